"""What goes wrong around a prefix store: broken lines, servers that restart, full disks, killed processes.

Nothing wrong is ever returned: `covered` compares states with those that were inserted. Nothing is lost that `flush`
has acknowledged.
"""

import contextlib
import errno
import os
import pathlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import killed_workers
import s3_server
from backend_cases import PART, covered, large, put
from kvlayers import PrefixStore
from kvlayers.persistence import atomic_file
from kvlayers.serving.reports import report_on
from proxy import Line, line_to

ROOM = 2**30
WAIT = 0.3
MARGIN = 5.0
"""Seconds that a caller says it waits at most, and for which a busy machine may stop the test besides. A caller that
waits for the server waits for 30 seconds."""

IDS = list(range(1, 9))

posix = pytest.mark.skipif(os.name != "posix", reason="kills and limits as POSIX does")


@dataclass
class Place:
    """A directory on a server, and a line to it that can be broken."""

    line: Line
    server: int
    by_port: Callable[[int], dict[str, Any]]

    def store(self, **options: Any) -> PrefixStore:
        """A store whose files are at the other end of the line."""
        return PrefixStore(ROOM, **self.by_port(self.line.port), **options)

    def direct(self) -> PrefixStore:
        """A store on another machine, whose line is in order."""
        return PrefixStore(ROOM, **self.by_port(self.server))


@pytest.fixture
def redis_port(redis_url: str) -> int:
    return int(redis_url.rpartition(":")[2].partition("/")[0])


@pytest.fixture(params=["redis", "s3"])
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    name = f"{request.param}-{abs(hash(request.node.name))}"
    server = request.getfixturevalue(f"{request.param}_port")
    with line_to(server) as line:
        if request.param == "redis":
            yield Place(line, server, lambda port: {"directory": f"redis://127.0.0.1:{port}/0?prefix={name}"})
        else:
            # s3fs would try five times, and wait longer from time to time.
            monkeypatch.setattr("s3fs.S3FileSystem.retries", 1)
            url = f"s3://{s3_server.BUCKET}/{name}"
            yield Place(line, server, lambda port: {"directory": url, "storage_options": s3_server.options(port)})


# Lines that break


@pytest.mark.parametrize("after", [0, 100, 2 * PART + 5])
def test_a_line_that_breaks_while_a_file_is_read(after: int, place: Place) -> None:
    put(place.direct(), IDS, large(IDS))
    put(place.direct(), [1, 2, 50])
    store = place.store()
    place.line.break_after(after, "client")
    assert covered(store, IDS) <= 8
    assert place.line.broken
    place.line.mend()
    assert (covered(store, IDS), covered(store, [1, 2, 50])) == (8, 3)
    # A line that breaks is no damage.
    assert (store.statistics.damaged, len(store)) == (0, 2)


@pytest.mark.parametrize("after", [pytest.param(0, marks=pytest.mark.nightly), 100, 2 * PART + 5])
def test_a_line_that_breaks_while_a_file_is_written(after: int, place: Place) -> None:
    store = place.store()
    put(store, [1, 2, 50])
    store.insert(torch.tensor(IDS), large(IDS), model="m")
    place.line.break_after(after, "server")
    store.flush()
    assert place.line.broken
    other = place.direct()
    assert covered(other, [1, 2, 50]) == 3
    # Redis is asked twice for each part, so that all of them may have passed.
    assert (covered(other, IDS), store.statistics.failed_writes) in ((2, 1), (8, 0))
    place.line.mend()
    store.flush()
    other = place.direct()
    assert (covered(other, IDS), covered(other, [1, 2, 50]), other.statistics.damaged) == (8, 3, 0)


# Servers that do not answer


def test_a_server_that_does_not_answer_holds_up_no_reader_for_longer_than_was_said(place: Place) -> None:
    put(place.direct(), IDS)
    store = place.store(read_wait_seconds=WAIT)
    place.line.stalls_after = 0
    start = time.monotonic()
    hit = store.lookup(torch.tensor([*IDS, 99]), model="m")
    assert time.monotonic() - start < WAIT + MARGIN
    assert (hit.covered, store.statistics.failed_reads) == (0, 1)
    assert "could not be reached" in hit.reason
    place.line.mend()
    assert (covered(store, IDS), store.statistics.damaged) == (8, 0)


# Full disks


@contextlib.contextmanager
def full_at_the_write(directory: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No file may have more than a few bytes: the kernel stops writes in the middle."""
    import resource

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextlib.contextmanager
def full_when_it_reaches_the_disk(directory: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As network disks do, which find out late that there is no room."""

    def full(path: str) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(atomic_file, "_to_disk", full)
        yield


@posix
@pytest.mark.parametrize("full", [full_at_the_write, full_when_it_reaches_the_disk])
def test_a_full_disk_keeps_what_it_has_and_takes_more_when_there_is_room(
    full: Any, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = PrefixStore(ROOM, tmp_path)
    put(store, [1, 2, 50])
    store.insert(torch.tensor(IDS), large(IDS), model="m")
    before = sorted(tmp_path.iterdir())
    with full(tmp_path, monkeypatch):
        store.flush()
        assert store.statistics.failed_writes == 1
        # What could not be written is still there, and so is what was written before.
        assert covered(store, IDS) == 8
        assert covered(PrefixStore(ROOM, tmp_path), [1, 2, 50]) == 3
    assert [path for path in sorted(tmp_path.iterdir()) if path.suffix == ".tmp"] == []
    assert set(before) <= set(tmp_path.iterdir())
    store.flush()
    other = PrefixStore(ROOM, tmp_path)
    assert (covered(other, IDS), covered(other, [1, 2, 50]), other.statistics.damaged) == (8, 3, 0)


# Processes that are killed


@pytest.mark.nightly
@posix
def test_processes_that_share_a_directory_and_are_killed_at_any_moment(tmp_path: pathlib.Path) -> None:
    """15 processes write, read and evict in one directory; each of 45 is killed, and what it has flushed is found."""
    directory = tmp_path / "shared"
    acknowledged = [tuple(map(int, line.split())) for line in killed_workers.flushed_by(str(directory)).splitlines()]
    assert len(acknowledged) > 20
    # What killed processes left behind is old an hour later, and so are tokens behind some that are gone.
    ids = list(range(300))
    put(PrefixStore(ROOM, directory), ids)
    (lost,) = [node for node in PrefixStore(ROOM, directory)._writes.directory._tree.nodes.values() if node.end == 256]
    (directory / lost.name).unlink()
    for path in directory.iterdir():
        os.utime(path, (1, 1))
    assert len(report_on(str(directory), lambda *_: None).unreferenced) == 1
    store = PrefixStore(ROOM, directory)
    assert [covered(store, list(ids)) for ids in acknowledged] == [len(ids) for ids in acknowledged]
    assert (store.statistics.damaged, store.statistics.failed_reads) == (0, 0)
    store.refresh()
    assert [path for path in directory.iterdir() if path.suffix == ".tmp"] == []
    held = report_on(str(directory), lambda *_: None)
    assert (held.unreferenced, held.problems) == ((), ())
