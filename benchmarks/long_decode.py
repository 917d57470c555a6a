"""Measures what quantizers lose over thousands of decoded tokens, by position, at each number of bits.

    python benchmarks/long_decode.py                   # the demo model, some 20 minutes on two cores
    python benchmarks/long_decode.py --model DIR       # another model
    python benchmarks/long_decode.py --quick           # a small random model, to see that it runs
    python benchmarks/long_decode.py --write           # the recorded tables, into docs/benchmarks.md

The model first samples a text with transformers' DynamicCache. Then each cache reads that text, as if it had decoded it
(teacher forcing): the KL divergence from the exact cache shows how errors add up, quarter by quarter. And each cache
decodes on its own, with the same random numbers, until its first token that differs: the median of five such runs,
because one early tie decides a run.
"""

import argparse
import json
import pathlib
import statistics
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import transformers
from rich.progress import TimeRemainingColumn
from rich.table import Table
from torch import Tensor

from claimed import between
from fidelity import RANDOM, load
from kvlayers.tools.measuring.predictions import newest_logits
from kvlayers.tools.measuring.scoring import CacheMaker, NoRecord, PassageScores, read
from kvlayers.tools.measuring.text import default_text
from lib import report
from lib.quantized import FULL, REFERENCE, Contender
from lib.workload import default_model
from quantizers import own, upstream

MAKERS: dict[Contender, CacheMaker] = {
    **{Contender("kvlayers", "native", bits): own("native", nbits=bits) for bits in (8, 4, 3, 2)},
    Contender("kvlayers", "fp8", 8): own("fp8"),
    **{Contender("kvlayers", "kivi", bits): own("kivi", nbits=bits, q_group_size=64) for bits in (4, 2)},
    **{Contender("kvlayers", "turboquant", bits): own("turboquant", nbits=bits) for bits in (4, 3, 2)},
    Contender("kvlayers", "nf4", 4): own("nf4", q_group_size=32),
    **{Contender("transformers", "quanto", bits): upstream("quanto", bits) for bits in (4, 2)},
}
QUARTERS = 4
FREE_RUNS = 5
FREE_TOKENS = 256
"""The most tokens of a run on its own."""

PAGE = pathlib.Path(__file__).parents[1] / "docs" / "benchmarks.md"
BEGIN, END = "<!-- long decodes: written by benchmarks/long_decode.py -->", "<!-- end of long decodes -->"


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", help="directory or hub name (the demo model)")
    parser.add_argument("--text", type=pathlib.Path, help="what the model continues (the topics of Python's help)")
    parser.add_argument("--context", type=int, help="tokens of the prompt (512)")
    parser.add_argument("--decoded", type=int, help="tokens that are decoded (2048)")
    parser.add_argument("--chunk", type=int, default=16, help="tokens of the decoded text that are read at once (16)")
    parser.add_argument("--temperature", type=float, default=1.0, help="of the samples (1)")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="of the model (float32)")
    parser.add_argument("--threads", type=int, help="threads of torch")
    parser.add_argument("--output", type=pathlib.Path, help="JSON file (benchmarks/results/long_decode-<date>.json)")
    parser.add_argument("--write", action="store_true", help="write the recorded tables into the page, and stop")
    parser.add_argument("--quick", action="store_true", help="a small random model and a short text")
    given = parser.parse_args(arguments)
    given.model = RANDOM if given.quick else given.model or default_model()
    given.context = given.context or (256 if given.quick else 512)
    given.decoded = given.decoded or (64 if given.quick else 2048)
    given.passages, given.scored = 1, 0
    if given.context % given.chunk or given.decoded % (QUARTERS * given.chunk):
        parser.error("--context must be a multiple of --chunk, and --decoded of four of them")
    given.output = given.output or report.output_path("long_decode")
    return given


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


def measure(given: argparse.Namespace, progress: Any) -> dict[str, Any]:
    """For each cache: KL and equal top tokens of each quarter, and how many tokens it decodes before one differs."""
    source = given.text.read_text() if given.text else default_text()
    model, (ids,) = load(given.model, source, given)
    prompt = ids[:, : given.context].to(model.device)
    task = progress.add_task("the text", total=given.decoded)
    exact = transformers.DynamicCache(config=model.config)
    text = decode(model, prompt, exact, given.decoded, given.temperature, tick=lambda: progress.advance(task))
    whole = torch.cat([prompt, text], 1)
    makers = {REFERENCE: FULL[REFERENCE], **MAKERS}
    task = progress.add_task("teacher forcing", total=-(-(whole.shape[1] - 1) // given.chunk))
    forced = read(model, [whole], makers, given.context, given.chunk, NoRecord(), lambda: progress.advance(task))
    failures = {key: forced[key].failure for key in MAKERS}
    alive = {key: make for key, make in MAKERS.items() if failures[key] is None}
    task = progress.add_task("free running", total=FREE_RUNS * len(alive))
    free = free_runs(model, prompt, alive, given.temperature, lambda: progress.advance(task))
    return {
        key.name: {"failure": failure} if failure else {**_figures(forced[key].passages[0]), "free": free[key]}
        for key, failure in failures.items()
    }


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
    """The cells of the table."""
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
    """The tables of the newest record of each model, in Markdown."""
    newest: dict[str, Any] = {}
    for path in sorted((pathlib.Path(__file__).parent / "recorded").glob("long_decode-*.json")):
        record = json.loads(path.read_text())
        newest[pathlib.Path(record["arguments"]["model"]).name] = record
    parts = []
    for model, record in newest.items():
        arguments, versions = record["arguments"], record["versions"]
        cells = rows_of(record["results"]["long_decode"])
        parts += [
            f"| {' | '.join(HEADINGS)} |",
            "|---" * len(HEADINGS) + "|",
            *(f"| {' | '.join(row)} |" for row in cells),
            "",
            f"{model}, {arguments['dtype']}, {arguments['decoded']:,} tokens behind a prompt of "
            f"{arguments['context']}, sampled at temperature {arguments['temperature']:g}. "
            f"{record['hardware']['cpu']}, torch {versions['torch']}, transformers {versions['transformers']}, "
            f"{record['date'][:10]}.",
            "",
        ]
    return "\n".join(parts).rstrip()


def page() -> str:
    """The page, as it is with the recorded tables."""
    return between(PAGE.read_text(), BEGIN, END, page_tables())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it; the exit code is 1 if a cache fails."""
    given = parse(arguments)
    console = report.terminal()
    if given.write:
        PAGE.write_text(page())
        console.print(f"written: {PAGE}")
        return 0
    if given.model is None:
        console.print("no real model: set KVLAYERS_DEMO_MODEL, bring it with `make demo`, or pass --model")
        return 1
    if given.threads:
        torch.set_num_threads(given.threads)
    environment = report.environment()
    with report.progress_bars(console, TimeRemainingColumn()) as progress:
        found = measure(given, progress)
    table = Table(title="Long decodes", title_justify="left")
    for heading in HEADINGS:
        table.add_column(heading, justify="left" if heading == "cache" else "right")
    for row in rows_of(found):
        table.add_row(*row)
    console.print(table)
    report.write(console, given, environment, {"results": {"long_decode": found}})
    return int(any("failure" in figures for figures in found.values()))


if __name__ == "__main__":
    sys.exit(main())
