"""Options of `install()` for caches and prompts that are passed to models."""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from kvlayers.errors import OptionError


@dataclasses.dataclass(frozen=True)
class InstallOptions:
    """The options.

    Attributes:
        replace_empty_caches: whether an empty cache of transformers that is given gets kvlayers' layers.
        strict_prompts: whether a prompt that differs from what a cache has seen is an error, rather than a warning.
    """

    replace_empty_caches: bool = True
    strict_prompts: bool = False


_of_all = InstallOptions()
_of_context: ContextVar[InstallOptions | None] = ContextVar("what the blocks of this context said", default=None)


def current() -> InstallOptions:
    """The options of a call that is made now."""
    return _of_context.get() or _of_all


def for_all() -> InstallOptions:
    """The options of calls in contexts without options of their own."""
    return _of_all


def changed(options: InstallOptions, replace_empty_caches: bool | None, strict_prompts: bool | None) -> InstallOptions:
    """`options`, changed by the arguments that are not `None`.

    Raises:
        OptionError: an option is neither true nor false, nor `None`.
    """
    given = {"replace_empty_caches": replace_empty_caches, "strict_prompts": strict_prompts}
    for name, value in given.items():
        if value is not None and not isinstance(value, bool):
            raise OptionError(f"expected {name} to be True or False, but saw {value!r}.")
    return dataclasses.replace(options, **{name: value for name, value in given.items() if value is not None})


def use_for_all(options: InstallOptions) -> None:
    """Let `options` hold for all calls, but for those in a context that says otherwise."""
    global _of_all
    _of_all = options


@contextmanager
def using(options: InstallOptions) -> Iterator[None]:
    """Let `options` hold for calls in this context, which is one thread's."""
    token = _of_context.set(options)
    try:
        yield
    finally:
        _of_context.reset(token)
