"""Let `generate()` resolve names to kvlayers' caches: explicit, reversible, and as little as possible.

What is replaced in transformers while kvlayers is installed, and why:

* `GenerationMixin._prepare_cache_for_generation` makes the cache that a name asks for. It is the one place to do so.
* `GenerationMixin._prepare_generation_config` forgets the name "hybrid" even where the user gave it; it is put back.
* `GenerationMixin.generate` takes legacy tuples and `return_legacy_cache=True`, which transformers 5 dropped.
* `ALL_CACHE_IMPLEMENTATIONS`, the names that a `GenerationConfig` accepts, has those of the registry added.
"""

import functools
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import transformers.generation.configuration_utils as configuration
from transformers.generation.utils import GenerationMixin, GenerationMode

from .. import compat
from ..dynamic_cache import DynamicCache
from ..encoder_decoder import EncoderDecoderCache
from . import registry

logger = logging.getLogger("kvlayers")

_lock = threading.RLock()
_originals: dict[str, Callable[..., Any]] = {}
_original_names: tuple[str, ...] = configuration.ALL_CACHE_IMPLEMENTATIONS
_installed = False


def install() -> None:
    """From now on, `generate()` makes its caches with kvlayers. Does nothing the second time."""
    global _installed
    with _lock:
        if _installed:
            return
        _installed = True
        for name, wrap in _WRAPPERS.items():
            current = getattr(GenerationMixin, name)
            # A wrapper that someone wrapped in turn could not be taken out by `uninstall`: it is awake again.
            if name not in _originals:
                _originals[name] = current
                setattr(GenerationMixin, name, wrap(current))
        _offer_names()


def uninstall() -> None:
    """Put everything back as it was before `install`. Does nothing if it is not installed."""
    global _installed
    with _lock:
        if not _installed:
            return
        _installed = False
        for name in list(_originals):
            current = getattr(GenerationMixin, name)
            # Where another library has wrapped ours since, ours stays underneath, and passes everything through.
            if getattr(current, "_kvlayers_wrapper", False) and current.__wrapped__ is _originals[name]:
                setattr(GenerationMixin, name, _originals.pop(name))
        configuration.ALL_CACHE_IMPLEMENTATIONS = _original_names


def is_installed() -> bool:
    """Whether `generate()` makes its caches with kvlayers."""
    return _installed


@contextmanager
def installed() -> Iterator[None]:
    """`install()` for the length of a `with` block; what was installed before stays so after it."""
    was_installed = _installed
    install()
    try:
        yield
    finally:
        if not was_installed:
            uninstall()


def _offer_names() -> None:
    if _installed:
        added = tuple(name for name in registry.cache_names() if name not in _original_names)
        configuration.ALL_CACHE_IMPLEMENTATIONS = _original_names + added


registry.on_change(_offer_names)


def _wrapper(original: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator for what stands in for `original` while kvlayers is installed, and passes through to it after."""

    def decorate(replacement: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            return (replacement if _installed else original)(self, *args, **kwargs)

        method._kvlayers_wrapper = True  # type: ignore[attr-defined]
        return method

    return decorate


def _wrap_generate(original: Callable[..., Any]) -> Callable[..., Any]:
    @_wrapper(original)
    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        config = kwargs.get("generation_config", args[1] if len(args) > 1 else None)
        as_tuples = kwargs.pop("return_legacy_cache", getattr(config, "return_legacy_cache", False))
        past = kwargs.get("past_key_values")
        if isinstance(past, tuple | list):
            kwargs["past_key_values"] = _cache_from_tuples(self.config, past)
        output = original(self, *args, **kwargs)
        if as_tuples and getattr(output, "past_key_values", None) is not None:
            output.past_key_values = output.past_key_values.to_legacy_cache()
        return output

    return generate


def _cache_from_tuples(config: Any, states: tuple[Any, ...] | list[Any]) -> DynamicCache | EncoderDecoderCache:
    if config.is_encoder_decoder:
        return EncoderDecoderCache.from_legacy_cache(states)
    return DynamicCache.from_legacy_cache(states, config=config)


def _wrap_prepare_config(original: Callable[..., Any]) -> Callable[..., Any]:
    @_wrapper(original)
    def prepare_generation_config(self: Any, generation_config: Any = None, *args: Any, **kwargs: Any) -> Any:
        asked = kwargs.get("cache_implementation") or getattr(generation_config, "cache_implementation", None)
        prepared, model_kwargs = original(self, generation_config, *args, **kwargs)
        if asked is not None and prepared.cache_implementation is None:
            prepared.cache_implementation = asked
        return prepared, model_kwargs

    return prepare_generation_config


def _wrap_prepare_cache(original: Callable[..., Any]) -> Callable[..., Any]:
    @_wrapper(original)
    def prepare_cache_for_generation(
        self: Any,
        generation_config: Any,
        model_kwargs: dict[str, Any],
        generation_mode: GenerationMode,
        batch_size: int,
        max_cache_length: int,
    ) -> None:
        cache_name = compat.cache_argument(self)
        name = generation_config.cache_implementation or "dynamic"
        if (
            model_kwargs.get(cache_name) is not None
            or generation_config.use_cache is False
            or not self._supports_default_dynamic_cache()
            or name not in registry.cache_names()
            or compat.makes_its_own_cache(self, name)
        ):
            original(self, generation_config, model_kwargs, generation_mode, batch_size, max_cache_length)
            return
        drafting = generation_mode == GenerationMode.ASSISTED_GENERATION
        cache = registry.make_cache(
            name,
            self,
            batch_size=batch_size * max(generation_config.num_beams or 1, generation_config.num_return_sequences or 1),
            length_hint=max(max_cache_length, generation_config.max_cache_len or 0)
            + (_draft_length(generation_config) if drafting else 0),
            device=self.device,
            dtype=self.dtype,
            **(generation_config.cache_config or {}),
        )
        if generation_config.is_assistant:
            cache.activate_past_recording()
        if drafting:
            # transformers refuses to verify drafts with a cache of a static name, since its own cannot be rolled back.
            generation_config.cache_implementation = None
        model_kwargs[cache_name] = cache

    return prepare_cache_for_generation


def _draft_length(generation_config: Any) -> int:
    """Tokens that a draft may reach beyond the end of the sequence, until they are rolled back."""
    return 1 + max(generation_config.prompt_lookup_num_tokens or 0, generation_config.num_assistant_tokens or 0)


_WRAPPERS = {
    "generate": _wrap_generate,
    "_prepare_generation_config": _wrap_prepare_config,
    "_prepare_cache_for_generation": _wrap_prepare_cache,
}
