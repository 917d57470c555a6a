"""The file of a run, to which results are written as they come, so that the run can go on after it was stopped."""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from typing_extensions import Self

from kvlayers.errors import KVLayersError
from kvlayers.persistence import weights_id
from kvlayers.tools.measuring.environment import package_versions

FORMAT_VERSION = 1

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

    def add(self, record: Mapping[str, Any]) -> None:
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
