"""Blocks: what is shared is written once, what is wrong is never used, and what is needed is never deleted."""

import dataclasses
import os
import pathlib
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import transformers

import kvlayers
from kvlayers.errors import CacheFileError, KVLayersError
from kvlayers.prefix import directory as directories
from kvlayers.prefix import entry_writer
from kvlayers.prefix.backends import GoneError, UnreachableError
from kvlayers.prefix.backends.contract import Content, StoredFile
from kvlayers.prefix.backends.local import LocalBackend
from kvlayers.prefix.blocks import BLOCK_TOKENS
from kvlayers.prefix.directory import Directory, WrittenEntry
from kvlayers.prefix.keys import label_of
from kvlayers.prefix.manifest import MOST_PIECES
from prefix_caches import KINDS, Ids, Kind, check, extend
from whole_entries import whole_entry

LABEL = label_of(None, "m", "")
OLD_NS = time.time_ns() - 10**9 * 10**5
DOCUMENT = list(range(3, 703))
"""More than two blocks."""


@dataclasses.dataclass(frozen=True)
class Stored:
    ids: np.ndarray
    path: str
    label: str = LABEL


def filled(kind: Kind, ids: Ids) -> Any:
    cache = kind.make()
    extend(kind, cache, [], ids)
    return cache


def write(
    directory: Directory, ids: Ids, neighbours: Sequence[tuple[str, int]] = (), kind: Kind = KINDS["full"]
) -> WrittenEntry:
    return directory.write(LABEL, np.array(ids, np.int64), {len(ids)}, filled(kind, ids), neighbours)


def load(directory: Directory, path: str, ids: Ids, length: int | None = None, deadline: float | None = None) -> Any:
    stored = Stored(np.array(ids, np.int64), path)
    return directory.load(stored, len(ids) if length is None else length, None, None, deadline)


def opened(path: pathlib.Path) -> Directory:
    directory = Directory(LocalBackend(str(path)))
    directory.changes(())
    return directory


def check_and_continue(kind: Kind, cache: Any, ids: Ids) -> None:
    check(kind, cache, ids)
    check(kind, cache, extend(kind, cache, ids, [5, 6, 7]))


def blocks(path: pathlib.Path) -> list[pathlib.Path]:
    return sorted(path.glob("*.block"))


def du(path: pathlib.Path) -> int:
    return sum(file.stat().st_size for file in path.iterdir())


# Round trips

ONE_LAYER = transformers.LlamaConfig(num_hidden_layers=1, head_dim=2, num_attention_heads=1)
STATIC = Kind(lambda: kvlayers.StaticCache(ONE_LAYER, max_cache_len=900))
LONG_KINDS = {**KINDS, "static": STATIC}
LENGTHS = (1, 255, 256, 257, 511, 512, 699)


@pytest.mark.parametrize("kind", LONG_KINDS)
def test_what_is_loaded_is_what_was_written_and_goes_on(kind: str, tmp_path: pathlib.Path) -> None:
    made = LONG_KINDS[kind]
    entry = write(Directory(LocalBackend(str(tmp_path))), DOCUMENT, kind=made)
    directory = opened(tmp_path)
    check_and_continue(made, load(directory, entry.path, DOCUMENT), DOCUMENT)
    for length in LENGTHS:
        cache = load(directory, entry.path, DOCUMENT, length)
        if kind == "window":
            assert cache is None
        else:
            check_and_continue(made, cache, DOCUMENT[:length])
    assert (directory.damaged, directory.failed_reads) == (0, 0)


@pytest.mark.parametrize(
    "make", [kvlayers.DynamicCache, lambda: kvlayers.QuantizedCache(nbits=4)], ids=["full", "int4"]
)
def test_states_as_wide_as_those_of_large_models_are_found_again(make: Any, tmp_path: pathlib.Path) -> None:
    cache, ids = make(), np.arange(300)
    states = torch.randn(1, 8, len(ids), 128, dtype=torch.bfloat16)
    cache.update(states, -states, 0)
    path = opened(tmp_path).write(LABEL, ids, {len(ids)}, cache).path
    again = opened(tmp_path)
    assert again.damaged == 0
    loaded = again.load(Stored(ids, path), len(ids), None, None)
    assert loaded is not None
    for one, other in zip(loaded.layers[0].peek(), cache.layers[0].peek(), strict=True):
        assert torch.equal(one + 0, other + 0)


def test_only_the_blocks_of_the_needed_tokens_are_read(tmp_path: pathlib.Path) -> None:
    for kind, needed in (("full", {1: 1, 256: 1, 257: 2, 700: 3}), ("quantized", {1: 1, 256: 1, 700: 4})):
        (tmp_path / kind).mkdir()
        backend = Recording(str(tmp_path / kind))
        directory = Directory(backend)
        entry = write(directory, DOCUMENT, kind=KINDS[kind])
        for length, count in needed.items():
            backend.read_names.clear()
            check(KINDS[kind], load(directory, entry.path, DOCUMENT, length), DOCUMENT[:length])
            assert sum(name.endswith(".block") for name in backend.read_names) == count


class Recording(LocalBackend):
    """Knows which files were read and written."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.read_names: list[str] = []
        self.written: dict[str, int] = {}

    def read(self, files: Sequence[StoredFile], wait_seconds: float | None = None) -> Iterator[Content | KVLayersError]:
        self.read_names += [file.name for file in files]
        return super().read(files, wait_seconds)

    def write(self, name: str, content: Content) -> None:
        self.written[name] = len(content)
        super().write(name, content)


# Sharing


def test_ten_questions_about_one_document_take_little_more_than_the_document(tmp_path: pathlib.Path) -> None:
    document, wide = list(range(3, 3003)), dataclasses.replace(KINDS["full"], channels=64)
    directory = Directory(LocalBackend(str(tmp_path)))
    first = write(directory, document, kind=wide)
    alone = du(tmp_path)
    written = [(first, document)]
    for question in range(10):
        ids = [*document, *range(9000 + 50 * question, 9000 + 50 * question + 50)]
        written.append((write(directory, ids, [(first.path, len(document))], wide), ids))
    # 10 times 50 tokens are a sixth of 3,000, and each entry has the ids of its tokens.
    ids_bytes = 8 * sum(len(ids) for _, ids in written[1:])
    assert du(tmp_path) - ids_bytes <= 1.2 * alone
    assert directory.nbytes == du(tmp_path)
    for entry, ids in written:
        check(wide, load(opened(tmp_path), entry.path, ids), ids)


@pytest.mark.parametrize("kind", ["full", "quantized"])
@pytest.mark.parametrize("shared", [2, 100, 256, 301, 700])
def test_a_branch_writes_its_own_tokens_alone(kind: str, shared: int, tmp_path: pathlib.Path) -> None:
    made, backend = KINDS[kind], Recording(str(tmp_path))
    directory = Directory(backend)
    first = write(directory, DOCUMENT, kind=made)
    token_bytes = sum(path.stat().st_size for path in blocks(tmp_path)) / len(DOCUMENT)
    backend.written.clear()
    ids = [*DOCUMENT[:shared], *range(8000, 8100)]
    branch = write(directory, ids, [(first.path, shared)], made)
    sizes = [nbytes for name, nbytes in backend.written.items() if name.endswith(".block")]
    # Packed tokens are written in pairs, and each block has a header.
    assert sum(sizes) <= 102 * token_bytes + 900 * len(sizes)
    for each in (directory, opened(tmp_path)):
        check_and_continue(made, load(each, branch.path, ids), ids)
        check_and_continue(made, load(each, first.path, DOCUMENT), DOCUMENT)
    assert directory.delete(first.path)
    check_and_continue(made, load(directory, branch.path, ids), ids)
    assert directory.delete(branch.path)
    assert (du(tmp_path), directory.nbytes) == (0, 0)


def test_windows_share_what_overlaps(tmp_path: pathlib.Path) -> None:
    kind = Kind(lambda: kvlayers.DynamicCache([(None, None, torch.tensor(400))]), channels=32)
    backend = Recording(str(tmp_path))
    directory = Directory(backend)
    first = write(directory, DOCUMENT, kind=kind)
    backend.written.clear()
    ids = [*DOCUMENT, *range(8000, 8010)]
    branch = write(directory, ids, [(first.path, 700)], kind)
    assert sum(backend.written[name] for name in backend.written if ".block" in name) < 60 * 256
    cache = load(directory, branch.path, ids)
    check_and_continue(kind, cache, ids)


def test_a_chat_of_many_turns_has_few_pieces(tmp_path: pathlib.Path) -> None:
    directory, ids = Directory(Recording(str(tmp_path))), list(range(20))
    entry = write(directory, ids)
    for turn in range(40):
        last, shared = entry, len(ids)
        ids = [*ids, *range(1000 * turn, 1000 * turn + 15)]
        entry = write(directory, ids, [(last.path, shared)])
        directory.delete(last.path)
    known = directory._references.get(entry.path)
    assert known is not None
    assert len(known.table.groups[0].pieces) <= (MOST_PIECES + 1) * (len(ids) // BLOCK_TOKENS + 1)
    assert len(blocks(tmp_path)) == len(known.table.sizes)
    check_and_continue(KINDS["full"], load(opened(tmp_path), entry.path, ids), ids)


def test_states_of_other_forms_are_never_mixed(tmp_path: pathlib.Path) -> None:
    directory, wide = Directory(LocalBackend(str(tmp_path))), dataclasses.replace(KINDS["full"], channels=2)
    first = write(directory, DOCUMENT)
    others = {
        "wider": wide,
        "packed": KINDS["quantized"],
        "half": Kind(lambda: kvlayers.DynamicCache(), most=2048),
        "in other groups": Kind(
            lambda: kvlayers.QuantizedCache(nbits=8, q_group_size=1, residual_length=0, sink_tokens=0), 2, 16, 0.25
        ),
    }
    for number, (name, kind) in enumerate(others.items()):
        ids = [*DOCUMENT[:600], number]
        cache = filled(kind, ids)
        if name == "half":
            states = cache.layers[0].keys.half()
            cache = kind.make()
            cache.update(states, -states, layer_idx=0)
        neighbours = [(first.path, 600)]
        entry = directory.write(LABEL, np.array(ids, np.int64), {len(ids)}, cache, neighbours)
        found = load(directory, entry.path, ids)
        assert type(found) is type(cache)
        assert torch.equal(found.layers[0].keys + 0, cache.layers[0].keys + 0)
        assert found.layers[0].keys.dtype == cache.layers[0].keys.dtype


def test_sinks_do_not_take_over_what_was_computed_beside_other_tokens(tmp_path: pathlib.Path) -> None:
    directory = Directory(LocalBackend(str(tmp_path)))
    caches = []
    for sign in (1.0, -1.0):
        cache = kvlayers.SinkCache(600, 4, config=ONE_LAYER)
        states = sign * torch.arange(300.0)[None, None, :, None].expand(1, 1, -1, 2)
        cache.update(states, -states, layer_idx=0)
        caches.append(cache)
    ids = np.arange(300)
    first = directory.write(LABEL, ids, {300}, caches[0], ())
    other = np.array([*range(299), 7])
    second = directory.write(LABEL, other, {300}, caches[1], [(first.path, 299)])
    found = directory.load(Stored(other, second.path), 300, None, None)
    assert found is not None
    assert torch.equal(found.layers[0].keys, caches[1].layers[0].keys)


# What is wrong is never used


def damages(path: pathlib.Path, other: pathlib.Path) -> Iterator[tuple[str, bytes | None]]:
    content = path.read_bytes()
    for place in (0, 9, *range(20, len(content), max(len(content) // 12, 1)), len(content) - 1):
        changed = bytearray(content)
        changed[place] ^= 1
        yield f"changed at {place}", bytes(changed)
    yield "cut", content[:-7]
    yield "longer", content + b"\0"
    yield "empty", b""
    yield "another block", other.read_bytes()
    yield "gone", None


@pytest.mark.parametrize("kind", ["full", "quantized", "window"])
@pytest.mark.parametrize("which", [0, 1, -1])
def test_a_damaged_block_costs_the_tokens_from_there_on(kind: str, which: int, tmp_path: pathlib.Path) -> None:
    made = KINDS[kind]
    if kind == "window":
        made = dataclasses.replace(made, make=lambda: kvlayers.DynamicCache([(None, None, torch.tensor(500))]))
    writer = Directory(LocalBackend(str(tmp_path)))
    entry = write(writer, DOCUMENT, kind=made)
    known = writer._references.get(entry.path)
    assert known is not None
    group = max(known.table.groups, key=lambda group: len(group.pieces))
    paths = [tmp_path / f"{piece.block}.block" for piece in group.pieces]
    path, before = paths[which], group.pieces[: which % len(paths)]
    usable = int(group.positions()[0][sum(piece.rows for piece in before)])
    content = path.read_bytes()
    for what, damaged in damages(path, paths[which - 1]):
        path.unlink()
        if damaged is not None:
            path.write_bytes(damaged)
        directory = opened(tmp_path)
        if kind == "window" or usable <= 0 or which == 0:
            # Whoever asked reports the entry.
            with pytest.raises(CacheFileError, match="cannot be loaded"):
                load(directory, entry.path, DOCUMENT)
        else:
            for _ in range(2):
                check_and_continue(made, load(directory, entry.path, DOCUMENT), DOCUMENT[:usable])
            assert directory.damaged == 1, what
        if kind != "window" and usable > 0:
            check(made, load(directory, entry.path, DOCUMENT, 10), DOCUMENT[:10])
        # Whoever writes these tokens again mends it.
        again = write(directory, DOCUMENT, [(entry.path, 700)], made)
        check(made, load(directory, again.path, DOCUMENT), DOCUMENT)
        assert path.read_bytes() == content


def test_a_changed_entry_is_refused_wherever_it_was_changed(tmp_path: pathlib.Path) -> None:
    entry = write(Directory(LocalBackend(str(tmp_path))), DOCUMENT)
    directory, path = opened(tmp_path), pathlib.Path(entry.path)
    content = path.read_bytes()
    for place in (0, 7, *range(8, len(content), max(len(content) // 80, 1)), len(content) - 1):
        changed = bytearray(content)
        changed[place] ^= 1
        path.write_bytes(bytes(changed))
        with pytest.raises(CacheFileError):
            load(directory, entry.path, DOCUMENT)
        fresh = opened(tmp_path)
        assert (fresh.damaged, fresh.nbytes) == (1, 0)


def test_an_entry_of_another_tenant_is_not_believed(tmp_path: pathlib.Path) -> None:
    directory = Directory(LocalBackend(str(tmp_path)))
    mine = write(directory, DOCUMENT)
    cache = filled(KINDS["full"], DOCUMENT)
    other = directory.write(label_of(None, "m", "another"), np.array(DOCUMENT), {700}, cache, ())
    pathlib.Path(mine.path).write_bytes(pathlib.Path(other.path).read_bytes())
    with pytest.raises(CacheFileError, match="no longer holds the tokens of its entry"):
        load(directory, mine.path, DOCUMENT)


def test_a_version_of_the_future_is_refused_and_its_blocks_stay(tmp_path: pathlib.Path) -> None:
    writer = Directory(LocalBackend(str(tmp_path)))
    path = pathlib.Path(write(writer, DOCUMENT).path)
    path.write_bytes(path.read_bytes().replace(b'"format_version":"3"', b'"format_version":"4"'))
    for block in blocks(tmp_path):
        os.utime(block, ns=(OLD_NS, OLD_NS))
    directory = Directory(LocalBackend(str(tmp_path)))
    assert directory.changes(()).added == []
    assert directory.damaged == 1
    assert (directory.collect_garbage(), len(blocks(tmp_path))) == (0, 3)


def test_blocks_that_have_not_arrived_in_time_cost_the_tokens_behind_them(tmp_path: pathlib.Path) -> None:
    class Late(LocalBackend):
        """Only one block arrives in time."""

        def read(self, files: Sequence[StoredFile], wait_seconds: float | None = None) -> Any:
            for number, content in enumerate(super().read(files)):
                late = number and wait_seconds is not None and wait_seconds < 60
                yield UnreachableError("late") if late else content

    directory = Directory(Late(str(tmp_path)))
    entry = write(directory, DOCUMENT)
    check_and_continue(KINDS["full"], load(directory, entry.path, DOCUMENT), DOCUMENT)
    found = load(directory, entry.path, DOCUMENT, deadline=time.monotonic() + 30)
    check_and_continue(KINDS["full"], found, DOCUMENT[:256])
    assert (directory.damaged, directory.failed_reads) == (0, 1)


def test_a_user_cannot_load_an_entry_as_a_file(tmp_path: pathlib.Path) -> None:
    entry = write(Directory(LocalBackend(str(tmp_path))), DOCUMENT)
    with pytest.raises(CacheFileError, match="open its directory with PrefixStore"):
        kvlayers.load_cache(entry.path)
    seen = kvlayers.inspect_cache(entry.path)
    assert (seen.kind, seen.length, seen.dtype, seen.blocks is None) == ("DynamicCache", 700, torch.float32, False)


# Directories as they were before


@pytest.mark.parametrize("kind", ["full", "window", "quantized"])
def test_whole_caches_are_read_and_written_as_blocks_next_time(kind: str, tmp_path: pathlib.Path) -> None:
    made = KINDS[kind]
    name, content = whole_entry(DOCUMENT, filled(made, DOCUMENT))
    (tmp_path / name).write_bytes(content)
    directory = Directory(LocalBackend(str(tmp_path)))
    (found,) = directory.changes(()).added
    assert (found.path, directory.nbytes) == (str(tmp_path / name), len(content))
    check_and_continue(made, load(directory, str(found.path), DOCUMENT), DOCUMENT)
    if kind != "window":
        check_and_continue(made, load(directory, str(found.path), DOCUMENT, 300), DOCUMENT[:300])
    again = write(directory, DOCUMENT, [(str(found.path), 700)], made)
    assert again.path == found.path
    assert blocks(tmp_path)
    assert directory.nbytes == du(tmp_path)
    check_and_continue(made, load(directory, again.path, DOCUMENT), DOCUMENT)


# Garbage


class Hooked(LocalBackend):
    """Runs something once, before or after an operation."""

    def __init__(self, path: str, can_be_touched: bool = True) -> None:
        super().__init__(path)
        self.hooks: dict[str, Any] = {}
        self.can_be_touched = can_be_touched

    def _hook(self, when: str) -> None:
        hook = self.hooks.pop(when, None)
        if hook is not None:
            hook()

    def files(self) -> list[StoredFile]:
        found = super().files()
        self._hook("listed")
        return found

    def missing(self, files: Sequence[StoredFile]) -> list[StoredFile]:
        found = super().missing(files) if self.can_be_touched else list(files)
        self._hook("touched")
        return found

    def find(self, names: Sequence[str]) -> list[StoredFile | None]:
        found = super().find(names)
        if names and names[0].endswith(".block"):
            self._hook("found")
        return found

    def write(self, name: str, content: Content) -> None:
        is_entry = not name.endswith(".block")
        if is_entry:
            self._hook("before the entry")
        super().write(name, content)
        if is_entry:
            self._hook("after the entry")

    def delete(self, names: Sequence[str], used_before: int | None = None) -> None:
        if names and names[0].endswith(".block"):
            self._hook("before the deletion")
        super().delete(names, used_before)


def age(path: pathlib.Path) -> None:
    for block in blocks(path):
        os.utime(block, ns=(OLD_NS, OLD_NS))


MOMENTS = ["found", "touched", "before the entry", "after the entry"]


@pytest.mark.parametrize("can_be_touched", [True, False])
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_writer_keeps_blocks_of_an_entry_that_others_delete_meanwhile(
    moment: str, can_be_touched: bool, tmp_path: pathlib.Path
) -> None:
    mine, other = Hooked(str(tmp_path), can_be_touched), opened(tmp_path)
    first = write(other, DOCUMENT)
    age(tmp_path)
    directory = Directory(mine)
    directory.changes(())

    def delete() -> None:
        assert other.delete(first.path)

    mine.hooks = {moment: delete}
    ids = [*DOCUMENT, 1, 2]
    entry = write(directory, ids, [(first.path, 700)])
    for each in (directory, opened(tmp_path)):
        check_and_continue(KINDS["full"], load(each, entry.path, ids), ids)
        assert each.damaged == 0
    assert not pathlib.Path(first.path).exists()


@pytest.mark.parametrize("moment", ["listed", "before the deletion"])
def test_a_collector_leaves_blocks_that_others_begin_to_use_meanwhile(moment: str, tmp_path: pathlib.Path) -> None:
    backend = Hooked(str(tmp_path))
    directory = Directory(backend)
    first = write(directory, DOCUMENT)
    other, entries = opened(tmp_path), []
    age(tmp_path)
    ids = [*DOCUMENT, 1, 2]
    backend.hooks = {moment: lambda: entries.append(write(other, ids, [(first.path, 700)]))}
    assert directory.delete(first.path)
    check_and_continue(KINDS["full"], load(opened(tmp_path), entries[0].path, ids), ids)
    assert (other.damaged, len(entries)) == (0, 1)


def test_blocks_of_killed_writers_go_after_their_time(tmp_path: pathlib.Path) -> None:
    kept = write(opened(tmp_path), DOCUMENT)
    lost = write(opened(tmp_path), [*DOCUMENT[:100], 1])
    pathlib.Path(lost.path).unlink()
    directory = opened(tmp_path)
    before = len(blocks(tmp_path))
    assert (directory.collect_garbage(), len(blocks(tmp_path))) == (0, before)
    age(tmp_path)
    # A writer that is at work has touched them.
    os.utime(max(blocks(tmp_path), key=lambda path: path.stat().st_size))
    assert directory.collect_garbage() > 0
    assert len(blocks(tmp_path)) == before - 1
    check_and_continue(KINDS["full"], load(directory, kept.path, DOCUMENT), DOCUMENT)


def test_a_slow_writer_touches_its_blocks_again(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert 4 * entry_writer.TOUCH_SECONDS < directories.GRACE_SECONDS_WHEN_FULL < directories.GRACE_SECONDS
    directory = Directory(Hooked(str(tmp_path)))
    first = write(directory, DOCUMENT)
    age(tmp_path)
    backend: Any = directory.backend
    backend.hooks = {"touched": lambda: age(tmp_path)}
    monkeypatch.setattr(entry_writer, "TOUCH_SECONDS", -1.0)
    write(directory, [*DOCUMENT, 1], [(first.path, 700)])
    assert all(path.stat().st_mtime_ns > OLD_NS for path in blocks(tmp_path))


def test_a_writer_gives_up_where_blocks_keep_disappearing(tmp_path: pathlib.Path) -> None:
    class Vanishing(LocalBackend):
        def find(self, names: Sequence[str]) -> list[StoredFile | None]:
            return [None] * len(names)

    with pytest.raises(UnreachableError, match="is incomplete, because its blocks were deleted 4 times"):
        write(Directory(Vanishing(str(tmp_path))), DOCUMENT)


def test_two_directories_may_write_and_delete_at_once(tmp_path: pathlib.Path) -> None:
    """What has been written, and not deleted, is complete."""
    errors: list[BaseException] = []
    kept: dict[str, Ids] = {}

    def work(number: int) -> None:
        try:
            directory = opened(tmp_path)
            base = write(directory, DOCUMENT[:300])
            for turn in range(8):
                ids = [*DOCUMENT[: 100 * (turn % 4)], number, turn, *range(50)]
                entry = write(directory, ids, [(base.path, 100 * (turn % 4))])
                if turn % 2:
                    directory.delete(entry.path)
                else:
                    kept[entry.path] = ids
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    directory = opened(tmp_path)
    for path, ids in kept.items():
        check(KINDS["full"], load(directory, path, ids), ids)
    assert directory.damaged == 0


def test_an_entry_that_was_deleted_meanwhile_is_gone_and_not_damaged(tmp_path: pathlib.Path) -> None:
    directory = opened(tmp_path)
    entry = write(directory, DOCUMENT)

    class Deleting(Recording):
        def read(self, files: Sequence[StoredFile], wait_seconds: float | None = None) -> Any:
            if files[0].name.endswith(".block"):
                assert directory.delete(entry.path)
            return super().read(files, wait_seconds)

    reader = Directory(Deleting(str(tmp_path)))
    reader.changes(())
    with pytest.raises(GoneError):
        load(reader, entry.path, DOCUMENT)
    assert reader.damaged == 0


def test_what_others_have_deleted_is_not_counted(tmp_path: pathlib.Path) -> None:
    directory, other = opened(tmp_path), opened(tmp_path)
    entries = [write(directory, [number, *DOCUMENT]) for number in range(3)]
    other.changes(())
    assert other.delete_all([entries[0].path, entries[1].path])
    with pytest.raises(GoneError):
        load(directory, entries[0].path, [0, *DOCUMENT])
    directory.changes([entries[1].path, entries[2].path])
    age(tmp_path)
    directory.collect_garbage()
    assert directory.nbytes == other.nbytes == du(tmp_path) == entries[2].nbytes
