"""Bits for the keys and values of each layer, with their cost and their expected divergence."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from kvlayers.caches.quantized import QuantizedCache
from kvlayers.quantizers.contract import Side
from kvlayers.stores.buffer import StateForm
from kvlayers.stores.packed_blocks import SIDES, block_nbytes
from kvlayers.stores.quantization import Quantization, block_tokens
from kvlayers.tools.calibration.allocation import PartChoice, least_losses
from kvlayers.tools.calibration.sensitivities import Sensitivity, with_bits

Part = tuple[int, Side]
"""Index of a layer, and one side of it."""


@dataclass(frozen=True)
class Setting:
    """Bits of every part of a cache.

    Attributes:
        nbits: bits by layer and side.
        layers: the number of layers of the cache, including layers that are not quantized.
        quantization: how states are quantized, apart from the bits.
        bytes_per_token: bytes of a packed token over all parts.
        expected: the expected divergence: the sum of the divergences of the parts, each quantized alone.
    """

    nbits: Mapping[Part, int]
    layers: int
    quantization: Quantization
    bytes_per_token: Fraction
    expected: float

    def of(self, side: Side) -> list[int | None]:
        """Bits of one side of each layer, `None` for a layer that is not quantized."""
        return [self.nbits.get((layer, side)) for layer in range(self.layers)]

    @property
    def cache_config(self) -> dict[str, Any]:
        """Options of a `QuantizedCache` that has these bits."""
        facts = {name: fact for name, fact in self.quantization.facts().items() if fact is not None}
        return {**facts, "key_nbits": self.of("keys"), "value_nbits": self.of("values")}

    def cache(self, config: object) -> QuantizedCache:
        """An empty cache with this setting for a model."""
        return QuantizedCache(config=config, **self.cache_config)


class Settings:
    """All settings of a model.

    Args:
        sensitivities: the sensitivity of each part.
        costs: bytes per token of each part, by its bits.
        layers: the number of layers of the cache.
        quantization: how states are quantized, apart from the bits.
    """

    def __init__(
        self,
        sensitivities: Sequence[Sensitivity],
        costs: Mapping[Part, Mapping[int, Fraction]],
        layers: int,
        quantization: Quantization,
    ) -> None:
        self._layers, self._quantization = layers, quantization
        self._parts: list[Part] = [(part.layer, part.side) for part in sensitivities]
        self._widths = [sorted(part.divergence) for part in sensitivities]
        self._choices = [
            [PartChoice(costs[part.layer, part.side][nbits], loss) for nbits, loss in sorted(part.divergence.items())]
            for part in sensitivities
        ]

    def best_within(self, bytes_per_token: Fraction) -> list[Setting]:
        """The settings with the least expected divergence, for every number of bytes up to a budget that matters.

        See `least_losses`. There is at least one setting, since a budget is never less than the cheapest setting.
        """
        found = least_losses(self._choices, bytes_per_token)
        fewest_bits = (0,) * len(self._choices)
        return [self._setting(chosen) for chosen in found or [fewest_bits]]

    def uniform_within(self, bytes_per_token: float) -> list[Setting]:
        """Settings within a budget with the same bits in every layer, one number for keys and one for values."""
        widths = range(len(self._widths[0]))
        pairs = [{"keys": key, "values": value} for key in widths for value in widths]
        found = [self._setting([pair[side] for _, side in self._parts]) for pair in pairs]
        return [setting for setting in found if float(setting.bytes_per_token) <= bytes_per_token]

    @property
    def most_bits(self) -> Setting:
        """The setting with the most bits everywhere."""
        return self._setting([len(widths) - 1 for widths in self._widths])

    def _setting(self, chosen: Sequence[int]) -> Setting:
        taken = [choices[index] for choices, index in zip(self._choices, chosen, strict=True)]
        widths = zip(self._parts, self._widths, chosen, strict=True)
        return Setting(
            nbits={part: nbits[index] for part, nbits, index in widths},
            layers=self._layers,
            quantization=self._quantization,
            bytes_per_token=sum((choice.cost for choice in taken), Fraction(0)),
            expected=sum(choice.loss for choice in taken),
        )


def part_costs(
    forms: Mapping[int, tuple[StateForm, StateForm]], quantization: Quantization, widths: Sequence[int]
) -> dict[Part, dict[int, Fraction]]:
    """Bytes of a packed token of one sequence for each part and number of bits, including scales and zeros.

    Args:
        forms: forms of the keys and values of each quantized layer.
        quantization: how states are quantized, apart from the bits.
        widths: numbers of bits.

    Raises:
        OptionError: the quantization does not support a number of bits, or the head_dim.
    """
    return {
        (layer, side): {nbits: _bytes_per_token(form, side, with_bits(quantization, nbits)) for nbits in widths}
        for layer, form in forms.items()
        for side in SIDES
    }


def _bytes_per_token(forms: tuple[StateForm, StateForm], side: Side, quantization: Quantization) -> Fraction:
    quantizers = quantization.quantizers(forms[0].head_dim, forms[1].head_dim)
    size, form = block_tokens(quantizers), forms[SIDES.index(side)]
    return Fraction(block_nbytes(quantizers[side].format, side, form.of_batch(1), size), size)
