"""Attention of many sequences to a prefix that they share, and to the tokens of each sequence.

The prefix is held and read once: the queries of all sequences that share it are grouped, as if they were queries of one
sequence. The two parts are merged by their log-sum-exp, as in Hydragen (Juravsky et al. 2024, arXiv:2402.05099).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvlayers.attention import reference
from kvlayers.attention.segments import KVSegments
from kvlayers.quantizers.contract import Side


@dataclass(frozen=True, eq=False)
class SharedPrefixSegments:
    """The tokens that the queries of an update attend to if several sequences share a prefix.

    Attributes:
        prefix: the prefixes; each is one sequence of its batch.
        own: the tokens of each sequence after its prefix, `None` if there are none yet.
        prefix_of: for each sequence the index of its prefix.
    """

    prefix: KVSegments
    own: KVSegments | None
    prefix_of: tuple[int, ...]

    @property
    def tokens(self) -> int:
        """Tokens that a sequence attends to."""
        return self.prefix.tokens + (0 if self.own is None else self.own.tokens)

    @property
    def batch(self) -> int:
        """Sequences side by side."""
        return len(self.prefix_of)

    @property
    def kv_heads(self) -> int:
        """Heads that have keys and values."""
        return self.prefix.kv_heads

    def dense_states(self) -> list[Tensor]:
        """All tensors in full precision."""
        return [*self.prefix.dense_states(), *([] if self.own is None else self.own.dense_states())]

    def dense(self, side: Side, dtype: torch.dtype) -> Tensor:
        """All states of one side in full precision, `[batch, kv_heads, tokens, head_dim]`: a copy for each sequence."""
        shared = self.prefix.dense(side, dtype)
        shared = shared.index_select(0, torch.tensor(self.prefix_of, device=shared.device))
        return shared if self.own is None else torch.cat([shared, self.own.dense(side, dtype)], dim=2)

    def attend(self, query: Tensor, mask: Tensor | None, scale: float) -> Tensor:
        """Softmax attention; arguments and result are those of `reference.attend`."""
        split = self.prefix.tokens
        shared_mask, own_mask = (None, None) if mask is None else (mask[..., :split], mask[..., split:])

        def over_prefix(prefix: KVSegments, rows: Tensor, rows_mask: Tensor | None) -> tuple[Tensor, Tensor]:
            return reference.attend_partly(rows, prefix, rows_mask, scale)

        parts = [self._by_prefix(query, shared_mask, over_prefix)]
        if self.own is not None and self.own.tokens:
            parts.append(reference.attend_partly(query, self.own, own_mask, scale))
        attended, _ = reference.merge([out for out, _ in parts], [logsumexp for _, logsumexp in parts])
        return attended.to(query.dtype)

    def scores(self, query: Tensor) -> Tensor:
        """Products with all keys; arguments and result are those of `reference.scores`."""
        products = self._by_prefix(query, None, lambda prefix, rows, _: (reference.scores(rows, prefix),))[0]
        if self.own is None or not self.own.tokens:
            return products
        return torch.cat([products, reference.scores(query, self.own)], dim=3)

    def combine(self, weights: Tensor) -> Tensor:
        """Weighted sums of all values; arguments and result are those of `reference.combine`."""
        split = self.prefix.tokens
        sums = self._by_prefix(
            weights[..., :split], None, lambda prefix, rows, _: (reference.combine(rows, prefix).float(),)
        )[0]
        if self.own is not None and self.own.tokens:
            sums = sums + reference.combine(weights[..., split:], self.own).float()
        return sums.to(weights.dtype)

    def _by_prefix(
        self,
        rows: Tensor,
        mask: Tensor | None,
        compute: Callable[[KVSegments, Tensor, Tensor | None], Sequence[Tensor]],
    ) -> Sequence[Tensor]:
        """Results of `compute` for each prefix and the rows, `[batch, heads, queries, any]`, of its sequences."""
        prefixes = self.prefix.batch
        if prefixes and self.prefix_of == tuple(sorted(self.prefix_of)) and self._is_even():
            found = compute(self.prefix, _group(rows, prefixes), None if mask is None else _group(mask, prefixes))
            return [_ungroup(result, len(self.prefix_of)) for result in found]
        pieces: list[Sequence[Tensor]] = []
        order: list[int] = []
        for prefix, members in self._members():
            index = torch.tensor(members, device=rows.device)
            group = _group(rows.index_select(0, index), 1)
            group_mask = None if mask is None else _group(mask.index_select(0, index), 1)
            found = compute(self.prefix.of_sequence(prefix), group, group_mask)
            pieces.append([_ungroup(result, len(members)) for result in found])
            order += members
        back = torch.tensor(order, device=rows.device).argsort()
        return [torch.cat(results).index_select(0, back) for results in zip(*pieces, strict=True)]

    def _is_even(self) -> bool:
        counts = {self.prefix_of.count(prefix) for prefix in range(self.prefix.batch)}
        return len(counts) == 1

    def _members(self) -> Iterator[tuple[int, list[int]]]:
        for prefix in sorted(set(self.prefix_of)):
            yield prefix, [row for row, of in enumerate(self.prefix_of) if of == prefix]


def _group(rows: Tensor, prefixes: int) -> Tensor:
    """Rows `[prefixes * sequences, heads, queries, any]` as `[prefixes, heads, sequences * queries, any]`."""
    batch, heads, queries, width = rows.shape
    sequences = batch // prefixes
    grouped = rows.reshape(prefixes, sequences, heads, queries, width).transpose(1, 2)
    return grouped.reshape(prefixes, heads, sequences * queries, width)


def _ungroup(result: Tensor, batch: int) -> Tensor:
    """Split the results of grouped queries back into sequences. Inverse of `_group`."""
    prefixes, heads, rows, *rest = result.shape
    sequences = batch // prefixes
    queries = rows // sequences
    split = result.reshape(prefixes, heads, sequences, queries, *rest).transpose(1, 2)
    return split.reshape(batch, heads, queries, *rest)
