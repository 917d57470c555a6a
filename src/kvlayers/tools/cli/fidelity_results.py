"""What `kvlayers fidelity` has measured, and whether it is well."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvlayers.tools.measuring.fidelity import Budget, Fidelity, smallest_within


@dataclass(frozen=True)
class FidelityResults:
    """All that was measured.

    Attributes:
        model: its name.
        text: the file that was read, or what it was.
        dtype: what the model computes in.
        device: where.
        passages: how many were read.
        context: tokens of each read before scoring began.
        scored: tokens of each that were scored.
        chunk: tokens read at once.
        budget: how much worse predictions may be.
        settings: what each came to, full precision first.
        uses: arguments of `generate()` that ask for such a cache, by the name of the setting.
        left_out: why there is no such cache for the model, by the name of the setting.
        environment: hardware, versions and date.
    """

    model: str
    text: str
    dtype: torch.dtype
    device: torch.device
    passages: int
    context: int
    scored: int
    chunk: int
    budget: Budget
    settings: Sequence[Fidelity]
    uses: Mapping[str, Mapping[str, Any]]
    left_out: Mapping[str, str]
    environment: Mapping[str, Any]

    @property
    def recommended(self) -> Fidelity | None:
        """The smallest setting within the budget, `None` where there is none, or no budget."""
        return smallest_within(self.settings)

    @property
    def are_well(self) -> bool:
        """Whether every setting came to figures, and one is within the budget, if there is one."""
        if not all(math.isfinite(each.kl) for each in self.settings):
            return False
        return self.recommended is not None or not self.budget.is_given

    def _use(self, name: str) -> dict[str, Any]:
        return {"use": self.uses[name]} if name in self.uses else {}

    def plain(self) -> dict[str, Any]:
        """All of it in words of JSON."""
        recommended = self.recommended
        return {
            "model": self.model,
            "text": self.text,
            "dtype": self.dtype,
            "device": str(self.device),
            "passages": self.passages,
            "context": self.context,
            "scored": self.scored,
            "chunk": self.chunk,
            **self.environment,
            "budget": self.budget,
            "left_out": self.left_out,
            "settings": [{**_plain_setting(each), **self._use(each.name)} for each in self.settings],
            "recommended": None if recommended is None else recommended.name,
            "well": self.are_well,
        }


def _plain_setting(measured: Fidelity) -> dict[str, Any]:
    """What there are figures of: JSON has no word for what is not a number."""
    finite = {name: value for name, value in vars(measured).items() if not _is_no_number(value)}
    return finite if measured.failure else {name: value for name, value in finite.items() if name != "failure"}


def _is_no_number(value: object) -> bool:
    return isinstance(value, float) and not math.isfinite(value)
