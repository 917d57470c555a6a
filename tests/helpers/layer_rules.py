"""What random sequences of operations do to every layer and to its oracle."""

import hypothesis.strategies as st
import torch
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from kvlayers import CacheLayer
from oracle import Oracle

MOST_ROWS = 5


class LayerRules(RuleBasedStateMachine):
    """A layer and its oracle, and forks of both that must not notice what happens to them."""

    layer: CacheLayer
    oracle: Oracle
    generator: torch.Generator
    forks: list[tuple[CacheLayer, Oracle]]

    @property
    def rows(self) -> int:
        return self.oracle.keys.shape[0] if self.oracle.length else 2

    @rule()
    def record(self) -> None:
        self.layer.activate_past_recording()
        self.oracle.recording = True

    @precondition(lambda self: self.oracle.length)
    @rule(data=st.data())
    def select(self, data: st.DataObject) -> None:
        chosen = data.draw(st.lists(st.integers(0, self.rows - 1), min_size=1, max_size=MOST_ROWS))
        self.layer.batch_select_indices(chosen)
        self.oracle.select(chosen)

    @rule()
    def reset(self) -> None:
        self.layer.reset()
        self.oracle.reset()
