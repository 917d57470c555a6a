"""Segments that stores share, and the tails behind them, against plain tensors that are concatenated."""

import itertools
import pickle
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import FrameType
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import Tensor
from torch.utils._pytree import tree_leaves

import kvlayers
from agreement import bytes_reached
from kvlayers.kernels.attention.packed_tensor import PackedStates, as_dense
from kvlayers.stores import DenseStore
from kvlayers.utils.tensor_memory import storages_of
from spies import Operators

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


@dataclass(eq=False, repr=False)
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

    def append(self, keys: Tensor, values: Tensor) -> None:
        self.keys, self.values = torch.cat([self.keys, keys], 2), torch.cat([self.values, values], 2)

    def fork(self) -> "Pair":
        return Pair(self.store.fork(), self.keys, self.values)

    def check(self) -> None:
        store = self.store
        assert store.length == self.length
        assert store.nbytes == bytes_reached(store)
        if store.forms is None:
            return
        assert store.forms[0].batch_size == self.rows
        assert sum(piece.tokens for piece in store.pieces(self.length)) == self.length
        # Segments, and the tail.
        assert len(store.pieces(self.length)) <= store.maximum_segments + 1
        for count in {0, 1, self.length // 2, self.length}:
            if count <= self.length:
                states = store.newest(count)
                for seen, expected in zip(states, (self.keys, self.values), strict=True):
                    assert torch.equal(as_dense(seen), expected[:, :, self.length - count :])


PAIRS: st.SearchStrategy[Pair] = st.runner().flatmap(lambda machine: st.sampled_from(machine.pairs))


class SegmentMachine(RuleBasedStateMachine):
    """Stores that share segments: what is done to one of them shows in no other."""

    @initialize(maximum=st.integers(1, 4), growth=st.integers(1, 6))
    def begin(self, maximum: int, growth: int) -> None:
        self.numbers = Numbers()
        store = DenseStore(minimum_growth=growth, maximum_segments=maximum)
        keys, values = self.numbers.states(2, 20)
        store.take_in(keys, values)
        self.pairs = [Pair(store, keys, values)]

    @rule(pair=PAIRS, tokens=st.one_of(st.just(1), st.integers(0, 30)))
    def extend(self, pair: Pair, tokens: int) -> None:
        if pair.length + tokens > MOST_TOKENS:
            return
        keys, values = self.numbers.states(pair.rows, tokens)
        pair.store.validate(keys, values)
        attended = pair.store.extend(keys, values)
        pair.append(keys, values)
        assert all(map(torch.equal, map(as_dense, attended), (pair.keys, pair.values)))

    @rule(pair=PAIRS, count=st.integers(1, 30), tokens=st.integers(1, 4))
    def overwrite(self, pair: Pair, count: int, tokens: int) -> None:
        count = min(count, pair.length)
        tokens = min(tokens, count)
        keys, values = self.numbers.states(pair.rows, tokens)
        first = pair.length - count
        if tokens and pair.store.overwrite(count, keys, values):
            pair.keys, pair.values = (
                torch.cat([held[:, :, :first], new, held[:, :, first + tokens :]], 2)
                for held, new in ((pair.keys, keys), (pair.values, values))
            )

    @rule(pair=PAIRS, tokens=st.integers(1, 5), past=st.integers(0, 10), kept=st.integers(1, 10))
    def extend_and_evict(self, pair: Pair, tokens: int, past: int, kept: int) -> None:
        keys, values = self.numbers.states(pair.rows, tokens)
        past = min(past, pair.length)
        pair.store.validate(keys, values)
        attended = pair.store.extend_and_evict(keys, values, past, min(kept, past + tokens))
        pair.change(slice(pair.length - past, None))
        pair.append(keys, values)
        assert all(map(torch.equal, attended, (pair.keys, pair.values)))
        pair.change(slice(pair.length - min(kept, past + tokens), None))

    @rule(pair=PAIRS)
    def fork(self, pair: Pair) -> None:
        self.pairs = [*self.pairs, pair.fork()][-MOST_STORES:]

    @rule(pair=PAIRS, length=st.integers(0, MOST_TOKENS))
    def truncate(self, pair: Pair, length: int) -> None:
        if length <= pair.length:
            pair.store.truncate(length)
            pair.change(slice(0, length))

    @rule(pair=PAIRS, count=st.integers(0, 25))
    def drop_oldest(self, pair: Pair, count: int) -> None:
        if count <= pair.length:
            pair.store.drop_oldest(count)
            pair.change(slice(count, None))

    @rule(pair=PAIRS, rows=st.lists(st.integers(0, MOST_ROWS), min_size=1, max_size=4))
    def select(self, pair: Pair, rows: list[int]) -> None:
        indices = torch.tensor([row % pair.rows for row in rows])
        pair.store.select(indices)
        pair.change(of_rows=indices)

    @rule(pair=PAIRS, repeats=st.integers(1, 3))
    def expand(self, pair: Pair, repeats: int) -> None:
        if pair.rows * repeats <= MOST_ROWS:
            pair.store.expand(repeats)
            pair.change(of_rows=torch.arange(pair.rows).repeat_interleave(repeats))

    @rule(pair=PAIRS, tokens=st.integers(1, MOST_TOKENS), more=st.integers(0, 9))
    def share_with_a_store_that_computed_the_same(self, pair: Pair, tokens: int, more: int) -> None:
        tokens = min(tokens, pair.length)
        keys, values = self.numbers.states(pair.rows, more)
        keys, values = (
            torch.cat([pair.keys[:, :, :tokens], keys], 2),
            torch.cat([pair.values[:, :, :tokens], values], 2),
        )
        store = DenseStore(minimum_growth=2)
        store.take_in(keys, values)
        store.share_prefix(pair.store, tokens)
        self.pairs = [*self.pairs, Pair(store, keys, values)][-MOST_STORES:]

    @rule(pair=PAIRS, other=PAIRS)
    def share_what_two_stores_have_in_common(self, pair: Pair, other: Pair) -> None:
        least = min(pair.length, other.length)
        if pair.rows == other.rows:
            same = (pair.keys[:, :, :least] == other.keys[:, :, :least]).all(3).all(1).all(0)
            pair.store.share_prefix(other.store, int(same.long().cumprod(0).sum()))

    @rule(pair=PAIRS)
    def trim(self, pair: Pair) -> None:
        before = pair.store.nbytes
        pair.store.trim()
        assert pair.store.nbytes <= before

    @rule(pair=PAIRS)
    def compact(self, pair: Pair) -> None:
        pair.store.compact()
        others = storages_of(held for other in self.pairs if other is not pair for held in other.store.held_tensors())
        assert not set(others) & {at for at, size in storages_of(pair.store.held_tensors()).items() if size}

    @rule(pair=PAIRS, tokens=st.integers(0, 40))
    def reserve(self, pair: Pair, tokens: int) -> None:
        if pair.store.forms is not None:
            pair.store.reserve(pair.length + tokens)
            pair.store.shrink(pair.length)

    @rule(pair=PAIRS)
    def write_to_a_view(self, pair: Pair) -> None:
        keys, values = pair.store.caller_views()
        if not isinstance(keys, PackedStates):
            fresh = self.numbers.states(pair.rows, pair.length)
            for view, states in zip((keys, values), fresh, strict=True):
                view.copy_(states)
            pair.keys, pair.values = fresh

    @rule(pair=PAIRS)
    def replace(self, pair: Pair) -> None:
        pair.keys, pair.values = self.numbers.states(pair.rows, 7)
        pair.store = pair.store.rewritten(pair.keys, pair.values)

    @rule(pair=PAIRS)
    def clear(self, pair: Pair) -> None:
        pair.store.clear()
        pair.change(slice(0, 0))

    @rule(pair=PAIRS)
    def pickle(self, pair: Pair) -> None:
        pair.store = pickle.loads(pickle.dumps(pair.store))

    @rule(pair=PAIRS)
    def save_and_load(self, pair: Pair) -> None:
        state = pair.store.state()
        assert torch.equal(state["keys"], pair.keys)
        pair.store.load_state(state)

    @precondition(lambda self: len(self.pairs) > 1)
    @rule(pair=PAIRS)
    def forget(self, pair: Pair) -> None:
        self.pairs.remove(pair)

    @invariant()
    def agrees(self) -> None:
        for pair in getattr(self, "pairs", ()):
            pair.check()


TestSegments = SegmentMachine.TestCase


def filled(tokens: int, **hints: int) -> tuple[DenseStore, Tensor, Tensor]:
    store, (keys, values) = DenseStore(**hints), Numbers().states(1, tokens)
    store.take_in(keys, values)
    return store, keys, values


def bytes_written(operator: Any, result: Any) -> int:
    """Bytes that an operator has written."""
    schema = operator._schema
    is_view = schema.returns and all(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)
    if is_view or "empty" in schema.name:
        return 0
    return sum(leaf.nbytes for leaf in tree_leaves(result) if isinstance(leaf, Tensor))


def test_a_fork_that_writes_behind_a_document_copies_nothing_of_it() -> None:
    store, keys, _ = filled(8000)
    forks = [store.fork() for _ in range(5)]
    question = Numbers().states(1, 100)
    token = HEADS * (KEY_DIM + VALUE_DIM) * keys.itemsize
    for fork in forks:
        copied: list[int] = []
        with Operators(lambda operator, _, result, copied=copied: copied.append(bytes_written(operator, result))):
            fork.take_in(*question)
            for _ in range(10):
                fork.take_in(*(states[:, :, :1] for states in question))
            fork.newest(fork.length)
        # The new tokens, and a tail that grows once. (A document of 8,000 tokens is 640,000 bytes.)
        assert sum(copied) <= token * (2 * 110 + 16)
    held = storages_of(held for one in (store, *forks) for held in one.held_tensors())
    # The document and its spare room, and 4 tails: one fork goes on in place.
    assert sum(held.values()) <= token * (8128 + 4 * (110 + 16))
    for fork in forks:
        fork.trim()
    held = storages_of(held for one in (store, *forks) for held in one.held_tensors())
    assert sum(held.values()) == token * (8128 + 4 * 110)


def test_a_short_tail_is_copied_so_that_segments_stay_few() -> None:
    """Forks of forks: each goes on from the end of the one before, which goes on as well."""
    store, _, _ = filled(1000)
    alive = []
    for _ in range(40):
        fork = store.fork()
        store.take_in(*Numbers().states(1, 1))
        fork.take_in(*Numbers().states(1, 20))
        alive.append(store)
        store = fork
    assert store.length == 1800
    # A tail becomes a segment when it is an eighth of all tokens, which happens 5 times from 1,000 to 1,800 at most.
    assert 2 < len(store.pieces(1800)) <= 6


def test_states_over_segments_are_stale_when_the_store_has_changed_and_not_before() -> None:
    for change in (
        lambda store: store.truncate(900),
        lambda store: store.clear(),
        lambda store: store.select(torch.tensor([0, 0])),
        lambda store: store.compact(),
        lambda store: store.expand(2),
    ):
        store, keys, _ = filled(1000)
        fork = store.fork()
        store.take_in(*Numbers().states(1, 1))
        fork.take_in(*Numbers().states(1, 3))
        seen, _ = fork.newest(1003)
        fork.take_in(*Numbers().states(1, 40))
        fork.drop_oldest(5)
        assert torch.equal(seen[:, :, :1000], keys)
        change(fork)
        with pytest.raises(kvlayers.errors.StaleStatesError):
            seen.clone()


def test_caches_in_threads_fork_one_stored_cache_and_go_on() -> None:
    document = kvlayers.DynamicCache()
    states = torch.randn(2, 1, 2, 500, 4)
    document.update(*states, 0)
    begin = threading.Barrier(8)

    def go_on(which: int) -> None:
        begin.wait()
        own = torch.full((2, 1, 2, 1, 4), float(which))
        for turn in range(20):
            fork = document.fork()
            for _ in range(5):
                fork.update(*own, 0)
            if turn % 3 == 0:
                fork.trim()
            if turn % 4 == 0:
                twin = fork.fork()
                fork.crop(400)
                fork.update(*own, 0)
                fork = twin
            keys, values = fork.layers[0].peek()
            for seen, held, new in zip((keys, values), states, own, strict=True):
                assert torch.equal(as_dense(seen), torch.cat([held, new.expand(1, 2, 5, 4)], 2))

    with ThreadPoolExecutor(8) as pool:
        # What a thread raises is raised here.
        list(pool.map(go_on, range(8)))
    assert torch.equal(document.layers[0].peek()[0], states[0])


CHANGES = {
    "append": lambda store, other, states: store.take_in(*states),
    "truncate to the tail": lambda store, other, states: store.truncate(1005),
    "truncate to a segment": lambda store, other, states: store.truncate(700),
    "drop": lambda store, other, states: store.drop_oldest(400),
    "select": lambda store, other, states: store.select(torch.tensor([0, 0, 0])),
    "expand": lambda store, other, states: store.expand(2),
    "compact": lambda store, other, states: store.compact(),
    "trim": lambda store, other, states: store.trim(),
    "clear": lambda store, other, states: store.clear(),
    "share": lambda store, other, states: store.share_prefix(other, 900),
}


@pytest.mark.parametrize(
    ("change", "segmented"),
    [(change, segmented) for change in CHANGES for segmented in (False, True) if segmented or "tail" not in change],
)
def test_an_interrupt_finds_a_change_done_or_not_begun(change: str, segmented: bool) -> None:
    def interrupted(at: int) -> bool:
        """Whether the call of that number in the package was interrupted, rather than the change done before it."""
        one, *held = filled(1000)
        other, *_ = filled(1000)
        store, states = one.fork(), Numbers(10**6).states(1, 9)
        if segmented:
            held = [torch.cat(pair, 2) for pair in zip(held, states, strict=True)]
            one.take_in(*Numbers(10**7).states(1, 9))
            store.take_in(*states)
        after, more, calls = DenseStore(), Numbers(2 * 10**6).states(1, 9), itertools.count(1)
        after.take_in(*held)
        CHANGES[change](after, other, more)

        def interrupt(frame: FrameType, event: str, argument: object) -> None:
            if event == "call" and "kvlayers/core" in frame.f_code.co_filename and next(calls) == at:
                raise KeyboardInterrupt

        sys.setprofile(interrupt)
        try:
            CHANGES[change](store, other, more)
            return False
        except KeyboardInterrupt:
            pass
        finally:
            sys.setprofile(None)
        seen, done = (
            [as_dense(side) for side in each.newest(each.length)] if each.length else [] for each in (store, after)
        )
        assert any(len(seen) == len(expected) and all(map(torch.equal, seen, expected)) for expected in (held, done))
        return True

    at = 1
    while interrupted(at):
        at += 1
    assert at > 1, "no call of the package was interrupted"
