"""Masks that callers make, as long as a reservation, beside keys of the tokens that are held.

A model takes a mask `[batch, 1 or heads, queries, columns]` as it is. Static caches of transformers return all slots of
their reservation, so a mask that was made for them has a column for each. Those of kvlayers return the tokens that are
held, and nobody tells them of such a mask. So the keys cut it when attention meets it: at torch's fused attention, or,
as eager attention is written, where the mask is added to the products of queries and keys, which inherit from the keys.

TorchDynamo traces this code.
"""

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from typing_extensions import override

from kvlayers.attention.gqa import GroupedKeys
from kvlayers.attention.gqa_repeats import SharedStates, marked_for_sdpa
from kvlayers.upstream import compat
from kvlayers.utils.sending import sent_by_value

LEADS_TO_SCORES = frozenset(
    {
        *(Tensor.__getitem__, Tensor.expand, Tensor.reshape, Tensor.view, Tensor.transpose, Tensor.permute),
        *(torch.transpose, torch.permute, torch.repeat_interleave, Tensor.repeat_interleave),
        *(Tensor.contiguous, Tensor.to, Tensor.float),
        *(torch.matmul, Tensor.matmul, Tensor.__matmul__, Tensor.__rmatmul__),
        *(torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__, torch.div, Tensor.div, Tensor.__truediv__),
        *(torch.tanh, Tensor.tanh),
    }
)
"""What models do to keys, and to the scores that they are multiplied to, before they mask the scores."""

MASKS_SCORES = frozenset(
    {
        *(torch.add, Tensor.add, Tensor.add_, Tensor.__add__, Tensor.__radd__, Tensor.__iadd__),
        *(torch.masked_fill, Tensor.masked_fill, Tensor.masked_fill_, torch.where),
    }
)

MAY_BE_MARKED = (Tensor, GroupedKeys, SharedStates)


def marked_for_custom_masks(keys: Tensor, values: Tensor, mark: type["CustomMaskKeys"]) -> tuple[Tensor, Tensor]:
    """Keys and values `[batch, kv_heads, tokens, head_dim]` that cut masks.

    Args:
        keys: the keys.
        values: the values.
        mark: of `keys_for_masks_of` the reservation.
    """
    kind = type(keys)
    # Tensors of other packages may not become others.
    if kind not in MAY_BE_MARKED or keys.shape[2] == mark.reserved:
        return keys, values
    if torch.compiler.is_compiling() and not compat.COMPILES_TENSOR_SUBCLASSES:
        return keys, values
    # Values that delay their repetition need keys that do.
    return keys.as_subclass(mark), values if kind is Tensor else values.as_subclass(Tensor)


def cut(mask: Tensor | None, keys: Tensor) -> Tensor | None:
    """The columns of a mask that are those of keys; the mask itself if it has no other columns."""
    return keys.cut(mask, keys.size(2)) if isinstance(keys, CustomMaskKeys) else mask


MaskOrOther = TypeVar("MaskOrOther")


class CustomMaskKeys(Tensor):
    """Keys, or scores of queries and keys `[batch, heads, queries, tokens]`, that cut the masks of a reservation.

    Attributes:
        reserved: columns of such a mask. A mask of other columns is not touched.
    """

    reserved: int

    @classmethod
    def cut(cls, argument: MaskOrOther, tokens: int) -> MaskOrOther:
        """The first `tokens` columns of a mask; any other argument as it is."""
        is_mask = isinstance(argument, Tensor) and argument.dim() > 1 and argument.size(-1) == cls.reserved
        return argument[..., :tokens] if is_mask else argument  # type: ignore[index]

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
            if func in MASKS_SCORES:
                tokens = next(arg for arg in (*args, *kwargs.values()) if isinstance(arg, cls)).size(-1)
                args = tuple(cls.cut(arg, tokens) for arg in args)
                kwargs = {name: cls.cut(arg, tokens) for name, arg in kwargs.items()}
                return func(*args, **kwargs)
            result = func(*args, **kwargs)
            return result.as_subclass(cls) if func in LEADS_TO_SCORES else result

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return copy.deepcopy(self.as_subclass(Tensor), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.as_subclass(Tensor).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


# A class, since a tensor that TorchDynamo traces has no attributes of its own.
@functools.lru_cache(maxsize=256)
def keys_for_masks_of(reserved: int) -> type[CustomMaskKeys]:
    """The keys that cut masks of `reserved` columns."""
    return sent_by_value(type("CustomMaskKeys", (CustomMaskKeys,), {"reserved": reserved}))


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
            states.as_subclass(Tensor) if isinstance(states, cls) else states for states in (query, key, value)
        )
        key, value = marked_for_sdpa(key, value, query.size(2))
    return scaled_dot_product_attention(query, key, value, mask, *args, **kwargs)
