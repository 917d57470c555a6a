"""A setting that has one value for everybody, and other values inside `with` blocks."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Generic, TypeVar

T = TypeVar("T")


class ScopedValue(Generic[T]):
    """A process-wide value that a context, which belongs to one thread, can override.

    Args:
        name: name of the setting, for debuggers.
        default: the process-wide value, until `set_default` changes it.
    """

    def __init__(self, name: str, default: T) -> None:
        self._default = default
        self._override: ContextVar[tuple[T] | None] = ContextVar(name, default=None)

    def get(self) -> T:
        """The value in this context."""
        override = self._override.get()
        return self._default if override is None else override[0]

    def set_default(self, value: T) -> None:
        """Change the process-wide value. Contexts with a value of their own keep it."""
        self._default = value

    @contextmanager
    def override(self, value: T) -> Iterator[None]:
        """Use `value` in this context for the length of a `with` block."""
        token = self._override.set((value,))
        try:
            yield
        finally:
            self._override.reset(token)
