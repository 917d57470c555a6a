"""Descriptions of layers and stores: plain facts from which an equal empty layer or store is made."""

import inspect
import operator
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from typing_extensions import Self, override

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
        rotaries: rotations of keys, by their fingerprints.
        length_hint: the most tokens that a layer expects its store to hold, `None` if unknown.
    """

    rotaries: Mapping[str, Rotary] = field(default_factory=dict)
    length_hint: int | None = None


class OptionFacts:
    """Base of frozen dataclasses of options that are plain facts.

    Attributes:
        fact_names: for each field, the name of its fact.
    """

    fact_names: ClassVar[Mapping[str, str]] = {}

    def facts(self) -> dict[str, Fact]:
        """The fields as plain facts."""
        return {fact: getattr(self, name) for name, fact in self.fact_names.items()}

    @classmethod
    def from_facts(cls, facts: Facts) -> Self:
        """The options with these `facts`, which may contain other facts too."""
        return cls(**{name: facts[fact] for name, fact in cls.fact_names.items()})


@dataclass(frozen=True)
class Argument:
    """An argument of an initialiser, and how a description has it: here as a plain fact.

    Attributes:
        name: name of the argument.
        attribute: where an object keeps its value, with a dot before an attribute of an attribute; `name` if not given.
        fact: name of the fact; `name` if not given.
    """

    name: str
    attribute: str = ""
    fact: str = ""

    def value_of(self, described: object) -> Any:
        """The value that an object was made with."""
        return operator.attrgetter(self.attribute or self.name)(described)

    def facts_of(self, described: object) -> dict[str, Fact]:
        """What the description of an object says of its value."""
        return {self.fact or self.name: self.value_of(described)}

    def read(self, facts: Facts, context: DescriptionContext) -> Any:
        """The value that facts describe.

        Raises:
            KeyError: a fact is missing.
            KVLayersError: a fact has a value that it cannot have.
        """
        return facts[self.fact or self.name]


class RotaryArgument(Argument):
    """An argument that is a rotation of keys. The fact is its fingerprint."""

    @override
    def facts_of(self, described: object) -> dict[str, Fact]:
        rotary = self.value_of(described)
        return {self.name: None if rotary is None else rotary.fingerprint}

    @override
    def read(self, facts: Facts, context: DescriptionContext) -> Rotary | None:
        fingerprint = facts[self.name]
        return None if fingerprint is None else context.rotaries[str(fingerprint)]


@dataclass(frozen=True)
class OptionsArgument(Argument):
    """An argument that is an object of options, which has facts of its own; no facts if it is `None`.

    Attributes:
        options: its class, with `facts` and `from_facts`.
    """

    options: Any = None

    @override
    def facts_of(self, described: object) -> dict[str, Fact]:
        options = self.value_of(described)
        return {} if options is None else options.facts()

    @override
    def read(self, facts: Facts, context: DescriptionContext) -> Any:
        return self.options.from_facts(facts)


@dataclass(frozen=True)
class NestedArgument(Argument):
    """An argument of a cache whose facts stand in a mapping of their own: the fact, `None` if it was not given.

    Attributes:
        made_from: makes the value from that mapping.
    """

    made_from: Any = None

    @override
    def facts_of(self, described: object) -> dict[str, Any]:
        value = self.value_of(described)
        return {self.name: None if value is None else value.facts()}

    @override
    def read(self, facts: Mapping[str, Any], context: DescriptionContext) -> Any:
        return self.made_from(facts[self.name])


def arguments_of(cls: Any) -> tuple[Argument, ...]:
    """The described arguments of a class of layers, of stores or of caches."""
    return *cls.made_with, *map(Argument, cls.described)


def described_facts(described: object) -> dict[str, Any]:
    """The described arguments of an object, as facts.

    Raises:
        RegistryError: two arguments have a fact of the same name, which could not be read again.
    """
    found: dict[str, Fact] = {}
    for argument in arguments_of(type(described)):
        facts = argument.facts_of(described)
        if shared := sorted(found.keys() & facts.keys()):
            raise RegistryError(
                "The facts of a layer must have other names than those of its store, but both a "
                f"{type(described).__name__} and its store have `{shared[0]}`: rename the layer's."
            )
        found |= facts
    return found


def rotaries_of(described: object) -> tuple[Rotary, ...]:
    """The rotations that the description of an object names by their fingerprints."""
    own = (argument for argument in arguments_of(type(described)) if isinstance(argument, RotaryArgument))
    return tuple(rotary for argument in own if (rotary := argument.value_of(described)) is not None)


def arguments_from(cls: Any, facts: Facts, context: DescriptionContext) -> dict[str, Any]:
    """The described arguments of a class, from what `described_facts` returned. Raises as `Argument.read`."""
    return {argument.name: argument.read(facts, context) for argument in arguments_of(cls)}


def registered_class(registry: Any, name: Fact, register: str) -> Any:
    """The class that a registry has by a name. `register` is the public function that adds one, for the error.

    Raises:
        RegistryError: no class is registered by the name.
    """
    found = registry.get(name)
    if found is None:
        raise RegistryError(f"{registry.unknown(name)} Import the package that registers it, or call {register}().")
    return found


def check_initialiser(cls: Any, passed_by: type) -> None:
    """Raise `RegistryError` if an inherited `from_description` would lose, or not find, an argument of `__init__`.

    A class that defines `from_description` knows the arguments of its own initialiser. A subclass names its further
    arguments in `described` or in `hints`, or defines `describe` and `from_description`.

    Args:
        cls: the class of a layer or of a store.
        passed_by: the class whose `from_description` passes the described arguments, and no others.
    """
    maker: Any = next(base for base in cls.__mro__ if "from_description" in vars(base))
    if maker is cls:
        return
    passed = [argument.name for argument in arguments_of(cls)]
    if maker is not passed_by:
        known = {*passed, *maker.described, *maker.hints}
        passed += [name for name in _arguments_of(maker) if name not in known]
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
