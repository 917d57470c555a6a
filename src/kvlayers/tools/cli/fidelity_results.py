"""The measurements of `kvlayers fidelity`, and whether they passed."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from kvlayers.tools.cli.run_facts import RunFacts
from kvlayers.tools.measuring.fidelity import FidelityBudget, SettingFidelity
from kvlayers.utils.units import readable_bytes


@dataclass(frozen=True)
class FidelityResults:
    """All measurements.

    Attributes:
        run: the model and the machine.
        text: the file that was read, or "Python's help".
        passages: passages that were read.
        context: tokens of each passage before the scored ones.
        scored: scored tokens of each passage.
        chunk: tokens of a forward pass.
        budget: how much worse predictions may be.
        settings: the result of each setting, full precision first.
        uses: arguments of `generate()` that ask for such a cache, by the name of the setting.
        left_out: for each setting that the model does not support, why.
    """

    run: RunFacts
    text: str
    passages: int
    context: int
    scored: int
    chunk: int
    budget: FidelityBudget
    settings: Sequence[SettingFidelity]
    uses: Mapping[str, Mapping[str, Any]]
    left_out: Mapping[str, str]

    @property
    def recommended(self) -> SettingFidelity | None:
        """The best setting within the budget, `None` if no setting is within it, or without a budget."""
        return self.budget.best_of(self.settings)

    @property
    def passed(self) -> bool:
        """Whether every setting has figures, and if there is a budget, one setting is within it."""
        if not all(math.isfinite(each.kl) for each in self.settings):
            return False
        return self.recommended is not None or not self.budget.is_given

    def _use(self, name: str) -> dict[str, Any]:
        return {"use": self.uses[name]} if name in self.uses else {}

    def plain(self) -> dict[str, Any]:
        """All measurements as JSON types."""
        recommended = self.recommended
        return {
            **self.run.plain(),
            "text": self.text,
            "passages": self.passages,
            "context": self.context,
            "scored": self.scored,
            "chunk": self.chunk,
            "budget": {
                **vars(self.budget),
                "max_bytes": None if self.budget.max_bytes is None else limit_text(self.budget.max_bytes),
            },
            "left_out": self.left_out,
            "settings": [{**_plain_setting(each), **self._use(each.name)} for each in self.settings],
            "recommended": None if recommended is None else recommended.name,
            "passed": self.passed,
        }


def limit_text(max_bytes: int | Fraction) -> str:
    """A limit of bytes as people write it."""
    return f"{float(100 * max_bytes):g}%" if isinstance(max_bytes, Fraction) else readable_bytes(max_bytes)


def _plain_setting(measured: SettingFidelity) -> dict[str, Any]:
    """The figures that are finite, since JSON has no other numbers, and the failure if there is one."""
    finite = {name: value for name, value in vars(measured).items() if not _is_not_finite(value)}
    return finite if measured.failure else {name: value for name, value in finite.items() if name != "failure"}


def _is_not_finite(value: object) -> bool:
    return isinstance(value, float) and not math.isfinite(value)
