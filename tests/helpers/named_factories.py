"""Names of caches that are known for the length of a test."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import kvlayers


@contextmanager
def registered(**factories: Any) -> Iterator[list[str]]:
    """The names of some factories, which are given up at the end."""
    for name, factory in factories.items():
        kvlayers.register(name)(factory)
    try:
        yield list(factories)
    finally:
        for name in factories:
            kvlayers.unregister(name)
