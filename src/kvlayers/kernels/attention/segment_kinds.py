"""Tokens that the queries of one update attend to, in full precision or in packed blocks."""

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvlayers.kernels.codes.packed_side import PackedSide
from kvlayers.kernels.codes.quantizer_contract import Side
from kvlayers.kernels.codes.smoothing import UNSMOOTHED, KeySmoothing

MAXIMUM_UNREAD_SEQUENCES = 64
"""Sequences up to which indices on an accelerator are not read. The queries of all sequences attend to each sequence of
a shared segment then, which costs little while the kernel is bound by reading keys. With more, waiting costs less."""


class SegmentRows:
    """For each sequence of a batch, the sequence of a shared segment that it reads.

    Args:
        sequences: how many sequences the segment has.
        rows: int64 `[batch]` on an accelerator, where nobody reads it, or a tuple if the host knows them.

    Attributes:
        sequences: how many sequences the segment has.
        known: the rows, `None` if only an accelerator knows them.
    """

    def __init__(self, sequences: int, rows: tuple[int, ...] | Tensor) -> None:
        self.sequences = sequences
        self._rows = rows
        self.known = None if isinstance(rows, Tensor) else rows
        self._on_devices: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def __len__(self) -> int:
        return len(self._rows)

    @functools.cached_property
    def are_even(self) -> bool:
        """Whether as many sequences of the batch read each sequence of the segment, next to each other and in order."""
        return bool(self.sequences) and self.known == of_repeats(self.sequences, len(self) // self.sequences)

    @functools.cached_property
    def most_readers(self) -> int:
        """Most sequences of the batch that read the same sequence, or all of them if only an accelerator knows."""
        return max(Counter(self.known).values()) if self.known else len(self)

    def on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """The rows, and the positions in the batch, both int64 `[batch]`. They are copied once for a device."""
        if torch.compiler.is_compiling():
            return self._copies(device)
        if device not in self._on_devices:
            # Autograd could not follow an index that was made in inference mode, and they are used outside of it too.
            with torch.inference_mode(False):
                self._on_devices[device] = self._copies(device)
        return self._on_devices[device]

    def select(self, states: Tensor) -> Tensor:
        """The states `[sequences, ...]` that each sequence of the batch reads, a copy `[batch, ...]`."""
        return states.index_select(0, self.on(states.device)[0])

    def _copies(self, device: torch.device) -> tuple[Tensor, Tensor]:
        positions = torch.arange(len(self), device=device)
        if self.are_even:
            # Computed there, because the host would wait for a copy.
            return positions // (len(self) // self.sequences), positions
        return torch.as_tensor(self._rows, device=device), positions

    def held_tensors(self) -> Iterator[Tensor]:
        """Tensors that hold the rows."""
        if isinstance(self._rows, Tensor):
            yield self._rows
        for copies in self._on_devices.values():
            yield from copies

    def selected(self, indices: Tensor) -> "SegmentRows":
        """The rows of the sequences at `indices`, int64 `[new_batch]`."""
        count = indices.shape[0]
        if self.sequences == 1:
            return SegmentRows(1, (0,) * count)
        if not reading_waits(indices) or count > MAXIMUM_UNREAD_SEQUENCES:
            known = self._rows.tolist() if isinstance(self._rows, Tensor) else self._rows
            return SegmentRows(self.sequences, tuple(known[row] for row in indices.tolist()))
        return SegmentRows(self.sequences, self.on(indices.device)[0].index_select(0, indices))


def reading_waits(indices: Tensor) -> bool:
    """Whether the host would have to wait for an accelerator to read a tensor."""
    return indices.device.type != "cpu"


def of_repeats(sequences: int, repeats: int) -> tuple[int, ...]:
    """The rows if `repeats` sequences next to each other read each sequence of a segment."""
    return tuple(row for row in range(sequences) for _ in range(repeats))


class KernelCache(dict[str, Any]):
    """Arguments that kernels have prepared for a segment and may use again, by the kernel's name.

    A copy of the segment has other addresses, so the cache of a copy is empty.
    """

    def kept(self, name: str, make: Callable[[], Any]) -> Any:
        """What is kept for a kernel. It is made if there is nothing."""
        if name not in self:
            self[name] = make()
        return self[name]

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
        tokens: how many slots it has.
        smoothing: keys in full precision were not smoothed.
        kernel_cache: what kernels have prepared for the segment.
    """

    smoothing: ClassVar[KeySmoothing] = UNSMOOTHED

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
        self.start, self.tokens = (0, key_slots.shape[2]) if slots is None else slots
        self.kernel_cache = KernelCache()
        self._slots = slots
        self._states = (key_slots, value_slots) if slots is None else None

    @property
    def source(self) -> "DenseSegment":
        """The segment that holds the states."""
        return self

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

    def states(self, side: Side, dtype: torch.dtype) -> Tensor:
        """Keys or values in a dtype, `[batch, kv_heads, tokens, head_dim]`: a view, if they are."""
        return (self.keys if side == "keys" else self.values).to(dtype)

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


@dataclass(frozen=True, eq=False)
class PackedSegment:
    """Tokens in packed blocks, not all of which need be full.

    Attributes:
        keys: packed keys.
        values: packed values.
        first: tokens at the beginning of the first block that have been evicted.
        ends: for each block the tokens that it holds, counted from its beginning; `None` if all are full.
        rows: as `DenseSegment.rows`.
        smoothing: how the keys were smoothed, for each sequence of the batch.
        kernel_cache: as `DenseSegment.kernel_cache`.
    """

    keys: PackedSide
    values: PackedSide
    first: int = 0
    ends: tuple[int, ...] | None = None
    rows: SegmentRows | None = None
    smoothing: KeySmoothing = UNSMOOTHED
    kernel_cache: KernelCache = field(default_factory=KernelCache, init=False, repr=False)

    @property
    def source(self) -> "PackedSegment":
        """The segment that holds the states."""
        return self

    @property
    def batch(self) -> int:
        """Sequences of the segment."""
        return self.keys.codes.shape[0]

    @functools.cached_property
    def kv_heads(self) -> int:
        """Heads that have keys and values."""
        return self.keys.codes.shape[1]

    @functools.cached_property
    def head_dims(self) -> tuple[int, int]:
        """Channels of a key, and of a value."""
        return self.keys.layout.head_dim, self.values.layout.head_dim

    @property
    def blocks(self) -> int:
        """Blocks in the segment."""
        return int(self.keys.codes.shape[2])

    @property
    def tokens(self) -> int:
        """Tokens in the segment."""
        held = self.blocks * self.keys.layout.block_tokens if self.ends is None else sum(self.ends)
        return held - self.first

    def side(self, side: Side) -> PackedSide:
        """Keys or values."""
        return self.keys if side == "keys" else self.values

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Codes and parameters of the keys, and of the values, `[batch, kv_heads, blocks, ...]`."""
        return self.keys.codes, self.keys.parameters, self.values.codes, self.values.parameters

    def with_tensors(self, tensors: Iterable[Tensor]) -> "PackedSegment":
        """The segment with other `tensors`, in the same order."""
        key_codes, key_parameters, codes, parameters = tensors
        keys = replace(self.keys, codes=key_codes, parameters=key_parameters)
        return replace(self, keys=keys, values=replace(self.values, codes=codes, parameters=parameters))

    def with_rows(self, rows: SegmentRows | None) -> "PackedSegment":
        """The segment with other `rows`."""
        return replace(self, rows=rows)

    def pieces(self, tokens: int) -> Iterator["PackedSegment"]:
        """The segment in pieces of about `tokens` tokens, whole blocks, of which each sequence of the batch reads its
        own."""
        blocks = max(tokens // self.keys.layout.block_tokens, 1)
        for start in range(0, self.blocks, blocks):
            some = slice(start, start + blocks)
            parts = (states[:, :, some] for states in self.tensors)
            piece = self.with_tensors(states if self.rows is None else self.rows.select(states) for states in parts)
            first = self.first if start == 0 else 0
            yield replace(piece, first=first, ends=None if self.ends is None else self.ends[some], rows=None)

    def states(self, side: Side, dtype: torch.dtype) -> Tensor:
        """States of one side, `[batch, kv_heads, tokens, head_dim]` of a dtype, rotated back."""
        return self.held(self.side(side).states(dtype))

    def held(self, states: Tensor) -> Tensor:
        """The states of the tokens of the segment, among those of whole blocks."""
        if self.ends is None:
            return states[:, :, self.first :]
        runs = [[self.first, 0]]
        for block, end in enumerate(self.ends):
            start = block * self.keys.layout.block_tokens
            if block and runs[-1][1] != start:
                runs.append([start, start])
            runs[-1][1] = start + end
        held = [states[:, :, start:end] for start, end in runs]
        return held[0] if len(held) == 1 else torch.cat(held, 2)
