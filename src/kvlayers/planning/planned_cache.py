"""What a plan says: a line for each kind of cache, and which to use."""

import html
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from kvlayers.errors import RegistryError
from kvlayers.planning.planned_kind import EXACT
from kvlayers.utils.units import html_table, plain_table, readable_bytes

PLAIN_NAMES = ("dynamic", "static", "offloaded", "offloaded_static")
"""Names that stand for others at the same cost, in this order."""


@dataclass(frozen=True)
class PlannedCache:
    """What one kind of cache would cost.

    Attributes:
        name: the name that it is asked for by.
        nbytes: what `nbytes` of the cache says: each byte once, where it is at home.
        device_bytes: the most that the device must have room for: all of them, or for an offloaded cache what stays on
            the device and the two layers of which states are there at once.
        host_bytes: those that are at home on the host.
        bytes_per_token: what a token more adds to `nbytes`, the mean of the next 4096.
        longest_context: the most tokens whose `device_bytes` are within the budget; `None` where there is no end to
            them, or no budget.
        fidelity: "exact" where the states that the model attends to are kept as they came, "rounded" where they are
            quantized, "evicting" where tokens are forgotten that the model would attend to.
        bits: of a state in the layers that hold it in the fewest, its part of the scales and zeros included.
        fits: whether it is within the budget, and holds the context.
        reason: why it is recommended or not, in a sentence.
    """

    name: str
    nbytes: int
    device_bytes: int
    host_bytes: int
    bytes_per_token: float
    longest_context: int | None
    fidelity: str
    bits: float
    fits: bool
    reason: str

    @property
    def is_exact(self) -> bool:
        """Whether the states that the model attends to are kept as they came."""
        return self.fidelity == EXACT


@dataclass(frozen=True, repr=False)
class Plan:
    """What caches would cost; printed, it is a table.

    Attributes:
        context_length: tokens of a sequence, prompt and continuation together.
        batch_size: sequences side by side.
        dtype: dtype of the states.
        memory: the budget in bytes, `None` for none.
        caches: those that there can be for the model, in the order of their names.
        recommended: the one to use.
        left_out: for each other name, why there can be no such cache, or why it cannot be planned.
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
        """The cache of a name.

        Raises:
            RegistryError: it was not planned.
        """
        for cache in self.caches:
            if cache.name == name:
                return cache
        why = self.left_out.get(name)
        raise RegistryError(
            f"expected the name of a planned cache ({', '.join(cache.name for cache in self.caches)}), but saw "
            f"{name!r}{'.' if why is None else f': {why}'}"
        )

    @property
    def title(self) -> str:
        """What is planned, in a line."""
        budget = "" if self.memory is None else f", {readable_bytes(self.memory)} for the cache"
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.context_length} tokens, batch {self.batch_size}, {dtype}{budget}"

    @property
    def notes(self) -> tuple[str, ...]:
        """What else there is to say, a sentence each: which to use, other names of the same, and missing positions."""
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
        """The caches, those of which a table would say the same together, the fewest bytes on the device first.

        The first of a group is the one that is recommended, or the one with the plainest name.
        """
        found: dict[tuple[str, ...], list[PlannedCache]] = {}
        for cache in self.caches:
            found.setdefault(self._figures(cache), []).append(cache)
        groups = [tuple(sorted(same, key=self._plainness)) for same in found.values()]
        return sorted(groups, key=lambda same: (same[0].device_bytes, same[0].host_bytes, same[0].bits))

    def rows(self) -> list[tuple[str, ...]]:
        """A head, and a row for the first of each group."""
        head = ("cache", "device", "host", "a token", "bits", "states")
        rows = [(first.name, *self._figures(first)) for first, *_ in self.groups()]
        return [head if self.memory is None else (*head, "longest"), *rows]

    def _figures(self, cache: PlannedCache) -> tuple[str, ...]:
        amounts = map(readable_bytes, (cache.device_bytes, cache.host_bytes, cache.bytes_per_token))
        figures = (*amounts, f"{cache.bits:.4g}", cache.fidelity)
        if self.memory is None:
            return figures
        return (*figures, "no end" if cache.longest_context is None else str(cache.longest_context))

    def _plainness(self, cache: PlannedCache) -> tuple[Any, ...]:
        name = cache.name
        rank = PLAIN_NAMES.index(name) if name in PLAIN_NAMES else len(PLAIN_NAMES)
        return name != self.recommended.name, rank, len(name), name

    def __repr__(self) -> str:
        return "\n".join([self.title, plain_table(self.rows()), *self.notes])

    def _repr_html_(self) -> str:
        bold = [index for index, group in enumerate(self.groups()) if self.recommended in group]
        notes = "".join(f"<p>{html.escape(note)}</p>" for note in self.notes)
        return html_table(self.title, self.rows(), bold) + notes
