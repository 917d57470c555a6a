"""What an offloaded layer describes and saves: its wrapped layer, with tensors on the host."""

import torch

from kvlayers.layers.operations import LayerState
from kvlayers.stores.description import Fact, Facts


def facts_of_wrapped(facts: Facts) -> dict[str, Fact]:
    """The facts of the wrapped layer, without the name of its kind."""
    return {name: fact for name, fact in facts.items() if name != "offloaded"}


def on_host(state: LayerState, device: torch.device | None) -> LayerState:
    """The state of a wrapped layer with tensors on the host, which says on which device they are computed."""
    # What a layer holds beside its store, such as queries, is on the device.
    tensors = {name: tensor.cpu() for name, tensor in state.tensors.items()}
    return LayerState(state.kind, tensors, {**state.facts, "device": None if device is None else str(device)})


def on_device(state: LayerState, device: torch.device | None) -> LayerState:
    """The state with tensors on a device, or on the device that the state says if `device` is `None`."""
    goal = state.facts.get("device") if device is None else device
    if not isinstance(goal, str | torch.device):
        return state
    tensors = {name: tensor.to(goal) for name, tensor in state.tensors.items()}
    return LayerState(state.kind, tensors, state.facts)
