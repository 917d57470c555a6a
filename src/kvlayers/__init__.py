"""A drop-in key-value cache library for Hugging Face transformers.

Importing it changes nothing in transformers; `install()` does, and `uninstall()` takes it back.
"""

import importlib
import importlib.util
import threading
from typing import TYPE_CHECKING, Any

from .supported import check_installed, is_command
from .version import __version__

if TYPE_CHECKING:
    from .cache import Cache
    from .cache_classes import cache_class_names, register_cache_class, unregister_cache_class
    from .calibration import BytesBudget, Calibration, DivergenceBudget, MeasuredSetting, Sensitivity, calibrate
    from .descriptions import DescriptionContext
    from .dynamic_cache import DynamicCache
    from .encoder_decoder import EncoderDecoderCache
    from .errors import (
        BatchIndexError,
        CacheFileError,
        CachePathError,
        CapacityError,
        ConfigError,
        InterruptedPassError,
        KVLayersError,
        LayerIndexError,
        LegacyFormatError,
        ModelMismatchError,
        OptionError,
        PrefixError,
        PromptMismatchError,
        ReadOnlyStatesError,
        RegistryError,
        RollbackError,
        StaleStatesError,
        StateMismatchError,
        UnsupportedLayerError,
    )
    from .explanation import Explanation
    from .export import ExportableDecoder
    from .generation.generating import generate
    from .generation.install import install, installed, is_installed, uninstall
    from .generation.known_ids import PromptMismatchWarning
    from .generation.ladder import DEFAULT_LADDER, Rung
    from .generation.registry import CacheRequest, cache_names, make_cache, register, unregister
    from .generation.reservations import free_reservations
    from .generation.resilient import SteppedDownWarning, resilient_generate
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
        TokenLayer,
        layer_names,
        register_layer,
        unregister_layer,
    )
    from .mamba_cache import HybridMambaAttentionDynamicCache, MambaCache
    from .offload import DiskMemory, HomeMemory, HostMemory, Prefetcher, Traffic, TrafficMeter
    from .offloaded_cache import OffloadedCache, OffloadedStaticCache
    from .operations import CacheState
    from .persistence import CacheFile, inspect_cache, load_cache, save_cache, weights_id
    from .planning import Plan, PlannedCache, plan
    from .prefix import EvictionPolicy, Hit, LeastRecentlyUsed, PrefixStatistics, PrefixStore
    from .pytrees import register_export_support
    from .quantized_cache import HQQQuantizedCache, QuantizedCache, QuantizedCacheConfig, QuantoQuantizedCache
    from .quantizers import quantizer_names, register_quantizer, unregister_quantizer
    from .rotary import Rotary
    from .sink_cache import SinkCache
    from .static_cache import HybridCache, HybridChunkedCache, SlidingWindowCache, StaticCache
    from .stores import (
        Buckets,
        DenseStore,
        FixedStore,
        Quantization,
        QuantizedStore,
        StateForm,
        TokenStore,
        register_store,
        store_names,
        unregister_store,
    )
    from .summary import CacheSummary, LayerSummary

if not is_command():
    # The command checks by itself, and does not wait for transformers before it answers `--help`.
    from . import first_import  # noqa: F401

    check_installed()

_NAMES = {
    "cache": ("Cache",),
    "cache_classes": ("cache_class_names", "register_cache_class", "unregister_cache_class"),
    "calibration": (
        "BytesBudget",
        "Calibration",
        "DivergenceBudget",
        "MeasuredSetting",
        "Sensitivity",
        "calibrate",
    ),
    "descriptions": ("DescriptionContext",),
    "dynamic_cache": ("DynamicCache",),
    "encoder_decoder": ("EncoderDecoderCache",),
    "errors": (
        "BatchIndexError",
        "CacheFileError",
        "CachePathError",
        "CapacityError",
        "ConfigError",
        "InterruptedPassError",
        "KVLayersError",
        "LayerIndexError",
        "LegacyFormatError",
        "ModelMismatchError",
        "OptionError",
        "PrefixError",
        "PromptMismatchError",
        "ReadOnlyStatesError",
        "RegistryError",
        "RollbackError",
        "StaleStatesError",
        "StateMismatchError",
        "UnsupportedLayerError",
    ),
    "explanation": ("Explanation",),
    "export": ("ExportableDecoder",),
    "generation.generating": ("generate",),
    "generation.install": ("install", "installed", "is_installed", "uninstall"),
    "generation.known_ids": ("PromptMismatchWarning",),
    "generation.ladder": ("DEFAULT_LADDER", "Rung"),
    "generation.registry": ("CacheRequest", "cache_names", "make_cache", "register", "unregister"),
    "generation.reservations": ("free_reservations",),
    "generation.resilient": ("SteppedDownWarning", "resilient_generate"),
    "layers": (
        "CacheLayer",
        "Checkpoints",
        "DynamicLayer",
        "HybridLayer",
        "LayerState",
        "LinearAttentionLayer",
        "OffloadedLayer",
        "QuantizedLayer",
        "SinkLayer",
        "SlidingLayer",
        "StaticLayer",
        "StaticSlidingLayer",
        "TokenLayer",
        "layer_names",
        "register_layer",
        "unregister_layer",
    ),
    "mamba_cache": ("HybridMambaAttentionDynamicCache", "MambaCache"),
    "offload": ("DiskMemory", "HomeMemory", "HostMemory", "Prefetcher", "Traffic", "TrafficMeter"),
    "offloaded_cache": ("OffloadedCache", "OffloadedStaticCache"),
    "operations": ("CacheState",),
    "persistence": ("CacheFile", "inspect_cache", "load_cache", "save_cache", "weights_id"),
    "planning": ("Plan", "PlannedCache", "plan"),
    "prefix": ("EvictionPolicy", "Hit", "LeastRecentlyUsed", "PrefixStatistics", "PrefixStore"),
    "pytrees": ("register_export_support",),
    "quantized_cache": ("HQQQuantizedCache", "QuantizedCache", "QuantizedCacheConfig", "QuantoQuantizedCache"),
    "quantizers": ("quantizer_names", "register_quantizer", "unregister_quantizer"),
    "rotary": ("Rotary",),
    "sink_cache": ("SinkCache",),
    "static_cache": ("HybridCache", "HybridChunkedCache", "SlidingWindowCache", "StaticCache"),
    "stores": (
        "Buckets",
        "DenseStore",
        "FixedStore",
        "Quantization",
        "QuantizedStore",
        "StateForm",
        "TokenStore",
        "register_store",
        "store_names",
        "unregister_store",
    ),
    "summary": ("CacheSummary", "LayerSummary"),
}
"""Public names by the module that has them: imported when first asked for, as torch takes seconds to import."""

_HOMES = {name: module for module, names in _NAMES.items() for name in names}

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
    "DescriptionContext",
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
    "InterruptedPassError",
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
    "PromptMismatchError",
    "PromptMismatchWarning",
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
    "StateForm",
    "StaticCache",
    "StaticLayer",
    "StaticSlidingLayer",
    "TokenLayer",
    "TokenStore",
    "Traffic",
    "TrafficMeter",
    "UnsupportedLayerError",
    "__version__",
    "cache_class_names",
    "cache_names",
    "calibrate",
    "free_reservations",
    "generate",
    "inspect_cache",
    "install",
    "installed",
    "is_installed",
    "layer_names",
    "load_cache",
    "make_cache",
    "plan",
    "quantizer_names",
    "register",
    "register_cache_class",
    "register_export_support",
    "register_layer",
    "register_quantizer",
    "register_store",
    "resilient_generate",
    "save_cache",
    "store_names",
    "uninstall",
    "unregister",
    "unregister_cache_class",
    "unregister_layer",
    "unregister_quantizer",
    "unregister_store",
    "weights_id",
]


_importing = threading.RLock()

if not TYPE_CHECKING:
    # Of a module with a `__getattr__`, type checkers believe that it has any name.
    def __getattr__(name: str) -> Any:
        if name in _HOMES:
            # One thread at a time: transformers imports its own modules lazily, and fails where two threads meet in
            # them. No module of this package asks for a public name while it is imported, so nobody waits for ever.
            with _importing:
                value = getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
        elif name.isidentifier() and importlib.util.find_spec(f"{__name__}.{name}"):
            value = importlib.import_module(f".{name}", __name__)
        else:
            raise AttributeError(f"module 'kvlayers' has no attribute '{name}'")
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted(__all__)
