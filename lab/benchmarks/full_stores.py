"""Full prefix stores: milliseconds of a look-up and of an insertion by the number of entries, and memory that lasts.

    python lab/benchmarks/full_stores.py            # a minute
    python lab/benchmarks/full_stores.py --quick    # few entries, to see that it runs
    python lab/benchmarks/full_stores.py --write    # the recorded figures, into docs/prefix.md

Prompts have 64 tokens, one layer with one head stands for a model, and a full store evicts one for each that comes.
"""

import itertools
import os
import pathlib
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

import kvlayers
import pages
from lib import report
from lib.report import shown

OPERATIONS = ("a look-up", "an insertion")
TOKEN_BYTES = 2 * 8 * 4
"""Bytes of a token of one layer with one head of 8."""


def options() -> report.Options:
    made = report.Options("full_stores", __doc__, threads=2, quick="few entries and requests", writes=written_pages)
    made.sized("--entries", [100, 1000, 10_000], [50], "entries", report.numbers)
    made.sized("--lasting", 10_000, 100, "requests after which memory is measured")
    return made


def passed(cache: kvlayers.Cache, tokens: int) -> None:
    states = torch.zeros(1, 1, tokens, 8)
    cache.update(states, states, 0)


class Timed(NamedTuple):
    """Seconds of look-ups and of insertions."""

    lookups: list[float]
    insertions: list[float]

    def figures(self) -> dict[str, float]:
        return {
            f"{how} of {what}": choose(seconds) * 1e3
            for what, seconds in zip(OPERATIONS, self, strict=True)
            for how, choose in (("median", statistics.median), ("worst", max))
        }


def ask(store: kvlayers.PrefixStore, ids: Tensor, timed: Timed) -> int:
    """Look a prompt up, pass the rest, insert it. Returns the tokens that were found."""
    begin = time.perf_counter()
    hit = store.lookup(ids, model="m")
    looked_up = time.perf_counter()
    cache = kvlayers.DynamicCache() if hit.cache is None else hit.cache
    passed(cache, len(ids) - hit.covered)
    computed = time.perf_counter()
    store.insert(ids, cache, model="m")
    timed.lookups.append(looked_up - begin)
    timed.insertions.append(time.perf_counter() - computed)
    return hit.covered


def milliseconds() -> dict[str, Callable[..., str]]:
    names = Timed([1.0], [1.0]).figures()
    return {f"{name}, ms": shown(name, ".2f") for name in names}


def resident_bytes() -> int:
    """Bytes of this process in memory, on Linux; 0 elsewhere."""
    path = pathlib.Path("/proc/self/statm")
    return int(path.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if path.exists() else 0


def entries(run: report.Session) -> dict[str, Any]:
    """A full store of short prompts, which gives one away for each that comes."""
    tokens, found = 64, dict[str, Any]()
    numbers = itertools.count()

    def prompt() -> Tensor:
        # A first token in common, as with a tokenizer that has one.
        return torch.cat([torch.zeros(1, dtype=torch.int64), torch.arange(1, tokens) + tokens * (1 + next(numbers))])

    for count in run.given.entries:
        store, tick = kvlayers.PrefixStore(count * tokens * TOKEN_BYTES), run.ticking(f"{count} entries", count)
        for _ in range(count):
            ask(store, prompt(), Timed([], []))
            tick()
        timed = Timed([], [])
        for _ in range(200):
            ask(store, prompt(), timed)
        found[f"{count:,}"] = timed.figures()
    last = found[f"{run.given.entries[-1]:,}"]
    run.target("median of an insertion, ms", last["median of an insertion"], at_most=1.0)
    run.target("worst of an insertion, ms", last["worst of an insertion"], at_most=20.0)
    run.table("Full stores of prompts of 64 tokens", "entries", {"": found}, milliseconds())
    store, lasting = kvlayers.PrefixStore(200 * tokens * TOKEN_BYTES), run.given.lasting
    tick, sizes = run.ticking("requests", lasting), list[int]()
    for number in range(lasting):
        ask(store, prompt(), Timed([], []))
        if number in (lasting // 2, lasting - 1):
            sizes.append(resident_bytes())
        tick()
    growth = (sizes[1] - sizes[0]) / 2**20
    run.console.print(f"Memory of the process grew by {growth:.1f} MiB in the second half of {lasting:,} requests.")
    run.target("MiB of growth in the second half", growth, at_most=4.0)
    return {"full": found, "growth_mib": growth}


def written_pages() -> pages.Pages:
    record = pages.newest("full_stores")
    rows = [
        [count, *(f"{figures[f'{how} of {what}']:.2f}" for what in OPERATIONS for how in ("median", "worst"))]
        for count, figures in record["results"]["entries"]["full"].items()
    ]
    heads = [f"{what}, {how} ms" for what in OPERATIONS for how in ("median", "worst")]
    table = f"{pages.markdown(['entries', *heads], rows)}\n\n{pages.measured_at(record)}."
    return pages.written("full_stores", {(pages.DOCS / "prefix.md", "full stores"): table})


def main(arguments: Sequence[str] | None = None) -> int:
    return report.run(options().parse(arguments), {"entries": entries})


if __name__ == "__main__":
    sys.exit(main())
