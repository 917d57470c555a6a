"""Records what `gpu.py` measured, and writes it into README.md and docs/gpu.md.

    python lab/benchmarks/gpu_tables.py --record results/first.json    # keep the figures in lab/benchmarks/recorded
    python lab/benchmarks/gpu_tables.py --write                        # the newest record, into the pages

It imports only the standard library, so that a test can compare the pages with the records.
"""

import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import pages
from pages import DOCS, ROOT, markdown

PAGE, README = DOCS / "gpu.md", ROOT / "README.md"

SHAPES = ("2,048 x 1", "8,192 x 1", "32,768 x 1", "8,192 x 8", "32,768 x 8")
LONGEST, LARGEST = "32,768 x 1", "32,768 x 8"
REFERENCE, WITHOUT_CUDNN = "transformers dynamic", "transformers dynamic, no cuDNN"
DYNAMIC, INT4 = "kvlayers dynamic", "kvlayers int4"
STEPS, IN_GRAPH, PEAK = "ms a step", "ms a step in a graph", "GB peak beyond the model"
WIDE = 1.2
"""How many times the lower quartile the upper one is, where a table gives both."""

Record = Mapping[str, Any]
Figures = Mapping[str, Any]


LONGEST_TEXT = 160
"""Characters that are kept of a text: the rest of what CUDA says, if something is wrong, is advice."""


def without_details(found: Any) -> Any:
    """Results without the output of tests, the times of single steps and other details."""
    if isinstance(found, str):
        return found[:LONGEST_TEXT]
    if isinstance(found, list):
        return [without_details(each) for each in found]
    if isinstance(found, dict):
        return {name: without_details(each) for name, each in found.items() if name != "details"}
    return found


def record(results: pathlib.Path) -> None:
    """Keep the file of the stage `first`."""
    found = without_details(json.loads(results.read_text()))
    path = pages.RECORDED / f"gpu-first-{found['date'][:10]}.json"
    path.write_text(json.dumps(found, indent=1) + "\n")


def read() -> Record:
    return pages.newest("gpu-first")


def where(record: Record) -> str:
    names = ", ".join(f"{name} {record['versions'][name]}" for name in ("torch", "triton", "transformers"))
    return f"{record['date'][:10]}, {record['hardware']['gpu']}, {names}"


def figures(step: str, unit: str) -> Figures:
    """The figures of a step in a unit, by what was measured and, where there are columns, by column."""
    found: Figures = read()["results"]["gpu"][step]["figures"][unit]
    return found


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table whose columns but the first are numbers."""
    return markdown(head, rows, "---:").replace("|  ", "| ")


def short(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.1f}" if 10 <= value < 100 else f"{value:,.0f}" if value >= 100 else f"{value:.2f}"


def by_shape(step: str, unit: str) -> str:
    """A table with a row for each cache and a column for each shape; slow halves of noisy times in brackets."""
    found = figures(step, unit)

    def cell(name: str, shape: str) -> str:
        if unit != STEPS:
            return short(found[name][shape])
        low, high = (figures(step, f"ms, {end} quartile")[name][shape] for end in ("lower", "upper"))
        return short(found[name][shape]) + (f" ({short(low)} to {short(high)})" if high > WIDE * low else "")

    return table(["", *SHAPES], [[name, *(cell(name, shape) for shape in SHAPES)] for name in found])


def first_token() -> str:
    found = figures("first token of 8k", "ms")
    rows = [[what.partition(":")[0], short(value)] for what, value in found.items()]
    return table(["cache", "ms to the first token of 8,192"], rows)


def offloading() -> str:
    """Offloaded steps beside what the bus allows."""
    found = figures("offloading", "ms")
    rows = []
    for what, step in found.items():
        name, _, measured = what.partition(": ")
        if measured == "a step":
            copies = [value for other, value in found.items() if other.startswith(f"{name}: copying")]
            rows.append([name, short(step), *([short(copies[0]), f"{copies[0] / step:.0%}"] if copies else ["", ""])])
    return table(["cache", "ms a step", "ms to copy its states", "share of the rate of the bus"], rows)


def in_readme() -> str:
    steps, in_graph, peaks = (
        figures(step, unit) for step, unit in (("decoding", STEPS), ("steps in graphs", IN_GRAPH), ("decoding", PEAK))
    )

    def at(found: Figures, name: str, shape: str = LONGEST) -> str:
        return short(found[name][shape])

    return (
        f"A step of `generate()` with the shape of an 8B model and 32,768 tokens ({where(read())}):\n\n"
        f"- transformers' `DynamicCache` takes {at(steps, REFERENCE)} ms in {at(peaks, REFERENCE)} GB: torch prefers "
        "cuDNN's attention there, which makes a plan for each length anew. With cuDNN's attention turned off, this "
        f"cache takes {at(steps, WITHOUT_CUDNN)} ms.\n"
        f"- kvlayers' `DynamicCache` takes {at(steps, DYNAMIC)} ms without any setting.\n"
        f"- kvlayers' `int4` takes {at(steps, INT4)} ms in {at(peaks, INT4)} GB. In a CUDA graph, where the host does "
        f"not launch each kernel, `int4` takes {at(in_graph, INT4)} ms, and {at(in_graph, INT4, LARGEST)} ms for eight "
        "such sequences."
    )


def written_pages() -> pages.Pages:
    on_page = {
        "gpu measured": f"{where(read())}.",
        "gpu steps": by_shape("decoding", STEPS),
        "gpu graphs": by_shape("steps in graphs", IN_GRAPH),
        "gpu memory": by_shape("decoding", PEAK),
        "gpu first token": first_token(),
        "gpu offloading": offloading(),
    }
    texts = {(PAGE, name): text for name, text in on_page.items()}
    return pages.written("gpu_tables", {**texts, (README, "gpu figures"): in_readme()})


if __name__ == "__main__":
    parser = pages.options(__doc__, written_pages)
    parser.add_argument("--record", type=pathlib.Path, required=True, help="JSON file of the stage first")
    record(parser.parse_args().record)
