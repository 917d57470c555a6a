"""How the layers of a cache are quantized where each has bits of its own."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvlayers.errors import OptionError
from kvlayers.quantizers.contract import Quantizer, Side
from kvlayers.stores.quantization import Quantization

BITS = ("nbits", "key_nbits", "value_nbits")
"""Options that may be one number for all layers, or one for each."""


@dataclass(frozen=True, slots=True)
class LayerwiseQuantization:
    """Quantizations of the layers of one model, alike but for their bits.

    Attributes:
        layers: one for each layer of the cache, those included that are not quantized.
    """

    layers: tuple[Quantization, ...]

    @property
    def count(self) -> int | None:
        """Layers that it is for."""
        return len(self.layers)

    def of_layer(self, index: int) -> Quantization:
        """How the layer of that index is quantized."""
        return self.layers[index]

    def quantizers(self, key_head_dim: int, value_head_dim: int) -> dict[Side, Quantizer]:
        """As `Quantization.quantizers`, those of the first layer: what is checked by it is the same for all."""
        return self.layers[0].quantizers(key_head_dim, value_head_dim)

    def facts(self) -> dict[str, Any]:
        """All options, as they were resolved, by plain facts: bits of keys and values are lists."""
        return {
            **self.layers[0].facts(),
            "key_nbits": [layer.keys.nbits for layer in self.layers],
            "value_nbits": [layer.values.nbits for layer in self.layers],
        }


QuantizationOfLayers = Quantization | LayerwiseQuantization


def quantization_of_layers(options: Mapping[str, Any]) -> QuantizationOfLayers:
    """What options of `Quantization` ask for, in which bits may be a sequence of one number for each layer.

    An entry that is `None` stands for the default, as it does for a layer that is not quantized.

    Raises:
        OptionError: an option that does not exist, a value that the backend does not take, or sequences that differ in
            length.
    """
    by_layer = {name: options[name] for name in BITS if _is_sequence(options.get(name))}
    if not by_layer:
        return Quantization(**options)
    lengths = {name: len(bits) for name, bits in by_layer.items()}
    if len(set(lengths.values())) > 1 or not min(lengths.values()):
        raise OptionError(
            "expected as many numbers of bits for keys as for values, one for each layer, but saw "
            f"{', '.join(f'{count} in {name}' for name, count in lengths.items())}: give one for each layer of the "
            "model."
        )
    return LayerwiseQuantization(
        tuple(
            Quantization(**{**options, **{name: bits[index] for name, bits in by_layer.items()}})
            for index in range(min(lengths.values()))
        )
    )


def check_count(quantization: QuantizationOfLayers, layers: int) -> None:
    """Raise `OptionError` where bits were given for another number of layers."""
    if quantization.count not in (None, layers):
        raise OptionError(
            f"expected bits for each of the {layers} layers of the model, but saw {quantization.count}: give one "
            "number for each layer that has a cache, or one for all."
        )


def _is_sequence(bits: object) -> bool:
    return isinstance(bits, Sequence) and not isinstance(bits, str | bytes)
