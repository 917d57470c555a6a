"""Nodes: what is shared is written once, what is wrong is never used, and what is needed is never deleted."""

import dataclasses
import hashlib
import itertools
import json
import os
import pathlib
import threading
import time
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import transformers

import kvlayers
from controlled_backend import ControlledBackend
from kvlayers.errors import CacheFileError, CachePathError
from kvlayers.persistence.format import canonical
from kvlayers.prefix.backends import GoneError, UnreachableError
from kvlayers.prefix.backends.local import LocalBackend
from kvlayers.prefix.directory import Directory
from kvlayers.prefix.keys import label_of
from kvlayers.prefix.nodes import Node
from kvlayers.prefix.states import MOST_PIECES, NODE_TOKENS
from matrix import once
from models import prompt, read, tiny_model
from prefix_caches import KINDS, Ids, Kind, check, extend

LABEL = label_of(None, "m", "")
OLD_NS = time.time_ns() - 10**9 * 10**5
DOCUMENT = list(range(3, 703))
"""More than two nodes."""


def filled(kind: Kind, ids: Ids) -> Any:
    cache = kind.make()
    extend(kind, cache, [], ids)
    return cache


def write(
    directory: Directory, ids: Ids, neighbours: Sequence[tuple[str, int]] = (), kind: Kind = KINDS["full"]
) -> str:
    """Write an entry, and return its path."""
    return directory.write(LABEL, np.array(ids, np.int64), {len(ids)}, filled(kind, ids), neighbours)[0]


def with_document(backend: Any, kind: Kind = KINDS["full"]) -> tuple[Directory, str]:
    """A directory, and the path of the only entry there."""
    directory = Directory(backend)
    return directory, write(directory, DOCUMENT, kind=kind)


def load(directory: Directory, path: str, ids: Ids, length: int | None = None, deadline: float | None = None) -> Any:
    return directory.load(path, len(ids) if length is None else length, None, None, deadline)


def opened(path: pathlib.Path) -> Directory:
    directory = Directory(LocalBackend(str(path)))
    directory.changes(())
    return directory


def check_and_continue(kind: Kind, cache: Any, ids: Ids) -> None:
    check(kind, cache, ids)
    check(kind, cache, extend(kind, cache, ids, [5, 6, 7]))


def files(path: pathlib.Path) -> list[pathlib.Path]:
    return sorted(path.glob("*.safetensors"))


def nodes(directory: Directory, entry: str) -> list[Node]:
    return directory._tree.chain(pathlib.Path(entry).name)


def du(path: pathlib.Path) -> int:
    return sum(file.stat().st_size for file in path.iterdir())


# Round trips

ONE_LAYER = transformers.LlamaConfig(num_hidden_layers=1, head_dim=2, num_attention_heads=1)
LONG_KINDS = {**KINDS, "static": Kind(lambda: kvlayers.StaticCache(ONE_LAYER, max_cache_len=900))}


@pytest.mark.parametrize("kind", LONG_KINDS)
def test_what_is_loaded_is_what_was_written_and_goes_on(kind: str, tmp_path: pathlib.Path) -> None:
    made = LONG_KINDS[kind]
    entry = write(opened(tmp_path), DOCUMENT, kind=made)
    directory = opened(tmp_path)
    with torch.inference_mode():
        cache = load(directory, entry, DOCUMENT)
    assert {held.is_inference() for layer in cache.adapted_layers() for held in layer.held_tensors()} == {False}
    check_and_continue(made, cache, DOCUMENT)
    for length in (1, 255, 256, 257, 511, 512, 699):
        cache = load(directory, entry, DOCUMENT, length)
        if kind == "window":
            assert cache is None
        else:
            check_and_continue(made, cache, DOCUMENT[:length])
    assert (directory.damaged_files, directory.failed_reads) == (0, 0)


@pytest.mark.parametrize("name", ["int4", "h2o"])
def test_what_is_loaded_is_on_the_host_whatever_the_default_device(name: str, tmp_path: pathlib.Path) -> None:
    model = tiny_model("llama")
    cache, _ = read(model, prompt(tokens=20), kvlayers.make_cache(name, model))
    path, _ = opened(tmp_path).write(LABEL, np.arange(20), {20}, cache)
    with torch.device("meta"):
        loaded: Any = opened(tmp_path).load(path, 20, model.config, None)
    for one, other in zip(loaded.layers[0].peek(), cache.layers[0].peek(), strict=True):
        assert torch.equal(one + 0, other + 0)


@pytest.mark.parametrize(
    ("kind", "needed"), [("full", {1: 1, 256: 1, 257: 2, 700: 3}), ("quantized", {1: 1, 256: 1, 700: 3})]
)
def test_only_the_nodes_of_the_needed_tokens_are_read(
    kind: str, needed: dict[int, int], tmp_path: pathlib.Path
) -> None:
    backend = ControlledBackend(tmp_path)
    directory, entry = with_document(backend, KINDS[kind])
    for length, count in needed.items():
        backend.read_names.clear()
        check(KINDS[kind], load(directory, entry, DOCUMENT, length), DOCUMENT[:length])
        assert len(backend.read_names) == count


# Sharing


LONG_WINDOW = Kind(lambda: kvlayers.DynamicCache([(None, None, torch.tensor(500))]), channels=32)
LONG = {"full": KINDS["full"], "quantized": KINDS["quantized"], "window": LONG_WINDOW}


@pytest.mark.parametrize(
    ("kind", "shared"), [*itertools.product(["full", "quantized"], [2, 100, 256, 301, 700]), ("window", 700)]
)
def test_a_branch_writes_its_own_tokens_alone(kind: str, shared: int, tmp_path: pathlib.Path) -> None:
    made, backend = LONG[kind], ControlledBackend(tmp_path)
    directory, first = with_document(backend, made)
    backend.written.clear()
    ids = [*DOCUMENT[:shared], *range(8000, 8100)]
    branch = write(directory, ids, [(first, shared)], made)
    sizes, token_bytes = list(backend.written.values()), 8 * made.channels + 8
    # Packed tokens are written in pairs, and each node says what cache it is of.
    assert sum(sizes) <= 102 * token_bytes + 5000 * len(sizes)
    assert len(sizes) <= 2
    for each in (directory, opened(tmp_path)):
        check_and_continue(made, load(each, branch, ids), ids)
        check_and_continue(made, load(each, first, DOCUMENT), DOCUMENT)
    directory.delete_all([first])
    check_and_continue(made, load(directory, branch, ids), ids)
    directory.delete_all([branch])
    assert (du(tmp_path), directory.nbytes) == (0, 0)


def test_a_chat_of_many_turns_has_few_nodes(tmp_path: pathlib.Path) -> None:
    directory, ids = opened(tmp_path), list(range(20))
    entry = write(directory, ids)
    for turn in range(40):
        more = [*ids, *range(1000 * turn, 1000 * turn + 15)]
        entry, ids = write(directory, more, [(entry, len(ids))]), more
    assert len(nodes(directory, entry)) <= MOST_PIECES * (len(ids) // NODE_TOKENS + 1)
    check_and_continue(KINDS["full"], load(opened(tmp_path), entry, ids), ids)
    # What was written again as one node goes an hour after its last use.
    directory.tidy()
    assert len(files(tmp_path)) > len(nodes(directory, entry))
    age(tmp_path)
    directory.tidy()
    assert len(files(tmp_path)) == len(nodes(directory, entry))
    check_and_continue(KINDS["full"], load(opened(tmp_path), entry, ids), ids)


BRANCH = [*DOCUMENT[:600], 7]


def of_half_precision() -> Any:
    cache = kvlayers.DynamicCache()
    states = filled(dataclasses.replace(KINDS["full"], most=2048), BRANCH).layers[0].keys.half()
    cache.update(states, -states, layer_idx=0)
    return cache


def in_groups_of_one() -> Any:
    return kvlayers.QuantizedCache(nbits=8, q_group_size=1, residual_length=0, sink_tokens=0)


@pytest.mark.parametrize(
    "make",
    [
        lambda: filled(dataclasses.replace(KINDS["full"], channels=2), BRANCH),
        lambda: filled(KINDS["quantized"], BRANCH),
        of_half_precision,
        lambda: filled(dataclasses.replace(KINDS["quantized"], make=in_groups_of_one), BRANCH),
    ],
    ids=["wider", "packed", "half", "in other groups"],
)
def test_states_of_other_forms_are_never_mixed(make: Any, tmp_path: pathlib.Path) -> None:
    directory, cache = opened(tmp_path), make()
    neighbours = [(write(directory, DOCUMENT), 600)]
    path, _ = directory.write(LABEL, np.array(BRANCH, np.int64), {len(BRANCH)}, cache, neighbours)
    found = load(directory, path, BRANCH)
    assert (type(found), found.layers[0].keys.dtype) == (type(cache), cache.layers[0].keys.dtype)
    assert torch.equal(found.layers[0].keys + 0, cache.layers[0].keys + 0)


def test_sinks_do_not_take_over_what_was_computed_beside_other_tokens(tmp_path: pathlib.Path) -> None:
    directory, caches = opened(tmp_path), [kvlayers.SinkCache(600, 4, config=ONE_LAYER) for _ in range(2)]
    for sign, cache in zip((1.0, -1.0), caches, strict=True):
        states = sign * torch.arange(300.0)[None, None, :, None].expand(1, 1, -1, 2)
        cache.update(states, -states, layer_idx=0)
    first, _ = directory.write(LABEL, np.arange(300), {300}, caches[0], ())
    second, _ = directory.write(LABEL, np.array([*range(299), 7]), {300}, caches[1], [(first, 299)])
    found: Any = directory.load(second, 300, None, None)
    assert torch.equal(found.layers[0].keys, caches[1].layers[0].keys)


# What is wrong is never used


def every_damage(path: pathlib.Path, other: pathlib.Path) -> Iterator[tuple[str, bytes | None]]:
    content = path.read_bytes()
    for place in (0, 9, *range(20, len(content), max(len(content) // 12, 1)), len(content) - 1):
        changed = bytearray(content)
        changed[place] ^= 1
        yield f"changed at {place}", bytes(changed)
    yield "cut", content[:-7]
    yield "longer", content + b"\0"
    yield "empty", b""
    yield "another node", other.read_bytes()
    yield "gone", None


@pytest.mark.parametrize(("kind", "which"), once(LONG, [0, 1, -1]))
def test_a_damaged_node_costs_the_tokens_from_there_on(kind: str, which: int, tmp_path: pathlib.Path) -> None:
    made = LONG[kind]
    writer, entry = with_document(LocalBackend(str(tmp_path)), made)
    chain = nodes(writer, entry)
    path, usable = tmp_path / chain[which].name, chain[which].record.start
    content = path.read_bytes()
    for what, other in every_damage(path, tmp_path / chain[which - 1].name):
        # Opened before it is damaged: whoever opens it afterwards may not believe that it is a node.
        directory = opened(tmp_path)
        path.unlink()
        if other is not None:
            path.write_bytes(other)
        if kind == "window" or which == 0:
            # Whoever asked reports the entry.
            error = GoneError if other is None else CacheFileError
            with pytest.raises(error, match=None if other is None else "cannot be loaded"):
                load(directory, entry, DOCUMENT)
            assert directory.damaged_files == 0
        else:
            for _ in range(2):
                check_and_continue(made, load(directory, entry, DOCUMENT), DOCUMENT[:usable])
            assert directory.damaged_files == (other is not None), what
            check(made, load(directory, entry, DOCUMENT, 10), DOCUMENT[:10])
        # Whoever writes these tokens again mends it.
        written = write(directory, DOCUMENT, [(entry, 700)], made)
        check(made, load(directory, written, DOCUMENT), DOCUMENT)
        again = opened(tmp_path)
        check_and_continue(made, load(again, entry, DOCUMENT), DOCUMENT)
        assert (again.damaged_files, path.stat().st_size) == (0, len(content))


@pytest.mark.parametrize("kind", ["full", "quantized"])
def test_behind_a_damaged_node_of_a_neighbour_no_rows_of_other_tokens_are_taken(
    kind: str, tmp_path: pathlib.Path
) -> None:
    made = LONG[kind]
    directory, document = with_document(LocalBackend(str(tmp_path)), made)
    # The nodes of the neighbour begin within the last node of the document.
    neighbour = [*DOCUMENT[:600], *range(8000, 8200)]
    entry = write(directory, neighbour, [(document, 600)], made)
    (tmp_path / nodes(directory, entry)[3].name).unlink()
    assert load(directory, entry, neighbour).length in (576, 600)
    for ids in ([*neighbour[:750], 7], neighbour):
        written = write(directory, ids, [(entry, min(len(ids), 750))], made)
        check_and_continue(made, load(opened(tmp_path), written, ids), ids)


def test_what_is_left_of_layers_that_are_packed_differently_has_as_many_tokens_in_each(tmp_path: pathlib.Path) -> None:
    layers = [kvlayers.DynamicLayer(), kvlayers.QuantizedLayer(kvlayers.Quantization(nbits=8, residual_length=0))]
    cache, directory, states = kvlayers.Cache(layers), opened(tmp_path), torch.randn(1, 1, 600, 64)
    for layer in range(2):
        cache.update(states, states, layer)
    path, _ = directory.write(LABEL, np.arange(600), {600}, cache)
    for node in nodes(directory, path)[1:]:
        (tmp_path / node.name).unlink()
    directory = opened(tmp_path)
    (entry,) = directory.changes(()).added
    # The last packed block of the first node goes on behind these.
    assert entry.length == NODE_TOKENS < nodes(directory, str(entry.path))[0].end
    for length in (100, 256, 600):
        found = load(directory, str(entry.path), entry.ids, length)
        assert [layer.length for layer in found.layers] == [min(length, 256)] * 2


def test_a_cache_whose_first_node_has_no_codes_is_found(tmp_path: pathlib.Path) -> None:
    cache, states = kvlayers.QuantizedCache(nbits=8, sink_tokens=300), torch.randn(1, 1, 700, 64)
    cache.update(states, states, 0)
    path, _ = opened(tmp_path).write(LABEL, np.arange(700), {700}, cache)
    for length in (100, 300, 512, 700):
        found = load(opened(tmp_path), path, DOCUMENT, length)
        assert torch.equal(found.layers[0].keys + 0, (cache.layers[0].keys + 0)[:, :, :length])


def test_a_backend_that_hangs_is_not_waited_for_beyond_the_deadline(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvlayers.prefix.directory.ASIDE_SECONDS", 30)
    backend, goes_on = ControlledBackend(tmp_path), threading.Event()
    directory, entry = with_document(backend)
    pathlib.Path(entry).write_bytes(b"damaged")
    backend.before = lambda name: name in ("find", "touch") and goes_on.wait(60)
    start = time.monotonic()
    # The damage is told, and the other nodes are used.
    check(KINDS["full"], load(directory, entry, DOCUMENT, deadline=start + 1), DOCUMENT[:512])
    seconds = time.monotonic() - start
    goes_on.set()
    assert seconds < 15
    assert directory.damaged_files == 1


def test_an_entry_of_another_tenant_is_not_believed(tmp_path: pathlib.Path) -> None:
    directory, mine = with_document(LocalBackend(str(tmp_path)))
    cache = filled(KINDS["full"], DOCUMENT)
    other, _ = directory.write(label_of(None, "m", "another"), np.array(DOCUMENT), {700}, cache, ())
    pathlib.Path(mine).write_bytes(pathlib.Path(other).read_bytes())
    check(KINDS["full"], load(directory, mine, DOCUMENT), DOCUMENT[:512])
    assert directory.damaged_files == 1
    (tmp_path / nodes(directory, mine)[0].name).write_bytes((tmp_path / nodes(directory, other)[0].name).read_bytes())
    with pytest.raises(CacheFileError, match="no longer holds the tokens of its entry"):
        load(directory, mine, DOCUMENT)


def test_a_version_of_the_future_is_refused_and_stays(tmp_path: pathlib.Path) -> None:
    path = pathlib.Path(write(opened(tmp_path), DOCUMENT))
    path.write_bytes(path.read_bytes().replace(b'"format_version":"11"', b'"format_version":"7"'))
    age(tmp_path)
    directory = Directory(LocalBackend(str(tmp_path)))
    # The tokens before it may be used.
    (found,) = directory.changes(()).added
    assert (found.length, directory.damaged_files) == (512, 1)
    directory.tidy()
    assert len(files(tmp_path)) == 3


@pytest.mark.parametrize("late", ["stuck", "unreachable"])
def test_nodes_that_have_not_arrived_in_time_cost_the_tokens_behind_them(
    late: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvlayers.prefix.directory.BATCH_BYTES", 1)
    backend, goes_on, reads = ControlledBackend(tmp_path), threading.Event(), itertools.count()
    directory, entry = with_document(backend)
    check_and_continue(KINDS["full"], load(directory, entry, DOCUMENT), DOCUMENT)

    def only_the_first_in_time(name: str) -> None:
        if name == "read_ranges" and next(reads):
            if late == "unreachable":
                raise UnreachableError("late")
            goes_on.wait(60)

    backend.before, start = only_the_first_in_time, time.monotonic()
    found = load(directory, entry, DOCUMENT, deadline=start + 0.5)
    goes_on.set()
    assert time.monotonic() - start < 30
    check_and_continue(KINDS["full"], found, DOCUMENT[:256])
    assert (directory.damaged_files, directory.failed_reads) == (0, 1)


def test_a_user_cannot_load_an_entry_as_a_file(tmp_path: pathlib.Path) -> None:
    entry = write(opened(tmp_path), DOCUMENT)
    with pytest.raises(CacheFileError, match="open its directory with PrefixStore"):
        kvlayers.load_cache(entry)
    seen: Any = kvlayers.inspect_cache(entry)
    assert (seen.kind, seen.length, seen.dtype, seen.node is None) == ("DynamicCache", 700, torch.float32, False)
    assert seen.token_ids().tolist() == [DOCUMENT[512:]]
    (first,) = (each for each in map(kvlayers.inspect_cache, files(tmp_path)) if each.length == 256)
    assert (first.kind, first.layers) == (seen.kind, seen.layers)
    os.unlink(first.path)
    with pytest.raises(CachePathError, match="does not exist"):
        kvlayers.inspect_cache(entry)


def forged(content: bytes, change: Any) -> tuple[str, bytes]:
    """Name and content of a node that somebody changed who knows how names and digests are made."""
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    metadata = header["__metadata__"]
    node = json.loads(metadata["node"])
    entry = node["entry"]
    change(types.SimpleNamespace(entry=entry, node=node, header=header, tensors=entry["groups"][0][1]))
    metadata["node"] = canonical(node)
    text = canonical(header).encode()
    text += b" " * (-len(text) % 8)
    begin = len(text).to_bytes(8, "little") + text
    claims = {name: claim["data_offsets"] for name, claim in header.items() if name not in ("__metadata__", "digests")}
    data = {name: content[8 + length + start : 8 + length + end] for name, (start, end) in claims.items()}
    table = b"".join(hashlib.sha256(data[name]).digest() for name in sorted(data))
    table += hashlib.sha256(begin + table).digest()
    name = hashlib.sha256(f"{metadata['node']}\n".encode() + data["token_ids"]).hexdigest()
    return f"{name}.safetensors", begin + content[8 + length : -len(table)] + table


FORGERIES: dict[str, Callable[[Any], Any]] = {
    "more fields": lambda of: of.node.update(os="system"),
    "more facts": lambda of: of.entry.update(os="system"),
    "no fields": lambda of: of.node.clear(),
    "no facts": lambda of: of.entry.clear(),
    "more texts": lambda of: of.header["__metadata__"].update(description="{}"),
    "tokens that are not there": lambda of: of.node.update(stop=2**39),
    "a terabyte of rows": lambda of: of.node["runs"][0].__setitem__(0, [0, 1, 2**39]),
    "rows of no tokens": lambda of: of.node["runs"][0].__setitem__(0, [0, 0, 200]),
    "rows of no group": lambda of: of.node["runs"].append([[0, 1, 200]]),
    "a path": lambda of: of.node.update(parent="../../etc/passwd", start=5),
    "a place behind nothing": lambda of: of.node.update(start=5),
    "wider tensors": lambda of: of.tensors[0].__setitem__(4, 2**30),
    "tensors of another dtype": lambda of: of.tensors[0].__setitem__(1, "F16"),
    "tensors twice": lambda of: (of.entry["groups"].append(of.entry["groups"][0]), of.node["runs"].append([])),
    "layers twice": lambda of: of.entry["groups"][0].__setitem__(0, [0, 0]),
    "a text for a flag": lambda of: of.entry.update(cuttable="yes"),
    "another place": lambda of: of.node.update(parent="0" * 64 + ".safetensors", start=5, stop=200),
    "no saved cache": lambda of: of.node.update(cache=""),
    "a label that is none": lambda of: of.entry.update(label=5),
    "versions that are none": lambda of: of.entry.update(versions=[1]),
    "a digest before the end": lambda of: of.header.update(cache=of.header["digests"], digests=of.header["cache"]),
    # These are well-formed, and seen to be wrong as soon as they are used.
    "tensors of another layer": lambda of: of.entry["groups"][0].__setitem__(0, [7]),
    "tensors of other names": lambda of: (
        of.tensors[0].__setitem__(0, "exploit"),
        of.header.update({"rows.0.exploit": of.header.pop("rows.0.keys")}),
    ),
}


def taken_out(path: pathlib.Path) -> bytes:
    """The content of a node of 200 tokens, which is gone."""
    file = pathlib.Path(write(opened(path), DOCUMENT[:200]))
    content = file.read_bytes()
    file.unlink()
    return content


def test_a_node_that_was_forged_without_a_change_is_loaded(tmp_path: pathlib.Path) -> None:
    name, same = forged(taken_out(tmp_path), lambda of: None)
    (tmp_path / name).write_bytes(same)
    check(KINDS["full"], load(opened(tmp_path), str(tmp_path / name), DOCUMENT[:200]), DOCUMENT[:200])


@pytest.mark.parametrize("which", FORGERIES)
def test_a_node_that_claims_something_else_is_refused(which: str, tmp_path: pathlib.Path) -> None:
    name, other = forged(taken_out(tmp_path), FORGERIES[which])
    (tmp_path / name).write_bytes(other)
    directory = Directory(LocalBackend(str(tmp_path)))
    if directory.changes(()).added:
        assert which in list(FORGERIES)[-2:]
        with pytest.raises(CacheFileError):
            load(directory, str(tmp_path / name), DOCUMENT[:200])
    else:
        assert directory.damaged_files == 1


@pytest.mark.parametrize(
    ("old", "new"),
    [(b"DynamicLayer", b"DynamicFayer"), (b"layers.0.keys", b"layers.9.keys"), (b'"F32"', b'"F99"')],
)
def test_a_saved_cache_in_a_node_is_checked_like_a_file(old: bytes, new: bytes, tmp_path: pathlib.Path) -> None:
    content = taken_out(tmp_path)
    # Where it is in the header of the saved cache.
    place = content.index(old, content.rindex(b'"__metadata__"'))
    name, whole = forged(content[:place] + new + content[place + len(old) :], lambda of: None)
    (tmp_path / name).write_bytes(whole)
    directory = opened(tmp_path)
    with pytest.raises(CacheFileError):
        load(directory, str(tmp_path / name), DOCUMENT[:200])


# Writers and those who delete


def once_at(call: str, act: Callable[[], Any]) -> Callable[[str], None]:
    """What acts at the first call of a method."""
    waiting = [act]

    def hook(name: str) -> None:
        if name == call and waiting:
            waiting.pop()()

    return hook


def age(path: pathlib.Path) -> None:
    for file in files(path):
        os.utime(file, ns=(OLD_NS, OLD_NS))


@pytest.mark.parametrize("can_be_touched", [True, False])
@pytest.mark.parametrize(("when", "call"), [("after", "touch"), ("before", "write"), ("after", "write")])
def test_a_writer_writes_again_what_others_delete_meanwhile(
    when: str, call: str, can_be_touched: bool, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = ControlledBackend(tmp_path)
    other, first = with_document(LocalBackend(str(tmp_path)))
    age(tmp_path)
    if not can_be_touched:
        monkeypatch.setattr(LocalBackend, "touch", lambda self, names: None)
    directory = Directory(mine)
    directory.changes(())
    names = [node.name for node in nodes(other, first)]
    setattr(mine, when, once_at(call, lambda: other.backend.delete(names)))
    ids = [*DOCUMENT, 1, 2]
    entry = write(directory, ids, [(first, 700)])
    for each in (directory, opened(tmp_path)):
        check_and_continue(KINDS["full"], load(each, entry, ids), ids)
        assert each.damaged_files == 0


def test_what_others_begin_to_use_meanwhile_is_not_tidied_away(tmp_path: pathlib.Path) -> None:
    backend = ControlledBackend(tmp_path)
    directory, first = with_document(backend)
    write(directory, [*DOCUMENT, 1])
    other, entries = opened(tmp_path), []
    age(tmp_path)
    ids = [*DOCUMENT, 8, 9]
    backend.before = once_at("delete", lambda: entries.append(write(other, ids, [(first, 700)])))
    directory.tidy()
    check_and_continue(KINDS["full"], load(opened(tmp_path), entries[0], ids), ids)
    assert (other.damaged_files, len(entries)) == (0, 1)


def test_nodes_whose_parents_are_gone_go_an_hour_after_their_last_use(tmp_path: pathlib.Path) -> None:
    kept = write(opened(tmp_path), [1, *DOCUMENT])
    directory, lost = with_document(LocalBackend(str(tmp_path)))
    (tmp_path / nodes(directory, lost)[0].name).unlink()
    directory = opened(tmp_path)
    directory.tidy()
    assert len(files(tmp_path)) == 5
    age(tmp_path)
    # A writer that is at work has touched it.
    os.utime(lost)
    directory.tidy()
    assert len(files(tmp_path)) == 4
    check_and_continue(KINDS["full"], load(directory, kept, [1, *DOCUMENT]), [1, *DOCUMENT])


@pytest.mark.parametrize("kind", LONG)
def test_what_a_deleted_entry_has_replaced_is_deleted_too(kind: str, tmp_path: pathlib.Path) -> None:
    directory, lengths = opened(tmp_path), (15, 64)
    for length in lengths:
        ids, served = np.array(DOCUMENT[:length], np.int64), [each for each in lengths if each <= length]
        entry = directory.write(LABEL, ids, served, filled(LONG[kind], DOCUMENT[:length]))[0]
    other = write(directory, range(900, 950), kind=LONG[kind])
    # Another process, which has never known what was replaced.
    opened(tmp_path).delete_all([entry])
    assert [file.name for file in files(tmp_path)] == [pathlib.Path(other).name]


def test_a_writer_gives_up_where_nodes_keep_disappearing(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LocalBackend, "find", lambda self, names: [None] * len(names))
    with pytest.raises(UnreachableError, match="is incomplete, because its nodes were deleted 4 times"):
        write(opened(tmp_path), DOCUMENT)


def test_the_nodes_used_longest_ago_go_first_and_their_children_before_them(tmp_path: pathlib.Path) -> None:
    branch = [*DOCUMENT[:256], *range(9000, 9100)]
    directory, first = with_document(LocalBackend(str(tmp_path)))
    kept = write(directory, branch, [(first, 256)])
    age(tmp_path)
    load(directory, kept, branch)
    changes = directory.shrink(directory.nbytes - 1, ())
    assert (changes.gone, [entry.length for entry in changes.added]) == ({first}, [512])
    assert directory.shrink(1, {kept}).added == []
    assert sorted(path.name for path in files(tmp_path)) == sorted(node.name for node in nodes(directory, kept))
    check_and_continue(KINDS["full"], load(directory, kept, branch), branch)
    assert (directory.shrink(1, ()).added, du(tmp_path)) == ([], 0)
