"""Configs that list something for each layer, with more or fewer entries than the model has layers."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers as tf
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

import kvlayers
import versions
from families import FAMILIES, HOLDS_ITS_OWN_CACHE, generated, model_of
from kvlayers.rope.from_config import rotaries
from kvlayers.upstream import model_layers, model_types
from kvlayers.upstream.model_layers import layer_specs
from matrix import once
from models import CONFIGS, fresh_model, passes_of, prompt


def default_configs() -> Iterator[tuple[str, Any]]:
    """The config of each model type that transformers generates with, as its defaults are, if it lists layer types."""
    for model_type in sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES}):
        try:
            config = getattr(tf, CONFIG_MAPPING_NAMES[model_type])()
            kvlayers.DynamicCache(config=config)
            tf.DynamicCache(config=config)
        except Exception:
            # There are no defaults, or a library has no cache for the model type: other tests say which.
            continue
        decoder = config.get_text_config(decoder=True)
        # A list that follows from other fields has as many entries as there are layers.
        if not config.is_encoder_decoder and isinstance(vars(decoder).get("layer_types"), list):
            yield model_type, config


def windows(cache: Any) -> list[int | None]:
    return [getattr(layer, "sliding_window", None) for layer in cache.layers]


@pytest.mark.slow
def test_fewer_layers_than_a_config_lists_are_its_first_ones_and_more_are_refused_by_name() -> None:
    checked = 0
    for model_type, config in default_configs():
        decoder = config.get_text_config(decoder=True)
        listed = len(decoder.layer_types)
        for layers in (decoder.num_hidden_layers // 2, 1):
            decoder.num_hidden_layers = layers
            try:
                expected = windows(tf.DynamicCache(config=config))
            except Exception:
                # No layer is left whose keys and values the others share (gemma3n).
                with pytest.raises(kvlayers.errors.ConfigError):
                    kvlayers.DynamicCache(config=config)
                continue
            if not expected and not getattr(decoder, "num_kv_shared_layers", 0):
                # Of a list, transformers 5.6 takes all but the last 0 entries: none (gemma4).
                continue
            # Before 5.14, transformers makes layers that the model does not have.
            seen = windows(kvlayers.DynamicCache(config=config))
            # Behind all layers stand those of the loops of dory.
            seen = seen[:layers] if model_type == "dory" else seen
            assert seen == expected[:layers] or getattr(decoder, "num_kv_shared_layers", 0), model_type
            checked += 1
        decoder.num_hidden_layers = listed + 1
        refused = rf"layer_types.*each of its {listed + 1} layers.*got {listed}"
        with pytest.raises(kvlayers.errors.ConfigError, match=refused):
            kvlayers.DynamicCache(config=config)
    assert checked >= 40


def with_other_layers(config: Any, what: str) -> Iterator[tuple[str, Any]]:
    """Configs whose lists have an entry too few, or one too many, or that have a layer less than their lists."""
    if what == "fewer layers":
        changed = copy.deepcopy(config)
        # Layers without attention alone cannot generate in transformers.
        changed.num_hidden_layers = max(config.num_hidden_layers - 1, 1)
        yield "num_hidden_layers", changed
        return
    for name, listed in vars(config).items():
        if not isinstance(listed, list) or len(listed) != config.num_hidden_layers:
            continue
        changed = copy.deepcopy(config)
        setattr(changed, name, listed[:-1] if what == "fewer entries" else listed + listed[:1])
        yield name, changed


DECODERS = [family for family in (*CONFIGS, *FAMILIES) if family not in ("t5", "bart", "marian", "t5gemma", "whisper")]
TAKE_CACHES = [family for family in DECODERS if family not in HOLDS_ITS_OWN_CACHE]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "what"),
    [
        *once(DECODERS, ["fewer entries", "more entries"]),
        *(
            pytest.param(family, "fewer layers", marks=() if family in TAKE_CACHES[::4] else pytest.mark.nightly)
            for family in TAKE_CACHES
        ),
    ],
)
def test_models_with_lists_of_other_lengths_generate_as_with_transformers(family: str, what: str) -> None:
    for name, changed in with_other_layers(model_of(family).config, what):
        torch.manual_seed(0)
        try:
            model = tf.AutoModelForCausalLM.from_config(changed).eval()
        except Exception:
            # Such a model does not exist, but such a config does.
            if (what, name) == ("fewer entries", "layer_types"):
                with pytest.raises(kvlayers.KVLayersError):
                    kvlayers.DynamicCache(config=changed)
            continue
        if what == "fewer layers":
            layers = kvlayers.DynamicCache(config=changed).adapted_layers()
            if not any(layer.traits.attends for layer in layers):
                pytest.skip(f"no layer of the first ones of {family} attends; older transformers count in one")
        ids = prompt(2, 12)
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        # The sequences are so short that all tokens of int8 are in full precision.
        for kind, theirs in ((None, None), ("static", "static"), ("int8", None)):
            expected = tokens_or_error(model, inputs, theirs)
            with kvlayers.installed():
                seen = tokens_or_error(model, inputs, kind)
            if isinstance(expected, torch.Tensor) and not lacks_static_layer(seen):
                assert isinstance(seen, torch.Tensor), seen
                assert torch.equal(seen, expected), (name, kind)


def lacks_static_layer(seen: object) -> bool:
    """Whether a cache was refused because this version has no static layer with an indexer (deepseek_v32, to 5.12)."""
    lacking = [f"got {name!r}" for name in model_layers.INDEXED]
    return isinstance(seen, kvlayers.errors.ConfigError) and any(name in str(seen) for name in lacking)


def tokens_or_error(model: Any, inputs: dict[str, torch.Tensor], kind: str | None) -> torch.Tensor | Exception:
    try:
        sequences: torch.Tensor = generated(model, inputs, do_sample=False, cache_implementation=kind).sequences
    except Exception as error:
        return error
    return sequences


@pytest.mark.skipif(versions.LEAVES_THE_CACHE_TO_MODELS, reason="early exits of 5.0 miss an argument of their own")
@pytest.mark.parametrize("family", ["gemma3", "gemma2", "llama", "deepseek_v3"])
def test_early_exit_drafts_with_the_first_layers(family: str) -> None:
    model = fresh_model(family)
    ids, layers = prompt(1, 12), model.config.num_hidden_layers

    def drafted() -> tuple[list[int], int]:
        with passes_of(model) as passes:
            tokens = model.generate(ids, max_new_tokens=20, do_sample=False, assistant_early_exit=1)
        return tokens.tolist(), len(passes)

    if family in ("gemma2", "gemma3"):
        versions.need_since("5.23", "drafts by early exit for models with windows")
    expected = drafted()
    with kvlayers.installed():
        # As many passes: the drafts were as good.
        assert drafted() == expected
    assert model.config.num_hidden_layers == layers


def test_an_early_exit_that_fails_leaves_the_config_as_it_was() -> None:
    versions.need_since("5.1", "early exits of gemma3")
    model, ids = fresh_model("gemma3"), prompt(1, 12)

    def fail(*_: Any) -> None:
        if model.config.num_hidden_layers == 1:
            raise torch.OutOfMemoryError("a draft takes too much")

    model.register_forward_hook(fail)
    with kvlayers.installed(), pytest.raises(torch.OutOfMemoryError):
        model.generate(ids, max_new_tokens=4, do_sample=False, assistant_early_exit=1)
    assert model.config.num_hidden_layers == 4


# What is read besides the types of layers


def llama4(**changes: Any) -> Any:
    config = CONFIGS["llama4"]()
    config.update(changes)
    return config


def test_only_layers_that_exist_decide_whether_keys_can_be_rotated() -> None:
    """The last layer, which is left out here, has no RoPE, so that its queries are scaled by their positions."""
    with pytest.raises(kvlayers.errors.ConfigError, match="attn_temperature_tuning"):
        rotaries(llama4())
    assert all(rotary is not None for rotary in rotaries(llama4(num_hidden_layers=3)))


def test_a_list_of_layers_with_rope_that_is_too_short_is_refused_by_name() -> None:
    config = llama4(no_rope_layers=[1, 1], attn_temperature_tuning=False)
    with pytest.raises(kvlayers.errors.ConfigError, match=r"no_rope_layers.*each of its 4 layers.*got 2"):
        rotaries(config)


def test_only_layers_that_exist_decide_whether_attention_goes_by_columns() -> None:
    config = tf.GPTNeoConfig(hidden_size=32, num_layers=2, attention_types=[[["global", "local"], 1]], num_heads=4)
    assert model_types.goes_by_columns(config)
    config.num_hidden_layers = 1
    assert not model_types.goes_by_columns(config)


class ConfigWithLists(tf.LlamaConfig):  # type: ignore[misc]
    """As configs of models with code of their own list their KV heads."""

    def __init__(self, listed_heads: list[int], **options: Any) -> None:
        super().__init__(**options)
        vars(self)["num_key_value_heads"] = listed_heads


def test_numbers_that_are_listed_per_layer_are_planned_per_layer() -> None:
    options = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "head_dim": 8}
    listed = [4, 1, 2]
    cache = kvlayers.DynamicCache(length_hint=128)
    for index, heads in enumerate(listed[:2]):
        cache.update(*(torch.zeros(1, heads, 128, 8) for _ in range(2)), index)
    planned = kvlayers.plan(ConfigWithLists(listed, **options), 128, dtype=torch.float32, names=["dynamic"])
    assert planned["dynamic"].nbytes == cache.nbytes
    with pytest.raises(kvlayers.errors.ConfigError, match=r"num_key_value_heads.*each of its 2 layers.*got 1"):
        kvlayers.plan(ConfigWithLists([4], **options), 128, dtype=torch.float32, names=["dynamic"])


def test_layers_are_described_once_each() -> None:
    config = CONFIGS["gemma3"]()
    config.layer_types = config.layer_types * 2
    assert [spec.layer_type for spec in layer_specs(config)] == CONFIGS["gemma3"]().layer_types
