"""How transformers' layers are rolled back, and what is checked before, since they do not check it themselves."""

from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from kvlayers.errors import RollbackError
from kvlayers.layers.upstream_adapter import calls, saved_states
from kvlayers.upstream import compat


@runtime_checkable
class _Croppable(Protocol):
    def crop(self, tokens_to_remove: int) -> None: ...


@runtime_checkable
class _Recording(Protocol):
    def activate_past_recording(self) -> None: ...


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
        for name, value in saved_states.entries(layer)
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
    if saved_states.is_empty(layer) or tokens == 0:
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
    if not isinstance(layer, _Croppable):
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
    if not calls.is_croppable(layer):
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


def remove_newest(layer: Any, tokens: int) -> None:
    """Remove the newest `tokens` tokens, which the caller has checked, and forget a past that was recorded for that."""
    if saved_states.is_empty(layer) or not isinstance(layer, _Croppable):
        return
    if tokens or (isinstance(layer, compat.LINEAR_LAYER) and records_past(layer)):
        layer.crop(-tokens)


def start_recording(layer: Any) -> None:
    """Let a layer hold what a later removal needs, if it can."""
    if isinstance(layer, _Recording):
        layer.activate_past_recording()


def stop_recording(layer: Any) -> None:
    """Let a layer record no more, and hold no more than it needs without."""
    if not records_past(layer):
        return
    layer.record_past = False
    is_recurrent = isinstance(layer, compat.LINEAR_LAYER)
    for index, states in calls.by_index(layer.conv_states).items() if is_recurrent else ():
        if states is not None:
            # A layer that does not record writes its convolutions in place, and so needs them of their own size.
            layer.conv_states[index] = _newest_columns(states, layer.conv_kernel_size[index])


def _newest_columns(states: Tensor, columns: int) -> Tensor:
    """The last `columns` of states `[batch, channels, any]`, after zeros if there are fewer."""
    missing = max(columns - states.shape[-1], 0)
    return torch.nn.functional.pad(states[..., -columns:], (missing, 0)).contiguous()
