"""What a task over a long context is, and the registry of tasks."""

import random
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, TypeVar

from typing_extensions import override

from kvlayers.errors import RegistryError
from kvlayers.tools.tasks.haystack import Haystack, Needle
from kvlayers.utils.registry import Registry


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
    """A kind of question over a long context. Each kind is one file, which registers itself.

    Attributes:
        name: name on the command line.
        title: name for readers, such as "Single needle".
        has_depth: whether the answer stands at one depth, which the user can set.
    """

    name: ClassVar[str]
    title: ClassVar[str]
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
            raise RegistryError(f"A task must be a class derived from kvlayers.tools.tasks.Task, got {entry!r}.")


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
