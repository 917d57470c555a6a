"""How transformers' layers are called, rolled back, copied and saved, in the installed version."""

import copy
from collections.abc import Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from kvlayers.core.arguments import no_room_for_tokens
from kvlayers.core.description import Fact
from kvlayers.core.layer_operations import LayerState
from kvlayers.errors import RollbackError, StateMismatchError
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


def is_checked_on_host(layer: Any, states: Tensor) -> bool:
    """Whether an update checks that its states fit. On an accelerator it would have to wait for the count."""
    return states.device.type == "cpu" and is_reserved(layer) and not torch.compiler.is_compiling()


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


@runtime_checkable
class Croppable(Protocol):
    """A layer of transformers that can be rolled back."""

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the newest tokens, of which `tokens_to_remove` is the negative number."""


def records_past(layer: Any) -> bool:
    """Whether a layer holds more than it needs, for a later crop. Not every class of transformers says so."""
    return bool(vars(layer).get("record_past", False))


def crops_every_state(layer: Any) -> bool:
    """Whether `crop` knows of every state that a layer holds: a class that adds states must define it anew.

    DeepSeek-V4 adds compressed states to a window, and inherits a `crop` that rolls the window back alone.
    """
    known = ("keys", "values", "cumulative_length")
    holds_more = any(
        isinstance(held, Tensor) and held.dim() and name.partition(".")[0] not in known
        for name, value in entries(layer)
        for held in (value if isinstance(value, list | tuple) else (value,))
    )
    for owner in type(layer).__mro__:
        if "crop" in vars(owner):
            return True
        if holds_more and not {"__init__", "reorder_cache"}.isdisjoint(vars(owner)):
            return False
    return False


def check_removal(layer: Any, tokens: int) -> None:
    """Raise `RollbackError` if the newest `tokens` tokens cannot be removed from a layer exactly."""
    if is_empty(layer) or tokens == 0:
        return
    name = type(layer).__name__
    length = int(layer.get_seq_length()) if isinstance(layer, compat.ATTENTION_LAYER) else None
    if tokens < 0:
        raise RollbackError(f"expected to remove tokens, but {name} holds {-tokens} fewer than are to be kept.")
    window = vars(layer).get("sliding_window")
    if window is not None and (length or 0) >= window and not records_past(layer):
        raise RollbackError(
            f"expected a past to roll back {tokens} tokens to, but the window of {name} is full and it did not record "
            "it: call activate_past_recording() before the tokens that may be taken back."
        )
    if not isinstance(layer, Croppable):
        raise RollbackError(f"expected a layer that can be rolled back, but {name} cannot: fork() the cache before.")
    if not crops_every_state(layer):
        raise RollbackError(
            f"expected a layer whose states can all be rolled back, but {name} has states beside its keys and values "
            "that its crop() leaves as they are: fork() the cache before the tokens that may be taken back."
        )
    if isinstance(layer, compat.LINEAR_LAYER):
        _check_recurrent_removal(layer, tokens)
    if length is not None and tokens > length:
        raise RollbackError(f"expected to remove at most {length} tokens from {name}, but was asked {tokens}.")


def _check_recurrent_removal(layer: Any, tokens: int) -> None:
    name = type(layer).__name__
    if not is_croppable(layer):
        raise RollbackError(
            f"expected layers that can be rolled back by {tokens} tokens, but the recurrent state of {name} has no "
            "past to go back to: fork() the cache before the tokens that may be taken back."
        )
    if not layer.record_past:
        raise RollbackError(
            f"expected a past to roll back {tokens} tokens to, but {name} did not record it: call "
            "activate_past_recording() before the tokens that may be taken back."
        )
    for index, states in layer.conv_states.items():
        room = states.shape[-1] - layer.conv_kernel_size[index]
        if tokens > room:
            raise RollbackError(
                f"expected to roll back at most the {room} tokens that {name} recorded, but was asked for {tokens}."
            )


def stop_recording(layer: Any) -> None:
    """Let a layer record no more, and hold no more than it needs without."""
    if not records_past(layer):
        return
    layer.record_past = False
    is_recurrent = isinstance(layer, compat.LINEAR_LAYER)
    for index, states in by_index(layer.conv_states).items() if is_recurrent else ():
        if states is not None:
            # A layer that does not record writes its convolutions in place, and so needs them of their own size.
            layer.conv_states[index] = _newest_columns(states, layer.conv_kernel_size[index])


def _newest_columns(states: Tensor, columns: int) -> Tensor:
    """The last `columns` of states `[batch, channels, any]`, after zeros if there are fewer."""
    missing = max(columns - states.shape[-1], 0)
    return torch.nn.functional.pad(states[..., -columns:], (missing, 0)).contiguous()


def entries(layer: Any) -> Iterator[tuple[str, Any]]:
    """The attributes of a layer. An entry of a dict is named `attribute.key`."""
    for name, value in vars(layer).items():
        if isinstance(value, dict):
            yield from ((f"{name}.{key}", item) for key, item in value.items())
        else:
            yield name, value


def held_tensors(layer: Any) -> Iterator[Tensor]:
    """The tensors that hold states. Counts of tokens exist before the first token: scalars, or of one element."""
    for name, value in entries(layer):
        if isinstance(value, Tensor) and value.dim() and name != "cumulative_length":
            yield value


def is_empty(layer: Any) -> bool:
    """Whether a layer holds no states."""
    return next(held_tensors(layer), None) is None


def copy_of(layer: Any) -> Any:
    """An independent layer with the same states."""
    twin = copy.copy(layer)
    for name, value in vars(layer).items():
        setattr(twin, name, _copied(value))
    return twin


def check_state(layer: Any, state: LayerState, kinds: Sequence[str]) -> None:
    """Raise `StateMismatchError` if the layer cannot become what it was when `state` was taken.

    Args:
        layer: the layer.
        state: the state.
        kinds: names by which states of such a layer are known.
    """
    if state.kind not in kinds:
        raise StateMismatchError(
            f"`state` must be that of a {type(layer).__name__}, got that of a {state.kind}: load it into a cache "
            "that was made for the same model config."
        )
    known = {name for name, _ in entries(layer)}
    if not vars(layer).get("is_initialized", True):
        # A layer of transformers gets the attributes that describe its states with the first ones.
        known |= {name for name in state.facts if "." not in name}
    needed = {
        name.replace("is_", "", 1).replace("_initialized", "", 1)
        for name, value in state.facts.items()
        if name.startswith("is_") and "states_initialized." in name and value
    }
    unknown, missing = {*state.facts, *state.tensors} - known, needed - set(state.tensors)
    if unknown or missing:
        raise StateMismatchError(
            f"`state` must be that of a {type(layer).__name__} as this one, got {sorted(unknown)} besides, and not "
            f"{sorted(missing)}: load it into a cache for the same config and version of transformers."
        )


def load_state(layer: Any, state: LayerState) -> None:
    """Let the layer become what it was when `state` was taken, which the caller has checked."""
    found: dict[str, Fact | Tensor] = {**state.facts, **{name: _copied(held) for name, held in state.tensors.items()}}
    for name, value in found.items():
        attribute, _, key = name.partition(".")
        if key:
            held = getattr(layer, attribute)
            held[next((known for known in held if str(known) == key), key)] = value
        else:
            setattr(layer, attribute, value)
    for name, states in state.tensors.items():
        if name == "indexer_keys":
            layer.indexer_dtype, layer.indexer_device = states.dtype, states.device
        else:
            layer.dtype, layer.device = states.dtype, states.device


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        # A clone that is made in inference mode could never be written to outside of it.
        with torch.inference_mode(False):
            return value.clone()
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_copied(item) for item in value)
    if isinstance(value, int | str | bool | None | torch.dtype | torch.device):
        return value
    return copy.deepcopy(value)
