"""Measures what quantizers lose over thousands of decoded tokens, by position, at each number of bits.

    python lab/benchmarks/long_decode.py                   # the demo model, some 20 minutes on two cores
    python lab/benchmarks/long_decode.py --model DIR       # another model
    python lab/benchmarks/long_decode.py --quick           # a small random model, to see that it runs
    python lab/benchmarks/long_decode.py --write           # the recorded tables, into docs/benchmarks.md

The model first samples a text with transformers' DynamicCache. Then each cache reads that text, as if it had decoded it
(teacher forcing): the KL divergence from the exact cache shows how errors add up, quarter by quarter. And each cache
decodes on its own, with the same random numbers, until its first token that differs: the median of five such runs,
because one early tie decides a run.
"""

import pathlib
import statistics
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import transformers
from torch import Tensor

import pages
from lib import report
from lib.internals import CacheMaker, NoRecord, PassageScores, newest_logits, read
from lib.quantized import FULL, RANDOM, REFERENCE, Contender, load, own, upstream

MAKERS: dict[Contender, CacheMaker] = {
    **{Contender("kvlayers", "native", bits): own("native", nbits=bits) for bits in (8, 4, 3, 2)},
    Contender("kvlayers", "fp8", 8): own("fp8"),
    **{Contender("kvlayers", "kivi", bits): own("kivi", nbits=bits, q_group_size=64) for bits in (4, 2)},
    **{Contender("kvlayers", "turboquant", bits): own("turboquant", nbits=bits) for bits in (4, 3, 2)},
    Contender("kvlayers", "nf4", 4): own("nf4", q_group_size=32),
    **upstream("quanto", 4),
    **upstream("quanto", 2),
}
QUARTERS = 4
FREE_RUNS = 5
FREE_TOKENS = 256
"""The most tokens of a run on its own."""


def options() -> report.Options:
    made = report.Options("long_decode", __doc__, quick="a small random model and a short text", writes=written_pages)
    made.real_model(RANDOM, is_needed=True)
    made.sized("--context", 512, 256, "tokens of the prompt")
    made.sized("--decoded", 2048, 64, "tokens that are decoded")
    made.sized("--chunk", 16, 16, "tokens of the decoded text that are read at once")
    made.sized("--temperature", 1.0, 1.0, "of the samples", float)
    made.dtype("float32", ("float32", "bfloat16"))
    return made


def decode(
    model: Any,
    prompt: Tensor,
    cache: Any,
    tokens: int,
    temperature: float,
    seed: int = 0,
    text: Tensor | None = None,
    tick: Callable[[], None] = lambda: None,
) -> Tensor:
    """The tokens `[1, tokens]` that a model samples, with random numbers that depend on the position alone.

    Args:
        model: in eval mode.
        prompt: int64 `[1, prompt]`.
        cache: an empty cache.
        tokens: the most tokens.
        temperature: of the samples; 0 takes the likeliest tokens.
        seed: of the random numbers.
        text: stop behind the first token that differs from these, `[1, tokens]`.
        tick: called after each token.
    """
    found: list[Tensor] = []
    newest = prompt
    for position in range(tokens):
        logits = newest_logits(model, newest, cache, 1).float()
        if temperature:
            # The largest of scores with Gumbel noise is a sample (Gumbel 1954).
            uniform = torch.rand(logits.shape, generator=torch.Generator().manual_seed(seed + position))
            logits = logits / temperature - (-uniform.clamp(min=1e-20).log()).log()
        newest = logits.argmax(-1)[None]
        found.append(newest)
        tick()
        if text is not None and not torch.equal(newest[0, 0], text[0, position]):
            break
    return torch.cat(found, 1)


def measure(run: report.Session) -> dict[str, Any]:
    """For each cache: KL and equal top tokens of each quarter, and how many tokens it decodes before one differs."""
    given = run.given
    model, (ids,) = load(given.model, given.text, given.dtype, 1, given.context + 1)
    prompt = ids[:, : given.context].to(model.device)
    exact = transformers.DynamicCache(config=model.config)
    tick = run.ticking("the text", given.decoded)
    text = decode(model, prompt, exact, given.decoded, given.temperature, tick=tick)
    whole = torch.cat([prompt, text], 1)
    makers = {REFERENCE: FULL[REFERENCE], **MAKERS}
    tick = run.ticking("teacher forcing", -(-(whole.shape[1] - 1) // given.chunk))
    forced = read(model, [whole], makers, given.context, given.chunk, NoRecord(), tick)
    failures = {key: forced[key].failure for key in MAKERS}
    alive = {key: make for key, make in MAKERS.items() if failures[key] is None}
    free = free_runs(model, prompt, alive, given.temperature, run.ticking("free running", FREE_RUNS * len(alive)))
    found = {
        key.name: {"failure": failure} if failure else {**_figures(forced[key].passages[0]), "free": free[key]}
        for key, failure in failures.items()
    }
    columns = {heading: lambda row, at=at: row[at] for at, heading in enumerate(HEADINGS) if at}
    run.table("Long decodes", HEADINGS[0], {"": {row[0]: row for row in rows_of(found)}}, columns)
    for key, failure in failures.items():
        run.expect(failure is None, f"{key.name}: {failure}")
    return found


def free_runs(
    model: Any, prompt: Tensor, makers: dict[Contender, CacheMaker], temperature: float, tick: Callable[[], None]
) -> dict[Contender, list[int]]:
    """How many tokens each cache decodes before the first one that differs, for each seed."""
    found: dict[Contender, list[int]] = {key: [] for key in makers}
    for seed in range(0, FREE_RUNS * 10_000, 10_000):
        exact = transformers.DynamicCache(config=model.config)
        text = decode(model, prompt, exact, FREE_TOKENS, temperature, seed)
        for key, make in makers.items():
            seen = decode(model, prompt, make(model.config), FREE_TOKENS, temperature, seed, text)
            found[key].append(int((seen == text[:, : seen.shape[1]]).sum()))
            tick()
    return found


def _figures(scores: PassageScores) -> dict[str, Any]:
    kl, agrees = torch.tensor(scores.kl, dtype=torch.float64), torch.tensor(scores.agrees, dtype=torch.float64)
    quarters = zip(kl.tensor_split(QUARTERS), agrees.tensor_split(QUARTERS), strict=True)
    return {
        "kl": float(kl.mean()),
        "agreement": float(agrees.mean()),
        "quarters": [{"kl": float(part.mean()), "agreement": float(same.mean())} for part, same in quarters],
    }


HEADINGS = ("cache", "KL", *(f"quarter {number}" for number in range(1, QUARTERS + 1)), "equal top", "free until")


def rows_of(found: dict[str, Any]) -> list[list[str]]:
    rows = []
    for name, figures in found.items():
        if "failure" in figures:
            rows.append([name, figures["failure"], *[""] * (len(HEADINGS) - 2)])
            continue
        median = int(statistics.median(figures["free"]))
        free = f"{FREE_TOKENS} or more" if median >= FREE_TOKENS else str(median)
        quarters = (f"{quarter['kl']:.2g}" for quarter in figures["quarters"])
        rows.append([name, f"{figures['kl']:.2g}", *quarters, f"{figures['agreement']:.1%}", free])
    return rows


def page_tables() -> str:
    parts = []
    for record in pages.records_by_model("long_decode"):
        arguments = record["arguments"]
        parts += [
            pages.markdown(HEADINGS, rows_of(record["results"]["long_decode"])),
            f"{pathlib.Path(arguments['model']).name}, {arguments['dtype']}, {arguments['decoded']:,} tokens behind a "
            f"prompt of {arguments['context']}, sampled at temperature {arguments['temperature']:g}. "
            f"{pages.measured_at(record)}.",
        ]
    return "\n\n".join(parts)


def written_pages() -> pages.Pages:
    return pages.written("long_decode", {(pages.DOCS / "benchmarks.md", "long decodes"): page_tables()})


def main(arguments: Sequence[str] | None = None) -> int:
    made = options()
    given = made.parse(arguments)
    if given.context % given.chunk or given.decoded % (QUARTERS * given.chunk):
        made.parser.error("--context must be a multiple of --chunk, and --decoded of four of them")
    return report.run(given, {"long_decode": measure})


if __name__ == "__main__":
    sys.exit(main())
