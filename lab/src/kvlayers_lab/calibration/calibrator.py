"""Chooses the bits of each layer of a model by how much its predictions change."""

import dataclasses
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor
from transformers.utils import logging
from typing_extensions import Self

from kvlayers import DynamicCache, Quantization, QuantizedCache, QuantizedCacheConfig
from kvlayers.errors import CapacityError, OptionError
from kvlayers.options import checked_dtype
from kvlayers.stores import StateForm, form_of
from kvlayers_lab.calibration.checks import (
    Budget,
    DivergenceBudget,
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
from kvlayers_lab.calibration.settings import (
    DivergenceInUse,
    Sensitivity,
    Setting,
    Settings,
    Text,
    measure_sensitivities,
    part_costs,
    passages_of,
    read,
)

FILE_NAME = "kvlayers_calibration.json"
"""Name of the file in the directory of a model."""


@dataclass(frozen=True)
class MeasuredSetting:
    """Bits of each layer, and their measured cost.

    Attributes:
        cache_config: options of a `QuantizedCache`.
        bytes_per_token: bytes that a packed token takes over all quantized layers.
        divergence: mean KL divergence from full precision in nats, on the texts of the calibration, read in chunks
            through such a cache.
    """

    cache_config: dict[str, Any]
    bytes_per_token: float
    divergence: float


@dataclass(frozen=True)
class Calibration:
    """Bits for the keys and the values of each layer of a model, with the measurements behind them.

    Attributes:
        chosen: the chosen bits.
        uniform: the best setting with the same bits in every layer that takes no more bytes; `None` if every such
            setting takes more.
        sensitivities: the divergence if one part alone is quantized, for each part.
    """

    chosen: MeasuredSetting
    uniform: MeasuredSetting | None
    sensitivities: tuple[Sensitivity, ...]

    def __str__(self) -> str:
        found = f"Calibration: {self.bytes_per_token:g} bytes a token, divergence {self.divergence:.3g}"
        if self.uniform is None:
            return found
        alike = self.uniform
        return f"{found}; uniform bits: {alike.bytes_per_token:g} bytes a token, divergence {alike.divergence:.3g}"

    @property
    def cache_config(self) -> dict[str, Any]:
        """Options of a `QuantizedCache`, or the `cache_config` of `cache_implementation="quantized"`."""
        return self.chosen.cache_config

    @property
    def divergence(self) -> float:
        """Mean KL divergence from full precision in nats, on the texts of the calibration."""
        return self.chosen.divergence

    @property
    def bytes_per_token(self) -> float:
        """Bytes that a packed token takes over all quantized layers."""
        return self.chosen.bytes_per_token

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the calibration as JSON.

        Args:
            path: a file that ends in `.json`, or a directory, such as the model's, for `kvlayers_calibration.json` in
                it. Missing directories are made. A file with another calibration is replaced.

        Returns:
            Path of the file.

        Raises:
            OptionError: the file cannot be written, or it exists and is not a calibration.
        """
        file = file_of(path)
        if file.exists():
            type(self).load(file)
        try:
            # A missing directory should not lose minutes of measurement.
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(dataclasses.asdict(self), indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise OptionError(
                f"`path`: {file} cannot be written ({error.strerror or error}): name another file."
            ) from error
        return file

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read a file that `save` wrote.

        Args:
            path: the file, or its directory, as for `save`.

        Raises:
            OptionError: the file does not exist, is not a calibration, or has invalid bits.
        """
        file = file_of(path)
        try:
            found = msgspec.json.decode(file.read_bytes(), type=cls)
            for setting in filter(None, (found.chosen, found.uniform)):
                QuantizedCacheConfig(**setting.cache_config)
            return found
        except OSError as error:
            raise OptionError(
                f"`path`: {file} cannot be read ({error.strerror or error}): pass a file that Calibration.save() wrote."
            ) from error
        except (msgspec.MsgspecError, ValueError, TypeError, RecursionError) as error:
            raise OptionError(
                f"`path`: {file} is not a calibration that Calibration.save() wrote ({type(error).__name__}: {error}): "
                "name another file, or calibrate again."
            ) from error


def file_of(path: str | os.PathLike[str]) -> Path:
    """The file for a path: the path itself if it ends in `.json`, otherwise `FILE_NAME` in that directory."""
    named = Path(path)
    return named if named.suffix == ".json" and not named.is_dir() else named / FILE_NAME


UNIFORM_MEASURED = 3
"""How many uniform settings are measured. The settings with the least expected divergence are chosen."""


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

    Quantizing one part alone, the keys or the values of a layer, changes predictions a little, and such changes nearly
    add up. So each part is quantized alone, with each number of bits, and the change is measured. Which part gets how
    many bits is a knapsack problem, which is solved exactly. The chosen setting is then measured as it will be used,
    and so are the best settings with the same bits everywhere; the best of them all is returned. (Bits by the
    sensitivity of layers: HAWQ, https://arxiv.org/abs/1905.03696, for weights; KVTuner,
    https://arxiv.org/abs/2502.04420, for caches.)

    It reads `passages * 2 * layers * widths` times `scored_tokens` tokens: a quarter of an hour on two cores for one
    with 135 million parameters. A bar shows the progress, unless transformers' `disable_progress_bar()` was
    called.

    Args:
        model: the model in eval mode, best in float32: in bfloat16, its own rounding changes predictions more than
            quantization to 8 bits does.
        texts: texts of the kind that the model will read, or their token ids, int64 `[tokens]`.
        budget: a `BytesBudget` or a `DivergenceBudget`.
        tokenizer: the model's tokenizer. By default it is loaded by the name of the model, if `texts` has texts.
        quantization: backend, group sizes, sinks and residual; its bits have no effect. By default `Quantization()`.
        widths: bits to choose from. By default all bits of the backend.
        passages: passages to read, taken from all texts in turn.
        context_length: tokens of a passage before the scored ones: 1024, or "1k".
        scored_tokens: tokens of a passage whose predictions are compared.
        dtype: dtype of the states for which bytes are counted, or its name; scales are held in it. By default the dtype
            of the model.
        sensitivities: sensitivities of an earlier calibration of the model. By default they are measured.

    Raises:
        OptionError: an argument is invalid, or the texts are too short.
        ConfigError: the model has an encoder, or no layer that is quantized.
        CapacityError: the budget cannot be met; the message says which one can.
        StateMismatchError: predictions are not finite.
    """
    check_budget(budget)
    states_dtype = None if dtype is None else checked_dtype(dtype)
    config, quantization = checked_config(model), checked_quantization(quantization)
    widths = checked_widths(widths, quantization)
    count, context = checked_count(passages, "passages"), checked_tokens(context_length, "context_length")
    scored = checked_tokens(scored_tokens, "scored_tokens")
    layers, quantized = checked_layers(config, quantization)
    ids = passages_of(model, texts, tokenizer, context + scored, count)
    check_ids(config, ids)
    forms = _forms(model, ids[0], quantized, states_dtype)
    costs = part_costs(forms, quantization, widths)
    keys, values = forms[quantized[0]]
    check_context(context, quantization, keys[2], values[2])
    most = most_bytes(budget, costs)
    if sensitivities is None:
        with logging.tqdm(total=len(ids) * len(costs) * len(widths), desc="Sensitivity of layers") as bar:
            sensitivities = measure_sensitivities(model, ids, quantized, quantization, widths, scored, bar.update)
    else:
        check_sensitivities(sensitivities, costs)
    check_finite(sensitivities)
    settings = Settings(sensitivities, costs, layers, quantization)
    with logging.tqdm(desc="Settings in use") as bar:
        divergence_in_use = DivergenceInUse(model, ids, scored)

        def measured(setting: Setting) -> MeasuredSetting:
            divergence = divergence_in_use.of(lambda: QuantizedCache(config=config, **setting.cache_config))
            bar.update()
            return MeasuredSetting(setting.cache_config, float(setting.bytes_per_token), divergence)

        best = settings.best_within(most)
        mixed = measured(best[-1])
        if isinstance(budget, DivergenceBudget):
            mixed = _cheapest_within(budget, best, mixed, settings.most_bits, measured)
        uniform = sorted(settings.uniform_within(mixed.bytes_per_token), key=lambda setting: setting.expected)
        tried = [measured(setting) for setting in uniform[:UNIFORM_MEASURED]]
    chosen = min([mixed, *tried], key=lambda setting: budget.rank(setting.bytes_per_token, setting.divergence))
    best_uniform = min(tried, key=lambda setting: setting.divergence, default=None)
    return Calibration(chosen, best_uniform, tuple(sensitivities))


def _cheapest_within(
    budget: DivergenceBudget,
    settings: Sequence[Setting],
    last: MeasuredSetting,
    most_bits: Setting,
    measured: Callable[[Setting], MeasuredSetting],
) -> MeasuredSetting:
    """The cheapest setting within a budget of divergence, found by bisection.

    Args:
        budget: the budget.
        settings: the settings, the cheapest first; each loses less than the one before.
        last: the last setting, measured.
        most_bits: the setting with the most bits everywhere, tried if even the last one is beyond the budget.
        measured: measures a setting.

    Raises:
        CapacityError: no setting is within the budget.
    """
    if last.divergence > budget.divergence:
        last = measured(most_bits)
        if last.divergence <= budget.divergence:
            return last
        raise CapacityError(
            f"`divergence` must be at least {last.divergence:.3g} nats, which the most bits everywhere reach, got "
            f"{budget.divergence:.3g}: allow more, or use a cache of full precision."
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
    """Forms of the keys and values that a model produces in each layer, with `dtype` if it is not `None`."""
    cache = DynamicCache(config=model.config)
    read(model, ids[:, :1], cache, 1)
    held = {index: cache.layers[index].parts[0] for index in layers}
    return {index: (form_of(each.keys.to(dtype)), form_of(each.values.to(dtype))) for index, each in held.items()}
