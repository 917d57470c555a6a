"""The caches that `resilient_generate` tries, in order."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvlayers.errors import KVLayersError, OptionError
from kvlayers.generation import registry


@dataclass(frozen=True)
class Rung:
    """One rung of a ladder: the cache to generate with.

    Args:
        name: one of `cache_names()`, or `None` for the cache that the call itself asks for.
        options: options of this cache, as in `cache_config`.

    Raises:
        RegistryError: `name` is empty, or not a string.
        OptionError: `options` is not a mapping from names to values, or is given without a name.

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
            raise OptionError(f"`options` of a Rung must be a mapping from names to values, got {self.options!r}.")
        if self.name is None and self.options:
            raise OptionError(
                f"`options` of a Rung need a `name`, got {dict(self.options)!r} without one: pass the options of the "
                "call's own cache to generate() as cache_config."
            )

    def __str__(self) -> str:
        if self.name is None:
            return "the requested cache"
        return f"cache_implementation={self.name!r}" + (f" with {dict(self.options)!r}" if self.options else "")


AS_REQUESTED = Rung()
DEFAULT_LADDER = (
    AS_REQUESTED,
    Rung("int8"),
    Rung("int4"),
    Rung("offloaded"),
    Rung("offloaded_quantized", {"nbits": 4}),
)
"""The requested cache, then caches that hold less and less on the device."""

RungLike = Rung | str | tuple[str, Mapping[str, Any]] | None


def suitable_rungs(ladder: Iterable[RungLike], model: Any) -> tuple[list[Rung], list[str]]:
    """The rungs whose caches suit `model`, the requested cache first, and why the others do not suit.

    A cache that does not suit the model is an error if the caller chose the ladder, but not in the default ladder.
    """
    if isinstance(ladder, str | Rung) or not isinstance(ladder, Iterable):
        raise OptionError(f"`ladder` must be a sequence of rungs, got {ladder!r}: put it in a list.")
    rungs = [_rung(entry) for entry in ladder]
    if not rungs:
        raise OptionError("`ladder` must have at least one rung, got an empty one: leave it out for the default.")
    below = rungs[1:] if rungs[0] == AS_REQUESTED else rungs
    if AS_REQUESTED in below:
        raise OptionError(
            "None in `ladder` stands for the requested cache, which comes first, but it is further down: put it first."
        )
    for rung in below:
        if rung.name is None or not registry.is_registered(rung.name):
            raise registry.unknown_name(rung.name)
    suitable: list[Rung] = [AS_REQUESTED]
    unsuitable: list[str] = []
    for rung in below:
        try:
            # A cache reserves no memory before its first states.
            registry.cache_for(str(rung.name), registry.CacheRequest(model.config, rung.options, length_hint=1))
            suitable.append(rung)
        except KVLayersError as error:
            if ladder is not DEFAULT_LADDER:
                raise
            unsuitable.append(f"{rung}: {first_line(error)}")
    return suitable, unsuitable


def _rung(entry: object) -> Rung:
    if isinstance(entry, Rung):
        return entry
    if entry is None or isinstance(entry, str):
        return Rung(entry)
    if isinstance(entry, tuple) and len(entry) == 2:
        return Rung(*entry)
    raise OptionError(
        f"a rung must be the name of a cache, a pair (name, options) or a Rung, got {entry!r}: for a cache with "
        "options, write ('offloaded_quantized', {'nbits': 4})."
    )


def first_line(error: BaseException) -> str:
    """The class and the first line of an error."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0].rstrip('.')}" if lines else type(error).__name__
