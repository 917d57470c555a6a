"""Streams a text of several windows through a sink cache: perplexity, and the time of a step.

    python lab/benchmarks/sinks.py                       # the demo model, windows of 64 and 256 tokens
    python lab/benchmarks/sinks.py --model DIR_OR_HUB    # another model
    python lab/benchmarks/sinks.py --quick               # a small random model, to see that it runs

The text is read token by token. The perplexity of its second half with a `SinkCache` is compared with two others: a
plain window of as many tokens, and the comparison of the paper (arXiv:2309.17453), in which the sinks and the window
are recomputed for each token, as one text with contiguous positions. Recomputation forgets everything before the
window, while the states in a cache were computed when it was visible, so a cache may predict better.

The exit code is 1 if the perplexity with sinks is more than a tenth above the one with recomputation.
"""

import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

import kvlayers
from lib import report
from lib.internals import quiet_clock

SINKS, WINDOW, RECOMPUTED = "kvlayers, sinks", "a window without sinks", "recomputed at every token"
NUM_SINK_TOKENS = 4
MOST_SHARE = 1.1
ROWS_AT_ONCE = 16
"""The number of tokens whose windows are recomputed side by side."""


def options() -> report.Options:
    made = report.Options("sinks", __doc__, quick="a small model and few tokens")
    made.real_model()
    made.dtype("float32", ("bfloat16", "float32"))
    made.add("--window", type=int, action="append", help="tokens held; several times for several (64, 256)")
    made.sized("--windows", 20, 4, "windows of text that are read")
    made.sized("--stride", 1, 1, "recompute one token in so many")
    return made


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


def stream_both(model: Any, ids: Tensor, window: int, ticking: Any) -> dict[str, Any]:
    """The figures of a cache with sinks, and of one that holds only the newest tokens."""
    layers = [kvlayers.SlidingLayer(window) for _ in range(model.config.num_hidden_layers)]
    caches = {SINKS: kvlayers.SinkCache(window, NUM_SINK_TOKENS, config=model.config), WINDOW: kvlayers.Cache(layers)}
    return {
        name: stream(model, ids, cache, window, ticking(f"{name}, {window} tokens", ids.shape[1] - 1))
        for name, cache in caches.items()
    }


def measure(run: report.Session) -> dict[int, Any]:
    given, dtype, found = run.given, getattr(torch, run.given.dtype), dict[int, Any]()
    workload = run.real(dtype) or run.random(dtype=dtype)
    for window in given.window:
        ids = workload.prompt(given.windows * window + 1)
        tokens = ids.shape[1] - 1
        entry = found[window] = stream_both(workload.model, ids, window, run.ticking)
        positions = range(tokens // 2, tokens, given.stride)
        tick = run.ticking(f"{RECOMPUTED}, {window} tokens", -(-len(positions) // ROWS_AT_ONCE))
        entry[RECOMPUTED] = {"perplexity": recompute(workload.model, ids, window, positions, tick)}
        share = entry[SINKS]["perplexity"] / entry[RECOMPUTED]["perplexity"]
        run.expect(share <= MOST_SHARE, f"{window}: {share:.2f} of the perplexity with recomputation")
    columns = {"perplexity of the second half": report.shown("perplexity", ".3f")}
    for heading, part in {"ms a step, first window": 0, "middle": 0.5, "last": 1}.items():
        columns[heading] = lambda figures, part=part: _step(figures.get("steps"), part)
    columns["kB held"] = report.shown("held", ".0f", 1e-3)
    run.table(f"{given.windows} windows of text, {workload.name}, {given.dtype}", "window", found, columns)
    return found


def _step(steps: list[float] | None, part: float) -> str:
    """Milliseconds of the step at a part of the text."""
    return f"{steps[round(part * (len(steps) - 1))] * report.MILLI:.2f}" if steps else ""


def main(arguments: Sequence[str] | None = None) -> int:
    made = options()
    given = made.parse(arguments)
    given.window = given.window or ([16] if given.quick else [64, 256])
    if min(given.window) <= NUM_SINK_TOKENS or given.windows < 2:
        made.parser.error(f"a window must be larger than {NUM_SINK_TOKENS} sinks, and there must be two of them")
    return report.run(given, {"windows": measure})


if __name__ == "__main__":
    sys.exit(main())
