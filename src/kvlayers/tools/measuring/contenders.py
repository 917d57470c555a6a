"""The caches that are compared: of kvlayers, of transformers, and of other packages."""

import difflib
import functools
import importlib
import importlib.util
import operator
import os
import re
import runpy
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import transformers

from kvlayers.caches.base import Cache
from kvlayers.caches.evicting import EvictingCache
from kvlayers.caches.from_config import WINDOWED
from kvlayers.caches.quantized import QuantizedCache
from kvlayers.errors import KVLayersError, OptionError, UnsupportedLayerError
from kvlayers.evaluation.caches import holds_states
from kvlayers.eviction import EvictionRule
from kvlayers.generation.registry import CacheRequest, NamedCache, cache_for, cache_names, named_cache, options_after
from kvlayers.planning.cache_bytes import fidelity_of
from kvlayers.quantizers import quantizer_names
from kvlayers.stores.contract import Fidelity
from kvlayers.tools.names import KVLAYERS, TRANSFORMERS
from kvlayers.upstream import model_layers
from kvlayers.upstream.model_layers import layer_devices
from kvlayers.upstream.model_types import config_of

NATIVE = "native"
NAMED: dict[str, dict[str, Any]] = {
    **{f"int{bits}": {"nbits": bits} for bits in (8, 4, 2)},
    "fp8": {"backend": "fp8"},
}
"""Settings for which a cache is registered by the same name, and their options."""

_FORMS = re.compile(r"(?:(?P<backend>[\w-]+):)?(?:(?:int)?(?P<bits>\d+)|k(?P<keys>\d+)v(?P<values>\d+))")


@dataclass(frozen=True)
class QuantizationSetting:
    """How a quantized cache rounds states.

    Attributes:
        name: `int4`, `k4v2` (bits of keys and of values), `fp8`, or with another backend, `hqq:4`.
        options: the options of `QuantizedCache`.
    """

    name: str
    options: dict[str, Any] = field(hash=False)

    @property
    def generate_options(self) -> dict[str, Any]:
        """Arguments of `generate()` that ask for such a cache, after `kvlayers.install()`."""
        if NAMED.get(self.name) == self.options:
            return {"cache_implementation": self.name}
        return {"cache_implementation": "quantized", "cache_config": self.options}

    def make(self, config: Any, length_hint: int | None = None) -> QuantizedCache:
        """An empty cache for a model. Raises the errors of `QuantizedCache`."""
        return QuantizedCache(config=config, length_hint=length_hint, **self.options)


def setting(text: str) -> QuantizationSetting:
    """The setting with a name.

    Args:
        text: bits (`4` or `int4`), bits of keys and of values (`k4v2`), either with a backend (`hqq:4`), or a backend
            alone (`fp8`).

    Raises:
        OptionError: `text` is no such name. Whether the backend has such bits is checked when a cache is made.

    Example:
        >>> setting("4").name, setting("k4v2").options
        ('int4', {'key_nbits': 4, 'value_nbits': 2})
    """
    asked = text.strip().lower()
    if asked in quantizer_names():
        return QuantizationSetting(asked, {"backend": asked})
    found = _FORMS.fullmatch(asked)
    if found is None or (found["backend"] or NATIVE) not in quantizer_names():
        raise OptionError(
            "`--bits` must be bits, such as 4, k4v2 (4 for keys, 2 for values) or hqq:4, or a backend "
            f"({', '.join(quantizer_names())}), got {text!r}."
        )
    backend = {} if found["backend"] in (None, NATIVE) else {"backend": found["backend"]}
    prefix = f"{found['backend']}:" if backend else ""
    if found["bits"]:
        bits = int(found["bits"])
        return QuantizationSetting(f"{prefix}{bits}" if backend else f"int{bits}", {**backend, "nbits": bits})
    keys, values = int(found["keys"]), int(found["values"])
    return QuantizationSetting(f"{prefix}k{keys}v{values}", {**backend, "key_nbits": keys, "value_nbits": values})


def settings(text: str) -> list[QuantizationSetting]:
    """Settings separated by commas, without duplicates. Raises the errors of `setting`.

    Example:
        >>> [each.name for each in settings("8, 4,int4,fp8")]
        ['int8', 'int4', 'fp8']
    """
    found = [setting(each) for each in text.split(",")]
    return list({each.name: each for each in found}.values())


Key = tuple[str, str]
"""A library and the name of a cache."""

_MAKERS: dict[str, Callable[[Any, int], Any]] = {
    "dynamic": lambda config, length: transformers.DynamicCache(config=config),
    "static": lambda config, length: transformers.StaticCache(config, max_cache_len=length),
    # With the axes that transformers' documentation recommends for each.
    "quanto": lambda config, length: transformers.QuantizedCache("quanto", config, 4, axis_key=0, axis_value=0),
    "quanto:2": lambda config, length: transformers.QuantizedCache("quanto", config, 2, axis_key=0, axis_value=0),
    "hqq": lambda config, length: transformers.QuantizedCache("hqq", config, 4, axis_key=1, axis_value=1),
    "hqq:2": lambda config, length: transformers.QuantizedCache("hqq", config, 2, axis_key=1, axis_value=1),
}
_PACKAGES = {
    "quanto": ("optimum", "optimum.quanto"),
    "quanto:2": ("optimum", "optimum.quanto"),
    "hqq": ("hqq",),
    "hqq:2": ("hqq",),
}

TRANSFORMERS_QUANTIZED = tuple(_PACKAGES)
"""Caches of transformers that round states."""


@dataclass(frozen=True)
class Contender:
    """One cache in a comparison.

    Attributes:
        library: `"kvlayers"`, `"transformers"`, or the module of another package.
        cache: name of the cache, or of the callable of that module.
        make: makes an empty cache. Raises `KVLayersError` if the model does not support it.
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
        return f"{self.library}{' ' if self.library in (KVLAYERS, TRANSFORMERS) else ':'}{self.cache}"

    @property
    def short_name(self) -> str:
        """The name, without the library if it is kvlayers."""
        return self.cache if self.library == KVLAYERS else self.name

    @property
    def generate_options(self) -> dict[str, Any] | None:
        """Arguments of `generate()` that ask for the cache after `kvlayers.install()`, `None` if it has no name."""
        named = named_cache(self.cache) if self.library == KVLAYERS else None
        return None if named is None else named.generate_options

    def fidelity(self) -> Fidelity:
        """What the cache does to the states that the model attends to. Makes a cache to find out.

        Raises:
            UnsupportedLayerError: a cache of another package does not say.
            KVLayersError: the model does not support the cache.
        """
        if self.library == TRANSFORMERS:
            return "rounded" if self.cache in TRANSFORMERS_QUANTIZED else "exact"
        cache = self.make()
        if not isinstance(cache, Cache):
            raise UnsupportedLayerError(
                f"expected a cache of kvlayers, which knows what it does to states, but {self.name} makes a "
                f"{type(cache).__name__}."
            )
        return fidelity_of(cache)


def make_contender(library: str, name: str, model: Any, length: int) -> Contender:
    """A contender by its name.

    Args:
        library: `"kvlayers"` or `"transformers"`.
        name: a name that is registered with kvlayers, which may have options behind it (see `named_cache`), or one of
            `TRANSFORMERS_CACHES`, which may have `:2` behind it for 2 bits.
        model: the model, or its config.
        length: the most tokens that the cache will hold.

    Raises:
        OptionError: the options cannot be read.
    """
    if library == KVLAYERS:
        named = named_cache(name) or NamedCache(name)
        # With the length that generate() would pass as a hint after `kvlayers.install()`.
        request = CacheRequest(config_of(model), named.options, length_hint=length, layer_devices=layer_devices(model))
        return Contender(KVLAYERS, name, lambda: cache_for(named.name, request))
    return Contender(
        TRANSFORMERS, name, lambda: _made(f"{TRANSFORMERS}:{name}", lambda config: _MAKERS[name](config, length), model)
    )


def is_installed(name: str) -> bool:
    """Whether the packages that one of `TRANSFORMERS_CACHES` needs are installed."""
    return all(importlib.util.find_spec(package) is not None for package in _PACKAGES.get(name, ()))


def exact_names(config: Any) -> list[str]:
    """Names of kvlayers' caches that keep the states that the model attends to as they came."""
    has_windows = any(spec.layer_type in WINDOWED for spec in model_layers.layer_specs(config))
    return ["dynamic", "static", *(["sliding_window", "hybrid"] if has_windows else [])]


def named_contender(name: str, model: Any, length: int) -> Contender:
    """A contender by the name that a user gives it.

    A module of other code is also looked for in the current directory, as `python -m` does. Its callable gets the
    model's config, and returns a new, empty cache at each call.

    Args:
        name: the name of a cache that is registered with kvlayers (`int4`), also with options behind it
            (`sink:window_length=512`), of a cache of transformers (`transformers:quanto:2`), of a callable that makes a
            cache from a model config (`package.module:callable`, `file.py:callable`), or of an eviction rule
            (`file.py:Rule`). These two may have options behind them as well (`file.py:Rule:keep=0.5`).
        model: the model, or its config.
        length: the most tokens that the cache will hold.

    Raises:
        OptionError: there is no such cache, or the package that it needs is not installed.

    Example:
        >>> import transformers
        >>> named_contender("transformers:static", transformers.LlamaConfig(num_hidden_layers=1), 64).name
        'transformers static'
    """
    if named_cache(name) is not None:
        return make_contender(KVLAYERS, name, model, length)
    library, _, cache = name.partition(":")
    if library == TRANSFORMERS and cache in _MAKERS:
        return _of_transformers("name", cache, model, length)
    if library == TRANSFORMERS or not cache:
        raise _unknown(name)
    attribute, _, written = cache.partition(":")
    options = options_after(f"{library}:{attribute}", written, name) if written else {}
    factory = functools.partial(_factory(name, _imported(name, library, attribute)), **options)
    return Contender(library, cache, lambda: _made(name, factory, model))


def against_contenders(names: Sequence[str], model: Any, length: int) -> list[Contender]:
    """Caches of transformers that kvlayers' caches are compared with.

    Args:
        names: names of transformers' caches (`quanto:2`), or `"transformers"` for all of its quantized caches whose
            packages are installed and that the model supports.
        model: the model, or its config.
        length: the most tokens that a cache will hold.

    Raises:
        OptionError: there is no such cache, or the package that it needs is not installed.
    """
    found = []
    for name in names:
        cache = name.removeprefix(f"{TRANSFORMERS}:")
        if name == TRANSFORMERS:
            every = [make_contender(TRANSFORMERS, each, model, length) for each in _PACKAGES if is_installed(each)]
            found += [each for each in every if _is_supported(each)]
        elif cache in _MAKERS:
            found.append(_of_transformers("against", cache, model, length))
        else:
            raise OptionError(
                f"`against` must be {TRANSFORMERS}, or one of its caches ({', '.join(_MAKERS)}), got {name!r}."
            )
    return list({each.key: each for each in found}.values())


def _of_transformers(argument: str, cache: str, model: Any, length: int) -> Contender:
    if not is_installed(cache):
        package = cache.partition(":")[0]
        raise OptionError(
            f'`{argument}` {cache!r} needs a package that is not installed: pip install "kvlayers[{package}]"'
        )
    return make_contender(TRANSFORMERS, cache, model, length)


def _is_supported(contender: Contender) -> bool:
    try:
        contender.make()
    except KVLayersError:
        return False
    return True


def _made(name: str, factory: Callable[[Any], Any], model: Any) -> Any:
    """The cache that code of another library makes from the model's config. Any error of that code is one line."""
    try:
        cache = factory(config_of(model))
        is_filled = isinstance(cache, transformers.Cache) and holds_states(cache)
    except KVLayersError:
        raise
    # `SystemExit` is no `Exception`, and would end the command without a word.
    except (Exception, SystemExit) as error:
        raise OptionError(
            f"{name} cannot make a cache for this model, {type(error).__name__} ({_first_line(error)}): choose another "
            "cache, or another model."
        ) from error
    if not isinstance(cache, transformers.Cache):
        raise OptionError(
            f"{name} must return a cache of transformers, got a {type(cache).__name__}: correct the callable."
        )
    if is_filled:
        raise OptionError(
            f"{name} must return a new, empty cache at each call, got one that holds states: correct the callable."
        )
    return cache


def _imported(name: str, module: str, attribute: str) -> object:
    """An attribute of a module, which may be the path of a file."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        holder = _file(os.path.realpath(module)) if module.endswith(".py") else importlib.import_module(module)
        return operator.attrgetter(attribute)(holder)
    # Importing runs any code, also that of a script that ends with sys.exit().
    except (Exception, SystemExit) as error:
        raise OptionError(
            f"`name` must be a callable that can be imported, got {name!r}, {type(error).__name__} "
            f"({_first_line(error)}): correct the name, or install its package."
        ) from error


@functools.cache
def _file(path: str) -> Any:
    """What a file defines. It runs once, as a module does: it may register rules, and import its neighbours."""
    sys.path.insert(0, os.path.dirname(path))
    return SimpleNamespace(**runpy.run_path(path))


def _factory(name: str, found: object) -> Callable[..., Any]:
    """What makes a cache from a model's config: a callable as it is, and an eviction rule with an `EvictingCache`."""
    if isinstance(found, EvictionRule):
        return functools.partial(EvictingCache, rule=found)
    if isinstance(found, type) and issubclass(found, EvictionRule):
        # Made with the cache, where an error of its own is one line.
        return lambda config, **options: EvictingCache(config, rule=found(), **options)
    if not callable(found):
        raise OptionError(
            f"`name` must be a callable or an eviction rule, but {name} is a {type(found).__name__}: name one of them."
        )
    factory: Callable[..., Any] = found
    return factory


def _unknown(name: str) -> OptionError:
    known = [*cache_names(), *(f"{TRANSFORMERS}:{each}" for each in _MAKERS)]
    near = difflib.get_close_matches(name.lower(), known, n=3)
    suggestion = f" Did you mean {' or '.join(near)}?" if near else ""
    return OptionError(
        "`name` must be the name of a cache, or a callable or an eviction rule (package.module:callable, "
        f"file.py:Rule), got {name!r}.{suggestion} Known names are {', '.join(known)}."
    )


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".:")
