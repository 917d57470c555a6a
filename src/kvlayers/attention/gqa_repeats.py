"""Grouped-query attention of few query tokens, without copies of the keys and values for each query head.

If there is a mask, transformers repeats keys and values for every query head of a group (`repeat_kv`) before it calls
`scaled_dot_product_attention`: for several query tokens, and in compiled code, which always has a mask. That copies all
tokens at every step, once for each query head of a group. The tensors here delay the repetition until attention asks
for it, and let the query heads of a group read the keys together, as `gqa` does if there is no mask.

TorchDynamo traces this code: nothing of it is left when the compiled function runs.
"""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from typing_extensions import override

from kvlayers.attention.cpu import dense
from kvlayers.attention.cuda import few_queries
from kvlayers.attention.gqa import (
    GroupedKeys,
    attend_grouped,
    attend_in_kernel,
    first_grouped_length,
    kv_head_copies,
)
from kvlayers.upstream import compat
from kvlayers.utils.sending import sent_by_value


def shared_in_graph(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values `[batch, kv_heads, tokens, head_dim]`, marked for SDPA if that saves time.

    Args:
        keys: the keys that the one new token of each sequence attends to, in code that is being compiled.
        values: the values of the same tokens.
    """
    if keys.device.type != "cpu" or not torch.compiler.is_dynamo_compiling() or not compat.COMPILES_TENSOR_SUBCLASSES:
        return keys, values
    return keys.as_subclass(SharedStates), values.as_subclass(SharedStates)


def marked_for_sdpa(keys: Tensor, values: Tensor, queries: int) -> tuple[Tensor, Tensor]:
    """Keys and values `[batch, kv_heads, tokens, head_dim]`, marked for SDPA if that saves time.

    Args:
        keys: the keys that the new tokens of each sequence attend to.
        values: the values of the same tokens.
        queries: new tokens of each sequence.
    """
    # First, because a tracer would specialize a program on the sizes that are compared.
    if torch.compiler.is_compiling() or type(keys) is not Tensor:
        return keys, values
    if queries == 1:
        return marked_for_one_query(keys, values) if keys.shape[2] >= first_grouped_length(keys) else (keys, values)
    if keys.is_cpu:
        pays = queries <= dense.CPU_MAXIMUM_QUERIES and keys.numel() >= dense.CPU_MINIMUM_STATES
    else:
        pays = queries <= few_queries.MAXIMUM_QUERIES and few_queries.serves(keys)
    return (keys.as_subclass(SharedStates), values.as_subclass(SharedStates)) if pays else (keys, values)


def marked_for_one_query(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """As `marked_for_sdpa`, of at least `first_grouped_length` tokens, for one new token of each sequence."""
    if keys.is_cpu:
        return keys.as_subclass(GroupedKeys), values
    return keys.as_subclass(SharedStates), values.as_subclass(SharedStates)


@sent_by_value
class SharedStates(Tensor):
    """States `[batch, kv_heads, tokens, head_dim]`, or `[batch, kv_heads, n, ...]` while they are being repeated.

    Attributes:
        repeated: what they become when they have been repeated.
    """

    repeated: "type[RepeatedStates]"

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
            if func is scaled_dot_product_attention:
                return _attend(*args, **kwargs)
            states = args[0] if args else next(iter(kwargs.values()))
            if func is Tensor.reshape and states.dim() == 5 and _merges_heads(states, args[1:]):
                # Through an operation, since a marked tensor cannot be marked otherwise.
                return states.expand(states.size()).as_subclass(cls.repeated)
            result = func(*args, **kwargs)
            if func is Tensor.__getitem__ or (func is Tensor.expand and states.dim() == 5 and states.size(2) == 1):
                repeats = result.dim() == 5 and kv_head_copies(states.size(), result.size())
                return result.as_subclass(cls) if repeats else result
            return result

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return copy.deepcopy(self.as_subclass(Tensor), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.as_subclass(Tensor).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


def _merges_heads(states: Tensor, shape: tuple[Any, ...]) -> bool:
    """Whether `shape` merges `[batch, kv_heads, n, tokens, head_dim]` to `[batch, kv_heads * n, tokens, head_dim]`."""
    wanted = tuple(shape[0]) if len(shape) == 1 else shape
    return len(wanted) == 4 and kv_head_copies(states.size(), wanted) > 0


class RepeatedStates(Tensor):
    """States `[batch, kv_heads, n, tokens, head_dim]` that report the shape `[batch, kv_heads * n, tokens, ...]`."""

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
            if func is scaled_dot_product_attention:
                return _attend(*args, **kwargs)
            shape: Any = Tensor.shape.__get__  # type: ignore[attr-defined]
            # Python makes another object at each access, which is equal; TorchDynamo knows a single one.
            if func is shape or (not torch.compiler.is_compiling() and func == shape):
                batch, kv_heads, repeats, tokens, head_dim = args[0].size()
                return torch.Size((batch, kv_heads * repeats, tokens, head_dim))
            return func(*map(_written_out, args), **{name: _written_out(value) for name, value in kwargs.items()})


SharedStates.repeated = RepeatedStates


def _written_out(argument: Any) -> Any:
    """An argument in which `RepeatedStates` are really repeated."""
    if isinstance(argument, RepeatedStates):
        batch, kv_heads, repeats, tokens, head_dim = argument.size()
        return argument.reshape(batch, kv_heads * repeats, tokens, head_dim)
    if isinstance(argument, list | tuple):
        return type(argument)([_written_out(part) for part in argument])
    return argument


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    keys = key[:, :, 0] if isinstance(key, RepeatedStates) else key
    values = value[:, :, 0] if isinstance(value, RepeatedStates) else value
    batch, heads, queries, _ = query.size()
    kv_heads = keys.size(1)
    shares_heads = enable_gqa or keys is not key or heads == kv_heads
    if shares_heads:
        attended = attend_in_kernel(query, keys, values, attn_mask, dropout_p, is_causal, scale)
        if attended is not None:
            return attended
    group = heads // kv_heads
    one_query = (
        queries == 1
        and keys.is_cpu
        and not is_causal
        and not dropout_p
        and (keys.size(0), values.size(1)) == (batch, kv_heads)
    )
    if not one_query or (attn_mask is not None and (attn_mask.dim() != 4 or attn_mask.size(1) not in (1, heads))):
        return scaled_dot_product_attention(
            query,
            _written_out(key),
            _written_out(value),
            attn_mask=attn_mask,
            dropout_p=dropout_p,
            is_causal=is_causal,
            scale=scale,
            enable_gqa=enable_gqa,
        )
    if attn_mask is not None and attn_mask.size(1) == heads and heads > 1:
        attn_mask = attn_mask.reshape(attn_mask.size(0), kv_heads, group, attn_mask.size(3))
    return attend_grouped(query, keys, values, group, attn_mask, scale)
