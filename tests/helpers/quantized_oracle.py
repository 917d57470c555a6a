"""The slow reference of quantized layers: all tokens in one tensor, those replaced that have been quantized by now."""

import math

import torch
from torch import Tensor

from kvlayers import Quantization
from kvlayers.quantizers import dequantize
from oracle import KEY_DIM, VALUE_DIM, Oracle, assert_near


class QuantizedOracle(Oracle):
    """An oracle that rounds its tokens as they are quantized, each once.

    Args:
        quantization: what the layer was made with.
        block_tokens: tokens that are quantized together.
        window: tokens that a query attends to; `None` for all.
        room: tokens that a window has room for.
    """

    def __init__(
        self, quantization: Quantization, block_tokens: int = 64, window: int | None = None, room: int | None = None
    ) -> None:
        super().__init__(window)
        self.quantization = quantization
        self.block_tokens = block_tokens
        self.room = room
        self.quantized_until = 0

    def empty(self) -> "QuantizedOracle":
        return QuantizedOracle(self.quantization, self.block_tokens, self.window, self.room)

    def update(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        first = self.first_attended(self.length)
        tokens = keys.shape[2]
        # A chunk that fills the window by itself leaves nothing of what was held.
        fills = self.window is not None and tokens >= min(self.window - 1, self.length - first + tokens)
        passes_through = (
            fills and self.room is not None and not self.recording and self.length - first + tokens > self.room
        )
        if self.length:
            keys, values = torch.cat([self.keys, keys], dim=2), torch.cat([self.values, values], dim=2)
        self.keys, self.values = keys, values
        if passes_through:
            self.held_from = max(self.held_from, self.first_attended(self.length))
        self._quantize()
        if not self.recording:
            self.held_from = max(self.held_from, self.first_attended(self.length))
        return keys[:, :, first:], values[:, :, first:]

    def _quantize(self) -> None:
        """Quantize whole blocks of the oldest tokens until no more than the residual and one block are left."""
        given = self.quantization
        start = max(self.quantized_until, self.held_from)
        sinks = given.sink_tokens if start == 0 else 0
        blocks = math.ceil(
            (self.length - start - sinks - given.residual_length - self.block_tokens) / self.block_tokens
        )
        if blocks <= 0:
            return
        quantizers = given.quantizers(KEY_DIM, VALUE_DIM)
        begin, end = start + sinks, start + sinks + blocks * self.block_tokens
        self.keys, self.values = self.keys.clone(), self.values.clone()
        for quantizer, states in ((quantizers["keys"], self.keys), (quantizers["values"], self.values)):
            groups = quantizer.quantize(states[:, :, begin:end])
            states[:, :, begin:end] = dequantize(groups, quantizer.format, states.dtype)
        self.quantized_until = end

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
