"""Recall as a loop over pages, and attention as a softmax over the tokens that the loop allows."""

import torch
from torch import Tensor

from kvlayers.layers import Recall
from oracle import Oracle
from packed_reference import attention


class RecallReference(Oracle):
    """The states of one layer, and the pages of them that may be chosen.

    Args:
        recall: the options.
        first: position of the first token of the first page.
    """

    def __init__(self, recall: Recall, first: int = 0) -> None:
        super().__init__()
        self.recall = recall
        self.first = first
        self.ends: list[int] | None = None
        """Ends of pages that are not at multiples of `page_tokens`, `None` if all are."""
        self.cut: dict[int, Tensor] = {}
        """By its start, the keys of a page that was cut later, `[batch, kv_heads, tokens, head_dim]`."""

    def pages(self) -> list[tuple[int, int]]:
        size = self.recall.page_tokens
        if self.ends is not None:
            starts = [self.first, *self.ends[:-1]]
            return list(zip(starts, self.ends, strict=True))
        starts = list(range(self.first, self.length - size + 1, size))
        return [(start, start + size) for start in starts]

    def bound(self, query: Tensor, keys: Tensor) -> float:
        """The highest bound `[group, head_dim]` queries have for keys `[tokens, head_dim]`."""
        highest, lowest = keys.amax(0).double(), keys.amin(0).double()
        return max(float(torch.maximum(row * highest, row * lowest).sum()) for row in query.double())

    def allowed(self, query: Tensor, padding: list[int] | None = None) -> Tensor:
        """Which tokens each KV head reads, bool `[batch, kv_heads, tokens]`."""
        batch, kv_heads, length, head_dim = self.keys.shape
        allowed = torch.ones(batch, kv_heads, length, dtype=torch.bool)
        recall, before = self.recall, padding or [0] * batch
        if recall.pages == "all" or query.shape[2] > 1:
            return allowed
        may_go = [(start, end) for start, end in self.pages() if end <= length - recall.recent_tokens]
        if len([start for start, _ in may_go if start >= recall.sink_tokens]) <= recall.pages:
            return allowed
        rows = query.reshape(batch, kv_heads, -1, head_dim)
        for sequence in range(batch):
            padded = before[sequence]
            first = padded + recall.sink_tokens if recall.sink_tokens else 0
            own = [page for page in may_go if page[1] > padded and page[0] >= first]
            for head in range(kv_heads):
                bounds = {}
                for start, end in own:
                    keys = self.cut.get(start, self.keys[:, :, start:end])
                    bounds[start, end] = self.bound(rows[sequence, head], keys[sequence, head])
                for start, end in sorted(own, key=lambda page: -bounds[page])[recall.pages :]:
                    allowed[sequence, head, start:end] = False
            allowed[sequence, :, :padded] = False
        return allowed

    def attend(self, query: Tensor, padding: list[int] | None = None) -> Tensor:
        """Attention of `[batch, heads, queries, head_dim]`, float64; several queries are those of the newest tokens."""
        group, queries, length = query.shape[1] // self.keys.shape[1], query.shape[2], self.length
        seen = self.allowed(query, padding).repeat_interleave(group, 1)[:, :, None]
        causal = torch.ones(queries, length, dtype=torch.bool).tril(length - queries)
        return attention(query, self.keys, self.values, seen & causal)
