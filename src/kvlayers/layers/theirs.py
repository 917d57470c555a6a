"""How layers of transformers' own are asked, in the words of the installed version."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .. import compat


def update(
    layer: Any, key_states: Tensor, value_states: Tensor, cache_kwargs: Mapping[str, Any] | None
) -> tuple[Tensor, Tensor]:
    """`update` of a layer of transformers' own. Static ones once wrote at slot 0 where nobody told them another."""
    if compat.UPDATES_BY_CACHE_POSITION:
        told = dict(cache_kwargs or {})
        if told.get("cache_position") is None:
            seen = int(layer.get_seq_length())
            told["cache_position"] = torch.arange(seen, seen + key_states.shape[2], device=key_states.device)
        attended: tuple[Tensor, Tensor] = layer.update(key_states, value_states, told)
    else:
        attended = layer.update(key_states, value_states)
    return attended


def mask_sizes(layer: Any, query_length: int) -> tuple[int, int]:
    """`get_mask_sizes` of a layer of transformers' own."""
    asked = torch.empty(query_length) if compat.MASKS_BY_CACHE_POSITION else query_length
    kv_length, kv_offset = layer.get_mask_sizes(asked)
    return kv_length, kv_offset


def max_length(layer: Any) -> int:
    """The most tokens that a layer of transformers' own can hold, -1 for any number."""
    return int(layer.get_max_length() if compat.RENAMED_MAXIMA else layer.get_max_cache_shape())


def is_croppable(layer: Any) -> bool:
    """Whether `crop` puts a layer of transformers' own back as it was. Before 5.17 no recurrent one could."""
    if compat.LAYERS_SAY_WHAT_THEY_CAN_CROP:
        return bool(layer.is_croppable)
    return isinstance(layer, compat.ATTENTION_LAYER) and not isinstance(layer, compat.LINEAR_LAYER)


def reserves(layer: Any) -> bool:
    """Whether a layer of transformers' own can reserve memory before its states: once, any that attends could."""
    return bool(layer.supports_early_init) if compat.SAYS_WHAT_RESERVES else isinstance(layer, compat.ATTENTION_LAYER)


def reserve(layer: Any, no_tokens: Tensor) -> None:
    """Let a layer of transformers' own reserve memory for states like these, `[batch, kv_heads, 0, head_dim]`."""
    layer.lazy_initialization(*([no_tokens] * (2 if compat.RESERVES_FOR_KEYS_AND_VALUES else 1)))


def by_index(held: Any) -> dict[int, Any]:
    """What a recurrent layer holds, by the index of the state. Layers of transformers' own once had one of each."""
    found: dict[int, Any] = held if isinstance(held, dict) else {0: held}
    return found


def which_state(state_idx: int) -> tuple[int, ...]:
    """How a recurrent layer of transformers' own is told which of its states is meant."""
    return (state_idx,) if compat.STATES_BY_INDEX else ()


def recurrent_states(layer: Any) -> list[Tensor]:
    """Every state, `[batch, ...]`, that a recurrent layer of transformers' own holds."""
    held = [*by_index(layer.conv_states).values(), *by_index(layer.recurrent_states).values()]
    return [states for states in held if states is not None]
