"""Several sequences from several caches in one, padded on the left where they are of several lengths."""

from collections.abc import Sequence

import torch
from torch import Tensor

from .cache import Cache
from .compat import DUMMY_LAYER
from .errors import UnsupportedLayerError
from .layers import DynamicLayer, HybridLayer, LayerState, LinearAttentionLayer, OffloadedLayer, SlidingLayer
from .layers.hybrid import LINEAR
from .stores import DenseStore, FixedStore, SharedStore
from .stores.base import Fact

STACKED_STORES = (DenseStore, FixedStore, SharedStore)
"""Stores that hold a token apart from the others, so that it can lie in another place."""


def can_be_stacked(cache: Cache) -> bool:
    """Whether caches like this one can be put side by side, whatever their lengths."""
    return bool(cache.layers) and all(map(_layer_can_be, cache.layers))


def _layer_can_be(layer: object) -> bool:
    if isinstance(layer, OffloadedLayer):
        layer = layer.layer
    if isinstance(layer, HybridLayer):
        layer = layer.attention
    if isinstance(layer, DynamicLayer | SlidingLayer):
        return isinstance(layer.store, STACKED_STORES)
    return isinstance(layer, (LinearAttentionLayer, *DUMMY_LAYER))


def stack(caches: Sequence[Cache], into: Cache, length: int) -> None:
    """Let `into` become what has seen the sequences of `caches`, each padded on the left to `length` tokens.

    The states of padding are zeros, which the attention mask must leave out. Recurrent states have seen no padding.
    Their checkpoints are not taken along.

    Args:
        caches: of one sequence each, with layers like those of `into`.
        into: an empty cache.
        length: tokens, padding included; no fewer than any of the caches has seen.

    Raises:
        UnsupportedLayerError: layers whose tokens do not lie apart: packed ones, sinks, those of transformers.
        StateMismatchError: the caches have other layers than `into`.
    """
    if not all(map(can_be_stacked, [*caches, into])):
        raise UnsupportedLayerError(
            f"expected caches whose tokens lie apart from each other, but saw {into!r}: use one for each sequence."
        )
    # A layer at a time, so that no more than one is held in three places.
    for layer, *rows in zip(into.operable(), *(cache.operable() for cache in caches), strict=True):
        layer.load_state(_stacked([row.state() for row in rows], length))


def _stacked(states: Sequence[LayerState], length: int) -> LayerState:
    """The states of one layer side by side, as if each sequence had `length` tokens."""
    if not states[0].tensors:
        # What the model never used, or what holds nothing.
        return states[0]
    facts = {name: _padded_fact(name, fact, length) for name, fact in states[0].facts.items() if not _is_past(name)}
    held = [state.facts["length"] for state in states]
    padding = [length - seen for seen in held if isinstance(seen, int)]
    window = facts.get("sliding_window")
    most = min(length, window - 1) if isinstance(window, int) else length
    tensors = {}
    for name in states[0].tensors:
        own = [state.tensors[name] for state in states]
        if name in ("keys", "values"):
            tensors[name] = _tokens_side_by_side(own, padding, most)
        elif not _is_past(name):
            tensors[name] = torch.cat(own)
    return LayerState(states[0].kind, tensors, facts)


def _is_past(name: str) -> bool:
    return name.removeprefix(LINEAR).startswith("checkpoint.")


def _padded_fact(name: str, fact: Fact, length: int) -> Fact:
    own = name.removeprefix(LINEAR)
    if own == "checkpoints":
        return 0
    counts = own == "length" or own.startswith("tokens.")
    return length if counts and fact is not None else fact


def _tokens_side_by_side(states: Sequence[Tensor], padding: Sequence[int], most: int) -> Tensor:
    """Keys or values `[1, kv_heads, held, head_dim]` in one tensor, `most` tokens of each or as many as there are."""
    held = min(max(own.shape[2] + padded for own, padded in zip(states, padding, strict=True)), most)
    _, kv_heads, _, head_dim = states[0].shape
    together = states[0].new_zeros((len(states), kv_heads, held, head_dim))
    for row, own in enumerate(states):
        tokens = min(own.shape[2], held)
        together[row, :, held - tokens :] = own[0, :, own.shape[2] - tokens :]
    return together
