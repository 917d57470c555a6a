"""Rules that keep tokens for the attention that queries pay to them."""

import dataclasses
import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import avg_pool1d, pad
from typing_extensions import Self, override

from kvlayers.errors import OptionError, StateMismatchError
from kvlayers.eviction.contract import ALL_QUERIES, EvictionRule, register_eviction_rule
from kvlayers.rope.rotary import Rotary

CPU_SCORES_AT_ONCE = 1 << 21
"""Scores of one KV head that are computed at once on a CPU, unless one query has more."""

ACCELERATOR_SCORES_AT_ONCE = 1 << 26
"""The same on other devices, where launches cost more than memory: 256 MiB in float32. Estimated, not measured."""


def attention_sums(keys: Tensor, queries: Tensor, scale: float | None) -> Tensor:
    """The probabilities with which the newest queries attend to each token, summed over the queries.

    Queries do not attend to tokens behind their own. Scores are computed for a few queries at a time, since those of
    all queries with all keys may not fit into memory.

    Args:
        keys: `[batch, kv_heads, tokens, head_dim]`, of any floating-point dtype.
        queries: `[batch, heads, observed, head_dim]`; the last query is that of the last token.
        scale: factor of the scores, `None` for `1 / sqrt(head_dim)`.

    Returns:
        float32 (float64 for float64 keys) `[batch, kv_heads, query heads of a KV head, tokens]`.
    """
    batch, kv_heads, tokens, head_dim = keys.shape
    observed = queries.shape[2]
    wide = torch.float64 if keys.dtype == torch.float64 else torch.float32
    groups = queries.shape[1] // kv_heads
    grouped = queries.view(batch, kv_heads, groups, observed, head_dim)
    factor = 1 / math.sqrt(head_dim) if scale is None else scale
    sums = torch.zeros(batch, kv_heads, groups, tokens, dtype=wide, device=keys.device)
    at_once = CPU_SCORES_AT_ONCE if keys.is_cpu else ACCELERATOR_SCORES_AT_ONCE
    step = max(1, min(observed, at_once // (batch * groups * tokens)))
    later = torch.ones(step, step, dtype=torch.bool, device=keys.device).triu(1)
    for head in range(kv_heads):
        own = keys[:, head].to(wide).transpose(1, 2)
        for first in range(0, observed, step):
            block = grouped[:, head, :, first : first + step].to(wide) * factor
            queries_now = block.shape[2]
            seen = tokens - observed + first + queries_now
            # As rows of one product, since matmul would copy the keys for each query head.
            scores = (block.flatten(1, 2) @ own[..., :seen]).view(batch, groups, queries_now, seen)
            scores[..., seen - queries_now :].masked_fill_(later[:queries_now, :queries_now], -torch.inf)
            sums[:, head, :, :seen] += scores.softmax(dim=-1).sum(dim=2)
    return sums


def needed(queries: Tensor | None, rule: str) -> Tensor:
    """The queries that a rule has asked for.

    Raises:
        StateMismatchError: there are no queries.
    """
    if queries is None or not queries.shape[2]:
        raise StateMismatchError(f"`{rule}.scores` needs the queries of the newest tokens, got {queries}: pass them.")
    return queries


class AttentionRule(EvictionRule):
    """A rule that computes scores of attention: by its own `scale`, or else by that of the model."""

    scale: float | None

    @override
    def for_attention(self, rotary: Rotary | None, scale: float | None) -> Self:
        return self if self.scale is not None else dataclasses.replace(self, scale=scale)  # type: ignore[type-var]


@register_eviction_rule("h2o")
@dataclass(frozen=True)
class HeavyHitters(AttentionRule):
    """A token is kept for the attention of all queries behind it, averaged over them and the heads that share its key.

    Zhang et al. 2023, "H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large Language Models"
    (arXiv:2306.14048). The paper takes the sum over the queries, by which an old token wins because more queries see
    it; here the sum is divided by the number of queries that see the token.

    Args:
        scale: factor of the scores of attention. Default: that of the model.
    """

    scale: float | None = None
    queries: int = dataclasses.field(default=ALL_QUERIES, init=False)

    @override
    def scores(self, keys: Tensor, values: Tensor, queries: Tensor | None) -> Tensor:
        observed = needed(queries, "HeavyHitters")
        sums = attention_sums(keys, observed, self.scale).mean(dim=2)
        seen_by = torch.arange(keys.shape[2], 0, -1, device=keys.device).clamp(max=observed.shape[2])
        return sums / seen_by


@register_eviction_rule("snapkv")
@dataclass(frozen=True)
class SnapKV(AttentionRule):
    """A token is kept for the attention of the newest queries (the window) to it and to its neighbours.

    Li et al. 2024, "SnapKV: LLM Knows What You are Looking for Before Generation" (arXiv:2404.14469): probabilities are
    averaged over the window and over the query heads of a KV head, and pooled over neighbours. The tokens of the window
    have the highest scores.

    Args:
        queries: tokens of the window.
        kernel: neighbours over which a score is averaged, itself included: an odd number.
        scale: factor of the scores of attention. Default: that of the model.

    Raises:
        OptionError: `queries` or `kernel` is not such a number.
    """

    queries: int = 64
    kernel: int = 5
    scale: float | None = None

    def __post_init__(self) -> None:
        for name, number in (("queries", self.queries), ("kernel", self.kernel)):
            if not isinstance(number, int) or isinstance(number, bool) or number < 1:
                raise OptionError(f"`{name}` must be a positive whole number, got {number!r}.")
        if not self.kernel % 2:
            raise OptionError(f"`kernel` must be odd, so that a token is in the middle, got {self.kernel}.")

    @override
    def scores(self, keys: Tensor, values: Tensor, queries: Tensor | None) -> Tensor:
        window = needed(queries, "SnapKV")[:, :, -self.queries :]
        sums = attention_sums(keys, window, self.scale).mean(dim=2)
        before = sums[..., : keys.shape[2] - window.shape[2]] / window.shape[2]
        if before.shape[2]:
            before = avg_pool1d(before, self.kernel, stride=1, padding=self.kernel // 2)
        return pad(before, (0, window.shape[2]), value=torch.inf)


@register_eviction_rule("tova")
@dataclass(frozen=True)
class Tova(AttentionRule):
    """A token is kept for the attention of the last query to it, averaged over all heads of the layer.

    Oren et al. 2024, "Transformers are Multi-State RNNs" (arXiv:2401.06104): Token Omission Via Attention.

    Args:
        scale: factor of the scores of attention. Default: that of the model.
    """

    scale: float | None = None
    queries: int = dataclasses.field(default=1, init=False)
    shares_heads: ClassVar[bool] = True

    @override
    def scores(self, keys: Tensor, values: Tensor, queries: Tensor | None) -> Tensor:
        last = needed(queries, "Tova")[:, :, -1:]
        return attention_sums(keys, last, self.scale).mean(dim=(1, 2))[:, None].expand(keys.shape[:3])
