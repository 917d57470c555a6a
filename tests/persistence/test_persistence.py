"""Caches in files: what is loaded decodes on as what was saved, and a path that cannot be used changes nothing."""

import functools
import hashlib
import json
import os
import pathlib
import re
import stat
import struct
import tempfile
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
import transformers as tf
from safetensors import safe_open

import fresh_process
import kvlayers
import versions
from kvlayers import OptionError, inspect_cache, load_cache, save_cache
from kvlayers.errors import CacheFileError, CachePathError, ModelMismatchError, RollbackError, StateMismatchError
from kvlayers.persistence import atomic_file, fingerprint
from kvlayers.rope.from_config import rotaries
from matrix import once
from models import CONFIGS, WINDOW, fresh_model, prompt, read, tiny_model

NEW = 6
QUANTIZATION: dict[str, Any] = {"q_group_size": 8, "residual_length": 4, "sink_tokens": 2}
SINKS: dict[str, Any] = {"window_length": 10, "num_sink_tokens": 2}

Make = Callable[[Any], Any]

KINDS: dict[str, tuple[str, Make]] = {
    "dynamic": ("llama", lambda config: kvlayers.DynamicCache(config=config)),
    "dynamic without a config": ("llama", lambda config: kvlayers.DynamicCache()),
    "dynamic, sliding": ("mistral", lambda config: kvlayers.DynamicCache(config=config)),
    "dynamic, mixed": ("gemma3", lambda config: kvlayers.DynamicCache(config=config)),
    "dynamic, chunked": ("llama4", lambda config: kvlayers.DynamicCache(config=config)),
    "dynamic, latent attention": ("deepseek_v3", lambda config: kvlayers.DynamicCache(config=config)),
    "dynamic, learned positions": ("gpt2", lambda config: kvlayers.DynamicCache(config=config)),
    "static": ("llama", lambda config: kvlayers.StaticCache(config, max_cache_len=200)),
    "static that grows": ("llama", lambda config: kvlayers.StaticCache(config, max_cache_len=4, grow=True)),
    "static with options": (
        "llama",
        lambda config: kvlayers.StaticCache(config, 200, max_batch_size=5, buckets=kvlayers.stores.Buckets(8, 1.5)),
    ),
    "sliding window": ("mistral", lambda config: kvlayers.SlidingWindowCache(config, max_cache_len=200)),
    "sliding window, reserved for less": ("long gemma3", lambda config: kvlayers.StaticCache(config, 150)),
    "hybrid": ("gemma3", lambda config: kvlayers.HybridCache(config, max_cache_len=200)),
    "hybrid chunked": ("llama4", lambda config: kvlayers.HybridChunkedCache(config, max_cache_len=200)),
    "quantized": ("llama", lambda config: kvlayers.QuantizedCache(config=config, **QUANTIZATION)),
    "quantized without a config": ("llama", lambda config: kvlayers.QuantizedCache(nbits=2, **QUANTIZATION)),
    "quantized in three bits": (
        "llama",
        lambda config: kvlayers.QuantizedCache(config=config, nbits=3, **QUANTIZATION),
    ),
    "quantized to fp8": ("llama", lambda config: kvlayers.QuantizedCache("fp8", config=config, residual_length=4)),
    "quantized windows": (
        "gemma3",
        lambda config: kvlayers.QuantizedCache(config=config, quantize_sliding=True, **QUANTIZATION),
    ),
    "quanto": ("llama", lambda config: kvlayers.QuantizedCache("quanto", config=config, q_group_size=8)),
    "hqq": ("llama", lambda config: kvlayers.QuantizedCache("hqq", config=config, q_group_size=8)),
    "offloaded": ("llama", lambda config: kvlayers.OffloadedCache(config=config)),
    "offloaded windows": ("gemma3", lambda config: kvlayers.DynamicCache(config=config, offloading=True)),
    "offloaded static": ("gemma3", lambda config: kvlayers.OffloadedStaticCache(config, max_cache_len=200)),
    "offloaded quantized": (
        "llama",
        lambda config: kvlayers.QuantizedCache(config=config, offloading=True, **QUANTIZATION),
    ),
    "sinks": ("llama", lambda config: kvlayers.SinkCache(**SINKS, config=config)),
    "sinks, quantized": (
        "llama",
        lambda config: kvlayers.SinkCache(
            128, 2, config=config, quantization={"q_group_size": 8, "residual_length": 0}
        ),
    ),
    "sinks without a config": ("llama", lambda config: kvlayers.SinkCache(**SINKS, rotary=rotaries(config)[0])),
    "sinks, offloaded": ("llama", lambda config: kvlayers.SinkCache(**SINKS, config=config, offloading=True)),
    "recurrent": ("mamba", lambda config: kvlayers.DynamicCache(config=config)),
    "recurrent and attending": ("jamba", lambda config: kvlayers.DynamicCache(config=config)),
    "recurrent, old": ("mamba", lambda config: kvlayers.MambaCache(config)),
    "recurrent and attending, old": ("jamba", lambda config: kvlayers.HybridMambaAttentionDynamicCache(config)),
    "recurrent and static": ("jamba", lambda config: kvlayers.StaticCache(config, max_cache_len=200)),
    "recurrent and quantized": ("jamba", lambda config: kvlayers.QuantizedCache(config=config, **QUANTIZATION)),
    "recorded": ("mistral", lambda config: _recording(config)),
    "recorded, offloaded": (
        "mistral",
        lambda config: _recording(config, offloading=True, offload_only_non_sliding=False),
    ),
}
RECURRENT = ("mamba", "jamba")
PACKAGES = {"quanto": "optimum.quanto", "hqq": "hqq"}


def _recording(config: Any, **options: Any) -> kvlayers.DynamicCache:
    """A cache whose tokens can be taken back."""
    cache = kvlayers.DynamicCache(config=config, **options)
    cache.activate_past_recording()
    return cache


def _model(family: str) -> Any:
    """A tiny model; "long" for one whose windows are of more tokens than a test reserves."""
    return fresh_model(family.removeprefix("long "), sliding_window=160) if "long" in family else tiny_model(family)


def _logits(model: Any, cache: Any, ids: torch.Tensor) -> torch.Tensor:
    """The logits of the newest token; a model whose scan begins from zero is given its tokens one by one."""
    steps = 1 if model.config.model_type in RECURRENT and cache.get_seq_length() else ids.shape[1]
    return [read(model, some, cache)[1][:, -1] for some in ids.split(steps, dim=1)][-1]


def _decoded(model: Any, cache: Any, ids: torch.Tensor) -> list[torch.Tensor]:
    """The logits of some steps, each of the token that the one before says."""
    found = []
    for _ in range(NEW):
        found.append(_logits(model, cache, ids))
        ids = found[-1].argmax(-1, keepdim=True)
    return found


def _go_on_alike(model: Any, one: Any, other: Any) -> bool:
    """Whether both caches go on from one more token to the same logits."""
    first = prompt(max(other.batch_size, 1), 1, seed=2)
    return all(map(torch.equal, *(_decoded(model, cache, first) for cache in (one, other))))


SEEN = torch.cat([prompt(2, 100), prompt(2, 3, seed=1)], dim=1)
"""What `_filled` caches have seen."""


def _filled(kind: str, batch: int = 2, tokens: int = 100) -> tuple[Any, Any]:
    family, make = KINDS[kind]
    if kind in PACKAGES:
        pytest.importorskip(PACKAGES[kind])
    model = _model(family)
    cache = make(model.config)
    _logits(model, cache, prompt(batch, tokens))
    _logits(model, cache, prompt(batch, 3, seed=1))
    return model, cache


def _described(cache: Any) -> str:
    """A cache as it prints, but for its bytes, as one that is loaded has other spare room; and which layers record."""
    recording = [layer.is_recording for part in cache.parts() for layer in part.adapted_layers()]
    return re.sub(r", [\d.]+ \w*B\)", ")", repr(cache)) + str(recording)


def _small() -> kvlayers.DynamicCache:
    return kvlayers.DynamicCache([(torch.ones(1, 1, 2, 2), torch.ones(1, 1, 2, 2))])


def _reloaded(cache: Any, path: pathlib.Path) -> Any:
    save_cache(cache, path)
    return load_cache(path)


def _content(cache: Any) -> list[Any]:
    layers = cache.state().layers
    return [(layer.facts, {name: tensor.tolist() for name, tensor in layer.tensors.items()}) for layer in layers]


@pytest.fixture
def path(tmp_path: pathlib.Path) -> pathlib.Path:
    return tmp_path / "chat.safetensors"


@pytest.mark.parametrize(("kind", "with_config"), once(KINDS, [False, True]))
def test_a_loaded_cache_decodes_as_the_saved_one(kind: str, with_config: bool, path: pathlib.Path) -> None:
    model, cache = _filled(kind)
    save_cache(cache, path, config=model.config)
    if inspect_cache(path).needs_config and not with_config:
        # Before transformers 5.15, recurrent layers are those of transformers.
        assert KINDS[kind][0] in RECURRENT
        with pytest.raises(CacheFileError, match=r"pass config=model\.config"):
            load_cache(path)
        return
    with torch.inference_mode(with_config):
        loaded = load_cache(path, config=model.config if with_config else None)
    assert (type(loaded), _described(loaded), loaded.offloading) == (type(cache), _described(cache), cache.offloading)
    assert _go_on_alike(model, loaded, cache)
    if cache.get_max_length() < 0:
        loaded.batch_repeat_interleave(2)
        assert loaded.batch_size == 4


@pytest.mark.parametrize("family", ["t5", "bart"])
@pytest.mark.parametrize(
    "make",
    [
        lambda config: kvlayers.DynamicCache(),
        lambda config: kvlayers.QuantizedCache(**QUANTIZATION),
        lambda config: kvlayers.StaticCache(config, max_cache_len=120),
    ],
    ids=["dynamic", "quantized", "static"],
)
def test_a_pair_is_saved_in_one_file(family: str, make: Make, path: pathlib.Path) -> None:
    model = tiny_model(family)
    self_attention = make(model.config)
    cache = kvlayers.EncoderDecoderCache(self_attention, self_attention.for_cross_attention(80))
    encoded = model.get_encoder()(prompt(2, 80)).last_hidden_state

    def logits(cache: Any, ids: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return model(
                encoder_outputs=(encoded,), decoder_input_ids=ids, past_key_values=cache, use_cache=True
            ).logits[:, -1]

    logits(cache, prompt(2, 90, seed=1))
    save_cache(cache, path, config=model.config)
    loaded = load_cache(path, config=model.config)
    assert (type(loaded.self_attention_cache), _described(loaded)) == (type(self_attention), _described(cache))
    assert [tuple(loaded.is_updated.values()), loaded.get_seq_length()] == [(True, True), 90]
    for step in range(4):
        assert torch.equal(logits(loaded, prompt(2, 1, seed=step)), logits(cache, prompt(2, 1, seed=step)))
    for length, encoded_length in ((50, 80), (0, 0)):
        prefix = load_cache(path, length=length)
        assert (prefix.get_seq_length(), prefix.cross_attention_cache.get_seq_length()) == (length, encoded_length)
    assert inspect_cache(path).layers == tuple(
        type(layer).__name__ for layer in [*cache.layers, *cache.cross_attention_cache.layers]
    )


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2]
)
def test_states_of_every_dtype_come_back_to_the_bit(dtype: torch.dtype, path: pathlib.Path) -> None:
    states = torch.randn(2, 3, 1100, 4).to(dtype), torch.randn(2, 3, 1100, 6).to(dtype)
    cache = kvlayers.DynamicCache([states, (states[1], states[0])])
    loaded = _reloaded(cache, path)
    for ours, theirs in zip([*loaded[0], *loaded[1]], [*cache[0], *cache[1]], strict=True):
        assert ours.dtype == dtype
        assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))
    prefix = load_cache(path, length=700)
    assert torch.equal(prefix.layers[0].keys.view(torch.uint8), states[0][:, :, :700].contiguous().view(torch.uint8))
    assert inspect_cache(path).dtype == dtype


@pytest.mark.parametrize(
    "make",
    [
        kvlayers.DynamicCache,
        lambda: kvlayers.DynamicCache(config=CONFIGS["gemma3"]()),
        lambda: kvlayers.StaticCache(CONFIGS["gemma3"](), 10),
        lambda: kvlayers.QuantizedCache(config=CONFIGS["llama"]()),
        lambda: kvlayers.SinkCache(16, config=CONFIGS["llama"]()),
        lambda: kvlayers.SinkCache(16, left_padding=[0, 3]),
        lambda: kvlayers.EncoderDecoderCache(kvlayers.DynamicCache(), kvlayers.DynamicCache()),
    ],
)
def test_an_empty_cache_comes_back_empty(make: Callable[[], Any], path: pathlib.Path) -> None:
    cache = make()
    loaded = _reloaded(cache, path)
    assert (_described(loaded), loaded.describe()) == (_described(cache), cache.describe())
    assert (loaded.batch_size, loaded.get_seq_length(), inspect_cache(path).length) == (-1, 0, 0)


def test_layers_without_tokens_stay_without(path: pathlib.Path) -> None:
    cache = kvlayers.DynamicCache()
    cache.update(torch.randn(1, 2, 3, 4), torch.randn(1, 2, 3, 4), layer_idx=2)
    cache.layers[1].lazy_initialization(torch.randn(1, 2, 0, 4), torch.randn(1, 2, 0, 4))
    loaded = _reloaded(cache, path)
    assert [layer.length for layer in loaded.layers] == [0, 0, 3]
    loaded.update(torch.randn(1, 2, 3, 4), torch.randn(1, 2, 3, 4), layer_idx=3)
    assert len(loaded) == 4


def test_states_with_gradients_are_saved_without(path: pathlib.Path) -> None:
    keys = torch.randn(1, 2, 3, 4, requires_grad=True)
    cache = kvlayers.DynamicCache([(keys, keys * 2)])
    loaded = _reloaded(cache, path)
    assert (loaded.layers[0].keys.requires_grad, cache.layers[0].keys.requires_grad) == (False, True)
    assert torch.equal(loaded.layers[0].keys, keys)


# What is written, and what is read


def test_only_live_tokens_are_written_and_packed_ones_stay_packed(path: pathlib.Path) -> None:
    states = torch.randn(2, 1, 2, 4096, 64).bfloat16()
    window = kvlayers.DynamicCache(config=tf.MistralConfig(num_hidden_layers=1, sliding_window=16))
    packed = kvlayers.QuantizedCache(nbits=4)
    for cache, most in ((window, 15 * 2 * 2 * 64 * 2 + 4096), (packed, 0.35 * states.nbytes)):
        cache.update(*states, layer_idx=0)
        save_cache(cache, path)
        assert path.stat().st_size < most
    assert path.stat().st_size < packed.nbytes + 4096


@pytest.mark.parametrize("kind", ["dynamic, mixed", "quantized", "sinks", "static", "recurrent and attending"])
def test_a_loaded_cache_has_memory_of_its_own(kind: str, path: pathlib.Path) -> None:
    model, cache = _filled(kind)
    save_cache(cache, path, config=model.config)
    loaded = load_cache(path, config=model.config)
    before = _content(loaded)
    # Were it a view of the map, what is written to the file would show.
    with open(path, "r+b") as file:
        file.write(b"\xff" * path.stat().st_size)
    assert _content(loaded) == before
    _decoded(model, loaded, prompt(2, 1))


def test_the_file_has_the_layout_that_is_documented(path: pathlib.Path) -> None:
    config = tf.LlamaConfig(num_hidden_layers=1, hidden_size=8, num_attention_heads=2, intermediate_size=8)
    cache = kvlayers.DynamicCache(config=config)
    cache.update(torch.zeros(1, 2, 3, 4), torch.ones(1, 2, 3, 4), layer_idx=0)
    save_cache(cache, path, token_ids=torch.tensor([[5, 6, 7]]), config=config, weights_id="mine")
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    metadata = header.pop("__metadata__")
    assert {name: (entry["dtype"], entry["shape"]) for name, entry in header.items()} == {
        "layers.0.keys": ("F32", [1, 2, 3, 4]),
        "layers.0.values": ("F32", [1, 2, 3, 4]),
        "token_ids": ("I64", [1, 3]),
        "digests": ("U8", [4, 32]),
    }
    assert set(metadata) == {"format", "format_version", "description"}
    assert (metadata["format"], metadata["format_version"]) == ("kvlayers.cache", "11")
    with safe_open(path, "pt") as file:
        assert file.get_tensor("layers.0.values").equal(torch.ones(1, 2, 3, 4))
    data = {name: content[8 + length :][slice(*entry["data_offsets"])] for name, entry in header.items()}
    digests = [hashlib.sha256(data[name]).digest() for name in ("layers.0.keys", "layers.0.values", "token_ids")]
    last = hashlib.sha256(content[: 8 + length] + b"".join(digests)).digest()
    assert (data["digests"], inspect_cache(path).checksum) == (b"".join([*digests, last]), last.hex())
    description = json.loads(metadata["description"])
    model = description.pop("model")
    assert model.pop("fields")["rope_parameters"] == {"rope_theta": 10000, "rope_type": "default"}
    assert model == {"name": None, "commit": None, "weights_id": "mine"}
    assert description == {
        "cache": {
            "batch_size": 1,
            "kind": "DynamicCache",
            "layers": [
                {"facts": {"length": 3}, "kind": "DynamicLayer", "recording": False, "tensors": ["keys", "values"]}
            ],
            "length": 3,
            "options": {"grows": False, "offloading": False, "only_non_sliding": False},
            "parts": [],
        },
        "dtypes": ["F32"],
        "rotaries": {},
        "versions": {
            "kvlayers": kvlayers.__version__,
            "torch": torch.__version__,
            "transformers": tf.__version__,
        },
    }


def test_a_file_says_what_is_in_it(path: pathlib.Path) -> None:
    model, cache = _filled("dynamic, mixed")
    save_cache(cache, path, token_ids=SEEN, config=model.config, weights_id=kvlayers.weights_id(model))
    seen = inspect_cache(path)
    assert (seen.kind, seen.length, seen.batch_size, seen.dtype) == ("DynamicCache", 103, 2, torch.float32)
    assert seen.layers == ("SlidingLayer", "SlidingLayer", "DynamicLayer", "SlidingLayer")
    assert seen.nbytes == path.stat().st_size
    assert (cast(Any, seen.model)["sliding_window"], seen.weights_id) == (WINDOW, kvlayers.weights_id(model))
    assert torch.equal(cast(torch.Tensor, seen.token_ids()), SEEN)
    save_cache(cache, path)
    other = inspect_cache(path)
    assert other.token_ids() is None
    assert other.fingerprint != seen.fingerprint
    with pytest.raises(CacheFileError, match="another one by now"):
        seen.token_ids()


def test_a_file_may_hold_ids_that_the_cache_has_not_seen_and_long_texts(path: pathlib.Path) -> None:
    _, cache = _filled("dynamic")
    ids, metadata = torch.cat([prompt(2, 100), prompt(2, 5, seed=1)], dim=1), {"of": "a chat", "ü": "ü{}" * 20_000}
    save_cache(cache, path, token_ids=ids, metadata=metadata)
    seen = inspect_cache(path)
    assert (seen.length, seen.metadata) == (103, metadata)
    assert torch.equal(cast(torch.Tensor, seen.token_ids()), ids)
    for loaded in (load_cache(path), load_cache(path, into=cache.fork()), load_cache(path, length=101)):
        # So that a prompt of another conversation is noticed.
        assert torch.equal(cast(torch.Tensor, loaded.known_ids), ids[:, : loaded.get_seq_length()])
    path.write_bytes(path.read_bytes().replace(b"a chat", b"a crab", 1))
    with pytest.raises(CacheFileError, match="checksum"):
        inspect_cache(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"# A page\n\nof text.", "is no saved cache: it does not begin as"),
        (b"", "got an empty file: .* save it again"),
    ],
)
@pytest.mark.parametrize("read", [inspect_cache, load_cache])
def test_a_text_is_no_saved_cache(read: Callable[..., Any], content: bytes, message: str, path: pathlib.Path) -> None:
    path.write_bytes(content)
    with pytest.raises(CacheFileError, match=message):
        read(path)


REFUSED: list[tuple[dict[str, Any], str]] = [
    *(({"metadata": metadata}, "must map names to texts") for metadata in ("a text", {"a": 5}, {5: "a"}, [("a", "b")])),
    *(({"metadata": {"a": text}}, "must have at most") for text in ("a" * 2**20, "[" * 60_000)),
    ({"metadata": {"a": "\ud800"}}, "lone surrogates"),
    *(
        ({"token_ids": ids}, "token_ids")
        for ids in (torch.zeros(1, 3), torch.zeros(1, 1, dtype=torch.int64), [[1]], torch.zeros(3, dtype=torch.int64))
    ),
    ({"weights_id": ""}, "weights_id"),
    *(({"device": device}, "device") for device in ("nowhere", "cuda:99", "meta", 3.5)),
    *(({"length": length}, "length") for length in (-1, 3, True, 2.0)),
]


@pytest.mark.parametrize(("options", "message"), REFUSED, ids=range(len(REFUSED)))
def test_options_that_cannot_be_are_refused(options: dict[str, Any], message: str, path: pathlib.Path) -> None:
    save, expected = "device" not in options and "length" not in options, (OptionError, RollbackError)
    if not save:
        save_cache(_small(), path)
    before = [*path.parent.iterdir()]
    with pytest.raises(expected, match=message):
        save_cache(_small(), path, **options) if save else load_cache(path, **options)
    assert [*path.parent.iterdir()] == before


@pytest.mark.parametrize("known", [103, 60])
def test_ids_that_the_cache_knows_are_in_its_file(known: int, path: pathlib.Path) -> None:
    _, cache = _filled("dynamic")
    cache.known_ids = SEEN[:, :known]
    save_cache(cache, path)
    assert torch.equal(cast(torch.Tensor, inspect_cache(path).token_ids()), SEEN[:, :known])
    for options in ({}, {"into": kvlayers.DynamicCache()}, {"length": 40}, {"length": 80}):
        found = load_cache(path, **options).known_ids
        assert torch.equal(cast(torch.Tensor, found), SEEN[:, : min(known, options.get("length", 103))])
    save_cache(cache, path, token_ids=SEEN)
    assert torch.equal(cast(torch.Tensor, load_cache(path).known_ids), SEEN)


@pytest.mark.parametrize(("row", "token"), [(0, 0), (1, 59)])
def test_ids_of_another_text_than_the_cache_knows_are_refused(row: int, token: int, path: pathlib.Path) -> None:
    _, cache = _filled("dynamic")
    cache.known_ids = SEEN[:, :60].clone()
    save_cache(cache, path)
    before, other = path.read_bytes(), SEEN.clone()
    other[row, token:] = 2
    told = f"token {token} of sequence {row} is 2 in `token_ids`, and {int(SEEN[row, token])} in the cache"
    with pytest.raises(OptionError, match=told):
        save_cache(cache, path, token_ids=other)
    assert path.read_bytes() == before
    # What the cache does not know cannot be compared.
    save_cache(cache, path, token_ids=torch.cat([SEEN[:, :60], other[:, 60:]], dim=1))


# A prefix


@pytest.mark.parametrize(("kind", "length"), once(KINDS, (0, 1, 7, 99, 103, 100), times=2))
def test_a_prefix_is_what_a_crop_leaves(kind: str, length: int, path: pathlib.Path) -> None:
    model, cache = _filled(kind)
    save_cache(cache, path, config=model.config)
    try:
        cache.crop(length) if length else cache.truncate(0)
    except RollbackError:
        with pytest.raises(RollbackError):
            load_cache(path, config=model.config, length=length)
        return
    loaded = load_cache(path, config=model.config, length=length)
    # In one piece, as the loaded cache is: attention to several pieces adds the same products in another order.
    cache.compact()
    assert _described(loaded) == _described(cache)
    assert _go_on_alike(model, loaded, cache)


def test_a_prefix_reads_its_own_bytes_alone(path: pathlib.Path) -> None:
    states = torch.randn(1, 2, 2048, 8), torch.randn(1, 2, 2048, 8)
    save_cache(kvlayers.DynamicCache([states]), path)
    content = bytearray(path.read_bytes())
    newest = states[0][0, -1, -1].numpy().tobytes()
    content[content.index(newest)] ^= 1
    path.write_bytes(content)
    with pytest.raises(CacheFileError, match="digest"):
        load_cache(path)
    assert load_cache(path, verify=False).get_seq_length() == 2048
    # The damage is behind the run of 512 tokens that the prefix ends in.
    prefix = load_cache(path, length=600)
    assert torch.equal(prefix.layers[0].keys, states[0][:, :, :600])


# Into a cache of the caller's


@pytest.mark.parametrize(
    ("kind", "into"),
    [
        ("static", lambda config: kvlayers.StaticCache(config, max_cache_len=400)),
        *(
            (kind, lambda config: kvlayers.DynamicCache(config=config, checkpoints={"every": 4, "most": 8}))
            for kind in ("recurrent, old", "recurrent and attending, old")
        ),
    ],
    ids=["a larger reservation", "other checkpoints", "other checkpoints beside attention"],
)
def test_a_cache_may_be_loaded_into_one_with_other_options(kind: str, into: Make, path: pathlib.Path) -> None:
    model, cache = _filled(kind)
    save_cache(cache, path)
    own = into(model.config)
    assert load_cache(path, into=own) is own
    assert _go_on_alike(model, own, cache)


def test_what_cannot_be_loaded_leaves_the_callers_cache_alone(path: pathlib.Path) -> None:
    (_, cache), (_, own) = _filled("dynamic, mixed"), _filled("dynamic, mixed", tokens=12)
    before, ids = _content(own), torch.full((2, 103), 0x0123456789ABCDEF)
    save_cache(cache, path, token_ids=ids)
    with pytest.raises(RollbackError):
        load_cache(path, into=own, length=50)
    # The ids, which come after the states.
    whole = ids.numpy().tobytes()
    path.write_bytes(path.read_bytes().replace(whole, whole[:-1] + b"x"))
    with pytest.raises(CacheFileError, match="damaged"):
        load_cache(path, into=own)
    pair = kvlayers.EncoderDecoderCache(_small(), _small())
    small = kvlayers.StaticCache(CONFIGS["llama"](), max_cache_len=50)
    for saved, into, error in (
        (_filled("dynamic")[1], own, StateMismatchError),
        (_small(), tf.DynamicCache(), OptionError),
        (_small(), pair, StateMismatchError),
        (pair, own, StateMismatchError),
        (_filled("static")[1], small, kvlayers.CapacityError),
    ):
        save_cache(saved, path)
        with pytest.raises(error):
            load_cache(path, into=into)  # type: ignore[arg-type]
    assert (_content(own), pair.get_seq_length(), small.get_seq_length()) == (before, 2, 0)
    assert load_cache(path, into=small, length=50).get_seq_length() == 50


def test_a_cache_on_disk_is_loaded_to_the_host_or_into_one_on_disk(path: pathlib.Path, tmp_path: pathlib.Path) -> None:
    model = tiny_model("llama")
    options: dict[str, Any] = {"offloading": True, "offload_device": "disk", "offload_directory": tmp_path}
    cache, other = (kvlayers.DynamicCache(config=model.config, **options) for _ in range(2))
    _logits(model, cache, prompt(2, 20))
    save_cache(cache, path)
    assert str(tmp_path).encode() not in path.read_bytes()
    assert _go_on_alike(model, load_cache(path), cache.fork())
    assert _go_on_alike(model, load_cache(path, into=other), cache)


def test_a_layer_of_transformers_is_loaded_with_a_config(path: pathlib.Path) -> None:
    cache, other = (kvlayers.Cache(layers=[kvlayers.DynamicLayer(), tf.cache_utils.DynamicLayer()]) for _ in range(2))
    for index in range(2):
        cache.update(torch.randn(1, 2, 3, 4), torch.randn(1, 2, 3, 4), layer_idx=index)
    save_cache(cache, path)
    load_cache(path, into=other)
    assert torch.equal(other.layers[1].keys, cache.layers[1].keys)


# Another model's


def llama_with(**fields: Any) -> Any:
    config = CONFIGS["llama"]()
    for name, value in fields.items():
        setattr(config, name, value)
    return config


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            llama_with(**versions.rope(rope_type="default", rope_theta=500000.0)),
            r"for another model, with rope_parameters\.rope_theta 10000 rather than 500000",
        ),
        (llama_with(hidden_size=64), "hidden_size"),
        (llama_with(rms_norm_eps=1e-5), "rms_norm_eps"),
        (llama_with(dtype="bfloat16"), "dtype"),
        (llama_with(num_key_value_heads=4), "num_key_value_heads"),
        (CONFIGS["qwen2"](), "another model, with model_type llama rather than qwen2 in"),
        # What tells models apart, rather than the dtype, which comes first by its name.
        (
            llama_with(dtype="bfloat16", head_dim=16, num_hidden_layers=3),
            "another model, with head_dim 8 rather than 16, num_hidden_layers 2 rather than 3 in",
        ),
    ],
)
def test_another_models_file_is_refused_with_what_differs(config: Any, message: str, path: pathlib.Path) -> None:
    save_cache(_filled("dynamic")[1], path, config=CONFIGS["llama"]())
    with pytest.raises(ModelMismatchError, match=message):
        load_cache(path, config=config)
    irrelevant = llama_with(attention_dropout=0.5, pad_token_id=3, use_cache=False, id2label={0: "a"})
    assert load_cache(path, config=irrelevant).get_seq_length() == 103


def test_without_a_saved_config_the_layers_are_compared(path: pathlib.Path) -> None:
    save_cache(_filled("dynamic, sliding")[1], path)
    assert load_cache(path, config=CONFIGS["mistral"]()).get_seq_length() == 103
    with pytest.raises(ModelMismatchError, match="4 layers"):
        load_cache(path, config=CONFIGS["gemma3"]())
    with pytest.raises(ModelMismatchError, match="sliding_window of 9"):
        load_cache(path, config=fresh_model("mistral", sliding_window=9))


def test_fields_of_another_version_of_transformers_are_not_compared(
    path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_cache(_filled("dynamic")[1], path, config=llama_with(field_of_old=3))
    with pytest.raises(ModelMismatchError, match="field_of_old"):
        load_cache(path, config=CONFIGS["llama"]())
    with pytest.raises(kvlayers.errors.ConfigError):
        load_cache(path, config={})
    monkeypatch.setattr(fingerprint, "INSTALLED", "5.99.0")
    assert load_cache(path, config=CONFIGS["llama"]()).get_seq_length() == 103


@pytest.mark.parametrize(("own", "other"), [("one", "two"), (None, "one")])
def test_other_weights_are_refused_where_they_have_a_name(own: str | None, other: str, path: pathlib.Path) -> None:
    save_cache(_small(), path, weights_id=own)
    for named in (own, None):
        assert load_cache(path, weights_id=named).get_seq_length() == 2
    with pytest.raises(ModelMismatchError, match="weights"):
        load_cache(path, weights_id=other)


@pytest.mark.parametrize(("place", "noted"), [("somebody/model", "somebody/model"), ("/home/somebody/model", None)])
def test_where_a_model_was_loaded_from_is_noted_unless_it_is_a_directory(
    place: str, noted: str | None, path: pathlib.Path
) -> None:
    save_cache(kvlayers.DynamicCache(), path, config=llama_with(_name_or_path=place, _commit_hash="abc"))
    seen = inspect_cache(path)
    assert (seen.model_name, seen.model_commit, b"/home" in path.read_bytes()) == (noted, "abc", False)


def test_a_cache_of_anothers_is_refused_by_name(path: pathlib.Path) -> None:
    with pytest.raises(OptionError, match=r"DynamicCache\(cache\)"):
        save_cache(tf.DynamicCache(), path)  # type: ignore[arg-type]


# Paths


@pytest.mark.skipif(os.geteuid() != 0, reason="a test that takes on another user must be root")
def test_a_directory_that_is_read_only_is_named() -> None:
    with tempfile.TemporaryDirectory() as place:
        # So that another user can look into it.
        os.chmod(place, 0o755)
        path = pathlib.Path(place, "chat.safetensors")
        save_cache(_small(), path)
        os.chmod(path, 0o444)
        before = path.read_bytes()
        os.seteuid(65534)
        try:
            for wrong, named in ((path, "write-protected"), (path.with_name("other"), "can be written to")):
                with pytest.raises(CachePathError, match=named):
                    save_cache(_small(), wrong)
            assert load_cache(path).get_seq_length() == 2
        finally:
            os.seteuid(0)
        assert [path.read_bytes(), os.listdir(place)] == [before, [path.name]]


@pytest.mark.parametrize("place", [".", "missing/chat", "/dev/null", "x" * 300, "link", "pipe"])
def test_paths_that_are_no_files_are_named(place: str, tmp_path: pathlib.Path) -> None:
    whole, link = tmp_path / "whole", tmp_path / "link"
    save_cache(_small(), whole)
    link.symlink_to(whole)
    os.mkfifo(tmp_path / "pipe")
    before = whole.read_bytes()
    for use in (functools.partial(save_cache, _small()), load_cache, inspect_cache):
        with pytest.raises(OSError if use is inspect_cache else CachePathError):
            use(tmp_path / place)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "pipe", "whole"]
    assert (link.is_symlink(), whole.read_bytes()) == (True, before)


@pytest.mark.parametrize("nothing", [3, None, "", "a\0b"])
@pytest.mark.parametrize("use", [functools.partial(save_cache, _small()), load_cache], ids=["save", "load"])
def test_what_is_no_path_is_refused(use: Callable[..., Any], nothing: Any) -> None:
    with pytest.raises(OptionError):
        use(nothing)


def test_the_mode_of_a_file_is_kept_and_that_of_a_new_one_is_the_systems(path: pathlib.Path) -> None:
    before = os.umask(0o027)
    try:
        save_cache(_small(), path)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    os.chmod(path, 0o600)
    save_cache(_small(), os.fsencode(path))  # type: ignore[arg-type]
    assert (stat.S_IMODE(path.stat().st_mode), list(path.parent.iterdir())) == (0o600, [path])


@pytest.mark.parametrize(
    ("name", "error", "expected"),
    [
        ("replace", OSError(28, "No space left on device"), CachePathError),
        ("fsync", OSError(28, "No space left on device"), CachePathError),
        ("replace", KeyboardInterrupt(), KeyboardInterrupt),
    ],
)
def test_a_file_that_cannot_be_put_in_place_leaves_the_old_one(
    name: str, error: BaseException, expected: Any, path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_cache(_small(), path)
    before = path.read_bytes()

    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(atomic_file.os, name, fail)
    with pytest.raises(expected):
        save_cache(kvlayers.DynamicCache(), path)
    assert [path.read_bytes(), list(path.parent.iterdir())] == [before, [path]]


# Other processes


DECODER = """
import sys, torch, kvlayers
torch.set_num_threads(1)
sys.path.insert(0, {tests!r})
from models import prompt
from test_persistence import KINDS, _decoded, _model
logits = []
for number, kind in enumerate({kinds!r}):
    model = _model(KINDS[kind][0])
    cache = kvlayers.load_cache({directory!r} + f"/{{number}}", config=model.config)
    logits += _decoded(model, cache, prompt(2, 1, seed=2))
torch.save(torch.stack(logits), {directory!r} + "/logits")
"""


@pytest.mark.slow
def test_another_process_decodes_on(tmp_path: pathlib.Path) -> None:
    kinds = ["dynamic, mixed", "quantized", "sinks", "recurrent and attending"]
    expected = []
    for number, kind in enumerate(kinds):
        model, cache = _filled(kind)
        save_cache(cache, tmp_path / str(number), config=model.config)
        expected += _decoded(model, cache, prompt(2, 1, seed=2))
    tests = str(pathlib.Path(__file__).parent)
    ran = fresh_process.run(DECODER.format(tests=tests, kinds=kinds, directory=str(tmp_path)))
    assert ran.returncode == 0, ran.stderr
    assert torch.equal(torch.load(tmp_path / "logits"), torch.stack(expected))
