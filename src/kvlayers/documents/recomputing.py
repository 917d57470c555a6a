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

from kvlayers.core.cache_layer import CacheLayer
from kvlayers.core.token_layer import DynamicLayer
from kvlayers.core.token_store import KVPair
from kvlayers.errors import ConfigError, OptionError, StateMismatchError, UnsupportedLayerError
from kvlayers.kernels.attention.gqa import marked_for_sdpa
from kvlayers.upstream import cache_argument, model_types
from kvlayers.upstream.model_layers import layer_specs, model_device
from kvlayers.utils.transforms import autocast_dtype

FULL, SLIDING = "full_attention", "sliding_attention"

MOST_IN_MASK = 2**24
"""Entries of a mask, at most: 64 MiB in float32. More tokens are read in parts."""

MASKED_ATTENTION = ("eager", "sdpa")
"""Implementations of attention that take any mask."""


class _OverwritingLayer(cache_utils.DynamicLayer):  # type: ignore[misc]
    """States of all tokens up to the last position, of which a pass overwrites some."""

    def __init__(self, states: KVPair, positions: Tensor, end: int) -> None:
        super().__init__()
        self.keys, self.values = (own[:, :, :end] for own in states)
        self.dtype, self.device = self.keys.dtype, self.keys.device
        self.is_initialized = True
        self._positions = positions

    @override
    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> KVPair:
        self.keys.index_copy_(2, self._positions, key_states)
        self.values.index_copy_(2, self._positions, value_states)
        return marked_for_sdpa(self.keys, self.values, key_states.shape[2])


class _StopPassError(Exception):
    """A pass has come as far as it is wanted. It never leaves this file."""


class _StopAtLayer(cache_utils.DynamicLayer):  # type: ignore[misc]
    """Remembers the states of each pass, and ends it."""

    def __init__(self) -> None:
        super().__init__()
        self.states: list[KVPair] = []

    @override
    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> KVPair:
        self.states.append((key_states, value_states))
        raise _StopPassError


def check_recomputable(model: Any, layers: Sequence[CacheLayer]) -> None:
    """Raise if tokens cannot be recomputed.

    Raises:
        OptionError: it is no model.
        UnsupportedLayerError: a layer has dropped tokens.
        StateMismatchError: the states have another dtype than the model would give them.
        ConfigError: the model takes images as well, is in training mode, attends in another way, or by an
            implementation that takes no masks of its own.
    """
    if not isinstance(model, torch.nn.Module):
        raise OptionError(
            f"`model` must be a model if `recompute` is not 0, got a {type(model).__name__}: pass the model that "
            "filled the caches."
        )
    dtypes = {form.dtype for layer in layers for form in layer.forms}
    expected = autocast_dtype(model_device(model)) or model.dtype
    if dtypes - {expected}:
        raise StateMismatchError(
            f"`recompute` needs states in {expected}, as the model computes them, got {', '.join(map(str, dtypes))}: "
            "compute the documents with this model, or pass recompute=0."
        )
    if causes := {cause for each in model.modules() if (cause := model_types.effect_of_training(each)) is not None}:
        raise ConfigError(
            f"`recompute` needs a model in eval mode, got {', '.join(sorted(causes))}: call model.eval()."
        )
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
    cache = cache_utils.Cache(layers=[DynamicLayer(), last])
    for part in ids.split(max(MOST_IN_MASK // ids.shape[1], 1), dim=1):  # type: ignore[no-untyped-call]
        with contextlib.suppress(_StopPassError):
            cache_argument.read_tokens(model, part, cache)
    changes = []
    for parts, old in zip(zip(*last.states, strict=True), states[1], strict=True):
        new = torch.cat(parts, dim=2)
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
    size = max(MOST_IN_MASK // ids.shape[1], 1)
    for begin in range(0, len(chosen), size):
        # A token attends to none after it: parts give the same, and need no keys after their own.
        part, end = chosen[begin : begin + size], chosen[min(begin + size, len(chosen)) - 1] + 1
        positions = torch.tensor(part, device=ids.device)
        layers = [_OverwritingLayer(pair, positions.to(pair[0].device), end) for pair in states]
        arguments = {"attention_mask": _mask(model, positions, end), "position_ids": positions[None]}
        cache_argument.read_tokens(model, ids[:, positions], cache_utils.Cache(layers=layers), **arguments)


def _mask(model: Any, positions: Tensor, tokens: int) -> Any:
    """What the tokens at `positions` attend to: additive masks, one for each type of layer if there are several."""
    decoder = model_types.decoder_config(model.config)
    seen = torch.arange(tokens, device=positions.device) <= positions[:, None]

    def additive(is_seen: Tensor) -> Tensor:
        hidden = torch.zeros(is_seen.shape, dtype=model.dtype, device=is_seen.device)
        return hidden.masked_fill_(~is_seen, torch.finfo(model.dtype).min)[None, None]

    masks = {FULL: additive(seen)}
    windows = {spec.layer_type: int(spec.options.get("sliding_window") or tokens) for spec in layer_specs(decoder)}
    if SLIDING in windows:
        is_near = torch.arange(tokens, device=positions.device) > positions[:, None] - windows[SLIDING]
        masks[SLIDING] = additive(seen & is_near)
    return masks if len(windows) > 1 else masks[next(iter(windows))]
