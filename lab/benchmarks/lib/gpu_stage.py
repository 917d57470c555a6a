"""Stages of steps: each runs if its first figures fit the budget, and what it finds is saved as it comes."""

import gc
import json
import math
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
import transformers

import kvlayers
from lib.internals import triton_support

Item = TypeVar("Item")

NO_DEVICE = "needs a CUDA device"
QUICK_FACTOR = 20
"""How many times as long as the quick form a step is predicted to take."""

CORES = os.cpu_count() or 1
PROCESSES = min(max(CORES - 2, 1), 12)
"""Processes that run at the same time: each compiles kernels on a core."""

STOPPED = 124
"""Exit code of a process that did not end in time."""

CLOSING_SECONDS = 4
"""How much earlier than it is stopped a process ends by itself."""

DRIVER = ("nvidia-smi", "--query-gpu=driver_version,clocks.sm,clocks.mem,power.limit", "--format=csv,noheader")


def facts(device: torch.device) -> dict[str, Any]:
    """The device and the packages that a run measures."""
    hardware: dict[str, Any] = {"gpu": device.type, "interpreted": triton_support.is_interpreted()}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        hardware |= {"gpu": torch.cuda.get_device_name(device), "gpu_memory_bytes": properties.total_memory}
        try:
            driver = subprocess.run(DRIVER, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
        except (OSError, subprocess.SubprocessError) as error:
            driver = f"unknown: {error}"
        hardware |= {"cuda": torch.version.cuda, "driver, clocks, power": driver}
    versions = {"python": platform.python_version(), "triton": str(triton_support.triton_version())}
    versions |= {module.__name__: module.__version__ for module in (torch, transformers, kvlayers)}
    return {
        "date": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
        "hardware": hardware,
        "versions": versions,
        "triton_obstacle": triton_support.device_facts(device).obstacle,
    }


@dataclass
class Findings:
    """What a step found.

    Attributes:
        figures: what is shown and recorded: by unit, by what was measured and, where there are columns, by column.
        wrong: one line for each result that is not what it must be.
        missing: why a contender has no figures, by its name.
        cut: what there was no time for.
        details: everything else, for the file.
    """

    figures: dict[str, dict[str, Any]] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)
    cut: list[str] = field(default_factory=list)
    details: dict[str, Any] = field(default_factory=dict)

    def add(self, what: str, value: float, unit: str, column: str = "") -> None:
        figures, value = self.figures.setdefault(unit, {}), float(f"{value:.4g}")
        if column:
            figures.setdefault(what, {})[column] = value
        else:
            figures[what] = value

    def expect(self, is_right: bool, otherwise: str) -> None:
        if not is_right:
            self.wrong.append(otherwise)

    def guarded(self, what: str, call: Callable[[], None], *, may_fail: bool = False) -> bool:
        """Whether a call succeeds. If it does not, that is wrong, or missing if it may fail, and the rest goes on."""
        try:
            call()
        except Exception as raised:
            reason = f"{type(raised).__name__}: {' '.join(str(raised).split())}"
            self.details.setdefault("errors", {})[what] = f"{traceback.format_exc()}\n{reason}"
            # Frames hold memory of the device.
            traceback.clear_frames(raised.__traceback__)
            if may_fail:
                self.missing[what] = reason
            else:
                self.wrong.append(f"{what}: {reason}")
            return False
        return True


@dataclass
class Setup:
    """What every step is given.

    Attributes:
        device: the device.
        quick: whether shapes are tiny.
        deadline: when the budget ends, by `time.monotonic()`.
        kept: what steps keep for one another, such as a model.
        step_deadline: when the step that runs must end.
        save: saves what a step has found so far.
    """

    device: torch.device
    quick: bool
    deadline: float
    kept: dict[str, Any] = field(default_factory=dict)
    step_deadline: float = math.inf
    save: Callable[["Findings"], None] = lambda found: None

    @property
    def on_cuda(self) -> bool:
        return self.device.type == "cuda"

    @property
    def seconds_left(self) -> float:
        return min(self.deadline, self.step_deadline) - time.monotonic()

    def in_time(self, found: "Findings", items: Iterable[Item]) -> Iterator[Item]:
        """What a step goes through, while there is time for one more that takes as long as the longest.

        What was found is saved after each. Items without time are named in `found.cut`.
        """
        longest = 0.0
        for number, item in enumerate(items):
            if number and (found.cut or longest > self.seconds_left):
                found.cut.append(str(item))
                continue
            begin = time.monotonic()
            yield item
            longest = max(longest, time.monotonic() - begin)
            self.save(found)

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
        seconds: how long it takes on an H200 with 16 cores, with compilation.
        run: measures.
        isolated: whether it runs in a process of its own on a GPU: an error in a kernel leaves the process without the
            device.
        least: seconds of its first figures, if it can be cut short: `Setup.in_time`.
    """

    name: str
    seconds: float
    run: Callable[[Setup], Findings]
    isolated: bool = False
    least: float | None = None

    @property
    def most(self) -> float:
        """Seconds after which it must end, so that others have their turn: half as many again."""
        return max(1.5 * self.seconds, self.seconds + 15)


@dataclass(frozen=True)
class Ended:
    """How a process ended: its exit code, which is `STOPPED` if it was stopped, and what it printed."""

    code: int
    output: str


def run_process(command: Sequence[str], seconds: float, environment: Mapping[str, str], folder: Path) -> Ended:
    """Run a command on its share of the cores; after some seconds, stop it and whatever it has started.

    Its environment has some variables beside this one's.
    """
    threads = str(max(CORES // PROCESSES, 1))
    shared = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS"), threads)
    # A pipe would be open for as long as the compilers that a stopped process has started.
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env={**os.environ, **shared, "PYTHONUNBUFFERED": "1", **environment},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(max(seconds, 1))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            code = STOPPED
        output.seek(0)
        return Ended(code, output.read().decode(errors="replace"))


class Stage:
    """Runs steps, the most valuable first, prints what they find and saves it in a folder beside some facts."""

    def __init__(self, name: str, steps: Sequence[Step], setup: Setup, output: Path, facts: dict[str, Any]) -> None:
        self.name, self.steps, self.setup = name, steps, setup
        self.path = output / f"{name}.json"
        self._steps: dict[str, dict[str, Any]] = {}
        self._written = {**facts, "stage": name, "results": {"gpu": self._steps}}
        self._device_is_lost = False

    def run(self) -> int:
        """Run the steps; return the number of steps that failed or found something wrong."""
        started, factor = time.monotonic(), QUICK_FACTOR if self.setup.quick else 1
        for number, step in enumerate(self.steps, 1):
            entry = self._steps[step.name] = {"predicted_seconds": step.seconds / factor, "status": "running"}
            head = f"[{time.monotonic() - started:5.0f} s] {number}/{len(self.steps)} {step.name}"
            print(f"{head}, predicted {step.seconds / factor:.0f} s", flush=True)
            self._run_step(step, entry)
            self._save()
            _show(entry)
        print(f"\n{self.path}", flush=True)
        return sum(entry["status"] in ("failed", "wrong") for entry in self._steps.values())

    def _run_step(self, step: Step, entry: dict[str, Any]) -> None:
        """Run a step unless there is a reason not to; write what it finds into its entry as it comes."""
        begin = time.monotonic()
        self.setup.step_deadline = begin + step.most
        found, status, error = Findings(), "done", ""

        def save(found: Findings) -> None:
            entry.update(seconds=time.monotonic() - begin, error="", **vars(found))
            self._save()

        self.setup.save = save
        save(found)
        least = (step.seconds if step.least is None else step.least) / (QUICK_FACTOR if self.setup.quick else 1)
        if least > self.setup.seconds_left:
            status, error = "skipped", f"{max(self.setup.seconds_left, 0):.0f} s of the budget are left"
        else:
            try:
                found = self._findings(step)
                status = "wrong" if found.wrong else "cut short" if found.cut else "done"
            except Exception as raised:
                # One failure must not stop the rest, nor take what was found before it.
                status, error = "failed", f"{type(raised).__name__}: {raised}\n{traceback.format_exc()}"
                traceback.clear_frames(raised.__traceback__)
            self._clean_up()
        entry.update(status=status, seconds=time.monotonic() - begin, error=error)
        if status != "failed":
            entry.update(vars(found))

    def _findings(self, step: Step) -> Findings:
        if (step.isolated and self.setup.on_cuda) or self._device_is_lost:
            return self._in_own_process(step)
        return run_here(step, self.setup)

    def _in_own_process(self, step: Step) -> Findings:
        """Run a step in another process, which may lose the device."""
        begin, seconds = time.monotonic(), self.setup.seconds_left
        with tempfile.TemporaryDirectory() as folder:
            result = Path(folder) / "findings.json"
            command = [sys.executable, str(Path(sys.modules["gpu"].__file__ or "")), self.name, "--only", step.name]
            command += ["--findings", str(result), "--device", str(self.setup.device)]
            command += ["--budget", f"{max(seconds - CLOSING_SECONDS, 1):.0f}", "--output", folder]
            command += ["--quick"] if self.setup.quick else []
            # The device computes all of it, so that nothing need be compiled for a CPU.
            ended = run_process(command, seconds, {"KVLAYERS_COMPILE": "never"}, Path.cwd())
            found = Findings(**json.loads(result.read_text())) if result.exists() else Findings()
        found.add("the process took", time.monotonic() - begin, "s")
        if ended.code == STOPPED:
            found.wrong.append(f"it did not end within the {seconds:.0f} s that were left: {ended.output[-1000:]}")
        elif ended.code:
            found.wrong.append(f"the process ended with {ended.code}: {ended.output[-3000:]}")
        return found

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
        write_whole(self.path, self._written)


def write_whole(path: Path, content: dict[str, Any]) -> None:
    """Write a file of JSON and then rename it, so that an interrupted run leaves a readable file."""
    beside = path.with_suffix(".part")
    # No step may be lost because of what it found.
    beside.write_text(json.dumps(content, indent=1, default=str, skipkeys=True))
    beside.replace(path)


def run_here(step: Step, setup: Setup) -> Findings:
    begin = time.monotonic()
    with torch.no_grad():
        found = step.run(setup)
    found.details["seconds"] = time.monotonic() - begin
    return found


def _show(entry: dict[str, Any]) -> None:
    reason = f": {entry['error'].strip().splitlines()[0]}" if entry["error"] else ""
    lines = [f"{entry['status']} in {entry['seconds']:.1f} s{reason}"]
    for unit, figures in entry["figures"].items():
        for what, value in figures.items():
            columns = value if isinstance(value, dict) else {"": value}
            lines += [f"{', '.join(filter(None, (what, at))):58} {each:12,.4g} {unit}" for at, each in columns.items()]
    lines += [f"missing {name}: {why}" for name, why in entry["missing"].items()]
    lines += [f"WRONG {line}" for line in entry["wrong"]]
    lines += [f"no time for {what}" for what in entry["cut"]]
    print("".join(f"          {line}\n" for line in lines), end="", flush=True)
