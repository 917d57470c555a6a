"""An eviction: which of its tokens a layer keeps."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import Self

from kvlayers.attention.packed_tensor import as_dense
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
    tokens = TokensToScore.of(held_tokens(store), new, progress.front)
    wanted = progress.account.wanted(seen, slack, tokens.keys.shape[0])
    # Queries of tokens that some head has evicted would not stand beside their keys.
    kept = tokens.kept(progress.settings, queries.newest(seen - progress.whole_from), wanted)
    return evicted(store, new, kept), progress.after_eviction(seen, kept.counts, queries)


@dataclass(frozen=True, eq=False)
class TokensToScore:
    """The held tokens of a layer and new ones behind them.

    Attributes:
        keys: `[batch, kv_heads, columns, key_head_dim]`.
        values: `[batch, kv_heads, columns, value_head_dim]`.
        counts: tokens of each head, in its last columns, int64 `[batch, kv_heads]` on the host.
        blocks: number of the packed block of each token, -1 for tokens in full precision, int64
            `[batch, kv_heads, columns]`; `None` if no token is packed.
    """

    keys: Tensor
    values: Tensor
    counts: Tensor
    blocks: Tensor | None

    @classmethod
    def of(cls, held: HeldTokens | None, new: KVPair | None, padding: Tensor | None) -> Self:
        """Tokens of a store, if it has any, and new states.

        Args:
            held: the tokens of the store.
            new: states behind them.
            padding: places in front of the tokens of each sequence that are padding, int64 `[batch]` on the host; more
                than there are if its first token has not come.
        """
        pairs = [] if held is None or not held.keys.shape[2] else [(held.keys, held.values)]
        if new is not None:
            pairs.append((as_dense(new[0]), as_dense(new[1])))
        keys, values = (torch.cat(side, 2) if len(side) > 1 else side[0] for side in zip(*pairs, strict=True))
        added = 0 if new is None else new[0].shape[2]
        counts = torch.full(keys.shape[:2], added)
        if held is not None and held.keys.shape[2]:
            counts = held.counts + added
        if padding is not None:
            counts = (counts - padding[:, None]).clamp(min=0)
        blocks = None if held is None else held.blocks
        if blocks is not None and added:
            blocks = torch.cat([blocks, blocks.new_full((*blocks.shape[:2], added), -1)], 2)
        return cls(keys, values, counts, blocks)

    def kept(self, settings: EvictionSettings, queries: Tensor | None, wanted: Sequence[int]) -> KeptTokens:
        """The tokens that are kept.

        Args:
            settings: the rule, and which tokens are always kept.
            queries: queries of the newest tokens, `[batch, heads, observed, key_head_dim]`.
            wanted: tokens that an average head is to keep of each sequence.

        Raises:
            StateMismatchError: the rule returned something other than scores of these tokens.
        """
        scores = scores_of(settings.rule, self.keys, self.values, queries, self.counts)
        front = scores.shape[2] - self.counts
        if self.blocks is not None:
            scores = block_scores(scores, self.blocks, settings.sink_tokens, settings.recent_tokens, front)
        kept = select(
            scores,
            wanted,
            sinks=settings.sink_tokens,
            recent=settings.recent_tokens,
            padding=front,
            head_budgets=settings.head_budgets,
        )
        return kept if self.blocks is None else without_parts(kept, self.blocks, scores)
