"""Fixed scales of float8 caches: read from checkpoints, bit-equal to them, and kept by every operation of a cache."""

import copy
import json
import pathlib
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError
from safetensors.torch import save_file
from torch import Tensor

import kvlayers
import models
from kvlayers.errors import OptionError
from kvlayers.kernels.codes.groups import scales_by_head
from kvlayers.quantized.quantizers.checkpoint_scales import read_scales
from kvlayers.quantizers import CodeFormat
from kvlayers.stores import QuantizedStore
from kvlayers.upstream import compat
from kvlayers.upstream.model_layers import layer_specs

LAYERS, KV_HEADS, HEAD_DIM = 2, 2, 8
INDEX = "model.safetensors.index.json"
OUT_OF_RANGE = r"must be from 1.2e-38 to 6.6e\+35"
EXACT = {"type": "float", "num_bits": 8, "strategy": "tensor", "dynamic": False, "symmetric": True}
ALL = {"residual_length": 0, "sink_tokens": 0}
FALCON = transformers.FalconConfig(num_hidden_layers=1, num_attention_heads=4, multi_query=True, alibi=False)


def scales(layer: int) -> tuple[float, float]:
    return 0.0113 + 0.001 * layer, 0.0177


def checkpoint(path: pathlib.Path, tensors: dict[str, Tensor] | None = None, shards: int = 0) -> str:
    """A checkpoint with scales, in one file or in some with an index, beside a tensor that no one may read."""
    if tensors is None:
        tensors = {
            f"model.layers.{layer}.self_attn.{side}_scale": torch.tensor([scale])
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
    (path / INDEX).write_text(json.dumps({"weight_map": places}))
    return str(path)


def config_of(path: str = "", **settings: Any) -> Any:
    config = copy.deepcopy(models.tiny_model("llama").config)
    config.name_or_path = path
    if settings:
        (pathlib.Path(path) / "config.json").write_text(json.dumps({"quantization_config": settings}))
    return config


@pytest.mark.parametrize("of_heads", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_cache_returns_the_states_of_its_scales(dtype: torch.dtype, of_heads: bool, tmp_path: pathlib.Path) -> None:
    config = config_of(checkpoint(tmp_path / "model"))
    given = [((0.01, 0.3), 0.02), (0.02, (0.3, 0.01))] if of_heads else [scales(layer) for layer in range(LAYERS)]
    cache = kvlayers.QuantizedCache("fp8", config=config, scales=given if of_heads else "checkpoint", **ALL)
    for held, of_layer in zip(cache.layers, given, strict=True):
        # Some are larger than the largest code, and some are smaller than the smallest one.
        states = (torch.randn(2, 2, KV_HEADS, 200, HEAD_DIM) * torch.logspace(-4, 2, 200)[:, None]).to(dtype)
        held.update(*states.unbind())
        for seen, side, numbers in zip((held.keys, held.values), states, of_layer, strict=True):
            # Written out: what a float8 code of a state stands for.
            scale = torch.tensor(numbers).view(-1, 1, 1)
            codes = (side.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
            assert torch.equal((seen + 0)[:, :, :192], (codes.float() * scale).to(dtype)[:, :, :192])


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
    given = [((0.01, 0.3), 0.2), (torch.tensor([0.5, 2.0]), 0.1)]
    layers = [kvlayers.QuantizedCache("fp8", scales=given).quantization.of_layer(layer) for layer in range(2)]
    assert [layer.key_scales for layer in layers] == [pytest.approx((0.01, 0.3)), (0.5, 2.0)]
    assert [layer.value_scales for layer in layers] == [pytest.approx((0.2,)), pytest.approx((0.1,))]


@pytest.mark.parametrize(
    "names",
    [
        *(
            {side: f"model.layers.1.{name.format(side)}" for side in "kv"}
            for name in ("self_attn.{}_scale", "self_attn.attn.{}_scale", "self_attn.{0}_proj.{0}_scale")
        ),
        {side: f"model.layers.1.self_attn.{side}_proj.output_scale" for side in "kv"},
        {"kv": "language_model.model.layers.1.self_attn.kv_scale"},
    ],
    ids=lambda names: next(iter(names.values())),
)
def test_spellings_of_checkpoints(names: dict[str, str], tmp_path: pathlib.Path) -> None:
    numbers = {side: 0.5 + number for number, side in enumerate(names)}
    tensors = {name: torch.tensor(numbers[side]) for side, name in names.items()}
    (found,) = read_scales(checkpoint(tmp_path / "model", tensors), {1: KV_HEADS})
    assert found == ((0.5,), (numbers.get("v", 0.5),))


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
        (without(0, "k") | {"model.layers.0.self_attn.k_scale": torch.tensor(0.0)}, OUT_OF_RANGE),
        (without(0, "k") | {"model.layers.0.self_attn.k_scale": torch.tensor(-1.0)}, OUT_OF_RANGE),
        (without(0, "k") | {"model.layers.0.self_attn.k_scale": torch.tensor(float("nan"))}, OUT_OF_RANGE),
        (without(0, "k") | {"model.layers.0.self_attn.k_scale": torch.tensor(float("inf"))}, OUT_OF_RANGE),
        (without(0, "k") | {"model.layers.0.self_attn.k_scale": torch.tensor(1e36)}, OUT_OF_RANGE),
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


GONE = json.dumps({"weight_map": {"model.layers.0.self_attn.k_scale": "gone.safetensors"}})


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (
            {},
            "model.safetensors of .* cannot be read: .* Pass the path of a checkpoint with model.safetensors or model",
        ),
        ({"model.safetensors": "no such thing"}, "model.safetensors cannot be read"),
        ({"config.json": "{"}, "config.json cannot be read"),
        ({INDEX: "[]"}, "index.json cannot be read"),
        (
            {INDEX: GONE},
            "gone.safetensors of .* cannot be read: .* does not appear to have a file named gone.safetensors",
        ),
    ],
)
def test_files_that_are_missing_or_damaged_are_named(
    files: dict[str, str], message: str, tmp_path: pathlib.Path
) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(OptionError, match=message):
        kvlayers.QuantizedCache("fp8", config=config_of(str(tmp_path)), scales="checkpoint")


WRONG: tuple[dict[str, Any], ...] = (
    *({"type": "int"}, {"type": None}, {"num_bits": 4}, {"dynamic": True}, {"symmetric": False}),
    {"strategy": "channel"},
)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        *(({"kv_cache_scheme": known}, None) for known in (EXACT, {**EXACT, "strategy": "attn_head"}, "static")),
        *(({"quantization_config": other}, None) for other in (8, "fp8")),
        *(({"kv_cache_scheme": word}, f"must be 'static' or a mapping, got {word!r}") for word in ("dynamic", 8)),
        *(({"kv_cache_scheme": {**EXACT, **wrong}}, f"must be .* got .*'{next(iter(wrong))}'") for wrong in WRONG),
        ({"quantization_config": {"kv_cache_scheme": {**EXACT, "num_bits": 4}}}, "must be .* got {'num_bits': 4}"),
    ],
    ids=str,
)
def test_another_scheme_is_named(settings: dict[str, Any], message: str | None, tmp_path: pathlib.Path) -> None:
    path = checkpoint(tmp_path / "model")
    of_the_model = config_of(path, **settings)
    for config, given, whose in (
        (of_the_model, "checkpoint", "of the .*"),
        (config_of(), path, "of the checkpoint"),
        (config_of(), tmp_path / "model" / "model.safetensors", "of the checkpoint"),
    ):
        if message is None:
            cache = kvlayers.QuantizedCache("fp8", config=config, scales=given)
            assert cache.quantization.of_layer(1).keys.scales == (torch.tensor(scales(1)[0]).item(),)
        else:
            with pytest.raises(OptionError, match=f"kv_cache_scheme {whose} {message}"):
                kvlayers.QuantizedCache("fp8", config=config, scales=given)


def test_windows_get_scales_if_they_are_quantized(tmp_path: pathlib.Path) -> None:
    config = copy.deepcopy(models.tiny_model("gemma2").config)
    config.name_or_path = checkpoint(tmp_path / "model")
    kinds = [spec.layer_type for spec in layer_specs(config)]
    assert set(kinds) == {"sliding_attention", "full_attention"}
    for quantize_sliding in (False, True):
        cache = kvlayers.QuantizedCache(
            "fp8", config=config, scales="checkpoint", quantize_sliding=quantize_sliding, residual_length=0
        )
        for layer, kind in enumerate(kinds):
            expected = torch.tensor(scales(layer)).tolist() if quantize_sliding or kind == "full_attention" else []
            held = cache.quantization.of_layer(layer)
            assert [*held.keys.scales, *held.values.scales] == expected
            if expected:
                cache.update(*torch.randn(2, 1, KV_HEADS, 70, HEAD_DIM).unbind(), layer)
                assert [*cache.layers[layer].store.quantization.keys.scales] == expected[:1]


def test_scales_for_no_layer_are_refused(tmp_path: pathlib.Path) -> None:
    config = copy.deepcopy(models.tiny_model("mistral").config)
    config.name_or_path = checkpoint(tmp_path / "model")
    for given in ("checkpoint", [(0.1, 0.1)] * 2):
        with pytest.raises(OptionError, match="got a model with layers of sliding_attention alone: leave out `scales`"):
            kvlayers.QuantizedCache("fp8", config=config, scales=given)
    kvlayers.QuantizedCache("fp8", config=config, scales="checkpoint", quantize_sliding=True)


@pytest.mark.skipif(not compat.CACHES_LATENTS, reason="this version does not cache latents")
def test_latents_and_rotated_keys_have_the_scale_of_the_keys(tmp_path: pathlib.Path) -> None:
    config = copy.deepcopy(models.tiny_model("deepseek_v3").config)
    only_keys = {f"model.layers.{layer}.self_attn.k_scale": torch.tensor(0.5) for layer in range(LAYERS)}
    for tensors in (only_keys, without(9, "") | only_keys):
        config.name_or_path = checkpoint(tmp_path / "model", tensors)
        cache = kvlayers.QuantizedCache("fp8", config=config, scales="checkpoint")
        assert cache.quantization.of_layer(0).values.scales == cache.quantization.of_layer(0).keys.scales == (0.5,)
    config.name_or_path = checkpoint(tmp_path / "model", {})
    with pytest.raises(OptionError, match="no scale for the keys of layer 0, nor 1 others"):
        kvlayers.QuantizedCache("fp8", config=config, scales="checkpoint")


@pytest.mark.parametrize("shards", [0, 2])
def test_scales_of_other_modules_are_not_read(shards: int, tmp_path: pathlib.Path) -> None:
    others = ("vision_tower.vision_model.encoder", "audio_tower", "model.visual", "model.encoder", "mtp")
    wrong = {f"{module}.layers.0.self_attn.k_scale": torch.zeros(3) for module in others}
    wrong["model.layers.7.self_attn.k_scale"] = torch.zeros(3)
    path = checkpoint(tmp_path / "model", without(9, "") | wrong, shards)
    scale = torch.tensor(0.1).item()
    assert read_scales(path, {0: KV_HEADS, 1: KV_HEADS}) == [((scale,), (scale,))] * 2


def on_the_hub(monkeypatch: pytest.MonkeyPatch, path: str, failure: Exception | None = None) -> list[tuple[str, Any]]:
    """Replace the Hub by a directory whose missing files raise `failure`; what was asked for is noted."""
    asked = []
    absent = failure or EntryNotFoundError("no such file")

    def on_disk(repo_id: str, filename: str, **options: Any) -> str | None:
        file = pathlib.Path(path) / filename
        return str(file) if file.is_file() else None

    def download(repo_id: str, filename: str, *, revision: str | None = None, **options: Any) -> None:
        asked.append((filename, revision))
        if on_disk(repo_id, filename) is None:
            raise absent

    monkeypatch.setattr(transformers.utils.hub, "hf_hub_download", download)
    monkeypatch.setattr(transformers.utils.hub, "try_to_load_from_cache", on_disk)
    return asked


@pytest.mark.parametrize("shards", [0, 2])
def test_files_of_the_hub_are_those_of_the_commit(
    shards: int, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    asked = on_the_hub(monkeypatch, checkpoint(tmp_path / "model", shards=shards))
    config = config_of("someone/some-model")
    config._commit_hash = "abc"
    for given, commit in (("checkpoint", "abc"), ("someone/some-model", "abc"), ("someone/another", None)):
        asked.clear()
        kvlayers.QuantizedCache("fp8", config=config, scales=given)
        assert {revision for _, revision in asked} == {commit}
        assert ("config.json", commit) in asked


@pytest.mark.parametrize(
    ("failure", "message"),
    [
        (LocalEntryNotFoundError("no network"), "We couldn't connect to"),
        (OSError("no access"), "no access"),
        (ValueError("no such name"), "no such name"),
    ],
)
def test_a_hub_out_of_reach_is_named(
    failure: Exception, message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    # The index is on disk, and whether there is a single file too is not known.
    path = checkpoint(tmp_path / "model", shards=2)
    config_of(path, kv_cache_scheme=EXACT)
    config = config_of("someone/some-model")
    on_the_hub(monkeypatch, path, failure)
    kvlayers.QuantizedCache("fp8", config=config, scales="checkpoint")
    on_the_hub(monkeypatch, str(tmp_path / "nowhere"), failure)
    with pytest.raises(OptionError, match=f"config.json of 'someone/some-model' cannot be read: {message}"):
        kvlayers.QuantizedCache("fp8", config=config, scales="checkpoint")
    on_the_hub(monkeypatch, str(tmp_path / "nowhere"))
    with pytest.raises(OptionError, match="someone/some-model does not appear to have"):
        kvlayers.QuantizedCache("fp8", config=config, scales="checkpoint")


def test_a_config_of_options_names_a_backend_that_takes_no_scales() -> None:
    with pytest.raises(OptionError, match="which the native backend does not hold"):
        kvlayers.QuantizedCacheConfig(backend="native", scales="checkpoint")
    assert kvlayers.QuantizedCacheConfig(backend="FP8", scales="checkpoint")["scales"] == "checkpoint"
    assert kvlayers.QuantizedCacheConfig(scales="checkpoint") == {"scales": "checkpoint"}


SCALED = {"backend": "fp8", "key_scales": 0.03, "value_scales": 0.02, "residual_length": 0, "sink_tokens": 0}


@pytest.mark.parametrize("name", ["sink", "evicting"])
@torch.no_grad()
def test_other_caches_are_saved_with_their_scales(name: str, tmp_path: pathlib.Path) -> None:
    llama, ids, token = models.tiny_model("llama"), torch.randint(2, 97, (2, 230)), torch.randint(2, 97, (2, 1))
    cache: Any
    if name == "sink":
        cache = kvlayers.SinkCache(200, config=llama.config, quantization=SCALED)
    else:
        cache = kvlayers.EvictingCache(llama.config, rule="knorm", keep=0.8, quantization=SCALED)
    llama(ids, past_key_values=cache)
    kvlayers.save_cache(cache, tmp_path / "cache.safetensors")
    loaded = kvlayers.load_cache(tmp_path / "cache.safetensors", config=llama.config)
    facts, expected_facts = (each.describe().get("evicting", each.describe()) for each in (loaded, cache))
    assert facts["quantization"] == expected_facts["quantization"]
    assert facts["quantization"]["key_scales"] == repr(torch.tensor(0.03).item())
    expected = llama(token, past_key_values=cache).logits
    assert torch.equal(llama(token, past_key_values=loaded).logits, expected)


def test_caches_that_evict_refuse_scales_of_single_heads() -> None:
    scaled = {**SCALED, "value_scales": (0.1, 0.2)}
    for make in (
        lambda: kvlayers.EvictingCache(quantization=scaled),
        lambda: kvlayers.EvictingCache(models.tiny_model("llama").config, per_head=False, quantization=scaled),
        lambda: kvlayers.EvictingLayer("knorm", 0.5, store=QuantizedStore(kvlayers.Quantization(**scaled))),
    ):
        with pytest.raises(OptionError, match="one scale for all KV heads, got 2 for the values"):
            make()


def test_scales_are_made_once_for_a_device() -> None:
    code_format = CodeFormat(8, 1, 8, floating=True, fixed_scales=(0.1, 0.2))
    states = torch.ones(1, 2, 4, 8)
    with torch.inference_mode():
        first = scales_by_head(code_format, states)
    again = scales_by_head(code_format, states[0][None, :, :, None])
    assert first.data_ptr() == again.data_ptr()
    assert not first.is_inference()
    assert (first.shape, again.shape) == ((2, 1, 1), (2, 1, 1, 1))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"backend": "native", "scales": [(0.1, 0.1)]}, "float8 numbers, which the native backend does not hold"),
        ({"scales": "checkpoint"}, "`config` must be the model"),
        ({"scales": "checkpoint", "config": config_of()}, "`config.name_or_path` must be"),
        ({"scales": [(0.1, 0.1)], "config": config_of()}, "for each of the 2 layers of the model, got 1"),
        ({"scales": [(0.1, 0.1)], "q_group_size": 32}, "a group size has no effect, got 32"),
        ({"scales": [0.1, 0.1]}, r"must have a pair \(keys, values\) for each layer, got 0.1 for layer 0"),
        ({"scales": ["ab"]}, r"must have a pair"),
        ({"scales": []}, "or a pair"),
        ({"scales": 0.5}, "or a pair"),
        ({"scales": [(True, 0.1)]}, r"must be numbers, got True \(bool\)"),
        ({"scales": [("1", 0.1)]}, r"must be numbers, got '1' \(str\)"),
        (
            {"scales": [([torch.tensor(0.1)] * 2, 0.1)]},
            r"must be numbers, got tensor\(0.1000\) \(Tensor\)",
        ),
        ({"scales": [(np.float32(0.1), 0.1)]}, r"must be numbers, got .* \(float32\)"),
        ({"scales": [(torch.ones(0), 0.1)]}, r"must be one number, or one for each KV head, got \[0\]"),
        ({"scales": [(), ()]}, "for a layer at least"),
        ({"scales": [((0.1, 0.1, 0.1), 0.1)] * 2, "config": config_of()}, "one for each of 2 KV heads, got 3"),
        # As many KV heads as the family has.
        ({"scales": [((0.1,) * 4, 0.1)], "config": FALCON}, "one for each of 1 KV heads, got 4"),
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
