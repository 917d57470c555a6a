"""The slow references of layers: every token ever seen in one tensor, from which what is attended to is cut out."""

import copy
import math

import torch
from torch import Tensor
from typing_extensions import Self

from kvlayers import CacheLayer, Quantization
from kvlayers.quantizers import dequantize

KV_HEADS, KEY_DIM, VALUE_DIM = 2, 4, 6
BLOCK_TOKENS = 64
"""Tokens that are quantized together."""
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
        first, tokens = self.first_attended(self.length), keys.shape[2]
        if self.length:
            keys, values = torch.cat([self.keys, keys], dim=2), torch.cat([self.values, values], dim=2)
        self.keys, self.values = keys, values
        self.forget(first, tokens)
        return keys[:, :, first:], values[:, :, first:]

    def forget(self, first: int, tokens: int) -> None:
        """What follows from so many new tokens, which were attended to with those from the first one on."""
        if not self.recording:
            self.held_from = max(self.held_from, self.first_needed(self.length))

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

    def copy(self) -> Self:
        return copy.copy(self)

    def empty(self) -> Self:
        """An oracle of the same settings that has seen nothing."""
        twin = self.copy()
        twin.reset()
        twin.recording = False
        return twin

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


class QuantizedOracle(Oracle):
    """An oracle that rounds its tokens as they are quantized, each once.

    Args:
        quantization: what the layer was made with.
        window: tokens that a query attends to; `None` for all.
        room: tokens that a window has room for.
    """

    def __init__(self, quantization: Quantization, window: int | None = None, room: int | None = None) -> None:
        super().__init__(window)
        self.quantization = quantization
        self.room = room
        self.quantized_until = 0

    def forget(self, first: int, tokens: int) -> None:
        held = self.length - first
        # A chunk that fills the window by itself leaves nothing of what was held.
        fills = self.window is not None and tokens >= min(self.window - 1, held)
        if fills and self.room is not None and held > self.room:
            super().forget(first, tokens)
        self._quantize()
        super().forget(first, tokens)

    def _quantize(self) -> None:
        """Quantize whole blocks of the oldest tokens until no more than the residual and one block are left."""
        given = self.quantization
        start = max(self.quantized_until, self.held_from)
        begin = start + (given.sink_tokens if start == 0 else 0)
        blocks = math.ceil((self.length - begin - given.residual_length) / BLOCK_TOKENS) - 1
        if blocks <= 0:
            return
        quantizers = given.quantizers(KEY_DIM, VALUE_DIM)
        self.quantized_until = begin + blocks * BLOCK_TOKENS
        rounded = slice(begin, self.quantized_until)
        self.keys, self.values = self.keys.clone(), self.values.clone()
        for quantizer, states in ((quantizers["keys"], self.keys), (quantizers["values"], self.values)):
            groups = quantizer.quantize(states[:, :, rounded])
            states[:, :, rounded] = dequantize(groups, quantizer.format, states.dtype)

    @property
    def exact_from(self) -> int:
        return self.quantized_until if self.quantized_until > self.held_from else 0

    def truncate(self, length: int) -> None:
        super().truncate(length)
        # Down to the sinks alone, it is as if nothing had been quantized yet.
        self.quantized_until = 0 if length <= self.quantization.sink_tokens else min(self.quantized_until, length)

    def reset(self) -> None:
        super().reset()
        self.quantized_until = 0

    def check_states(self, seen: Tensor, expected: Tensor) -> None:
        # The same products in another order, as the matrix that undoes the rotation is applied to another shape.
        assert_near(seen + 0, expected)

    def least_bytes(self, tokens: int) -> int:
        return 0


INV_FREQ = torch.tensor([1.0, 0.05], dtype=torch.float64)
"""Radians a token, for keys of 4 dimensions."""


def turned(keys: Tensor, distance: int) -> Tensor:
    """Keys `[..., 4]`, each pair of which (0 with 2, 1 with 3) is turned as a complex number."""
    pairs = torch.complex(keys[..., : KEY_DIM // 2].double(), keys[..., KEY_DIM // 2 :].double())
    pairs = pairs * torch.polar(torch.ones_like(INV_FREQ), INV_FREQ * distance)
    return torch.cat([pairs.real, pairs.imag], dim=-1).to(keys.dtype)


class SinkOracle(Oracle):
    """An oracle that puts the first tokens of each sequence in front of its window, turned from the first on each time.

    Args:
        window: tokens that a query attends to, sinks and itself included.
        sinks: how many of them are sinks.
        padding: tokens of padding before each sequence.
    """

    def __init__(self, window: int, sinks: int, padding: list[int] | None = None) -> None:
        super().__init__(window)
        self.sinks = sinks
        self.padding = padding

    def update(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        past = self.length
        seen_keys, seen_values = super().update(keys, values)
        return self.with_sinks(seen_keys, seen_values, self.first_attended(past))

    def with_sinks(self, keys: Tensor, values: Tensor, first: int) -> tuple[Tensor, Tensor]:
        keys, values = keys.clone(), values.clone()
        for row, start in enumerate(self.padding or [0] * self.keys.shape[0]):
            if first > start:
                sinks = slice(start, start + self.sinks)
                keys[row, :, : self.sinks] = turned(self.keys[row, :, sinks], first - start)
                values[row, :, : self.sinks] = self.values[row, :, sinks]
        return keys, values

    def attended_next(self) -> tuple[Tensor, Tensor]:
        return self.with_sinks(*super().attended_next(), self.first_attended(self.length))

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


class RecentOracle(Oracle):
    """What a layer must be equal to that is left with the newest tokens when it has held as many as it may.

    Args:
        most: tokens that are kept until there is one more.
        kept: tokens that are left then.
    """

    def __init__(self, most: int, kept: int) -> None:
        super().__init__()
        self.most, self.kept = most, kept
        self.evicted_at = 0

    def first_attended(self, length: int) -> int:
        return self.held_from

    def first_needed(self, length: int) -> int:
        if length - self.held_from <= self.most:
            return self.held_from
        self.evicted_at = length
        return length - self.kept

    @property
    def exact_from(self) -> int:
        return self.held_from

    def can_truncate(self, length: int) -> bool:
        return length == 0 or self.evicted_at <= length <= self.length

    def truncate(self, length: int) -> None:
        super().truncate(length)
        self.evicted_at = self.evicted_at if length else 0

    def reset(self) -> None:
        super().reset()
        self.evicted_at = 0
