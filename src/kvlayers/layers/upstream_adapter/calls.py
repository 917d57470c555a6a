"""How transformers' layers are called, in the installed version."""

from typing import Any

import torch
from torch import Tensor

from kvlayers.stores.validation import no_room_for_tokens
from kvlayers.upstream import compat


def update(layer: Any, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """`update` of transformers' layer, which is handed what the model has passed besides the states.

    Before 5.4, static layers wrote to slot 0 unless a dict of arguments told them another slot.
    """
    if is_checked_on_host(layer, key_states):
        check_room(layer, key_states.shape[-2])
    if not compat.UPDATES_BY_CACHE_POSITION:
        return layer.update(key_states, value_states, *args, **kwargs)  # type: ignore[no-any-return]
    told = dict((args[0] if args else kwargs.get("cache_kwargs")) or {})
    if told.get("cache_position") is None:
        seen = int(layer.get_seq_length())
        told["cache_position"] = torch.arange(seen, seen + key_states.shape[2], device=key_states.device)
    return layer.update(key_states, value_states, told)  # type: ignore[no-any-return]


def update_indexer(layer: Any, indexer_key_states: Tensor) -> Tensor:
    """`update_indexer` of transformers' layer, with keys `[batch, new, index_head_dim]`."""
    if is_checked_on_host(layer, indexer_key_states):
        # An indexer has a count of its own, since attention may have taken in the tokens already.
        seen = int(layer.indexer_cumulative_length) if layer.is_indexer_initialized else 0
        check_reservation(layer, seen, indexer_key_states.shape[-2])
    updated: Tensor = layer.update_indexer(indexer_key_states)
    return updated


def is_checked_on_host(layer: Any, states: Tensor) -> bool:
    """Whether an update checks that its states fit. On an accelerator it would have to wait for the count."""
    return states.device.type == "cpu" and is_reserved(layer) and not torch.compiler.is_compiling()


def mask_sizes(layer: Any, query_length: int) -> tuple[int, int]:
    """`get_mask_sizes` of transformers' layer."""
    asked = torch.empty(query_length) if compat.MASKS_BY_CACHE_POSITION else query_length
    kv_length, kv_offset = layer.get_mask_sizes(asked)
    return kv_length, kv_offset


def max_length(layer: Any) -> int:
    """The most tokens that transformers' layer can hold, -1 if there is no maximum."""
    return int(layer.get_max_length() if compat.RENAMED_MAXIMA else layer.get_max_cache_shape())


def is_reserved(layer: Any) -> bool:
    """Whether transformers' layer holds every token in a reservation: a static indexer, or a model's own class."""
    return isinstance(layer, compat.STATIC_LAYER) and type(layer) is not compat.STATIC_LAYER and not layer.is_sliding


def check_room(layer: Any, tokens: int) -> None:
    """Raise `CapacityError` if the reservation of transformers' layer has no room for `tokens` more tokens."""
    check_reservation(layer, int(layer.get_seq_length()), tokens)


def check_reservation(layer: Any, seen: int, tokens: int) -> None:
    """Raise `CapacityError` if `tokens` more tokens, after `seen`, exceed the reservation of transformers' layer."""
    if seen + tokens > layer.max_cache_len:
        raise no_room_for_tokens(layer.max_cache_len, seen, tokens)


def grow(layer: Any, tokens: int) -> None:
    """Take a larger reservation in transformers' layer if it has no room for `tokens` more tokens."""
    reserved, needed = layer.max_cache_len, int(layer.get_seq_length()) + tokens
    if needed <= reserved:
        return
    layer.max_cache_len = max(needed, 2 * reserved)
    for name, states in vars(layer).items():
        # States have a row for each reserved token, and counts do not.
        if isinstance(states, Tensor) and states.dim() > 2 and states.shape[-2] == reserved:
            with torch.inference_mode(False):
                larger = states.new_zeros(*states.shape[:-2], layer.max_cache_len, states.shape[-1])
            larger[..., :reserved, :] = states
            torch._dynamo.mark_static_address(larger)
            setattr(layer, name, larger)


def is_croppable(layer: Any) -> bool:
    """Whether `crop` puts transformers' layer back as it was. Before 5.17 no recurrent layer could do that."""
    if compat.LAYERS_SAY_WHAT_THEY_CAN_CROP:
        return bool(layer.is_croppable)
    return isinstance(layer, compat.ATTENTION_LAYER) and not isinstance(layer, compat.LINEAR_LAYER)


def reserves(layer: Any) -> bool:
    """Whether transformers' layer can reserve memory before its states. Before 5.13, any layer that attends could."""
    return bool(layer.supports_early_init) if compat.SAYS_WHAT_RESERVES else isinstance(layer, compat.ATTENTION_LAYER)


def reserve(layer: Any, no_tokens: Tensor) -> None:
    """Let transformers' layer reserve memory for states of this form, `[batch, kv_heads, 0, head_dim]`."""
    layer.lazy_initialization(*([no_tokens] * (2 if compat.RESERVES_FOR_KEYS_AND_VALUES else 1)))


def by_index(held: Any) -> dict[int, Any]:
    """The states of a recurrent layer by their index. Before 5.14, transformers' layers had one state of each kind."""
    found: dict[int, Any] = held if isinstance(held, dict) else {0: held}
    return found


def which_state(state_idx: int) -> tuple[int, ...]:
    """The argument that tells transformers' recurrent layer which of its states is meant."""
    return (state_idx,) if compat.STATES_BY_INDEX else ()


def recurrent_states(layer: Any) -> list[Tensor]:
    """Every state, `[batch, ...]`, that transformers' recurrent layer holds."""
    held = [*by_index(layer.conv_states).values(), *by_index(layer.recurrent_states).values()]
    return [states for states in held if states is not None]
