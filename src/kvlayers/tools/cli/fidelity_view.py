"""How `kvlayers fidelity` shows its measurements: a table on the console, and a report."""

import math

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvlayers.tools.cli.fidelity_results import FidelityResults, limit_text
from kvlayers.tools.cli.output import USAGE_PREFIX, usage_line
from kvlayers.tools.measuring.fidelity import FULL, SettingFidelity
from kvlayers.tools.reporting.page import Report, ReportTable
from kvlayers.utils.units import readable_bytes

COLUMNS = (
    "Setting",
    "KL",
    "KL, 99th",
    "KL, first to last quarter",
    "Perplexity",
    "Increase",
    "Top-1",
    "A token",
    "Of full",
)
WITHIN = "Within"
REPORT_ONLY = ("KL, 99th", "KL, first to last quarter")
"""Columns that only the report shows: consoles of 80 columns have no room for them."""
NOTES = (
    "KL: mean KL divergence of the next-token distribution from that of the same model over transformers' DynamicCache "
    "in full precision, in nats. 99th: the 99th percentile over the tokens.",
    "Top-1: the share of tokens whose likeliest next token is the same.",
    "A token: bytes per token of a cache of bfloat16 states that holds a whole passage, including scales and the "
    "newest tokens, which stay in full precision. The longer the context, the less those newest tokens count.",
    "First to last quarter: mean KL divergence of the first and of the last quarter of the scored tokens.",
    "By position: position 0 is the first token of a passage. Each point is the mean over a range of tokens.",
    "Since the last packing or eviction: a cache packs and evicts at the end of a forward pass, so that the next token "
    "is the first one that attends to less. No curve: the cache did neither, or does not say when.",
    "The passages are spread evenly over the text; nothing is chosen at random.",
    "k4v2: 4 bits for keys, 2 for values.",
)


def show(console: Console, results: FidelityResults) -> None:
    """Print the table, and the findings."""
    table = Table(
        box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True, title=_title(results), title_justify="left"
    )
    shown = [column for column in _columns(results) if column not in REPORT_ONLY]
    # Long names are folded, and figures are never cut.
    table.add_column(shown[0], overflow="fold")
    for column in shown[1:]:
        table.add_column(column, justify="right", no_wrap=True)
    for each in results.settings:
        cells = dict(zip(_columns(results), _cells(results, each), strict=True))
        style = "bold" if each is results.recommended else None
        table.add_row(*(escape(cells[column]) for column in shown), style=style)
    answer = _verdict(results)
    console.print(answer, markup=False, highlight=False)
    console.print(table)
    for sentence in findings(results):
        if sentence != answer:
            # A line to paste must not be wrapped.
            console.print(sentence, markup=False, highlight=False, soft_wrap=sentence.startswith(USAGE_PREFIX))


def findings(results: FidelityResults) -> list[str]:
    """The findings, one sentence each, the answer first."""
    found = [_verdict(results), *_usage(results)]
    found += [f"{each.name} failed: {each.failure}" for each in results.settings if each.failure is not None]
    if not any(each.kl for each in results.settings if each.name != FULL):
        found.append(
            "Nothing was rounded: the newest tokens, and windows, stay in full precision. A longer --context may "
            "change that."
        )
    heads = ((each.name, each.uneven_head) for each in results.settings)
    found += [f"Warning: {name}: {head.sentence}." for name, head in heads if head is not None]
    found += _growth(results)
    return found + [f"Not for this model: {name} ({reason})" for name, reason in results.left_out.items()]


def fidelity_report(results: FidelityResults, command: str) -> Report:
    """The report as a page. It needs matplotlib."""
    from kvlayers.tools.cli.fidelity_plots import fidelity_plots

    within = [index for index, each in enumerate(results.settings) if each.within]
    settings = {
        **results.run.settings,
        "Text": results.text,
        "Tokens at once": str(results.chunk),
    }
    return Report(
        title=f"Fidelity of caches for {results.run.model}",
        command=command,
        findings=findings(results),
        tables=[
            ReportTable(
                _title(results), _columns(results), [_cells(results, each) for each in results.settings], within
            )
        ],
        plots=fidelity_plots(results.settings),
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
    per_token, of_full = measured.bytes_per_token, measured.of_full
    held = ["" if per_token is None else readable_bytes(per_token), "" if of_full is None else f"{of_full:.3f}"]
    if measured.failure is not None:
        return [measured.name, "failed", "", "", "", "", "", *held, *verdict]
    if measured.name == FULL:
        return [measured.name, "0", "0", "", f"{measured.perplexity:#.5g}", "", "", *held, *verdict]
    quarters = "" if measured.drift is None else f"{measured.drift.first.kl:.2g} to {measured.drift.last.kl:.2g}"
    return [
        measured.name,
        f"{measured.kl:.2g}",
        f"{measured.kl_99:.2g}",
        quarters,
        f"{measured.perplexity:#.5g}",
        f"{measured.perplexity_increase:+.{2 if abs(measured.perplexity_increase) < 100 else 0}f} %",
        f"{measured.agreement:.1%}",
        *held,
        *verdict,
    ]


def _verdict(results: FidelityResults) -> str:
    """The answer in one sentence: the best cache within the budget; without one, the best within half the bytes."""
    budget, best = results.budget, results.recommended
    if not budget.is_given:
        return _best_in_half(results)
    limits = [
        *([] if budget.max_bytes is None else [f"{limit_text(budget.max_bytes)} of memory"]),
        *([] if budget.max_kl is None else [f"a KL divergence of {budget.max_kl:g}"]),
        *([] if budget.max_perplexity_increase is None else [f"{budget.max_perplexity_increase:g} % more perplexity"]),
    ]
    if best is None:
        return f"No setting is within {' and '.join(limits)}: keep full precision, or allow more."
    how = "The smallest is" if budget.max_bytes is None else "Least is lost with"
    within = ", ".join(each.name for each in results.settings if each.within)
    return f"Within {' and '.join(limits)}: {within}. {how} {_described(best)}."


def _best_in_half(results: FidelityResults) -> str:
    small = (each for each in results.settings if each.of_full is not None and each.of_full <= 0.5)
    best = min((each for each in small if math.isfinite(each.kl)), key=lambda each: each.kl, default=None)
    if best is None:
        return "No measured setting takes half the memory of full precision or less."
    return f"In half the memory of full precision, least is lost with {_described(best)}."


def _described(best: SettingFidelity) -> str:
    size = (
        "whose bytes are not known"
        if best.bytes_per_token is None
        else f"with {readable_bytes(best.bytes_per_token)} a token, {best.of_full:.2f} of full precision"
    )
    return f"{best.name}, {size}; its KL is {best.kl:.2g}, and {best.agreement:.1%} of the top tokens are the same"


def _usage(results: FidelityResults) -> list[str]:
    """The line of code that asks for the best cache within the budget, if there is one."""
    best = results.recommended
    return [] if best is None or best.name not in results.uses else [usage_line(results.uses[best.name])]


def _growth(results: FidelityResults) -> list[str]:
    """A sentence about the caches whose KL divergence grows along the scored tokens, if there are any."""
    growing = [(each.name, each.drift) for each in results.settings if each.drift is not None and each.drift.grows]
    if not growing:
        return []
    first, last = growing[0][1].first, growing[0][1].last
    figures = ", ".join(
        f"{name} from {drift.first.kl:.2g} to {drift.last.kl:.2g} (in {drift.growing_passages} of {drift.passages} "
        "passages)"
        for name, drift in growing
    )
    return [
        f"KL grows between tokens {first.start:,} to {first.stop - 1:,} and tokens {last.start:,} to "
        f"{last.stop - 1:,}: {figures}."
    ]
