"""What benchmarks share measures what it says, and what the smaller ones of them find is what they are called."""

import contextlib
import functools
import io
import pathlib
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor

import kvlayers
import versions
from kvlayers.quantizers import quantizer_names, unregister_quantizer
from models import fresh_model, prompt, read
from other_values import OtherValues

of_transformers = versions.benchmarks_of_transformers


@pytest.mark.slow
@of_transformers
def test_bytes_of_transformers_quantized_layers_are_those_of_codes_scales_zeros_and_residual(script: Any) -> None:
    pytest.importorskip("optimum.quanto")
    from lib.contenders import measure_bytes, quanto
    from lib.workload import RandomModel, Shape

    config = RandomModel(Shape(layers=2, heads=2, kv_heads=2, head_dim=64, intermediate=64, vocab=64)).model.config
    tokens = 32 + 128 + 64
    # The first chunk is quantized at once, the next four when their residual is full, the last two not yet.
    quantized, residual = 32 + 128, 64
    of_a_vector = 64 // 2 + 2 + 2
    expected = 2 * 2 * 2 * (quantized * of_a_vector + residual * 64 * 2) / tokens
    assert measure_bytes(quanto(4), config, tokens - 64, 64, 32)["last_bytes"] == expected


@pytest.mark.slow
@of_transformers
def test_compiled_contenders_have_nothing_to_do_with_one_another(script: Any) -> None:
    from lib import compiled

    def doubling(numbers: Tensor) -> Tensor:
        return 2 * numbers

    inputs: list[Any] = []

    def backend(graph: Any, example_inputs: list[Any]) -> Any:
        inputs.append(example_inputs)
        return graph.forward

    first, second = (torch.compile(compiled.own_code(doubling), backend=backend) for _ in range(2))
    for _ in range(2):
        assert first(numbers=torch.ones(2)).tolist() == [2, 2]
        assert second(numbers=torch.ones(3)).tolist() == [2, 2, 2]
    # Where sizes are dynamic, they are inputs as well.
    assert [len(each) for each in inputs] == [1, 1]
    first(numbers=torch.ones(4))
    assert [len(each) for each in inputs] == [1, 1, 2]


# Outliers


@pytest.fixture
def outliers(script: Any) -> Iterator[Any]:
    known = quantizer_names()
    yield script("outliers")
    # A run registers quantizers that do not smooth keys.
    for name in set(quantizer_names()) - set(known):
        unregister_quantizer(name)


def states_of(model: Any, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, and the keys and values of the first layer."""
    cache, logits = read(model, ids, tf.DynamicCache(config=model.config))
    return logits, cache.layers[0].keys, cache.layers[0].values


@of_transformers
@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("heads", ["all", "one"])
@pytest.mark.parametrize("speed", ["slow", "fast"])
@pytest.mark.parametrize("kind", ["constant", "varying"])
def test_outliers_are_in_the_keys_that_they_name_and_a_factor_changes_no_prediction(
    outliers: Any, family: str, heads: str, speed: str, kind: str
) -> None:
    model, ids = fresh_model(family, head_dim=16), prompt(tokens=20)
    expected, was, _ = states_of(model, ids)
    with outliers.KeyOutliers(kind, 30.0, speed, 2, heads).applied(model):
        seen, keys, _ = states_of(model, ids)
    pairs = torch.zeros(2, 1, 8, dtype=torch.bool)
    pairs[slice(None) if heads == "all" else slice(1), :, slice(2) if speed == "fast" else slice(6, 8)] = True
    changed = pairs.repeat(1, 1, 2)
    torch.testing.assert_close(keys[~changed.expand_as(keys)], was[~changed.expand_as(keys)], rtol=1e-3, atol=1e-4)
    if kind == "varying":
        torch.testing.assert_close(seen, expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(keys, was * torch.where(changed, 30.0, 1.0), rtol=1e-3, atol=1e-4)
    else:
        # Both channels of a pair are rotated together.
        lengths = keys.unflatten(-1, (2, 8)).norm(dim=-2)
        assert torch.equal(lengths > 20, pairs.expand_as(lengths))
    assert torch.equal(states_of(model, ids)[0], expected)


@of_transformers
@pytest.mark.parametrize("kind", ["tokens", "varying"])
def test_outliers_are_in_the_values_that_they_name(outliers: Any, kind: str) -> None:
    model, ids = fresh_model("llama", head_dim=16), torch.arange(40)[None]
    expected, _, was = states_of(model, ids)
    with outliers.ValueOutliers(kind, 30.0).applied(model):
        seen, _, values = states_of(model, ids)
    changed = (ids % 16 == 0)[:, None, :, None] if kind == "tokens" else torch.arange(16) >= 14
    torch.testing.assert_close(values, was * torch.where(changed, 30.0, 1.0), rtol=1e-4, atol=1e-4)
    if kind == "varying":
        torch.testing.assert_close(seen, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@of_transformers
def test_a_quick_run_of_outliers_has_a_row_for_each_kind(outliers: Any, found_by: Any) -> None:
    smoothed = ("native", "turboquant", "nf4")
    caches = ",".join(f"{name},{name} plain" for name in smoothed)
    written = found_by(outliers, "--quick", "--context", "256", "--scored", "64", "--caches", caches)
    found = written["results"]["outliers"]
    assert len(found["rows"]) == 6
    assert found["bytes"]["native"]["bytes"] > 0
    for cells in found["rows"].values():
        for name in smoothed:
            # The limit of issue 56: keys that are smoothed never cost more than that.
            assert 0 < cells[name]["kl"] <= 1.1 * cells[f"{name} plain"]["kl"]


# Tasks


@pytest.fixture
def tasks(script: Any) -> Any:
    return script("tasks")


def test_caches_that_fail_and_tasks_that_are_too_hard_leave_cells_empty(tasks: Any) -> None:
    caches = {"kvlayers dynamic": (0.1, -2.0), "transformers hqq": (None, None)}
    counts = {"kvlayers dynamic": {"samples": 1, "failed": 0}, "transformers hqq": {"samples": 0, "failed": 1}}
    found: dict[str, Any] = {
        "model": "dir/tiny",
        "dtype": "float32",
        "date": "2026-11-23",
        "hardware": {"cpu": "a CPU"},
        "versions": {"torch": "2", "transformers": "5"},
        "tasks": ["needle"],
        "lengths": [256],
        "depths": [0.5],
        "samples": 1,
        "seed": 0,
        "results": {
            "tasks": {
                "reference": "kvlayers dynamic",
                "too_weak_below": 0.25,
                "too_weak": [["needle", 256]],
                "overall": [
                    {"cache": cache, "logprob": logprob, **counts[cache]} for cache, (_, logprob) in caches.items()
                ],
                "comparable": [],
                "by_length": [
                    {"cache": cache, "task": "needle", "length": 256, "score": score}
                    for cache, (score, _) in caches.items()
                ],
            }
        },
    }
    rows = [line for line in tasks.table(found).splitlines() if line.startswith("| ")]
    assert rows[1:] == [
        "| exact (`dynamic`) | (10) |  | -2.00 |",
        "| transformers hqq, 4 bits, failed at 1 of 1 samples | (-) |  | - |",
    ]


def test_each_rule_is_measured_at_each_part_with_budgets_of_heads_and_without(tasks: Any) -> None:
    names = tasks.eviction_names()
    assert len(set(names)) == len(names)
    assert {"snapkv:keep=0.25", "snapkv:keep=0.25,per_head=false", "random:keep=0.75"} <= set(names)
    assert "tova:keep=0.5,per_head=false" not in names
    [run] = tasks.CACHES_OF["eviction"].runs([1024])
    assert run.arguments == tasks.as_arguments(names)
    assert [tasks.label(f"kvlayers {name}", "") for name in names if name.startswith("snapkv:keep=0.5")] == [
        "`snapkv`, 0.5 kept",
        "`snapkv`, 0.5 kept, even heads",
        "`snapkv`, 0.5 kept, 4 bits",
    ]


def test_recall_of_a_part_of_the_pages_is_one_cache_at_all_lengths(tasks: Any) -> None:
    short, long = tasks.recall_runs([1024, 4096])
    assert short.called["recall:recall.pages=4"] == long.called["recall:recall.pages=16"] == "recall:part=1/4"
    assert tasks.label("kvlayers recall:part=1/4", "") == "`recall`, 1/4 of the pages"

    def printed(run: Any, pages: int, length: int, logprob: float) -> dict[str, Any]:
        outcome = {"task": "needle", "length": length, "depth": 0.5, "index": 0, "answer": "", "failure": None}
        caches = {"kvlayers dynamic": -1.0, f"kvlayers recall:recall.pages={pages}": logprob}
        return {
            **dict.fromkeys(tasks.KEPT),
            "caches": [{"name": name, "nbytes": length} for name in caches],
            "outcomes": [
                {**outcome, "cache": name, "score": 1.0, "logprob": logprob} for name, logprob in caches.items()
            ],
            "summary": {"reference": "kvlayers dynamic"},
        }

    runs = [(short, printed(short, 4, 1024, -2.0)), (long, printed(long, 16, 4096, -4.0))]
    found = tasks.merged(runs, [1024, 4096])
    assert found["lengths"] == [1024, 4096]
    assert found["caches"][1] == {"name": "kvlayers recall:part=1/4", "nbytes": 4096}
    _, recall = found["results"]["tasks"]["overall"]
    assert (recall["cache"], recall["samples"], recall["logprob"]) == ("kvlayers recall:part=1/4", 2, -3.0)


# Budgets of memory


@pytest.fixture
def memory(script: Any) -> Any:
    return script("memory")


def filled(cache: Any) -> Any:
    for index in range(3):
        cache.update(torch.randn(1, 2, 1000, 64), torch.randn(1, 2, 1000, 64), index)
    return cache


@of_transformers
def test_what_a_budget_has_become_is_made_again(memory: Any) -> None:
    config = tf.LlamaConfig(hidden_size=128, num_hidden_layers=3, num_attention_heads=2)
    cache = filled(kvlayers.DynamicCache(config=config, max_bytes="40%", length_hint=1000))
    same = filled(memory.as_it_ends(cache)(config))
    assert [layer.bits for layer in same.layers] == [layer.bits for layer in cache.layers]
    assert [layer.exact_from for layer in same.layers] == [layer.exact_from for layer in cache.layers]
    assert 0 < memory.exact_share(cache) < 1


@pytest.mark.slow
@pytest.mark.nightly
@of_transformers
def test_a_quick_run_of_budgets_has_each_section(memory: Any, found_by: Any) -> None:
    found = found_by(memory, "--quick")
    assert found["wrong"] == []
    results = found["results"]
    assert {"int8", "int4", "within 70%", "within 70%, from the start"} <= set(results["loss"])
    assert set(results["time"]) == {"exact", "int8", "int4"}
    for name in ("within 70%", "within 50%"):
        assert results["loss"][name]["bytes"] <= results["loss"][name]["budget"]


# Prompts

FEW = ["--quick", "--threads", "1", "--models", "llama-64,attention", "--lengths", "72"]
FEW += ["--only", "bfloat16,float32,batch", "--lengths-float32", "64", "--batch", "64", "--turn", "8"]


@pytest.fixture
def recording(script: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> Callable[[str], Any]:
    """Loads a script by its name, which has an empty folder of records."""

    def load(name: str) -> Any:
        found = script(name)
        monkeypatch.setattr(found.pages, "RECORDED", tmp_path)
        return found

    return load


@pytest.fixture
def tables(recording: Callable[[str], Any]) -> Any:
    return recording("prompt_tables")


@pytest.fixture
def prompts(script: Any, tables: Any) -> Any:
    return script("prompts")


def cell(tables: Any, **other: Any) -> dict[str, Any]:
    usual = {"model": tables.SMOLLM2, "dtype": "bfloat16", "case": tables.ONE, "tokens": 8192}
    return {**usual, "cache": tables.DYNAMIC, "seconds": 1.0, "ratio": 0.5, "turns": 1, **other}


@of_transformers
def test_a_quick_run_has_every_cache_of_every_prompt(prompts: Any, tables: Any, found_by: Any) -> None:
    parts = found_by(prompts, *FEW)["results"]["prompts"]
    assert list(parts) == ["llama-64: bfloat16", "llama-64: float32", "llama-64: batch", "attention"]
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
    shares = parts["attention"]["shares"]
    assert set(shares["bfloat16"]) == set(tables.LEAST_SHARES)
    for ways in shares["float32"].values():
        assert ways[tables.GEMM]["share"] == 1
        assert ways[tables.KVLAYERS]["apart"] < 1e-5


@of_transformers
def test_a_cache_with_other_states_fails_the_benchmark(
    prompts: Any, tables: Any, found_by: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(prompts.MAKERS, tables.DYNAMIC, lambda config, length: OtherValues(config=config))
    wrong = "\n".join(found_by(prompts, *FEW, "--caches", "dynamic", code=1)["wrong"])
    for case in ("bfloat16, one prompt of 72", "bfloat16, second turn of 72", "float32, padded batch of 16"):
        assert f"llama-64, {case}, dynamic: logits" in wrong


@of_transformers
def test_a_batch_is_padded_on_the_left(prompts: Any) -> None:
    subject = prompts.subjects(prompts.parse(["--quick"]))["llama-64"]
    batch = subject.batch(8)
    assert batch.mask.sum(1).tolist() == [2, 4, 6, 8]
    assert batch.mask[:, -2:].all()
    assert batch.positions[1].tolist() == [0, 0, 0, 0, 0, 1, 2, 3]
    assert not batch.ids[batch.mask == 0].any()


@of_transformers
@pytest.mark.parametrize("window", [None, 5])
def test_useful_products_are_those_of_the_mask(prompts: Any, window: int | None) -> None:
    shape = prompts.AttentionShape(4, 1, 16, window)
    expected = [[key <= query and query - key < (window or 99) for key in range(12)] for query in range(12)]
    assert shape.pairs(12) == torch.tensor(expected).sum()
    if window is not None:
        assert torch.equal(shape.mask(12)[0, 0], torch.tensor(expected))


def in_this_process(prompts: Any, command: list[str], env: dict[str, str], **_: Any) -> Any:
    """Stands in for processes of the benchmark, which take seconds to import torch."""
    written = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(written):
        patch.setattr(prompts.os, "environ", env)
        code = prompts.main(command[2:])
    return SimpleNamespace(returncode=code, stdout=written.getvalue())


@of_transformers
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


@of_transformers
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


@of_transformers
def test_what_is_recorded_keeps_its_bounds_but_for_those_that_the_page_names(script: Any) -> None:
    found = script("prompt_tables")
    # Nothing is held if there is no record, and the pages then claim nothing.
    missed = [held for held in found.held_of(found.pages.parts("prompts")) if not held.holds]
    assert [held for held in missed if not any(part in held[0] for part in found.STILL_MISSED)] == []


# Peers: another process is asked for the figures of llama.cpp

STAND_IN = """
GGML_TYPE_F16, GGML_TYPE_Q8_0, GGML_TYPE_Q4_0 = 1, 8, 2

class Llama:
    def __init__(self, path, n_ctx, type_k, type_v, **options):
        assert type_k == type_v and options["flash_attn"] and options["n_threads_batch"] == 1
        self.room, self.kind, self.seen = n_ctx, type_k, []
        self.ctx = self
        self.vocab = int(open(path).read())

    def n_vocab(self):
        return self.vocab

    def eval(self, tokens):
        self.seen += tokens
        assert len(self.seen) <= self.room

    def reset(self):
        self.seen = []

    def close(self):
        pass

def llama_get_logits(model):
    # The likeliest token is the number of those that were seen.
    return [float(number == len(model.seen)) for number in range(model.vocab)]

def llama_state_seq_get_size(model, sequence):
    return 1000 * model.kind + len(model.seen)

def llama_print_system_info():
    return b"STAND-IN = 1"
"""


@pytest.fixture
def peers(recording: Callable[[str], Any]) -> Any:
    return recording("peers")


@pytest.fixture
def gguf(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> pathlib.Path:
    """A file for a stand-in of llama.cpp, which other processes of this interpreter import."""
    folder = tmp_path / "binding"
    folder.mkdir()
    (folder / "llama_cpp.py").write_text(STAND_IN)
    monkeypatch.setenv("PYTHONPATH", str(folder))
    path = tmp_path / "model.gguf"
    path.write_text("99")
    return path


@of_transformers
def test_the_other_process_answers_a_request(peers: Any, gguf: pathlib.Path) -> None:
    given = SimpleNamespace(peer_python=sys.executable, gguf=gguf, threads=1)
    for kv, kind in (("f16", 1), ("q4_0", 2)):
        found = peers.read_there(given, kv, torch.arange(40)[None], torch.arange(3)[None])
        assert found["build"]["system"] == "STAND-IN = 1"
        assert (found["tokens"], found["nbytes"]) == ([40, 41, 42, 43], 1000 * kind + 43)
        assert len(found["step_seconds"]) == 3
        assert found["seconds"] >= 0


def test_a_process_that_ends_is_named(peers: Any, tmp_path: pathlib.Path) -> None:
    # The interpreter of the tests has no llama-cpp-python, or the file is none.
    given, ids = SimpleNamespace(peer_python="/bin/true", gguf=tmp_path, threads=1), torch.arange(3)[None]
    with pytest.raises(SystemExit, match="llama-cpp-python"):
        peers.read_there(given, "f16", ids, ids)


def test_the_tokens_of_a_cache_here_are_those_that_the_model_predicts(peers: Any) -> None:
    model, text = fresh_model("llama"), prompt(tokens=23)
    with torch.no_grad():
        found = peers.read_here(model, peers.OWN[peers.TRANSFORMERS], text[:, :20], text[:, 20:])
        assert found["tokens"] == model(text).logits.argmax(-1)[0, 19:].tolist()


@of_transformers
def test_each_length_has_every_contender_and_other_tokens_fail(
    peers: Any, gguf: pathlib.Path, found_by: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    def text_of(tokens: int) -> Tensor:
        return torch.arange(1, tokens + 1)[None]

    workload = SimpleNamespace(name="tiny", model=fresh_model("llama"), prompt=text_of)
    monkeypatch.setattr(peers.report.Session, "real", lambda run, dtype: workload)
    page = tmp_path / "benchmarks.md"
    page.write_text("\n".join(peers.pages.markers("peers", "peers")))
    monkeypatch.setattr(peers, "PAGE", page)
    arguments = ["--peer-python", sys.executable, "--gguf", str(gguf), "--model", "tiny", "--threads", "1"]
    arguments += ["--lengths", "24,32", "--steps", "2", "--seconds", "0", "--record"]
    # The stand-in predicts numbers of tokens.
    written = found_by(peers, *arguments, code=1)
    assert [line.partition(" at ")[0] for line in written["wrong"]] == 2 * list(peers.PEERS)
    figures = written["results"]["peers"]["24"]["figures"]
    assert set(figures) == {*peers.OWN, *peers.PEERS}
    assert all(figures[name]["same_top"] == 1 and figures[name]["nbytes"] for name in peers.OWN)
    assert set(peers.pages.parts("peers")) == {"24", "32"}
    assert "| llama.cpp, q8_0 | 0.00 s |" in page.read_text()


# All of them

HAS_CUDA = torch.cuda.is_available()
GPU = ["check", "--output", "results"]
GPU_ON_CPU = [*GPU, "--device", "cpu", "--quick"]


@of_transformers
@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        ("prompts", ["--models", "nothing"], "--models takes"),
        ("prompts", ["--quick", "--record"], "pass only one"),
        ("prompts", ["--model", "no/such/folder"], "must be a directory"),
        ("prompts", ["--only", "nothing"], "takes bfloat16"),
        ("peers", [], "must be an interpreter"),
        ("peers", ["--peer-python", "python", "--gguf", "no/such/file"], "must be a file"),
        ("claims", ["--only", "nothing"], "got nothing"),
        ("claims", ["--quick", "--record"], "pass only one"),
        ("gpu", [*GPU_ON_CPU, "--budget", "0"], "--budget must be a positive number of seconds, got 0"),
        ("gpu", [*GPU_ON_CPU, "--budget", "nan"], "--budget must be a positive number of seconds, got nan"),
        ("gpu", [*GPU_ON_CPU, "--only", "nothing"], "--only must be one of"),
        ("gpu", [*GPU_ON_CPU, "--output", __file__], "--output must be a folder"),
        ("gpu", [*GPU, "--device", "gpu"], "--device must be cuda or cpu, got gpu"),
        ("gpu", [*GPU, "--device", "cpu"], "--device cpu goes with --quick"),
        pytest.param("gpu", GPU, "needs a CUDA device", marks=pytest.mark.skipif(HAS_CUDA, reason="there is one")),
    ],
)
def test_arguments_that_mean_nothing_are_refused(
    script: Any, name: str, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        script(name).main(arguments)
    assert stopped.value.code == 2
    assert said in capsys.readouterr().err
