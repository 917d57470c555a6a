"""Many small files in each backend: read, found, kept and deleted together, by several threads.

In a real Redis or Valkey server they are whole or not at all, whoever is killed meanwhile.
"""

import hashlib
import logging
import os
import pathlib
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
import torch

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
    name = f"{os.getpid()}-{time.time_ns()}"
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
        backend.write(file.name, (bytes, bytearray, memoryview)[number % 3](content_of(number)))
    return files


@pytest.mark.filterwarnings("ignore:The given buffer is not writable")
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
    # What was read becomes a tensor without a copy.
    found = [torch.frombuffer(cast(Content, each), dtype=torch.uint8).numpy().tobytes() for each in others]
    assert (gone, found) == (None, expected)
    (inner,) = backend.read_ranges([ByteRange(files[2].name, PART - 1, PART + 3)])
    assert bytes(cast(Content, inner)) == content_of(2)[PART - 1 : PART + 3]
    assert backend.read_ranges([]) == []


def read(backend: StorageBackend, files: list[StoredFile]) -> list[Content | KVLayersError | None]:
    """As many bytes of each file as it is said to have."""
    return backend.read_ranges([ByteRange(file.name, 0, file.nbytes) for file in files])


def contents(backend: StorageBackend, files: list[StoredFile]) -> list[bytes]:
    """The content of each file, which must be there."""
    return [bytes(cast(Content, each)) for each in read(backend, files)]


def test_files_of_a_store_are_listed_and_nothing_else(backend: StorageBackend) -> None:
    files = written(backend, 3)
    # And no names that a terminal would obey.
    for name in ("it.safetensors", "notes.txt", "\u202emine.safetensors"):
        backend.write(name, b"entry")
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


def test_what_was_used_since_is_not_deleted_and_what_is_gone_is_no_error(backend: StorageBackend) -> None:
    names = [*(file.name for file in written(backend, 3)), "0.safetensors"]
    long_ago, before = time.time_ns() - 2 * ABANDONED_SECONDS * 10**9, time.time_ns()
    backend.touch([names[0], *names[2:]])
    # Clocks of servers have seconds.
    for deleted, used_before, left in (
        (names, long_ago, [True, True, True]),
        ([names[0], names[2]], before - 2 * 10**9, [True, True, True]),
        ([names[0], names[3]], None, [False, True, True]),
        (names, time.time_ns() + 2 * 10**9, [False, False, False]),
    ):
        backend.delete(deleted, used_before)
        backend.touch(names[:1] if not left[0] else [])
        assert [file is not None for file in backend.find(names)] == [*left, False]


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
    os.mkfifo(tmp_path / "pipe.safetensors")
    found = read(backend, [StoredFile(f"{name}.safetensors", 5) for name in ("link", "folder", "pipe")])
    assert all(isinstance(each, CachePathError) and "must be a regular file" in str(each) for each in found)
    (tmp_path / "empty.safetensors").write_bytes(b"")
    assert contents(backend, [StoredFile("empty.safetensors", 0)]) == [b""]


def test_a_local_file_that_cannot_be_deleted_hides_no_others(tmp_path: pathlib.Path) -> None:
    backend, (first, *others) = backend_for(str(tmp_path), None), [f"{number}{SUFFIX}" for number in range(3)]
    # As is a file whose deletion the system refuses.
    (tmp_path / first).mkdir()
    for name in others:
        backend.write(name, b"states")
    with pytest.raises(UnreachableError, match="cannot delete"):
        backend.delete([first, *others, "gone" + SUFFIX])
    assert os.listdir(tmp_path) == [first]


def test_a_file_of_a_directory_has_its_name_only_when_it_is_whole(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process may be killed before its file is renamed: others then find what was there before."""
    backend, content = backend_for(tmp_path, None), content_of(1)
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
    put(store, IDS, large(IDS))
    assert (store.statistics.failed_writes, len(store), keys(files)) == (1, 0, set())
    assert f"must have at most {2 * PART} bytes" in caplog.text


def test_readers_see_one_of_two_files_and_no_mixture(files: ServerFiles) -> None:
    writer, backend = (RedisBackend(Address(files.url, {})) for _ in range(2))
    written = [bytes([number]) * size for number, size in ((1, 4 * PART + 7), (2, 5 * PART))]
    writer.write("it.safetensors", written[0])
    with ThreadPoolExecutor() as threads:
        writes = threads.submit(lambda: [writer.write("it.safetensors", content) for content in written * 50])
        while not writes.done():
            (content,) = backend.read_ranges([ByteRange("it.safetensors", 0, 2**20)])
            assert bytes(cast(Content, content)) in written
    assert (len(writes.result()), len(keys(files))) == (100, 2)


@pytest.mark.parametrize(("written", "found"), [(0, 0), (1, 256)])
def test_a_writer_that_breaks_off_leaves_the_store_in_order(
    written: int, found: int, files: ServerFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When some of the two files of an entry are written, as if its process had been killed."""
    write, ids = RedisBackend.write, list(range(5, 305))

    def killed(self: RedisBackend, name: str, content: Any) -> None:
        if len(files.names()) == written:
            raise KeyboardInterrupt
        write(self, name, content)

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


def test_a_server_that_lets_nobody_in_for_a_while_loses_nothing(files: ServerFiles) -> None:
    store = PrefixStore(ROOM, files.url)
    put(store, [1, 5, 6])
    insert(store, [2, 5, 6])
    admin = ServerFiles(files.url).client
    admin.config_set("requirepass", "hunter2")
    try:
        # The connections that were let in before stay so.
        files.client.client_kill_filter(_type="normal", skipme=True)
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
    host, messages = files.url.removeprefix("redis://"), list[str]()
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


def test_the_url_chooses_database_and_keys_as_documented(files: ServerFiles) -> None:
    files.client.set("somebody", "else's")
    places = [(files.url, "kvlayers:prefix"), (files.url, "team:a"), (f"{files.url[:-1]}1", "kvlayers:prefix")]
    stores = [PrefixStore(ROOM, f"{url}?prefix={prefix}") for url, prefix in places]
    for first, store in enumerate(stores):
        put(store, [first, 5, 6], large([first, 5, 6]))
    # What no prefix is given for goes by the first one.
    stores[0] = PrefixStore(ROOM, files.url.replace("redis://", "valkey://"))
    assert [[covered(store, [first, 5, 6]) for first in range(3)] for store in stores] == [
        [3, 0, 0],
        [0, 3, 0],
        [0, 0, 3],
    ]
    # One value for each file, however large, and nothing that goes by itself.
    ((name,), (other,), _) = (ServerFiles(*place).names() for place in places)
    assert keys(files) == {
        *("somebody", "kvlayers:prefix:index", f"kvlayers:prefix:file:{name}"),
        *("team:a:index", f"team:a:file:{other}"),
    }
    assert {files.client.ttl(key) for key in keys(files)} == {-1}
    for store in stores:
        store.clear()
    assert keys(files) == {"somebody"}


def test_a_key_of_another_type_is_no_file_and_stays(files: ServerFiles, caplog: pytest.LogCaptureFixture) -> None:
    put(PrefixStore(ROOM, files.url), [1, 5, 6])
    store, (name,) = PrefixStore(ROOM, files.url), files.names()
    files.client.delete(files.key(name))
    files.client.hset(files.key(name), mapping={"nbytes": 5})
    for each in (store, PrefixStore(ROOM, files.url)):
        assert (covered(each, [1, 5, 6]), each.statistics.failed_reads, each.statistics.damaged) == (0, 0, 0)
    assert "are no files" in caplog.text
    put(store, [1, 5, 6])
    assert "choose other keys" in caplog.text
    store.clear()
    assert files.client.hgetall(files.key(name)) == {b"nbytes": b"5"}
    files.client.delete(files.key(name))
    put(store, [1, 5, 6])
    assert covered(PrefixStore(ROOM, files.url), [1, 5, 6]) == 3
