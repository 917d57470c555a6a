"""Changes to classes of transformers that can be taken back, and settings that `with` blocks override."""

import functools
import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any, Generic, TypeVar

Method = Callable[..., Any]


class Patch:
    """A replacement for one attribute of a class or module, which coexists with replacements by other libraries.

    Args:
        owner: the class, or the module.
        name: name of the attribute, usually a method. A class that lacks it gets it.
        wrap: makes the replacement from the method that it replaces. The replacement must set `__wrapped__`, as
            `functools.wraps` does, and must call the replaced method whenever it has nothing to do itself.
    """

    def __init__(self, owner: Any, name: str, wrap: Callable[[Any], Any]) -> None:
        self._owner, self._name, self._wrap = owner, name, wrap
        self._replacement: Any = None
        self._replaced: Any = None

    def apply(self) -> None:
        """Replace the attribute, unless it is replaced already."""
        current: Any = getattr(self._owner, self._name, None)
        # If another library has wrapped the replacement, the replacement is still called underneath.
        if self._replacement is None or (
            current is not self._replacement
            and inspect.unwrap(current, stop=lambda each: each is self._replacement) is not self._replacement
        ):
            # `None` if the class inherits or lacks the attribute.
            self._replaced, self._replacement = vars(self._owner).get(self._name), self._wrap(current)
            setattr(self._owner, self._name, self._replacement)

    def remove(self) -> None:
        """Restore the attribute, unless another library has replaced it: then the replacement stays underneath."""
        if self._replacement is None or vars(self._owner).get(self._name) is not self._replacement:
            return
        if self._replaced is None:
            delattr(self._owner, self._name)
        else:
            setattr(self._owner, self._name, self._replaced)
        self._replacement = self._replaced = None


def around(hook: Callable[..., Any], applies: Callable[[], bool] | None = None) -> Callable[[Any], Any]:
    """For a `Patch`: the replacement calls `hook` with the method that it replaces, and with its arguments.

    Args:
        hook: what is called.
        applies: whether `hook` is to be called now, rather than the method itself. Default: always.
    """

    def wrap(original: Any) -> Any:
        @functools.wraps(original, updated=())
        def replacement(*args: Any, **kwargs: Any) -> Any:
            return hook(original, *args, **kwargs) if applies is None or applies() else original(*args, **kwargs)

        return replacement

    return wrap


class Activation:
    """When a set of changes is in place: between explicit calls, during `with` blocks, and until running calls end.

    The changes are active while `activate` or a `block` asks for them. They stay in place a little longer if a call
    that began while they were active still runs. It is true while the changes are active.

    Args:
        apply: makes the changes. It is also called when they are in place already.
        remove: undoes whatever changes are in place.
    """

    def __init__(self, apply: Callable[[], None], remove: Callable[[], None]) -> None:
        self._apply, self._remove = apply, remove
        self._lock = threading.RLock()
        self._users: set[object] = set()
        """A token for each block, and the object itself between explicit calls."""
        self._calls: set[object] = set()

    def __bool__(self) -> bool:
        return bool(self._users)

    @property
    def is_in_place(self) -> bool:
        """Whether the changes are active, or a call that began while they were active still runs."""
        return bool(self._users or self._calls)

    @contextmanager
    def call(self) -> Iterator[bool]:
        """Lasts for one call, and yields whether the changes are active. If so, they stay in place until it ends.

        Thus no other thread can remove them in the middle of the call.
        """
        token = object()
        try:
            with self._lock:
                if self._users:
                    self._calls.add(token)
            yield token in self._calls
        finally:
            with self._lock:
                if token in self._calls:
                    self._leave(self._calls, token)

    def activate(self) -> None:
        """Make the changes, until `deactivate`."""
        with self._lock:
            self._users.add(self)
            try:
                self._apply()
            except BaseException:
                self._leave(self._users, self)
                raise

    def deactivate(self) -> None:
        """Remove the changes as soon as no running call needs them, even inside a block."""
        with self._lock:
            self._users.clear()
            self._leave(self._users, self)

    @contextmanager
    def block(self, is_active: bool = True) -> Iterator[None]:
        """`activate` for the length of a `with` block. Blocks nest and overlap: the last one to end deactivates.

        Args:
            is_active: `False` for a block that needs the changes in place for itself alone.
        """
        token, users = object(), self._users if is_active else self._calls
        try:
            with self._lock:
                users.add(token)
                self._apply()
            yield
        finally:
            with self._lock:
                self._leave(users, token)

    def _leave(self, users: set[object], token: object) -> None:
        users.discard(token)
        if not self._users and not self._calls:
            self._remove()


T = TypeVar("T")


class ScopedValue(Generic[T]):
    """A process-wide value that a context, which belongs to one thread, can override.

    Args:
        name: name of the setting, for debuggers.
        default: the process-wide value, until `set_default` changes it.
    """

    def __init__(self, name: str, default: T) -> None:
        self._default = default
        self._override: ContextVar[tuple[T] | None] = ContextVar(name, default=None)

    def get(self) -> T:
        """The value in this context."""
        override = self._override.get()
        return self._default if override is None else override[0]

    @property
    def is_overridden(self) -> bool:
        """Whether this context has a value of its own."""
        return self._override.get() is not None

    def set_default(self, value: T) -> None:
        """Change the process-wide value. Contexts with a value of their own keep it."""
        self._default = value

    def override(self, value: T) -> AbstractContextManager[None]:
        """Use `value` in this context for the length of a `with` block."""
        return overriding(self._override, (value,))


@contextmanager
def overriding(variable: ContextVar[T], value: T) -> Iterator[None]:
    """Set a variable of this context for the length of a `with` block."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)
