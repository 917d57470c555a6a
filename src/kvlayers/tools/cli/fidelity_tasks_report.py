"""The HTML report of `kvlayers fidelity --tasks`. It needs matplotlib."""

from collections.abc import Callable, Mapping

from kvlayers.tools.cli.fidelity_tasks_results import TaskResults
from kvlayers.tools.cli.fidelity_tasks_view import findings, label, listed, mean_and_loss, percent, points, title_of
from kvlayers.tools.measuring.contenders import Contender
from kvlayers.tools.reporting.heat_maps import Cells, heat_maps
from kvlayers.tools.reporting.page import Report, ReportPlot, ReportTable
from kvlayers.tools.tasks.contract import task_named
from kvlayers.tools.tasks.summary import TaskFigures
from kvlayers.utils.units import readable_bytes

NOTES = (
    "Score: the share of the expected strings that an answer contains, in percent. Each sample counts the same.",
    "Mean and loss leave out the tasks and lengths that the model is too weak for. Loss: the mean score of the exact "
    "cache less that of this cache, in percentage points; ±: its standard error over the samples.",
    "Log-prob.: the mean log-probability of a token of a right answer, in nats, over all samples. It falls before an "
    "answer turns wrong, while scores are all or nothing.",
    "Same: the share of the answers that are word for word those of the exact cache, in percent.",
    "A token: bytes per token of a cache of bfloat16 states that holds the longest sample and its answer, including "
    "scales and the tokens that stay in full precision.",
    "In a table of one length, the loss beside the exact cache stands in parentheses.",
)


def tasks_report(results: TaskResults, command: str) -> Report:
    """The report as a page."""
    read = "the context in one pass, with exact attention"
    if results.chunk is not None:
        read = f"{results.chunk} tokens at once, through every cache"
    if results.question_chunk is not None:
        read += f"; the question {results.question_chunk} at once"
    settings = {
        **results.run.settings,
        "Tasks": ", ".join(results.tasks),
        "Lengths": f"{listed(results.lengths)} tokens of context and question",
        "Depths": ", ".join(f"{100 * depth:.3g} %" for depth in results.depths),
        "Samples": f"{results.samples} per length and depth, seed {results.seed}",
        "Filler": results.text,
        "Read": read,
    }
    return Report(
        title=f"Long-context tasks for {results.run.model}",
        command=command,
        findings=findings(results),
        tables=[_overall_table(results), *(_length_table(results, length) for length in results.lengths)],
        plots=_plots(results),
        notes=NOTES,
        facts={**settings, **results.run.machine},
    )


def _overall_table(results: TaskResults) -> ReportTable:
    overall = {each.cache: each for each in results.summary.overall}
    by_task = {(each.cache, each.task): each for each in results.summary.by_task}
    within = [index for index, each in enumerate(results.contenders) if each in results.within]

    def row(contender: Contender) -> list[str]:
        figures, comparable = overall[contender.name], results.comparable.get(contender.name)
        taken = results.bytes_per_token(contender)
        return [
            label(results, contender),
            *(percent(by_task[contender.name, task].score) for task in results.tasks),
            *mean_and_loss(results, contender),
            "" if comparable is None or contender is results.exact else percent(comparable.loss_error),
            _nats(figures.logprob),
            percent(figures.same_answers),
            "" if taken is None else readable_bytes(taken),
        ]

    columns = ("Cache", *map(_title, results.tasks), "Mean", "Loss", "±", "Log-prob.", "Same", "A token")
    return ReportTable(title_of(results), columns, [row(each) for each in results.contenders], within)


def _length_table(results: TaskResults, length: int) -> ReportTable:
    found = {(each.cache, each.task): each for each in results.summary.by_length if each.length == length}

    def row(contender: Contender) -> list[str]:
        every = [found[contender.name, task] for task in results.tasks]
        return [
            label(results, contender),
            *(_score_and_loss(each, contender is results.exact) for each in every),
            *(_nats(each.logprob) for each in every),
        ]

    titles = [_title(task) for task in results.tasks]
    columns = ("Cache", *titles, *(f"{title}, log-prob." for title in titles))
    return ReportTable(f"{length:,} tokens", columns, [row(each) for each in results.contenders])


def _score_and_loss(figures: TaskFigures, is_exact: bool) -> str:
    score = percent(figures.score)
    return score if is_exact or figures.loss is None else f"{score} ({points(figures.loss)})"


def _plots(results: TaskResults) -> list[ReportPlot]:
    """Two figures for each task with depths: heat maps of the scores, and of the log-probabilities."""
    found = []
    for task in results.tasks:
        if any(each.task == task and each.depth is not None for each in results.summary.by_depth):
            logprobs = _maps(results, task, lambda figures: figures.logprob)
            every = [logprob for cells in logprobs.values() for logprob in cells.values()]
            title = f"{_title(task)}: score by length and depth"
            scores = _maps(results, task, lambda figures: figures.score)
            found.append(ReportPlot(title, heat_maps(f"{task}-score", title, scores, (0, 1))))
            title = f"{_title(task)}: mean log-probability of a right answer, in nats a token, by length and depth"
            found.append(ReportPlot(title, heat_maps(f"{task}-logprob", title, logprobs, (min(every), max(every)))))
    return found


def _maps(results: TaskResults, task: str, figure: Callable[[TaskFigures], float | None]) -> Mapping[str, Cells]:
    """For each cache, a figure of a task by length and depth."""
    maps: dict[str, dict[tuple[int, float], float]] = {label(results, each): {} for each in results.contenders}
    labels = {each.name: label(results, each) for each in results.contenders}
    for each in results.summary.by_depth:
        value = figure(each)
        if each.task == task and each.length is not None and each.depth is not None and value is not None:
            maps[labels[each.cache]][each.length, each.depth] = value
    return maps


def _title(task: str) -> str:
    found = task_named(task)
    return task if found is None else found.title


def _nats(logprob: float | None) -> str:
    return "" if logprob is None else f"{logprob:.2f}"
