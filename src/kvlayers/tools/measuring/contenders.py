"""The caches of kvlayers and of transformers that are compared."""

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
    # With the axes that transformers' documentation recommends for each.
    "quanto": lambda config, length: transformers.QuantizedCache("quanto", config, 4, axis_key=0, axis_value=0),
    "hqq": lambda config, length: transformers.QuantizedCache("hqq", config, 4, axis_key=1, axis_value=1),
}
_PACKAGES = {"quanto": ("optimum", "optimum.quanto"), "hqq": ("hqq",)}

TRANSFORMERS_QUANTIZED = tuple(_PACKAGES)
"""Caches of transformers that round states."""


@dataclass(frozen=True)
class Contender:
    """One cache in a comparison.

    Attributes:
        library: `"kvlayers"` or `"transformers"`.
        cache: name of the cache.
        make: makes an empty cache.
    """

    library: str
    cache: str
    make: Callable[[], Any]

    @property
    def key(self) -> Key:
        """Library and name."""
        return self.library, self.cache

    @property
    def name(self) -> str:
        """Library and name, for readers."""
        return f"{self.library} {self.cache}"

    def fidelity(self) -> Fidelity:
        """What the cache does to the states that the model attends to. Makes a cache to find out.

        Raises:
            KVLayersError: the model does not support the cache.
        """
        if self.library == TRANSFORMERS:
            return "rounded" if self.cache in TRANSFORMERS_QUANTIZED else "exact"
        return fidelity_of(self.make())


def make_contender(library: str, name: str, model: Any, length: int) -> Contender:
    """A contender by its name.

    Args:
        library: `"kvlayers"` or `"transformers"`.
        name: a name that is registered with kvlayers, or one of `TRANSFORMERS_CACHES`.
        model: the model, or its config.
        length: the most tokens that the cache will hold.
    """
    if library == KVLAYERS:
        # With the length that generate() would pass as a hint after `kvlayers.install()`.
        return Contender(KVLAYERS, name, lambda: make_cache(name, model, length_hint=length))
    return Contender(TRANSFORMERS, name, lambda: _MAKERS[name](config_of(model), length))


def is_installed(name: str) -> bool:
    """Whether the packages that one of `TRANSFORMERS_CACHES` needs are installed."""
    return all(importlib.util.find_spec(package) is not None for package in _PACKAGES.get(name, ()))


def exact_names(config: Any) -> list[str]:
    """Names of kvlayers' caches that keep the states that the model attends to as they came."""
    has_windows = any(spec.layer_type in WINDOWED for spec in model_layers.layer_specs(config))
    return ["dynamic", "static", *(["sliding_window", "hybrid"] if has_windows else [])]
