"""Key-value caches for Hugging Face transformers: faster, smaller, shared, under the same names.

Pass a cache to `generate()`, or to a model in a decode loop of your own::

    cache = kvlayers.QuantizedCache(config=model.config, nbits=4)
    model.generate(**inputs, cache=cache)

Or ask for one by name, and let kvlayers make it::

    with kvlayers.installed():
        model.generate(**inputs, cache_implementation="int4")

Where to look:

* caches: `DynamicCache`, `StaticCache`, `QuantizedCache`, `OffloadedCache`, `SinkCache`, `EvictingCache`,
  `EncoderDecoderCache`. Each can be cropped, forked, saved, reordered and offloaded; see `help(kvlayers.DynamicCache)`.
* names for `cache_implementation`: `cache_names()`, `make_cache()`, `register()`.
* chats and common beginnings: `Chat`, `PrefixStore`, `generate()`.
* files: `save_cache()`, `load_cache()`, `inspect_cache()`.
* what a cache costs, and which one fits: `plan()`, `calibrate()`; on the command line also `kvlayers fidelity`.
* too little memory: `resilient_generate()`.
* new kinds of caches: `CacheLayer`, `TokenStore`, `EvictionRule`, `register_layer()`.
* errors: all are `KVLayersError`.

Importing kvlayers changes nothing in transformers. `install()` does, and `uninstall()` takes it back.
"""

import importlib
import importlib.util
import threading
from typing import TYPE_CHECKING, Any

from kvlayers.upstream.supported import check_installed, is_command
from kvlayers.utils import late
from kvlayers.version import __version__

if TYPE_CHECKING:
    from kvlayers.caches.aliases import (
        HQQQuantizedCache,
        HybridCache,
        HybridChunkedCache,
        HybridMambaAttentionDynamicCache,
        MambaCache,
        OffloadedCache,
        OffloadedStaticCache,
        QuantoQuantizedCache,
        SlidingWindowCache,
    )
    from kvlayers.caches.base import Cache
    from kvlayers.caches.dynamic import DynamicCache
    from kvlayers.caches.encoder_decoder import EncoderDecoderCache
    from kvlayers.caches.evicting import EvictingCache
    from kvlayers.caches.export import ExportableDecoder
    from kvlayers.caches.operations import CacheState
    from kvlayers.caches.pytrees import register_export_support
    from kvlayers.caches.quantized import QuantizedCache, QuantizedCacheConfig
    from kvlayers.caches.registry import cache_class_names, register_cache_class, unregister_cache_class
    from kvlayers.caches.sink import SinkCache
    from kvlayers.caches.static import StaticCache
    from kvlayers.caches.summary import CacheSummary, Explanation, LayerSummary
    from kvlayers.errors import (
        BatchIndexError,
        CacheFileError,
        CachePathError,
        CapacityError,
        ConfigError,
        InterruptedPassError,
        KernelError,
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
        UnusedCacheError,
    )
    from kvlayers.evaluation.requests import ContinuationScore
    from kvlayers.evaluation.score import score
    from kvlayers.eviction import (
        EvictionRule,
        eviction_rule_names,
        register_eviction_rule,
        unregister_eviction_rule,
    )
    from kvlayers.generation.chat import Chat
    from kvlayers.generation.generate import generate
    from kvlayers.generation.install import install, installed, is_installed, uninstall
    from kvlayers.generation.known_ids import PromptMismatchWarning
    from kvlayers.generation.oom.ladder import DEFAULT_LADDER, Rung
    from kvlayers.generation.oom.resilient import SteppedDownWarning, resilient_generate
    from kvlayers.generation.registry import CacheRequest, cache_names, make_cache, register, unregister
    from kvlayers.generation.static_pool import free_reservations
    from kvlayers.layers import (
        CacheLayer,
        Checkpoints,
        DynamicLayer,
        EvictingLayer,
        HybridLayer,
        LayerOperations,
        LayerState,
        LinearAttentionLayer,
        OffloadedLayer,
        QuantizedLayer,
        Recall,
        RecallLayer,
        SinkLayer,
        SlidingLayer,
        StaticLayer,
        StaticSlidingLayer,
        TokenLayer,
        layer_names,
        register_layer,
        unregister_layer,
    )
    from kvlayers.offload import DiskMemory, HomeMemory, HostMemory, Prefetcher, Traffic, TrafficMeter
    from kvlayers.persistence import CacheFile, inspect_cache, load_cache, save_cache, weights_id
    from kvlayers.planning import Plan, PlannedCache, plan
    from kvlayers.prefix import (
        EvictionPolicy,
        Hit,
        LeastRecentlyUsed,
        PrefixNode,
        PrefixStatistics,
        PrefixStore,
        PrefixTree,
    )
    from kvlayers.quantizers import quantizer_names, register_quantizer, unregister_quantizer
    from kvlayers.rope.rotary import Rotary
    from kvlayers.stores import (
        Buckets,
        DenseStore,
        DescriptionContext,
        Quantization,
        QuantizedStore,
        StateForm,
        StaticStore,
        TokenStore,
        register_store,
        store_names,
        unregister_store,
    )
    from kvlayers.tools.calibration import (
        BytesBudget,
        Calibration,
        DivergenceBudget,
        MeasuredSetting,
        Sensitivity,
        calibrate,
    )
    from kvlayers.tools.kernels import compile_kernels

late.provide("DynamicCache", "kvlayers.caches.dynamic:DynamicCache")
late.provide("save_cache", "kvlayers.persistence.save:save_cache")
late.provide("chosen_cache", "kvlayers.planning.auto:chosen_cache")

if not is_command():
    # The command checks by itself, and does not wait for transformers before it answers `--help`.
    from kvlayers.upstream import first_import  # noqa: F401

    check_installed()

_NAMES = {
    "caches.aliases": (
        "HQQQuantizedCache",
        "HybridCache",
        "HybridChunkedCache",
        "HybridMambaAttentionDynamicCache",
        "MambaCache",
        "OffloadedCache",
        "OffloadedStaticCache",
        "QuantoQuantizedCache",
        "SlidingWindowCache",
    ),
    "caches.base": ("Cache",),
    "tools.calibration": (
        "BytesBudget",
        "Calibration",
        "DivergenceBudget",
        "MeasuredSetting",
        "Sensitivity",
        "calibrate",
    ),
    "tools.kernels": ("compile_kernels",),
    "caches.dynamic": ("DynamicCache",),
    "caches.registry": ("cache_class_names", "register_cache_class", "unregister_cache_class"),
    "caches.encoder_decoder": ("EncoderDecoderCache",),
    "errors": (
        "BatchIndexError",
        "CacheFileError",
        "CachePathError",
        "CapacityError",
        "ConfigError",
        "InterruptedPassError",
        "KVLayersError",
        "KernelError",
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
        "UnusedCacheError",
    ),
    "evaluation.requests": ("ContinuationScore",),
    "evaluation.score": ("score",),
    "eviction": ("EvictionRule", "eviction_rule_names", "register_eviction_rule", "unregister_eviction_rule"),
    "caches.export": ("ExportableDecoder",),
    "generation.chat": ("Chat",),
    "generation.generate": ("generate",),
    "generation.install": ("install", "installed", "is_installed", "uninstall"),
    "generation.known_ids": ("PromptMismatchWarning",),
    "generation.oom.ladder": ("DEFAULT_LADDER", "Rung"),
    "generation.registry": ("CacheRequest", "cache_names", "make_cache", "register", "unregister"),
    "generation.static_pool": ("free_reservations",),
    "generation.oom.resilient": ("SteppedDownWarning", "resilient_generate"),
    "layers": (
        "CacheLayer",
        "Checkpoints",
        "DynamicLayer",
        "EvictingLayer",
        "HybridLayer",
        "LayerOperations",
        "LayerState",
        "LinearAttentionLayer",
        "OffloadedLayer",
        "QuantizedLayer",
        "Recall",
        "RecallLayer",
        "SinkLayer",
        "SlidingLayer",
        "StaticLayer",
        "StaticSlidingLayer",
        "TokenLayer",
        "layer_names",
        "register_layer",
        "unregister_layer",
    ),
    "offload": ("DiskMemory", "HomeMemory", "HostMemory", "Prefetcher", "Traffic", "TrafficMeter"),
    "caches.operations": ("CacheState",),
    "persistence": ("CacheFile", "inspect_cache", "load_cache", "save_cache", "weights_id"),
    "planning": ("Plan", "PlannedCache", "plan"),
    "prefix": (
        "EvictionPolicy",
        "Hit",
        "LeastRecentlyUsed",
        "PrefixNode",
        "PrefixStatistics",
        "PrefixStore",
        "PrefixTree",
    ),
    "caches.pytrees": ("register_export_support",),
    "caches.quantized": ("QuantizedCache", "QuantizedCacheConfig"),
    "quantizers": ("quantizer_names", "register_quantizer", "unregister_quantizer"),
    "rope.rotary": ("Rotary",),
    "caches.evicting": ("EvictingCache",),
    "caches.sink": ("SinkCache",),
    "caches.static": ("StaticCache",),
    "stores": (
        "Buckets",
        "DenseStore",
        "DescriptionContext",
        "Quantization",
        "QuantizedStore",
        "StateForm",
        "StaticStore",
        "TokenStore",
        "register_store",
        "store_names",
        "unregister_store",
    ),
    "caches.summary": ("CacheSummary", "Explanation", "LayerSummary"),
}
"""Public names by the module that has them: imported when first asked for, as torch takes seconds to import."""

_HOMES = {name: module for module, names in _NAMES.items() for name in names}

_FORMER_NAMES = {"FixedStore": "StaticStore"}
"""Names of earlier versions, which keep working."""

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
    "Chat",
    "Checkpoints",
    "ConfigError",
    "ContinuationScore",
    "DenseStore",
    "DescriptionContext",
    "DiskMemory",
    "DivergenceBudget",
    "DynamicCache",
    "DynamicLayer",
    "EncoderDecoderCache",
    "EvictingCache",
    "EvictingLayer",
    "EvictionPolicy",
    "EvictionRule",
    "Explanation",
    "ExportableDecoder",
    "StaticStore",
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
    "KernelError",
    "LayerIndexError",
    "LayerOperations",
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
    "PrefixNode",
    "PrefixStatistics",
    "PrefixStore",
    "PrefixTree",
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
    "Recall",
    "RecallLayer",
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
    "UnusedCacheError",
    "__version__",
    "cache_class_names",
    "cache_names",
    "calibrate",
    "compile_kernels",
    "eviction_rule_names",
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
    "register_eviction_rule",
    "register_export_support",
    "register_layer",
    "register_quantizer",
    "register_store",
    "resilient_generate",
    "save_cache",
    "score",
    "store_names",
    "uninstall",
    "unregister",
    "unregister_cache_class",
    "unregister_eviction_rule",
    "unregister_layer",
    "unregister_quantizer",
    "unregister_store",
    "weights_id",
]


_importing = threading.RLock()

if not TYPE_CHECKING:
    # Of a module with a `__getattr__`, type checkers believe that it has any name.
    def __getattr__(name: str) -> Any:
        name = _FORMER_NAMES.get(name, name)
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
