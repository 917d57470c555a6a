"""Checks and measures kvlayers on a CUDA device, within a budget of seconds.

    python lab/benchmarks/gpu.py first --budget 420 --output results   # what is worth most, where time is short
    python lab/benchmarks/gpu.py check --budget 540 --output results   # is it right?
    python lab/benchmarks/gpu.py check --device cpu --quick --output results   # tiny shapes, to see that it runs

Steps run in order of value. A step whose first figures no longer fit the budget is skipped and named; one of several
shapes ends with those for which time is left. What is found is saved to the stage's JSON file as it comes, so that an
interrupted run keeps what it has. Contenders take turns; figures are medians; outputs are compared before a time is
reported.

Weights are random and made on the device: nothing is downloaded. It needs torch, triton, transformers, rich and, for
the tests that `check` runs, pytest and hypothesis. kvlayers need not be installed: `PYTHONPATH=src` is enough.

The exit code is the number of steps that failed or found something wrong.
"""

import argparse
import gc
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path

STARTED = time.monotonic()

import torch  # noqa: E402

# The references that the tests compare with, and the lab, which need not be installed.
ROOT = Path(__file__).parents[2]
sys.path += [str(ROOT / "tests" / "helpers"), str(ROOT / "lab" / "src")]
from lib.gpu_check import TESTS  # noqa: E402
from lib.gpu_speed import FIRST  # noqa: E402
from lib.gpu_stage import NO_DEVICE, Setup, Stage, facts, run_here, write_whole  # noqa: E402

# The name by which steps in processes of their own find this file, also if it is run as a script.
sys.modules.setdefault("gpu", sys.modules[__name__])

STAGES = {"first": (*FIRST, TESTS), "check": (TESTS,)}
MOST_FAILURES = 100
"""Largest exit code: some larger ones mean that a process was stopped."""


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=STAGES)
    parser.add_argument("--budget", type=float, default=540, help="seconds for the stage (540)")
    parser.add_argument("--output", type=Path, required=True, help="folder for the stage's JSON file")
    parser.add_argument("--device", default="cuda", help="cuda, or cpu with --quick (cuda)")
    parser.add_argument("--quick", action="store_true", help="tiny shapes, to see that it runs")
    parser.add_argument("--only", action="append", help="run only the step of this name; may be repeated")
    # How a step is run in a process of its own.
    parser.add_argument("--findings", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    names = [step.name for step in STAGES[given.stage]]
    if not 0 < given.budget < math.inf:
        parser.error(f"--budget must be a positive number of seconds, got {given.budget}")
    if unknown := [name for name in given.only or () if name not in names]:
        parser.error(f"--only must be one of {', '.join(names)}, got {unknown[0]}")
    kind = given.device.partition(":")[0]
    if kind not in ("cuda", "cpu"):
        parser.error(f"--device must be cuda or cpu, got {given.device}")
    if kind == "cuda" and not torch.cuda.is_available():
        parser.error(f"{NO_DEVICE}; --quick --device cpu shows on a CPU that it runs")
    if kind == "cpu" and not given.quick:
        parser.error("--device cpu goes with --quick")
    try:
        given.output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--output must be a folder, got {given.output}: {error.strerror}")
    return given


def main(arguments: Sequence[str] | None = None, started: float | None = None) -> int:
    """Run a stage; return the number of steps that failed or found something wrong.

    Args:
        arguments: those of the command.
        started: when the budget began, by `time.monotonic()`; now if it is not given.
    """
    given = parse(arguments)
    device = torch.device(given.device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    began = time.monotonic() if started is None else started
    setup = Setup(device, given.quick, began + given.budget)
    steps = [step for step in STAGES[given.stage] if given.only is None or step.name in given.only]
    torch.manual_seed(0)
    # Memory is collected before each contender: not among all that was imported.
    gc.freeze()
    if given.findings is not None:
        setup.save = lambda found: write_whole(given.findings, vars(found))
        setup.save(run_here(steps[0], setup))
        return 0
    described = {"budget": given.budget, "quick": given.quick, **facts(device)}
    failures = Stage(given.stage, steps, setup, given.output, described).run()
    return min(failures, MOST_FAILURES)


if __name__ == "__main__":
    sys.exit(main(started=STARTED))
