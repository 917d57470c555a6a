"""Fidelity by position: figures over ranges of positions, and how they change along a text."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from kvlayers.tools.measuring.scoring import PassageScores

BINS = 16
"""Ranges of a curve, at most. Each range then has enough tokens: KL divergence varies much from token to token."""

GROWS_FROM = 1.5
"""How many times as great the divergence of the last quarter must be to count as growth. The quarters are of other
text: with `int4`, which does not drift, one was 1.2 times the other (SmolLM2-135M, 2 passages, 256 tokens each)."""

LEAST_KL = 1e-6
"""Mean KL divergence, in nats, below which a difference is the rounding of float32."""


@dataclass(frozen=True)
class FidelityRange:
    """Fidelity of the tokens in a range of positions, or of distances.

    Attributes:
        start: the first position, or distance, in tokens.
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
    """Fidelity by position in the passage, whose first scored token is at position `context`."""
    return _ranges([(context + index, *_figures(each, index)) for each in passages for index in range(each.tokens)])


def since_packing(passages: Sequence[PassageScores]) -> tuple[FidelityRange, ...]:
    """Fidelity by the distance from the last packing or eviction; empty if there was none, or it is not known."""
    return _ranges(
        [
            (distance, *_figures(each, index))
            for each in passages
            for index, distance in enumerate(each.since_packing)
            if distance is not None
        ]
    )


def drift(passages: Sequence[PassageScores], context: int) -> Drift:
    """The first and the last quarter of the scored tokens of passages of the same length, at least one token each."""
    scored = passages[0].tokens
    quarter = max(scored // 4, 1)
    first = [_of_passage(each, context, 0, quarter) for each in passages]
    last = [_of_passage(each, context, scored - quarter, scored) for each in passages]
    growing = sum(end.kl > begin.kl for begin, end in zip(first, last, strict=True))
    return Drift(_together(first), _together(last), len(passages), growing)


_Token = tuple[int, float, bool]
"""Position or distance of a token, its KL divergence, and whether the likeliest next token agrees."""


def _figures(scores: PassageScores, index: int) -> tuple[float, bool]:
    return scores.kl[index], scores.agrees[index]


def _ranges(tokens: Sequence[_Token]) -> tuple[FidelityRange, ...]:
    """Ranges of equal width, without empty ones. The last range may be shorter."""
    if not tokens:
        return ()
    first, stop = min(place for place, _, _ in tokens), max(place for place, _, _ in tokens) + 1
    width = math.ceil((stop - first) / BINS)
    of_range: dict[int, list[_Token]] = {}
    for token in tokens:
        of_range.setdefault((token[0] - first) // width, []).append(token)
    return tuple(
        _range(first + index * width, min(first + (index + 1) * width, stop), of_range[index])
        for index in sorted(of_range)
    )


def _range(start: int, stop: int, tokens: Sequence[_Token]) -> FidelityRange:
    kl = math.fsum(kl for _, kl, _ in tokens) / len(tokens)
    return FidelityRange(start, stop, len(tokens), kl, sum(agrees for _, _, agrees in tokens) / len(tokens))


def _of_passage(scores: PassageScores, context: int, begin: int, end: int) -> FidelityRange:
    tokens = [(context + index, *_figures(scores, index)) for index in range(begin, end)]
    return _range(context + begin, context + end, tokens)


def _together(ranges: Sequence[FidelityRange]) -> FidelityRange:
    """The same range of several passages, which has as many tokens in each."""
    one = ranges[0]
    return FidelityRange(
        one.start,
        one.stop,
        sum(each.tokens for each in ranges),
        math.fsum(each.kl for each in ranges) / len(ranges),
        math.fsum(each.agreement for each in ranges) / len(ranges),
    )
