"""Eviction rules by name, for the option `rule="..."`."""

from collections.abc import Callable
from typing import TypeVar

from kvlayers.eviction.contract import EvictionRule
from kvlayers.utils.registry import FactoryRegistry

ENTRY_POINT_GROUP = "kvlayers.eviction_rules"
"""Entry points in this group are rules of other packages. The entry point's name is the rule's name."""

Factory = TypeVar("Factory", bound=Callable[..., EvictionRule])

_rules = FactoryRegistry("eviction rule", ENTRY_POINT_GROUP, "unregister_eviction_rule", EvictionRule)  # type: ignore[type-abstract]


def register_eviction_rule(name: str) -> Callable[[Factory], Factory]:
    """Decorator that registers a factory (a class or function that returns an `EvictionRule`) as rule `name`.

    Raises:
        RegistryError: the name is empty or taken.
    """
    return _rules.register(name)


def unregister_eviction_rule(name: str) -> None:
    """Remove a rule.

    Raises:
        RegistryError: the name is not registered.
    """
    _rules.remove(name)


def added_rule_names() -> list[str]:
    """The names of the rules that were registered by a call, without those of entry points."""
    return _rules.own_names()


def eviction_rule_names() -> list[str]:
    """All names of rules, including those of entry points in other packages."""
    return _rules.names()


def eviction_rule(name: str) -> EvictionRule:
    """The rule called `name`.

    Raises:
        OptionError: no rule has this name.
        RegistryError: the factory with this name does not return a rule.

    Example:
        >>> from kvlayers.eviction import eviction_rule
        >>> eviction_rule("knorm").queries
        0
    """
    return _rules.make(name)


def eviction_rule_name(rule: EvictionRule) -> str | None:
    """The name of a rule that is equal to `rule`, `None` if none is."""
    return _rules.name_of(rule)
