"""Many small files in each backend: read, found, kept and deleted together, by several threads."""

import hashlib
import os
import pathlib
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

import s3_server
from backend_cases import PART
from kvlayers.errors import CachePathError, KVLayersError
from kvlayers.persistence.node_file import SUFFIX
from kvlayers.prefix.backends import StorageBackend, StoredFile, UnreachableError, backend_for
from kvlayers.prefix.backends.contract import ABANDONED_SECONDS, ByteRange, Content

KINDS = ("local", "memory", "redis", "s3")
THREADS = 8


@pytest.fixture(params=KINDS)
def backend(request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> StorageBackend:
    found = opened(request, tmp_path)
    found.prepare()
    return found


def opened(request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> StorageBackend:
    """A backend on an empty directory of this test."""
    name = f"{os.getpid()}-{hashlib.sha256(request.node.name.encode()).hexdigest()[:8]}"
    if request.param == "local":
        return backend_for(tmp_path / "files", None)
    if request.param == "memory":
        MemoryFileSystem.store.clear()
        return backend_for(f"memory://bucket/{name}", None)
    if request.param == "redis":
        return backend_for(f"{request.getfixturevalue('redis_url')}?prefix={name}", None)
    return backend_for(f"s3://{s3_server.BUCKET}/{name}", s3_server.options(request.getfixturevalue("s3_port")))


def content_of(number: int) -> bytes:
    return bytes([number % 256]) * (PART * (number % 3) + number + 1)


def named(content: bytes) -> StoredFile:
    """A file of which the name and the size are known."""
    return StoredFile(hashlib.sha256(content).hexdigest() + SUFFIX, len(content))


def written(backend: StorageBackend, count: int) -> list[StoredFile]:
    files = []
    for number in range(count):
        files.append(named(content_of(number)))
        backend.write(files[-1].name, content_of(number))
    return files


def test_files_are_read_in_order_and_one_does_not_hide_the_others(backend: StorageBackend) -> None:
    files = written(backend, 9)
    assert [bytes(each) for each in contents(backend, files)] == list(map(content_of, range(9)))
    asked = [
        replace(files[0], name="0.safetensors"),
        files[1],
        replace(files[2], nbytes=5),
        replace(files[3], nbytes=2**20),
    ]
    gone, *others = read(backend, [*asked, files[4]])
    assert gone is None
    # Of a longer file what was asked for, and of a shorter one what it has.
    expected = [content_of(1), content_of(2)[:5], content_of(3), content_of(4)]
    assert [bytes(each) for each in others] == expected  # type: ignore[arg-type]
    (inner,) = backend.read_ranges([ByteRange(files[2].name, PART - 1, PART + 3)])
    assert bytes(inner) == content_of(2)[PART - 1 : PART + 3]  # type: ignore[arg-type]
    assert backend.read_ranges([]) == []


def read(backend: StorageBackend, files: list[StoredFile]) -> list[Content | KVLayersError | None]:
    """As many bytes of each file as it is said to have."""
    return backend.read_ranges([ByteRange(file.name, 0, file.nbytes) for file in files])


def contents(backend: StorageBackend, files: list[StoredFile]) -> list[Content]:
    found = []
    for each in read(backend, files):
        assert each is not None
        assert not isinstance(each, Exception), each
        found.append(each)
    return found


@pytest.mark.filterwarnings("ignore:The given buffer is not writable")
def test_content_of_any_kind_is_written_and_becomes_a_tensor_without_a_copy(backend: StorageBackend) -> None:
    (file,) = written(backend, 1)
    (content,) = contents(backend, [file])
    assert torch.frombuffer(content, dtype=torch.uint8).tolist() == list(content_of(0))
    for view in (memoryview(content_of(4)), bytearray(content_of(4))):
        backend.write(named(content_of(4)).name, view)
        assert bytes(contents(backend, [named(content_of(4))])[0]) == content_of(4)


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
        found = [bytes(each) for each in contents(backend, [file for file, _ in mine])]
        assert found == [content for _, content in mine]
        assert len(backend.files()) >= len(mine)
        backend.last_uses()
        backend.delete([file.name for file, _ in mine[:2]])

    with ThreadPoolExecutor(THREADS) as threads:
        list(threads.map(work, range(THREADS)))
    assert len(backend.files()) == len(shared) + THREADS
    assert [bytes(each) for each in contents(backend, shared)] == list(map(content_of, range(100, 104)))


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
    assert [bytes(each) for each in contents(backend, [StoredFile("empty.safetensors", 0)])] == [b""]


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
    with pytest.raises(KeyboardInterrupt):
        backend.write(name, content[:10])
    with pytest.raises(KeyboardInterrupt):
        backend.write("another" + SUFFIX, content)
    assert (tmp_path / name).read_bytes() == content
    assert not (tmp_path / f"another{SUFFIX}").exists()
