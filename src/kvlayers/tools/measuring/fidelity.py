"""What rounding does to a model's predictions, and what it saves."""

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
from kvlayers.tools.measuring.contenders import of_kvlayers
from kvlayers.tools.measuring.scoring import CacheMaker, Scores, read
from kvlayers.tools.measuring.settings import QuantizationSetting

FULL = "full"
"""The name of full precision."""

DTYPE_IN_USE = torch.bfloat16
"""That of the states whose bytes are counted, whatever the model computes in."""


@dataclass(frozen=True)
class Fidelity:
    """What one setting came to.

    Attributes:
        name: of the setting, or `FULL`.
        nbytes: that a cache of bfloat16 states holds after all tokens of a passage, scales and residual included.
        bytes_per_token: the same, for a token of the passage.
        of_full: the same, as a part of what full precision holds.
        tokens: that were scored.
        kl: mean divergence of its next-token distributions from those of full precision, in nats.
        kl_99: that of the token at the 99th percentile.
        kl_of_passages: the mean of each passage.
        perplexity: of the text that was scored.
        perplexity_increase: over that of full precision, in percent.
        agreement: in which part of the tokens the likeliest next token is that of full precision.
        within: whether it is within the budget, `None` where there is none.
        failure: what it raised; the figures of the reading are then not numbers.
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
class Budget:
    """How much worse predictions may be.

    Attributes:
        max_kl: the greatest mean divergence, in nats a token; `None` for any.
        max_perplexity_increase: the greatest increase of perplexity, in percent; `None` for any.
    """

    max_kl: float | None = None
    max_perplexity_increase: float | None = None

    def __post_init__(self) -> None:
        for most in (self.max_kl, self.max_perplexity_increase):
            if most is not None and not 0 <= most < math.inf:
                raise OptionError(f"expected a budget of 0 or a number above it, but saw {most}.")

    @property
    def is_given(self) -> bool:
        """Whether there is one."""
        return self.max_kl is not None or self.max_perplexity_increase is not None

    def allows(self, kl: float, perplexity_increase: float) -> bool:
        """Whether figures are within it. Those that are not numbers are not."""
        pairs = ((kl, self.max_kl), (perplexity_increase, self.max_perplexity_increase))
        return all(most is None or figure <= most for figure, most in pairs)


def bytes_of(make: Callable[[Any, int], Any], config: Any, tokens: int) -> int:
    """Bytes of a cache after `tokens` tokens of one sequence in `DTYPE_IN_USE`, by arithmetic.

    Args:
        make: makes an empty cache from a model config and a length hint.
        config: of the model.
        tokens: how many it has seen.

    Raises:
        ConfigError: the config does not say what the model's layers hold.
        OptionError: there is no such cache for the model.
    """
    shapes = layer_shapes(config, 1, DTYPE_IN_USE)
    return CacheArithmetic(lambda length_hint: make(config, length_hint), shapes, None).nbytes(tokens).total


def measure_fidelity(
    model: Any,
    passages: Sequence[Tensor],
    settings: Sequence[QuantizationSetting],
    context: int,
    chunk: int,
    budget: Budget,
    tick: Callable[[], None],
) -> list[Fidelity]:
    """Read passages through a cache of each setting, and through transformers' `DynamicCache` in full precision.

    Args:
        model: in eval mode.
        passages: token ids, int64 `[1, tokens + 1]`, the last of which is only predicted.
        settings: of quantized caches that there can be for the model.
        context: tokens of each passage read before scoring begins.
        chunk: tokens read at once, after each of which a cache may quantize again.
        budget: how much worse predictions may be.
        tick: called after each chunk.

    Returns:
        Full precision, and the settings in their order. One that raises while it reads is left out from there on.
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
        Fidelity(
            name,
            held[name],
            held[name] / tokens,
            held[name] / full_bytes,
            **_figures(score, perplexity, None if name == FULL else budget),
        )
        for name, score in scores.items()
    ]


def smallest_within(measured: Sequence[Fidelity]) -> Fidelity | None:
    """That of the settings within the budget that holds the fewest bytes, `None` where there is none."""
    return min((each for each in measured if each.within), key=lambda each: (each.nbytes, each.kl), default=None)


def _in_full(config: Any, length_hint: int) -> Any:
    return of_kvlayers("dynamic", config, length_hint).make()


def _figures(score: Scores, perplexity: float, budget: Budget | None) -> dict[str, Any]:
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
