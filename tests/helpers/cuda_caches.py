"""Every kind of cache, with a model that it suits: for the tests on a CUDA device."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import kvlayers
from models import fresh_model

EXACT, ROUNDED = 1e-4, 0.05
"""How far logits in float32 may be from the CPU's, relative to their norm: products add in another order. Where states
are rounded to few bits, a sum that differs in its last bit may choose the neighbouring code."""

EAGER_EXPERTS = {"_experts_implementation": "eager"}
"""A GPU multiplies with all experts at once by default, in a lower precision than the CPU."""

PACKED: dict[str, Any] = {"residual_length": 16, "sink_tokens": 4}


@dataclass(frozen=True)
class Kind:
    """A kind of cache.

    Attributes:
        family: family of the model.
        make: makes an empty cache for a config.
        tolerance: how far its logits may be from the CPU's, relative to their norm.
        changes: fields of the model's config.
        one_by_one: whether the model takes tokens one by one after the first ones.
    """

    family: str
    make: Callable[[Any], kvlayers.Cache]
    tolerance: float = EXACT
    changes: dict[str, Any] = field(default_factory=dict)
    one_by_one: bool = False

    def model(self) -> Any:
        """A random model, on the CPU in float32."""
        return fresh_model(self.family, **self.changes)


def _quantized(backend: str = "native", family: str = "llama", **options: Any) -> Kind:
    def make(config: Any) -> kvlayers.Cache:
        return kvlayers.QuantizedCache(backend, config, **PACKED, **options)

    return Kind(family, make, ROUNDED, {"head_dim": 64})


KINDS: dict[str, Kind] = {
    "dynamic": Kind("llama", lambda config: kvlayers.DynamicCache(config=config)),
    "dynamic, head_dims that differ": Kind(
        "deepseek_v3", lambda config: kvlayers.DynamicCache(config=config), changes=EAGER_EXPERTS
    ),
    "windows": Kind("mistral", lambda config: kvlayers.DynamicCache(config=config)),
    "windows and full attention": Kind("gemma3", lambda config: kvlayers.DynamicCache(config=config)),
    "chunks": Kind("llama4", lambda config: kvlayers.DynamicCache(config=config)),
    "static": Kind("llama", lambda config: kvlayers.StaticCache(config, max_cache_len=300)),
    "static that grows": Kind("llama", lambda config: kvlayers.StaticCache(config, max_cache_len=8, grow=True)),
    "static windows": Kind("gemma3", lambda config: kvlayers.StaticCache(config, max_cache_len=300)),
    "sinks": Kind("llama", lambda config: kvlayers.SinkCache(40, 4, config)),
    "int4": _quantized(nbits=4),
    "int8": _quantized(nbits=8),
    "int2": _quantized(nbits=2),
    "int3": _quantized(nbits=3),
    "fp8": _quantized("fp8"),
    "int4 windows": _quantized(family="gemma3", nbits=4, quantize_sliding=True),
    "offloaded": Kind("llama", lambda config: kvlayers.DynamicCache(config=config, offloading=True)),
    "offloaded windows": Kind("gemma3", lambda config: kvlayers.DynamicCache(config=config, offloading=True)),
    "offloaded static": Kind("llama", lambda config: kvlayers.StaticCache(config, max_cache_len=300, offloading=True)),
    "offloaded int4": _quantized(nbits=4, offloading=True),
    "recurrent": Kind("mamba", lambda config: kvlayers.DynamicCache(config=config), one_by_one=True),
    "recurrent and attention": Kind(
        "jamba", lambda config: kvlayers.DynamicCache(config=config), changes=EAGER_EXPERTS, one_by_one=True
    ),
}


def on_device(model: Any, device: Any) -> Any:
    """A copy of a model on a device."""
    return copy.deepcopy(model).to(device)
