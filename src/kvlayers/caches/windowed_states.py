"""Tuples of states that say of a window what their tensors do not: how long it is, and how many tokens it has seen."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvlayers.errors import LegacyFormatError

if TYPE_CHECKING:
    from kvlayers.layers import TransformersLayer
    from kvlayers.layers.contract import LayerOperations


class WindowedStates(tuple[Any, ...]):
    """States of a layer that attends within a window: a tuple whose type says what its tensors do not.

    torch gathers what replicas return by making each tuple anew, of the same type, from gathered tensors alone.
    """

    sliding_window: int
    """Tokens that a query attends to, itself included."""
    seen: int
    """Tokens that the layer has seen."""

    def __reduce__(self) -> tuple[type, tuple[tuple[Any, ...]]]:
        # No other process could import a type that was made for one layer.
        return tuple, (tuple(self),)


def check_is_whole(states: tuple[Any, ...], index: int) -> None:
    """Raise `LegacyFormatError` where the states of layer `index` are those of a window that has dropped tokens."""
    if isinstance(states, WindowedStates) and states.seen > states[0].shape[2]:
        raise LegacyFormatError(
            f"expected the states of every token, but layer {index} has dropped {states.seen - states[0].shape[2]} of "
            f"{states.seen}: pass the cache itself."
        )


def with_dropped(states: tuple[Any, ...], slides: bool) -> tuple[Tensor, Tensor]:
    """Keys and values, with zeros in the place of tokens that a window has dropped: positions are those of the layer.

    Args:
        states: what a layer held.
        slides: whether the layer that is to take them in drops such tokens as well.

    Raises:
        LegacyFormatError: tokens are missing, and the layer would attend to what is in their place.
    """
    keys, values = states[:2]
    if not isinstance(states, WindowedStates) or states.seen == keys.shape[2]:
        return keys, values
    dropped = states.seen - keys.shape[2]
    if not slides:
        raise LegacyFormatError(
            f"expected states of every token for a layer of full attention, but saw those of a window of "
            f"{states.sliding_window}, which has dropped {dropped} of {states.seen}: make the cache from the config of "
            "the model that they are of."
        )
    return tuple(torch.nn.functional.pad(held, (0, 0, dropped, 0)) for held in (keys, values))  # type: ignore[return-value]


def with_window(states: tuple[Any, ...], layer: "LayerOperations | TransformersLayer") -> tuple[Any, ...]:
    """`states` of a layer as a tuple that is gathered with the layer's window, where it has one."""
    if not layer.is_sliding or layer.capacity is None:
        return states
    facts = {"sliding_window": layer.capacity, "seen": layer.length or 0}
    windowed: type[WindowedStates] = type(WindowedStates.__name__, (WindowedStates,), facts)
    return windowed(states)
