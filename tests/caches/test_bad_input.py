"""Bad input is a named error, raised before anything is changed: the cache still decodes correctly after it."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers

import kvlayers
from kvlayers.serving import prometheus_text
from matrix import once
from models import COMMON, prompt, tiny_model

GOOD = (2, 3, 1, 8)


def states(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, dtype=dtype)


def _damaged(state: Any) -> Any:
    tensors = state.layers[-1].tensors
    tensors["values"] = tensors["values"][:, :, 1:]
    return state


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
@torch.no_grad()
def test_a_cache_decodes_correctly_after_misuse(kind: str, misuse: str) -> None:
    model, ids, cache = tiny_model("gemma3"), prompt(1, 18), CACHES[kind]()
    model(ids[:, :13], past_key_values=cache)
    error, use = MISUSES[misuse]
    with pytest.raises(error):
        use(cache)
    logits = [model(token, past_key_values=cache).logits for token in ids[:, 13:].split(1, dim=1)]
    torch.testing.assert_close(torch.cat(logits, dim=1), model(ids).logits[:, 13:], rtol=1e-4, atol=1e-5)


def test_a_window_of_transformers_own_is_not_rolled_back_half_way() -> None:
    window = transformers.cache_utils.DynamicSlidingWindowLayer(sliding_window=4)
    cache = kvlayers.Cache(layers=[kvlayers.DynamicLayer(), window])
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


@pytest.mark.parametrize(("error", "words", "act"), WRONG_ARGUMENTS.values(), ids=WRONG_ARGUMENTS)
def test_a_wrong_argument_is_named_with_what_is_right(
    error: type[Exception], words: str, act: Callable[[], object]
) -> None:
    with pytest.raises(error, match=words):
        act()


@pytest.mark.parametrize("family", ["llama", "gemma3", "jamba"])
@pytest.mark.parametrize("tokens", [1, 5])
@torch.no_grad()
def test_tokens_that_do_not_fit_are_refused_before_any_layer_takes_them(family: str, tokens: int) -> None:
    """A recurrent layer could not give them back."""
    model, seen = tiny_model(family), 12 - tokens // 2
    cache, grown = (kvlayers.StaticCache(model.config, max_cache_len=12, grow=grow) for grow in (False, True))
    other = kvlayers.DynamicCache(config=model.config)
    for held in (cache, grown, other):
        model(prompt(1, seen), past_key_values=held)
    words = rf"at most 12 tokens, got {seen} held and {tokens} new: reserve {seen + tokens}"
    with pytest.raises(kvlayers.CapacityError, match=words):
        model(prompt(1, tokens, seed=1), past_key_values=cache)
    assert {layer.length for layer in cache.layers} == {seen}
    expected = model(prompt(1, 1, seed=2), past_key_values=other).logits
    for held in (grown, cache) if tokens > 1 else (grown,):
        assert torch.equal(model(prompt(1, 1, seed=2), past_key_values=held).logits, expected)


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


@torch.no_grad()
def test_a_damaged_recurrent_state_is_refused() -> None:
    model = tiny_model("jamba")
    cache = model(prompt(1), past_key_values=kvlayers.DynamicCache(config=model.config)).past_key_values
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


@pytest.mark.parametrize(("call", "said"), MISWRITTEN.values(), ids=MISWRITTEN)
def test_a_miswritten_call_is_answered_by_what_to_write(call: Callable[[Any], object], said: str) -> None:
    with pytest.raises((kvlayers.OptionError, kvlayers.errors.LayerIndexError), match=said) as raised:
        call(tiny_model("llama"))
    assert len(str(raised.value)) < 500
