"""Descriptions of layers and stores: plain facts from which an equal empty layer or store is made."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from kvlayers.errors import RegistryError
from kvlayers.rope.rotary import Rotary

Fact = int | float | str | bool | None
"""A plain fact: a JSON value other than a list or an object. Numbers are finite."""

Facts = Mapping[str, Fact]
"""Plain facts by their names."""


@dataclass(frozen=True)
class DescriptionContext:
    """Everything besides its own facts that a layer or a store is made from.

    Attributes:
        read_layer: makes a layer of a kind from its facts.
        read_store: makes the store that the facts of a layer describe.
        rotaries: rotations of keys, by their fingerprints.
        length_hint: the most tokens that a layer expects its store to hold, `None` if unknown.
    """

    read_layer: "Callable[[Fact, Facts, DescriptionContext], Any]" = field(repr=False)
    read_store: "Callable[[Facts, DescriptionContext], Any]" = field(repr=False)
    rotaries: Mapping[str, Rotary] = field(default_factory=dict)
    length_hint: int | None = None

    def layer(self, kind: Fact, facts: Facts) -> Any:
        """A layer that is part of another one, from its own facts.

        Raises:
            RegistryError: no layer is registered by this name.
        """
        return self.read_layer(kind, facts, self)

    def store(self, facts: Facts, length_hint: int | None = None) -> Any:
        """The store that a layer's facts describe, `None` if the layer makes its own store.

        Args:
            facts: facts of the layer.
            length_hint: the most tokens that the layer expects the store to hold, if known.

        Raises:
            RegistryError: no store is registered by the name in the facts.
        """
        return self.read_store(facts, replace(self, length_hint=length_hint))

    def rotary(self, fingerprint: Fact) -> Rotary | None:
        """The rotation with this fingerprint; `None` for `None`."""
        return None if fingerprint is None else self.rotaries[str(fingerprint)]


class DescribedByArguments:
    """A class whose objects are described by the arguments of their initialiser.

    Attributes:
        described: names of arguments that are plain facts, each kept in an attribute of the same name.
        hints: names of arguments that are not described, because no state depends on them.

    A class that defines `describe` and `from_description` includes `described_arguments` and `arguments_from` in them,
    so that subclasses can add arguments.
    """

    described: ClassVar[tuple[str, ...]] = ()
    hints: ClassVar[tuple[str, ...]] = ()

    def described_arguments(self) -> dict[str, Fact]:
        """The described arguments of this object, by their names."""
        return {name: getattr(self, name) for name in self.described}

    @classmethod
    def arguments_from(cls, facts: Facts) -> dict[str, Any]:
        """The described arguments among `facts`."""
        return {name: facts[name] for name in cls.described}

    @classmethod
    def check_initialiser(cls) -> None:
        """Raise `RegistryError` if an inherited `from_description` would lose, or not find, an argument of `__init__`.

        The class that defines `from_description` knows the arguments of its own initialiser. A subclass names its
        further arguments in `described` or in `hints`, or defines `describe` and `from_description`.
        """
        maker = next(base for base in cls.__mro__ if "from_description" in vars(base))
        if maker is cls:
            return
        known = {*getattr(maker, "described", ()), *getattr(maker, "hints", ())}
        passed = [*cls.described, *(name for name in _arguments_of(maker) if name not in known)]
        taken = _arguments_of(cls)
        shown = ", ".join(f"`{name}`" for name in taken) or "no argument"
        for name in taken:
            if name not in passed and name not in cls.hints:
                raise RegistryError(
                    f"{cls.__qualname__}.described must name every argument of __init__ that a state depends on, but "
                    f"it does not name `{name}`: add it to `described`, or to `hints` if no state depends on it, or "
                    "define `describe` and `from_description`."
                )
        for name in passed:
            if name not in taken:
                raise RegistryError(
                    f"{cls.__qualname__}.__init__ must take the argument `{name}`, which `from_description` passes, "
                    f"but it takes {shown}: add it, or define `describe` and `from_description`."
                )


def _arguments_of(cls: type) -> list[str]:
    if cls.__init__ is object.__init__:  # type: ignore[misc]
        return []
    return list(inspect.signature(cls.__init__).parameters)[1:]  # type: ignore[misc]
