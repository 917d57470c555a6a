"""Forward passes over many tokens, and the log-probabilities that they give."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvlayers.upstream import cache_argument, model_types

LOGITS_AT_ONCE = 2**27
"""Logits of one pass: half a gigabyte in float32, and as much again where they are normalized."""


class PassSizes(NamedTuple):
    """How many tokens go into each forward pass.

    Attributes:
        step: most tokens, counted from the first; `None` for no limit.
        behind: most tokens in a pass behind others; `None` for no limit.
        scored: most tokens that logits are kept of; `None` for no limit.
    """

    step: int | None = None
    behind: int | None = None
    scored: int | None = None

    def spans(self, tokens: int, seen: int, scored_from: int) -> Iterator[tuple[int, int]]:
        """Begin and end of each pass over `tokens` tokens behind `seen` others.

        Example:
            >>> list(PassSizes(step=4).spans(10, seen=0, scored_from=0)), list(PassSizes(scored=2).spans(10, 0, 5))
            ([(0, 4), (4, 8), (8, 10)], [(0, 7), (7, 9), (9, 10)])
        """
        begin = 0
        while begin < tokens:
            ends = [tokens]
            if self.step is not None:
                ends.append(begin - begin % self.step + self.step)
            if self.behind is not None and seen + begin:
                ends.append(begin + self.behind)
            if self.scored is not None:
                ends.append(max(begin, scored_from) + self.scored)
            end = min(ends)
            yield begin, end
            begin = end


def scored_logits(
    model: Any, ids: Tensor, cache: Any, sizes: PassSizes, seen: int, scored_from: int
) -> Iterator[tuple[int, Tensor]]:
    """Pass tokens to a model, behind the tokens that its cache has seen.

    Args:
        model: the model.
        ids: `[rows, tokens]`, on the device of the model.
        cache: the cache.
        sizes: how many tokens go into each pass.
        seen: how many tokens the cache has seen.
        scored_from: index of the first token whose logits are needed.

    Yields:
        For each pass that has such tokens, the index of the first one, and logits `[rows, tokens, vocab]`.
    """
    name = cache_argument.name_for(model)
    for begin, end in sizes.spans(ids.shape[1], seen, scored_from):
        kept = end - max(begin, scored_from)
        limit = model_types.newest_logits_only(model, max(kept, 1))
        logits = model(input_ids=ids[:, begin:end], use_cache=True, return_dict=True, **{name: cache}, **limit).logits
        if kept > 0:
            yield end - kept, logits[:, -kept:]


class ScoredToken(NamedTuple):
    """A token whose log-probability is asked for.

    Attributes:
        position: index of the token that it is predicted from, in its row.
        row: index of the row in the batch.
        token: its id.
        request: index of the request.
        place: its place in the continuation of the request.
    """

    position: int
    row: int
    token: int
    request: int
    place: int


class TokenScores:
    """Log-probabilities of tokens, collected on the device and read together.

    Args:
        wanted: the tokens, in ascending order of their positions.
    """

    def __init__(self, wanted: Sequence[ScoredToken]) -> None:
        self._wanted = wanted
        self._done = 0
        self._found: list[Tensor] = []

    def take(self, first: int, logits: Tensor) -> None:
        """Score the tokens that are predicted from the positions from `first` on, with `[rows, positions, vocab]`."""
        end = self._done
        while end < len(self._wanted) and self._wanted[end].position < first + logits.shape[1]:
            end += 1
        wanted, self._done = self._wanted[self._done : end], end
        if not wanted:
            return
        places = torch.tensor([(token.row, token.position - first, token.token) for token in wanted])
        rows, positions, targets = places.to(logits.device).unbind(1)
        logits = logits if logits.dtype == torch.float64 else logits.float()
        # logsumexp is more exact: over 49k tokens they differ by 1e-5. But most code takes log_softmax, and people
        # compare scores with what that gives.
        logprobs = logits.log_softmax(-1)[rows, positions, targets]
        is_greedy = logits.argmax(-1)[rows, positions] == targets
        self._found.append(torch.stack([logprobs, is_greedy.to(logprobs.dtype)]))

    def results(self) -> Iterator[tuple[ScoredToken, float, bool]]:
        """Each token with its log-probability and whether it is the likeliest one."""
        logprobs, is_greedy = torch.cat(self._found, dim=1).tolist() if self._found else ((), ())
        for token, logprob, likeliest in zip(self._wanted, logprobs, is_greedy, strict=True):
            yield token, logprob, bool(likeliest)
