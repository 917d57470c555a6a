"""The slow reference of sink layers: every token ever seen, and sinks that are turned from the first on each time."""

import torch
from torch import Tensor

from oracle import KEY_DIM, Oracle, assert_near

INV_FREQ = torch.tensor([1.0, 0.05], dtype=torch.float64)
"""Radians a token, for the tests' keys of 4 dimensions."""


def turned(keys: Tensor, distance: int) -> Tensor:
    """Keys `[..., 4]`, each pair of which (0 with 2, 1 with 3) is turned as a complex number."""
    pairs = torch.complex(keys[..., : KEY_DIM // 2].double(), keys[..., KEY_DIM // 2 :].double())
    pairs = pairs * torch.polar(torch.ones_like(INV_FREQ), INV_FREQ * distance)
    return torch.cat([pairs.real, pairs.imag], dim=-1).to(keys.dtype)


class SinkOracle(Oracle):
    """An oracle that puts the first tokens of each sequence in front of its window.

    Args:
        window: tokens that a query attends to, sinks and itself included.
        sinks: how many of them are sinks.
        padding: tokens of padding before each sequence.
    """

    def __init__(self, window: int, sinks: int, padding: list[int] | None = None) -> None:
        super().__init__(window)
        self.sinks = sinks
        self.padding = padding

    def empty(self) -> "SinkOracle":
        return SinkOracle(self.window, self.sinks, self.padding)

    def starts(self) -> list[int]:
        return self.padding or [0] * self.keys.shape[0]

    def update(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        past = self.length
        seen_keys, seen_values = super().update(keys, values)
        return self.with_sinks(seen_keys, seen_values, self.first_attended(past))

    def with_sinks(self, keys: Tensor, values: Tensor, first: int) -> tuple[Tensor, Tensor]:
        keys, values = keys.clone(), values.clone()
        for row, start in enumerate(self.starts()):
            if first > start:
                for sink in range(self.sinks):
                    keys[row, :, sink] = turned(self.keys[row, :, start + sink], first - start)
                    values[row, :, sink] = self.values[row, :, start + sink]
        return keys, values

    def attended_next(self) -> tuple[Tensor, Tensor]:
        first = self.first_attended(self.length)
        return self.with_sinks(self.keys[:, :, first:], self.values[:, :, first:], first)

    def first_needed(self, length: int) -> int:
        first = self.first_attended(length)
        return first + self.sinks if first > max(self.padding or [0]) else first

    @property
    def exact_from(self) -> int:
        padding = self.padding or [0]
        # In a sequence of which more than padding was dropped, the sinks stand where the oldest tokens were.
        apart_in_some = min(padding) < self.held_from <= max(padding)
        return self.held_from + self.sinks if apart_in_some else self.held_from

    def select(self, rows: list[int]) -> None:
        super().select(rows)
        if self.padding is not None:
            before = max(self.padding)
            self.padding = [self.padding[row] for row in rows]
            if max(self.padding) < self.held_from <= before:
                # The sinks now stand apart in every sequence that is left.
                self.held_from += self.sinks

    def reset(self) -> None:
        super().reset()
        self.padding = None

    def check_states(self, seen: Tensor, expected: Tensor) -> None:
        # Both turn float32 keys by angles in float64; the layer multiplies in float32.
        assert_near(seen, expected)
