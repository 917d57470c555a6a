"""What a module needs of the rooms above it: it asks for a function by name.

A module imports only modules below it. If a lower module offers something that an upper one implements (an option
that another room serves), it asks for the function by name. `kvlayers.rooms` says where each function is.
"""

import importlib
import pkgutil
from collections.abc import Callable, Iterable, Mapping
from typing import Any

_targets: dict[str, str] = {}
_rooms: list[str] = []


def provide(rooms: Iterable[str], targets: Mapping[str, str]) -> None:
    """Say where everything is.

    Args:
        rooms: the packages whose import registers kinds of layers, stores and caches.
        targets: for each name that lower modules ask for, a module and what it has there, as `"package.module:name"`.
    """
    _rooms.extend(rooms)
    _targets.update(targets)


def function(name: str) -> Callable[..., Any]:
    """The function that was provided as `name`, imported when it is first asked for.

    Raises:
        RegistryError: this installation lacks the room that has it.
    """
    if name not in _targets:
        # Now, as `import kvlayers` imports this module, and nothing that it does not need.
        from kvlayers.errors import RegistryError

        raise RegistryError(
            f"This installation of kvlayers must have a room that provides '{name}', got none: install kvlayers "
            "with the room, or leave out what needs it."
        )
    found: Callable[..., Any] = pkgutil.resolve_name(_targets[name])
    return found


def load_rooms() -> None:
    """Import every room, so that all kinds are registered."""
    for room in _rooms:
        importlib.import_module(room)
