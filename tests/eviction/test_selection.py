"""Selections are those of a loop over sequences, heads and tokens."""

import math
import random

import pytest
import torch

from kvlayers.eviction.selection import HEAD_FLOOR, KeptTokens, highest, select


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


def slow_even(
    scores: torch.Tensor, keep: list[int], sinks: int, recent: int, padding: list[int]
) -> list[list[list[int]]]:
    tokens = scores.shape[2]
    result = []
    for row in range(scores.shape[0]):
        front = padding[row]
        always = {token for token in range(front, tokens) if token < front + sinks or token >= tokens - recent}
        count = min(max(keep[row], sinks + recent), tokens - front)
        result.append([sorted(order(head.tolist(), always, front)[:count]) for head in scores[row]])
    return result


@pytest.mark.parametrize("seed", range(30))
def test_even_heads_keep_the_best_tokens(seed: int) -> None:
    rng = random.Random(seed)
    batch, heads, tokens = rng.randint(1, 3), rng.randint(1, 4), rng.randint(1, 40)
    # Few different scores, so that many are equal.
    scores = torch.randint(-2, 3, (batch, heads, tokens)).float()
    if seed % 3 == 0:
        hostile = [math.nan, math.inf, -math.inf]
        scores = torch.where(torch.rand(scores.shape) < 0.3, torch.tensor(rng.choices(hostile, k=tokens)), scores)
    keep = [rng.randint(0, tokens + 5) for _ in range(batch)]
    padding = [rng.randint(0, tokens) for _ in range(batch)]
    sinks, recent = rng.randint(0, 4), rng.randint(0, 6)
    # Minus infinity is as low as NaN, and infinity as high as the largest number.
    plain = scores.nan_to_num(nan=-1e9, neginf=-1e9)
    found = kept_sets(select(scores, keep, sinks=sinks, recent=recent, padding=torch.tensor(padding)[:, None]))
    assert found == slow_even(plain, keep, sinks, recent, padding)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_scores_of_every_dtype_select(dtype: torch.dtype) -> None:
    scores = torch.randn(2, 3, 50).to(dtype)
    found = select(scores, 20, sinks=4, recent=8)
    assert len(set(found.counts.flatten().tolist())) == 1
    assert kept_sets(found) == slow_even(scores.double(), [20, 20], 4, 8, [0, 0])


def test_close_scores_of_float64_are_told_apart() -> None:
    scores = 1 + torch.arange(8, dtype=torch.float64).flip(0)[None, None] * 1e-12
    assert kept_sets(select(scores, 3)) == [[[0, 1, 2]]]


def test_scores_are_not_written_to() -> None:
    scores = torch.tensor([[[math.nan, 1.0, -math.inf, 3.0]]])
    before = scores.clone()
    select(scores, 2, sinks=1, floor=HEAD_FLOOR)
    torch.testing.assert_close(scores, before, rtol=0, atol=0, equal_nan=True)


def slow_adaptive(scores: torch.Tensor, keep: int, always: set[int], front: int, floor: float) -> list[int]:
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


@pytest.mark.parametrize("seed", range(30))
def test_adaptive_heads_keep_the_best_tokens_of_all_heads(seed: int) -> None:
    rng = random.Random(seed)
    heads, tokens = rng.randint(1, 5), rng.randint(10, 60)
    padding, sinks, recent = [0, rng.randint(0, tokens)], rng.randint(0, 3), rng.randint(0, 5)
    # Heads with higher scores than others, and scores that no two tokens share.
    scores = torch.randn(2, heads, tokens) + torch.randn(2, heads, 1) * 2
    keep = [rng.randint(0, tokens + 5) for _ in range(2)]
    floor = rng.choice([0.0, 0.2, 1.0])
    found = select(scores, keep, sinks=sinks, recent=recent, padding=torch.tensor(padding)[:, None], floor=floor)
    sets = kept_sets(found)
    for row in range(2):
        front = padding[row]
        always = {token for token in range(front, tokens) if token < front + sinks or token >= tokens - recent}
        expected = slow_adaptive(scores[row], max(keep[row], sinks + recent), always, front, floor)
        assert found.counts[row].tolist() == expected
        for head in range(heads):
            best = order(scores[row, head].tolist(), always, front)[: expected[head]]
            assert sets[row][head] == sorted(best)


def test_a_floor_of_one_is_even() -> None:
    scores = torch.randn(1, 4, 50) + torch.arange(4)[:, None] * 10.0
    assert select(scores, 20, floor=1).counts.tolist() == [[20] * 4]
    assert select(scores, 20, floor=0).counts.tolist() == [[0, 0, 30, 50]]
    assert select(scores, 20, floor=HEAD_FLOOR).counts.tolist() == [[4, 4, 22, 50]]


def test_heads_with_equal_scores_keep_as_many() -> None:
    scores = torch.randn(2, 1, 100).expand(2, 4, 100)
    found = select(scores, 30, sinks=4, recent=8, padding=torch.tensor([[0], [80]]), floor=HEAD_FLOOR)
    assert found.counts.tolist() == [[30] * 4, [20] * 4]


def test_nothing_but_padding_keeps_nothing() -> None:
    found = select(torch.randn(2, 3, 10), 5, padding=torch.full((2, 3), 10), floor=HEAD_FLOOR)
    assert not found.mask.any()
    assert len(set(found.counts.flatten().tolist())) == 1


def test_highest_takes_the_first_of_equal_scores() -> None:
    scores = torch.tensor([[[1.0, 2.0, 2.0, 2.0, 0.0], [5.0, 5.0, 5.0, 5.0, 5.0]]])
    assert highest(scores, torch.tensor([[2, 3]])).tolist() == [
        [[False, True, True, False, False], [True, True, True, False, False]]
    ]
    assert not highest(scores, torch.tensor([[0, 0]])).any()
    assert highest(scores, torch.tensor([[5, 0]])).sum(-1).tolist() == [[5, 0]]
