"""Sessions: what one conversation holds, for how long, and on another host; and what pins with a time and a rank do."""

import gc
import os
import pathlib
import time
import weakref
import zipfile
from typing import Any

import pytest
import torch

import families
import kvlayers
from kvlayers import OptionError, PrefixStore
from kvlayers.errors import CacheFileError, CachePathError, CapacityError, PrefixError
from models import fresh_model
from prefix_caches import KINDS, check, extend

FULL = KINDS["full"]
DOCUMENT = list(range(100, 400))


def filled(ids: list[int], kind: str = "full") -> Any:
    cache = KINDS[kind].make()
    extend(KINDS[kind], cache, [], ids)
    return cache


def insert(store: PrefixStore, ids: list[int], **more: Any) -> bool:
    return store.insert(torch.tensor(ids), filled(ids), model="m", **more)


def found(store: PrefixStore, ids: list[int], **more: Any) -> int:
    return store.lookup(torch.tensor(ids), **{"model": "m", "leave": 0, **more}).covered


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
    for ids in (OTHER, THIRD):
        insert(store, ids)
    assert (found(store, ONE), found(store, THIRD)) == (len(ONE), len(THIRD))
    clock.now += 2
    with pytest.raises(PrefixError, match="not pinned"):
        store.unpin(torch.tensor(ONE), model="m")
    for ids in (OTHER, FOURTH):
        insert(store, ids)
    assert found(store, ONE) < len(ONE)


def test_clocks_that_go_back_change_no_pin(monkeypatch: pytest.MonkeyPatch) -> None:
    store = PrefixStore(room_for(ONE))
    insert(store, ONE)
    store.pin(torch.tensor(ONE), model="m", ttl=0.05)
    monkeypatch.setattr(time, "time", lambda: 0.0)
    monkeypatch.setattr(time, "time_ns", lambda: 0)
    time.sleep(0.06)
    insert(store, OTHER)
    assert found(store, OTHER) == len(OTHER)


def test_what_has_less_priority_leaves_first() -> None:
    store = PrefixStore(room_for(ONE, OTHER, THIRD))
    insert(store, OTHER)
    for ids, priority in ((ONE, 2), (THIRD, -1)):
        insert(store, ids)
        store.pin(torch.tensor(ids), model="m", priority=priority)
    # Below zero before what is not pinned, whatever was used longest ago.
    insert(store, FOURTH)
    assert [found(store, ids) == len(ids) for ids in (ONE, OTHER, THIRD)] == [True, True, False]
    for ids, priority in ((OTHER, 1), (FOURTH, 3)):
        store.pin(torch.tensor(ids), model="m", priority=priority)
    insert(store, list(range(1000, 1150)))
    assert [found(store, ids) == len(ids) for ids in (ONE, OTHER, FOURTH)] == [True, False, True]


def test_without_a_priority_nothing_may_take_the_room() -> None:
    store = PrefixStore(room_for(ONE))
    insert(store, ONE)
    store.pin(torch.tensor(ONE), model="m", priority=100)
    insert(store, OTHER)
    store.pin(torch.tensor(OTHER), model="m", ttl=1000)
    with pytest.raises(CapacityError, match="pinned"):
        insert(store, THIRD)


@pytest.mark.parametrize(
    "options", [{"ttl": 0}, {"ttl": -1.0}, {"ttl": float("inf")}, {"ttl": "1"}, {"priority": float("nan")}], ids=str
)
def test_a_pin_of_no_time_or_rank_is_refused(options: dict[str, Any]) -> None:
    store = PrefixStore("1MiB")
    insert(store, ONE)
    with pytest.raises(OptionError, match=next(iter(options))):
        store.pin(torch.tensor(ONE), model="m", **options)
    with pytest.raises(OptionError, match=next(iter(options))):
        store.session("a").pin(**options)


@pytest.mark.parametrize("name", ["user-17", "../user-17", "/etc/passwd", "a\0b", "..", " ", "ü" * 1000])
def test_a_name_is_a_name_and_no_path(name: str, tmp_path: pathlib.Path) -> None:
    store = PrefixStore("1MiB")
    with store.session(name):
        insert(store, ONE)
    assert store.session(name).tokens == len(ONE)
    store.session(name).export(tmp_path / "file")
    assert os.listdir(tmp_path) == ["file"]
    other = PrefixStore("1MiB")
    assert other.import_session(tmp_path / "file").name == name
    assert other.session(name).tokens == len(ONE)


def test_a_session_counts_what_it_shares_once_and_only_its_own_tokens() -> None:
    store = PrefixStore("1MiB")
    with store.session("a") as session:
        insert(store, [*DOCUMENT, 1, 2])
        insert(store, [*DOCUMENT, 3])
    insert(store, [*DOCUMENT, 3, 4, 5, 6])
    assert session.tokens == len(DOCUMENT) + 3
    assert 0 < session.bytes <= store.statistics.bytes
    # Others' insertions, those of other namespaces and of other stores, are not its own.
    with session:
        insert(PrefixStore("1MiB"), FOURTH)
    assert session.tokens == len(DOCUMENT) + 3
    assert store.session("a", namespace="b").tokens == 0
    store.clear()
    assert (session.tokens, session.bytes) == (0, 0)


def test_an_expired_session_names_nothing(clock: Any, tmp_path: pathlib.Path) -> None:
    store = PrefixStore("1MiB")
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


def test_a_pinned_session_stays_as_it_grows_and_leaves_when_its_time_is_over(clock: Any) -> None:
    store = PrefixStore(room_for(DOCUMENT) * 2)
    with store.session("a", ttl=1) as session:
        insert(store, DOCUMENT[:100])
        session.pin(ttl=60)
        insert(store, DOCUMENT[:200])
        insert(store, DOCUMENT)
    # One entry, as without a pin.
    assert len(store) == 1
    clock.now += 30
    for first in range(20):
        insert(store, [first, *range(500, 700)])
    assert session.tokens == len(DOCUMENT)
    clock.now += 31
    for first in range(20):
        insert(store, [first, *range(500, 700)])
    assert (session.tokens, found(store, DOCUMENT)) == (0, 0)


def test_unpinning_a_session_leaves_other_pins() -> None:
    store = PrefixStore("1MiB")
    with store.session("a") as session:
        insert(store, ONE)
        insert(store, OTHER)
    session.pin()
    store.pin(torch.tensor(ONE), model="m")
    session.unpin()
    store.evict()
    assert (found(store, ONE), found(store, OTHER)) == (len(ONE), 0)


@pytest.mark.parametrize("kind", KINDS)
def test_an_exported_session_goes_on_elsewhere(kind: str, tmp_path: pathlib.Path) -> None:
    store, ids = PrefixStore(2**30), DOCUMENT[:90]
    with store.session("a") as session:
        for length in (30, 60, 90):
            store.insert(torch.tensor(ids[:length]), filled(ids[:length], kind), model="m")
    tokens = session.export(tmp_path / "file")
    other = PrefixStore(2**30)
    imported = other.import_session(tmp_path / "file", "b")
    assert (tokens, imported.name, imported.tokens) == (90, "b", 90)
    for length in (30, 60, 90):
        hit = other.lookup(torch.tensor([*ids[:length], 7]), model="m")
        assert hit.covered == length
        check(KINDS[kind], hit.cache, ids[:length])
        check(KINDS[kind], hit.cache, extend(KINDS[kind], hit.cache, ids[:length], [5, 6, 7]))
    assert found(other, ids, model="n") == found(other, ids, namespace="b") == 0


@pytest.mark.parametrize("family", ["gemma3", "lfm2", "mamba2"])
def test_a_session_of_a_model_whose_states_cannot_go_back(family: str, tmp_path: pathlib.Path) -> None:
    model = families.model_and_inputs(family)[0] if family in families.FAMILIES else fresh_model(family)
    store, prompt = PrefixStore(2**30), torch.arange(3, 60)[None]
    asked = {"max_new_tokens": 4, "do_sample": False, "return_dict_in_generate": True}
    with store.session("a") as session:
        first = kvlayers.generate(model, prompt, prefix_store=store, **asked)
    session.export(tmp_path / "file")
    other = PrefixStore(2**30)
    other.import_session(tmp_path / "file")
    turn = torch.cat([first.sequences, torch.tensor([[5, 6]])], dim=1)
    again = kvlayers.generate(model, turn, prefix_store=other, **asked)
    plain = model.generate(turn, **asked)
    assert again.cached_tokens[0] >= prompt.shape[1] - 1
    assert again.sequences.tolist() == plain.sequences.tolist()


def test_a_session_of_another_namespace_is_refused(tmp_path: pathlib.Path) -> None:
    store = PrefixStore("1MiB")
    with store.session("a", namespace="tenant 1") as session:
        insert(store, ONE, namespace="tenant 1")
    session.export(tmp_path / "file")
    other = PrefixStore("1MiB")
    for namespace in ("", "tenant 2"):
        with pytest.raises(PrefixError, match="namespace"):
            other.import_session(tmp_path / "file", namespace=namespace)
    assert len(other) == 0
    other.import_session(tmp_path / "file", namespace="tenant 1")
    assert (found(other, ONE, namespace="tenant 1"), found(other, ONE)) == (len(ONE), 0)


def spoilt(path: pathlib.Path, how: str) -> None:
    content = path.read_bytes()
    if how == "empty":
        path.write_bytes(b"")
    elif how == "no zip":
        path.write_bytes(b"a" * 1000)
    elif how == "cut":
        path.write_bytes(content[: len(content) // 2])
    elif how == "a changed byte":
        middle = len(content) // 2
        path.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
    else:
        with zipfile.ZipFile(path, "a", zipfile.ZIP_DEFLATED) as archive:
            if how == "a path":
                archive.writestr("../escaped.safetensors", b"1")
            elif how == "a bomb":
                archive.writestr("0" * 64 + ".safetensors", bytes(2**24))
            elif how == "no name":
                archive.comment = b"\xff"
            else:
                archive.writestr("0" * 64 + ".safetensors", b"no node")


SPOILT = {
    "empty": "holds no session",
    "no zip": "holds no session",
    "cut": "holds no session",
    "a changed byte": "file",
    "a path": "has a part '../escaped",
    "a bomb": "more bytes than the file",
    "no name": "holds no session",
    "another part": "damaged",
}
"""What is wrong, and what is said of it."""


@pytest.mark.parametrize("how", SPOILT)
def test_a_spoilt_file_is_refused_and_changes_nothing(how: str, tmp_path: pathlib.Path) -> None:
    store = PrefixStore("1MiB")
    with store.session("a") as session:
        insert(store, DOCUMENT)
    session.export(tmp_path / "file")
    spoilt(tmp_path / "file", how)
    other = PrefixStore("1MiB")
    with pytest.raises(CacheFileError, match=SPOILT[how]):
        other.import_session(tmp_path / "file")
    assert (len(other), os.listdir(tmp_path)) == (0, ["file"])


def test_a_file_that_is_not_there_is_named(tmp_path: pathlib.Path) -> None:
    store = PrefixStore("1MiB")
    with store.session("a") as session:
        insert(store, ONE)
    with pytest.raises(CachePathError):
        store.import_session(tmp_path / "missing")
    with pytest.raises(CachePathError):
        session.export(tmp_path / "missing" / "file")
    session.export(tmp_path / "file")
    with pytest.raises(CapacityError):
        PrefixStore(100).import_session(tmp_path / "file")


def test_what_is_in_a_directory_alone_is_exported_too(tmp_path: pathlib.Path) -> None:
    with PrefixStore("1MiB", directory=tmp_path / "store") as store:
        with store.session("a") as session:
            insert(store, DOCUMENT)
        store.evict()
        assert (store.statistics.bytes, session.tokens) == (0, len(DOCUMENT))
        assert session.export(tmp_path / "file") == len(DOCUMENT)
    other = PrefixStore("1MiB")
    other.import_session(tmp_path / "file")
    hit = other.lookup(torch.tensor(DOCUMENT), model="m", leave=0)
    check(FULL, hit.cache, DOCUMENT)


def test_many_sessions_are_forgotten_when_they_have_expired(clock: Any) -> None:
    store = PrefixStore("1MiB")
    first = store.session("first", ttl=1)
    for number in range(100):
        clock.now += 1
        store.session(f"{number}", ttl=2)
    assert store.session("first") is not first


def test_a_store_that_has_sessions_is_freed_with_the_last_reference() -> None:
    store = PrefixStore("1MiB")
    with store.session("a"):
        insert(store, ONE)
    held = weakref.ref(next(iter(store._index.entries)).cache)
    assert held() is not None
    del store
    gc.collect()
    assert held() is None
