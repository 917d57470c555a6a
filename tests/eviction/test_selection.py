"""Selections are those of a loop over sequences, heads and tokens."""

import math
import random

import pytest
import torch

from kvlayers.eviction.selection import HEAD_FLOOR, KeptTokens, select


def kept_sets(kept: KeptTokens) -> list[list[list[int]]]:
    """The kept tokens of each sequence and head, after a check of the form of the result."""
    assert kept.mask.dtype == torch.bool
    assert kept.counts.dtype == torch.int64
    assert kept.counts.device.type == "cpu"
    assert torch.equal(kept.counts, kept.mask.sum(2))
    return [[head.nonzero().flatten().tolist() for head in heads] for heads in kept.mask]


def order(scores: list[float], always: set[int], padding: int) -> list[int]:
    """The tokens of one head from the best to the worst, without padding; the first of equal ones first."""

    def key(token: int) -> tuple[bool, float]:
        score = scores[token]
        return token not in always, math.inf if math.isnan(score) else -score

    return sorted(range(padding, len(scores)), key=key)


def counts_of(scores: torch.Tensor, keep: int, always: set[int], front: int, floor: float) -> list[int]:
    """Tokens of each head: the safe ones of each head, and then the best of all heads until there are enough."""
    heads, tokens = scores.shape
    keep = min(keep, tokens - front)
    orders = [order(scores[head].tolist(), always, front) for head in range(heads)]
    chosen = {(head, token) for head in range(heads) for token in orders[head][: int(keep * floor)]}
    chosen |= {(head, token) for head in range(heads) for token in always}
    rest = [(-float(scores[head, token]), head, token) for head in range(heads) for token in range(front, tokens)]
    for _, head, token in sorted(rest):
        if len(chosen) < keep * heads:
            chosen.add((head, token))
    return [sum(own == head for own, _ in chosen) for head in range(heads)]


def slow_sets(
    scores: torch.Tensor, keep: list[int], sinks: int, recent: int, padding: list[int], floor: float = 1.0
) -> list[list[list[int]]]:
    """The best tokens of each head, as many as it keeps."""
    tokens, result = scores.shape[2], []
    for row, front in enumerate(padding):
        always = {token for token in range(front, tokens) if token < front + sinks or token >= tokens - recent}
        counts = counts_of(scores[row], max(keep[row], sinks + recent), always, front, floor)
        heads = zip(scores[row].tolist(), counts, strict=True)
        result.append([sorted(order(head, always, front)[:count]) for head, count in heads])
    return result


@pytest.mark.parametrize("seed", range(60))
def test_heads_keep_the_best_tokens(seed: int) -> None:
    rng = random.Random(seed)
    batch, heads, tokens = rng.randint(1, 3), rng.randint(1, 5), rng.randint(1, 50)
    keep, padding = ([rng.randint(0, tokens + more) for _ in range(batch)] for more in (5, 0))
    sinks, recent, floor = rng.randint(0, 4), rng.randint(0, 6), rng.choice([0.0, 0.2, 1.0])
    # Few different scores, so that many are equal, or heads with higher scores than others.
    scores = torch.randn(batch, heads, tokens) + torch.randn(batch, heads, 1) * 2
    scores = scores if seed % 2 else torch.randint(-2, 3, scores.shape).float()
    if seed % 3 == 0:
        hostile = torch.tensor(rng.choices([math.nan, math.inf, -math.inf], k=tokens))
        scores = torch.where(torch.rand(scores.shape) < 0.3, hostile, scores)
    found = select(scores, keep, sinks=sinks, recent=recent, padding=torch.tensor(padding)[:, None], floor=floor)
    # Minus infinity is as low as NaN, and infinity as high as the largest number.
    plain = scores.nan_to_num(nan=-1e9, neginf=-1e9)
    assert kept_sets(found) == slow_sets(plain, keep, sinks, recent, padding, floor)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_scores_of_every_dtype_select(dtype: torch.dtype) -> None:
    scores = torch.randn(2, 3, 50).to(dtype)
    found = select(scores, 20, sinks=4, recent=8)
    assert len(set(found.counts.flatten().tolist())) == 1
    assert kept_sets(found) == slow_sets(scores.double(), [20, 20], 4, 8, [0, 0])


def test_close_scores_of_float64_are_told_apart() -> None:
    scores = 1 + torch.arange(8, dtype=torch.float64).flip(0)[None, None] * 1e-12
    assert kept_sets(select(scores, 3)) == [[[0, 1, 2]]]


def test_scores_are_not_written_to() -> None:
    scores = torch.tensor([[[math.nan, 1.0, -math.inf, 3.0]]])
    before = scores.clone()
    select(scores, 2, sinks=1, floor=HEAD_FLOOR)
    torch.testing.assert_close(scores, before, rtol=0, atol=0, equal_nan=True)


def test_heads_with_equal_scores_keep_as_many() -> None:
    scores = torch.randn(2, 1, 100).expand(2, 4, 100)
    found = select(scores, 30, sinks=4, recent=8, padding=torch.tensor([[0], [80]]), floor=HEAD_FLOOR)
    assert found.counts.tolist() == [[30] * 4, [20] * 4]
