"""Every kind of layer, in every state, through every operation, against the concatenating oracle."""

import contextlib
import itertools
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from transformers import LlamaConfig

import kvlayers
from agreement import check_at_rest, continue_decoding, same_state, step
from kvlayers.core.buffer import TokenBuffer
from kvlayers.errors import (
    BatchIndexError,
    KVLayersError,
    OptionError,
    RegistryError,
    StateMismatchError,
    UnsupportedLayerError,
)
from layer_kinds import KINDS, OPERATIONS, STATES
from matrix import product
from oracle import Oracle, states
from other_package import SteppedStore
from rounds import NIGHTLY


# The others are on the way into one of these.
@pytest.mark.parametrize("past", [*STATES][3:])
@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_agrees_with_the_oracle_on_its_way_into_every_state(kind: str, past: str) -> None:
    layer, oracle = KINDS[kind]()
    generator = torch.Generator().manual_seed(1)
    for tokens in STATES[past]:
        if oracle.fits(tokens):
            step(layer, oracle, tokens, generator)


def _in_state(kind: str, past: str, generator: torch.Generator) -> tuple[kvlayers.CacheLayer, Oracle]:
    """A layer and its oracle, whose way there the test above checks step by step, once for all operations."""
    layer, oracle = KINDS[kind]()
    for tokens in STATES[past]:
        if oracle.fits(tokens):
            new = states(2, tokens, generator)
            layer.update(*new)
            oracle.update(*new)
    return layer, oracle


@pytest.mark.parametrize(("kind", "operation", "past"), product(KINDS, OPERATIONS, STATES))
def test_a_layer_decodes_as_the_oracle_does_after_an_operation(
    kind: str, operation: str, past: str, generator: torch.Generator
) -> None:
    layer, oracle = _in_state(kind, past, generator)
    check_at_rest(layer, oracle)
    layer = OPERATIONS[operation](layer, oracle)
    check_at_rest(layer, oracle)
    continue_decoding(layer, oracle, generator)


# Only single tokens are read in buckets.
@pytest.mark.parametrize(
    ("kind", "grow"),
    [
        *((kind, 3) for kind in KINDS),
        *(pytest.param(kind, 1, marks=() if "buckets" in kind else pytest.mark.nightly) for kind in KINDS),
    ],
)
def test_a_layer_agrees_with_the_oracle_at_every_length(kind: str, grow: int) -> None:
    layer, oracle = KINDS[kind]()
    generator = torch.Generator().manual_seed(2)
    while oracle.fits(grow) and oracle.length < (300 if NIGHTLY else 160):
        step(layer, oracle, grow, generator)


@pytest.mark.parametrize("past", ["after prefill", "past the window"])
@pytest.mark.parametrize("kind", ["sliding", "sliding over a long window", "sink", "sink over a long window"])
def test_a_window_that_could_not_return_its_states_has_not_taken_them_in(
    kind: str, past: str, generator: torch.Generator
) -> None:
    layer, oracle = _in_state(kind, past, generator)
    with mock.patch.object(layer.store, "newest", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        layer.update(*states(2, 1, generator))
    continue_decoding(layer, oracle, generator)


GROWING = ("dynamic", "sliding", "static that grows", "static sliding that grows", "quantized")


# The fourth time, some parts have been selected.
@pytest.mark.parametrize(
    ("kind", "operation", "fails"),
    [*itertools.product(GROWING, ["update", "select"], [2]), ("quantized", "select", 4)],
)
def test_running_out_of_memory_leaves_a_layer_as_it_was(
    kind: str, operation: str, fails: int, monkeypatch: pytest.MonkeyPatch, generator: torch.Generator
) -> None:
    # So many tokens that some are packed.
    layer, oracle = _in_state(kind, "after long chunks" if kind == "quantized" else "decoding", generator)
    layer.activate_past_recording()
    oracle.recording = True
    allocate, calls = TokenBuffer.allocate, []

    def fail_once(*args: Any) -> TokenBuffer:
        calls.append(args)
        if len(calls) == fails:
            raise MemoryError
        return allocate(*args)

    monkeypatch.setattr(TokenBuffer, "allocate", fail_once)
    with contextlib.suppress(MemoryError, kvlayers.CapacityError):
        layer.update(*states(2, 200, generator)) if operation == "update" else layer.select(torch.tensor([0, 1, 0]))
    monkeypatch.undo()
    continue_decoding(layer, oracle, generator)


# Members of a layer that are called by hand name what they were given, and change nothing

NUMBERS = (
    *("truncate", "check_truncate", "nearest_restorable"),
    *("row", "get_mask_sizes", "crop"),
)
NOT_NUMBERS = (None, "3", True, 1.5, [1], torch.tensor(1, device="meta"), torch.tensor(True))
INDICES = ("select", "batch_select_indices", "reorder_cache")
NOT_INDICES = (None, "3", 1, torch.tensor([0.5]), torch.tensor([7]), torch.zeros(1, 1, dtype=torch.int64))

KEYS, VALUES = torch.zeros(2, 2, 1, 4), torch.zeros(2, 2, 1, 6)
NO_STATES: dict[str, tuple[Any, Any]] = {
    "no keys": (None, VALUES),
    "no values": (KEYS, None),
    "names": ("keys", "values"),
    "a list": ([1.0], VALUES),
    "another batch": (KEYS[:1], VALUES[:1]),
    "fewer heads": (KEYS[:, :1], VALUES[:, :1]),
    "another head_dim": (VALUES, VALUES),
    "another head_dim of values alone": (KEYS, KEYS),
    "another device": (KEYS.to("meta"), VALUES.to("meta")),
    "three dimensions": (KEYS[0], VALUES[0]),
    "fewer values than keys": (KEYS.expand(2, 2, 3, 4), VALUES),
}


def filled(kind: str) -> Any:
    layer, _ = KINDS[kind]()
    torch.manual_seed(0)
    layer.update(torch.randn(2, 2, 6, 8), torch.randn(2, 2, 6, 8))
    return layer


# A layer of another package checks its own lengths.
@pytest.mark.parametrize("kind", [kind for kind in KINDS if "another package" not in kind])
def test_what_is_no_number_and_what_are_no_indices_is_named(kind: str) -> None:
    layer = filled(kind)
    before = layer.state()
    numbers, indices = itertools.product(NUMBERS, NOT_NUMBERS), itertools.product(INDICES, NOT_INDICES)
    for member, wrong in [*numbers, *indices, *itertools.product(["expand"], [*NOT_NUMBERS, 0, -1])]:
        error, said = (KVLayersError, "must be .* got ") if member in NUMBERS else (BatchIndexError, "must .* got ")
        with pytest.raises(error, match=said):
            getattr(layer, member)(wrong)
    assert same_state(layer.state(), before)


# A window of one token holds none.
@pytest.mark.parametrize("kind", [kind for kind in KINDS if "over one token" not in kind])
def test_what_are_no_states_of_a_layer_is_named(kind: str, generator: torch.Generator) -> None:
    """Also by the short ways of a token like the one before."""
    layer, oracle = KINDS[kind]()
    # So many that blocks are packed.
    for tokens in (80 if oracle.fits(90) and "from heads" not in kind else 6, 1, 1):
        step(layer, oracle, tokens, generator)
    for wrong in NO_STATES.values():
        with pytest.raises(StateMismatchError, match="must .* got "):
            layer.update(*wrong)
    step(layer, oracle, 1, generator)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.startswith(("recall", "sliding", "sink", "evicting"))])
def test_padding_is_not_dropped_of_tokens_that_are_counted_beside_the_store(kind: str) -> None:
    """Pages and windows would stand at other tokens than before."""
    layer = filled(kind)
    mask = torch.tensor([[1] * 6, [0] + [1] * 5])
    with pytest.raises(UnsupportedLayerError, match="`attention_mask` must have no padding for a .*Layer"):
        kvlayers.Rows(kvlayers.Cache(layers=[layer]), mask)


TAKE_HINTS: dict[str, Callable[[Any], Any]] = {
    "DynamicLayer": lambda hint: kvlayers.DynamicLayer(length_hint=hint),
    "QuantizedLayer": lambda hint: kvlayers.QuantizedLayer(length_hint=hint),
    "RecallLayer": lambda hint: kvlayers.RecallLayer(length_hint=hint),
    "DenseStore": lambda hint: kvlayers.stores.DenseStore(length_hint=hint),
    "DynamicCache": lambda hint: kvlayers.DynamicCache(length_hint=hint),
    "QuantizedCache": lambda hint: kvlayers.QuantizedCache(length_hint=hint),
    "dynamic": lambda hint: kvlayers.make_cache("dynamic", LlamaConfig(), length_hint=hint),
    "dynamic_full": lambda hint: kvlayers.make_cache("dynamic_full", LlamaConfig(), length_hint=hint),
    "static": lambda hint: kvlayers.make_cache("static", LlamaConfig(), length_hint=hint),
}


@pytest.mark.parametrize("hint", [-3, 1.5, True, "a few"])
@pytest.mark.parametrize("taker", TAKE_HINTS)
def test_a_hint_of_no_number_of_tokens_is_refused_where_it_is_taken(taker: str, hint: Any) -> None:
    with pytest.raises(OptionError, match="`length_hint` must be .* got "):
        TAKE_HINTS[taker](hint)
    assert TAKE_HINTS[taker]("1k") is not None


@pytest.mark.parametrize("base", [kvlayers.DynamicLayer, kvlayers.SlidingLayer, kvlayers.CacheLayer])
def test_what_a_kind_is_like_is_said_by_its_traits_alone(base: type) -> None:
    with pytest.raises(RegistryError, match=r"`traits` of .*Own must .* `keeps_every_token`.*LayerTraits\("):
        type("Own", (base,), {"keeps_every_token": False, "__qualname__": "Own"})
    own: Any = type("Own", (base,), {"traits": kvlayers.layers.LayerTraits(keeps_every_token=True)})
    assert own.traits.keeps_every_token


def test_a_store_that_does_not_say_is_not_taken_for_exact() -> None:
    rounding, silent = (
        kvlayers.DynamicLayer(store=type("Own", (SteppedStore,), {"fidelity": fidelity})(64))
        for fidelity in ("rounded", kvlayers.stores.TokenStore.fidelity)
    )
    for layer in (rounding, silent):
        layer.update(KEYS, VALUES)
    assert rounding.exact_from is None
    with pytest.raises(UnsupportedLayerError, match="has no `fidelity`"):
        silent.exact_from  # noqa: B018
