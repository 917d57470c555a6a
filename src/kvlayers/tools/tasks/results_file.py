"""The file that outcomes are written to as they come, so that a run that was stopped can go on."""

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from typing_extensions import Self

from kvlayers.tools.measuring.run_file import RunFile, identity_of
from kvlayers.tools.tasks.contract import TaskSample
from kvlayers.tools.tasks.outcome import TaskOutcome

RESULTS = "task results"
"""What the records of a file are."""

SampleKey = tuple[str, str, int, float | None, int]
"""Name of the cache, then task, length, depth and index of the sample."""


def run_identity(
    model: Any, name: str, text: str, seed: int, chunk: int | None, question_chunk: int | None = None
) -> dict[str, Any]:
    """What must be equal for two runs to have the same outcomes, as JSON types.

    Args:
        model: the model, with its weights in memory.
        name: name of the model, for readers.
        text: the text that filler is taken from.
        seed: seed of the samples.
        chunk: tokens of a forward pass while context and question are read, `None` for one pass each.
        question_chunk: tokens of a forward pass while the question is read, `None` if as many as `chunk`.
    """
    # Files of runs without it stay valid.
    question = {} if question_chunk is None else {"question_chunk": question_chunk}
    return identity_of(model, name, text, {"seed": seed, "chunk": chunk, **question})


class ResultsFile:
    """Outcomes in a `RunFile`, one a line. A run may add samples, tasks and caches, which do not identify it.

    Args:
        path: the file. It is made if it does not exist.
        identity: what identifies the run, as JSON types; see `run_identity`.
        options: for each cache that its name does not identify, the options that it is made with, as JSON types.
            Outcomes of a cache of the same name with other options are not its outcomes.

    Raises:
        ResultsFileError: the file is of another run, is damaged or no file of results, or cannot be written.
    """

    def __init__(
        self, path: Path, identity: Mapping[str, Any], options: Mapping[str, Any] = MappingProxyType({})
    ) -> None:
        self.path = path
        self._options = options
        self._file = RunFile(path, RESULTS, identity)
        self._outcomes: dict[SampleKey, TaskOutcome] = {}
        for number, record in enumerate(self._file.records, 2):
            made_with = record.pop("options", None)
            try:
                outcome = TaskOutcome(**record)
                is_outcome = _is_outcome(outcome)
            except TypeError:
                is_outcome = False
            if not is_outcome:
                self.close()
                raise self._file.damaged(f"line {number} is no outcome")
            if made_with == options.get(outcome.cache):
                self._outcomes[_key(outcome)] = outcome

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def outcome(self, cache: str, sample: TaskSample) -> TaskOutcome | None:
        """The outcome of a sample with the cache of this name. `None` if it is not known, or if the cache failed."""
        found = self._outcomes.get((cache, sample.task, sample.length, sample.depth, sample.index))
        return found if found is not None and found.failure is None else None

    def add(self, outcome: TaskOutcome) -> None:
        """Write an outcome. If it is of the same sample and cache as an earlier one, it replaces that one.

        Raises:
            ResultsFileError: the file cannot be written.
        """
        options = {"options": self._options[outcome.cache]} if outcome.cache in self._options else {}
        self._file.add({**dataclasses.asdict(outcome), **options})
        self._outcomes[_key(outcome)] = outcome


def _is_outcome(outcome: TaskOutcome) -> bool:
    """Whether all fields that a file gave have the types and values that `run_tasks` writes."""
    texts = (outcome.cache, outcome.task, outcome.answer, *(() if outcome.failure is None else (outcome.failure,)))
    if not all(isinstance(text, str) for text in texts):
        return False
    if not all(type(number) is int for number in (outcome.length, outcome.index)):
        return False
    if not (outcome.depth is None or _is_share(outcome.depth)):
        return False
    if outcome.failure is not None:
        return outcome.score is None and outcome.logprob is None
    return _is_share(outcome.score) and isinstance(outcome.logprob, float) and math.isfinite(outcome.logprob)


def _is_share(value: object) -> bool:
    """Whether a value is a number from 0 to 1."""
    return type(value) in (int, float) and 0 <= value <= 1  # type: ignore[operator]


def _key(outcome: TaskOutcome) -> SampleKey:
    return outcome.cache, outcome.task, outcome.length, outcome.depth, outcome.index
