"""What an evicting layer must hold and attend to, with every token of the text and a mask of those that are kept."""

import itertools
import math
from collections.abc import Callable, Iterable

import pytest
import torch
from torch import Tensor

from kvlayers import CacheLayer
from kvlayers.errors import UnsupportedLayerError
from kvlayers.eviction import ALL_QUERIES, EvictionRule, eviction_rule
from kvlayers.eviction.held_tokens import held_tokens
from kvlayers.kernels.attention.packed_tensor import PackedStates
from oracle import KEY_DIM, VALUE_DIM, Oracle
from packed_reference import attention
from ragged_reference import of_head, states_of_head

STEP = 64


class EvictionOracle(Oracle):
    """Every key, value and query of a text, and for each head which tokens are kept.

    Args:
        rule: the rule.
        keep: part of the tokens that is kept.
        budget: tokens that are kept.
        sinks: first tokens of each sequence that are always kept.
        recent: newest tokens that an eviction always keeps.
        padding: tokens of padding before each sequence.
        per_head: whether heads keep different numbers of tokens.
    """

    def __init__(
        self,
        rule: EvictionRule,
        keep: float | None = None,
        budget: int | None = None,
        sinks: int = 4,
        recent: int = 16,
        padding: list[int] | None = None,
        per_head: bool = False,
    ) -> None:
        super().__init__()
        self.rule, self.keep, self.budget = rule, keep, budget
        self.sinks, self.recent = sinks, recent
        self.padding = padding
        self.per_head = per_head and not rule.shares_heads
        self.reset()

    def reset(self) -> None:
        super().reset()
        self.queries = self.kept = None
        self.whole_from = 0
        self.evicted_at: list[int] = []

    @property
    def seen(self) -> int:
        return self.length

    def allowed(self, text: int) -> int:
        if self.budget is not None:
            return self.budget
        return max(math.ceil(self.keep * text), self.sinks + self.recent)

    def step(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Attention of new tokens, `[batch, heads, new, head_dim]`, and what follows from them."""
        batch, kv_heads, new, _ = keys.shape
        padding = self.padding or [0] * batch
        self.evicted_at = [*self.evicted_at] or [0] * batch
        is_token = torch.ones(batch, kv_heads, new, dtype=torch.bool)
        for row, pad in enumerate(padding):
            is_token[row, :, : max(pad - self.seen, 0)] = False
        first = self.seen
        if self.keys is None:
            self.keys, self.values, self.queries, self.kept = keys, values, queries, is_token
        else:
            self.keys, self.values = torch.cat([self.keys, keys], 2), torch.cat([self.values, values], 2)
            self.queries, self.kept = torch.cat([self.queries, queries], 2), torch.cat([self.kept, is_token], 2)
        attended = self.attention(queries, first)
        if not self.recording and (new > 1 or self.budget is not None):
            self.evict(new, padding, 0 if new > 1 else STEP - 1)
        return attended

    def attention(self, queries: Tensor, first: int) -> Tensor:
        group = queries.shape[1] // self.keys.shape[1]
        visible = torch.arange(self.seen) <= torch.arange(first, self.seen)[:, None]
        mask = visible[None, None] & self.kept.repeat_interleave(group, 1)[:, :, None]
        return attention(queries, self.keys, self.values, mask).nan_to_num().to(queries.dtype)

    def evict(self, new: int, padding: list[int], slack: int) -> None:
        for row in range(self.keys.shape[0]):
            text = self.seen - padding[row]
            held = self.kept[row].sum(1).float().mean().item()
            if held > self.allowed(text) + slack:
                self.evict_from(row, new, min(self.allowed(text), text))
                self.evicted_at[row] = self.seen
                self.whole_from = max(self.whole_from, self.seen - self.recent)

    def evict_from(self, row: int, new: int, wanted: int) -> None:
        kv_heads = self.keys.shape[1]
        group = self.queries.shape[1] // kv_heads
        wanted = max(wanted, self.sinks + self.recent)
        every = [torch.where(self.kept[row, head])[0] for head in range(kv_heads)]
        scores = self.scores(row, every, new, group)
        ranks = []
        for head, held in enumerate(every):
            safe = {*range(self.sinks), *range(len(held) - self.recent, len(held))}
            ranks.append([(index not in safe, -scores[head][index].item(), index) for index in range(len(held))])
        counts = self.shares(ranks, wanted) if self.per_head else [wanted] * kv_heads
        # Copies of this oracle have the same mask.
        self.kept = self.kept.clone()
        for head, held in enumerate(every):
            chosen = [index for *_, index in sorted(ranks[head])[: counts[head]]]
            self.kept[row, head] = False
            self.kept[row, head, held[chosen]] = True

    def shares(self, ranks: list[list[tuple[bool, float, int]]], wanted: int) -> list[int]:
        """AdaKV: the best tokens of all heads together, after a fifth of an average head's for each head."""
        floor = int(wanted * 0.2)
        safe = [
            (head, index)
            for head, ranked in enumerate(ranks)
            for number, (later, _, index) in enumerate(sorted(ranked))
            if number < floor or not later
        ]
        taken = set(safe)
        others = sorted(
            (score, head, index)
            for head, ranked in enumerate(ranks)
            for _, score, index in ranked
            if (head, index) not in taken
        )
        chosen = [head for head, _ in safe] + [head for _, head, _ in others[: wanted * len(ranks) - len(safe)]]
        return [chosen.count(head) for head in range(len(ranks))]

    def scores(self, row: int, every: list[Tensor], new: int, group: int) -> list[Tensor]:
        queries = None
        if self.rule.queries:
            newest = new if self.budget is None else self.seen - self.evicted_at[row]
            if self.budget is not None and self.rule.queries != ALL_QUERIES:
                newest = self.seen
            count = newest if self.rule.queries == ALL_QUERIES else min(newest, self.rule.queries)
            # Tokens whose keys every head still has, so that each query stands beside its key. Those of this sequence
            # alone count: what becomes of the others must not matter.
            if self.evicted_at[row]:
                count = min(count, self.seen - self.evicted_at[row] + self.recent)
            queries = self.queries[row : row + 1, :, self.seen - count :]
        if all(torch.equal(held, every[0]) for held in every):
            keys, values = (states[row : row + 1, :, every[0]] for states in (self.keys, self.values))
            queries = None if queries is None else queries[:, :, -keys.shape[2] :]
            return list(self.rule.scores(keys, values, queries)[0])
        found = []
        for head, held in enumerate(every):
            keys, values = (states[row : row + 1, head : head + 1, held] for states in (self.keys, self.values))
            own = None if queries is None else queries[:, head * group : (head + 1) * group, -len(held) :]
            found.append(self.rule.scores(keys, values, own)[0, 0])
        return found

    def truncate(self, length: int) -> None:
        self.keys, self.values, self.queries = (s[:, :, :length] for s in (self.keys, self.values, self.queries))
        self.kept = self.kept[:, :, :length]
        self.evicted_at = [min(position, length) for position in self.evicted_at]
        if not length:
            self.reset()

    def select(self, rows: list[int]) -> None:
        self.keys, self.values, self.queries, self.kept = (
            states[rows] for states in (self.keys, self.values, self.queries, self.kept)
        )
        self.padding = None if self.padding is None else [self.padding[row] for row in rows]
        self.evicted_at = [self.evicted_at[row] for row in rows]


class KeptOracle(EvictionOracle):
    """An oracle that forgets the tokens that a rule without queries scores lowest.

    A head that keeps fewer tokens than another one has zeros in its first columns.

    Args:
        rule: name of the rule.
        sinks: first tokens of each sequence that are always kept.
        recent: newest tokens that an eviction always keeps.
        per_head: whether heads keep different numbers of tokens.
        amount: `keep`, the part of the tokens that is kept, or `budget`, how many are.
    """

    def __init__(self, rule: str, sinks: int, recent: int, per_head: bool, **amount: float) -> None:
        super().__init__(eviction_rule(rule), sinks=sinks, recent=recent, per_head=per_head, **amount)

    def reset(self) -> None:
        super().reset()
        self.empty_columns = 0

    def attention(self, queries: Tensor, first: int) -> Tensor:
        # Nobody asks for it.
        return queries

    @property
    def counts(self) -> Tensor:
        """Tokens that each head keeps, int64 `[batch, kv_heads]`."""
        return self.kept.sum(2)

    def first_attended(self, length: int) -> int:
        return length - (self.columns if self.length else 0)

    @property
    def columns(self) -> int:
        """Columns of held tokens: as many as the head had that kept the most, though it may not be selected now."""
        return int(self.counts.max()) + self.empty_columns

    def attended_next(self) -> tuple[Tensor, Tensor]:
        return self.right_aligned(lambda *at: (states[at][self.kept[at]] for states in (self.keys, self.values)))

    def right_aligned(self, states_at: Callable[[int, int], Iterable[Tensor]]) -> tuple[Tensor, Tensor]:
        """Keys and values of each head in its last columns, and zeros before them."""
        counts, width = self.counts, self.columns
        keys, values = (torch.zeros(*counts.shape, width, dim) for dim in (KEY_DIM, VALUE_DIM))
        for row, head in itertools.product(*map(range, counts.shape)):
            tokens = slice(width - int(counts[row, head]), None)
            keys[row, head, tokens], values[row, head, tokens] = states_at(row, head)
        return keys, values

    @property
    def exact_from(self) -> int:
        return self.whole_from

    def update(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        attended, before = (keys, values), 0
        if self.length:
            attended = tuple(map(lambda held, new: torch.cat([held, new], 2), self.attended_next(), (keys, values)))
            before = int(self.kept.sum())
        self.step(torch.zeros_like(keys), keys, values)
        if int(self.kept.sum()) < before + keys.shape[:3].numel():
            self.empty_columns = 0
        return attended

    def can_truncate(self, length: int) -> bool:
        return length == 0 or max(self.whole_from, 1) <= length <= self.length

    def truncate(self, length: int) -> None:
        if self.length:
            super().truncate(length)
        if self.recording and self.length:
            # What recording has held beyond the step is evicted.
            before = int(self.kept.sum())
            self.evict(1, [0] * self.keys.shape[0], STEP - 1)
            self.empty_columns = 0 if int(self.kept.sum()) < before else self.empty_columns

    def select(self, rows: list[int]) -> None:
        if self.length:
            columns = self.columns
            super().select(rows)
            self.empty_columns = columns - int(self.counts.max())

    def peeked(self, layer: CacheLayer) -> tuple[Tensor, Tensor]:
        counts = self.counts
        if not self.empty_columns and bool((counts == counts[0, 0]).all()):
            return super().peeked(layer)
        with pytest.raises(UnsupportedLayerError):
            layer.peek()
        held = held_tokens(layer.store)
        return self.right_aligned(lambda row, head: (side[0, 0] for side in of_head(held, row, head)))

    def check_states(self, seen: Tensor, expected: Tensor) -> None:
        if not isinstance(seen, PackedStates):
            assert torch.equal(seen, expected)
            return
        segments, width = seen.snapshot.read(), seen.shape[2]
        for row, head in itertools.product(*map(range, seen.shape[:2])):
            states = states_of_head(segments, row, head)[0 if seen.side == "keys" else 1]
            assert torch.equal(states, expected[row, head, width - states.shape[0] :])
            assert not expected[row, head, : width - states.shape[0]].any()

    def least_bytes(self, tokens: int) -> int:
        if not self.length:
            return 0
        # Sequences may share what they have in common: at least the one with the most tokens is held.
        return int(self.counts.sum(1).max()) * (KEY_DIM + VALUE_DIM) * 4
