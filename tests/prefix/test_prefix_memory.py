"""What a prefix store counts: each piece of memory once, whoever holds it."""

import pytest
import torch

import kvlayers
from kvlayers import CapacityError, PrefixStore
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


def test_what_snapshots_share_counts_once() -> None:
    store, taken = PrefixStore(2**30), snapshots(6)
    for ids, cache in taken:
        store.insert(ids, cache, model="m")
    assert len(store) == 6
    held = union([cache for _, cache in taken])
    assert store.statistics.bytes == held
    assert held < 2 * taken[-1][1].nbytes
    assert store.evict() == held
    assert (len(store), store.statistics.bytes) == (0, 0)


def test_a_budget_for_two_holds_many_that_share() -> None:
    taken = snapshots(6)
    store = PrefixStore(2 * taken[-1][1].nbytes)
    for ids, cache in taken:
        store.insert(ids, cache, model="m")
    assert (len(store), store.statistics.evictions) == (6, 0)


def test_eviction_goes_on_until_memory_is_free() -> None:
    store, taken = PrefixStore(2**30), snapshots(6)
    for ids, cache in taken:
        store.insert(ids, cache, model="m")
    whole = store.statistics.bytes
    # Of the older ones little is their own, and the full attention of all is free with the last.
    assert store.evict(whole // 2) == whole
    assert len(store) == 0


def test_what_is_pinned_is_counted_once_too() -> None:
    taken = snapshots(3)
    store = PrefixStore(union([cache for _, cache in taken]) + 1)
    for ids, cache in taken:
        store.insert(ids, cache, model="m")
        store.pin(ids, model="m")
    assert len(store) == 3
    before = store.statistics
    ids, cache = snapshots(1)[0]
    with pytest.raises(CapacityError, match="pinned"):
        store.insert(ids + 1000, cache, model="m")
    assert store.statistics == before


def test_snapshots_of_a_prompt_share_what_never_leaves() -> None:
    model, store = tiny_model("gemma3"), PrefixStore(2**30, snapshot_tokens=STEP)
    ids = torch.arange(1, 1 + 80)[None] % 97
    asked = {"max_new_tokens": 2, "do_sample": False, "return_dict_in_generate": True, "pad_token_id": 0}
    cache = kvlayers.generate(model, ids, prefix_store=store, **asked).past_key_values
    own = sum(layer.nbytes for layer in cache.layers if layer.is_sliding)
    assert len(store) == 6
    # Windows are held apart; full attention once, and once again where the cache went on in other memory.
    assert store.statistics.bytes <= 6 * own + 2 * (cache.nbytes - own)
