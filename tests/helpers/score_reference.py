"""Scores of continuations, computed one by one in the plainest way."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kvlayers_lab.evaluation.requests import ContinuationScore, ScoringRequest
from models import read


def alone(model: Any, request: ScoringRequest) -> ContinuationScore:
    """The score from one forward pass over the request, without a cache."""
    ids = torch.tensor([[*request.context, *request.continuation]])
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits[0]
    return _score(logits[len(request.context) - 1 : -1], request.continuation)


def in_chunks(
    model: Any, request: ScoringRequest, cache: Any, context_chunk: int, continuation_chunk: int
) -> ContinuationScore:
    """The score through a cache, with so many tokens of the context and of the continuation in a forward pass."""
    context, continuation = request.context, request.continuation[:-1]
    last = _passes(model, context, cache, context_chunk)[-1:]
    behind = _passes(model, continuation, cache, continuation_chunk) if continuation else last[:0]
    return _score(torch.cat([last, behind]), request.continuation)


def _passes(model: Any, ids: tuple[int, ...], cache: Any, chunk: int) -> Tensor:
    return torch.cat([read(model, piece, cache)[1][0] for piece in torch.tensor([ids]).split(chunk, dim=1)])


def _score(logits: Tensor, continuation: tuple[int, ...]) -> ContinuationScore:
    logprobs = logits.double().log_softmax(-1)
    each = [float(logprobs[place, token]) for place, token in enumerate(continuation)]
    return ContinuationScore(tuple(each), tuple((logprobs.argmax(-1) == torch.tensor(continuation)).tolist()))


def difference(one: Sequence[ContinuationScore], other: Sequence[ContinuationScore]) -> float:
    """The largest difference of two log-probabilities. Lengths and orders must be the same."""
    pairs = [
        (first, second)
        for first_score, second_score in zip(one, other, strict=True)
        for first, second in zip(first_score.token_logprobs, second_score.token_logprobs, strict=True)
    ]
    return max((abs(first - second) for first, second in pairs), default=0.0)
