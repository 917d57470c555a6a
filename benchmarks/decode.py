"""Compares kvlayers' and transformers' caches in one process: time, bytes and tokens.

    python benchmarks/decode.py                     # everything, about forty minutes on two cores
    python benchmarks/decode.py --quick             # a small model, to see that it runs
    python benchmarks/decode.py --skip static       # without compiled code, about fifteen minutes
    python benchmarks/decode.py --model DIR_OR_HUB  # another model beside the random one

Contenders alternate in short turns within a trial, in an order that rotates; figures are medians over the trials. Every
step's token is compared with the one from transformers' DynamicCache, and the exit code is 1 if one differs. Timings
never decide the exit code. `--help` lists the options.

"amortised" is the median step with kvlayers' DynamicCache plus its share of growing, measured over a whole cycle from
one growth to the next: a plain mean over tens of steps contains either no growth or too much of it.

Static caches are measured with reservations of several times the tokens in the cache, in eager code and in compiled
code, where every graph is compiled before the clock starts. They are also measured in whole calls of `generate()`, of
which the first one compiles.

Run it on an idle machine: if other processes use the cores, torch's threads wait for one another, and the figures
measure the scheduler.
"""

import argparse
import itertools
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

import torch
from rich.console import Console

from lib import report
from lib.compiling import INDUCTOR
from lib.contenders import CONTENDERS, KVLAYERS, QUANTIZED, Maker
from lib.peak import measure_peak
from lib.sliding import measure_sliding
from lib.static import Plan, measure_static
from lib.static_report import show_static, static_targets, summarise_static
from lib.timing import Disagreements, measure_decode, measure_growth, measure_update
from lib.workload import QUICK_SHAPE, RandomModel, Shape, Workload, default_model, real_workload


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--lengths", type=_numbers, help="tokens held, separated by commas (128,1024,4096,16384)")
    parser.add_argument("--model", help="directory or hub name of the real model; 'none' for none")
    parser.add_argument("--text", type=pathlib.Path, help="what the real model reads (the topics of Python's help)")
    parser.add_argument("--trials", type=int, help="trials (5)")
    parser.add_argument("--steps", type=int, help="decode steps in each trial (32)")
    parser.add_argument("--block", type=int, default=8, help="steps before the next contender's turn (8)")
    parser.add_argument("--window", type=int, help="sliding window (512)")
    parser.add_argument("--stations", type=_numbers, help="tokens at which its steps are timed (600,...,6000)")
    parser.add_argument("--static-lengths", type=_numbers, help="tokens present in static caches (128,1024,8192)")
    parser.add_argument("--times", type=_numbers, help="their reservations, times the tokens present (1,8,32)")
    parser.add_argument("--most-reserved", type=int, default=65536, help="tokens, for reservations beyond 1x (65536)")
    parser.add_argument(
        "--generate", type=_numbers, help="prompt, new and reserved tokens of generate() (200,512,4096)"
    )
    parser.add_argument("--backend", help="of torch.compile (inductor; eager with --quick, which compiles no kernels)")
    parser.add_argument(
        "--skip", type=lambda text: text.split(","), default=[], help="of decode,update,peak,sliding,quantized,static"
    )
    parser.add_argument("--threads", type=int, help="threads of torch")
    parser.add_argument("--output", type=pathlib.Path, help="JSON file (benchmarks/results/decode-<date>.json)")
    parser.add_argument("--quick", action="store_true", help="a small model and short lengths, under a minute")
    given = parser.parse_args(arguments)
    quick = given.quick
    given.lengths = given.lengths or ([64, 128] if quick else [128, 1024, 4096, 16384])
    given.trials = given.trials or (2 if quick else 5)
    given.steps = given.steps or (8 if quick else 32)
    given.window = given.window or (32 if quick else 512)
    given.stations = given.stations or ([40, 120] if quick else [600, 1500, 3000, 4500, 6000])
    given.static_lengths = given.static_lengths or ([64] if quick else [128, 1024, 8192])
    given.times = given.times or ([1, 8] if quick else [1, 8, 32])
    given.generate = given.generate or ([250, 16, 1024] if quick else [200, 512, 4096])
    if len(given.generate) != 3 or sum(given.generate[:2]) > given.generate[2]:
        parser.error("--generate takes three numbers, and more tokens cannot come than are reserved")
    given.backend = given.backend or ("eager" if quick else INDUCTOR)
    if any(later - earlier <= given.steps for earlier, later in itertools.pairwise(given.stations)):
        parser.error(f"stations must be more than the {given.steps} steps apart that are timed at each")
    given.model = given.model or ("none" if quick else default_model())
    given.output = given.output or report.output_path("decode")
    return given


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def fitting(lengths: list[int], workload: Workload, steps: int, console: Console) -> list[int]:
    """The lengths, limited to the model's context."""
    if workload.limit is None:
        return lengths
    most = workload.limit - steps
    if max(lengths) > most:
        console.print(f"{workload.name} has a context of {workload.limit}: lengths are capped at {most}")
    return sorted({min(length, most) for length in lengths})


def plan(given: argparse.Namespace) -> Plan:
    """The sizes for the measurements of static caches."""
    prompt, new, reserve = given.generate
    return Plan(
        lengths=given.static_lengths,
        times=given.times,
        most=given.most_reserved,
        steps=given.steps,
        trials=given.trials,
        block=given.block,
        prompt=prompt,
        new=new,
        reserve=reserve,
        backend=given.backend,
    )


def main(arguments: Sequence[str] | None = None, contenders: dict[str, Maker] | None = None) -> int:
    """Run it.

    Args:
        arguments: the command line.
        contenders: the caches to compare, by name.

    Returns:
        The exit code: 1 if a contender's tokens or states differ from the reference.
    """
    given = parse(arguments)
    makers = contenders or CONTENDERS
    console = report.terminal()
    if given.threads:
        torch.set_num_threads(given.threads)
    environment = report.environment()
    shape = QUICK_SHAPE if given.quick else Shape()
    disagreements = Disagreements()
    workloads: dict[str, Workload] = {"random": RandomModel(shape)}
    real = real_workload(given.model, given.text, console.print)
    if real is not None:
        workloads["real"] = real
    sections = ("decode", "update", "growth", "peak", "sliding", "quantized", "static")
    results: dict[str, Any] = {section: {} for section in sections}
    with report.progress_bars(console) as progress:
        ticking = report.ticking_in(progress)
        random_model = workloads["random"].model
        if "update" not in given.skip:
            for length in sorted({64, *given.lengths}):
                tick = ticking(f"update at {length}", given.trials)
                measured = measure_update(
                    random_model.config, shape, makers, length, given.steps, given.trials, disagreements, tick
                )
                report.summarise(measured)
                results["update"][length] = measured
                results["growth"][length] = measure_growth(random_model.config, shape, makers[KVLAYERS], length)
        if "decode" not in given.skip:
            for kind, workload in workloads.items():
                results["decode"][kind] = {"model": workload.name}
                for length in fitting(given.lengths, workload, given.steps, console):
                    tick = ticking(f"{workload.name} at {length}", given.trials)
                    measured = measure_decode(
                        workload, makers, length, given.steps, given.trials, given.block, disagreements, tick
                    )
                    report.summarise(measured)
                    if kind == "random":
                        report.add_amortised(measured, results["growth"].get(length, {}), shape.layers)
                    results["decode"][kind][length] = measured
        if "quantized" not in given.skip:
            workload = workloads["random"]
            results["quantized"] = {"model": workload.name}
            # Quantized caches give other numbers by design, so other tokens are no failure here:
            # benchmarks/fidelity.py measures them.
            rounded = Disagreements()
            # transformers' quantized caches need a length that is a multiple of their groups of 64.
            shortest = 64 if given.quick else 4096
            for length in [length for length in given.lengths if length >= shortest]:
                tick = ticking(f"quantized caches at {length}", given.trials)
                measured = measure_decode(
                    workload, QUANTIZED, length, given.steps, given.trials, given.block, rounded, tick
                )
                report.summarise(measured)
                report.add_agreement(measured, rounded, length, given.steps * given.trials)
                results["quantized"][length] = measured
        if "static" not in given.skip:
            results["static"] = measure_static(workloads["random"], makers, plan(given), disagreements, ticking)
            summarise_static(results["static"])
        if "sliding" not in given.skip:
            tick = ticking(f"window {given.window}", given.trials)
            workload = RandomModel(shape, sliding_window=given.window)
            results["sliding"] = measure_sliding(
                workload, makers, given.stations, given.steps, given.trials, disagreements, tick
            )
            report.summarise_sliding(results["sliding"])
        if "peak" not in given.skip:
            tick = ticking("bytes while growing", len(makers))
            tokens = max(given.lengths)
            results["peak"] = {"tokens": tokens, "caches": {}}
            for name, make in makers.items():
                results["peak"]["caches"][name] = measure_peak(make, random_model.config, tokens, min(1024, tokens))
                tick()
    report.show(console, results)
    show_static(console, results["static"])
    # The targets are for the full model: a small model has other costs.
    promises = [] if given.quick else [*report.targets(results), *static_targets(results["static"])]
    report.show_targets(console, promises)
    return report.finish(console, given, environment, results, promises, disagreements)


if __name__ == "__main__":
    sys.exit(main())
