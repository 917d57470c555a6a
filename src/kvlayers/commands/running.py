"""`kvlayers run`: what it passes to the Python processes under it, and what they do with it."""

import functools
import json
import logging
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvlayers.errors import KVLayersError, OptionError

if TYPE_CHECKING:
    from kvlayers.prefix import PrefixStore

logger = logging.getLogger(__name__)

VARIABLE = "KVLAYERS_RUN"
"""Environment variable with the options of `kvlayers run`, as JSON."""

STARTUP = Path(__file__).parent / "startup"
"""Directory of the `sitecustomize` that each Python process runs when it starts."""


def store_of(text: str) -> "PrefixStore":
    """The prefix store that a text asks for.

    Args:
        text: bytes of memory ("2GiB"), a directory or a URL, or both ("2GiB,DIRECTORY"). What begins with a digit, and
            has no slash, is bytes.

    Raises:
        OptionError: it is no amount of bytes and no directory, as for `PrefixStore`.
        CachePathError: the directory cannot be reached, made, read or written to.

    Example:
        >>> store_of("2GiB")
        PrefixStore(0 entries, 0 B of 2.00 GiB)
    """
    from kvlayers.prefix import PrefixStore

    first, _, rest = text.partition(",")
    if text[:1].isdigit() and "/" not in first:
        return PrefixStore(first, directory=rest or None)
    return PrefixStore(directory=text)


@dataclass(frozen=True)
class Running:
    """The options of `kvlayers run`.

    Attributes:
        cache: name of the cache of calls that name none.
        prefix_store: text for `store_of`, `None` for no store.
        namespace: namespace of the store.
        by_key: whether only requests to `transformers serve` use the store, each API key in a namespace of its own.
    """

    cache: str | None
    prefix_store: str | None
    namespace: str
    by_key: bool

    def check(self) -> None:
        """Raise what `install` would raise, and what opening the store raises."""
        if self.cache is not None:
            from kvlayers.generation.cache_by_name import DefaultCache

            DefaultCache(self.cache)
        if self.prefix_store is not None:
            store_of(self.prefix_store)
        elif self.namespace or self.by_key:
            option = "namespace" if self.namespace else "by_key"
            raise OptionError(f"`{option}` needs a `prefix_store`, got none: pass both.")

    def environment(self, before: Mapping[str, str]) -> dict[str, str]:
        """The environment variables in which Python processes install kvlayers with these options."""
        paths = [str(STARTUP), *filter(None, [before.get("PYTHONPATH")])]
        return {**before, VARIABLE: json.dumps(asdict(self)), "PYTHONPATH": os.pathsep.join(paths)}


@functools.cache
def _in_this_process() -> "tuple[Running, PrefixStore | None]":
    """The options in the environment, and the store; `None` if it cannot be reached any more, as the log says."""
    options = Running(**json.loads(os.environ[VARIABLE]))
    try:
        return options, None if options.prefix_store is None else store_of(options.prefix_store)
    except KVLayersError as error:
        logger.warning("This process goes on without the prefix store: %s", error)
        return options, None


def install() -> None:
    """Install kvlayers with the options in the environment."""
    from kvlayers.generation import install as generation

    options, store = _in_this_process()
    of_all = None if options.by_key else store
    generation.install(cache=options.cache, prefix_store=of_all, namespace="" if of_all is None else options.namespace)


def change_the_server() -> None:
    """Let `transformers serve` report what was reused, and give each API key a namespace if that was asked for."""
    from kvlayers.generation import served

    options, store = _in_this_process()
    served.report_reuse()
    if store is not None and options.by_key:
        served.separate_keys(store, options.namespace)
