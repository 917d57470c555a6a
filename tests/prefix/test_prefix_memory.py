"""What a prefix store counts: each piece of memory once, whoever holds it."""

import contextlib
import pathlib
import random
from typing import Any

import numpy as np
import pytest
import torch

import kvlayers
from kvlayers import CapacityError, PrefixStore
from kvlayers.core.buffer import StateForm, TokenBuffer
from kvlayers.prefix import LeastRecentlyUsed, PrefixEntry
from kvlayers.prefix.entry import MOST_RANKED, MemoryAccount
from models import tiny_model

HEADS, HEAD_DIM, WINDOW, STEP = 2, 4, 8, 16
LAYERS = [(None, None), (None, None, torch.tensor(WINDOW))]
"""One with full attention, and one with a window, which cannot go back."""


def snapshots(count: int, reserved: int = 512) -> list[tuple[torch.Tensor, kvlayers.DynamicCache]]:
    """A cache that reads on, and a fork of it after each `STEP` tokens."""
    cache = kvlayers.DynamicCache(LAYERS, length_hint=reserved)
    taken = []
    for number in range(1, count + 1):
        for layer in range(2):
            states = torch.randn(1, HEADS, STEP, HEAD_DIM)
            cache.update(states, -states, layer)
        # A first buffer has room for few tokens more, and all snapshots are to be in one.
        cache.layers[0].store.reserve(8 * STEP)
        taken.append((torch.arange(number * STEP), cache.fork()))
    return taken


def union(caches: list[kvlayers.DynamicCache]) -> int:
    found: dict[int, int] = {}
    for cache in caches:
        for layer in cache.layers:
            for states in layer.peek():
                storage = states.untyped_storage()
                found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())


def test_what_snapshots_share_counts_once_and_is_free_with_the_last() -> None:
    store, taken = PrefixStore(2**30), snapshots(6)
    for ids, cache in taken:
        store.insert(ids, cache, model="m")
    assert len(store) == 6
    held = union([cache for _, cache in taken])
    assert store.statistics.bytes == held
    assert held < 2 * taken[-1][1].nbytes
    # Of the older ones little is their own, and the full attention of all is free with the last.
    assert store.evict(held // 2) == held
    assert (len(store), store.statistics.bytes) == (0, 0)


def test_what_is_pinned_is_counted_once_too() -> None:
    taken = snapshots(3)
    store = PrefixStore(union([cache for _, cache in taken]) + 1)
    for ids, cache in taken:
        store.insert(ids, cache, model="m")
        store.pin(ids, model="m")
    assert len(store) == 3
    # Spare room behind those that are pinned serves others, until there is none.
    reason, count = "", 0
    while not reason and count < 60:
        count, before = count + 1, store.statistics
        ids, cache = snapshots(count)[-1]
        try:
            store.insert(ids + 1000 * count, cache, model="m")
        except CapacityError as error:
            reason = str(error)
    assert "pinned" in reason
    assert store.statistics == before


def test_snapshots_of_a_prompt_share_what_never_leaves() -> None:
    model, store = tiny_model("gemma3"), PrefixStore(2**30, snapshot_tokens=STEP)
    ids = torch.arange(1, 1 + 80)[None] % 97
    asked: dict[str, Any] = {
        "max_new_tokens": 2,
        "do_sample": False,
        "return_dict_in_generate": True,
        "pad_token_id": 0,
    }
    cache = kvlayers.generate(model, ids, prefix_store=store, **asked).past_key_values
    own = sum(layer.nbytes for layer in cache.layers if layer.is_sliding)
    assert len(store) == 6
    # Windows are held apart; full attention once, and once again where the cache went on in other memory.
    assert store.statistics.bytes <= 7 * own + 2 * (cache.nbytes - own)


# One document and many questions

LLAMA = {"layers": 4, "heads": 2, "head_dim": 16}
TOKEN_BYTES = LLAMA["layers"] * 2 * LLAMA["heads"] * LLAMA["head_dim"] * 2


def read(cache: kvlayers.DynamicCache, tokens: int) -> None:
    """Pass random states in bfloat16, as a model of four layers would."""
    for layer in range(LLAMA["layers"]):
        states = torch.randn(1, LLAMA["heads"], tokens, LLAMA["head_dim"], dtype=torch.bfloat16)
        cache.update(states, -states, layer)


def ask(store: PrefixStore, document: torch.Tensor, questions: int, tokens: int) -> int:
    """Insert a document and questions about it as `generate` does, and return the bytes of the document alone."""
    cache = kvlayers.DynamicCache()
    read(cache, len(document))
    store.insert(document, cache, model="m")
    alone = store.statistics.bytes
    for question in range(questions):
        prompt = torch.cat([document, torch.arange(tokens + 1) + 10_000 * (question + 1)])
        hit = store.lookup(prompt, model="m")
        assert hit.covered == len(document)
        read(hit.cache, tokens)  # type: ignore[arg-type]
        assert store.insert(prompt, hit.cache, model="m")  # type: ignore[arg-type]
    return alone


@pytest.mark.parametrize("tokens", [20, 100, 300])
def test_six_questions_take_the_bytes_of_the_document_and_their_own(tokens: int) -> None:
    store = PrefixStore(2**30)
    alone = ask(store, torch.arange(1000), questions=6, tokens=tokens)
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


def union_of(store: PrefixStore) -> int:
    """Bytes of memory that the caches of a store keep alive."""
    found: dict[int, int] = {}
    for entry in store._index.entries:
        if entry.cache is not None:
            found.update(entry.cache.storages())
    return sum(found.values())


def test_a_branch_moves_nothing_of_its_document(monkeypatch: pytest.MonkeyPatch) -> None:
    document = torch.arange(8192)
    store = PrefixStore(2**30)
    ask(store, document, questions=1, tokens=100)
    prompt = torch.cat([document, torch.arange(101) + 50_000])
    hit = store.lookup(prompt, model="m")
    read(hit.cache, 100)  # type: ignore[arg-type]
    allocated: list[int] = []
    allocate = TokenBuffer.allocate.__func__  # type: ignore[attr-defined]

    def counted(cls: type[TokenBuffer], form: StateForm, capacity: int, *how: Any) -> TokenBuffer:
        allocated.append(capacity)
        return allocate(cls, form, capacity, *how)  # type: ignore[no-any-return]

    monkeypatch.setattr(TokenBuffer, "allocate", classmethod(counted))
    assert store.insert(prompt, hit.cache, model="m")  # type: ignore[arg-type]
    # The tail alone, for keys and values of each layer.
    assert sum(allocated) <= 2 * LLAMA["layers"] * 100


def test_what_was_computed_twice_is_held_once() -> None:
    store, document = PrefixStore(2**30), torch.arange(1000)
    for question in range(4):
        cache = kvlayers.DynamicCache()
        torch.manual_seed(0)
        read(cache, 1000)
        torch.manual_seed(question)
        read(cache, 50)
        expected = [(layer.keys[:, :, -50:].clone(), layer.values[:, :, -50:].clone()) for layer in cache.layers]
        prompt = torch.cat([document, torch.arange(50) + 10_000 * (question + 1)])
        store.insert(prompt, cache, model="m")
        hit = store.lookup(torch.cat([prompt, prompt[:1]]), model="m").cache
        assert hit is not None
        for layer, (keys, values) in zip(hit.layers, expected, strict=True):
            assert torch.equal(layer.keys[:, :, -50:], keys)
            assert torch.equal(layer.values[:, :, -50:], values)
    assert store.statistics.bytes <= 1.125 * 1050 * TOKEN_BYTES + 3 * 50 * TOKEN_BYTES
    assert store.statistics.bytes == union_of(store)


def test_a_document_of_a_directory_is_held_once_too(tmp_path: pathlib.Path) -> None:
    ask(PrefixStore(2**30, tmp_path), torch.arange(1000), questions=0, tokens=0)
    with PrefixStore(2**30, tmp_path) as store:
        ask(store, torch.arange(1000), questions=3, tokens=50)
    store = PrefixStore(2**30, tmp_path)
    for question in range(3):
        prompt = torch.cat([torch.arange(1000), torch.arange(51) + 10_000 * (question + 1)])
        assert store.lookup(prompt, model="m").covered == 1050
    # The entry that was loaded first has the spare room of a growing buffer.
    assert store.statistics.bytes <= (1.125 * 1050 + 1.05 * 2 * 50) * TOKEN_BYTES
    assert store.statistics.bytes == union_of(store)


# What leaves


def test_an_address_that_was_given_to_other_memory_counts_with_its_new_size() -> None:
    account = MemoryAccount()
    one, other = (PrefixEntry("m", np.array([token])) for token in (1, 2))
    account.count(one, {1: 100})
    account.count(other, {1: 30})
    account.count(one, {})
    assert (account.nbytes, account.staying_bytes, account.shared_bytes) == (30, 30, 0)
    account.count(other, {})
    assert (account.nbytes, account.staying_bytes, account.shared_bytes, account.pieces) == (0, 0, 0, {})


class Counting(LeastRecentlyUsed):
    """Counts how often it is asked."""

    asked = 0

    def rank(self, entry: PrefixEntry) -> float:
        self.asked += 1
        return super().rank(entry)


def test_an_eviction_costs_what_leaves_and_not_what_the_store_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    storages, looked_at = kvlayers.DynamicCache.storages, 0

    def counted(cache: kvlayers.DynamicCache) -> dict[int, int]:
        nonlocal looked_at
        looked_at += 1
        return storages(cache)

    def ids_of(number: int) -> torch.Tensor:
        # All begin with one token, which the first entry has brought.
        return torch.cat([torch.zeros(1, dtype=torch.int64), number * STEP + torch.arange(1, STEP)])

    monkeypatch.setattr(kvlayers.DynamicCache, "storages", counted)
    most: dict[int, list[int]] = {}
    for entries in (50, 350):
        policy, spent = Counting(), []
        store = PrefixStore(entries * STEP * 64, policy=policy)
        for number in range(entries * 5 // 4):
            cache, states = kvlayers.DynamicCache(), torch.zeros(1, 1, STEP, 8)
            cache.update(states, states, 0)
            looked_at = policy.asked = 0
            store.insert(ids_of(number), cache, model="m")
            spent.append((looked_at, policy.asked))
            for earlier in range(number if number == entries - 10 else 0):
                assert store.lookup(ids_of(earlier), model="m", leave=0).covered == STEP
        assert store.statistics.bytes == union_of(store)
        assert store.statistics.evictions > entries // 8
        most[entries] = [max(own) for own in zip(*spent, strict=True)]
    # As many for seven times the entries.
    assert most[350][0] <= most[50][0] + 4 < 100
    assert most[350][1] < MOST_RANKED + 40 < 340


def test_states_that_a_fork_copies_are_copied_once_to_be_inserted(monkeypatch: pytest.MonkeyPatch) -> None:
    store, cache = PrefixStore(2**30), kvlayers.OffloadedCache()
    cache.update(torch.randn(1, HEADS, STEP, HEAD_DIM), torch.randn(1, HEADS, STEP, HEAD_DIM), 0)
    store.insert(torch.arange(STEP), cache, model="m")
    cache.update(torch.randn(1, HEADS, STEP, HEAD_DIM), torch.randn(1, HEADS, STEP, HEAD_DIM), 0)
    forks: list[kvlayers.Cache] = []
    fork = type(cache).fork

    def counted(self: kvlayers.Cache) -> kvlayers.Cache:
        forks.append(self)
        return fork(self)

    monkeypatch.setattr(type(cache), "fork", counted)
    assert store.insert(torch.arange(2 * STEP), cache, model="m")
    assert forks == [cache]
    assert store.lookup(torch.arange(2 * STEP + 1), model="m").covered == 2 * STEP


def test_a_policy_ranks_entries() -> None:
    class ShortestFirst:
        def rank(self, entry: PrefixEntry) -> float:
            return entry.length

    store = PrefixStore(2**30, policy=ShortestFirst())
    # The longest ones come in first.
    for ids, cache in reversed(snapshots(3)):
        store.insert(ids, cache, model="m")
    while not store.statistics.evictions:
        store.evict(1)
    assert (len(store), store.statistics.evictions) == (2, 1)
    ids, _ = snapshots(3)[0]
    assert store.lookup(torch.cat([ids, torch.tensor([99])]), model="m").covered == 0
    assert store.evict() > 0
    assert (len(store), store.statistics.bytes, store.statistics.evictions) == (0, 0, 3)


def test_hits_and_age_go_to_the_entry_that_replaces_another() -> None:
    store, cache = PrefixStore(2**30), kvlayers.DynamicCache()
    for tokens in (50, 100):
        read(cache, 50)
        assert store.insert(torch.arange(tokens), cache, model="m")
        assert store.lookup(torch.arange(tokens + 1), model="m").covered == tokens
        (node,) = (node for node in store.tree().nodes if node.is_entry)
        assert (node.tokens, node.hits) == (tokens, tokens // 50)
        assert node.age is not None
    read(cache, 50)
    store.insert(torch.arange(150), cache, model="m")
    (node,) = (node for node in store.tree().nodes if node.is_entry)
    assert (node.hits, node.age is None) == (2, False)


def test_a_tree_shows_what_is_pinned_used_and_in_files(tmp_path: pathlib.Path) -> None:
    store = PrefixStore(2**30, tmp_path)
    ask(store, torch.arange(100), questions=2, tokens=20)
    prompt = torch.cat([torch.arange(100), torch.arange(20) + 10_000])
    store.pin(prompt, model="m")
    store.evict()
    text = str(store.tree())
    assert "100 tokens" in text
    assert "pinned" in text
    assert text.count("files") >= 1
    nodes = store.tree().nodes
    assert sum(node.nbytes for node in nodes) == store.statistics.bytes
    assert sorted((node.in_memory, node.in_files, node.pinned) for node in nodes if node.is_entry) == [
        (False, True, False),
        (True, False, True),
    ]
    assert str(PrefixStore(2**30).tree()) == "nothing is held"


@pytest.mark.parametrize("moves", [False, True], ids=["callers keep their memory", "callers move it"])
def test_what_is_counted_is_what_is_held(moves: bool) -> None:
    chance = random.Random(3)
    store = PrefixStore(220 * 2**10)
    hits: list[Any] = []
    for _ in range(150):
        length = chance.choice([200, 300, 500])
        same = chance.randint(1, length)
        ids = torch.tensor([1] * same + [chance.randrange(50) for _ in range(length - same)])
        cache = kvlayers.DynamicCache()
        states = torch.randn(1, HEADS, length, HEAD_DIM)
        for layer in range(2):
            cache.update(states, -states, layer)
        with contextlib.suppress(CapacityError):
            store.insert(ids, cache, model="m")
        hit = store.lookup(torch.cat([ids[: chance.randint(1, length)], ids[:50] + 100]), model="m").cache
        if hit is not None:
            if chance.random() < 0.5:
                for layer in range(2):
                    hit.update(states[:, :, :50], states[:, :, :50], layer)
            hits.append(hit)
        if len(hits) > 5:
            gone = hits.pop(chance.randrange(len(hits)))
            if moves:
                gone.trim()
        assert store.statistics.bytes <= 220 * 2**10
        assert moves or store.statistics.bytes == union_of(store)
    store.evict()
    assert (store.statistics.bytes, store.statistics.shared_bytes) == (0, 0)


@pytest.mark.parametrize("change", ["count", "stay"])
def test_an_interrupt_while_memory_is_counted_leaves_a_store_that_goes_on(
    change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = snapshots(5)
    store = PrefixStore(2 * taken[-1][1].nbytes)
    counted, left = getattr(MemoryAccount, change), 0

    def interrupted(account: MemoryAccount, *arguments: Any) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            raise KeyboardInterrupt
        counted(account, *arguments)

    monkeypatch.setattr(MemoryAccount, change, interrupted)
    interrupts = 0
    for calls in range(1, 14):
        for ids, cache in taken:
            left = calls
            try:
                store.insert(ids + 100 * calls, cache.fork(), model="m")
            except KeyboardInterrupt:
                interrupts += 1
            left = 0
            assert store.statistics.bytes == union_of(store) <= 2 * taken[-1][1].nbytes
            assert store.insert(ids + 100 * calls, cache.fork(), model="m") in (True, False)
            assert store.statistics.bytes == union_of(store)
    assert interrupts > 4
    store.evict()
    assert (store.statistics.bytes, len(store)) == (0, 0)
