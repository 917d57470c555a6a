"""Gives samples of tasks to a model, through several caches."""

import math
from collections.abc import Sequence
from typing import Any

import torch

from kvlayers.errors import CapacityError, KVLayersError, OptionError
from kvlayers.tools.measuring.contenders import Contender
from kvlayers.tools.tasks.answer_score import answer_score
from kvlayers.tools.tasks.answering import answer
from kvlayers.tools.tasks.contract import TaskSample, Tick
from kvlayers.tools.tasks.outcome import TaskOutcome
from kvlayers.tools.tasks.results_file import ResultsFile
from kvlayers.tools.tasks.sample_reader import SampleReader


class TaskError(KVLayersError, RuntimeError):
    """The model cannot answer a sample even with the exact cache."""


def run_tasks(
    model: Any,
    tokenizer: Any,
    samples: Sequence[TaskSample],
    contenders: Sequence[Contender],
    chunk: int | None,
    done: ResultsFile | None,
    tick: Tick,
    question_chunk: int | None = None,
) -> list[TaskOutcome]:
    """Let a model answer samples through every cache.

    For each sample, a cache first takes in the context, then the question, then the tokens of the answer one by one. A
    cache that raises an error fails at this sample. If it lacks room, it also fails at every longer sample.

    Args:
        model: a causal language model in eval mode.
        tokenizer: its tokenizer.
        samples: the samples.
        contenders: the caches, the exact one first, each with a name of its own.
        chunk: tokens of a forward pass while context and question are read, so that the cache takes part in reading
            them; `None` to read each in one pass.
        done: file of results. Outcomes in it are not computed again, and new ones are added to it as they come.
            Failures in it are tried again.
        tick: called before each sample with each cache.
        question_chunk: tokens of a forward pass while the question is read, if other than `chunk`. With 1, the question
            is read as answers are, so that caches in which only single queries leave tokens out take part.

    Returns:
        One outcome for each sample and cache, in the order of the samples, and for each sample in the order of
        the caches.

    Raises:
        OptionError: `chunk` or `question_chunk` is not positive, or two caches have one name.
        TaskError: the first cache fails.
        ResultsFileError: the file cannot be written.
    """
    for name, size in (("chunk", chunk), ("question_chunk", question_chunk)):
        if size is not None and size < 1:
            raise OptionError(f"`{name}` must be at least 1 token, got {size}.")
    names = [contender.name for contender in contenders]
    if len(set(names)) != len(names):
        raise OptionError(f"`contenders` must have a name each, got {', '.join(names)}: leave out duplicates.")
    run = _Run(model, tokenizer, chunk, reference=names[0])
    outcomes = []
    for sample in samples:
        reader = SampleReader(model, sample, chunk, question_chunk)
        for contender in contenders:
            tick(f"{sample.task}, {sample.length} tokens: {contender.name}")
            outcome = None if done is None else done.outcome(contender.name, sample)
            if outcome is None:
                outcome = run.outcome(reader, contender)
                if done is not None:
                    done.add(outcome)
            outcomes.append(outcome)
    return outcomes


class _Run:
    """Computes outcomes, and remembers which caches lack room.

    Args:
        model: a causal language model in eval mode.
        tokenizer: its tokenizer.
        chunk: tokens of a forward pass.
        reference: name of the exact cache.
    """

    def __init__(self, model: Any, tokenizer: Any, chunk: int | None, reference: str) -> None:
        self.model, self.tokenizer, self.chunk, self.reference = model, tokenizer, chunk, reference
        self._full: dict[str, tuple[int, str]] = {}
        """For each cache that lacked room, the length of the sample, and the error."""

    def outcome(self, reader: SampleReader, contender: Contender) -> TaskOutcome:
        """The outcome of one sample with one cache."""
        sample = reader.sample
        if contender.name in self._full:
            length, failure = self._full[contender.name]
            if sample.length > length:
                return _outcome(contender, sample, failure=failure)
        try:
            answered = answer(self.tokenizer, sample, lambda: reader.read(contender.make))
            if not math.isfinite(answered.logprob):
                raise FloatingPointError(f"the mean log-probability of a right answer is {answered.logprob}")
        except Exception as error:
            failure = " ".join(f"{type(error).__name__}: {error}".split())
            if contender.name == self.reference:
                raise TaskError(
                    f"The model cannot answer the task {sample.task} of {sample.length} tokens with the exact cache "
                    f"({failure.rstrip('.')}): check the model, or ask for shorter lengths."
                ) from error
            if isinstance(error, CapacityError | torch.OutOfMemoryError):
                self._full[contender.name] = sample.length, failure
            return _outcome(contender, sample, failure=failure)
        score = answer_score(answered.text, sample.answers)
        return _outcome(contender, sample, score, answered.logprob, answered.text)


def _outcome(
    contender: Contender,
    sample: TaskSample,
    score: float | None = None,
    logprob: float | None = None,
    answer: str = "",
    failure: str | None = None,
) -> TaskOutcome:
    return TaskOutcome(
        cache=contender.name,
        task=sample.task,
        length=sample.length,
        depth=sample.depth,
        index=sample.index,
        score=score,
        logprob=logprob,
        answer=answer,
        failure=failure,
    )
