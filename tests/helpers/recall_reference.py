"""Recall as a loop over pages, and attention as a softmax over the tokens that the loop allows."""

import math

import torch
from torch import Tensor

from kvlayers.layers import Recall


class RecallReference:
    """The states of one layer, and the pages of them that may be chosen.

    Args:
        recall: the options.
        first: position of the first token of the first page.
    """

    def __init__(self, recall: Recall, first: int = 0) -> None:
        self.recall = recall
        self.first = first
        self.keys = self.values = torch.empty(0)
        self.ends: list[int] | None = None
        """Ends of pages that are not at multiples of `page_tokens`, `None` if all are."""
        self.cut: dict[int, Tensor] = {}
        """By its start, the keys of a page that was cut later, `[batch, kv_heads, tokens, head_dim]`."""

    @property
    def length(self) -> int:
        return self.keys.shape[2] if self.keys.numel() else 0

    def update(self, keys: Tensor, values: Tensor) -> None:
        if not self.length:
            self.keys, self.values = keys.clone(), values.clone()
        else:
            self.keys, self.values = torch.cat([self.keys, keys], 2), torch.cat([self.values, values], 2)

    def truncate(self, length: int) -> None:
        self.keys, self.values = self.keys[:, :, :length], self.values[:, :, :length]

    def select(self, rows: list[int]) -> None:
        self.keys, self.values = self.keys[rows], self.values[rows]

    def copy(self) -> "RecallReference":
        twin = RecallReference(self.recall, self.first)
        twin.keys, twin.values, twin.ends = self.keys.clone(), self.values.clone(), self.ends
        return twin

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
        keys, values = (states.double().repeat_interleave(group, 1) for states in (self.keys, self.values))
        scores = query.double() @ keys.transpose(2, 3) / math.sqrt(query.shape[3])
        hidden = ~self.allowed(query, padding).repeat_interleave(group, 1)[:, :, None]
        scores = scores.masked_fill(hidden, -math.inf)
        scores = scores.masked_fill(~torch.ones(queries, length, dtype=torch.bool).tril(length - queries), -math.inf)
        return scores.softmax(-1) @ values
