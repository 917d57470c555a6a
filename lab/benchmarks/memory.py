"""Measures a cache within a budget: what it loses, how many tokens stay exact, and what giving way costs.

    python lab/benchmarks/memory.py                    # the demo model, 4k tokens behind a prompt of 4k: an hour
    python lab/benchmarks/memory.py --model DIR        # another model
    python lab/benchmarks/memory.py --quick            # a small random model, to see that it runs
    python lab/benchmarks/memory.py --record           # also keep the figures in lab/benchmarks/recorded
    python lab/benchmarks/memory.py --write            # the recorded tables, into docs/memory.md

loss: each cache reads the same text (teacher forcing) chunk by chunk. KL and equal top tokens are beside the exact
cache. Beside each budget stands the cache that was from the start what the budget ends with: the same bits in each
layer, and as many of the newest tokens exact, in as many bytes.
again: codes of 8 bits that are packed again to 4, after the prompt, beside 4 bits at once.
time: milliseconds of each step of giving way behind a prompt, and of a decode step before and after.
"""

import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

import kvlayers
import pages
from lib import report
from lib.contenders import CONTENDERS, KVLAYERS, REFERENCE, Maker, packed
from lib.internals import NoRecord, newest_logits, quiet_clock, read
from pages import shown

EXACT = "kvlayers DynamicCache"
STEPS = 16
"""Decode steps whose median is shown."""


def options() -> report.Options:
    made = report.Options(
        "memory",
        __doc__,
        written_pages,
        quick="a small random model and a short text",
        kind=lambda given: f"memory-{pages.model_name(vars(given))}",
    )
    made.some_of("--only", list(SECTIONS), "sections")
    made.real_model(is_needed=True)
    made.sized("--prompt", 4096, 512, "tokens of the prompt")
    made.sized("--answers", 4096, 256, "tokens behind it")
    made.sized("--chunk", 16, 16, "tokens of the text that are read at once")
    made.sized("--shares", [60, 40, 25], [70, 50], "budgets, in percent of full precision at the end", report.numbers)
    made.sized("--held", 8192, 600, "tokens of the prompt of `time`")
    return made


class Watched:
    """Caches by name, with the most bytes that each has held, and what is done to it once it has read the prompt."""

    def __init__(self, prompt: int) -> None:
        self.caches, self.peaks, self._prompt = dict[str, Any](), dict[str, int](), prompt

    def maker(self, name: str, make: Maker, then: Callable[[Any], None] = lambda cache: None) -> Maker:
        def made(config: Any) -> Any:
            cache = self.caches[name] = make(config)
            update, waiting = cache.update, [then]
            self.peaks[name] = 0

            def watched(keys: Any, values: Any, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
                if layer_idx == 0 and waiting and cache.get_seq_length() >= self._prompt:
                    waiting.pop()(cache)
                states = update(keys, values, layer_idx, *args, **kwargs)
                self.peaks[name] = max(self.peaks[name], cache.nbytes)
                return states

            cache.update = watched
            return cache

        return made


def exact_share(cache: Any) -> float:
    """The share of the tokens that the layers hold as they came."""
    held = [
        (layer.length - (layer.exact_from or 0), layer.length)
        for layer in cache.adapted_layers()
        if layer.traits.attends
    ]
    return sum(exact for exact, _ in held) / sum(length for _, length in held)


def as_it_ends(cache: Any) -> Maker:
    """Makes what a cache within a budget has become: its bits in each layer, and as many of the newest tokens exact."""
    stores = [layer.parts[0].unwrapped.store for layer in cache.adapted_layers()]
    bits = [store.bits[0] if store.bits else 8 for store in stores]
    kept = min((store.kept for store in stores if store.bits), default=128)
    return packed(nbits=bits, residual_length=kept, quantize_sliding=True)


def figures(run: report.Session, model: Any, ids: Any, makers: Mapping[str, Maker], watched: Watched) -> dict[str, Any]:
    given = run.given
    wanted = {REFERENCE: CONTENDERS[REFERENCE], **makers}
    tick = run.ticking("reading", -(-(ids.shape[1] - 1) // given.chunk))
    scores = read(model, [ids], wanted, given.prompt, given.chunk, NoRecord(), tick)
    found = dict[str, Any]()
    for name in makers:
        summary = scores[name].summary()
        run.expect("failure" not in summary, f"{name}: {summary.get('failure')}")
        if "failure" in summary:
            found[name] = summary
            continue
        cache = watched.caches[name]
        found[name] = {
            "kl": summary["kl"],
            "agreement": summary["agreement"],
            "exact": exact_share(cache),
            "bytes": cache.nbytes,
            "peak": watched.peaks[name],
        }
    return found


COLUMNS = (
    shown("KL", "kl", ".2g"),
    shown("equal top", "agreement", ".1%"),
    shown("exact", "exact", ".0%"),
    shown("MB", "bytes", ".1f", 1e-6),
    shown("peak MB", "peak", ".1f", 1e-6),
    shown("of full", "of_full", ".0%"),
)


def text_of(run: report.Session, tokens: int) -> tuple[Any, Any]:
    """The model, and so many tokens and one more, int64 `[1, tokens + 1]`."""
    workload = run.some_model(torch.float32)
    return workload.model, workload.passages(1, tokens + 1)[0]


def loss(run: report.Session) -> dict[str, Any]:
    """For each budget, and for 8 and 4 bits from the start: KL, equal top tokens, exact tokens and bytes."""
    given = run.given
    tokens = given.prompt + given.answers
    model, ids = text_of(run, tokens)
    watched = Watched(given.prompt)
    budgets = {f"within {share}%": share for share in given.shares}

    def within(share: int) -> Maker:
        return lambda config: kvlayers.DynamicCache(config=config, max_bytes=f"{share}%", length_hint=tokens)

    makers = {EXACT: CONTENDERS[KVLAYERS], "int8": packed(nbits=8), "int4": packed(nbits=4)}
    makers |= {name: within(share) for name, share in budgets.items()}
    found = figures(run, model, ids, {name: watched.maker(name, make) for name, make in makers.items()}, watched)
    ended = {name: as_it_ends(watched.caches[name]) for name in budgets if "failure" not in found[name]}
    from_start = {
        f"{name}, from the start": watched.maker(f"{name}, from the start", make) for name, make in ended.items()
    }
    found |= figures(run, model, ids, from_start, watched) if from_start else {}
    full = found[EXACT]["bytes"]
    for name, entry in found.items():
        if "failure" in entry:
            continue
        entry["of_full"] = entry["bytes"] / full
        if name in ended:
            cache, block = watched.caches[name], 0
            for layer in cache.adapted_layers():
                block += 64 * (layer.nbytes // max(layer.held_tokens or 1, 1)) * 4
            entry["budget"] = cache.budget.max_bytes
            run.expect(
                entry["peak"] <= cache.budget.max_bytes + block, f"{name}: more bytes than the budget and a block"
            )
            run.target(
                f"{name}: KL, of the same from the start",
                entry["kl"] / found[f"{name}, from the start"]["kl"],
                at_most=1.02,
            )
    return found


def again(run: report.Session) -> dict[str, Any]:
    """4 bits at once, and after 8."""
    model, ids = text_of(run, run.given.prompt + run.given.answers)
    watched = Watched(run.given.prompt)

    def both(cache: Any) -> None:
        cache.pack(8)
        cache.pack(4)

    exact, ways = CONTENDERS[KVLAYERS], dict[str, tuple[Any, ...]]()
    ways["4 bits from the start"] = (packed(nbits=4),)
    ways["4 bits behind the prompt"] = (exact, lambda cache: cache.pack(4))
    ways["8, then 4 bits behind the prompt"] = (exact, both)
    makers = {name: watched.maker(name, *way) for name, way in ways.items()}
    found = figures(run, model, ids, makers, watched)
    once, twice = (found[name]["kl"] for name in list(makers)[1:])
    run.target("KL of 8 and then 4 bits, of 4 at once", twice / once, at_most=1.05)
    return found


def times(run: report.Session) -> dict[str, Any]:
    """Milliseconds of giving way, and of a decode step before and after each step."""
    given = run.given
    model, ids = text_of(run, given.held)
    cache = kvlayers.DynamicCache(config=model.config)
    token, found = ids[:, -1:], dict[str, Any]()
    with quiet_clock():
        for start in range(0, given.held, 512):
            newest_logits(model, ids[:, start : min(start + 512, given.held)], cache, 1)

        def a_step() -> float:
            seconds = list[float]()
            for _ in range(STEPS):
                begin = time.perf_counter()
                newest_logits(model, token, cache, 1)
                seconds.append(time.perf_counter() - begin)
            return statistics.median(seconds)

        found["exact"] = {"step": a_step(), "bytes": cache.nbytes}
        while True:
            begin = time.perf_counter()
            taken = cache.give_way()
            seconds = time.perf_counter() - begin
            if taken is None:
                break
            found[taken] = {"giving way": seconds, "step": a_step(), "bytes": cache.nbytes}
    return found


def figures_table(arguments: Mapping[str, Any], found: Mapping[str, Any]) -> str:
    refused = [name for name, entry in found.items() if "failure" in entry]
    table = pages.table("cache", {name: entry for name, entry in found.items() if name not in refused}, COLUMNS)
    return f"{table}\n\nToo small, and refused by `CapacityError`: {', '.join(refused)}." if refused else table


def times_table(arguments: Mapping[str, Any], found: Mapping[str, Any]) -> str:
    columns = (shown("giving way, ms", "giving way", ".1f", 1e3), shown("a step, ms", "step", ".1f", 1e3))
    return pages.table(f"{arguments['held']:,} tokens", found, columns)


SECTIONS: dict[str, report.Section] = {
    "loss": (loss, figures_table),
    "again": (again, figures_table),
    "time": (times, times_table),
}


def page_tables() -> str:
    parts = []
    for record in pages.records_by_model("memory"):
        arguments, results = record["arguments"], record["results"]
        parts += [show(arguments, results[name]) for name, (_, show) in SECTIONS.items() if name in results]
        parts.append(
            f"{pages.model_name(arguments)}, float32, {arguments['answers']:,} tokens behind a prompt of "
            f"{arguments['prompt']:,}. {pages.measured_at(record)}."
        )
    return "\n\n".join(parts)


def written_pages() -> pages.Pages:
    return pages.written("memory", {(pages.DOCS / "memory.md", "memory"): page_tables()})


def main(arguments: Sequence[str] | None = None) -> int:
    made = options()
    given = made.parse(arguments)
    if given.prompt % given.chunk:
        made.parser.error("--prompt must be a multiple of --chunk")
    return report.run(given, SECTIONS)


if __name__ == "__main__":
    sys.exit(main())
