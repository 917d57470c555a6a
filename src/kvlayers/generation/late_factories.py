"""Caches by name whose factories are imported when they are first asked for.

So a room above the registry can offer a cache, and the registry does not import that room.
"""

late_factories: dict[str, str] = {}
"""By the name of a cache, where its factory is: "module:function"."""


def offer(name: str, factory: str) -> None:
    """Let `factory`, "module:function", make the caches called `name`."""
    late_factories[name] = factory
