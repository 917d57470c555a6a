"""Latents that an update of a cache returns."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.functional import linear
from typing_extensions import override

from kvlayers.attention.latents.expansion import expand
from kvlayers.attention.packed_ops import packed_like, snapshot_of
from kvlayers.attention.packed_tensor import PackedStates
from kvlayers.attention.snapshot import Snapshot
from kvlayers.utils.sending import sent_by_value
from kvlayers.utils.transforms import is_changed_by_torch


@sent_by_value
class LatentStates(PackedStates):
    """Latents `[batch, 1, tokens, latent_dim]` that a linear layer expands when the result is read.

    To every other function they are the states of a cache.
    """

    @staticmethod
    def __new__(cls: type["LatentStates"], snapshot: Snapshot, shape: Sequence[int]) -> "LatentStates":
        """Latents of a snapshot."""
        states: LatentStates = PackedStates.__new__(cls, snapshot, "keys", shape)  # type: ignore[assignment]
        return states

    @classmethod
    @override
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is not linear or torch.compiler.is_dynamo_compiling():
            return super().__torch_function__(func, types, args, kwargs)
        # Other kinds of tensors, such as quantized weights, have their own linear layers.
        return _linear(*args, **(kwargs or {}))


def _linear(states: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if not isinstance(states, LatentStates):
        dense = [tensor.dense() if isinstance(tensor, LatentStates) else tensor for tensor in (weight, bias)]
        return linear(states, *dense)  # type: ignore[arg-type]
    snapshot = states.snapshot
    is_plain = type(weight) in (Tensor, Parameter) and weight.dtype == states.dtype and weight.is_contiguous()
    follows = snapshot.follows_gradients or (torch.is_grad_enabled() and weight.requires_grad)
    if bias is None and is_plain and not follows and not is_changed_by_torch(states) and weight.device == states.device:
        return expand(states, weight)
    return linear(snapshot.read().dense("keys", snapshot.dtype), weight, bias)


def as_latents(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """The states of an update of multi-head latent attention, of which attention may read the latents themselves.

    Args:
        keys: latents `[batch, 1, tokens, latent_dim]`, plain or packed.
        values: rotated keys `[batch, 1, tokens, rotated_channels]`, as the latents.
    """
    snapshot = snapshot_of(keys, values)
    # Somebody who looks at queries, or chooses tokens by them, knows no queries of latents.
    chooses = snapshot.observe is not None or snapshot.choose is not None or snapshot.segments.holds_gathered
    if chooses or snapshot.follows_gradients:
        return keys, values
    rotated = values if isinstance(values, PackedStates) else packed_like(keys, values, snapshot)[1]
    return LatentStates(snapshot, keys.shape), rotated
