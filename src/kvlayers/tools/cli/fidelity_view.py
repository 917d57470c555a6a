"""How `kvlayers fidelity` shows its measurements: a table on the console, and a report."""

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvlayers.tools.cli.fidelity_results import FidelityResults
from kvlayers.tools.cli.output import USAGE_PREFIX, usage_line
from kvlayers.tools.measuring.fidelity import FULL, SettingFidelity
from kvlayers.tools.reporting.page import Report, ReportPlot, ReportTable
from kvlayers.utils.units import readable_bytes

COLUMNS = ("Setting", "KL", "KL, 99th", "Perplexity", "Increase", "Top-1", "A token", "Of full")
WITHIN = "Within"
REPORT_ONLY = "KL, 99th"
"""A column that only the report shows: consoles of 80 columns have no room for it."""
NOTES = (
    "KL: mean KL divergence of the next-token distribution from that of the same model over transformers' DynamicCache "
    "in full precision, in nats. 99th: the 99th percentile over the tokens.",
    "Top-1: the share of tokens whose likeliest next token is the same.",
    "A token: bytes per token of a cache of bfloat16 states that holds a whole passage, including scales and the "
    "newest tokens, which stay in full precision. The longer the context, the less those newest tokens count.",
    "k4v2: 4 bits for keys, 2 for values.",
)


def show(console: Console, results: FidelityResults) -> None:
    """Print the table, and the findings."""
    table = Table(
        box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True, title=_title(results), title_justify="left"
    )
    shown = [column for column in _columns(results) if column != REPORT_ONLY]
    for column in shown:
        table.add_column(column, justify="left" if column == COLUMNS[0] else "right", no_wrap=True)
    for each in results.settings:
        cells = dict(zip(_columns(results), _cells(results, each), strict=True))
        style = "bold" if each is results.recommended else None
        table.add_row(*(escape(cells[column]) for column in shown), style=style)
    console.print(table)
    for sentence in findings(results):
        # A line to paste must not be wrapped.
        console.print(sentence, markup=False, highlight=False, soft_wrap=sentence.startswith(USAGE_PREFIX))


def findings(results: FidelityResults) -> list[str]:
    """The findings, one sentence each."""
    found = [f"{each.name} failed: {each.failure}" for each in results.settings if each.failure is not None]
    if results.budget.is_given:
        best = results.recommended
        found[:0] = [_verdict(results), *([] if best is None else [usage_line(results.uses[best.name])])]
    if not any(each.kl for each in results.settings if each.name != FULL):
        found.append(
            "Nothing was rounded: the newest tokens, and windows, stay in full precision. A longer --context may "
            "change that."
        )
    return found + [f"Not for this model: {name} ({reason})" for name, reason in results.left_out.items()]


def fidelity_report(results: FidelityResults, command: str) -> Report:
    """The report as a page. It needs matplotlib."""
    from kvlayers.tools.reporting.plots import labelled_points

    title = "KL divergence against bytes"
    points = {each.name: (each.bytes_per_token, each.kl) for each in results.settings if each.failure is None}
    svg = labelled_points("kl", title, "bytes a token", "mean KL divergence, nats", points)
    within = [index for index, each in enumerate(results.settings) if each.within]
    settings = {
        **results.run.settings,
        "Text": results.text,
        "Read": f"{_title(results)}, {results.chunk} tokens at once",
    }
    return Report(
        title=f"Fidelity of quantized caches for {results.run.model}",
        command=command,
        findings=findings(results),
        tables=[
            ReportTable(
                _title(results), _columns(results), [_cells(results, each) for each in results.settings], within
            )
        ],
        plots=[ReportPlot(title, svg)],
        notes=NOTES,
        facts={**settings, **results.run.machine},
    )


def _title(results: FidelityResults) -> str:
    passages = "1 passage" if results.passages == 1 else f"{results.passages} passages"
    return f"{passages} of {results.context} tokens of context and {results.scored} scored tokens"


def _columns(results: FidelityResults) -> tuple[str, ...]:
    return (*COLUMNS, WITHIN) if results.budget.is_given else COLUMNS


def _cells(results: FidelityResults, measured: SettingFidelity) -> list[str]:
    verdict = [] if not results.budget.is_given else ["" if measured.within is None else ("no", "yes")[measured.within]]
    held = [readable_bytes(measured.bytes_per_token), f"{measured.of_full:.3f}"]
    if measured.failure is not None:
        return [measured.name, "failed", "", "", "", "", *held, *verdict]
    if measured.name == FULL:
        return [measured.name, "0", "0", f"{measured.perplexity:#.5g}", "", "", *held, *verdict]
    return [
        measured.name,
        f"{measured.kl:.2g}",
        f"{measured.kl_99:.2g}",
        f"{measured.perplexity:#.5g}",
        f"{measured.perplexity_increase:+.2f} %",
        f"{measured.agreement:.1%}",
        *held,
        *verdict,
    ]


def _verdict(results: FidelityResults) -> str:
    budget, best = results.budget, results.recommended
    limits = [
        *([] if budget.max_kl is None else [f"a KL divergence of {budget.max_kl:g}"]),
        *([] if budget.max_perplexity_increase is None else [f"{budget.max_perplexity_increase:g} % more perplexity"]),
    ]
    if best is None:
        return f"No setting is within {' and '.join(limits)}: keep full precision, or allow more."
    within = ", ".join(each.name for each in results.settings if each.within)
    return (
        f"Within {' and '.join(limits)}: {within}. The smallest is {best.name}, with "
        f"{readable_bytes(best.bytes_per_token)} a token, {best.of_full:.2f} of full precision."
    )
