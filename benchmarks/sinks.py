"""Streams a text of several windows through a sink cache: perplexity, and the time of a step.

    python benchmarks/sinks.py                       # the demo model, windows of 64 and 256 tokens
    python benchmarks/sinks.py --model DIR_OR_HUB    # another model
    python benchmarks/sinks.py --quick               # a small random model, to see that it runs

The text is read token by token. The perplexity of its second half with a `SinkCache` is compared with two others: a
plain window of as many tokens, and the comparison of the paper (arXiv:2309.17453), in which the sinks and the window
are recomputed for each token, as one text with contiguous positions. Recomputation forgets everything before the
window, while the states in a cache were computed when it was visible, so a cache may predict better.

The exit code is 1 if the perplexity with sinks is more than a tenth above the one with recomputation.
"""

import argparse
import json
import pathlib
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

import kvlayers
from kvlayers.tools.measuring.interleave import quiet_clock
from lib import report
from lib.workload import QUICK_SHAPE, RandomModel, Workload, default_model, real_workload

SINKS, WINDOW, RECOMPUTED = "kvlayers, sinks", "a window without sinks", "recomputed at every token"
NUM_SINK_TOKENS = 4
ROWS_AT_ONCE = 16
"""The number of tokens whose windows are recomputed side by side."""
MOST_OVER_RECOMPUTED = 1.1
MOST_OVER_FIRST_WINDOW = 1.1


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", help="directory or hub name of a real model; 'none' for a random one")
    parser.add_argument("--text", type=pathlib.Path, help="what is read (the topics of Python's help)")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="float32", help="of the model (float32)")
    parser.add_argument("--window", type=int, action="append", help="tokens held; several times for several (64, 256)")
    parser.add_argument("--windows", type=int, help="windows of text that are read (20)")
    parser.add_argument("--stride", type=int, help="recompute one token in so many (1)")
    parser.add_argument("--threads", type=int, help="threads of torch")
    parser.add_argument("--output", type=pathlib.Path, help="JSON file (benchmarks/results/sinks-<date>.json)")
    parser.add_argument("--quick", action="store_true", help="a small model and few tokens")
    given = parser.parse_args(arguments)
    given.window = given.window or ([16] if given.quick else [64, 256])
    given.windows = given.windows or (4 if given.quick else 20)
    given.stride = given.stride or 1
    given.model = given.model or ("none" if given.quick else default_model())
    given.output = given.output or report.output_path("sinks")
    if min(given.window) <= NUM_SINK_TOKENS or given.windows < 2:
        parser.error(f"a window must be larger than {NUM_SINK_TOKENS} sinks, and there must be two of them")
    return given


def window_cache(model: Any, window: int) -> kvlayers.Cache:
    """A cache that holds only the newest tokens."""
    return kvlayers.Cache([kvlayers.SlidingLayer(window) for _ in range(model.config.num_hidden_layers)])


def stream(model: Any, ids: Tensor, cache: Any, window: int, tick: Callable[[], None]) -> dict[str, Any]:
    """Read a text token by token: the perplexity of its second half, and the seconds of a step in each window."""
    tokens = ids.shape[1] - 1
    surprise, seconds = [], []
    with torch.inference_mode(), quiet_clock():
        for position in range(tokens):
            begin = time.perf_counter()
            logits = model(input_ids=ids[:, position : position + 1], past_key_values=cache).logits
            seconds.append(time.perf_counter() - begin)
            if position >= tokens // 2:
                surprise.append(_surprise(logits[0, -1], ids[0, position + 1]))
            tick()
    steps = [statistics.median(seconds[start : start + window]) for start in range(0, tokens, window)]
    return {"perplexity": _perplexity(surprise), "steps": steps, "held": cache.nbytes}


def recompute(model: Any, ids: Tensor, window: int, positions: Sequence[int], tick: Callable[[], None]) -> float:
    """Perplexity if each token is predicted from the sinks and the window before it, computed as one text."""
    surprise = []
    with torch.inference_mode():
        for start in range(0, len(positions), ROWS_AT_ONCE):
            some = positions[start : start + ROWS_AT_ONCE]
            rows = [
                torch.cat([ids[0, :NUM_SINK_TOKENS], ids[0, at + 1 - window + NUM_SINK_TOKENS : at + 1]]) for at in some
            ]
            logits = model(input_ids=torch.stack(rows)).logits[:, -1]
            surprise += [_surprise(row, ids[0, at + 1]) for row, at in zip(logits, some, strict=True)]
            tick()
    return _perplexity(surprise)


def _surprise(logits: Tensor, target: Tensor) -> float:
    return -float(logits.float().log_softmax(-1)[target])


def _perplexity(surprise: Iterable[float]) -> float:
    return float(torch.tensor(list(surprise), dtype=torch.float64).mean().exp())


def measure(model: Any, ids: Tensor, window: int, stride: int, ticking: Any) -> dict[str, Any]:
    """All figures of one window."""
    tokens = ids.shape[1] - 1
    makers = {
        SINKS: lambda: kvlayers.SinkCache(window, NUM_SINK_TOKENS, config=model.config),
        WINDOW: lambda: window_cache(model, window),
    }
    found: dict[str, Any] = {
        name: stream(model, ids, make(), window, ticking(f"{name}, {window} tokens", tokens))
        for name, make in makers.items()
    }
    positions = range(tokens // 2, tokens, stride)
    tick = ticking(f"{RECOMPUTED}, {window} tokens", -(-len(positions) // ROWS_AT_ONCE))
    found[RECOMPUTED] = {"perplexity": recompute(model, ids, window, positions, tick)}
    return found


def promises(measured: dict[int, Any]) -> list[dict[str, Any]]:
    """The targets, and whether they are met."""
    found = []
    for window, entry in measured.items():
        share = entry[SINKS]["perplexity"] / entry[RECOMPUTED]["perplexity"]
        found.append(
            report.promised(f"{window}: perplexity relative to recomputation", share, at_most=MOST_OVER_RECOMPUTED)
        )
        first, *_, last = entry[SINKS]["steps"]
        found.append(
            report.promised(
                f"{window}: last window's step to the first's", last / first, at_most=MOST_OVER_FIRST_WINDOW
            )
        )
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it; the exit code is 1 if sinks predict worse than recomputation by more than a tenth."""
    given = parse(arguments)
    console = report.terminal()
    if given.threads:
        torch.set_num_threads(given.threads)
    dtype = getattr(torch, given.dtype)
    workload: Workload | None = real_workload(given.model, given.text, console.print, dtype)
    if workload is None:
        workload = RandomModel(QUICK_SHAPE, dtype=dtype)
    measured = {}
    with report.progress_bars(console) as progress:
        for window in given.window:
            ids = workload.prompt(given.windows * window + 1)
            measured[window] = measure(workload.model, ids, window, given.stride, report.ticking_in(progress))
    table = report.new_table(
        f"{given.windows} windows of text, {workload.name}, {given.dtype}",
        "window", "perplexity of the second half", "ms a step, first window", "middle", "last", "kB held",
    )  # fmt: skip
    for window, entry in measured.items():
        for name, figures in entry.items():
            steps, held = figures.get("steps"), figures.get("held")
            times = [steps[0], steps[len(steps) // 2], steps[-1]] if steps else []
            cells = [f"{seconds * 1000:.2f}" for seconds in times] or ["", "", ""]
            table.add_row(
                f"{window:>4} {name}", f"{figures['perplexity']:.3f}", *cells, f"{held / 1e3:.0f}" if held else ""
            )
    console.print(table)
    kept = promises(measured)
    for promise in kept:
        met = "met" if promise["met"] else "missed"
        console.print(f"{met}: {promise['what']}: {promise['value']:.3f}, asked {promise['asked']}")
    given.output.parent.mkdir(parents=True, exist_ok=True)
    result = {"environment": report.environment(), "model": workload.name, "windows": measured, "targets": kept}
    given.output.write_text(json.dumps(result, indent=1))
    return 0 if all(promise["met"] for promise in kept if "perplexity" in promise["what"]) else 1


if __name__ == "__main__":
    sys.exit(main())
