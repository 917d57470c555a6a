"""Stages of steps: each runs while its predicted seconds fit the budget, and its result is saved as it comes."""

import gc
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

NO_DEVICE = "needs a CUDA device"
QUICK_FACTOR = 20
"""How many times as long as the quick form a step is predicted to take."""

PROCESSES = 6
"""Parts of a step that run at the same time: each compiles kernels on a core or two."""


@dataclass
class Figure:
    """A measured figure.

    Attributes:
        what: what was measured.
        value: the figure.
        unit: its unit.
        predicted: what was predicted, empty if nothing was.
    """

    what: str
    value: float
    unit: str
    predicted: str = ""

    def __str__(self) -> str:
        predicted = f"   predicted {self.predicted}" if self.predicted else ""
        return f"{self.what:58} {self.value:12,.4g} {self.unit:9}{predicted}"


@dataclass
class Findings:
    """What a step found.

    Attributes:
        figures: what the table shows.
        wrong: one line for each result that is not what it must be.
        details: everything else, for the file.
    """

    figures: list[Figure] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    details: dict[str, Any] = field(default_factory=dict)

    def add(self, what: str, value: float, unit: str, predicted: str = "") -> None:
        """Add a figure."""
        self.figures.append(Figure(what, float(value), unit, predicted))

    def expect(self, is_right: bool, otherwise: str) -> None:
        """Add a line to `wrong` unless something is right."""
        if not is_right:
            self.wrong.append(otherwise)

    def merge(self, name: str, other: "Findings") -> None:
        """Add what a part of the step found."""
        self.figures += [replace(each, what=f"{name}: {each.what}") for each in other.figures]
        self.wrong += [f"{name}: {line}" for line in other.wrong]
        self.details[name] = other.details

    def plain(self) -> dict[str, Any]:
        """Everything as JSON holds it."""
        return {"figures": list(map(vars, self.figures)), "wrong": self.wrong, "details": _plain(self.details)}

    @classmethod
    def from_json(cls, text: str) -> "Findings":
        """The findings that another process wrote with `plain`."""
        written = json.loads(text)
        return cls([Figure(**figure) for figure in written["figures"]], written["wrong"], written["details"])


@dataclass
class Setup:
    """What every step is given.

    Attributes:
        device: the device.
        quick: whether shapes are tiny.
        deadline: when the budget ends, by `time.monotonic()`.
        part: the part of the step that is to run, empty if it has no parts.
        kept: what steps keep for one another, such as a model.
    """

    device: torch.device
    quick: bool
    deadline: float
    part: str = ""
    kept: dict[str, Any] = field(default_factory=dict)

    @property
    def on_cuda(self) -> bool:
        """Whether the device is a CUDA device."""
        return self.device.type == "cuda"

    @property
    def seconds_left(self) -> float:
        """Seconds of the budget that are left."""
        return self.deadline - time.monotonic()

    def choose(self, usual: Any, quick: Any) -> Any:
        """The first of two values, or the second one if shapes are tiny."""
        return quick if self.quick else usual

    def keep(self, name: str, make: Callable[[], Any]) -> Any:
        """A value that is made once. The value of that name is the only one that is kept, as models are large."""
        if name not in self.kept:
            self.kept.clear()
            self.free_memory()
            self.kept[name] = make()
        return self.kept[name]

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.on_cuda:
            torch.cuda.synchronize(self.device)

    def free_memory(self) -> None:
        """Free what nobody holds any more."""
        gc.collect()
        if self.on_cuda:
            torch.cuda.empty_cache()


@dataclass(frozen=True)
class Step:
    """One measurement.

    Attributes:
        name: its name.
        seconds: how long it is predicted to take on an H200, with compilation.
        run: measures.
        isolated: whether it runs in a process of its own on a GPU: an error in a kernel leaves the process without the
            device.
        parts: names of parts that run at the same time, in a process each.
    """

    name: str
    seconds: float
    run: Callable[[Setup], Findings]
    isolated: bool = False
    parts: tuple[str, ...] = ()


def predicted_seconds(step: Step, setup: Setup) -> float:
    """How long a step takes."""
    return step.seconds / (QUICK_FACTOR if setup.quick else 1)


class Stage:
    """Runs steps and saves what they find.

    Args:
        name: name of the stage.
        steps: its steps, the most valuable first.
        setup: what they are given.
        output: folder of the stage's file.
        facts: what the file says beside the steps.
    """

    def __init__(self, name: str, steps: Sequence[Step], setup: Setup, output: Path, facts: dict[str, Any]) -> None:
        self.name, self.steps, self.setup = name, steps, setup
        self.path = output / f"{name}.json"
        self._written: dict[str, Any] = {"stage": name, **facts, "steps": []}
        self._device_is_lost = False

    def run(self) -> int:
        """Run the steps and print a table; return the number of steps that failed or found something wrong."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._save()
        started = time.monotonic()
        for number, step in enumerate(self.steps, 1):
            predicted = predicted_seconds(step, self.setup)
            head = f"[{time.monotonic() - started:5.0f} s] {number}/{len(self.steps)} {step.name}"
            print(f"{head}, predicted {predicted:.0f} s", flush=True)
            entry = {"name": step.name, "predicted_seconds": predicted, **self._entry(step, predicted)}
            self._written["steps"].append(entry)
            self._save()
            print(f"          {entry['status']} in {entry['seconds']:.1f} s{_reason(entry)}", flush=True)
        self._show()
        return sum(entry["status"] in ("failed", "wrong") for entry in self._written["steps"])

    def _entry(self, step: Step, predicted: float) -> dict[str, Any]:
        """Run a step unless there is a reason not to."""
        begin = time.monotonic()
        found, status, error = Findings(), "done", ""
        if predicted > self.setup.seconds_left:
            status, error = "skipped", f"{max(self.setup.seconds_left, 0):.0f} s of the budget are left"
        else:
            try:
                found = self._findings(step)
                status = "wrong" if found.wrong else "done"
            except Exception as raised:
                # One failure must not stop the rest.
                status, error = "failed", f"{type(raised).__name__}: {raised}\n{traceback.format_exc()}"
                traceback.clear_frames(raised.__traceback__)
            self._clean_up()
        return {"status": status, "seconds": time.monotonic() - begin, "error": error, **found.plain()}

    def _findings(self, step: Step) -> Findings:
        alone = (step.isolated and self.setup.on_cuda) or self._device_is_lost
        parts = self.setup.choose(step.parts, step.parts[:2]) or ("",)
        if not alone:
            return merged(parts, (run_part(step, self.setup, part) for part in parts))
        with ThreadPoolExecutor(PROCESSES) as threads:
            return merged(parts, threads.map(lambda part: self._in_own_process(step, part), parts))

    def _in_own_process(self, step: Step, part: str) -> Findings:
        """Run a part of a step in another process, which may lose the device."""
        seconds = max(self.setup.seconds_left, 1)
        with tempfile.TemporaryDirectory() as folder:
            result = Path(folder) / "findings.json"
            command = [sys.executable, str(Path(sys.modules["gpu"].__file__ or "")), self.name, "--only", step.name]
            command += ["--part", part, "--findings", str(result), "--device", str(self.setup.device)]
            command += ["--budget", f"{seconds:.0f}", "--output", folder, *(["--quick"] if self.setup.quick else [])]
            try:
                ran = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
            except subprocess.TimeoutExpired:
                return Findings(wrong=[f"it did not end within the {seconds:.0f} s that were left"])
            if result.exists():
                return Findings.from_json(result.read_text())
            return Findings(wrong=[f"the process ended with {ran.returncode}: {(ran.stderr or ran.stdout)[-3000:]}"])

    def _clean_up(self) -> None:
        """Free memory, and find out whether the device still answers."""
        if self._device_is_lost:
            return
        try:
            self.setup.synchronize()
            self.setup.free_memory()
        except RuntimeError as error:
            self._device_is_lost = True
            print(f"          this process has lost the device ({error}): later steps run in their own", flush=True)

    def _save(self) -> None:
        # Written whole and then renamed, so that an interrupted run leaves a readable file.
        beside = self.path.with_suffix(".part")
        beside.write_text(json.dumps(self._written, indent=1))
        os.replace(beside, self.path)

    def _show(self) -> None:
        print(f"\n{self.name} on {self._written['device']}")
        for entry in self._written["steps"]:
            print(f"\n{entry['name']}: {entry['status']}, {entry['seconds']:.0f} s{_reason(entry)}")
            for figure in entry["figures"]:
                print(f"  {Figure(**figure)}")
            for line in entry["wrong"]:
                print(f"  WRONG {line}")
        print(f"\n{self.path}", flush=True)


def run_part(step: Step, setup: Setup, part: str) -> Findings:
    """Run a part of a step in this process."""
    setup.part = part
    with torch.no_grad():
        return step.run(setup)


def merged(parts: Iterable[str], found: Iterable[Findings]) -> Findings:
    """The findings of all parts of a step."""
    whole = Findings()
    for part, findings in zip(parts, found, strict=True):
        if not part:
            return findings
        whole.merge(part, findings)
    return whole


def _plain(value: Any) -> Any:
    """A value as JSON holds it: no step may be lost because of what it found."""
    if isinstance(value, dict):
        return {str(key): _plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple | set):
        return [_plain(part) for part in value]
    return value if isinstance(value, str | int | float | None) else str(value)


def _reason(entry: dict[str, Any]) -> str:
    return f": {entry['error'].strip().splitlines()[0]}" if entry["error"] else ""
