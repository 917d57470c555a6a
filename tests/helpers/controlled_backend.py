"""A directory whose every call can be watched, stopped and made to fail."""

import pathlib
from collections.abc import Callable
from typing import Any

import pytest

from kvlayers.prefix.backends import UnreachableError, backend_for

WRITES = {"write"}
READS = {"read_ranges"}


class ControlledBackend:
    """Passes every call on to a local directory.

    Attributes:
        before: is called with the name of each method before the method is. It may wait, or raise.
        after: is called with it afterwards.
        fails: whether files can neither be written nor read.
        calls: names of the methods that were called.
        read_names: files that were read, each as often as it was.
        written: bytes of each file that was written.
    """

    def __init__(self, directory: pathlib.Path) -> None:
        self._backend: Any = backend_for(directory, None)
        self._backend.prepare()
        self.before: Callable[[str], None] = lambda name: None
        self.after: Callable[[str], None] = lambda name: None
        self.fails = False
        self.calls: list[str] = []
        self.read_names: list[str] = []
        self.written: dict[str, int] = {}

    def _begin(self, name: str, args: tuple[Any, ...]) -> None:
        self.calls.append(name)
        self.before(name)
        if self.fails and name in WRITES | READS:
            raise UnreachableError("the directory is not there now")
        if name == "read_ranges":
            self.read_names += [each.name for each in args[0]]
        elif name == "write":
            self.written[args[0]] = len(args[1])

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._backend, name)
        if not callable(found) or name == "path_of":
            return found

        def call(*args: Any, **options: Any) -> Any:
            self._begin(name, args)
            result = found(*args, **options)
            self.after(name)
            return result

        return call


def use(backend: ControlledBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have every store with a directory use `backend`, and try again without waiting."""
    monkeypatch.setattr("kvlayers.prefix.store.backend_for", lambda directory, options: backend)
    monkeypatch.setattr("kvlayers.prefix.write_queue.FIRST_DELAY", 0.0001)
