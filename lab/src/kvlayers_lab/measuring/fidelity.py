"""What caches change in a model's predictions, and the bytes that they take."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import transformers
from torch import Tensor

from kvlayers.errors import OptionError
from kvlayers_lab.measuring.contenders import make_contender
from kvlayers_lab.measuring.nbytes import bytes_of, held_nbytes
from kvlayers_lab.measuring.scoring import CacheMaker, NoRecord, PassageScores, Scores, read
from kvlayers_lab.measuring.uneven_heads import UnevenHead, uneven_heads
from kvlayers_lab.names import KVLAYERS

BINS = 16
"""Ranges of a curve, at most. Each range then has enough tokens: KL divergence varies much from token to token."""

GROWS_FROM = 1.5
"""How many times as great the divergence of the last quarter must be to count as growth. The quarters are of other
text: with `int4`, which does not drift, one was 1.2 times the other (SmolLM2-135M, 2 passages, 256 tokens each)."""

LEAST_KL = 1e-6
"""Mean KL divergence, in nats, below which a difference is the rounding of float32."""


@dataclass(frozen=True)
class FidelityRange:
    """Fidelity of the tokens in a range of positions.

    Attributes:
        start: the first position, in tokens.
        stop: the position after the last one.
        tokens: scored tokens in the range, over all passages.
        kl: their mean KL divergence, in nats.
        agreement: share of them whose likeliest next token is the same as in full precision.
    """

    start: int
    stop: int
    tokens: int
    kl: float
    agreement: float


@dataclass(frozen=True)
class Drift:
    """How the KL divergence changes from the first quarter of the scored tokens to the last quarter.

    Attributes:
        first: the first quarter, over all passages.
        last: the last quarter.
        passages: passages that were read.
        growing_passages: those whose mean KL divergence is greater in the last quarter.
    """

    first: FidelityRange
    last: FidelityRange
    passages: int
    growing_passages: int

    @property
    def grows(self) -> bool:
        """Whether the divergence is clearly greater in the last quarter, and in most of the passages."""
        is_greater = self.last.kl >= GROWS_FROM * self.first.kl and self.last.kl >= LEAST_KL
        return is_greater and 2 * self.growing_passages > self.passages


def by_position(passages: Sequence[PassageScores], context: int) -> tuple[FidelityRange, ...]:
    """Fidelity in ranges of equal width, whose first one is at position `context`. The last one may be shorter."""
    scored = len(passages[0].kl)
    width = math.ceil(scored / BINS)
    return tuple(_range(passages, context, start, min(start + width, scored)) for start in range(0, scored, width))


def drift(passages: Sequence[PassageScores], context: int) -> Drift:
    """The first and the last quarter of the scored tokens of passages of the same length, at least one token each."""
    scored = len(passages[0].kl)
    quarter = max(scored // 4, 1)
    first, last = (_range(passages, context, start, start + quarter) for start in (0, scored - quarter))
    growing = sum(math.fsum(each.kl[-quarter:]) > math.fsum(each.kl[:quarter]) for each in passages)
    return Drift(first, last, len(passages), growing)


def _range(passages: Sequence[PassageScores], context: int, start: int, stop: int) -> FidelityRange:
    """Fidelity of the scored tokens with these indices, over all passages."""
    kl = [kl for each in passages for kl in each.kl[start:stop]]
    agrees = [is_same for each in passages for is_same in each.agrees[start:stop]]
    return FidelityRange(context + start, context + stop, len(kl), math.fsum(kl) / len(kl), sum(agrees) / len(kl))


FULL = "full"
"""The name of full precision."""


@dataclass(frozen=True)
class SettingFidelity:
    """Fidelity and bytes of one cache.

    Attributes:
        name: name of the cache, or `FULL`.
        nbytes: bytes of a cache of bfloat16 states after all tokens of a passage, scales and residual included; `None`
            if they are not known, as the next two.
        bytes_per_token: `nbytes` divided by the tokens of the passage.
        of_full: `nbytes` as a fraction of the bytes in full precision.
        tokens: tokens that were scored.
        kl: mean KL divergence of the next-token distributions from those in full precision, in nats.
        kl_99: 99th percentile of the KL divergence over the tokens.
        kl_of_passages: mean KL divergence of each passage.
        perplexity: perplexity of the scored text.
        perplexity_increase: increase of the perplexity over full precision, in percent.
        agreement: share of the tokens whose likeliest next token is the same as in full precision.
        by_position: fidelity by position in the passage.
        drift: the first and the last quarter of the scored tokens, `None` after an error.
        within: whether the cache is within the budget, `None` if there is no budget.
        uneven_head: the head whose keys lose far more than those of the others, `None` if no head does, or if the cache
            does not round its keys.
        failure: the error that ended the reading, `None` if there was none. The figures are NaN after an error.
    """

    name: str
    nbytes: int | None
    bytes_per_token: float | None
    of_full: float | None
    tokens: int = 0
    kl: float = math.nan
    kl_99: float = math.nan
    kl_of_passages: tuple[float, ...] = ()
    perplexity: float = math.nan
    perplexity_increase: float = math.nan
    agreement: float = math.nan
    by_position: tuple[FidelityRange, ...] = ()
    drift: Drift | None = None
    within: bool | None = None
    uneven_head: UnevenHead | None = None
    failure: str | None = None


@dataclass(frozen=True)
class FidelityBudget:
    """How much worse predictions may be, and how much memory a cache may take.

    Attributes:
        max_kl: the greatest mean KL divergence, in nats a token; `None` for any.
        max_perplexity_increase: the greatest increase of perplexity, in percent; `None` for any.
        max_bytes: the most bytes of a cache that holds a passage, or a share of the bytes in full precision (above 0, 1
            at most); `None` for any.
    """

    max_kl: float | None = None
    max_perplexity_increase: float | None = None
    max_bytes: int | Fraction | None = None

    def __post_init__(self) -> None:
        for name, most in (("max_kl", self.max_kl), ("max_perplexity_increase", self.max_perplexity_increase)):
            if most is not None and not 0 <= most < math.inf:
                raise OptionError(f"`{name}` must be a finite number, at least 0, got {most}.")
        if self.max_bytes is not None and self.max_bytes <= 0:
            raise OptionError(f"`max_bytes` must be above 0, got {self.max_bytes}.")

    @property
    def is_given(self) -> bool:
        """Whether there is a limit."""
        return self != FidelityBudget()

    def allows(self, kl: float, perplexity_increase: float, nbytes: int | None, full_nbytes: int) -> bool:
        """Whether the figures are within the budget. NaN is not, and neither are unknown bytes if bytes are limited."""
        pairs = ((kl, self.max_kl), (perplexity_increase, self.max_perplexity_increase))
        if not math.isfinite(kl) or not all(most is None or figure <= most for figure, most in pairs):
            return False
        most = self.max_bytes * full_nbytes if isinstance(self.max_bytes, Fraction) else self.max_bytes
        return most is None or (nbytes is not None and nbytes <= most)

    def best_of(self, measured: Sequence[SettingFidelity]) -> SettingFidelity | None:
        """The best cache within the budget, `None` if no cache is within it.

        With a limit of bytes, it is the one with the least KL divergence. Otherwise it is the one with the fewest
        bytes, and a cache whose bytes are not known counts as the largest.
        """

        def rank(each: SettingFidelity) -> tuple[float, float]:
            nbytes = math.inf if each.nbytes is None else each.nbytes
            return (nbytes, each.kl) if self.max_bytes is None else (each.kl, nbytes)

        return min((each for each in measured if each.within), key=rank, default=None)


def measure_fidelity(
    model: Any,
    passages: Sequence[Tensor],
    caches: Mapping[str, Callable[[], Any]],
    context: int,
    chunk: int,
    budget: FidelityBudget,
    record: NoRecord,
    tick: Callable[[], None],
) -> list[SettingFidelity]:
    """Read passages through every cache, and through transformers' `DynamicCache` in full precision.

    Args:
        model: in eval mode.
        passages: token ids, int64 `[1, tokens + 1]`; the last one is only predicted.
        caches: makers of empty caches for a passage, by name.
        context: tokens of each passage before the scored ones.
        chunk: tokens of a forward pass. A cache may quantize again after each of them.
        budget: how much worse predictions may be.
        record: what was read before, and keeps what is read now.
        tick: called after each chunk.

    Returns:
        Full precision, then the caches in their order. A cache that raises an error reads no further.
    """
    tokens = passages[0].shape[1] - 1
    config = model.config
    full_nbytes = bytes_of(make_contender(KVLAYERS, "dynamic", config, tokens).make, config, tokens)
    held: dict[str, int | None] = {FULL: full_nbytes}
    held |= {name: held_nbytes(make, config, tokens, chunk) for name, make in caches.items()}
    makers: dict[str, CacheMaker] = {FULL: lambda config: transformers.DynamicCache(config=config)}
    makers |= {name: lambda config, make=make: make() for name, make in caches.items()}  # type: ignore[misc]
    scores = read(model, passages, makers, context, chunk, record, tick)
    perplexity = scores[FULL].summary()["perplexity"]
    readable = {name: make for name, make in caches.items() if scores[name].failure is None}
    uneven = uneven_heads(model, passages[0][:, :-1], chunk, readable)
    measured = []
    for (name, score), nbytes in zip(scores.items(), held.values(), strict=True):
        found = SettingFidelity(
            name,
            nbytes,
            None if nbytes is None else nbytes / tokens,
            None if nbytes is None else nbytes / full_nbytes,
            **_figures(score, context, perplexity),
            uneven_head=uneven.get(name),
        )
        if name != FULL and budget.is_given:
            within = budget.allows(found.kl, found.perplexity_increase, nbytes, full_nbytes)
            found = dataclasses.replace(found, within=within)
        measured.append(found)
    return measured


def _figures(score: Scores, context: int, perplexity: float) -> dict[str, Any]:
    figures = score.summary()
    if "failure" in figures:
        return {"failure": figures["failure"]}
    return {
        **{name: figures[name] for name in ("tokens", "kl", "kl_99", "perplexity", "agreement")},
        "kl_of_passages": tuple(figures["kl_of_passages"]),
        "perplexity_increase": 100 * float(figures["perplexity"] / perplexity - 1),
        "by_position": by_position(score.passages, context),
        "drift": drift(score.passages, context),
    }
