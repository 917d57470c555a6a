"""Attention of many sequences to a prefix that they share, and to the tokens of each sequence.

The prefix is held and read once: the queries of all sequences that share it are grouped, as if they were queries of one
sequence. The two parts are merged by their log-sum-exp, as in Hydragen (Juravsky et al. 2024, arXiv:2402.05099).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvlayers.attention import fused, reference
from kvlayers.attention.segment_rows import SegmentRows
from kvlayers.attention.segments import KVSegments
from kvlayers.quantizers.contract import Side


@dataclass(frozen=True, eq=False)
class SharedPrefixSegments:
    """The tokens that the queries of an update attend to if several sequences share a prefix.

    Attributes:
        prefix: the prefixes; each is one sequence of its batch.
        own: the tokens of each sequence after its prefix, `None` if there are none yet.
        numbers: the prefix of each sequence.
    """

    prefix: KVSegments
    own: KVSegments | None
    numbers: SegmentRows

    @property
    def tokens(self) -> int:
        """Tokens that a sequence attends to."""
        return self.prefix.tokens + (0 if self.own is None else self.own.tokens)

    @property
    def batch(self) -> int:
        """Sequences side by side."""
        return len(self.numbers)

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
        shared = shared.index_select(0, self.numbers.on(shared.device)[0])
        return shared if self.own is None else torch.cat([shared, self.own.dense(side, dtype)], dim=2)

    def attend(self, query: Tensor, mask: Tensor | None, scale: float) -> Tensor:
        """Softmax attention; arguments and result are those of `reference.attend`."""
        split = self.prefix.tokens
        on_accelerator = fused.serves(query.device)
        if mask is not None and on_accelerator:
            # Nothing is copied for each head if the mask is the same for all.
            mask = fused.unexpanded(mask).expand(query.shape[0], -1, query.shape[2], -1)
        shared_mask, own_mask = (None, None) if mask is None else (mask[..., :split], mask[..., split:])
        attend_partly = fused.attend_partly if on_accelerator else reference.attend_partly

        def over_prefix(prefix: KVSegments, rows: Tensor, rows_mask: Tensor | None) -> tuple[Tensor, Tensor]:
            return attend_partly(rows, prefix, rows_mask, scale)

        out, logsumexp = self._by_prefix(query, shared_mask, over_prefix)
        own = None
        if self.own is not None and self.own.tokens:
            own = attend_partly(query, self.own, own_mask, scale)
        if on_accelerator:
            return fused.attend_both((out, logsumexp), own, mask).to(query.dtype)
        outs, logsumexps = zip((out, logsumexp), *(() if own is None else (own,)), strict=True)
        return reference.merge(outs, logsumexps)[0].to(query.dtype)

    def scores(self, query: Tensor) -> Tensor:
        """Products with all keys; arguments and result are those of `reference.scores`."""
        products_of = fused.scores if fused.serves(query.device) else reference.scores
        products = self._by_prefix(query, None, lambda prefix, rows, _: (products_of(rows, prefix),))[0]
        if self.own is None or not self.own.tokens:
            return products
        return torch.cat([products, products_of(query, self.own)], dim=3)

    def combine(self, weights: Tensor) -> Tensor:
        """Weighted sums of all values; arguments and result are those of `reference.combine`."""
        split = self.prefix.tokens
        sums_of = fused.combine if fused.serves(weights.device) else reference.combine
        sums = self._by_prefix(weights[..., :split], None, lambda prefix, rows, _: (sums_of(rows, prefix),))[0]
        if self.own is not None and self.own.tokens:
            sums = sums.float() + sums_of(weights[..., split:], self.own).float()
        return sums.to(weights.dtype)

    def _by_prefix(
        self,
        rows: Tensor,
        mask: Tensor | None,
        compute: Callable[[KVSegments, Tensor, Tensor | None], Sequence[Tensor]],
    ) -> Sequence[Tensor]:
        """Results of `compute` for each prefix and the rows, `[batch, heads, queries, any]`, of its sequences."""
        if self.numbers.are_even:
            prefixes = self.prefix.batch
            found = compute(self.prefix, _group(rows, prefixes), None if mask is None else _group(mask, prefixes))
            return [_ungroup(result, self.batch) for result in found]
        if fused.serves(rows.device):
            return self._of_all_prefixes(rows, mask, compute)
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

    def _of_all_prefixes(
        self,
        rows: Tensor,
        mask: Tensor | None,
        compute: Callable[[KVSegments, Tensor, Tensor | None], Sequence[Tensor]],
    ) -> Sequence[Tensor]:
        """As `_by_prefix`: the rows of all sequences go to each prefix, and each sequence takes its own result.

        So nothing depends on numbers that only the accelerator knows.
        """
        batch, _, queries, _ = rows.shape
        prefixes = self.prefix.batch
        grouped = _group(rows, 1).expand(prefixes, -1, -1, -1)
        grouped_mask = None if mask is None else _group(mask, 1).expand(prefixes, -1, -1, -1)
        found = compute(self.prefix, grouped, grouped_mask)
        numbers, positions = self.numbers.on(rows.device)
        split = [torch.unflatten(result, 2, (batch, queries)) for result in found]
        return [result.transpose(1, 2)[numbers, positions] for result in split]

    def _members(self) -> Iterator[tuple[int, list[int]]]:
        known = self.numbers.known or ()
        for prefix in sorted(set(known)):
            yield prefix, [row for row, of in enumerate(known) if of == prefix]


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
