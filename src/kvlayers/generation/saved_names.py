"""Names that only kvlayers knows, in a saved `GenerationConfig` that plain transformers can load.

transformers refuses to load a config with a cache name that it does not know. So such a name, and the options of its
cache, are saved in a field of their own, which transformers loads and ignores. kvlayers reads it where it is installed.
"""

import copy
from collections.abc import Callable
from typing import Any

from kvlayers.generation import registry
from kvlayers.upstream.deprecation import warn_the_caller

FIELD = "kvlayers"
"""The field, a dict of `OPTIONS`."""

OPTIONS = ("cache_implementation", "cache_config")


def save(original: Callable[..., None], config: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """What `original`, which is `GenerationConfig.save_pretrained`, does, with the name and options in the field."""
    moved = {option: vars(config)[option] for option in OPTIONS if vars(config)[option] is not None}
    written = copy.copy(config)
    # A config of a model's config alone is loaded without fields of its own.
    vars(written).update({**dict.fromkeys(OPTIONS), FIELD: moved, "_from_model_config": False})
    original(written, *args, **kwargs)
    warn_the_caller(
        f"transformers does not know the cache {config.cache_implementation!r}, so the saved GenerationConfig has its "
        f"name in the field {FIELD!r}: the model can be loaded anywhere, and uses that cache where kvlayers is "
        "installed (kvlayers.install())."
    )


def restore(config: Any) -> None:
    """Let a `GenerationConfig` that was just loaded have what the field says, if it says nothing else itself."""
    name, options = _saved(config)
    if name is not None and registry.is_registered(name):
        del vars(config)[FIELD]
        _use(config, name, options)


def apply(config: Any) -> None:
    """Let a call of `generate()` have what the field says, if it was loaded before kvlayers was installed.

    Raises:
        RegistryError: nobody has registered the name.
    """
    name, options = _saved(config)
    if name is not None and config.cache_implementation is None:
        if not registry.is_registered(name):
            raise registry.unknown_name(name)
        _use(config, name, options)


def _saved(config: Any) -> tuple[str | None, Any]:
    field = vars(config).get(FIELD)
    # Anybody may have written a field of that name.
    name = field.get("cache_implementation") if isinstance(field, dict) else None
    return (name, field.get("cache_config")) if isinstance(name, str) else (None, None)


def _use(config: Any, name: str, options: Any) -> None:
    if config.cache_implementation is None:
        config.cache_implementation = name
        if config.cache_config is None:
            config.cache_config = options
