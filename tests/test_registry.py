"""Names: who makes the cache that `cache_implementation` asks for, and that it is the one asked for."""

import functools
import importlib.metadata
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.generation import configuration_utils
from transformers.generation.utils import GenerationMixin

import kvlayers
from kvlayers.generation import registry
from models import prompt, tiny_model

pytestmark = pytest.mark.fast

CLASSES = {
    "dynamic": kvlayers.DynamicCache,
    "static": kvlayers.StaticCache,
    "sliding_window": kvlayers.SlidingWindowCache,
    "hybrid": kvlayers.HybridCache,
    "hybrid_chunked": kvlayers.HybridCache,
}


def used_cache(family: str = "mistral", **arguments: Any) -> Any:
    """The cache that generate() used."""
    ids = prompt(1, 6)
    output = tiny_model(family).generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=3, return_dict_in_generate=True, **arguments
    )
    return output.past_key_values


@pytest.mark.parametrize("name", CLASSES)
def test_the_cache_that_is_used_is_the_one_asked_for(name: str, installed: None, tmp_path: Path) -> None:
    assert type(used_cache(cache_implementation=name)) is CLASSES[name]
    config = transformers.GenerationConfig(cache_implementation=name, pad_token_id=0)
    assert type(used_cache(generation_config=config)) is CLASSES[name]
    config.save_pretrained(tmp_path)
    assert type(used_cache(generation_config=transformers.GenerationConfig.from_pretrained(tmp_path))) is CLASSES[name]


def test_without_a_name_the_cache_is_ours_too(installed: None) -> None:
    assert type(used_cache()) is kvlayers.DynamicCache


def test_a_name_that_is_not_built_yet_falls_through_to_transformers(
    installed: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def theirs(config: Any, offloading: bool) -> transformers.DynamicCache:
        # Without offloading, which needs an accelerator.
        asked.append(offloading)
        return transformers.DynamicCache(config=config)

    monkeypatch.setattr("transformers.generation.utils.DynamicCache", theirs)
    assert type(used_cache(cache_implementation="offloaded")) is transformers.DynamicCache
    assert asked == [True]


def test_a_name_of_ones_own_is_accepted_everywhere_while_installed(tmp_path: Path) -> None:
    class Mine(kvlayers.DynamicCache):
        """A cache of the user's."""

    with kvlayers.installed():

        @kvlayers.register("mine")
        def make(request: kvlayers.CacheRequest) -> Mine:
            assert request.length_hint == 8
            assert request.dtype == torch.float32
            assert request.device == torch.device("cpu")
            return Mine(config=request.config, **request.options)

        try:
            config = transformers.GenerationConfig(cache_implementation="mine", pad_token_id=0)
            config.save_pretrained(tmp_path)
            loaded = transformers.GenerationConfig.from_pretrained(tmp_path)
            loaded.max_new_tokens = 3
            assert type(used_cache(generation_config=loaded)) is Mine
            with pytest.raises(kvlayers.OptionError, match="length_hnt"):
                used_cache(cache_implementation="mine", cache_config={"length_hnt": 3})
        finally:
            kvlayers.unregister("mine")
        with pytest.raises(ValueError, match="mine"):
            transformers.GenerationConfig(cache_implementation="mine").validate()


def test_options_of_a_name_reach_its_cache(installed: None) -> None:
    cache = used_cache("llama", cache_implementation="static", cache_config={"max_cache_len": 77})
    assert cache.get_max_length() == 77
    assert used_cache("llama", cache_implementation="static", max_cache_len=99).get_max_length() == 99


def test_a_misspelt_option_of_a_name_is_refused(installed: None) -> None:
    with pytest.raises(kvlayers.OptionError, match="did you mean 'max_cache_len'"):
        used_cache(cache_implementation="static", cache_config={"max_cash_len": 77})


@pytest.mark.parametrize("name", ["", "  ", None, 3])
def test_an_empty_name_is_refused(name: Any) -> None:
    with pytest.raises(kvlayers.RegistryError, match="expected a name"):
        kvlayers.register(name)


def test_a_name_that_is_taken_is_refused_and_stays_what_it_was() -> None:
    with pytest.raises(kvlayers.RegistryError, match="'dynamic' is taken by kvlayers"):
        kvlayers.register("dynamic")(lambda request: None)
    assert type(kvlayers.make_cache("dynamic", tiny_model("llama"))) is kvlayers.DynamicCache


def test_an_unknown_name_is_refused_with_those_that_exist(installed: None) -> None:
    with pytest.raises(kvlayers.RegistryError, match=r"dynamic, hybrid, .* saw 'dinamic'"):
        kvlayers.make_cache("dinamic", tiny_model("llama"))
    with pytest.raises(kvlayers.RegistryError, match="saw 'dinamic'"):
        kvlayers.unregister("dinamic")
    for wrong in ("dinamic", ""):
        with pytest.raises(kvlayers.RegistryError, match=f"saw '{wrong}'"):
            used_cache(cache_implementation=wrong)


def test_a_static_cache_needs_a_size() -> None:
    with pytest.raises(kvlayers.OptionError, match="expected max_cache_len to be .* saw None"):
        kvlayers.make_cache("static", tiny_model("llama"))
    assert kvlayers.make_cache("static", tiny_model("llama"), length_hint=9).get_max_length() == 9


def test_a_factory_that_returns_no_cache_is_named() -> None:
    kvlayers.register("broken")(lambda request: 3)
    try:
        with pytest.raises(kvlayers.RegistryError, match="factory of 'broken' to return a cache, but saw a int"):
            kvlayers.make_cache("broken", tiny_model("llama"))
    finally:
        kvlayers.unregister("broken")


def test_other_packages_register_by_entry_points(monkeypatch: pytest.MonkeyPatch) -> None:
    point = importlib.metadata.EntryPoint("theirs", "kvlayers:StaticCache", "kvlayers.caches")
    points = importlib.metadata.EntryPoints([point])
    monkeypatch.setattr(registry, "_entry_points", lambda: points.select(group=registry.ENTRY_POINT_GROUP))
    assert "theirs" in kvlayers.cache_names()
    monkeypatch.setattr(
        kvlayers.StaticCache, "__init__", lambda self, request: kvlayers.Cache.__init__(self, layers=[])
    )
    assert type(kvlayers.make_cache("theirs", tiny_model("llama"))) is kvlayers.StaticCache


def test_installing_is_idempotent_reversible_and_nests() -> None:
    before = {name: getattr(GenerationMixin, name) for name in ("generate", "_prepare_cache_for_generation")}
    names = configuration_utils.ALL_CACHE_IMPLEMENTATIONS
    kvlayers.install()
    kvlayers.install()
    assert kvlayers.is_installed()
    with kvlayers.installed():
        pass
    assert kvlayers.is_installed()
    kvlayers.uninstall()
    kvlayers.uninstall()
    assert not kvlayers.is_installed()
    assert {name: getattr(GenerationMixin, name) for name in before} == before
    assert names == configuration_utils.ALL_CACHE_IMPLEMENTATIONS
    assert type(used_cache()) is transformers.DynamicCache


def test_uninstalling_under_another_patch_leaves_ours_asleep() -> None:
    kvlayers.install()
    ours = GenerationMixin.generate

    @functools.wraps(ours)
    def theirs(self: Any, *args: Any, **kwargs: Any) -> Any:
        return ours(self, *args, **kwargs)

    GenerationMixin.generate = theirs
    try:
        kvlayers.uninstall()
        assert GenerationMixin.generate is theirs
        assert type(used_cache()) is transformers.DynamicCache
        with kvlayers.installed():
            assert GenerationMixin.generate is theirs
            assert type(used_cache()) is kvlayers.DynamicCache
    finally:
        GenerationMixin.generate = ours
        kvlayers.install()
        kvlayers.uninstall()


def test_installing_again_after_others_have_come_and_gone_uses_our_caches() -> None:
    before = GenerationMixin.generate
    GenerationMixin.generate = lambda self, *args, **kwargs: before(self, *args, **kwargs)
    kvlayers.install()
    GenerationMixin.generate = before
    kvlayers.uninstall()
    with kvlayers.installed():
        assert type(used_cache()) is kvlayers.DynamicCache
    assert GenerationMixin.generate is before


def test_blocks_may_overlap_and_the_last_one_uninstalls() -> None:
    first, second = kvlayers.installed(), kvlayers.installed()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert type(used_cache()) is kvlayers.DynamicCache
    second.__exit__(None, None, None)
    assert not kvlayers.is_installed()


def test_names_that_others_add_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    names = (*configuration_utils.ALL_CACHE_IMPLEMENTATIONS, "theirs")
    monkeypatch.setattr(configuration_utils, "ALL_CACHE_IMPLEMENTATIONS", names)
    with kvlayers.installed():
        assert "theirs" in configuration_utils.ALL_CACHE_IMPLEMENTATIONS
    assert names == configuration_utils.ALL_CACHE_IMPLEMENTATIONS


def test_an_error_inside_the_block_uninstalls_as_well() -> None:
    with pytest.raises(ZeroDivisionError), kvlayers.installed():
        1 / 0  # noqa: B018
    assert not kvlayers.is_installed()


def test_importing_changes_nothing_in_transformers() -> None:
    script = """
import transformers.generation.utils as utils, transformers.generation.configuration_utils as configuration
import transformers.cache_utils as caches
before = {name: dict(vars(thing)) for name, thing in vars(caches).items() if isinstance(thing, type)}
mixin, names = dict(vars(utils.GenerationMixin)), configuration.ALL_CACHE_IMPLEMENTATIONS
maps = dict(caches.DYNAMIC_LAYER_TYPE_MAPPING), dict(caches.STATIC_LAYER_TYPE_MAPPING)
import kvlayers
after = {name: dict(vars(thing)) for name, thing in vars(caches).items() if isinstance(thing, type)}
drop = lambda found: {k: {n: v for n, v in d.items() if not n.startswith("_abc")} for k, d in found.items()}
assert drop(after) == drop(before)
assert dict(vars(utils.GenerationMixin)) == mixin and configuration.ALL_CACHE_IMPLEMENTATIONS == names
assert (dict(caches.DYNAMIC_LAYER_TYPE_MAPPING), dict(caches.STATIC_LAYER_TYPE_MAPPING)) == maps
"""
    subprocess.run([sys.executable, "-c", script], check=True)
