"""Fixed scales of float8 caches: read from checkpoints, bit-equal to them, and kept by every operation of a cache."""

import copy
import json
import pathlib
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor

import kvlayers
import models
from kvlayers.errors import OptionError
from kvlayers.quantizers import SideOptions, backend, dequantize
from kvlayers.quantizers.checkpoint_scales import check_scheme, read_scales

LAYERS, KV_HEADS, HEAD_DIM = 2, 2, 8
EXACT = {"type": "float", "num_bits": 8, "strategy": "tensor", "dynamic": False, "symmetric": True}
ALL = {"residual_length": 0, "sink_tokens": 0}


def scales(layer: int) -> tuple[float, float]:
    return 0.0113 + 0.001 * layer, 0.0177


def checkpoint(
    path: pathlib.Path, tensors: dict[str, Tensor] | None = None, shards: int = 0, name: str = "self_attn.{}_scale"
) -> str:
    """A checkpoint with scales, in one file or in some with an index, beside a tensor that no one may read."""
    if tensors is None:
        tensors = {
            f"model.layers.{layer}.{name.format(side)}": torch.tensor([scale])
            for layer in range(LAYERS)
            for side, scale in zip("kv", scales(layer), strict=True)
        }
    tensors = {**tensors, "model.layers.0.self_attn.k_proj.weight_scale": torch.ones(3)}
    path.mkdir(exist_ok=True)
    if not shards:
        save_file(tensors, path / "model.safetensors")
        return str(path)
    places = {name: f"model-{index % shards}.safetensors" for index, name in enumerate(tensors)}
    for file in set(places.values()):
        save_file({name: tensor for name, tensor in tensors.items() if places[name] == file}, path / file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return str(path)


def config_of(path: str = "", **settings: Any) -> Any:
    config = copy.deepcopy(models.tiny_model("llama").config)
    config.name_or_path = path
    if settings:
        config.quantization_config = settings
    return config


def round_trip(states: Tensor, scale: Tensor | float) -> Tensor:
    """Written out: what a float8 code of a state stands for."""
    codes = (states.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    return (codes.float() * scale).to(states.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("given", [(0.0123456,), (0.01, 0.3)])
@pytest.mark.parametrize("side", ["keys", "values"])
def test_codes_and_states_are_bit_equal_to_those_of_the_scales(
    side: Any, given: tuple[float, ...], dtype: torch.dtype
) -> None:
    quantizer = backend("fp8").quantizer(SideOptions(side, 8, scales=given), HEAD_DIM)
    states = (torch.randn(3, KV_HEADS, 128, HEAD_DIM) * torch.logspace(-4, 2, 128)[:, None]).to(dtype)
    scale = torch.tensor(given).view(-1, 1, 1)
    groups = quantizer.quantize(states)
    codes = (states.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    assert torch.equal(groups.codes, codes.view(torch.uint8))
    assert torch.equal(dequantize(groups, quantizer.format, dtype), (codes.float() * scale).to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_cache_returns_the_states_of_the_checkpoints_scales(dtype: torch.dtype, tmp_path: pathlib.Path) -> None:
    config = config_of(checkpoint(tmp_path / "model"))
    cache = kvlayers.QuantizedCache("fp8", config=config, scales="checkpoint", **ALL)
    for layer in range(LAYERS):
        states = torch.randn(2, 2, KV_HEADS, 200, HEAD_DIM).to(dtype)
        cache.update(*states.unbind(), layer)
        held = cache.layers[layer]
        for seen, side, scale in zip((held.keys, held.values), states, scales(layer), strict=True):
            expected = round_trip(side, torch.tensor(scale))
            assert torch.equal(torch.as_tensor(seen + 0)[:, :, :192], expected[:, :, :192])


def expected_logits(config_path: str, ids: Tensor, packed: int, token: Tensor) -> Tensor:
    """Logits of a token behind `ids`, of which the first `packed` were rounded to float8."""
    llama = models.tiny_model("llama")
    exact = transformers.DynamicCache(config=llama.config)
    llama(ids, past_key_values=exact)
    for layer, held in enumerate(exact.layers):
        for name, scale in zip(("keys", "values"), scales(layer), strict=True):
            states = getattr(held, name)
            held_back = torch.cat((round_trip(states[:, :, :packed], torch.tensor(scale)), states[:, :, packed:]), 2)
            setattr(held, name, held_back)
    return llama(token, past_key_values=exact).logits


@torch.no_grad()
def test_decoding_goes_on_after_every_operation(tmp_path: pathlib.Path) -> None:
    path = checkpoint(tmp_path / "model", shards=2)
    llama, ids, token = models.tiny_model("llama"), torch.randint(2, 97, (2, 150)), torch.randint(2, 97, (2, 1))
    options = {"config": config_of(path), "scales": path, **ALL}
    expected = expected_logits(path, ids, 128, token)

    def check(cache: Any, wanted: Tensor = expected, next_token: Tensor = token) -> None:
        seen = llama(next_token, past_key_values=cache).logits
        torch.testing.assert_close(seen, wanted, rtol=0, atol=1e-5)

    def filled(**more: Any) -> Any:
        cache = kvlayers.QuantizedCache("fp8", **options, **more)
        llama(ids, past_key_values=cache)
        return cache

    check(filled())
    check(filled(offloading=True))
    check(copy.deepcopy(filled()))
    check(filled().fork())
    cropped = filled()
    llama(token, past_key_values=cropped)
    cropped.crop(150)
    check(cropped)
    swapped = filled()
    swapped.reorder_cache(torch.tensor([1, 0]))
    check(swapped, expected.flip(0), token.flip(0))
    kvlayers.save_cache(filled(), tmp_path / "cache.safetensors")
    loaded = kvlayers.load_cache(tmp_path / "cache.safetensors")
    assert loaded.quantization.facts() == filled().quantization.facts()
    check(loaded)
    used = filled()
    used.reset()
    llama(ids, past_key_values=used)
    check(used)


def test_generate_takes_the_scales_by_name(tmp_path: pathlib.Path) -> None:
    path = checkpoint(tmp_path / "model")
    llama, ids = models.tiny_model("llama"), torch.randint(2, 97, (1, 150))
    given = kvlayers.QuantizedCache("fp8", config=llama.config, scales=path, **ALL)
    options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False}
    expected = llama.generate(ids, past_key_values=given, **options)
    config = kvlayers.QuantizedCacheConfig(backend="fp8", scales=path, **ALL)
    with kvlayers.installed():
        seen = llama.generate(ids, cache_implementation="quantized", cache_config=config, **options)
    assert torch.equal(seen, expected)


def test_scales_may_be_given_for_each_layer_and_each_head() -> None:
    cache = kvlayers.QuantizedCache("fp8", scales=[((0.01, 0.3), 0.2), (torch.tensor([0.5, 2.0]), 0.1)], **ALL)
    states = torch.randn(2, 1, KV_HEADS, 70, HEAD_DIM)
    cache.update(*states.unbind(), 0)
    keys, values = (torch.as_tensor(held + 0)[:, :, :64] for held in (cache.layers[0].keys, cache.layers[0].values))
    assert torch.equal(keys, round_trip(states[0, :, :, :64], torch.tensor([0.01, 0.3]).view(2, 1, 1)))
    assert torch.equal(values, round_trip(states[1, :, :, :64], torch.tensor(0.2)))
    assert cache.quantization.of_layer(1).key_scales == (0.5, 2.0)


@pytest.mark.parametrize(
    "name",
    ["self_attn.{}_scale", "self_attn.attn.{}_scale", "self_attn.{0}_proj.{0}_scale", "self_attn.{}_proj.output_scale"],
)
def test_spellings_of_checkpoints(name: str, tmp_path: pathlib.Path) -> None:
    path = checkpoint(tmp_path / "model", name=name)
    keys, values = read_scales(path, [1], KV_HEADS)[0]
    assert (keys, values) == tuple((torch.tensor(scale).item(),) for scale in scales(1))


def test_one_scale_for_keys_and_values(tmp_path: pathlib.Path) -> None:
    tensors = {f"language_model.model.layers.{layer}.self_attn.kv_scale": torch.tensor(0.5) for layer in range(LAYERS)}
    assert read_scales(checkpoint(tmp_path / "model", tensors), [0, 1], KV_HEADS) == [((0.5,), (0.5,))] * 2


def without(layer: int, side: str) -> dict[str, Tensor]:
    return {
        f"model.layers.{other}.self_attn.{name}_scale": torch.tensor(0.1)
        for other in range(LAYERS)
        for name in "kv"
        if (other, name) != (layer, side)
    }


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({}, "has no scale for the keys of layer 0, nor 3 others"),
        (without(1, "v"), r"has no scale for the values of layer 1 \(such as model.layers.1.self_attn.v_scale\)"),
        (
            without(0, "k") | {"model.layers.0.self_attn.k_scale": torch.ones(3)},
            r"or one for each of 2 KV heads, got \[3\]",
        ),
        (without(0, "k") | {"model.layers.0.self_attn.k_scale": torch.ones(0)}, "must be one number"),
        (without(0, "k") | {"model.layers.0.self_attn.k_scale": torch.tensor(0.0)}, "must be positive and finite"),
        (without(0, "k") | {"model.layers.0.self_attn.k_scale": torch.tensor(-1.0)}, "must be positive and finite"),
        (without(0, "k") | {"model.layers.0.self_attn.k_scale": torch.tensor(float("nan"))}, "must be positive and"),
        (without(0, "k") | {"model.layers.0.self_attn.k_scale": torch.tensor(float("inf"))}, "must be positive and"),
        (
            without(9, "") | {"model.layers.0.self_attn.kv_scale": torch.tensor(0.1)},
            "two scales for the keys of layer 0",
        ),
    ],
)
def test_scales_that_are_missing_or_wrong_are_named(
    tensors: dict[str, Tensor], message: str, tmp_path: pathlib.Path
) -> None:
    config = config_of(checkpoint(tmp_path / "model", tensors))
    with pytest.raises(OptionError, match=message):
        kvlayers.QuantizedCache("fp8", config=config, scales="checkpoint")


def test_files_that_are_missing_or_damaged_are_named(tmp_path: pathlib.Path) -> None:
    def refused(message: str) -> None:
        with pytest.raises(OptionError, match=message):
            kvlayers.QuantizedCache("fp8", config=config_of(str(tmp_path / "model")), scales="checkpoint")

    (tmp_path / "model").mkdir()
    refused("expected a directory, or a repository on the Hub, with model.safetensors")
    (tmp_path / "model" / "model.safetensors").write_bytes(b"no such thing")
    refused("model.safetensors cannot be read")
    index = tmp_path / "model" / "model.safetensors.index.json"
    index.write_text("[]")
    refused("index.json cannot be read")
    index.write_text(json.dumps({"weight_map": {"model.layers.0.self_attn.k_scale": "gone.safetensors"}}))
    refused("names gone.safetensors, which is missing")


@pytest.mark.parametrize(
    "wrong",
    [
        {"type": "int"},
        {"num_bits": 4},
        {"dynamic": True},
        {"symmetric": False},
        {"strategy": "channel"},
        {"type": None},
    ],
)
def test_another_scheme_is_named(wrong: dict[str, Any], tmp_path: pathlib.Path) -> None:
    path = checkpoint(tmp_path / "model")
    kvlayers.QuantizedCache("fp8", config=config_of(path, kv_cache_scheme=EXACT), scales="checkpoint")
    check_scheme({**EXACT, "strategy": "attn_head"})
    with pytest.raises(OptionError, match=f"kv_cache_scheme of the checkpoint must be .* got .*'{next(iter(wrong))}'"):
        kvlayers.QuantizedCache("fp8", config=config_of(path, kv_cache_scheme={**EXACT, **wrong}), scales="checkpoint")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"backend": "native", "scales": [(0.1, 0.1)]}, "float8 numbers, which the native backend does not hold"),
        ({"scales": "checkpoint"}, "needs the model"),
        ({"scales": "checkpoint", "config": config_of()}, "has no name_or_path"),
        ({"scales": [(0.1, 0.1)], "config": config_of()}, "for each of the 2 layers of the model, got 1"),
        ({"scales": [(0.1, 0.1)], "q_group_size": 32}, "a group size has no effect, got 32"),
        ({"scales": [0.1, 0.1]}, r"must have a pair \(keys, values\) for each layer, got 0.1 for layer 0"),
        ({"scales": ["ab"]}, r"must have a pair"),
        ({"scales": []}, "or a pair"),
        ({"scales": 0.5}, "or a pair"),
        ({"scales": [(True, 0.1)]}, "must be positive and finite"),
        ({"scales": [("1", 0.1)]}, "must be positive and finite"),
        ({"scales": [((0.1, 0.1, 0.1), 0.1)] * 2, "config": config_of()}, "one for each of 2 KV heads, got 3"),
    ],
)
def test_options_that_do_not_fit_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        kvlayers.QuantizedCache(**{"backend": "fp8", **options})


def test_scales_for_other_heads_are_found_before_anything_is_held() -> None:
    cache = kvlayers.QuantizedCache("fp8", scales=[((0.1, 0.2, 0.3), 0.1)], **ALL)
    with pytest.raises(kvlayers.KVLayersError, match="one for each of 2 KV heads, got 3"):
        cache.update(*torch.randn(2, 1, KV_HEADS, 70, HEAD_DIM).unbind(), 0)
    assert cache.get_seq_length() == 0
    cache.update(*torch.randn(2, 1, 3, 70, HEAD_DIM).unbind(), 0)
