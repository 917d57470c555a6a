"""Files that were damaged, or made to do harm: refused by name, whatever they claim, and nothing is reserved for it."""

import contextlib
import copy
import functools
import hashlib
import json
import operator
import os
import pathlib
import pickle
import resource
import struct
import tempfile
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import safetensors.torch
import torch

import kvlayers
import versions
from kvlayers import KVLayersError, inspect_cache, load_cache, save_cache
from kvlayers.core.cache_layer import LAYER_CLASSES
from kvlayers.errors import CacheFileError
from kvlayers.persistence import load
from kvlayers.persistence.format import canonical
from kvlayers.persistence.tensor_file import TensorEntry, content_of, file_header
from models import CONFIGS

ROOM = 192 * 2**20
"""Bytes that a process may take besides while it reads a file that claims far more."""


def _cache(kind: str) -> Any:
    config = CONFIGS["mistral"]()
    quantization: dict[str, Any] = {"residual_length": 0, "sink_tokens": 2, "q_group_size": 8}
    makes: dict[str, Callable[[], Any]] = {
        "dynamic": kvlayers.DynamicCache,
        "sliding": lambda: kvlayers.DynamicCache(config=config),
        "static": lambda: kvlayers.StaticCache(CONFIGS["llama"](), max_cache_len=300),
        "static sliding": lambda: kvlayers.StaticCache(config, max_cache_len=300),
        "quantized": lambda: kvlayers.QuantizedCache(**quantization),
        "sink": lambda: kvlayers.SinkCache(16, 2, config=CONFIGS["llama"](), left_padding=[0, 1]),
        "pair": lambda: kvlayers.EncoderDecoderCache(kvlayers.DynamicCache(), kvlayers.DynamicCache()),
    }
    cache = makes[kind]()
    for part in [cache.self_attention_cache, cache.cross_attention_cache] if kind == "pair" else [cache]:
        for index in range(2):
            shape = (2, 2, 2, 150 if kind == "quantized" else 20, 8)
            part.update(*torch.randn(shape, generator=torch.Generator().manual_seed(0)), layer_idx=index)
    return cache


@functools.cache
def _saved(kind: str) -> bytes:
    with tempfile.TemporaryDirectory() as directory:
        path = pathlib.Path(directory) / "chat"
        save_cache(_cache(kind), path)
        return path.read_bytes()


class Forged:
    """A file as somebody would make it who knows the format: what is changed in it has the right checksums."""

    def __init__(self, content: bytes) -> None:
        (length,) = struct.unpack("<Q", content[:8])
        self.metadata: dict[str, str] = json.loads(content[8 : 8 + length])["__metadata__"]
        self.description: dict[str, Any] = json.loads(self.metadata["description"])
        self.cache: Any = self.description["cache"]
        self.tensors = safetensors.torch.load(content)
        del self.tensors["digests"]

    @property
    def facts(self) -> Any:
        return self.cache["layers"][0]["facts"]

    def content(self) -> bytes:
        own = {name: text for name, text in self.metadata.items() if "format" not in name}
        entries = {name: TensorEntry(tensor.dtype, tuple(tensor.shape)) for name, tensor in self.tensors.items()}
        header = file_header(entries, {**own, "description": canonical(self.description)})
        return bytes(content_of(header, {name: [tensor] for name, tensor in self.tensors.items()}))


def framed(header: bytes, data: bytes = b"") -> bytes:
    return struct.pack("<Q", len(header)) + header + data


def _of(header: Any, data: bytes = b"") -> bytes:
    """A file with a header of this content."""
    return framed(json.dumps(header).encode(), data)


def _one(entry: Any, data: bytes = b"") -> bytes:
    return _of({"x": entry}, data)


def _entry(shape: Any, offsets: Any, dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


RAW: dict[str, bytes] = {
    "nothing": b"",
    "less than a length": b"\x08\0\0",
    "no header": struct.pack("<Q", 0),
    "a header of 2**60 bytes": struct.pack("<Q", 2**60) + b"{}",
    "a header of 2**64 - 1 bytes": b"\xff" * 8 + b"{}",
    "a header of more bytes than there are": struct.pack("<Q", 3) + b"{}",
    "a header beyond any need": framed(b" " * (5 * 2**20) + b"{}"),
    "a header that is no text": framed(b'{"\xff": 1}'),
    "a header that is no JSON": framed(b"{'a': 1}"),
    "a header that is a list": framed(b"[]"),
    "a header of lists in lists": framed(b"[" * 10**6),
    "a header of objects in objects": framed(b'{"a":' * 10**5),
    "a header of many lists": framed(b'{"a": [' + b"[]," * 10**6 + b"[]]}"),
    "a name that comes twice": framed(b'{"x": {}, "x": {}}'),
    "a field that comes twice": framed(
        b'{"x": {"dtype": "F32", "dtype": "F32", "shape": [], "data_offsets": [0, 4]}}', bytes(4)
    ),
    "not a number": framed(b'{"x": {"dtype": "F32", "shape": [NaN], "data_offsets": [0, 0]}}'),
    "infinity": framed(b'{"x": {"dtype": "F32", "shape": [1e999], "data_offsets": [0, 0]}}'),
    "a number of many digits": framed(
        b'{"x": {"dtype": "F32", "shape": [' + b"9" * 10**6 + b'], "data_offsets": [0, 0]}}'
    ),
    "metadata that is no mapping": framed(b'{"__metadata__": [1]}'),
    "metadata that is no text": framed(b'{"__metadata__": {"format": 1}}'),
    "an entry that is none": _one([]),
    "an entry with more fields": _one({**_entry([1], [0, 4]), "strides": [1]}, bytes(4)),
    "an unknown dtype": _one(_entry([1], [0, 4], "F1024"), bytes(4)),
    "a dtype that is none": _one(_entry([1], [0, 4], []), bytes(4)),
    "a dtype that lies": _one(_entry([2], [0, 8], "F64"), bytes(8)),
    "a shape that overflows": _one(_entry([2**32, 2**32], [0, 0])),
    "a shape that overflows to its own size": _one(_entry([2**62 + 1], [0, 4]), bytes(4)),
    "a shape that is negative": _one(_entry([-1, -1], [0, 4]), bytes(4)),
    "a shape of fractions": _one(_entry([1.0], [0, 4]), bytes(4)),
    "a shape of truths": _one(_entry([True], [0, 4]), bytes(4)),
    "a shape of many dimensions": _one(_entry([1] * 9, [0, 4]), bytes(4)),
    "a shape of nothing, and of far too much": _one(_entry([2**40, 0, 2**40], [0, 0])),
    "bytes beyond the end": _one(_entry([2**40], [0, 2**42])),
    "bytes that end before they begin": _one(_entry([1], [4, 0]), bytes(4)),
    "bytes before the beginning": _one(_entry([1], [-4, 0]), bytes(4)),
    "bytes of one place": _one(_entry([1], [0]), bytes(4)),
    "bytes that nobody claims": _one(_entry([1], [0, 4]), bytes(5)),
    "bytes that two claim": _of({"x": _entry([2], [0, 8]), "y": _entry([1], [4, 8])}, bytes(8)),
    "bytes between two": _of({"x": _entry([1], [0, 4]), "y": _entry([1], [8, 12])}, bytes(12)),
    "a pickle": pickle.dumps({"keys": [1, 2, 3]}),
    "another safetensors file": _of({"__metadata__": {"format": "pt"}, "x": _entry([2], [0, 8])}, bytes(8)),
    "no description": _of({"__metadata__": {"format": "kvlayers.cache", "format_version": "11"}}),
}


def _set(*names_and_value: Any) -> Callable[[Forged], None]:
    """What sets a place in the description of a cache, which these names lead to, to something."""
    *outer, last, value = names_and_value

    def change(forged: Forged) -> None:
        functools.reduce(operator.getitem, outer, forged.cache)[last] = value

    return change


def _fact(name: str, value: Any) -> Callable[[Forged], None]:
    return _set("layers", 0, "facts", name, value)


def _tensor(name: str, value: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Forged], None]:
    def change(forged: Forged) -> None:
        forged.tensors[name] = value(forged.tensors[name])

    return change


def _renamed(new: str) -> Callable[[Forged], None]:
    def change(forged: Forged) -> None:
        forged.cache["layers"][0]["tensors"][0] = new
        forged.tensors[f"layers.0.{new}"] = forged.tensors.pop("layers.0.keys")

    return change


def _huge_empty(forged: Forged) -> None:
    for side in ("keys", "values"):
        forged.tensors[f"layers.0.{side}"] = torch.empty(2, 1000, 0, 1000)
    forged.facts["length"] = 0
    forged.facts["max_cache_len"] = 2**24


def _nested(forged: Forged) -> None:
    part = copy.deepcopy(forged.cache)
    forged.cache["parts"][0] = part


FORGED: dict[str, tuple[str, Callable[[Forged], None]]] = {
    "a kind of cache that is none": ("dynamic", _set("kind", "Exploit")),
    "a kind of cache that is a module": ("dynamic", _set("kind", "os.system")),
    "a kind of cache that is no text": ("dynamic", _set("kind", ["DynamicCache"])),
    "a kind of layer that is none": ("dynamic", _set("layers", 0, "kind", "Exploit")),
    "a kind of layer with dunders": ("dynamic", _set("layers", 0, "kind", "__class__")),
    "another kind of layer": ("dynamic", _set("layers", 0, "kind", "SlidingLayer")),
    "no layers": ("dynamic", _set("layers", [])),
    "layers that are none": ("dynamic", _set("layers", [[]])),
    "layers with a path": ("dynamic", _renamed("../../../etc/passwd")),
    "layers with a name of another layer": ("dynamic", _renamed("../1.keys")),
    "a tensor that is not described": (
        "dynamic",
        lambda forged: forged.tensors.update({"layers.7.keys": torch.zeros(1)}),
    ),
    "a tensor with an absolute path": (
        "dynamic",
        lambda forged: forged.tensors.update({"/etc/passwd": torch.zeros(1)}),
    ),
    "a fact that is a list": ("dynamic", _fact("length", [20])),
    "a fact that is a fraction": ("dynamic", _fact("length", 20.5)),
    "a length that is a text": ("dynamic", _fact("length", "20")),
    "a length that is a truth": ("dynamic", _fact("length", True)),
    "a length of 10**18": ("sliding", _fact("length", 10**18)),
    "a length below zero": ("sliding", _fact("length", -1)),
    "a length of too few tokens": ("sliding", _fact("length", 3)),
    "a length of too many tokens": ("dynamic", _fact("length", 21)),
    "no length": ("dynamic", lambda forged: forged.facts.pop("length")),
    "a window below zero": ("sliding", _fact("sliding_window", -8)),
    "a window of 10**15": ("sliding", _fact("sliding_window", 10**15)),
    "a window that is a text": ("sliding", _fact("sliding_window", "8")),
    "a window that is a truth": ("sliding", _fact("sliding_window", True)),
    "a reservation of 10**15": ("static", _fact("max_cache_len", 10**15)),
    "a reservation of 2**30": ("static", _fact("max_cache_len", 2**30)),
    "a reservation below zero": ("static", _fact("max_cache_len", -5)),
    "a reservation of too little": ("static", _fact("max_cache_len", 5)),
    "a reservation that is a text": ("static", _fact("max_cache_len", "300")),
    "a reservation that grows from 2**30": (
        "static",
        lambda forged: [_fact("max_cache_len", None)(forged), _set("options", "max_cache_len", 2**30)(forged)],
    ),
    "a reservation for 2**30 sequences": ("static", _set("options", "max_batch_size", 2**30)),
    "a reservation for sequences that are a text": ("static", _set("options", "max_batch_size", "2")),
    "a reservation without states": ("static", _huge_empty),
    "buckets that do not grow": ("static", _set("options", "buckets", {"minimum": 8, "factor": 1.0})),
    "buckets that are none": ("static", _set("options", "buckets", {"os": "system"})),
    "a reserved window of 2**30": (
        "static sliding",
        lambda forged: [_fact("sliding_window", 2**30)(forged), _fact("max_cache_len", 2**30)(forged)],
    ),
    "a reserved window of less than it has": ("static sliding", _fact("token_limit", 3)),
    "options that are missing": ("dynamic", _set("options", {})),
    "options that are no truths": ("dynamic", _set("options", "offloading", "no")),
    "a backend that is none": ("quantized", _fact("backend", "os")),
    "a backend that is no text": ("quantized", _fact("backend", 3)),
    "codes of seven bits": ("quantized", _fact("key_nbits", 7)),
    "codes of other bits": ("quantized", _fact("key_nbits", 2)),
    "groups of 10**15": ("quantized", _fact("key_group_size", 10**15)),
    "groups of nothing": ("quantized", _fact("key_group_size", 0)),
    "groups below zero": ("quantized", _fact("value_group_size", -8)),
    "a residual of 10**15": ("quantized", _fact("residual_length", 10**15)),
    "sinks of 10**15": ("quantized", _fact("sink_tokens", 10**15)),
    "sinks below zero": ("quantized", _fact("sink_tokens", -1)),
    "fewer sinks than there are": ("quantized", _fact("sink_tokens", 1)),
    "a facts of another store": ("quantized", lambda forged: forged.facts.pop("backend")),
    "blocks that end elsewhere": ("quantized", _tensor("layers.0.block_ends", lambda t: t + 1000)),
    "blocks that end before they begin": ("quantized", _tensor("layers.0.block_ends", lambda t: -t - 1)),
    "blocks that are fractions": ("quantized", _tensor("layers.0.block_ends", lambda t: t.double())),
    "blocks in two dimensions": ("quantized", _tensor("layers.0.block_ends", lambda t: t[None])),
    "no blocks": ("quantized", _tensor("layers.0.block_ends", lambda t: t[:0])),
    "codes of another shape": ("quantized", _tensor("layers.0.keys_codes", lambda t: t[..., :-1])),
    "codes of fractions": ("quantized", _tensor("layers.0.keys_codes", lambda t: t.float())),
    "scales of another dtype": ("quantized", _tensor("layers.0.values_parameters", lambda t: t.double())),
    "keys of other tokens": ("dynamic", _tensor("layers.0.keys", lambda t: t[:, :, :-1])),
    "keys of another batch": ("dynamic", _tensor("layers.0.keys", lambda t: t[:1])),
    "a layer of another batch": (
        "dynamic",
        lambda forged: [_tensor(f"layers.0.{side}", lambda t: t[:1])(forged) for side in ("keys", "values")],
    ),
    "keys of three dimensions": ("dynamic", _tensor("layers.0.keys", lambda t: t[0])),
    "keys of no dimension": ("dynamic", _tensor("layers.0.keys", lambda t: t[0, 0, 0, 0])),
    "keys of whole numbers": ("dynamic", _tensor("layers.0.keys", lambda t: t.long())),
    "keys of no sequences": (
        "dynamic",
        lambda forged: [_tensor(f"layers.0.{side}", lambda t: t[:0])(forged) for side in ("keys", "values")],
    ),
    "a window of sinks below zero": ("sink", _fact("window_length", -16)),
    "sinks of 10**12": ("sink", _fact("num_sink_tokens", 10**12)),
    "sinks of 2**30 in a window of more": (
        "sink",
        lambda forged: [_fact("num_sink_tokens", 2**30)(forged), _fact("window_length", 2**31)(forged)],
    ),
    "sinks of 2**30 in all": (
        "sink",
        lambda forged: [
            _set("options", "num_sink_tokens", 2**30)(forged),
            _set("options", "window_length", 2**31)(forged),
            _fact("num_sink_tokens", 2**30)(forged),
            _fact("window_length", 2**31)(forged),
        ],
    ),
    "a rotation that is not there": ("sink", _fact("rotary", "0" * 16)),
    "a rotation of other frequencies": (
        "sink",
        lambda forged: forged.tensors.update({n: t * 2 for n, t in forged.tensors.items() if "rotary" in n}),
    ),
    "a rotation that is not finite": (
        "sink",
        lambda forged: forged.tensors.update({n: t / 0 for n, t in forged.tensors.items() if "rotary" in n}),
    ),
    "a rotation of another layout": (
        "sink",
        lambda forged: forged.description.update(rotaries={n: ["spiral", 0] for n in forged.description["rotaries"]}),
    ),
    "a padding below zero": ("sink", _tensor("layers.0.left_padding", lambda t: -t - 1)),
    "a padding of other sequences": ("sink", _tensor("layers.0.left_padding", lambda t: t[:1])),
    "a padding of a cache that is none": ("sink", _set("options", "left_padding", [-1, "a"])),
    "first tokens of another count": ("sink", _tensor("layers.0.first_keys", lambda t: t[:, :, :1])),
    "parts in parts": ("pair", _nested),
    "three parts": ("pair", lambda forged: forged.cache["parts"].append(forged.cache["parts"][0])),
    "one part": ("pair", lambda forged: forged.cache["parts"].pop()),
    "parts and layers": ("pair", lambda forged: forged.cache["layers"].extend(forged.cache["parts"][0]["layers"])),
    "more fields": ("dynamic", _set("os", "system")),
    "a model that is none": ("dynamic", lambda forged: forged.description.update(model=None)),
    "versions that are none": ("dynamic", lambda forged: forged.description.update(versions=[1])),
    "an option that is far too deep": (
        "dynamic",
        lambda forged: forged.cache["options"].update(x=json.loads("[" * 500 + "]" * 500)),
    ),
}
HARMLESS = ("an option that is far too deep",)


def _outcome(path: pathlib.Path, read: Callable[..., Any] = load_cache, **options: Any) -> str:
    """What becomes of reading a file: the name of the error, or nothing."""
    try:
        read(path, **options)
    except KVLayersError as error:
        message = str(error)
        assert path.name in message
        assert len(message) < 2000
        assert message.isprintable()
        return type(error).__name__
    return ""


@pytest.fixture
def path(tmp_path: pathlib.Path) -> pathlib.Path:
    return tmp_path / "chat.safetensors"


def test_what_is_wrong_in_a_file_is_refused_and_nothing_is_reserved_for_what_it_claims(tmp_path: pathlib.Path) -> None:
    files, expected = dict(RAW), dict.fromkeys([*RAW, *FORGED], "CacheFileError") | dict.fromkeys(HARMLESS, "")
    for name, (kind, change) in FORGED.items():
        forged = Forged(_saved(kind))
        change(forged)
        files[name] = forged.content()
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    child = os.fork()
    if not child:
        # A process of its own, as the limit would be that of all other tests as well.
        try:
            pages = int(pathlib.Path("/proc/self/statm").read_text().split()[0])
            most = pages * resource.getpagesize() + ROOM
            resource.setrlimit(resource.RLIMIT_AS, (most, most))
            found = {name: _outcome(tmp_path / name) for name in files}
            inspected = {name: _outcome(tmp_path / name, inspect_cache) for name in RAW}
            (tmp_path / "outcomes").write_text(json.dumps([found, inspected]))
        except BaseException:
            (tmp_path / "outcomes").write_text(traceback.format_exc())
        finally:
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    told = (tmp_path / "outcomes").read_text()
    assert told[:1] == "[", told
    assert json.loads(told) == [expected, dict.fromkeys(RAW, "CacheFileError")]


@pytest.mark.parametrize(
    ("shape", "nbytes", "message"),
    [
        ((1,) * 9, 4, "a shape that states have"),
        ((2**40, 0, 2**40), 0, "a shape that states have"),
        ((2**40,), 8, r"must have \d+ bytes, got"),
        ((1,), 5, r"must have \d+ bytes, got"),
    ],
)
def test_a_header_may_be_well_written_and_claim_too_much(
    shape: tuple[int, ...], nbytes: int, message: str, path: pathlib.Path
) -> None:
    header = file_header({"x": TensorEntry(torch.float32, shape)}, {})
    path.write_bytes(header.content + bytes(nbytes + 64))
    with pytest.raises(CacheFileError, match=message):
        load_cache(path)


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text.replace(b'"shape":[2,2,20,8]', b'"shape":[2,2,20,8 ]', 1),
        lambda text: text.replace(b'{"__metadata__"', b'{"__metadata__":{},"__metadata__"', 1),
        lambda text: text.replace(b'"DynamicCache', b'"\\u0044ynamicCache', 1),
        lambda text: text.replace(b'"data_offsets":[0,', b'"data_offsets":[4,', 1),
        lambda text: text.replace(b'"data_offsets":[0,', b'"data_offsets":["0",', 1),
        lambda text: text.replace(b'"data_offsets":[0,', b'"offsets":[0,', 1),
    ],
    ids=["spaces", "a name twice", "other letters", "another place", "a place that is a text", "no place"],
)
def test_a_header_in_other_words_is_refused(change: Callable[[bytes], bytes], path: pathlib.Path) -> None:
    """Even if it says the same."""
    content = Forged(_saved("dynamic")).content()
    length = int.from_bytes(content[:8], "little")
    header = change(content[8 : 8 + length].rstrip())
    header += b" " * (-len(header) % 8)
    digests = content[8 + length :][-5 * 32 : -32]
    last = hashlib.sha256(framed(header) + digests).digest()
    path.write_bytes(framed(header) + content[8 + length : -32] + last)
    with pytest.raises(CacheFileError, match="as kvlayers writes it"):
        load_cache(path)


def test_each_tensor_begins_where_numbers_of_its_dtype_can_be() -> None:
    """Whatever the dtype of ids is in a file: memory is read in place."""
    dtypes = {"token_ids": torch.uint8, "a": torch.int8, "b": torch.float64, "c": torch.bfloat16, "d": torch.float32}
    header = file_header({name: TensorEntry(dtype, (3,)) for name, dtype in dtypes.items()}, {})
    assert not any(header.ranges[name][0] % dtype.itemsize for name, dtype in dtypes.items())


@pytest.mark.parametrize("version", [3, 9, 10, 12])
@pytest.mark.parametrize("read", [inspect_cache, load_cache])
def test_files_of_other_versions_are_refused(read: Callable[..., Any], version: int, path: pathlib.Path) -> None:
    path.write_bytes(_of({"__metadata__": {"format": "kvlayers.cache", "format_version": str(version)}}))
    with pytest.raises(CacheFileError, match=r"chat\.safetensors must have version 11 of the format"):
        read(path)


@pytest.mark.parametrize("kind", ["dynamic", "sliding", "static", "static sliding", "quantized", "sink", "pair"])
def test_a_file_that_was_forged_without_a_change_is_loaded(kind: str, path: pathlib.Path) -> None:
    path.write_bytes(Forged(_saved(kind)).content())
    assert _outcome(path) == ""


@pytest.mark.parametrize("tokens", [20_000, 20_000_000, -20_000, "300" * 2**18])
def test_a_reservation_of_layers_that_are_made_from_a_config_is_limited(
    tokens: Any, path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load, "FREE_RESERVATION", 2**20)
    forged = Forged(_saved("static"))
    for layer in forged.cache["layers"]:
        del layer["facts"]["grow"]
    path.write_bytes(forged.content())
    assert _outcome(path, config=CONFIGS["llama"]()) == ""
    forged.cache["options"]["max_cache_len"] = tokens
    path.write_bytes(forged.content())
    assert _outcome(path, config=CONFIGS["llama"]()) == "CacheFileError"


@pytest.mark.parametrize("tokens", [20_000_000, -20_000_000, "300" * 2**18])
@pytest.mark.parametrize("wrapped", [False, True])
def test_a_reservation_is_a_number_of_tokens(wrapped: bool, tokens: Any, path: pathlib.Path) -> None:
    forged = Forged(_saved("static"))
    for layer in forged.cache["layers"]:
        layer["facts"]["max_cache_len"] = tokens
        if wrapped:
            layer["facts"]["offloaded"] = layer["kind"]
            layer["kind"] = "OffloadedLayer"
    path.write_bytes(forged.content())
    with pytest.raises(CacheFileError, match="reserved tokens from 0 to"):
        load_cache(path)


def test_one_reservation_does_not_make_up_for_another_one(path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Owing(kvlayers.DynamicLayer):
        @classmethod
        def reserved_by(cls, facts: Any) -> tuple[int, int]:
            return -(2**21), 0

    forged = Forged(_saved("static"))
    forged.facts["max_cache_len"] = 2**21
    forged.cache["layers"][1]["kind"] = "Owing"
    path.write_bytes(forged.content())
    monkeypatch.setitem(LAYER_CLASSES._entries, "Owing", Owing)
    with pytest.raises(CacheFileError, match="reserved tokens from 0 to"):
        load_cache(path)


@pytest.mark.parametrize("family", ["mamba", "jamba"])
@pytest.mark.parametrize(
    "facts",
    [
        {"checkpoints": 10**12},
        {"checkpoints": -1},
        {"number_of_states": 10**9},
        {"length": -3},
        {"conv_kernel_size.0": None, "has_recurrent_state.x": True},
    ],
)
def test_a_forged_file_of_a_recurrent_model_is_refused(family: str, facts: dict[str, Any], path: pathlib.Path) -> None:
    versions.need_recurrent_layers(family)
    config = CONFIGS[family]()
    cache = kvlayers.DynamicCache(config=config)
    for index, layer in enumerate(cache.layers):
        if layer.traits.is_recurrent:
            cache.update_conv_state(torch.randn(1, 4, 3), index, conv_kernel_size=4)
            cache.update_recurrent_state(torch.randn(1, 4, 2), index)
    save_cache(cache, path, config=config)
    assert _outcome(path, config=config) == ""
    forged = Forged(path.read_bytes())
    prefix = "linear." if family == "jamba" and "linear.checkpoints" in forged.facts else ""
    forged.facts.update({prefix + name: value for name, value in facts.items()})
    path.write_bytes(forged.content())
    assert _outcome(path, config=config) == "CacheFileError"
    before = cache.state()
    with pytest.raises(KVLayersError):
        load_cache(path, into=cache)
    assert [layer.facts for layer in cache.state().layers] == [layer.facts for layer in before.layers]


def test_no_source_of_the_format_knows_pickle() -> None:
    sources = pathlib.Path(kvlayers.__file__).parent.joinpath("persistence").glob("*.py")
    text = "".join(source.read_text() for source in sources)
    for word in ("pickle", "torch.load", "torch.save", "eval(", "exec(", "import_module", "getattr("):
        assert word not in text


# Damage


def _content(cache: Any) -> list[Any]:
    state = cache.state()
    return [
        (layer.kind, layer.facts, {name: (tensor.dtype, tensor.tolist()) for name, tensor in layer.tensors.items()})
        for part in state.parts or (state,)
        for layer in part.layers
    ]


@pytest.mark.parametrize("kind", ["dynamic", "sliding", "static", "quantized", "sink", "pair"])
def test_no_single_bit_goes_unnoticed(kind: str, path: pathlib.Path) -> None:
    content, expected = bytearray(_saved(kind)), _content(_cache(kind))
    for at in range(0, len(content), len(content) // 150):
        content[at] ^= 4
        path.write_bytes(content)
        with contextlib.suppress(CacheFileError):
            assert _content(load_cache(path)) == expected
        content[at] ^= 4
