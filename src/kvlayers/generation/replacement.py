"""Methods of transformers that stand aside for others for a while."""

from collections.abc import Callable
from typing import Any

Method = Callable[..., Any]


class Replacement:
    """A method that stands in for one of a class, beside those of other libraries that do the same.

    Args:
        owner: the class.
        name: of the method.
        wrap: makes the one that stands in of the one that it stands in for, and which it passes through to while it is
            not wanted. It says what it wraps, as `functools.wraps` does.
    """

    def __init__(self, owner: type, name: str, wrap: Callable[[Method], Method]) -> None:
        self._owner, self._name, self._wrap = owner, name, wrap
        self._wrapper: Method | None = None
        self._before: Method | None = None

    def put(self) -> None:
        """Let it stand in."""
        current = getattr(self._owner, self._name)
        # Where another library has wrapped ours, ours is still underneath, and awake again.
        if self._wrapper is None or self._wrapper not in _chain(current):
            # None where it is inherited.
            self._before, self._wrapper = vars(self._owner).get(self._name), self._wrap(current)
            setattr(self._owner, self._name, self._wrapper)

    def take_back(self) -> None:
        """Put the one before it back, unless another library has wrapped ours: then ours stays underneath."""
        if self._wrapper is None or vars(self._owner).get(self._name) is not self._wrapper:
            return
        if self._before is None:
            delattr(self._owner, self._name)
        else:
            setattr(self._owner, self._name, self._before)
        self._wrapper = self._before = None


def _chain(method: Method) -> list[Method]:
    """A method and those that it wraps, as far as it says so."""
    found = [method]
    while "__wrapped__" in found[-1].__dict__:
        found.append(found[-1].__dict__["__wrapped__"])
    return found
