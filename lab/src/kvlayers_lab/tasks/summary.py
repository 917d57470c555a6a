"""What caches do to the scores of tasks: means, and the loss against the exact cache."""

import dataclasses
import statistics
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec

Share = Annotated[float, msgspec.Meta(ge=0, le=1)]


@dataclass(frozen=True)
class TaskOutcome:
    """The answer to one sample through one cache.

    Attributes:
        cache: name of the cache, with its library: `Contender.name`.
        task: name of the task.
        length: tokens of context and question together.
        depth: where the answer stands, from 0 to 1; `None` if the task has no depth.
        index: number of the sample among those with the same task, length and depth.
        score: share of the expected strings that the answer contains, from 0 to 1; `None` after a failure.
        logprob: mean log-probability of the tokens of a right answer, in nats; `None` after a failure.
        answer: the text that the model generated.
        failure: the error that ended this sample, `None` if there was none.
    """

    cache: str
    task: str
    length: int
    depth: Share | None
    index: int
    score: Share | None
    logprob: float | None
    answer: str
    failure: str | None = None


TOO_WEAK_BELOW = 0.25
"""Mean score of the exact cache below which a task at a length says nothing about caches."""


@dataclass(frozen=True)
class TaskFigures:
    """Means over the samples of a group with one cache. Each sample counts the same.

    Loss and share are over the samples that both the cache and the exact cache have answered.

    Attributes:
        cache: name of the cache.
        task: name of the task, `None` for a group of several.
        length: tokens of context and question together, `None` for all lengths.
        depth: where the answers stand, from 0 to 1; `None` for all depths, or for a task without depths.
        samples: samples that were answered.
        failed: samples at which the cache failed.
        score: mean score, from 0 to 1; `None` if no sample was answered.
        logprob: mean log-probability of a token of a right answer, in nats; `None` if no sample was answered.
        loss: mean score of the exact cache, less that of this cache; `None` if there is no pair of answers.
        loss_error: standard error of `loss`, from the differences of pairs; `None` for fewer than two pairs.
        same_answers: share of the answers that are equal to those with the exact cache; `None` if there is no pair.
    """

    cache: str
    task: str | None
    length: int | None
    depth: float | None
    samples: int
    failed: int
    score: float | None
    logprob: float | None
    loss: float | None
    loss_error: float | None
    same_answers: float | None


@dataclass(frozen=True)
class TaskSummary:
    """Figures of every cache, in the order in which caches, tasks, lengths and depths first came.

    Attributes:
        reference: name of the exact cache.
        too_weak_below: mean score of the exact cache below which a task at a length is too weak to compare caches by.
        too_weak: tasks and lengths that are too weak.
        overall: figures of each cache.
        comparable: figures of each cache over the tasks and lengths that are not too weak. A loss stands out here, and
            is not thinned by samples that no cache can answer.
        by_task: figures of each cache and task.
        by_length: figures of each cache, task and length.
        by_depth: figures of each cache, task, length and depth.
    """

    reference: str
    too_weak_below: float
    too_weak: tuple[tuple[str, int], ...]
    overall: tuple[TaskFigures, ...]
    comparable: tuple[TaskFigures, ...]
    by_task: tuple[TaskFigures, ...]
    by_length: tuple[TaskFigures, ...]
    by_depth: tuple[TaskFigures, ...]

    def plain(self) -> dict[str, Any]:
        """The summary as JSON types."""
        return dataclasses.asdict(self)


Place = tuple[str | None, int | None, float | None]
"""Task, length and depth of a group."""


def summarize(outcomes: Iterable[TaskOutcome], reference: str, too_weak_below: float = TOO_WEAK_BELOW) -> TaskSummary:
    """Summarize outcomes.

    Args:
        outcomes: what `run_tasks` returned.
        reference: name of the exact cache.
        too_weak_below: see `TaskSummary`.
    """
    every = list(outcomes)
    exact = {_sample_key(each): each for each in every if each.cache == reference}

    def figures(chosen: Iterable[TaskOutcome], place: Callable[[TaskOutcome], Place]) -> tuple[TaskFigures, ...]:
        groups: dict[tuple[str, Place], list[TaskOutcome]] = {}
        for each in chosen:
            groups.setdefault((each.cache, place(each)), []).append(each)
        return tuple(_figures(cache, where, group, exact) for (cache, where), group in groups.items())

    exact_scores: dict[tuple[str, int], list[float]] = {}
    for each in exact.values():
        exact_scores.setdefault((each.task, each.length), []).append(each.score or 0.0)
    too_weak = tuple(group for group, scores in exact_scores.items() if statistics.fmean(scores) < too_weak_below)
    comparable = [each for each in every if (each.task, each.length) not in too_weak]
    return TaskSummary(
        reference=reference,
        too_weak_below=too_weak_below,
        too_weak=too_weak,
        overall=figures(every, lambda each: (None, None, None)),
        comparable=figures(comparable, lambda each: (None, None, None)),
        by_task=figures(every, lambda each: (each.task, None, None)),
        by_length=figures(every, lambda each: (each.task, each.length, None)),
        by_depth=figures(every, lambda each: (each.task, each.length, each.depth)),
    )


def _figures(
    cache: str, place: Place, group: Sequence[TaskOutcome], exact: Mapping[Hashable, TaskOutcome]
) -> TaskFigures:
    task, length, depth = place
    scores = [each.score for each in group if each.score is not None]
    pairs = [(exact[_sample_key(each)], each) for each in group if _sample_key(each) in exact]
    losses = [
        before.score - after.score for before, after in pairs if before.score is not None and after.score is not None
    ]
    same = [before.answer == after.answer for before, after in pairs if after.failure is None]
    return TaskFigures(
        cache=cache,
        task=task,
        length=length,
        depth=depth,
        samples=len(scores),
        failed=len(group) - len(scores),
        score=_mean(scores),
        logprob=_mean([each.logprob for each in group if each.logprob is not None]),
        loss=_mean(losses),
        loss_error=statistics.stdev(losses) / len(losses) ** 0.5 if len(losses) > 1 else None,
        same_answers=_mean(same),
    )


def _mean(figures: Sequence[float]) -> float | None:
    return statistics.fmean(figures) if figures else None


def _sample_key(outcome: TaskOutcome) -> Hashable:
    return outcome.task, outcome.length, outcome.depth, outcome.index
