"""Sessions: what one conversation holds, for how long, and on another host; what pins with a time and a rank do; what
clients of `transformers serve` say of their conversations; and what listeners and Prometheus are told of a store."""

import asyncio
import contextvars
import gc
import hashlib
import logging
import os
import pathlib
import re
import threading
import time
import weakref
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import families
import kvlayers
from kvlayers import OptionError, PrefixStore
from kvlayers.errors import CacheFileError, CachePathError, CapacityError, PrefixError
from kvlayers.generation.patching import around
from kvlayers.generation.served import _in_session
from kvlayers.serving import StoreEvent, key_of, namespace_mark, prometheus_text
from prefix_caches import KINDS, check, extend

DOCUMENT = list(range(100, 400))


def filled(ids: list[int], kind: str = "full") -> Any:
    cache = KINDS[kind].make()
    extend(KINDS[kind], cache, [], ids)
    return cache


def insert(store: PrefixStore, *texts: list[int], kind: str = "full", **more: Any) -> None:
    for ids in texts:
        store.insert(torch.tensor(ids), filled(ids, kind), model="m", **more)


def found(store: PrefixStore, ids: list[int], **more: Any) -> int:
    return store.lookup(torch.tensor(ids), **{"model": "m", "leave": 0, **more}).covered


def exported(path: pathlib.Path, *texts: list[int], kind: str = "full", namespace: str = "") -> int:
    """Write the session of a store that holds these texts."""
    store = PrefixStore(2**30)
    with store.session("a", namespace=namespace) as session:
        insert(store, *texts, kind=kind, namespace=namespace)
    return session.export(path)


@pytest.fixture
def store() -> PrefixStore:
    return PrefixStore("1MiB")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A clock that stands still until a test adds seconds."""

    class Clock:
        now = 1000.0

    monkeypatch.setattr(time, "monotonic", lambda: Clock.now)
    return Clock


def room_for(*texts: list[int]) -> int:
    """Bytes of texts that have nothing in common: a key and a value of four bytes in one layer."""
    return 8 * sum(map(len, texts))


ONE, OTHER, THIRD, FOURTH = ([first, *range(50, 200)] for first in range(4))


def test_a_pin_ends_after_its_time(clock: Any) -> None:
    store = PrefixStore(room_for(ONE, OTHER))
    insert(store, ONE)
    store.pin(torch.tensor(ONE), model="m", ttl=10)
    clock.now += 9
    insert(store, OTHER, THIRD)
    assert (found(store, ONE), found(store, THIRD)) == (len(ONE), len(THIRD))
    clock.now += 2
    with pytest.raises(PrefixError, match="not pinned"):
        store.unpin(torch.tensor(ONE), model="m")
    insert(store, OTHER, FOURTH)
    assert found(store, ONE) < len(ONE)


def test_what_has_less_priority_leaves_first() -> None:
    store = PrefixStore(room_for(ONE, OTHER, THIRD))
    insert(store, OTHER, ONE, THIRD)
    for ids, priority in ((ONE, 2), (THIRD, -1)):
        store.pin(torch.tensor(ids), model="m", priority=priority)
    # Below zero before what is not pinned, whatever was used longest ago.
    insert(store, FOURTH)
    assert [found(store, ids) == len(ids) for ids in (ONE, OTHER, THIRD)] == [True, True, False]
    for ids, priority in ((OTHER, 1), (FOURTH, 3)):
        store.pin(torch.tensor(ids), model="m", priority=priority)
    insert(store, list(range(1000, 1150)))
    assert [found(store, ids) == len(ids) for ids in (ONE, OTHER, FOURTH)] == [True, False, True]


@pytest.mark.parametrize(
    "options", [{"ttl": 0}, {"ttl": -1.0}, {"ttl": float("inf")}, {"ttl": "1"}, {"priority": float("nan")}], ids=str
)
def test_a_pin_of_no_time_or_rank_is_refused(store: PrefixStore, options: dict[str, Any]) -> None:
    insert(store, ONE)
    with pytest.raises(OptionError, match=next(iter(options))):
        store.pin(torch.tensor(ONE), model="m", **options)
    with pytest.raises(OptionError, match=next(iter(options))):
        store.session("a").pin(**options)


@pytest.mark.parametrize("name", ["user-17", "../user-17", "/etc/passwd", "a\0b", "..", " ", "ü" * 1000])
def test_a_name_is_a_name_and_no_path(store: PrefixStore, name: str, tmp_path: pathlib.Path) -> None:
    with store.session(name):
        insert(store, ONE)
    assert store.session(name).tokens == len(ONE)
    store.session(name).export(tmp_path / "file")
    assert os.listdir(tmp_path) == ["file"]
    other = PrefixStore("1MiB")
    assert other.import_session(tmp_path / "file").name == name
    assert other.session(name).tokens == len(ONE)


def test_a_session_counts_what_it_shares_once_and_only_its_own_tokens(store: PrefixStore) -> None:
    with store.session("a") as session:
        insert(store, [*DOCUMENT, 1, 2], [*DOCUMENT, 3])
        # Others' insertions, those of other namespaces and of other stores, are not its own.
        insert(PrefixStore("1MiB"), FOURTH)
    insert(store, [*DOCUMENT, 3, 4, 5, 6])
    assert session.tokens == len(DOCUMENT) + 3
    assert 0 < session.bytes <= store.statistics.bytes
    assert store.session("a", namespace="b").tokens == 0
    store.clear()
    assert (session.tokens, session.bytes) == (0, 0)


def test_an_expired_session_names_nothing(store: PrefixStore, clock: Any, tmp_path: pathlib.Path) -> None:
    with store.session("a", ttl=5) as session:
        insert(store, ONE)
    clock.now += 4
    assert (store.session("a", ttl=5) is session, session.seconds_left) == (True, 1.0)
    clock.now += 2
    assert (session.tokens, session.seconds_left) == (0, 0)
    with pytest.raises(PrefixError, match="expired"):
        session.export(tmp_path / "file")
    assert os.listdir(tmp_path) == []
    assert store.session("a") is not session
    # The states are in the store as before.
    assert found(store, ONE) == len(ONE)


def test_a_session_does_not_expire_while_a_turn_takes_its_time(store: PrefixStore, clock: Any) -> None:
    with store.session("a", ttl=5) as session:
        insert(store, ONE)
        clock.now += 9
        insert(store, OTHER)
    clock.now += 4
    with store.session("a", ttl=5):
        clock.now += 4
        assert session.tokens == len(ONE) + len(OTHER)
    clock.now += 2
    with session:
        insert(store, THIRD)
    # What has expired names nothing of before.
    assert session.tokens == len(THIRD)


def test_turns_of_one_session_overlap(store: PrefixStore) -> None:
    """In threads and in tasks, each of which leaves its block while others are in theirs."""
    texts, meeting = (ONE, OTHER, THIRD), threading.Barrier(3, timeout=20)

    def turn(ids: list[int]) -> None:
        with store.session("a"):
            meeting.wait()
            with store.session("b"):
                insert(store, FOURTH)
            insert(store, ids)

    with ThreadPoolExecutor(3) as threads:
        list(threads.map(turn, texts))
    assert [store.session(name).tokens for name in "ab"] == [sum(map(len, texts)), len(FOURTH)]

    async def task(number: int) -> None:
        with store.session("c"):
            await asyncio.sleep(0.01 * (3 - number))
            insert(store, texts[number])

    async def all_tasks() -> None:
        await asyncio.gather(*map(task, range(3)))

    asyncio.run(all_tasks())
    assert store.session("c").tokens == sum(map(len, texts))
    insert(store, [*FOURTH, 1])
    assert [store.session(name).tokens for name in "abc"] == [sum(map(len, texts)), len(FOURTH), sum(map(len, texts))]


def test_whoever_pins_a_session_last_holds_its_only_pin(store: PrefixStore, monkeypatch: pytest.MonkeyPatch) -> None:
    with store.session("a") as session:
        insert(store, ONE)
    unpin, meeting = kvlayers.serving.Session.unpin, threading.Barrier(2, timeout=20)

    def met(own: Any) -> None:
        unpin(own)
        meeting.wait()

    monkeypatch.setattr(kvlayers.serving.Session, "unpin", met)
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(lambda _: session.pin(), range(2)))
    monkeypatch.undo()
    session.unpin()
    store.evict()
    assert len(store) == 0


def test_a_session_of_several_namespaces_is_exported_to_no_file(store: PrefixStore, tmp_path: pathlib.Path) -> None:
    with store.session("a") as session:
        for namespace in ("tenant 1", "tenant 2"):
            insert(store, ONE, namespace=namespace)
    with pytest.raises(PrefixError, match="several"):
        session.export(tmp_path / "file")
    assert os.listdir(tmp_path) == []


def test_a_name_that_no_file_could_have_is_refused(store: PrefixStore, tmp_path: pathlib.Path) -> None:
    with store.session("x" * 65_533) as session:
        insert(store, ONE)
    session.export(tmp_path / "file")
    assert store.import_session(tmp_path / "file").name == session.name
    with pytest.raises(OptionError, match="`name` must be a text of at most 65535 bytes"):
        store.session("x" * 65_534)


def test_a_pinned_session_stays_as_it_grows_and_leaves_when_its_time_is_over(clock: Any) -> None:
    store = PrefixStore(room_for(DOCUMENT) * 2)
    with store.session("a", ttl=1) as session:
        insert(store, DOCUMENT[:100])
        session.pin(ttl=60)
        insert(store, DOCUMENT[:200], DOCUMENT)
    # One entry, as without a pin.
    assert len(store) == 1
    for seconds, tokens in ((30, 300), (31, 0)):
        clock.now += seconds
        insert(store, *([first, *range(500, 700)] for first in range(20)))
        assert session.tokens == tokens
    assert found(store, DOCUMENT) == 0


def test_unpinning_a_session_leaves_other_pins(store: PrefixStore) -> None:
    with store.session("a") as session:
        insert(store, ONE, OTHER)
    session.pin()
    store.pin(torch.tensor(ONE), model="m")
    session.unpin()
    store.evict()
    assert (found(store, ONE), found(store, OTHER)) == (len(ONE), 0)


@pytest.mark.parametrize("kind", KINDS)
def test_an_exported_session_goes_on_elsewhere(store: PrefixStore, kind: str, tmp_path: pathlib.Path) -> None:
    texts = [DOCUMENT[:length] for length in (30, 60, 90)]
    tokens = exported(tmp_path / "file", *texts, kind=kind)
    imported = store.import_session(tmp_path / "file", "b")
    assert (tokens, imported.name, imported.tokens) == (90, "b", 90)
    for ids in texts:
        hit = store.lookup(torch.tensor([*ids, 7]), model="m")
        assert hit.covered == len(ids)
        check(KINDS[kind], hit.cache, ids)
        check(KINDS[kind], hit.cache, extend(KINDS[kind], hit.cache, ids, [5, 6, 7]))
    assert found(store, ids, model="n") == found(store, ids, namespace="b") == 0


@pytest.mark.parametrize("family", ["gemma3", "lfm2", "mamba2"])
def test_a_session_of_a_model_whose_states_cannot_go_back(family: str, tmp_path: pathlib.Path) -> None:
    model, (store, other) = families.model_of(family), [PrefixStore(2**30) for _ in range(2)]
    asked = {"max_new_tokens": 4, "do_sample": False, "return_dict_in_generate": True}
    with store.session("a") as session:
        first = kvlayers.generate(model, PROMPT, prefix_store=store, **asked)
    session.export(tmp_path / "file")
    other.import_session(tmp_path / "file")
    turn = torch.cat([first.sequences, torch.tensor([[5, 6]])], dim=1)
    again = kvlayers.generate(model, turn, prefix_store=other, **asked)
    assert again.cached_tokens[0] >= PROMPT.shape[1] - 1
    assert torch.equal(again.sequences, model.generate(turn, **asked).sequences)


def test_a_session_of_another_namespace_is_refused(store: PrefixStore, tmp_path: pathlib.Path) -> None:
    exported(tmp_path / "file", ONE, namespace="tenant 1")
    for namespace in ("", "tenant 2"):
        with pytest.raises(PrefixError, match="namespace"):
            store.import_session(tmp_path / "file", namespace=namespace)
    assert len(store) == 0
    store.import_session(tmp_path / "file", namespace="tenant 1")
    assert (found(store, ONE, namespace="tenant 1"), found(store, ONE)) == (len(ONE), 0)


Spoil = Callable[[pathlib.Path], object]


def changed(change: Callable[[bytes], bytes]) -> Spoil:
    return lambda path: path.write_bytes(change(path.read_bytes()))


def with_part(name: str, content: bytes) -> Spoil:
    def add(path: pathlib.Path) -> None:
        with zipfile.ZipFile(path, "a", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr(name, content)

    return add


def without_name(path: pathlib.Path) -> None:
    with zipfile.ZipFile(path, "a") as archive:
        archive.comment = b"\xff"


def with_a_changed_byte(content: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]


SPOILT: dict[str, tuple[Spoil, str]] = {
    "empty": (changed(lambda content: b""), "holds no session"),
    "no zip": (changed(lambda content: b"a" * 1000), "holds no session"),
    "cut": (changed(lambda content: content[: len(content) // 2]), "holds no session"),
    "a changed byte": (changed(with_a_changed_byte), "file"),
    "a path": (with_part("../escaped.safetensors", b"1"), "has a part '../escaped"),
    "a bomb": (with_part("0" * 64 + ".safetensors", bytes(2**24)), "more bytes than the file"),
    "no name": (without_name, "holds no session"),
    "another part": (with_part("0" * 64 + ".safetensors", b"no node"), "damaged"),
}
"""What is wrong, and what is said of it."""


@pytest.mark.parametrize("how", SPOILT)
def test_a_spoilt_file_is_refused_and_changes_nothing(store: PrefixStore, how: str, tmp_path: pathlib.Path) -> None:
    spoil, words = SPOILT[how]
    exported(tmp_path / "file", DOCUMENT)
    spoil(tmp_path / "file")
    with pytest.raises(CacheFileError, match=words):
        store.import_session(tmp_path / "file")
    assert (len(store), os.listdir(tmp_path)) == (0, ["file"])


def test_a_file_that_is_not_there_is_named(store: PrefixStore, tmp_path: pathlib.Path) -> None:
    with pytest.raises(CachePathError):
        store.import_session(tmp_path / "missing")
    with pytest.raises(CachePathError):
        exported(tmp_path / "missing" / "file", ONE)
    exported(tmp_path / "file", ONE)
    with pytest.raises(CapacityError):
        PrefixStore(100).import_session(tmp_path / "file")


def test_what_is_in_a_directory_alone_is_exported_too(store: PrefixStore, tmp_path: pathlib.Path) -> None:
    with PrefixStore("1MiB", directory=tmp_path / "store") as first:
        with first.session("a") as session:
            insert(first, DOCUMENT)
        first.evict()
        assert (first.statistics.bytes, session.tokens) == (0, len(DOCUMENT))
        assert session.export(tmp_path / "file") == len(DOCUMENT)
    store.import_session(tmp_path / "file")
    check(KINDS["full"], store.lookup(torch.tensor(DOCUMENT), model="m", leave=0).cache, DOCUMENT)


def test_a_store_that_has_sessions_is_freed_with_the_last_reference() -> None:
    store = PrefixStore("1MiB")
    with store.session("a"):
        insert(store, ONE)
    held = weakref.ref(next(iter(store._index.entries)).cache)
    assert held() is not None
    del store
    gc.collect()
    assert held() is None


# Clients of `transformers serve`

PROMPT = torch.arange(3, 60)[None]


class Handler:
    """As the server's: it refuses fields that it does not know, before anybody else looks at them."""

    def validate(self, body: dict[str, Any]) -> None:
        if "unknown" in body:
            raise ValueError("422")


Handler.validate = around(_in_session)(Handler.validate)  # type: ignore[method-assign]


def answered(store: PrefixStore, body: dict[str, Any], namespace: str = "") -> None:
    """Serve a request in a context of its own, whose copy a thread would have."""
    model = families.model_of("llama")

    def serve() -> None:
        with kvlayers.installed(prefix_store=store, namespace=namespace):
            Handler().validate(body)
            contextvars.copy_context().run(model.generate, PROMPT, max_new_tokens=2, do_sample=False)

    contextvars.copy_context().run(serve)


def test_a_request_belongs_to_the_session_that_it_names(store: PrefixStore) -> None:
    answered(store, {"prompt_cache_key": "user-17"}, "tenant 1")
    answered(store, {"messages": []}, "tenant 2")
    assert store.session("user-17", "tenant 1").tokens == PROMPT.shape[1] + 1
    assert store.session("user-17").tokens == store.session("user-18", "tenant 1").tokens == 0


def test_a_client_keeps_its_session_for_a_time_but_no_one_else_out(store: PrefixStore) -> None:
    answered(store, {"prompt_cache_key": "a", "metadata": {"cache_ttl": "600", "cache_priority": "2"}})
    assert store.session("a", ttl=1).seconds_left > 500
    answered(store, {})
    (entry,) = store._index.entries
    assert [pin.priority for pin in entry.pins] == [2.0]


@pytest.mark.parametrize(
    "body",
    [
        {"prompt_cache_key": ""},
        {"prompt_cache_key": 3},
        {"prompt_cache_key": None, "metadata": None},
        {"prompt_cache_key": "a", "metadata": []},
        {"prompt_cache_key": "a", "metadata": {"cache_ttl": "soon"}},
        {"prompt_cache_key": "a", "metadata": {"cache_ttl": "-1"}},
        {"prompt_cache_key": "a", "metadata": {"cache_ttl": "1", "cache_priority": "inf"}},
        {"prompt_cache_key": "a", "metadata": {"cache_ttl": None}},
        {"prompt_cache_key": "a", "metadata": {"cache_ttl": 10**400}},
        {"prompt_cache_key": "a" * 10**5, "metadata": {"cache_ttl": "1"}},
    ],
    ids=lambda body: str(body)[:80],
)
def test_whatever_a_client_writes_is_answered(
    store: PrefixStore, body: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        answered(store, body)
    (entry,) = store._index.entries
    assert entry.pins == ()
    is_told = isinstance(body.get("metadata"), dict)
    assert ("does not keep its session" in caplog.text) is is_told


def test_a_request_that_the_server_refuses_is_in_no_session(store: PrefixStore) -> None:
    with pytest.raises(ValueError, match="422"):
        answered(store, {"unknown": 1, "prompt_cache_key": "a"})
    assert store.session("a").tokens == 0


# What a listener is told, what Prometheus reads, and what `explain` says of look-ups that found less

TEXT = list(range(100, 300))


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
    facts = "stored", key(TEXT), len(TEXT), store.statistics.bytes, namespace_mark("tenant 1"), "memory"
    assert event == StoreEvent(*facts, event.model)
    assert event.key == key_of(torch.tensor(TEXT).numpy())
    # A longer one takes its place.
    insert(store, [*TEXT, 1, 2], namespace="tenant 1")
    listener.wait_for("memory", [[*TEXT, 1, 2]])
    store.clear()
    listener.wait_for("memory", [])


def test_a_prefix_that_gets_shorter_is_told_by_its_new_tokens() -> None:
    listener = Listener()
    store = PrefixStore(8 * 300, on_event=listener)
    insert(store, TEXT, [1, *TEXT])
    left = found(store, TEXT)
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
    figures = [line for line in text.splitlines() if not line.startswith("#")]
    assert [line for line in figures if not LINE.fullmatch(line)] == []
    kinds = [tuple(line.split()[2:]) for line in text.splitlines() if line.startswith("# TYPE")]
    assert kinds == [(name, "counter" if name.endswith("_total") else "gauge") for name, _ in kinds]
    # The figures of a name follow each other, in the order of their kinds.
    assert list(dict.fromkeys(line.partition("{")[0] for line in figures)) == [name for name, _ in kinds]
    assert len(dict(kinds)) == len(kinds) == len(vars(store.statistics))
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
