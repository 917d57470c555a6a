"""Which store of prefixes a call of `generate()` goes by."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from kvlayers.errors import OptionError
from kvlayers.prefix import PrefixStore


@dataclass(frozen=True)
class Prefixes:
    """A store that calls of `generate()` go by.

    Attributes:
        store: where prefixes are looked up and held.
        namespace: whose they are.
        unusable: what is done with the reason for which a call cannot go by it.
    """

    store: PrefixStore
    namespace: str
    unusable: Callable[[str], None]


def counting(prefix_store: PrefixStore | None, namespace: str) -> Prefixes | None:
    """A store whose calls are made without it where they cannot go by it, and counted; `None` for none.

    Raises:
        OptionError: it is no store, or `namespace` is no text, or comes without a store.
    """
    _check(prefix_store, namespace)
    return None if prefix_store is None else Prefixes(prefix_store, namespace, prefix_store.note_bypassed)


def required(prefix_store: PrefixStore | None, namespace: str) -> Prefixes | None:
    """A store without which no call is made; `None` for none.

    Raises:
        OptionError: as `counting`.
    """
    _check(prefix_store, namespace)
    return None if prefix_store is None else Prefixes(prefix_store, namespace, _refuse)


def _refuse(reason: str) -> None:
    raise OptionError(
        f"expected a call that can go by a prefix_store, but {reason}: leave prefix_store out for it."
    ) from None


def _check(prefix_store: object, namespace: object) -> None:
    if prefix_store is not None and not isinstance(prefix_store, PrefixStore):
        seen = type(prefix_store).__name__
        raise OptionError(f"expected prefix_store to be a kvlayers.PrefixStore, but saw a {seen}.")
    if not isinstance(namespace, str):
        raise OptionError(f"expected namespace to be a text, but saw a {type(namespace).__name__}.")
    if namespace and prefix_store is None:
        raise OptionError(f"expected a prefix_store beside namespace={namespace!r}, but saw none: pass both.")


_of_context: ContextVar[tuple[Prefixes | None] | None] = ContextVar("what calls in this context go by", default=None)
_of_all: Prefixes | None = None


@contextmanager
def using(prefixes: Prefixes | None) -> Iterator[None]:
    """Let calls in this context, which is one thread's, go by `prefixes` or by none, whatever is installed."""
    token = _of_context.set((prefixes,))
    try:
        yield
    finally:
        _of_context.reset(token)


def use_for_all(prefixes: Prefixes | None) -> None:
    """Let all calls go by `prefixes`, or by none, but for those in a context that says otherwise."""
    global _of_all
    _of_all = prefixes


def current() -> Prefixes | None:
    """What a call goes by that is made now."""
    of_context = _of_context.get()
    return _of_all if of_context is None else of_context[0]
