"""The views that modelling code takes of keys and values before it attends to them, of states without memory.

Most are the three steps in which it repeats KV heads for the query heads that share them.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from kvlayers.kernels.attention.gqa import kv_head_copies
from kvlayers.kernels.attention.packed_tensor import UNCHANGED, HeldStates, Implementations, StateView

UNKNOWN_VIEW = "attention takes no such view of keys or values"
CONVERTED = "they are converted"

_WHOLE = slice(None)
_WITH_AN_AXIS_FOR_COPIES = ((_WHOLE, _WHOLE, None, _WHOLE, _WHOLE), (_WHOLE, _WHOLE, None))

View = TypeVar("View", bound=Callable[..., Tensor | str])

VIEWS: Implementations = {}
"""By function of torch: the view of `HeldStates`, or why it is not one that attention takes."""


def _of(*functions: Any) -> Callable[[View], View]:
    """Enters a view for functions of torch."""

    def register(view: View) -> View:
        VIEWS.update(dict.fromkeys(functions, view))
        return view

    return register


@_of(Tensor.transpose, torch.transpose, Tensor.swapaxes)
def _transposed(states: Any, dim0: int, dim1: int) -> Tensor | str:
    if not isinstance(states, HeldStates) or states.dim() != 4 or {dim0 % 4, dim1 % 4} != {2, 3}:
        return UNKNOWN_VIEW
    batch, heads, rows, columns = states.shape
    return states.viewed(
        (batch, heads, columns, rows), replace(states.view_taken, swapped=not states.view_taken.swapped)
    )


VIEWS[Tensor.mT.__get__] = lambda states: _transposed(states, 2, 3)  # type: ignore[attr-defined]


@_of(Tensor.__getitem__)
def _item(states: Any, index: Any) -> Tensor | str:
    # Anything else, such as a tensor, could not be compared.
    are_slices = isinstance(index, tuple) and {type(None), slice}.issuperset(map(type, index))
    adds_an_axis = are_slices and index in _WITH_AN_AXIS_FOR_COPIES
    if not adds_an_axis or not isinstance(states, HeldStates) or states.view_taken != UNCHANGED:
        return UNKNOWN_VIEW
    batch, kv_heads, *rest = states.shape
    return states.viewed((batch, kv_heads, 1, *rest), StateView(grouped=True))


@_of(Tensor.expand, Tensor.reshape, Tensor.view)
def _resized(states: Any, *sizes: Any, **named: Any) -> Tensor | str:
    if named or not isinstance(states, HeldStates):
        return UNKNOWN_VIEW
    shape, own, view = sizes_of(sizes), states.shape, states.view_taken
    if shape == tuple(own):
        return states
    if view == UNCHANGED and len(shape) == 4 and own[1] == 1 and shape[1] > 0:
        # As for the rotated key of multi-head latent attention, which all heads share.
        whole = (own[0], shape[1], *own[2:])
        fits = all(size in (-1, known) for size, known in zip(shape, whole, strict=True))
        return states.viewed(whole, StateView(shape[1])) if fits else UNKNOWN_VIEW
    copies = kv_head_copies(own, shape)
    return states.viewed(shape, StateView(copies, grouped=len(shape) == 5)) if view.grouped and copies else UNKNOWN_VIEW


@_of(Tensor.repeat_interleave, torch.repeat_interleave)
def _repeated(states: Any, repeats: Any, dim: int | None = None, **options: Any) -> Tensor | str:
    repeats_heads = dim == 1 and isinstance(repeats, int) and repeats >= 1
    if not repeats_heads or not isinstance(states, HeldStates) or states.view_taken != UNCHANGED:
        return UNKNOWN_VIEW
    batch, kv_heads, tokens, head_dim = states.shape
    return states.viewed((batch, kv_heads * repeats, tokens, head_dim), StateView(repeats))


@_of(Tensor.contiguous, Tensor.detach, Tensor.to)
def _unchanged(states: Any, *args: Any, **kwargs: Any) -> Tensor | str:
    is_same = isinstance(states, HeldStates) and {*args, *kwargs.values()} <= {states.dtype, states.device}
    return states if is_same else CONVERTED


def sizes_of(sizes: tuple[Any, ...]) -> tuple[int, ...]:
    """The sizes of a view, which were passed one by one or together."""
    return tuple(sizes[0]) if len(sizes) == 1 and isinstance(sizes[0], tuple | list) else sizes
