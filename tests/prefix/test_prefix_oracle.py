"""What a prefix store finds, against an ideal tree of tokens, from which the least recently used leaf goes first."""

import heapq
import pathlib
import random
import time
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch

import families
import kvlayers
from kvlayers import CapacityError, PrefixStore
from kvlayers.errors import PrefixError
from models import tiny_model

HEADS, HEAD_DIM, LAYERS = 2, 4, 2
TOKEN_BYTES = LAYERS * 2 * HEADS * HEAD_DIM * 4

STEPS = 150
"""Prompts of a simulation."""

Ids = tuple[int, ...]


class IdealTree:
    """Each token of each prompt once. Leaves go first, of these the one that was used longest ago."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.used: dict[Ids, int] = {}
        self.children: dict[Ids, int] = {}
        self.pinned: set[Ids] = set()
        self.now = 0

    def find(self, ids: Ids) -> int:
        """Tokens that are found, which are used now."""
        self.now += 1
        found = next((n for n in range(len(ids) - 1, 0, -1) if ids[:n] in self.used), 0)
        for length in range(1, found + 1):
            self.used[ids[:length]] = self.now
        return found

    def add(self, ids: Ids) -> bool:
        """Hold a prompt, and return whether there is room for it beside what is pinned."""
        if len({*(ids[:n] for n in range(1, len(ids) + 1)), *self.pinned}) > self.most:
            return False
        for length in range(1, len(ids) + 1):
            if ids[:length] not in self.used:
                self.children[ids[:length]] = 0
                self.children[ids[: length - 1]] = self.children.get(ids[: length - 1], 0) + 1
            self.used[ids[:length]] = self.now
        leaves = [(time, key) for key, time in self.used.items() if not self.children[key] and key not in self.pinned]
        heapq.heapify(leaves)
        while len(self.used) > self.most:
            _, key = heapq.heappop(leaves)
            del self.used[key], self.children[key]
            above = key[:-1]
            self.children[above] -= 1
            if above in self.used and not self.children[above] and above not in self.pinned:
                heapq.heappush(leaves, (self.used[above], above))
        return True

    def pin(self, ids: Ids) -> None:
        self.pinned |= {ids[:n] for n in range(1, len(ids) + 1)}


def passed(cache: Any, ids: Iterable[int], head_dim: int = HEAD_DIM) -> None:
    states = torch.tensor(list(ids), dtype=torch.float32)[None, None, :, None].expand(1, HEADS, -1, head_dim)
    for layer in range(LAYERS):
        cache.update(states, -states, layer)


def ask(store: PrefixStore, ids: Ids, is_room: bool = True) -> tuple[int, kvlayers.Cache]:
    """Look a prompt up, compute the rest, and insert it, as `generate()` does. Then all of it is found."""
    hit = store.lookup(torch.tensor(ids), model="m")
    cache = kvlayers.DynamicCache() if hit.cache is None else hit.cache
    passed(cache, ids[hit.covered :])
    try:
        store.insert(torch.tensor(ids), cache, model="m")
    except CapacityError:
        if is_room:
            raise
    else:
        held = store.lookup(torch.tensor((*ids, 0)), model="m")
        assert held.covered == len(ids)
        assert held.cache.layers[1].keys[0, 0, :, 0].tolist() == list(map(float, ids))
    return hit.covered, cache


class Prompts:
    """Random prompts that begin like others: with the same first token, with instructions, with a document."""

    def __init__(self, seed: int, longest: int) -> None:
        self.chance = random.Random(seed)
        self.longest = longest
        self.asked: list[Ids] = []
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


def simulate(seed: int, most: int, longest: int, pins: int = 0, held: int = 0, **options: Any) -> tuple[int, int]:
    """Tokens that a store of `most` tokens finds in random prompts, and those that the ideal tree finds.

    Args:
        seed: which prompts.
        most: tokens for which there is memory.
        longest: most tokens of a part of a prompt.
        pins: prompts that are pinned.
        held: how many of the last caches the caller goes on holding.
        options: of the store.
    """
    prompts, ideal = Prompts(seed, longest), IdealTree(most)
    store = PrefixStore(most * TOKEN_BYTES, **options)
    caches: list[kvlayers.Cache] = []
    found = of_ideal = 0
    for step in range(STEPS):
        ids = prompts.next()
        of_ideal += ideal.find(ids)
        is_room = ideal.add(ids)
        covered, cache = ask(store, ids, is_room)
        found += covered
        if step in range(20, 20 + pins) and is_room:
            beginning = ids[: max(len(ids) // 3, 1)]
            store.pin(torch.tensor(beginning), model="m")
            ideal.pin(beginning)
        assert store.statistics.bytes <= most * TOKEN_BYTES
        caches = [*caches, cache][-held:] if held else []
        del cache
    return found, of_ideal


@pytest.mark.parametrize(
    ("seed", "longest", "most", "held"),
    [
        *((1, 20, 25, 0), (2, 20, 80, 0), (3, 20, 200, 1), (4, 100, 105, 0), (5, 100, 400, 1)),
        *((6, 150, 600, 1), (7, 400, 1600, 0), (8, 400, 4000, 1), (9, 400, 4000, 10)),
        # Room for two of the longest prompts, while callers hold as much as several times the room.
        *((1, 100, 210, 1), (1, 100, 210, 4), (2, 100, 400, 10), (3, 100, 400, 10)),
    ],
)
def test_as_many_tokens_are_found_as_in_an_ideal_tree(seed: int, longest: int, most: int, held: int) -> None:
    found, of_ideal = simulate(seed, most, longest, held=held)
    assert of_ideal > 0
    assert found >= 0.97 * of_ideal


@pytest.mark.parametrize(("seed", "longest", "most"), [(1, 20, 200), (2, 100, 600), (3, 150, 1500)])
def test_what_is_pinned_takes_no_more_than_its_own_tokens(seed: int, longest: int, most: int) -> None:
    found, of_ideal = simulate(seed, most, longest, pins=3)
    assert found >= 0.97 * of_ideal


def test_a_pin_keeps_its_tokens_alone() -> None:
    store = PrefixStore(1100 * TOKEN_BYTES)
    ids = torch.arange(1024)
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
    before = store.statistics
    for shared in (0, 1, 249):
        with pytest.raises(CapacityError, match="max_bytes"):
            ask(store, (*range(shared), *range(9000, 9301 - shared)))
    assert store.lookup(torch.arange(251), model="m").covered == 250
    assert (store.statistics.bytes, store.statistics.evictions) == (before.bytes, 0)


# Caches of other kinds, and of several tenants


KINDS: dict[str, Callable[[], kvlayers.Cache]] = {
    "dynamic": kvlayers.DynamicCache,
    "int4": lambda: kvlayers.QuantizedCache(nbits=4, q_group_size=8, residual_length=8),
    "static": lambda: kvlayers.StaticCache(config=tiny_model("llama").config, max_cache_len=160),
    "offloaded": kvlayers.OffloadedCache,
}


@pytest.mark.parametrize("kind", KINDS)
def test_no_kind_stops_learning(kind: str) -> None:
    make, chance = KINDS[kind], random.Random(0)
    whole = make()
    passed(whole, range(150))
    store = PrefixStore(int(1.5 * whole.nbytes))
    for turn in range(8):
        ids = torch.tensor([1, *(chance.randrange(2, 90) for _ in range(149))])
        namespace = str(turn % 2)
        for again in range(2):
            hit = store.lookup(ids, model="m", namespace=namespace)
            assert not again or hit.covered >= 141
            cache = make() if hit.cache is None else hit.cache
            passed(cache, ids[hit.covered :].tolist())
            store.insert(ids, cache, model="m", namespace=namespace)
            assert store.statistics.bytes <= 1.5 * whole.nbytes


@pytest.mark.parametrize("family", ["llama", "gemma3", "mamba", "jamba", "qwen3_next"])
def test_no_model_stops_learning(family: str) -> None:
    model = families.model_of(family)
    asked = {"max_new_tokens": 2, "do_sample": False, "pad_token_id": 0, "return_dict_in_generate": True}
    generator, store = torch.Generator().manual_seed(0), PrefixStore("1GiB", snapshot_tokens=16)

    def prompt() -> torch.Tensor:
        ids = torch.randint(3, 90, (1, 48), generator=generator)
        ids[0, 0] = 1
        return ids

    kvlayers.generate(model, prompt(), prefix_store=store, **asked)
    store = PrefixStore(int(1.3 * store.statistics.bytes), snapshot_tokens=16)
    outputs = []
    for _ in range(5):
        ids = prompt()
        first, second = (kvlayers.generate(model, ids, prefix_store=store, **asked) for _ in range(2))
        assert torch.equal(first.sequences, second.sequences)
        # The last four are read together, where states cannot go back and tokens may come together.
        assert second.cached_tokens[0] == (44 if family in ("gemma3", "qwen3_next") else 47)
        outputs.append(second)
    assert store.statistics.refused == 0


@pytest.mark.parametrize(("seed", "most"), [(1, 60), (2, 120), (3, 250)])
def test_as_much_of_documents_is_found_as_in_an_ideal_tree(seed: int, most: int) -> None:
    model, chance, ideal = tiny_model("llama"), random.Random(seed), IdealTree(most)

    def text(length: int) -> list[int]:
        return [chance.randrange(3, 90) for _ in range(length)]

    texts, beginning = [text(chance.randint(4, 30)) for _ in range(12)], [1, *text(5)]
    # Two layers, each with a key and a value of 16 numbers.
    store, of_ideal = PrefixStore(most * 2 * 2 * 16 * 4), 0
    for _ in range(STEPS // 2):
        popular = texts[min(int(chance.expovariate(0.25)), len(texts) - 1)]
        document = [*popular, *text(chance.randint(0, 6))]
        kvlayers.store_document(store, torch.tensor([document]), model, beginning=torch.tensor([beginning]))
        # A document is found as a whole.
        of_ideal += ideal.find((*beginning, *document, 0))
        ideal.add((*beginning, *document))
    assert of_ideal > 0
    assert store.statistics.tokens_covered >= 0.97 * of_ideal


# Directories


def test_what_leaves_memory_for_files_is_found_there(tmp_path: pathlib.Path) -> None:
    found, of_ideal = simulate(5, 400, 100, directory=tmp_path)
    assert found >= of_ideal


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
        hit = store.lookup(torch.tensor(ids), model="m")
        cache = kvlayers.DynamicCache() if hit.cache is None else hit.cache
        passed(cache, ids[hit.covered :], WIDE)
        store.insert(torch.tensor(ids), cache, model="m")
        if step == 30:
            store.pin(torch.tensor(ids[:50]), model="m")
            ideal.pin(ids[:50])
            pinned = ids[:50]
        if alone:
            store.evict()
        else:
            store.refresh()
        found += hit.covered
        assert store.statistics.file_bytes <= most * WIDE_BYTES
        assert step < 30 or store.lookup(torch.tensor((*pinned, 0)), model="m").covered == 50
    assert found >= 0.97 * of_ideal
