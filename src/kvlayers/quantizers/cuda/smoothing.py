"""The vectors of `KeySmoothing`, found in one launch."""

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from kvlayers.quantizers import smoothing
from kvlayers.quantizers.contract import Quantizer
from kvlayers.quantizers.cuda.launch import DTYPES
from kvlayers.quantizers.smoothing import KeySmoothing
from kvlayers.utils import triton_support
from kvlayers.utils.triton_support import DeviceFacts, TritonKernel

FIND = TritonKernel("kvlayers.quantizers.cuda.triton_smoothing", "find_vectors")

# Fused multiply-add is not the default of every version of triton.
OPTIONS = {"num_warps": 8, "num_stages": 1, "enable_fp_fusion": True}

LARGEST_TILE = 64 * 256
"""Keys that one program holds at most."""


@dataclass(frozen=True)
class _Constants:
    """Compile-time constants of `find_vectors`; see `smoothing`."""

    BLOCK_TOKENS: int
    HEAD_DIM: int
    TOKENS: int
    CHANNELS: int
    FACTORS: bool
    MEANS: bool
    UNEVEN: float
    LARGE_MEAN: float
    SMALLEST: float = torch.finfo(torch.float32).tiny
    MOST: float = smoothing.LARGEST_FACTOR**4
    POWER: float = smoothing.POWER
    LARGEST_VARIANCE: float = smoothing.LARGEST_VARIANCE
    LARGEST_FACTOR: float = smoothing.LARGEST_FACTOR


def smoothing_for(keys: Tensor, quantizer: Quantizer) -> KeySmoothing:
    """As `KeySmoothing.for_keys`, which serves where the kernel does not run."""
    factors, means = smoothing.vectors_for(quantizer)
    batch, kv_heads, tokens, head_dim = keys.shape
    wanted = (factors or means) and keys.numel()
    constants = _constants(tokens, head_dim, factors, means, *smoothing.thresholds(quantizer))
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
    padded_tokens, channels = (1 << (number - 1).bit_length() for number in (tokens, head_dim))
    return _Constants(tokens, head_dim, padded_tokens, channels, factors, means, uneven, large_mean)


@functools.lru_cache(maxsize=64)
def _obstacle(device: torch.device, dtype: torch.dtype, constants: _Constants, facts: DeviceFacts) -> str | None:
    if facts.obstacle is not None:
        return facts.obstacle
    if dtype not in DTYPES or constants.TOKENS * constants.CHANNELS > LARGEST_TILE:
        return f"the kernel does not take {constants.BLOCK_TOKENS} tokens of {constants.HEAD_DIM} channels of {dtype}"
    # Dtypes stand for tensors, and 16 for strides: the kernel is compiled, not launched.
    return FIND.obstacle(device, (1,), (dtype, dtype, dtype, 16, 16, 16, 1), {"C": constants, **OPTIONS})
