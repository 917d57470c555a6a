"""Eviction from stores that pack tokens: codes move as they are, and no token is quantized twice.

There is one exception. What an eviction leaves is read with the same vectors, those of the newest run of blocks. So
keys of older runs are packed again with these: at each eviction that begins behind a new run. Most sequences have one.
"""

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from kvlayers.core.buffer import form_of
from kvlayers.core.token_store import KVPair, TokenStore
from kvlayers.errors import OptionError, StateMismatchError, UnsupportedLayerError
from kvlayers.eviction.flat_tokens import FlatTokens, flat_form, pieces_in_a_row
from kvlayers.eviction.held_tokens import HeldTokens, taken
from kvlayers.eviction.ragged_store import RaggedStore
from kvlayers.eviction.selection import KeptTokens
from kvlayers.kernels.codes.quantizer_contract import Side
from kvlayers.kernels.codes.smoothing import KeySmoothing
from kvlayers.quantized.checks import checked_quantizers
from kvlayers.quantized.packed_blocks import SIDES, PackedBlocks
from kvlayers.quantized.quantization import Quantization, block_tokens
from kvlayers.quantized.quantized_store import QuantizedStore
from kvlayers.quantized.smoothing_runs import SmoothingRuns


def check_evictable(quantization: Quantization) -> None:
    """Raise `OptionError` if KV heads have scales of their own: an eviction puts the blocks of all heads together."""
    for side in (quantization.keys, quantization.values):
        if len(side.scales) > 1:
            raise OptionError(
                f"`quantization` of a cache that evicts tokens must have one scale for all KV heads, got "
                f"{len(side.scales)} for the {side.side}: pass one number, such as the largest."
            )


@dataclass(frozen=True, eq=False)
class PackedPieces:
    """The packed blocks of a store, one behind the other.

    Attributes:
        codes: codes and parameters of each side, `[blocks, bytes or numbers]`.
        starts: number of each block of each head, int64 `[batch, kv_heads, held]`.
        counts: tokens of each of these blocks, int64 `[batch, kv_heads, held]`; 0 for no block.
        smoothing: how their keys were smoothed, `None` before one was packed.
    """

    codes: dict[Side, KVPair]
    starts: Tensor
    counts: Tensor
    smoothing: KeySmoothing | None


def packed_pieces(store: TokenStore) -> PackedPieces | None:
    """The packed blocks of a store, numbered as in `HeldTokens.blocks`; `None` if it has no packed block.

    Raises:
        UnsupportedLayerError: the oldest tokens of a block were dropped.
    """
    flat = store.flat if isinstance(store, RaggedStore) else None
    tail = store.tail if isinstance(store, RaggedStore) else store
    if not isinstance(tail, QuantizedStore):
        return None
    blocks, runs = tail.parts.blocks, tail.parts.runs
    smoothing = runs.in_order[-1] if len(runs) else None
    found = []
    if flat is not None and isinstance(flat.part, PackedBlocks):
        found.append(PackedPieces(_rows_of(flat.part.state()), flat.starts, flat.counts, smoothing))
    numbers = [0] * found[0].starts.shape[2] if found else []
    if blocks:
        found.append(_of_store(blocks, smoothing))
        numbers += runs.numbers(len(blocks))
    if not found or blocks is None:
        return None
    pieces = found[0] if len(found) == 1 else _joined(*found)
    return pieces if len(runs) == 1 else _in_last_run(pieces, blocks, runs, numbers)


def _joined(first: PackedPieces, second: PackedPieces) -> PackedPieces:
    codes = _one_behind_the_other(first.codes, second.codes)
    starts = torch.cat([first.starts, second.starts + first.codes["keys"][0].shape[0]], 2)
    return PackedPieces(codes, starts, torch.cat([first.counts, second.counts], 2), first.smoothing)


def _one_behind_the_other(first: dict[Side, KVPair], second: dict[Side, KVPair]) -> dict[Side, KVPair]:
    """Codes and parameters of two lists of blocks in one."""
    both: dict[Side, KVPair] = {}
    for side in SIDES:
        codes, parameters = (torch.cat(pair) for pair in zip(first[side], second[side], strict=True))
        both[side] = codes, parameters
    return both


@torch.no_grad()
def _in_last_run(pieces: PackedPieces, blocks: PackedBlocks, runs: SmoothingRuns, numbers: list[int]) -> PackedPieces:
    """Pieces whose keys are smoothed as those of the last run.

    Args:
        pieces: the pieces.
        blocks: blocks of the same quantizers.
        runs: the runs.
        numbers: the run of each piece of a head.
    """
    run = torch.tensor(numbers, device=pieces.starts.device)
    sequence_of, head_of, piece = ((run < len(runs) - 1) & (pieces.counts > 0)).nonzero(as_tuple=True)
    rows = pieces.starts[sequence_of, head_of, piece]
    if not len(rows) or pieces.smoothing is None:
        return pieces
    older: dict[Side, KVPair] = {
        side: (codes[rows], parameters[rows]) for side, (codes, parameters) in pieces.codes.items()
    }
    flat = blocks.with_codes(_unpaged(older))
    segment = next(flat.segments())
    where = (part.repeat_interleave(flat.block_tokens) for part in (sequence_of, head_of, run[piece]))
    sequence, kv_head, run = where
    keys = _of_tokens(runs.vectors, sequence, kv_head, run).restored(segment.states("keys", flat.dtype))
    again = flat.fork()
    again.clear()
    again.prepare(len(rows))
    keys = _of_tokens(pieces.smoothing, sequence, kv_head).applied(keys)
    again.write(0, keys, segment.states("values", flat.dtype))
    again.hold(len(rows))
    # Behind the others, as sequences that went on from one beginning share rows and may have other vectors.
    starts = pieces.starts.clone()
    starts[sequence_of, head_of, piece] = pieces.codes["keys"][0].shape[0] + torch.arange(len(rows), device=rows.device)
    new: dict[Side, KVPair] = {"keys": _rows_of(again.state())["keys"], "values": older["values"]}
    return replace(pieces, codes=_one_behind_the_other(pieces.codes, new), starts=starts)


def _of_store(blocks: PackedBlocks, smoothing: KeySmoothing | None) -> PackedPieces:
    tensors = blocks.state()
    if int(tensors["block_ends"][0]):
        raise UnsupportedLayerError(
            "Tokens cannot be evicted from a block whose oldest tokens were dropped: drop no oldest tokens of a store "
            "from which tokens are evicted."
        )
    batch, kv_heads, held, _ = tensors["keys_codes"].shape
    starts = torch.arange(batch * kv_heads * held, device=tensors["keys_codes"].device).view(batch, kv_heads, held)
    counts = tensors["block_ends"][1:].expand(batch, kv_heads, -1)
    return PackedPieces(_rows_of(tensors), starts, counts, smoothing)


def _rows_of(tensors: dict[str, Tensor]) -> dict[Side, KVPair]:
    """Codes and parameters of each block, as rows, from the state of packed blocks."""
    return {
        side: (tensors[f"{side}_codes"].flatten(0, 2), tensors[f"{side}_parameters"].flatten(0, 2)) for side in SIDES
    }


@dataclass(frozen=True, eq=False)
class _Kept:
    """What is kept, apart for tokens in full precision and for blocks.

    Attributes:
        states: keys and values of all columns, in one dtype; those of packed tokens are not used.
        singles: columns of the kept tokens in full precision, ascending and right-aligned, int64
            `[batch, kv_heads, most]`.
        counts: how many they are, int64 `[batch, kv_heads]` on the host.
        older: how many of them come before every block, likewise.
        newer: how many of them come behind every kept block, likewise.
        blocks: tokens of each kept block, int64 `[batch, kv_heads, held]`, 0 for others; `None` without blocks.
    """

    states: KVPair
    singles: Tensor
    counts: Tensor
    older: Tensor
    newer: Tensor
    blocks: Tensor | None


def _kept_of(tokens: HeldTokens, kept: KeptTokens, held: PackedPieces | None) -> _Kept:
    """Tell apart kept tokens in full precision and kept blocks.

    Raises:
        StateMismatchError: only a part of a block is kept.
    """
    # In one dtype, as a store that packs holds them.
    dtype = torch.promote_types(tokens.keys.dtype, tokens.values.dtype)
    states = tokens.keys.to(dtype), tokens.values.to(dtype)
    device, columns = states[0].device, states[0].shape[2]
    is_kept = torch.zeros(*kept.indices.shape[:2], columns + 1, dtype=torch.bool, device=device)
    most = kept.indices.shape[2]
    absent = torch.arange(most) < (most - kept.counts)[..., None]
    is_kept.scatter_(2, torch.where(absent.to(device), columns, kept.indices.to(device)), True)
    single = older = newer = is_kept = is_kept[..., :-1]
    blocks = None
    if tokens.blocks is not None and held is not None:
        is_packed = tokens.blocks >= 0
        blocks = torch.zeros(held.counts.shape, dtype=torch.int64, device=device)
        blocks.scatter_add_(2, tokens.blocks.clamp(min=0), (is_kept & is_packed).long())
        if bool(((blocks != 0) & (blocks != held.counts)).any()):
            raise StateMismatchError(
                "The tokens of a packed block must be kept or evicted together, but only some of them are to be kept: "
                "choose whole blocks of `HeldTokens.blocks`."
            )
        single = is_kept & ~is_packed
        older = single & (is_packed.long().cumsum(2) == 0)
        kept_packed = (is_kept & is_packed).long()
        newer = single & (kept_packed.cumsum(2) == kept_packed.sum(2, keepdim=True))
    counts, of_older, of_newer = (mask.sum(2).cpu() for mask in (single, older, newer))
    # Stable sorting puts the kept columns last, in their order.
    singles = single.byte().argsort(dim=2, stable=True)[..., columns - int(counts.max()) :]
    return _Kept(states, singles, counts, of_older, of_newer, blocks)


def packed_evicted(
    quantization: Quantization, tokens: HeldTokens, kept: KeptTokens, held: PackedPieces | None, run: int
) -> TokenStore:
    """A `QuantizedStore` or a `RaggedStore` of kept tokens.

    Args:
        quantization: how tokens are packed.
        tokens: the tokens. States of packed ones are not used.
        kept: the columns to keep.
        held: the packed blocks.
        run: how many of the newest tokens every head keeps.
    """
    chosen = _kept_of(tokens, kept, held)
    key_form, value_form = map(form_of, chosen.states)
    quantizers = checked_quantizers(quantization, key_form, value_form)
    size = block_tokens(quantizers)
    if _is_even(chosen):
        return _even(quantization, chosen, held)
    sinks = min(quantization.sink_tokens, int(chosen.older.min()))
    newest = _newest_tokens(chosen, sinks, size, run, quantization.residual_length)
    middle = chosen.counts - sinks - newest
    smoothing = None if held is None else held.smoothing
    if smoothing is None:
        # The last columns, as many as the head with the fewest tokens has. Without any, nothing is smoothed.
        some = taken(chosen.states[0], _last(chosen, min(size, int(chosen.counts.min()))))
        smoothing = KeySmoothing.for_keys(some, quantizers["keys"])
    tail = QuantizedStore(quantization)
    ends = _singles(chosen, torch.cat([_first(chosen, 0, sinks), _last(chosen, newest)], 2))
    tail.validate(*ends)
    tail.reserve_form(key_form, value_form)
    tail.parts.runs, tail.parts.follows_packed = SmoothingRuns.of(smoothing), True
    tail.append(*ends)
    fresh = PackedBlocks(
        quantizers, (flat_form(key_form), flat_form(value_form)), size, int((-(-middle // size)).sum())
    )
    _pack(fresh, chosen, sinks, middle, smoothing)
    part, starts, counts = _flat_of(fresh, chosen.blocks, held, middle)
    return RaggedStore.of(tail, FlatTokens.of(part, starts, counts, None, sinks, sinks + newest - min(run, newest)))


def _is_even(chosen: _Kept) -> bool:
    """Whether all heads keep the same numbers of tokens in full precision, of blocks, and of tokens in each block."""
    first = chosen.counts[0, 0], chosen.older[0, 0]
    if bool((chosen.counts != first[0]).any() | (chosen.older != first[1]).any()):
        return False
    if chosen.blocks is None:
        return True
    pieces = _compressed(chosen.blocks, chosen.blocks)
    return bool((pieces == pieces[0, 0]).all())


def _even(quantization: Quantization, chosen: _Kept, held: PackedPieces | None) -> QuantizedStore:
    """A store of heads that keep the same numbers of tokens and blocks."""
    store = QuantizedStore(quantization)
    sinks, count = int(chosen.older[0, 0]), int(chosen.counts[0, 0])
    if held is not None and chosen.blocks is not None and bool((chosen.blocks > 0).any()):
        first = _singles(chosen, _first(chosen, 0, sinks))
        numbers = _compressed(held.starts, chosen.blocks)
        tensors = {"keys": first[0][:, :, :0], "values": first[1][:, :, :0]}
        for side in SIDES:
            codes, parameters = held.codes[side]
            tensors |= {f"{side}_codes": codes[numbers], f"{side}_parameters": parameters[numbers]}
        ends = _compressed(chosen.blocks, chosen.blocks)[0, 0].tolist()
        tensors["block_ends"] = torch.tensor([0, *ends])
        if sinks:
            tensors |= {"sink_keys": first[0], "sink_values": first[1]}
        if held.smoothing is not None:
            tensors |= SmoothingRuns.of(held.smoothing).state()
        store.load_state(tensors)
    else:
        sinks = 0
    rest = _singles(chosen, _first(chosen, sinks, count - sinks))
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
    most = int(torch.minimum(chosen.newer, chosen.counts - sinks).min())
    least = min(max(run, residual_length), most)
    lengths = torch.arange(least, min(least + size - 1, most) + 1)
    middle = (chosen.counts - sinks).flatten()[:, None] - lengths
    return int(lengths[((-middle) % size).sum(0).argmin()])


def _first(chosen: _Kept, skipped: int, count: int) -> Tensor:
    """Columns of the first single tokens of each head, int64 `[batch, kv_heads, count]`."""
    most = chosen.singles.shape[2]
    places = (most - chosen.counts + skipped)[..., None] + torch.arange(count)
    return chosen.singles.gather(2, places.to(chosen.singles.device))


def _last(chosen: _Kept, count: int) -> Tensor:
    return chosen.singles[..., chosen.singles.shape[2] - count :]


def _singles(chosen: _Kept, columns: Tensor) -> KVPair:
    keys, values = (taken(side, columns) for side in chosen.states)
    return keys, values


def _pack(blocks: PackedBlocks, chosen: _Kept, sinks: int, middle: Tensor, smoothing: KeySmoothing) -> None:
    """Pack `middle` single tokens of each head after its sinks, int64 `[batch, kv_heads]` on the host.

    The last token of a head is repeated to the end of its last block, which widens no group.
    """
    size = blocks.block_tokens
    room = -(-middle // size) * size
    count = int(room.sum()) // size
    if not count:
        return
    heads = room.flatten()
    head = torch.arange(heads.numel()).repeat_interleave(heads)
    within = torch.arange(int(heads.sum())) - (heads.cumsum(0) - heads)[head]
    first = chosen.singles.shape[2] - chosen.counts.flatten() + sinks
    places = first[head] + torch.minimum(within, middle.flatten()[head] - 1)
    device, kv_heads = chosen.singles.device, middle.shape[1]
    sequence, kv_head, places = (part.to(device) for part in (head // kv_heads, head % kv_heads, places))
    columns = chosen.singles[sequence, kv_head, places]
    blocks.prepare(count)
    at_once = blocks.blocks_at_once
    for done in range(0, count, at_once):
        some = slice(done * size, (done + at_once) * size)
        where = sequence[some], kv_head[some], columns[some]
        keys, values = (side[where][None, None] for side in chosen.states)
        blocks.write(done, _of_tokens(smoothing, *where[:2]).applied(keys), values)
    blocks.hold(count)


def _of_tokens(
    smoothing: KeySmoothing, sequence: Tensor, kv_head: Tensor, run: Tensor | Literal[0] = 0
) -> KeySmoothing:
    """The smoothing of tokens of several heads and runs, one behind the other: `[1, 1, tokens, head_dim]`."""
    return smoothing.mapped(lambda vectors: vectors[sequence, kv_head, run][None, None])


def _flat_of(
    fresh: PackedBlocks, kept_blocks: Tensor | None, held: PackedPieces | None, middle: Tensor
) -> tuple[PackedBlocks, Tensor, Tensor]:
    """Kept blocks, and behind them new ones with `middle` tokens of each head; starts and counts of all pieces."""
    tables = pieces_in_a_row(middle, fresh.block_tokens, fresh.block_tokens)
    starts, counts = (table.to((fresh if held is None else held.starts).device) for table in tables)
    if held is None or kept_blocks is None:
        return fresh, starts, counts
    is_kept = kept_blocks > 0
    moved = held.starts[is_kept]
    kept: dict[Side, KVPair] = {
        side: (codes[moved], parameters[moved]) for side, (codes, parameters) in held.codes.items()
    }
    if len(fresh):
        kept = _one_behind_the_other(kept, _rows_of(fresh.state()))
    numbers = is_kept.flatten().long().cumsum(0).view_as(is_kept) - 1
    behind = torch.where(counts > 0, starts + moved.shape[0], 0)
    all_starts = torch.cat([torch.where(is_kept, numbers, 0), behind], 2)
    all_counts = torch.cat([kept_blocks, counts], 2)
    part = fresh.with_codes(_unpaged(kept))
    return part, _compressed(all_starts, all_counts), _compressed(all_counts, all_counts)


def _unpaged(rows: dict[Side, KVPair]) -> dict[Side, KVPair]:
    """Rows of codes and parameters as blocks of one sequence with one head."""
    return {side: (codes[None, None], parameters[None, None]) for side, (codes, parameters) in rows.items()}
