"""Bits for the keys and values of each layer: what they cost, what they change, and which are best within a budget."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvlayers import DynamicCache, Quantization, QuantizedLayer, models
from kvlayers.errors import OptionError
from kvlayers.quantizers import SIDES, Side, block_nbytes, block_tokens
from kvlayers.stores import StateForm
from kvlayers_lab.measuring.scoring import mean_divergence, newest_logits

Text = str | Tensor


def passages_of(model: Any, texts: Sequence[Text], tokenizer: Any | None, tokens: int, most: int) -> list[Tensor]:
    """Passages of `tokens` tokens each, taken from all texts in turn, each text from its beginning.

    Args:
        model: the passages are put on its device.
        texts: texts, or token ids `[tokens]` or `[1, tokens]`.
        tokenizer: the model's tokenizer. By default it is loaded by the name of the model, if `texts` has texts.
        tokens: tokens of a passage.
        most: the most passages to return.

    Returns:
        Token ids `[1, tokens]` each.

    Raises:
        OptionError: `texts` is empty, has other objects than texts, or all texts are too short.
    """
    if isinstance(texts, str | Tensor) or not isinstance(texts, Sequence) or not texts:
        raise OptionError(
            f"`texts` must be a list of texts or of token ids, got {_shown(texts)}: pass texts of the kind that the "
            "model will read."
        )
    if tokenizer is not None and not callable(tokenizer):
        raise OptionError(f"`tokenizer` must be a tokenizer of transformers, got a {type(tokenizer).__name__}.")
    if tokenizer is None and any(isinstance(text, str) for text in texts):
        tokenizer = _tokenizer_of(model)
    ids = [_ids(text, tokenizer) for text in texts]
    longest = max(each.shape[0] for each in ids)
    cut = [torch.split(each, tokens) for each in ids]
    found = []
    # One passage of each text in turn, so that few passages still come from many texts.
    for index in range(max(map(len, cut))):
        found += [parts[index] for parts in cut if index < len(parts) and parts[index].shape[0] == tokens]
    if not found:
        raise OptionError(
            f"`texts` must have a text of {tokens} tokens or more, but the longest has {longest}: pass longer texts, "
            "or a smaller `context_length` or `scored_tokens`."
        )
    return [passage[None].to(model.device) for passage in found[:most]]


def _ids(text: Text, tokenizer: Any) -> Tensor:
    if isinstance(text, str):
        # Without `verbose=False` the tokenizer warns about long texts, which are cut here.
        found: Tensor = tokenizer(text, return_tensors="pt", verbose=False).input_ids[0]
        return found
    if isinstance(text, Tensor) and text.dtype == torch.int64 and text.squeeze().dim() == 1:
        return text.reshape(-1)
    raise OptionError(f"`texts` must be texts, or token ids [tokens] of torch.int64, got {_shown(text)}.")


def _shown(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a tensor {list(value.shape)} of {value.dtype}"
    return "an empty list" if isinstance(value, list) and not value else f"a {type(value).__name__}"


def _tokenizer_of(model: Any) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(model.config.name_or_path)
    except (OSError, ValueError, TypeError) as error:
        raise OptionError(
            f"`tokenizer` is missing, and it cannot be loaded by the name of the model, "
            f"{model.config.name_or_path!r}: pass it, or pass token ids as `texts`."
        ) from error


def read(model: Any, ids: Tensor, cache: Any, scored: int) -> Tensor:
    """Read tokens with a cache, and predict the token after each of the newest tokens.

    Args:
        model: in eval mode.
        ids: the next tokens, int64 `[1, tokens]`.
        cache: holds the tokens before them.
        scored: the number of newest tokens.

    Returns:
        Log-probabilities `[scored, vocab]`, float64.
    """
    at_once = models.tokens_at_once(model.config) if cache.get_seq_length() else None
    parts = torch.split(ids, at_once or ids.shape[1], dim=1)
    logits = [newest_logits(model, part, cache, min(scored, part.shape[1])) for part in parts]
    return torch.cat(logits)[-scored:].double().log_softmax(-1)


class DivergenceInUse:
    """Measures caches as they are used: passages are read in chunks, and each chunk attends to rounded states.

    The states that a chunk adds depend on the rounding before it, so errors add up as they do in decoding.

    Args:
        model: in eval mode.
        passages: token ids `[1, tokens]`.
        scored: newest tokens of a passage that are scored, and tokens of a chunk.
    """

    def __init__(self, model: Any, passages: Sequence[Tensor], scored: int) -> None:
        self._model, self._passages, self._scored = model, passages, scored
        self._exact = [self._predictions(ids, DynamicCache(config=model.config)) for ids in passages]

    def of(self, make_cache: Callable[[], Any]) -> float:
        """Mean KL divergence of the predictions from full precision, in nats.

        Args:
            make_cache: makes an empty cache; called for each passage.
        """
        found = [
            mean_divergence(exact, self._predictions(ids, make_cache()))
            for ids, exact in zip(self._passages, self._exact, strict=True)
        ]
        return sum(found) / len(found)

    def _predictions(self, ids: Tensor, cache: Any) -> Tensor:
        for part in torch.split(ids[:, : -self._scored], self._scored, dim=1):
            read(self._model, part, cache, 1)
        return read(self._model, ids[:, -self._scored :], cache, self._scored)


MOST_UNITS = 200_000
"""The most units into which a budget is divided. Finer units would change nothing measurable, and take memory."""


@dataclass(frozen=True)
class PartChoice:
    """A setting that a part can have.

    Attributes:
        cost: bytes per token.
        loss: KL divergence if all other parts are in full precision.
    """

    cost: Fraction
    loss: float


def least_losses(parts: Sequence[Sequence[PartChoice]], most: Fraction) -> list[tuple[int, ...]]:
    """Choose a setting for each part so that the sum of losses is least, for every budget up to `most` that matters.

    A budget matters if it allows a smaller loss than every smaller budget. Dynamic programming over the parts finds
    them, in units of the greatest common divisor of all costs. If `most` is more than `MOST_UNITS` such units (which
    takes odd head_dims in many layers), the unit is larger and costs are rounded up to it, so that no result exceeds
    its budget.

    Args:
        parts: the choices of each part.
        most: bytes per token that all parts together may take.

    Returns:
        For each budget that matters, the smallest first, the index of each part's choice. Empty if even the cheapest
        choices, rounded up, exceed `most`.
    """
    unit = max(_common_unit([choice.cost for part in parts for choice in part]), most / MOST_UNITS)
    costs = [[-(-choice.cost // unit) for choice in part] for part in parts]
    units = int(most // unit)
    best = np.zeros(units + 1)
    taken: list[npt.NDArray[np.int8]] = []
    for part, prices in zip(parts, costs, strict=True):
        totals = np.full((len(part), units + 1), np.inf)
        for index, (choice, price) in enumerate(zip(part, prices, strict=True)):
            if price <= units:
                totals[index, price:] = best[: units + 1 - price] + choice.loss
        taken.append(totals.argmin(0).astype(np.int8))
        best = totals.min(0)
    improves = np.isfinite(best) & np.r_[True, best[1:] < best[:-1]]
    return [_choices(taken, costs, int(budget)) for budget in np.flatnonzero(improves)]


def _common_unit(costs: Sequence[Fraction]) -> Fraction:
    denominator = int(np.lcm.reduce([cost.denominator for cost in costs]))
    return Fraction(int(np.gcd.reduce([int(cost * denominator) for cost in costs])), denominator)


def _choices(taken: Sequence[npt.NDArray[np.int8]], costs: Sequence[Sequence[int]], units: int) -> tuple[int, ...]:
    chosen = []
    for indices, prices in zip(reversed(taken), reversed(costs), strict=True):
        index = int(indices[units])
        chosen.append(index)
        units -= prices[index]
    return tuple(reversed(chosen))


@dataclass(frozen=True)
class Sensitivity:
    """KL divergence of the predictions if one side of one layer alone is quantized.

    Attributes:
        layer: index of the layer.
        side: `"keys"` or `"values"`.
        divergence: mean KL divergence from full precision in nats, by the number of bits.
    """

    layer: int
    side: Side
    divergence: dict[int, float]


def measure_sensitivities(
    model: Any,
    passages: Sequence[Tensor],
    layers: Sequence[int],
    quantization: Quantization,
    widths: Sequence[int],
    scored: int,
    tick: Callable[[], object],
) -> list[Sensitivity]:
    """Quantize one side of each layer at a time, and compare the predictions after it.

    The context of a passage is read once. Its states are then rounded in a fork of the cache, and only the newest
    tokens are read again, once for each layer, side and width.

    Args:
        model: in eval mode.
        passages: token ids `[1, tokens]`.
        layers: indices of the layers that are quantized.
        quantization: how states are quantized, apart from the bits.
        widths: numbers of bits to measure.
        scored: newest tokens of a passage, which are scored and not quantized.
        tick: called after each measurement.

    Returns:
        A sensitivity for each layer and side, layers in order and keys first.
    """
    total = {(layer, side, nbits): 0.0 for layer in layers for side in SIDES for nbits in widths}
    for ids in passages:
        context, newest = ids[:, :-scored], ids[:, -scored:]
        cache = DynamicCache(config=model.config)
        read(model, context, cache, 1)
        exact = read(model, newest, cache.fork(), scored)
        for layer in layers:
            for nbits in widths:
                rounded = _rounded(cache.layers[layer].parts[0], quantization, nbits)
                for side in SIDES:
                    probed = cache.fork()
                    setattr(probed.layers[layer].parts[0], side, rounded[side])
                    seen = read(model, newest, probed, scored)
                    total[layer, side, nbits] += mean_divergence(exact, seen) / len(passages)
                    tick()
    return [
        Sensitivity(layer, side, {nbits: total[layer, side, nbits] for nbits in widths})
        for layer in layers
        for side in SIDES
    ]


def _rounded(layer: Any, quantization: Quantization, nbits: int) -> dict[Side, Tensor | None]:
    """The states of a layer, quantized and dequantized."""
    quantized = QuantizedLayer(with_bits(quantization, nbits))
    quantized.update(layer.keys, layer.values)
    return {"keys": quantized.keys, "values": quantized.values}


def with_bits(quantization: Quantization, nbits: int) -> Quantization:
    """The same quantization with `nbits` bits for keys and values."""
    return dataclasses.replace(quantization, nbits=nbits, key_nbits=None, value_nbits=None)


Part = tuple[int, Side]
"""Index of a layer, and one side of it."""


@dataclass(frozen=True)
class Setting:
    """Bits of every part of a cache.

    Attributes:
        cache_config: options of a `QuantizedCache` that has these bits, `None` for a layer that is not quantized.
        bytes_per_token: bytes of a packed token over all parts.
        expected: the expected divergence: the sum of the divergences of the parts, each quantized alone.
    """

    cache_config: dict[str, Any]
    bytes_per_token: Fraction
    expected: float


class Settings:
    """All settings of a model.

    Args:
        sensitivities: the sensitivity of each part.
        costs: bytes per token of each part, by its bits.
        layers: the number of layers of the cache, including layers that are not quantized.
        quantization: how states are quantized, apart from the bits.
    """

    def __init__(
        self,
        sensitivities: Sequence[Sensitivity],
        costs: Mapping[Part, Mapping[int, Fraction]],
        layers: int,
        quantization: Quantization,
    ) -> None:
        self._layers = layers
        self._facts = {name: fact for name, fact in quantization.facts().items() if fact is not None}
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
        nbits = {part: of_part[index] for part, of_part, index in widths}
        keys, values = ([nbits.get((layer, side)) for layer in range(self._layers)] for side in SIDES)
        return Setting(
            cache_config={**self._facts, "key_nbits": keys, "value_nbits": values},
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
