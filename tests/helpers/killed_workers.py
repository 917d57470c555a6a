"""Processes that work in one directory and are killed at random moments.

They are forks of this process, since starting an interpreter takes far longer than writing a file.
"""

import os
import random
import selectors
import signal
import time
import traceback

import torch

import kvlayers
from backend_cases import covered, filled

WORKERS, KILLS, SECONDS = 15, 45, 3
ROOM = 2**20
DOCUMENT = [7] * 20
"""Tokens that all entries begin with."""


def work(directory: str, worker: int, acknowledge: int) -> None:
    generator = random.Random(worker)
    store = kvlayers.PrefixStore(ROOM, directory)
    for number in range(1000):
        # Some entries are those of other workers, which write the same files at the same time.
        ids = [*DOCUMENT, 8 + generator.choice([worker, worker % 3]), number % 9, *range(generator.randrange(5))]
        store.insert(torch.tensor(ids), filled(ids), model="m")
        if store.flush():
            os.write(acknowledge, (" ".join(map(str, ids)) + "\n").encode())
        if number % 3 == 2:
            store.evict()
            store.refresh()
        for asked in (ids, [*DOCUMENT, 8 + generator.randrange(worker + 1), number % 9]):
            assert covered(store, asked) <= len(asked)
        assert store.statistics.damaged == 0, store.statistics


def flushed_by(directory: str) -> str:
    """Start workers and kill them; a line for each entry that a worker has flushed, with its tokens."""
    generator, said = random.Random(0), list[str]()
    selector = selectors.DefaultSelector()
    running: list[tuple[int, int]] = []
    started = killed = 0
    until = time.monotonic() + SECONDS
    try:
        while killed < KILLS and time.monotonic() < until:
            while len(running) < WORKERS:
                running.append(start(directory, started))
                selector.register(running[-1][1], selectors.EVENT_READ)
                started += 1
            time.sleep(generator.uniform(0, 2 * SECONDS / KILLS))
            for key, _ in selector.select(0):
                said.append(os.read(key.fd, 2**16).decode())
            child, heard = running.pop(generator.randrange(len(running)))
            selector.unregister(heard)
            said.append(end(child, heard))
            killed += 1
    finally:
        for child, _ in running:
            os.kill(child, signal.SIGKILL)
    said += [end(child, heard) for child, heard in running]
    return "".join(said)


def start(directory: str, number: int) -> tuple[int, int]:
    """A worker, and where it says what it has flushed."""
    heard, acknowledge = os.pipe()
    child = os.fork()
    if child:
        os.close(acknowledge)
        return child, heard
    try:
        work(directory, number, acknowledge)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def end(child: int, heard: int) -> str:
    """Kill a worker, which must be at work, and return what it has said."""
    os.kill(child, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    said = b""
    while piece := os.read(heard, 2**16):
        said += piece
    os.close(heard)
    if status != -signal.SIGKILL:
        raise ChildProcessError(f"a worker ended by itself, with {status}")
    return said.decode()
