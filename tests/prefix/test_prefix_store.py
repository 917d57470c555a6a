"""The prefix store: what it finds is what would have been computed, whatever the cache, and nobody else's."""

import itertools
import math
import os
import pathlib
import random
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf

import families
import kvlayers
import versions
from backend_cases import covered, filled, held, insert, put, room_for
from kvlayers import OptionError, PrefixStore
from kvlayers.errors import CachePathError, PrefixError, StateMismatchError
from kvlayers.prefix.backends.local import LocalBackend
from kvlayers.prefix.keys import PrefixMap
from matrix import once
from models import prompt, read, tiny_model

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
    store, cache = PrefixStore(ROOM, tmp_path if on_disk else None), make(model.config)
    run(model, system, cache)
    assert store.insert(system, cache, config=model.config)
    run(model, question, cache, one_by_one=True)
    store.insert(torch.cat([system, question], dim=1), cache, config=model.config)
    run(model, prompt(tokens=5, seed=3), cache, one_by_one=True)
    if on_disk:
        store.evict()
        store = PrefixStore(ROOM, tmp_path)
    # Twice, as what is held is not changed by those who go on from it.
    for tail in (question, other, other):
        ids = torch.cat([system, tail], dim=1)
        hit = store.lookup(ids, config=model.config)
        found: Any = hit.cache
        assert system.shape[1] <= hit.covered < ids.shape[1], hit.reason
        assert (type(found), found.get_seq_length()) == (type(cache), hit.covered)
        fresh = make(model.config)
        run(model, system, fresh)
        expected = run(model, tail, fresh, one_by_one=True)[:, hit.covered - system.shape[1] :]
        seen = run(model, ids[:, hit.covered :], found, one_by_one=True)
        # Rolled back packed tokens stay packed, where a fresh run has them in full precision for a while.
        exact = kind != "quantized" or hit.covered == system.shape[1]
        torch.testing.assert_close(seen, expected, rtol=0, atol=1e-5 if exact else 0.5)
    assert store.statistics.damaged == 0


def boundary_found(store: PrefixStore, boundary: int) -> bool:
    """Whether exactly so many tokens of `window_of` are found, with the states that they have."""
    hit = store.lookup(torch.tensor([*range(boundary), 99]), model="m")
    newest = [] if hit.cache is None else hit.cache.layers[0].keys[0, 0, -3:, 0].tolist()
    return (hit.covered, newest) == (boundary, [*range(boundary - 3, boundary)])


def go_on(window: kvlayers.DynamicCache, until: int) -> kvlayers.DynamicCache:
    """Have a window of four tokens decode on. It can go back to where it was, and no further."""
    window.deactivate_past_recording()
    window.activate_past_recording()
    states = torch.arange(float(window.get_seq_length()), until)[None, None, :, None]
    window.update(states, states, layer_idx=0)
    return window


def test_a_window_that_has_moved_on_says_so() -> None:
    store, window = PrefixStore(ROOM), kvlayers.DynamicCache([(None, None, torch.tensor(4))])
    store.insert(torch.arange(20), go_on(go_on(window, 10), 20), model="m")
    hit = store.lookup(torch.arange(8), model="m")
    assert (hit.cache, hit.covered) == (None, 0)
    assert "insert a cache where prompts diverge" in hit.reason


@pytest.mark.parametrize("first", ["shorter", "longer"])
def test_a_boundary_stays_one_where_a_window_goes_beyond_it_step_by_step(first: str) -> None:
    store, window = PrefixStore(ROOM), kvlayers.DynamicCache([(None, None, torch.tensor(4))])
    for length in range(6, 66, 6):
        earlier = go_on(window, length).fork()
        earlier.crop(-1)
        for each in (earlier, window) if first == "shorter" else (window, earlier):
            store.insert(torch.arange(60), each, model="m")
    assert all(boundary_found(store, boundary) for boundary in (*range(6, 60, 6), *range(5, 60, 6)))


@pytest.mark.parametrize("restarted", [False, True])
@pytest.mark.parametrize("was_pinned", [False, True])
def test_a_file_that_replaces_another_serves_the_lengths_of_both(
    was_pinned: bool, restarted: bool, tmp_path: pathlib.Path
) -> None:
    store, window = PrefixStore(ROOM, tmp_path), kvlayers.DynamicCache([(None, None, torch.tensor(4))])
    store.insert(torch.arange(10), go_on(window, 10), model="m")
    if was_pinned:
        # So that it is not replaced before it is a file.
        store.pin(torch.arange(10), model="m")
    store.insert(torch.arange(20), go_on(window, 20), model="m")
    if was_pinned:
        store.unpin(torch.arange(10), model="m")
    store.evict()
    assert len(store) == 1
    if restarted:
        store = PrefixStore(ROOM, tmp_path)
    # Goes back to 20 and no further, so that it stands for a part of what the file stands for.
    store.insert(torch.arange(30), go_on(window, 30), model="m")
    store.evict()
    for each in (store, PrefixStore(ROOM, tmp_path)):
        assert [boundary_found(each, boundary) for boundary in (10, 20, 30)] == [True] * 3


# What begins alike


def test_the_map_finds_all_prefixes() -> None:
    generator, tree, kept = random.Random(0), PrefixMap[tuple[int, ...]](), set[tuple[int, ...]]()
    for _ in range(600):
        ids = tuple(generator.choices((1, 2), k=generator.randint(1, 7)))
        if generator.random() < 0.4:
            tree.remove("m", np.array(ids))
            kept.discard(ids)
        else:
            tree.insert("m", np.array(ids), ids)
            kept.add(ids)
        asked = tuple(generator.choices((1, 2), k=7))
        assert tree.prefixes_of("m", np.array(asked)) == [asked[:n] for n in range(1, 8) if asked[:n] in kept]
        assert (sorted(tree), len(tree)) == (sorted(kept), len(kept))


# Look-up and insertion


def test_full_attention_serves_every_prompt_that_begins_alike() -> None:
    store = PrefixStore(ROOM)
    assert store.insert(ids_of(1, 2, 3, 4, 5), filled([1, 2, 3, 4, 5]), model="m")
    for asked, tokens, why in (
        ([1, 2, 3, 4, 5], 4, ""),
        ([1, 2, 3, 4, 5, 6], 5, ""),
        ([1, 2, 3, 9, 9, 9], 3, "diverges after 3"),
        ([1, 2, 3, 4, 5, 6, 7], 5, "ends after 5"),
        ([9, 2], 0, "no stored sequence starts"),
        ([1], 0, "single token"),
    ):
        hit = store.lookup(ids_of(*asked), model="m")
        assert (hit.covered, hit.cache is None) == (tokens, tokens == 0)
        assert (why in hit.reason) if why else hit.reason == ""
        assert held(hit.cache) == held(filled(asked))[:tokens]
    now = store.statistics
    assert (now.hits, now.misses, now.tokens_covered, now.tokens_asked) == (4, 2, 17, 27)


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


def policy(rank: Callable[[Any], float]) -> Any:
    return types.SimpleNamespace(rank=rank)


def newest_use(entry: Any) -> float:
    """A rank that needs a use of each entry."""
    return float(max(entry.uses.values()))


@pytest.mark.parametrize("place", ["memory", "directory"])
def test_a_policy_sees_the_use_of_an_entry_that_comes_in(place: str, tmp_path: pathlib.Path) -> None:
    store = PrefixStore(room_for(2), tmp_path if place == "directory" else None, policy=policy(newest_use))
    for first in range(5):
        assert insert(store, [first, 0, 0])
        assert store.lookup(ids_of(0, 0, 0), model="m").covered == 2
    assert store.lookup(ids_of(4, 0, 0), model="m").covered == 2


def test_a_policy_that_fails_for_a_while_only_keeps_entries_from_leaving() -> None:
    # An entry is no number.
    failing = policy(float)
    store = PrefixStore(ROOM, policy=failing)
    for first in range(3):
        assert insert(store, [first, 0, 0])
    with pytest.raises(TypeError, match="must be a string or a real number"):
        store.evict()
    assert [covered(store, [first, 0, 0]) for first in range(3)] == [3, 3, 3]
    failing.rank = newest_use
    assert store.evict() > 0
    assert (len(store), store.statistics.bytes) == (0, 0)


@pytest.mark.parametrize("ranks", [(math.nan, 1), (0, 1), (0, -1)])
def test_the_budget_holds_whatever_a_policy_says(ranks: tuple[float, int]) -> None:
    count = itertools.count(*ranks)
    store = PrefixStore(room_for(2), policy=policy(lambda entry: next(count)))
    for first in range(9):
        insert(store, [first, 0, 0])
        assert store.statistics.bytes <= room_for(2)
    assert len(store) == 2


def test_what_was_pinned_is_unpinned_though_another_entry_begins_with_its_tokens() -> None:
    store = PrefixStore(ROOM)
    insert(store, [3, 4, 5])
    store.pin(ids_of(3), model="m")
    insert(store, [3, 9])
    store.pin(ids_of(3, 9), model="m")
    store.unpin(ids_of(3), model="m")
    assert store.evict() > 0
    assert (len(store), covered(store, [3, 9])) == (1, 2)
    store.unpin(ids_of(3, 9), model="m")
    with pytest.raises(PrefixError, match="not pinned"):
        store.unpin(ids_of(3, 9), model="m")


# Files


@versions.kvlayers_recurrent_layers
def test_a_recurrent_cache_in_a_file_does_not_need_the_config(tmp_path: pathlib.Path) -> None:
    store, ids, model = PrefixStore(ROOM, tmp_path), prompt(tokens=6), families.model_of("qwen3_next")
    cache = kvlayers.DynamicCache(config=model.config)
    run(model, ids, cache)
    store.insert(ids, cache, model="m")
    store.evict()
    hit = store.lookup(torch.cat([ids, ids], dim=1), model="m")
    assert hit.covered == 6
    assert torch.equal(run(model, ids[:, :1], hit.cache), run(model, ids[:, :1], cache))


def test_a_cache_of_layers_of_transformers_needs_the_config(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That is said without reading any states."""
    store, cache = PrefixStore(ROOM, tmp_path), kvlayers.Cache(layers=[tf.cache_utils.DynamicLayer()])
    cache.update(torch.ones(1, 1, 3, 1), torch.ones(1, 1, 3, 1), layer_idx=0)
    put(store, [1, 2, 3], cache)
    monkeypatch.setattr(LocalBackend, "read_ranges", None)
    for _ in range(2):
        hit = store.lookup(ids_of(1, 2, 3, 4), model="m")
        assert (hit.covered, store.statistics.damaged) == (0, 0)
        assert "config=model.config" in hit.reason


def test_what_cannot_be_written_is_dropped_and_counted(tmp_path: pathlib.Path) -> None:
    store, mine = PrefixStore(ROOM, tmp_path), type("Mine", (kvlayers.DynamicCache,), {})
    put(store, [1, 2, 3], mine([(torch.ones(1, 1, 3, 1), torch.ones(1, 1, 3, 1))]))
    assert (len(store), store.statistics.failed_writes, list(tmp_path.iterdir())) == (0, 1, [])


def test_what_a_killed_writer_left_behind_is_cleared_when_it_is_old(tmp_path: pathlib.Path) -> None:
    old, new = tmp_path / ".kvlayers-1.tmp", tmp_path / ".kvlayers-2.tmp"
    for path in (old, new):
        path.write_bytes(b"half")
    os.utime(old, (1, 1))
    PrefixStore(ROOM, tmp_path)
    assert (old.exists(), new.exists()) == (False, True)


def files_in(directory: pathlib.Path) -> set[pathlib.Path]:
    return set(directory.glob("*.safetensors"))


@pytest.mark.parametrize("write", [PrefixStore.flush, PrefixStore.evict])
@pytest.mark.parametrize("restarted", [False, True])
@pytest.mark.parametrize("promoted", [False, True])
def test_what_is_longer_goes_on_from_the_file_of_what_it_has_replaced(
    tmp_path: pathlib.Path, write: Any, restarted: bool, promoted: bool
) -> None:
    store = PrefixStore(ROOM, tmp_path)
    put(store, [1, 2, 3])
    put(store, [1, 2, 7])
    before = files_in(tmp_path)
    if restarted:
        store = PrefixStore(ROOM, tmp_path)
    if promoted:
        assert covered(store, [1, 2, 3]) == 3
    insert(store, [1, 2, 3, 4, 5])
    assert files_in(tmp_path) == before
    write(store)
    assert before < files_in(tmp_path)
    assert len(files_in(tmp_path)) == 3
    for each in (store, PrefixStore(ROOM, tmp_path)):
        assert (len(each), covered(each, [1, 2, 3]), covered(each, [1, 2, 7])) == (2, 3, 3)


def damage(path: pathlib.Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def in_file(store: PrefixStore, directory: pathlib.Path, ids: list[int]) -> pathlib.Path:
    """The file of an entry that is in no memory."""
    before = files_in(directory)
    put(store, ids)
    (path,) = files_in(directory) - before
    return path


@pytest.mark.parametrize("first", ["memory", "file"])
@pytest.mark.parametrize("tail", [[7], [7] * 9])
def test_a_file_is_not_read_where_memory_serves_as_well(tmp_path: pathlib.Path, first: str, tail: list[int]) -> None:
    store, kept = PrefixStore(ROOM, tmp_path), [1, 2, 3, 4, 5]
    if first == "memory":
        insert(store, kept)
        store.pin(torch.tensor(kept), model="m")
    # Whoever reads it finds out.
    damage(in_file(store, tmp_path, [1, 2, 3, *tail]))
    if first == "file":
        insert(store, kept)
    for asked, damaged in (([1, 2, 3], 0), ([1, 2, 3, *tail], 1)):
        assert (covered(store, asked), store.statistics.damaged) == (3, damaged)


@pytest.mark.parametrize("lengths", [(4, 9, 12), (12, 9, 4), (9, 4, 12)])
def test_of_several_entries_the_file_of_the_shared_tokens_is_read(
    tmp_path: pathlib.Path, lengths: tuple[int, ...]
) -> None:
    store = PrefixStore(ROOM, tmp_path)
    _, *others = [in_file(store, tmp_path, [1, 2, 3, *[length] * (length - 3)]) for length in lengths]
    stores = store, PrefixStore(ROOM, tmp_path)
    for path in others:
        damage(path)
    for each in stores:
        assert (covered(each, [1, 2, 3]), each.statistics.damaged) == (3, 0)


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


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: PrefixStore(0), "positive number"),
        (lambda: PrefixStore(1.5), "positive number"),
        (lambda: PrefixStore(1, directory_max_bytes=5), "needs a `directory`"),
        (lambda: PrefixStore(1, directory=5), "a path or a URL"),
        (lambda: PrefixStore(1, device="nowhere"), "device"),
        (lambda: PrefixStore(max_byte=1), "did you mean 'max_bytes'"),
        (lambda: PrefixStore(ROOM).lookup(ids_of(1, 2)), "config=model.config"),
        (lambda: PrefixStore(ROOM).lookup(ids_of(1, 2), model=""), "`model` must be a string"),
        (lambda: PrefixStore(ROOM).lookup(ids_of(1, 2), model="m", namespace=None), "`namespace` must be a string"),
        (lambda: PrefixStore(ROOM).flush(), "a store with a directory"),
        (lambda: PrefixStore(ROOM).refresh(), "a store with a directory"),
        (lambda: PrefixStore(ROOM).evict(-1), "nbytes"),
        *(
            (
                lambda name=name, value=value: PrefixStore(ROOM, **{name: value}),
                f"`{name}` must be a number of seconds, 0 or more, got",
            )
            for name in ("write_wait_seconds", "read_wait_seconds")
            for value in (-1, "1", None, True, float("inf"), float("nan"))
        ),
    ],
)
def test_options_that_make_no_sense_are_refused(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        call()


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
    store, opened = PrefixStore(ROOM, tmp_path), open
    put(store, [1, 5, 6])

    def failing(path: Any, *args: Any, **how: Any) -> Any:
        if str(path).endswith(".safetensors"):
            raise OSError(5, "Input/output error", str(path))
        return opened(path, *args, **how)

    with monkeypatch.context() as broken:
        broken.setattr("builtins.open", failing)
        hit = store.lookup(ids_of(1, 5, 6, 7), model="m")
    assert (hit.covered, store.statistics.failed_reads, store.statistics.damaged, len(store)) == (0, 1, 0, 1)
    assert "could not be reached" in hit.reason
    assert covered(store, [1, 5, 6]) == 3
