"""The three parts of a quantized store: sinks in full precision, packed blocks, and the residual in full precision."""

from collections.abc import Iterator

import torch
from torch import Tensor
from typing_extensions import Self

from kvlayers.core.buffer import StateForm, form_of
from kvlayers.core.dense_store import DenseStore
from kvlayers.core.token_store import BufferSwap, KVPair
from kvlayers.errors import StateMismatchError
from kvlayers.kernels.attention.segment_kinds import DenseSegment
from kvlayers.kernels.attention.segments import Segment
from kvlayers.kernels.codes.smoothing import BLOCKS_ASKED, MOST_RUNS
from kvlayers.quantized.packed_blocks import PackedBlocks
from kvlayers.quantized.smoothing_runs import SmoothingRuns

RESIDUAL_GROWTH_DIVISOR = 16
"""A full residual behind packed blocks grows by its size divided by this."""

GROWTHS_PER_BLOCK = 2
"""How often the residual grows while a block fills, at most. Packing the first block frees nearly half of its bytes or
more, so with half a block of spare room the store takes no more bytes than the tokens take in full precision."""


def residual_after_blocks(block_tokens: int) -> DenseStore:
    """An empty residual that follows blocks of `block_tokens` tokens."""
    return DenseStore(growth_divisor=RESIDUAL_GROWTH_DIVISOR, minimum_growth=block_tokens // GROWTHS_PER_BLOCK)


def residual_length_hint(room: int, length_hint: int | None, old_tokens: int, held: int = 0) -> int:
    """The most tokens that a residual is expected to hold.

    Args:
        room: tokens of a full residual.
        length_hint: the most tokens that the whole store is expected to hold, if known.
        old_tokens: tokens before the residual.
        held: tokens in the residual. If they exceed the length hint, it no longer holds.
    """
    if length_hint is None or length_hint - old_tokens < held:
        return room
    return min(room, length_hint - old_tokens)


class QuantizedParts:
    """Sinks, packed blocks and residual, in the order of their tokens.

    Until the first block is packed, all tokens are in the residual.

    Attributes:
        sinks: the oldest tokens, in full precision.
        blocks: the packed tokens, `None` before the first states.
        residual: the newest tokens, in full precision.
        runs: how runs of packed blocks were smoothed; none before a block is packed.
        follows_packed: whether these tokens follow packed ones of another store, whose keys are smoothed as the first
            run.
    """

    def __init__(
        self,
        sinks: DenseStore,
        blocks: PackedBlocks | None,
        residual: DenseStore,
        runs: SmoothingRuns | None = None,
        follows_packed: bool = False,
    ) -> None:
        self.sinks = sinks
        self.blocks = blocks
        self.residual = residual
        self.follows_packed = follows_packed
        self.runs = SmoothingRuns() if runs is None else runs

    @property
    def old_tokens(self) -> int:
        """Tokens before the residual."""
        return self.sinks.length + (0 if self.blocks is None else self.blocks.tokens)

    @property
    def tokens(self) -> int:
        """Tokens in all parts."""
        return self.old_tokens + self.residual.length

    # Packing

    def pack(
        self, keys: Tensor, values: Tensor, count: int, sinks: int, residual_length: int, length_hint: int | None
    ) -> None:
        """Take in states, and pack `count` blocks of the oldest full-precision tokens after the new sinks.

        A residual that is shared goes on where it is, without those tokens. Any other is copied, which frees them.

        Args:
            keys: `[batch, kv_heads, new, key_head_dim]`.
            values: `[batch, kv_heads, new, value_head_dim]`.
            count: blocks to pack.
            sinks: tokens at the front of the residual that become sinks.
            residual_length: tokens that stay in the residual at least.
            length_hint: the most tokens that the store is expected to hold, if known.
        """
        blocks = self.blocks
        if blocks is None:
            raise StateMismatchError("The store is empty, so it has no states to pack: update the layer first.")
        held = self.residual.length
        states = [*map(_states_of, self.residual.pieces(held)), (keys, values)]
        size = blocks.block_tokens
        packed = sinks + count * size
        # Everything that can fail comes first, and goes where nobody reads: held and returned states stay valid.
        blocks.prepare(count)
        asked = range(sinks, packed, size * -(-count // BLOCKS_ASKED))
        runs = self.runs if self.runs.are_settled else self._runs_with(blocks, states, asked)
        at_once = blocks.blocks_at_once
        for done in range(0, count, at_once):
            some = _tokens_of(states, sinks + done * size, min(at_once, count - done) * size)
            blocks.write(done, *some, runs.in_order[-1])
        new_sinks = self.sinks
        if sinks:
            new_sinks = self.sinks.fork()
            append_states(new_sinks, _tokens_of(states, 0, sinks))
        rest = held + keys.shape[2] - packed
        hint = residual_length_hint(residual_length + size, length_hint, self.old_tokens + packed, rest)
        if packed < held and self.residual.is_shared:
            residual = self.residual.fork()
            residual.drop_oldest(packed)
            residual.length_hint = hint
            append_states(residual, (keys, values))
        else:
            residual = residual_after_blocks(size)
            residual.length_hint = hint
            residual.reserve_form(form_of(keys), form_of(values))
            residual.prepare_slots(rest)
            _copy_tokens(states, packed, rest, residual.slots_ahead(0, rest))
            residual.hold(rest)
        before, runs_before = blocks.tokens, self.runs
        self.runs = runs
        try:
            blocks.hold(count)
        except BaseException:
            # Interrupted: the residual still holds these tokens, so no block may hold them too, nor one side of it.
            blocks.truncate(before)
            self.runs = runs_before
            raise
        retired, self.sinks, self.residual = self.residual, new_sinks, residual
        retired.retire()

    @torch.no_grad()
    def _runs_with(self, blocks: PackedBlocks, states: list[KVPair], asked: range) -> SmoothingRuns:
        """The runs if more blocks are packed, of which the first tokens of some are given.

        The last run is that of the new blocks.
        """
        some = [_tokens_of(states, start, blocks.block_tokens)[0] for start in asked]
        keys = some[0] if len(some) == 1 else torch.cat(some, 2)
        if not len(self.runs):
            return SmoothingRuns.of(blocks.smoothing_for(keys))
        last = self.runs.in_order[-1]
        own = blocks.smoothing_for(keys, last)
        if own is last:
            return self.runs
        return self.runs.followed(len(blocks), last.emptied() if len(self.runs) == MOST_RUNS - 1 else own)

    # Reading

    def old_segments(self, skipped: int = 0) -> tuple[Segment, ...]:
        """Sinks and packed tokens, without the oldest `skipped` tokens."""
        sinks = max(self.sinks.length - skipped, 0)
        packed = () if self.blocks is None else self.blocks.segments(max(skipped - self.sinks.length, 0), self.runs)
        return *self.sinks.pieces(sinks), *packed

    # Dropping, cropping and the batch

    def drop_oldest(self, count: int) -> None:
        """Forget the oldest `count` tokens."""
        from_sinks = min(count, self.sinks.length)
        self.sinks.drop_oldest(from_sinks)
        from_blocks = 0
        if self.blocks:
            from_blocks = min(count - from_sinks, self.blocks.tokens)
            held = len(self.blocks)
            self.blocks.drop_oldest(from_blocks)
            self.runs = self.runs.dropped(held - len(self.blocks), self.follows_packed)
            self._crop_runs()
        self.residual.drop_oldest(count - from_sinks - from_blocks)

    def truncate(self, length: int) -> None:
        """Forget all but the oldest `length` tokens."""
        old = self.old_tokens
        self.residual.truncate(max(length - old, 0))
        if length < old:
            sinks = min(length, self.sinks.length)
            if self.blocks is not None:
                self.blocks.truncate(length - sinks)
            if sinks < self.sinks.length:
                self.sinks.truncate(sinks)
            self._crop_runs()

    def _crop_runs(self) -> None:
        """Let the next block find its own vectors, if no packed token has any."""
        self.runs = self.runs.cropped(len(self.blocks or ()), self.follows_packed)

    def selected(self, indices: Tensor) -> Self:
        """Parts of the selected sequences. If there is no memory for them, this one has not changed."""
        sinks, residual = self.sinks.selected(indices), self.residual.selected(indices)
        blocks = None if self.blocks is None else self.blocks.selected(indices)
        return self.__class__(sinks, blocks, residual, self.runs.selected(indices), self.follows_packed)

    def expanded(self, batch: int, repeats: int) -> Self:
        """Parts in which each of `batch` sequences is repeated in a row, and held once as far as possible."""
        twin = self.fork()
        for part in twin._each():
            part.expand(repeats)
        twin.runs = self.runs.repeated(batch, repeats)
        return twin

    def promoted(self, forms: tuple[StateForm, StateForm]) -> Self:
        """Parts with the same tokens in the dtypes of these forms, which hold them without rounding."""
        twin = self.fork()
        for part in twin._each():
            part.promote(*forms)
        twin.runs = self.runs.promoted(forms[0].dtype)
        return twin

    def clear(self) -> None:
        """Forget all tokens; keep the memory."""
        self.runs, self.follows_packed = SmoothingRuns(), False
        for part in self._each():
            part.clear()

    def _each(self) -> Iterator[DenseStore | PackedBlocks]:
        return (part for part in (self.sinks, self.blocks, self.residual) if part is not None)

    # Copies and state

    def snapshot(self) -> Self:
        """See `TokenStore.snapshot`."""
        blocks = None if self.blocks is None else self.blocks.snapshot()
        return self.__class__(self.sinks.snapshot(), blocks, self.residual.snapshot(), self.runs, self.follows_packed)

    def fork(self) -> Self:
        """Independent parts with the same tokens."""
        blocks = None if self.blocks is None else self.blocks.fork()
        return self.__class__(self.sinks.fork(), blocks, self.residual.fork(), self.runs.owned(), self.follows_packed)

    def share_prefix(self, other: Self, tokens: int) -> None:
        """Hold sinks and whole blocks of the first `tokens` tokens as `other` holds them."""
        sinks = self.sinks.length
        if self.blocks is None or other.blocks is None or sinks != other.sinks.length or tokens < sinks:
            return
        self.sinks.share_prefix(other.sinks, sinks)
        most = self.runs.common_blocks(other.runs, min(len(self.blocks), len(other.blocks)))
        self.blocks.share_prefix(other.blocks, tokens - sinks, most)

    def trim(self) -> None:
        """See `TokenStore.trim`."""
        for part in self._each():
            part.trim()

    def compact(self) -> None:
        """See `TokenStore.compact`."""
        for part in self._each():
            part.compact()

    def swap_buffers(self, swap: BufferSwap) -> None:
        """See `TokenStore.swap_buffers`."""
        for part in self._each():
            part.swap_buffers(swap)
        self.runs = self.runs.swapped(swap)

    def swap_unpaged_buffers(self, swap: BufferSwap) -> None:
        """See `TokenStore.swap_unpaged_buffers`."""
        self.sinks.swap_buffers(swap)
        self.residual.swap_buffers(swap)
        self.runs = self.runs.swapped(swap)

    def held_tensors(self) -> Iterator[Tensor]:
        """See `TokenStore.held_tensors`."""
        for part in self._each():
            yield from part.held_tensors()
        yield from self.runs.held_tensors()

    def state(self) -> dict[str, Tensor]:
        """Copies of all held tensors; empty before the first states."""
        if self.blocks is None:
            return {}
        tensors = {**self.residual.state(), **self.blocks.state()}
        if self.sinks.length:
            tensors.update({f"sink_{name}": states for name, states in self.sinks.state().items()})
        return {**tensors, **self.runs.state()}


def append_states(store: DenseStore, states: KVPair) -> None:
    """Validate keys and values, and append them."""
    store.validate(*states)
    store.append(*states)


def _states_of(piece: DenseSegment) -> KVPair:
    """Keys and values of each sequence of the batch."""
    if piece.rows is None:
        return piece.keys, piece.values
    rows = piece.rows.on(piece.keys.device)[0]
    return piece.keys.index_select(0, rows), piece.values.index_select(0, rows)


def _pieces_of(parts: list[KVPair], start: int, count: int) -> list[KVPair]:
    """Keys and values of `count` tokens from `start`, counted over all parts, as views of the parts."""
    found: list[KVPair] = []
    for keys, values in parts:
        tokens = keys.shape[2]
        begin, end = max(start, 0), min(start + count, tokens)
        if begin < end:
            found.append((keys[:, :, begin:end], values[:, :, begin:end]))
        start -= tokens
    return found


def _tokens_of(parts: list[KVPair], start: int, count: int) -> KVPair:
    """Keys and values of `count` tokens from `start`, counted over all parts: views if one part has them all."""
    found = _pieces_of(parts, start, count)
    if len(found) == 1:
        return found[0]
    keys, values = (torch.cat(side, dim=2) for side in zip(*found, strict=True))
    return keys, values


@torch.no_grad()
def _copy_tokens(parts: list[KVPair], start: int, count: int, to: KVPair) -> None:
    """Copy keys and values of `count` tokens from `start`, counted over all parts."""
    found = _pieces_of(parts, start, count)
    for target, *side in zip(to, *found, strict=True):
        if side:
            torch.cat(side, dim=2, out=target)
