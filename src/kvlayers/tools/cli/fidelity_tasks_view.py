"""How `kvlayers fidelity --tasks` shows its scores: a table and findings on the console."""

from collections.abc import Mapping, Sequence

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvlayers.tools.cli.fidelity_tasks_results import TaskResults
from kvlayers.tools.cli.output import USAGE_PREFIX, usage_line
from kvlayers.tools.measuring.contenders import Contender
from kvlayers.utils.units import readable_bytes


def show(console: Console, results: TaskResults) -> None:
    """Print the table, and the findings."""
    # A title of the table would be wrapped to its width, which is small if there is one task.
    console.print(title_of(results), style="italic", markup=False, highlight=False)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    columns = ("Cache", *results.tasks, "Mean", "Loss")
    for column in columns:
        table.add_column(escape(column), justify="left" if column == columns[0] else "right", no_wrap=True)
    by_task = {(each.cache, each.task): each for each in results.summary.by_task}
    for each in results.contenders:
        scores = [percent(by_task[each.name, task].score) for task in results.tasks]
        cells = [label(results, each), *scores, *mean_and_loss(results, each)]
        table.add_row(*map(escape, cells), style="bold" if each in results.within else None)
    console.print(table)
    for sentence in findings(results):
        # A line to paste must not be wrapped.
        console.print(sentence, markup=False, highlight=False, soft_wrap=sentence.startswith(USAGE_PREFIX))


def findings(results: TaskResults) -> list[str]:
    """The findings, one sentence each."""
    found = [] if results.budget is None else _verdict(results, results.budget)
    for task, lengths in _too_weak(results).items():
        found.append(
            f"The model is too weak for {task} at {listed(lengths)} tokens: even with the exact cache, it scores less "
            f"than {results.summary.too_weak_below:.0%}. Mean and loss leave these samples out."
        )
    for each in results.contenders:
        if each.name in results.failures:
            failed = sum(one.cache == each.name and one.failure is not None for one in results.outcomes)
            found.append(f"{each.short_name} failed at {counted(failed, 'sample')}: {results.failures[each.name]}")
    if results.resumption is not None and results.resumption.known:
        known, wanted = results.resumption.known, counted(results.resumption.wanted, "answer")
        found.append(f"{known} of {wanted} were in {results.resumption.path} before.")
    return found + [f"Not for this model: {name} ({reason})" for name, reason in results.left_out.items()]


def _verdict(results: TaskResults, budget: float) -> list[str]:
    if not results.comparable:
        return [
            "The model is too weak for all of these tasks, so the budget cannot be judged: choose easier tasks, "
            "shorter lengths or a larger model."
        ]
    limit, best = f"a loss of {budget:g} percentage point{'' if budget == 1 else 's'}", results.recommended
    if best is None:
        return [f"No cache is within {limit}: keep the exact cache, or allow more."]
    within = f"Within {limit}: {', '.join(each.short_name for each in results.within)}."
    taken, exact = results.bytes_per_token(best), results.bytes_per_token(results.exact)
    if taken is not None and exact is not None:
        within += (
            f" The smallest is {best.short_name}, with {readable_bytes(taken)} a token, {taken / exact:.2f} of the "
            "exact cache."
        )
    use = results.uses.get(best.short_name)
    return [within, *([] if use is None else [usage_line(use)])]


def _too_weak(results: TaskResults) -> Mapping[str, list[int]]:
    """The lengths at which the model is too weak, by task."""
    found: dict[str, list[int]] = {}
    for task, length in results.summary.too_weak:
        found.setdefault(task, []).append(length)
    return found


def title_of(results: TaskResults) -> str:
    """What the figures are, in a few words."""
    return f"Scores in percent at {listed(results.lengths)} tokens"


def label(results: TaskResults, contender: Contender) -> str:
    """The name of a cache in tables and plots."""
    return f"{contender.short_name} (exact)" if contender is results.exact else contender.short_name


def mean_and_loss(results: TaskResults, contender: Contender) -> tuple[str, str]:
    """The mean score of a cache, and what it lost; empty if the model is too weak for all tasks."""
    figures = results.comparable.get(contender.name)
    if figures is None:
        return "", ""
    return percent(figures.score), "" if contender is results.exact else points(figures.loss)


def percent(share: float | None) -> str:
    """A share from 0 to 1 in percent, empty for `None`."""
    return "" if share is None else f"{100 * share:.1f}"


def points(loss: float | None) -> str:
    """A loss from -1 to 1 in percentage points, empty for `None`."""
    return "" if loss is None else f"{100 * loss:.1f}"


def counted(count: int, noun: str) -> str:
    """A number of things.

    Example:
        >>> counted(1, "sample"), counted(2048, "answer")
        ('1 sample', '2,048 answers')
    """
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def listed(numbers: Sequence[int]) -> str:
    """Numbers in a sentence.

    Example:
        >>> listed([512]), listed([512, 1024, 2048])
        ('512', '512, 1,024 and 2,048')
    """
    *others, last = (f"{number:,}" for number in numbers)
    return f"{', '.join(others)} and {last}" if others else last
