"""The result of one sample of a task with one cache."""

from dataclasses import dataclass


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
    depth: float | None
    index: int
    score: float | None
    logprob: float | None
    answer: str
    failure: str | None = None
