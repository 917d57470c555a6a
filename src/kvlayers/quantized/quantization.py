"""Options of quantization: bits, groups, and which tokens stay in full precision."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, cast

from typing_extensions import Self

from kvlayers.core.description import Facts
from kvlayers.errors import OptionError
from kvlayers.kernels.codes.quantizer_contract import Backend, Quantizer, Side, SideOptions, quantizer_names
from kvlayers.kernels.codes.quantizer_contract import backend as backend_called
from kvlayers.quantized.quantizers.checkpoint_scales import Scales, checked_scales
from kvlayers.utils.options import as_options, check_whole_number, mapping_option

DEFAULT_NBITS = 4
DEFAULT_RESIDUAL_LENGTH = 128
DEFAULT_SINK_TOKENS = 16
SCALES = ("key_scales", "value_scales")
"""Options that may be given for each layer, as bits may."""

MINIMUM_BLOCK_TOKENS = 64
"""Fewest tokens in a block: the work for a block must outweigh the work of finding it."""


@mapping_option("quantization")
@dataclass(frozen=True, slots=True)
class Quantization:
    """How keys and values are quantized.

    Args:
        backend: `"native"`, `"kivi"`, `"turboquant"`, `"nf4"`, `"quanto"`, `"hqq"`, `"fp8"`, or a name that was
            registered.
        nbits: bits of a code, for keys and values; by default 4, or 8 for fp8.
        key_nbits: bits of the keys alone.
        value_nbits: bits of the values alone.
        axis_key: axis along which quanto (0 or -1) and hqq (0 or 1) group the keys; by default the one that
            transformers recommends for each: 0 for quanto, 1 for hqq.
        axis_value: the same for the values.
        q_group_size: states that share a scale, for keys and values; by default the largest divisor of head_dim up to
            64, or 64 tokens if groups go along tokens. Along channels, a size that does not divide head_dim is reduced
            to the next one that does, with a warning.
        key_group_size: group size of the keys alone.
        value_group_size: group size of the values alone.
        key_scales: scales of the keys that never change, one number or one for each KV head, for fp8; by default each
            group of states has its own. A text has the numbers apart by spaces, as `facts` does. See `QuantizedCache`
            for those of a checkpoint.
        value_scales: the same for the values.
        residual_length: newest tokens that stay in full precision.
        sink_tokens: oldest tokens that stay in full precision, as attention sinks
            (https://arxiv.org/abs/2309.17453): the error of these few tokens would be most of the total error.

    Raises:
        OptionError: an option does not exist, or the backend does not take a value.
    """

    backend: str = "native"
    nbits: int | None = None
    key_nbits: int | None = None
    value_nbits: int | None = None
    axis_key: int | None = None
    axis_value: int | None = None
    q_group_size: int | None = None
    key_group_size: int | None = None
    value_group_size: int | None = None
    key_scales: float | Sequence[float] | str = ()
    value_scales: float | Sequence[float] | str = ()
    residual_length: int = DEFAULT_RESIDUAL_LENGTH
    sink_tokens: int = DEFAULT_SINK_TOKENS

    count: ClassVar[int | None] = None
    """Number of layers that it is for: `None`, because it is for any number."""

    def __post_init__(self) -> None:
        # transformers 4 wrote some names in capitals.
        if isinstance(self.backend, str) and self.backend not in quantizer_names():
            object.__setattr__(self, "backend", self.backend.lower())
        for name in ("residual_length", "sink_tokens"):
            check_whole_number(getattr(self, name), f"`{name}`", 0, of="tokens")
        for name in SCALES:
            object.__setattr__(self, name, _scales(getattr(self, name), name))
        for side in (self.keys, self.values):
            self._backend.check(side)

    def of_layer(self, index: int) -> "Quantization":
        """Quantization of the layer with this index: the same for all."""
        return self

    @property
    def _backend(self) -> Backend:
        return backend_called(self.backend)

    @property
    def keys(self) -> SideOptions:
        """Options of the keys."""
        return self._side("keys", self.key_nbits, self.axis_key, self.key_group_size, self.key_scales)

    @property
    def values(self) -> SideOptions:
        """Options of the values."""
        return self._side("values", self.value_nbits, self.axis_value, self.value_group_size, self.value_scales)

    def _side(self, side: Side, nbits: int | None, axis: int | None, size: int | None, scales: object) -> SideOptions:
        """Options of one side, of which what is `None` is that of both sides."""
        widths = self._backend.widths
        default = DEFAULT_NBITS if DEFAULT_NBITS in widths else widths[-1]
        own = next((given for given in (nbits, self.nbits) if given is not None), default)
        return SideOptions(side, own, axis, self.q_group_size if size is None else size, cast("Scales", scales))

    @property
    def axes(self) -> tuple[int | None, int | None]:
        """Axes of the keys and of the values, the backend's own if none was given."""
        default = self._backend.default_axis
        keys, values = (default if axis is None else axis for axis in (self.axis_key, self.axis_value))
        return keys, values

    def quantizers(self, key_head_dim: int, value_head_dim: int) -> dict[Side, Quantizer]:
        """Quantizers for states of these head_dims. A group size that does not divide its head_dim is reduced."""
        return {
            "keys": self._backend.quantizer(self.keys, key_head_dim),
            "values": self._backend.quantizer(self.values, value_head_dim),
        }

    def narrowed(self, nbits: int) -> Self:
        """These options, with at most `nbits` bits."""
        keys, values = (min(side.nbits, nbits) for side in (self.keys, self.values))
        return replace(self, nbits=None, key_nbits=keys, value_nbits=values)

    @classmethod
    def of(cls, given: object) -> Self | None:
        """The options that a cache is given as its option `quantization`: as they are, as a mapping, or `None`.

        Raises:
            OptionError: it is something else, or an option does not exist or has a wrong value.
        """
        return None if given is None else as_options(cls, given, "{'nbits': 4}")

    @classmethod
    def from_facts(cls, facts: Facts) -> Self:
        """The quantization with these `facts`, which may contain other facts too."""
        scales = [name for name in SCALES if name in facts]
        options: dict[str, Any] = {name: facts[name] for name in (*cls().facts(), *scales)}
        return cls(**options)

    def facts(self) -> dict[str, Any]:
        """All resolved options as plain facts; scales only if there are some."""
        scales = {name: " ".join(map(repr, getattr(self, name))) for name in SCALES if getattr(self, name)}
        keys, values = self.keys, self.values
        return {
            "backend": self.backend,
            "key_nbits": keys.nbits,
            "value_nbits": values.nbits,
            "axis_key": keys.axis,
            "axis_value": values.axis,
            "key_group_size": keys.group_size,
            "value_group_size": values.group_size,
            "residual_length": self.residual_length,
            "sink_tokens": self.sink_tokens,
            **scales,
        }


def _scales(given: object, name: str) -> Scales:
    if isinstance(given, str):
        try:
            given = tuple(map(float, given.split()))
        except ValueError:
            raise OptionError(
                f"`{name}` must be numbers, got {given!r}: pass one, or one for each KV head with spaces between."
            ) from None
    return () if isinstance(given, Sequence) and not given else checked_scales(given, name, None)


def block_tokens(quantizers: dict[Side, Quantizer]) -> int:
    """Tokens of a block: a whole number of groups of keys and of values."""
    whole = math.lcm(*(quantizer.format.group_tokens for quantizer in quantizers.values()))
    return whole * math.ceil(MINIMUM_BLOCK_TOKENS / whole)


def blocks_beyond(tokens: int, room: int, block_tokens: int) -> int:
    """Blocks to pack so that at most `room` of `tokens` tokens remain."""
    return max(math.ceil((tokens - room) / block_tokens), 0)


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
    by_layer = {name: options[name] for name in (*BITS, *SCALES) if _is_by_layer(name, options.get(name))}
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


def _is_by_layer(name: str, given: object) -> bool:
    """Whether an option has an entry for each layer. Numbers alone are scales of one layer, for each KV head."""
    return (
        isinstance(given, Sequence)
        and not isinstance(given, str | bytes)
        and (name in BITS or not all(isinstance(entry, int | float) for entry in given))
    )
