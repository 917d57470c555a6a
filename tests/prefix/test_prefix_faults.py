"""What a prefix store does about a place that is slow, fails or comes back: nothing waits that need not, or is lost.

Lines break, servers do not answer, disks are full, and processes are killed. Nothing wrong is ever returned: `covered`
compares states with those that were inserted. Nothing is lost that `flush` has acknowledged.
"""

import contextlib
import functools
import multiprocessing
import os
import pathlib
import random
import signal
import textwrap
import threading
import time
import types
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import fresh_process
import s3_server
from backend_cases import PART, covered, insert, large, put, room_for
from controlled_backend import READS, WRITES, ControlledBackend, use
from kvlayers import CapacityError, DynamicCache, PrefixStore
from kvlayers.errors import CachePathError
from proxy import Line

ROOM = 2**30
BOUND, WAIT = 0.05, 0.3
MARGIN = 20.0
"""Seconds more than the bound that nobody waits, however busy the machine is. Servers are waited for longer."""

IDS = list(range(1, 9))

posix = pytest.mark.skipif(os.name != "posix", reason="forks, kills and limits as POSIX does")


@pytest.fixture
def backend(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> ControlledBackend:
    found = ControlledBackend(tmp_path)
    use(found, monkeypatch)
    return found


@pytest.fixture
def store(backend: ControlledBackend) -> PrefixStore:
    return PrefixStore(ROOM, "elsewhere")


class Gate:
    """Stops calls of a backend until it is opened."""

    def __init__(self, backend: ControlledBackend, names: set[str]) -> None:
        self._names, self._is_open = names, threading.Event()
        self.arrived = threading.Event()
        backend.before = self

    def __call__(self, name: str) -> None:
        if name in self._names:
            self.arrived.set()
            assert self._is_open.wait(60)

    def open(self) -> None:
        self._is_open.set()

    @contextlib.contextmanager
    def holding_up(self, work: Callable[[], Any]) -> Iterator[None]:
        """Do something in a thread, which is held up in the directory until the block ends."""
        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        assert self.arrived.wait(60)
        yield
        self.open()
        thread.join(60)
        assert not thread.is_alive()


@pytest.fixture
def closed_for_writing(backend: ControlledBackend) -> Iterator[Gate]:
    gate = Gate(backend, WRITES)
    yield gate
    gate.open()


def entries(count: int, length: int = 3) -> list[list[int]]:
    return [[first, *range(2, length + 1)] for first in range(1, count + 1)]


# What is under the lock


def test_no_file_is_touched_under_the_lock(backend: ControlledBackend) -> None:
    store = PrefixStore(room_for(3), "elsewhere", directory_max_bytes=10_000)

    def lock_is_free(name: str) -> None:
        assert store._lock.acquire(timeout=60), name
        store._lock.release()

    backend.before = lock_is_free
    for ids in entries(12):
        insert(store, ids)
        covered(store, ids[:2])
    assert store.flush()
    for ids in entries(12):
        covered(store, ids)
    store.refresh()
    store.evict()
    store.clear()
    assert (len(store), store.statistics.failed_writes, store.statistics.dropped_writes) == (0, 0, 0)
    assert {"write", "read_ranges", "files", "delete", "last_uses"} <= set(backend.calls)


def test_lookups_read_at_the_same_time_and_memory_serves_meanwhile(
    store: PrefixStore, backend: ControlledBackend
) -> None:
    for ids in entries(2):
        put(store, ids)
    insert(store, [7, 8, 9])
    meeting, met = threading.Barrier(3, timeout=60), set[int]()

    def meet(name: str) -> None:
        reader = threading.get_ident()
        if name in READS and reader not in met:
            met.add(reader)
            meeting.wait()

    backend.before = meet
    with ThreadPoolExecutor(2) as threads:
        found = threads.map(lambda ids: covered(store, ids), entries(2))
        assert covered(store, [7, 8, 9]) == 3
        # Both are reading now, and neither can go on without the other.
        meeting.wait()
        assert list(found) == [3, 3]


def test_an_entry_is_read_once_for_several_that_ask(store: PrefixStore, backend: ControlledBackend) -> None:
    put(store, [1, 2, 3])
    other = PrefixStore(ROOM, "elsewhere")
    backend.calls.clear()
    assert covered(other, [1, 2, 3]) == 3
    needed = sum(name in READS for name in backend.calls)
    backend.calls.clear()
    gate = Gate(backend, READS)
    with ThreadPoolExecutor(3) as threads:
        found = threads.map(lambda ids: covered(store, ids), [[1, 2, 3]] * 3)
        assert gate.arrived.wait(60)
        gate.open()
        assert list(found) == [3, 3, 3]
    assert sum(name in READS for name in backend.calls) == needed


# What waits to be written


def test_an_insert_waits_no_longer_than_its_bound(closed_for_writing: Gate) -> None:
    store = PrefixStore(room_for(2), "elsewhere", write_wait_seconds=BOUND)
    begun = time.monotonic()
    for ids in entries(6):
        assert insert(store, ids)
        assert store.statistics.bytes <= room_for(2)
        assert covered(store, ids) == 3
    assert time.monotonic() - begun < 6 * BOUND + MARGIN
    # The first is being written, and the last is in memory; those between made room for others.
    assert (store.statistics.dropped_writes, store.statistics.pending_writes) == (4, 1)
    assert [covered(store, ids) for ids in entries(6)] == [3, 0, 0, 0, 0, 3]
    closed_for_writing.open()
    # The dropped ones were dropped before, and are no fault of this flush.
    assert store.flush()
    assert [covered(PrefixStore(ROOM, "elsewhere"), ids) for ids in entries(6)] == [3, 0, 0, 0, 0, 3]
    # It goes on as before.
    insert(store, [9, 9, 9])
    insert(store, [8, 8, 8])
    assert (store.statistics.dropped_writes, covered(store, [9, 9, 9])) == (4, 3)


def test_who_waits_for_a_dropped_entry_goes_on(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    store, flushed = PrefixStore(room_for(1), tmp_path, write_wait_seconds=0.0), list[bool]()
    # As between two jobs of the thread, which finds none of them any more.
    monkeypatch.setattr(store._writes, "_ensure_worker", lambda: None)
    insert(store, [1, 2, 3])
    waiting = threading.Thread(target=lambda: flushed.append(store.flush()), daemon=True)
    waiting.start()
    while not store.statistics.pending_writes:
        time.sleep(0.001)
    assert insert(store, [4, 5, 6])
    waiting.join(20)
    assert (flushed, store.statistics.dropped_writes) == ([False], 1)


def test_where_writing_holds_all_memory_an_insert_is_refused_after_its_bound(closed_for_writing: Gate) -> None:
    store = PrefixStore(room_for(1), "elsewhere", write_wait_seconds=BOUND)
    insert(store, [1, 2, 3])
    begun = time.monotonic()
    with pytest.raises(CapacityError, match=r"more than 0.05 s: insert it later"):
        insert(store, [4, 5, 6])
    assert time.monotonic() - begun < BOUND + MARGIN
    assert (store.statistics.bytes, len(store)) == (room_for(1), 1)
    closed_for_writing.open()
    assert store.flush()
    assert insert(store, [4, 5, 6])
    assert (covered(store, [1, 2, 3]), store.statistics.dropped_writes) == (3, 0)


def test_a_longer_entry_is_written_in_place_of_the_one_that_waits(store: PrefixStore, closed_for_writing: Gate) -> None:
    insert(store, [7, 7, 7])
    with closed_for_writing.holding_up(store.flush):
        insert(store, [1, 2])
        with closed_for_writing.holding_up(store.flush):
            while store.statistics.pending_writes < 2:
                time.sleep(0.001)
            # It replaces one that is to be written, and the other one that is being written.
            insert(store, [1, 2, 3])
            insert(store, [7, 7, 7, 7])
    other = PrefixStore(ROOM, "elsewhere")
    assert (covered(other, [1, 2, 3]), covered(other, [7, 7, 7])) == (3, 3)
    assert store.flush()
    assert len(PrefixStore(ROOM, "elsewhere")) == 2


def test_an_entry_is_written_though_the_job_of_the_one_that_it_replaces_has_not_ended(
    backend: ControlledBackend,
) -> None:
    store, gate = PrefixStore(ROOM, "elsewhere", directory_max_bytes=1), Gate(backend, {"last_uses"})
    insert(store, [1, 2, 3])
    # It is in a file, and what exceeds the bytes of the directory is being looked for.
    with gate.holding_up(store.flush):
        insert(store, [1, 2, 3, 4])
        with store._lock:
            store._writes.write(list(store._index.entries))
    with store._lock:
        assert store._writes.wait(time.monotonic() + MARGIN)
    assert (store.statistics.spilled, store.statistics.pending_writes) == (2, 0)


def test_what_is_cleared_while_it_is_written_is_gone(store: PrefixStore, closed_for_writing: Gate) -> None:
    insert(store, [1, 2, 3])
    with closed_for_writing.holding_up(store.flush), closed_for_writing.holding_up(store.clear):
        while len(store):
            time.sleep(0.001)
    assert len(PrefixStore(ROOM, "elsewhere")) == 0


# A directory that fails


def test_an_entry_that_is_pinned_while_it_waits_to_be_written_stays(closed_for_writing: Gate) -> None:
    store = PrefixStore(room_for(2), "elsewhere", write_wait_seconds=BOUND)
    first, second, third, fourth = entries(4)
    for ids in (first, second):
        insert(store, ids)
    with closed_for_writing.holding_up(store.evict):
        for ids in (first, second):
            store.pin(torch.tensor(ids), model="m")
        for ids in (third, fourth):
            with pytest.raises(CapacityError, match="pinned"):
                insert(store, ids)
    assert (store.statistics.dropped_writes, store.statistics.bytes) == (0, room_for(2))


def test_an_entry_whose_cache_cannot_be_forked_is_not_written_and_leaves(
    store: PrefixStore, backend: ControlledBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    insert(store, [1, 2, 3])
    with monkeypatch.context() as patched:
        patched.setattr(DynamicCache, "fork", None)
        assert not store.flush()
        assert len(store) == 1
        store.evict()
    now = store.statistics
    assert (now.entries, now.bytes, now.failed_writes, now.pending_writes) == (0, 0, 2, 0)


def test_what_a_refresh_finds_while_the_store_is_cleared_is_deleted(
    store: PrefixStore, backend: ControlledBackend
) -> None:
    insert(store, [1, 2, 3])
    store.flush()
    gate = Gate(backend, {"delete"})
    # The files are still there.
    with gate.holding_up(store.clear), gate.holding_up(store.refresh):
        while not len(store):
            time.sleep(0.01)
    assert len(store) == store.refresh() == 0


def test_a_directory_that_stays_away_is_given_up(
    backend: ControlledBackend, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("kvlayers.prefix.write_queue.MOST_TRIES", 3)
    store = PrefixStore(ROOM, "elsewhere")
    for ids in entries(3):
        insert(store, ids)
    backend.fails = True
    backend.calls.clear()
    assert not store.flush()
    assert (store.statistics.failed_writes, store.statistics.pending_writes, len(store)) == (3, 0, 3)
    # After the first entry, one try tells that the directory is still away.
    assert sum(name in WRITES for name in backend.calls) == 3 + 1 + 1
    assert caplog.text.count("was not written to its directory") == 3
    assert [covered(store, ids) for ids in entries(3)] == [3, 3, 3]
    backend.fails = False
    assert store.close()
    assert store.close()
    assert [covered(PrefixStore(ROOM, "elsewhere"), ids) for ids in entries(3)] == [3, 3, 3]


# Ends of a process


def test_nothing_is_left_that_runs(tmp_path: pathlib.Path) -> None:
    store = PrefixStore(ROOM, tmp_path)
    put(store, [1, 2, 3])
    assert covered(store, [1, 2, 3]) == 3
    if store._writes._worker is not None:
        store._writes._worker.join(60)
    names = {thread.name for thread in threading.enumerate()}
    assert not any(name.startswith("kvlayers-prefix-writer") for name in names)


PROGRAM = """
    import os, threading, kvlayers
    from backend_cases import covered, insert
    import kvlayers.prefix.store
    from controlled_backend import ControlledBackend
    backend = ControlledBackend({directory!r})
    kvlayers.prefix.store.backend_for = lambda directory, options: backend
    store = kvlayers.PrefixStore(2**30, "elsewhere")
    insert(store, [1, 2, 3])
    arrived, may_go_on = threading.Event(), threading.Event()

    def wait(name):
        if name in ("write", "writing"):
            arrived.set()
            may_go_on.wait()

    backend.before = wait
    thread = threading.Thread(target=store.flush)
    thread.start()
    arrived.wait()
    # The thread that writes is in the parent alone.
    child = os.fork()
    if not child:
        backend.before = lambda name: None
        insert(store, [4, 5, 6])
        done = store.flush() and covered(store, [1, 2, 3]) == 3
        os._exit(0 if done and store.statistics.pending_writes == 0 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    may_go_on.set()
    thread.join()
    assert store.flush()
    assert store.refresh() == 1
    # Written by nobody but the end of the process.
    insert(store, [7, 8, 9])
"""


@posix
def test_a_forked_process_writes_with_a_thread_of_its_own_and_the_end_of_a_process_writes_all(
    tmp_path: pathlib.Path,
) -> None:
    program = textwrap.dedent(PROGRAM).format(directory=str(tmp_path))
    ran = fresh_process.run(program, with_exit_handlers=True)
    assert ran.returncode == 0, ran.stderr
    store = PrefixStore(ROOM, tmp_path)
    assert [covered(store, ids) for ids in ([1, 2, 3], [4, 5, 6], [7, 8, 9])] == [3, 3, 3]


def test_an_entry_in_a_file_alone_is_not_evicted_again(backend: ControlledBackend) -> None:
    """It was to be replaced by one that found no room, since what was to leave hung."""
    store = PrefixStore(room_for(3) - 1, "elsewhere", write_wait_seconds=BOUND)
    put(store, [1, 2, 3])
    insert(store, [4, 5, 6])
    with Gate(backend, WRITES).holding_up(store.evict):
        insert(store, [7, 8, 9])
        store.pin(torch.tensor([7, 8, 9]), model="m")
        with pytest.raises(CapacityError):
            insert(store, [1, 2, 3, 10])
        store.unpin(torch.tensor([7, 8, 9]), model="m")
        with contextlib.suppress(CapacityError):
            insert(store, [11, 12, 13])
    assert insert(store, [14, 15, 16])
    assert [covered(store, ids) for ids in ([1, 2, 3], [4, 5, 6], [14, 15, 16])] == [3, 3, 3]


# Many at once

SHARED = [7] * 20
"""Tokens that all entries begin with."""


def work(store: PrefixStore, seed: int, steps: int, acknowledge: Callable[[list[int]], object]) -> None:
    """Write, read and evict at random, and acknowledge the tokens of entries that were flushed."""
    generator = random.Random(seed)
    for number in range(steps):
        # Some entries are those of others, which write the same files at the same time.
        ids = [*SHARED, 8 + generator.choice([seed, seed % 3]), number % 9, *range(generator.randrange(5))]
        insert(store, ids)
        assert store.statistics.bytes <= store._index.max_bytes
        if generator.random() < 0.3 and store.flush():
            acknowledge(ids)
        for asked in (ids, [*SHARED, 8 + generator.randrange(seed + 1), number % 9]):
            covered(store, asked)
        if number % 3 == 2:
            store.evict(generator.choice([None, 100, 1000]))
            with contextlib.suppress(CachePathError):
                store.refresh()


def test_threads_with_a_slow_directory_that_fails_now_and_then(backend: ControlledBackend) -> None:
    chances, acknowledged = random.Random(0), list[list[int]]()

    def hesitate(name: str) -> None:
        time.sleep(chances.uniform(0, 0.002))
        backend.fails = chances.random() < 0.1

    backend.before = hesitate
    store = PrefixStore(room_for(12, tokens=30), "elsewhere", write_wait_seconds=60.0)
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda seed: work(store, seed, 25, acknowledged.append), range(4)))
    backend.before, backend.fails = lambda name: None, False
    assert len(acknowledged) >= 4
    other = PrefixStore(ROOM, "elsewhere")
    assert [covered(other, ids) for ids in acknowledged] == [len(ids) for ids in acknowledged]
    assert (other.statistics.damaged, store.statistics.damaged) == (0, 0)


WORKERS, KILLS, SECONDS = 15, 45, 3


def work_apart(directory: pathlib.Path, worker: int, told: pathlib.Path) -> None:
    with told.open("a") as file:
        work(PrefixStore(2**20, directory), worker, 1000, lambda ids: print(*ids, file=file, flush=True))


@pytest.mark.nightly
@posix
def test_processes_that_share_a_directory_and_are_killed_at_any_moment(tmp_path: pathlib.Path) -> None:
    """15 processes write, read and evict in one directory; each of 45 is killed, and what it has flushed is found."""
    directory, told, generator = tmp_path / "shared", tmp_path / "told", random.Random(0)
    # Forks, since starting an interpreter takes far longer than writing a file.
    context, workers = multiprocessing.get_context("fork"), list[Any]()
    for started in range(KILLS + WORKERS):
        workers.append(context.Process(target=work_apart, args=(directory, started, told), daemon=True))
        workers[-1].start()
        if len(workers) == WORKERS:
            time.sleep(generator.uniform(0, 2 * SECONDS / KILLS))
            killed = workers.pop(generator.randrange(WORKERS))
            killed.kill()
            killed.join()
            # It was at work, and had not ended by itself.
            assert killed.exitcode == -signal.SIGKILL
    for worker in workers:
        worker.kill()
        worker.join()
    acknowledged = [tuple(map(int, line.split())) for line in told.read_text().splitlines()]
    assert len(acknowledged) > 20
    store = PrefixStore(ROOM, directory)
    assert [covered(store, list(ids)) for ids in acknowledged] == [len(ids) for ids in acknowledged]
    assert (store.statistics.damaged, store.statistics.failed_reads) == (0, 0)


def test_what_was_inserted_again_stays_in_the_directory(tmp_path: pathlib.Path) -> None:
    first, second, third = ([start, *range(5, 44)] for start in (1, 2, 3))
    with PrefixStore(ROOM, tmp_path / "one") as store:
        insert(store, first)
    (file,) = (tmp_path / "one").iterdir()
    with PrefixStore(ROOM, tmp_path / "all", directory_max_bytes=int(file.stat().st_size * 2.5)) as store:
        for ids in (first, second, first):
            insert(store, ids)
            assert store.flush()
        insert(store, third)
    again = PrefixStore(ROOM, tmp_path / "all")
    assert [covered(again, ids) for ids in (first, second, third)] == [40, 0, 40]


@pytest.fixture
def redis_port(redis_url: str) -> int:
    return int(redis_url.rpartition(":")[2].partition("/")[0])


@pytest.fixture(params=["redis", "s3"])
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A directory on a server: `store()` is at the end of a `line` that can be broken, `direct()` is elsewhere."""
    name, server = f"{request.param}-{abs(hash(request.node.name))}", request.getfixturevalue(f"{request.param}_port")

    def store_at(port: int, **options: Any) -> PrefixStore:
        if request.param == "redis":
            return PrefixStore(ROOM, f"redis://127.0.0.1:{port}/0?prefix={name}", **options)
        # s3fs would try five times, and wait longer from time to time.
        monkeypatch.setattr("s3fs.S3FileSystem.retries", 1)
        return PrefixStore(ROOM, f"s3://{s3_server.BUCKET}/{name}", storage_options=s3_server.options(port), **options)

    with contextlib.closing(Line(server)) as line:
        yield types.SimpleNamespace(
            line=line,
            store=functools.partial(store_at, line.port),
            direct=functools.partial(store_at, server),
        )


# Lines that break


@pytest.mark.parametrize("after", [0, 100, 2 * PART + 5])
def test_a_line_that_breaks_while_a_file_is_written_or_read(after: int, place: Any) -> None:
    store = place.store()
    put(store, [1, 2, 50])
    insert(store, IDS, large(IDS))
    place.line.break_after(after, "server")
    store.flush()
    assert place.line.broken
    other = place.direct()
    # Redis is asked twice for each part, so that all of them may have passed.
    written = covered(other, IDS), store.statistics.failed_writes
    assert (covered(other, [1, 2, 50]), written) in ((3, (2, 1)), (3, (8, 0)))
    place.line.mend()
    store.flush()
    reader, broken = place.store(), place.line.broken
    place.line.break_after(after, "client")
    assert covered(reader, IDS) <= 8
    assert place.line.broken > broken
    place.line.mend()
    assert (covered(reader, IDS), covered(reader, [1, 2, 50])) == (8, 3)
    # A line that breaks is no damage.
    assert (reader.statistics.damaged, len(reader)) == (0, 2)


# Servers that do not answer


def test_a_server_that_does_not_answer_holds_up_no_reader_for_longer_than_was_said(place: Any) -> None:
    put(place.direct(), IDS)
    store = place.store(read_wait_seconds=WAIT)
    insert(store, [1, 2, 50])
    place.line.stalls_after = 0
    start = time.monotonic()
    hit = store.lookup(torch.tensor([*IDS, 99]), model="m")
    assert time.monotonic() - start < WAIT + MARGIN
    # What is in memory serves as far as it can.
    assert (hit.covered, store.statistics.failed_reads) == (2, 1)
    assert hit.reason == "8 tokens are stored, but only 2 of them can be used now; a file could not be reached"
    place.line.mend()
    assert (covered(store, IDS), store.statistics.damaged) == (8, 0)


# Full disks


@posix
def test_a_full_disk_keeps_what_it_has_and_takes_more_when_there_is_room(tmp_path: pathlib.Path) -> None:
    import resource

    store = PrefixStore(ROOM, tmp_path)
    put(store, [1, 2, 50])
    insert(store, IDS, large(IDS))
    files, limits = set(tmp_path.iterdir()), resource.getrlimit(resource.RLIMIT_FSIZE)
    # No file may have more than a few bytes: the kernel stops writes in the middle.
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        store.flush()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert store.statistics.failed_writes == 1
    # What could not be written is still there, and so is what was written before.
    assert (covered(store, IDS), covered(PrefixStore(ROOM, tmp_path), [1, 2, 50])) == (8, 3)
    assert set(tmp_path.iterdir()) == files
    store.flush()
    other = PrefixStore(ROOM, tmp_path)
    assert (covered(other, IDS), covered(other, [1, 2, 50]), other.statistics.damaged) == (8, 3, 0)
