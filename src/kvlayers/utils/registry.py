"""Registries of named factories and classes, added by a call or by another package's entry points."""

import contextlib
import functools
import importlib.metadata
import inspect
import itertools
import threading
from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar

from typing_extensions import override

from kvlayers.errors import OptionError, RegistryError
from kvlayers.utils import late
from kvlayers.utils.options import suggestion

Entry = TypeVar("Entry", bound=Callable[..., Any])
Factory = TypeVar("Factory", bound=Callable[..., Any])
Made = TypeVar("Made")


class Registry(Generic[Entry]):
    """Factories or classes by name.

    Args:
        what: noun for an entry in errors, such as "store".
        group: group of the entry points of other packages, which are entries under their own names.
        unregister: name of the public function that removes an entry, for errors.
        base: the class that entries derive from, or that their objects have; leave it out if entries may be anything.
    """

    def __init__(self, what: str, group: str, unregister: str, base: type = object) -> None:
        self.what = what
        self._base = base
        self.group = group
        self._unregister = unregister
        self._entries: dict[str, Entry] = {}
        self._adding = threading.RLock()

    def add(self, name: str, entry: Entry) -> None:
        """Add an entry.

        Raises:
            RegistryError: the name is empty or taken.
        """
        with self._adding:
            # Another thread may have taken the name since it was checked.
            self.check_free(name)
            self._entries[name] = entry

    def check_free(self, name: object) -> None:
        """Raise `RegistryError` if a name is empty or taken."""
        if not isinstance(name, str) or not name.strip():
            raise RegistryError(
                f"`name` of the {self.what} must be a string that is not empty, got {name!r}: pass one."
            )
        taken_by = self._entries.get(name)
        if taken_by is not None:
            raise RegistryError(
                f"The name '{name}' is already registered by {taken_by.__module__}.{taken_by.__qualname__}: choose "
                f"another one, or call {self._unregister}('{name}') first."
            )

    def remove(self, name: str) -> None:
        """Remove an entry.

        Raises:
            RegistryError: the name is not registered.
        """
        if not isinstance(name, str) or self._entries.pop(name, None) is None:
            raise RegistryError(self.unknown(name))

    def unknown(self, name: object) -> str:
        """The error for a name that is not registered, which lists the names that are."""
        known = self.names()
        meant = suggestion(str(name).lower(), known)
        return f"unknown {self.what} name {name!r}{f': {meant}' if meant else '.'} Known names are {', '.join(known)}."

    def own_names(self) -> list[str]:
        """The names that were added by a call, sorted."""
        return sorted(self._entries)

    def names(self) -> list[str]:
        """All names, including those of rooms that were not imported yet and of entry points, sorted."""
        late.load_rooms()
        return sorted({*self._entries, *(point.name for point in self._entry_points)})

    def __contains__(self, name: object) -> bool:
        return name in self._entries or name in self.names()

    def get(self, name: object) -> Entry | None:
        """The entry with this name, `None` for an unknown name. Entry points are loaded when they are first needed.

        Raises:
            RegistryError: an entry point cannot be loaded, or has an object that cannot be registered here.
        """
        if not isinstance(name, str):
            return None
        if name not in self._entries:
            late.load_rooms()
        if name in self._entries or name not in self._entry_points.names:
            return self._entries.get(name)
        point = self._entry_points[name]
        try:
            loaded: Entry = point.load()
        except Exception as error:
            # A module of another package can raise anything.
            raise RegistryError(
                f"The {self.what} '{point.name}' is the entry point {point.value}, which cannot be loaded: {error!r}. "
                "Mend or remove the package that has it."
            ) from error
        self.check(loaded)
        return loaded

    def check(self, entry: object) -> None:
        """Raise `RegistryError` if `entry` cannot be registered here."""

    def _check_kind(self, entry: object) -> None:
        """Raise `RegistryError` if `entry` is no class derived from the base, or lacks members of its contract."""
        named = f"{self._base.__module__}.{self._base.__name__}"
        if not isinstance(entry, type) or not issubclass(entry, self._base):
            seen = f"the class {entry.__qualname__}" if isinstance(entry, type) else f"a {type(entry).__name__}"
            raise RegistryError(f"A {self.what} must be a class derived from {named}, got {seen}: derive it from that.")
        missing = sorted(getattr(entry, "__abstractmethods__", ()))
        if missing:
            raise RegistryError(
                f"{entry.__qualname__} must have every member of {named}, but it has no `{missing[0]}`: define "
                f"{', '.join(f'`{name}`' for name in missing)}."
            )

    def _first(
        self, names: Iterable[str], is_meant: Callable[[str], bool], wrong: type[Exception] = RegistryError
    ) -> str | None:
        """The first of some names that is meant, `None` if none is."""
        for name in names:
            # What is wrong with an entry is said to those who ask for its name.
            with contextlib.suppress(wrong):
                if is_meant(name):
                    return name
        return None

    @functools.cached_property
    def _entry_points(self) -> importlib.metadata.EntryPoints:
        return importlib.metadata.entry_points(group=self.group)


class FactoryRegistry(Registry[Callable[..., Made]], Generic[Made]):
    """Factories without arguments, by the names that an option may have. They make objects of the base."""

    def register(self, name: str) -> Callable[[Factory], Factory]:
        """Decorator that adds a factory. Raises as `add`, and `RegistryError` for a factory that can make nothing."""
        self.check_free(name)

        def add(factory: Factory) -> Factory:
            self.check(factory)
            self.add(name, factory)
            return factory

        return add

    @override
    def check(self, entry: object) -> None:
        if isinstance(entry, type):
            self._check_kind(entry)
        try:
            inspect.signature(entry).bind()  # type: ignore[arg-type]
        except TypeError as error:
            raise RegistryError(
                f"The factory of the {self.what} must be called without arguments, but {error}: give each argument a "
                "default, or register a function that passes it."
            ) from error
        except ValueError:
            # A factory written in C may have no signature.
            return

    def name_of(self, made: Made) -> str | None:
        """The name of a factory that makes an object equal to `made`, `None` if no factory does."""
        return self._first(self.names(), lambda name: self.make(name) == made, Exception)

    def make(self, name: object) -> Made:
        """An object of the factory called `name`.

        Raises:
            OptionError: no factory has this name.
            RegistryError: the factory does not return an object of the class.
        """
        factory = self.get(name)
        if factory is None:
            raise OptionError(self.unknown(name))
        made: Made = factory()
        if not isinstance(made, self._base):
            raise RegistryError(
                f"The factory of the {self.what} '{name}' must return an object of {self._base.__name__}, but "
                f"returned a {type(made).__name__}: correct the factory."
            )
        return made


Kind = TypeVar("Kind")


class ClassRegistry(Registry[type[Kind]], Generic[Kind]):
    """The classes whose objects may be made from a file, by their names in files.

    Args:
        what: as for `Registry`.
        group: as for `Registry`.
        unregister: as for `Registry`.
        base: the base class, whose contract all of them fulfil.
        check: is called with a class and the base, and raises `RegistryError` if the facts that describe an object of
            the class are not enough to make an equal one.
    """

    def __init__(
        self,
        what: str,
        group: str,
        unregister: str,
        base: type[Kind],
        check: Callable[[Any, Any], None] | None = None,
    ) -> None:
        super().__init__(what, group, unregister, base)
        self._check_class = check
        self._twins: dict[type, type] = {}

    def register(self, cls: Any = None, *, name: str | None = None) -> Any:
        """Let objects of a class be made from a file, as a decorator or by a call. Return the class.

        Args:
            cls: the class; without it, the result is a decorator.
            name: its name in files; the name of the class if it is not given.

        Raises:
            RegistryError: the name is taken, or the class lacks a member of the contract. The error names the member.
        """
        if cls is None:
            return functools.partial(self.register, name=name)
        self.check(cls)
        self.add(cls.__name__ if name is None else name, cls)
        return cls

    def register_twin(self, twin: type, cls: type) -> None:
        """Let a class go by the name of another one, which also makes such objects."""
        self._twins[twin] = cls

    @override
    def check(self, entry: object) -> None:
        """Raise `RegistryError` if a class lacks members of the contract, which the error names."""
        self._check_kind(entry)
        if self._check_class is not None:
            self._check_class(entry, self._base)

    def name_of(self, cls: type) -> str:
        """The name of a class in files: the one that it was last registered by, else its module and name."""
        named = self._twins.get(cls, cls)
        names = itertools.chain(reversed(list(self._entries)), (point.name for point in self._entry_points))
        return self._first(names, lambda name: self.get(name) is named) or f"{cls.__module__}.{cls.__qualname__}"
