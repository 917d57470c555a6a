"""Scores of passages that were read before, which are not read again."""

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any

from kvlayers.tools.measuring.run_file import RunFile
from kvlayers.tools.measuring.scoring import PassageScores

RESULTS = "passage scores"
"""What the records of a file are."""


class PassageFile:
    """Knows the scores in the file of a run, and writes others to it as they come.

    Args:
        file: the file.
        options: for each cache that its name does not identify, the options that it is made with, as JSON types. Scores
            of a cache of the same name with other options are not its scores.

    Raises:
        ResultsFileError: a record of the file has no scores.
    """

    def __init__(self, file: RunFile, options: Mapping[str, Any]) -> None:
        self._file = file
        self._options = options
        self._scores: dict[int, dict[str, PassageScores]] = {}
        for number, record in enumerate(file.records, 2):
            try:
                index, name, scores = record["passage"], record["cache"], _scores(record["scores"])
                # A failure may be of the moment, such as a lack of memory: the passage is read again.
                if scores.failure is None and record["options"] == options.get(name):
                    self._scores.setdefault(index, {})[name] = scores
            except (AttributeError, KeyError, TypeError):
                raise file.damaged(f"line {number} has no scores") from None

    def known(self, passages: int, names: Iterable[str]) -> int:
        """How many scores the file has, of those of these caches on the first `passages` passages."""
        return sum(name in self.of_passage(index) for index in range(passages) for name in names)

    def of_passage(self, index: int) -> Mapping[str, PassageScores]:
        """See `PassageRecord`."""
        return self._scores.get(index, {})

    def add(self, index: int, name: str, scores: PassageScores) -> None:
        """See `PassageRecord`. Scores that are not finite are not written, since JSON has no such numbers.

        Raises:
            ResultsFileError: the file cannot be written.
        """
        if not all(map(math.isfinite, (*scores.kl, *scores.surprise))):
            return
        options = self._options.get(name)
        self._file.add({"passage": index, "cache": name, "options": options, "scores": dataclasses.asdict(scores)})


def _scores(fields: Mapping[str, Any]) -> PassageScores:
    arguments: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()
    }
    return PassageScores(**arguments)
