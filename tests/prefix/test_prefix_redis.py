"""A prefix store's files in a real Redis or Valkey server: whole or not at all, whoever is killed meanwhile."""

import logging
import os
import signal
import threading
from typing import Any

import pytest
import torch

from backend_cases import PART, ServerFiles, covered, filled, large, put
from kvlayers import OptionError, PrefixStore
from kvlayers.errors import CachePathError
from kvlayers.prefix.backends import redis
from kvlayers.prefix.backends.contract import Address, ByteRange
from kvlayers.prefix.backends.redis import RedisBackend
from redis_server import why_not

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not() or "-")

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
    address = Address(files.url, {})
    writer, backend = RedisBackend(address), RedisBackend(address)
    contents = [bytes([number]) * size for number, size in ((1, 4 * PART + 7), (2, 5 * PART))]
    mixed: list[bytes] = []
    done = threading.Event()

    def read() -> None:
        while not done.is_set():
            try:
                (found,) = backend.read_ranges([ByteRange("it.safetensors", 0, 2**20)])
                content = bytes(found)
            except BaseException as error:
                content = repr(error).encode()
            if content not in contents:
                mixed.append(content[:300])

    writer.write("it.safetensors", contents[0])
    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    for number in range(100):
        writer.write("it.safetensors", contents[number % 2])
    done.set()
    for reader in readers:
        reader.join()
    assert mixed == []
    assert len(keys(files)) == 2


def two_nodes(number: int) -> list[int]:
    """Tokens of an entry that is written as two files."""
    return [number, *range(5, 304)]


def put_until_killed(url: str, ids: list[int], moment: str, files: int) -> None:
    """In a process of its own: write an entry, and be killed before or after this file of it is written."""
    write, begun = RedisBackend.write, []

    def killed(self: RedisBackend, name: str, content: Any) -> None:
        begun.append(name)
        if moment == "after" or len(begun) < files:
            write(self, name, content)
        if len(begun) == files:
            os.kill(os.getpid(), signal.SIGKILL)

    RedisBackend.write = killed  # type: ignore[method-assign]
    try:
        put(PrefixStore(ROOM, url), ids, filled(ids, heads=64))
    finally:
        os._exit(1)


@pytest.mark.skipif(os.name != "posix", reason="kills as POSIX does")
def test_writers_that_are_killed_leave_the_store_in_order(files: ServerFiles) -> None:
    moments = [(moment, count) for count in (1, 2) for moment in ("before", "after")]
    for number, (moment, count) in enumerate(moments):
        # A fork, since starting an interpreter takes seconds.
        child = os.fork()
        if not child:
            put_until_killed(files.url, two_nodes(number), moment, count)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    store = PrefixStore(ROOM, files.url)
    assert (len(store), store.statistics.damaged) == (3, 0)
    assert [covered(store, two_nodes(number)) for number in range(4)] == [0, 256, 256, 300]
    assert len(files.names()) == 4
    for number in range(3):
        put(store, two_nodes(number), filled(two_nodes(number), heads=64))
    other = PrefixStore(ROOM, files.url)
    assert [covered(other, two_nodes(number)) for number in range(4)] == [300] * 4
    # Nothing was written twice.
    assert len(files.names()) == 8


def test_a_server_that_lets_nobody_in_for_a_while_loses_nothing(
    files: ServerFiles, caplog: pytest.LogCaptureFixture
) -> None:
    store = PrefixStore(ROOM, files.url)
    put(store, [1, 5, 6])
    store.insert(torch.tensor([2, 5, 6]), filled([2, 5, 6]), model="m")
    admin = ServerFiles(files.url).client
    admin.config_set("requirepass", "hunter2")
    try:
        # The connections that were let in before stay so.
        files.client.client_kill_filter(_type="normal", skipme=True)
        with caplog.at_level(logging.WARNING, logger="kvlayers"):
            assert [covered(store, [first, 5, 6]) for first in (1, 2)] == [0, 3]
            store.insert(torch.tensor([3, 5, 6]), filled([3, 5, 6]), model="m")
            store.flush()
        now = store.statistics
        assert (now.failed_reads, now.failed_writes, now.damaged) == (1, 2, 0)
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
    for options, message in (({"no_such": 1}, "no_such"), ({"decode_responses": True}, "decode_responses")):
        with pytest.raises(OptionError, match=message):
            PrefixStore(ROOM, files.url, storage_options=options)
    with pytest.raises(OptionError, match="decode_responses"):
        PrefixStore(ROOM, f"{files.url}?decode_responses=yes")


def test_the_url_chooses_database_and_keys(files: ServerFiles) -> None:
    other = ServerFiles(files.url, prefix="team:a")
    files.client.set("somebody", "else's")
    stores = [PrefixStore(ROOM, url) for url in (files.url, f"{files.url}?prefix=team:a", f"{files.url[:-1]}1")]
    for first, store in enumerate(stores):
        put(store, [first, 5, 6])
    assert [[covered(store, [first, 5, 6]) for first in range(3)] for store in stores] == [
        [3, 0, 0],
        [0, 3, 0],
        [0, 0, 3],
    ]
    assert (len(files.names()), len(other.names()), len(ServerFiles(f"{files.url[:-1]}1").names())) == (1, 1, 1)
    valkey = PrefixStore(ROOM, files.url.replace("redis://", "valkey://"))
    assert covered(valkey, [0, 5, 6]) == 3
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
            assert covered(each, [1, 5, 6]) == 0
            assert (each.statistics.failed_reads, each.statistics.damaged) == (0, 0)
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
