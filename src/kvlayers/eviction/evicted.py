"""What an eviction leaves of a store. Codes move as they are, and no token is quantized twice.

There are two exceptions. What an eviction leaves is read with the same vectors, those of the newest run of blocks. So
keys of older runs are packed again with these: at each eviction that begins behind a new run. Most sequences have one.
And a block that begins with padding is packed again without it, at the first eviction of its batch.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple, cast

import torch
from torch import Tensor

from kvlayers.core.buffer import form_of
from kvlayers.core.dense_store import DenseStore, filled, without_spare_room
from kvlayers.core.token_store import KVPair, TokenStore
from kvlayers.errors import StateMismatchError
from kvlayers.eviction.flat_tokens import FlatTokens, flat_form, pieces_in_a_row
from kvlayers.eviction.held_tokens import HeldTokens, taken
from kvlayers.eviction.ragged_store import RaggedStore
from kvlayers.eviction.selection import KeptTokens, places_of
from kvlayers.kernels.attention.segment_kinds import DENSE_PIECE_TOKENS, PackedSegment
from kvlayers.kernels.attention.segments import GatheredSegment, with_full_blocks
from kvlayers.kernels.codes.smoothing import UNSMOOTHED, KeySmoothing
from kvlayers.quantized.checks import checked_quantizers
from kvlayers.quantized.packed_blocks import PACKED_NAMES, SIDES, PackedBlocks
from kvlayers.quantized.quantization import Quantization, block_tokens
from kvlayers.quantized.quantized_store import QuantizedStore
from kvlayers.quantized.smoothing_runs import SmoothingRuns


def evicted(store: TokenStore, tokens: HeldTokens, kept: KeptTokens) -> TokenStore:
    """A store that holds only some of the tokens of a store and of new ones. The store does not change.

    Kept tokens are held as they were: states in full precision as they came, and codes as they were packed. If all
    heads keep the same number, the result is a store of the same kind. If not, it is a `RaggedStore`, which has the
    newest tokens that all heads keep in its tail.

    Args:
        store: a `DenseStore`, a `QuantizedStore` or a `RaggedStore`, empty or not.
        tokens: what `held_tokens` has returned for the store and the new tokens.
        kept: the tokens to keep. The tokens of a packed block are kept or evicted together.

    Raises:
        StateMismatchError: values have another number of kv_heads than keys.
    """
    if tokens.values.shape[1] != tokens.keys.shape[1]:
        raise StateMismatchError(
            "Keys and values must have the same kv_heads, each of which keeps its own tokens, got "
            f"{tokens.keys.shape[1]} and {tokens.values.shape[1]}: use a DynamicCache."
        )
    inner = store.tail if isinstance(store, RaggedStore) else store
    with torch.inference_mode(False), torch.no_grad():
        if isinstance(inner, QuantizedStore):
            return _packed(inner, tokens, kept)
        return _dense(cast("DenseStore", inner), tokens, kept)


def _common_run(mask: Tensor) -> int:
    """How many of the newest tokens every head keeps, of a mask `[batch, kv_heads, tokens]`."""
    return int(mask.flatten(0, 1).all(0).flip(0).long().cumprod(0).sum())


def _dense(store: DenseStore, tokens: HeldTokens, kept: KeptTokens) -> TokenStore:
    """A store in full precision, which grows as `store` does."""
    keys, values, growth = tokens.keys.detach(), tokens.values.detach(), (store.growth_divisor, store.minimum_growth)
    if bool((kept.counts == kept.counts.max()).all()):
        columns = places_of(kept.mask, int(kept.counts.max()))
        return filled(DenseStore(None, *growth), *taken((keys, values), columns))
    run = _common_run(kept.mask)
    first = keys.shape[2] - run
    tail = filled(DenseStore(None, *growth), keys[:, :, first:], values[:, :, first:])
    places = kept.mask[..., :first].nonzero(as_tuple=True)
    part = without_spare_room(keys[places][None, None], values[places][None, None])
    starts, counts = (table.to(keys.device) for table in pieces_in_a_row(kept.counts - run, DENSE_PIECE_TOKENS, 1))
    return RaggedStore(tail, FlatTokens.of(part, starts, counts))


# Packed blocks


class _HeadBlocks(NamedTuple):
    """Packed blocks of each head.

    Attributes:
        codes: codes and parameters of keys, and of values, one block behind the other: `[1, 1, blocks, ...]`.
        starts: the place of each block of each head among them, int64 `[batch, kv_heads, held]`.
        counts: tokens of each of these blocks, int64 `[batch, kv_heads, held]`; 0 for no block.
    """

    codes: tuple[Tensor, ...]
    starts: Tensor
    counts: Tensor


def _kept_blocks(
    packed: Sequence[GatheredSegment], counts: Tensor, like: PackedBlocks, dtype: torch.dtype
) -> _HeadBlocks:
    """The blocks of which tokens are kept, one head behind another. All keys are smoothed as those of the newest run.

    Args:
        packed: as `HeldTokens.packed`.
        counts: how many tokens are kept of each of these blocks, int64 `[batch, kv_heads, blocks]`.
        like: blocks of the same quantizers.
        dtype: dtype of the parameters, which holds those of the blocks without rounding.
    """
    heads: list[Tensor] = []
    of_segments: list[tuple[Tensor, ...]] = []
    newest = packed[-1].source.smoothing
    for segment, own in zip(
        packed, torch.split(counts, [segment.starts.shape[2] for segment in packed], 2), strict=True
    ):
        sequence, kv_head, piece = own.nonzero(as_tuple=True)
        heads.append(sequence * own.shape[1] + kv_head)
        source = cast("PackedSegment", with_full_blocks(segment.source))
        at = sequence, kv_head, segment.starts[sequence, kv_head, piece]
        blocks = source.with_tensors(codes[at][None, None] for codes in source.tensors)
        blocks = _smoothed_as(newest, blocks, sequence, kv_head, like)
        of_segments.append(_without_padding(blocks, (segment.counts - own)[sequence, kv_head, piece], like).tensors)
    # Of each head in the order of the text.
    order = torch.cat(heads).argsort(stable=True)
    key_codes, keys, value_codes, values = (
        torch.cat(parts, 2)[:, :, order] for parts in zip(*of_segments, strict=True)
    )
    is_held = counts > 0
    starts, is_block = (table.to(counts.device) for table in pieces_in_a_row(is_held.sum(2).cpu(), 1, 1))
    of_blocks = counts.gather(2, places_of(is_held, starts.shape[2])) * is_block
    return _HeadBlocks((key_codes, keys.to(dtype), value_codes, values.to(dtype)), starts, of_blocks)


def _smoothed_as(
    smoothing: KeySmoothing, blocks: PackedSegment, sequence: Tensor, kv_head: Tensor, like: PackedBlocks
) -> PackedSegment:
    """Blocks of these sequences and heads. Their keys are packed again if they were not smoothed like this."""
    count = len(sequence)
    if blocks.smoothing is smoothing or not count:
        return blocks
    where = [part.repeat_interleave(like.block_tokens) for part in (sequence, kv_head)]
    keys, values = (blocks.states(side, like.dtype) for side in SIDES)
    keys = _of_tokens(smoothing, *where).applied(_of_tokens(blocks.smoothing, *where).restored(keys))
    return replace(blocks, keys=_written(keys, values, blocks, like).keys)


def _without_padding(blocks: PackedSegment, padding: Tensor, like: PackedBlocks) -> PackedSegment:
    """Blocks without the padding that they begin with, int64 `[blocks]`. The tokens behind it move to the front.

    They are packed again, as a head reads the first tokens of a block. The last one is repeated, which widens no group.
    """
    at, size = padding.nonzero().flatten(), like.block_tokens
    if not len(at):
        return blocks
    within = (torch.arange(size, device=at.device) + padding[at, None]).clamp(max=size - 1)
    keys, values = (blocks.states(side, like.dtype)[:, :, (at[:, None] * size + within).flatten()] for side in SIDES)
    written = _written(keys, values, blocks.with_tensors(codes[:, :, at] for codes in blocks.tensors), like)
    return blocks.with_tensors(map(lambda codes, own: codes.index_copy(2, at, own), blocks.tensors, written.tensors))


def _written(keys: Tensor, values: Tensor, blocks: PackedSegment, like: PackedBlocks) -> PackedSegment:
    """Keys and values `[1, 1, tokens, head_dim]` in place of what as many blocks hold."""
    again, count = like.with_codes(*blocks.tensors), keys.shape[2] // like.block_tokens
    again.clear()
    again.prepare(count)
    again.write(0, keys, values)
    again.hold(count)
    return next(again.segments())


def _of_tokens(smoothing: KeySmoothing, sequence: Tensor, kv_head: Tensor) -> KeySmoothing:
    """The smoothing of tokens of several heads, one behind the other: `[1, 1, tokens, head_dim]`."""
    return smoothing.mapped(lambda vectors: vectors[sequence, kv_head, 0][None, None])


def _packed(store: QuantizedStore, tokens: HeldTokens, kept: KeptTokens) -> TokenStore:
    """A `QuantizedStore` or a `RaggedStore` of kept tokens: of a store, which may be the tail behind a flat part."""
    quantization = store.quantization
    # In one dtype, as a store that packs holds them.
    dtype = torch.promote_types(tokens.keys.dtype, tokens.values.dtype)
    states = tokens.keys.to(dtype), tokens.values.to(dtype)
    single = older = newer = kept.mask
    held = smoothing = None
    if tokens.blocks is not None and store.blocks is not None:
        smoothing = tokens.packed[-1].source.smoothing.mapped(lambda vectors: vectors.to(dtype))
        is_packed = tokens.blocks >= 0
        packed = (single & is_packed).long()
        single = single & ~is_packed
        # Before every block, and behind every kept one.
        older = single & (is_packed.long().cumsum(2) == 0)
        newer = single & (packed.cumsum(2) == packed.sum(2, keepdim=True))
        kept_of = torch.cat([torch.zeros_like(segment.counts) for segment in tokens.packed], 2)
        kept_of.scatter_add_(2, tokens.blocks.clamp(min=0), packed)
        held = _kept_blocks(tokens.packed, kept_of, store.blocks, dtype) if bool(kept_of.any()) else None
    counts, of_older, of_newer = (part.sum(2).cpu() for part in (single, older, newer))
    columns = places_of(single, int(counts.max()))
    tables = [counts] if held is None else [counts, of_older, held.counts]
    if all(bool((table == table[0, 0]).all()) for table in tables):
        return _even(quantization, states, columns, int(of_older[0, 0]), held, smoothing or UNSMOOTHED)
    key_form, value_form = map(form_of, states)
    quantizers = checked_quantizers(quantization, key_form, value_form)
    size, run = block_tokens(quantizers), _common_run(kept.mask)
    sinks = min(quantization.sink_tokens, int(of_older.min()))
    newest = _newest_tokens(of_newer, counts - sinks, size, run, quantization.residual_length)
    middle = counts - sinks - newest
    if smoothing is None:
        # The last columns, as many as the head with the fewest tokens has. Without any, nothing is smoothed.
        some, _ = taken(states, _last(columns, counts, min(size, int(counts.min()))))
        smoothing = KeySmoothing.for_keys(some.unsqueeze(2), quantizers["keys"])
    # So few that it packs none of them.
    tail = _even(quantization, states, torch.cat([columns[..., :sinks], _last(columns, counts, newest)], 2))
    tail.runs, tail.follows_packed = SmoothingRuns.of(smoothing), True
    part = PackedBlocks(quantizers, (flat_form(key_form), flat_form(value_form)), size, int((-(-middle // size)).sum()))
    _pack(part, states, columns, sinks, middle, smoothing)
    starts, pieces = (table.to(columns.device) for table in pieces_in_a_row(middle, size, size))
    if held is not None:
        # What is packed now stands behind the other blocks of each head.
        starts = torch.cat([held.starts, torch.where(pieces > 0, starts + held.codes[0].shape[2], 0)], 2)
        pieces = torch.cat([held.counts, pieces], 2)
        both = zip(held.codes, *(segment.tensors for segment in part.segments()), strict=True)
        part = part.with_codes(*(torch.cat(codes, 2) for codes in both))
    return RaggedStore(tail, FlatTokens.of(part, starts, pieces, None, sinks, sinks + newest - min(run, newest)))


def _newest_tokens(newer: Tensor, counts: Tensor, size: int, run: int, residual_length: int) -> int:
    """How many of the newest tokens go to the tail: few, and so many that the fewest places of new blocks are empty.

    Args:
        newer: single tokens of each head behind its blocks, int64 `[batch, kv_heads]`.
        counts: its single tokens without sinks, likewise.
        size: tokens of a block.
        run: newest tokens that all heads keep.
        residual_length: tokens that stay in full precision.
    """
    most = int(newer.minimum(counts).min())
    least = min(max(run, residual_length), most)
    lengths = torch.arange(least, min(least + size - 1, most) + 1)
    return int(lengths[((lengths - counts.flatten()[:, None]) % size).sum(0).argmin()])


def _last(columns: Tensor, counts: Tensor, count: int) -> Tensor:
    """The last `count` of the columns of each head, of which it has `counts`, int64 `[batch, kv_heads]` on the host."""
    return columns.gather(2, (counts[..., None] - count + torch.arange(count)).to(columns.device))


def _even(
    quantization: Quantization,
    states: KVPair,
    columns: Tensor,
    sinks: int = 0,
    held: _HeadBlocks | None = None,
    smoothing: KeySmoothing = UNSMOOTHED,
) -> QuantizedStore:
    """A store of heads that keep the same numbers of tokens.

    Args:
        quantization: how it packs tokens.
        states: keys and values of all single tokens.
        columns: which of them are kept, int64 `[batch, kv_heads, kept]`.
        sinks: how many of these stand before the packed blocks.
        held: the packed blocks, `None` if there are none.
        smoothing: how their keys were smoothed.
    """
    store = QuantizedStore(quantization)
    if held is not None:
        keys, values = taken(states, columns[..., :sinks])
        columns = columns[..., sinks:]
        tensors = {
            **{
                name: codes.view(*keys.shape[:2], -1, codes.shape[3])
                for name, codes in zip(PACKED_NAMES, held.codes, strict=False)
            },
            "keys": keys[:, :, :0],
            "values": values[:, :, :0],
            "block_ends": torch.tensor([0, *held.counts[0, 0].tolist()]),
            **({"sink_keys": keys, "sink_values": values} if sinks else {}),
            **SmoothingRuns.of(smoothing).state(),
        }
        store.load_state(tensors)
    rest = taken(states, columns)
    store.validate(*rest)
    store.append(*rest)
    return store


def _pack(
    blocks: PackedBlocks, states: KVPair, columns: Tensor, sinks: int, middle: Tensor, smoothing: KeySmoothing
) -> None:
    """Pack `middle` single tokens of each head after its sinks, int64 `[batch, kv_heads]` on the host.

    The last token of a head is repeated to the end of its last block, which widens no group.
    """
    size = blocks.block_tokens
    room = -(-middle // size) * size
    sequence, kv_head, token = (torch.arange(int(room.max())) < room[..., None]).nonzero(as_tuple=True)
    count = len(token) // size
    if not count:
        return
    token = sinks + token.minimum(middle[sequence, kv_head] - 1)
    sequence, kv_head, token = (part.to(columns.device) for part in (sequence, kv_head, token))
    where = sequence, kv_head, columns[sequence, kv_head, token]
    blocks.prepare(count)
    at_once = blocks.blocks_at_once
    for done in range(0, count, at_once):
        some = [part[done * size : (done + at_once) * size] for part in where]
        keys, values = (side[tuple(some)][None, None] for side in states)
        blocks.write(done, _of_tokens(smoothing, *some[:2]).applied(keys), values)
    blocks.hold(count)
