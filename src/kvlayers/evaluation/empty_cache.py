"""The empty cache that scoring copies: by name, or as it is given."""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import transformers

from kvlayers.caches.base import Cache
from kvlayers.errors import ConfigError, OptionError, StateMismatchError
from kvlayers.generation import registry
from kvlayers.generation.passed_caches import validate
from kvlayers.layers import LayerOperations
from kvlayers.layers.upstream_adapter.adapter import adapted
from kvlayers.upstream.model_layers import layer_specs


def empty_cache(model: Any, cache: object, cache_config: Mapping[str, Any] | None, tokens: int) -> transformers.Cache:
    """An empty cache for a model that can be copied for each sequence.

    `copy.deepcopy` copies it: for caches of kvlayers, that is a fork.

    Args:
        model: the model.
        cache: a name of `kvlayers.cache_names()`, or an empty cache of kvlayers or transformers, which is not changed.
        cache_config: options of the cache that `cache` names.
        tokens: the most tokens of a sequence, for a cache by name.

    Raises:
        RegistryError: the name is not registered.
        OptionError: `cache` is neither a name nor a cache; the cache has no such option; options are given with a
            cache; or the cache cannot be copied.
        StateMismatchError: the cache holds states.
        ConfigError: the cache was made for another model, or does not work with this one.
    """
    if cache_config is not None and not isinstance(cache_config, Mapping):
        raise OptionError(
            f"`cache_config` must be a mapping from names to values, got a {type(cache_config).__name__}."
        )
    if isinstance(cache, str):
        given = registry.make_cache(
            cache, model, length_hint=tokens, device=model.device, dtype=model.dtype, **(cache_config or {})
        )
    elif cache_config is not None:
        raise OptionError("`cache_config` has options for a cache by name, got a cache: leave it out, or pass a name.")
    else:
        given = _checked_instance(cache)
    found = _copied(given)
    _check_layers(model, found)
    validate(model, found, None, None)
    return found


def _checked_instance(cache: object) -> transformers.Cache:
    if not isinstance(cache, transformers.Cache) or isinstance(cache, transformers.EncoderDecoderCache):
        shown = f"the class {cache.__name__}" if isinstance(cache, type) else f"a {type(cache).__name__}"
        raise OptionError(
            "`cache` must be the name of a cache, or an empty cache for a model without an encoder, got "
            f"{shown}: pass one of {', '.join(registry.cache_names())}."
        )
    if holds_states(cache):
        raise StateMismatchError(
            f"`cache` must be empty, got a {type(cache).__name__} that holds states: reset() it, or pass a new one."
        )
    if any(layer.is_recording for layer in layers_of(cache)):
        raise OptionError(
            "`cache` must not record tokens for a rollback, as it would never drop them: call "
            "deactivate_past_recording() first, or pass a new cache."
        )
    return cache


def holds_states(cache: transformers.Cache) -> bool:
    """Whether a cache of any library has seen tokens. Memory that is reserved for them is no state."""
    return any(
        next(layer.held_tensors(), None) is not None if layer.length is None else layer.length > 0
        for layer in layers_of(cache)
    )


def _copied(cache: transformers.Cache) -> transformers.Cache:
    try:
        return copy.deepcopy(cache)
    except Exception as error:
        raise OptionError(
            f"`cache` must be a cache that copy.deepcopy can copy, since each context needs a cache of its own, got a "
            f"{type(cache).__name__}: {error}"
        ) from error


def _check_layers(model: Any, cache: transformers.Cache) -> None:
    """Raise `ConfigError` if a cache of kvlayers has more or fewer layers than the model."""
    if not isinstance(cache, Cache) or cache.layer_class_to_replicate is not None:
        return
    expected = len(layer_specs(model.config))
    if len(cache.layers) != expected:
        raise ConfigError(
            f"`cache` must have a layer for each of the {expected} layers of {type(model).__name__}, got "
            f"{len(cache.layers)}: make it with config=model.config."
        )


def layers_of(cache: transformers.Cache) -> Sequence[LayerOperations]:
    """The layers of a cache of any library, with the contract of kvlayers' layers."""
    return cache.adapted_layers() if isinstance(cache, Cache) else [adapted(layer) for layer in cache.layers]
