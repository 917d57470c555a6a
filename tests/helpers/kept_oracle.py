"""The slow reference of evicting layers: every token ever seen, and for each head a mask of those that are kept."""

import itertools
from collections.abc import Callable, Iterable

import pytest
import torch
from torch import Tensor

from eviction_oracle import STEP, EvictionOracle
from kvlayers import CacheLayer
from kvlayers.errors import UnsupportedLayerError
from kvlayers.eviction import eviction_rule
from kvlayers.eviction.held_tokens import held_tokens
from kvlayers.kernels.attention.packed_tensor import PackedStates
from oracle import KEY_DIM, VALUE_DIM
from ragged_reference import of_head, states_of_head


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
