"""Random sequences of operations on every kind of layer, against the concatenating oracle."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from agreement import check_at_rest, roll_back, step
from kvlayers import CacheLayer, CapacityError
from layer_kinds import KINDS
from oracle import Oracle, states

MOST_ROWS = 5


class LayerMachine(RuleBasedStateMachine):
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
        roll_back(self.layer, self.oracle, length, lambda: self.layer.truncate(length))

    @rule(count=st.integers(0, 8))
    def remove(self, count: int) -> None:
        roll_back(self.layer, self.oracle, self.oracle.length - count, lambda: self.layer.crop(-count))

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
