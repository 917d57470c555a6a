"""What a task over a long context is: its text, the filler around it, the registry of tasks, and their samples."""

import bisect
import itertools
import random
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, TypeVar

from typing_extensions import override

from kvlayers.errors import OptionError, RegistryError
from kvlayers.models import bos_ids
from kvlayers.options import Registry

LONGEST_SENTENCE = 60
"""Words of a sentence of filler, at most. A longer run of words without a full stop, such as a table, is divided."""


class Needle(NamedTuple):
    """A sentence to be hidden in filler.

    Attributes:
        text: the sentence.
        depth: share of the filler's tokens before it, from 0 to 1.
    """

    text: str
    depth: float


class Haystack:
    """Filler from a text, in whole sentences.

    Args:
        encode: token ids of a text, without special tokens.
        text: the text that the filler is taken from.

    Raises:
        OptionError: the text has no words, or the tokenizer returns no tokens for them.
    """

    def __init__(self, encode: Callable[[str], Sequence[int]], text: str) -> None:
        self.encode = encode
        self.text = text
        self._anchor = tuple(encode("a"))
        self._tokens: dict[str, tuple[int, ...]] = {}
        self._sentences = _sentences(text)
        if not any(self.tokens(f" {sentence}") for sentence in self._sentences):
            raise OptionError(
                "`text` must have words to take filler from, got none that the tokenizer knows: use another text, or "
                "the tokenizer of a model that reads it."
            )

    def tokens(self, text: str) -> tuple[int, ...]:
        """Token ids of a text that stands behind other text.

        Some tokenizers put a space before all that they encode. The ids of a text behind other text are without it.
        """
        if text not in self._tokens:
            anchored = tuple(self.encode(f"a{text}"))
            joined = anchored[: len(self._anchor)] == self._anchor
            self._tokens[text] = anchored[len(self._anchor) :] if joined else tuple(self.encode(text))
        return self._tokens[text]

    def filler(self, tokens: int, chooser: random.Random) -> list[tuple[int, ...]]:
        """Sentences that follow one another in the text, from a random one on, with `tokens` tokens in all.

        Behind its last sentence, the text begins again. The last sentence of the filler is cut at the last token.
        """
        start = chooser.randrange(len(self._sentences))
        found = []
        for sentence in itertools.islice(itertools.cycle(self._sentences), start, None):
            if not tokens:
                break
            ids = self.tokens(f" {sentence}")[:tokens]
            found.append(ids)
            tokens -= len(ids)
        return found

    def hide(self, needles: Sequence[Needle], tokens: int, chooser: random.Random) -> list[int]:
        """Token ids of `tokens` tokens of filler and of the needles in it.

        Each needle stands between two sentences of the filler, as near to its depth as they allow.
        """
        sentences = self.filler(tokens, chooser)
        ends = [0, *itertools.accumulate(map(len, sentences))]
        hidden: dict[int, list[int]] = {}
        for needle in sorted(needles, key=lambda needle: needle.depth):
            hidden.setdefault(_nearest(ends, needle.depth * tokens), []).extend(self.tokens(f" {needle.text}"))
        ids = hidden.get(0, [])
        for place, sentence in enumerate(sentences, 1):
            ids += [*sentence, *hidden.get(place, ())]
        return ids


def _nearest(ascending: Sequence[int], wanted: float) -> int:
    """Index of the number that is nearest to the wanted one."""
    above = min(bisect.bisect_left(ascending, wanted), len(ascending) - 1)
    below = max(above - 1, 0)
    return below if wanted - ascending[below] <= ascending[above] - wanted else above


def _sentences(text: str) -> list[str]:
    """The sentences of a text, each on one line."""
    found = []
    for paragraph in re.split(r"\n\s*\n", text):
        for sentence in re.split(r"(?<=[.!?])\s+|(?<=[\u3002\uff01\uff1f])", paragraph):
            words = sentence.split()
            starts = range(0, len(words), LONGEST_SENTENCE)
            found += [" ".join(words[start : start + LONGEST_SENTENCE]) for start in starts]
    return found


@dataclass(frozen=True)
class TaskSample:
    """One question over one context.

    Attributes:
        task: name of the task.
        length: tokens of context and question together, as the user asked for them.
        depth: where the answer stands in the context, 0 for the beginning and 1 for the end; `None` if the answer is
            spread over the whole context.
        index: number of the sample among those with the same task, length and depth.
        context_ids: token ids of the context.
        question_ids: token ids of the question behind it, which ends where the model is to answer.
        answers: strings that a right answer contains, all of them.
        answer_ids: token ids of one right answer, for its log-probability.
        max_answer_tokens: the most tokens that the model may generate as its answer.
        introduction_tokens: tokens of the context before all filler.
    """

    task: str
    length: int
    depth: float | None
    index: int
    context_ids: tuple[int, ...]
    question_ids: tuple[int, ...]
    answers: tuple[str, ...]
    answer_ids: tuple[int, ...]
    max_answer_tokens: int
    introduction_tokens: int = 0


@dataclass(frozen=True)
class TaskText:
    """One sample as text, without its filler.

    Attributes:
        introduction: the beginning of the context, before all filler.
        needles: the sentences to be hidden in the filler.
        question: the text behind the context. It ends with a cue, which the answer completes.
        answer: one right answer, as the text goes on behind the question: with a space at its beginning, if a new
            word begins.
        expected: strings that a right answer contains, all of them.
    """

    introduction: str
    needles: tuple[Needle, ...]
    question: str
    answer: str
    expected: tuple[str, ...]


class Task(ABC):
    """A kind of question over a long context. `register_task` makes it known.

    Attributes:
        name: name on the command line.
        has_depth: whether the answer stands at one depth, which the user can set.
    """

    name: ClassVar[str]
    has_depth: ClassVar[bool] = True

    @abstractmethod
    def text(self, haystack: Haystack, length: int, depth: float, chooser: random.Random) -> TaskText:
        """One sample as text. `samples_of` adds filler until the sample has its length.

        Args:
            haystack: the text that filler is taken from, and the tokenizer.
            length: tokens of context and question together.
            depth: where the answer is to stand, from 0 to 1. A task without depth ignores it.
            chooser: the source of all random choices. The same state must give the same text.
        """


TaskClass = TypeVar("TaskClass", bound=type[Task])


class _TaskRegistry(Registry[type[Task]]):
    @override
    def check(self, entry: object) -> None:
        if not isinstance(entry, type) or not issubclass(entry, Task):
            raise RegistryError(f"A task must be a class derived from kvlayers_lab.tasks.Task, got {entry!r}.")


_tasks = _TaskRegistry("task", "kvlayers.tasks", "unregister_task")


def register_task(task: TaskClass) -> TaskClass:
    """Class decorator: register a task under its name.

    Raises:
        RegistryError: the class is no `Task`, or its name is empty or taken.
    """
    _tasks.check(task)
    _tasks.add(task.name, task)
    return task


def unregister_task(name: str) -> None:
    """Remove a task. Raises `RegistryError` if no task has this name."""
    _tasks.remove(name)


def task_named(name: str) -> type[Task] | None:
    """The task of this name, `None` if there is no such task. Raises `RegistryError` if its entry point is unusable."""
    return _tasks.get(name)


def task_names() -> list[str]:
    """Names of all tasks, sorted."""
    return _tasks.names()


Tick = Callable[[str], None]
"""Called before each piece of work, with its description."""


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
    haystack = Haystack(lambda part: tokenizer(part, add_special_tokens=False).input_ids, text)
    places = [(depth, index) for depth in dict.fromkeys(depths) for index in range(count)]
    spread = [(None, index) for index in range(len(places))]
    bos = tuple(bos_ids(tokenizer))
    return [
        _sample(haystack, bos, seed, task, length, depth, index)
        for task in map(_made, dict.fromkeys(tasks))
        for length in dict.fromkeys(lengths)
        for depth, index in (places if task.has_depth else spread)
    ]


def _made(name: str) -> Task:
    task = task_named(name)
    if task is None:
        raise OptionError(f"`tasks` must be among {', '.join(task_names())}, got {name!r}.")
    return task()


def _sample(
    haystack: Haystack, bos: tuple[int, ...], seed: int, task: Task, length: int, depth: float | None, index: int
) -> TaskSample:
    """One sample behind the tokens `bos`. Raises `OptionError` if the length has no room for it."""
    place = "spread" if depth is None else repr(float(depth))
    # A string as the seed gives the same choices in every version of Python.
    chooser = random.Random(f"{seed} {task.name} {length} {place} {index}")
    text = task.text(haystack, length, depth or 0.0, chooser)
    start = (*bos, *haystack.encode(text.introduction))
    question = haystack.tokens(text.question)
    needles = sum(len(haystack.tokens(f" {needle.text}")) for needle in text.needles)
    filler = length - len(start) - needles - len(question)
    if filler < LEAST_FILLER:
        # The needles of other samples may have a few more tokens.
        needed = (length - filler + LEAST_FILLER) * 9 // 8
        least = -(-needed // LENGTH_STEP) * LENGTH_STEP
        raise OptionError(
            f"`lengths` must be at least {least} tokens for the task {task.name!r} with this tokenizer, got "
            f"{length}: pass a longer length, or leave the task out."
        )
    answer = haystack.tokens(text.answer)
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
        context_ids=(*start, *haystack.hide(text.needles, filler, chooser)),
        question_ids=question,
        answers=text.expected,
        answer_ids=answer,
        max_answer_tokens=len(answer) + SPARE_ANSWER_TOKENS,
        introduction_tokens=len(start),
    )
