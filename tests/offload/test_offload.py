"""Offloaded caches: the same tokens, no more traffic than what is new, and nothing read before it is there."""

import copy
import errno
import functools
import os
import pathlib
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import kvlayers
import kvlayers.offload.offloading
import kvlayers.upstream.compat
from families import model_of
from kvlayers import CapacityError, OffloadedLayer, OptionError, offload
from matrix import once, product
from models import CONFIGS, fresh_model, prompt, tiny_model
from recording_transfers import RecordingTransfers, live_bytes

QUANTIZED = {"nbits": 4, "residual_length": 16, "sink_tokens": 4, "q_group_size": 4}
CACHES: dict[str, Callable[..., kvlayers.Cache]] = {
    "dynamic": lambda config, **options: kvlayers.DynamicCache(config=config, **options),
    "static": lambda config, **options: kvlayers.StaticCache(config, max_cache_len=160, **options),
    "quantized": lambda config, **options: kvlayers.QuantizedCache(config=config, **QUANTIZED, **options),
    "quantized windows": lambda config, **options: kvlayers.QuantizedCache(
        config=config, quantize_sliding=True, **QUANTIZED, **options
    ),
}
PROGRESS: dict[str, Any] = {
    "at once": lambda waiting: waiting,
    "as late as can be": lambda waiting: 0,
    "at random": None,
}


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[RecordingTransfers]:
    """Caches that are made with `offloading=True` move their states between two memories of the host."""
    return record(monkeypatch, None)


def record(monkeypatch: pytest.MonkeyPatch, progress: Any) -> list[RecordingTransfers]:
    made: list[RecordingTransfers] = []

    def transfers(device: torch.device) -> RecordingTransfers:
        made.append(RecordingTransfers(progress, seed=len(made)))
        return made[-1]

    monkeypatch.setattr(
        kvlayers.offload.offloading, "Prefetcher", functools.partial(offload.Prefetcher, transfers=transfers)
    )
    return made


def decode(model: Any, cache: Any, ids: Tensor, steps: int) -> Tensor:
    """Logits of a prompt's last token, and of each token that follows greedily."""
    logits = []
    with torch.no_grad():
        for _ in range(steps):
            logits.append(model(ids, past_key_values=cache).logits[:, -1])
            ids = logits[-1].argmax(-1, keepdim=True)
    return torch.stack(logits)


def pair(kind: str, family: str = "gemma3") -> tuple[Any, kvlayers.Cache, kvlayers.Cache]:
    """A model, a cache, and one that is offloaded."""
    model, make = tiny_model(family), CACHES[kind]
    return model, make(model.config), make(model.config, offloading=True, offload_only_non_sliding=False)


def dense(states: Iterable[Tensor]) -> list[Tensor]:
    """Keys and values, unpacked."""
    return [side + 0 for side in states]


# The same tokens


@pytest.mark.parametrize(("family", "kind", "progress"), product(["llama", "gemma3", "deepseek_v3"], CACHES, PROGRESS))
def test_logits_are_those_of_the_same_cache_on_its_device(
    monkeypatch: pytest.MonkeyPatch, family: str, kind: str, progress: str
) -> None:
    record(monkeypatch, PROGRESS[progress])
    model, plain, offloaded = pair(kind, family)
    # The first block is packed on the way.
    ids, steps = prompt(2, 76), 20
    assert torch.equal(decode(model, offloaded, ids, steps), decode(model, plain, ids, steps))
    assert offloaded.traffic.total.to_device > 0


def follow(model: Any, caches: tuple[kvlayers.Cache, kvlayers.Cache], ids: Tensor, steps: int) -> None:
    expected, seen = (decode(model, cache, ids, steps) for cache in caches)
    # A fork on its device reads shared segments, and one elsewhere copies: products are summed in another order.
    torch.testing.assert_close(seen, expected, rtol=1e-5, atol=1e-5)
    assert caches[1].get_seq_length() == caches[0].get_seq_length()


@pytest.mark.parametrize("kind", CACHES)
def test_what_is_read_stays_true_while_other_layers_are_read(recorded: list[RecordingTransfers], kind: str) -> None:
    model, plain, offloaded = pair(kind)
    for cache in (plain, offloaded):
        decode(model, cache, prompt(2, 90), 3)
    seen = [(layer.keys, layer.values) for layer in offloaded.layers]
    for layer, states in zip(plain.layers, seen, strict=True):
        torch.testing.assert_close(dense(states), dense((layer.keys, layer.values)), rtol=0, atol=0)
    offloaded.layers[0].keys = offloaded.layers[0].keys * 2
    torch.testing.assert_close(offloaded.layers[0].keys + 0, plain.layers[0].keys * 2)


# generate()

WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True, "temperature": 1.5},
    "beams": {"do_sample": False, "num_beams": 3},
    "several answers": {"do_sample": True, "num_return_sequences": 3},
    "prompt lookup": {"do_sample": False, "prompt_lookup_num_tokens": 3},
    "a prefill in chunks": {"do_sample": False, "prefill_chunk_size": 5},
    "a draft model": {"do_sample": False},
}
NAMES = {
    "offloaded": "dynamic",
    "offloaded_static": "static",
    "offloaded_hybrid": "hybrid",
    "offloaded_hybrid_chunked": "hybrid_chunked",
    "offloaded_quantized": "quantized",
}


@pytest.mark.parametrize(("name", "way"), once(["offloaded", "offloaded_static", "offloaded_quantized"], WAYS))
def test_generate_gives_the_tokens_of_the_cache_that_is_not_offloaded(
    installed: None, recorded: list[RecordingTransfers], name: str, way: str
) -> None:
    model, tokens = tiny_model("gemma3"), []
    how = WAYS[way] | ({"assistant_model": tiny_model("gemma3", seed=1)} if way == "a draft model" else {})
    options = QUANTIZED if "quantized" in name else None
    for implementation in (NAMES[name], name):
        torch.manual_seed(0)
        tokens.append(
            model.generate(
                prompt(1, 80), max_new_tokens=12, cache_implementation=implementation, cache_config=options, **how
            )
        )
    assert torch.equal(*tokens)
    assert sum(made.peak_bytes for made in recorded) > 0


@pytest.mark.parametrize(("name", "family"), once(NAMES, ["llama", "gemma3", "llama4"]))
def test_every_name_works_where_nothing_has_to_travel(installed: None, name: str, family: str) -> None:
    model = tiny_model(family)
    tokens = [
        model.generate(prompt(2, 9), max_new_tokens=20, do_sample=False, cache_implementation=implementation)
        for implementation in (NAMES[name], name)
    ]
    assert torch.equal(*tokens)


@pytest.mark.parametrize(
    ("name", "family"), once(["offloaded", "offloaded_static", "offloaded_quantized"], ["t5", "bart"])
)
def test_encoder_decoders_send_cross_attention_once(
    installed: None, recorded: list[RecordingTransfers], name: str, family: str
) -> None:
    model, ids = tiny_model(family), prompt(2, 14)
    outputs = [
        model.generate(
            ids, max_new_tokens=12, do_sample=False, cache_implementation=implementation, return_dict_in_generate=True
        )
        for implementation in (NAMES[name], name)
    ]
    assert torch.equal(outputs[0].sequences, outputs[1].sequences)
    cross = outputs[1].past_key_values.cross_attention_cache
    own = outputs[1].past_key_values.self_attention_cache
    assert own.offloading
    assert cross.offloading
    bytes_held = sum(layer.wrapped.keys.nbytes + layer.wrapped.values.nbytes for layer in cross.layers)
    if name != "offloaded_quantized":
        assert cross.traffic.total.to_host == bytes_held


# Traffic


@pytest.mark.parametrize("kind", ["dynamic", "static", "quantized"])
def test_a_step_sends_the_new_tokens_and_brings_what_is_held(recorded: list[RecordingTransfers], kind: str) -> None:
    model = fresh_model("llama", num_hidden_layers=3)
    cache = CACHES[kind](model.config, offloading=True)
    new_token = 2 * 2 * 2 * 8 * 4
    ids, packing_steps = decode(model, cache, prompt(2, 73), 3)[-1].argmax(-1, keepdim=True), 0
    for _ in range(30):
        held = [live_bytes(layer.wrapped.store) for layer in cache.layers]
        ids = decode(model, cache, ids, 1)[-1].argmax(-1, keepdim=True)
        step = cache.traffic.steps[-1]
        assert [step[index].to_device for index in range(3)] == held
        if kind == "quantized" and any(traffic.to_host != new_token for traffic in step.values()):
            # A step that packs a block sends its codes, and what of the residual has moved.
            packing_steps += 1
            continue
        assert [step[index].to_host for index in range(3)] == [new_token] * 3
        assert cache.traffic.of_step() == offload.Traffic(3 * new_token, sum(held))
    assert packing_steps == (kind == "quantized")


def test_windows_stay_on_the_device_where_they_are_asked_to(recorded: list[RecordingTransfers]) -> None:
    config = tiny_model("gemma3").config
    kinds = [type(layer).__name__ for layer in kvlayers.StaticCache(config, max_cache_len=64, offloading=True).layers]
    assert kinds == ["StaticSlidingLayer", "StaticSlidingLayer", "OffloadedLayer", "StaticSlidingLayer"]
    assert {type(layer) for layer in kvlayers.OffloadedCache(config=config).layers} == {OffloadedLayer}
    model = tiny_model("gemma3")
    plain, offloaded = (kvlayers.StaticCache(config, 64, offloading=offloading) for offloading in (False, True))
    follow(model, (plain, offloaded), prompt(2, 21), 30)
    assert set(offloaded.traffic.steps[-1]) == {0}


def test_a_static_cache_stays_at_its_addresses(recorded: list[RecordingTransfers]) -> None:
    model, _, cache = pair("static", "llama")
    decode(model, cache, prompt(2, 21), 2)
    addresses = [layer.wrapped.keys.data_ptr() for layer in cache.layers]
    decode(model, cache, prompt(2, 1), 60)
    cache.crop(-5)
    cache.reorder_cache(torch.tensor([1, 0]))
    decode(model, cache, prompt(2, 1), 5)
    assert [layer.wrapped.keys.data_ptr() for layer in cache.layers] == addresses


# Disk


@pytest.mark.parametrize("device", ["cpu", "disk"])
def test_caches_within_the_host_decode_and_nothing_travels_or_stays_in_a_file(
    device: str, tmp_path: pathlib.Path
) -> None:
    model = tiny_model("gemma3")
    place = {"offload_device": "disk", "offload_directory": tmp_path} if device == "disk" else {}
    for kind in CACHES:
        plain = CACHES[kind](model.config)
        elsewhere = CACHES[kind](model.config, offloading=True, offload_only_non_sliding=False, **place)
        follow(model, (plain, elsewhere), prompt(2, 80), 10)
        for cache in (plain, elsewhere):
            cache.crop(0) if kind == "static" else cache.batch_select_indices([1])
        follow(model, (plain, elsewhere), prompt(plain.batch_size, 1), 10)
        assert elsewhere.traffic.total == offload.Traffic()
    assert list(tmp_path.iterdir()) == []


def test_a_cache_on_disk_with_another_device_decodes(
    recorded: list[RecordingTransfers], tmp_path: pathlib.Path
) -> None:
    model = tiny_model("gemma3")
    on_disk = kvlayers.OffloadedCache(config=model.config, offload_device="disk", offload_directory=tmp_path)
    follow(model, (kvlayers.DynamicCache(config=model.config), on_disk), prompt(2, 21), 30)
    assert recorded[0].peak_bytes > 0
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(params=["full disk", "no memory"])
def runs_out(request: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """A function that lets allocations fail after so many more."""
    left = [10**9]
    owner, name, error = {
        "full disk": (os, "posix_fallocate", OSError(errno.ENOSPC, "No space left on device")),
        "no memory": (offload.HostMemory, "empty", CapacityError("expected 1 byte of the host, but had none")),
    }[request.param]
    allocate = getattr(owner, name)

    def allocate_or_fail(*arguments: Any) -> Any:
        left[0] -= 1
        if left[0] < 0:
            raise error
        return allocate(*arguments)

    monkeypatch.setattr(owner, name, allocate_or_fail)
    return functools.partial(left.__setitem__, 0)


@pytest.mark.parametrize(("kind", "after"), once(CACHES, [0, 1, 3]))
@pytest.mark.skipif(not os.path.exists("/proc"), reason="takes space on disk as Linux does")
def test_where_there_is_no_room_the_error_says_so_and_the_layer_is_as_it_was(
    recorded: list[RecordingTransfers],
    runs_out: Callable[[int], None],
    request: Any,
    tmp_path: pathlib.Path,
    kind: str,
    after: int,
) -> None:
    model = tiny_model("llama")
    disk = "full disk" in request.node.name
    place = {"offload_device": "disk", "offload_directory": tmp_path} if disk else {}
    plain, cache = CACHES[kind](model.config), CACHES[kind](model.config, offloading=True, **place)
    follow(model, (plain, cache), prompt(2, 21), 3)
    runs_out(after)
    layer, other = cache.layers[0], plain.layers[0]
    generator = torch.Generator().manual_seed(0)

    def take_in(tokens: int) -> None:
        for new in torch.randn(tokens, 2, 2, 2, 1, 8, generator=generator):
            seen = dense(layer.update(*new))
            # Keys that have factors are multiplied in the order of the host's memory: a rounding of float32.
            torch.testing.assert_close(seen, dense(other.update(*new)), rtol=1e-6, atol=1e-6)

    with pytest.raises(CapacityError):
        take_in(600)
    assert layer.length == other.length
    if kind == "static":
        # Its memory is there from the beginning.
        assert layer.length == 160
        return
    torch.testing.assert_close(dense(layer.peek()), dense(other.peek()), rtol=0, atol=0)
    runs_out(10**9)
    take_in(3)


# Bad input

CONFIG = CONFIGS["llama"]()
BAD: dict[str, tuple[type[Exception], str, Callable[[], object]]] = {
    "a directory that is not there": (
        OptionError,
        "must be a directory in which files can be made",
        lambda: kvlayers.OffloadedCache(offload_device="disk", offload_directory="/proc/nowhere"),
    ),
    "a device that is none": (
        OptionError,
        "`offload_device` must be one of 'cpu', 'disk', got 'tape'",
        lambda: kvlayers.DynamicCache(offloading=True, offload_device="tape"),
    ),
    "disk without a directory": (
        OptionError,
        "`offload_directory` belongs to",
        lambda: kvlayers.StaticCache(CONFIG, 8, offloading=True, offload_device="disk"),
    ),
    "a directory without disk": (
        OptionError,
        "`offload_directory` belongs to",
        lambda: kvlayers.QuantizedCache(offloading=True, offload_directory="/tmp"),
    ),
    "disk without offloading": (
        OptionError,
        "`offloading` must be True",
        lambda: kvlayers.DynamicCache(offload_device="disk", offload_directory="/tmp"),
    ),
    "a name that is nearly one": (
        kvlayers.errors.RegistryError,
        "did you mean .static.",
        lambda: kvlayers.make_cache("Statc", CONFIG),
    ),
    "a misspelt option": (
        OptionError,
        "`offload_dir` is no option of OffloadedCache: did you mean 'offload_directory'",
        lambda: kvlayers.OffloadedCache(offload_dir="/tmp"),
    ),
    "a layer that cannot": (
        kvlayers.errors.UnsupportedLayerError,
        "must be a layer that holds tokens",
        lambda: OffloadedLayer(transformers.cache_utils.DynamicLayer()),
    ),
    "a layer of transformers that holds tokens": (
        kvlayers.errors.UnsupportedLayerError,
        "Layers must be of a kind that can be offloaded",
        lambda: kvlayers.Cache(layers=[transformers.cache_utils.DynamicLayer()], offloading=True),
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_a_named_error(case: str) -> None:
    error, message, act = BAD[case]
    with pytest.raises(error, match=message):
        act()


@pytest.mark.parametrize(
    ("family", "name", "offloaded"),
    [
        *(("mamba", "offloaded", 0), ("jamba", "offloaded", 2)),
        *(("zamba2", "offloaded", 1), ("falcon_h1", "offloaded_static", 2)),
    ],
)
def test_recurrent_states_stay_on_the_device(
    installed: None, recorded: list[RecordingTransfers], family: str, name: str, offloaded: int
) -> None:
    model, how = model_of(family), {"max_new_tokens": 12, "do_sample": False, "return_dict_in_generate": True}
    expected = model.generate(prompt(2, 12), **how)
    output = model.generate(prompt(2, 12), **how, cache_implementation=name)
    assert torch.equal(output.sequences, expected.sequences)
    cache = output.past_key_values
    parts = [layer.attention if isinstance(layer, kvlayers.HybridLayer) else layer for layer in cache.layers]
    assert sum(isinstance(part, OffloadedLayer) for part in parts) == offloaded
    if offloaded:
        assert cache.traffic.total.to_device > 0
    assert cache.truncate(14) >= 0


def test_forks_are_brought_by_prefetchers_of_their_own(recorded: list[RecordingTransfers]) -> None:
    """As each may be in a thread of its own, and a prefetcher is one thread's. What travels counts for all."""
    model, _, cache = pair("dynamic", "llama")
    decode(model, cache, prompt(2, 9), 3)
    forks = [cache, *cache.fork(2), copy.deepcopy(cache)]
    prefetchers = [{id(layer.prefetcher) for layer in fork.layers} for fork in forks]
    assert [len(own) for own in prefetchers] == [1] * 4
    assert len(set.union(*prefetchers)) == 4
    before = cache.traffic.total.to_device
    decode(model, forks[1], prompt(2, 1), 3)
    assert cache.traffic.total.to_device > before
    assert "to_device=" in repr(cache.traffic)
    grown = kvlayers.OffloadedCache()
    twin = grown.fork()
    twin.update(torch.ones(1, 1, 2, 4), torch.ones(1, 1, 2, 4), layer_idx=0)
    assert twin.layers[0].prefetcher is twin._prefetcher is not grown._prefetcher


@pytest.mark.usefixtures("counted")
@torch.no_grad()
def test_compiled_code_that_calls_no_operators_breaks_its_graph_at_offloaded_layers(
    recorded: list[RecordingTransfers], monkeypatch: pytest.MonkeyPatch
) -> None:
    # As before torch 2.13.
    monkeypatch.setattr(kvlayers.upstream.compat, "COMPILES_TENSOR_SUBCLASSES", False)

    def attend(cache: kvlayers.Cache, new: Tensor) -> Tensor:
        attended = new[2]
        for index in range(2):
            keys, values = cache.update(new[0], new[1], index)
            attended = torch.nn.functional.scaled_dot_product_attention(attended, keys, values)
        return attended

    _, plain, offloaded = pair("static", "llama")
    compiled = torch.compile(attend, backend="eager")
    for tokens in (9, 1, 1, 1):
        new = torch.randn(3, 2, 2, tokens, 8)
        assert torch.equal(compiled(offloaded, new), attend(plain, new))
    assert offloaded.traffic.total.to_device > 0
