"""The prefix store that a call of `generate()` uses."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace

from kvlayers.errors import OptionError
from kvlayers.generation.call_arguments import check_is
from kvlayers.generation.patching import ScopedValue
from kvlayers.prefix import PrefixStore


@dataclass(frozen=True)
class ActiveStore:
    """A store that calls of `generate()` use.

    Attributes:
        store: where prefixes are looked up and inserted.
        namespace: the namespace in the store.
        on_bypass: is called with the reason if a call cannot use the store. It may raise.
    """

    store: PrefixStore
    namespace: str
    on_bypass: Callable[[str], None]


CURRENT: ScopedValue[ActiveStore | None] = ScopedValue("active prefix store", None)
"""The store of a call that starts now, `None` for no store."""


COVERED: ContextVar[list[int] | None] = ContextVar("tokens that calls in this context took from a store", default=None)
"""A list to which each call that looks into a store adds how many tokens it does not compute, over all its prompts."""

_of_blocks: list[PrefixStore] = []
"""The stores of the `installed` blocks that are open in any thread."""

OTHER_THREAD = (
    "it runs in another thread than the block `installed(prefix_store=...)`, whose namespace may be for that thread "
    "alone: pass the store to install(), or start the thread with contextvars.copy_context().run as its target"
)


@contextmanager
def noting_other_threads(store: PrefixStore) -> Iterator[None]:
    """Lasts for a block: calls of `generate()` by threads that have no store count as calls that bypass this one."""
    _of_blocks.append(store)
    try:
        yield
    finally:
        _of_blocks.remove(store)


def for_call() -> ActiveStore | None:
    """The store of a call that starts now. A call that a block in another thread may have been meant for is counted."""
    active = CURRENT.get()
    if active is None and _of_blocks and not CURRENT.is_overridden:
        for store in list(_of_blocks):
            store.record_bypass(OTHER_THREAD)
    return active


def optional_store(prefix_store: PrefixStore | None, namespace: str) -> ActiveStore | None:
    """A store that calls bypass if they cannot use it; the store counts them. `None` for no store.

    Raises:
        OptionError: `prefix_store` is not a `PrefixStore`, `namespace` is not a string, or it has no store.
    """
    check_is(
        PrefixStore | None,
        prefix_store,
        "prefix_store",
        "a kvlayers.PrefixStore",
        "make one, as in kvlayers.PrefixStore('1GiB', directory=PATH). The name of a cache goes by `cache`",
    )
    check_is(str, namespace, "namespace", "a string", "pass for example str(user_id)")
    if namespace and prefix_store is None:
        raise OptionError(f"`namespace` needs a `prefix_store`, got namespace={namespace!r} without one: pass both.")
    return None if prefix_store is None else ActiveStore(prefix_store, namespace, prefix_store.record_bypass)


def required_store(prefix_store: PrefixStore | None, namespace: str) -> ActiveStore | None:
    """A store that calls must use: a call that cannot use it raises `OptionError`. `None` for no store.

    Raises:
        OptionError: as `optional_store`.
    """
    active = optional_store(prefix_store, namespace)
    return None if active is None else replace(active, on_bypass=_refuse)


def _refuse(reason: str) -> None:
    raise OptionError(f"`prefix_store` must be left out of this call, as {reason}.") from None
