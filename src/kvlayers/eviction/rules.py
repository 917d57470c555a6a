"""The rules of kvlayers: by keys alone, or by the attention that queries pay to tokens or are expected to pay."""

import dataclasses
import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import avg_pool1d, normalize, pad
from typing_extensions import Self, override

from kvlayers.errors import OptionError, StateMismatchError
from kvlayers.eviction.rule import ALL_QUERIES, EvictionRule, register_eviction_rule
from kvlayers.rope.rotary import Rotary
from kvlayers.utils.options import check_whole_number

# Rules that look at keys alone, or at nothing


@register_eviction_rule("keydiff")
@dataclass(frozen=True)
class KeyDiff(EvictionRule):
    """A token is kept if its key points elsewhere than the mean key.

    Park et al. 2025, "KeyDiff: Key Similarity-Based KV Cache Eviction for Long-Context LLM Inference in
    Resource-Constrained Environments" (arXiv:2504.15364): the score is minus the cosine similarity of a key to the mean
    of the normalized keys. Keys that differ from the others tend to receive much attention.
    """

    @override
    def scores(self, keys: Tensor, values: Tensor, queries: Tensor | None) -> Tensor:
        unit = normalize(keys.to(torch.promote_types(keys.dtype, torch.float32)), dim=-1)
        anchor = normalize(unit.mean(dim=2), dim=-1)
        similarities: Tensor = (unit @ anchor[..., None]).squeeze(-1)
        return -similarities


@register_eviction_rule("knorm")
@dataclass(frozen=True)
class KNorm(EvictionRule):
    """A token is kept for the small L2 norm of its key.

    Devoto et al. 2024, "A Simple and Effective L2 Norm-Based Strategy for KV Cache Compression" (arXiv:2406.11430):
    keys of a small norm tend to receive much attention.
    """

    @override
    def scores(self, keys: Tensor, values: Tensor, queries: Tensor | None) -> Tensor:
        wide = torch.promote_types(keys.dtype, torch.float32)
        norms: Tensor = torch.linalg.vector_norm(keys, dim=-1, dtype=wide)
        return -norms


CHANNELS = 4
"""Channels of a key that its score is drawn from."""


@register_eviction_rule("random")
@dataclass(frozen=True)
class RandomEviction(EvictionRule):
    """A token is kept by chance: its score is a hash of its key and the seed.

    So a token has the same score whenever it is scored, beside whatever other heads, and on every device. Heads, layers
    and sequences keep different tokens, as their keys differ. No generator of random numbers is used up.

    Args:
        seed: another seed gives other scores.

    Raises:
        OptionError: the seed is not a whole number.
    """

    seed: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.seed, int) or isinstance(self.seed, bool):
            raise OptionError(f"`seed` must be a whole number, got {self.seed!r}: pass an integer.")

    @override
    def scores(self, keys: Tensor, values: Tensor, queries: Tensor | None) -> Tensor:
        # Bits of float32, which holds the keys of all narrower dtypes unchanged.
        bits = keys[..., :CHANNELS].float().contiguous().view(torch.int32).long()
        mixed = _mixed(_mixed(torch.full(keys.shape[:3], self.seed % (1 << 31), device=keys.device)))
        for channel in range(bits.shape[-1]):
            mixed = _mixed(mixed ^ bits[..., channel])
        # float32 holds whole numbers up to this one.
        return (mixed % (1 << 24)).float()


def _mixed(numbers: Tensor) -> Tensor:
    """Numbers from 0 to 2^31, spread evenly whatever the given ones are."""
    for _ in range(2):
        low = numbers & 0x7FFFFFFF
        numbers = ((low ^ (low >> 16)) * 0x45D9F3B) & 0x7FFFFFFF
    return numbers ^ (numbers >> 16)


@register_eviction_rule("streaming")
@dataclass(frozen=True)
class Streaming(EvictionRule):
    """A token is kept for being new. With the sinks, which the layer keeps, that is a window behind sinks.

    Xiao et al. 2023, "Efficient Streaming Language Models with Attention Sinks" (arXiv:2309.17453). Other than in the
    paper, and in `SinkCache`, tokens keep the positions that they have in the text.
    """

    shares_heads: ClassVar[bool] = True

    @override
    def scores(self, keys: Tensor, values: Tensor, queries: Tensor | None) -> Tensor:
        return torch.arange(keys.shape[2], dtype=torch.float32, device=keys.device).expand(keys.shape[:3])


# Rules that look at queries

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


@dataclass(frozen=True, kw_only=True)
class AttentionRule(EvictionRule):
    """A rule that computes scores of attention.

    Args:
        scale: factor of the scores of attention. Default: that of the model.
    """

    scale: float | None = None

    @override
    def for_attention(self, rotary: Rotary | None, scale: float | None) -> Self:
        return self if self.scale is not None else dataclasses.replace(self, scale=scale)


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

    def __post_init__(self) -> None:
        for name, number in (("queries", self.queries), ("kernel", self.kernel)):
            check_whole_number(number, f"`{name}`", 1)
        if not self.kernel % 2:
            raise OptionError(
                f"`kernel` must be odd, so that a token is in the middle, got {self.kernel}: pass an odd number."
            )

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

    queries: int = dataclasses.field(default=1, init=False)
    shares_heads: ClassVar[bool] = True

    @override
    def scores(self, keys: Tensor, values: Tensor, queries: Tensor | None) -> Tensor:
        last = needed(queries, "Tova")[:, :, -1:]
        return attention_sums(keys, last, self.scale).mean(dim=(1, 2))[:, None].expand(keys.shape[:3])


TOKENS_AT_ONCE = 512
"""Queries or keys that are computed with at once, in float32."""


@register_eviction_rule("expected_attention")
@dataclass(frozen=True)
class ExpectedAttention(EvictionRule):
    """A token is kept for the attention that later queries are expected to pay to it, times the norm of its value.

    Devoto et al. 2025, "Expected Attention: KV Cache Compression by Estimating Attention from Future Queries
    Distribution" (arXiv:2510.00636). Queries, before they are rotated, are taken to be normally distributed, with the
    mean and the covariance of those seen. A later query is one of them, rotated to a position behind the last token;
    its score with a key is normally distributed too, so the expected exponential of the score is known.

    A query at position `p` that was rotated by `distance` more is one at position `p + distance`. So the queries are
    rotated to the position behind the last token by their distances to it, and their absolute positions are not
    needed.

    Args:
        future: positions behind the last token over which a rotation is averaged.
        sinks: tokens in front that have the highest scores, and whose queries are left out, since they are unlike all
            others.
        epsilon: added to an expected probability before it is multiplied by the norm of the value, so that a larger
            one gives the values more weight.
        rotary: how keys and queries are rotated. Default: as in the model.
        scale: factor of the scores of attention. Default: that of the model.

    Raises:
        OptionError: a number is negative, or there are no future positions.
    """

    future: int = 512
    sinks: int = 4
    epsilon: float = 0.0
    rotary: Rotary | None = None
    scale: float | None = None
    queries: int = dataclasses.field(default=ALL_QUERIES, init=False)
    needs_rotary: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for name, number, least in (("future", self.future, 1), ("sinks", self.sinks, 0)):
            check_whole_number(number, f"`{name}`", least)
        if not self.epsilon >= 0:
            raise OptionError(f"`epsilon` must be at least 0, got {self.epsilon!r}: pass a small number, such as 0.02.")

    @override
    def for_attention(self, rotary: Rotary | None, scale: float | None) -> Self:
        return dataclasses.replace(
            self,
            rotary=rotary if self.rotary is None else self.rotary,
            scale=scale if self.scale is None else self.scale,
        )

    @override
    def scores(self, keys: Tensor, values: Tensor, queries: Tensor | None) -> Tensor:
        seen = needed(queries, "ExpectedAttention")
        kv_heads, tokens, head_dim = keys.shape[1:]
        sinks = min(self.sinks, tokens)
        if seen.shape[2] == tokens and sinks < tokens:
            seen = seen[:, :, sinks:]
        mean, covariance = self._later_queries(seen)
        factor = 1 / math.sqrt(head_dim) if self.scale is None else self.scale
        groups = seen.shape[1] // kv_heads
        grouped_mean = mean.view(-1, kv_heads, groups, head_dim) * factor
        grouped_covariance = covariance.view(-1, kv_heads, groups, head_dim, head_dim) * (factor * factor / 2)
        logits = torch.empty(*grouped_mean.shape[:3], tokens - sinks, dtype=mean.dtype, device=keys.device)
        for first in range(0, tokens - sinks, TOKENS_AT_ONCE):
            block = keys[:, :, None, sinks + first : sinks + first + TOKENS_AT_ONCE].to(mean.dtype)
            # The mean of the score of a key, and half its variance.
            likely = (block @ grouped_covariance).add_(grouped_mean[..., None, :]).mul_(block).sum(dim=-1)
            logits[..., first : first + TOKENS_AT_ONCE] = likely
        norms = torch.linalg.vector_norm(values[:, :, sinks:], dim=-1, dtype=mean.dtype)
        expected = (logits.softmax(dim=-1).mean(dim=2) + self.epsilon) * norms
        return pad(expected, (sinks, 0), value=torch.inf)

    def _later_queries(self, queries: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and covariance of queries behind the last token, `[batch, heads, (head_dim,) head_dim]`, float32.

        Queries `[batch, heads, observed, head_dim]` are rotated a few at a time. Sums are of differences to the first
        few's mean, since the mean may be much larger than the deviation.
        """
        observed = queries.shape[2]
        first = self._to_the_end(queries, 0)
        center = first.mean(dim=2, keepdim=True)
        total = torch.zeros_like(center)
        products = center.new_zeros(*center.shape[:2], center.shape[3], center.shape[3])
        for start in range(0, observed, TOKENS_AT_ONCE):
            differences = (first if start == 0 else self._to_the_end(queries, start)) - center
            total += differences.sum(dim=2, keepdim=True)
            products += differences.mT @ differences
        rest = total / observed
        covariance = products / observed - rest.mT @ rest
        return self._averaged(center + rest).squeeze(2), self._averaged(self._averaged(covariance).mT)

    def _to_the_end(self, queries: Tensor, start: int) -> Tensor:
        """Queries from number `start` on, rotated to the position behind the last one, float32."""
        block = queries[:, :, start : start + TOKENS_AT_ONCE]
        wide = block.to(torch.promote_types(block.dtype, torch.float32))
        if self.rotary is None:
            return wide
        numbers = torch.arange(start, start + block.shape[2])
        cos, sin = _turns(self.rotary, queries.shape[2] - numbers, wide)
        return torch.addcmul(wide * cos, self.rotary.partner(wide), sin)

    def _averaged(self, rows: Tensor) -> Tensor:
        """Rows `[batch, heads, rows, head_dim]`, rotated by 0, 1, 2... and averaged."""
        if self.rotary is None:
            return rows
        cos, sin = _turns(self.rotary, torch.arange(self.future), rows)
        return torch.addcmul(rows * cos.mean(dim=0), self.rotary.partner(rows), sin.mean(dim=0))


def _turns(rotary: Rotary, distances: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines for each distance, `[distances, head_dim]`."""
    cos, sin = rotary.turn(distances, like.shape[3], like.dtype, like.device)
    return cos[:, 0, 0], sin[:, 0, 0]
