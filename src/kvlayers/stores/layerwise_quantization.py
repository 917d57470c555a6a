"""Quantization of the layers of a cache if each has its own number of bits, or its own scales."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvlayers.errors import OptionError
from kvlayers.quantizers.contract import Quantizer, Side
from kvlayers.stores.quantization import SCALES, Quantization

BITS = ("nbits", "key_nbits", "value_nbits")
"""Options that may be one number for all layers, or a number for each layer."""


@dataclass(frozen=True, slots=True)
class LayerwiseQuantization:
    """Quantizations of the layers of one model, which differ only in their bits and scales.

    Attributes:
        layers: one for each layer of the cache, including layers that are not quantized.
    """

    layers: tuple[Quantization, ...]

    @property
    def count(self) -> int | None:
        """Number of layers that it is for."""
        return len(self.layers)

    def of_layer(self, index: int) -> Quantization:
        """Quantization of the layer with this index."""
        return self.layers[index]

    def quantizers(self, key_head_dim: int, value_head_dim: int) -> dict[Side, Quantizer]:
        """As `Quantization.quantizers`, for the first layer: the checks that use it hold for all layers alike."""
        return self.layers[0].quantizers(key_head_dim, value_head_dim)

    def facts(self) -> dict[str, Any]:
        """All resolved options as plain facts. Bits of keys and of values are lists, and so are scales."""
        by_layer = [layer.facts() for layer in self.layers]
        scales = {name: [facts.get(name, "") for facts in by_layer] for name in SCALES}
        return {
            **{name: fact for name, fact in by_layer[0].items() if name not in SCALES},
            **{name: of_layers for name, of_layers in scales.items() if any(of_layers)},
            "key_nbits": [layer.keys.nbits for layer in self.layers],
            "value_nbits": [layer.values.nbits for layer in self.layers],
        }


QuantizationOfLayers = Quantization | LayerwiseQuantization


def quantization_of_layers(options: Mapping[str, Any]) -> QuantizationOfLayers:
    """The quantization for options of `Quantization`, in which bits may be a sequence with a number for each layer.

    An entry that is `None` means the default, and is also used for layers that are not quantized. Scales may be a
    sequence with those of each layer, empty for layers that have none.

    Raises:
        OptionError: an option does not exist, the backend does not take a value, or sequences have different lengths.
    """
    by_layer = {name: options[name] for name in BITS if _is_sequence(options.get(name))}
    by_layer |= {name: options[name] for name in SCALES if _has_scales_of_layers(options.get(name))}
    if not by_layer:
        return Quantization(**options)
    lengths = {name: len(bits) for name, bits in by_layer.items()}
    if len(set(lengths.values())) > 1 or not min(lengths.values()):
        raise OptionError(
            "Sequences of bits, or of scales, must have one entry for each layer, got "
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
    """Raise `OptionError` if bits or scales were given for another number of layers."""
    if quantization.count not in (None, layers):
        raise OptionError(
            f"Bits and scales must be given for each of the {layers} layers of the model, got {quantization.count}: "
            "give them for each layer that has a cache, or the same for all."
        )


def _has_scales_of_layers(given: object) -> bool:
    return _is_sequence(given) and not all(isinstance(entry, int | float) for entry in given)  # type: ignore[attr-defined]


def _is_sequence(bits: object) -> bool:
    return isinstance(bits, Sequence) and not isinstance(bits, str | bytes)
