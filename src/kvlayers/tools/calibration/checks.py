"""What a calibration takes, seen before anything is measured."""

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from kvlayers.caches.quantized import QuantizedCache
from kvlayers.errors import CapacityError, ConfigError, OptionError, StateMismatchError
from kvlayers.layers.arguments import whole_number
from kvlayers.quantizers.registry import backend
from kvlayers.stores.quantization import Quantization, block_tokens
from kvlayers.tools.calibration.budgets import Budget, BytesBudget, DivergenceBudget
from kvlayers.tools.calibration.sensitivities import Sensitivity
from kvlayers.tools.calibration.settings import Part
from kvlayers.tools.measuring.text import check_known
from kvlayers.upstream import model_types
from kvlayers.utils.units import exact_bytes, tokens

FEWEST_BITS = 2
"""Bits that are chosen from by default, at least: with 1, models say something else."""


def check_budget(budget: Budget) -> None:
    """Raise `OptionError` where a budget is none."""
    if not isinstance(budget, BytesBudget | DivergenceBudget):
        raise OptionError(
            f"expected a BytesBudget or a DivergenceBudget, but saw a {type(budget).__name__}: pass, for example, "
            "kvlayers.BytesBudget(bytes_per_token=4320)."
        )


def checked_config(model: Any) -> PretrainedConfig:
    """The config of a model that can be calibrated.

    Raises:
        OptionError: no model, or one that is training.
        ConfigError: a model with an encoder.
    """
    if not isinstance(model, PreTrainedModel):
        raise OptionError(f"expected a model of transformers, but saw a {type(model).__name__}.")
    if model.training:
        raise OptionError("expected a model in eval mode, but saw one that is training: call model.eval() first.")
    if model.config.is_encoder_decoder:
        raise ConfigError(
            f"expected a model that reads its text alone, but a {type(model).__name__} has an encoder: choose bits for "
            "it by nbits."
        )
    return model.config


def checked_quantization(quantization: Quantization | None) -> Quantization:
    """The quantization that is given, or the default one. Raises `OptionError` where it is none."""
    if quantization is not None and not isinstance(quantization, Quantization):
        raise OptionError(
            f"expected quantization to be a kvlayers.Quantization, but saw a {type(quantization).__name__}."
        )
    return quantization or Quantization()


def checked_layers(config: PretrainedConfig, quantization: Quantization) -> tuple[int, list[int]]:
    """Number of layers of a cache, and the indices of the quantized ones.

    Raises:
        ConfigError: no layer is quantized.
    """
    layers = QuantizedCache(config=config, backend=quantization.backend).adapted_layers()
    quantized = [index for index, layer in enumerate(layers) if layer.bits is not None]
    if not quantized:
        raise ConfigError(
            "expected a model with layers of full attention, which are quantized, but saw none: use a DynamicCache."
        )
    return len(layers), quantized


def checked_widths(widths: Sequence[int] | None, quantization: Quantization) -> tuple[int, ...]:
    """Bits to choose from, sorted. Raises `OptionError` where the backend has no such, or there is no choice."""
    known = backend(quantization.backend).widths
    if widths is None:
        widths = [nbits for nbits in known if nbits >= FEWEST_BITS]
    if not isinstance(widths, list | tuple) or not all(nbits in known for nbits in widths):
        raise OptionError(f"expected widths to be of {', '.join(map(str, known))}, but saw {widths!r}.")
    if len(set(widths)) < 2:
        raise OptionError(
            f"expected two widths or more to choose from, but saw {list(widths)} for '{quantization.backend}': use "
            "another backend."
        )
    return tuple(sorted(set(widths)))


def checked_tokens(given: int | str, name: str) -> int:
    """A number of tokens, at least 1. Raises `OptionError` if it is not."""
    return checked_count(tokens(given, name), name)


def checked_count(number: int, name: str) -> int:
    """A number of at least 1. Raises `OptionError` where it is none."""
    found = whole_number(number, name)
    if found < 1:
        raise OptionError(f"expected {name} to be at least 1, but saw {number!r}.")
    return found


def check_positions(config: PretrainedConfig, tokens: int) -> None:
    """Raise `OptionError` where a model has no positions for so many tokens."""
    most = model_types.most_positions(config)
    if most is not None and tokens > most:
        raise OptionError(
            f"expected at most {most} tokens, as the model has positions for, but saw {tokens}: pass a smaller "
            "context_length or scored_tokens."
        )


def check_ids(config: PretrainedConfig, passages: Sequence[Tensor]) -> None:
    """Raise `OptionError` where a model has no positions for passages, or does not know their tokens."""
    check_positions(config, passages[0].shape[1])
    for ids in passages:
        check_known(config, ids)


def check_context(context: int, quantization: Quantization, key_head_dim: int, value_head_dim: int) -> None:
    """Raise `OptionError` where a context is so short that nothing of it is quantized."""
    size = block_tokens(quantization.quantizers(key_head_dim, value_head_dim))
    exact = quantization.sink_tokens + quantization.residual_length
    if context < exact + 2 * size:
        raise OptionError(
            f"expected a context_length of {exact + 2 * size} tokens or more, as {exact} stay in full precision and "
            f"{size} are packed at once, but saw {context}."
        )


def most_bytes(budget: Budget, costs: Mapping[Part, Mapping[int, Fraction]]) -> Fraction:
    """Bytes a token that a setting may take: those of the budget, or of the most bits everywhere.

    Raises:
        CapacityError: not even the fewest bits are within them.
    """
    if isinstance(budget, DivergenceBudget):
        return sum((max(by_bits.values()) for by_bits in costs.values()), Fraction(0))
    least = sum((min(by_bits.values()) for by_bits in costs.values()), Fraction(0))
    if least > budget.bytes_per_token:
        raise CapacityError(
            f"expected a budget that the fewest bits fit into, {exact_bytes(float(least))} a token, but saw "
            f"{exact_bytes(budget.bytes_per_token)}: allow more, or use larger groups."
        )
    # A budget that was a fraction before it became a float is that fraction: a third of a byte decides.
    return Fraction(budget.bytes_per_token).limit_denominator(10**6)


def check_sensitivities(given: Sequence[Sensitivity], costs: Mapping[Part, Mapping[int, Fraction]]) -> None:
    """Raise `OptionError` where sensitivities are of other parts, or of other widths, than what is calibrated."""
    if not isinstance(given, list | tuple) or not all(isinstance(part, Sensitivity) for part in given):
        raise OptionError(
            f"expected the sensitivities of a Calibration, but saw a {type(given).__name__}: pass "
            "calibration.sensitivities."
        )
    of_parts = {(part.layer, part.side): set(part.divergence) for part in given}
    if len(given) != len(costs) or of_parts != {part: set(by_bits) for part, by_bits in costs.items()}:
        raise OptionError(
            f"expected sensitivities of the {len(costs)} parts of the model, for the same widths, but saw "
            f"{len(given)}, of other parts or widths: leave them out, and they are measured."
        )


def check_finite(sensitivities: Sequence[Sensitivity]) -> None:
    """Raise `StateMismatchError` where predictions were not finite."""
    for part in sensitivities:
        if not all(map(math.isfinite, part.divergence.values())):
            raise StateMismatchError(
                f"expected predictions that are finite, but with the {part.side} of layer {part.layer} quantized they "
                "are not: load the model in float32, or check its weights."
            )
