"""The caches of both libraries that are held against each other."""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import transformers

from kvlayers.caches.from_config import WINDOWED
from kvlayers.generation.registry import make_cache
from kvlayers.planning.cache_bytes import fidelity_of
from kvlayers.stores.contract import Fidelity
from kvlayers.tools.names import KVLAYERS, TRANSFORMERS
from kvlayers.upstream import model_layers
from kvlayers.upstream.model_types import config_of

Key = tuple[str, str]
"""A library and the name of a cache."""

_MAKERS: dict[str, Callable[[Any, int], Any]] = {
    "dynamic": lambda config, length: transformers.DynamicCache(config=config),
    "static": lambda config, length: transformers.StaticCache(config, max_cache_len=length),
    # At the axes that transformers' documentation recommends for each.
    "quanto": lambda config, length: transformers.QuantizedCache("quanto", config, 4, axis_key=0, axis_value=0),
    "hqq": lambda config, length: transformers.QuantizedCache("hqq", config, 4, axis_key=1, axis_value=1),
}
_PACKAGES = {"quanto": ("optimum", "optimum.quanto"), "hqq": ("hqq",)}

TRANSFORMERS_QUANTIZED = tuple(_PACKAGES)
"""Those that round states."""


@dataclass(frozen=True)
class Contender:
    """One kind of cache that is run.

    Attributes:
        library: who makes it.
        cache: its name.
        make: makes an empty one.
    """

    library: str
    cache: str
    make: Callable[[], Any]


def of_kvlayers(name: str, model: Any, length: int) -> Contender:
    """A cache of kvlayers by its name, for a model (or its config) and the most tokens that it will hold."""
    # With the length that generate() would give as a hint after `kvlayers.install()`.
    return Contender(KVLAYERS, name, lambda: make_cache(name, model, length_hint=length))


def of_transformers(name: str, model: Any, length: int) -> Contender:
    """A cache of `TRANSFORMERS_CACHES`, for a model or its config and the most tokens that it will hold."""
    return Contender(TRANSFORMERS, name, lambda: _MAKERS[name](config_of(model), length))


def contender(library: str, name: str, model: Any, length: int) -> Contender:
    """A cache of either library, as `of_kvlayers` and `of_transformers`."""
    return {KVLAYERS: of_kvlayers, TRANSFORMERS: of_transformers}[library](name, model, length)


def is_installed(name: str) -> bool:
    """Whether the packages of one of `TRANSFORMERS_CACHES` are there."""
    return all(importlib.util.find_spec(package) is not None for package in _PACKAGES.get(name, ()))


def exact_names(config: Any) -> list[str]:
    """Names of the caches of kvlayers that keep what a model attends to as it is."""
    has_windows = any(spec.layer_type in WINDOWED for spec in model_layers.layer_specs(config))
    return ["dynamic", "static", *(["sliding_window", "hybrid"] if has_windows else [])]


def states_in(rival: Contender) -> Fidelity:
    """What a cache does to the states that the model attends to.

    Raises:
        KVLayersError: there is no such cache for the model.
    """
    if rival.library == TRANSFORMERS:
        return "rounded" if rival.cache in TRANSFORMERS_QUANTIZED else "exact"
    return fidelity_of(rival.make())
