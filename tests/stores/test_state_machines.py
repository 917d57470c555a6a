"""Random sequences of operations on every kind of layer, against the concatenating oracle."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from agreement import check_at_rest, roll_back, step
from kvlayers import CacheLayer, CapacityError
from layer_kinds import KINDS, OPERATIONS
from oracle import Oracle, states


class LayerMachine(RuleBasedStateMachine):
    """A layer and its oracle, and forks of both that must not notice what happens to them."""

    layer: CacheLayer
    oracle: Oracle
    generator: torch.Generator
    forks: list[tuple[CacheLayer, Oracle]]

    @property
    def rows(self) -> int:
        return self.oracle.keys.shape[0] if self.oracle.length else 2

    @initialize(kind=st.sampled_from(sorted(KINDS)), seed=st.integers(0, 2**20))
    def begin(self, kind: str, seed: int) -> None:
        self.layer, self.oracle = KINDS[kind]()
        # Sequences that are selected from what branches share hold it once.
        self.oracle.least_bytes = lambda tokens: 0
        self.generator = torch.Generator().manual_seed(seed)
        self.forks = []

    @rule(tokens=st.one_of(st.just(1), st.integers(0, 60), st.integers(100, 200)))
    def update(self, tokens: int) -> None:
        if self.oracle.fits(tokens):
            step(self.layer, self.oracle, tokens, self.generator)
        else:
            with pytest.raises(CapacityError):
                self.layer.update(*states(self.rows, tokens, self.generator))

    @precondition(lambda self: self.oracle.length)
    @rule(operation=st.sampled_from(sorted(OPERATIONS)))
    def operate(self, operation: str) -> None:
        # They are for two sequences.
        if self.rows != 2:
            self.layer.batch_select_indices([0, self.rows - 1])
            self.oracle.select([0, self.rows - 1])
        self.layer = OPERATIONS[operation](self.layer, self.oracle)

    @rule(length=st.integers(0, 250))
    def truncate(self, length: int) -> None:
        roll_back(self.layer, self.oracle, length, lambda: self.layer.truncate(length))

    @rule(swap=st.booleans())
    def fork(self, swap: bool) -> None:
        pairs = [(self.layer, self.oracle), (self.layer.fork(), self.oracle.copy())]
        self.layer, self.oracle = pairs[swap]
        self.forks = [*self.forks[-2:], pairs[not swap]]

    @invariant()
    def agrees(self) -> None:
        for layer, oracle in [(self.layer, self.oracle), *self.forks]:
            check_at_rest(layer, oracle)


TestLayers = LayerMachine.TestCase
