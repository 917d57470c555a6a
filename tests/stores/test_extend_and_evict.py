"""`extend_and_evict` returns the tokens that queries attend to, and holds the newest ones, whichever are more."""

from typing import Any

import pytest
import torch
from torch import Tensor

from kvlayers.stores import DenseStore, StaticStore

CAPACITY = 12
CASES = {
    "attends to more than it keeps": (6, 3, 4, 5),
    "keeps what it attends to": (6, 3, 4, 7),
    "keeps more than it attends to": (6, 3, 4, 8),
    "keeps everything": (6, 3, 1, 9),
    "attends to the new tokens alone": (6, 3, 0, 5),
    "attends to the new tokens alone, and keeps some": (6, 3, 0, 2),
    "a single token": (6, 1, 2, 6),
    "nothing held": (0, 3, 0, 2),
}
"""Tokens held, new tokens, held tokens that are attended to, and tokens to keep."""


def states(first: int, tokens: int) -> tuple[Tensor, Tensor]:
    """Keys and values `[1, 2, tokens, 4]` that say which token they are of."""
    numbers = torch.arange(first, first + tokens, dtype=torch.float32)
    keys = numbers[None, None, :, None].expand(1, 2, tokens, 4).clone()
    return keys, -keys


def numbers_of(attended: tuple[Tensor, Tensor]) -> list[int]:
    """The tokens that states are of."""
    keys, values = attended
    assert torch.equal(values, -keys)
    assert torch.equal(keys, keys[:, :1, :, :1].expand_as(keys))
    return [int(number) for number in keys[0, 0, :, 0]]


def compiled(store: Any) -> Any:
    """`extend_and_evict` of a store, within a compiled function."""

    @torch.compile(fullgraph=True, backend="eager")
    def call(keys: Tensor, values: Tensor, past: int, kept: int) -> Any:
        attended = store.extend_and_evict(keys, values, past, kept)
        return attended[0].clone(), attended[1].clone()

    return call


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kind", ["dense", "static", "compiled"])
def test_attended_tokens_and_kept_ones_are_those_of_a_list(kind: str, case: str) -> None:
    torch.compiler.reset()
    held, new, past, kept = CASES[case]
    store: Any = DenseStore() if kind == "dense" else StaticStore(CAPACITY)
    with torch.no_grad():
        if held:
            keys, values = states(0, held)
            store.validate(keys, values)
            store.extend(keys, values, 0)
        keys, values = states(held, new)
        store.validate(keys, values)
        call = compiled(store) if kind == "compiled" else store.extend_and_evict
        attended = call(keys, values, past, kept)
        tokens = list(range(held + new))
        assert numbers_of(attended) == tokens[held - past :]
        assert store.length == kept
        if kind != "dense":
            assert store.total == held + new
        # Decoding goes on with what is held.
        for step in range(held + new, held + new + 3):
            keys, values = states(step, 1)
            store.validate(keys, values)
            seen = numbers_of(store.extend(keys, values))
            assert seen == [*tokens[-kept:], *range(held + new, step + 1)]
            assert numbers_of(store.newest(store.length)) == seen
