"""Wherever a prefix store's files are: what is found is what was put there, and nothing else is touched."""

import logging
import pathlib
import struct
import tempfile
from typing import Any

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.registry import known_implementations

from backend_cases import Files, FilesystemFiles, ServerFiles, covered, filled, insert, large, put
from kvlayers import OptionError, PrefixStore, save_cache
from kvlayers.errors import CachePathError
from kvlayers.persistence.node_file import SUFFIX
from kvlayers.persistence.tensor_file import Header, TensorEntry, file_header, parse_header
from kvlayers.prefix.backends.contract import Address
from kvlayers.prefix.nodes import HEAD_BYTES
from redis_server import why_not

ROOM = 2**30


@pytest.fixture(autouse=True)
def _empty_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    for system in (MemoryFileSystem, Failing):
        monkeypatch.setattr(system, "store", {})
        monkeypatch.setattr(system, "pseudo_dirs", [""])
    Failing.fails, Failing.asked = set(), []


@pytest.fixture(params=["local", "memory", "redis"])
def files(request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> Files:
    if request.param != "redis":
        return FilesystemFiles(str(tmp_path / "files") if request.param == "local" else "memory://bucket/team")
    found = ServerFiles(request.getfixturevalue("redis_url"))
    found.client.flushall()
    return found


class Failing(MemoryFileSystem):
    """A file system that does not do what it is told not to, and repeats in its errors all that it was told."""

    protocol = "failing"
    fails: set[str] = set()  # noqa: RUF012
    asked: list[tuple[int, int]] = []  # noqa: RUF012
    cachable = False

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return "/" + path.removeprefix(f"{cls.protocol}://").rpartition("@")[2].strip("/")

    def _try(self, what: str) -> None:
        if what in self.fails:
            raise ConnectionError(f"failing://me:hunter2@host/ with {self.storage_options} does not {what}")

    def ls(self, path: str, detail: bool = True, **options: Any) -> Any:
        self._try("ls")
        return super().ls(path, detail, **options)

    def info(self, path: str, **options: Any) -> Any:
        self._try("info")
        return super().info(path, **options)

    def cat_file(self, path: str, start: Any = None, end: Any = None, **options: Any) -> bytes:
        self._try("read")
        self.asked.append((start, end))
        content: bytes = super().cat_file(path, start, end, **options)
        if not content:
            raise OSError("no server answers with nothing")
        return content

    def pipe_file(self, path: str, value: bytes, **options: Any) -> None:
        self._try("write")
        super().pipe_file(path, value, **options)

    def rm_file(self, path: str) -> None:
        self._try("delete")
        super().rm_file(path)


fsspec.register_implementation("failing", Failing, clobber=True)


@pytest.fixture
def failing() -> FilesystemFiles:
    return FilesystemFiles("failing://me:hunter2@host/team")


@pytest.fixture
def store(failing: FilesystemFiles) -> PrefixStore:
    """One with an entry there."""
    store = PrefixStore(ROOM, failing.url)
    put(store, [1, 5, 6])
    return store


# What all backends have in common


def test_what_leaves_memory_is_found_again_whole_and_in_part(files: Files) -> None:
    most = filled([1, 2, 3]).nbytes
    store = PrefixStore(most, files.url)
    for first in (1, 2, 3):
        insert(store, [first, 5, 6], namespace="a")
    store.flush()
    for each in (store, PrefixStore(most, files.url)):
        for first in (1, 2, 3, 1):
            assert [covered(each, [first, 5, 6], name) for name in ("a", "b", "")] == [3, 0, 0]
            assert covered(each, [first, 5, 9], "a") == 2
            assert each.statistics.bytes <= most
    assert len(files.names()) == 3


@pytest.mark.parametrize("damage", ["cut", "changed", "empty", "not ours", "gone"])
def test_damaged_files_are_skipped_reported_once_and_written_anew(
    damage: str, files: Files, caplog: pytest.LogCaptureFixture
) -> None:
    store = PrefixStore(ROOM, files.url)
    put(store, [1, 5, 6])
    before = files.names()
    put(store, [2, 5, 6])
    (name,) = set(files.names()) - set(before)
    content = files.read(name)
    # A server has no difference between an empty value and none.
    is_damage = damage != "gone" and not (damage == "empty" and isinstance(files, ServerFiles))
    changed = content.replace(struct.pack("<3q", 2, 5, 6), struct.pack("<3q", 2, 5, 7))
    if damage != "gone":
        files.write(name, {"cut": content[:-5], "changed": changed, "empty": b"", "not ours": b"x" * 400}[damage])
    elif isinstance(files, ServerFiles):
        # As a server does that has no more memory. Its index goes on having it.
        files.client.delete(files.key(name))
    else:
        files.delete(name)
    for each in (store, PrefixStore(ROOM, files.url)):
        for _ in range(2):
            assert (covered(each, [2, 5, 6]), covered(each, [1, 5, 6])) == (0, 3)
            each.refresh()
        assert (each.statistics.damaged, each.statistics.failed_reads) == (is_damage, 0)
    assert len(caplog.records) == 2 * is_damage
    assert tempfile.gettempdir() + "/kvlayers-" not in caplog.text
    assert is_damage or files.names() == before
    put(store, [2, 5, 6])
    assert covered(PrefixStore(ROOM, files.url), [2, 5, 6]) == 3


def test_stores_that_write_to_one_directory_have_one_limit(files: Files) -> None:
    """Though none of them is refreshed, and whichever has written: beyond it is at most what is not listed yet."""
    put(PrefixStore(ROOM, files.url), [0, 0, 0])
    most = 16 * sum(len(files.read(name)) for name in files.names())
    stores = [PrefixStore(ROOM, files.url, directory_max_bytes=most) for _ in range(3)]
    for number in range(60):
        put(stores[number % 3], [1 + number, 0, 0])
        held = sum(len(files.read(name)) for name in files.names())
        assert held <= most * 1.5, number
    assert held > most / 2


def test_clear_deletes_what_is_its_own_and_nothing_else(files: Files, tmp_path: pathlib.Path) -> None:
    save_cache(filled([1, 2]), tmp_path / "mine", token_ids=torch.tensor([[1, 2]]))
    PrefixStore(ROOM, files.url)
    files.write("mine.safetensors", (tmp_path / "mine").read_bytes())
    files.write("notes.txt", b"mine too")
    store = PrefixStore(ROOM, files.url)
    assert (len(store), store.statistics.damaged) == (0, 0)
    put(store, [1, 5, 6])
    assert len(files.names()) == 3
    store.clear()
    assert (files.names(), files.read("notes.txt")) == (["mine.safetensors", "notes.txt"], b"mine too")


def test_refresh_finds_what_others_wrote_and_forgets_what_they_deleted(files: Files) -> None:
    store, other = PrefixStore(ROOM, files.url), PrefixStore(ROOM, files.url)
    insert(store, [4, 5, 6])
    for first in (1, 2, 4):
        put(other, [first, 5, 6])
    assert (covered(store, [1, 5, 6]), store.refresh(), store.refresh()) == (0, 2, 0)
    assert [covered(store, [first, 5, 6]) for first in (1, 2)] == [3, 3]
    # What is in memory too takes the other's file for its own.
    store.evict()
    assert (store.statistics.spilled, covered(store, [4, 5, 6]), len(store)) == (0, 3, 3)
    put(store, [3, 5, 6])
    store.lookup(torch.tensor([1, 5, 6, 7]), model="m")
    other.clear()
    assert (len(store), store.refresh(), len(store)) == (4, 0, 2)
    # What is in memory is written again when it leaves it, and what is not has gone.
    store.evict()
    assert [covered(store, [first, 5, 6]) for first in (1, 2, 3)] == [3, 0, 3]


# What goes wrong on the way


def test_a_backend_that_does_not_answer_loses_nothing(store: PrefixStore, caplog: pytest.LogCaptureFixture) -> None:
    put(store, [1, 5, 7])
    insert(store, [2, 5, 6])
    Failing.fails = {"read"}
    hit = store.lookup(torch.tensor([1, 5, 8, 9]), model="m")
    assert "could not be reached" in hit.reason
    # One of the two files was tried: who waits for one server twice waits twice as long.
    assert (hit.covered, store.statistics.failed_reads, len(caplog.records)) == (0, 1, 1)
    assert covered(store, [2, 5, 6]) == 3
    # Blocks have names and sizes, which suffice to read them.
    for Failing.fails in ({"info"}, set()):
        assert (covered(store, [1, 5, 6]), len(store), store.statistics.damaged) == (3, 3, 0)


def test_a_backend_that_cannot_be_listed_changes_nothing(failing: FilesystemFiles, store: PrefixStore) -> None:
    Failing.fails = {"ls"}
    with pytest.raises(CachePathError, match=r"cannot reach failing://\*\*\*@host/team, got ConnectionError: check"):
        store.refresh()
    Failing.fails = {"read"}
    put(PrefixStore(ROOM, failing.url), [2, 5, 6])
    assert (store.refresh(), store.statistics.failed_reads) == (0, 1)
    Failing.fails = set()
    assert (store.refresh(), covered(store, [1, 5, 6]), covered(store, [2, 5, 6])) == (1, 3, 3)


def test_what_cannot_be_deleted_stays_counted(store: PrefixStore, caplog: pytest.LogCaptureFixture) -> None:
    size = store.statistics.file_bytes
    store._writes.directory_max_bytes = size
    Failing.fails = {"delete"}
    put(store, [2, 5, 6])
    assert (len(store), store.statistics.file_bytes) == (2, 2 * size)
    assert "was not deleted" in caplog.text
    Failing.fails = set()
    assert (store.refresh(), len(store), store.statistics.file_bytes) == (0, 1, size)


@pytest.mark.parametrize("what", ["write", "delete", "ls"])
def test_a_backend_that_cannot_be_used_is_refused_at_once(what: str, failing: FilesystemFiles) -> None:
    Failing.fails = {what}
    with pytest.raises(CachePathError, match=r"reach failing://\*\*\*@host/team, got ConnectionError: check that"):
        PrefixStore(ROOM, failing.url)


def test_a_file_that_is_replaced_while_it_is_read_is_read_again(failing: FilesystemFiles, monkeypatch: Any) -> None:
    ids = list(range(1, 9))
    put(PrefixStore(ROOM, failing.url), ids)
    (name,) = failing.names()
    store, original, contents = PrefixStore(ROOM, failing.url), Failing.cat_file, list[bytes]()

    def replaced_once(self: Any, path: str, *range_: Any, **options: Any) -> bytes:
        if contents:
            self.pipe_file(path, contents.pop())
        return original(self, path, *range_, **options)

    monkeypatch.setattr(Failing, "cat_file", replaced_once)
    for is_opened in (False, True):
        contents += [failing.read(name), b"damaged"]
        # The second time while a store looks what there is.
        each = PrefixStore(ROOM, failing.url) if is_opened else store
        assert (covered(each, ids), each.statistics.damaged) == (8, 0)


# Files that were made to do harm


def test_a_remote_file_that_claims_much_is_not_read(failing: FilesystemFiles, store: PrefixStore) -> None:
    (name,) = failing.names()
    content = failing.read(name)

    class Endless(Failing):
        """Every file is as long as it says, and has nothing but zeros behind what was written."""

        protocol = "endless"
        header, size = b"", 2**40

        def ls(self, path: str, detail: bool = True, **options: Any) -> Any:
            return [{**info, "size": self.size} for info in super().ls(path, True, **options)]

        def info(self, path: str, **options: Any) -> Any:
            return {**super().info(path, **options), "size": self.size}

        def cat_file(self, path: str, start: Any = None, end: Any = None, **options: Any) -> bytes:
            self.asked.append((start, end))
            if end - start > 2**30:
                raise MemoryError
            return self.header[start:end].ljust(end - start, b"\0")

    fsspec.register_implementation("endless", Endless, clobber=True)
    node = _endless_node(content)
    claims = {
        "a header of 2**60 bytes": (struct.pack("<Q", 2**60), 2**40),
        "a header of 4 MiB of nothing": (struct.pack("<Q", 2**22), 2**40),
        "a node of ids of nearly a terabyte": (node.content, node.file_bytes),
        "a file of other bytes": (content, 2**40),
    }
    for what, (header, size) in claims.items():
        Endless.header, Endless.size, Endless.asked = header, size, []
        found = PrefixStore(ROOM, "endless://host/team")
        assert (what, len(found), found.statistics.damaged) == (what, 0, 1)
        assert sum(end - start for start, end in Endless.asked) < 80 * 2**20, what


def _endless_node(content: bytes) -> Header:
    """The header of a node of 2**37 ids."""
    header = parse_header("", len(content), lambda start, end: content[start:end])
    tensors = {name: entry for name, entry in header.tensors.items() if name != "digests"}
    return file_header({**tensors, "token_ids": TensorEntry(torch.int64, (1, 2**37))}, header.metadata)


def test_a_remote_file_that_has_grown_is_not_fetched(failing: FilesystemFiles, store: PrefixStore) -> None:
    (name,) = failing.names()
    failing.write(name, failing.read(name) + bytes(5 * 2**20))
    Failing.asked = []
    assert (covered(store, [1, 5, 6]), store.statistics.damaged) == (0, 1)
    assert sum(end - start for start, end in Failing.asked) < 2**20


@pytest.mark.parametrize("content", [b"", b"\x08", b"\x08" + bytes(7)])
def test_nothing_is_asked_for_behind_the_end_of_a_file(
    content: bytes, failing: FilesystemFiles, store: PrefixStore
) -> None:
    failing.write("it.safetensors", content)
    assert (store.refresh(), store.statistics.damaged, store.statistics.failed_reads) == (0, 1, 0)


def test_only_a_little_of_each_file_is_read_at_first(failing: FilesystemFiles) -> None:
    ids = list(range(1, 9))
    put(PrefixStore(ROOM, failing.url), ids, large(ids))
    size = sum(len(failing.read(name)) for name in failing.names())
    Failing.asked = []
    store = PrefixStore(ROOM, failing.url)
    assert sum(end - start for start, end in Failing.asked) <= 2 * HEAD_BYTES < size
    Failing.asked = []
    assert covered(store, ids) == 8
    # One byte more of each file, which would show that it is longer.
    assert sum(end - start for start, end in Failing.asked) == size + len(Failing.asked)


# Addresses and options


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://host:6379/0", "redis://host:6379/0"),
        ("redis://me:hunter2@host/0", "redis://***@host/0"),
        ("redis://:hunter2@host", "redis://***@host"),
        ("redis://host/0?password=hunter2", "redis://host/0"),
        ("redis://host/0?password=hunt@er2", "redis://***"),
        ("redis://me:hun/ter2@host/0", "redis://***"),
        ("redis://me:hun#ter2@host/0", "redis://***"),
        ("redis://me:hun?ter2@host/0", "redis://***"),
        ("redis://me:hun@ter2@host/0", "redis://***"),
        ("s3://bucket/team/", "s3://bucket/team"),
        ("s3://bucket/me@home", "s3://***"),
        ("zip://x::sftp://me:hunter2@host/y", "zip://***"),
    ],
)
def test_addresses_are_shown_without_what_lets_somebody_in(url: str, shown: str) -> None:
    address = Address(url, {"secret": "s3cr3t", "client_kwargs": {"keys": ["dee9"]}})
    assert repr(address) == address.shown == shown
    secrets = {text for text in ("hunter2", "hunt@er2", "hun/ter2") if text in url}
    for secret in {*secrets, "s3cr3t", "dee9"}:
        assert address.detail(ValueError(f"no such {secret}")) == "ValueError"
    assert address.detail(OSError(5, "no\nline")) == "OSError: [Errno 5] no line"


def test_credentials_are_in_no_message(failing: FilesystemFiles, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="kvlayers"):
        store = PrefixStore(ROOM, failing.url, storage_options={"token": "t0k3n"})
        put(store, [1, 5, 6])
        assert store._writes.directory.backend._fs.storage_options == {"token": "t0k3n"}
        told = [repr(store), str(store.statistics), *(str(vars(entry)) for entry in store._index.entries)]
        for first, what in enumerate(("info", "read", "write", "delete"), 2):
            Failing.fails = {what}
            covered(store, [1, 5, 6])
            insert(store, [first, 5, 6])
            store.flush()
        store.clear()
        Failing.fails = set()
        failing.write(failing.names()[0], b"damaged")
        store.refresh()
        Failing.fails = {"ls"}
        with pytest.raises(CachePathError) as caught:
            store.refresh()
    assert (caught.value.__cause__, caught.value.__suppress_context__) == (None, True)
    assert len(caplog.records) >= 2
    for text in (*told, str(caught.value), caplog.text):
        assert not any(secret in text for secret in ("hunter2", "t0k3n")), text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"directory": "nowhere://x"}, "scheme that fsspec knows, got nowhere://: see"),
        ({"directory": "missing://x"}, r"missing:// is not installed \(Install there-is-none to reach it\)"),
        ({"directory": pathlib.Path("s3://bucket/x")}, "a URL in a PosixPath: pass it as a str"),
        ({"directory": b"redis://host"}, "a URL in a bytes"),
        ({"directory": 5}, "a path or a URL, got a int"),
        ({"directory": pathlib.Path("files"), "storage_options": {"a": 1}}, "storage_options` are for URLs"),
        ({"directory": "file:///files", "storage_options": {"a": 1}}, "storage_options` are for URLs"),
        ({"storage_options": {}}, "storage_options` need a `directory`"),
        ({"directory": "memory://x", "storage_options": 5}, "mapping from names to values, got a int"),
        ({"directory": "memory://x", "storage_options": {5: 5}}, "mapping from names"),
        ({"directory": "redis://host:hunter2/0"}, "escape special characters"),
        ({"directory": "redis://me:hun#ter2@host/0"}, "escape special characters"),
        ({"directory": "redis://[host/0"}, "escape special characters"),
        ({"directory": "redis://host/0?prefix="}, "one prefix"),
        ({"directory": "redis://host/0?prefix=a&prefix=b"}, "one prefix"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_not_a_backend_is_refused(
    options: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = {"class": "there_is_no_such_package.FileSystem", "err": "Install there-is-none to reach it"}
    monkeypatch.setitem(known_implementations, "missing", missing)
    if "redis://h" in str(options) and why_not().startswith("the package"):
        pytest.skip(why_not())
    with pytest.raises(OptionError, match=message) as caught:
        PrefixStore(ROOM, **options)
    assert [text in str(caught.value) for text in ("\n", "hun")] == [False, False]


@pytest.mark.parametrize("scheme", ["redis", "rediss", "valkey", "valkeys"])
def test_a_missing_package_for_servers_is_named(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "redis", None)
    with pytest.raises(OptionError, match=rf"reaches {scheme}://.* run `pip install redis`"):
        PrefixStore(ROOM, f"{scheme}://127.0.0.1:1/0")


@pytest.mark.parametrize("scheme", ["file", "local"])
def test_urls_of_files_are_local_directories(scheme: str, tmp_path: pathlib.Path) -> None:
    place = tmp_path / "files"
    put(PrefixStore(ROOM, f"{scheme}://{place}"), [1, 5, 6])
    assert ({path.suffix for path in place.iterdir()}, place.stat().st_mode & 0o777) == ({SUFFIX}, 0o700)
    assert covered(PrefixStore(ROOM, place), [1, 5, 6]) == 3
