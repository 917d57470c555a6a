"""The cache of calls of `generate()` that name none, and pass none: what `install(cache=...)` sets."""

import contextlib
import logging
import weakref
from typing import Any

import transformers

from kvlayers.core.cache import Cache
from kvlayers.core.named_caches import CacheRequest
from kvlayers.errors import ConfigError, KVLayersError
from kvlayers.generation import cache_by_name
from kvlayers.generation.passed_caches import check_rope_dtype
from kvlayers.generation.patching import ScopedValue
from kvlayers.upstream.model_layers import layer_devices, model_device

logger = logging.getLogger(__name__)


class DefaultCache:
    """A name of a cache for calls that give none, by any model that such a cache suits.

    Args:
        text: a name, which may have options behind a colon, as in "sink:window_length=512".

    Raises:
        RegistryError: the name is not registered.
        OptionError: `text` is not a text, or the cache lacks such an option, or needs one that is missing.
    """

    def __init__(self, text: str) -> None:
        self.named = named = cache_by_name.requested_cache(text, None)
        self._suits: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()
        # An option that does not exist is an error now. Another model may suit the cache better than this one.
        with contextlib.suppress(ConfigError):
            cache_by_name.cache_for(named.name, CacheRequest(transformers.LlamaConfig(), named.options, length_hint=1))

    def suits(self, model: Any) -> bool:
        """Whether a model can have such a cache. If not, the log says so once."""
        if model not in self._suits:
            reason = self._what_is_wrong(model)
            self._suits[model] = reason is None
            if reason is not None:
                name = type(model).__name__
                logger.warning("Calls of %s go on without the cache '%s': %s", name, self.named.name, reason)
        return self._suits[model]

    def _what_is_wrong(self, model: Any) -> object | None:
        if not model._supports_default_dynamic_cache():
            return "the model makes its own cache."
        devices = layer_devices(model)
        request = CacheRequest(
            model.config, self.named.options, length_hint=1, device=model_device(model), layer_devices=devices
        )
        try:
            cache = cache_by_name.cache_for(self.named.name, request)
            if isinstance(cache, Cache) and cache.rotates_keys:
                check_rope_dtype(model)
        except KVLayersError as error:
            return error
        return None


DEFAULT: ScopedValue[DefaultCache | None] = ScopedValue("cache of calls that name none", None)
"""The option `cache` of `install()`."""
