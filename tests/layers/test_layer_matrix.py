"""Every kind of layer, in every state, through every operation, against the concatenating oracle."""

import contextlib
from typing import Any

import pytest
import torch

from agreement import check_at_rest, continue_decoding, step
from kvlayers import CacheLayer, CapacityError
from kvlayers.core.buffer import TokenBuffer
from layer_kinds import KINDS, OPERATIONS, STATES
from matrix import product
from oracle import Oracle, states
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


def _in_state(kind: str, past: str, generator: torch.Generator) -> tuple[CacheLayer, Oracle]:
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

    def interrupted(count: int) -> None:
        raise KeyboardInterrupt

    vars(layer.store)["newest"] = interrupted
    with pytest.raises(KeyboardInterrupt):
        layer.update(*states(2, 1, generator))
    del vars(layer.store)["newest"]
    continue_decoding(layer, oracle, generator)


@pytest.mark.parametrize("operation", ["update", "select"])
@pytest.mark.parametrize("kind", ["dynamic", "sliding", "static that grows", "static sliding that grows"])
def test_running_out_of_memory_leaves_a_layer_as_it_was(
    kind: str, operation: str, monkeypatch: pytest.MonkeyPatch, generator: torch.Generator
) -> None:
    layer, oracle = _in_state(kind, "decoding", generator)
    layer.activate_past_recording()
    oracle.recording = True
    allocate, calls = TokenBuffer.allocate, []

    def second_fails(*args: Any) -> TokenBuffer:
        calls.append(args)
        if len(calls) == 2:
            raise MemoryError
        return allocate(*args)

    monkeypatch.setattr(TokenBuffer, "allocate", second_fails)
    with contextlib.suppress(MemoryError, CapacityError):
        layer.update(*states(2, 200, generator)) if operation == "update" else layer.select(torch.tensor([0, 1, 0]))
    monkeypatch.undo()
    continue_decoding(layer, oracle, generator)
