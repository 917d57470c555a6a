"""The result of a plan: a line for each cache, which one to use, and why."""

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from kvlayers.core.token_store import Fidelity
from kvlayers.errors import CapacityError, ConfigError, KVLayersError, RegistryError
from kvlayers.utils.units import exact_bytes, html_table, plain_table, readable_bytes

PLAIN_NAMES = ("dynamic", "static", "offloaded", "offloaded_static", "evicting")
"""Names that are shown for a group of caches at the same cost, in order of preference."""


COARSE_BITS = 4
"""With fewer bits than this, answers often change: a cache on the host is better."""

SIMPLEST = "dynamic"
"""The name that wins over another one of equal cost and fidelity: it needs no options, and never refuses a token."""


@dataclass(frozen=True)
class PlannedCache:
    """What one cache would cost.

    Attributes:
        name: name of the cache.
        nbytes: the `nbytes` of the cache: each byte once, where it is kept.
        device_bytes: the most bytes that the device must have room for. For an offloaded cache these are the layers
            that stay on the device, and the two others whose states are there at once.
        host_bytes: bytes that are kept on the host. On a machine with an accelerator they are pinned, and include what
            torch's allocator rounds up to.
        bytes_per_token: bytes that each further token adds to `nbytes`, the mean of the next 4096.
        longest_context: the most tokens whose `device_bytes` are within the budget; `None` if any number is, or if
            there is no budget.
        fidelity: "exact" if all states that the model attends to are kept as they came, "rounded" if some are
            quantized, or if a query reads only some of them, "evicting" if tokens are evicted that the model would
            attend to.
        bits: bits of one number of a key or value, with its share of scales and zeros, in the layers with the fewest.
        fits: whether the cache is within the budget.
        reason: why it is recommended or not, in a sentence.
    """

    name: str
    nbytes: int
    device_bytes: int
    host_bytes: int
    bytes_per_token: float
    longest_context: int | None
    fidelity: Fidelity
    bits: float
    fits: bool
    reason: str

    @property
    def is_exact(self) -> bool:
        """Whether the states that the model attends to are kept as they came."""
        return self.fidelity == "exact"

    @property
    def is_coarse(self) -> bool:
        """Whether it has fewer bits than `COARSE_BITS`."""
        return self.bits < COARSE_BITS


@dataclass(frozen=True, repr=False)
class Plan:
    """What caches would cost. Printed, it is a table.

    Attributes:
        context_length: tokens of a sequence, prompt and continuation together.
        batch_size: sequences side by side.
        dtype: dtype of the states.
        memory: the budget in bytes, `None` for none.
        caches: the caches that the model supports, in the order of their names.
        recommended: the cache to use.
        left_out: for each other name, why the model does not support the cache, or why it cannot be planned.
        most_positions: the most tokens that the model has positions for, `None` if its config names no limit.
    """

    context_length: int
    batch_size: int
    dtype: torch.dtype
    memory: int | None
    caches: tuple[PlannedCache, ...]
    recommended: PlannedCache
    left_out: Mapping[str, str] = field(default_factory=dict)
    most_positions: int | None = None

    def __getitem__(self, name: str) -> PlannedCache:
        """The planned cache called `name`.

        Raises:
            RegistryError: no such cache was planned.
        """
        named = {cache.name: cache for cache in self.caches}
        if name in named:
            return named[name]
        why = self.left_out.get(name)
        raise RegistryError(
            f"{name!r} is not among the planned caches ({', '.join(named)}){'.' if why is None else f': {why}'}"
        )

    @property
    def title(self) -> str:
        """The arguments of the plan, in a line."""
        budget = "" if self.memory is None else f", {readable_bytes(self.memory)} for the cache"
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.context_length} tokens, batch {self.batch_size}, {dtype}{budget}"

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences below the table: which cache to use, names of equal caches, and whether positions are missing."""
        same = [
            f"{first.name} ({', '.join(cache.name for cache in others)})" for first, *others in self.groups() if others
        ]
        most = self.most_positions
        return (
            f"Use {self.recommended.name!r}: {self.recommended.reason}",
            *([f"At the same cost: {', '.join(same)}."] if same else []),
            *(
                [f"Careful: the model has positions for {most} tokens, and {self.context_length} are planned."]
                if most is not None and self.context_length > most
                else []
            ),
        )

    def groups(self) -> list[tuple[PlannedCache, ...]]:
        """The caches, grouped by equal figures, with the fewest bytes on the device first.

        The first of a group is the recommended one, or the one with the plainest name.
        """
        found: dict[tuple[str, ...], list[PlannedCache]] = {}
        for cache in self.caches:
            found.setdefault(self._figures(cache), []).append(cache)
        preferred = (self.recommended.name, *PLAIN_NAMES)

        def plainness(cache: PlannedCache) -> tuple[Any, ...]:
            is_plain = cache.name in preferred
            return not is_plain, preferred.index(cache.name) if is_plain else 0, len(cache.name), cache.name

        groups = [tuple(sorted(same, key=plainness)) for same in found.values()]
        return sorted(groups, key=lambda same: (same[0].device_bytes, same[0].host_bytes, same[0].bits))

    def rows(self) -> list[tuple[str, ...]]:
        """A header, and a row for the first cache of each group."""
        head = ("cache", "device", "host", "a token", "bits", "states")
        rows = [(first.name, *self._figures(first)) for first, *_ in self.groups()]
        return [head if self.memory is None else (*head, "longest"), *rows]

    def _figures(self, cache: PlannedCache) -> tuple[str, ...]:
        amounts = map(readable_bytes, (cache.device_bytes, cache.host_bytes, cache.bytes_per_token))
        figures = (*amounts, f"{cache.bits:.4g}", cache.fidelity)
        if self.memory is None:
            return figures
        return (*figures, "no end" if cache.longest_context is None else str(cache.longest_context))

    def __repr__(self) -> str:
        return "\n".join([self.title, plain_table(self.rows()), *self.notes])

    def _repr_html_(self) -> str:
        bold = [index for index, group in enumerate(self.groups()) if self.recommended in group]
        notes = "".join(f"<p>{html.escape(note)}</p>" for note in self.notes)
        return html_table(self.title, self.rows(), bold) + notes


# Which cache to use


def best_of(caches: Sequence[PlannedCache]) -> PlannedCache | None:
    """The best of the caches that fit, `None` if no cache fits.

    First come caches with at least `COARSE_BITS`. Then the device comes before the host, from which every token brings
    the states; exact before rounded; more bits before fewer; and fewer bytes before more. A cache that evicts does not
    hold the context, and is recommended only if all caches evict.
    """
    keeping = [cache for cache in caches if cache.fidelity != "evicting"]
    return min(
        (cache for cache in keeping or caches if cache.fits),
        key=lambda cache: (
            cache.is_coarse,
            cache.host_bytes > 0,
            not cache.is_exact,
            -cache.bits,
            cache.device_bytes,
            cache.name != SIMPLEST,
            cache.name,
        ),
        default=None,
    )


def why_recommended(cache: PlannedCache, caches: Sequence[PlannedCache], memory: int | None) -> str:
    """The reason to use the best of the caches."""
    within = "" if memory is None else f" that fits into {readable_bytes(memory)}"
    kept = "is exact" if cache.is_exact else f"has the most bits, {cache.bits:.3g},"
    reasons = {
        "it is the only one that was asked for.": len(caches) == 1,
        "only caches that evict were asked for, and it is the best of them.": cache.fidelity == "evicting",
        f"no cache on the device{within} has {COARSE_BITS} bits or more, and it {kept} of the caches on the host, "
        "for which every token waits.": cache.host_bytes,
        f"it is exact, and the smallest such cache on the device{within}.": cache.is_exact,
        f"no exact cache on the device fits, and it has the most bits, {cache.bits:.3g}, of any{within}.": True,
    }
    return next(reason for reason, applies in reasons.items() if applies)


def why_not(cache: PlannedCache, best: PlannedCache) -> str:
    """The reason to use the best cache instead of this one, which fits too."""
    reasons = {
        "it evicts tokens that the model would attend to.": cache.fidelity == "evicting",
        f"it rounds states to {cache.bits:.3g} bits, and '{best.name}' keeps more.": cache.is_coarse
        and not best.is_coarse,
        f"it brings states from the host for every token, and '{best.name}' does not.": cache.host_bytes
        and not best.host_bytes,
        f"it changes what attention computes, and '{best.name}' does not.": cache.is_exact != best.is_exact,
        f"it has fewer bits than '{best.name}'.": cache.bits != best.bits,
        f"it takes more memory than '{best.name}'.": cache.device_bytes != best.device_bytes,
        f"it costs and keeps the same as '{best.name}'.": True,
    }
    return next(reason for reason, applies in reasons.items() if applies)


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
