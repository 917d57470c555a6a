"""Samples of tasks: the same arguments give the same samples."""

import random
from collections.abc import Sequence
from typing import Any

from kvlayers.errors import OptionError
from kvlayers.tools.measuring.text import bos_ids
from kvlayers.tools.tasks.contract import Haystack, Task, TaskSample, task_named, task_names

LEAST_FILLER = 64
"""Tokens of filler in a sample, at least: with fewer of them, depth means nothing."""

SPARE_ANSWER_TOKENS = 8
"""Tokens that a model may generate beyond the number of tokens of a right answer, for words of its own."""

LENGTH_STEP = 64
"""The least length that an error names is a multiple of this."""


def samples_of(
    tasks: Sequence[str],
    lengths: Sequence[int],
    depths: Sequence[float],
    count: int,
    seed: int,
    tokenizer: Any,
    text: str,
) -> list[TaskSample]:
    """Samples of tasks, at each length and depth.

    A sample depends on the seed, on its task, length, depth and index, on the text and on the tokenizer. It is the same
    on every machine, whatever other samples are made. A task without depth has `count` samples for each of the
    depths too, so that all tasks have as many.

    Args:
        tasks: names of tasks.
        lengths: tokens of context and question together.
        depths: where the answer stands, from 0 (the beginning) to 1 (the end).
        count: samples for each task, length and depth.
        seed: seed of all random choices.
        tokenizer: tokenizer of the model. A sample begins with its BOS token if it begins every text with it.
        text: the text that filler is taken from.

    Raises:
        OptionError: a name, length, depth, count or the text cannot be used.
    """
    _check(tasks, lengths, depths, count)
    haystack = Haystack(lambda part: tokenizer(part, add_special_tokens=False).input_ids, text)
    maker = _SampleMaker(haystack, tuple(bos_ids(tokenizer)), seed)
    return [
        maker.sample(task, length, depth, index)
        for task in map(_made, dict.fromkeys(tasks))
        for length in dict.fromkeys(lengths)
        for depth, index in _places(task, list(dict.fromkeys(depths)), count)
    ]


def _check(tasks: Sequence[str], lengths: Sequence[int], depths: Sequence[float], count: int) -> None:
    for name, values in {"tasks": tasks, "lengths": lengths, "depths": depths}.items():
        if not values:
            raise OptionError(f"`{name}` must have at least one entry, got none.")
    for depth in depths:
        if not 0 <= depth <= 1:
            raise OptionError(f"`depths` must be from 0 (the beginning) to 1 (the end), got {depth}.")
    for length in lengths:
        if length < 1:
            raise OptionError(f"`lengths` must be positive numbers of tokens, got {length}.")
    if count < 1:
        raise OptionError(f"`count` must be at least 1 sample for each length and depth, got {count}.")


def _made(name: str) -> Task:
    task = task_named(name)
    if task is None:
        raise OptionError(f"`tasks` must be among {', '.join(task_names())}, got {name!r}.")
    return task()


def _places(task: Task, depths: Sequence[float], count: int) -> list[tuple[float | None, int]]:
    """Depth and index of each sample of a task at one length."""
    if not task.has_depth:
        return [(None, index) for index in range(count * len(depths))]
    return [(depth, index) for depth in depths for index in range(count)]


class _SampleMaker:
    """Makes samples over one text.

    Args:
        haystack: filler, and the tokenizer.
        bos: token ids before the text.
        seed: seed of all random choices.
    """

    def __init__(self, haystack: Haystack, bos: tuple[int, ...], seed: int) -> None:
        self._haystack = haystack
        self._bos = bos
        self._seed = seed

    def sample(self, task: Task, length: int, depth: float | None, index: int) -> TaskSample:
        """One sample. Raises `OptionError` if the length has no room for it."""
        place = "spread" if depth is None else repr(float(depth))
        # A string as the seed gives the same choices in every version of Python.
        chooser = random.Random(f"{self._seed} {task.name} {length} {place} {index}")
        text = task.text(self._haystack, length, depth or 0.0, chooser)
        start = (*self._bos, *self._haystack.encode(text.introduction))
        question = self._haystack.tokens(text.question)
        needles = sum(len(self._haystack.tokens(f" {needle.text}")) for needle in text.needles)
        filler = length - len(start) - needles - len(question)
        if filler < LEAST_FILLER:
            # The needles of other samples may have a few more tokens.
            needed = (length - filler + LEAST_FILLER) * 9 // 8
            least = -(-needed // LENGTH_STEP) * LENGTH_STEP
            raise OptionError(
                f"`lengths` must be at least {least} tokens for the task {task.name!r} with this tokenizer, got "
                f"{length}: pass a longer length, or leave the task out."
            )
        answer = self._haystack.tokens(text.answer)
        if not answer or not text.expected:
            raise OptionError(
                f"The task {task.name!r} must have an answer with tokens and strings to expect, got {text.answer!r} "
                f"and {text.expected}: mend the task, or use a tokenizer that knows the answer."
            )
        return TaskSample(
            task=task.name,
            length=length,
            depth=depth,
            index=index,
            context_ids=(*start, *self._haystack.hide(text.needles, filler, chooser)),
            question_ids=question,
            answers=text.expected,
            answer_ids=answer,
            max_answer_tokens=len(answer) + SPARE_ANSWER_TOKENS,
        )
