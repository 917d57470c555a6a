"""`kvlayers run`: what it passes to the Python processes under it, and what they do with it."""

import json
import logging
import os
from collections.abc import Mapping
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

MEMORY = "1GiB"
"""Memory of a store with a directory, unless it is given."""


def store_of(text: str) -> "PrefixStore":
    """The prefix store that a text asks for.

    Args:
        text: bytes of memory ("2GiB"), a directory or a URL, or both ("2GiB,DIRECTORY"). What begins with a digit, and
            has no slash, is bytes.

    Raises:
        OptionError: it is none of these, as for `PrefixStore`.
        CachePathError: the directory cannot be reached, made, read or written to.

    Example:
        >>> store_of("2GiB")
        PrefixStore(0 entries, 0 B of 2.00 GiB)
    """
    from kvlayers.prefix import PrefixStore

    first, _, rest = text.partition(",")
    memory, directory = (first, rest) if text[:1].isdigit() and "/" not in first else (MEMORY, text)
    return PrefixStore(memory, directory=directory or None)


def check(cache: str | None, prefix_store: str | None, namespace: str) -> None:
    """Raise the error that `install` would raise for these options."""
    if cache is not None:
        from kvlayers.generation.default_cache import DefaultCache

        DefaultCache(cache)
    if prefix_store is not None:
        store_of(prefix_store)
    elif namespace:
        raise OptionError(f"`namespace` needs a `prefix_store`, got namespace={namespace!r} without one: pass both.")


def environment(
    before: Mapping[str, str], cache: str | None, prefix_store: str | None, namespace: str
) -> dict[str, str]:
    """The environment variables in which Python processes install kvlayers with these options."""
    options = {"cache": cache, "prefix_store": prefix_store, "namespace": namespace}
    paths = [str(STARTUP), *filter(None, [before.get("PYTHONPATH")])]
    return {**before, VARIABLE: json.dumps(options), "PYTHONPATH": os.pathsep.join(paths)}


def install() -> None:
    """Install kvlayers with the options in the environment; without the store if it cannot be reached any more."""
    from kvlayers.generation import install as generation

    options = json.loads(os.environ[VARIABLE])
    store, namespace = None, ""
    if options["prefix_store"] is not None:
        try:
            store, namespace = store_of(options["prefix_store"]), options["namespace"]
        except KVLayersError as error:
            logger.warning("This process goes on without the prefix store: %s", error)
    generation.install(cache=options["cache"], prefix_store=store, namespace=namespace)


def let_the_server_say_what_was_reused() -> None:
    """See `kvlayers.generation.served`."""
    from kvlayers.generation import served

    served.report_reuse()
