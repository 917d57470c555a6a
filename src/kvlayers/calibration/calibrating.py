"""Bits for each layer of a model by what its predictions lose."""

import math
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel
from transformers.utils import logging

from .. import model_types
from ..dynamic_cache import DynamicCache
from ..errors import CapacityError, ConfigError, OptionError, StateMismatchError
from ..layers import QuantizedLayer
from ..layers.base import whole_number
from ..layers.dispatch import attention_part
from ..measuring.texts import check_known
from ..quantized_cache import QuantizedCache
from ..quantizers.registry import backend
from ..stores.buffer import StateForm, form_of
from ..stores.quantization import Quantization, block_tokens
from .budgets import Budget, BytesBudget, DivergenceBudget
from .divergence import DivergenceInUse, read
from .passages import Text, passages_of
from .result import Calibration, MeasuredSetting
from .sensitivities import Sensitivity, measure_sensitivities
from .settings import Part, Setting, Settings, part_costs

FEWEST_BITS = 2
"""Bits that are chosen from by default, at least: with 1, models say something else."""

UNIFORM_MEASURED = 3
"""Uniform settings that are measured: those that are expected to be the best."""


def calibrate(
    model: Any,
    texts: Sequence[Text],
    budget: Budget,
    *,
    tokenizer: Any | None = None,
    quantization: Quantization | None = None,
    widths: Sequence[int] | None = None,
    passages: int = 4,
    context_length: int = 1024,
    scored_tokens: int = 64,
    dtype: torch.dtype | None = None,
    sensitivities: Sequence[Sensitivity] | None = None,
) -> Calibration:
    """Choose bits for the keys and the values of each layer, so that predictions change least within a budget.

    Quantizing one part alone, the keys or the values of a layer, changes predictions by little, and such changes nearly
    add up. So each part is quantized alone, with each number of bits, and what then changes is measured; which part
    gets how many bits is a knapsack problem, which is solved exactly. What was chosen is measured as it will be used,
    and so are the best settings with the same bits everywhere: where one of them is better, it is what is returned.
    (Bits by the sensitivity of layers, as for weights: HAWQ, https://arxiv.org/abs/1905.03696; for caches: KVTuner,
    https://arxiv.org/abs/2502.04420.)

    It reads `passages * 2 * layers * widths` times `scored_tokens` tokens: for a model of 135 million parameters on two
    cores some ten minutes, for one that a GPU holds a few. A bar shows how far it is, unless transformers'
    `disable_progress_bar()` was called.

    Args:
        model: in eval mode, best in float32: in bfloat16, rounding alone changes predictions more than 8 bits do.
        texts: what the model will read: texts, or token ids `[tokens]`.
        budget: `BytesBudget` or `DivergenceBudget`.
        tokenizer: of the model, loaded by its name where not given and needed.
        quantization: backend, groups, sinks and residual; its bits have no effect. The defaults where not given.
        widths: bits to choose from, all that the backend takes (from 2 on) where not given.
        passages: passages to read, taken from all texts in turn.
        context_length: tokens of a passage before those that are scored.
        scored_tokens: tokens of a passage whose predictions are compared.
        dtype: of the states that bytes are counted for, as scales are held in it; that of the model where not given.
        sensitivities: those of an earlier calibration of the model, for another budget: measured where not given.

    Raises:
        OptionError: an argument that is none, or texts that are too short.
        ConfigError: a model with an encoder, or without layers that are quantized.
        CapacityError: the budget cannot be met; the message says what can.
        StateMismatchError: predictions that are not finite.
    """
    if not isinstance(budget, BytesBudget | DivergenceBudget):
        raise OptionError(
            f"expected a BytesBudget or a DivergenceBudget, but saw a {type(budget).__name__}: pass, for example, "
            "kvlayers.BytesBudget(bytes_per_token=4320)."
        )
    config, kept = _checked_config(model), _checked_quantization(quantization)
    widths = _checked_widths(widths, kept)
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise OptionError(f"expected dtype to be a floating torch.dtype, such as torch.bfloat16, but saw {dtype!r}.")
    count, context = _count(passages, "passages"), _count(context_length, "context_length")
    scored = _count(scored_tokens, "scored_tokens")
    cache = QuantizedCache(config=config, backend=kept.backend)
    quantized = [index for index, layer in enumerate(cache.layers) if isinstance(attention_part(layer), QuantizedLayer)]
    if not quantized:
        raise ConfigError(
            "expected a model with layers of full attention, which are quantized, but saw none: use a DynamicCache."
        )
    ids = passages_of(model, texts, tokenizer, context + scored, count)
    _check_ids(config, ids)
    forms = _forms(model, ids[0], quantized, dtype)
    costs = part_costs(forms, kept, widths)
    _check_context(context, kept, forms[quantized[0]])
    most = _most_bytes(budget, costs)
    if sensitivities is None:
        with logging.tqdm(total=len(ids) * len(costs) * len(widths), desc="Sensitivity of layers") as bar:
            sensitivities = measure_sensitivities(model, ids, quantized, kept, widths, scored, bar.update)
    else:
        _check_sensitivities(sensitivities, costs)
    _check_finite(sensitivities)
    settings = Settings(sensitivities, costs, len(cache.layers), kept)
    with logging.tqdm(desc="Settings in use") as bar:
        in_use = DivergenceInUse(model, ids, scored)

        def measured(setting: Setting) -> MeasuredSetting:
            divergence = in_use.of(lambda: setting.cache(config))
            bar.update()
            return MeasuredSetting(setting.cache_config, float(setting.bytes_per_token), divergence)

        best = settings.best_within(most)
        mixed = measured(best[-1])
        if isinstance(budget, DivergenceBudget):
            mixed = _cheapest_within(budget, best, mixed, settings.most_bits, measured)
        alike = sorted(settings.uniform_within(mixed.bytes_per_token), key=lambda setting: setting.expected)
        tried = [measured(setting) for setting in alike[:UNIFORM_MEASURED]]
    chosen = min([mixed, *tried], key=lambda setting: budget.rank(setting.bytes_per_token, setting.divergence))
    uniform = min(tried, key=lambda setting: setting.divergence, default=None)
    return Calibration(chosen, uniform, tuple(sensitivities))


def _cheapest_within(
    budget: DivergenceBudget,
    settings: Sequence[Setting],
    last: MeasuredSetting,
    most_bits: Setting,
    measured: Callable[[Setting], MeasuredSetting],
) -> MeasuredSetting:
    """The cheapest of settings, each of which loses less than the one before, that is within a budget of divergence.

    Args:
        budget: what it must be within.
        settings: the settings, the cheapest first.
        last: the last of them, measured.
        most_bits: what no other should be better than; where they are all beyond the budget, it may be within.
        measured: measures a setting.

    Raises:
        CapacityError: none is within the budget.
    """
    if last.divergence > budget.divergence:
        last = measured(most_bits)
        if last.divergence <= budget.divergence:
            return last
        raise CapacityError(
            f"expected a divergence of at most {budget.divergence:.3g} nats, but even with the most bits everywhere it "
            f"is {last.divergence:.3g}: allow more, or use a cache of full precision."
        )
    first, within = 0, len(settings) - 1
    while first < within:
        middle = (first + within) // 2
        tried = measured(settings[middle])
        if tried.divergence <= budget.divergence:
            within, last = middle, tried
        else:
            first = middle + 1
    return last


def _most_bytes(budget: Budget, costs: Mapping[Part, Mapping[int, Fraction]]) -> Fraction:
    """Bytes a token that a setting may take: those of the budget, or of the most bits everywhere.

    Raises:
        CapacityError: not even the fewest bits are within them.
    """
    if isinstance(budget, DivergenceBudget):
        return sum((max(by_bits.values()) for by_bits in costs.values()), Fraction(0))
    least = sum((min(by_bits.values()) for by_bits in costs.values()), Fraction(0))
    if least > budget.bytes_per_token:
        raise CapacityError(
            f"expected a budget that the fewest bits fit into, {float(least):g} bytes a token, but saw "
            f"{budget.bytes_per_token:g}: allow more, or use larger groups."
        )
    # A budget that was a fraction before it became a float is that fraction: a third of a byte decides.
    return Fraction(budget.bytes_per_token).limit_denominator(10**6)


def _checked_config(model: Any) -> PretrainedConfig:
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


def _checked_quantization(quantization: Quantization | None) -> Quantization:
    if quantization is not None and not isinstance(quantization, Quantization):
        raise OptionError(
            f"expected quantization to be a kvlayers.Quantization, but saw a {type(quantization).__name__}."
        )
    return quantization or Quantization()


def _count(number: int, name: str) -> int:
    found = whole_number(number, name)
    if found < 1:
        raise OptionError(f"expected {name} to be at least 1, but saw {number!r}.")
    return found


def _checked_widths(widths: Sequence[int] | None, quantization: Quantization) -> tuple[int, ...]:
    """Bits to choose from, sorted."""
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


def _check_ids(config: PretrainedConfig, passages: Sequence[Tensor]) -> None:
    """Raise `OptionError` where a model has no positions for passages, or does not know their tokens."""
    tokens, most = passages[0].shape[1], model_types.most_positions(config)
    if most is not None and tokens > most:
        raise OptionError(
            f"expected at most {most} tokens, as the model has positions for, but saw {tokens}: pass a smaller "
            "context_length or scored_tokens."
        )
    for ids in passages:
        check_known(config, ids)


def _check_sensitivities(given: Sequence[Sensitivity], costs: Mapping[Part, Mapping[int, Fraction]]) -> None:
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


def _check_finite(sensitivities: Sequence[Sensitivity]) -> None:
    for part in sensitivities:
        if not all(map(math.isfinite, part.divergence.values())):
            raise StateMismatchError(
                f"expected predictions that are finite, but with the {part.side} of layer {part.layer} quantized they "
                "are not: load the model in float32, or check its weights."
            )


def _forms(
    model: Any, ids: Tensor, layers: Sequence[int], dtype: torch.dtype | None
) -> dict[int, tuple[StateForm, StateForm]]:
    """Forms of the keys and values of layers, as they come from a model, in another dtype where one is given."""
    held = DynamicCache(config=model.config)
    read(model, ids[:, :1], held, 1)
    forms = {}
    for index in layers:
        layer = attention_part(held.layers[index])
        forms[index] = form_of(layer.keys.to(dtype)), form_of(layer.values.to(dtype))
    return forms


def _check_context(context: int, quantization: Quantization, forms: tuple[StateForm, StateForm]) -> None:
    """Raise `OptionError` where a context is so short that nothing of it is quantized."""
    size = block_tokens(quantization.quantizers(forms[0][2], forms[1][2]))
    exact = quantization.sink_tokens + quantization.residual_length
    if context < exact + 2 * size:
        raise OptionError(
            f"expected a context_length of {exact + 2 * size} tokens or more, as {exact} stay in full precision and "
            f"{size} are packed at once, but saw {context}."
        )
