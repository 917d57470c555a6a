"""Random histories of branches, each beside one that went the same way alone from the beginning and shares nothing."""

import operator
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from kvlayers import CapacityError
from kvlayers.errors import RollbackError

MOST_BRANCHES, MOST_ROWS = 5, 6
METHODS = {"reset": "reset", "record": "activate_past_recording", "end": "deactivate_past_recording"}


@dataclass(frozen=True)
class Kind:
    """A kind of layer or cache.

    Attributes:
        make: makes an empty one.
        attend: gives one new tokens, `(layer, sequences, tokens, seed)`, and returns what attention or the model makes
            of them.
        rows: sequences at the beginning.
        tolerance: the largest difference between such outputs.
    """

    make: Callable[[], Any]
    attend: Callable[[Any, int, int, int], Tensor]
    tolerance: float
    rows: int = 2


@dataclass
class Branch:
    """A layer or cache that shares memory with other branches, and one that does not.

    Attributes:
        kind: of which kind both are.
        shared: what is tested.
        alone: what it must be equal to.
        past: all that was done to either of them.
    """

    kind: Kind
    shared: Any
    alone: Any
    past: list[Callable[[Any], object]]

    @classmethod
    def begun(cls, kind: Kind) -> "Branch":
        return cls(kind, kind.make(), kind.make(), [])

    @property
    def rows(self) -> int:
        batch_size = self.alone.batch_size
        return batch_size if batch_size is not None and batch_size > 0 else self.kind.rows

    def fork(self) -> "Branch":
        alone = self.kind.make()
        for done in self.past:
            done(alone)
        return Branch(self.kind, self.shared.fork(), alone, list(self.past))

    def do(self, change: Callable[[Any], object], change_shared: Callable[[Any], object] | None = None) -> None:
        """Change both, or neither if the one that is alone refuses.

        Args:
            change: what to do.
            change_shared: the same, in a way that may share memory.
        """
        try:
            expected = change(self.alone)
        except (CapacityError, RollbackError) as error:
            with pytest.raises(type(error)):
                (change_shared or change)(self.shared)
            return
        self.past.append(change)
        seen = (change_shared or change)(self.shared)
        if isinstance(expected, Tensor):
            torch.testing.assert_close(seen, expected, rtol=self.kind.tolerance, atol=self.kind.tolerance)
        else:
            assert seen == expected

    def attend(self, tokens: int, seed: int) -> None:
        rows = self.rows
        self.do(lambda layer: self.kind.attend(layer, rows, tokens, seed))


def change_one(branches: list[Branch], chance: random.Random, check: Callable[[Branch], None]) -> str:
    """Do something to one of the branches, which is checked before it loses something, and return what was done."""
    branch = chance.choice(branches)
    rows, length = branch.rows, branch.alone.get_seq_length()
    rare = ["crop", "select", "expand", *METHODS, "drop", "trim", "compact"]
    what = chance.choice(["update"] * 5 + ["fork"] * 3 + rare)
    # Some of what it held is gone then.
    if what in ("drop", "reset", "crop", "select"):
        check(branch)
    if what == "update":
        branch.attend(chance.choice([1, 1, 1, 2, 3, 9, 30, 70]), chance.randrange(2**30))
    elif what == "fork" and len(branches) < MOST_BRANCHES:
        branches.append(branch.fork())
    elif what == "drop" and len(branches) > 1:
        branches.remove(branch)
    elif what == "crop":
        target = chance.choice([length, length - 1, length - 3, length // 2, chance.randint(0, length)])
        branch.do(lambda layer: layer.truncate(max(target, 0)))
    elif what == "select":
        chosen = [chance.randrange(rows) for _ in range(chance.choice([rows, rows, chance.randint(1, MOST_ROWS)]))]
        branch.do(lambda layer: layer.batch_select_indices(chosen))
    elif what == "expand" and rows * 2 <= MOST_ROWS:
        branch.do(lambda layer: layer.batch_repeat_interleave(2), lambda layer: layer.expand(2))
    elif what in METHODS and (what != "reset" or chance.random() < 0.3):
        branch.do(operator.methodcaller(METHODS[what]))
    elif what == "trim":
        branch.shared.trim()
    elif what == "compact" and chance.random() < 0.5:
        branch.shared.compact()
    return what


def check_branches(
    kind: Kind, seed: object, prefix: int, changes: int, check: Callable[[Branch], None] = lambda branch: None
) -> None:
    """Let branches go on from a prefix at random; check each before it loses something, and all now and then."""
    chance = random.Random(str(seed))
    branches, done = [Branch.begun(kind)], []
    branches[0].attend(prefix, seed=1)
    branches += [branches[0].fork() for _ in range(3)]
    try:
        for number in range(changes):
            done.append(change_one(branches, chance, check))
            # What one branch did to another one is still there a few changes later, or was seen before it was lost.
            for branch in branches if number % 4 == 3 else ():
                check(branch)
        for branch in branches * 2:
            branch.attend(1, chance.randrange(2**30))
            check(branch)
    except Exception as error:
        raise AssertionError(f"Until then: {', '.join(done)}.") from error
