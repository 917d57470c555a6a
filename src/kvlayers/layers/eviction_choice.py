"""An eviction: which of its tokens a layer keeps."""

from collections.abc import Sequence

from torch import Tensor

from kvlayers.eviction.kept import KeptTokens
from kvlayers.eviction.scoring import scores_of
from kvlayers.eviction.selection import select
from kvlayers.eviction.settings import EvictionSettings
from kvlayers.eviction.whole_blocks import block_scores, without_parts
from kvlayers.layers.eviction_progress import EvictionProgress
from kvlayers.layers.observed_queries import ObservedQueries
from kvlayers.stores.contract import KVPair, TokenStore
from kvlayers.stores.eviction import evicted
from kvlayers.stores.held_tokens import HeldTokens, held_tokens


def evict(
    store: TokenStore, progress: EvictionProgress, new: KVPair | None, queries: ObservedQueries, slack: int, seen: int
) -> tuple[TokenStore, EvictionProgress]:
    """A store with fewer tokens of each sequence that has more than `slack` tokens too many, and the progress.

    Args:
        store: the held tokens. It does not change.
        progress: how far the layer has evicted.
        new: states of the newest tokens, if they are not stored yet.
        queries: the queries that the rule may ask for.
        slack: tokens that a sequence may hold beyond what is allowed.
        seen: tokens seen, the new ones included.

    Raises:
        StateMismatchError: the rule returned something other than scores of these tokens.
    """
    tokens, front = held_tokens(store, new), progress.front
    counts = tokens.counts if front is None else tokens.counts - front[:, None]
    wanted = progress.account.wanted(seen, slack, counts.shape[0])
    # Queries of tokens that some head has evicted would not stand beside their keys.
    kept = _chosen(progress.settings, tokens, counts, queries.newest(seen - progress.whole_from), wanted)
    return evicted(store, tokens, kept), progress.after_eviction(seen, kept.counts, queries)


def _chosen(
    settings: EvictionSettings, tokens: HeldTokens, counts: Tensor, queries: Tensor | None, wanted: Sequence[int]
) -> KeptTokens:
    """The tokens that are kept.

    Args:
        settings: the rule, and which tokens are always kept.
        tokens: the tokens.
        counts: tokens of each head that are not padding, in its last columns, int64 `[batch, kv_heads]` on the host.
        queries: queries of the newest tokens, `[batch, heads, observed, key_head_dim]`.
        wanted: tokens that an average head is to keep of each sequence.

    Raises:
        StateMismatchError: the rule returned something other than scores of these tokens.
    """
    sinks, recent, blocks = settings.sink_tokens, settings.recent_tokens, tokens.blocks
    scores = scores_of(settings.rule, tokens.keys, tokens.values, queries, counts)
    front = scores.shape[2] - counts
    if blocks is not None:
        scores = block_scores(scores, blocks, sinks, recent, front)
    kept = select(scores, wanted, sinks=sinks, recent=recent, padding=front, head_budgets=settings.head_budgets)
    return kept if blocks is None else without_parts(kept, blocks, scores)
