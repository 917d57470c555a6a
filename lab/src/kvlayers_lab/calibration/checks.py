"""The arguments of a calibration: its budget, and the checks before anything is measured."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from kvlayers import Quantization, QuantizedCache, models
from kvlayers.errors import CapacityError, ConfigError, OptionError, StateMismatchError
from kvlayers.options import amount_of_bytes, exact_bytes, tokens, whole_number
from kvlayers.quantizers import backend, block_tokens
from kvlayers_lab.calibration.settings import Part, Sensitivity
from kvlayers_lab.measuring.text import check_known


@dataclass(frozen=True)
class BytesBudget:
    """Ask for the least KL divergence within a number of bytes.

    Attributes:
        bytes_per_token: bytes that a packed token may take over all quantized layers, including keys, values, scales
            and zeros: 4320, or a text such as "4.2KiB", which becomes a number. In a model of full attention,
            `kvlayers.plan(...)["int4"].bytes_per_token` is the number for 4 bits everywhere.

    Raises:
        OptionError: `bytes_per_token` is not a number above 0.
    """

    bytes_per_token: float

    def __post_init__(self) -> None:
        if isinstance(self.bytes_per_token, str):
            object.__setattr__(self, "bytes_per_token", amount_of_bytes(self.bytes_per_token, "bytes_per_token"))
        _check_positive(self.bytes_per_token, "bytes_per_token")

    def rank(self, bytes_per_token: float, divergence: float) -> tuple[float, float]:
        """Sort key of a setting within the budget, less if it is better."""
        return divergence, bytes_per_token


@dataclass(frozen=True)
class DivergenceBudget:
    """Ask for the fewest bytes within a KL divergence.

    Attributes:
        divergence: the greatest mean KL divergence of the next-token distributions from full precision, on the texts
            of the calibration, in nats.

    Raises:
        OptionError: `divergence` is not a number above 0.
    """

    divergence: float

    def __post_init__(self) -> None:
        _check_positive(self.divergence, "divergence")

    def rank(self, bytes_per_token: float, divergence: float) -> tuple[float, float]:
        """Sort key of a setting, less if it is better. A setting beyond the budget is worse than any within it."""
        return (bytes_per_token if divergence <= self.divergence else float("inf")), divergence


Budget = BytesBudget | DivergenceBudget


def _check_positive(number: object, name: str) -> None:
    if isinstance(number, bool) or not isinstance(number, int | float) or not 0 < number < float("inf"):
        raise OptionError(f"`{name}` must be a number above 0, got {number!r}.")


def check_budget(budget: Budget) -> None:
    """Raise `OptionError` if the budget is not a budget."""
    if not isinstance(budget, BytesBudget | DivergenceBudget):
        raise OptionError(
            f"`budget` must be a BytesBudget or a DivergenceBudget, got a {type(budget).__name__}: pass, for example, "
            "kvlayers_lab.BytesBudget(bytes_per_token=4320)."
        )


def checked_config(model: Any) -> PretrainedConfig:
    """The config of a model that can be calibrated.

    Raises:
        OptionError: `model` is not a model, or is in training mode.
        ConfigError: the model has an encoder.
    """
    if not isinstance(model, PreTrainedModel):
        raise OptionError(f"`model` must be a model of transformers, got a {type(model).__name__}.")
    if model.training:
        raise OptionError("`model` must be in eval mode, but it is in training mode: call model.eval() first.")
    if model.config.is_encoder_decoder:
        raise ConfigError(
            f"`model` must be a decoder-only model, but a {type(model).__name__} has an encoder: choose its bits "
            "yourself, with the option `nbits` of a QuantizedCache."
        )
    return model.config


def checked_quantization(quantization: Quantization | None) -> Quantization:
    """The quantization, by default `Quantization()`.

    Raises:
        OptionError: it is not a `Quantization`, or has scales, which are those of one number of bits.
    """
    if quantization is not None and not isinstance(quantization, Quantization):
        raise OptionError(f"`quantization` must be a kvlayers.Quantization, got a {type(quantization).__name__}.")
    if quantization is not None and (quantization.key_scales or quantization.value_scales):
        raise OptionError(
            "`quantization` must have no `key_scales` and no `value_scales`, as calibration compares numbers of bits, "
            f"got {quantization.key_scales!r} and {quantization.value_scales!r}: leave them out."
        )
    return quantization or Quantization()


def checked_layers(config: PretrainedConfig, quantization: Quantization) -> tuple[int, list[int]]:
    """The number of layers of a cache, and the indices of the quantized ones.

    Raises:
        ConfigError: no layer is quantized.
    """
    layers = QuantizedCache(config=config, backend=quantization.backend).adapted_layers()
    quantized = [index for index, layer in enumerate(layers) if layer.bits is not None]
    if not quantized:
        raise ConfigError(
            "The model has no layers of full attention, and only such layers are quantized: use a DynamicCache."
        )
    return len(layers), quantized


def checked_widths(widths: Sequence[int] | None, quantization: Quantization) -> tuple[int, ...]:
    """Bits to choose from, sorted. Raises `OptionError` if the backend lacks one, or if there are fewer than two."""
    known = backend(quantization.backend).widths
    if widths is None:
        widths = list(known)
    if not isinstance(widths, list | tuple) or not all(nbits in known for nbits in widths):
        raise OptionError(f"`widths` must be a list of {', '.join(map(str, known))}, got {widths!r}.")
    if len(set(widths)) < 2:
        raise OptionError(
            f"`widths` must be two or more numbers of bits to choose from, got {list(widths)} for the backend "
            f"'{quantization.backend}': pass more, or use another backend."
        )
    return tuple(sorted(set(widths)))


def checked_tokens(given: int | str, name: str) -> int:
    """A number of tokens, at least 1. Raises `OptionError` if it is not."""
    return checked_count(tokens(given, name), name)


def checked_count(number: int, name: str) -> int:
    """A number of at least 1. Raises `OptionError` if it is not."""
    found = whole_number(number, name)
    if found < 1:
        raise OptionError(f"`{name}` must be at least 1, got {number!r}.")
    return found


def check_positions(config: PretrainedConfig, tokens: int) -> None:
    """Raise `OptionError` if a model has no positions for so many tokens."""
    most = models.most_positions(config)
    if most is not None and tokens > most:
        raise OptionError(
            f"`context_length` and `scored_tokens` together must be within the {most} positions of the model, got "
            f"{tokens} tokens: pass fewer."
        )


def check_ids(config: PretrainedConfig, passages: Sequence[Tensor]) -> None:
    """Raise `OptionError` if passages are longer than a model's positions, or outside its vocabulary."""
    check_positions(config, passages[0].shape[1])
    for ids in passages:
        check_known(config, ids)


def check_context(context: int, quantization: Quantization, key_head_dim: int, value_head_dim: int) -> None:
    """Raise `OptionError` if a context is so short that no token of it is quantized."""
    size = block_tokens(quantization.quantizers(key_head_dim, value_head_dim))
    exact = quantization.sink_tokens + quantization.residual_length
    if context < exact + 2 * size:
        raise OptionError(
            f"`context_length` must be at least {exact + 2 * size} tokens, since {exact} stay in full precision and "
            f"{size} are packed at once, got {context}."
        )


def most_bytes(budget: Budget, costs: Mapping[Part, Mapping[int, Fraction]]) -> Fraction:
    """Bytes per token that a setting may take: the budget, or the bytes of the most bits everywhere.

    Raises:
        CapacityError: even the fewest bits exceed the budget.
    """
    if isinstance(budget, DivergenceBudget):
        return sum((max(by_bits.values()) for by_bits in costs.values()), Fraction(0))
    least = sum((min(by_bits.values()) for by_bits in costs.values()), Fraction(0))
    if least > budget.bytes_per_token:
        raise CapacityError(
            f"`bytes_per_token` must be at least {exact_bytes(float(least))}, which the fewest bits take, got "
            f"{exact_bytes(budget.bytes_per_token)}: allow more, or use larger groups."
        )
    # Undo the rounding of a budget such as 4320 + 1/3 to a float, since a fraction of a byte can decide.
    return Fraction(budget.bytes_per_token).limit_denominator(10**6)


def check_sensitivities(given: Sequence[Sensitivity], costs: Mapping[Part, Mapping[int, Fraction]]) -> None:
    """Raise `OptionError` if sensitivities belong to other parts or widths than the calibration's."""
    if not isinstance(given, list | tuple) or not all(isinstance(part, Sensitivity) for part in given):
        raise OptionError(
            f"`sensitivities` must be the sensitivities of a Calibration, got a {type(given).__name__}: pass "
            "calibration.sensitivities."
        )
    of_parts = {(part.layer, part.side): set(part.divergence) for part in given}
    if len(given) != len(costs) or of_parts != {part: set(by_bits) for part, by_bits in costs.items()}:
        raise OptionError(
            f"`sensitivities` must be of the {len(costs)} parts of the model and of the same widths, got {len(given)} "
            "of other parts or widths: leave them out to measure them."
        )


def check_finite(sensitivities: Sequence[Sensitivity]) -> None:
    """Raise `StateMismatchError` if predictions were not finite."""
    for part in sensitivities:
        if not all(map(math.isfinite, part.divergence.values())):
            raise StateMismatchError(
                f"Predictions are not finite with the {part.side} of layer {part.layer} quantized: load the model in "
                "float32, or check its weights."
            )
