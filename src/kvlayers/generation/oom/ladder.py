"""What `resilient_generate` tries, in order."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvlayers.errors import KVLayersError, OptionError
from kvlayers.generation import registry


@dataclass(frozen=True)
class Rung:
    """One rung of a ladder: the cache to generate with.

    Args:
        name: a name of `cache_names()`, or `None` for what the call itself asks for.
        options: options of that cache, as `cache_config` has them.

    Raises:
        RegistryError: the name is empty, or no string.
        OptionError: the options are no mapping from names, or belong to no cache.

    Example:
        >>> Rung("offloaded_quantized", {"nbits": 4})
        Rung(name='offloaded_quantized', options={'nbits': 4})
    """

    name: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.name is not None and (not isinstance(self.name, str) or not self.name.strip()):
            raise registry.unknown_name(self.name)
        if not isinstance(self.options, Mapping) or not all(isinstance(key, str) for key in self.options):
            raise OptionError(f"expected the options of a rung by their names, but saw {self.options!r}.")
        if self.name is None and self.options:
            raise OptionError(
                f"expected options of a cache that has a name, but saw {dict(self.options)!r} for what was asked for: "
                "pass them to generate() as cache_config."
            )

    def __str__(self) -> str:
        if self.name is None:
            return "what was asked for"
        return f"cache_implementation={self.name!r}" + (f" with {dict(self.options)!r}" if self.options else "")


AS_ASKED = Rung()
DEFAULT_LADDER = (
    AS_ASKED,
    Rung("int8"),
    Rung("int4"),
    Rung("offloaded"),
    Rung("offloaded_quantized", {"nbits": 4}),
)
"""As asked, then caches that hold less and less on the device."""

RungLike = Rung | str | tuple[str, Mapping[str, Any]] | None


def possible_rungs(ladder: Iterable[RungLike], model: Any) -> tuple[list[Rung], list[str]]:
    """The rungs whose caches `model` can have, what was asked for first; and why others cannot be had.

    A cache that cannot be had is an error where the caller chose it, and not where the default ladder did.
    """
    if isinstance(ladder, str | Rung) or not isinstance(ladder, Iterable):
        raise OptionError(f"expected a sequence of rungs as the ladder, but saw {ladder!r}: put it in a list.")
    rungs = [_rung(entry) for entry in ladder]
    if not rungs:
        raise OptionError("expected at least one rung in the ladder, but saw none: leave ladder out for the default.")
    below = rungs[1:] if rungs[0] == AS_ASKED else rungs
    if AS_ASKED in below:
        raise OptionError(
            "expected None, which is what the call asks for, as the first rung, but saw it further down: put it first."
        )
    for rung in below:
        if rung.name is None or not registry.is_registered(rung.name):
            raise registry.unknown_name(rung.name)
    possible: list[Rung] = [AS_ASKED]
    impossible: list[str] = []
    for rung in below:
        try:
            # No memory is reserved before the first states come.
            registry.cache_for(str(rung.name), registry.CacheRequest(model.config, rung.options, length_hint=1))
            possible.append(rung)
        except KVLayersError as error:
            if ladder is not DEFAULT_LADDER:
                raise
            impossible.append(f"{rung}: {first_line(error)}")
    return possible, impossible


def _rung(entry: object) -> Rung:
    if isinstance(entry, Rung):
        return entry
    if entry is None or isinstance(entry, str):
        return Rung(entry)
    if isinstance(entry, tuple) and len(entry) == 2:
        return Rung(*entry)
    raise OptionError(
        f"expected a rung to be the name of a cache, a pair (name, options) or a Rung, but saw {entry!r}: for a cache "
        "with options, write ('offloaded_quantized', {'nbits': 4})."
    )


def first_line(error: BaseException) -> str:
    """What an error says, in a line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0].rstrip('.')}" if lines else type(error).__name__
