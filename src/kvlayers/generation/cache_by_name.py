"""Names of caches: what a text names, which cache it makes, and which one a call of `generate()` gets.

A call gets the cache that it names, that its config was saved with, or the default of `install()`.

transformers refuses to load a config with a cache name that it does not know. Such a name, and the options of its
cache, are therefore saved in a separate field, which transformers loads and ignores. kvlayers reads it if installed.
"""

import contextlib
import copy
import dataclasses
import json
import logging
import re
import threading
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
import transformers
import transformers.generation.configuration_utils as configuration

from kvlayers.core.arguments import checked_hint
from kvlayers.core.cache import Cache
from kvlayers.core.dynamic_cache import DynamicCache
from kvlayers.core.named_caches import CacheRequest, factory_of, is_registered, unknown
from kvlayers.encoder_decoder.encoder_decoder_cache import EncoderDecoderCache
from kvlayers.errors import ConfigError, KVLayersError, OptionError, RegistryError
from kvlayers.eviction.rule import eviction_rule_names
from kvlayers.generation.patching import ScopedValue
from kvlayers.kernels.codes.quantizer_contract import quantizer_names
from kvlayers.upstream import generate_calls, model_layers, model_types
from kvlayers.upstream.callers import warn_the_caller
from kvlayers.utils.options import check_whole_number, checked_device, checked_dtype, checks_options

logger = logging.getLogger(__name__)

DYNAMIC = "dynamic"
"""The name of the cache of calls that name none."""

AUTO = "auto"
"""The name of a cache that a plan chooses for a number of tokens."""

_BITS = re.compile(r"int(?P<nbits>\d)|k(?P<key_nbits>\d)v(?P<value_nbits>\d)")
_WRITTEN_BITS = re.compile(r"^(?:int[-_ ])?(\d)(?:[-_ ]?bits?)?$")


@checks_options
def make_cache(
    name: str,
    model_or_config: object,
    *,
    batch_size: int | None = None,
    length_hint: int | str | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | str | None = None,
    **options: Any,
) -> transformers.Cache:
    """Make the cache called `name` for a model.

    Args:
        name: one of `cache_names()`.
        model_or_config: the model that will use the cache, or its config.
        batch_size: number of sequences, if known. (The reservation of a static cache is an option, `max_batch_size`.)
        length_hint: the most tokens that are expected, such as 4096 or "4k", if known. A static cache reserves this
            many.
        device: device of the model, if known.
        dtype: dtype of the states, or its name, if known.
        options: options of this kind of cache, such as `max_cache_len`.

    Returns:
        An empty cache, of the class that the name stands for.

    Raises:
        RegistryError: the name is not registered.
        OptionError: the cache does not have such an option, or needs one that is missing.
        ConfigError: the model's config does not describe its layers.

    Example:
        >>> import kvlayers, transformers
        >>> config = transformers.MistralConfig(num_hidden_layers=2, sliding_window=4096)
        >>> kvlayers.make_cache("dynamic", config)
        DynamicCache(2 x SlidingLayer, 0 tokens, 0 B)
    """
    # First, since somebody may pass the model before the name.
    named = requested_cache(name, options)
    if batch_size is not None:
        check_whole_number(batch_size, "`batch_size`", 1, of="sequences")
    request = CacheRequest(
        model_types.config_of(model_or_config),
        named.options,
        batch_size,
        checked_hint(length_hint),
        device if isinstance(device, torch.device | None) else checked_device(device),
        None if dtype is None else checked_dtype(dtype),
        layer_devices=model_layers.layer_devices(model_or_config),
    )
    return cache_for(named.name, request)


def request_of(model: Any, options: Mapping[str, Any] = MappingProxyType({}), **known: Any) -> CacheRequest:
    """A request for a cache of a model that is there: with its config, its devices and its dtype.

    Args:
        model: the model.
        options: options of the cache.
        known: what else is known, by the names of `CacheRequest`.
    """
    return CacheRequest(
        model.config,
        options,
        device=model_layers.model_device(model),
        dtype=model.dtype,
        layer_devices=model_layers.layer_devices(model),
        **known,
    )


def cache_for(name: str, request: CacheRequest) -> transformers.Cache:
    """Make the cache called `name` for a request. Raises as `make_cache`."""
    factory = factory_of(name)
    if factory is None:
        # Options may stand behind the name.
        named = requested_cache(name, request.options)
        return cache_for(named.name, dataclasses.replace(request, options=named.options))
    checked_options(request.options)
    cache = factory(request)
    if not isinstance(cache, transformers.Cache):
        raise RegistryError(
            f"the factory of '{name}' must return a cache, got a {type(cache).__name__}: correct the factory."
        )
    has_cross_attention = request.config.is_encoder_decoder or request.encoder_length is not None
    return paired(cache, request.encoder_length) if has_cross_attention else cache


def own_cache(model: Any, named: "NamedCache", **known: Any) -> Cache:
    """A cache of kvlayers for a model that is there; `known` as for `request_of`.

    Raises:
        OptionError: the name stands for a cache of somebody else.
        KVLayersError: as `make_cache`.
    """
    cache = cache_for(named.name, request_of(model, named.options, **known))
    if not isinstance(cache, Cache):
        raise OptionError(
            f"`cache` must be a cache of kvlayers, got {named.name!r}, a {type(cache).__name__} that is not: name "
            "another one of kvlayers.cache_names()."
        )
    return cache


def paired(cache: transformers.Cache, encoder_length: int | None) -> transformers.Cache:
    """A cache with another one for cross-attention beside it, unless it is a pair.

    Args:
        cache: the cache of self-attention, or a pair.
        encoder_length: tokens of the encoder's output, if known.
    """
    if isinstance(cache, transformers.EncoderDecoderCache):
        return cache
    if isinstance(cache, Cache):
        return EncoderDecoderCache(cache, cache.for_cross_attention(encoder_length))
    return transformers.EncoderDecoderCache(cache, DynamicCache())


def check_rope_dtype(model: torch.nn.Module, cache: Any) -> None:
    """Raise `ConfigError` if a cache rotates keys, and its model does so by other angles than its config says.

    `model.to(torch.bfloat16)` has this effect, since it also rounds the frequencies.
    """
    if not isinstance(cache, Cache) or not cache.rotates_keys:
        return
    for name, buffer in model.named_buffers():
        if name.endswith("inv_freq") and buffer.is_floating_point() and buffer.dtype.itemsize < 4:
            raise ConfigError(
                f"`{name}` of `model` must be in float32, as the frequencies of RoPE are in its config, got "
                f"{buffer.dtype}: load the model with dtype={buffer.dtype} instead of converting it."
            )


def read_cache_argument(model: Any, argument: str, arguments: dict[str, Any]) -> None:
    """Read what a call of `generate()` passes in the place of a cache, which is a cache or legacy tuples from then on.

    A name becomes the `cache_implementation`, and options that stand behind it the `cache_config`. So do those that the
    config of the call was saved with.

    Args:
        model: the model.
        argument: name of the argument that takes a cache.
        arguments: arguments of the call, changed in place.

    Raises:
        OptionError: it is no cache, such as a class or a config; `cache_implementation` is another name; a cache comes
            with a `cache_config`; or a cache or a name with `use_cache=False`.
    """
    given, name = arguments.get(argument), arguments.get("cache_implementation")
    config, usual = arguments.get("generation_config"), model.generation_config
    # What the model says by itself is no wish of the call, and a draft model gets the config of the other one.
    own = usual if config is None or config.is_assistant else config
    options = arguments.get("cache_config", None if own.cache_config == usual.cache_config else own.cache_config)
    if arguments.get("use_cache", None if own.use_cache == usual.use_cache else own.use_cache) is False:
        for unused in (given, name, options):
            if unused is not None:
                raise OptionError(
                    f"`use_cache` must not be False beside a cache or its options, got {unused!r:.60} as well: leave "
                    "one of them out."
                )
    if name is None and isinstance(given, transformers.Cache | tuple | list) and options is not None:
        raise OptionError(
            f"`cache_config` must be left out beside a cache that you made, got it and {_what(given)}: it has options "
            "for a name, so give them to the cache when you make it, or pass a name."
        )
    if isinstance(given, str):
        name = arguments["cache_implementation"] = either(arguments.pop(argument), name, argument)
    # Models with a cache of their own may take any class.
    elif not isinstance(given, transformers.Cache | tuple | list | None) and model._supports_default_dynamic_cache():
        raise OptionError(
            f"`{argument}` must be a cache or the name of one, got {_what(given)}: pass for example "
            f"kvlayers.DynamicCache(config=model.config), or {argument}='int4'."
        )
    # The config of the model may have another name.
    is_silent = name is None and given is None and config is not None and config.cache_implementation is None
    saved = _saved(config) if is_silent else None
    if saved is not None:
        options = arguments.get("cache_config", saved.options or None)
        arguments.update(cache_implementation=saved.name, cache_config=options)
    named = None if name is None else named_cache(name)
    if named is not None and named.options:
        arguments.update(requested_cache(name, arguments.get("cache_config")).generate_options)


def _what(given: object) -> str:
    return f"the class {given.__name__}" if isinstance(given, type) else f"a {type(given).__name__}"


def either(cache: Any, cache_implementation: str | None, argument: str = "cache") -> Any:
    """The cache of a call that may name it by either of two arguments.

    Raises:
        OptionError: both are given, and they differ.
    """
    if cache is not None and cache_implementation is not None and cache != cache_implementation:
        raise OptionError(
            f"`{argument}` must be what `cache_implementation` is, got {argument}={cache!r} and "
            f"cache_implementation={cache_implementation!r}, which ask for different caches: pass one of them."
        )
    return cache if cache_implementation is None else cache_implementation


def unknown_name(name: object) -> OptionError | RegistryError:
    """The error for a name that is not registered, which lists the names that are, or for what is no name."""
    if not isinstance(name, str):
        return OptionError(
            f"`cache` must be the name of a cache here, such as 'int4', got {_what(name)}: pass its name, and its "
            "options as `cache_config`; generate() and Chat also take a cache that you made, as `cache`."
        )
    lower = _WRITTEN_BITS.sub(r"int\1", name.strip().lower())
    if is_registered(lower):
        return RegistryError(f"`cache` must be a known name, got {name!r}: did you mean {lower!r}?")
    kind, options = "quantized", dict[str, Any]()
    if lower in quantizer_names():
        options["backend"] = lower
    elif (bits := _BITS.fullmatch(lower)) is not None:
        options = {option: int(count) for option, count in bits.groupdict().items() if count}
    elif name in eviction_rule_names():
        kind, options = "evicting", {"rule": name}
    else:
        return unknown(name)
    return RegistryError(
        f"`cache` must be a known name, got {name!r}: use {kind!r} with cache_config={options}, or "
        f"write '{kind}:{','.join(f'{option}={value}' for option, value in options.items())}'."
    )


_OPTION = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*=")
# A comma inside a value, such as a list, is followed by no name of an option.
_BETWEEN_OPTIONS = re.compile(rf",(?={_OPTION.pattern})")


@dataclass(frozen=True)
class NamedCache:
    """A registered name, and the options that the cache is made with.

    Attributes:
        name: the name.
        options: the options by their names, as in `cache_config`.
    """

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def generate_options(self) -> dict[str, Any]:
        """Arguments of `generate()` that ask for such a cache, after `kvlayers.install()`."""
        config = {"cache_config": dict(self.options)} if self.options else {}
        return {"cache_implementation": self.name, **config}


def named_cache(text: object) -> NamedCache | None:
    """The name and the options in a text, `None` if it is no text, or does not begin with a registered name.

    A name with a colon that is registered as it stands has no options.

    Args:
        text: `NAME`, or `NAME:OPTION=VALUE,OPTION=VALUE`. A value is a number, `true`, `false`, `null`, a list in
            brackets, or else a string. An option of an option has a dot: `recall.pages=64`.

    Raises:
        OptionError: what stands behind the colon are no options, or one is given twice.

    Example:
        >>> named_cache("quantized:nbits=4,backend=hqq").options
        {'nbits': 4, 'backend': 'hqq'}
        >>> named_cache("dynamic").generate_options
        {'cache_implementation': 'dynamic'}
    """
    if not isinstance(text, str):
        return None
    if is_registered(text):
        return NamedCache(text)
    name, colon, written = text.partition(":")
    if not colon or not is_registered(name):
        return None
    return NamedCache(name, options_after(name, written, text))


def requested_cache(text: object, options: object) -> NamedCache:
    """The cache that a text names, with further options, which have precedence over those in the text.

    Raises:
        RegistryError: the text does not begin with a registered name.
        OptionError: `text` is no text, or `options` are no mapping from names to values.
    """
    named = named_cache(text)
    if named is None:
        raise unknown_name(text)
    if options is None:
        return named
    return NamedCache(named.name, {**named.options, **checked_options(options)})


def checked_options(options: Any) -> Mapping[str, Any]:
    """Options of a cache as they are.

    Raises:
        OptionError: they are no mapping from names to values.
    """
    if not isinstance(options, Mapping) or "config" in options or not set(map(type, options)) <= {str}:
        raise OptionError(
            "`cache_config` must be a mapping from names to values, without the config of the model, got "
            f"{options!r}: pass for example cache_config={{'nbits': 4}}."
        )
    return options


def options_after(name: str, written: str, text: str) -> dict[str, Any]:
    """The options `OPTION=VALUE,OPTION=VALUE` that are written after a name and a colon.

    Args:
        name: the name, for errors.
        written: the options.
        text: the whole text, for errors.

    Raises:
        OptionError: they are no options, or one is given twice.
    """
    options: dict[str, Any] = {}
    for each in _BETWEEN_OPTIONS.split(written):
        if _OPTION.match(each) is None:
            raise OptionError(
                f"`name` must have options behind the colon, as in {name}:OPTION=VALUE,OPTION=VALUE, got {text!r}."
            )
        option, _, value = each.partition("=")
        *groups, last = option.split(".")
        inner: Any = options
        for group in groups:
            inner = inner.setdefault(group, {}) if isinstance(inner, dict) else None
        if not isinstance(inner, dict) or last in inner:
            raise OptionError(f"`name` must have each option once, got {option!r} twice in {text!r}: leave one out.")
        try:
            inner[last] = json.loads(value)
        except ValueError:
            inner[last] = value
    return options


# Which cache a call gets

FIELD = "kvlayers"
"""The separate field, a dict of `OPTIONS`."""

OPTIONS = ("cache_implementation", "cache_config")

CONTINUOUS_BATCHING = "paged"
"""A name that asks `generate()` for another way of batching, rather than for a cache."""


class DefaultCache:
    """A name of a cache for calls that give none, by any model that such a cache suits.

    Args:
        text: a name, which may have options behind a colon, as in "sink:window_length=512".

    Raises:
        RegistryError: the name is not registered.
        OptionError: `text` is not a text, or the cache lacks such an option, or needs one that is missing.
    """

    def __init__(self, text: str) -> None:
        self.named = named = requested_cache(text, None)
        self._suits: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()
        # An option that does not exist is an error now. Another model may suit the cache better than this one.
        with contextlib.suppress(ConfigError):
            cache_for(named.name, CacheRequest(transformers.LlamaConfig(), named.options, length_hint=1))

    def suits(self, model: Any) -> bool:
        """Whether a model can have such a cache. If not, the log says so once."""
        if model not in self._suits:
            try:
                if not model._supports_default_dynamic_cache():
                    raise ConfigError("the model makes its own cache.")
                check_rope_dtype(
                    model, cache_for(self.named.name, request_of(model, self.named.options, length_hint=1))
                )
                self._suits[model] = True
            except KVLayersError as reason:
                self._suits[model] = False
                logger.warning(
                    "Calls of %s go on without the cache '%s': %s", type(model).__name__, self.named.name, reason
                )
        return self._suits[model]


DEFAULT: ScopedValue[DefaultCache | None] = ScopedValue("cache of calls that name none", None)
"""The option `cache` of `install()`."""

_added_names: tuple[str, ...] = ()
_lock = threading.Lock()


def accept_names(list_names: Callable[[], list[str]]) -> None:
    """Let a `GenerationConfig` accept more names, besides those of transformers and of other libraries.

    Args:
        list_names: returns all names that kvlayers adds now; the names that it added before are removed.
    """
    global _added_names
    # Not within the lock at first: this imports rooms, whose names are registered then, which leads here again.
    list_names()
    with _lock:
        other_names = tuple(name for name in configuration.ALL_CACHE_IMPLEMENTATIONS if name not in _added_names)
        _added_names = tuple(name for name in list_names() if name not in other_names)
        configuration.ALL_CACHE_IMPLEMENTATIONS = other_names + _added_names


def requested_name(arguments: Mapping[str, Any]) -> str | None:
    """The cache name that a call of `generate()` asks for itself, by an argument or in the config that it is given.

    Args:
        arguments: arguments of `generate()` by their names.

    Raises:
        RegistryError: `generate()` does not know the name.
    """
    name: str | None = arguments.get("cache_implementation")
    given = arguments.get("generation_config")
    if name is None and given is not None:
        name = given.cache_implementation
    if name not in (None, *configuration.ALL_CACHE_IMPLEMENTATIONS, CONTINUOUS_BATCHING):
        raise unknown_name(name)
    return name


def resolve_name(model: Any, config: Any, requested: str | None, is_given_a_cache: bool) -> str:
    """Let the config that transformers has made for a call say which cache the call gets.

    transformers drops the name "hybrid" even if the call asks for it, and does not know of the separate field. A call
    that says nothing gets the default of `install()`, except for draft models.

    Args:
        model: the model.
        config: the `GenerationConfig` of the call, which is changed.
        requested: as `requested_name` returned it.
        is_given_a_cache: whether the call has a cache already.

    Returns:
        The name of the cache.

    Raises:
        RegistryError: the saved name is not registered.
        OptionError: its saved options are no mapping from names to values.
    """
    if config.cache_implementation is None:
        config.cache_implementation = requested
    if config.cache_implementation is None and not is_given_a_cache:
        named, default = _saved(config), DEFAULT.get()
        if named is not None and not is_registered(named.name):
            raise unknown_name(named.name)
        says_nothing = config.cache_config is None and config.use_cache is not False and not config.is_assistant
        if named is None and default is not None and says_nothing and default.suits(model):
            named = default.named
        if named is not None:
            config.cache_implementation = named.name
            if config.cache_config is None:
                config.cache_config = dict(named.options) or None
    return config.cache_implementation or DYNAMIC


def is_made_here(model: Any, name: str) -> bool:
    """Whether a cache of this name is made by its factory, rather than by the model."""
    return is_registered(name) and not generate_calls.makes_own_static_cache(model, name)


def save_pretrained(original: Callable[..., None], config: Any, *args: Any, **kwargs: Any) -> None:
    """For `GenerationConfig.save_pretrained`: write the name and the options into the separate field."""
    name = config.cache_implementation
    if name not in _added_names:
        original(config, *args, **kwargs)
        return
    moved = {option: vars(config)[option] for option in OPTIONS if vars(config)[option] is not None}
    written = copy.copy(config)
    # transformers loads a config that comes from a model config without fields that it does not know. So what it
    # notes of the origin of a config is taken from one that comes from nowhere.
    origin = {note: value for note, value in vars(configuration.GenerationConfig()).items() if note.startswith("_")}
    vars(written).update({**origin, **dict.fromkeys(OPTIONS), FIELD: moved})
    original(written, *args, **kwargs)
    warn_the_caller(
        f"transformers does not know the cache {name!r}, so the saved GenerationConfig has this name in the field "
        f"{FIELD!r}: the model can be loaded anywhere, and uses this cache where kvlayers is installed "
        "(kvlayers.install())."
    )


def _saved(config: Any) -> NamedCache | None:
    """What `save_pretrained` has written into the separate field of a config."""
    field = vars(config).get(FIELD)
    # Anybody may have written a field of this name.
    name = field.get("cache_implementation") if isinstance(field, dict) else None
    return NamedCache(name, checked_options(field.get("cache_config") or {})) if isinstance(name, str) else None
