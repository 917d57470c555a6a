"""Measures what quantizers lose on models whose keys have outliers, relative to the same model in full precision.

    python lab/benchmarks/outliers.py                  # the demo model, every row: some 30 minutes on two cores
    python lab/benchmarks/outliers.py --only x30 +100  # the rows whose names contain one of these texts
    python lab/benchmarks/outliers.py --resume RECORD  # what a record lacks, or the rows of --only again
    python lab/benchmarks/outliers.py --quick          # a small random model, to see that it runs
    python lab/benchmarks/outliers.py --write          # the records, into docs/benchmarks.md and docs/quantized.md

Rows are made of a model without outliers, by hooks in its attention (`lib/outliers.py`): a constant that is added to
some channels of all keys, or a factor of them by which the queries are divided, so that the model stays the same in
full precision. Both exist in real models: biases of Qwen2.5's `k_proj`, and channels of Llama's keys that vary from
token to token. "x30 in 2 slow, all": the two slowest rotary pairs of all KV heads, times 30.

Each cache is compared with transformers' DynamicCache of the same modified model, by the mean KL divergence in nats a
token and by the share of equal top tokens. kvlayers' caches of 4 bits hold about as many bytes; all bytes are shown. A
name with "plain" is the same quantizer of keys that are not smoothed (`kvlayers.kernels.codes.smoothing`). Passages
differ by more than caches do: with several of them (`--passages`), a figure has the standard error of their mean.
"""

import itertools
import json
import pathlib
import statistics
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch

import kvlayers
import pages
from kvlayers.quantizers import Quantizer, SideOptions, backend, quantizer_names, register_quantizer
from lib import report
from lib.contenders import CONTENDERS, REFERENCE, Maker, measure_bytes, packed
from lib.internals import NoRecord, read
from lib.outliers import KeyOutliers, ValueOutliers
from prompt_tables import CONVERTED, SMOLLM2


def plain(name: str, **options: Any) -> Maker:
    """Makes caches with a backend like another one, whose keys are packed as they are."""
    registered = f"{name} plain"

    class Plain(type(backend(name))):  # type: ignore[misc]
        def quantizer(self, options: SideOptions, head_dim: int) -> Quantizer:
            quantizer: Quantizer = super().quantizer(options, head_dim)
            quantizer.smooths_keys = False
            return quantizer

    def make(config: Any) -> kvlayers.QuantizedCache:
        if registered not in quantizer_names():
            register_quantizer(registered)(Plain)
        return kvlayers.QuantizedCache(registered, config=config, **options)

    return make


NAMES = {
    "native": packed(nbits=4),
    "native plain": plain("native", nbits=4),
    "kivi": packed("kivi", nbits=4, q_group_size=64),
    "turboquant": packed("turboquant", nbits=4),
    "turboquant plain": plain("turboquant", nbits=4),
    "nf4": packed("nf4", q_group_size=32),
    "nf4 plain": plain("nf4", q_group_size=32),
    "fp8": packed("fp8"),
}
SIZES = (3.0, 10.0, 30.0, 100.0)
PAIRS = (1, 2, 8)
PLAIN = "as it is"

SHOWN = (
    PLAIN,
    *("+30 in 2 slow, all", "+100 in 1 slow, all"),
    *("x3 in 2 slow, all", "x30 in 2 slow, all", "x30 in 2 fast, all", "x30 in 2 slow, one"),
    *("values x3 in 1 token of 16", "values x30 in 2 channels"),
)
"""The rows in docs/quantized.md."""

LEFT_OUT = ("turboquant plain", "nf4 plain")
"""The caches that are not in docs/quantized.md."""

ROWS: list[KeyOutliers | ValueOutliers] = [
    *(KeyOutliers(*row) for row in itertools.product(("constant", "varying"), SIZES, ("slow", "fast"), PAIRS)),
    *(KeyOutliers(kind, size, "slow", 2, "one") for kind, size in itertools.product(("constant", "varying"), SIZES)),
    *(ValueOutliers("tokens", size) for size in (3.0, 10.0)),
    *(ValueOutliers("varying", size) for size in (30.0, 100.0)),
]


QUICK = (
    PLAIN,
    *("+30 in 1 slow, all", "+30 in 1 fast, all", "x30 in 1 slow, all", "x30 in 1 fast, all"),
    "values x30 in 2 channels",
)
"""The rows of a quick run."""


def options() -> report.Options:
    made = report.Options(
        "outliers",
        __doc__,
        written_pages,
        quick="a small random model and few rows",
        kind=lambda given: f"outliers-{pages.model_name(vars(given))}",
    )
    made.real_model(is_needed=True)
    made.sized("--passages", 1, 1, "from places spread over the text")
    made.sized("--context", 512, 512, "tokens of each read before scoring begins")
    made.sized("--scored", 128, 128, "tokens of each that are scored")
    made.sized("--chunk", 64, 64, "tokens read at once")
    made.some_of("--caches", list(NAMES), "caches")
    made.add("--only", nargs="+", default=[], help="only rows whose names contain one of these texts")
    made.add("--resume", type=pathlib.Path, help="JSON file of an earlier run, whose other figures stay")
    return made


def chosen(given: Any, known: Mapping[str, Any]) -> dict[str, KeyOutliers | ValueOutliers | None]:
    """The rows to measure by name; `None` for the model as it is.

    Args:
        given: the arguments.
        known: the rows of an earlier run. They are measured again only if `--only` names them.
    """
    rows: dict[str, KeyOutliers | ValueOutliers | None] = {PLAIN: None, **{row.name: row for row in ROWS}}
    if given.only:
        return {name: row for name, row in rows.items() if any(text in name for text in given.only)}
    if given.quick:
        rows = {name: rows[name] for name in QUICK}
    return {name: row for name, row in rows.items() if not {*given.caches} <= known.get(name, {}).keys()}


def measure(run: report.Session) -> dict[str, Any]:
    """For each row, the figures of each cache; and the bytes of each cache a token.

    What has been measured is in the output file before the next row is.
    """
    given, caches = run.given, run.given.caches
    found, held = _resumed(given)
    workload = run.some_model(torch.float32)
    model, texts = workload.model, workload.passages(given.passages, given.context + given.scored + 1)
    makers = {REFERENCE: CONTENDERS[REFERENCE], **{name: NAMES[name] for name in caches}}
    for name in caches:
        held[name] = measure_bytes(NAMES[name], model.config, given.context, given.scored, given.chunk)
    rows = chosen(given, found)
    # The record is of all caches, whichever are measured now.
    given.caches = [name for name in NAMES if name in held]
    tick = run.ticking("rows", (given.context + given.scored) // given.chunk * len(texts) * len(rows))
    order = [PLAIN, *(row.name for row in ROWS)]
    for name, row in rows.items():
        with nullcontext() if row is None else row.applied(model):
            scores = read(model, texts, makers, given.context, given.chunk, NoRecord(), tick)
        cells = found.setdefault(name, {})
        for cache in caches:
            summary = scores[cache].summary()
            figures = {key: summary.get(key) for key in ("kl", "kl_99", "kl_of_passages", "agreement", "failure")}
            cells[cache] = {**figures, "date": run.environment["date"]}
            run.expect(not summary.get("failure"), f"{cache}, {name}: {summary.get('failure')}")
        found = {known: found[known] for known in order if known in found}
        run.write({"outliers": {"rows": found, "bytes": held}})
    run.say(
        page_table(
            {
                **run.environment,
                "arguments": vars(given),
                "results": {"outliers": {"rows": {name: found[name] for name in rows}, "bytes": held}},
            }
        )
    )
    return {"rows": found, "bytes": held}


def _resumed(given: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The rows and the bytes of the earlier run, which must have been of the same lengths."""
    if given.resume is None:
        return {}, {}
    record = json.loads(given.resume.read_text())
    for name in ("context", "scored", "chunk"):
        if record["arguments"][name] != getattr(given, name):
            raise SystemExit(f"--{name} must be that of {given.resume}: {record['arguments'][name]}")
    found = record["results"]["outliers"]
    for cells in found["rows"].values():
        for figures in cells.values():
            figures.setdefault("date", record["date"])
    return found["rows"], found["bytes"]


def _cell(figures: dict[str, Any]) -> str:
    if figures["failure"]:
        return str(figures["failure"])
    passages = figures.get("kl_of_passages") or []
    error = f" ±{statistics.stdev(passages) / len(passages) ** 0.5:.1g}" if len(passages) > 1 else ""
    return f"{figures['kl']:.2g}{error} {figures['agreement']:.0%}"


def page_table(record: dict[str, Any], rows: Sequence[str] | None = None, left_out: Sequence[str] = ()) -> str:
    found, arguments = record["results"]["outliers"], record["arguments"]
    caches = [name for name in arguments["caches"] if name not in left_out]
    shown = [row for row in rows or found["rows"] if row in found["rows"]]
    dates = {figures.get("date", record["date"])[:10] for cells in found["rows"].values() for figures in cells.values()}
    newest = max(dates)

    def dated(figures: dict[str, Any]) -> str:
        is_marked = len(dates) > 1 and figures.get("date", record["date"])[:10] == newest
        return _cell(figures) + " *" * is_marked

    cells = [[row, *(dated(found["rows"][row][name]) for name in caches)] for row in shown]
    older = ", ".join(sorted(dates - {newest}))
    marks = f" Cells with * were measured on {newest}, the others on {older}." if older else ""
    held = ", ".join(f"`{name}` {found['bytes'][name]['bytes']:,.0f}" for name in caches)
    name = pages.model_name(arguments)
    model = f"{name} ({CONVERTED})" if name == SMOLLM2 else name
    lengths = f"{arguments['scored']} tokens after {arguments['context']}"
    return (
        f"{pages.markdown(['keys', *(f'`{name}`' for name in caches)], cells)}\n\n"
        f"KL in nats, and equal top tokens. {model}, float32, {lengths}. Bytes a token: {held}. "
        f"{pages.measured_at(record)}.{marks}"
    )


def written_pages() -> pages.Pages:
    records = pages.records_by_model("outliers")
    all_rows = "\n\n".join(map(page_table, records))
    some = "\n\n".join(page_table(record, SHOWN, LEFT_OUT) for record in records)
    tables = {"benchmarks.md": all_rows, "quantized.md": some}
    return pages.written("outliers", {(pages.DOCS / page, "outliers"): found for page, found in tables.items()})


def main(arguments: Sequence[str] | None = None) -> int:
    made = options()
    given = made.parse(arguments)
    if given.context % given.chunk or given.scored % given.chunk:
        made.parser.error("--context and --scored must be multiples of --chunk")
    with report.session(given) as run:
        found = {"outliers": measure(run)}
    return run.finish(found)


if __name__ == "__main__":
    sys.exit(main())
