"""Which of the caches that fit to use, and why."""

from collections.abc import Mapping, Sequence

from kvlayers.errors import CapacityError, ConfigError, KVLayersError
from kvlayers.planning.planned_cache import PlannedCache
from kvlayers.utils.units import exact_bytes, readable_bytes

COARSE_BITS = 4
"""With fewer bits than this, answers often change: a cache on the host is better."""

SIMPLEST = "dynamic"
"""The name that wins over another one of equal cost and fidelity: it needs no options, and never refuses a token."""


def best_of(caches: Sequence[PlannedCache]) -> PlannedCache | None:
    """The best of the caches that fit, `None` if no cache fits.

    First come caches with at least `COARSE_BITS`. Then the device comes before the host, from which every token brings
    the states; exact before rounded; more bits before fewer; and fewer bytes before more. A cache that evicts does not
    hold the context, and is recommended only if all caches evict.
    """
    keeping = [cache for cache in caches if cache.fidelity != "evicting"]
    fitting = [cache for cache in keeping or caches if cache.fits]
    return min(fitting, key=_rank, default=None)


def _is_coarse(cache: PlannedCache) -> bool:
    return cache.bits < COARSE_BITS


def _rank(cache: PlannedCache) -> tuple[bool, bool, bool, float, int, bool, str]:
    on_host, is_simplest = cache.host_bytes > 0, cache.name == SIMPLEST
    return (
        _is_coarse(cache),
        on_host,
        not cache.is_exact,
        -cache.bits,
        cache.device_bytes,
        not is_simplest,
        cache.name,
    )


def why_recommended(cache: PlannedCache, caches: Sequence[PlannedCache], memory: int | None) -> str:
    """The reason to use the best of the caches."""
    if len(caches) == 1:
        return "it is the only one that was asked for."
    within = "" if memory is None else f" that fits into {readable_bytes(memory)}"
    if cache.fidelity == "evicting":
        return "only caches that evict were asked for, and it is the best of them."
    if cache.host_bytes:
        kept = "is exact" if cache.is_exact else f"has the most bits, {cache.bits:.3g},"
        return (
            f"no cache on the device{within} has {COARSE_BITS} bits or more, and it {kept} of the caches on the host, "
            "for which every token waits."
        )
    if cache.is_exact:
        return f"it is exact, and the smallest such cache on the device{within}."
    return f"no exact cache on the device fits, and it has the most bits, {cache.bits:.3g}, of any{within}."


def why_not(cache: PlannedCache, best: PlannedCache) -> str:
    """The reason to use the best cache instead of this one, which fits too."""
    if cache.fidelity == "evicting":
        return "it evicts tokens that the model would attend to."
    if _is_coarse(cache) and not _is_coarse(best):
        return f"it rounds states to {cache.bits:.3g} bits, and '{best.name}' keeps more."
    if cache.host_bytes and not best.host_bytes:
        return f"it brings states from the host for every token, and '{best.name}' does not."
    if cache.is_exact != best.is_exact:
        return f"it changes what attention computes, and '{best.name}' does not."
    if cache.bits != best.bits:
        return f"it has fewer bits than '{best.name}'."
    if cache.device_bytes != best.device_bytes:
        return f"it takes more memory than '{best.name}'."
    return f"it costs and keeps the same as '{best.name}'."


def nothing_fits(
    caches: Sequence[PlannedCache], left_out: Mapping[str, str], context_length: int, memory: int | None
) -> KVLayersError:
    """The error for a budget that is too small for all caches, or for a model that no cache could be planned for."""
    if not caches or memory is None:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in left_out.items())
        return ConfigError(f"No cache could be planned for the model: {reasons}.")
    keeping = [cache for cache in caches if cache.fidelity != "evicting"] or caches
    least = min(keeping, key=lambda cache: cache.device_bytes)
    furthest = max(keeping, key=lambda cache: cache.longest_context or 0)
    shorter = (
        f", or plan at most {furthest.longest_context} tokens, with '{furthest.name}'"
        if furthest.longest_context
        else ""
    )
    if least.device_bytes <= memory:
        # There is enough memory, but not where the layers are.
        return CapacityError(
            f"{context_length} tokens do not fit. The smallest cache is '{least.name}', and {least.reason[:-1]}: allow "
            f"more there{shorter}."
        )
    return CapacityError(
        f"`memory` must be at least {exact_bytes(least.device_bytes)} for {context_length} tokens, which "
        f"'{least.name}' takes, got {exact_bytes(memory)}: allow more{shorter}."
    )
