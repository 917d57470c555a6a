"""The file of a run, to which results are written as they come, so that the run can go on after it was stopped."""

import dataclasses
import hashlib
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO, ClassVar

import msgspec

from kvlayers import weights_id
from kvlayers.errors import KVLayersError
from kvlayers_lab.measuring.environment import package_versions
from kvlayers_lab.measuring.scoring import NoRecord, PassageScores
from kvlayers_lab.tasks.contract import TaskSample
from kvlayers_lab.tasks.summary import TaskOutcome

FORMAT_VERSION = 1

NO_RECORD = (KeyError, TypeError, ValueError, msgspec.MsgspecError)
"""Errors of a line that is no record."""

MOST_SHOWN = 24
"""Letters of a value that an error shows: the beginning of a digest is enough."""


class ResultsFileError(KVLayersError, OSError):
    """The file of a run is of another run, is damaged, or cannot be read or written."""


def identity_of(model: Any, name: str, text: str, facts: Mapping[str, Any]) -> dict[str, Any]:
    """What must be equal for two runs to have the same results, as JSON types.

    Args:
        model: the model, with its weights in memory.
        name: name of the model, for readers.
        text: the text that the run reads.
        facts: what else decides the results, such as a seed and the tokens of a forward pass.
    """
    return {
        "model": name,
        "weights": weights_id(model),
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": model.device.type,
        "text": hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest(),
        **facts,
        "versions": package_versions(),
    }


class RunFile:
    """The records of a run in a file of JSON lines. The first line identifies the run; each other line is a record.

    Every line is on the disk before the next result is computed. If the process is killed within a line, the next
    start drops that line.

    Args:
        path: the file. It is made if it does not exist.
        identity: what identifies the run, as JSON types; see `identity_of`.
        options: for each cache that its name does not identify, the options that it is made with, as JSON types.
            Records of a cache of the same name with other options are not of this run.

    Attributes:
        path: the file.

    Raises:
        ResultsFileError: the file is of another run, is damaged or no file of results, or cannot be written.
    """

    RESULTS: ClassVar[str]
    """What the records are. A file of other records is refused."""

    DAMAGE: ClassVar[str]
    """What a line that `_take` refuses has or is."""

    def __init__(
        self, path: Path, identity: Mapping[str, Any], options: Mapping[str, Any] = MappingProxyType({})
    ) -> None:
        self.path, self._options = path, options
        self._known: dict[Any, Any] = {}
        header = {"format": f"kvlayers {self.RESULTS}", "version": FORMAT_VERSION, "run": identity}
        first_line = _line(header)
        with self._opened() as file:
            file.seek(0)
            content = file.read()
            whole = content[: content.rfind(b"\n") + 1]
            if whole:
                self._load(whole.splitlines(), json.loads(first_line))
            elif not first_line.startswith(content):
                raise self._damaged("it does not begin as such a file")
            file.truncate(len(whole))
        if not whole:
            self._add(header)

    @contextmanager
    def _opened(self) -> Iterator[BinaryIO]:
        try:
            # Whatever is written goes to the end, wherever reading stopped.
            with self.path.open("a+b") as file:
                yield file
        except OSError as error:
            raise error if isinstance(error, ResultsFileError) else self._unusable(error) from None

    def _take(self, record: dict[str, Any]) -> None:
        """Take in a record of the file. Raises any of `NO_RECORD` for anything else."""
        raise NotImplementedError

    def _add(self, record: Mapping[str, Any]) -> None:
        """Write a record of JSON types.

        Raises:
            ResultsFileError: the file cannot be written.
        """
        with self._opened() as file:
            file.write(_line(record))
            file.flush()
            os.fsync(file.fileno())

    def _load(self, lines: Sequence[bytes], now: Mapping[str, Any]) -> None:
        for number, line in enumerate(lines, 1):
            try:
                parsed = json.loads(line)
            # Lists within lists without end are no JSON either.
            except (ValueError, RecursionError):
                raise self._damaged(f"line {number} is not JSON") from None
            if not isinstance(parsed, dict):
                raise self._damaged(f"line {number} is no object")
            if number == 1:
                self._check_header(parsed, now)
                continue
            try:
                self._take(parsed)
            except NO_RECORD:
                raise self._damaged(f"line {number} {self.DAMAGE}") from None

    def _check_header(self, found: Mapping[str, Any], header: Mapping[str, Any]) -> None:
        if found.get("format") != header["format"] or not isinstance(found.get("run"), dict):
            raise self._damaged("it does not begin as such a file")
        if found.get("version") != FORMAT_VERSION:
            raise ResultsFileError(
                f"`results`: {self.path} has version {found.get('version')} of the format, and this kvlayers reads "
                f"version {FORMAT_VERSION}: name another file."
            )
        before, now = dict(_flat(found["run"])), dict(_flat(header["run"]))
        different = [name for name in {**now, **before} if before.get(name) != now.get(name)]
        if different:
            what = ", ".join(f"{name} {_shown(before.get(name))} (now {_shown(now.get(name))})" for name in different)
            raise ResultsFileError(
                f"`results`: {self.path} is of another run, with {what}: name another file, or repeat that run."
            )

    def _damaged(self, what: str) -> ResultsFileError:
        return ResultsFileError(
            f"`results`: {self.path} must be a file of results, but {what}: name another file, or repair it."
        )

    def _unusable(self, error: OSError) -> ResultsFileError:
        return ResultsFileError(
            f"`results`: {self.path} cannot be read and written ({error.strerror or error}): name another file."
        )


def _line(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, allow_nan=False).encode() + b"\n"


def _shown(value: object) -> str:
    text = str(value)
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}…"


def _flat(fields: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in fields.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


class PassageFile(RunFile, NoRecord):
    """The scores of passages, one cache and passage a line."""

    RESULTS = "passage scores"
    DAMAGE = "has no scores"

    def _take(self, record: dict[str, Any]) -> None:
        scores, name = msgspec.convert(record["scores"], PassageScores), record["cache"]
        # A failure may be of the moment, such as a lack of memory: the passage is read again.
        if scores.failure is None and record["options"] == self._options.get(name):
            self._known.setdefault(record["passage"], {})[name] = scores

    def known(self, passages: int, names: Iterable[str]) -> int:
        """How many scores the file has, of those of these caches on the first `passages` passages."""
        return sum(name in self.of_passage(index) for index in range(passages) for name in names)

    def of_passage(self, index: int) -> Mapping[str, PassageScores]:
        """See `NoRecord`."""
        known: Mapping[str, PassageScores] = self._known.get(index, {})
        return known

    def add(self, index: int, name: str, scores: PassageScores) -> None:
        """Keep scores. Those that are not finite are not written, since JSON has no such numbers.

        Raises:
            ResultsFileError: the file cannot be written.
        """
        if all(map(math.isfinite, (*scores.kl, *scores.surprise))):
            options = self._options.get(name)
            self._add({"passage": index, "cache": name, "options": options, "scores": dataclasses.asdict(scores)})


SampleKey = tuple[str, str, int, float | None, int]
"""Name of the cache, then task, length, depth and index of the sample."""


class ResultsFile(RunFile):
    """Outcomes of tasks, one a line. A run may add samples, tasks and caches, which do not identify it."""

    RESULTS = "task results"
    DAMAGE = "is no outcome"

    def _take(self, record: dict[str, Any]) -> None:
        made_with = record.pop("options", None)
        outcome = msgspec.convert(record, TaskOutcome)
        figures = (outcome.score, outcome.logprob)
        # They are missing after a failure, and only then. Python's JSON has numbers that are not finite.
        if any((each is None) != (outcome.failure is not None) or not math.isfinite(each or 0.0) for each in figures):
            raise ValueError
        if made_with == self._options.get(outcome.cache):
            self._known[_key(outcome)] = outcome

    def outcome(self, cache: str, sample: TaskSample) -> TaskOutcome | None:
        """The outcome of a sample with the cache of this name. `None` if it is not known, or if the cache failed."""
        found: TaskOutcome | None = self._known.get((cache, sample.task, sample.length, sample.depth, sample.index))
        return found if found is not None and found.failure is None else None

    def add(self, outcome: TaskOutcome) -> None:
        """Write an outcome. If it is of the same sample and cache as an earlier one, it replaces that one.

        Raises:
            ResultsFileError: the file cannot be written.
        """
        options = {"options": self._options[outcome.cache]} if outcome.cache in self._options else {}
        self._add({**dataclasses.asdict(outcome), **options})
        self._known[_key(outcome)] = outcome


def _key(outcome: TaskOutcome) -> SampleKey:
    return outcome.cache, outcome.task, outcome.length, outcome.depth, outcome.index
