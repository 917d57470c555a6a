"""Writes what was measured on a GPU into README.md and docs/gpu.md, from the newest records of `gpu.py`.

    python benchmarks/gpu_tables.py --write   # into the pages
    python benchmarks/gpu_tables.py           # as they would be written

It imports only the standard library, so that a test can compare the pages with the records.
"""

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pages import DOCS, RECORDED, ROOT, between, markdown

PAGE, README = DOCS / "gpu.md", ROOT / "README.md"
BEGIN, END = "<!-- gpu: {}, written by benchmarks/gpu_tables.py -->", "<!-- end of gpu -->"

SHAPES = ("2,048 x 1", "8,192 x 1", "32,768 x 1", "8,192 x 8", "32,768 x 8")
LONGEST, LARGEST = "32,768 x 1", "32,768 x 8"
REFERENCE, WITHOUT_CUDNN = "transformers dynamic", "transformers dynamic, no cuDNN"
DYNAMIC, INT4 = "kvlayers dynamic", "kvlayers int4"
STEPS, IN_GRAPH, PEAK = "ms a step", "ms a step in a graph", "GB peak beyond the model"
WIDE = 1.2
"""How many times the lower quartile the upper one is, where a table gives both."""

Record = Mapping[str, Any]


def read(stage: str) -> Record:
    found: Record = json.loads(max(RECORDED.glob(f"gpu-{stage}-*.json")).read_text())
    return found


def where(record: Record) -> str:
    names = ", ".join(f"{name} {record['versions'][name]}" for name in ("torch", "triton", "transformers"))
    return f"{record['date'][:10]}, {record['hardware']['gpu']}, {names}"


def figures(record: Record, step: str, unit: str) -> Mapping[str, Any]:
    """The figures of a step in a unit, by what was measured and, where there are columns, by column."""
    found: Mapping[str, Any] = record["results"]["gpu"][step]["figures"][unit]
    return found


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table whose columns but the first are numbers."""
    return markdown(head, rows, "---:").replace("|  ", "| ")


def short(value: float) -> str:
    return f"{value:.1f}" if 10 <= value < 100 else f"{value:,.0f}" if value >= 100 else f"{value:.2f}"


def by_shape(record: Record, step: str, unit: str) -> str:
    """A table with a row for each cache and a column for each shape; slow halves of noisy times in brackets."""
    found = figures(record, step, unit)
    middle = record["results"]["gpu"][step].get("middle half, ms", {}) if unit == STEPS else {}

    def cell(name: str, shape: str) -> str:
        spread = middle.get(shape, {}).get(name)
        noise = f" ({short(spread['from'])} to {short(spread['to'])})" if spread and _is_wide(spread) else ""
        return short(found[name][shape]) + noise

    return table(["", *SHAPES], [[name, *(cell(name, shape) for shape in SHAPES)] for name in found])


def _is_wide(spread: Mapping[str, float]) -> bool:
    return spread["to"] > WIDE * spread["from"]


def decoding() -> str:
    return by_shape(read("first"), "decoding", STEPS)


def graphs() -> str:
    return by_shape(read("first"), "steps in graphs", IN_GRAPH)


def memory() -> str:
    return by_shape(read("first"), "decoding", PEAK)


def first_token() -> str:
    found = figures(read("first"), "first token of 8k", "ms")
    rows = [[what.partition(":")[0], short(value)] for what, value in found.items()]
    return table(["cache", "ms to the first token of 8,192"], rows)


def offloading() -> str:
    """Offloaded steps beside what the bus allows."""
    found = figures(read("first"), "offloading", "ms")
    rows = []
    for what, step in found.items():
        name, _, measured = what.partition(": ")
        if measured == "a step":
            copies = [value for other, value in found.items() if other.startswith(f"{name}: copying")]
            rows.append([name, short(step), *([short(copies[0]), f"{copies[0] / step:.0%}"] if copies else ["", ""])])
    return table(["cache", "ms a step", "ms to copy its states", "share of the rate of the bus"], rows)


def kernels() -> str:
    record = read("speed")
    rows = []
    for batch, step in ((1, "attention, int4, one sequence"), (8, "attention, int4, eight sequences")):
        found = figures(record, step, "us")
        for tokens in (8192, 32768, 131072):
            shape = f"batch {batch}, {tokens:,} tokens"
            names = [f"{name}, {shape}, {how}" for how in ("in a graph", "eager") for name in _of(how)]
            rows.append([f"{tokens:,} x {batch}", *(short(found[name]) for name in names)])
    head = ["us", "flash, in a graph", "int4, in a graph", "torch's choice, eager", "int4, eager"]
    return table(head, rows)


def _of(how: str) -> tuple[str, str]:
    return ("flash SDPA" if how == "in a graph" else "SDPA", "int4")


def others() -> str:
    """What was measured before the mends, and not since."""
    record = read("speed")

    def row(title: str, step: str, unit: str, what: str) -> list[str]:
        found = figures(record, step, unit)
        names = (f"{name}: {what}" for name in (REFERENCE, DYNAMIC, INT4))
        return [title, *(short(found[name]) if name in found else "" for name in names)]

    samples, turn, packing, far = (
        "eight samples of 32k",
        "second turn behind 32k",
        "packing",
        "decoding behind 128k",
    )
    rows = [
        row("eight samples of a prompt of 32,768: a step, ms", samples, "ms", "a step"),
        row("and the peak of memory, GB", samples, "GB", "peak beyond the model"),
        row("a step behind 131,072 tokens, ms", far, "ms", "a step"),
        row("and the peak of memory, GB", far, "GB", "peak beyond the model"),
        row("a step behind 8,192 tokens, ms", packing, "ms", "a step"),
        row("and the slowest of 64, in which `int4` packs a block", packing, "ms", "the slowest step of 64"),
        row("a turn of 512 tokens behind 32,768, ms", turn, "ms", "512 tokens behind 32,768"),
    ]
    return table(["", REFERENCE, DYNAMIC, INT4], rows)


def gathered() -> str:
    """Attention of layers that evict tokens or recall pages."""
    record = read("speed")
    rows = []
    for tokens in (8192, 16384, 32768):
        for how in ("in a graph", "eager"):
            evicted = figures(record, "attention to evicted tokens", "us")
            recalled = figures(record, "attention to recalled pages", "us")
            kept = f"{tokens // 4:,}, {how}"
            all_of = f"SDPA, all tokens, {tokens:,}, {how}"
            rows.append(
                [
                    f"{tokens:,}, {how}",
                    short({**evicted, **recalled}[all_of]),
                    *(
                        short(found[name]) if name in found else ""
                        for found, name in (
                            (evicted, f"even budgets, {kept}"),
                            (evicted, f"budgets of heads, {kept}"),
                            (recalled, f"recall of 64 pages, {tokens:,}, {how}"),
                        )
                    ),
                ]
            )
    head = ["us", "all tokens, torch", "a quarter kept", "a quarter kept, budgets of heads", "64 pages recalled"]
    return table(head, rows)


def measured() -> str:
    """Where the tables of the page were measured."""
    return f"`first`: {where(read('first'))}.\n`speed`: {where(read('speed'))}, an hour earlier."


def in_readme() -> str:
    record = read("first")
    steps, in_graph, peaks = (
        figures(record, step, unit)
        for step, unit in (("decoding", STEPS), ("steps in graphs", IN_GRAPH), ("decoding", PEAK))
    )

    def at(found: Mapping[str, Any], name: str, shape: str = LONGEST) -> str:
        return short(found[name][shape])

    return (
        f"With the shape of an 8B model and 32,768 tokens ({where(record)}), a step of `generate()` takes "
        f"{at(steps, REFERENCE)} ms with transformers' `DynamicCache`, and {at(steps, WITHOUT_CUDNN)} ms if cuDNN's "
        f"attention, which torch prefers there and which plans anew for each length, is turned off. It takes "
        f"{at(steps, DYNAMIC)} ms with kvlayers' `DynamicCache` and no setting, and {at(steps, INT4)} ms with `int4`, "
        f"in {at(peaks, INT4)} GB instead of {at(peaks, REFERENCE)} GB. Most of that is time of the host: in a CUDA "
        f"graph, `int4` takes {at(in_graph, INT4)} ms, and {at(in_graph, INT4, LARGEST)} ms for eight such sequences."
    )


ON_PAGE: Mapping[str, Callable[[], str]] = {
    "measured": measured,
    "steps": decoding,
    "graphs": graphs,
    "memory": memory,
    "first token": first_token,
    "offloading": offloading,
    "kernels": kernels,
    "samples and turns": others,
    "eviction and recall": gathered,
}
BEGIN_README = BEGIN.format("figures")


def with_tables(page: str) -> str:
    for name, make in ON_PAGE.items():
        page = between(page, BEGIN.format(name), END, make())
    return page


def with_readme_figures(page: str) -> str:
    return between(page, BEGIN_README, END, in_readme())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write README.md and docs/gpu.md")
    if parser.parse_args().write:
        PAGE.write_text(with_tables(PAGE.read_text()))
        README.write_text(with_readme_figures(README.read_text()))
    else:
        print("\n\n".join([*(make() for make in ON_PAGE.values()), in_readme()]))


if __name__ == "__main__":
    main()
