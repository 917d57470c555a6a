"""Compiled code that evicts gets the tokens that queries attend to, and holds the newest ones, whichever are more.

The layer matrix has the same of eager code.
"""

import pytest
import torch
from torch import Tensor

from kvlayers.core.token_store import KVPair
from kvlayers.stores import StaticStore

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


@pytest.mark.usefixtures("counted")
@pytest.mark.parametrize("case", CASES)
def test_attended_tokens_and_kept_ones_are_those_of_a_list(case: str) -> None:
    held, new, past, kept = CASES[case]
    store = StaticStore(CAPACITY)

    @torch.compile(fullgraph=True, backend="eager")
    def extend_and_evict(keys: Tensor, values: Tensor, past: int, kept: int) -> KVPair:
        attended = store.extend_and_evict(keys, values, past, kept)
        return attended[0].clone(), attended[1].clone()

    with torch.no_grad():
        if held:
            store.take_in(*states(0, held))
        store.validate(*states(held, new))
        attended = extend_and_evict(*states(held, new), past, kept)
        tokens = list(range(held + new))
        assert numbers_of(attended) == tokens[held - past :]
        assert (store.length, store.total) == (kept, held + new)
        # Decoding goes on with what is held.
        for step in range(held + new, held + new + 3):
            seen = numbers_of(store.take_in(*states(step, 1)))
            assert seen == [*tokens[-kept:], *range(held + new, step + 1)]
            assert numbers_of(store.newest(store.length)) == seen
