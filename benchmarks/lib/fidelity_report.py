"""Summaries of the fidelity measurements: ratios, targets, tables and a plot."""

import math
import pathlib
from typing import Any

from rich.console import Console
from rich.table import Table

from lib.quantized import REFERENCE, Contender

BASELINES = ("quanto", "hqq")
KVLAYERS = "native"


def entry_of(measured: dict[str, Any], kind: str, library: str, backend: str, bits: int) -> dict[str, Any] | None:
    """The figures of one contender; `None` if it did not run or failed."""
    entry = measured.get(kind, {}).get(Contender(library, backend, bits).name)
    return None if entry is None or "failure" in entry else entry


def better_baseline(measured: dict[str, Any], kind: str, bits: int) -> dict[str, Any] | None:
    """The figures of transformers' quanto or hqq, whichever diverges less; `None` if neither ran."""
    entries = [entry_of(measured, kind, "transformers", backend, bits) for backend in BASELINES]
    # Comparisons with a divergence of nan are always false.
    finite = [entry for entry in entries if entry is not None and math.isfinite(entry["kl"])]
    return min(finite, key=lambda entry: entry["kl"], default=None)


def promises(measured: dict[str, Any]) -> list[dict[str, Any]]:
    """The project's targets for these figures: target, measurement, and whether it is met."""
    found: list[dict[str, Any]] = []

    def promise(what: str, value: float, at_least: float | None = None, at_most: float | None = None) -> None:
        met = (at_least is None or value >= at_least) and (at_most is None or value <= at_most)
        asked = f">= {at_least}" if at_least is not None else f"<= {at_most}"
        found.append({"what": f"{measured['model']}, {what}", "asked": asked, "value": value, "met": met})

    for bits, at_most in ((4, 1 / 10), (2, 1 / 40)):
        candidate, baseline = (
            entry_of(measured, "plain", "kvlayers", KVLAYERS, bits),
            better_baseline(measured, "plain", bits),
        )
        if candidate is None or baseline is None:
            continue
        promise(
            f"{bits} bits, divergence relative to the better of transformers'",
            candidate["kl"] / baseline["kl"],
            at_most=at_most,
        )
        held = [
            measured["bytes"][entry.name]["bytes"]
            for entry in (Contender("transformers", backend, bits) for backend in BASELINES)
            if entry.name in measured["bytes"]
        ]
        candidate_bytes = measured["bytes"][Contender("kvlayers", KVLAYERS, bits).name]["bytes"]
        promise(f"{bits} bits, bytes relative to transformers' smallest", candidate_bytes / min(held), at_most=1)
    candidate, baseline = entry_of(measured, "plain", "kvlayers", KVLAYERS, 2), better_baseline(measured, "plain", 4)
    if candidate is not None and baseline is not None:
        promise(
            "2 bits, divergence relative to the better of transformers' at 4 bits",
            candidate["kl"] / baseline["kl"],
            at_most=1,
        )
    candidate, plain = (entry_of(measured, kind, "kvlayers", KVLAYERS, 4) for kind in ("outliers", "plain"))
    if candidate is not None and plain is not None:
        promise("4 bits, divergence with outliers relative to without", candidate["kl"] / plain["kl"], at_most=2)
    candidate = entry_of(measured, "plain", "kvlayers", KVLAYERS, 8)
    if candidate is not None:
        promise("8 bits, agreement of the most likely token", candidate["agreement"], at_least=0.995)
    return found


def show(console: Console, measured: dict[str, Any]) -> None:
    """Print the tables of one model, with notes."""
    console.print(_table(measured, "plain", measured["model"]))
    if "outliers" in measured:
        before, after = (measured[kind][REFERENCE.name]["perplexity"] for kind in ("plain", "outliers"))
        title = (
            f"{measured['model']} with outliers in its keys (in full precision: {before:.3f} before, {after:.3f} with)"
        )
        console.print(_table(measured, "outliers", title))
    failures = [
        f"{name} failed: {entry['failure']}"
        for kind in ("plain", "outliers")
        for name, entry in measured.get(kind, {}).items()
        if "failure" in entry
    ]
    for line in dict.fromkeys([*failures, *measured["notes"]]):
        console.print(line, markup=False)


def _table(measured: dict[str, Any], kind: str, title: str) -> Table:
    table = Table(title=title, title_justify="left")
    columns = ("KL", "99th", "over better", "perplexity", "agreement", "bytes/token", "of dense", "seconds")
    for index, column in enumerate(("cache", *columns)):
        table.add_column(column, justify="left" if index == 0 else "right", overflow="fold")
    dense = measured["bytes"][REFERENCE.name]["bytes"]
    bits: int | None = None
    for name, entry in measured[kind].items():
        if entry["bits"] != bits:
            table.add_section()
            bits = entry["bits"]
        if "failure" in entry:
            continue
        baseline = None if bits is None else better_baseline(measured, kind, bits)
        held = measured["bytes"][name]["bytes"]
        table.add_row(
            name,
            f"{entry['kl']:.3g}",
            f"{entry['kl_99']:.3g}",
            f"{entry['kl'] / baseline['kl']:.4f}" if baseline else "",
            f"{entry['perplexity']:.3f}",
            f"{entry['agreement']:.2%}",
            f"{held:,.0f}",
            f"{held / dense:.4f}",
            f"{entry['seconds']:.0f}",
        )
    return table


def plot(console: Console, results: list[dict[str, Any]], path: pathlib.Path) -> None:
    """Draw divergence against bytes per token, or print that matplotlib is missing."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        console.print("no plot: it needs matplotlib, which is not installed")
        return
    panels = [(measured, kind) for measured in results for kind in ("plain", "outliers") if kind in measured]
    figure = Figure(figsize=(6 * len(panels), 4.5), layout="constrained")
    for axes, (measured, kind) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        lines: dict[str, list[tuple[float, float]]] = {}
        for name, entry in measured[kind].items():
            if entry["bits"] is not None and entry.get("kl", 0) > 0:
                point = measured["bytes"][name]["bytes"], entry["kl"]
                lines.setdefault(f"{entry['library']} {entry['backend']}", []).append(point)
        for label, points in lines.items():
            axes.plot(*zip(*sorted(points), strict=True), marker="o", label=label)
        axes.set(yscale="log", xlabel="bytes per token", ylabel="mean KL divergence")
        axes.set_title(measured["model"] + (" with outliers" if kind == "outliers" else ""))
        axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    console.print(f"plotted to {path}")
