"""Key-value caches for Hugging Face transformers: faster, smaller, shared, under the same names.

Call `generate()` of kvlayers instead of the model's, and name a cache::

    kvlayers.generate(model, **inputs, cache="int4")

Or pass a cache to `model.generate()`, or to a model in a decode loop of your own::

    cache = kvlayers.QuantizedCache(config=model.config, nbits=4)
    model.generate(**inputs, cache=cache)

Or install kvlayers into transformers, where it then makes the caches::

    with kvlayers.installed():
        model.generate(**inputs, cache_implementation="int4")

Where to look:

* caches: `DynamicCache`, `StaticCache`, `QuantizedCache`, `OffloadedCache`, `SinkCache`, `EvictingCache`,
  `EncoderDecoderCache`. Each can be cropped, forked, saved, reordered and offloaded; see `help(kvlayers.DynamicCache)`.
* names for `cache_implementation`: `cache_names()`, `make_cache()`, `register()`.
* chats and common beginnings: `Chat`, `PrefixStore`, `generate()`.
* files: `save_cache()`, `load_cache()`, `inspect_cache()`.
* what a cache costs, and which one fits: `plan()`. What it loses: the package kvlayers-lab measures it.
* too little memory: `resilient_generate()`.
* new kinds: `kvlayers.layers`, `kvlayers.stores`, `kvlayers.quantizers`, `kvlayers.eviction`, `kvlayers.offload`.
* tools that run models through caches: `kvlayers.models`, `kvlayers.calls`, `kvlayers.options`, `kvlayers.commands`.
* errors: all are `KVLayersError`, and each is in `kvlayers.errors`.

Importing kvlayers changes nothing in transformers. `install()` does, and `uninstall()` takes it back.
"""

import difflib
import importlib.util
import threading
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

_importing = threading.RLock()


def __getattr__(name: str) -> Any:
    # One thread at a time: transformers imports its own modules lazily, and fails where two threads meet in them. No
    # module of this package asks for a public name while it is imported, so nobody waits for ever.
    with _importing:
        if name in __all__:
            value = _public(name)
        elif name.isidentifier() and importlib.util.find_spec(f"{__name__}.{name}"):
            value = importlib.import_module(f".{name}", __name__)
        else:
            raise AttributeError(
                f"module 'kvlayers' has no attribute '{name}'"
                + (
                    f": {name} is in kvlayers_lab; in a checkout: pip install ./lab"
                    if name in ("BytesBudget", "Calibration", "DivergenceBudget", "calibrate", "score")
                    else "".join(f": did you mean '{near}'?" for near in difflib.get_close_matches(name, __all__, n=1))
                )
            )
    globals()[name] = value
    return value
