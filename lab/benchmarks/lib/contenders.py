"""The caches that are compared, how each is made, and how its bytes are counted."""

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

import kvlayers
from lib.internals import cache_nbytes, marked_for_sdpa

Maker = Callable[..., Any]
"""Makes an empty cache from a model config and the final number of tokens, which only static caches need."""

REFERENCE = "transformers.DynamicCache"
KVLAYERS = "kvlayers.DynamicCache"
FLOOR = "preallocated to length"
KVLAYERS_STATIC = "kvlayers.StaticCache"
TRANSFORMERS_STATIC = "transformers.StaticCache"
"""transformers' preallocated cache. If no reservation is named, it reserves the exact final length."""


def compiled(name: str) -> str:
    return f"{name}, compiled"


def roundings(name: str) -> int:
    """How many roundings of the model's dtype a logit may differ from the reference; 0 if every sum is the same.

    transformers' StaticCache makes attention add the same numbers in another order, through its mask, and so do all
    caches that mark keys for attention: see `kvlayers.kernels.attention.gqa`. Compiled code rounds after several
    operations instead of after each one: with 8 layers in bfloat16, some logits then differ by four roundings.
    """
    if name.endswith(", compiled"):
        return 4
    return int(name != REFERENCE)


class PreallocatedLayer(CacheLayerMixin):  # type: ignore[misc]
    """The least that a layer can do: memory of the exact final length, a write in place, a view.

    It checks nothing, never grows and cannot roll back, so that caches which do can be compared with it. Its keys are
    read by the same attention as the keys in kvlayers' caches, so that only the caches differ.
    """

    is_sliding = False

    def __init__(self, length: int) -> None:
        super().__init__()
        self.length, self.seen = length, 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        batch, kv_heads, _, head_dim = key_states.shape
        self.keys = key_states.new_empty((batch, kv_heads, self.length, head_dim))
        self.values = value_states.new_empty((batch, kv_heads, self.length, value_states.shape[3]))
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write states `[batch, kv_heads, new, head_dim]`; return views of all tokens."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start, end = self.seen, self.seen + key_states.shape[2]
        self.keys[:, :, start:end].copy_(key_states)
        self.values[:, :, start:end].copy_(value_states)
        self.seen = end
        keys, values = self.keys[:, :, :end], self.values[:, :, :end]
        return marked_for_sdpa(keys, values, 1) if key_states.shape[2] == 1 else (keys, values)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and first position of the keys that the next update returns."""
        return self.seen + query_length, 0

    def get_seq_length(self) -> int:
        return self.seen

    def get_max_length(self) -> int:
        return self.length


def preallocated(config: Any, length: int) -> transformers.Cache:
    layers = [PreallocatedLayer(length) for _ in range(config.get_text_config().num_hidden_layers)]
    return transformers.Cache(layers=layers)


def packed(backend: str = "native", **options: Any) -> Maker:
    """Makes kvlayers' quantized caches."""
    return lambda config, length=0: kvlayers.QuantizedCache(backend, config=config, **options)


def quanto(nbits: int, **options: int) -> Maker:
    """Makes transformers' quantized caches, with the axes that transformers' documentation recommends."""
    options |= {"nbits": nbits, "axis_key": 0, "axis_value": 0}
    return lambda config, length=0: transformers.QuantizedCache("quanto", config, **options)


CONTENDERS: dict[str, Maker] = {
    REFERENCE: lambda config, length=0: transformers.DynamicCache(config=config),
    KVLAYERS: lambda config, length=0: kvlayers.DynamicCache(config=config),
    KVLAYERS_STATIC: lambda config, length: kvlayers.StaticCache(config, max_cache_len=length),
    TRANSFORMERS_STATIC: lambda config, length: transformers.StaticCache(config, max_cache_len=length),
    FLOOR: preallocated,
}
"""The reference comes first: tokens and ratios are compared with it."""

KVLAYERS_4_BITS, QUANTO_4_BITS = "kvlayers 4 bits", "transformers quanto, 4 bits"

QUANTIZED: dict[str, Maker] = {
    REFERENCE: CONTENDERS[REFERENCE],
    KVLAYERS: CONTENDERS[KVLAYERS],
    **{f"kvlayers {nbits} bits": packed(nbits=nbits) for nbits in (4, 2, 8)},
    "kvlayers fp8": packed("fp8"),
    QUANTO_4_BITS: quanto(4),
}
"""Quantized caches, and two caches in full precision."""


def fill(cache: Any, states: list[tuple[Tensor, Tensor]], chunk: int) -> None:
    """Append states to a cache as a prefill in chunks would, without a model.

    Args:
        cache: an empty cache.
        states: keys and values `[batch, kv_heads, tokens, head_dim]` for each layer.
        chunk: tokens in a chunk.
    """
    tokens = states[0][0].shape[2]
    for start in range(0, tokens, chunk):
        for layer_idx, (keys, values) in enumerate(states):
            cache.update(keys[:, :, start : start + chunk], values[:, :, start : start + chunk], layer_idx)


def heads_of(config: Any) -> tuple[tuple[int, int], int]:
    """KV heads and head_dim, and the query heads of each KV head."""
    of_text = config.get_text_config()
    heads = of_text.num_attention_heads
    kv_heads = getattr(of_text, "num_key_value_heads", None) or heads
    return (kv_heads, getattr(of_text, "head_dim", None) or of_text.hidden_size // heads), heads // kv_heads


def measure_bytes(make: Maker, config: Any, context: int, scored: int, chunk: int) -> dict[str, float]:
    """Bytes per token of a cache that is filled in chunks with states in bfloat16, as caches hold them in use.

    The bytes depend on the number of states, not on their values: a residual in full precision fills and empties. So
    they are counted after every chunk of the scored part.

    Returns:
        `bytes` is the mean over these chunks, and `last_bytes` are those at the end.
    """
    (kv_heads, head_dim), _ = heads_of(config)
    generator = torch.Generator().manual_seed(0)
    keys, values = torch.randn(2, 1, kv_heads, context + scored, head_dim, generator=generator).bfloat16().unbind(0)
    cache = make(config)
    seen = []
    with torch.no_grad():
        for start in range(0, context + scored, chunk):
            new = keys[:, :, start : start + chunk], values[:, :, start : start + chunk]
            fill(cache, [new] * config.get_text_config().num_hidden_layers, chunk)
            if start >= context:
                seen.append(cache_nbytes(cache) / (start + chunk))
    return {"bytes": sum(seen) / len(seen), "last_bytes": seen[-1]}
