"""Attention of a single query token by other means than those torch would choose.

transformers leaves grouped-query attention to `scaled_dot_product_attention(..., enable_gqa=True)`, which on a CPU
walks through the keys once for every query head. The query heads of a group attend to the same keys, so the compiled
kernel reads these once (`cpu/dense.py`), and where torch takes less time they are rows of one product:
`[batch, heads, 1, head_dim]` becomes `[batch, kv_heads, heads / kv_heads, head_dim]`. The sums are the same, at most in
another order. transformers regroups in the same way if there is a mask (as with its static cache).

On a GPU, `cuda/flash.py` and `cuda/few_queries.py` say what torch would do.
"""

import copy
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C import DisableTorchFunctionSubclass
from torch.nn.functional import scaled_dot_product_attention
from typing_extensions import override

from kvlayers.attention.cpu import dense
from kvlayers.attention.cuda import few_queries, flash
from kvlayers.utils.sending import sent_by_value

CPU_MINIMUM_FLOAT32_TOKENS = 128
"""Tokens from which grouping saves time in float32, measured on a CPU."""

CPU_MINIMUM_FLOAT32_GROUP = 4
"""Query heads of a KV head from which grouping saves time in float32, measured on a CPU."""


def grouped_for_one_query(keys: Tensor) -> Tensor:
    """View of `keys`, `[batch, kv_heads, tokens, head_dim]`, marked for SDPA if that saves time.

    On a CPU, from some tokens on, the compiled kernel takes less time than torch. With fewer, torch multiplies
    half-precision rows one by one so slowly that grouping wins at every length. In float32, grouping wins once every
    thread has two heads to read and there are enough tokens.

    Args:
        keys: the keys that the one new token of each sequence attends to.
    """
    if torch.compiler.is_compiling() or not keys.is_cpu or keys.shape[2] < first_grouped_length(keys):
        return keys
    return keys.as_subclass(GroupedKeys)


def first_grouped_length(keys: Tensor) -> int:
    """Tokens from which keys that differ from these in the number of tokens alone are marked, if there is one query."""
    if not keys.is_cpu:
        return 0 if flash.replaces_cudnn(keys) or few_queries.serves(keys) else sys.maxsize
    if keys.dtype.itemsize <= 2:
        return 0
    batch, kv_heads, _, head_dim = keys.shape
    length = -(-dense.CPU_MINIMUM_STATES // max(1, batch * kv_heads * head_dim))
    shares_threads = batch * kv_heads < 2 * torch.get_num_threads()
    return length if shares_threads else min(length, CPU_MINIMUM_FLOAT32_TOKENS)


@sent_by_value
class GroupedKeys(Tensor):
    """Keys for which SDPA takes another way, if there is one query. To every other function, a plain tensor."""

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        """The shape, without the detour by `__torch_function__`: models read it several times in each layer."""
        with DisableTorchFunctionSubclass():
            return self.size()

    @classmethod
    @override
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        with DisableTorchFunctionSubclass():
            if func is scaled_dot_product_attention:
                return _attend(*args, **(kwargs or {}))
            return func(*args, **(kwargs or {}))

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return copy.deepcopy(self.as_subclass(Tensor), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.as_subclass(Tensor).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


def attend_in_kernel(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
) -> Tensor | None:
    """Attention by the compiled kernel for states in full precision on a CPU, or by a kernel of `cuda/` on a GPU.

    It is `None` if none takes the call.

    Args:
        query: `[batch, heads, queries, head_dim]`, whose groups of heads share a KV head.
        keys: `[batch, kv_heads, tokens, head_dim]`.
        values: `[batch, kv_heads, tokens, value_head_dim]`.
        mask: bool or additive, broadcast to `[batch, heads, queries, tokens]`, or `None`.
        dropout_p: probability that a weight is dropped.
        is_causal: whether a query attends to the tokens up to its own number alone.
        scale: factor of the scores, `1 / sqrt(head_dim)` if `None`.
    """
    if is_causal or dropout_p:
        return None
    if keys.is_cpu:
        return dense.attend(query, keys, values, mask, scale) if dense.takes(query, keys, values, mask) else None
    if mask is None and flash.takes(query, keys, values):
        return flash.attend(query, keys, values, scale)
    return few_queries.attend(query, keys, values, mask, scale)


def attend_dense(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, is_causal: bool, scale: float | None
) -> Tensor:
    """Attention to states in full precision, which reads the keys once for a group of heads where that saves time.

    Args:
        query: `[batch, heads, queries, head_dim]`, heads a multiple of `kv_heads`.
        keys: `[batch, kv_heads, tokens, head_dim]`.
        values: `[batch, kv_heads, tokens, value_head_dim]`.
        mask: bool or additive, broadcast to `[batch, heads, queries, tokens]`, or `None`.
        is_causal: whether a query attends to the tokens up to its own number alone.
        scale: factor of the scores, `1 / sqrt(head_dim)` if `None`.
    """
    attended = attend_in_kernel(query, keys, values, mask, 0.0, is_causal, scale)
    if attended is not None:
        return attended
    shares_heads = query.shape[1] != keys.shape[1]
    grouped = query.shape[2] == 1 and type(grouped_for_one_query(keys)) is GroupedKeys
    attend = _attend if grouped else scaled_dot_product_attention
    return attend(query, keys, values, mask, 0.0, is_causal, scale=scale, enable_gqa=shares_heads)


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
    shares_heads = enable_gqa or query.size(1) == key.size(1)
    if shares_heads:
        attended = attend_in_kernel(query, key, value, attn_mask, dropout_p, is_causal, scale)
        if attended is not None:
            return attended
    group = _group_of_one_query(query.size(), key.size(), value.size(), enable_gqa)
    slower = group < CPU_MINIMUM_FLOAT32_GROUP and query.dtype.itemsize > 2
    if not group or slower or attn_mask is not None or is_causal or dropout_p or not key.is_cpu:
        return scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    if group == 1:
        # Two rows of half precision take less time than one.
        return scaled_dot_product_attention(query.expand(-1, -1, 2, -1), key, value, scale=scale)[:, :, :1]
    return attend_grouped(query, key, value, group, None, scale)


def _group_of_one_query(query: torch.Size, key: torch.Size, value: torch.Size, enable_gqa: bool) -> int:
    """Query heads that share a KV head if there is one query token, and 0 if there are more or shapes do not match."""
    if len(query) != 4 or len(value) != 4 or query[2] != 1 or query[0] != key[0] or value[:3] != key[:3]:
        return 0
    group, rest = divmod(query[1], key[1])
    return group if not rest and (enable_gqa or group == 1) else 0


def kv_head_copies(before: Sequence[int], after: Sequence[int]) -> int:
    """Copies of each KV head after one of the three steps in which modelling code repeats KV heads, else 0.

    The steps (`repeat_kv` of transformers) add an axis for the copies, expand it, and merge it into the KV heads.

    Args:
        before: shape that the step is given, `[batch, kv_heads, (copies,) tokens, head_dim]`.
        after: shape of its result.
    """
    if len(before) == 4 and after == (*before[:2], 1, *before[2:]):
        return 1
    if len(before) == 5 and len(after) == 5 and (*after[:2], *after[3:]) == (*before[:2], *before[3:]):
        return after[2]
    if len(before) == 5 and after == (before[0], before[1] * before[2], *before[3:]):
        return before[2]
    return 0


def attend_grouped(
    query: Tensor, key: Tensor, value: Tensor, group: int, mask: Tensor | None, scale: float | None
) -> Tensor:
    """Attention of one query token per sequence, with the query heads of a group as rows of one product.

    Args:
        query: `[batch, kv_heads * group, 1, head_dim]`.
        key: `[batch, kv_heads, tokens, head_dim]`.
        value: `[batch, kv_heads, tokens, value_head_dim]`.
        group: query heads that share a KV head.
        mask: broadcast to `[batch, kv_heads, group, tokens]`, or `None`.
        scale: factor of the scores, `1 / sqrt(head_dim)` if `None`.
    """
    batch, kv_heads, _, head_dim = key.size()
    rows = query.reshape(batch, kv_heads, group, head_dim)
    attended = scaled_dot_product_attention(rows, key, value, attn_mask=mask, scale=scale)
    return attended.reshape(batch, kv_heads * group, 1, value.size(3))
