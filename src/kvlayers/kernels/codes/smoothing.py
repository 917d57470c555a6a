"""Keys are smoothed before they are packed, by two vectors for each KV head that change no attention.

Some models have channels of keys that are much larger than the others. A constant in a channel takes most codes of its
group. A rotation spreads a channel that varies over all others. Two vectors mend that:

- A mean is subtracted from all packed keys of a head. It lowers all their scores by the product of the query and the
  mean, which is added again, as in SageAttention (Zhang et al. 2024, https://arxiv.org/abs/2410.02367).
- Each channel is divided by a factor. The query is multiplied by it, as in QServe's SmoothAttention (Lin et al. 2024,
  https://arxiv.org/abs/2405.04532).

Both are found in the first block that is packed, and hold for all packed tokens of a sequence.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import Self

from kvlayers.kernels.codes.quantizer_contract import Quantizer
from kvlayers.utils import triton_support
from kvlayers.utils.triton_support import DTYPES, DeviceFacts, TritonKernel, power_of_two

UNEVEN = 24.0
"""How many times the median variance of a head's channels the largest must be before its channels get factors.

Below that, large channels often meet large queries, so that a factor costs more than it gains. Measured on SmolLM2 and
Gemma 3, as the two numbers below.
"""

UNEVEN_ROTATED = 96.0
"""Likewise, for codes without a zero of channels that were rotated: the rotation spreads smaller ones well enough."""

LARGE_MEAN = 3.0
"""How many times the variance of such keys the square of their mean must be before the mean is subtracted.

Below that, predictions were further from those of the exact cache with a mean than without one. Measured with
turboquant on SmolLM2.
"""

POWER = 0.75
"""Power of the relative variance of a channel that its factor takes out."""

LARGEST_VARIANCE = 2.0
"""Times the median that the variance of a channel may be after it was divided by its factor."""

LARGEST_FACTOR = 512.0
"""The largest factor of a channel: queries below 128 times it stay within float16."""

NAMES = ("smoothing_factor", "smoothing_mean")
"""Names of the vectors in the state of a store."""


@dataclass(frozen=True, eq=False)
class KeySmoothing:
    """How the packed keys of each sequence and KV head were smoothed: `packed = (key - mean) / factor`.

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
        factors, means = vectors_for(quantizer)
        if not keys.numel() or not (factors or means):
            return cls()
        if keys.is_meta:
            # A plan asks for bytes alone.
            shape = (*keys.shape[:2], 1, keys.shape[3])
            return cls(*(keys.new_empty(shape) if wanted else None for wanted in (factors, means)))
        finite = keys.isfinite().all(-1, keepdim=True)
        exact = torch.where(finite, keys.float(), 0.0)
        # Squares of the largest keys would overflow.
        largest = exact.abs().amax((-2, -1), keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
        exact, tokens = exact / largest, finite.sum(-2, keepdim=True).clamp(min=1)
        mean = exact.sum(-2, keepdim=True) / tokens
        variance = torch.where(finite, (exact - mean).square(), 0.0).sum(-2, keepdim=True) / tokens
        uneven, large_mean = thresholds(quantizer)
        is_large = mean.square().sum(-1, keepdim=True) >= large_mean * variance.sum(-1, keepdim=True)
        return cls(
            _factors(variance, uneven).to(keys.dtype) if factors else None,
            torch.where(is_large, mean * largest, 0.0).to(keys.dtype) if means else None,
        )

    @classmethod
    def of_state(cls, tensors: dict[str, Tensor]) -> Self:
        """The one in the state of a store, which has been checked. Older states have no vectors."""
        return cls(*(tensors.get(name) for name in NAMES))

    def state(self) -> dict[str, Tensor]:
        """The vectors by their names."""
        pairs = zip(NAMES, (self.factor, self.mean), strict=True)
        return {name: vector for name, vector in pairs if vector is not None}

    def mapped(self, change: Callable[[Tensor], Tensor]) -> Self:
        """One with changed vectors."""
        return self.__class__(*(None if vector is None else change(vector) for vector in (self.factor, self.mean)))

    def applied(self, keys: Tensor) -> Tensor:
        """Keys `[batch, kv_heads, tokens, head_dim]` as they are packed, in their dtype.

        A number that is not finite stays so.
        """
        if self.mean is None:
            return keys if self.factor is None else (keys.float() / self.factor.float()).to(keys.dtype)
        exact, most = keys.float(), torch.finfo(keys.dtype).max
        smooth = exact - self.mean.float()
        if self.factor is not None:
            smooth = smooth / self.factor.float()
        # The difference of two finite keys must not become infinite, nor an infinite one finite.
        return (smooth.clamp(-most, most) + exact * 0).to(keys.dtype)

    def restored(self, keys: Tensor) -> Tensor:
        """Inverse of `applied`."""
        if self.factor is not None:
            keys = keys * self.factor.to(keys.dtype)
        return keys if self.mean is None else keys + self.mean.to(keys.dtype)

    def queries(self, query: Tensor) -> Tensor:
        """Queries `[batch, heads, queries, head_dim]`, for products with keys as they are packed."""
        if self.factor is None:
            return query
        return (_by_kv_head(query, self.factor) * self.factor.unsqueeze(2).to(query.dtype)).flatten(1, 2)

    def offsets(self, query: Tensor) -> Tensor | None:
        """What is added to products with packed keys for their mean, float32 `[batch, heads, queries, 1]`.

        `None` without a mean.
        """
        if self.mean is None:
            return None
        products = _by_kv_head(query, self.mean).float() * self.mean.unsqueeze(2).float()
        return products.sum(-1, keepdim=True).flatten(1, 2)

    def is_same(self, other: "KeySmoothing | None") -> bool:
        """Whether it is the same as another one, of as many sequences."""
        mine, others = self.state(), {} if other is None else other.state()
        return mine.keys() == others.keys() and all(torch.equal(mine[name], others[name]) for name in mine)


def _by_kv_head(query: Tensor, vectors: Tensor) -> Tensor:
    """Queries `[batch, kv_heads, heads of a group, queries, head_dim]`."""
    grouped: Tensor = torch.unflatten(query, 1, (vectors.shape[1], -1))
    return grouped


def vectors_for(quantizer: Quantizer) -> tuple[bool, bool]:
    """Whether the keys of a quantizer are smoothed by factors, and by a mean.

    Factors are for channels that share a scale, at once or by a rotation. A mean is for codes that cannot take out a
    constant, as a zero of each channel does.
    """
    code_format = quantizer.format
    shares_scales = code_format.group_channels > 1
    return (
        quantizer.smooths_keys and (code_format.rotated or shares_scales),
        quantizer.smooths_keys and (shares_scales or not code_format.has_zero),
    )


def thresholds(quantizer: Quantizer) -> tuple[float, float]:
    """How uneven the channels of a head are that get factors, and how large a mean is that is subtracted."""
    if quantizer.format.rotated and not quantizer.format.has_zero:
        return UNEVEN_ROTATED, LARGE_MEAN
    return UNEVEN, 0.0


def _factors(variance: Tensor, uneven: float) -> Tensor:
    """Factors of channels, from their variances `[batch, kv_heads, 1, head_dim]` in any unit.

    The exponents are half those of the variances, because a factor divides a standard deviation.
    """
    median = variance.median(-1, keepdim=True).values
    relative = (variance / median.clamp(min=torch.finfo(torch.float32).tiny)).clamp(1.0, LARGEST_FACTOR**4)
    taken_out = torch.maximum(relative**POWER, relative / LARGEST_VARIANCE)
    factors = torch.where(relative.amax(-1, keepdim=True) > uneven, taken_out, 1.0).sqrt()
    return factors.clamp(max=LARGEST_FACTOR)


FIND = TritonKernel("kvlayers.kernels.codes.triton_blocks", "find_vectors")

# Fused multiply-add is not the default of every version of triton.
OPTIONS = {"num_warps": 8, "num_stages": 1, "enable_fp_fusion": True}

LARGEST_TILE = 64 * 256
"""Keys that one program holds at most."""


@dataclass(frozen=True)
class _Constants:
    """Compile-time constants of `find_vectors`."""

    BLOCK_TOKENS: int
    HEAD_DIM: int
    TOKENS: int
    CHANNELS: int
    FACTORS: bool
    MEANS: bool
    UNEVEN: float
    LARGE_MEAN: float
    SMALLEST: float
    MOST: float
    POWER: float
    LARGEST_VARIANCE: float
    LARGEST_FACTOR: float


def smoothing_for(keys: Tensor, quantizer: Quantizer) -> KeySmoothing:
    """As `KeySmoothing.for_keys`, which serves where the kernel does not run, in one launch."""
    factors, means = vectors_for(quantizer)
    batch, kv_heads, tokens, head_dim = keys.shape
    wanted = (factors or means) and keys.numel()
    constants = _constants(tokens, head_dim, factors, means, *thresholds(quantizer))
    facts = triton_support.device_facts(keys.device)
    if not wanted or _obstacle(keys.device, keys.dtype, constants, facts) is not None:
        return KeySmoothing.for_keys(keys, quantizer)
    shape = batch, kv_heads, 1, head_dim
    factor, mean = (keys.new_empty(shape) if is_wanted else None for is_wanted in (factors, means))
    # Any pointer stands for what is not written.
    arguments = (keys, *(keys if vectors is None else vectors for vectors in (factor, mean)), *keys.stride())
    FIND.launch(keys.device, (kv_heads, batch), arguments, {"C": constants, **OPTIONS})
    return KeySmoothing(factor, mean)


@functools.lru_cache(maxsize=64)
def _constants(tokens: int, head_dim: int, factors: bool, means: bool, uneven: float, large_mean: float) -> _Constants:
    padded_tokens, channels = power_of_two(tokens), power_of_two(head_dim)
    found_by = torch.finfo(torch.float32).tiny, LARGEST_FACTOR**4, POWER, LARGEST_VARIANCE, LARGEST_FACTOR
    return _Constants(tokens, head_dim, padded_tokens, channels, factors, means, uneven, large_mean, *found_by)


@functools.lru_cache(maxsize=64)
def _obstacle(device: torch.device, dtype: torch.dtype, constants: _Constants, facts: DeviceFacts) -> str | None:
    if facts.obstacle is not None:
        return facts.obstacle
    if dtype not in DTYPES or constants.TOKENS * constants.CHANNELS > LARGEST_TILE:
        return f"the kernel does not take {constants.BLOCK_TOKENS} tokens of {constants.HEAD_DIM} channels of {dtype}"
    # Dtypes stand for tensors, and 16 for strides: the kernel is compiled, not launched.
    return FIND.obstacle(device, (1,), (dtype, dtype, dtype, 16, 16, 16, 1), {"C": constants, **OPTIONS})
