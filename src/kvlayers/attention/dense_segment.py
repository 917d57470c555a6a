"""Tokens in full precision that the queries of one update attend to."""

import functools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from kvlayers.attention.segment_rows import SegmentRows
from kvlayers.quantizers.contract import Side


class KernelCache(dict[str, Any]):
    """Arguments that kernels have prepared for a segment and may use again, by the kernel's name.

    A copy of the segment has other addresses, so the cache of a copy is empty.
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> "KernelCache":
        return KernelCache()

    def __reduce__(self) -> tuple[type["KernelCache"], tuple[()]]:
        return KernelCache, ()


DENSE_PIECE_TOKENS = 64
"""Most tokens of a piece of a dense segment: what kernels read at once."""


class DenseSegment:
    """Tokens in full precision, in all slots of two tensors or in some. They are never changed.

    If they are in some slots, `keys` and `values` are views, which are made when they are first read. The CPU kernel
    takes addresses instead: two views for each layer would make an update a fifth slower.

    Args:
        key_slots: `[batch, kv_heads, slots, key_head_dim]`.
        value_slots: `[batch, kv_heads, slots, value_head_dim]`.
        rows: see the attributes.
        slots: first slot of the segment, and how many it has; all slots if it is not given.

    Attributes:
        key_slots: the slots that hold the keys.
        value_slots: the slots that hold the values.
        rows: which sequence of the segment each sequence of the batch reads; `None` if each reads its own.
        start: first slot of the segment.
        kernel_cache: what kernels have prepared for the segment.
    """

    def __init__(
        self,
        key_slots: Tensor,
        value_slots: Tensor,
        rows: SegmentRows | None = None,
        slots: tuple[int, int] | None = None,
    ) -> None:
        self.key_slots = key_slots
        self.value_slots = value_slots
        self.rows = rows
        self.start = 0 if slots is None else slots[0]
        self.kernel_cache = KernelCache()
        self._slots = slots
        self._states = (key_slots, value_slots) if slots is None else None

    @property
    def tokens(self) -> int:
        """Tokens in the segment."""
        return int(self.key_slots.shape[2]) if self._slots is None else self._slots[1]

    @property
    def tensors(self) -> tuple[Tensor, Tensor]:
        """The keys and the values, `[batch, kv_heads, tokens, head_dim]`."""
        if self._states is None:
            slots = self.key_slots, self.value_slots
            keys, values = (states.narrow(2, self.start, self.tokens) for states in slots)
            self._states = keys, values
        return self._states

    @property
    def keys(self) -> Tensor:
        """The keys, `[batch, kv_heads, tokens, key_head_dim]`."""
        return self.tensors[0]

    @property
    def values(self) -> Tensor:
        """The values, `[batch, kv_heads, tokens, value_head_dim]`."""
        return self.tensors[1]

    @property
    def requires_grad(self) -> bool:
        """Whether autograd follows the keys or the values."""
        return self.key_slots.requires_grad or self.value_slots.requires_grad

    @property
    def batch(self) -> int:
        """Sequences of the segment."""
        return self.key_slots.shape[0]

    @functools.cached_property
    def kv_heads(self) -> int:
        """Heads that have keys and values."""
        return self.key_slots.shape[1]

    @functools.cached_property
    def head_dims(self) -> tuple[int, int]:
        """Channels of a key, and of a value."""
        return self.key_slots.shape[3], self.value_slots.shape[3]

    def side(self, side: Side) -> Tensor:
        """Keys or values."""
        return self.keys if side == "keys" else self.values

    def with_tensors(self, tensors: Iterable[Tensor]) -> "DenseSegment":
        """The segment with other `tensors`, in the same order."""
        keys, values = tensors
        return DenseSegment(keys, values, self.rows)

    def with_rows(self, rows: SegmentRows | None) -> "DenseSegment":
        """The segment with other `rows`."""
        return DenseSegment(self.key_slots, self.value_slots, rows, self._slots)

    def pieces(self, tokens: int) -> Iterator["DenseSegment"]:
        """The segment in pieces of at most `tokens` tokens, of which each sequence of the batch reads its own."""
        for keys, values in zip(*(torch.split(states, tokens, 2) for states in self.tensors), strict=True):
            if self.rows is None:
                yield DenseSegment(keys, values)
            else:
                yield DenseSegment(self.rows.select(keys), self.rows.select(values))
