"""A drop-in key-value cache library for Hugging Face transformers.

Importing it changes nothing in transformers; `install()` does, and `uninstall()` takes it back.
"""

import importlib
from typing import TYPE_CHECKING, Any

from .cache import Cache
from .dynamic_cache import DynamicCache
from .encoder_decoder import EncoderDecoderCache
from .errors import (
    BatchIndexError,
    CacheFileError,
    CachePathError,
    CapacityError,
    ConfigError,
    KVLayersError,
    LayerIndexError,
    LegacyFormatError,
    ModelMismatchError,
    OptionError,
    PrefixError,
    ReadOnlyStatesError,
    RegistryError,
    RollbackError,
    StaleStatesError,
    StateMismatchError,
    UnsupportedLayerError,
)
from .export import ExportableDecoder
from .generation.registry import CacheRequest, cache_names, make_cache, register, unregister
from .generation.reservations import free_reservations
from .layers import (
    CacheLayer,
    Checkpoints,
    DynamicLayer,
    HybridLayer,
    LayerState,
    LinearAttentionLayer,
    OffloadedLayer,
    QuantizedLayer,
    SinkLayer,
    SlidingLayer,
    StaticLayer,
    StaticSlidingLayer,
)
from .mamba_cache import HybridMambaAttentionDynamicCache, MambaCache
from .offload import DiskMemory, HomeMemory, HostMemory, Prefetcher, Traffic, TrafficMeter
from .offloaded_cache import OffloadedCache, OffloadedStaticCache
from .operations import CacheState
from .persistence import CacheFile, inspect_cache, load_cache, save_cache, weights_id
from .prefix import EvictionPolicy, Hit, LeastRecentlyUsed, PrefixStatistics, PrefixStore
from .quantized_cache import HQQQuantizedCache, QuantizedCache, QuantizedCacheConfig, QuantoQuantizedCache
from .quantizers import quantizer_names, register_quantizer, unregister_quantizer
from .rotary import Rotary
from .sink_cache import SinkCache
from .static_cache import HybridCache, HybridChunkedCache, SlidingWindowCache, StaticCache
from .stores import Buckets, DenseStore, FixedStore, Quantization, QuantizedStore, TokenStore
from .version import __version__

if TYPE_CHECKING:
    from .calibration import BytesBudget, Calibration, DivergenceBudget, MeasuredSetting, Sensitivity, calibrate
    from .explanation import Explanation
    from .generation.generating import generate
    from .generation.install import install, installed, is_installed, uninstall
    from .generation.ladder import DEFAULT_LADDER, Rung
    from .generation.resilient import SteppedDownWarning, resilient_generate
    from .planning import Plan, PlannedCache, plan
    from .summary import CacheSummary, LayerSummary

_LATE = {
    **dict.fromkeys(
        ("BytesBudget", "Calibration", "DivergenceBudget", "MeasuredSetting", "Sensitivity", "calibrate"), "calibration"
    ),
    "generate": "generation.generating",
    **dict.fromkeys(("install", "installed", "is_installed", "uninstall"), "generation.install"),
    **dict.fromkeys(("DEFAULT_LADDER", "Rung"), "generation.ladder"),
    **dict.fromkeys(("SteppedDownWarning", "resilient_generate"), "generation.resilient"),
    **dict.fromkeys(("Plan", "PlannedCache", "plan"), "planning"),
    "Explanation": "explanation",
    **dict.fromkeys(("CacheSummary", "LayerSummary"), "summary"),
}
"""What is imported when it is first asked for, and from which module."""

__all__ = [
    "DEFAULT_LADDER",
    "BatchIndexError",
    "Buckets",
    "BytesBudget",
    "Cache",
    "CacheFile",
    "CacheFileError",
    "CacheLayer",
    "CachePathError",
    "CacheRequest",
    "CacheSummary",
    "CacheState",
    "Calibration",
    "CapacityError",
    "Checkpoints",
    "ConfigError",
    "DenseStore",
    "DiskMemory",
    "DivergenceBudget",
    "DynamicCache",
    "DynamicLayer",
    "EncoderDecoderCache",
    "EvictionPolicy",
    "Explanation",
    "ExportableDecoder",
    "FixedStore",
    "HQQQuantizedCache",
    "Hit",
    "HomeMemory",
    "HostMemory",
    "HybridCache",
    "HybridChunkedCache",
    "HybridLayer",
    "HybridMambaAttentionDynamicCache",
    "KVLayersError",
    "LayerIndexError",
    "LayerState",
    "LayerSummary",
    "LeastRecentlyUsed",
    "LegacyFormatError",
    "LinearAttentionLayer",
    "MambaCache",
    "MeasuredSetting",
    "ModelMismatchError",
    "OffloadedCache",
    "OffloadedLayer",
    "OffloadedStaticCache",
    "OptionError",
    "Plan",
    "PlannedCache",
    "PrefixError",
    "PrefixStatistics",
    "PrefixStore",
    "Prefetcher",
    "Quantization",
    "QuantizedCache",
    "QuantizedCacheConfig",
    "QuantizedLayer",
    "QuantizedStore",
    "QuantoQuantizedCache",
    "ReadOnlyStatesError",
    "RegistryError",
    "RollbackError",
    "Rotary",
    "Rung",
    "Sensitivity",
    "SinkCache",
    "SinkLayer",
    "SlidingLayer",
    "SlidingWindowCache",
    "StaleStatesError",
    "StateMismatchError",
    "SteppedDownWarning",
    "StaticCache",
    "StaticLayer",
    "StaticSlidingLayer",
    "TokenStore",
    "Traffic",
    "TrafficMeter",
    "UnsupportedLayerError",
    "__version__",
    "cache_names",
    "calibrate",
    "free_reservations",
    "generate",
    "inspect_cache",
    "install",
    "installed",
    "is_installed",
    "load_cache",
    "make_cache",
    "plan",
    "quantizer_names",
    "register",
    "register_quantizer",
    "resilient_generate",
    "save_cache",
    "uninstall",
    "unregister",
    "unregister_quantizer",
    "weights_id",
]


def __getattr__(name: str) -> Any:
    # generate() takes longer to import than all of kvlayers, and a decode loop of one's own does without it.
    if name in _LATE:
        return getattr(importlib.import_module(f".{_LATE[name]}", __name__), name)
    raise AttributeError(f"module 'kvlayers' has no attribute '{name}'")
