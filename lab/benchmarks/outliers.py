"""Measures what quantizers lose on models whose keys have outliers, relative to the same model in full precision.

    python lab/benchmarks/outliers.py                  # the demo model, every row: some 30 minutes on two cores
    python lab/benchmarks/outliers.py --only x30       # the rows whose name contains this text
    python lab/benchmarks/outliers.py --quick          # a small random model, to see that it runs
    python lab/benchmarks/outliers.py --write          # the records, into docs/benchmarks.md and docs/quantized.md

Rows are made of a model without outliers, by hooks in its attention (`lib/outliers.py`): a constant that is added to
some channels of all keys, or a factor of them by which the queries are divided, so that the model stays the same in
full precision. Both exist in real models: biases of Qwen2.5's `k_proj`, and channels of Llama's keys that vary from
token to token. "x30 in 2 slow, all": the two slowest rotary pairs of all KV heads, times 30.

Each cache is compared with transformers' DynamicCache of the same modified model, by the mean KL divergence in nats a
token and by the share of equal top tokens. kvlayers' caches of 4 bits hold about as many bytes; all bytes are shown. A
name with "plain" is the same quantizer of keys that are not smoothed (`kvlayers.kernels.codes.smoothing`).
"""

import itertools
import pathlib
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import kvlayers
import pages
from kvlayers.quantizers import Quantizer, SideOptions, backend, quantizer_names, register_quantizer
from lib import report
from lib.internals import CacheMaker, NoRecord, read
from lib.outliers import KeyOutliers, ValueOutliers
from lib.quantized import FULL, RANDOM, REFERENCE, Contender, load, measure_bytes, own


def plain(name: str, **options: Any) -> CacheMaker:
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
    "native": (Contender("kvlayers", "native", 4), own("native", nbits=4)),
    "native plain": (Contender("kvlayers", "native plain", 4), plain("native", nbits=4)),
    "kivi": (Contender("kvlayers", "kivi", 4), own("kivi", nbits=4, q_group_size=64)),
    "turboquant": (Contender("kvlayers", "turboquant", 4), own("turboquant", nbits=4)),
    "turboquant plain": (Contender("kvlayers", "turboquant plain", 4), plain("turboquant", nbits=4)),
    "nf4": (Contender("kvlayers", "nf4", 4), own("nf4", q_group_size=32)),
    "nf4 plain": (Contender("kvlayers", "nf4 plain", 4), plain("nf4", q_group_size=32)),
    "fp8": (Contender("kvlayers", "fp8", 8), own("fp8")),
}
SIZES = (3.0, 10.0, 30.0, 100.0)
PAIRS = (1, 2, 8)
PLAIN = "as it is"

FIGURES, QUANTIZED = pages.DOCS / "benchmarks.md", pages.DOCS / "quantized.md"
BEGIN, END = "<!-- outliers: written by lab/benchmarks/outliers.py -->", "<!-- end of outliers -->"
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


def options() -> report.Options:
    made = report.Options("outliers", __doc__, quick="a small random model and few rows")
    made.real_model(RANDOM, is_needed=True)
    made.sized("--passages", 1, 1, "from places spread over the text")
    made.sized("--context", 512, 512, "tokens of each read before scoring begins")
    made.sized("--scored", 128, 128, "tokens of each that are scored")
    made.sized("--chunk", 64, 64, "tokens read at once")
    made.some_of("--caches", list(NAMES), "caches")
    made.add("--only", default="", help="only rows whose name contains this text")
    made.dtype("float32", ("float32", "bfloat16"))
    made.add("--write", action="store_true", help="write the recorded tables into the pages, and stop")
    return made


def chosen(given: Any) -> list[KeyOutliers | ValueOutliers | None]:
    """The rows to measure; `None` for the model as it is."""
    rows = [row for row in ROWS if given.only in row.name]
    if given.quick:
        rows = [row for row in rows if row.size == 30 and (isinstance(row, ValueOutliers) or row.pairs == 1)]
    return [None, *rows]


def measure(run: report.Session) -> dict[str, Any]:
    """For each row, the figures of each cache; and the bytes of each cache a token."""
    given = run.given
    model, texts = load(given.model, given.text, given.dtype, given.passages, given.context + given.scored + 1)
    makers = {REFERENCE: FULL[REFERENCE], **dict(NAMES[name] for name in given.caches)}
    rows = chosen(given)
    tick = run.ticking("rows", (given.context + given.scored) // given.chunk * len(texts) * len(rows))
    found: dict[str, Any] = {}
    for row in rows:
        with nullcontext() if row is None else row.applied(model):
            scores = read(model, texts, makers, given.context, given.chunk, NoRecord(), tick)
        summaries = {name: scores[NAMES[name][0]].summary() for name in given.caches}
        found[PLAIN if row is None else row.name] = {
            name: {key: summary.get(key) for key in ("kl", "kl_99", "agreement", "failure")}
            for name, summary in summaries.items()
        }
    held = {
        name: measure_bytes(NAMES[name][1], model.config, given.context, given.scored, given.chunk)
        for name in given.caches
    }
    columns = {name: lambda cells, name=name: cells[name]["failure"] or _cell(cells[name]) for name in given.caches}
    run.table("KL divergence, and the share of equal top tokens", "keys", {"": found}, columns)
    for row, cells in found.items():
        for name, cell in cells.items():
            run.expect(not cell["failure"], f"{name}, {row}: {cell['failure']}")
    return {"rows": found, "bytes": held}


def _cell(figures: dict[str, float]) -> str:
    return f"{figures['kl']:.2g} {figures['agreement']:.0%}"


def page_table(record: dict[str, Any], rows: Sequence[str] | None = None, left_out: Sequence[str] = ()) -> str:
    found, arguments = record["results"]["outliers"], record["arguments"]
    caches = [name for name in arguments["caches"] if name not in left_out]
    shown = [row for row in rows or found["rows"] if row in found["rows"]]
    cells = [[row, *(_cell(found["rows"][row][name]) for name in caches)] for row in shown]
    held = ", ".join(f"`{name}` {found['bytes'][name]['bytes']:,.0f}" for name in caches)
    model = pathlib.Path(arguments["model"]).name
    lengths = f"{arguments['scored']} tokens after {arguments['context']}"
    return "\n".join(
        [
            pages.markdown(["keys", *(f"`{name}`" for name in caches)], cells),
            "",
            f"KL in nats, and equal top tokens. {model}, {arguments['dtype']}, {lengths}. Bytes a token: {held}. "
            f"{pages.measured_at(record)}.",
        ]
    )


def written_pages() -> dict[pathlib.Path, str]:
    records = pages.records_by_model("outliers")
    tables = {
        FIGURES: "\n\n".join(map(page_table, records)),
        QUANTIZED: "\n\n".join(page_table(record, SHOWN, LEFT_OUT) for record in records),
    }
    return {path: pages.between(path.read_text(), BEGIN, END, found) for path, found in tables.items()}


def main(arguments: Sequence[str] | None = None) -> int:
    made = options()
    given = made.parse(arguments)
    if given.write:
        return pages.write_pages(written_pages())
    if given.context % given.chunk or given.scored % given.chunk:
        made.parser.error("--context and --scored must be multiples of --chunk")
    with report.session(given) as run:
        found = {"outliers": measure(run)}
    return run.finish(found)


if __name__ == "__main__":
    sys.exit(main())
