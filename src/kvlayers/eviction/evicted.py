"""What an eviction leaves of a store. Codes move as they are, and no token is quantized twice.

There is one exception. What an eviction leaves is read with the same vectors, those of the newest run of blocks. So
keys of older runs are packed again with these: at each eviction that begins behind a new run. Most sequences have one.
"""

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from kvlayers.core.buffer import form_of
from kvlayers.core.dense_store import may_share, store_of, without_spare_room
from kvlayers.core.token_store import KVPair, TokenStore
from kvlayers.errors import OptionError, StateMismatchError, UnsupportedLayerError
from kvlayers.eviction.flat_tokens import FlatTokens, flat_form, pieces_in_a_row
from kvlayers.eviction.held_tokens import HeldTokens, cannot_evict_from, taken
from kvlayers.eviction.ragged_store import RaggedStore
from kvlayers.eviction.selection import KeptTokens
from kvlayers.kernels.attention.segment_kinds import DENSE_PIECE_TOKENS
from kvlayers.kernels.codes.quantizer_contract import Side
from kvlayers.kernels.codes.smoothing import KeySmoothing
from kvlayers.quantized.checks import checked_quantizers
from kvlayers.quantized.packed_blocks import SIDES, PackedBlocks
from kvlayers.quantized.quantization import Quantization, block_tokens
from kvlayers.quantized.quantized_store import QuantizedStore
from kvlayers.quantized.smoothing_runs import SmoothingRuns

Rows = dict[Side, KVPair]
"""Codes and parameters of blocks one behind the other, each `[blocks, bytes or numbers]`."""


def check_evictable(quantization: Quantization) -> None:
    """Raise `OptionError` if KV heads have scales of their own: an eviction puts the blocks of all heads together."""
    for side in (quantization.keys, quantization.values):
        if len(side.scales) > 1:
            raise OptionError(
                f"`quantization` of a cache that evicts tokens must have one scale for all KV heads, got "
                f"{len(side.scales)} for the {side.side}: pass one number, such as the largest."
            )


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
        StateMismatchError: the numbers are not those of tokens that there are, or only a part of a block is kept.
        UnsupportedLayerError: the store is of another kind.
    """
    inner = store.tail if isinstance(store, RaggedStore) else store
    with torch.inference_mode(False), torch.no_grad():
        _check_kept(kept, tokens.keys, tokens.values)
        if isinstance(inner, QuantizedStore):
            flat = store.flat if isinstance(store, RaggedStore) else None
            left = _packed(inner.quantization, tokens, kept, _packed_pieces(flat, inner))
        elif may_share(inner):
            left = _dense((inner.growth_divisor, inner.minimum_growth), tokens, kept)
        else:
            raise cannot_evict_from(inner)
    return RaggedStore(left) if isinstance(store, RaggedStore) and not isinstance(left, RaggedStore) else left


def _check_kept(kept: KeptTokens, keys: Tensor, values: Tensor) -> None:
    shape, most = keys.shape[:2], kept.indices.shape[-1]
    if kept.indices.shape[:-1] != shape or kept.counts.shape != shape or values.shape[1] != shape[1]:
        raise StateMismatchError(
            f"Kept tokens must be [batch, kv_heads, most] = [{shape[0]}, {shape[1]}, most] for keys of {shape[1]} and "
            f"values of {values.shape[1]} kv_heads, got {list(kept.indices.shape)}: choose them from `held_tokens`."
        )
    if not 0 <= int(kept.counts.min()) <= int(kept.counts.max()) <= most or not 0 < most <= keys.shape[2]:
        raise StateMismatchError(
            f"Heads must keep 0 to {keys.shape[2]} tokens, got counts from {int(kept.counts.min())} to "
            f"{int(kept.counts.max())} with {most} indices: choose them from `held_tokens`."
        )


def _common_run(mask: Tensor) -> int:
    """How many of the newest tokens every head keeps, of a mask `[batch, kv_heads, tokens]`."""
    return int(mask.flatten(0, 1).all(0).flip(0).long().cumprod(0).sum())


def _dense(growth: tuple[int, int], tokens: HeldTokens, kept: KeptTokens) -> TokenStore:
    """A store in full precision."""
    keys, values = tokens.keys.detach(), tokens.values.detach()
    if kept.are_even:
        return store_of(taken(keys, kept.indices), taken(values, kept.indices), *growth)
    mask = kept.mask(keys.shape[2])
    run = _common_run(mask)
    first = keys.shape[2] - run
    tail = store_of(keys[:, :, first:], values[:, :, first:], *growth)
    places = mask[..., :first].nonzero(as_tuple=True)
    part = without_spare_room(keys[places][None, None], values[places][None, None])
    starts, counts = (table.to(keys.device) for table in pieces_in_a_row(kept.counts - run, DENSE_PIECE_TOKENS, 1))
    return RaggedStore.of(tail, FlatTokens.of(part, starts, counts))


# Packed blocks


@dataclass(frozen=True, eq=False)
class _Pieces:
    """The packed blocks of a store, numbered as in `HeldTokens.blocks`.

    Attributes:
        rows: the blocks, one behind the other.
        starts: number of each block of each head, int64 `[batch, kv_heads, held]`.
        counts: tokens of each of these blocks, int64 `[batch, kv_heads, held]`; 0 for no block.
        smoothing: how their keys were smoothed, `None` before one was packed.
    """

    rows: Rows
    starts: Tensor
    counts: Tensor
    smoothing: KeySmoothing | None


def _packed_pieces(flat: FlatTokens | None, tail: QuantizedStore) -> _Pieces | None:
    """The packed blocks of a store; `None` if it has no packed block.

    Raises:
        UnsupportedLayerError: the oldest tokens of a block were dropped.
    """
    blocks, runs = tail.blocks, tail.runs
    smoothing = runs.in_order[-1] if len(runs) else None
    found, numbers = [], []
    if flat is not None and isinstance(flat.part, PackedBlocks):
        found.append(_Pieces(_rows_of(flat.part), flat.starts, flat.counts, smoothing))
        numbers += [0] * flat.starts.shape[2]
    if blocks:
        found.append(_of_store(blocks, smoothing))
        numbers += runs.numbers(len(blocks))
    if not found or blocks is None:
        return None
    pieces = found[0]
    for behind in found[1:]:
        starts = torch.cat([pieces.starts, behind.starts + pieces.rows["keys"][0].shape[0]], 2)
        counts = torch.cat([pieces.counts, behind.counts], 2)
        pieces = _Pieces(_joined(pieces.rows, behind.rows), starts, counts, smoothing)
    return pieces if len(runs) == 1 else _in_last_run(pieces, blocks, runs, numbers)


def _of_store(blocks: PackedBlocks, smoothing: KeySmoothing | None) -> _Pieces:
    tensors = blocks.state()
    if int(tensors["block_ends"][0]):
        raise UnsupportedLayerError(
            "Tokens cannot be evicted from a block whose oldest tokens were dropped: drop no oldest tokens of a store "
            "from which tokens are evicted."
        )
    batch, kv_heads, held, _ = tensors["keys_codes"].shape
    starts = torch.arange(batch * kv_heads * held, device=tensors["keys_codes"].device).view(batch, kv_heads, held)
    return _Pieces(_rows_of(blocks), starts, tensors["block_ends"][1:].expand(batch, kv_heads, -1), smoothing)


def _rows_of(blocks: PackedBlocks) -> Rows:
    tensors = blocks.state()
    return {
        side: (tensors[f"{side}_codes"].flatten(0, 2), tensors[f"{side}_parameters"].flatten(0, 2)) for side in SIDES
    }


def _joined(first: Rows, second: Rows) -> Rows:
    both: Rows = {}
    for side in SIDES:
        codes, parameters = (torch.cat(pair) for pair in zip(first[side], second[side], strict=True))
        both[side] = codes, parameters
    return both


def _chosen(rows: Rows, numbers: Tensor) -> Rows:
    """Some of the rows: of int64 numbers `[...]`, codes and parameters `[..., bytes or numbers]`."""
    return {side: (codes[numbers], parameters[numbers]) for side, (codes, parameters) in rows.items()}


def _flat(rows: Rows) -> Rows:
    """The rows as blocks of one sequence with one head."""
    return {side: (codes[None, None], parameters[None, None]) for side, (codes, parameters) in rows.items()}


@torch.no_grad()
def _in_last_run(pieces: _Pieces, blocks: PackedBlocks, runs: SmoothingRuns, numbers: list[int]) -> _Pieces:
    """Pieces whose keys are smoothed as those of the last run.

    Args:
        pieces: the pieces.
        blocks: blocks of the same quantizers.
        runs: the runs.
        numbers: the run of each piece of a head.
    """
    run = torch.tensor(numbers, device=pieces.starts.device)
    older = (run < len(runs) - 1) & (pieces.counts > 0)
    sequence, kv_head, piece = older.nonzero(as_tuple=True)
    count = len(piece)
    if not count or pieces.smoothing is None:
        return pieces
    rows = _chosen(pieces.rows, pieces.starts[older])
    flat = blocks.with_codes(_flat(rows))
    segment = next(flat.segments())
    sequence, kv_head, run = (part.repeat_interleave(flat.block_tokens) for part in (sequence, kv_head, run[piece]))
    keys = _of_tokens(runs.vectors, sequence, kv_head, run).restored(segment.states("keys", flat.dtype))
    again = flat.fork()
    again.clear()
    again.prepare(count)
    keys = _of_tokens(pieces.smoothing, sequence, kv_head).applied(keys)
    again.write(0, keys, segment.states("values", flat.dtype))
    again.hold(count)
    # Behind the others, as sequences that went on from one beginning share rows and may have other vectors.
    starts = pieces.starts.clone()
    starts[older] = pieces.rows["keys"][0].shape[0] + torch.arange(count, device=starts.device)
    new: Rows = {"keys": _rows_of(again)["keys"], "values": rows["values"]}
    return replace(pieces, rows=_joined(pieces.rows, new), starts=starts)


def _of_tokens(
    smoothing: KeySmoothing, sequence: Tensor, kv_head: Tensor, run: Tensor | Literal[0] = 0
) -> KeySmoothing:
    """The smoothing of tokens of several heads and runs, one behind the other: `[1, 1, tokens, head_dim]`."""
    return smoothing.mapped(lambda vectors: vectors[sequence, kv_head, run][None, None])


@dataclass(frozen=True, eq=False)
class _Kept:
    """What is kept, apart for tokens in full precision and for blocks.

    Attributes:
        states: keys and values of all columns, in one dtype; those of packed tokens are not used.
        singles: the kept tokens in full precision.
        older: how many of them come before every block, int64 `[batch, kv_heads]` on the host.
        newer: how many of them come behind every kept block, likewise.
        blocks: tokens of each kept block, int64 `[batch, kv_heads, held]`, 0 for others; `None` if none is kept.
    """

    states: KVPair
    singles: KeptTokens
    older: Tensor
    newer: Tensor
    blocks: Tensor | None

    def first(self, skipped: int, count: int) -> Tensor:
        """Columns of the first single tokens of each head, int64 `[batch, kv_heads, count]`."""
        most = self.singles.indices.shape[2]
        places = (most - self.singles.counts + skipped)[..., None] + torch.arange(count)
        return self.singles.indices.gather(2, places.to(self.singles.indices.device))

    def last(self, count: int) -> Tensor:
        """Columns of the last single tokens of each head, likewise."""
        return self.singles.indices[..., self.singles.indices.shape[2] - count :]

    def states_of(self, columns: Tensor) -> KVPair:
        """Keys and values `[batch, kv_heads, count, head_dim]` of columns."""
        return taken(self.states[0], columns), taken(self.states[1], columns)


def _kept_of(tokens: HeldTokens, mask: Tensor, held: _Pieces | None) -> _Kept:
    """Tell apart kept tokens in full precision and kept blocks.

    Raises:
        StateMismatchError: only a part of a block is kept.
    """
    # In one dtype, as a store that packs holds them.
    dtype = torch.promote_types(tokens.keys.dtype, tokens.values.dtype)
    states = tokens.keys.to(dtype), tokens.values.to(dtype)
    single = older = newer = mask
    blocks = None
    if tokens.blocks is not None and held is not None:
        is_packed = tokens.blocks >= 0
        packed = (mask & is_packed).long()
        blocks = packed.new_zeros(held.counts.shape).scatter_add_(2, tokens.blocks.clamp(min=0), packed)
        if bool(((blocks != 0) & (blocks != held.counts)).any()):
            raise StateMismatchError(
                "The tokens of a packed block must be kept or evicted together, but only some of them are to be kept: "
                "choose whole blocks of `HeldTokens.blocks`."
            )
        single = mask & ~is_packed
        older = single & (is_packed.long().cumsum(2) == 0)
        newer = single & (packed.cumsum(2) == packed.sum(2, keepdim=True))
        blocks = blocks if bool(blocks.any()) else None
    counts, of_older, of_newer = (part.sum(2).cpu() for part in (single, older, newer))
    return _Kept(states, KeptTokens.of(single, counts), of_older, of_newer, blocks)


def _packed(quantization: Quantization, tokens: HeldTokens, kept: KeptTokens, held: _Pieces | None) -> TokenStore:
    """A `QuantizedStore` or a `RaggedStore` of kept tokens.

    Args:
        quantization: how tokens are packed.
        tokens: the tokens. States of packed ones are not used.
        kept: the columns to keep.
        held: the packed blocks.
    """
    mask = kept.mask(tokens.keys.shape[2])
    chosen = _kept_of(tokens, mask, held)
    counts = chosen.singles.counts
    key_form, value_form = map(form_of, chosen.states)
    quantizers = checked_quantizers(quantization, key_form, value_form)
    size = block_tokens(quantizers)
    if _is_even(chosen):
        return _even(quantization, chosen, held)
    run = 0 if kept.are_even else _common_run(mask)
    sinks = min(quantization.sink_tokens, int(chosen.older.min()))
    newest = _newest_tokens(chosen, sinks, size, run, quantization.residual_length)
    middle = counts - sinks - newest
    smoothing = None if held is None else held.smoothing
    if smoothing is None:
        # The last columns, as many as the head with the fewest tokens has. Without any, nothing is smoothed.
        some = taken(chosen.states[0], chosen.last(min(size, int(counts.min()))))
        smoothing = KeySmoothing.for_keys(some, quantizers["keys"])
    tail = QuantizedStore(quantization)
    ends = chosen.states_of(torch.cat([chosen.first(0, sinks), chosen.last(newest)], 2))
    tail.validate(*ends)
    tail.reserve_form(key_form, value_form)
    tail.runs, tail.follows_packed = SmoothingRuns.of(smoothing), True
    tail.append(*ends)
    fresh = PackedBlocks(
        quantizers, (flat_form(key_form), flat_form(value_form)), size, int((-(-middle // size)).sum())
    )
    _pack(fresh, chosen, sinks, middle, smoothing)
    part, starts, pieces = _flat_of(fresh, chosen.blocks, held, middle)
    return RaggedStore.of(tail, FlatTokens.of(part, starts, pieces, None, sinks, sinks + newest - min(run, newest)))


def _is_even(chosen: _Kept) -> bool:
    """Whether all heads keep the same numbers of tokens in full precision, of blocks, and of tokens in each block."""
    if not chosen.singles.are_even or chosen.blocks is None:
        return chosen.singles.are_even
    pieces = _compressed(chosen.blocks, chosen.blocks)
    return bool((chosen.older == chosen.older[0, 0]).all()) and bool((pieces == pieces[0, 0]).all())


def _even(quantization: Quantization, chosen: _Kept, held: _Pieces | None) -> QuantizedStore:
    """A store of heads that keep the same numbers of tokens and blocks."""
    store = QuantizedStore(quantization)
    sinks, count = 0, chosen.singles.indices.shape[2]
    if held is not None and chosen.blocks is not None:
        sinks = int(chosen.older[0, 0])
        keys, values = chosen.states_of(chosen.first(0, sinks))
        tensors = {"keys": keys[:, :, :0], "values": values[:, :, :0]}
        rows = _chosen(held.rows, _compressed(held.starts, chosen.blocks))
        for side, (codes, parameters) in rows.items():
            tensors |= {f"{side}_codes": codes, f"{side}_parameters": parameters}
        tensors["block_ends"] = torch.tensor([0, *_compressed(chosen.blocks, chosen.blocks)[0, 0].tolist()])
        if sinks:
            tensors |= {"sink_keys": keys, "sink_values": values}
        if held.smoothing is not None:
            tensors |= SmoothingRuns.of(held.smoothing).state()
        store.load_state(tensors)
    rest = chosen.states_of(chosen.first(sinks, count - sinks))
    store.validate(*rest)
    store.append(*rest)
    return store


def _compressed(numbers: Tensor, blocks: Tensor) -> Tensor:
    """The numbers of kept blocks, first, int64 `[batch, kv_heads, most]`; further ones are of blocks not kept."""
    most = int((blocks > 0).sum(2).max())
    order = (blocks == 0).byte().argsort(dim=2, stable=True)[..., :most]
    return numbers.gather(2, order)


def _newest_tokens(chosen: _Kept, sinks: int, size: int, run: int, residual_length: int) -> int:
    """How many of the newest tokens go to the tail: few, and so many that the fewest places of new blocks are empty."""
    counts = chosen.singles.counts - sinks
    most = int(torch.minimum(chosen.newer, counts).min())
    least = min(max(run, residual_length), most)
    lengths = torch.arange(least, min(least + size - 1, most) + 1)
    return int(lengths[((lengths - counts.flatten()[:, None]) % size).sum(0).argmin()])


def _pack(blocks: PackedBlocks, chosen: _Kept, sinks: int, middle: Tensor, smoothing: KeySmoothing) -> None:
    """Pack `middle` single tokens of each head after its sinks, int64 `[batch, kv_heads]` on the host.

    The last token of a head is repeated to the end of its last block, which widens no group.
    """
    size, indices = blocks.block_tokens, chosen.singles.indices
    room = (-(-middle // size) * size).flatten()
    count = int(room.sum()) // size
    if not count:
        return
    head = torch.arange(room.numel()).repeat_interleave(room)
    within = torch.arange(count * size) - (room.cumsum(0) - room)[head]
    first = indices.shape[2] - chosen.singles.counts.flatten() + sinks
    places = first[head] + torch.minimum(within, middle.flatten()[head] - 1)
    kv_heads = middle.shape[1]
    sequence, kv_head, places = (part.to(indices.device) for part in (head // kv_heads, head % kv_heads, places))
    columns = indices[sequence, kv_head, places]
    blocks.prepare(count)
    at_once = blocks.blocks_at_once
    for done in range(0, count, at_once):
        some = slice(done * size, (done + at_once) * size)
        where = sequence[some], kv_head[some], columns[some]
        keys, values = (side[where][None, None] for side in chosen.states)
        blocks.write(done, _of_tokens(smoothing, *where[:2]).applied(keys), values)
    blocks.hold(count)


def _flat_of(
    fresh: PackedBlocks, kept_blocks: Tensor | None, held: _Pieces | None, middle: Tensor
) -> tuple[PackedBlocks, Tensor, Tensor]:
    """Kept blocks, and behind them new ones with `middle` tokens of each head; starts and counts of all pieces."""
    tables = pieces_in_a_row(middle, fresh.block_tokens, fresh.block_tokens)
    starts, counts = (table.to((fresh if held is None else held.starts).device) for table in tables)
    if held is None or kept_blocks is None:
        return fresh, starts, counts
    is_kept = kept_blocks > 0
    rows = _chosen(held.rows, held.starts[is_kept])
    moved = rows["keys"][0].shape[0]
    if len(fresh):
        rows = _joined(rows, _rows_of(fresh))
    numbers = is_kept.flatten().long().cumsum(0).view_as(is_kept) - 1
    starts = torch.cat([torch.where(is_kept, numbers, 0), torch.where(counts > 0, starts + moved, 0)], 2)
    counts = torch.cat([kept_blocks, counts], 2)
    return fresh.with_codes(_flat(rows)), _compressed(starts, counts), _compressed(counts, counts)
