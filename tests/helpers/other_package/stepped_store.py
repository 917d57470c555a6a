"""A store that grows by a fixed number of tokens."""

from collections.abc import Mapping
from typing import Any

from typing_extensions import Self

import kvlayers


class SteppedStore(kvlayers.DenseStore):
    """A dense store that grows by `step` tokens at a time, however long it is."""

    def __init__(self, step: int = 16) -> None:
        super().__init__(growth_divisor=2**62, minimum_growth=step)
        self.step = step

    def describe(self) -> dict[str, Any]:
        return {**super().describe(), "step": self.step}

    @classmethod
    def from_description(cls, facts: Mapping[str, Any], context: kvlayers.DescriptionContext) -> Self:
        return cls(facts["step"])
