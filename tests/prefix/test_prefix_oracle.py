"""What a prefix store finds and holds: as an ideal tree of tokens, from which the least recently used leaf goes first.

Each piece of memory counts once, whoever holds it.
"""

import heapq
import itertools
import pathlib
import random
import time
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
import torch

import families
import kvlayers
from kvlayers import CapacityError, PrefixStore
from kvlayers.core.buffer import TokenBuffer
from kvlayers.errors import PrefixError
from kvlayers.prefix import LeastRecentlyUsed, PrefixEntry
from kvlayers.prefix.entry import MOST_RANKED, MemoryAccount
from kvlayers.prefix.keys import PrefixMap
from kvlayers.prefix.lookup import EntryAccess
from spies import spy

HEADS, HEAD_DIM, LAYERS = 2, 4, 2
TOKEN_BYTES = LAYERS * 2 * HEADS * HEAD_DIM * 4

ASKED: dict[str, Any] = {
    "max_new_tokens": 2,
    "do_sample": False,
    "pad_token_id": 0,
    "return_dict_in_generate": True,
}

Ids = tuple[int, ...]


class IdealTree:
    """Each token of each prompt once. Leaves go first, of these the one that was used longest ago."""

    def __init__(self, most: int) -> None:
        self.most, self.now = most, 0
        self.numbers: dict[tuple[int, int], int] = {}
        """Of each token behind another one, by the number of that and the token; 0 is before the first ones."""
        self.above, self.used, self.children = dict[int, int](), dict[int, int](), {0: 0}
        self.pinned: set[int] = set()

    def path(self, ids: Ids) -> list[int]:
        """The numbers of the tokens of a prompt."""
        found = [0]
        for token in ids:
            number = self.numbers.setdefault((found[-1], token), len(self.numbers) + 1)
            self.above[number] = found[-1]
            found.append(number)
        return found[1:]

    def find(self, ids: Ids) -> int:
        """Tokens that are found, which are used now."""
        self.now += 1
        found = list(itertools.takewhile(self.used.__contains__, self.path(ids[:-1])))
        self.used.update(dict.fromkeys(found, self.now))
        return len(found)

    def add(self, ids: Ids) -> bool:
        """Hold a prompt, and return whether there is room for it beside what is pinned."""
        path = self.path(ids)
        if len({*path, *self.pinned}) > self.most:
            return False
        for number in path:
            if number not in self.used:
                self.children[number] = 0
                self.children[self.above[number]] += 1
            self.used[number] = self.now
        leaves = [(time, key) for key, time in self.used.items() if not self.children[key] and key not in self.pinned]
        heapq.heapify(leaves)
        while len(self.used) > self.most:
            _, key = heapq.heappop(leaves)
            del self.used[key], self.children[key]
            above = self.above[key]
            self.children[above] -= 1
            if above in self.used and not self.children[above] and above not in self.pinned:
                heapq.heappush(leaves, (self.used[above], above))
        return True

    def pin(self, ids: Ids) -> None:
        self.pinned |= set(self.path(ids))


def passed(cache: Any, ids: Iterable[int], head_dim: int = HEAD_DIM) -> None:
    states = torch.tensor(list(ids), dtype=torch.float32)[None, None, :, None].expand(1, HEADS, -1, head_dim)
    for layer in range(LAYERS):
        cache.update(states, -states, layer)


def ask(store: PrefixStore, ids: Ids, is_room: bool = True, head_dim: int = HEAD_DIM) -> tuple[int, kvlayers.Cache]:
    """Look a prompt up, compute the rest, and insert it, as `generate()` does. Then all of it is found."""
    hit = store.lookup(torch.tensor(ids), model="m")
    cache = kvlayers.DynamicCache() if hit.cache is None else hit.cache
    passed(cache, ids[hit.covered :], head_dim)
    try:
        store.insert(torch.tensor(ids), cache, model="m")
    except CapacityError:
        if is_room:
            raise
    else:
        held = store.lookup(torch.tensor((*ids, 0)), model="m")
        assert (held.covered, held.cache.layers[1].keys[0, 0, :, 0].tolist()) == (len(ids), list(ids))
    return hit.covered, cache


def union_of(store: PrefixStore) -> int:
    """Bytes of memory that the caches of a store keep alive."""
    caches = (entry.cache for entry in store._index.entries if entry.cache is not None)
    return sum(dict(piece for cache in caches for piece in cache.storages().items()).values())


class Prompts:
    """Random prompts that begin like others: with the same first token, with instructions, with a document."""

    def __init__(self, seed: int, longest: int) -> None:
        self.chance, self.longest, self.asked = random.Random(seed), longest, list[Ids]()
        self.beginnings = [self.fresh(1, 3), *(self.fresh(1, longest) for _ in range(self.chance.randint(0, 4)))]

    def fresh(self, least: int, most: int) -> Ids:
        length = self.chance.randint(least, most)
        return (1, *(self.chance.randrange(2, 10**6) for _ in range(length - 1)))

    def next(self) -> Ids:
        kind = self.chance.random()
        if self.asked and kind < 0.45:
            # Popular ones, the newer the more.
            ids = self.asked[-min(int(self.chance.expovariate(0.15)) + 1, len(self.asked))]
            if kind < 0.1:
                ids = ids[: self.chance.randint(1, len(ids))]
            if kind < 0.25:
                ids = (*ids, *self.fresh(1, 40))
        else:
            ids = (*self.chance.choice(self.beginnings), *self.fresh(1, self.longest))
        ids = ids[: 2 * self.longest]
        self.asked.append(ids)
        return ids


@pytest.mark.parametrize(
    ("seed", "longest", "most", "held", "pins"),
    [
        *((1, 20, 25, 0, 0), (2, 20, 80, 0, 0), (3, 20, 200, 1, 0), (4, 100, 105, 0, 0), (5, 100, 400, 1, 0)),
        *((6, 150, 600, 1, 0), (7, 400, 1600, 0, 0), (8, 400, 4000, 1, 0), (9, 400, 4000, 10, 0)),
        # Room for two of the longest prompts, while callers hold as much as several times the room.
        *((1, 100, 210, 1, 0), (1, 100, 210, 4, 0), (2, 100, 400, 10, 0), (3, 100, 400, 10, 0)),
        # What is pinned takes no more than its own tokens.
        *((1, 20, 200, 0, 3), (2, 100, 600, 0, 3), (3, 150, 1500, 0, 3)),
    ],
)
def test_as_many_tokens_are_found_as_in_an_ideal_tree(seed: int, longest: int, most: int, held: int, pins: int) -> None:
    """A store of `most` tokens; the caller goes on holding some of the last caches, and pins some prompts."""
    prompts, ideal, store = Prompts(seed, longest), IdealTree(most), PrefixStore(most * TOKEN_BYTES)
    caches: list[kvlayers.Cache] = []
    found = of_ideal = 0
    for step in range(150):
        ids = prompts.next()
        of_ideal += ideal.find(ids)
        is_room = ideal.add(ids)
        covered, cache = ask(store, ids, is_room)
        found += covered
        if step in range(20, 20 + pins) and is_room:
            beginning = ids[: max(len(ids) // 3, 1)]
            store.pin(torch.tensor(beginning), model="m")
            ideal.pin(beginning)
        assert store.statistics.bytes == union_of(store) <= most * TOKEN_BYTES
        caches = [*caches, cache][-held:] if held else []
        del cache
    assert found >= 0.97 * of_ideal > 0


def test_a_pin_keeps_its_tokens_alone() -> None:
    store, ids = PrefixStore(1100 * TOKEN_BYTES), torch.arange(1024)
    ask(store, tuple(range(1024)))
    store.pin(ids[:32], model="m")
    store.pin(ids[:32], model="m")
    ask(store, tuple(range(5000, 6060)))
    # What is pinned, and what there is room for besides.
    assert 32 <= store.lookup(ids, model="m").covered <= 1100 - 1060
    assert store.lookup(torch.arange(5000, 6061), model="m").covered == 1060
    with pytest.raises(CapacityError, match="are pinned"):
        ask(store, tuple(range(7000, 8080)))
    assert store.lookup(torch.arange(5000, 6061), model="m").covered == 1060
    store.unpin(ids[:32], model="m")
    store.unpin(ids[:32], model="m")
    with pytest.raises(PrefixError, match="not pinned"):
        store.unpin(ids[:32], model="m")
    ask(store, tuple(range(7000, 8080)))
    assert store.lookup(ids, model="m").covered == 0


def test_what_does_not_fit_alone_is_refused_and_evicts_nothing() -> None:
    store = PrefixStore(300 * TOKEN_BYTES)
    ask(store, tuple(range(250)))
    for shared in (0, 1, 249):
        with pytest.raises(CapacityError, match="max_bytes"):
            ask(store, (*range(shared), *range(9000, 9301 - shared)))
    assert store.lookup(torch.arange(251), model="m").covered == 250
    assert (store.statistics.bytes, store.statistics.evictions) == (250 * TOKEN_BYTES, 0)


KINDS: dict[str, Callable[[], kvlayers.Cache]] = {
    "int4": lambda: kvlayers.QuantizedCache(nbits=4, q_group_size=8, residual_length=8),
    "static": lambda: kvlayers.StaticCache(config=families.model_of("llama").config, max_cache_len=160),
    "offloaded": kvlayers.OffloadedCache,
}


@pytest.mark.parametrize("kind", KINDS)
def test_no_kind_stops_learning(kind: str) -> None:
    chance, whole = random.Random(0), KINDS[kind]()
    passed(whole, range(150))
    store = PrefixStore(int(1.5 * whole.nbytes))
    for turn in range(8):
        ids = torch.tensor([1, *(chance.randrange(2, 90) for _ in range(149))])
        for again in range(2):
            hit = store.lookup(ids, model="m", namespace=str(turn % 2))
            assert not again or hit.covered >= 141
            cache = KINDS[kind]() if hit.cache is None else hit.cache
            passed(cache, ids[hit.covered :].tolist())
            store.insert(ids, cache, model="m", namespace=str(turn % 2))
            assert store.statistics.bytes <= 1.5 * whole.nbytes


@pytest.mark.parametrize("family", ["llama", "gemma3", "mamba", "jamba", "qwen3_next"])
def test_no_model_stops_learning(family: str) -> None:
    model = families.model_of(family)
    generator, store = torch.Generator().manual_seed(0), PrefixStore("1GiB", snapshot_tokens=16)

    def prompt() -> torch.Tensor:
        ids = torch.randint(3, 90, (1, 48), generator=generator)
        ids[0, 0] = 1
        return ids

    kvlayers.generate(model, prompt(), prefix_store=store, **ASKED)
    store = PrefixStore(int(1.3 * store.statistics.bytes), snapshot_tokens=16)
    for _ in range(5):
        ids = prompt()
        first, second = (kvlayers.generate(model, ids, prefix_store=store, **ASKED) for _ in range(2))
        assert torch.equal(first.sequences, second.sequences)
        # The last four are read together, where states cannot go back and tokens may come together.
        assert second.cached_tokens[0] == (44 if family in ("gemma3", "qwen3_next") else 47)
    assert store.statistics.refused == 0


# Directories


WIDE = 64
"""Channels of states beside which the heads of files are small."""

WIDE_BYTES = TOKEN_BYTES * WIDE // HEAD_DIM


@pytest.fixture(params=["local", "memory", "redis"])
def place(request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> str:
    name = f"{tmp_path.name}{time.time_ns()}"
    if request.param == "redis":
        return f"{request.getfixturevalue('redis_url')}?prefix={name}"
    return str(tmp_path) if request.param == "local" else f"memory://{name}"


@pytest.mark.parametrize(("seed", "memory"), [(0, 4000), (1, 1000)], ids=["alone", "behind memory"])
def test_a_directory_with_a_limit_finds_as_many_as_an_ideal_tree(place: str, seed: int, memory: int) -> None:
    # Ten of the longest prompts: of the last one that goes, up to 255 tokens more go than have to, as files do.
    most, alone = 4000, memory == 4000
    prompts, ideal = Prompts(seed, 400), IdealTree(most)
    store = PrefixStore(memory * WIDE_BYTES, place, directory_max_bytes=most * WIDE_BYTES)
    found = of_ideal = 0
    for step in range(60):
        ids = prompts.next()
        of_ideal += ideal.find(ids)
        ideal.add(ids)
        found += ask(store, ids, head_dim=WIDE)[0]
        if step == 30:
            pinned = ids[:50]
            store.pin(torch.tensor(pinned), model="m")
            ideal.pin(pinned)
        if alone:
            store.evict()
        else:
            store.refresh()
        assert store.statistics.file_bytes <= most * WIDE_BYTES
        assert step < 30 or store.lookup(torch.tensor((*pinned, 0)), model="m").covered == 50
    assert found >= 0.97 * of_ideal


# What is held once


def tail(question: int, tokens: int) -> Iterable[int]:
    return range(10_000 * (question + 1), 10_000 * (question + 1) + tokens)


def test_snapshots_of_a_prompt_share_what_never_leaves() -> None:
    model, store = families.model_of("gemma3"), PrefixStore(2**30, snapshot_tokens=16)
    ids = torch.arange(1, 1 + 80)[None] % 97
    cache = kvlayers.generate(model, ids, prefix_store=store, **ASKED).past_key_values
    own = sum(layer.nbytes for layer in cache.layers if layer.is_sliding)
    assert len(store) == 6
    # Windows are held apart; full attention once, and once again where the cache went on in other memory.
    assert store.statistics.bytes <= 7 * own + 2 * (cache.nbytes - own)


@pytest.mark.parametrize("tokens", [20, 100, 300])
def test_six_questions_take_the_bytes_of_the_document_and_their_own(tokens: int) -> None:
    store, document = PrefixStore(2**30), range(1000)
    ask(store, tuple(document))
    alone = store.statistics.bytes
    assert [ask(store, (*document, *tail(question, tokens)))[0] for question in range(6)] == [1000] * 6
    now = store.statistics
    assert now.bytes <= alone + 1.05 * 6 * tokens * TOKEN_BYTES
    assert (now.entries, now.evictions, now.tokens) == (6, 0, 1000 + 6 * tokens)
    assert now.shared_bytes >= 1000 * TOKEN_BYTES
    # Nothing is held that the store does not count, and the tree counts all of it.
    assert now.bytes == union_of(store) == store.tree().nbytes
    (top,) = store.tree().children
    (node,) = top.children
    assert (node.tokens, len(node.children), node.is_entry) == (1000, 6, False)
    assert node.nbytes >= 1000 * TOKEN_BYTES
    assert all(child.tokens == tokens and child.in_memory and not child.in_files for child in node.children)


def test_a_branch_moves_nothing_of_its_document(monkeypatch: pytest.MonkeyPatch) -> None:
    store, document, allocated = PrefixStore(2**30), range(8192), list[int]()
    for ids in (tuple(document), (*document, *tail(0, 100))):
        ask(store, ids)
    cache = store.lookup(torch.tensor([*document, 0]), model="m").cache
    passed(cache, tail(1, 100))
    spy(monkeypatch, TokenBuffer, "allocate", lambda form, capacity, *how: allocated.append(capacity))
    store.insert(torch.tensor([*document, *tail(1, 100)]), cache, model="m")  # type: ignore[arg-type]
    # The tail alone, for keys and values of each layer.
    assert sum(allocated) <= 2 * LAYERS * 100


def test_a_document_of_a_directory_is_held_once_too(tmp_path: pathlib.Path) -> None:
    texts = [tuple(range(1000)), *((*range(1000), *tail(question, 50)) for question in range(3))]
    for some in (texts[:1], texts):
        with PrefixStore(2**30, tmp_path) as store:
            for ids in some:
                ask(store, ids)
    store = PrefixStore(2**30, tmp_path)
    for ids in texts[1:]:
        assert store.lookup(torch.tensor((*ids, 0)), model="m").covered == 1050
    # The entry that was loaded first has the spare room of a growing buffer.
    assert store.statistics.bytes <= (1.125 * 1050 + 1.05 * 2 * 50) * TOKEN_BYTES
    assert store.statistics.bytes == union_of(store)


# What leaves


def test_an_address_that_was_given_to_other_memory_counts_with_its_new_size() -> None:
    account = MemoryAccount()
    one, other = (PrefixEntry("m", np.array([token])) for token in (1, 2))
    for entry, storages in ((one, {1: 100}), (other, {1: 30}), (one, {})):
        account.count(entry, storages)
    assert (account.nbytes, account.staying_bytes, account.shared_bytes) == (30, 30, 0)
    account.count(other, {})
    assert (account.nbytes, account.staying_bytes, account.shared_bytes, account.pieces) == (0, 0, 0, {})


def test_an_eviction_costs_what_leaves_and_not_what_the_store_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, looked_at, ranked = 16, list[int](), list[int]()

    def ids_of(number: int) -> list[int]:
        # All begin with one token, which the first entry has brought.
        return [0, *range(number * tokens + 1, (number + 1) * tokens)]

    spy(monkeypatch, kvlayers.DynamicCache, "storages", lambda cache: looked_at.append(1))
    spy(monkeypatch, LeastRecentlyUsed, "rank", lambda policy, entry: ranked.append(1))
    most: dict[int, list[int]] = {}
    for entries in (50, 350):
        store, spent = PrefixStore(entries * tokens * TOKEN_BYTES), []
        for number in range(entries * 5 // 4):
            cache = kvlayers.DynamicCache()
            passed(cache, ids_of(number))
            for counted in (looked_at, ranked):
                counted.clear()
            store.insert(torch.tensor(ids_of(number)), cache, model="m")
            spent.append((len(looked_at), len(ranked)))
            for earlier in range(number if number == entries - 10 else 0):
                assert store.lookup(torch.tensor(ids_of(earlier)), model="m", leave=0).covered == tokens
        assert store.statistics.bytes == union_of(store)
        assert store.statistics.evictions > entries // 8
        most[entries] = [max(own) for own in zip(*spent, strict=True)]
    # As many for seven times the entries.
    assert most[350][0] <= most[50][0] + 4 < 100
    assert most[350][1] < MOST_RANKED + 40 < 340


def test_states_that_a_fork_copies_are_copied_once_to_be_inserted(monkeypatch: pytest.MonkeyPatch) -> None:
    store, cache, forks = PrefixStore(2**30), kvlayers.OffloadedCache(), list[kvlayers.Cache]()
    passed(cache, range(16))
    store.insert(torch.arange(16), cache, model="m")
    passed(cache, range(16, 32))
    spy(monkeypatch, type(cache), "fork", forks.append)
    assert store.insert(torch.arange(32), cache, model="m")
    assert forks == [cache]
    assert store.lookup(torch.arange(33), model="m").covered == 32


def test_hits_and_age_go_to_the_entry_that_replaces_another() -> None:
    store = PrefixStore(2**30)
    for tokens, hits in ((50, 1), (100, 3)):
        ask(store, tuple(range(tokens)))
        (node,) = (node for node in store.tree().nodes if node.is_entry)
        assert (node.tokens, node.hits, node.age is None) == (tokens, hits, False)
    cache = store.lookup(torch.arange(101), model="m").cache
    passed(cache, range(100, 150))
    store.insert(torch.arange(150), cache, model="m")  # type: ignore[arg-type]
    (node,) = (node for node in store.tree().nodes if node.is_entry)
    assert (node.hits, node.age is None) == (4, False)


def test_a_tree_shows_what_is_pinned_used_and_in_files(tmp_path: pathlib.Path) -> None:
    store, prompts = PrefixStore(2**30, tmp_path), [(*range(100), *tail(question, 20)) for question in range(2)]
    for ids in prompts:
        ask(store, ids)
    store.pin(torch.tensor(prompts[0]), model="m")
    store.evict()
    text = str(store.tree())
    assert [word in text for word in ("100 tokens", "pinned", "files")] == [True] * 3
    nodes = store.tree().nodes
    assert sum(node.nbytes for node in nodes) == store.statistics.bytes
    assert sorted((node.in_memory, node.in_files, node.pinned) for node in nodes if node.is_entry) == [
        (False, True, False),
        (True, False, True),
    ]
    assert str(PrefixStore(2**30).tree()) == "nothing is held"


def snapshots(count: int) -> list[tuple[torch.Tensor, kvlayers.DynamicCache]]:
    """A cache that reads on, with full attention and with a window, which cannot go back; and forks of it."""
    cache, taken = kvlayers.DynamicCache([(None, None), (None, None, torch.tensor(8))], length_hint=512), []
    for length in range(16, 16 * count + 1, 16):
        passed(cache, range(length - 16, length))
        # A first buffer has room for few tokens more, and all snapshots are to be in one.
        cache.layers[0].store.reserve(8 * 16)
        taken.append((torch.arange(length), cache.fork()))
    return taken


@pytest.mark.parametrize("change", ["count", "stay"])
def test_an_interrupt_while_memory_is_counted_leaves_a_store_that_goes_on(
    change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = snapshots(5)
    most = 2 * taken[-1][1].nbytes
    store, counted, left, interrupts = PrefixStore(most), getattr(MemoryAccount, change), 0, 0

    def interrupted(account: MemoryAccount, *arguments: Any) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            raise KeyboardInterrupt
        counted(account, *arguments)

    monkeypatch.setattr(MemoryAccount, change, interrupted)
    for calls in range(1, 14):
        for ids, cache in taken:
            left = calls
            try:
                store.insert(ids + 100 * calls, cache.fork(), model="m")
            except KeyboardInterrupt:
                interrupts += 1
            left = 0
            assert store.statistics.bytes == union_of(store) <= most
            store.insert(ids + 100 * calls, cache.fork(), model="m")
            assert store.statistics.bytes == union_of(store)
    assert interrupts > 4
    store.evict()
    assert (store.statistics.bytes, len(store)) == (0, 0)


def test_an_interrupt_while_an_entry_gets_shorter_leaves_none_that_holds_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nobody would find it again, to remove it."""
    counted, left, interrupts = MemoryAccount.count, 0, 0

    def interrupted(account: MemoryAccount, *arguments: Any) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            raise KeyboardInterrupt
        counted(account, *arguments)

    monkeypatch.setattr(MemoryAccount, "count", interrupted)
    store = PrefixStore(200 * 128)
    for calls, question in itertools.product(range(1, 14), range(5)):
        left = calls
        try:
            ask(store, (calls, *range(60), *tail(question, 20)))
        except KeyboardInterrupt:
            interrupts += 1
        left = 0
    assert interrupts > 4
    store.evict()
    assert (len(store), store.statistics.bytes) == (0, 0)


def test_an_interrupt_between_a_key_and_its_value_leaves_a_mapping_that_can_be_read() -> None:
    class Keys(list[Any]):
        def insert(self, *arguments: Any) -> None:
            super().insert(*arguments)
            raise KeyboardInterrupt

    known = PrefixMap[str]()
    known.insert("m", np.array([1, 2]), "ab")
    known._keys = Keys(known._keys)
    with pytest.raises(KeyboardInterrupt):
        known.insert("m", np.array([1, 3]), "ac")
    assert list(known) == ["ab", "ac"]


def test_an_entry_that_gets_shorter_while_it_is_looked_up_leaves_as_others_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look-ups do not hold the lock all the time, so another thread may have it cut."""
    store, keep = PrefixStore(200 * TOKEN_BYTES), EntryAccess._keep
    cache = kvlayers.DynamicCache()
    passed(cache, range(150))
    store.insert(torch.arange(150), cache, model="m")
    del cache

    def cut_before(access: EntryAccess, search: Any) -> None:
        access.index.evict(100 * TOKEN_BYTES)
        keep(access, search)

    monkeypatch.setattr(EntryAccess, "_keep", cut_before)
    assert store.lookup(torch.arange(150), model="m", leave=0).covered == 150
    assert 0 < store.statistics.tokens < 150
    store.evict()
    assert len(store) == 0
