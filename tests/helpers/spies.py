"""What is called, and which operators of torch run: noted, and then done as ever."""

from collections.abc import Callable
from typing import Any

import pytest
from torch.utils._python_dispatch import TorchDispatchMode


def spy(patch: pytest.MonkeyPatch, owner: Any, name: str, note: Callable[..., object]) -> None:
    """Let `note` have the arguments of each call of a function or method of `owner`."""
    original = getattr(owner, name)

    def noted(*args: Any, **kwargs: Any) -> Any:
        note(*args, **kwargs)
        return original(*args, **kwargs)

    patch.setattr(owner, name, noted)


class Operators(TorchDispatchMode):
    """Lets `note` have each operator that runs, its arguments and its result.

    Args:
        note: is called with `(operator, arguments, result)`.
    """

    def __init__(self, note: Callable[[Any, Any, Any], object]) -> None:
        super().__init__()
        self._note = note

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._note(func, args, result)
        return result
