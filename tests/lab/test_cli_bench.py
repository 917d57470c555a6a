"""`kvlayers bench`: what it measures, how it judges, the report that it writes, and how it ends."""

import functools
import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import command_line
import kvlayers
from kvlayers_lab.cli import console
from kvlayers_lab.cli import report as page
from kvlayers_lab.cli.bench_results import BenchResults
from kvlayers_lab.measuring import contenders, decoding
from kvlayers_lab.measuring.environment import environment
from kvlayers_lab.models import RunFacts
from model_directories import save_model
from models import tiny_model
from named_factories import registered
from other_values import OtherValues
from web_page import check_self_contained

HOSTILE = "<b onclick=alert(1)>&\"'$x_$"
QUICK = ("--text", "text.txt", "--dtype", "float32", "--steps", 4, "--trials", 1, "--against", "static")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("models") / HOSTILE, "llama")


@pytest.fixture(autouse=True)
def _elsewhere(text_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No report is made, which takes longer than all else, but for one test."""
    monkeypatch.setattr(page, "missing_packages", lambda: ["matplotlib"])
    monkeypatch.setenv("COLUMNS", "100")


bench = functools.partial(command_line.run, "bench")
said = functools.partial(command_line.said, "bench")


def caches_of(results: Any) -> list[list[dict[str, Any]]]:
    return [each["caches"] for each in results["results"]]


class Failing(kvlayers.DynamicCache):
    """Takes ten tokens."""

    def update(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if self.get_seq_length() >= 10:
            raise RuntimeError("no more\nthan ten")
        return super().update(*args, **kwargs)


WRONG = {
    "other-values": lambda request: OtherValues(config=request.config),
    "failing": lambda request: Failing(config=request.config),
}
"""Caches that are wrong in one way each, by their names."""


def test_the_tables_have_every_cache_at_every_length(llama: Path) -> None:
    output = bench(llama, "--lengths", "20,16", *QUICK, code=0).output
    assert output.count("tokens and 4 steps, batch 1, float32 on cpu") == 2
    cells = [re.split(r"\s{2,}", line.strip()) for line in output.splitlines()]
    found = [row for row in cells if row[0].startswith(("transformers ", "kvlayers ")) and len(row) == 6]
    names = ["transformers dynamic", "kvlayers dynamic", "kvlayers static", "transformers static"]
    assert [row[0] for row in found] == [*names, "kvlayers int8", "kvlayers int4"] * 2
    assert [row[1] for row in found[:4]] == ["reference", "same", "same", "same"]
    assert found[0][4] == "1.00"
    assert "Every exact cache of kvlayers gave the same tokens as transformers' DynamicCache." in output


def test_the_json_is_all_of_stdout_and_has_what_was_measured(llama: Path) -> None:
    found = said(llama, "--lengths", 20, "--batch", 3, *QUICK, "--trials", 2)
    assert (found["model"], found["batch"], found["steps"], found["trials"]) == (HOSTILE, 3, 4, 2)
    assert {"cpu", "cores", "threads"} <= found["hardware"].keys()
    assert {"torch", "transformers", "kvlayers", "python"} <= found["versions"].keys()
    (measured,) = caches_of(found)
    assert all(row["prefill_seconds"] > 0 and row["step_seconds"] > 0 and row["passed"] for row in measured)
    assert measured[0]["times_as_fast"] == 1
    states = {(row["library"], row["cache"]): row["fidelity"] for row in measured}
    assert states["kvlayers", "int4"] == "rounded"
    assert states["kvlayers", "static"] == states["transformers", "dynamic"] == "exact"
    held = {(row["library"], row["cache"]): row["nbytes"] for row in measured}
    # Two layers, keys and values, two KV heads of 8, four bytes each.
    assert held["transformers", "dynamic"] == held["kvlayers", "dynamic"] == 3 * 24 * 2 * 2 * 2 * 8 * 4


def test_the_report_is_one_file_that_needs_nothing_and_believes_no_name(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if any(importlib.util.find_spec(name) is None for name in page.PACKAGES):
        pytest.skip("no matplotlib or jinja2 here: the extra 'report' brings them")
    monkeypatch.setattr(page, "missing_packages", list)
    result = bench(llama, "--lengths", "8,16", *QUICK, "--cache", "static", "--cache", "int4", code=0)
    shown = (tmp_path / "kvlayers-bench.html").read_text()
    parsed = check_self_contained(shown)
    assert f"Caches for {HOSTILE}" in parsed.text
    assert "b" not in parsed.tags
    assert parsed.tags.count("svg") == 3
    assert "mathdefault" not in parsed.text
    rows_of = {row[0]: row for row in parsed.cells}
    assert rows_of["kvlayers static"][1] == "same"
    assert {"CPU", "Versions", "Date", "Model", "Dtype", "Trials"} <= rows_of.keys()
    assert "prefers-color-scheme: dark" in shown
    assert "currentColor" in shown
    assert "Report: kvlayers-bench.html" in result.output


@pytest.mark.parametrize(("name", "words"), [("other-values", "others: "), ("failing", "failed")])
def test_a_cache_that_is_wrong_ends_with_1(llama: Path, name: str, words: str) -> None:
    with registered(**WRONG):
        result = bench(llama, "--lengths", 16, *QUICK, "--cache", "dynamic", "--cache", name, "--json", code=1)
    assert any(f"kvlayers {name}" in line and words in line for line in result.stderr.splitlines())
    assert ("Other tokens than transformers' DynamicCache: kvlayers other-values at 16." in result.stderr) == (
        name == "other-values"
    )
    measured = caches_of(json.loads(result.stdout))[0]
    right, wrong = (row for row in measured if row["library"] == contenders.KVLAYERS)
    assert right["passed"]
    assert not wrong["passed"]
    assert wrong.get("failure") == ("RuntimeError: no more" if name == "failing" else None)


def test_where_the_reference_fails_nothing_is_measured(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(contenders._MAKERS, "dynamic", lambda config, length: Failing(config=config))
    result = bench(llama, "--lengths", "4,16", *QUICK, "--json", code=1)
    short, long = caches_of(json.loads(result.stdout))
    assert len(short) > 1
    assert [row["failure"] for row in long] == ["RuntimeError: no more"]
    assert "transformers dynamic failed: RuntimeError: no more" in result.stderr


def test_lengths_are_cut_to_the_positions_of_the_model(llama: Path) -> None:
    found = said(llama, "--lengths", "8,400,4k", *QUICK, "--cache", "dynamic")
    assert [each["length"] for each in found["results"]] == [8, 256 - 4]


def test_trials_turn_round_and_a_failure_ends_a_cache() -> None:
    model = tiny_model("llama")
    order: list[tuple[str, int]] = []
    with registered(**WRONG):
        compared = [
            contenders.make_contender("transformers", "dynamic", model, 20),
            *(contenders.make_contender("kvlayers", name, model, 20) for name in ("failing", "static")),
        ]
        found = decoding.measure(
            *(model, torch.full((1, 12), 4), 3, 3, compared),
            lambda contender, trial: order.append((contender.cache, trial)),
        )
    there = ["dynamic", "failing", "static"]
    assert [cache for cache, _ in order] == [*there, *reversed(there), *there]
    assert [(len(row.trials), row.failure) for row in found] == [(3, None), (0, "RuntimeError: no more"), (3, None)]
    assert [trial.predicted.shape for trial in found[0].trials] == [(1, 4)] * 3
    assert all(len(trial.step_seconds) == 3 for trial in found[2].trials)


def test_a_token_is_a_tie_where_its_logit_is_no_further_off_than_the_dtype_rounds() -> None:
    logits = torch.zeros(3, 1, 5)
    logits[..., 2], logits[..., 3], logits[..., 4] = 8, 8 - 0.0625, 7
    trials = [decoding.Trial(1.0, [1.0, 1.0], 0, torch.tensor([tokens])) for tokens in ([2, 3, 2], [2, 3, 4])]
    tied, other = (decoding.ContenderResult(contenders.Contender("", "", object), [trial]) for trial in trials)
    for row in (tied, other):
        decoding._compare(row, logits, torch.bfloat16)
    assert (tied.other_tokens, tied.ties, tied.same_tokens) == (1, 1, True)
    assert (other.other_tokens, other.ties, other.same_tokens) == (2, 1, False)
    decoding._compare(tied, logits, torch.float32)
    assert not tied.same_tokens


def test_the_greedy_continuation_is_that_of_generate() -> None:
    model = tiny_model("llama")
    prompt = torch.randint(3, 97, (2, 12))
    continuation, logits = decoding._greedy(
        model, prompt, 5, contenders.make_contender("transformers", "dynamic", model, 17)
    )
    expected = model.generate(prompt, max_new_tokens=6, do_sample=False)[:, 12:]
    assert torch.equal(torch.cat([continuation.tokens, logits[-1].argmax(-1)[:, None]], 1), expected)


def row_of(cache: str, *trials: list[float], nbytes: int = 10) -> decoding.ContenderResult:
    library, name = cache.split()
    made = [decoding.Trial(1.0, steps, nbytes, torch.zeros(1, 2)) for steps in trials]
    use = {"cache_implementation": name}
    return decoding.ContenderResult(contenders.Contender(library, name, object, use), made)


def test_how_far_trials_are_apart_says_what_is_noise() -> None:
    reference = row_of("transformers dynamic", [4.0, 5.0, 9.0], [6.0, 6.0, 6.0], [5.5, 5.5, 5.5])
    assert (reference.step_range, reference.step_spread) == ((5.0, 6.0), pytest.approx(0.5 / 5.5))
    inside, outside = row_of("kvlayers dynamic", [4.0], [5.0]), row_of("kvlayers static", [4.0], [4.9])
    assert inside.is_as_fast_as(reference)
    assert not outside.is_as_fast_as(reference)
    # One trial has its steps alone.
    assert row_of("kvlayers dynamic", [1.0, 2.0, 3.0, 4.0, 9.0]).step_range == (2.0, 4.0)
    assert row_of("kvlayers dynamic", [1.0]).step_range == (1.0, 1.0)


def test_what_is_within_noise_is_marked_and_no_winner(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        row_of("transformers dynamic", [5.0], [6.0], nbytes=40),
        row_of("kvlayers dynamic", [4.0], [5.0], nbytes=40),
        row_of("kvlayers int4", [4.9], [5.5], nbytes=10),
        row_of("kvlayers static", [2.0], [2.2], nbytes=40),
    ]
    # A cache that rounds may choose other tokens.
    rows[2].other_tokens = 1
    fidelities = {row.contender.key: "rounded" for row in rows}
    run = RunFacts("m", torch.float32, torch.device("cpu"), environment())
    results = BenchResults(run, 1, 1, 2, fidelities, {}, {8: rows[:3]})
    results.report().show(console.Console(width=100))
    shown = capsys.readouterr().out
    lines = {" ".join(line.split()[:2]): line for line in shown.splitlines()}
    assert "4500 ms ±11%" in lines["kvlayers dynamic"]
    assert "≈1.22" in lines["kvlayers dynamic"]
    assert "≈: within noise" in shown
    assert "dynamic is the fastest cache of kvlayers (within noise of int4), 1.22 times as" in " ".join(shown.split())
    assert "as transformers dynamic, which is within noise" in " ".join(shown.split())
    plain_rows = results.plain()["results"][0]["caches"]
    assert "75.0% same" in lines["kvlayers int4"]
    assert [row["passed"] for row in plain_rows] == [True, True, True]
    assert (plain_rows[2]["same_tokens"], plain_rows[2]["agreement"]) == (False, 0.75)
    assert [row["within_noise"] for row in plain_rows] == [False, True, True]
    assert plain_rows[1]["step_seconds_range"] == (4.0, 5.0)
    # What is to be pasted is a line of its own, and a name that there is.
    pasted = re.findall(r"^To use it: kvlayers.generate\(model, ..., cache_implementation='(.*)'\)$", shown, re.M)
    assert pasted == ["dynamic", "int4"]
    results.by_length[8] = rows
    results.report().show(console.Console(width=100))
    assert "static is the fastest cache of kvlayers, 2.62 times as fast as transformers dynamic;" in " ".join(
        capsys.readouterr().out.split()
    )


def test_without_the_packages_a_report_is_refused_if_asked_for_and_left_out_else(llama: Path, tmp_path: Path) -> None:
    how = r'pip install \. "./lab\[report\]"'
    command_line.check_refused(f"`--report` needs matplotlib.*{how}", "bench", llama, "--report", "report.html")
    result = bench(llama, "--lengths", 8, *QUICK, "--cache", "dynamic", code=0)
    assert re.search(f"No report, since matplotlib is not installed: {how}", result.output)
    assert not list(tmp_path.glob("*.html"))


def test_a_package_of_transformers_caches_that_is_missing_is_named(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contenders.importlib.util, "find_spec", lambda name: None)
    assert 'pip install ".[hqq]"' in bench(llama, "--against", "hqq", code=2).stderr
