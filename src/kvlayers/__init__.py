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
from typing import Any

import lazy_loader

from kvlayers import rooms  # noqa: F401
from kvlayers.upstream.supported import check_installed, is_command
from kvlayers.version import __version__ as __version__

if not is_command():
    # The command checks by itself, and does not wait for transformers before it answers `--help`.
    from kvlayers.upstream import first_import  # noqa: F401

    check_installed()

_public, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

_MOVED = {
    "caches": (
        "CacheState",
        "CacheSummary",
        "Explanation",
        "LayerSummary",
        "cache_class_names",
        "register_cache_class",
        "unregister_cache_class",
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

_importing = threading.RLock()


def __getattr__(name: str) -> Any:
    new = _FORMER_NAMES.get(name, name)
    # One thread at a time: transformers imports its own modules lazily, and fails where two threads meet in them. No
    # module of this package asks for a public name while it is imported, so nobody waits for ever.
    with _importing:
        if new in _NEW_HOMES:
            home = f"{__name__}.{_NEW_HOMES[new]}"
            warnings.warn(
                f"`kvlayers.{name}` has moved: write `from {home} import {new}`.", DeprecationWarning, stacklevel=2
            )
            return getattr(importlib.import_module(home), new)
        if name in __all__:
            value = _public(name)
        elif name.isidentifier() and importlib.util.find_spec(f"{__name__}.{name}"):
            value = importlib.import_module(f".{name}", __name__)
        else:
            raise AttributeError(f"module 'kvlayers' has no attribute '{name}'")
    globals()[name] = value
    return value
