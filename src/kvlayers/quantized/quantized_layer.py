"""A layer that keeps every token, most of them in packed codes."""

from typing import Any, cast

import torch
from torch import Tensor
from typing_extensions import Self, override

from kvlayers.core.cache_layer import LAYER_CLASSES, forwarded, register_layer
from kvlayers.core.description import DescriptionContext, Fact, Facts, OptionsArgument, arguments_from
from kvlayers.core.token_layer import DynamicLayer
from kvlayers.kernels.attention.packed_tensor import as_dense
from kvlayers.kernels.codes.quantizer_contract import Side
from kvlayers.quantized.quantization import Quantization
from kvlayers.quantized.quantized_store import QuantizedStore
from kvlayers.upstream import compat
from kvlayers.utils.options import checks_options


class _StoredQuantization(OptionsArgument):
    @override
    def facts_of(self, described: Any) -> dict[str, Fact]:
        # The name of the store's class stands beside them.
        facts: dict[str, Fact] = described.store.describe()
        return facts


@register_layer
class QuantizedLayer(DynamicLayer):
    """Full attention over a `QuantizedStore`.

    For a backend that transformers has too, a cache holds layers of a subclass. They are instances of transformers'
    layer class of that backend, and otherwise the same.

    Args:
        quantization: bits, groups, and the tokens that stay in full precision; the defaults if it is not given.
        length_hint: the most tokens that are expected, if known.

    Example:
        >>> import torch, kvlayers
        >>> layer = kvlayers.QuantizedLayer(kvlayers.Quantization(nbits=4))
        >>> keys, values = layer.update(torch.randn(1, 2, 1000, 64), torch.randn(1, 2, 1000, 64))
        >>> keys, values = layer.update(torch.randn(1, 2, 1, 64), torch.randn(1, 2, 1, 64))
        >>> query = torch.randn(1, 8, 1, 64)
        >>> torch.nn.functional.scaled_dot_product_attention(query, keys, values, enable_gqa=True).shape
        torch.Size([1, 8, 1, 64])
    """

    made_with = (_StoredQuantization("quantization", options=Quantization),)

    store: QuantizedStore

    @checks_options
    def __init__(self, quantization: Quantization | None = None, length_hint: int | None = None) -> None:
        super().__init__(length_hint, QuantizedStore(quantization or Quantization(), length_hint))

    @property
    def quantization(self) -> Quantization:
        """Bits, groups, and the tokens that stay in full precision."""
        # Also while the keys have been assigned and the values have not.
        return self.store.complete.quantization

    @classmethod
    @override
    def from_description(cls, facts: Facts, context: DescriptionContext) -> Self:
        arguments = arguments_from(cls, facts, context)
        return cast("Self", (quantized_layer if cls is QuantizedLayer else cls)(**arguments))

    # By the names of transformers' layers

    @property
    def nbits(self) -> int:
        """Bits of a code of the keys. The values may have others."""
        return self.quantization.keys.nbits

    @property
    def axis_key(self) -> int | None:
        """Axis along which keys are grouped, `None` if the backend has no such option."""
        return self.quantization.axes[0]

    @property
    def axis_value(self) -> int | None:
        """Axis along which values are grouped, `None` if the backend has no such option."""
        return self.quantization.axes[1]

    @property
    def q_group_size(self) -> int | None:
        """States that share a scale, as given; `None` for a size that suits the head_dim."""
        return self.quantization.keys.group_size

    residual_length = forwarded("quantization")
    """Newest tokens that stay in full precision."""

    # By the private names of transformers' layers that kvpress uses. What is assigned is packed when it is held.

    def _quantize(self, tensor: Tensor, axis: int | None) -> Tensor:
        return tensor

    def _dequantize(self, tensor: Tensor) -> Tensor:
        return as_dense(tensor)

    _quantized_keys = DynamicLayer.keys
    _quantized_values = DynamicLayer.values

    @override
    def _assign(self, states: Tensor, side: Side) -> None:
        # To transformers, an empty vector says that no token is in full precision.
        if not (isinstance(states, Tensor) and states.shape == (0,)):
            super()._assign(states, side)


def _namesake(name: str, transformers_class: type, **members: object) -> type[QuantizedLayer]:
    """The class of layers of one backend, which are instances of transformers' class for it too.

    Only the name is inherited: every public method is that of `QuantizedLayer`.
    """
    made = type(
        name,
        (QuantizedLayer, transformers_class),
        {"__module__": __name__, "__doc__": QuantizedLayer.__doc__, **members},
    )
    LAYER_CLASSES.register_twin(made, QuantizedLayer)
    return made


QuantoQuantizedLayer = _namesake("QuantoQuantizedLayer", compat.QUANTO_LAYER)
HQQQuantizedLayer = _namesake("HQQQuantizedLayer", compat.HQQ_LAYER)
Fp8QuantizedLayer = _namesake(
    "Fp8QuantizedLayer",
    compat.FP8_LAYER,
    # The dtype of a code, and the largest number that one can stand for.
    fp8_dtype=torch.float8_e4m3fn,
    fp8_max=torch.finfo(torch.float8_e4m3fn).max,
)

_BY_BACKEND = {"quanto": QuantoQuantizedLayer, "hqq": HQQQuantizedLayer, "fp8": Fp8QuantizedLayer}


def quantized_layer(quantization: Quantization, length_hint: int | None = None) -> QuantizedLayer:
    """A quantized layer for a cache, of the class that transformers has for the backend; see `QuantizedLayer`."""
    return _BY_BACKEND.get(quantization.backend, QuantizedLayer)(quantization, length_hint)
