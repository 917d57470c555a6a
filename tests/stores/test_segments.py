"""Segments that stores share, and the tails behind them, against plain tensors that are concatenated."""

import pickle
import threading
from dataclasses import dataclass

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import kvlayers
from agreement import bytes_reached
from kvlayers.attention.packed_tensor import PackedStates, as_dense
from kvlayers.errors import StaleStatesError
from kvlayers.stores import DenseStore
from kvlayers.utils.tensor_memory import storages_of

HEADS, KEY_DIM, VALUE_DIM = 2, 3, 2
MOST_TOKENS, MOST_ROWS, MOST_STORES = 120, 12, 4


@dataclass
class Numbers:
    """States in which no number occurs twice, so that no two tokens can be confused."""

    used: int = 0

    def states(self, batch: int, tokens: int) -> tuple[Tensor, Tensor]:
        return self._numbers(batch, tokens, KEY_DIM), self._numbers(batch, tokens, VALUE_DIM)

    def _numbers(self, batch: int, tokens: int, head_dim: int) -> Tensor:
        count = batch * HEADS * tokens * head_dim
        self.used += count
        numbers = torch.arange(self.used - count, self.used, dtype=torch.float64)
        return numbers.reshape(batch, HEADS, tokens, head_dim)


@dataclass(eq=False)
class Pair:
    """A store, and the states that it must hold."""

    store: DenseStore
    keys: Tensor
    values: Tensor

    @property
    def length(self) -> int:
        return self.keys.shape[2]

    @property
    def rows(self) -> int:
        return self.keys.shape[0]

    def change(self, of_tokens: slice = slice(None), of_rows: object = slice(None)) -> None:
        self.keys, self.values = self.keys[of_rows][:, :, of_tokens], self.values[of_rows][:, :, of_tokens]

    def fork(self) -> "Pair":
        return Pair(self.store.fork(), self.keys, self.values)

    def check(self) -> None:
        store = self.store
        assert store.length == self.length
        assert store.nbytes == bytes_reached(store)
        if store.key_form is None:
            return
        assert store.key_form.batch_size == self.rows
        assert sum(piece.tokens for piece in store.pieces(self.length)) == self.length
        # Segments, and the tail.
        assert len(store.pieces(self.length)) <= store.maximum_segments + 1
        for count in {0, 1, self.length // 2, self.length}:
            if count <= self.length:
                states = store.newest(count)
                for seen, expected in zip(states, (self.keys, self.values), strict=True):
                    assert torch.equal(as_dense(seen), expected[:, :, self.length - count :])


class SegmentMachine(RuleBasedStateMachine):
    """Stores that share segments: what is done to one of them shows in no other."""

    @initialize(maximum=st.integers(1, 4), growth=st.integers(1, 6), room=st.sampled_from([0, 3]))
    def begin(self, maximum: int, growth: int, room: int) -> None:
        self.numbers = Numbers()
        self.room = room
        store = DenseStore(minimum_growth=growth, prefix_room=room, maximum_segments=maximum)
        keys, values = self.numbers.states(2, 20)
        store.validate(keys, values)
        store.append(keys, values)
        self.pairs = [Pair(store, keys, values)]

    def one(self, which: int) -> Pair:
        return self.pairs[which % len(self.pairs)]

    @rule(which=st.integers(0, 9), tokens=st.one_of(st.just(1), st.integers(0, 30)), prefixed=st.booleans())
    def extend(self, which: int, tokens: int, prefixed: bool) -> None:
        pair = self.one(which)
        if pair.length + tokens > MOST_TOKENS:
            return
        keys, values = self.numbers.states(pair.rows, tokens)
        prefix = self.numbers.states(pair.rows, self.room) if prefixed and self.room else None
        pair.store.validate(keys, values)
        attended = pair.store.extend(keys, values, None, prefix)
        pair.keys, pair.values = torch.cat([pair.keys, keys], 2), torch.cat([pair.values, values], 2)
        for seen, held, front in zip(attended, (pair.keys, pair.values), prefix or ((), ()), strict=True):
            assert torch.equal(as_dense(seen), torch.cat([front, held], 2) if prefix else held)

    @rule(which=st.integers(0, 9), tokens=st.integers(1, 5), past=st.integers(0, 10), kept=st.integers(1, 10))
    def extend_and_evict(self, which: int, tokens: int, past: int, kept: int) -> None:
        pair = self.one(which)
        keys, values = self.numbers.states(pair.rows, tokens)
        past = min(past, pair.length)
        pair.store.validate(keys, values)
        attended = pair.store.extend_and_evict(keys, values, past, min(kept, past + tokens))
        pair.change(slice(pair.length - past, None))
        pair.keys, pair.values = torch.cat([pair.keys, keys], 2), torch.cat([pair.values, values], 2)
        assert torch.equal(attended[0], pair.keys)
        assert torch.equal(attended[1], pair.values)
        pair.change(slice(pair.length - min(kept, past + tokens), None))

    @rule(which=st.integers(0, 9))
    def fork(self, which: int) -> None:
        self.pairs = [*self.pairs, self.one(which).fork()][-MOST_STORES:]

    @rule(which=st.integers(0, 9), length=st.integers(0, MOST_TOKENS))
    def truncate(self, which: int, length: int) -> None:
        pair = self.one(which)
        if length <= pair.length:
            pair.store.truncate(length)
            pair.change(slice(0, length))

    @rule(which=st.integers(0, 9), count=st.integers(0, 25))
    def drop_oldest(self, which: int, count: int) -> None:
        pair = self.one(which)
        if count <= pair.length:
            pair.store.drop_oldest(count)
            pair.change(slice(count, None))

    @rule(which=st.integers(0, 9), rows=st.lists(st.integers(0, MOST_ROWS), min_size=1, max_size=4))
    def select(self, which: int, rows: list[int]) -> None:
        pair = self.one(which)
        indices = torch.tensor([row % pair.rows for row in rows])
        pair.store.select(indices)
        pair.change(of_rows=indices)

    @rule(which=st.integers(0, 9), repeats=st.integers(1, 3))
    def expand(self, which: int, repeats: int) -> None:
        pair = self.one(which)
        if pair.rows * repeats <= MOST_ROWS:
            pair.store.expand(repeats)
            pair.change(of_rows=torch.arange(pair.rows).repeat_interleave(repeats))

    @rule(which=st.integers(0, 9), tokens=st.integers(1, MOST_TOKENS), more=st.integers(0, 9))
    def share_with_a_store_that_computed_the_same(self, which: int, tokens: int, more: int) -> None:
        pair = self.one(which)
        tokens = min(tokens, pair.length)
        keys, values = self.numbers.states(pair.rows, more)
        keys, values = (
            torch.cat([pair.keys[:, :, :tokens], keys], 2),
            torch.cat([pair.values[:, :, :tokens], values], 2),
        )
        store = DenseStore(minimum_growth=2, prefix_room=self.room)
        store.validate(keys, values)
        store.append(keys, values)
        store.share_prefix(pair.store, tokens)
        self.pairs = [*self.pairs, Pair(store, keys, values)][-MOST_STORES:]

    @rule(which=st.integers(0, 9), other=st.integers(0, 9))
    def share_what_two_stores_have_in_common(self, which: int, other: int) -> None:
        pair, other_pair = self.one(which), self.one(other)
        least = min(pair.length, other_pair.length)
        if pair.rows == other_pair.rows:
            same = (pair.keys[:, :, :least] == other_pair.keys[:, :, :least]).all(3).all(1).all(0)
            pair.store.share_prefix(other_pair.store, int(same.long().cumprod(0).sum()))

    @rule(which=st.integers(0, 9))
    def trim(self, which: int) -> None:
        pair = self.one(which)
        before = pair.store.nbytes
        pair.store.trim()
        assert pair.store.nbytes <= before

    @rule(which=st.integers(0, 9))
    def compact(self, which: int) -> None:
        pair = self.one(which)
        pair.store.compact()
        others = storages_of(held for other in self.pairs if other is not pair for held in other.store.held_tensors())
        assert not set(others) & {at for at, size in storages_of(pair.store.held_tensors()).items() if size}

    @rule(which=st.integers(0, 9), tokens=st.integers(0, 40))
    def reserve(self, which: int, tokens: int) -> None:
        pair = self.one(which)
        if pair.store.key_form is not None:
            pair.store.reserve(pair.length + tokens)
            pair.store.shrink(pair.length)

    @rule(which=st.integers(0, 9))
    def write_to_a_view(self, which: int) -> None:
        pair = self.one(which)
        keys, values = pair.store.caller_views()
        if not isinstance(keys, PackedStates):
            fresh = self.numbers.states(pair.rows, pair.length)
            for view, states in zip((keys, values), fresh, strict=True):
                view.copy_(states)
            pair.keys, pair.values = fresh

    @rule(which=st.integers(0, 9))
    def replace(self, which: int) -> None:
        pair = self.one(which)
        pair.keys, pair.values = self.numbers.states(pair.rows, 7)
        pair.store = pair.store.rewritten(pair.keys, pair.values)

    @rule(which=st.integers(0, 9))
    def clear(self, which: int) -> None:
        pair = self.one(which)
        pair.store.clear()
        pair.change(slice(0, 0))

    @rule(which=st.integers(0, 9))
    def pickle(self, which: int) -> None:
        pair = self.one(which)
        pair.store = pickle.loads(pickle.dumps(pair.store))

    @rule(which=st.integers(0, 9))
    def save_and_load(self, which: int) -> None:
        pair = self.one(which)
        state = pair.store.state()
        assert torch.equal(state["keys"], pair.keys)
        pair.store.load_state(state)

    @precondition(lambda self: len(self.pairs) > 1)
    @rule(which=st.integers(0, 9))
    def forget(self, which: int) -> None:
        self.pairs.remove(self.one(which))

    @invariant()
    def agrees(self) -> None:
        for pair in getattr(self, "pairs", ()):
            pair.check()


SegmentMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestSegments = SegmentMachine.TestCase
