"""Caches of transformers that a model is given under `install()`: empty ones get layers of kvlayers."""

import copy
import logging
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers

import kvlayers
import versions
from counted_graphs import MODELS, backend, graphs
from families import FAMILIES, any_model_and_inputs, model_and_inputs
from kvlayers.upstream import cache_argument, compat
from matrix import some
from models import WINDOW, continued, fresh_model, given, prompt, read, tiny_model, under_install, without_mlps
from named_factories import registered

MAKERS: dict[str, Callable[[Any], Any]] = {
    "bare": lambda model: transformers.DynamicCache(),
    "of a config": lambda model: transformers.DynamicCache(config=model.config),
    "static": lambda model: transformers.StaticCache(model.config, max_cache_len=48),
}
FULL, WINDOWS = ["DynamicLayer"] * 4, ["SlidingLayer", "SlidingLayer", "DynamicLayer", "SlidingLayer"]
EXPECTED = {
    "bare": FULL,
    "of a config": WINDOWS,
    "static": ["Static" + name.replace("Dynamic", "") for name in WINDOWS],
}


def generate(ids: torch.Tensor, cache: Any, **how: Any) -> Any:
    return continued(tiny_model("gemma3"), ids, 14, past_key_values=cache, **how)


def kinds(cache: Any) -> list[str]:
    """Names of the classes of layers of kvlayers, "" for one of transformers."""
    return [type(layer).__name__ if isinstance(layer, kvlayers.CacheLayer) else "" for layer in cache.layers]


@pytest.mark.parametrize(
    "way",
    [
        pytest.param({}, id="greedy"),
        pytest.param({"num_beams": 3}, id="beams"),
        pytest.param({"prefill_chunk_size": 4}, id="chunks", marks=versions.windows_in_chunks),
    ],
)
@pytest.mark.parametrize("kind", MAKERS)
def test_an_empty_cache_decodes_with_layers_of_kvlayers(kind: str, way: dict[str, Any]) -> None:
    model, ids = tiny_model("gemma3"), prompt(2, 12)
    expected = generate(ids, MAKERS[kind](model), **way)
    cache = MAKERS[kind](model)
    known_as, layers = type(cache), cache.layers
    assert torch.equal(under_install(generate, ids, cache, **way), expected)
    assert type(cache) is known_as
    assert cache.layers is layers
    assert kinds(cache) == EXPECTED[kind]
    assert int(cache.get_seq_length()) == 25


@pytest.mark.parametrize("kind", MAKERS)
def test_it_goes_on_like_any_other_also_after_uninstall(kind: str) -> None:
    model, ids = tiny_model("gemma3"), prompt(2, 5)
    cache, _ = under_install(read, model, ids, MAKERS[kind](model))
    assert kinds(cache) == EXPECTED[kind]
    twin, longer = copy.deepcopy(cache), torch.cat([ids, prompt(2, 6)], dim=1)
    expected = generate(longer, None)
    for each in (cache, twin):
        assert torch.equal(generate(longer, each), expected)
    twin.reset()
    assert torch.equal(generate(longer, twin), expected)


def test_methods_of_transformers_work_on_the_layers(installed: None) -> None:
    model, ids = tiny_model("llama"), prompt(2, 8)
    cache, whole = read(model, ids, transformers.DynamicCache())
    cache.crop(-3)
    cache.reorder_cache(torch.tensor([1, 0]))
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([2, 0]))
    assert (cache.get_seq_length(), len(cache), cache.is_sliding) == (5, 2, [False, False])
    keys = [states[0].shape for states in cache]
    assert keys == [cache.layers[0].keys.shape] * 2 == [torch.Size([2, 2, 5, 8])] * 2
    assert compat.MASKS_BY_CACHE_POSITION or cache.get_mask_sizes(3, 0) == (8, 0)
    torch.testing.assert_close(read(model, ids[:, 5:], cache)[1], whole[:, 5:])
    fixed, _ = read(model, ids, transformers.StaticCache(model.config, max_cache_len=20))
    # What comes beyond the reservation is an error of transformers as well.
    with pytest.raises(kvlayers.CapacityError, match="at most 20 tokens"):
        read(model, prompt(2, 13), fixed)
    assert max(layer.max_cache_len for layer in fixed.layers) == 20


@pytest.mark.slow
@versions.compiled_by_length
def test_compiled_generate_decodes_in_one_graph(counted: None) -> None:
    name, changes = MODELS["hybrid"]
    model, ids = without_mlps(fresh_model(name, **changes)), prompt(1, 6)
    expected = continued(model, ids, 30)
    cache = transformers.StaticCache(model.config, max_cache_len=48)
    config = transformers.CompileConfig(backend=backend, mode=None)
    seen = under_install(continued, model, ids, 30, past_key_values=cache, compile_config=config)
    assert torch.equal(seen, expected)
    assert graphs() == 1
    assert all(kinds(cache))


@versions.kvlayers_recurrent_layers
@pytest.mark.parametrize("family", ["mamba2", "jamba"])
def test_recurrent_layers_are_replaced_where_they_take_a_chat(family: str) -> None:
    model = tiny_model(family) if family == "jamba" else model_and_inputs(family)[0]
    expected, cache = continued(model, prompt(1, 7)), transformers.DynamicCache(config=model.config)
    assert torch.equal(under_install(continued, model, prompt(1, 7), **given(cache, model)), expected)
    ours = any(isinstance(layer, kvlayers.LinearAttentionLayer) for layer in cache.layers)
    # The scan of the other one begins from zero.
    assert ours is (family == "mamba2")


def test_both_parts_of_a_pair_are_replaced() -> None:
    model, pairs = tiny_model("bart"), [[transformers.DynamicCache() for _ in range(2)] for _ in range(2)]
    theirs, ours = (transformers.EncoderDecoderCache(*pair) for pair in pairs)
    expected = continued(model, prompt(2, 7), past_key_values=theirs, num_beams=2)
    assert torch.equal(under_install(continued, model, prompt(2, 7), past_key_values=ours, num_beams=2), expected)
    assert kinds(ours.self_attention_cache) == kinds(ours.cross_attention_cache) == ["DynamicLayer"] * 2


def test_what_may_do_something_of_its_own_is_left_alone() -> None:
    class Mine(transformers.DynamicCache):
        """A cache of a user's."""

    class MyLayer(transformers.cache_utils.DynamicSlidingWindowLayer):
        """A layer of a user's."""

    mine, mixed, turned_off = Mine(), MAKERS["of a config"](tiny_model("gemma3")), transformers.DynamicCache()
    mixed.layers[1] = MyLayer(sliding_window=WINDOW)
    with kvlayers.installed():
        for cache in (mine, mixed):
            generate(prompt(1, 4), cache)
        with kvlayers.installed(replace_empty_caches=False), kvlayers.installed():
            generate(prompt(1, 4), turned_off)
    assert kinds(mine) == kinds(turned_off) == [""] * 4
    assert kinds(mixed) == ["SlidingLayer", "", "DynamicLayer", "SlidingLayer"]


def test_a_filled_cache_is_left_alone_with_one_line_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "kvlayers")
    cache = transformers.DynamicCache()
    longer = torch.cat([generate(prompt(1, 6), cache), prompt(1, 3)], dim=1)
    with kvlayers.installed():
        assert torch.equal(generate(longer, cache), generate(longer, None))
    assert kinds(cache) == [""] * 4
    assert [record.message for record in caplog.records] == [
        "A DynamicCache keeps its layers of transformers, as it holds states: only empty caches get kvlayers' layers."
    ]


@torch.no_grad()
def loop(model: Any, inputs: dict[str, torch.Tensor]) -> tuple[list[torch.Tensor], Any]:
    """Logits of a prompt and of three tokens behind it, as a loop of one's own computes them, and the model's cache."""
    inputs = {name: value for name, value in inputs.items() if name != "attention_mask"}
    ids_name = "decoder_input_ids" if model.config.is_encoder_decoder else "input_ids"
    cache, logits = None, []
    for ids in (prompt(2, 7), *(prompt(2, 1, seed=seed) for seed in range(3))):
        past = {} if cache is None else given(cache, model)
        output = model(**{**inputs, ids_name: ids}, use_cache=True, **past)
        cache = cache_argument.in_output(output)
        logits.append(output.logits)
    return logits, cache


@pytest.mark.parametrize(
    "family", some([*FAMILIES, "llama", "gemma3"], ["llama", "gemma3", "mamba2", "minimax", "whisper"])
)
def test_a_cache_that_a_model_makes_itself_has_layers_of_kvlayers(family: str) -> None:
    model, inputs = any_model_and_inputs(family) if family in FAMILIES else (fresh_model(family), {})
    expected, theirs = loop(model, inputs)
    seen, ours = under_install(loop, model, inputs)
    torch.testing.assert_close(seen, expected, rtol=1e-4, atol=1e-4)
    assert type(ours) is type(theirs)
    if family in ("llama", "gemma3"):
        assert kinds(ours) == (FULL[:2] if family == "llama" else WINDOWS)


def test_a_model_makes_transformers_layers_where_it_may_not_have_others() -> None:
    model, ids = fresh_model("llama"), prompt(1, 6)

    def made(**how: Any) -> Any:
        return cache_argument.in_output(model(ids, **{"use_cache": True, **how}))

    with kvlayers.installed():
        followed = made()
        with torch.no_grad():
            with kvlayers.installed(replace_empty_caches=False):
                turned_off = made()
            # Nobody makes a cache here.
            assert made(use_cache=False) is None
        elsewhere = transformers.DynamicCache(config=model.config)
    with torch.no_grad():
        after = made()
    assert [kinds(cache) for cache in (followed, turned_off, elsewhere, after)] == [["", ""]] * 4


def test_a_cache_in_the_place_of_the_named_one_is_a_warning_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """PEFT's prefix tuning does that."""
    if versions.LEAVES_THE_CACHE_TO_MODELS:
        pytest.skip("transformers 5.0 passes no empty cache")
    model, ids = fresh_model("llama"), prompt(1, 6)
    with torch.no_grad():
        prefix = cache_argument.in_output(model(prompt(1, 4), use_cache=True))
    prepare = model.prepare_inputs_for_generation

    def with_prefix(input_ids: torch.Tensor, **arguments: Any) -> dict[str, Any]:
        inputs = prepare(input_ids, **arguments)
        if not inputs[cache_argument.usual_name()].get_seq_length():
            inputs |= {**given(copy.deepcopy(prefix)), "attention_mask": None}
        return inputs

    monkeypatch.setattr(model, "prepare_inputs_for_generation", with_prefix)
    expected = continued(model, ids, 4, attention_mask=None)
    with kvlayers.installed():
        with pytest.warns(UserWarning, match="'int4' is not used: .* given a DynamicCache in its place") as warned:
            assert torch.equal(continued(model, ids, 4, attention_mask=None, cache_implementation="int4"), expected)
        assert len(warned) == 1
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            for options in ({"cache_implementation": "int4"}, {}):
                assert torch.equal(continued(model, ids, 4, attention_mask=None, **options), expected)


def test_a_cache_of_pages_is_passed_on_as_it_is(installed: None) -> None:
    class PagedAttentionCache:
        """The name of the class of transformers."""

    passed: list[Any] = []

    class Model(transformers.LlamaForCausalLM):
        def forward(self, input_ids: torch.Tensor, past_key_values: Any = None, **given: Any) -> None:
            passed.append((past_key_values, given))

    pages = PagedAttentionCache()
    Model(tiny_model("llama").config)(input_ids=prompt(1, 3), cache=pages)
    assert passed == [(None, {"cache": pages})]


def test_a_cache_of_transformers_by_the_name_of_a_factory_is_the_one_that_was_named(installed: None) -> None:
    with registered(theirs=lambda request: transformers.DynamicCache()), warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*is not used")
        continued(fresh_model("llama"), prompt(1, 5), 3, cache_implementation="theirs")


@versions.kvlayers_recurrent_layers
def test_guidance_beside_a_named_cache_needs_no_count_of_tokens() -> None:
    """transformers' cache of the other prompt, which has recurrent states alone, does not say how many it has seen."""
    model, ids = fresh_model("mamba"), prompt(1, 6)
    how = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 4, "do_sample": False, "guidance_scale": 2.0}
    expected = model.generate(ids, **how)
    with kvlayers.installed(), warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        seen = model.generate(ids, cache_implementation="static", **how)
    assert torch.equal(seen, expected)
    # Before 5.24, guidance passes mamba no cache for the other prompt.
    takes_cache = cache_argument.name_for(model) == cache_argument.usual_name()
    assert any("The cache 'static' is not used" in str(each.message) for each in warned) is takes_cache
