"""Attention of a single query token on a CPU, without reading the history several times over.

transformers leaves grouped-query attention to `scaled_dot_product_attention(..., enable_gqa=True)`, which on a CPU
walks through the keys once for every query head. The query heads of a group attend to the same keys, so they are rows
of one product: `[batch, heads, 1, head_dim]` becomes `[batch, kv_heads, heads / kv_heads, head_dim]`. The sums are the
same, in another order at most; transformers itself regroups like that where there is a mask (as with its static cache).
"""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from typing_extensions import override

MINIMUM_TOKENS = 1024
"""Tokens from which on keys are marked. Below, there is little to win, and every sum stays in transformers' order."""


def attended_by_one_query(keys: Tensor) -> Tensor:
    """View of `keys`, `[batch, kv_heads, tokens, head_dim]`, marked for SDPA where that saves time.

    Args:
        keys: what the one new token of each sequence attends to.
    """
    if keys.shape[2] < MINIMUM_TOKENS or keys.device.type != "cpu" or torch.compiler.is_compiling():
        return keys
    return keys.as_subclass(SharedKeys)


class SharedKeys(Tensor):
    """Keys that the query heads of a group read together. To every other function, the tensor that they are."""

    @classmethod
    @override
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if func is scaled_dot_product_attention:
                return _attend(*args, **(kwargs or {}))
            return func(*args, **(kwargs or {}))

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return copy.deepcopy(self.as_subclass(Tensor), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.as_subclass(Tensor).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


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
    one_query = query.dim() == value.dim() == 4 and query.shape[2] == 1 and query.shape[0] == key.shape[0]
    whole_groups = one_query and (enable_gqa or query.shape[1] == key.shape[1]) and query.shape[1] % key.shape[1] == 0
    if not whole_groups or value.shape[:3] != key.shape[:3] or attn_mask is not None or is_causal or dropout_p:
        return scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    batch, heads, _, head_dim = query.shape
    groups = heads // key.shape[1]
    rows = query.reshape(batch, key.shape[1], groups, head_dim)
    if groups == 1 and query.dtype == torch.bfloat16:
        # A bfloat16 product with one row takes a path that is slower than that with two.
        rows = rows.expand(batch, heads, 2, head_dim)
    attended = scaled_dot_product_attention(rows, key, value, scale=scale)
    return attended[:, :, :groups].reshape(batch, heads, 1, value.shape[3])
