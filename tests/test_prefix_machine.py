"""Random sequences of what is done to a prefix store, against plain lists."""

import shutil
import tempfile
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvlayers import CapacityError, DynamicCache, PrefixError, PrefixStore

pytestmark = pytest.mark.fast

WINDOW = 4
ENTRY_BYTES = 1200
"""Of a cache that has grown once: 8 bytes a token."""
NAMESPACES = ("", "other")

Ids = list[int]


def new_cache(windowed: bool) -> DynamicCache:
    return DynamicCache([(None, None, torch.tensor(WINDOW))]) if windowed else DynamicCache()


def contents(ids: Ids) -> list[float]:
    """A number for each token that says what it and all before it are."""
    numbers, total = [], 0
    for position, token in enumerate(ids):
        total = (total * 31 + token + position + 1) % 999_983
        numbers.append(float(total))
    return numbers


def extend(cache: DynamicCache, ids: Ids, more: Ids) -> Ids:
    whole = [*ids, *more]
    states = torch.tensor(contents(whole)[len(ids) :])[None, None, :, None]
    cache.update(states, -states, layer_idx=0)
    return whole


def check(cache: Any, ids: Ids) -> None:
    """`cache` holds what `ids` are, as far as it holds it."""
    assert cache.get_seq_length() == len(ids)
    layer = cache.layers[0]
    held = layer.keys[0, 0, :, 0].tolist()
    least = min(len(ids), WINDOW - 1) if layer.is_sliding else len(ids)
    assert len(held) >= least
    assert held == contents(ids)[len(ids) - len(held) :]
    assert (-layer.values[0, 0, :, 0]).tolist() == held


def common(one: Ids, other: Ids) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


# Long runs too: a window with few tokens holds all of them for a while.
tokens = st.lists(st.integers(0, 2), min_size=1, max_size=6) | st.integers(15, 30).map(
    lambda count: [count % 2] * count
)
namespaces = st.sampled_from(NAMESPACES)


class PrefixMachine(RuleBasedStateMachine):
    """A store, a cache that decodes, and all that was ever inserted."""

    @initialize(windowed=st.booleans(), entries=st.integers(1, 4), on_disk=st.booleans())
    def begin(self, windowed: bool, entries: int, on_disk: bool) -> None:
        self.windowed = windowed
        self.max_bytes = ENTRY_BYTES * entries
        self.directory = tempfile.mkdtemp() if on_disk else None
        self.store = PrefixStore(self.max_bytes, self.directory)
        self.inserted: list[tuple[str, Ids]] = []
        self.pinned: list[tuple[str, Ids]] = []
        self.cache, self.ids = new_cache(windowed), []

    def teardown(self) -> None:
        if vars(self).get("directory"):
            shutil.rmtree(str(self.directory))

    @rule(more=tokens)
    def go_on(self, more: Ids) -> None:
        if len(self.ids) < 90:
            self.ids = extend(self.cache, self.ids, more)

    @rule(ids=tokens)
    def begin_anew(self, ids: Ids) -> None:
        self.cache = new_cache(self.windowed)
        self.ids = extend(self.cache, [], ids)

    @precondition(lambda self: self.ids)
    @rule(length=st.integers(0, 120))
    def truncate(self, length: int) -> None:
        length = min(length, len(self.ids))
        if not self.windowed:
            self.cache.truncate(length)
            self.ids = self.ids[:length]

    @precondition(lambda self: self.ids)
    @rule(namespace=namespaces)
    def insert(self, namespace: str) -> None:
        ids = torch.tensor([self.ids])
        before = self.store.statistics
        try:
            self.store.insert(ids, self.cache, namespace=namespace, model="m")
        except CapacityError:
            assert self.cache.nbytes > self.max_bytes or self.pinned
            assert self.store.statistics == before
            return
        self.inserted.append((namespace, self.ids))
        self.see_what_is_lost(before.evictions)
        found = self.store.lookup(torch.tensor([[*self.ids, 9]]), namespace=namespace, model="m")
        assert found.covered == len(self.ids)

    @rule(more=tokens, back=st.integers(0, 4), namespace=namespaces, go_on=st.booleans())
    def lookup(self, more: Ids, back: int, namespace: str, go_on: bool) -> None:
        asked = [*self.ids[: max(len(self.ids) - back, 0)], *more]
        hit = self.store.lookup(torch.tensor(asked), namespace=namespace, model="m")
        most = max((common(ids, asked) for where, ids in self.inserted if where == namespace), default=0)
        assert 0 <= hit.covered <= min(most, len(asked) - 1)
        assert hit.covered >= self.least(namespace, asked)
        assert (hit.cache is None) == (hit.covered == 0)
        assert (hit.reason == "") == (hit.covered == len(asked) - 1 and len(asked) > 1)
        if hit.cache is not None:
            check(hit.cache, asked[: hit.covered])
            if go_on:
                self.cache = hit.cache
                self.ids = extend(hit.cache, asked[: hit.covered], asked[hit.covered :])

    def least(self, namespace: str, asked: Ids) -> int:
        """What must be found of a prompt, where all that is in `inserted` is held."""
        own = [ids for where, ids in self.inserted if where == namespace]
        shared = [common(ids, asked) for ids in own if not self.windowed or asked[: len(ids)] == ids]
        # A window that has seen the whole prompt cannot always go back by one token.
        return max((min(n, len(asked) - 1) for n in shared if n < len(asked) or not self.windowed), default=0)

    @precondition(lambda self: self.inserted)
    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        namespace, ids = data.draw(st.sampled_from(self.inserted))
        try:
            self.store.pin(torch.tensor(ids), namespace=namespace, model="m")
        except PrefixError:
            return
        self.pinned.append((namespace, ids))

    @precondition(lambda self: self.pinned)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        where = data.draw(st.integers(0, len(self.pinned) - 1))
        namespace, ids = self.pinned.pop(where)
        self.store.unpin(torch.tensor(ids), namespace=namespace, model="m")

    @rule(nbytes=st.one_of(st.none(), st.integers(1, 10_000)))
    def evict(self, nbytes: int | None) -> None:
        before = self.store.statistics
        freed = self.store.evict(nbytes)
        assert self.store.statistics.bytes == before.bytes - freed
        if nbytes is not None and not self.pinned:
            assert freed >= min(nbytes, before.bytes)
        self.see_what_is_lost(before.evictions)

    @precondition(lambda self: self.directory is not None)
    @rule(flush=st.booleans())
    def restart(self, flush: bool) -> None:
        if flush:
            self.store.flush()
        self.store = PrefixStore(self.max_bytes, self.directory)
        self.pinned = []
        if flush:
            self.inserted_are_found()
        else:
            self.inserted = [each for each in self.inserted if self.covered(each) == len(each[1])]

    @rule()
    def clear(self) -> None:
        self.store.clear()
        self.inserted, self.pinned = [], []
        assert self.store.statistics.bytes == len(self.store) == 0

    def covered(self, inserted: tuple[str, Ids]) -> int:
        namespace, ids = inserted
        hit = self.store.lookup(torch.tensor([*ids, 9]), namespace=namespace, model="m")
        if hit.cache is not None:
            check(hit.cache, ids[: hit.covered])
        return hit.covered

    def see_what_is_lost(self, evictions: int) -> None:
        if self.directory is not None:
            self.inserted_are_found()
        elif self.store.statistics.evictions > evictions:
            self.inserted = [each for each in self.inserted if self.covered(each) == len(each[1])]

    def inserted_are_found(self) -> None:
        """With a directory nothing is ever lost."""
        for each in self.inserted:
            assert self.covered(each) == len(each[1])

    @invariant()
    def keeps_to_its_bounds(self) -> None:
        if not vars(self).get("store"):
            return
        now = self.store.statistics
        assert 0 <= now.bytes <= self.max_bytes
        assert (now.damaged, now.failed_writes) == (0, 0)
        for namespace, ids in self.pinned:
            hit = self.store.lookup(torch.tensor([*ids, 9]), namespace=namespace, model="m")
            assert hit.covered == len(ids)
        if self.ids:
            check(self.cache, self.ids)


PrefixMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=25, deadline=None)
TestPrefixStore = PrefixMachine.TestCase


def test_contents_tell_sequences_apart() -> None:
    generator = np.random.default_rng(0)
    seen = {tuple(generator.integers(0, 3, 12)) for _ in range(500)}
    assert len({contents(list(map(int, ids)))[-1] for ids in seen}) == len(seen)
