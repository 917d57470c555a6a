"""Registries: names for kinds of things, taken by a call or offered by another package's entry points."""

import functools
import importlib.metadata
import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from typing_extensions import override

from kvlayers.errors import RegistryError

Thing = TypeVar("Thing", bound=Callable[..., Any])


class Registry(Generic[Thing]):
    """Names, and the factory or class that each of them stands for.

    Args:
        what: what a name stands for, as errors call it.
        group: entry points in this group are offered by other packages, each under its own name.
        unregister: the public function that gives up a name, as errors call it.
    """

    def __init__(self, what: str, group: str, unregister: str) -> None:
        self.what = what
        self.group = group
        self._unregister = unregister
        self._things: dict[str, Thing] = {}
        self._changing = threading.Lock()

    def add(self, name: str, thing: Thing) -> None:
        """Let `name` stand for `thing`.

        Raises:
            RegistryError: the name is empty, or it is taken.
        """
        with self._changing:
            # Another thread may have taken the name since it was checked.
            self.check_free(name)
            self._things[name] = thing

    def check_free(self, name: object) -> None:
        """Raise `RegistryError` if a name is empty, or if it is taken."""
        if not isinstance(name, str) or not name.strip():
            raise RegistryError(
                f"expected a name for the {self.what}, but saw {name!r}: pass a string that is not empty."
            )
        taken_by = self._things.get(name)
        if taken_by is not None:
            raise RegistryError(
                f"expected a name that is free, but '{name}' is taken by {taken_by.__module__}."
                f"{taken_by.__qualname__}: choose another, or {self._unregister}('{name}') first."
            )

    def remove(self, name: str) -> bool:
        """Give up a name. Returns whether it was taken."""
        with self._changing:
            return self._things.pop(name, None) is not None

    def names(self) -> list[str]:
        """Every name, those of other packages' entry points included, sorted."""
        return sorted({*self._things, *(point.name for point in self._entry_points)})

    def __contains__(self, name: object) -> bool:
        return name in self._things or any(point.name == name for point in self._entry_points)

    def get(self, name: object) -> Thing | None:
        """What a name stands for, `None` if it stands for nothing. An entry point is loaded when its name is asked for.

        Raises:
            RegistryError: an entry point offers what is not allowed here.
        """
        if not isinstance(name, str):
            return None
        if name in self._things:
            return self._things[name]
        for point in self._entry_points:
            if point.name == name:
                loaded: Thing = point.load()
                self.check(loaded)
                return loaded
        return None

    def check(self, thing: object) -> None:
        """Raise `RegistryError` if `thing` cannot be registered here."""

    @functools.cached_property
    def _entry_points(self) -> importlib.metadata.EntryPoints:
        return importlib.metadata.entry_points(group=self.group)


class DescribesItself:
    """What every class in a `ClassRegistry` has."""

    @classmethod
    def check_description(cls) -> None:
        """Raise `RegistryError` if what `describe` says would not be enough to make such a thing again."""


Kind = TypeVar("Kind", bound=DescribesItself)


class ClassRegistry(Registry[type[Kind]], Generic[Kind]):
    """The classes that may be made from a file, by the names that files know them by.

    Args:
        what: as for `Registry`.
        group: as for `Registry`.
        unregister: as for `Registry`.
        base: the class whose contract all of them fulfil.
    """

    def __init__(self, what: str, group: str, unregister: str, base: type[Kind]) -> None:
        super().__init__(what, group, unregister)
        self._base = base
        self._names: dict[type, str] = {}

    def register(self, cls: Any, name: str | None = None) -> None:
        """Register a class, by its own name if no other is given.

        Raises:
            RegistryError: the name is taken, or the class lacks a member of the contract.
        """
        self.check(cls)
        name = cls.__name__ if name is None else name
        self.add(name, cls)
        self._names[cls] = name

    def register_twin(self, cls: type, name: str) -> None:
        """Let states of `cls` be saved as those of the class that `name` stands for, which makes such layers too."""
        self._names[cls] = name

    @override
    def remove(self, name: str) -> bool:
        removed = super().remove(name)
        self._names = {cls: own for cls, own in self._names.items() if own != name}
        return removed

    @override
    def check(self, thing: object) -> None:
        """Raise `RegistryError` if a class does not have all members of the contract, with the name of the first."""
        base = f"kvlayers.{self._base.__name__}"
        if not isinstance(thing, type) or not issubclass(thing, self._base):
            seen = f"the class {thing.__qualname__}" if isinstance(thing, type) else f"a {type(thing).__name__}"
            raise RegistryError(f"expected a class of a {self.what}, derived from {base}, but saw {seen}.")
        missing = sorted(getattr(thing, "__abstractmethods__", ()))
        if missing:
            raise RegistryError(
                f"expected {thing.__qualname__} to have every member of {base}, but it has no `{missing[0]}`: "
                f"define {', '.join(f'`{name}`' for name in missing)}."
            )
        thing.check_description()

    def name_of(self, cls: type) -> str:
        """The name that files know a class by: that which it is registered by, else its module and name."""
        name = self._names.get(cls)
        if name is not None:
            return name
        whole = f"{cls.__module__}.{cls.__qualname__}"
        value = f"{cls.__module__}:{cls.__qualname__}"
        return next((point.name for point in self._entry_points if point.value == value), whole)
