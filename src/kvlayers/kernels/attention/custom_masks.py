"""Masks that callers make, as long as a reservation, beside keys of the tokens that are held.

A model takes a mask `[batch, 1 or heads, queries, columns]` as it is. Static caches of transformers return all slots of
their reservation, so a mask that was made for them has a column for each. Those of kvlayers return the tokens that are
held, and nobody tells them of such a mask. So the keys cut it when attention meets it: at torch's fused attention, or,
as eager attention is written, where the mask meets the scores, the products of queries and these keys.

TorchDynamo traces this code.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kvlayers.kernels.attention.gqa import (
    GroupedKeys,
    MarkedStates,
    MarkedTensor,
    RepeatedStates,
    SharedStates,
    attend,
    marking_pays,
    repeating,
)
from kvlayers.upstream import compat
from kvlayers.utils.sending import sent_by_value

KEEPS_KEYS: frozenset[Any] = frozenset(
    {
        *(Tensor.__getitem__, Tensor.expand, Tensor.reshape, Tensor.view, Tensor.transpose, Tensor.permute),
        *(torch.transpose, torch.permute, torch.repeat_interleave, Tensor.repeat_interleave),
        *(Tensor.contiguous, Tensor.to, Tensor.float),
    }
)
"""What models do to keys before they multiply them."""

MULTIPLIES_KEYS: frozenset[Any] = frozenset({torch.matmul, Tensor.matmul, Tensor.__matmul__, Tensor.__rmatmul__})

SCALES_SCORES: frozenset[Any] = frozenset(
    {
        *(torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__, torch.div, Tensor.div, Tensor.__truediv__),
        *(torch.tanh, Tensor.tanh, Tensor.to, Tensor.float),
    }
)
"""What models do to scores before they mask them."""

MASKS_SCORES: frozenset[Any] = frozenset(
    {
        *(torch.add, Tensor.add, Tensor.add_, Tensor.__add__, Tensor.__radd__, Tensor.__iadd__),
        *(torch.masked_fill, Tensor.masked_fill, Tensor.masked_fill_, torch.where),
    }
)

Argument = TypeVar("Argument")


class MaskedScores(MarkedTensor):
    """Scores `[batch, heads, queries, tokens]`, until something other than a scale or a mask meets them."""


class CustomMaskKeys(MarkedStates):
    """Keys `[batch, kv_heads, tokens, head_dim]` whose repetition is not delayed."""


@dataclass(frozen=True)
class ReservedColumns:
    """The marks of keys that cut the masks of a reservation.

    Attributes:
        keys: the mark of keys. Masks of other numbers of columns than `keys.reserved` are not touched.
        shared: the mark of keys whose repetition is delayed.
    """

    keys: type[CustomMaskKeys]
    shared: type[SharedStates]


# Classes, since a tensor that TorchDynamo traces has no attributes of its own.
@functools.lru_cache(maxsize=256)
def columns_of(reserved: int) -> ReservedColumns:
    """The marks of keys that cut masks of `reserved` columns."""

    def made(name: str, base: type[Any]) -> Any:
        return sent_by_value(type(name, (base,), {"reserved": reserved}))

    scores, keys = made("MaskedScores", MaskedScores), made("CustomMaskKeys", CustomMaskKeys)
    shared, repeated = made("SharedMaskKeys", SharedStates), made("RepeatedMaskKeys", RepeatedStates)
    masked = {func: _with_cut_masks(func, reserved) for func in MASKS_SCORES}
    of_attention = {scaled_dot_product_attention: _cutting(reserved)}
    of_products = {func: _marking(func, scores) for func in MULTIPLIES_KEYS}
    of_views = {func: _marking(func, keys) for func in KEEPS_KEYS}
    delayed = {func: _marking(view, keys) for func, view in repeating(shared, repeated).items()}
    scores.implementations = {func: _marking(masked.get(func, func), scores) for func in SCALES_SCORES | MASKS_SCORES}
    keys.implementations = {**of_views, **of_products, **of_attention}
    shared.implementations = {**keys.implementations, **delayed}
    repeated.implementations = {**RepeatedStates.implementations, **keys.implementations}
    return ReservedColumns(keys, shared)


def _marking(func: Callable[..., Any], kind: type[Tensor]) -> Callable[..., Any]:
    """The function, with a mark for its result, unless that has one."""

    def marking(*args: Any, **kwargs: Any) -> Any:
        result = func(*args, **kwargs)
        return result.as_subclass(kind) if type(result) is Tensor else result

    return marking


def _with_cut_masks(func: Callable[..., Any], reserved: int) -> Callable[..., Any]:
    """A function of scores and a mask, which cuts the mask."""

    def cutting(*args: Any, **kwargs: Any) -> Any:
        tokens = next(each for each in (*args, *kwargs.values()) if isinstance(each, MaskedScores)).size(-1)
        args = tuple(_cut(each, reserved, tokens) for each in args)
        return func(*args, **{name: _cut(each, reserved, tokens) for name, each in kwargs.items()})

    return cutting


def _cutting(reserved: int) -> Callable[..., Tensor]:
    """Torch's fused attention, with the columns of the mask that are those of the keys."""

    def cutting(
        query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *args: Any, **kwargs: Any
    ) -> Tensor:
        mask = _cut(attn_mask, reserved, key.size(-2))
        by: Callable[..., Tensor] = attend
        if isinstance(key, CustomMaskKeys):
            # As what they would be without custom masks.
            if not torch.compiler.is_compiling():
                key = key.as_subclass(Tensor)
            if torch.compiler.is_compiling() or not marking_pays(key, query.size(2)):
                by = scaled_dot_product_attention
        return by(query, key, value, mask, *args, **kwargs)

    return cutting


def _cut(argument: Argument, reserved: int | None, tokens: int) -> Argument:
    """The first `tokens` columns of a mask of a reservation; any other argument as it is."""
    is_mask = isinstance(argument, Tensor) and argument.dim() > 1 and argument.size(-1) == reserved
    return argument[..., :tokens] if is_mask else argument  # type: ignore[index]


def marked_for_custom_masks(keys: Tensor, values: Tensor, columns: ReservedColumns) -> tuple[Tensor, Tensor]:
    """Keys and values `[batch, kv_heads, tokens, head_dim]` that cut masks of a reservation."""
    kind = type(keys)
    is_marked = not torch.compiler.is_compiling() or compat.COMPILES_TENSOR_SUBCLASSES
    if keys.shape[2] == columns.keys.reserved or not is_marked:
        return keys, values
    if kind is SharedStates:
        return keys.as_subclass(columns.shared), values
    # Tensors of other packages may not become others.
    return (keys.as_subclass(columns.keys) if kind in (Tensor, GroupedKeys) else keys), values


def cut(mask: Tensor | None, keys: Tensor) -> Tensor | None:
    """The columns of a mask that are those of keys; the mask itself if it has no other columns."""
    return _cut(mask, keys.reserved, keys.shape[2]) if isinstance(keys, MarkedTensor) and mask is not None else mask
