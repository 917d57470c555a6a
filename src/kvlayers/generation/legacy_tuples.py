"""Nested tuples instead of a cache, as models of transformers 4 took and returned them."""

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any, cast

import transformers
from torch import Tensor
from typing_extensions import Self

from kvlayers.core import legacy_api
from kvlayers.core.cache import Cache
from kvlayers.core.cache_layer import CacheLayer
from kvlayers.core.dynamic_cache import DynamicCache
from kvlayers.encoder_decoder.encoder_decoder_cache import EncoderDecoderCache
from kvlayers.errors import LegacyFormatError, StateMismatchError
from kvlayers.upstream import cache_argument, model_types
from kvlayers.upstream.callers import warn_of_old_use


def forward_with_tuples(original: Callable[..., Any], model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a forward pass one of whose arguments is a tuple or a list. It may be the past, or something else.

    Args:
        original: `PreTrainedModel.__call__`.
        model: the model.
        args: positional arguments of the pass.
        kwargs: its arguments by name.

    Returns:
        What the pass returns. If it was given tuples of states, its caches are tuples as well.

    Raises:
        LegacyFormatError: as `cache_for_forward`.
    """
    argument = cache_argument.name_for(model)
    by_position = dict(zip(inspect.signature(model.forward).parameters, args, strict=False))
    past = {**by_position, **kwargs}.get(argument)
    of_repository = inspect.unwrap(type(model).forward).__module__.startswith("transformers_modules.")
    # Code of a model repository that is older than caches reads its own form of tuples. Code of that time uses this
    # attribute to say that it takes caches.
    reads_tuples_itself = of_repository and not getattr(model, "_supports_cache_class", False)
    if not isinstance(past, tuple | list) or reads_tuples_itself:
        return original(model, *args, **kwargs)
    warn_of_tuples(argument)
    cache = cache_for_forward(model.config, past)
    args = tuple(cache if given is past else given for given in args)
    kwargs = {name: cache if given is past else given for name, given in kwargs.items()}
    try:
        output = original(model, *args, **kwargs)
    except StateMismatchError as mismatch:
        raise LegacyFormatError(
            f"`{argument}` must be states as {type(model).__name__} computes them for these inputs: {mismatch}"
        ) from mismatch
    return cache_argument.replace_in_output(output, functools.partial(PastTuples.of, config=model.config))


def warn_of_tuples(argument: str) -> None:
    """Warn, at the line that passes tuples, and say what to pass instead."""
    warn_of_old_use(
        f"{argument} as tuples",
        "pass kvlayers.DynamicCache(config=model.config), or what from_legacy_cache() makes of the tuples",
    )


class PastTuples(tuple[tuple[Tensor, ...], ...]):
    """The tuples that a forward pass returns: plain tuples, except that they know the cache that they are views of.

    The next forward pass continues in this cache and thus copies nothing. From then on the cache holds more tokens than
    the tuples, which do not change: passing the same tuples a second time makes a copy.
    """

    @classmethod
    def of(cls, cache: Any, config: object) -> Self:
        """The states of `cache`, which nobody else may change from now on.

        Args:
            cache: a cache that a model returned.
            config: config of the model, whose forward passes may continue in the cache.
        """
        states = cls(kvlayers_view(cache).as_tuples(legacy_api.handed_out_states))
        if isinstance(cache, Cache):
            vars(states)["source"] = cache, config
        return states

    def __reduce__(self) -> tuple[type, tuple[Any, ...]]:
        return tuple, (tuple(self),)


def cache_for_forward(config: Any, states: Iterable[Any]) -> Cache:
    """A cache in which a forward pass can continue without changing `states`.

    It keeps all tokens, even if the model attends within a window, since the shape of the tuples is the only count of
    tokens.

    Raises:
        LegacyFormatError: the tuples are nested differently, or do not match each other or the model's layers.
    """
    if isinstance(states, PastTuples):
        # Of one model's forward passes, and once: from then on it holds more tokens than the tuples.
        source, made_for = vars(states).pop("source", (None, None))
        if made_for is config and source is not None:
            return cast("Cache", source)
    checked = _checked(config, states)
    layers = [] if _has_cross_attention(config) else DynamicCache(config=config).layers
    if layers and all(isinstance(layer, CacheLayer) and not layer.traits.is_recurrent for layer in layers):
        if checked:
            _check_count(checked, len(layers))
        return DynamicCache.from_legacy_cache(checked)
    return cache_for_generate(config, checked)


def cache_for_generate(config: Any, states: Iterable[Any]) -> Cache:
    """A cache with copies of `states` that keeps the tokens which the model attends to.

    Raises:
        LegacyFormatError: as `cache_for_forward`.
    """
    checked = _checked(config, states)
    if _has_cross_attention(config):
        return EncoderDecoderCache.from_legacy_cache(checked)
    return DynamicCache.from_legacy_cache(checked, config=config)


def _checked(config: Any, states: Iterable[Any]) -> legacy_api.LegacyStates:
    checked = legacy_api.check_tuples(states, width=(2, 4) if _has_cross_attention(config) else (2,))
    for index, layer in enumerate(checked):
        legacy_api.check_is_whole(layer, index)
    if checked and config.is_encoder_decoder:
        _check_count(checked, model_types.decoder_config(config).num_hidden_layers)
    return checked


def _check_count(states: legacy_api.LegacyStates, layers: int) -> None:
    if len(states) != layers:
        raise LegacyFormatError(
            f"tuples of states must have those of each of the {layers} layers of the model that attend, got "
            f"{len(states)}: pass the states of every layer."
        )


def _has_cross_attention(config: Any) -> bool:
    # Not every config has this field.
    return bool(config.is_encoder_decoder or getattr(config, "add_cross_attention", False))


def to_tuples(cache: Any) -> legacy_api.LegacyStates:
    """Copies of the states of a cache, which may be one of transformers, as nested tuples.

    Raises:
        LegacyFormatError: a layer has dropped tokens or has other states, which tuples cannot represent.
    """
    return kvlayers_view(cache).to_legacy_cache()


def kvlayers_view(cache: Any) -> Cache:
    """A cache of kvlayers that has the same layers as `cache`, which may be one of transformers."""
    if isinstance(cache, Cache):
        return cache
    if isinstance(cache, transformers.EncoderDecoderCache):
        parts = cache.self_attention_cache, cache.cross_attention_cache
        return EncoderDecoderCache(*(Cache(layers=part.layers) for part in parts))
    return Cache(layers=cache.layers)
