"""Descriptions: plain facts that a layer or a store says of itself, and that one like it is made from."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from kvlayers.errors import RegistryError
from kvlayers.rope.rotary import Rotary

Fact = int | float | str | bool | None
"""A plain fact: what JSON has beside lists and objects. Numbers are finite."""

Facts = Mapping[str, Fact]
"""Plain facts by their names."""


@dataclass(frozen=True)
class DescriptionContext:
    """What a layer or a store is made from beside its own facts.

    Attributes:
        read_layer: makes a layer of a kind from its facts.
        read_store: makes the store that the facts of a layer describe.
        rotaries: how keys are rotated, by the fingerprint of the rotation.
        length_hint: the most tokens that a layer expects its store to hold, `None` if it does not know.
    """

    read_layer: "Callable[[Fact, Facts, DescriptionContext], Any]" = field(repr=False)
    read_store: "Callable[[Facts, DescriptionContext], Any]" = field(repr=False)
    rotaries: Mapping[str, Rotary] = field(default_factory=dict)
    length_hint: int | None = None

    def layer(self, kind: Fact, facts: Facts) -> Any:
        """A layer that is part of another one, from its own facts.

        Raises:
            RegistryError: no kind of layer is registered by that name.
        """
        return self.read_layer(kind, facts, self)

    def store(self, facts: Facts, length_hint: int | None = None) -> Any:
        """The store that a layer's facts describe, `None` if that is the one which the layer makes by itself.

        Args:
            facts: those of the layer.
            length_hint: the most tokens that the layer expects the store to hold, if it knows.

        Raises:
            RegistryError: no kind of store is registered by the name that the facts have.
        """
        return self.read_store(facts, replace(self, length_hint=length_hint))

    def rotary(self, fingerprint: Fact) -> Rotary | None:
        """The rotation with that fingerprint; `None` for `None`."""
        return None if fingerprint is None else self.rotaries[str(fingerprint)]


class DescribedByArguments:
    """What is described by arguments of its initialiser.

    Attributes:
        described: names of arguments that are plain facts, and are kept in attributes of the same names.
        hints: names of arguments that are not described, as no state depends on them.
    """

    described: ClassVar[tuple[str, ...]] = ()
    hints: ClassVar[tuple[str, ...]] = ()

    def described_arguments(self) -> dict[str, Fact]:
        """The described arguments that this was made with, by their names."""
        return {name: getattr(self, name) for name in self.described}

    @classmethod
    def arguments_from(cls, facts: Facts) -> dict[str, Any]:
        """The described arguments among `facts`."""
        return {name: facts[name] for name in cls.described}

    @classmethod
    def check_arguments(cls, *others: str) -> None:
        """Raise `RegistryError` if the initialiser takes other arguments than those that are described.

        Args:
            others: arguments that it must take besides.
        """
        taken = [name for name in inspect.signature(cls.__init__).parameters if name != "self"]
        expected = [*cls.described, *cls.hints, *others]
        for name in expected:
            if name not in taken:
                raise RegistryError(
                    f"expected {cls.__qualname__}.__init__ to take the argument `{name}`, from which "
                    f"`from_description` makes one like it, but it takes {', '.join(taken) or 'none'}: add it, or "
                    "define `describe` and `from_description`."
                )
        for name in taken:
            if name not in expected:
                raise RegistryError(
                    f"expected {cls.__qualname__}.described to name every argument of __init__ that a state depends "
                    f"on, but it does not name `{name}`: add it to `described`, or to `hints` if no state depends on "
                    "it, or define `describe` and `from_description`."
                )
