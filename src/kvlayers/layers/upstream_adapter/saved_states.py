"""How the states of transformers' layers are copied, saved and loaded: by their attributes, whatever their class."""

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from kvlayers.errors import StateMismatchError
from kvlayers.layers.operations import LayerState
from kvlayers.stores.description import Fact


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


def state_of(layer: Any, kind: str) -> LayerState:
    """Copies of all tensors of a layer, counts included, and its plain facts."""
    found = dict(entries(layer))
    facts: dict[str, Fact] = {
        name: value for name, value in found.items() if isinstance(value, int | str | bool | None)
    }
    tensors = {name: value.clone() for name, value in found.items() if isinstance(value, Tensor)}
    return LayerState(kind, tensors, facts)


def check_state(layer: Any, state: LayerState, kinds: Sequence[str]) -> None:
    """Raise `StateMismatchError` if the layer cannot become what it was when `state` was taken.

    Args:
        layer: the layer.
        state: the state.
        kinds: names by which states of such a layer are known.
    """
    if state.kind not in kinds:
        raise StateMismatchError(
            f"expected the state of a {type(layer).__name__}, but saw that of a {state.kind}: load it into a cache "
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
            f"expected the state of a {type(layer).__name__} as this one, but saw {sorted(unknown)} besides, and not "
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
