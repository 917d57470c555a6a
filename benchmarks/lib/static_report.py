"""Summaries of the measurements of static caches: targets and tables."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from lib.contenders import COMPILED, KVLAYERS, KVLAYERS_STATIC, REFERENCE, TRANSFORMERS_STATIC, compiled
from lib.report import MILLI, new_table, promised, span, summarise, times_as_fast
from lib.static import with_reservation


class Figure(NamedTuple):
    """How a figure is shown: the column name, and the digits after the point."""

    column: str
    digits: int


COMPILING = {
    "graphs": Figure("graphs", 0),
    "compile_seconds": Figure("compiled\nin s", 1),
    "recompiles": Figure("compiled\nlater", 0),
}
"""The figures that only compiled contenders have."""


def summarise_static(static: dict[str, Any]) -> None:
    """Summarise the steps at every length, and the calls of `generate()`."""
    for measured in (*static["eager"].values(), *static["compiled"].values(), static["generate"]["calls"]):
        summarise(measured)


def static_targets(static: dict[str, Any]) -> list[dict[str, Any]]:
    """The project's targets for static caches."""
    if not static:
        return []
    steps = [promise for length, measured in static["eager"].items() for promise in _step_targets(length, measured)]
    calls = static["generate"]["calls"]
    candidate = calls[compiled(KVLAYERS_STATIC)]
    return [
        *steps,
        promised("generate, graphs", candidate["graphs"], at_most=static["generate"]["buckets"] + 1),
        promised("generate, graphs compiled after the first call", candidate["recompiles"], at_most=0),
        *(
            promised(
                f"generate, compiled, time of a later call over that of {other}",
                times_as_fast(calls, other, compiled(KVLAYERS_STATIC)),
                at_most=1,
            )
            for other in (compiled(TRANSFORMERS_STATIC), KVLAYERS, REFERENCE)
        ),
    ]


def _step_targets(length: int, measured: dict[str, Any]) -> list[dict[str, Any]]:
    small, large = (with_reservation(KVLAYERS_STATIC, times) for times in (1, 32))
    baseline = with_reservation(TRANSFORMERS_STATIC, 32)
    found = []
    if length == 1024 and large in measured and small in measured:
        where = f"eager static step at {length} of {measured[large]['reserved']}"
        slower = times_as_fast(measured, small, large)
        found += [
            promised(f"{where}, time relative to {measured[small]['reserved']} reserved", slower, at_most=1.15),
            promised(
                f"{where}, times as fast as {TRANSFORMERS_STATIC}", times_as_fast(measured, large, baseline), at_least=5
            ),
        ]
    if small in measured:
        slower = times_as_fast(measured, KVLAYERS, small)
        found.append(
            promised(f"eager static step at {length}, time relative to kvlayers' DynamicCache", slower, at_most=1.05)
        )
    return found


def show_static(console: Console, static: dict[str, Any]) -> None:
    """Print all tables."""
    if not static:
        return
    console.print(_steps_table(f"Static caches in eager code, {static['model']}", static["eager"]))
    beside = "Static caches in compiled code, dynamic ones in eager code"
    console.print(_steps_table(f"{beside}, {static['model']}", static["compiled"], COMPILING))
    generate = static["generate"]
    where = f"{generate['prompt']} tokens, {generate['reserve']} reserved, {generate['buckets']} buckets"
    console.print(calls_table(f"generate() after {where}, {static['model']}", generate["calls"]))


def _steps_table(title: str, lengths: dict[int, Any], more: Mapping[str, Figure] | None = None) -> Table:
    more = more or {}
    columns = ("reserved", "ms a step", "times as fast", "MB held", "logits\napart")
    table = new_table(title, "tokens, cache", *columns, *(figure.column for figure in more.values()))
    for length, measured in lengths.items():
        for name, entry in measured.items():
            table.add_row(
                f"{length:>6} {name.removesuffix(COMPILED)}",
                f"{entry.get('reserved', '')}",
                f"{entry['median'] * MILLI:.2f}",
                span(entry, "speed"),
                f"{entry['held'] / 1e6:.1f}",
                f"{entry['logit_distance']:.3f}",
                *(f"{entry[key]:.{figure.digits}f}" if key in entry else "" for key, figure in more.items()),
            )
        table.add_section()
    return table


def calls_table(title: str, calls: dict[str, Any]) -> Table:
    """A table of calls of `generate()`, with bytes if they were counted."""
    peaks = any("peak" in entry for entry in calls.values())
    columns = ("s a call", "tokens/s", "times as fast", *(["peak MB"] if peaks else []))
    table = new_table(title, "cache", *columns, "graphs", "first\ncall, s", "compiled\nlater")
    for name, entry in calls.items():
        table.add_row(
            name,
            f"{entry['median']:.3f}",
            f"{entry['new'] / entry['median']:.1f}",
            span(entry, "speed"),
            *([_megabytes(entry["peak"])] if peaks else []),
            f"{entry['graphs'] or ''}",
            f"{entry['first']:.3f}",
            f"{entry['recompiles'] if entry['graphs'] else ''}",
        )
    return table


def _megabytes(count: int | None) -> str:
    return "not measured" if count is None else f"{count / 1e6:.2f}"
