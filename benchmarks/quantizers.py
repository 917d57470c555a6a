"""Compares all quantizers at about equal bytes: what a model loses, with outliers too, and how long a step takes.

    python benchmarks/quantizers.py            # the demo model, some ten minutes on two cores
    python benchmarks/quantizers.py --quick    # a small random model, to see that it runs

Each row is a cache of kvlayers with one of its backends, or a cache of transformers, near 8, 4 or 2 bits a number,
scales included. Group sizes are chosen so that kvlayers' caches of a band hold nearly the same bytes, which are counted
and shown. They keep at least 128 recent tokens and 16 sinks in full precision, transformers' 0 to 127 recent tokens.

The KL divergence is from the same model with transformers' DynamicCache, in nats a token, of a text that is read in
chunks; with outliers, two key channels of each KV head have a bias of 30. A step decodes one token behind `--context`
tokens, alternately with every cache; its time is a ratio to that of transformers' DynamicCache. `benchmarks/tasks.py`
measures the answers to tasks.
"""

import argparse
import pathlib
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import transformers
from rich.progress import Progress
from rich.table import Table
from torch import Tensor

import kvlayers
from fidelity import load, summaries
from kvlayers.tools.measuring.scoring import CacheMaker, NoRecord, read
from kvlayers.tools.measuring.text import default_text
from lib import report
from lib.outliers import KeyOutliers
from lib.quantized import FULL, REFERENCE, Contender, measure_bytes
from lib.workload import default_model

OUTLIER = 30.0


def own(backend: str, **options: Any) -> CacheMaker:
    """Makes caches of kvlayers."""
    return lambda config: kvlayers.QuantizedCache(backend, config=config, **options)


def upstream(backend: str, nbits: int) -> CacheMaker:
    """Makes caches of transformers, with the options that its documentation recommends."""
    return Contender("transformers", backend, nbits).make


MAKERS: dict[Contender, CacheMaker] = {
    Contender("kvlayers", "native", 8): own("native", nbits=8),
    Contender("kvlayers", "fp8", 8): own("fp8"),
    Contender("transformers", "fp8", 8): upstream("fp8", 8),
    Contender("kvlayers", "native", 4): own("native", nbits=4),
    Contender("kvlayers", "kivi", 4): own("kivi", nbits=4, q_group_size=64),
    Contender("kvlayers", "turboquant", 4): own("turboquant", nbits=4),
    Contender("kvlayers", "nf4", 4): own("nf4", q_group_size=32),
    Contender("kvlayers", "quanto", 4): own("quanto", nbits=4),
    Contender("kvlayers", "hqq", 4): own("hqq", nbits=4),
    Contender("transformers", "quanto", 4): upstream("quanto", 4),
    Contender("transformers", "hqq", 4): upstream("hqq", 4),
    Contender("kvlayers", "native", 2): own("native", nbits=2),
    Contender("kvlayers", "kivi", 2): own("kivi", nbits=2, q_group_size=64),
    Contender("kvlayers", "turboquant", 2): own("turboquant", nbits=2),
    Contender("kvlayers", "quanto", 2): own("quanto", nbits=2),
    Contender("kvlayers", "hqq", 2): own("hqq", nbits=2),
    Contender("transformers", "quanto", 2): upstream("quanto", 2),
    Contender("transformers", "hqq", 2): upstream("hqq", 2),
}


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", help="directory or hub name (the demo model)")
    parser.add_argument("--context", type=int, help="tokens read before scoring begins, and behind a step (1024)")
    parser.add_argument("--scored", type=int, help="tokens that are scored (512)")
    parser.add_argument("--steps", type=int, help="timed steps with each cache (15)")
    parser.add_argument("--threads", type=int, help="threads of torch")
    parser.add_argument("--output", type=pathlib.Path, help="JSON file (benchmarks/results/quantizers-<date>.json)")
    parser.add_argument("--quick", action="store_true", help="a small random model and a short text")
    given = parser.parse_args(arguments)
    given.context = given.context or (448 if given.quick else 1024)
    given.scored = given.scored or (64 if given.quick else 512)
    given.steps = given.steps or (2 if given.quick else 15)
    # hqq takes seconds for each chunk.
    given.chunk, given.passages, given.dtype = (64 if given.quick else 256), 1, "float32"
    given.model = given.model or ("random llama" if given.quick else default_model())
    given.output = given.output or report.output_path("quantizers")
    return given


@torch.no_grad()
def step_ratios(
    model: Any, ids: Tensor, makers: dict[Contender, CacheMaker], steps: int, tick: Callable[[], None]
) -> dict[Contender, float]:
    """For each cache, the median of the times of a step over those of the reference beside it."""
    caches = {key: make(model.config) for key, make in makers.items()}
    for cache in caches.values():
        model(ids[:, :-1], past_key_values=cache, logits_to_keep=1)
        tick()
    ratios: dict[Contender, list[float]] = {key: [] for key in caches}
    for step in range(steps + 2):
        seconds = {}
        for key, cache in caches.items():
            begin = time.perf_counter()
            model(ids[:, -1:], past_key_values=cache)
            seconds[key] = time.perf_counter() - begin
        # The first steps allocate and choose kernels.
        if step > 1:
            for key in caches:
                ratios[key].append(seconds[key] / seconds[REFERENCE])
        tick()
    return {key: statistics.median(found) for key, found in ratios.items()}


def measure(given: argparse.Namespace, makers: dict[Contender, CacheMaker], progress: Progress) -> list[dict[str, Any]]:
    """A row for each cache that works."""
    model, texts = load(given.model, default_text(), given)
    ticking = report.ticking_in(progress)
    chunks = (given.context + given.scored) // given.chunk
    every = {REFERENCE: FULL[REFERENCE], **makers}

    def scores(what: str) -> dict[str, Any]:
        return summaries(read(model, texts, every, given.context, given.chunk, NoRecord(), ticking(what, chunks)))

    plain = scores("reading")
    with KeyOutliers("constant", OUTLIER).applied(model):
        outliers = scores("with outliers")
    working = {key: make for key, make in every.items() if "failure" not in {**plain[key.name], **outliers[key.name]}}
    tick = ticking("bytes", len(working))
    held = {}
    for key, make in working.items():
        held[key] = measure_bytes(make, model.config, given.context, given.scored, given.chunk)["bytes"]
        tick()
    ids = texts[0][:, : given.context + 1]
    ratios = step_ratios(model, ids, working, given.steps, ticking("steps", len(working) + given.steps + 2))
    return [
        {
            **key._asdict(),
            "bytes": held[key],
            "kl": plain[key.name]["kl"],
            "agreement": plain[key.name]["agreement"],
            "kl_outliers": outliers[key.name]["kl"],
            "step_ratio": ratios[key],
        }
        for key in working
    ] + [
        {**key._asdict(), "failure": plain[key.name].get("failure") or outliers[key.name].get("failure")}
        for key in every
        if key not in working
    ]


def table(rows: list[dict[str, Any]]) -> Table:
    shown = Table(title="quantizers at about equal bytes")
    for column in ("cache", "bits", "bytes a token", "KL", "agreement", "KL, outliers", "step"):
        shown.add_column(column, justify="left" if column == "cache" else "right")
    for row in rows:
        name, bits = f"{row['library']} {row['backend']}", "" if row["bits"] is None else str(row["bits"])
        if "failure" in row:
            shown.add_row(name, bits, str(row["failure"]))
            continue
        shown.add_row(
            name,
            bits,
            f"{row['bytes']:,.0f}",
            f"{row['kl']:.2g}",
            f"{row['agreement']:.2%}",
            f"{row['kl_outliers']:.2g}",
            f"{row['step_ratio']:.2f}",
        )
    return shown


def main(arguments: Sequence[str] | None = None, makers: dict[Contender, CacheMaker] | None = None) -> int:
    """Run it; the exit code is 1 if one of kvlayers' caches fails."""
    given = parse(arguments)
    console = report.terminal()
    if given.model is None:
        console.print("no real model: set KVLAYERS_DEMO_MODEL, bring it with `make demo`, or pass --model")
        return 1
    if given.threads:
        torch.set_num_threads(given.threads)
    transformers.utils.logging.set_verbosity_error()
    environment = report.environment()
    with report.progress_bars(console) as progress:
        rows = measure(given, MAKERS if makers is None else makers, progress)
    console.print(table(rows))
    report.write(console, given, environment, {"results": {"quantizers": rows}, "targets": []})
    return 1 if any("failure" in row and row["library"] == "kvlayers" for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
