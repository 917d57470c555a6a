"""Eviction rules by name, for the option `rule="..."`."""

import difflib
from collections.abc import Callable
from typing import TypeVar

from kvlayers.errors import OptionError, RegistryError
from kvlayers.eviction.contract import EvictionRule
from kvlayers.utils.registry import Registry

ENTRY_POINT_GROUP = "kvlayers.eviction_rules"
"""Entry points in this group are rules of other packages. The entry point's name is the rule's name."""

RuleFactory = Callable[..., EvictionRule]
Factory = TypeVar("Factory", bound=RuleFactory)

_rules: Registry[RuleFactory] = Registry("eviction rule", ENTRY_POINT_GROUP, "unregister_eviction_rule")


def register_eviction_rule(name: str) -> Callable[[Factory], Factory]:
    """Decorator that registers a factory (a class or function that returns an `EvictionRule`) as rule `name`.

    Raises:
        RegistryError: the name is empty or taken.
    """
    _rules.check_free(name)

    def add(factory: Factory) -> Factory:
        _rules.add(name, factory)
        return factory

    return add


def unregister_eviction_rule(name: str) -> None:
    """Remove a rule.

    Raises:
        RegistryError: the name is not registered.
    """
    if not _rules.remove(name):
        raise RegistryError(f"`name` must be that of a rule ({', '.join(eviction_rule_names())}), got {name!r}.")


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
    factory = _rules.get(name)
    if factory is None:
        near = difflib.get_close_matches(str(name).lower(), eviction_rule_names(), n=1)
        suggestion = f": did you mean {near[0]!r}?" if near else "."
        raise OptionError(f"`rule` must be one of {', '.join(eviction_rule_names())}, got {name!r}{suggestion}")
    rule = factory()
    if not isinstance(rule, EvictionRule):
        raise RegistryError(
            f"The factory of the eviction rule '{name}' must return an EvictionRule, but returned a "
            f"{type(rule).__name__}: correct the factory."
        )
    return rule
