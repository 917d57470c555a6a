"""A decode in progress through any cache, beside a forward pass without one, and what may be done to it meanwhile."""

import copy
import dataclasses
import pickle
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Self

from models import prompt


@dataclasses.dataclass
class Decoding(ABC):
    """A decode in progress: the cache has seen all tokens but the newest.

    Attributes:
        tokens: `[batch, tokens]`.
        cache: the cache.
        make: makes an empty cache of its kind.
    """

    tokens: Tensor
    cache: Any
    make: Callable[[], Any]

    @abstractmethod
    def logits(self, tokens: Tensor, cache: Any) -> Tensor:
        """Logits of the model for tokens, `[batch, tokens, vocab]`, with a cache or without one."""

    def check_at_rest(self) -> None:
        """Check what the cache says of itself."""
        length = self.cache.get_seq_length()
        assert isinstance(length, int)
        assert (length, self.cache.batch_size) == (self.tokens.shape[1] - 1, self.tokens.shape[0])

    def begin_anew(self) -> None:
        """Other tokens, from the first one on, for a cache that holds nothing."""
        self.tokens = prompt(2, 5, seed=4)

    def tolerance(self, expected: Tensor) -> dict[str, float]:
        """By how much logits may differ from those of a pass that adds in another order."""
        return {"rtol": 1e-4, "atol": 1e-4}

    def step(self) -> None:
        """Feed what the cache has not seen, compare with a forward pass that has no cache, and go on greedily."""
        seen = self.logits(self.tokens[:, self.cache.get_seq_length() :], self.cache)[:, -1]
        expected = self.logits(self.tokens, None)[:, -1]
        torch.testing.assert_close(seen, expected, **self.tolerance(expected))
        self.tokens = torch.cat([self.tokens, seen.argmax(-1, keepdim=True)], dim=1)
        self.check_at_rest()

    def select(self, rows: list[int]) -> None:
        """What remains where the cache has gone on with these sequences."""
        self.tokens = self.tokens[rows]

    def roll_back(self, length: int) -> None:
        """What remains where the cache has gone back to `length` tokens."""
        self.tokens = self.tokens[:, : length + 1]

    def twin(self, cache: Any) -> Self:
        """Another decode from here, which goes on with another token."""
        twin = dataclasses.replace(self, cache=cache, tokens=self.tokens.clone())
        twin.tokens[:, -1] = 96 - twin.tokens[:, -1]
        return twin


def recorded(decoding: Decoding) -> None:
    """Two tokens more, which windows can take back."""
    decoding.cache.activate_past_recording()
    decoding.step()
    decoding.step()


def crop_newest(decoding: Decoding) -> None:
    recorded(decoding)
    decoding.cache.crop(-2)
    decoding.tokens = decoding.tokens[:, :-2]


def crop_to_length(decoding: Decoding) -> None:
    recorded(decoding)
    length = decoding.cache.get_seq_length() - 1
    decoding.cache.crop(length)
    decoding.roll_back(length)


def truncate(decoding: Decoding) -> None:
    recorded(decoding)
    length = decoding.cache.get_seq_length() - 2
    decoding.cache.truncate(length)
    decoding.roll_back(length)


def crop_nothing(decoding: Decoding) -> None:
    decoding.cache.crop(0)


def reset(decoding: Decoding) -> None:
    decoding.cache.reset()
    assert decoding.cache.get_seq_length() == 0
    decoding.begin_anew()


def reorder(decoding: Decoding) -> None:
    decoding.cache.reorder_cache(torch.tensor([1, 0]))
    decoding.select([1, 0])


def select_fewer(decoding: Decoding) -> None:
    decoding.cache.batch_select_indices([1])
    decoding.select([1])


def select_more(decoding: Decoding) -> None:
    decoding.cache.batch_select_indices(torch.tensor([1, 0, 1]))
    decoding.select([1, 0, 1])


def repeat(decoding: Decoding) -> None:
    decoding.cache.batch_repeat_interleave(2)
    decoding.select([0, 0, 1, 1])


def beside(decoding: Decoding, cache: Any) -> Decoding:
    """A copy goes on, and so does what it was made of, after a change."""
    twin = decoding.twin(cache)
    reorder(decoding)
    return twin


def fork(decoding: Decoding) -> Decoding:
    return beside(decoding, decoding.cache.fork())


def deepcopy(decoding: Decoding) -> Decoding:
    return beside(decoding, copy.deepcopy(decoding.cache))


def pickled(decoding: Decoding) -> Decoding:
    return beside(decoding, pickle.loads(pickle.dumps(decoding.cache)))


def saved(decoding: Decoding) -> Decoding:
    """A state goes on in a cache that is empty, and in one that holds something else."""
    state = decoding.cache.state()
    fresh, used = decoding.twin(decoding.make()), decoding.twin(decoding.cache.fork())
    decoding.step()
    used.step()
    used.cache.load_state(state)
    fresh.cache.load_state(state)
    fresh.step()
    used.tokens = used.tokens[:, :-1]
    used.step()
    return used


CROPPING = (crop_newest, crop_to_length, truncate)

Operation = Callable[[Any], Decoding | None]

OPERATIONS: tuple[Operation, ...] = (
    *CROPPING,
    crop_nothing,
    reset,
    reorder,
    select_fewer,
    select_more,
    repeat,
    fork,
    deepcopy,
    pickled,
    saved,
)
"""Each returns another decode, if it made one, which goes on beside the first."""


def check_goes_on_after(decoding: Decoding, operation: Operation) -> None:
    twin = operation(decoding)
    for _ in range(2):
        decoding.step()
        if twin is not None:
            twin.step()
