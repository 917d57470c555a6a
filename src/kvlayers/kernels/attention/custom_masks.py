"""Masks that callers make, as long as a reservation, beside keys of the tokens that are held.

A model takes a mask `[batch, 1 or heads, queries, columns]` as it is. Static caches of transformers return all slots of
their reservation, so a mask that was made for them has a column for each. Those of kvlayers return the tokens that are
held, and nobody tells them of such a mask. So the keys cut it when attention meets it: at torch's fused attention, or,
as eager attention is written, where the mask meets the scores, the products of queries and these keys.

TorchDynamo traces this code.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from typing_extensions import override

from kvlayers.kernels.attention.gqa import GroupedKeys, MarkedStates, RepeatedStates, SharedStates, marked_for_sdpa
from kvlayers.upstream import compat
from kvlayers.utils.sending import sent_by_value

KEEPS_KEYS = frozenset(
    {
        *(Tensor.__getitem__, Tensor.expand, Tensor.reshape, Tensor.view, Tensor.transpose, Tensor.permute),
        *(torch.transpose, torch.permute, torch.repeat_interleave, Tensor.repeat_interleave),
        *(Tensor.contiguous, Tensor.to, Tensor.float),
    }
)
"""What models do to keys before they multiply them."""

MULTIPLIES_KEYS = frozenset({torch.matmul, Tensor.matmul, Tensor.__matmul__, Tensor.__rmatmul__})

SCALES_SCORES = frozenset(
    {
        *(torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__, torch.div, Tensor.div, Tensor.__truediv__),
        *(torch.tanh, Tensor.tanh, Tensor.to, Tensor.float),
    }
)
"""What models do to scores before they mask them."""

MASKS_SCORES = frozenset(
    {
        *(torch.add, Tensor.add, Tensor.add_, Tensor.__add__, Tensor.__radd__, Tensor.__iadd__),
        *(torch.masked_fill, Tensor.masked_fill, Tensor.masked_fill_, torch.where),
    }
)

Argument = TypeVar("Argument")


class _CutsMasks(Tensor):
    """What keys and scores have in common.

    Attributes:
        reserved: columns of a mask that is cut. A mask of other columns is not touched.
        scores: the class of products of queries and keys.
        plain_keys: the class of keys whose repetition is not delayed.
    """

    reserved: int
    scores: "type[MaskedScores]"
    plain_keys: "type[CustomMaskKeys]"

    @classmethod
    def cut(cls, argument: Argument, tokens: int) -> Argument:
        """The first `tokens` columns of a mask; any other argument as it is."""
        is_mask = isinstance(argument, Tensor) and argument.dim() > 1 and argument.size(-1) == cls.reserved
        return argument[..., :tokens] if is_mask else argument  # type: ignore[index]


class MaskedScores(_CutsMasks):
    """Scores `[batch, heads, queries, tokens]`, until something other than a scale or a mask meets them."""

    @classmethod
    @override
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = {} if kwargs is None else kwargs
        with torch._C.DisableTorchFunctionSubclass():
            if func in MASKS_SCORES:
                tokens = next(each for each in (*args, *kwargs.values()) if isinstance(each, cls)).size(-1)
                args = tuple(cls.cut(each, tokens) for each in args)
                kwargs = {name: cls.cut(each, tokens) for name, each in kwargs.items()}
            result = func(*args, **kwargs)
            return result.as_subclass(cls) if func in SCALES_SCORES or func in MASKS_SCORES else result


class CustomMaskKeys(_CutsMasks, MarkedStates):
    """Keys `[batch, kv_heads, tokens, head_dim]`. To functions that models do not call on keys, a plain tensor."""

    @classmethod
    @override
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = {} if kwargs is None else kwargs
        if func is scaled_dot_product_attention:
            return _attend(cls, *args, **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
            if func in MULTIPLIES_KEYS:
                return result.as_subclass(cls.scores)
            return result.as_subclass(cls) if func in KEEPS_KEYS else result


class _DelaysRepetition(_CutsMasks):
    """What keys have in common whose repetition is delayed."""

    @classmethod
    @override
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is scaled_dot_product_attention:
            args, kwargs = _with_cut_mask(cls, *args, **(kwargs or {}))
        result = super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        if type(result) is Tensor and func in MULTIPLIES_KEYS:
            return result.as_subclass(cls.scores)
        return result.as_subclass(cls.plain_keys) if type(result) is Tensor and func in KEEPS_KEYS else result


class SharedMaskKeys(_DelaysRepetition, SharedStates):
    """As `SharedStates`, for keys."""


class RepeatedMaskKeys(_DelaysRepetition, RepeatedStates):
    """As `RepeatedStates`, for keys."""


@dataclass(frozen=True)
class ReservedColumns:
    """The marks of keys that cut the masks of a reservation.

    Attributes:
        reserved: columns of these masks.
        keys: the mark of keys.
        shared: the mark of keys whose repetition is delayed.
    """

    reserved: int
    keys: type[CustomMaskKeys]
    shared: type[SharedMaskKeys]


# Classes, since a tensor that TorchDynamo traces has no attributes of its own.
@functools.lru_cache(maxsize=256)
def columns_of(reserved: int) -> ReservedColumns:
    """The marks of keys that cut masks of `reserved` columns."""

    def made(name: str, base: type[Any], **attributes: Any) -> Any:
        return sent_by_value(type(name, (base,), {"reserved": reserved, **attributes}))

    scores = made("MaskedScores", MaskedScores)
    keys = made("CustomMaskKeys", CustomMaskKeys, scores=scores)
    repeated = made("RepeatedMaskKeys", RepeatedMaskKeys, plain_keys=keys, scores=scores)
    shared = made("SharedMaskKeys", SharedMaskKeys, plain_keys=keys, scores=scores, repeated=repeated)
    return ReservedColumns(reserved, keys, shared)


def marked_for_custom_masks(keys: Tensor, values: Tensor, columns: ReservedColumns) -> tuple[Tensor, Tensor]:
    """Keys and values `[batch, kv_heads, tokens, head_dim]` that cut masks of a reservation."""
    kind = type(keys)
    if keys.shape[2] == columns.reserved:
        return keys, values
    if torch.compiler.is_compiling() and not compat.COMPILES_TENSOR_SUBCLASSES:
        return keys, values
    if kind is SharedStates:
        return keys.as_subclass(columns.shared), values
    # Tensors of other packages may not become others.
    return (keys.as_subclass(columns.keys) if kind in (Tensor, GroupedKeys) else keys), values


def cut(mask: Tensor | None, keys: Tensor) -> Tensor | None:
    """The columns of a mask that are those of keys; the mask itself if it has no other columns."""
    return keys.cut(mask, keys.shape[2]) if isinstance(keys, _CutsMasks) else mask


def _attend(
    cls: type[CustomMaskKeys],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    *args: Any,
    **kwargs: Any,
) -> Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        mask = cls.cut(attn_mask, key.size(2))
        if torch.compiler.is_compiling():
            return scaled_dot_product_attention(query, key, value, mask, *args, **kwargs)
        query, key, value = (
            each.as_subclass(Tensor) if isinstance(each, cls) else each for each in (query, key, value)
        )
        key, value = marked_for_sdpa(key, value, query.size(2))
    return scaled_dot_product_attention(query, key, value, mask, *args, **kwargs)


def _with_cut_mask(
    cls: type[_CutsMasks],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    *args: Any,
    **kwargs: Any,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of torch's fused attention, with the columns of the mask that are those of the keys."""
    return (query, key, value, cls.cut(attn_mask, key.shape[2]), *args), kwargs
