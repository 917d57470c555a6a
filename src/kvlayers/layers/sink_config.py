"""What the sink layers of a cache have in common."""

from dataclasses import dataclass

from torch import Tensor

from kvlayers.layers.sink import SinkLayer
from kvlayers.layers.sliding import window_room
from kvlayers.rope.rotary import Rotary
from kvlayers.stores.quantization import Quantization
from kvlayers.stores.quantized import QuantizedStore


@dataclass(frozen=True, eq=False)
class SinkConfig:
    """How the layers of a `SinkCache` are made.

    Attributes:
        window_length: tokens that a query attends to, the sinks and itself included.
        num_sink_tokens: how many of them are sinks.
        quantization: how windows are held in packed codes, `None` for full precision.
        left_padding: tokens of padding before each sequence, int64 `[batch]`; `None` where there is none.
    """

    window_length: int
    num_sink_tokens: int
    quantization: Quantization | None = None
    left_padding: Tensor | None = None

    def layer(self, rotary: Rotary | None) -> SinkLayer:
        """A layer whose keys are rotated so; `None` where they are not."""
        quantization, window = self.quantization, self.window_length
        store = None if quantization is None else QuantizedStore(quantization, window_room(window))
        return SinkLayer(window, self.num_sink_tokens, rotary, store, self.left_padding)
