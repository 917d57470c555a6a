"""The functions of the package flash_attn, by its documentation, computed by the definition of attention on a CPU.

Queries, keys and values are `[batch, tokens, heads, head_dim]`, or `[all tokens, heads, head_dim]` for sequences of
different lengths. A causal mask, and a window, are aligned to the last token.
"""

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import modeling_flash_attention_utils as flash

CALLS: list[type] = []
"""The types of the keys that the functions were given."""


def note(keys: Tensor) -> None:
    """Remember what kind of keys a function was given."""
    if not torch.compiler.is_compiling():
        CALLS.append(type(keys))


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Tensor:
    """Attention of sequences of one length."""
    note(k)
    return torch.stack(
        [attended(*states, softmax_scale, causal, window_size, softcap) for states in zip(q, k, v, strict=True)]
    )


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: None = None,
) -> Tensor:
    """Attention of sequences of different lengths, one after the other."""
    note(k)
    pieces = []
    for index in range(len(cu_seqlens_q) - 1):
        queries = slice(int(cu_seqlens_q[index]), int(cu_seqlens_q[index + 1]))
        tokens = slice(int(cu_seqlens_k[index]), int(cu_seqlens_k[index + 1]))
        pieces.append(attended(q[queries], k[tokens], v[tokens], softmax_scale, causal, window_size, softcap))
    return torch.cat(pieces)


def attended(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None, causal: bool, window: tuple[int, int], softcap: float
) -> Tensor:
    """Attention of one sequence, `[queries, heads, head_dim]`, in float64."""
    groups, behind = q.shape[1] // k.shape[1], k.shape[0] - q.shape[0]
    keys, values = (states.double().repeat_interleave(groups, 1) for states in (k, v))
    scores = torch.einsum("qhd,thd->hqt", q.double(), keys) * (scale or 1 / math.sqrt(q.shape[2]))
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    distance = torch.arange(q.shape[0])[:, None] + behind - torch.arange(k.shape[0])
    most = window[0] if window[0] >= 0 else math.inf
    least = 0 if causal else -window[1] if window[1] >= 0 else -math.inf
    seen = (distance >= least) & (distance <= most)
    weights = torch.softmax(scores.masked_fill(~seen, -torch.inf), -1).nan_to_num(0)
    return torch.einsum("hqt,thd->qhd", weights, values).to(q.dtype)


@pytest.fixture
def flash_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers finds the functions here, as if the package were installed."""
    CALLS.clear()
    of_package = (flash_attn_func, flash_attn_varlen_func)
    of_transformers = (flash._pad_input, flash._unpad_input)
    # Newer versions also look for a function that has a paged cache.
    paged: tuple[Any, ...] = (None,) if "_flash_with_kvcache_fn" in vars(flash) else ()
    monkeypatch.setattr(flash, "_lazy_imports", lambda *args, **kwargs: (*of_package, *paged, *of_transformers))
    names = [name for name in vars(flash) if name.endswith("_fn") or name == "_loaded_implementation"]
    for name in names:
        monkeypatch.setattr(flash, name, None)


def use(model: Any, name: str = "flash_attention_2") -> None:
    """Set the model's attention, which transformers refuses to do on a CPU."""
    model.config._attn_implementation_internal = name
