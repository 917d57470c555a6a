"""The saved state of a recurrent layer."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from kvlayers.errors import StateMismatchError
from kvlayers.layers.linear.checkpoints import Checkpoint
from kvlayers.layers.linear.states import LinearStates, TokenCount, kept
from kvlayers.layers.operations import LayerState
from kvlayers.stores.description import Fact, Facts


def linear_state(
    kind: str, described: Facts, states: LinearStates, count: TokenCount, history: Sequence[Checkpoint]
) -> LayerState:
    """Copies of all states and checkpoints. Their names say which of them each tensor is."""
    conv, recurrent = states.live()
    tensors = _named("", conv, recurrent)
    facts: dict[str, Fact] = {**described, "checkpoints": len(history), **count.facts()}
    facts |= {f"conv_kernel_size.{index}": held.shape[-1] for index, held in conv.items()}
    facts |= {f"has_recurrent_state.{index}": True for index in recurrent}
    facts["length"] = count.length
    for number, checkpoint in enumerate(checkpoint.resolved() for checkpoint in history):
        tensors |= _named(f"checkpoint.{number}.", checkpoint.conv, checkpoint.recurrent)
        facts |= {f"checkpoint.{number}.tokens.{index}": seen for index, seen in checkpoint.seen.items()}
    return LayerState(kind, {name: kept(held) for name, held in tensors.items()}, facts)


def _named(prefix: str, conv: Mapping[int, Tensor], recurrent: Mapping[int, Tensor]) -> dict[str, Tensor]:
    return {
        **{f"{prefix}conv_states.{index}": states for index, states in conv.items()},
        **{f"{prefix}recurrent_states.{index}": states for index, states in recurrent.items()},
    }


def check_linear_state(state: LayerState, kind: str, number_of_states: int) -> None:
    """Raise `StateMismatchError` if a layer of this kind cannot become what it was when `state` was taken."""
    if state.kind != kind or state.facts.get("number_of_states") != number_of_states:
        raise StateMismatchError(
            f"expected the state of a {kind} with {number_of_states} states, but saw that of a {state.kind} with "
            f"{state.facts.get('number_of_states')}: load it into a cache that was made for the same model config."
        )
    needed = {name.replace("conv_kernel_size", "conv_states") for name in state.facts if name.startswith("conv_kernel")}
    needed |= {name.replace("has_recurrent_state", "recurrent_states") for name in state.facts if "has_rec" in name}
    present = {name for name in state.tensors if not name.startswith("checkpoint.")}
    if needed != present:
        raise StateMismatchError(
            f"expected a state with {sorted(needed)}, but saw {sorted(present)}: take the state again."
        )
    sizes = {tensor.shape[0] for tensor in state.tensors.values() if tensor.dim()}
    if len(sizes) > 1 or any(tensor.layout != torch.strided or not tensor.dim() for tensor in state.tensors.values()):
        raise StateMismatchError(f"expected dense tensors of one batch size, but saw batch sizes {sorted(sizes)}.")


def read_history(state: LayerState) -> list[Checkpoint]:
    """The checkpoints of a state, copied."""
    count = state.facts.get("checkpoints")
    checkpoints = []
    for number in range(count if isinstance(count, int) else 0):
        prefix = f"checkpoint.{number}."
        of_one = {name.removeprefix(prefix): value for name, value in state.facts.items() if name.startswith(prefix)}
        seen = {int(name.removeprefix("tokens.")): value for name, value in of_one.items() if isinstance(value, int)}
        checkpoint = Checkpoint(seen)
        for name, states in state.tensors.items():
            if name.startswith(prefix):
                family, _, index = name.removeprefix(prefix).partition(".")
                held = checkpoint.conv if family == "conv_states" else checkpoint.recurrent
                held[int(index)] = kept(states)
        if seen:
            checkpoints.append(checkpoint)
    return checkpoints
