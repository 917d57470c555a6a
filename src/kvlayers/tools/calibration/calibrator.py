"""Bits for each layer of a model by what its predictions lose."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.utils import logging

from kvlayers.caches.dynamic import DynamicCache
from kvlayers.errors import CapacityError
from kvlayers.stores.buffer import StateForm, form_of
from kvlayers.stores.quantization import Quantization
from kvlayers.tools.calibration.budgets import Budget, DivergenceBudget
from kvlayers.tools.calibration.checks import (
    check_budget,
    check_context,
    check_finite,
    check_ids,
    check_sensitivities,
    checked_config,
    checked_count,
    checked_layers,
    checked_quantization,
    checked_tokens,
    checked_widths,
    most_bytes,
)
from kvlayers.tools.calibration.divergence import DivergenceInUse, read
from kvlayers.tools.calibration.passages import Text, passages_of
from kvlayers.tools.calibration.result import Calibration, MeasuredSetting
from kvlayers.tools.calibration.sensitivities import Sensitivity, measure_sensitivities
from kvlayers.tools.calibration.settings import Setting, Settings, part_costs
from kvlayers.utils.options import checked_dtype

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
    context_length: int | str = 1024,
    scored_tokens: int | str = 64,
    dtype: torch.dtype | str | None = None,
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
    cores some ten minutes. A bar shows how far it is, unless transformers' `disable_progress_bar()` was called.

    Args:
        model: in eval mode, best in float32: in bfloat16, rounding alone changes predictions more than 8 bits do.
        texts: what the model will read: texts, or token ids `[tokens]`.
        budget: `BytesBudget` or `DivergenceBudget`.
        tokenizer: of the model, loaded by its name where not given and needed.
        quantization: backend, groups, sinks and residual; its bits have no effect. The defaults where not given.
        widths: bits to choose from, all that the backend takes (from 2 on) where not given.
        passages: passages to read, taken from all texts in turn.
        context_length: tokens of a passage before those that are scored: 1024, or "1k".
        scored_tokens: tokens of a passage whose predictions are compared.
        dtype: of the states that bytes are counted for, as scales are held in it, or its name; that of the model where
            not given.
        sensitivities: those of an earlier calibration of the model, for another budget: measured where not given.

    Raises:
        OptionError: an argument that is none, or texts that are too short.
        ConfigError: a model with an encoder, or without layers that are quantized.
        CapacityError: the budget cannot be met; the message says what can.
        StateMismatchError: predictions that are not finite.
    """
    check_budget(budget)
    counted_in = None if dtype is None else checked_dtype(dtype)
    config, kept = checked_config(model), checked_quantization(quantization)
    widths = checked_widths(widths, kept)
    count, context = checked_count(passages, "passages"), checked_tokens(context_length, "context_length")
    scored = checked_tokens(scored_tokens, "scored_tokens")
    layers, quantized = checked_layers(config, kept)
    ids = passages_of(model, texts, tokenizer, context + scored, count)
    check_ids(config, ids)
    forms = _forms(model, ids[0], quantized, counted_in)
    costs = part_costs(forms, kept, widths)
    keys, values = forms[quantized[0]]
    check_context(context, kept, keys[2], values[2])
    most = most_bytes(budget, costs)
    if sensitivities is None:
        with logging.tqdm(total=len(ids) * len(costs) * len(widths), desc="Sensitivity of layers") as bar:
            sensitivities = measure_sensitivities(model, ids, quantized, kept, widths, scored, bar.update)
    else:
        check_sensitivities(sensitivities, costs)
    check_finite(sensitivities)
    settings = Settings(sensitivities, costs, layers, kept)
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


def _forms(
    model: Any, ids: Tensor, layers: Sequence[int], dtype: torch.dtype | None
) -> dict[int, tuple[StateForm, StateForm]]:
    """Forms of the keys and values of layers, as they come from a model, in another dtype where one is given."""
    held = DynamicCache(config=model.config)
    read(model, ids[:, :1], held, 1)
    forms = {}
    for index in layers:
        layer = held.layers[index].parts[0]
        forms[index] = form_of(layer.keys.to(dtype)), form_of(layer.values.to(dtype))
    return forms
