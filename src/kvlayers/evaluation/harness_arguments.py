"""The arguments of the harness's model `kvlayers` that are about its cache."""

import difflib
import inspect
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import transformers
from lm_eval.models.huggingface import HFLM
from lm_eval.utils import handle_arg_string

from kvlayers.errors import OptionError
from kvlayers.evaluation.caches import check_count
from kvlayers.generation.registry import is_registered, make_cache, unknown_name
from kvlayers.prefix import PrefixStore
from kvlayers.utils.units import amount_of_bytes

OPTION_SEPARATOR, VALUE_SEPARATOR = "+", ":"
"""In `nbits:2+residual_length:64`. The harness splits its model arguments at commas."""

AUTO = "auto"
"""The value of an argument that kvlayers shall choose."""

DEFAULT_STORE_BYTES = 2**30


@dataclass(frozen=True)
class CacheArguments:
    """Which cache the model reads through, and how.

    Attributes:
        name: name of the cache.
        options: its options.
        chunk: tokens of a forward pass, `None` for whole contexts.
        prefix_store: bytes for the store of prefixes, 0 for none, or `AUTO`: `DEFAULT_STORE_BYTES` with an exact cache,
            and none with other caches.
    """

    name: str
    options: Mapping[str, Any]
    chunk: int | None
    prefix_store: int | str

    @classmethod
    def parse(cls, cache: object, cache_config: object, chunk: int | None, prefix_store: object) -> "CacheArguments":
        """Check the arguments as the harness passes them.

        Raises:
            RegistryError: no cache has this name.
            OptionError: another argument has a wrong value.
        """
        if not isinstance(cache, str):
            raise OptionError(f"`cache` must be the name of a cache, got {cache!r}: pass a name such as 'int4'.")
        if not is_registered(cache):
            raise unknown_name(cache)
        if chunk is not None:
            check_count("chunk", chunk)
        return cls(cache, parse_options(cache_config), chunk, _parse_store(prefix_store))

    def make(self, model_or_config: object, length_hint: int) -> transformers.Cache:
        """An empty cache for a model that reads at most `length_hint` tokens. Raises as `kvlayers.make_cache`."""
        return make_cache(self.name, model_or_config, **{"length_hint": length_hint, **self.options})

    def make_store(self, is_exact: bool) -> PrefixStore | None:
        """The store of prefixes that generation uses, if any.

        Raises:
            OptionError: one was asked for, but the cache is not exact.
        """
        if self.prefix_store == AUTO:
            return PrefixStore(max_bytes=DEFAULT_STORE_BYTES) if is_exact else None
        if self.prefix_store == 0:
            return None
        if not is_exact:
            raise OptionError(
                f"`prefix_store` needs an exact cache, got cache={self.name!r}: leave it out, since texts would depend "
                "on which prompts came before."
            )
        return PrefixStore(max_bytes=self.prefix_store)


def _parse_store(given: object) -> int | str:
    if given is None or given == AUTO:
        return 0 if given is None else AUTO
    if not isinstance(given, int | str) or isinstance(given, bool):
        raise OptionError(f"`prefix_store` must be a number of bytes, such as 1GiB, or 'auto', got {given!r}.")
    nbytes = amount_of_bytes(given, "prefix_store")
    if nbytes < 0:
        raise OptionError(f"`prefix_store` must not be negative, got {given!r}: pass 0 for no store.")
    return nbytes


def parse_options(given: object) -> dict[str, Any]:
    """The options of a cache: a mapping, JSON text, or text such as `nbits:2+residual_length:64`.

    Raises:
        OptionError: it has another form.

    Example:
        >>> parse_options("nbits:2+backend:hqq"), parse_options('{"nbits": 2}'), parse_options(None)
        ({'nbits': 2, 'backend': 'hqq'}, {'nbits': 2}, {})
    """
    if given is None:
        return {}
    options = _options_of_text(given) if isinstance(given, str) else given
    if not isinstance(options, Mapping) or not all(isinstance(name, str) for name in options):
        raise _wrong_options(given)
    return dict(options)


def _options_of_text(text: str) -> object:
    if text.lstrip().startswith("{"):
        try:
            return json.loads(text)
        except json.JSONDecodeError:
            raise _wrong_options(text) from None
    options = {}
    for part in text.split(OPTION_SEPARATOR):
        name, separator, value = part.partition(VALUE_SEPARATOR)
        if not (name.strip() and separator):
            raise _wrong_options(text)
        options[name.strip()] = handle_arg_string(value.strip())
    return options


def _wrong_options(given: object) -> OptionError:
    return OptionError(
        f"`cache_config` must be options of the cache, got {given!r}: write nbits:2+residual_length:64, or pass a JSON "
        "object or a dict."
    )


def check_batch_sizes(given: Mapping[str, Any]) -> None:
    """Raise `OptionError` unless `batch_size` and `max_batch_size`, if given, are numbers of sequences or "auto"."""
    for name in ("batch_size", "max_batch_size"):
        size = str(given.get(name, 1))
        if not size.startswith(AUTO) and not (size.isdecimal() and int(size) > 0):
            raise OptionError(f"`{name}` must be a whole number, at least 1, or 'auto', got {given[name]!r}.")


def check_names(names: Iterable[str], own: Iterable[str]) -> None:
    """Raise `OptionError` if an argument for transformers is nearly one of the harness or of kvlayers.

    transformers refuses all other names that it does not know.

    Args:
        names: the arguments that are passed on to transformers.
        own: the arguments of kvlayers.
    """
    known = [*own, *inspect.signature(HFLM).parameters]
    of_transformers = inspect.signature(transformers.PreTrainedModel.from_pretrained).parameters
    for name in set(names) - {*known, *of_transformers}:
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.8)
        if near:
            raise OptionError(
                f"`{name}` is not a model argument: did you mean {near[0]!r}? kvlayers adds {', '.join(own)} to the "
                "arguments of the model 'hf'."
            )
