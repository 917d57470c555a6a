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
* new kinds: `kvlayers.layers`, `kvlayers.stores`, `kvlayers.quantizers`, `kvlayers.eviction`, `kvlayers.offload`.
* errors: all are `KVLayersError`, and each is in `kvlayers.errors`.

Importing kvlayers changes nothing in transformers. `install()` does, and `uninstall()` takes it back.
"""

import importlib
import importlib.util
import threading
import warnings
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
    from kvlayers.caches.export import ExportableDecoder, register_export_support
    from kvlayers.caches.quantized import QuantizedCache, QuantizedCacheConfig
    from kvlayers.caches.sink import SinkCache
    from kvlayers.caches.static import StaticCache
    from kvlayers.errors import CapacityError, KVLayersError, OptionError
    from kvlayers.evaluation.engine import score
    from kvlayers.generation.chat import Chat
    from kvlayers.generation.install import generate, install, installed, is_installed, uninstall
    from kvlayers.generation.known_ids import PromptMismatchWarning
    from kvlayers.generation.registry import CacheRequest, cache_names, make_cache, register, unregister
    from kvlayers.generation.resilient import SteppedDownWarning, resilient_generate
    from kvlayers.generation.static_pool import free_reservations
    from kvlayers.layers import (
        CacheLayer,
        DynamicLayer,
        EvictingLayer,
        HybridLayer,
        LinearAttentionLayer,
        OffloadedLayer,
        QuantizedLayer,
        RecallLayer,
        SinkLayer,
        SlidingLayer,
        StaticLayer,
        StaticSlidingLayer,
    )
    from kvlayers.persistence import inspect_cache, load_cache, save_cache, weights_id
    from kvlayers.planning import plan
    from kvlayers.prefix import PrefixStore
    from kvlayers.stores import Quantization
    from kvlayers.tools.calibration import BytesBudget, Calibration, DivergenceBudget, calibrate
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
    "caches.dynamic": ("DynamicCache",),
    "caches.encoder_decoder": ("EncoderDecoderCache",),
    "caches.evicting": ("EvictingCache",),
    "caches.export": (
        "ExportableDecoder",
        "register_export_support",
    ),
    "caches.quantized": (
        "QuantizedCache",
        "QuantizedCacheConfig",
    ),
    "caches.sink": ("SinkCache",),
    "caches.static": ("StaticCache",),
    "errors": (
        "CapacityError",
        "KVLayersError",
        "OptionError",
    ),
    "evaluation.engine": ("score",),
    "generation.chat": ("Chat",),
    "generation.install": (
        "generate",
        "install",
        "installed",
        "is_installed",
        "uninstall",
    ),
    "generation.known_ids": ("PromptMismatchWarning",),
    "generation.registry": (
        "CacheRequest",
        "cache_names",
        "make_cache",
        "register",
        "unregister",
    ),
    "generation.resilient": (
        "SteppedDownWarning",
        "resilient_generate",
    ),
    "generation.static_pool": ("free_reservations",),
    "layers": (
        "CacheLayer",
        "DynamicLayer",
        "EvictingLayer",
        "HybridLayer",
        "LinearAttentionLayer",
        "OffloadedLayer",
        "QuantizedLayer",
        "RecallLayer",
        "SinkLayer",
        "SlidingLayer",
        "StaticLayer",
        "StaticSlidingLayer",
    ),
    "persistence": (
        "inspect_cache",
        "load_cache",
        "save_cache",
        "weights_id",
    ),
    "planning": ("plan",),
    "prefix": ("PrefixStore",),
    "stores": ("Quantization",),
    "tools.calibration": (
        "BytesBudget",
        "Calibration",
        "DivergenceBudget",
        "calibrate",
    ),
    "tools.kernels": ("compile_kernels",),
}
"""Public names by the module that has them: imported when first asked for, as torch takes seconds to import."""

_HOMES = {name: module for module, names in _NAMES.items() for name in names}

_MOVED = {
    "caches.operations": ("CacheState",),
    "caches.registry": (
        "cache_class_names",
        "register_cache_class",
        "unregister_cache_class",
    ),
    "caches.summary": (
        "CacheSummary",
        "Explanation",
        "LayerSummary",
    ),
    "errors": (
        "BatchIndexError",
        "CacheFileError",
        "CachePathError",
        "ConfigError",
        "InterruptedPassError",
        "KernelError",
        "LayerIndexError",
        "LegacyFormatError",
        "ModelMismatchError",
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
    "eviction": (
        "EvictionRule",
        "eviction_rule_names",
        "register_eviction_rule",
        "unregister_eviction_rule",
    ),
    "generation.ladder": (
        "DEFAULT_LADDER",
        "Rung",
    ),
    "layers": (
        "Checkpoints",
        "LayerOperations",
        "LayerState",
        "Recall",
        "TokenLayer",
        "layer_names",
        "register_layer",
        "unregister_layer",
    ),
    "offload": (
        "DiskMemory",
        "HomeMemory",
        "HostMemory",
        "Prefetcher",
        "Traffic",
        "TrafficMeter",
    ),
    "persistence": ("CacheFile",),
    "planning": (
        "Plan",
        "PlannedCache",
    ),
    "prefix": (
        "EvictionPolicy",
        "Hit",
        "LeastRecentlyUsed",
        "PrefixNode",
        "PrefixStatistics",
        "PrefixTree",
    ),
    "quantizers": (
        "quantizer_names",
        "register_quantizer",
        "unregister_quantizer",
    ),
    "rope.rotary": ("Rotary",),
    "stores": (
        "Buckets",
        "DenseStore",
        "DescriptionContext",
        "QuantizedStore",
        "StateForm",
        "StaticStore",
        "TokenStore",
        "register_store",
        "store_names",
        "unregister_store",
    ),
    "tools.calibration": (
        "MeasuredSetting",
        "Sensitivity",
    ),
}
"""Names that were in `kvlayers` itself, by the module where they are now. They keep working, with a warning."""

_FORMER_NAMES = {"FixedStore": "StaticStore"}
"""Names of earlier versions, which keep working."""

_NEW_HOMES = {name: module for module, names in _MOVED.items() for name in names}

__all__ = [
    "BytesBudget",
    "Cache",
    "CacheLayer",
    "CacheRequest",
    "Calibration",
    "CapacityError",
    "Chat",
    "DivergenceBudget",
    "DynamicCache",
    "DynamicLayer",
    "EncoderDecoderCache",
    "EvictingCache",
    "EvictingLayer",
    "ExportableDecoder",
    "HQQQuantizedCache",
    "HybridCache",
    "HybridChunkedCache",
    "HybridLayer",
    "HybridMambaAttentionDynamicCache",
    "KVLayersError",
    "LinearAttentionLayer",
    "MambaCache",
    "OffloadedCache",
    "OffloadedLayer",
    "OffloadedStaticCache",
    "OptionError",
    "PrefixStore",
    "PromptMismatchWarning",
    "Quantization",
    "QuantizedCache",
    "QuantizedCacheConfig",
    "QuantizedLayer",
    "QuantoQuantizedCache",
    "RecallLayer",
    "SinkCache",
    "SinkLayer",
    "SlidingLayer",
    "SlidingWindowCache",
    "SteppedDownWarning",
    "StaticCache",
    "StaticLayer",
    "StaticSlidingLayer",
    "__version__",
    "cache_names",
    "calibrate",
    "compile_kernels",
    "free_reservations",
    "generate",
    "inspect_cache",
    "install",
    "installed",
    "is_installed",
    "load_cache",
    "make_cache",
    "plan",
    "register",
    "register_export_support",
    "resilient_generate",
    "save_cache",
    "score",
    "uninstall",
    "unregister",
    "weights_id",
]


_importing = threading.RLock()

if not TYPE_CHECKING:
    # Of a module with a `__getattr__`, type checkers believe that it has any name.
    def __getattr__(name: str) -> Any:
        new = _FORMER_NAMES.get(name, name)
        if new in _NEW_HOMES:
            home = f"{__name__}.{_NEW_HOMES[new]}"
            warnings.warn(
                f"`kvlayers.{name}` has moved: write `from {home} import {new}`.", DeprecationWarning, stacklevel=2
            )
            with _importing:
                return getattr(importlib.import_module(home), new)
        if name in _HOMES:
            # One thread at a time: transformers imports its own modules lazily, and fails where two threads meet in
            # them. No module of this package asks for a public name while it is imported, so nobody waits for ever.
            with _importing:
                value = getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
        elif name.isidentifier() and importlib.util.find_spec(f"{__name__}.{name}"):
            with _importing:
                value = importlib.import_module(f".{name}", __name__)
        else:
            raise AttributeError(f"module 'kvlayers' has no attribute '{name}'")
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted(__all__)
