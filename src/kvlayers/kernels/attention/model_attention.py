"""The attention function of models whose `attn_implementation` is "kvlayers".

It takes the arguments of transformers' `AttentionInterface`, and reads the states as the cache holds them: codes as
codes, and a prefix that sequences share once for all of them. `install()` registers it.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface

from kvlayers.errors import ConfigError
from kvlayers.kernels.attention import custom_masks, dense_kernels
from kvlayers.kernels.attention.cpu import kernel as cpu_kernel
from kvlayers.kernels.attention.state_tensor import StateTensor
from kvlayers.upstream import compat

NAME = "kvlayers"
"""The `attn_implementation` of the function."""

REFUSED = ("indices", "block_indices", "sinks", "cache")
"""Arguments by which models choose the keys or change the softmax in ways that are not computed here."""


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of a layer of a model, by the rules of transformers' "sdpa", and with soft caps and attention sinks.

    Args:
        module: the layer of the model.
        query: `[batch, heads, queries, head_dim]`, heads a multiple of the kv_heads.
        key: keys that a cache returned, `[batch, kv_heads, tokens, head_dim]`.
        value: values that a cache returned, `[batch, kv_heads, tokens, value_head_dim]`.
        attention_mask: bool or additive, broadcast to `[batch, heads, queries, tokens]`, or `None`. If the attention is
            causal and there is no mask, the queries are those of the newest tokens.
        dropout: probability with which a weight is dropped.
        scaling: factor of the scores, `1 / sqrt(head_dim)` if `None`.
        is_causal: whether a query attends to no later token; `module.is_causal` if `None`.
        softcap: limit of the scores, as in Gemma 2 (Gemma Team 2024, arXiv:2408.00118).
        s_aux: `[heads]`, the score of each head's learned sink, as in gpt-oss: a key without a value.
        **kwargs: what "sdpa" of the installed version of transformers takes.

    Returns:
        `[batch, queries, heads, value_head_dim]`, and `None` in place of the weights.

    Raises:
        ConfigError: the model passes one of `REFUSED`.
    """
    for name in REFUSED:
        if kwargs.get(name) is not None:
            raise ConfigError(
                f"{type(module).__name__} passes `{name}` to its attention, which the attention {NAME!r} cannot "
                "compute: load the model with attn_implementation='sdpa' or 'eager'."
            )
    attention_mask = custom_masks.cut(attention_mask, key)
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    is_plain = softcap is None and s_aux is None
    # Of a prompt "sdpa" knows it.
    if attention_mask is None and causal and query.shape[2] > 1 and (query.shape[2] < key.shape[2] or not is_plain):
        visible = query.new_ones((query.shape[2], key.shape[2]), dtype=torch.bool)
        attention_mask = visible.tril(key.shape[2] - query.shape[2])
    if is_plain:
        out, _ = sdpa_attention_forward(
            module,
            query,
            key,
            value,
            attention_mask,
            dropout=dropout,
            scaling=scaling,
            is_causal=is_causal,
            **kwargs,
        )
        return out, None
    if kwargs.get("position_bias") is not None:
        raise ConfigError(
            f"{type(module).__name__} passes `position_bias` beside `softcap` or `s_aux`, which the attention {NAME!r} "
            "cannot compute: load the model with attn_implementation='eager'."
        )
    scale = query.shape[3] ** -0.5 if scaling is None else scaling
    # Sinks may be trained where nothing else is. The kernel reads one for each head, and takes a cap of 0 for none.
    if not (
        dropout
        or softcap == 0
        or isinstance(key, StateTensor)
        or isinstance(value, StateTensor)
        or (
            s_aux is not None and (s_aux.numel() != query.shape[1] or (s_aux.requires_grad and torch.is_grad_enabled()))
        )
    ):
        with torch._C.DisableTorchFunctionSubclass():
            if dense_kernels.takes_on_cpu(query, key, value, attention_mask):
                out = cpu_kernel.attend_dense(query, key, value, attention_mask, scale, softcap, s_aux)
                return out.transpose(1, 2), None
    return _by_products(query, key, value, attention_mask, dropout, scale, softcap, s_aux), None


def _by_products(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout: float,
    scale: float,
    softcap: float | None,
    s_aux: Tensor | None,
) -> Tensor:
    """Attention as two products, which read packed states as codes. The result is `[batch, queries, heads, dim]`."""
    batch, heads, queries, head_dim = query.shape
    kv_heads, tokens = key.shape[1:3]
    # The query heads that share a kv head are rows of one product.
    rows = query.reshape(batch, kv_heads, heads // kv_heads * queries, head_dim)
    scores = torch.matmul(rows, key.transpose(2, 3)).reshape(batch, heads, queries, tokens) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is not None:
        hidden = torch.finfo(scores.dtype).min
        scores = scores.masked_fill(~mask, hidden) if mask.dtype == torch.bool else scores + mask
    if s_aux is not None:
        sinks = s_aux.to(scores.dtype).reshape(1, heads, 1, 1).expand(batch, heads, queries, 1)
        scores = torch.cat([scores, sinks], dim=3)
    weights = torch.softmax(scores, dim=3, dtype=torch.float32)[..., :tokens].to(query.dtype)
    weights = torch.dropout(weights, dropout, train=dropout > 0)
    out = torch.matmul(weights.reshape(batch, kv_heads, heads // kv_heads * queries, tokens), value)
    return out.reshape(batch, heads, queries, value.shape[3]).transpose(1, 2).contiguous()


def attention_mask(**arguments: Any) -> Tensor | None:
    """The mask of "sdpa", but always a mask if there are more keys than queries, and more queries than one.

    "sdpa" leaves out the mask of a prompt in a static cache whose other slots are free, and reads the first keys alone.
    `attention` takes such queries for those of the newest tokens, because models may drop the others (gemma3n, gemma4).
    """
    by_position = compat.MASKS_BY_CACHE_POSITION
    queries = arguments["cache_position"].shape[0] if by_position else arguments["q_length"]
    if queries not in (1, arguments["kv_length"]):
        arguments["allow_is_causal_skip"] = False
    mask: Tensor | None = AttentionMaskInterface()["sdpa"](**arguments)
    return mask
