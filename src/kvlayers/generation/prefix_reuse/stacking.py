"""Puts the sequences of several caches into one, padded on the left to one length."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kvlayers.core.cache import Cache
from kvlayers.core.description import Fact
from kvlayers.core.layer_operations import LayerState
from kvlayers.errors import UnsupportedLayerError
from kvlayers.recurrent.hybrid_layer import LINEAR


def can_be_stacked(cache: Cache) -> bool:
    """Whether caches like this one can be put side by side, whatever their lengths."""
    return bool(cache.layers) and all(layer.can_be_stacked for layer in cache.adapted_layers())


def stack(caches: Sequence[Cache], into: Cache, length: int) -> None:
    """Let `into` hold the sequences of `caches`, each padded on the left to `length` tokens.

    The states of padding are zeros, which the attention mask must leave out. Recurrent states have seen no padding.
    Their checkpoints are not copied.

    Args:
        caches: of one sequence each, with layers like those of `into`.
        into: an empty cache.
        length: tokens, padding included; no fewer than any of the caches has seen.

    Raises:
        UnsupportedLayerError: a layer whose tokens do not lie apart: a packed layer, a sink, transformers' layer.
        StateMismatchError: the caches have other layers than `into`.
    """
    if not all(map(can_be_stacked, [*caches, into])):
        raise UnsupportedLayerError(
            f"expected caches whose tokens lie apart from each other, but saw {into!r}: use one for each sequence."
        )
    # One layer at a time, so that the states of only one layer are held three times.
    for layer, *rows in zip(into.adapted_layers(), *(cache.adapted_layers() for cache in caches), strict=True):
        layer.load_state(_stacked([row.state() for row in rows], length))


def _stacked(states: Sequence[LayerState], length: int) -> LayerState:
    """The states of one layer side by side, as if each sequence had `length` tokens."""
    # The cache of a prompt of one token is empty, and a layer that the model never used is empty in every cache.
    example = next((state for state in states if state.tensors), states[0])
    facts = {name: _padded_fact(name, fact, length) for name, fact in example.facts.items() if not _is_past(name)}
    window = facts.get("sliding_window")
    most = min(length, window - 1) if isinstance(window, int) else length
    tensors = {}
    for name, form in example.tensors.items():
        own = [state.tensors.get(name) for state in states]
        if name in ("keys", "values"):
            nothing = form[:, :, :0]
            held = [nothing if tensor is None else tensor for tensor in own]
            tensors[name] = _tokens_side_by_side(held, [length - _seen(state) for state in states], most)
        elif not _is_past(name):
            tensors[name] = torch.cat([torch.zeros_like(form) if tensor is None else tensor for tensor in own])
    return LayerState(example.kind, tensors, facts if tensors else dict(example.facts))


def _seen(state: LayerState) -> int:
    length = state.facts.get("length")
    return length if isinstance(length, int) else 0


def _is_past(name: str) -> bool:
    return name.removeprefix(LINEAR).startswith("checkpoint.")


def _padded_fact(name: str, fact: Fact, length: int) -> Fact:
    own = name.removeprefix(LINEAR)
    if own == "checkpoints":
        return 0
    counts = own == "length" or own.startswith("tokens.")
    return length if counts and fact is not None else fact


def _tokens_side_by_side(states: Sequence[Tensor], padding: Sequence[int], most: int) -> Tensor:
    """Keys or values `[1, kv_heads, held, head_dim]` in one tensor: of each, the newest `most` tokens or all."""
    held = min(max(own.shape[2] + padded for own, padded in zip(states, padding, strict=True)), most)
    _, kv_heads, _, head_dim = states[0].shape
    together = states[0].new_zeros((len(states), kv_heads, held, head_dim))
    for row, own in enumerate(states):
        tokens = min(own.shape[2], held)
        together[row, :, held - tokens :] = own[0, :, own.shape[2] - tokens :]
    return together
