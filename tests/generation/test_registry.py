"""Names: who makes the cache that `cache_implementation` asks for, and that it is the one asked for."""

import contextlib
import importlib.metadata
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.generation import configuration_utils

import kvlayers
import versions
from kvlayers.core import named_caches
from kvlayers.errors import OptionError, RegistryError
from models import fresh_model, prompt, tiny_model
from named_factories import registered

CLASSES = {
    "auto": kvlayers.DynamicCache,
    "dynamic": kvlayers.DynamicCache,
    "dynamic_full": kvlayers.Cache,
    "static": kvlayers.StaticCache,
    "sliding_window": kvlayers.SlidingWindowCache,
    "hybrid": kvlayers.HybridCache,
    "hybrid_chunked": kvlayers.HybridChunkedCache,
    "quantized": kvlayers.QuantizedCache,
    "fp8": kvlayers.QuantizedCache,
    "int8": kvlayers.QuantizedCache,
    "int4": kvlayers.QuantizedCache,
    "int2": kvlayers.QuantizedCache,
}
TRANSFORMERS_NAMES = configuration_utils.ALL_CACHE_IMPLEMENTATIONS
# Backend, bits of the keys and bits of the values.
QUANTIZED = {
    "quantized": ("native", 4, 4),
    "fp8": ("fp8", 8, 8),
    "int8": ("native", 8, 8),
    "int4": ("native", 4, 4),
    "int2": ("native", 2, 2),
}


def cache_of(model: Any, **arguments: Any) -> Any:
    """The cache that generate() used."""
    ids = prompt(1, 6)
    given = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 3, "return_dict_in_generate": True, **arguments}
    return model.generate(ids, **given).past_key_values


def used_cache(family: str = "mistral", **arguments: Any) -> Any:
    return cache_of(tiny_model(family), **arguments)


def config_with(name: str | None, **fields: Any) -> transformers.GenerationConfig:
    return transformers.GenerationConfig(cache_implementation=name, pad_token_id=0, **fields)


def saved(config: Any, path: Path) -> transformers.GenerationConfig:
    """A config as it comes from a file, with a warning if only kvlayers knows the name of its cache."""
    known = config.cache_implementation in TRANSFORMERS_NAMES
    with contextlib.nullcontext() if known else pytest.warns(UserWarning, match="in the field 'kvlayers'"):
        config.save_pretrained(path)
    return transformers.GenerationConfig.from_pretrained(path)


def facts(cache: Any) -> dict[str, Any]:
    """What the layers of full attention of a quantized cache were made with."""
    first, *others = [layer.describe() for layer in cache.layers if isinstance(layer, kvlayers.QuantizedLayer)]
    assert all(each == first for each in others)
    return first


def bits(cache: Any) -> tuple[str, int, int]:
    given = facts(cache)
    return given["backend"], given["key_nbits"], given["value_nbits"]


@pytest.mark.parametrize("name", CLASSES)
def test_the_cache_that_is_used_is_the_one_asked_for(name: str, installed: None, tmp_path: Path) -> None:
    assert type(used_cache(cache_implementation=name)) is CLASSES[name]
    for config in (config_with(name), saved(config_with(name), tmp_path)):
        assert type(used_cache(generation_config=config)) is CLASSES[name]


@pytest.mark.parametrize("options", [None, {"residual_length": 32}])
def test_a_model_that_is_saved_with_a_name_of_kvlayers_can_be_loaded_anywhere(
    options: dict[str, Any] | None, tmp_path: Path
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    with kvlayers.installed():
        model = fresh_model("llama")
        model.generation_config.cache_implementation, model.generation_config.cache_config = "int4", options
        with pytest.warns(UserWarning, match="transformers does not know the cache 'int4'") as caught:
            model.save_pretrained(first)
        assert [warning.filename for warning in caught if warning.category is UserWarning] == [__file__]
        assert model.generation_config.cache_implementation == "int4"
    # Without kvlayers, and saved again there.
    plain = transformers.AutoModelForCausalLM.from_pretrained(first)
    assert plain.generation_config.cache_implementation is None
    assert type(cache_of(plain)) is transformers.DynamicCache
    plain.save_pretrained(second)
    # The config of the call counts before that of the model.
    model.generation_config.cache_implementation = "dynamic"
    with kvlayers.installed():
        for own, how in (
            *(
                (model, {"generation_config": transformers.GenerationConfig.from_pretrained(path)})
                for path in (first, second)
            ),
            (plain, {}),
            (plain, {"generation_config": config_with(None)}),
        ):
            cache = cache_of(own, **how)
            assert (bits(cache), facts(cache)["residual_length"]) == (("native", 4, 4), 32 if options else 128)
        assert type(cache_of(plain, cache_implementation="static")) is kvlayers.StaticCache
        assert type(cache_of(plain, past_key_values=kvlayers.DynamicCache())) is kvlayers.DynamicCache
        plain.generation_config.kvlayers["cache_implementation"] = "int44"
        with pytest.raises(RegistryError, match="did you mean 'int4'"):
            cache_of(plain)


def test_a_name_that_kvlayers_does_not_know_falls_through_to_transformers(
    installed: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def theirs(config: Any, offloading: bool) -> transformers.DynamicCache:
        # Without offloading, which needs an accelerator.
        asked.append(offloading)
        return transformers.DynamicCache(config=config)

    monkeypatch.delitem(named_caches._factories._entries, "offloaded")
    monkeypatch.setattr("transformers.generation.utils.DynamicCache", theirs)
    assert type(used_cache(cache_implementation="offloaded")) is transformers.DynamicCache
    assert asked == [True]


def test_a_name_of_ones_own_is_accepted_everywhere_while_installed(tmp_path: Path) -> None:
    class Mine(kvlayers.DynamicCache):
        """A cache of the user's."""

    def make(request: kvlayers.CacheRequest) -> Mine:
        asked = request.length_hint, request.dtype, request.device
        assert asked == (8, torch.float32, torch.device("cpu"))
        return Mine(config=request.config, **request.options)

    with kvlayers.installed():
        with registered(mine=make):
            assert type(used_cache(generation_config=saved(config_with("mine"), tmp_path))) is Mine
            with pytest.raises(OptionError, match="length_hnt"):
                used_cache(cache_implementation="mine", cache_config={"length_hnt": 3})
        with pytest.raises(ValueError, match="mine"):
            config_with("mine").validate()


@versions.cache_length_of_a_call
def test_the_length_that_a_call_asks_for_is_reserved(installed: None) -> None:
    assert used_cache("llama", cache_implementation="static", max_cache_len=99).get_max_length() == 99


@pytest.mark.parametrize("name", QUANTIZED)
def test_a_quantized_name_has_its_backend_and_its_bits(name: str, installed: None) -> None:
    cache, hybrid = (used_cache(family, cache_implementation=name) for family in ("llama", "gemma3"))
    assert bits(cache) == bits(hybrid) == bits(kvlayers.make_cache(name, tiny_model("llama"))) == QUANTIZED[name]
    assert isinstance(cache, transformers.QuantizedCache)
    assert facts(cache)["residual_length"] == 128
    kinds = kvlayers.SlidingLayer, kvlayers.SlidingLayer, kvlayers.QuantizedLayer, kvlayers.SlidingLayer
    assert all(isinstance(layer, kind) for layer, kind in zip(hybrid.layers, kinds, strict=True))


GIVEN = {"nbits": 2, "value_nbits": 8, "residual_length": 32, "sink_tokens": 0, "key_group_size": 16}


@pytest.mark.parametrize("kind", [dict, kvlayers.QuantizedCacheConfig])
@pytest.mark.parametrize("name", ["quantized", "int2"])
def test_a_cache_config_reaches_a_quantized_cache(name: str, kind: Any, installed: None, tmp_path: Path) -> None:
    given = kind(**GIVEN)
    config = config_with(name, cache_config=given)
    for how in (
        {"cache_implementation": name, "cache_config": given},
        *[{"generation_config": config}] * 2,
        {"generation_config": saved(config, tmp_path)},
    ):
        cache = used_cache("llama", **how)
        seen = facts(cache)
        assert bits(cache) == ("native", 2, 8)
        assert (seen["residual_length"], seen["sink_tokens"], seen["key_group_size"]) == (32, 0, 16)
        assert given == GIVEN


def test_without_installing_quantized_names_are_those_of_transformers() -> None:
    pytest.importorskip("optimum.quanto", reason="the default backend of transformers")
    cache = used_cache("llama", cache_implementation="quantized", cache_config={"q_group_size": 8})
    assert type(cache) is transformers.QuantizedCache
    for name in ("fp8", "int8", "int4", "int2"):
        with pytest.raises(ValueError, match=name):
            transformers.GenerationConfig(cache_implementation=name).validate()


@pytest.mark.parametrize(
    ("name", "said"),
    [
        *((name, "must be a string that is not empty") for name in ("", "  ", None, 3)),
        ("dynamic", "'dynamic' is already registered by kvlayers"),
    ],
)
def test_a_name_that_cannot_be_registered_is_refused_and_stays_what_it_was(name: Any, said: str) -> None:
    with pytest.raises(RegistryError, match=said):
        kvlayers.register(name)(lambda request: None)
    assert type(kvlayers.make_cache("dynamic", tiny_model("llama"))) is kvlayers.DynamicCache


def test_an_unknown_name_is_refused_by_all_that_take_one(installed: None) -> None:
    with pytest.raises(RegistryError, match="cache name 'dinamic'"):
        kvlayers.unregister("dinamic")
    for wrong in ("dinamic", ""):
        with pytest.raises(RegistryError, match=f"cache name '{wrong}'"):
            used_cache(cache_implementation=wrong)


def test_a_static_cache_takes_the_size_of_a_call() -> None:
    assert kvlayers.make_cache("static", tiny_model("llama"), length_hint=9).get_max_length() == 9


def test_a_factory_that_returns_no_cache_is_named() -> None:
    words = "factory of 'broken' must return a cache, got a int"
    with registered(broken=lambda request: 3), pytest.raises(RegistryError, match=words):
        kvlayers.make_cache("broken", tiny_model("llama"))


def test_other_packages_register_by_entry_points(monkeypatch: pytest.MonkeyPatch) -> None:
    point = importlib.metadata.EntryPoint("theirs", "kvlayers:StaticCache", "kvlayers.caches")
    points = importlib.metadata.EntryPoints([point]).select(group=named_caches.ENTRY_POINT_GROUP)
    monkeypatch.setitem(vars(named_caches._factories), "_entry_points", points)
    assert "theirs" in kvlayers.cache_names()
    monkeypatch.setattr(
        kvlayers.StaticCache, "__init__", lambda self, request: kvlayers.Cache.__init__(self, layers=[])
    )
    assert type(kvlayers.make_cache("theirs", tiny_model("llama"))) is kvlayers.StaticCache


TWICE = "must have each option once, got '{}' twice in 'recall:"
OPTIONS: list[tuple[str, dict[str, Any], str]] = [
    ("static", {}, "max_cache_len.* None"),
    ("int8", {"nbits": 2}, "for a cache of this name, got"),
    ("fp8", {"backend": "native"}, "for a cache of this name, got"),
    ("int2", {"nbits": 4}, "for a cache of this name, got"),
    ("recall:residual_length=1,residual_length=2", {}, TWICE.format("residual_length")),
    ("recall:recall.pages=1,recall.pages=2", {}, TWICE.format("recall.pages")),
    ("recall:recall=1,recall.pages=2", {}, TWICE.format("recall.pages")),
    ("recall:recall.pages=1,recall=2", {}, TWICE.format("recall")),
    ("quantized", {"nbit": 4}, "did you mean 'nbits'"),
    ("quantized", {"residual_len": 4}, "did you mean 'residual_length'"),
    ("quantized", {"nbits": 7}, "one of 1, 2, 3, 4, 5, 6, 8, got 7"),
    ("quantized", {"backend": "quantoo"}, r"quantoo.*fp8, hqq, kivi, native, nf4, quanto, turboquant"),
    ("quantized", {"backend": "fp8", "nbits": 4}, "one of 8, got 4"),
    ("quantized", {"axis_key": 0}, "`axis_key` of the native backend must be left out"),
    ("quantized", {"residual_length": -1}, "residual_length"),
]
NAMES: list[tuple[str, str]] = [
    ("int5", r"use 'quantized' with cache_config=\{'nbits': 5\}, or write 'quantized:nbits=5'\.$"),
    ("K8V4", r"cache_config=\{'key_nbits': 8, 'value_nbits': 4\}, .* 'quantized:key_nbits=8,value_nbits=4'\.$"),
    *(
        (name, rf"cache_config=\{{'backend': '{name.lower()}'\}}, or write 'quantized:backend={name.lower()}'\.$")
        for name in ("kivi", "TurboQuant", "nf4", "native")
    ),
    ("INT4", r"^`cache` must be a known name, got 'INT4': did you mean 'int4'\?$"),
    ("4bit", r"got '4bit': did you mean 'int4'\?$"),
    ("int-4", r"got 'int-4': did you mean 'int4'\?$"),
    (" Int4 ", r"got ' Int4 ': did you mean 'int4'\?$"),
    ("8-bits", r"got '8-bits': did you mean 'int8'\?$"),
    ("5bit", r"or write 'quantized:nbits=5'\.$"),
    (
        "dinamic",
        r"^unknown cache name 'dinamic': did you mean 'dynamic'\? Known names are auto, dynamic, dynamic_full, "
        r"evicting, .*fp8, h2o",
    ),
]


@pytest.mark.parametrize(
    ("name", "options", "error", "said"),
    [
        *((name, options, OptionError, said) for name, options, said in OPTIONS),
        *((name, {}, RegistryError, said) for name, said in NAMES),
    ],
)
def test_a_wrong_name_or_option_is_answered_by_what_to_write(
    name: str, options: dict[str, Any], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        kvlayers.make_cache(name, tiny_model("llama"), **options)
