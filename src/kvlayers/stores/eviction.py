"""What is left of a store after an eviction: a store of the kept tokens, in memory of its own."""

import torch
from torch import Tensor

from kvlayers.attention.segment_kinds import DENSE_PIECE_TOKENS
from kvlayers.errors import StateMismatchError
from kvlayers.eviction.selection import KeptTokens
from kvlayers.stores.contract import KVPair, TokenStore
from kvlayers.stores.dense import DenseStore, store_of
from kvlayers.stores.flat_tokens import DenseFlatTokens, PieceTables
from kvlayers.stores.held_tokens import HeldTokens, cannot_evict_from, taken
from kvlayers.stores.packed_eviction import packed_evicted, packed_pieces
from kvlayers.stores.quantized import QuantizedStore
from kvlayers.stores.ragged import RaggedStore


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
    states = tokens.keys, tokens.values
    with torch.inference_mode(False), torch.no_grad():
        _check_kept(kept, states)
        run = 0 if kept.are_even else _common_run(kept, states[0].shape[2])
        if isinstance(inner, QuantizedStore):
            left = packed_evicted(inner.quantization, tokens, kept, packed_pieces(store), run)
        elif isinstance(inner, DenseStore):
            left = _dense((inner.growth_divisor, inner.minimum_growth), states, kept, run)
        else:
            raise cannot_evict_from(inner)
    return RaggedStore(left) if isinstance(store, RaggedStore) and not isinstance(left, RaggedStore) else left


def _check_kept(kept: KeptTokens, states: KVPair) -> None:
    keys, values = states
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


def _common_run(kept: KeptTokens, tokens: int) -> int:
    """How many of the newest of `tokens` tokens every head keeps."""
    most = kept.indices.shape[2]
    newest = torch.arange(tokens - most, tokens, device=kept.indices.device)
    are_newest = (kept.indices == newest).flip(-1).flatten(0, 1).all(0)
    return min(int(are_newest.long().cumprod(0).sum()), int(kept.counts.min()))


def _dense(growth: tuple[int, int], states: KVPair, kept: KeptTokens, run: int) -> TokenStore:
    """A store in full precision of kept tokens among `states`, of which every head keeps the newest `run`."""
    keys, values = (side.detach() for side in states)
    if kept.are_even:
        return store_of(taken(keys, kept.indices), taken(values, kept.indices), *growth)
    first = keys.shape[2] - run
    tail = store_of(keys[:, :, first:], values[:, :, first:], *growth)
    counts = kept.counts - run
    places = _first_places(kept, counts)
    tables = PieceTables.of_heads(counts, DENSE_PIECE_TOKENS)
    flat = DenseFlatTokens.of(keys[places][None, None], values[places][None, None], tables)
    return RaggedStore.of(tail, flat)


def _first_places(kept: KeptTokens, counts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Sequences, heads and tokens, each int64 `[sum of counts]`, of the first kept tokens of each head.

    Args:
        kept: the kept tokens.
        counts: how many to take of each head, int64 `[batch, kv_heads]` on the host.
    """
    indices = kept.indices
    first = (indices.shape[2] - kept.counts)[..., None]
    columns = torch.arange(indices.shape[2])
    sequences, heads, places = ((columns >= first) & (columns < first + counts[..., None])).nonzero(as_tuple=True)
    sequences, heads, places = (part.to(indices.device) for part in (sequences, heads, places))
    return sequences, heads, indices[sequences, heads, places]
