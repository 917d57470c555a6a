"""A layer that keeps every token, most of them in packed codes."""

from ..options import checks_options
from ..stores.quantization import Quantization
from ..stores.quantized import QuantizedStore
from .base import whole_number
from .dynamic import DynamicLayer


class QuantizedLayer(DynamicLayer):
    """Full attention over a `QuantizedStore`.

    Args:
        quantization: bits, groups, and the tokens that stay in full precision; the defaults where not given.
        length_hint: the most tokens that are expected, where known.

    Example:
        >>> import torch, kvlayers
        >>> layer = kvlayers.QuantizedLayer(kvlayers.Quantization(nbits=4))
        >>> keys, values = layer.update(torch.randn(1, 2, 1000, 64), torch.randn(1, 2, 1000, 64))
        >>> keys, values = layer.update(torch.randn(1, 2, 1, 64), torch.randn(1, 2, 1, 64))
        >>> query = torch.randn(1, 8, 1, 64)
        >>> torch.nn.functional.scaled_dot_product_attention(query, keys, values, enable_gqa=True).shape
        torch.Size([1, 8, 1, 64])
    """

    @checks_options
    def __init__(self, quantization: Quantization | None = None, length_hint: int | None = None) -> None:
        if length_hint is not None:
            length_hint = whole_number(length_hint, "length_hint")
        super().__init__(store=QuantizedStore(quantization or Quantization(), length_hint))
