"""What an eviction leaves of a store. Codes move as they are, and no token is quantized twice.

There is one exception. What an eviction leaves is read with the same vectors, those of the newest run of blocks. So
keys of older runs are packed again with these: at each eviction that begins behind a new run. Most sequences have one.
"""

from dataclasses import dataclass, replace
from typing import Literal, cast

import torch
from torch import Tensor

from kvlayers.core.buffer import form_of
from kvlayers.core.dense_store import DenseStore, filled, without_spare_room
from kvlayers.core.token_store import KVPair, TokenStore
from kvlayers.errors import StateMismatchError, UnsupportedLayerError
from kvlayers.eviction.flat_tokens import FlatTokens, flat_form, pieces_in_a_row
from kvlayers.eviction.held_tokens import HeldTokens, taken
from kvlayers.eviction.ragged_store import RaggedStore
from kvlayers.eviction.selection import KeptTokens, places_of
from kvlayers.kernels.attention.segment_kinds import DENSE_PIECE_TOKENS
from kvlayers.kernels.codes.smoothing import KeySmoothing
from kvlayers.quantized.checks import checked_quantizers
from kvlayers.quantized.packed_blocks import SIDES, PackedBlocks
from kvlayers.quantized.quantization import Quantization, block_tokens
from kvlayers.quantized.quantized_store import QuantizedStore
from kvlayers.quantized.smoothing_runs import SmoothingRuns

Rows = dict[str, Tensor]
"""Codes and parameters of blocks one behind the other, each `[blocks, bytes or numbers]`, by their names in a state."""


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
    inner, flat = (store.tail, store.flat) if isinstance(store, RaggedStore) else (store, None)
    with torch.inference_mode(False), torch.no_grad():
        if isinstance(inner, QuantizedStore):
            return _packed(inner, flat, tokens, kept)
        return _dense(cast("DenseStore", inner), tokens, kept)


def _common_run(mask: Tensor) -> int:
    """How many of the newest tokens every head keeps, of a mask `[batch, kv_heads, tokens]`."""
    return int(mask.flatten(0, 1).all(0).flip(0).long().cumprod(0).sum())


def _dense(store: DenseStore, tokens: HeldTokens, kept: KeptTokens) -> TokenStore:
    """A store in full precision, which grows as `store` does."""
    keys, values, growth = tokens.keys.detach(), tokens.values.detach(), (store.growth_divisor, store.minimum_growth)
    mask = kept.mask
    if kept.are_even:
        columns = places_of(mask, int(kept.counts.max()))
        return filled(DenseStore(None, *growth), taken(keys, columns), taken(values, columns))
    run = _common_run(mask)
    first = keys.shape[2] - run
    tail = filled(DenseStore(None, *growth), keys[:, :, first:], values[:, :, first:])
    places = mask[..., :first].nonzero(as_tuple=True)
    part = without_spare_room(keys[places][None, None], values[places][None, None])
    starts, counts = (table.to(keys.device) for table in pieces_in_a_row(kept.counts - run, DENSE_PIECE_TOKENS, 1))
    return RaggedStore(tail, FlatTokens.of(part, starts, counts))


# Packed blocks


@dataclass(frozen=True, eq=False)
class _HeadBlocks:
    """Packed blocks of each head, numbered as in `HeldTokens.blocks`.

    Attributes:
        rows: the blocks, one behind the other.
        starts: row of each block of each head, int64 `[batch, kv_heads, held]`.
        counts: tokens of each of these blocks, int64 `[batch, kv_heads, held]`; 0 for no block.
        runs: the run of each of these blocks, whose vectors smoothed its keys, int64 `[held]`.
    """

    rows: Rows
    starts: Tensor
    counts: Tensor
    runs: Tensor

    def compacted(self) -> "_HeadBlocks":
        """The same with the rows of its blocks alone, in order, and tables as wide as the most blocks of a head."""
        is_kept = self.counts > 0
        starts, is_block = (table.to(is_kept.device) for table in pieces_in_a_row(is_kept.sum(2).cpu(), 1, 1))
        order = places_of(is_kept, starts.shape[2])
        counts = self.counts.gather(2, order) * is_block
        return replace(self, rows=_chosen(self.rows, self.starts[is_kept]), starts=starts, counts=counts)

    def followed_by(self, other: "_HeadBlocks") -> "_HeadBlocks":
        """The same with other blocks of each head behind them."""
        starts = other.starts + len(self.rows["keys_codes"])
        return _HeadBlocks(
            {name: torch.cat([rows, other.rows[name]]) for name, rows in self.rows.items()},
            torch.cat([self.starts, torch.where(other.counts > 0, starts, 0)], 2),
            torch.cat([self.counts, other.counts], 2),
            torch.cat([self.runs, other.runs]),
        )

    def in_run(self, runs: SmoothingRuns, like: PackedBlocks | None) -> "_HeadBlocks":
        """The same with keys that are smoothed as those of the last of the runs: older ones are packed again.

        Args:
            runs: the runs.
            like: blocks of the same quantizers.
        """
        older = (self.runs < len(runs) - 1) & (self.counts > 0)
        sequence, kv_head, block = older.nonzero(as_tuple=True)
        count = len(block)
        if not count or like is None:
            return self
        flat = _flat(like, _chosen(self.rows, self.starts[older]))
        segment = next(flat.segments())
        where = [part.repeat_interleave(flat.block_tokens) for part in (sequence, kv_head, self.runs[block])]
        keys = _of_tokens(runs.vectors, *where).restored(segment.states("keys", flat.dtype))
        keys = _of_tokens(runs.in_order[-1], *where[:2]).applied(keys)
        again = flat.fork()
        again.clear()
        again.prepare(count)
        again.write(0, keys, segment.states("values", flat.dtype))
        again.hold(count)
        # Behind the others, as sequences that went on from one beginning share rows and may have other vectors.
        starts = self.starts.masked_scatter(older, len(self.rows["keys_codes"]) + torch.arange(count).to(older.device))
        packed = _rows_of(again) | {name: rows for name, rows in _rows_of(flat).items() if name.startswith("values")}
        return replace(
            self, rows={name: torch.cat([rows, packed[name]]) for name, rows in self.rows.items()}, starts=starts
        )


def _blocks_of(flat: FlatTokens | None, tail: QuantizedStore) -> _HeadBlocks | None:
    """The packed blocks of a flat part and of the tail behind it; `None` if there is no packed block.

    Raises:
        UnsupportedLayerError: the oldest tokens of a block were dropped.
    """
    held, blocks = None, tail.blocks
    if flat is not None and isinstance(flat.part, PackedBlocks):
        held = _HeadBlocks(_rows_of(flat.part), flat.starts, flat.counts, torch.zeros_like(flat.starts[0, 0]))
    if not blocks:
        return held
    tensors = blocks.state()
    if int(tensors["block_ends"][0]):
        raise UnsupportedLayerError(
            "Tokens cannot be evicted from a block whose oldest tokens were dropped: drop no oldest tokens of a "
            "store from which tokens are evicted."
        )
    shape, device = tensors["keys_codes"].shape[:3], tensors["keys_codes"].device
    starts = torch.arange(shape.numel(), device=device).view(shape)
    runs = torch.tensor(tail.runs.numbers(len(blocks)), device=device)
    of_tail = _HeadBlocks(_rows_of(blocks), starts, tensors["block_ends"][1:].expand(shape), runs)
    return of_tail if held is None else held.followed_by(of_tail)


def _rows_of(blocks: PackedBlocks) -> Rows:
    return {name: rows.flatten(0, 2) for name, rows in blocks.state().items() if name != "block_ends"}


def _chosen(rows: Rows, numbers: Tensor) -> Rows:
    return {name: of_all[numbers] for name, of_all in rows.items()}


def _flat(like: PackedBlocks, rows: Rows) -> PackedBlocks:
    """The rows as blocks of one sequence with one head, of the quantizers of `like`."""
    return like.with_codes(
        {side: (rows[f"{side}_codes"][None, None], rows[f"{side}_parameters"][None, None]) for side in SIDES}
    )


def _of_tokens(
    smoothing: KeySmoothing, sequence: Tensor, kv_head: Tensor, run: Tensor | Literal[0] = 0
) -> KeySmoothing:
    """The smoothing of tokens of several heads and runs, one behind the other: `[1, 1, tokens, head_dim]`."""
    return smoothing.mapped(lambda vectors: vectors[sequence, kv_head, run][None, None])


def _packed(store: QuantizedStore, flat: FlatTokens | None, tokens: HeldTokens, kept: KeptTokens) -> TokenStore:
    """A `QuantizedStore` or a `RaggedStore` of kept tokens: of a store, and of a flat part before it."""
    quantization, runs, held = store.quantization, store.runs, _blocks_of(flat, store)
    smoothing = None if held is None or not len(runs) else runs.in_order[-1]
    # In one dtype, as a store that packs holds them.
    dtype = torch.promote_types(tokens.keys.dtype, tokens.values.dtype)
    states = tokens.keys.to(dtype), tokens.values.to(dtype)
    single = older = newer = kept.mask
    if held is not None and tokens.blocks is not None:
        is_packed = tokens.blocks >= 0
        packed = (single & is_packed).long()
        single = single & ~is_packed
        # Before every block, and behind every kept one.
        older = single & (is_packed.long().cumsum(2) == 0)
        newer = single & (packed.cumsum(2) == packed.sum(2, keepdim=True))
        kept_of = torch.zeros_like(held.counts).scatter_add_(2, tokens.blocks.clamp(min=0), packed)
        held = replace(held, counts=kept_of).in_run(runs, store.blocks).compacted() if bool(kept_of.any()) else None
    counts, of_older, of_newer = (part.sum(2).cpu() for part in (single, older, newer))
    columns = places_of(single, int(counts.max()))
    tables = [counts] if held is None else [counts, of_older, held.counts]
    if all(bool((table == table[0, 0]).all()) for table in tables):
        return _even(quantization, states, columns, int(of_older[0, 0]), held, smoothing)
    key_form, value_form = map(form_of, states)
    quantizers = checked_quantizers(quantization, key_form, value_form)
    size, run = block_tokens(quantizers), _common_run(kept.mask)
    sinks = min(quantization.sink_tokens, int(of_older.min()))
    newest = _newest_tokens(of_newer, counts - sinks, size, run, quantization.residual_length)
    middle = counts - sinks - newest
    if smoothing is None:
        # The last columns, as many as the head with the fewest tokens has. Without any, nothing is smoothed.
        some = taken(states[0], _last(columns, counts, min(size, int(counts.min()))))
        smoothing = KeySmoothing.for_keys(some.unsqueeze(2), quantizers["keys"])
    # So few that it packs none of them.
    tail = _even(quantization, states, torch.cat([columns[..., :sinks], _last(columns, counts, newest)], 2))
    tail.runs, tail.follows_packed = SmoothingRuns.of(smoothing), True
    part = PackedBlocks(quantizers, (flat_form(key_form), flat_form(value_form)), size, int((-(-middle // size)).sum()))
    _pack(part, states, columns, sinks, middle, smoothing)
    starts, pieces = (table.to(columns.device) for table in pieces_in_a_row(middle, size, size))
    if held is not None:
        if len(part):
            held = held.followed_by(_HeadBlocks(_rows_of(part), starts, pieces, starts[0, 0]))
        part, starts, pieces = _flat(part, held.rows), held.starts, held.counts
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


def _states_of(states: KVPair, columns: Tensor) -> KVPair:
    """Keys and values `[batch, kv_heads, count, head_dim]` of columns."""
    return taken(states[0], columns), taken(states[1], columns)


def _even(
    quantization: Quantization,
    states: KVPair,
    columns: Tensor,
    sinks: int = 0,
    held: _HeadBlocks | None = None,
    smoothing: KeySmoothing | None = None,
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
        keys, values = _states_of(states, columns[..., :sinks])
        columns = columns[..., sinks:]
        tensors = {"keys": keys[:, :, :0], "values": values[:, :, :0]}
        tensors |= {name: torch.unflatten(rows, 0, (*keys.shape[:2], -1)) for name, rows in held.rows.items()}
        tensors["block_ends"] = torch.tensor([0, *held.counts[0, 0].tolist()])
        if sinks:
            tensors |= {"sink_keys": keys, "sink_values": values}
        if smoothing is not None:
            tensors |= SmoothingRuns.of(smoothing).state()
        store.load_state(tensors)
    rest = _states_of(states, columns)
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
