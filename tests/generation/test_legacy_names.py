"""Old names of caches, and of their methods, where old code looks for them."""

import importlib
import types
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers

import kvlayers
from kvlayers.errors import LegacyFormatError
from kvlayers.generation.transformers4_names import CLASSES, HOMES
from kvlayers.upstream import compat
from models import continued, prompt, read, tiny_model

OLD_CLASSES = (
    "SinkCache",
    "SlidingWindowCache",
    "HybridCache",
    "HybridChunkedCache",
    "OffloadedCache",
    "OffloadedStaticCache",
    "QuantizedCacheConfig",
    "QuantoQuantizedCache",
    "HQQQuantizedCache",
    "MambaCache",
    "HybridMambaAttentionDynamicCache",
)

SCRIPT = """
from transformers import AutoModelForCausalLM, SinkCache
from transformers.cache_utils import Cache, DynamicCache, QuantizedCacheConfig, SinkCache as same


def chat(model, ids):
    cache = SinkCache(window_length=16, num_sink_tokens=2)
    return model.generate(ids, past_key_values=cache, max_new_tokens=24, do_sample=False), cache
"""
"""As old examples have it."""

pytestmark = pytest.mark.filterwarnings("ignore:.*is from transformers 4:DeprecationWarning")


@pytest.fixture
def legacy_names() -> Iterator[None]:
    """transformers has its old names for the length of a test."""
    with kvlayers.installed(legacy_names=True):
        yield


@pytest.mark.parametrize("module", ["transformers", "transformers.cache_utils"])
def test_old_classes_are_importable(module: str) -> None:
    assert set(OLD_CLASSES) == set(CLASSES)
    home = importlib.import_module(module)
    were_there = set(OLD_CLASSES) & set(dir(home))
    with kvlayers.installed(legacy_names=True):
        for name in OLD_CLASSES:
            imported: dict[str, Any] = {}
            exec(f"from {module} import {name}", imported)
            of_its_own = name in were_there and name not in compat.HOLLOW_CACHE_NAMES
            assert (imported[name] is getattr(kvlayers, name)) is not of_its_own
    assert set(OLD_CLASSES) & set(dir(home)) == were_there


@pytest.mark.parametrize("module", [name for name in HOMES if ".models." in name])
def test_caches_of_models_are_found_beside_them(module: str, legacy_names: None) -> None:
    home = importlib.import_module(module)
    for name in HOMES[module]:
        assert isinstance(getattr(home, name), type)


def test_an_old_script_runs_unchanged(legacy_names: None) -> None:
    script, model = types.ModuleType("transformers_modules.old_script"), tiny_model("llama")
    exec(SCRIPT, vars(script))
    tokens, cache = script.chat(model, prompt(1))
    assert type(cache) is kvlayers.SinkCache
    ours = kvlayers.SinkCache(window_length=16, num_sink_tokens=2)
    assert torch.equal(tokens, continued(model, prompt(1), 24, past_key_values=ours))
    assert len(tokens[0]) > 16


def test_other_names_are_imported_and_missed_as_before(legacy_names: None) -> None:
    from transformers import LlamaConfig

    assert isinstance(tiny_model("llama").config, LlamaConfig)
    for module in ("transformers", "transformers.cache_utils", "transformers.models.jamba.modeling_jamba"):
        with pytest.raises(AttributeError, match="NoSuchCache"):
            importlib.import_module(module).NoSuchCache  # noqa: B018
    with pytest.raises(ImportError, match="NoSuchCache"):
        exec("from transformers import NoSuchCache")


def test_a_maximum_is_a_number_or_none_under_old_names_too(legacy_names: None) -> None:
    config = tiny_model("llama").config
    sink = kvlayers.SinkCache(window_length=8, num_sink_tokens=2, config=config)
    for cache, most in (
        (transformers.StaticCache(config=config, max_cache_len=16), 16),
        (kvlayers.StaticCache(config, 16), 16),
        (sink, 8),
        # Old loops cut their masks to a maximum that is not None.
        (transformers.DynamicCache(), None),
        (kvlayers.DynamicCache(), None),
    ):
        assert cache.get_max_length() == most
    assert sink.get_usable_length(1) == 0


@pytest.mark.parametrize("kind", [transformers.DynamicCache, kvlayers.DynamicCache], ids=["theirs", "ours"])
def test_lists_of_states_are_assigned_to_the_layers(kind: Any, legacy_names: None) -> None:
    model, ids, swapped = tiny_model("llama"), prompt(2, 12), torch.tensor([1, 0])
    expected = read(model, ids[swapped])[1][:, 8:]
    cache, _ = read(model, ids[:, :8], kind())
    cache.key_cache = [keys[swapped] for keys in cache.key_cache]
    cache.value_cache = [values[swapped] for values in cache.value_cache]
    torch.testing.assert_close(read(model, ids[swapped, 8:], cache)[1], expected)
    for wrong in (cache.key_cache[:1], None):
        with pytest.raises(LegacyFormatError, match="a list of the keys of 2 layers"):
            cache.key_cache = wrong


def test_caches_of_transformers_have_their_old_methods_again(legacy_names: None) -> None:
    cache = transformers.DynamicCache()
    assert (cache.seen_tokens, list(cache), cache.to_legacy_cache()) == (0, [], ())
    for index in range(3):
        cache.update(torch.randn(2, 2, 7, 8), torch.randn(2, 2, 7, 4), index)
    assert (cache.seen_tokens, cache.get_usable_length(3), cache.get_usable_length(3, 1)) == (7, 7, 7)
    assert cache.get_max_cache_shape() == -1
    assert transformers.DynamicCache.from_legacy_cache(None).get_seq_length() == 0
    with pytest.raises((LegacyFormatError, ValueError)):
        transformers.DynamicCache.from_legacy_cache(((torch.randn(1, 2, 3, 4),),))
    # `crop` takes a length again.
    for argument, expected in ((9, 7), (7, 7), (5, 5), (-2, 3)):
        cache.crop(argument)
        assert [cache.get_seq_length(index) for index in range(3)] == [expected] * 3
    cache.crop(max_length=1)
    assert [cache.get_seq_length(index) for index in range(3)] == [1] * 3


def test_a_static_cache_of_transformers_reads_as_what_it_reserves(legacy_names: None) -> None:
    model = tiny_model("llama")
    # With layers of kvlayers it would read as the tokens that are held.
    with kvlayers.installed(replace_empty_caches=False):
        cache, _ = read(model, prompt(2, 5), transformers.StaticCache(config=model.config, max_cache_len=16))
    assert cache[0][0].shape == (2, 2, 16, 8)
    assert (cache.max_cache_len, cache.max_batch_size, cache.get_max_cache_shape()) == (16, 2, 16)
    assert cache.get_usable_length(12) == 4


def test_caches_of_repositories_keep_lists_of_their_own(legacy_names: None) -> None:
    class Old(transformers.DynamicCache):
        def __init__(self) -> None:
            super().__init__()
            self.key_cache: list[torch.Tensor] = []
            self.seen_tokens = 4

    cache = Old()
    cache.key_cache.append(torch.zeros(1))
    assert (len(cache.key_cache), cache.seen_tokens) == (1, 4)


def test_an_import_by_an_old_name_says_what_to_write(legacy_names: None) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        from transformers import SinkCache  # noqa: F401
        from transformers.cache_utils import SinkCache as Same  # noqa: F401
    assert [warning.filename for warning in caught] == [__file__] * 2
    assert all("write 'from kvlayers import SinkCache'" in str(warning.message) for warning in caught)


OLD_USES = {
    "seen_tokens": (lambda cache: cache.seen_tokens, r"get_seq_length\(\)", True),
    "get_usable_length": (lambda cache: cache.get_usable_length(1), r"get_seq_length\(\)", True),
    "get_max_cache_shape": (lambda cache: cache.get_max_cache_shape(), r"get_max_length\(\)", compat.RENAMED_MAXIMA),
    "max_cache_len": (lambda cache: cache.max_cache_len, r"get_max_length\(\)", compat.RENAMED_MAXIMA),
    "max_batch_size": (lambda cache: cache.max_batch_size, "batch_size", compat.RENAMED_MAXIMA),
}


@pytest.mark.parametrize("name", OLD_USES)
def test_old_names_say_what_to_write_where_they_are_old(name: str) -> None:
    use, instead, is_old = OLD_USES[name]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        use(kvlayers.DynamicCache())
    assert [(warning.category, warning.filename) for warning in caught] == [(DeprecationWarning, __file__)] * is_old
    if is_old:
        with pytest.warns(DeprecationWarning, match=f"{name}.*use cache.{instead}"):
            use(kvlayers.DynamicCache())


def test_converters_and_generate_warn_of_nothing(installed: None) -> None:
    model, ids = tiny_model("llama"), prompt(1)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*is from transformers 4", DeprecationWarning)
        for name in ("dynamic", "static", "int4", "offloaded", "sink:window_length=64,num_sink_tokens=2"):
            model.generate(ids, max_new_tokens=3, cache_implementation=name)
        output = model.generate(ids, max_new_tokens=3, return_dict_in_generate=True, return_legacy_cache=True)
        cache = kvlayers.DynamicCache.from_legacy_cache(output.past_key_values)
        assert len([cache[0], *cache, *cache.key_cache, *cache.value_cache]) == 7
        cache.crop(4)
        cache.reorder_cache(torch.tensor([0]))
        model(ids, past_key_values=cache)


def test_nothing_warns_while_torch_traces() -> None:
    cache = kvlayers.DynamicCache.from_legacy_cache([(torch.randn(1, 2, 3, 8),) * 2])
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*is from transformers 4", DeprecationWarning)
        seen = torch.compile(lambda states: states + cache.seen_tokens, backend="eager", fullgraph=True)(torch.zeros(1))
    assert seen == 3


@pytest.mark.skipif(compat.CONVERTS_TO_TUPLES, reason="this transformers has from_legacy_cache of its own")
def test_states_of_a_window_that_has_dropped_tokens_are_refused(legacy_names: None) -> None:
    model = tiny_model("mistral")
    cache, _ = read(model, prompt(1, 24), kvlayers.DynamicCache(config=model.config))
    with pytest.raises(LegacyFormatError, match="dropped"):
        transformers.DynamicCache.from_legacy_cache(tuple(cache))
