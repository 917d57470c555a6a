"""The slow reference: every token ever seen in one tensor, and the window cut out of it when it is asked for."""

import torch
from torch import Tensor

from kvlayers import CacheLayer

KV_HEADS, KEY_DIM, VALUE_DIM = 2, 4, 6
TOLERANCE = 1e-5
"""Of states of about 1, relative and absolute: what float32 leaves, where the same products are in another order."""


def states(batch: int, tokens: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Random keys `[batch, 2, tokens, 4]` and values `[batch, 2, tokens, 6]`: head_dims differ, as in MLA."""
    keys = torch.randn(batch, KV_HEADS, tokens, KEY_DIM, generator=generator)
    values = torch.randn(batch, KV_HEADS, tokens, VALUE_DIM, generator=generator)
    return keys, values


def assert_near(seen: Tensor, expected: Tensor) -> None:
    """Fail as `torch.testing.assert_close` does, with its message, at a fraction of what its success costs."""
    alike = seen.shape == expected.shape and seen.dtype == expected.dtype and seen.device == expected.device
    if not (alike and torch.allclose(seen, expected, rtol=TOLERANCE, atol=TOLERANCE)):
        torch.testing.assert_close(seen, expected, rtol=TOLERANCE, atol=TOLERANCE)


class Oracle:
    """What a layer must be equal to.

    Args:
        window: tokens that a query attends to, itself included; `None` for all.
        capacity: the most tokens that fit; `None` for any number.
    """

    reads_buckets = False

    def __init__(self, window: int | None = None, capacity: int | None = None) -> None:
        self.window = window
        self.capacity = capacity
        self.keys: Tensor | None = None
        self.values: Tensor | None = None
        self.recording = False
        self.held_from = 0

    @property
    def length(self) -> int:
        return 0 if self.keys is None else self.keys.shape[2]

    def first_attended(self, length: int) -> int:
        """Position of the first token that a query at position `length` attends to."""
        return 0 if self.window is None else max(length - self.window + 1, 0)

    def first_needed(self, length: int) -> int:
        """Position of the first token that must be held for a query at position `length`, but for tokens kept apart."""
        return self.first_attended(length)

    def attended_next(self) -> tuple[Tensor, Tensor]:
        """Keys and values of what is held that the next token attends to."""
        first = self.first_attended(self.length)
        return self.keys[:, :, first:], self.values[:, :, first:]

    @property
    def exact_from(self) -> int:
        """Position from which on the layer must hold every token as it came; 0 if the model misses no token."""
        return 0

    def fits(self, tokens: int) -> bool:
        return self.capacity is None or self.length + tokens <= self.capacity

    def update(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        first = self.first_attended(self.length)
        if self.length:
            keys, values = torch.cat([self.keys, keys], dim=2), torch.cat([self.values, values], dim=2)
        self.keys, self.values = keys, values
        if not self.recording:
            self.held_from = max(self.held_from, self.first_needed(self.length))
        return self.keys[:, :, first:], self.values[:, :, first:]

    def can_truncate(self, length: int) -> bool:
        return length == 0 or (0 < length <= self.length and self.first_needed(length) >= self.held_from)

    def truncate(self, length: int) -> None:
        if self.keys is not None:
            self.keys, self.values = self.keys[:, :, :length], self.values[:, :, :length]
        self.held_from = max(self.held_from, self.first_needed(length)) if length else 0

    def select(self, rows: list[int]) -> None:
        if self.keys is not None:
            self.keys, self.values = self.keys[rows], self.values[rows]

    def reset(self) -> None:
        self.keys = self.values = None
        self.held_from = 0

    def copy(self) -> "Oracle":
        twin = self.empty()
        twin.__dict__.update(self.__dict__)
        return twin

    def empty(self) -> "Oracle":
        """An oracle of the same settings that has seen nothing."""
        return type(self)(self.window, self.capacity)

    def peeked(self, layer: CacheLayer) -> tuple[Tensor, Tensor]:
        """The keys and values that a layer holds."""
        return layer.peek()

    def unmasked(self, seen: Tensor, hidden: int, tokens: int) -> Tensor:
        """Of the states that are returned, those that a mask shows: so many, behind those that it hides. Here all."""
        assert (hidden, tokens) == (0, seen.shape[2])
        return seen

    def check_states(self, seen: Tensor, expected: Tensor) -> None:
        """Fail where a layer's states are not those expected: to the last bit, as nothing is computed."""
        assert torch.equal(seen, expected)

    def least_bytes(self, tokens: int) -> int:
        """Bytes that so many tokens take at least: all of them, in float32."""
        return 0 if self.keys is None else tokens * self.keys.shape[0] * KV_HEADS * (KEY_DIM + VALUE_DIM) * 4


class BucketOracle(Oracle):
    """What a static layer must be equal to whose attention reads buckets, as compiled code does."""

    reads_buckets = True

    def unmasked(self, seen: Tensor, hidden: int, tokens: int) -> Tensor:
        # A NaN in a slot that is masked would not be masked by a zero.
        assert seen.isfinite().all()
        assert 0 <= hidden <= seen.shape[2] - tokens
        return seen[:, :, hidden : hidden + tokens]
