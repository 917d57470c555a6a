"""What is computed on packed states as they are held: attention, and the steps in which models write it out."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kvlayers.attention import dispatch
from kvlayers.attention.packed_tensor import AS_HELD, PackedStates, Snapshot, View, computes


def handles(attended: Snapshot, kv_heads: int, head_dims: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """The two handles of what an update returns: keys and values, each `[batch, kv_heads, tokens, head_dim]`."""
    batch, tokens = attended.history.batch, attended.history.tokens
    keys = PackedStates(attended, "keys", (batch, kv_heads, tokens, head_dims[0]))
    values = PackedStates(attended, "values", (batch, kv_heads, tokens, head_dims[1]))
    return keys, values


@computes(scaled_dot_product_attention)
def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor | str:
    if not isinstance(key, PackedStates) or not isinstance(value, PackedStates) or isinstance(query, PackedStates):
        return "keys and values are not both of the cache"
    if key.attended is not value.attended or (key.side, value.side) != ("keys", "values"):
        return "keys and values are not those of one update"
    if dropout_p:
        return "there is dropout"
    view = key.view_of
    if view != value.view_of or view.swapped or view.grouped or query.dim() != 4:
        return "keys and values are of other shapes than attention has"
    heads, kv_heads = query.shape[1], key.shape[1]
    whole_groups = heads == kv_heads or (enable_gqa and heads % kv_heads == 0)
    if not whole_groups or query.shape[0] != key.shape[0] or query.shape[3] != key.shape[3]:
        return "queries do not fit the keys"
    if (reason := _not_alike(query, key)) is not None:
        return reason
    if attn_mask is not None and (attn_mask.dtype not in (torch.bool, torch.float32, query.dtype) or is_causal):
        return f"the mask is {attn_mask.dtype}, or comes beside is_causal"
    if attn_mask is not None and attn_mask.device != key.device:
        return "the mask is on another device"
    history = key.attended.read()
    if dispatch.wants_gradients(query, *history.dense_states(), *(() if attn_mask is None else (attn_mask,))):
        return FOLLOWED
    if is_causal:
        attn_mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).tril()
    return dispatch.attend(query, history, attn_mask, scale, key.attended.ways)


FOLLOWED = "autograd follows what is computed"


@computes(torch.matmul, Tensor.matmul, Tensor.__matmul__)
def _product(left: Tensor, right: Tensor) -> Tensor | str:
    """`queries @ keys.transpose(2, 3)`, or `weights @ values`."""
    if not isinstance(right, PackedStates) or isinstance(left, PackedStates):
        return "it is another product than attention has"
    if left.dim() != 4 or right.view_of.grouped:
        return "keys and values are of other shapes than attention has"
    if (reason := _not_alike(left, right)) is not None:
        return reason
    if left.shape[:2] != right.shape[:2] or left.shape[3] != right.shape[2]:
        return "queries do not fit the keys"
    history = right.attended.read()
    if dispatch.wants_gradients(left, *history.dense_states()):
        return FOLLOWED
    if right.side == "keys" and right.view_of.swapped:
        return dispatch.scores(left, history, right.attended.ways)
    if right.side == "values" and not right.view_of.swapped:
        return dispatch.combine(left, history, right.attended.ways)
    return "it is another product than attention has"


def _not_alike(states: Tensor, held: Tensor) -> str | None:
    """Why states cannot meet those that are held as they are, `None` where they can."""
    if states.dtype != held.dtype:
        return f"queries are {states.dtype}, and the cache is {held.dtype}"
    if states.device != held.device:
        return "queries are on another device"
    return "autocast computes in another dtype" if _converts(states) else None


def _converts(states: Tensor) -> bool:
    """Whether autocast would have the computation in another dtype."""
    kind = states.device.type
    return torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) != states.dtype


ANOTHER_VIEW = "it is another view of them than attention has"
CONVERTED = "they are converted"


@computes(Tensor.transpose, torch.transpose, Tensor.swapaxes)
def _transposed(states: Tensor, dim0: int, dim1: int) -> Tensor | str:
    if not isinstance(states, PackedStates) or states.dim() != 4 or {dim0 % 4, dim1 % 4} != {2, 3}:
        return ANOTHER_VIEW
    batch, heads, rows, columns = states.shape
    view = replace(states.view_of, swapped=not states.view_of.swapped)
    return PackedStates(states.attended, states.side, (batch, heads, columns, rows), view)


# The three steps in which modelling code repeats kv heads for the query heads that share them.

_WITH_AN_AXIS_FOR_COPIES = (slice(None), slice(None), None, slice(None), slice(None))


@computes(Tensor.__getitem__)
def _item(states: Tensor, index: Any) -> Tensor | str:
    if not isinstance(states, PackedStates) or states.view_of != AS_HELD or not isinstance(index, tuple):
        return ANOTHER_VIEW
    if not all(part is None or isinstance(part, slice) for part in index):
        return ANOTHER_VIEW
    if index not in (_WITH_AN_AXIS_FOR_COPIES, _WITH_AN_AXIS_FOR_COPIES[:3]):
        return ANOTHER_VIEW
    batch, kv_heads, *rest = states.shape
    return PackedStates(states.attended, states.side, (batch, kv_heads, 1, *rest), View(grouped=True))


@computes(Tensor.expand)
def _expanded(states: Tensor, *sizes: Any, **named: Any) -> Tensor | str:
    shape = _numbers(sizes)
    if named or not isinstance(states, PackedStates) or states.view_of != View(grouped=True) or len(shape) != 5:
        return ANOTHER_VIEW
    batch, kv_heads, _, tokens, head_dim = states.shape
    copies = shape[2]
    if shape != (batch, kv_heads, copies, tokens, head_dim) or copies < 1:
        return ANOTHER_VIEW
    return PackedStates(states.attended, states.side, shape, View(copies, grouped=True))


@computes(Tensor.reshape, Tensor.view)
def _reshaped(states: Tensor, *sizes: Any, **named: Any) -> Tensor | str:
    shape = _numbers(sizes)
    if named or not isinstance(states, PackedStates):
        return ANOTHER_VIEW
    if shape == tuple(states.shape):
        return states
    if not states.view_of.grouped:
        return ANOTHER_VIEW
    batch, kv_heads, copies, tokens, head_dim = states.shape
    if shape != (batch, kv_heads * copies, tokens, head_dim):
        return ANOTHER_VIEW
    return PackedStates(states.attended, states.side, shape, View(copies))


@computes(Tensor.repeat_interleave, torch.repeat_interleave)
def _repeated(states: Tensor, repeats: Any, dim: int | None = None, **options: Any) -> Tensor | str:
    if not isinstance(states, PackedStates) or states.view_of != AS_HELD or dim != 1:
        return ANOTHER_VIEW
    if not isinstance(repeats, int) or repeats < 1:
        return ANOTHER_VIEW
    batch, kv_heads, tokens, head_dim = states.shape
    return PackedStates(states.attended, states.side, (batch, kv_heads * repeats, tokens, head_dim), View(repeats))


def _numbers(sizes: tuple[Any, ...]) -> tuple[int, ...]:
    return tuple(sizes[0]) if len(sizes) == 1 and isinstance(sizes[0], tuple | list) else sizes


@computes(Tensor.contiguous, Tensor.detach, Tensor.to)
def _unchanged(states: Tensor, *args: Any, **kwargs: Any) -> Tensor | str:
    asked = {*args, *kwargs.values()}
    return states if isinstance(states, PackedStates) and asked <= {states.dtype, states.device} else CONVERTED


@computes(Tensor.mT.__get__)  # type: ignore[attr-defined]
def _matrix_transposed(states: Tensor) -> Tensor | str:
    return _transposed(states, 2, 3)
