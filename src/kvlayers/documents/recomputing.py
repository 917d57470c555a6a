"""Some tokens of a context recomputed, by all layers, among states that stay as they are.

A forward pass over these tokens alone writes their keys and values in the place of the old ones, layer by layer, and
attends to all of them. What it computes is right if all that it attends to is.
"""

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import cache_utils
from typing_extensions import override

from kvlayers.core.layer_operations import LayerOperations
from kvlayers.core.token_store import KVPair
from kvlayers.errors import ConfigError, UnsupportedLayerError
from kvlayers.upstream import cache_argument, model_types
from kvlayers.upstream.model_layers import layer_specs

FULL, SLIDING = "full_attention", "sliding_attention"

MASKED_ATTENTION = ("eager", "sdpa")
"""Implementations of attention that take any mask."""


class _OverwritingLayer(cache_utils.DynamicLayer):  # type: ignore[misc]
    """States of all tokens, of which a pass overwrites some."""

    def __init__(self, states: KVPair, positions: Tensor) -> None:
        super().__init__()
        self.keys, self.values = states
        self.dtype, self.device = self.keys.dtype, self.keys.device
        self.is_initialized = True
        self._positions = positions

    @override
    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> KVPair:
        self.keys.index_copy_(2, self._positions, key_states)
        self.values.index_copy_(2, self._positions, value_states)
        return self.keys, self.values


class _StopPassError(Exception):
    """A pass has come as far as it is wanted. It never leaves this file."""


class _StopAtLayer(cache_utils.DynamicLayer):  # type: ignore[misc]
    """Remembers the first states, and ends the pass."""

    states: KVPair

    @override
    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> KVPair:
        self.states = (key_states, value_states)
        raise _StopPassError


def check_recomputable(model: Any, layers: Sequence[LayerOperations]) -> None:
    """Raise if tokens cannot be recomputed.

    Raises:
        UnsupportedLayerError: a layer has dropped tokens.
        ConfigError: the model takes images as well, attends in another way, or by an implementation that takes no masks
            of its own.
    """
    if any(layer.is_sliding for layer in layers):
        raise UnsupportedLayerError(
            "`recompute` needs layers that keep every token, got windows: compute the documents with a DynamicCache() "
            "without a config."
        )
    if model_types.decoder_config(model.config) is not model.config:
        # Ids say nothing of its images.
        raise ConfigError(f"`recompute` needs a model of text alone, got a {type(model).__name__}: pass recompute=0.")
    kinds = sorted({spec.layer_type for spec in layer_specs(model.config)} - {FULL, SLIDING})
    if kinds:
        raise ConfigError(f"`recompute` needs full attention or windows, got {', '.join(kinds)}: pass recompute=0.")
    how = model_types.attention_implementation(model_types.decoder_config(model))
    if how not in MASKED_ATTENTION:
        raise ConfigError(
            f"`recompute` needs attn_implementation {' or '.join(MASKED_ATTENTION)}, got {how!r}: use "
            "model.set_attn_implementation()."
        )


def deviations(model: Any, ids: Tensor, states: Sequence[KVPair]) -> Tensor:
    """How much the states of the second layer change once the first has seen the whole context, float32 `[tokens]`.

    The first layer's own states do not depend on other tokens. A model of one layer has no deviations: zeros.

    Args:
        model: the model.
        ids: the whole context, int64 `[batch, tokens]`.
        states: keys and values of each layer, `[batch, kv_heads, tokens, head_dim]`.
    """
    if len(states) < 2:
        return torch.zeros(ids.shape[1], device=ids.device)
    last = _StopAtLayer()
    cache = cache_utils.Cache(layers=[cache_utils.DynamicLayer(), last])
    with contextlib.suppress(_StopPassError):
        cache_argument.read_tokens(model, ids, cache)
    changes = []
    for new, old in zip(last.states, states[1], strict=True):
        change = (new.float() - old.float()).square().sum((1, 3))
        changes.append(change / old.float().square().sum((1, 3)).mean())
    return torch.stack(changes).sum((0, 1))


def recompute_tokens(model: Any, ids: Tensor, states: Sequence[KVPair], chosen: Sequence[int]) -> None:
    """Recompute the tokens at `chosen` positions, in order, and write their states into `states`.

    Args:
        model: the model.
        ids: the whole context, int64 `[batch, tokens]`.
        states: keys and values of each layer, `[batch, kv_heads, tokens, head_dim]`, written in place.
        chosen: positions.
    """
    positions = torch.tensor(list(chosen), device=ids.device)
    layers = [_OverwritingLayer(pair, positions.to(pair[0].device)) for pair in states]
    arguments = {"attention_mask": _mask(model, positions, ids.shape[1]), "position_ids": positions[None]}
    cache_argument.read_tokens(model, ids[:, positions], cache_utils.Cache(layers=layers), **arguments)


def _mask(model: Any, positions: Tensor, tokens: int) -> Any:
    """What the tokens at `positions` attend to: additive masks, one for each type of layer if there are several."""
    decoder = model_types.decoder_config(model.config)
    distance = positions[:, None] - torch.arange(tokens, device=positions.device)
    lowest = torch.finfo(model.dtype).min

    def additive(is_seen: Tensor) -> Tensor:
        return torch.zeros_like(distance, dtype=model.dtype).masked_fill(~is_seen, lowest)[None, None]

    masks = {FULL: additive(distance >= 0)}
    windows = {spec.layer_type: int(spec.options.get("sliding_window") or tokens) for spec in layer_specs(decoder)}
    if SLIDING in windows:
        masks[SLIDING] = additive((distance >= 0) & (distance < windows[SLIDING]))
    return masks if len(windows) > 1 else masks[next(iter(windows))]
