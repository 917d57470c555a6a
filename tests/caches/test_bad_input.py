"""Bad input is a named error, raised before anything is changed: the cache still decodes correctly after it."""

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers

import kvlayers
from families import model_and_inputs
from kvlayers.core.buffer import TokenBuffer
from kvlayers.core.cache_operations import CacheState
from kvlayers.serving import prometheus_text
from matrix import once
from models import COMMON, WINDOW, prompt, tiny_model

LAYERS: dict[str, Callable[[], kvlayers.CacheLayer]] = {
    "dynamic": kvlayers.DynamicLayer,
    "sliding": lambda: kvlayers.SlidingLayer(WINDOW),
    "static": lambda: kvlayers.StaticLayer(64),
    "static sliding": lambda: kvlayers.StaticSlidingLayer(64, WINDOW),
}


def states(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, dtype=dtype)


GOOD = (2, 3, 1, 8)
BAD_STATES: dict[str, tuple[torch.Tensor, torch.Tensor]] = {
    "another batch": (states(1, 3, 1, 8), states(1, 3, 1, 8)),
    "another head count": (states(2, 4, 1, 8), states(2, 4, 1, 8)),
    "another head_dim": (states(2, 3, 1, 4), states(2, 3, 1, 4)),
    "another head_dim of values alone": (states(*GOOD), states(2, 3, 1, 4)),
    "another dtype": (states(*GOOD, dtype=torch.float64), states(*GOOD, dtype=torch.float64)),
    "another device": (states(*GOOD).to("meta"), states(*GOOD).to("meta")),
    "three dimensions": (states(2, 3, 8), states(2, 3, 8)),
    "fewer values than keys": (states(2, 3, 2, 8), states(*GOOD)),
}


PROMOTING = ("dynamic", "sliding")
"""Layers to which another dtype is not bad: test_changed_dtype.py."""


@pytest.mark.parametrize(
    ("kind", "bad"),
    [(kind, bad) for kind in LAYERS for bad in BAD_STATES if kind not in PROMOTING or bad != "another dtype"],
)
@pytest.mark.parametrize("filled", [5, 30])
def test_states_that_do_not_fit_change_nothing(kind: str, bad: str, filled: int) -> None:
    layer, untouched = LAYERS[kind](), LAYERS[kind]()
    for _ in range(filled):
        pair = states(*GOOD), states(*GOOD)
        layer.update(*pair)
        untouched.update(*pair)
    with pytest.raises(kvlayers.errors.StateMismatchError, match="must .* got"):
        layer.update(*BAD_STATES[bad])
    pair = states(*GOOD), states(*GOOD)
    for seen, expected in zip(layer.update(*pair), untouched.update(*pair), strict=True):
        assert torch.equal(seen, expected)


def _damaged(state: CacheState) -> CacheState:
    *layers, last = state.layers
    tensors = {**last.tensors, "values": last.tensors["values"][:, :, 1:]}
    return dataclasses.replace(state, layers=(*layers, dataclasses.replace(last, tensors=tensors)))


def half_way(cache: Any) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """A cache in the middle of a greedy decode, the next token, and the tokens that must follow it."""
    model, ids = tiny_model("gemma3"), prompt(1, 10)
    whole = model.generate(ids, max_new_tokens=8, do_sample=False, attention_mask=torch.ones_like(ids))
    with torch.no_grad():
        model(whole[:, :13], past_key_values=cache)
    return cache, whole[:, 13:14], whole[:, 14:]


CACHES: dict[str, Callable[[], Any]] = {
    "dynamic": lambda: kvlayers.DynamicCache(config=tiny_model("gemma3").config),
    "static": lambda: kvlayers.StaticCache(tiny_model("gemma3").config, max_cache_len=24),
}
MISUSES: dict[str, tuple[type[Exception], Callable[[Any], object]]] = {
    "layer index beyond the last": (
        kvlayers.errors.LayerIndexError,
        lambda cache: cache.update(states(1, 2, 1, 8), states(1, 2, 1, 8), 4),
    ),
    "layer index below the first": (
        kvlayers.errors.LayerIndexError,
        lambda cache: cache.update(states(1, 2, 1, 8), states(1, 2, 1, 8), -1),
    ),
    "a length that is no whole number": (kvlayers.OptionError, lambda cache: cache.crop(1.5)),
    "a state with a layer that is damaged": (
        kvlayers.errors.StateMismatchError,
        lambda cache: cache.load_state(_damaged(cache.state())),
    ),
    "subscript beyond the last": (kvlayers.errors.LayerIndexError, lambda cache: cache[4]),
    "more keys than the cache has layers": (
        kvlayers.errors.LayerIndexError,
        lambda cache: cache.key_cache.append(states(1, 2, 12, 8)),
    ),
    # Upstream, this leaves an empty cache and says nothing.
    "removing more than is held": (kvlayers.errors.RollbackError, lambda cache: cache.crop(-14)),
    "keeping more than is held": (kvlayers.errors.RollbackError, lambda cache: cache.crop(14)),
    "rolling back over a full window": (kvlayers.errors.RollbackError, lambda cache: cache.crop(-1)),
    "batch index beyond the last": (
        kvlayers.errors.BatchIndexError,
        lambda cache: cache.reorder_cache(torch.tensor([1])),
    ),
    "batch index below the first": (
        kvlayers.errors.BatchIndexError,
        lambda cache: cache.batch_select_indices(torch.tensor([-2])),
    ),
    "no batch index": (kvlayers.errors.BatchIndexError, lambda cache: cache.batch_select_indices([])),
    "batch index of floats": (kvlayers.errors.BatchIndexError, lambda cache: cache.batch_select_indices([0.0])),
    "a mask of another length": (
        kvlayers.errors.BatchIndexError,
        lambda cache: cache.batch_select_indices([True, False]),
    ),
    "no repeats": (kvlayers.errors.BatchIndexError, lambda cache: cache.batch_repeat_interleave(0)),
    "a forward pass of two sequences": (
        kvlayers.errors.StateMismatchError,
        lambda cache: tiny_model("gemma3")(prompt(2, 1), past_key_values=cache),
    ),
    "the state of another kind": (
        kvlayers.errors.StateMismatchError,
        lambda cache: cache.load_state(kvlayers.DynamicCache([(states(1, 2, 3, 8), states(1, 2, 3, 8))]).state()),
    ),
    "putting more tokens in place than were seen": (
        kvlayers.errors.StateMismatchError,
        lambda cache: cache.key_cache.__setitem__(0, states(1, 2, 14, 8)),
    ),
    "moving a layer that cannot": (kvlayers.errors.UnsupportedLayerError, lambda cache: cache.offload(2)),
    "asking for a recurrent state": (kvlayers.errors.UnsupportedLayerError, lambda cache: cache.get_conv_state(0)),
    "tuples of a window that has dropped tokens": (
        kvlayers.errors.LegacyFormatError,
        lambda cache: cache.to_legacy_cache(),
    ),
}


@pytest.mark.parametrize(("kind", "misuse"), once(CACHES, MISUSES))
def test_a_cache_decodes_correctly_after_misuse(kind: str, misuse: str) -> None:
    cache, step, expected = half_way(CACHES[kind]())
    error, use = MISUSES[misuse]
    with torch.no_grad(), pytest.raises(error) as raised:
        use(cache)
    assert isinstance(raised.value, kvlayers.KVLayersError)
    tokens = []
    with torch.no_grad():
        for _ in range(expected.shape[1]):
            step = tiny_model("gemma3")(step, past_key_values=cache).logits[:, -1].argmax(-1, keepdim=True)
            tokens.append(step)
    assert torch.equal(torch.cat(tokens, dim=1), expected)


def test_a_refused_first_update_leaves_a_layer_as_it_was() -> None:
    layer = kvlayers.StaticLayer(4)
    layer.lazy_initialization(states(1, 2, 0, 8), states(1, 2, 0, 8))
    held = layer.nbytes
    with pytest.raises(kvlayers.CapacityError):
        layer.update(states(3, 2, 5, 8), states(3, 2, 5, 8))
    assert (layer.batch_size, layer.nbytes) == (1, held)


def test_a_window_of_transformers_own_is_not_rolled_back_half_way() -> None:
    from transformers.cache_utils import DynamicSlidingWindowLayer

    cache = kvlayers.Cache(layers=[kvlayers.DynamicLayer(), DynamicSlidingWindowLayer(sliding_window=4)])
    for index in range(2):
        cache.update(states(1, 2, 10, 8), states(1, 2, 10, 8), index)
    with pytest.raises(kvlayers.errors.RollbackError):
        cache.crop(-2)
    assert [layer.get_seq_length() for layer in cache.layers] == [10, 10]


LLAMA = transformers.LlamaConfig(**COMMON)


def _with_layer_type(layer_type: str) -> transformers.PretrainedConfig:
    config = transformers.LlamaConfig(**COMMON)
    config.layer_types = [layer_type] * 2
    return config


OPTION, CONFIG = kvlayers.OptionError, kvlayers.errors.ConfigError
WHAT_EXISTS = "is no option of .* takes the options"
MUST = "must|are not"
WRONG_ARGUMENTS: dict[str, tuple[type[Exception], str, Callable[[], object]]] = {
    # Upstream, StaticCache(config, 4, max_cash_len=9) is accepted.
    "misspelt": (OPTION, WHAT_EXISTS, lambda: kvlayers.StaticCache(LLAMA, 4, max_cash_len=9)),
    "misspelt, encoder-decoder": (OPTION, WHAT_EXISTS, lambda: kvlayers.EncoderDecoderCache(cashes=())),
    "misspelt, dynamic": (OPTION, WHAT_EXISTS, lambda: kvlayers.DynamicCache(confg=LLAMA)),
    "misspelt, layer": (OPTION, WHAT_EXISTS, lambda: kvlayers.StaticLayer(max_cache_length=3)),
    "misspelt, by name": (OPTION, WHAT_EXISTS, lambda: kvlayers.make_cache("static", LLAMA, max_cash_len=9)),
    "of another kind, by name": (OPTION, WHAT_EXISTS, lambda: kvlayers.make_cache("dynamic", LLAMA, nbits=4)),
    "nearly right": (OPTION, "did you mean 'max_cache_len'", lambda: kvlayers.StaticCache(LLAMA, max_cash_len=9)),
    "missing": (OPTION, "max_cache_len", lambda: kvlayers.StaticCache(LLAMA)),
    "infinite factor": (OPTION, MUST, lambda: kvlayers.stores.Buckets(factor=1e308)),
    "no capacity": (OPTION, MUST, lambda: kvlayers.stores.Buckets().sizes(0)),
    "fraction of a token": (OPTION, MUST, lambda: kvlayers.stores.Buckets().sizes(2.5)),
    "text for compiled": (OPTION, MUST, lambda: kvlayers.StaticCache(LLAMA, 8, compiled="no")),
    "text for grow": (OPTION, MUST, lambda: kvlayers.StaticCache(LLAMA, 8, grow="yes")),
    "text for offloading": (OPTION, MUST, lambda: kvlayers.DynamicCache(config=LLAMA, offloading="no")),
    "number for a directory": (
        OPTION,
        "`offload_directory` must be a directory",
        lambda: kvlayers.StaticCache(LLAMA, 8, offloading=True, offload_device="disk", offload_directory=3),
    ),
    "number for a flag": (
        OPTION,
        MUST,
        lambda: kvlayers.QuantizedCache(config=LLAMA, offloading=True, offload_only_non_sliding=2),
    ),
    "negative batch": (
        OPTION,
        MUST,
        lambda: kvlayers.StaticCache(LLAMA, 8).early_initialization(-1, 2, 8, torch.float32, "cpu"),
    ),
    **{
        f"size {size!r}": (OPTION, "max_cache_len", lambda size=size: kvlayers.StaticCache(LLAMA, max_cache_len=size))
        for size in (0, -3, 2.5, "eight", "0", None, True)
    },
    **{
        f"sequences {size!r}": (
            OPTION,
            "max_batch_size",
            lambda size=size: kvlayers.StaticCache(LLAMA, 8, max_batch_size=size),
        )
        for size in (0, -1, 1.5)
    },
    **{
        f"buckets {given!r}": (OPTION, "buckets", lambda given=given: kvlayers.StaticCache(LLAMA, 8, buckets=given))
        for given in (16, (16, 32), "small", {"minimum": 16})
    },
    "a config in the place of states": (OPTION, "pass it as `config`", lambda: kvlayers.DynamicCache(LLAMA)),
    "no parts": (OPTION, "a cross-attention cache", lambda: kvlayers.EncoderDecoderCache()),
    "a part that is a number": (
        OPTION,
        "a cross-attention cache",
        lambda: kvlayers.EncoderDecoderCache(kvlayers.DynamicCache(), 3),
    ),
    "three parts": (
        OPTION,
        "a cross-attention cache",
        lambda: kvlayers.EncoderDecoderCache(*(kvlayers.DynamicCache() for _ in range(3))),
    ),
    "one part twice": (OPTION, "share nothing", lambda: kvlayers.EncoderDecoderCache(*[kvlayers.DynamicCache()] * 2)),
    "one layer twice": (CONFIG, "got one twice", lambda: kvlayers.Cache(layers=[kvlayers.DynamicLayer()] * 2)),
    "half a pair": (
        kvlayers.errors.LegacyFormatError,
        "only one",
        lambda: kvlayers.DynamicCache([(states(1, 2, 3, 8), None)]),
    ),
    "a cache for layers": (
        OPTION,
        "`layers` must be a list, got a DynamicCache",
        lambda: kvlayers.Cache(layers=kvlayers.DynamicCache()),
    ),
    "a layer for layers": (
        OPTION,
        "`layers` must be a list, got a DynamicLayer",
        lambda: kvlayers.Cache(layers=kvlayers.DynamicLayer()),
    ),
    "no layers": (CONFIG, MUST, lambda: kvlayers.DynamicCache(config=transformers.PretrainedConfig())),
    "no config": (CONFIG, MUST, lambda: kvlayers.StaticCache({"num_hidden_layers": 2}, max_cache_len=4)),
    "a window that is none": (CONFIG, MUST, lambda: kvlayers.SlidingLayer(0)),
    "neither layers nor a class": (CONFIG, MUST, lambda: kvlayers.Cache()),
    "a path": (CONFIG, MUST, lambda: kvlayers.make_cache("dynamic", "gpt2")),
    "a module without a config": (CONFIG, MUST, lambda: kvlayers.make_cache("dynamic", torch.nn.Linear(2, 2))),
    "a recurrent model to export": (
        kvlayers.errors.UnsupportedLayerError,
        "other types",
        lambda: kvlayers.ExportableDecoder(tiny_model("jamba"), max_cache_len=64),
    ),
    "nothing reserved to export": (
        OPTION,
        "max_cache_len",
        lambda: kvlayers.ExportableDecoder(tiny_model("llama"), max_cache_len=0),
    ),
    "a listener that cannot be called": (
        OPTION,
        "on_event",
        lambda: kvlayers.PrefixStore("1MiB", on_event="http://router"),
    ),
    **{
        f"session {name!r}": (OPTION, "name", lambda name=name: kvlayers.PrefixStore("1MiB").session(name))
        for name in ("", None, 3, b"a")
    },
    **{
        f"namespace {name!r}": (
            OPTION,
            "namespace",
            lambda name=name: kvlayers.PrefixStore("1MiB").session("a", namespace=name),
        )
        for name in (1, 3, b"a")
    },
    "a session of less than no time": (OPTION, "ttl", lambda: kvlayers.PrefixStore("1MiB").session("a", ttl=-1)),
    **{
        f"labels {labels}": (
            OPTION,
            "labels",
            lambda labels=labels: prometheus_text(kvlayers.PrefixStore("1MiB").statistics, labels),
        )
        for labels in ({"a-b": "1"}, {"reason": "1"}, {"a": 1}, {"__name__": "a"})
    },
    "a prefix that begins with a number": (
        OPTION,
        "prefix",
        lambda: prometheus_text(kvlayers.PrefixStore("1MiB").statistics, prefix="1p"),
    ),
    "an unknown layer type": (CONFIG, MUST, lambda: kvlayers.DynamicCache(config=_with_layer_type("telepathy"))),
}


@pytest.mark.parametrize("case", WRONG_ARGUMENTS)
def test_a_wrong_argument_is_named_with_what_is_right(case: str) -> None:
    error, words, act = WRONG_ARGUMENTS[case]
    with pytest.raises(error, match=words):
        act()


@pytest.mark.parametrize("family", ["llama", "gemma3", "jamba"])
@pytest.mark.parametrize("tokens", [1, 5])
def test_tokens_that_do_not_fit_are_refused_before_any_layer_takes_them(family: str, tokens: int) -> None:
    """A recurrent layer could not give them back."""
    model = tiny_model(family)
    cache, other = kvlayers.StaticCache(model.config, max_cache_len=12), kvlayers.DynamicCache(config=model.config)
    with torch.no_grad():
        for held in (cache, other):
            model(prompt(1, 12 - tokens // 2), past_key_values=held)
        words = rf"at most 12 tokens, got {12 - tokens // 2} held and {tokens} new: reserve {12 + tokens - tokens // 2}"
        with pytest.raises(kvlayers.CapacityError, match=words):
            model(prompt(1, tokens, seed=1), past_key_values=cache)
        assert {layer.length for layer in cache.layers} == {12 - tokens // 2}
        expected = model(prompt(1, 1, seed=2), past_key_values=other).logits
        if tokens > 1:
            assert torch.equal(model(prompt(1, 1, seed=2), past_key_values=cache).logits, expected)
        grown = kvlayers.StaticCache(model.config, max_cache_len=12, grow=True)
        model(prompt(1, 12 - tokens // 2), past_key_values=grown)
        assert torch.equal(model(prompt(1, 1, seed=2), past_key_values=grown).logits, expected)


def test_layers_that_recorded_go_on_with_chunks_when_they_record_no_more() -> None:
    model = model_and_inputs("granitemoehybrid")[0]
    cache, other = kvlayers.DynamicCache(config=model.config), kvlayers.DynamicCache(config=model.config)
    with torch.no_grad():
        for tokens in (5, 1):
            model(prompt(1, tokens), past_key_values=other)
        model(prompt(1, 5), past_key_values=cache)
        cache.activate_past_recording()
        model(prompt(1, 1), past_key_values=cache)
        cache.deactivate_past_recording()
        for tokens in (1, 3, 1):
            expected = model(prompt(1, tokens, seed=1), past_key_values=other).logits
            assert torch.equal(model(prompt(1, tokens, seed=1), past_key_values=cache).logits, expected)


@pytest.mark.parametrize(
    "kind",
    [
        kvlayers.StaticCache,
        kvlayers.HybridCache,
        kvlayers.HybridChunkedCache,
        kvlayers.SlidingWindowCache,
        kvlayers.OffloadedStaticCache,
    ],
)
def test_arguments_that_static_caches_once_took_are_looked_at(kind: Any) -> None:
    """Old code passes them, and nothing follows from them."""
    # A device of another machine is none the less one.
    kind(config=LLAMA, max_cache_len=8, device="cuda:7", dtype="bfloat16")
    given = {"max_cache_len": 8, "max_batch_size": 1, "device": "cpu", "dtype": torch.float16}
    keys, _ = kind(config=LLAMA, **given).update(states(1, 2, 3, 8), states(1, 2, 3, 8), 0)
    assert keys.dtype == torch.float32
    for wrong in ({"dtype": "floaty"}, {"dtype": 16}, {"device": "cdua"}, {"device": 1.5}, {"device": -1}):
        with pytest.raises(kvlayers.OptionError, match=f"`{next(iter(wrong))}` must be a"):
            kind(config=LLAMA, **{**given, **wrong})


@pytest.mark.parametrize("recording", [False, True])
def test_states_that_alias_a_window_are_taken_in_as_they_were(recording: bool) -> None:
    layer = kvlayers.SlidingLayer(100)
    for _ in range(115):
        keys, values = layer.update(states(1, 2, 1, 4), states(1, 2, 1, 4))
    if recording:
        layer.activate_past_recording()
    for _ in range(90):
        fed = keys[:, :, 30:31], values[:, :, 30:31]
        expected = fed[0].clone()
        keys, values = layer.update(*fed)
        assert torch.equal(keys[:, :, -1:], expected)


def test_what_the_caller_passed_is_never_written_to_or_read_again() -> None:
    keys, values = states(1, 2, 23, 4).requires_grad_(), states(1, 2, 23, 4)
    before = keys.detach().clone(), values.clone()
    layer = kvlayers.StaticSlidingLayer(100, 8)
    layer.update(keys, values)
    with torch.no_grad():
        layer.update(states(1, 2, 1, 4), states(1, 2, 1, 4))
    assert torch.equal(keys.detach(), before[0])
    assert torch.equal(values, before[1])
    cache = kvlayers.DynamicCache()
    cache.update(keys, values, 0)
    values.zero_()
    assert torch.equal(cache[0][1], before[1])


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("operation", ["update", "select"])
def test_running_out_of_memory_leaves_a_layer_as_it_was(
    kind: str, operation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, untouched = LAYERS[kind](), LAYERS[kind]()
    for _ in range(12):
        pair = states(*GOOD), states(*GOOD)
        layer.update(*pair)
        untouched.update(*pair)
    allocate, calls = TokenBuffer.allocate, []

    def second_fails(*args: Any) -> TokenBuffer:
        calls.append(args)
        if len(calls) == 2:
            raise MemoryError
        return allocate(*args)

    layer.activate_past_recording()
    monkeypatch.setattr(TokenBuffer, "allocate", second_fails)
    with contextlib.suppress(MemoryError, kvlayers.CapacityError):
        layer.update(states(2, 3, 200, 8), states(2, 3, 200, 8)) if operation == "update" else layer.select(
            torch.tensor([0, 1, 0])
        )
    monkeypatch.undo()
    pair = states(*GOOD), states(*GOOD)
    for seen, expected in zip(layer.update(*pair), untouched.update(*pair), strict=True):
        assert torch.equal(seen, expected)


def test_layers_of_different_batch_sizes_are_not_selected() -> None:
    cache = kvlayers.DynamicCache()
    for index, batch in enumerate((2, 3)):
        cache.update(states(batch, 2, 5, 4), states(batch, 2, 5, 4), index)
    with pytest.raises(kvlayers.errors.BatchIndexError, match=r"\[2, 3\]"):
        cache.reorder_cache([1, 0])


def test_a_failed_first_update_leaves_no_layers_behind() -> None:
    cache = kvlayers.DynamicCache()
    with pytest.raises(kvlayers.errors.StateMismatchError):
        cache.update(states(1, 2, 5), states(1, 2, 5), 5)
    assert len(cache) == 0


def test_a_limit_is_no_way_around_by_a_state() -> None:
    ahead = kvlayers.StaticSlidingLayer(20, 8)
    for _ in range(30):
        ahead.update(states(*GOOD), states(*GOOD))
    with pytest.raises(kvlayers.CapacityError, match="at most 20 tokens, which the layer may see, got 30"):
        kvlayers.StaticSlidingLayer(20, 8, token_limit=20).load_state(ahead.state())


def test_a_damaged_recurrent_state_is_refused() -> None:
    model = tiny_model("jamba")
    cache = kvlayers.DynamicCache(config=model.config)
    with torch.no_grad():
        model(prompt(1), past_key_values=cache)
    state = cache.state()
    layers = [
        dataclasses.replace(layer, tensors={k: v for k, v in layer.tensors.items() if not k.startswith("conv")})
        for layer in state.layers
    ]
    with pytest.raises(kvlayers.errors.StateMismatchError, match="conv_states"):
        kvlayers.DynamicCache(config=model.config).load_state(dataclasses.replace(state, layers=tuple(layers)))


@pytest.mark.parametrize(
    ("thing", "said"),
    [
        (lambda: kvlayers.DynamicCache(), "a DynamicCache"),
        (lambda: transformers.DynamicCache(), "a DynamicCache"),
        (lambda: kvlayers.DynamicLayer, "the class DynamicLayer"),
        (lambda: torch.zeros(1), "a Tensor"),
        (lambda: None, "a NoneType"),
    ],
)
def test_what_is_no_layer_makes_no_cache(thing: Any, said: str) -> None:
    words = f"A layer must be one of kvlayers or of transformers, got {said}"
    with pytest.raises(kvlayers.OptionError, match=words):
        kvlayers.Cache(layers=[kvlayers.DynamicLayer(), thing()])
    cache = kvlayers.Cache(layer_class_to_replicate=thing)
    with pytest.raises(kvlayers.OptionError, match=words):
        cache.update(states(*GOOD), states(*GOOD), 0)
    assert len(cache.layers) == 0


MISWRITTEN: dict[str, tuple[Callable[[Any], object], str]] = {
    "names by another name": (lambda model: kvlayers.plan(model, 100, cache="int4"), r"write names=\['int4'\]\."),
    "config by another name": (lambda model: kvlayers.load_cache("no", model=model), r"write config=model\.config\."),
    "a model as the second of a file": (lambda model: kvlayers.load_cache("no", model), "by name, as in .*config="),
    "a model as a device": (
        lambda model: kvlayers.make_cache("static", model, device=model),
        "got a LlamaForCausalLM ",
    ),
    "a rule before the config": (lambda model: kvlayers.EvictingCache("tova", config=model), "by name, as in .*rule="),
    "a share as a budget": (lambda model: kvlayers.make_cache("tova", model, budget=0.5), r"as keep=0\.5\."),
    "a layer before its states": (
        lambda _: kvlayers.DynamicCache().update(0, *map(torch.zeros, (GOOD, GOOD))),
        "got a Tensor: pass keys, values and layer_idx",
    ),
    "what only old code passes comes last": (
        lambda _: kvlayers.DynamicCache(x=1),
        r"options config, .*, ddp_cache_data\.$",
    ),
}


@pytest.mark.parametrize("case", MISWRITTEN)
def test_a_miswritten_call_is_answered_by_what_to_write(case: str) -> None:
    call, said = MISWRITTEN[case]
    with pytest.raises((kvlayers.OptionError, kvlayers.errors.LayerIndexError), match=said) as raised:
        call(tiny_model("llama"))
    assert len(str(raised.value)) < 500
