"""Random sequences of what is done to a prefix store and to its caches, against plain lists."""

import pathlib
import shutil
import tempfile

import hypothesis.strategies as st
import pytest
import torch
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvlayers import Cache, CapacityError, PrefixStore
from kvlayers.errors import PrefixError
from kvlayers.prefix import PrefixStatistics
from prefix_caches import KINDS, MOST_TOKENS, Ids, check, extend

pytestmark = pytest.mark.slow

ENTRY_BYTES = 1600
"""Of a cache of one channel that has grown once: 8 bytes a token."""
NAMESPACES = ("", "other")
FORKS = 2
"""Caches beside the one in hand, which go on apart from it."""


def common(one: Ids, other: Ids) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


# Long runs too: a window with few tokens holds all of them for a while, and so many are packed together.
tokens = st.lists(st.integers(0, 2), min_size=1, max_size=6) | st.integers(15, 70).map(
    lambda count: [count % 2] * count
)
namespaces = st.sampled_from(NAMESPACES)


class PrefixMachine(RuleBasedStateMachine):
    """A store, a cache that decodes beside forks of its own, and all that was ever inserted.

    Attributes:
        kinds: of caches, one of which a sequence is with.
        on_disk: whether the store has a directory.
        ever: what was inserted and not cleared, as (namespace, tokens).
        inserted: what of it must be found.
    """

    @initialize(data=st.data(), entries=st.integers(1, 4))
    def begin(self, data: st.DataObject, entries: int) -> None:
        name = data.draw(st.sampled_from(self.kinds))
        self.kind, self.windowed = KINDS[name], name == "window"
        self.max_bytes = ENTRY_BYTES * self.kind.channels * entries
        self.directory = tempfile.mkdtemp() if self.on_disk else None
        self.store = PrefixStore(self.max_bytes, self.directory)
        self.ever: list[tuple[str, Ids]] = []
        self.inserted: list[tuple[str, Ids]] = []
        self.pinned: list[tuple[str, Ids]] = []
        self.has_lost_files, self.left = False, list[PrefixStore]()
        self.forks: list[tuple[Cache, Ids]] = []
        self.cache, self.ids = self.kind.make(), []

    def teardown(self) -> None:
        if vars(self).get("directory"):
            # Its thread may be about to write or delete a file there.
            for store in (*self.left, self.store):
                store.close()
            shutil.rmtree(str(self.directory))

    @rule(more=tokens)
    def go_on(self, more: Ids) -> None:
        if len(self.ids) + len(more) <= MOST_TOKENS:
            self.ids = extend(self.kind, self.cache, self.ids, more)

    @rule(ids=tokens)
    def begin_anew(self, ids: Ids) -> None:
        self.cache = self.kind.make()
        self.ids = extend(self.kind, self.cache, [], ids)

    @precondition(lambda self: self.ids)
    @rule(length=st.integers(0, MOST_TOKENS))
    def truncate(self, length: int) -> None:
        length = min(length, len(self.ids))
        if not self.windowed:
            self.cache.truncate(length)
            self.ids = self.ids[:length]

    @precondition(lambda self: self.ids)
    @rule(more=tokens, original=st.booleans())
    def fork(self, more: Ids, original: bool) -> None:
        """The fork or the original goes on at once, and the other one when it is in hand again."""
        twin = self.cache.fork()
        self.cache, other = (self.cache, twin) if original else (twin, self.cache)
        self.forks = [*self.forks, (other, self.ids)][-FORKS:]
        self.go_on(more)

    @precondition(lambda self: self.forks)
    @rule(which=st.integers(0, FORKS - 1))
    def change_to_a_fork(self, which: int) -> None:
        which %= len(self.forks)
        in_hand = self.cache, self.ids
        self.cache, self.ids = self.forks[which]
        self.forks[which] = in_hand

    @precondition(lambda self: self.ids)
    @rule(namespace=namespaces)
    def insert(self, namespace: str) -> None:
        ids, before = torch.tensor([self.ids]), self.store.statistics
        try:
            self.store.insert(ids, self.cache, namespace=namespace, model="m")
        except CapacityError:
            assert self.cache.nbytes > self.max_bytes or self.pinned
            assert self.store.statistics == before
            return
        self.inserted.append((namespace, self.ids))
        self.ever.append((namespace, self.ids))
        self.see_what_is_lost(before)
        found = self.store.lookup(torch.tensor([[*self.ids, 9]]), namespace=namespace, model="m")
        assert found.covered == len(self.ids)

    @rule(more=tokens, back=st.integers(0, 4), namespace=namespaces, go_on=st.booleans())
    def lookup(self, more: Ids, back: int, namespace: str, go_on: bool) -> None:
        asked = [*self.ids[: max(len(self.ids) - back, 0)], *more]
        hit = self.store.lookup(torch.tensor(asked), namespace=namespace, model="m")
        most = max((common(ids, asked) for where, ids in self.ever if where == namespace), default=0)
        assert 0 <= hit.covered <= min(most, len(asked) - 1)
        assert hit.covered >= self.least(namespace, asked)
        assert (hit.cache is None) == (hit.covered == 0)
        assert (hit.reason == "") == (hit.covered == len(asked) - 1 and len(asked) > 1)
        if hit.cache is not None:
            check(self.kind, hit.cache, asked[: hit.covered])
            if go_on and len(asked) <= MOST_TOKENS:
                self.cache = hit.cache
                self.ids = extend(self.kind, hit.cache, asked[: hit.covered], asked[hit.covered :])

    def least(self, namespace: str, asked: Ids) -> int:
        """What must be found of a prompt, where all that is in `inserted` is held."""
        if self.has_lost_files:
            return 0
        own = [ids for where, ids in self.inserted if where == namespace]
        shared = [common(ids, asked) for ids in own if not self.windowed or asked[: len(ids)] == ids]
        # A window that has seen the whole prompt cannot always go back by one token.
        return max((min(n, len(asked) - 1) for n in shared if n < len(asked) or not self.windowed), default=0)

    @precondition(lambda self: self.inserted and not self.has_lost_files)
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
        namespace, ids = self.pinned.pop(data.draw(st.integers(0, len(self.pinned) - 1)))
        self.store.unpin(torch.tensor(ids), namespace=namespace, model="m")

    @rule(nbytes=st.one_of(st.none(), st.integers(1, 10_000)))
    def evict(self, nbytes: int | None) -> None:
        before = self.store.statistics
        freed = self.store.evict(nbytes)
        assert self.store.statistics.bytes == before.bytes - freed
        if nbytes is not None and not self.pinned:
            assert freed >= min(nbytes, before.bytes)
        self.see_what_is_lost(before)

    @precondition(lambda self: self.directory is not None)
    @rule(flush=st.booleans())
    def restart(self, flush: bool) -> None:
        assert not flush or self.store.flush()
        self.left.append(self.store)
        self.store = PrefixStore(self.max_bytes, self.directory)
        self.pinned = []
        if self.has_lost_files:
            return
        if flush:
            self.inserted_are_found()
        else:
            self.forget_what_is_lost()

    @precondition(lambda self: self.directory is not None and not self.pinned)
    @rule(which=st.integers(0, 9))
    def lose_a_file(self, which: int) -> None:
        """As servers do that have no more memory. From now on anything may be missing, and nothing may be wrong."""
        self.store.flush()
        files = sorted(pathlib.Path(str(self.directory)).glob("*.safetensors"))
        if files:
            files[which % len(files)].unlink()
            self.has_lost_files = True

    @rule()
    def clear(self) -> None:
        if self.directory is not None:
            # Those that were left may still write, and what they write is known after a refresh.
            while self.left:
                self.left.pop().close()
            self.store.refresh()
        self.store.clear()
        self.ever, self.inserted, self.pinned, self.has_lost_files = [], [], [], False
        assert self.store.statistics.bytes == len(self.store) == 0

    def covered(self, inserted: tuple[str, Ids]) -> int:
        namespace, ids = inserted
        hit = self.store.lookup(torch.tensor([*ids, 9]), namespace=namespace, model="m")
        if hit.cache is not None:
            check(self.kind, hit.cache, ids[: hit.covered])
        return hit.covered

    def see_what_is_lost(self, before: PrefixStatistics) -> None:
        if self.has_lost_files:
            return
        if self.directory is not None:
            self.inserted_are_found()
        elif self.store.statistics.evictions > before.evictions:
            self.forget_what_is_lost()

    def forget_what_is_lost(self) -> None:
        self.inserted = [each for each in self.inserted if self.covered(each) == len(each[1])]

    def inserted_are_found(self) -> None:
        """With a directory nothing is ever lost."""
        for each in self.inserted:
            assert self.covered(each) == len(each[1])

    @invariant()
    def keeps_to_its_bounds(self) -> None:
        if "store" not in vars(self):
            return
        now = self.store.statistics
        assert 0 <= now.bytes <= self.max_bytes
        assert (now.damaged, now.failed_writes, now.dropped_writes) == (0, 0, 0)
        assert now.bytes == self.store.tree().nbytes
        for namespace, ids in self.pinned:
            hit = self.store.lookup(torch.tensor([*ids, 9]), namespace=namespace, model="m")
            assert hit.covered == len(ids)
        for cache, ids in ((self.cache, self.ids), *self.forks):
            check(self.kind, cache, ids)


@pytest.mark.parametrize("on_disk", [False, True], ids=["in memory", "on disk"])
@pytest.mark.parametrize("kinds", [("full", "segments", "static", "quantized"), ("window",)], ids=["full", "window"])
def test_a_store_has_what_was_inserted(kinds: tuple[str, ...], on_disk: bool) -> None:
    run_state_machine_as_test(type("Machine", (PrefixMachine,), {"kinds": kinds, "on_disk": on_disk}))
