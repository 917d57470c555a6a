"""Names of caches with options behind them, as people type them: `snapkv:keep=0.5,quantization.nbits=4`."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvlayers.errors import OptionError
from kvlayers.generation.registry import is_registered

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


def named_cache(text: str) -> NamedCache | None:
    """The name and the options in a text, `None` if the text does not begin with a registered name.

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
    if is_registered(text):
        return NamedCache(text)
    name, colon, written = text.partition(":")
    if not colon or not is_registered(name):
        return None
    return NamedCache(name, options_after(name, written, text))


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
        _set(options, option.split("."), _value(value), text)
    return options


def _set(options: dict[str, Any], path: list[str], value: Any, text: str) -> None:
    first, *rest = path
    inner = options.setdefault(first, {}) if rest else None
    if rest and isinstance(inner, dict):
        _set(inner, rest, value, text)
    elif rest or first in options:
        raise OptionError(f"`name` must have each option once, got {first!r} twice in {text!r}: leave one out.")
    else:
        options[first] = value


def _value(written: str) -> Any:
    try:
        return json.loads(written)
    except ValueError:
        return written
