"""Settings of quantized caches by their names on the command line."""

import re
from dataclasses import dataclass, field
from typing import Any

from kvlayers.caches.quantized import QuantizedCache
from kvlayers.errors import OptionError
from kvlayers.quantizers import quantizer_names

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
