"""The file of a run, to which results are written as they come, so that the run can go on after it was stopped."""

import dataclasses
import hashlib
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from typing_extensions import Self

from kvlayers.errors import KVLayersError
from kvlayers.persistence import weights_id
from kvlayers.tools.measuring.environment import package_versions
from kvlayers.tools.measuring.scoring import PassageScores
from kvlayers.tools.tasks.contract import TaskSample
from kvlayers.tools.tasks.summary import TaskOutcome

FORMAT_VERSION = 1

PASSAGE_SCORES, TASK_RESULTS = "passage scores", "task results"
"""What the records of a file are."""

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
        results: what the records are, such as "task results". A file of other records is refused.
        identity: what identifies the run, as JSON types; see `identity_of`.

    Attributes:
        path: the file.
        records: the records that were in the file, as JSON objects.

    Raises:
        ResultsFileError: the file is of another run, is damaged or no file of results, or cannot be written.
    """

    def __init__(self, path: Path, results: str, identity: Mapping[str, Any]) -> None:
        self.path = path
        self.records: list[dict[str, Any]] = []
        self._format = f"kvlayers {results}"
        header = _line({"format": self._format, "version": FORMAT_VERSION, "run": identity})
        try:
            # Whatever is written goes to the end, wherever reading stopped.
            self._file = path.open("a+b")
        except OSError as error:
            raise self._unusable(error) from None
        try:
            self._file.seek(0)
            content = self._file.read()
            whole = content[: content.rfind(b"\n") + 1]
            if whole:
                self._load(whole, json.loads(header)["run"])
            elif not header.startswith(content):
                raise self._other_file()
            self._file.truncate(len(whole))
            if not whole:
                self._write(header)
        except OSError as error:
            self._file.close()
            raise error if isinstance(error, ResultsFileError) else self._unusable(error) from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def write(self, record: Mapping[str, Any]) -> None:
        """Write a record of JSON types.

        Raises:
            ResultsFileError: the file cannot be written.
        """
        try:
            self._write(_line(record))
        except OSError as error:
            raise self._unusable(error) from None

    def damaged(self, what: str) -> ResultsFileError:
        """The error for a file whose contents are wrong.

        Args:
            what: what is wrong, as a clause.
        """
        return ResultsFileError(
            f"`results`: {self.path} must be a file of results, but {what}: name another file, or repair it."
        )

    def _write(self, line: bytes) -> None:
        self._file.write(line)
        self._file.flush()
        os.fsync(self._file.fileno())

    def _load(self, content: bytes, identity: Mapping[str, Any]) -> None:
        header, *lines = content.splitlines()
        self._check_header(self._parsed(header, 1), identity)
        self.records = [self._parsed(line, number) for number, line in enumerate(lines, 2)]

    def _check_header(self, found: Mapping[str, Any], identity: Mapping[str, Any]) -> None:
        if found.get("format") != self._format or not isinstance(found.get("run"), dict):
            raise self._other_file()
        if found.get("version") != FORMAT_VERSION:
            raise ResultsFileError(
                f"`results`: {self.path} has version {found.get('version')} of the format, and this kvlayers reads "
                f"version {FORMAT_VERSION}: name another file."
            )
        before, now = dict(_flat(found["run"])), dict(_flat(identity))
        different = [name for name in {**now, **before} if before.get(name) != now.get(name)]
        if different:
            what = ", ".join(f"{name} {_shown(before.get(name))} (now {_shown(now.get(name))})" for name in different)
            raise ResultsFileError(
                f"`results`: {self.path} is of another run, with {what}: name another file, or repeat that run."
            )

    def _parsed(self, line: bytes, number: int) -> dict[str, Any]:
        try:
            parsed = json.loads(line)
        # Lists within lists without end are no JSON either.
        except (ValueError, RecursionError):
            raise self.damaged(f"line {number} is not JSON") from None
        if not isinstance(parsed, dict):
            raise self.damaged(f"line {number} is no object")
        return parsed

    def _other_file(self) -> ResultsFileError:
        return self.damaged("it does not begin as such a file")

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


class PassageFile(RunFile):
    """The scores of passages, one cache and passage a line. It is a `PassageRecord`.

    Args:
        path: the file. It is made if it does not exist.
        identity: what identifies the run, as JSON types; see `identity_of`.
        options: for each cache that its name does not identify, the options that it is made with, as JSON types. Scores
            of a cache of the same name with other options are not its scores.

    Raises:
        ResultsFileError: as a `RunFile`, or a record of the file has no scores.
    """

    def __init__(self, path: Path, identity: Mapping[str, Any], options: Mapping[str, Any]) -> None:
        super().__init__(path, PASSAGE_SCORES, identity)
        self._options = options
        self._scores: dict[int, dict[str, PassageScores]] = {}
        for number, record in enumerate(self.records, 2):
            try:
                index, name, scores = record["passage"], record["cache"], _scores(record["scores"])
                # A failure may be of the moment, such as a lack of memory: the passage is read again.
                if scores.failure is None and record["options"] == options.get(name):
                    self._scores.setdefault(index, {})[name] = scores
            except (AttributeError, KeyError, TypeError):
                self.close()
                raise self.damaged(f"line {number} has no scores") from None

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
        self.write({"passage": index, "cache": name, "options": options, "scores": dataclasses.asdict(scores)})


def _scores(fields: Mapping[str, Any]) -> PassageScores:
    arguments: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()
    }
    return PassageScores(**arguments)


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


class ResultsFile(RunFile):
    """Outcomes of tasks, one a line. A run may add samples, tasks and caches, which do not identify it.

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
        super().__init__(path, TASK_RESULTS, identity)
        self._options = options
        self._outcomes: dict[SampleKey, TaskOutcome] = {}
        for number, record in enumerate(self.records, 2):
            made_with = record.pop("options", None)
            try:
                outcome = TaskOutcome(**record)
                is_outcome = _is_outcome(outcome)
            except TypeError:
                is_outcome = False
            if not is_outcome:
                self.close()
                raise self.damaged(f"line {number} is no outcome")
            if made_with == options.get(outcome.cache):
                self._outcomes[_key(outcome)] = outcome

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
        self.write({**dataclasses.asdict(outcome), **options})
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
