"""What stands for what in a prefix store: between memory and files, before and after a restart."""

import pathlib
from typing import Any

import pytest
import torch

from kvlayers import DynamicCache, PrefixStore
from prefix_caches import KINDS, WINDOW, Ids, check, extend

ROOM = 2**30


def filled(ids: Ids) -> DynamicCache:
    cache = DynamicCache()
    extend(KINDS["full"], cache, [], ids)
    return cache


def insert(store: PrefixStore, ids: Ids, cache: DynamicCache) -> None:
    assert store.insert(torch.tensor(ids), cache, model="m")


def covered(store: PrefixStore, ids: Ids) -> int:
    """Tokens that are found of a prompt, whose states are compared with what they must be."""
    hit = store.lookup(torch.tensor(ids), model="m")
    if hit.cache is not None:
        check(KINDS["full"], hit.cache, ids[: hit.covered])
    return hit.covered


class Window:
    """A window that decodes, and can be put back to `since` or later alone."""

    def __init__(self) -> None:
        self.cache = DynamicCache([(None, None, torch.tensor(WINDOW))])
        self.ids: list[int] = []

    def go_on(self, until: int) -> "Window":
        self.cache.deactivate_past_recording()
        self.cache.activate_past_recording()
        self.ids = extend(KINDS["window"], self.cache, self.ids, list(range(len(self.ids), until)))
        return self


def files_in(directory: pathlib.Path) -> set[str]:
    return {path.name for path in directory.glob("*.safetensors")}


# The lengths that were inserted


@pytest.mark.parametrize("restarted", [False, True])
@pytest.mark.parametrize("was_pinned", [False, True])
def test_a_file_that_replaces_another_serves_the_lengths_of_both(
    was_pinned: bool, restarted: bool, tmp_path: pathlib.Path
) -> None:
    store, window, first = PrefixStore(ROOM, tmp_path), Window(), torch.arange(10)
    insert(store, window.go_on(10).ids, window.cache)
    if was_pinned:
        # So that it is not replaced before it is a file.
        store.pin(first, model="m")
    insert(store, window.go_on(20).ids, window.cache)
    if was_pinned:
        store.unpin(first, model="m")
    store.evict()
    assert len(store) == 1
    if restarted:
        store = PrefixStore(ROOM, tmp_path)
    # Goes back to 20 and no further, so that it stands for a part of what the file stands for.
    insert(store, window.go_on(30).ids, window.cache)
    store.evict()
    for each in (store, PrefixStore(ROOM, tmp_path)):
        for boundary in (10, 20, 30):
            assert covered(each, [*range(boundary), 99]) == boundary


# Files that are no longer needed


@pytest.mark.parametrize("write", [PrefixStore.flush, PrefixStore.evict])
@pytest.mark.parametrize("restarted", [False, True])
@pytest.mark.parametrize("promoted", [False, True])
def test_what_is_longer_goes_on_from_the_file_of_what_it_has_replaced(
    tmp_path: pathlib.Path, write: Any, restarted: bool, promoted: bool
) -> None:
    store = PrefixStore(ROOM, tmp_path)
    insert(store, [1, 2, 3], filled([1, 2, 3]))
    insert(store, [1, 2, 7], filled([1, 2, 7]))
    store.evict()
    before = files_in(tmp_path)
    if restarted:
        store = PrefixStore(ROOM, tmp_path)
    if promoted:
        assert covered(store, [1, 2, 3, 4]) == 3
    insert(store, [1, 2, 3, 4, 5], filled([1, 2, 3, 4, 5]))
    assert files_in(tmp_path) == before
    write(store)
    assert before < files_in(tmp_path)
    assert len(files_in(tmp_path)) == 3
    for each in (store, PrefixStore(ROOM, tmp_path)):
        assert len(each) == 2
        assert covered(each, [1, 2, 3, 9]) == 3
        assert covered(each, [1, 2, 7, 9]) == 3


# Which of several equally good ones is taken


def damage(path: pathlib.Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def in_file(store: PrefixStore, directory: pathlib.Path, ids: list[int]) -> pathlib.Path:
    """Insert a cache, which is in a file alone from then on."""
    before = files_in(directory)
    insert(store, ids, filled(ids))
    store.evict()
    [name] = files_in(directory) - before
    return directory / name


@pytest.mark.parametrize("first", ["memory", "file"])
@pytest.mark.parametrize("tail", [[7], [7] * 9])
def test_a_file_is_not_read_where_memory_serves_as_well(tmp_path: pathlib.Path, first: str, tail: list[int]) -> None:
    store, held = PrefixStore(ROOM, tmp_path), [1, 2, 3, 4, 5]
    if first == "memory":
        insert(store, held, filled(held))
        store.pin(torch.tensor(held), model="m")
    # Whoever reads it finds out.
    damage(in_file(store, tmp_path, [1, 2, 3, *tail]))
    if first == "file":
        insert(store, held, filled(held))
    assert covered(store, [1, 2, 3, 9]) == 3
    assert store.statistics.damaged == 0
    assert covered(store, [1, 2, 3, *tail, 9]) == 3
    assert store.statistics.damaged == 1


@pytest.mark.parametrize("lengths", [(4, 9, 12), (12, 9, 4), (9, 4, 12)])
def test_of_several_entries_the_file_of_the_shared_tokens_is_read(
    tmp_path: pathlib.Path, lengths: tuple[int, ...]
) -> None:
    store, paths = PrefixStore(ROOM, tmp_path), {}
    for length in lengths:
        paths[length] = in_file(store, tmp_path, [1, 2, 3, *[length] * (length - 3)])
    stores = store, PrefixStore(ROOM, tmp_path)
    for length in lengths[1:]:
        damage(paths[length])
    for each in stores:
        assert covered(each, [1, 2, 3, 1]) == 3
        assert each.statistics.damaged == 0
