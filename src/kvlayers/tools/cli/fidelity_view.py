"""How `kvlayers fidelity` shows what it has measured: a table on the console, and a report."""

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvlayers.tools.cli.fidelity_results import FidelityResults
from kvlayers.tools.cli.output import PASTE, pasted, plain
from kvlayers.tools.cli.reports import facts
from kvlayers.tools.measuring.fidelity import FULL, Fidelity
from kvlayers.tools.reporting.page import Report, ReportPlot, ReportTable
from kvlayers.utils.units import readable_bytes

COLUMNS = ("Setting", "KL", "KL, 99th", "Perplexity", "Increase", "Top-1", "A token", "Of full")
WITHIN = "Within"
ON_PAGES_ALONE = "KL, 99th"
"""A column for which consoles of 80 columns have no room."""
NOTES = (
    "KL: mean divergence of the distribution of the next token from that of the same model over transformers' "
    "DynamicCache in full precision, in nats. 99th: that of a token at the 99th percentile.",
    "Top-1: in which part of the tokens the likeliest next token is the same.",
    "A token: bytes of a token, scales and the newest tokens in full precision included, in a cache of bfloat16 states "
    "that holds a whole passage. The longer the context, the less those newest tokens count.",
    "k4v2: keys in 4 bits, values in 2.",
)


def show(console: Console, results: FidelityResults) -> None:
    """Print the table, and what came out."""
    drawn = Table(
        box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True, title=_title(results), title_justify="left"
    )
    shown = [column for column in _columns(results) if column != ON_PAGES_ALONE]
    for column in shown:
        drawn.add_column(column, justify="left" if column == COLUMNS[0] else "right", no_wrap=True)
    for each in results.settings:
        cells = dict(zip(_columns(results), _cells(results, each), strict=True))
        style = "bold" if each is results.recommended else None
        drawn.add_row(*(escape(cells[column]) for column in shown), style=style)
    console.print(drawn)
    for sentence in findings(results):
        # What is to be pasted stays in one piece.
        console.print(sentence, markup=False, highlight=False, soft_wrap=sentence.startswith(PASTE))


def findings(results: FidelityResults) -> list[str]:
    """What came out, a sentence each."""
    found = [f"{each.name} failed: {each.failure}" for each in results.settings if each.failure is not None]
    if results.budget.is_given:
        best = results.recommended
        found[:0] = [_verdict(results), *([] if best is None else [pasted(results.uses[best.name])])]
    if not any(each.kl for each in results.settings if each.name != FULL):
        found.append(
            "Nothing was rounded: the newest tokens, and windows, stay as they are. More --context may change that."
        )
    return found + [f"Not for this model: {name} ({reason})" for name, reason in results.left_out.items()]


def fidelity_report(results: FidelityResults, command: str) -> Report:
    """The page. Needs matplotlib."""
    from kvlayers.tools.reporting.plots import labelled_points

    drawn = "Divergence against bytes"
    points = {each.name: (each.bytes_per_token, each.kl) for each in results.settings if each.failure is None}
    svg = labelled_points("kl", drawn, "bytes a token", "mean KL divergence, nats", points)
    within = [index for index, each in enumerate(results.settings) if each.within]
    settings = {
        "Model": results.model,
        "Text": results.text,
        "Read": f"{_title(results)}, {results.chunk} tokens at once",
        "Dtype": str(plain(results.dtype)),
        "Device": str(results.device),
    }
    return Report(
        title=f"Fidelity of quantized caches for {results.model}",
        command=command,
        findings=findings(results),
        tables=[
            ReportTable(
                _title(results), _columns(results), [_cells(results, each) for each in results.settings], within
            )
        ],
        plots=[ReportPlot(drawn, svg)],
        notes=NOTES,
        facts={**settings, **facts(results.environment)},
    )


def _title(results: FidelityResults) -> str:
    passages = "1 passage" if results.passages == 1 else f"{results.passages} passages"
    return f"{passages} of {results.context} tokens of context and {results.scored} scored"


def _columns(results: FidelityResults) -> tuple[str, ...]:
    return (*COLUMNS, WITHIN) if results.budget.is_given else COLUMNS


def _cells(results: FidelityResults, measured: Fidelity) -> list[str]:
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
        *([] if budget.max_kl is None else [f"a divergence of {budget.max_kl:g}"]),
        *([] if budget.max_perplexity_increase is None else [f"{budget.max_perplexity_increase:g} % more perplexity"]),
    ]
    if best is None:
        return f"No setting is within {' and '.join(limits)}: keep full precision, or allow more."
    within = ", ".join(each.name for each in results.settings if each.within)
    return (
        f"Within {' and '.join(limits)}: {within}. The smallest is {best.name}, with "
        f"{readable_bytes(best.bytes_per_token)} a token, {best.of_full:.2f} of full precision."
    )
