"""The prefix store: what it finds is what would have been computed, whatever the cache, and nobody else's."""

import itertools
import math
import os
import pathlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf

import families
import kvlayers
import versions
from backend_cases import filled, held, room_for
from kvlayers import OptionError, PrefixStore
from kvlayers.errors import CachePathError, PrefixError, StateMismatchError
from kvlayers.prefix.backends.local import LocalBackend
from kvlayers.prefix.keys import PrefixMap, common_tokens
from matrix import once
from models import WINDOW, prompt, read, tiny_model

ROOM = 2**30


def ids_of(*ids: int) -> torch.Tensor:
    return torch.tensor(ids)


def run(model: Any, ids: torch.Tensor, cache: Any, one_by_one: bool = False) -> torch.Tensor:
    pieces = ids.split(1, dim=1) if one_by_one else (ids,)
    return torch.cat([read(model, piece, cache)[1] for piece in pieces], dim=1)


KINDS: dict[str, tuple[str, Any]] = {
    "dynamic": ("llama", lambda config: kvlayers.DynamicCache(config=config)),
    "gpt2": ("gpt2", lambda config: kvlayers.DynamicCache(config=config)),
    "window": ("mistral", lambda config: kvlayers.DynamicCache(config=config)),
    "mixed windows": ("gemma3", lambda config: kvlayers.DynamicCache(config=config)),
    "chunks": ("llama4", lambda config: kvlayers.DynamicCache(config=config)),
    "sinks": ("llama", lambda config: kvlayers.SinkCache(10, 2, config=config)),
    "static": ("llama", lambda config: kvlayers.StaticCache(config, max_cache_len=64)),
    "static windows": ("gemma3", lambda config: kvlayers.StaticCache(config, max_cache_len=64)),
    "quantized": ("llama", lambda config: kvlayers.QuantizedCache("native", config, residual_length=4)),
    "offloaded": ("llama", lambda config: kvlayers.OffloadedCache(config=config)),
    "recurrent": ("qwen3_next", lambda config: kvlayers.DynamicCache(config=config)),
    "states that begin at zero": ("jamba", lambda config: kvlayers.DynamicCache(config=config)),
}


@pytest.mark.parametrize(("kind", "on_disk"), once(KINDS, [False, True]))
def test_what_is_found_decodes_as_what_was_computed(kind: str, on_disk: bool, tmp_path: pathlib.Path) -> None:
    family, make = KINDS[kind]
    model = families.model_of(family)
    system, question, other = prompt(tokens=19), prompt(tokens=9, seed=1), prompt(tokens=9, seed=2)
    store = PrefixStore(ROOM, tmp_path if on_disk else None)
    cache = make(model.config)
    run(model, system, cache)
    assert store.insert(system, cache, config=model.config)
    whole = torch.cat([system, question], dim=1)
    run(model, question, cache, one_by_one=True)
    store.insert(whole, cache, config=model.config)
    run(model, prompt(tokens=5, seed=3), cache, one_by_one=True)
    if on_disk:
        assert store.evict() > 0
        assert store.statistics.bytes == 0
        store = PrefixStore(ROOM, tmp_path)
        assert store.statistics.damaged == 0
    # Twice, as what is held is not changed by those who go on from it.
    for tail in (question, other, other):
        ids = torch.cat([system, tail], dim=1)
        hit = store.lookup(ids, config=model.config)
        assert system.shape[1] <= hit.covered < ids.shape[1], hit.reason
        assert hit.cache is not None
        assert hit.cache.get_seq_length() == hit.covered
        assert type(hit.cache) is type(cache)
        fresh = make(model.config)
        run(model, system, fresh)
        expected = run(model, tail, fresh, one_by_one=True)[:, hit.covered - system.shape[1] :]
        seen = run(model, ids[:, hit.covered :], hit.cache, one_by_one=True)
        # Rolled back packed tokens stay packed, where a fresh run has them in full precision for a while.
        exact = kind != "quantized" or hit.covered == system.shape[1]
        torch.testing.assert_close(seen, expected, rtol=0, atol=1e-5 if exact else 0.5)


def test_a_window_that_has_moved_on_says_so() -> None:
    model = tiny_model("mistral")
    ids = prompt(tokens=3 * WINDOW)
    cache = kvlayers.DynamicCache(config=model.config)
    run(model, ids, cache)
    store = PrefixStore(ROOM)
    store.insert(ids, cache, config=model.config)
    hit = store.lookup(ids[:, : 2 * WINDOW], config=model.config)
    assert (hit.cache, hit.covered) == (None, 0)
    assert "insert a cache where prompts diverge" in hit.reason


@pytest.mark.parametrize("first", ["shorter", "longer"])
def test_a_boundary_stays_one_where_a_window_goes_beyond_it_step_by_step(first: str) -> None:
    store, cache = PrefixStore(ROOM), kvlayers.DynamicCache([(None, None, torch.tensor(4))])
    ids = torch.arange(60)
    for start in range(0, 60, 6):
        # It can go back to where it is now, and no further.
        cache.deactivate_past_recording()
        cache.activate_past_recording()
        states = torch.arange(start, start + 6.0)[None, None, :, None]
        cache.update(states, states, layer_idx=0)
        earlier = cache.fork()
        earlier.crop(-1)
        for each in (earlier, cache) if first == "shorter" else (cache, earlier):
            store.insert(ids, each, model="m")
    for boundary in (*range(6, 60, 6), *range(5, 60, 6)):
        hit = store.lookup(torch.cat([ids[:boundary], torch.tensor([99])]), model="m")
        assert hit.covered == boundary
        assert hit.cache.layers[0].keys[0, 0, -3:, 0].tolist() == [*range(boundary - 3, boundary)]


# What begins alike


def test_the_map_finds_what_plain_comparison_finds() -> None:
    generator = random.Random(0)
    tree: PrefixMap[tuple[int, ...]] = PrefixMap()
    kept: set[tuple[int, ...]] = set()
    for _ in range(600):
        ids = tuple(generator.choices((1, 2), k=generator.randint(1, 7)))
        array = np.array(ids, np.int64)
        if generator.random() < 0.4:
            tree.remove("m", array)
            kept.discard(ids)
        else:
            tree.insert("m", array, ids)
            kept.add(ids)
        asked = np.array(generator.choices((1, 2), k=7), np.int64)
        found = list(tree.nearest("m", asked))
        assert sorted(value for value, _ in found) == sorted(own for own in kept if own[0] == asked[0])
        assert sorted(tree) == sorted(kept)
        assert tree.tokens == len({own[:length] for own in kept for length in range(1, len(own) + 1)})
        assert len(tree) == len(kept)
        shared = [common_tokens(asked, np.array(value, np.int64)) for value, _ in found]
        assert [tokens for _, tokens in found] == shared == sorted(shared, reverse=True)
        prefixes = [tuple(asked[:n].tolist()) for n in range(1, 8)]
        assert tree.prefixes_of("m", asked) == [ids for ids in prefixes if ids in kept]
        assert tree.get("m", array) == (ids if ids in kept else None)


def test_a_chat_of_thousands_of_turns_is_held_once() -> None:
    tree: PrefixMap[int] = PrefixMap()
    ids = np.arange(1, 3001, dtype=np.int64)
    for length in range(3000, 0, -1):
        tree.insert("m", ids[:length], length)
    assert tree.tokens == len(tree) == 3000
    assert tree.prefixes_of("m", ids) == list(tree)


# Look-up and insertion


def test_full_attention_serves_every_prompt_that_begins_alike() -> None:
    store = PrefixStore(ROOM)
    assert store.insert(ids_of(1, 2, 3, 4, 5), filled([1, 2, 3, 4, 5]), model="m")
    for asked, covered, why in (
        ([1, 2, 3, 4, 5], 4, ""),
        ([1, 2, 3, 4, 5, 6], 5, ""),
        ([1, 2, 3, 9, 9, 9], 3, "diverges after 3"),
        ([1, 2, 3, 4, 5, 6, 7], 5, "ends after 5"),
        ([9, 2], 0, "no stored sequence starts"),
        ([1], 0, "single token"),
    ):
        hit = store.lookup(ids_of(*asked), model="m")
        assert (hit.covered, hit.cache is None) == (covered, covered == 0)
        assert (why in hit.reason) if why else hit.reason == ""
        if hit.cache is not None:
            assert held(hit.cache) == held(filled(asked))[:covered]
    now = store.statistics
    assert (now.hits, now.misses, now.tokens_covered, now.tokens_asked) == (4, 2, 17, 27)


def test_ids_beyond_what_the_cache_has_seen_are_left_out() -> None:
    store = PrefixStore(ROOM)
    store.insert(ids_of(1, 2, 3, 4), filled([1, 2]), model="m")
    assert store.lookup(ids_of(1, 2, 3, 4), model="m").covered == 2


def test_what_happens_to_a_cache_or_to_a_hit_is_not_seen_by_the_store() -> None:
    store, cache, ids = PrefixStore(ROOM), filled([1, 2, 3]), ids_of(1, 2, 3)
    store.insert(ids, cache, model="m")
    ids.fill_(7)
    cache.crop(1)
    cache.update(torch.full((1, 1, 4, 1), 99.0), torch.full((1, 1, 4, 1), 99.0), layer_idx=0)
    one = store.lookup(ids_of(1, 2, 3, 4), model="m").cache
    assert one is not None
    one.update(torch.full((1, 1, 1, 1), 77.0), torch.full((1, 1, 1, 1), 77.0), layer_idx=0)
    other = store.lookup(ids_of(1, 2, 3, 4), model="m").cache
    assert held(other) == held(filled([1, 2, 3]))


def test_neither_tenants_nor_models_find_one_anothers() -> None:
    store, ids, config = PrefixStore(ROOM), prompt(tokens=6), tiny_model("llama").config
    cache = filled(ids[0].tolist())
    theta = tf.LlamaConfig(**{**config.to_dict(), **versions.rope(rope_type="default", rope_theta=5e5)})
    store.insert(ids, cache, config=config, namespace="a")
    assert store.lookup(ids, config=config, namespace="a").covered == 5
    for options in (
        {"config": config},
        {"config": config, "namespace": "b"},
        {"config": theta, "namespace": "a"},
        {"config": config, "namespace": "a", "model": "fine-tune"},
        {"model": "m", "namespace": "a"},
    ):
        hit = store.lookup(ids, **options)
        assert (hit.cache, hit.reason) == (None, "nothing is stored for this model and namespace")
        with pytest.raises(PrefixError, match="has no entry"):
            store.pin(ids, **options)


# Eviction


def test_a_store_without_a_size_has_one_gibibyte_and_is_a_store_though_it_is_empty() -> None:
    store = PrefixStore()
    assert (len(store), bool(store), repr(store)) == (
        *(0, True),
        "PrefixStore(0 entries, 0 B of 1.00 GiB)",
    )


class Saying:
    """A policy that says one rank after the other, whatever it is asked for."""

    def __init__(self, ranks: Iterator[float]) -> None:
        self.ranks = ranks

    def rank(self, entry: Any) -> float:
        return next(self.ranks)


class NewestUse:
    """One that needs a use of each entry."""

    def rank(self, entry: Any) -> float:
        return max(entry.uses.values())


@pytest.mark.parametrize("place", ["memory", "directory"])
def test_a_policy_sees_the_use_of_an_entry_that_comes_in(place: str, tmp_path: pathlib.Path) -> None:
    store = PrefixStore(room_for(2), tmp_path if place == "directory" else None, policy=NewestUse())
    for first in range(5):
        assert store.insert(ids_of(first, 0, 0), filled([first, 0, 0]), model="m")
        assert store.lookup(ids_of(0, 0, 0), model="m").covered == 2
    assert store.lookup(ids_of(4, 0, 0), model="m").covered == 2


def test_a_policy_that_fails_for_a_while_only_keeps_entries_from_leaving() -> None:
    class Failing(NewestUse):
        fails = True

        def rank(self, entry: Any) -> float:
            if self.fails:
                raise RuntimeError("a policy of somebody else's")
            return super().rank(entry)

    policy = Failing()
    store = PrefixStore(2**30, policy=policy)
    for first in range(3):
        assert store.insert(ids_of(first, 0, 0), filled([first, 0, 0]), model="m")
    with pytest.raises(RuntimeError, match="somebody else's"):
        store.evict()
    assert [store.lookup(ids_of(first, 0, 0), model="m").covered for first in range(3)] == [2, 2, 2]
    policy.fails = False
    assert store.evict() > 0
    assert (len(store), store.statistics.bytes) == (0, 0)


@pytest.mark.parametrize("start_and_step", [(math.nan, 1), (0, 1), (0, -1)])
def test_the_budget_holds_whatever_a_policy_says(start_and_step: tuple[float, int]) -> None:
    store = PrefixStore(room_for(2), policy=Saying(itertools.count(*start_and_step)))
    for first in range(9):
        store.insert(ids_of(first, 0, 0), filled([first, 0, 0]), model="m")
        assert store.statistics.bytes <= room_for(2)
    assert len(store) == 2


def test_what_was_pinned_is_unpinned_though_another_entry_begins_with_its_tokens() -> None:
    store = PrefixStore(ROOM)
    store.insert(ids_of(3, 4, 5), filled([3, 4, 5]), model="m")
    store.pin(ids_of(3), model="m")
    store.insert(ids_of(3, 9), filled([3, 9]), model="m")
    store.pin(ids_of(3, 9), model="m")
    store.unpin(ids_of(3), model="m")
    assert store.evict() > 0
    assert len(store) == 1
    assert store.lookup(ids_of(3, 9, 1), model="m").covered == 2
    store.unpin(ids_of(3, 9), model="m")
    with pytest.raises(PrefixError, match="not pinned"):
        store.unpin(ids_of(3, 9), model="m")


def test_evict_frees_as_many_bytes_as_it_is_asked_for() -> None:
    store = PrefixStore(ROOM)
    for first in range(4):
        store.insert(ids_of(first, 0, 0), filled([first, 0, 0]), model="m")
    # Three tokens, and one of the next entry.
    assert store.evict(room_for(1) + 1) == room_for(1) + room_for(1, tokens=1)
    assert len(store) == 3
    assert store.lookup(ids_of(1, 0, 0), model="m").covered == 2
    store.clear()
    assert (len(store), store.statistics.bytes) == (0, 0)


# Files


def test_a_recurrent_cache_in_a_file_needs_the_config_only_if_its_layers_are_those_of_transformers(
    tmp_path: pathlib.Path,
) -> None:
    store, ids, qwen3_next = PrefixStore(ROOM, tmp_path), prompt(tokens=6), families.model_of("qwen3_next")
    cache = kvlayers.DynamicCache(config=qwen3_next.config)
    run(qwen3_next, ids, cache)
    store.insert(ids, cache, model="m")
    store.evict()
    longer = torch.cat([ids, ids], dim=1)
    hit = store.lookup(longer, model="m")
    if all(isinstance(layer, kvlayers.layers.CacheLayer) for layer in cache.layers):
        assert hit.covered == 6
        assert torch.equal(run(qwen3_next, longer[:, 6:7], hit.cache), run(qwen3_next, longer[:, 6:7], cache))
    else:
        assert (hit.covered, store.statistics.damaged) == (0, 0)
        assert "config=model.config" in hit.reason


def test_a_cache_of_layers_of_transformers_needs_the_config(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That is said without reading any states."""
    store = PrefixStore(ROOM, tmp_path)
    cache = kvlayers.Cache(layers=[tf.cache_utils.DynamicLayer()])
    cache.update(torch.ones(1, 1, 3, 1), torch.ones(1, 1, 3, 1), layer_idx=0)
    store.insert(ids_of(1, 2, 3), cache, model="m")
    store.evict()
    monkeypatch.setattr(LocalBackend, "read_ranges", None)
    for _ in range(2):
        hit = store.lookup(ids_of(1, 2, 3, 4), model="m")
        assert (hit.covered, store.statistics.damaged) == (0, 0)
        assert "config=model.config" in hit.reason


def test_what_cannot_be_written_is_dropped_and_counted(tmp_path: pathlib.Path) -> None:
    class Mine(kvlayers.DynamicCache):
        pass

    cache = Mine()
    cache.update(torch.ones(1, 1, 3, 1), torch.ones(1, 1, 3, 1), layer_idx=0)
    store = PrefixStore(ROOM, tmp_path)
    store.insert(ids_of(1, 2, 3), cache, model="m")
    assert store.evict() == cache.nbytes
    assert (len(store), store.statistics.failed_writes, list(tmp_path.iterdir())) == (0, 1, [])


def test_what_a_killed_writer_left_behind_is_cleared_when_it_is_old(tmp_path: pathlib.Path) -> None:
    old, new = tmp_path / ".kvlayers-1.tmp", tmp_path / ".kvlayers-2.tmp"
    for path in (old, new):
        path.write_bytes(b"half")
    os.utime(old, (1, 1))
    PrefixStore(ROOM, tmp_path)
    assert (old.exists(), new.exists()) == (False, True)


# Bad input


@pytest.mark.parametrize(
    ("input_ids", "message"),
    [
        ([1, 2], "tensor, got a list"),
        (torch.tensor([1.0]), "int64, got torch.float32"),
        (torch.tensor([1], dtype=torch.int32), "int64, got torch.int32"),
        (torch.tensor([], dtype=torch.int64), "at least one token"),
        (torch.ones(1, 0, dtype=torch.int64), "at least one token"),
        (torch.tensor(3), r"\[1, tokens\], got \[\]"),
        (torch.ones(1, 1, 2, dtype=torch.int64), r"\[1, tokens\], got \[1, 1, 2\]"),
        (torch.ones(2, 3, dtype=torch.int64), "got \\[2, "),
    ],
)
def test_ids_of_other_kinds_are_refused(input_ids: Any, message: str) -> None:
    store, cache = PrefixStore(ROOM), filled([1])
    for call in (store.lookup, store.pin, store.unpin, lambda ids, **how: store.insert(ids, cache, **how)):
        with pytest.raises(OptionError, match=message):
            call(input_ids, model="m")
    assert (len(store), store.statistics.tokens_asked) == (0, 0)


def test_caches_that_cannot_be_held_are_refused() -> None:
    store, ids = PrefixStore(ROOM), ids_of(1, 2, 3)
    rows = filled([1, 2, 3])
    rows.batch_repeat_interleave(2)
    broken = filled([1, 2, 3])
    broken.layers[1].truncate(2)
    pair = kvlayers.EncoderDecoderCache(filled([1, 2, 3]), filled([1]))
    for cache, error, message in (
        (rows, StateMismatchError, "batch_select_indices"),
        (kvlayers.DynamicCache(), StateMismatchError, "empty"),
        (filled([1, 2, 3, 4]), StateMismatchError, "cover the 4 tokens"),
        (broken, StateMismatchError, "crop the cache to 2"),
        (pair, OptionError, "without an encoder"),
        (tf.DynamicCache(), OptionError, "a cache of kvlayers"),
        (None, OptionError, "NoneType"),
    ):
        with pytest.raises(error, match=message):
            store.insert(ids, cache, model="m")
    assert len(store) == 0


def test_options_that_make_no_sense_are_refused(tmp_path: pathlib.Path) -> None:
    for options, message in (
        ({"max_bytes": 0}, "positive number"),
        ({"max_bytes": 1.5}, "positive number"),
        ({"max_bytes": 1, "directory_max_bytes": 5}, "needs a `directory`"),
        ({"max_bytes": 1, "directory": 5}, "a path or a URL"),
        ({"max_bytes": 1, "device": "nowhere"}, "device"),
        ({"max_byte": 1}, "did you mean 'max_bytes'"),
    ):
        with pytest.raises(OptionError, match=message):
            PrefixStore(**options)
    store = PrefixStore(ROOM)
    for options, message in (
        ({}, "config=model.config"),
        ({"model": ""}, "`model` must be a string"),
        ({"model": "m", "namespace": None}, "`namespace` must be a string"),
    ):
        with pytest.raises(OptionError, match=message):
            store.lookup(ids_of(1, 2), **options)
    with pytest.raises(OptionError, match="a store with a directory"):
        store.flush()
    with pytest.raises(OptionError, match="nbytes"):
        store.evict(-1)


def test_directories_that_cannot_be_written_to_are_refused(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    places = [file, file / "below"]
    if pathlib.Path("/proc/self").is_dir():
        # Read-only for everybody, root included.
        places.append(pathlib.Path("/proc/self"))
    for place in places:
        with pytest.raises(CachePathError, match="choose another"):
            PrefixStore(ROOM, place)


def test_a_file_that_cannot_be_read_now_is_tried_again(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = PrefixStore(ROOM, tmp_path)
    store.insert(ids_of(1, 5, 6), filled([1, 5, 6]), model="m")
    store.evict()
    opened = open

    def failing(path: Any, *args: Any, **how: Any) -> Any:
        if str(path).endswith(".safetensors"):
            raise OSError(5, "Input/output error", str(path))
        return opened(path, *args, **how)

    with monkeypatch.context() as broken:
        broken.setattr("builtins.open", failing)
        hit = store.lookup(ids_of(1, 5, 6, 7), model="m")
    assert (hit.covered, store.statistics.failed_reads, store.statistics.damaged, len(store)) == (0, 1, 0, 1)
    assert "could not be reached" in hit.reason
    assert store.lookup(ids_of(1, 5, 6, 7), model="m").covered == 3
