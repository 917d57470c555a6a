"""Counts the bytes that operations write."""

from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

WRITING_NOTHING = {"empty", "empty_strided", "new_empty", "new_empty_strided", "empty_like", "set_", "_unsafe_view"}
"""Operators that return a tensor and write no state, beside views."""


class MovedBytes(TorchDispatchMode):
    """Counts the bytes of every tensor that an operation writes, new or in place. Views write nothing.

    Attributes:
        nbytes: bytes written so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and count its results."""
        found = func(*args, **(kwargs or {}))
        if not func.is_view and func.overloadpacket.__name__ not in WRITING_NOTHING:
            self.nbytes += sum(leaf.nbytes for leaf in tree_leaves(found) if isinstance(leaf, Tensor))
        return found
