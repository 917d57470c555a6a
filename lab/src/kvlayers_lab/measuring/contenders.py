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
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import transformers

from kvlayers import Cache, CacheRequest, EvictingCache, cache_names, models
from kvlayers.calls import NamedCache, cache_for, fidelity_of, named_cache, options_after
from kvlayers.commands.console import first_line
from kvlayers.errors import KVLayersError, OptionError, UnsupportedLayerError
from kvlayers.eviction import EvictionRule
from kvlayers.models import WINDOWED, config_of, layer_devices
from kvlayers.quantizers import quantizer_names
from kvlayers.stores import Fidelity
from kvlayers_lab.evaluation.caches import holds_states
from kvlayers_lab.names import KVLAYERS, TRANSFORMERS

NATIVE = "native"
OWN_NAMES = ("int8", "int4", "int2", "fp8")
"""Settings for which a cache is registered by the same name."""

_FORMS = re.compile(r"(?:(?P<backend>[\w-]+):)?(?:(?:int)?(?P<bits>\d+)|k(?P<keys>\d+)v(?P<values>\d+))")


def setting(text: str) -> tuple[str, NamedCache]:
    """The name of a setting of quantized caches, and the cache that has it.

    Args:
        text: bits (`4` or `int4`), bits of keys and of values (`k4v2`), either with a backend (`hqq:4`), or a backend
            alone (`fp8`).

    Returns:
        The name is `int4`, `k4v2` (bits of keys and of values), `fp8`, or with another backend, `hqq:4`.

    Raises:
        OptionError: `text` is no such name. Whether the backend has such bits is checked when a cache is made.

    Example:
        >>> setting("4")
        ('int4', NamedCache(name='int4', options={}))
        >>> setting("k4v2")
        ('k4v2', NamedCache(name='quantized', options={'key_nbits': 4, 'value_nbits': 2}))
    """
    asked = text.strip().lower()
    found = _FORMS.fullmatch(asked)
    options: dict[str, Any]
    if asked in quantizer_names():
        name, options = asked, {"backend": asked}
    elif found is None or (found["backend"] or NATIVE) not in quantizer_names():
        raise OptionError(
            "`--bits` must be bits, such as 4, k4v2 (4 for keys, 2 for values) or hqq:4, or a backend "
            f"({', '.join(quantizer_names())}), got {text!r}."
        )
    else:
        is_native = found["backend"] in (None, NATIVE)
        bits = {"nbits": found["bits"], "key_nbits": found["keys"], "value_nbits": found["values"]}
        options = {option: int(number) for option, number in bits.items() if number}
        name = found["bits"] or f"k{found['keys']}v{found['values']}"
        if is_native and found["bits"]:
            name = f"int{name}"
        if not is_native:
            name, options = f"{found['backend']}:{name}", {"backend": found["backend"], **options}
    return name, NamedCache(name) if name in OWN_NAMES else NamedCache("quantized", options)


def settings(text: str) -> dict[str, NamedCache]:
    """Settings separated by commas, by their names. Raises the errors of `setting`.

    Example:
        >>> [*settings("8, 4,int4,fp8")]
        ['int8', 'int4', 'fp8']
    """
    return dict(map(setting, text.split(",")))


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
        generate_options: arguments of `generate()` that ask for the cache after `kvlayers.install()`, `None` if it has
            no name.
    """

    library: str
    cache: str
    make: Callable[[], Any]
    generate_options: Mapping[str, Any] | None = None

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


def uses_of(contenders: Iterable[Contender]) -> dict[str, Mapping[str, Any]]:
    """Arguments of `generate()` that ask for each cache, by its short name, if there are such arguments."""
    return {each.short_name: each.generate_options for each in contenders if each.generate_options is not None}


def kvlayers_contender(shown: str, named: NamedCache, model: Any, length: int) -> Contender:
    """A cache of kvlayers that is shown by a name.

    Args:
        shown: the name that is shown.
        named: the cache.
        model: the model, or its config.
        length: the most tokens that the cache will hold.
    """
    # With the length that generate() would pass as a hint after `kvlayers.install()`.
    request = CacheRequest(config_of(model), named.options, length_hint=length, layer_devices=layer_devices(model))
    return Contender(KVLAYERS, shown, lambda: cache_for(named.name, request), named.generate_options)


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
        return kvlayers_contender(name, named_cache(name) or NamedCache(name), model, length)
    return Contender(
        TRANSFORMERS, name, lambda: _made(f"{TRANSFORMERS}:{name}", lambda config: _MAKERS[name](config, length), model)
    )


def is_installed(name: str) -> bool:
    """Whether the packages that one of `TRANSFORMERS_CACHES` needs are installed."""
    return all(importlib.util.find_spec(package) is not None for package in _PACKAGES.get(name, ()))


def exact_names(config: Any) -> list[str]:
    """Names of kvlayers' caches that keep the states that the model attends to as they came."""
    has_windows = any(spec.layer_type in WINDOWED for spec in models.layer_specs(config))
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
            found += [each for each in every if is_supported(each)]
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
            f'`{argument}` {cache!r} needs a package that is not installed: pip install ".[{package}]" in a checkout'
        )
    return make_contender(TRANSFORMERS, cache, model, length)


def is_supported(contender: Contender) -> bool:
    """Whether the model supports the cache. A sink cache, for example, needs rotary position embeddings."""
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
            f"{name} cannot make a cache for this model, {type(error).__name__} ({first_line(error)}): choose another "
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
            f"({first_line(error)}): correct the name, or install its package."
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
