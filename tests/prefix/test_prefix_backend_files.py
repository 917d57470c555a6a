"""Many small files in each backend: read, found, kept and deleted together, by several threads.

In a real Redis or Valkey server they are whole or not at all, whoever is killed meanwhile.
"""

import hashlib
import logging
import os
import pathlib
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

import s3_server
from backend_cases import PART, ServerFiles, covered, filled, insert, large, put
from kvlayers import OptionError, PrefixStore
from kvlayers.errors import CachePathError, KVLayersError
from kvlayers.persistence.node_file import SUFFIX
from kvlayers.prefix.backends import StorageBackend, StoredFile, UnreachableError, backend_for, redis
from kvlayers.prefix.backends.contract import ABANDONED_SECONDS, Address, ByteRange, Content
from kvlayers.prefix.backends.redis import RedisBackend
from kvlayers.prefix.directory import Directory
from kvlayers.prefix.keys import label_of

KINDS = ("local", "memory", "redis", "s3")
THREADS = 8


@pytest.fixture(params=KINDS)
def backend(request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> StorageBackend:
    """A backend on an empty directory of this test."""
    name = f"{os.getpid()}-{hashlib.sha256(request.node.name.encode()).hexdigest()[:8]}"
    MemoryFileSystem.store.clear()
    options = s3_server.options(request.getfixturevalue("s3_port")) if request.param == "s3" else None
    places: dict[str, Callable[[], Any]] = {
        "local": lambda: tmp_path / "files",
        "memory": lambda: f"memory://bucket/{name}",
        "redis": lambda: f"{request.getfixturevalue('redis_url')}?prefix={name}",
        "s3": lambda: f"s3://{s3_server.BUCKET}/{name}",
    }
    found = backend_for(places[request.param](), options)
    found.prepare()
    return found


def content_of(number: int) -> bytes:
    return bytes([number % 256]) * (PART * (number % 3) + number + 1)


def named(content: bytes) -> StoredFile:
    """A file of which the name and the size are known."""
    return StoredFile(hashlib.sha256(content).hexdigest() + SUFFIX, len(content))


def written(backend: StorageBackend, count: int) -> list[StoredFile]:
    files = [named(content_of(number)) for number in range(count)]
    for number, file in enumerate(files):
        backend.write(file.name, content_of(number))
    return files


def test_files_are_read_in_order_and_one_does_not_hide_the_others(backend: StorageBackend) -> None:
    files = written(backend, 9)
    assert contents(backend, files) == list(map(content_of, range(9)))
    missing, short, long = (
        replace(files[0], name="0.safetensors"),
        replace(files[2], nbytes=5),
        replace(files[3], nbytes=2**20),
    )
    gone, *others = read(backend, [missing, files[1], short, long, files[4]])
    # Of a longer file what was asked for, and of a shorter one what it has.
    expected = [content_of(1), content_of(2)[:5], content_of(3), content_of(4)]
    assert (gone, [bytes(cast(Content, each)) for each in others]) == (None, expected)
    (inner,) = backend.read_ranges([ByteRange(files[2].name, PART - 1, PART + 3)])
    assert bytes(cast(Content, inner)) == content_of(2)[PART - 1 : PART + 3]
    assert backend.read_ranges([]) == []


def read(backend: StorageBackend, files: list[StoredFile]) -> list[Content | KVLayersError | None]:
    """As many bytes of each file as it is said to have."""
    return backend.read_ranges([ByteRange(file.name, 0, file.nbytes) for file in files])


def contents(backend: StorageBackend, files: list[StoredFile]) -> list[bytes]:
    """The content of each file, which must be there."""
    return [bytes(cast(Content, each)) for each in read(backend, files)]


@pytest.mark.filterwarnings("ignore:The given buffer is not writable")
def test_content_of_any_kind_is_written_and_becomes_a_tensor_without_a_copy(backend: StorageBackend) -> None:
    (content,) = read(backend, written(backend, 1))
    assert torch.frombuffer(content, dtype=torch.uint8).tolist() == list(content_of(0))
    for view in (memoryview(content_of(4)), bytearray(content_of(4))):
        backend.write(named(content_of(4)).name, view)
        assert contents(backend, [named(content_of(4))]) == [content_of(4)]


def test_files_of_a_store_are_listed_and_nothing_else(backend: StorageBackend) -> None:
    files = written(backend, 3)
    backend.write("it.safetensors", b"entry")
    backend.write("notes.txt", b"mine")
    assert {file.name: file.nbytes for file in backend.files()} == {
        "it.safetensors": 5,
        **{file.name: file.nbytes for file in files},
    }
    found = backend.find([files[0].name, "0.safetensors", files[2].name])
    assert [file and (file.name, file.nbytes) for file in found] == [
        (files[0].name, files[0].nbytes),
        None,
        (files[2].name, files[2].nbytes),
    ]
    assert set(backend.last_uses()) >= {file.name for file in files}


def test_what_was_used_since_is_not_deleted(backend: StorageBackend) -> None:
    files = written(backend, 3)
    long_ago = time.time_ns() - 2 * ABANDONED_SECONDS * 10**9
    names = [*(file.name for file in files), "0.safetensors"]
    before = time.time_ns()
    backend.touch([files[0].name, files[2].name, "0.safetensors"])
    backend.delete(names, used_before=long_ago)
    assert backend.find(names) == [*backend.find(names[:3]), None]
    # Clocks of servers have seconds.
    backend.delete([files[0].name, files[2].name], used_before=before - 2 * 10**9)
    assert backend.find(names[:3]).count(None) == 0
    backend.delete(names, used_before=time.time_ns() + 2 * 10**9)
    assert backend.find(names) == [None] * 4


def test_files_are_deleted_together_and_those_that_are_gone_are_no_error(backend: StorageBackend) -> None:
    files = written(backend, 4)
    backend.delete([files[0].name, "0.safetensors", files[2].name])
    assert [file is None for file in backend.find([file.name for file in files])] == [True, False, True, False]
    backend.touch([files[0].name, files[1].name])
    assert {file.name for file in backend.files()} == {files[1].name, files[3].name}


def test_threads_share_a_backend(backend: StorageBackend, request: pytest.FixtureRequest) -> None:
    """Each thread writes its own files and those that all write, and reads them while others write and delete."""
    shared = [named(content_of(number)) for number in range(100, 104)]
    if request.node.callspec.params["backend"] == "s3":
        # moto, unlike S3, fails if two clients write the same file at once.
        for number, file in enumerate(shared, 100):
            backend.write(file.name, content_of(number))

    def work(thread: int) -> None:
        mine = [(named(content_of(number)), content_of(number)) for number in range(thread * 3, thread * 3 + 3)]
        common = list(zip(shared, map(content_of, range(100, 104)), strict=True))
        for file, content in [*common, *mine]:
            if backend.find([file.name]) == [None]:
                backend.write(file.name, content)
        for each, (_, content) in zip(read(backend, [file for file, _ in common]), common, strict=True):
            # A file that another thread writes anew may be gone for readers, but is never another one.
            assert each is None or isinstance(each, Exception) or bytes(each) == content
        assert contents(backend, [file for file, _ in mine]) == [content for _, content in mine]
        assert len(backend.files()) >= len(mine)
        backend.last_uses()
        backend.delete([file.name for file, _ in mine[:2]])

    with ThreadPoolExecutor(THREADS) as threads:
        list(threads.map(work, range(THREADS)))
    assert len(backend.files()) == len(shared) + THREADS
    assert contents(backend, shared) == list(map(content_of, range(100, 104)))


def test_a_local_file_that_is_no_regular_file_is_not_opened(tmp_path: pathlib.Path) -> None:
    backend = backend_for(tmp_path, None)
    (tmp_path / "real").write_bytes(b"12345")
    (tmp_path / "link.safetensors").symlink_to(tmp_path / "real")
    (tmp_path / "folder.safetensors").mkdir()
    asked = ["link.safetensors", "folder.safetensors"]
    if os.name == "posix":
        os.mkfifo(tmp_path / "pipe.safetensors")
        asked.append("pipe.safetensors")
    found = read(backend, [StoredFile(name, 5) for name in asked])
    assert all(isinstance(each, CachePathError) and "must be a regular file" in str(each) for each in found)
    (tmp_path / "empty.safetensors").write_bytes(b"")
    assert contents(backend, [StoredFile("empty.safetensors", 0)]) == [b""]


def test_a_local_file_that_cannot_be_deleted_hides_no_others(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = backend_for(str(tmp_path), None)
    names = [f"{number}{SUFFIX}" for number in range(3)]
    for name in names:
        backend.write(name, b"states")
    unlink = os.unlink

    def guarded(path: str) -> None:
        if path.endswith(names[0]):
            raise PermissionError(13, "Permission denied")
        unlink(path)

    with monkeypatch.context() as patched:
        patched.setattr(os, "unlink", guarded)
        with pytest.raises(UnreachableError, match="cannot delete"):
            backend.delete([*names, "gone" + SUFFIX])
    assert [file.name for file in backend.files()] == names[:1]


def test_a_file_of_a_directory_has_its_name_only_when_it_is_whole(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process may be killed before its file is renamed: others then find what was there before."""
    backend = backend_for(tmp_path, None)
    backend.prepare()
    content = content_of(1)
    name = named(content).name
    backend.write(name, content)

    def is_killed(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", is_killed)
    for other in (name, "another" + SUFFIX):
        with pytest.raises(KeyboardInterrupt):
            backend.write(other, content[:10])
    assert (tmp_path / name).read_bytes() == content
    assert not (tmp_path / f"another{SUFFIX}").exists()


def test_uses_are_in_order_however_coarse_the_clock_is_and_also_if_it_goes_back(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = backend_for(tmp_path, None)
    for name in ("a", "b", "c"):
        backend.write(f"{name}.safetensors", b"content")
    now = time.time_ns() + 10**9
    for moment in (now, now, now - 10**12):
        monkeypatch.setattr(time, "time_ns", lambda moment=moment: moment)
        for order in ("cab", "abcb", "bca"):
            backend.touch([f"{name}.safetensors" for name in order])
            uses = backend.last_uses()
            wanted = [name for place, name in enumerate(order) if name not in order[place + 1 :]]
            assert sorted(uses, key=lambda name: uses[name]) == [f"{name}.safetensors" for name in wanted]
    backend.write("d.safetensors", b"content")
    uses = backend.last_uses()
    assert max(uses, key=lambda name: uses[name]) == "d.safetensors"


# In a server

ROOM = 2**30
IDS = list(range(1, 9))


@pytest.fixture
def files(redis_url: str) -> ServerFiles:
    found = ServerFiles(redis_url)
    found.client.flushall()
    return found


def keys(files: ServerFiles) -> set[str]:
    return {key.decode() for key in files.client.keys("*")}


def test_the_keys_are_those_of_the_documentation(files: ServerFiles) -> None:
    store = PrefixStore(ROOM, files.url)
    put(store, IDS, large(IDS))
    (name,) = files.names()
    assert len(name) == 64 + len(".safetensors")
    file = f"kvlayers:prefix:file:{name}"
    assert keys(files) == {"kvlayers:prefix:index", file}
    assert all(files.client.ttl(key) == -1 for key in keys(files))
    assert len(files.client.get(file)) > PART
    store.clear()
    assert keys(files) == set()


def test_a_value_that_the_server_has_dropped_is_gone(files: ServerFiles) -> None:
    put(PrefixStore(ROOM, files.url), IDS)
    store, (name,) = PrefixStore(ROOM, files.url), files.names()
    # As a server does that has no more memory.
    files.client.delete(files.key(name))
    for each in (store, PrefixStore(ROOM, files.url)):
        assert (covered(each, IDS), each.statistics.damaged, len(each)) == (0, 0, 0)
    assert files.names() == []


def test_what_is_flushed_is_found_although_the_server_has_dropped_the_index(files: ServerFiles) -> None:
    put(PrefixStore(ROOM, files.url), IDS)
    store = PrefixStore(ROOM, files.url)
    files.client.delete("kvlayers:prefix:index")
    for each in (store, PrefixStore(ROOM, files.url)):
        insert(each, IDS)
        assert each.flush()
    other = PrefixStore(ROOM, files.url)
    assert covered(other, IDS) == len(IDS)
    other.clear()
    assert keys(files) == set()


def test_a_file_that_is_larger_than_a_value_is_not_written(
    files: ServerFiles, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(redis, "MOST_BYTES", 2 * PART)
    store = PrefixStore(ROOM, files.url)
    with caplog.at_level(logging.WARNING, logger="kvlayers"):
        put(store, IDS, large(IDS))
    assert (store.statistics.failed_writes, len(store), keys(files)) == (1, 0, set())
    assert f"must have at most {2 * PART} bytes" in caplog.text


def test_readers_see_one_of_two_files_and_no_mixture(files: ServerFiles) -> None:
    writer, backend = (RedisBackend(Address(files.url, {})) for _ in range(2))
    written = [bytes([number]) * size for number, size in ((1, 4 * PART + 7), (2, 5 * PART))]
    writer.write("it.safetensors", written[0])
    done = threading.Event()

    def seen() -> set[bytes]:
        found = set()
        while not done.is_set():
            (content,) = backend.read_ranges([ByteRange("it.safetensors", 0, 2**20)])
            found.add(bytes(content))  # type: ignore[arg-type]
        return found

    with ThreadPoolExecutor() as threads:
        readers = [threads.submit(seen) for _ in range(2)]
        try:
            for number in range(100):
                writer.write("it.safetensors", written[number % 2])
        finally:
            done.set()
    assert {content for reader in readers for content in reader.result()} <= set(written)
    assert len(keys(files)) == 2


@pytest.mark.parametrize(
    ("moment", "count", "found"), [("before", 1, 0), ("after", 1, 256), ("before", 2, 256), ("after", 2, 300)]
)
def test_a_writer_that_breaks_off_leaves_the_store_in_order(
    moment: str, count: int, found: int, files: ServerFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before or after one of the two files of an entry is written, as if its process had been killed."""
    write, begun, ids = RedisBackend.write, list[str](), list(range(5, 305))

    def killed(self: RedisBackend, name: str, content: Any) -> None:
        begun.append(name)
        if moment == "after" or len(begun) < count:
            write(self, name, content)
        if len(begun) == count:
            raise KeyboardInterrupt

    directory = Directory(RedisBackend(Address(files.url, {})))
    monkeypatch.setattr(RedisBackend, "write", killed)
    with pytest.raises(KeyboardInterrupt):
        directory.write(label_of(None, "m", ""), np.array(ids), {300}, filled(ids, heads=64), ())
    monkeypatch.undo()
    store = PrefixStore(ROOM, files.url)
    assert (covered(store, ids), store.statistics.damaged) == (found, 0)
    put(store, ids, filled(ids, heads=64))
    assert covered(PrefixStore(ROOM, files.url), ids) == 300
    # Nothing was written twice.
    assert len(files.names()) == 2


def test_a_server_that_lets_nobody_in_for_a_while_loses_nothing(
    files: ServerFiles, caplog: pytest.LogCaptureFixture
) -> None:
    store = PrefixStore(ROOM, files.url)
    put(store, [1, 5, 6])
    insert(store, [2, 5, 6])
    admin = ServerFiles(files.url).client
    admin.config_set("requirepass", "hunter2")
    try:
        # The connections that were let in before stay so.
        files.client.client_kill_filter(_type="normal", skipme=True)
        with caplog.at_level(logging.WARNING, logger="kvlayers"):
            assert [covered(store, [first, 5, 6]) for first in (1, 2)] == [0, 3]
            insert(store, [3, 5, 6])
            store.flush()
        assert (store.statistics.failed_reads, store.statistics.failed_writes, store.statistics.damaged) == (1, 2, 0)
        with pytest.raises(CachePathError, match="cannot reach redis://127"):
            store.refresh()
        with pytest.raises(CachePathError, match="AuthenticationError"):
            PrefixStore(ROOM, files.url)
    finally:
        allowed = files.url.replace("redis://", "redis://:hunter2@")
        ServerFiles(allowed).client.config_set("requirepass", "")
    assert [covered(store, [first, 5, 6]) for first in (1, 2, 3)] == [3, 3, 3]
    store.flush()
    assert store.statistics.spilled == 3


def test_credentials_are_in_no_message(files: ServerFiles, caplog: pytest.LogCaptureFixture) -> None:
    files.client.acl_setuser("me", enabled=True, passwords=["+hunter2"], keys=["*"], commands=["+@all"])
    host = files.url.removeprefix("redis://")
    messages: list[str] = []
    for url, options in (
        (f"redis://me:wrong2@{host}", {}),
        (f"redis://{host}?username=me&password=wrong2", {}),
        (f"redis://{host}", {"username": "me", "password": "wrong2"}),
        ("redis://me:hunter2@127.0.0.1:1/0", {}),
        ("redis://me:hunter2@no-such-host.invalid:1/0", {}),
    ):
        with pytest.raises(CachePathError) as caught:
            PrefixStore(ROOM, url, storage_options=options)
        assert caught.value.__suppress_context__
        messages.append(str(caught.value))
    with caplog.at_level(logging.DEBUG, logger="kvlayers"):
        store = PrefixStore(ROOM, f"redis://me:hunter2@{host}")
        put(store, [1, 5, 6])
        messages += [repr(store), *(str(vars(entry)) for entry in store._index.entries)]
        (name,) = files.names()
        files.write(name, b"damaged")
        assert covered(store, [1, 5, 6]) == 0
    messages.append(caplog.text)
    assert f"redis://***@{host}/{name}" in caplog.text
    for text in messages:
        assert not any(secret in text for secret in ("hunter2", "wrong2")), text


def test_options_are_those_of_the_client(files: ServerFiles) -> None:
    objects = RedisBackend(Address(files.url, {"client_name": "kvlayers-test", "socket_timeout": 7}))
    settings = objects._client.get_connection_kwargs()
    assert (settings["client_name"], settings["socket_timeout"]) == ("kvlayers-test", 7)
    for added, options, named in (
        ("", {"no_such": 1}, "no_such"),
        ("", {"decode_responses": True}, "decode_responses"),
        ("?decode_responses=yes", {}, "decode_responses"),
    ):
        with pytest.raises(OptionError, match=named):
            PrefixStore(ROOM, files.url + added, storage_options=options)


def test_the_url_chooses_database_and_keys(files: ServerFiles) -> None:
    files.client.set("somebody", "else's")
    places = [(files.url, "kvlayers:prefix"), (files.url, "team:a"), (f"{files.url[:-1]}1", "kvlayers:prefix")]
    stores = [PrefixStore(ROOM, f"{url}?prefix={prefix}") for url, prefix in places]
    for first, store in enumerate(stores):
        put(store, [first, 5, 6])
    # What no prefix is given for goes by the first one.
    stores[0] = PrefixStore(ROOM, files.url.replace("redis://", "valkey://"))
    assert [[covered(store, [first, 5, 6]) for first in range(3)] for store in stores] == [
        [3, 0, 0],
        [0, 3, 0],
        [0, 0, 3],
    ]
    assert [len(ServerFiles(*place).names()) for place in places] == [1, 1, 1]
    for store in stores:
        store.clear()
    assert keys(files) == {"somebody"}


def test_a_key_of_another_type_is_no_file_and_stays(files: ServerFiles, caplog: pytest.LogCaptureFixture) -> None:
    put(PrefixStore(ROOM, files.url), [1, 5, 6])
    (name,) = files.names()
    store = PrefixStore(ROOM, files.url)
    files.client.delete(files.key(name))
    files.client.hset(files.key(name), mapping={"nbytes": 5})
    with caplog.at_level(logging.WARNING, logger="kvlayers"):
        for each in (store, PrefixStore(ROOM, files.url)):
            assert (covered(each, [1, 5, 6]), each.statistics.failed_reads, each.statistics.damaged) == (0, 0, 0)
        assert "are no files" in caplog.text
        put(store, [1, 5, 6])
    assert "choose other keys" in caplog.text
    assert store.statistics.failed_writes == 1
    store.clear()
    assert files.client.hgetall(files.key(name)) == {b"nbytes": b"5"}
    files.client.delete(files.key(name))
    put(store, [1, 5, 6])
    assert covered(PrefixStore(ROOM, files.url), [1, 5, 6]) == 3


def test_names_that_a_terminal_would_obey_are_not_looked_at(files: ServerFiles) -> None:
    files.client.zadd("kvlayers:prefix:index", {"\x1b[2J.safetensors": 1})
    files.write("\x1b[2J.safetensors", b"damaged")
    store = PrefixStore(ROOM, files.url)
    assert (len(store), store.statistics.damaged) == (0, 0)
