"""`lab/benchmarks/prompts.py` compares logits, keeps its record part by part, and holds it against the bounds."""

import contextlib
import functools
import io
import pathlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import versions
from other_values import OtherValues

FEW = ["--quick", "--threads", "1", "--models", "llama-64", "--only", "bfloat16,float32,batch", "--lengths", "72"]
FEW += ["--lengths-float32", "64", "--batch", "64", "--turn", "8"]

pytestmark = versions.benchmarks_of_transformers


@pytest.fixture
def tables(script: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> Any:
    found = script("prompt_tables")
    monkeypatch.setattr(found.pages, "RECORDED", tmp_path)
    return found


@pytest.fixture
def prompts(script: Any, tables: Any) -> Any:
    return script("prompts")


def cell(tables: Any, **other: Any) -> dict[str, Any]:
    usual = {"model": tables.SMOLLM2, "dtype": "bfloat16", "case": tables.ONE, "tokens": 8192}
    return {**usual, "cache": tables.DYNAMIC, "seconds": 1.0, "ratio": 0.5, "turns": 1, **other}


def test_a_quick_run_has_every_cache_of_every_prompt(prompts: Any, tables: Any, found_by: Any) -> None:
    parts = found_by(prompts, *FEW)["results"]["prompts"]
    assert list(parts) == ["llama-64: bfloat16", "llama-64: float32", "llama-64: batch"]
    cells = tables.cells_of(parts)
    assert {(each["dtype"], each["case"], each["tokens"]) for each in cells} == {
        ("bfloat16", tables.ONE, 72),
        ("bfloat16", tables.TURN, 72),
        ("float32", tables.ONE, 64),
        ("float32", tables.TURN, 64),
        ("bfloat16", tables.BATCH, 64),
        ("float32", tables.BATCH, 16),
    }
    assert len(cells) == 6 * (1 + len(tables.CACHES))
    assert all(each["ratio"] > 0 for each in cells if each["cache"] != tables.TRANSFORMERS)


def test_a_cache_with_other_states_fails_the_benchmark(
    prompts: Any, tables: Any, found_by: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(prompts.MAKERS, tables.DYNAMIC, lambda config, length: OtherValues(config=config))
    wrong = "\n".join(found_by(prompts, *FEW, "--caches", "dynamic", code=1)["wrong"])
    for case in ("bfloat16, one prompt of 72", "bfloat16, second turn of 72", "float32, padded batch of 16"):
        assert f"llama-64, {case}, dynamic: logits" in wrong


def test_a_batch_is_padded_on_the_left(prompts: Any) -> None:
    subject = prompts.subjects(prompts.parse(["--quick"]))["llama-64"]
    batch = subject.batch(8)
    assert batch.mask.sum(1).tolist() == [2, 4, 6, 8]
    assert batch.mask[:, -2:].all()
    assert batch.positions[1].tolist() == [0, 0, 0, 0, 0, 1, 2, 3]
    assert not batch.ids[batch.mask == 0].any()


@pytest.mark.parametrize("window", [None, 5])
def test_useful_products_are_those_of_the_mask(prompts: Any, window: int | None) -> None:
    shape = prompts.AttentionShape(4, 1, 16, window)
    expected = [[key <= query and query - key < (window or 99) for key in range(12)] for query in range(12)]
    assert shape.pairs(12) == torch.tensor(expected).sum()
    if window is not None:
        assert torch.equal(shape.mask(12)[0, 0], torch.tensor(expected))


def test_attention_is_compared_with_float32(prompts: Any, tables: Any, found_by: Any) -> None:
    found = found_by(prompts, "--quick", "--threads", "1", "--models", "attention")
    shares = found["results"]["prompts"]["attention"]["shares"]
    assert set(shares["bfloat16"]) == set(tables.LEAST_SHARES)
    for ways in shares["float32"].values():
        assert ways[tables.GEMM]["share"] == 1
        assert ways[tables.KVLAYERS]["apart"] < 1e-5


def in_this_process(prompts: Any, command: list[str], env: dict[str, str], **_: Any) -> Any:
    """Stands in for processes of the benchmark, which take seconds to import torch."""
    written = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(written):
        patch.setattr(prompts.os, "environ", env)
        code = prompts.main(command[2:])
    return SimpleNamespace(returncode=code, stdout=written.getvalue())


def test_other_processes_measure_memory_and_read_without_a_kernel(
    prompts: Any, tables: Any, found_by: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = functools.partial(in_this_process, prompts)
    monkeypatch.setattr(prompts, "subprocess", SimpleNamespace(run=here, PIPE=None))
    arguments = ("--quick", "--threads", "1", "--models", "llama-64", "--only", "memory,uncompiled")
    parts = found_by(prompts, *arguments, "--caches", "dynamic")["results"]["prompts"]
    peaks = parts["llama-64: memory"]["peaks"]
    assert set(peaks) == {tables.TRANSFORMERS, tables.DYNAMIC}
    assert 0.5 < peaks[tables.DYNAMIC]["ratio"] < 2
    cases = {each["case"] for each in parts["llama-64: uncompiled"]["cells"]}
    assert cases == {f"{tables.UNCOMPILED}{case}" for case in (tables.ONE, tables.TURN, tables.BATCH)}


def test_each_bound_can_be_missed(tables: Any) -> None:
    whole = {
        "a: bfloat16": {
            "cells": [
                cell(tables, cache=tables.TRANSFORMERS),
                cell(tables, ratio=0.61),
                cell(tables, model=tables.GEMMA, ratio=0.37),
                cell(tables, tokens=4096, cache=tables.INT4, ratio=1.03, of_dynamic=1.04),
                cell(tables, case=f"{tables.UNCOMPILED}{tables.ONE}", ratio=1.04),
                cell(tables, case=f"{tables.UNCOMPILED}{tables.BATCH}", ratio=1.06),
            ]
        },
        "attention": {"shares": {"bfloat16": {tables.WIDE_ATTENTION: {tables.KVLAYERS: {"share": 0.59}}}}},
        "a: memory": {"model": "a", "tokens": 16384, "peaks": {tables.DYNAMIC: {"ratio": 1.01}}},
    }
    missed = [held.what for held in tables.held_of(whole) if not held.holds]
    for what in (
        "SmolLM2-135M-Instruct at 8,192: time",
        "gemma-3-270m at 8,192: time",
        "one prompt of 4,096, int4: time of transformers'",
        "at 4,096, int4: time of dynamic",
        "without a kernel, padded batch of 8,192",
        "attention, 32/8 heads of 128: share",
        "a at 16,384, dynamic: peak memory",
    ):
        assert [each for each in missed if what in each], what
    assert len(missed) == 7


def test_what_is_recorded_keeps_its_bounds_but_for_those_that_the_page_names(script: Any) -> None:
    found = script("prompt_tables")
    # Nothing is held if there is no record, and the pages then claim nothing.
    missed = [held for held in found.held_of(found.pages.parts("prompts")) if not held.holds]
    assert [held for held in missed if not any(part in held[0] for part in found.STILL_MISSED)] == []


@pytest.mark.parametrize(
    "arguments",
    [["--models", "nothing"], ["--quick", "--record"], ["--model", "no/such/folder"], ["--only", "nothing"]],
)
def test_arguments_that_mean_nothing_are_refused(prompts: Any, arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        prompts.main(arguments)
    assert stopped.value.code == 2
