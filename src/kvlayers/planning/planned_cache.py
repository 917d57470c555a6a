"""What a plan says: a line for each kind of cache, and which to use."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from ..amounts import plain_table, readable_bytes
from ..errors import RegistryError
from .planned_kind import EXACT


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
        left_out: for each other name, why there can be no such cache, or why it cannot be planned.
        recommended: the one to use.
    """

    context_length: int
    batch_size: int
    dtype: torch.dtype
    memory: int | None
    caches: tuple[PlannedCache, ...]
    recommended: PlannedCache
    left_out: Mapping[str, str] = field(default_factory=dict)

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

    def __repr__(self) -> str:
        head = f"{self.context_length} tokens, batch {self.batch_size}, {self.dtype}"
        budget = "" if self.memory is None else f", {readable_bytes(self.memory)} on the device"
        rows: list[tuple[str, ...]] = [("cache", "device", "host", "a token", "bits", "states")]
        rows += [_row(cache) for cache in self.caches]
        if self.memory is not None:
            furthest = [
                "no end" if cache.longest_context is None else str(cache.longest_context) for cache in self.caches
            ]
            rows = [(*row, longest) for row, longest in zip(rows, ["longest context", *furthest], strict=True)]
        return f"{head}{budget}\n{plain_table(rows)}\nUse {self.recommended.name!r}: {self.recommended.reason}"


def _row(cache: PlannedCache) -> tuple[str, ...]:
    amounts = map(readable_bytes, (cache.device_bytes, cache.host_bytes, cache.bytes_per_token))
    return (cache.name, *amounts, f"{cache.bits:.4g}", cache.fidelity)
