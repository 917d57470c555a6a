"""Late imports: functions and classes of upper modules that lower modules call by name.

A module imports only modules below it. If a lower module offers something that an upper one implements (`Cache.save`,
the name `"auto"`), it asks for the function by name. The package's `__init__` says where each function is.
"""

import importlib
from collections.abc import Callable
from typing import Any

_targets: dict[str, str] = {}


def provide(name: str, target: str) -> None:
    """Register where a function is.

    Args:
        name: name by which lower modules ask for it.
        target: its module and its name there, as `"package.module:function"`; imported when it is first asked for.
    """
    _targets[name] = target


def function(name: str) -> Callable[..., Any]:
    """The function that was provided as `name`."""
    module, _, attribute = _targets[name].partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module), attribute)
    return found
