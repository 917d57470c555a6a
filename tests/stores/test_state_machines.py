"""Random sequences of operations on every kind of layer, against the concatenating oracle."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis.stateful import initialize, invariant, precondition, rule

from agreement import check_at_rest, step
from kvlayers import CapacityError
from kvlayers.errors import RollbackError
from layer_kinds import KINDS
from layer_rules import MOST_ROWS, LayerRules
from oracle import states


class LayerMachine(LayerRules):
    """A layer and its oracle, and forks of both that must not notice what happens to them."""

    @initialize(kind=st.sampled_from(sorted(KINDS)), seed=st.integers(0, 2**20))
    def begin(self, kind: str, seed: int) -> None:
        self.layer, self.oracle = KINDS[kind]()
        self.generator = torch.Generator().manual_seed(seed)
        self.forks = []

    @rule(tokens=st.one_of(st.just(1), st.integers(0, 60), st.integers(100, 200)))
    def update(self, tokens: int) -> None:
        if self.oracle.fits(tokens):
            step(self.layer, self.oracle, tokens, self.generator)
        else:
            with pytest.raises(CapacityError):
                self.layer.update(*states(self.rows, tokens, self.generator))

    @rule(length=st.integers(0, 250))
    def truncate(self, length: int) -> None:
        if self.oracle.can_truncate(length):
            self.layer.truncate(length)
            self.oracle.truncate(length)
        else:
            with pytest.raises(RollbackError):
                self.layer.truncate(length)

    @rule(count=st.integers(0, 8))
    def remove(self, count: int) -> None:
        if self.oracle.can_truncate(self.oracle.length - count):
            self.layer.crop(-count)
            self.oracle.truncate(self.oracle.length - count)
        else:
            with pytest.raises(RollbackError):
                self.layer.crop(-count)

    @precondition(lambda self: self.oracle.length and self.rows * 2 <= MOST_ROWS)
    @rule()
    def repeat(self) -> None:
        chosen = [row for row in range(self.rows) for _ in range(2)]
        self.layer.batch_repeat_interleave(2)
        self.oracle.select(chosen)

    @rule(swap=st.booleans())
    def fork(self, swap: bool) -> None:
        twin, twin_oracle = self.layer.fork(), self.oracle.copy()
        kept = (self.layer, self.oracle) if swap else (twin, twin_oracle)
        if swap:
            self.layer, self.oracle = twin, twin_oracle
        self.forks = [*self.forks[-2:], kept]

    @rule()
    def save_and_load(self) -> None:
        state = self.layer.state()
        self.layer.reset()
        self.layer.update(*states(1, 2, self.generator))
        self.layer.load_state(state)
        # What was held beyond the window is part of a state, so nothing else changes.

    @invariant()
    def agrees(self) -> None:
        for layer, oracle in [(self.layer, self.oracle), *self.forks]:
            check_at_rest(layer, oracle)


TestLayers = LayerMachine.TestCase
