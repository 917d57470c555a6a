"""What quantized caches change in a model's predictions, and the bytes that they take."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor

from kvlayers.errors import OptionError
from kvlayers.planning.cache_bytes import CacheArithmetic
from kvlayers.planning.shapes import layer_shapes
from kvlayers.tools.measuring.contenders import make_contender
from kvlayers.tools.measuring.scoring import CacheMaker, Scores, read
from kvlayers.tools.measuring.settings import QuantizationSetting
from kvlayers.tools.names import KVLAYERS

FULL = "full"
"""The name of full precision."""

DTYPE_IN_USE = torch.bfloat16
"""Dtype of the states whose bytes are counted, whatever the model computes in."""


@dataclass(frozen=True)
class SettingFidelity:
    """Fidelity and bytes of one setting.

    Attributes:
        name: name of the setting, or `FULL`.
        nbytes: bytes of a cache of bfloat16 states after all tokens of a passage, scales and residual included.
        bytes_per_token: `nbytes` divided by the tokens of the passage.
        of_full: `nbytes` as a fraction of the bytes in full precision.
        tokens: tokens that were scored.
        kl: mean KL divergence of the next-token distributions from those in full precision, in nats.
        kl_99: 99th percentile of the KL divergence over the tokens.
        kl_of_passages: mean KL divergence of each passage.
        perplexity: perplexity of the scored text.
        perplexity_increase: increase of the perplexity over full precision, in percent.
        agreement: share of the tokens whose likeliest next token is the same as in full precision.
        within: whether the setting is within the budget, `None` if there is no budget.
        failure: the error that ended the reading, `None` if there was none. The figures are NaN after an error.
    """

    name: str
    nbytes: int
    bytes_per_token: float
    of_full: float
    tokens: int = 0
    kl: float = math.nan
    kl_99: float = math.nan
    kl_of_passages: tuple[float, ...] = ()
    perplexity: float = math.nan
    perplexity_increase: float = math.nan
    agreement: float = math.nan
    within: bool | None = None
    failure: str | None = None


@dataclass(frozen=True)
class FidelityBudget:
    """How much worse predictions may be.

    Attributes:
        max_kl: the greatest mean KL divergence, in nats a token; `None` for any.
        max_perplexity_increase: the greatest increase of perplexity, in percent; `None` for any.
    """

    max_kl: float | None = None
    max_perplexity_increase: float | None = None

    def __post_init__(self) -> None:
        for name, most in vars(self).items():
            if most is not None and not 0 <= most < math.inf:
                raise OptionError(f"`{name}` must be a finite number, at least 0, got {most}.")

    @property
    def is_given(self) -> bool:
        """Whether there is a limit."""
        return self.max_kl is not None or self.max_perplexity_increase is not None

    def allows(self, kl: float, perplexity_increase: float) -> bool:
        """Whether the figures are within the budget. NaN is not."""
        pairs = ((kl, self.max_kl), (perplexity_increase, self.max_perplexity_increase))
        return all(most is None or figure <= most for figure, most in pairs)


def bytes_of(make: Callable[[Any, int], Any], config: Any, tokens: int) -> int:
    """Bytes of a cache after `tokens` tokens of one sequence in `DTYPE_IN_USE`, by arithmetic.

    Args:
        make: makes an empty cache from a model config and a length hint.
        config: config of the model.
        tokens: tokens that the cache has seen.

    Raises:
        ConfigError: the config does not say what the model's layers hold.
        OptionError: the model does not support the cache.
    """
    shapes = layer_shapes(config, 1, DTYPE_IN_USE)
    return CacheArithmetic(lambda length_hint: make(config, length_hint), shapes, None).nbytes(tokens).total


def measure_fidelity(
    model: Any,
    passages: Sequence[Tensor],
    settings: Sequence[QuantizationSetting],
    context: int,
    chunk: int,
    budget: FidelityBudget,
    tick: Callable[[], None],
) -> list[SettingFidelity]:
    """Read passages through a cache of each setting, and through transformers' `DynamicCache` in full precision.

    Args:
        model: in eval mode.
        passages: token ids, int64 `[1, tokens + 1]`; the last one is only predicted.
        settings: settings that the model supports.
        context: tokens of each passage before the scored ones.
        chunk: tokens of a forward pass. A cache may quantize again after each of them.
        budget: how much worse predictions may be.
        tick: called after each chunk.

    Returns:
        Full precision, then the settings in their order. A setting that raises an error reads no further.
    """
    makers: dict[str, CacheMaker] = {FULL: lambda config: transformers.DynamicCache(config=config)}
    makers |= {each.name: each.make for each in settings}
    tokens = passages[0].shape[1] - 1
    full_bytes = bytes_of(_in_full, model.config, tokens)
    held = {FULL: full_bytes} | {each.name: bytes_of(each.make, model.config, tokens) for each in settings}
    on_device = [ids.to(model.device) for ids in passages]
    scores = read(model, on_device, makers, context, chunk, tick)
    perplexity = scores[FULL].summary()["perplexity"]
    return [
        SettingFidelity(
            name,
            held[name],
            held[name] / tokens,
            held[name] / full_bytes,
            **_figures(score, perplexity, None if name == FULL else budget),
        )
        for name, score in scores.items()
    ]


def smallest_within(measured: Sequence[SettingFidelity]) -> SettingFidelity | None:
    """The setting within the budget that takes the fewest bytes, `None` if no setting is within it."""
    return min((each for each in measured if each.within), key=lambda each: (each.nbytes, each.kl), default=None)


def _in_full(config: Any, length_hint: int) -> Any:
    return make_contender(KVLAYERS, "dynamic", config, length_hint).make()


def _figures(score: Scores, perplexity: float, budget: FidelityBudget | None) -> dict[str, Any]:
    figures = score.summary()
    within = None if budget is None or not budget.is_given else False
    if "failure" in figures:
        return {"failure": figures["failure"], "within": within}
    increase = 100 * (figures["perplexity"] / perplexity - 1)
    return {
        **{name: figures[name] for name in ("tokens", "kl", "kl_99", "perplexity", "agreement")},
        "kl_of_passages": tuple(figures["kl_of_passages"]),
        "perplexity_increase": increase,
        "within": within if within is None or budget is None else budget.allows(figures["kl"], increase),
    }
