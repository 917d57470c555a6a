"""What a listener is told, what Prometheus reads, and what `explain` says of look-ups that found less."""

import hashlib
import pathlib
import re
import threading
import time
from typing import Any

import pytest
import torch

from kvlayers import PrefixStore
from kvlayers.serving import StoreEvent, key_of, namespace_mark, prometheus_text
from prefix_caches import KINDS, extend

TEXT = list(range(100, 300))


def insert(store: PrefixStore, ids: list[int], **more: Any) -> None:
    cache = KINDS["full"].make()
    extend(KINDS["full"], cache, [], ids)
    store.insert(torch.tensor(ids), cache, **{"model": "m", **more})


def key(ids: list[int]) -> str:
    return hashlib.sha256(b"".join(token.to_bytes(8, "little") for token in ids)).hexdigest()


class Listener:
    """Notes what it is told, and that nobody held a lock meanwhile."""

    def __init__(self) -> None:
        self.told: list[StoreEvent] = []
        self.store: PrefixStore | None = None

    def __call__(self, event: StoreEvent) -> None:
        if self.store is not None:
            # It would wait for ever if its caller held the lock.
            len(self.store)
        self.told.append(event)

    def held(self, where: str) -> dict[str, int]:
        """Keys and tokens of what is there, if every event is believed."""
        there: dict[str, int] = {}
        for event in self.told:
            if event.where == where and event.kind == "stored":
                there[event.key] = event.tokens
            elif event.where == where:
                del there[event.key]
        return there

    def wait_for(self, where: str, texts: list[list[int]]) -> None:
        wanted = {key(ids): len(ids) for ids in texts}
        deadline = time.monotonic() + 20
        while self.held(where) != wanted and time.monotonic() < deadline:
            time.sleep(0.01)
        assert self.held(where) == wanted


def test_what_comes_and_goes_in_memory() -> None:
    listener = Listener()
    listener.store = store = PrefixStore("1MiB", on_event=listener)
    insert(store, TEXT, namespace="tenant 1")
    listener.wait_for("memory", [TEXT])
    (event,) = listener.told
    assert (event.kind, event.tokens, event.where) == ("stored", len(TEXT), "memory")
    assert (event.namespace, event.key) == (namespace_mark("tenant 1"), key(TEXT))
    assert event.key == key_of(torch.tensor(TEXT).numpy())
    assert event.nbytes == store.statistics.bytes
    # A longer one takes its place.
    insert(store, [*TEXT, 1, 2], namespace="tenant 1")
    listener.wait_for("memory", [[*TEXT, 1, 2]])
    store.clear()
    listener.wait_for("memory", [])


def test_a_prefix_that_gets_shorter_is_told_by_its_new_tokens() -> None:
    listener = Listener()
    store = PrefixStore(8 * 300, on_event=listener)
    insert(store, TEXT)
    insert(store, [1, *TEXT])
    left = store.lookup(torch.tensor(TEXT), model="m", leave=0).covered
    assert 0 < left < len(TEXT)
    listener.wait_for("memory", [TEXT[:left], [1, *TEXT]])


def test_what_is_in_files(tmp_path: pathlib.Path) -> None:
    listener = Listener()
    with PrefixStore("1MiB", directory=tmp_path, on_event=listener) as store:
        listener.store = store
        insert(store, TEXT)
        store.evict()
        listener.wait_for("files", [TEXT])
        listener.wait_for("memory", [])
    other = Listener()
    store = PrefixStore("1MiB", directory=tmp_path, on_event=other)
    other.wait_for("files", [TEXT])
    store.clear()
    other.wait_for("files", [])


def test_a_listener_that_fails_breaks_nothing_and_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    called = threading.Semaphore(0)

    def fail(event: StoreEvent) -> None:
        called.release()
        raise ValueError("the router is gone")

    store = PrefixStore("1MiB", on_event=fail)
    for first in range(3):
        insert(store, [first, *TEXT])
        assert called.acquire(timeout=20)
    time.sleep(0.1)
    assert len(store) == 3
    assert caplog.text.count("The listener of a prefix store has failed") == 1


LINE = re.compile(r'[a-z_]+(\{([a-z_]+="([^"\\\n]|\\["\\n])*",?)+\})? \d+')


def test_figures_are_lines_that_prometheus_reads() -> None:
    store = PrefixStore("1MiB")
    insert(store, TEXT)
    store.lookup(torch.tensor(TEXT), model="m")
    store.record_bypass('it is "given"\na \\ cache')
    text = prometheus_text(store.statistics, {"host": 'a"b'})
    assert text.endswith("\n")
    names = []
    for line in text.splitlines():
        if line.startswith("# TYPE"):
            names.append(line.split()[2])
            assert line.split()[3] == ("counter" if names[-1].endswith("_total") else "gauge")
        elif not line.startswith("# HELP"):
            assert LINE.fullmatch(line), line
            assert line.startswith(names[-1] + "{")
    assert len(names) == len(set(names)) == len(vars(store.statistics))
    assert 'kvlayers_prefix_hits_total{host="a\\"b"} 1' in text.splitlines()
    reason = r'reason="it is \"given\"\na \\ cache"'
    assert f'kvlayers_prefix_bypasses_total{{host="a\\"b",{reason}}} 1' in text.splitlines()
    assert "# HELP kvlayers_prefix_hits_total lookups that found a prefix." in text.splitlines()
    assert "kvlayers_prefix_entries 1" in prometheus_text(store.statistics).splitlines()


def test_explain_says_why_a_turn_found_less() -> None:
    store = PrefixStore(8 * 250)
    insert(store, TEXT)
    store.lookup(torch.tensor([*TEXT[:50], 1, 2, 3]), model="m")
    assert "50 of 53 tokens: the stored sequence diverges after 50" in store.explain()
    store.lookup(torch.tensor([*TEXT[:50], 1]), model="m", namespace="tenant 2")
    assert "0 of 51 tokens: nothing is stored for this model and namespace\n    50 of them are stored for another" in (
        store.explain()
    )
    insert(store, list(range(500, 700)))
    store.lookup(torch.tensor([*TEXT, 1]), model="m")
    assert f"    {len(TEXT)} of them were stored, and have left for room" in store.explain()
    # Whoever asks is told nothing of other namespaces.
    assert "another" not in store.lookup(torch.tensor(TEXT[:60]), model="m", namespace="tenant 2").reason


def test_explain_keeps_the_newest_look_ups_alone() -> None:
    store = PrefixStore("1MiB")
    for length in range(1, 200):
        store.lookup(torch.arange(length), model="m")
    lines = store.explain().splitlines()
    assert 10 < len(lines) < 40
    assert lines[-1].startswith("0 of 199 tokens")
