"""Keys made even before they are packed, by two vectors for each KV head that change no attention.

Some models have channels of keys that are much larger than the others. A constant one takes most codes of a group, and a
rotation spreads one that varies over all channels. Two vectors mend that, and the queries make up for both:

- A mean that is subtracted from all packed keys of a head. It lowers all their scores by the same number, the product of
  the query and the mean, as in SageAttention (Zhang et al. 2024, https://arxiv.org/abs/2410.02367).
- A factor that each channel is divided by. The query is multiplied by it, as in QServe's SmoothAttention (Lin et al.
  2024, https://arxiv.org/abs/2405.04532).

Both are found in the first tokens that are packed, and hold for all packed tokens of a sequence.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import Self

from kvlayers.quantizers.contract import Quantizer

UNEVEN = 24.0
"""Times the median variance of a head's channels that one of them must have before channels get factors. Below that, large
channels often meet large queries, so that a factor costs more than it gains (measured on SmolLM2 and Gemma 3)."""

POWER = 0.75
"""Power of the relative variance of a channel that its factor takes out."""

LARGEST_VARIANCE = 2.0
"""Times the median that the variance of a channel may be after it was divided by its factor."""

LARGEST_FACTOR = 512.0
"""The largest factor of a channel: a query times it stays within float16."""

NAMES = ("smoothing_factor", "smoothing_mean")
"""Names of the vectors in the state of a store."""


@dataclass(frozen=True, eq=False)
class KeySmoothing:
    """What packed keys of each sequence and KV head were made even by: `packed = (key - mean) / factor`.

    Attributes:
        factor: `[batch, kv_heads, 1, head_dim]` in the dtype of the keys, at least 1; `None` without factors.
        mean: likewise, `None` without a mean.
    """

    factor: Tensor | None = None
    mean: Tensor | None = None

    @classmethod
    def for_keys(cls, keys: Tensor, quantizer: Quantizer) -> Self:
        """What suits keys and their quantizer. Tokens that are not finite do not count.

        Args:
            keys: `[batch, kv_heads, tokens, head_dim]`, as many as a block has.
            quantizer: the quantizer of the keys.
        """
        if not vectors_of(quantizer) or not keys.numel():
            return cls()
        finite = keys.isfinite().all(-1, keepdim=True)
        exact = torch.where(finite, keys.float(), 0.0)
        # Squares of the largest keys would overflow.
        largest = exact.abs().amax((-2, -1), keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
        exact, tokens = exact / largest, finite.sum(-2, keepdim=True).clamp(min=1)
        mean = exact.sum(-2, keepdim=True) / tokens
        variance = torch.where(finite, (exact - mean).square(), 0.0).sum(-2, keepdim=True) / tokens
        return cls(
            _factors(variance).to(keys.dtype) if _wants_factors(quantizer) else None,
            (mean * largest).to(keys.dtype) if _wants_mean(quantizer) else None,
        )

    @classmethod
    def of_state(cls, tensors: dict[str, Tensor]) -> Self:
        """The one in the state of a store, which has been checked. Those of kvlayers 0.1 have no vectors."""
        return cls(*(tensors.get(name) for name in NAMES))

    def state(self) -> dict[str, Tensor]:
        """The vectors by their names."""
        pairs = zip(NAMES, (self.factor, self.mean), strict=True)
        return {name: vector for name, vector in pairs if vector is not None}

    def mapped(self, change: Callable[[Tensor], Tensor]) -> Self:
        """One with changed vectors."""
        return self.__class__(*(None if vector is None else change(vector) for vector in (self.factor, self.mean)))

    def applied(self, keys: Tensor) -> Tensor:
        """Keys `[batch, kv_heads, tokens, head_dim]` as they are packed, in their dtype. What is not finite stays so."""
        if self.mean is None:
            return keys if self.factor is None else (keys.float() / self.factor.float()).to(keys.dtype)
        exact, most = keys.float(), torch.finfo(keys.dtype).max
        even = exact - self.mean.float()
        if self.factor is not None:
            even = even / self.factor.float()
        # The difference of two finite keys must not become infinite, nor an infinite one finite.
        return (even.clamp(-most, most) + exact * 0).to(keys.dtype)

    def restored(self, keys: Tensor) -> Tensor:
        """Inverse of `applied`."""
        if self.factor is not None:
            keys = keys * self.factor.to(keys.dtype)
        return keys if self.mean is None else keys + self.mean.to(keys.dtype)

    def queries(self, query: Tensor) -> Tensor:
        """Queries `[batch, heads, queries, head_dim]`, for products with keys as they are packed."""
        return query if self.factor is None else query * _by_head(self.factor, query).to(query.dtype)

    def offsets(self, query: Tensor) -> Tensor | None:
        """What products with packed keys lack, float32 `[batch, heads, queries, 1]`; `None` if they lack nothing."""
        if self.mean is None:
            return None
        return (query.float() * _by_head(self.mean, query).float()).sum(-1, keepdim=True)

    def is_same(self, other: "KeySmoothing | None") -> bool:
        """Whether it is the same as another one, of as many sequences."""
        if other is self or other is None:
            return other is self
        mine, others = self.state(), other.state()
        return mine.keys() == others.keys() and all(torch.equal(mine[name], others[name]) for name in mine)


def _by_head(vector: Tensor, query: Tensor) -> Tensor:
    """A vector of each KV head for each query head."""
    return vector.repeat_interleave(query.shape[1] // vector.shape[1], 1)


def _wants_factors(quantizer: Quantizer) -> bool:
    """Whether channels of keys share a scale, at once or by a rotation."""
    return quantizer.smooths_keys and (quantizer.format.rotated or quantizer.format.group_channels > 1)


def _wants_mean(quantizer: Quantizer) -> bool:
    """Whether codes cannot take out a constant, as a zero of each channel does."""
    return quantizer.smooths_keys and (not quantizer.format.has_zero or quantizer.format.group_channels > 1)


def vectors_of(quantizer: Quantizer) -> int:
    """How many vectors the keys of a quantizer are made even by."""
    return _wants_factors(quantizer) + _wants_mean(quantizer)


def _factors(variance: Tensor) -> Tensor:
    """Factors of channels, from their variances `[batch, kv_heads, 1, head_dim]` in any unit.

    The exponents are half those of the variances, because a factor divides a standard deviation.
    """
    median = variance.median(-1, keepdim=True).values
    relative = (variance / median.clamp(min=torch.finfo(torch.float32).tiny)).clamp(1.0, LARGEST_FACTOR**4)
    taken_out = torch.maximum(relative**POWER, relative / LARGEST_VARIANCE)
    factors = torch.where(relative.amax(-1, keepdim=True) > UNEVEN, taken_out, 1.0).sqrt()
    return factors.clamp(max=LARGEST_FACTOR)
