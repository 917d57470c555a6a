"""The script for a GPU runs on a CPU, keeps to its budget, and goes on after a failure."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import versions

ON_CPU = ["--device", "cpu", "--quick"]

pytestmark = [pytest.mark.slow, versions.benchmarks_of_transformers]


@pytest.fixture
def gpu(script: Any) -> Any:
    return script("gpu")


def steps_in(folder: Path, stage: str) -> dict[str, dict[str, Any]]:
    written = json.loads((folder / f"{stage}.json").read_text())
    assert {"hardware", "versions", "budget"} <= set(written)
    steps: dict[str, dict[str, Any]] = written["results"]["gpu"]
    return steps


@pytest.mark.nightly
def test_every_measurement_runs(gpu: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main(["first", *ON_CPU, "--output", str(tmp_path)]) == 0
    steps = steps_in(tmp_path, "first")
    assert {step["status"] for step in steps.values()} == {"done"}
    assert all(step["figures"] for step in steps.values())
    assert steps["tests for CUDA"]["figures"]["tests"]["collected"] > 0
    shown = capsys.readouterr().out
    assert all(what in shown for step in steps.values() for found in step["figures"].values() for what in found)


@pytest.fixture
def stage(script: Any) -> Any:
    return script("lib.gpu_stage")


@pytest.fixture
def model_check(script: Any) -> Any:
    return script("lib.gpu_model")


@pytest.fixture
def run_steps(gpu: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Runs steps as a stage; returns their entries by name, and the exit code."""

    def run(*steps: Any, budget: float = 500) -> tuple[dict[str, Any], int]:
        monkeypatch.setitem(gpu.STAGES, "check", steps)
        code = gpu.main(["check", *ON_CPU, "--budget", str(budget), "--output", str(tmp_path)])
        return steps_in(tmp_path, "check"), code

    return run


def statuses(entries: dict[str, Any]) -> dict[str, str]:
    return {name: entry["status"] for name, entry in entries.items()}


def test_a_failure_does_not_stop_the_rest(run_steps: Any, stage: Any) -> None:
    def fails(setup: Any) -> Any:
        raise RuntimeError("the kernel is missing")

    def is_wrong(setup: Any) -> Any:
        found = stage.Findings()
        found.add("error", 0.5, "")
        found.expect(False, "the error is 0.5")
        found.details |= {"dtype": torch.float16, ("a", "tuple"): 2}
        return found

    def nothing(setup: Any) -> Any:
        return stage.Findings()

    steps = {"fails": fails, "is wrong": is_wrong, "is right": nothing}
    entries, code = run_steps(*(stage.Step(name, 1, step) for name, step in steps.items()))
    assert (statuses(entries), code) == ({"fails": "failed", "is wrong": "wrong", "is right": "done"}, 2)
    assert entries["fails"]["error"].startswith("RuntimeError: the kernel is missing")
    assert entries["is wrong"]["details"].pop("seconds") >= 0
    assert entries["is wrong"]["details"] == {"dtype": "torch.float16"}
    # A step that does not fit the budget is skipped.
    entries, code = run_steps(stage.Step("long", 6000, nothing), stage.Step("short", 20, nothing), budget=60)
    assert (statuses(entries), code) == ({"long": "skipped", "short": "done"}, 0)
    assert "of the budget are left" in entries["long"]["error"]


def test_a_step_of_several_shapes_is_cut_short(run_steps: Any, stage: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(stage.time, "monotonic", lambda: now[0])

    def shapes(setup: Any) -> Any:
        found = stage.Findings()
        for shape in setup.in_time(found, [10, 20, 40, 80]):
            now[0] += shape
            found.add("a step", shape, "ms", column=f"{shape} x 1")
        return found

    entries, code = run_steps(stage.Step("shapes", 60, shapes, least=10), budget=75)
    assert (statuses(entries), code) == ({"shapes": "cut short"}, 0)
    assert list(entries["shapes"]["figures"]["ms"]["a step"]) == ["10 x 1", "20 x 1", "40 x 1"]
    assert entries["shapes"]["cut"] == ["80"]


def test_a_process_that_is_stopped_takes_those_that_it_started_with_it(stage: Any, tmp_path: Path) -> None:
    script = (
        "import subprocess, sys; print('begun'); subprocess.run([sys.executable, '-c', 'import time; time.sleep(60)'])"
    )
    ended = stage.run_process([sys.executable, "-u", "-c", script], 3, {}, tmp_path)
    assert ended == stage.Ended(stage.STOPPED, "begun\n")


def test_a_process_without_its_device_lets_others_go_on(
    run_steps: Any, stage: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def lost(setup: Any) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def ran_elsewhere(command: list[str], *options: Any) -> Any:
        asked.append(command)
        if "second" not in command:
            return stage.Ended(1, "no device either")
        findings = Path(command[command.index("--findings") + 1])
        findings.write_text(json.dumps({"figures": {}, "details": {"part": "elsewhere"}}))
        return stage.Ended(0, "")

    monkeypatch.setattr(stage.Setup, "synchronize", lost)
    monkeypatch.setattr(stage, "run_process", ran_elsewhere)
    steps = [stage.Step(name, 1, lambda setup: stage.Findings()) for name in ("first", "second", "third")]
    entries, code = run_steps(*steps)
    assert (statuses(entries), code) == ({"first": "done", "second": "done", "third": "wrong"}, 1)
    assert entries["second"]["details"] == {"part": "elsewhere"}
    assert "no device either" in entries["third"]["wrong"][0]
    assert len(asked) == 2


def test_a_step_runs_in_a_process_of_its_own(gpu: Any, tmp_path: Path) -> None:
    findings = tmp_path / "findings.json"
    arguments = ["first", *ON_CPU, "--only", "first token of 8k", "--findings", str(findings)]
    assert gpu.main([*arguments, "--output", str(tmp_path)]) == 0
    assert {"figures", "wrong", "missing", "cut", "details"} == set(json.loads(findings.read_text()))


def test_a_cache_with_other_logits_is_named(model_check: Any, stage: Any) -> None:
    expected = torch.randn(2, 50)
    for seen, lines in ((expected, 0), (1.02 * expected, 0), (-expected, 1), (torch.full((2, 50), torch.nan), 1)):
        found = stage.Findings()
        model_check.compare_logits(found, model_check.DYNAMIC, expected, seen, 0.05)
        assert len(found.wrong) == lines, found.wrong


@pytest.mark.parametrize("name", ["kvlayers int4", "kvlayers int8", "kvlayers fp8"])
def test_a_packed_cache_is_compared_with_the_states_that_it_gives_back(
    model_check: Any, stage: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup = stage.Setup(torch.device("cpu"), True, 1e9)
    model, makers = model_check.llama(setup, model_check.QUICK), {name: model_check.CACHES[name]}
    dense = model_check.as_dense
    for factor, lines in ((1, 0), (1.5, 1)):
        monkeypatch.setattr(model_check, "as_dense", lambda states, factor=factor: factor * dense(states))
        found = stage.Findings()
        with torch.no_grad():
            model_check.check_decoding(setup, model, makers, 300, 1, found)
        assert len([line for line in found.wrong if "logits differ" in line]) == len(found.wrong) == lines
