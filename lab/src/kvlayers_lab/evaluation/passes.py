"""How scored tokens are divided into forward passes, and the log-probabilities that these give."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvlayers import models
from kvlayers.models import depends_on_length

PASS_COST_ON_CPU = 32
"""A forward pass on a CPU takes about as long as the arithmetic of this many tokens, since it reads all weights."""

PASS_FLOPS_ON_ACCELERATOR = 4e12
"""Floating-point operations in the time that launching one forward pass takes. Estimated (20 ms at 200 TFLOPS), not
measured. It decides which prefixes are shared, never a score."""


@dataclass(frozen=True)
class Division:
    """How tokens are divided into forward passes. A score depends on nothing else of how it was computed.

    Attributes:
        shared_every: a prefix that contexts have in common is shared at multiples of this many tokens; `None` if only
            identical contexts are shared.
        pass_cost: a prefix is read in a pass of its own if that saves at least this many tokens.
        context_step: most tokens of a context in one pass, counted from its start; `None` for no limit.
        continuation_step: most tokens behind a shared prefix in one pass; `None` for no limit.
        pass_limit: most tokens that the model can take in one pass behind others; `None` for no limit.
        may_pad: whether rows of different lengths may be read together, padded on the right.
        may_split: whether passes may be shorter than that.
    """

    shared_every: int | None
    pass_cost: float
    context_step: int | None
    continuation_step: int | None
    pass_limit: int | None
    may_pad: bool
    may_split: bool

    def shared_tokens(self, common: int) -> int:
        """How many of the first `common` tokens, which two contexts have in common, they may share.

        Example:
            >>> Division(8, 0, 8, 8, None, False, False).shared_tokens(19)
            16
        """
        return 0 if self.shared_every is None else common - common % self.shared_every


def exact_division(model: Any, chunk: int | None) -> Division:
    """The fewest passes: any division gives the same scores.

    Args:
        model: the model.
        chunk: most tokens in one pass, to bound memory.
    """
    specs = models.layer_specs(model.config) if models.INDEXERS_DEPEND_ON_CHUNKS else []
    # Whatever its cache does, the model computes other states if the same tokens come in other passes.
    if depends_on_length(model.config) or any(spec.layer_type in models.INDEXED for spec in specs):
        return Division(None, math.inf, None, None, None, may_pad=False, may_split=False)
    limit = models.tokens_at_once(model)
    step = chunk if limit is None else None
    on_cpu = torch.device(model.device).type == "cpu"
    cost = PASS_COST_ON_CPU if on_cpu else PASS_FLOPS_ON_ACCELERATOR / (2 * int(model.num_parameters()))
    return Division(1, cost, step, step, limit, may_pad=True, may_split=limit is None)


def lossy_division(model: Any, chunk: int | None) -> Division:
    """The same passes for a request whatever other requests there are, since they decide what is rounded or evicted.

    Args:
        model: the model.
        chunk: tokens in one pass, of the context and of the continuation. `None`: the context in one pass and the
            continuation token by token, as `generate()` does.
    """
    # Chunks of a context would be rotated by the frequencies of a shorter one.
    chunk = None if depends_on_length(model.config) else chunk
    step = chunk or 1
    return Division(chunk, 0, chunk, step, models.tokens_at_once(model), may_pad=step == 1, may_split=False)


LOGITS_AT_ONCE = 2**27
"""Logits of one pass: half a gigabyte in float32, and as much again where they are normalized."""


def spans(
    tokens: int, seen: int, scored_from: int, *, step: int | None, behind: int | None, scored: int | None
) -> Iterator[tuple[int, int]]:
    """Begin and end of each forward pass over tokens. The arguments are those of `scored_logits`.

    Example:
        >>> list(spans(10, 0, 0, step=4, behind=None, scored=None))
        [(0, 4), (4, 8), (8, 10)]
        >>> list(spans(10, 0, 5, step=None, behind=None, scored=2))
        [(0, 7), (7, 9), (9, 10)]
    """
    begin = 0
    while begin < tokens:
        ends = [tokens]
        if step is not None:
            ends.append(begin - begin % step + step)
        if behind is not None and seen + begin:
            ends.append(begin + behind)
        if scored is not None:
            ends.append(max(begin, scored_from) + scored)
        end = min(ends)
        yield begin, end
        begin = end


def scored_logits(
    model: Any,
    ids: Tensor,
    cache: Any,
    seen: int,
    scored_from: int,
    *,
    step: int | None,
    behind: int | None,
    scored: int | None = None,
) -> Iterator[tuple[int, Tensor]]:
    """Pass tokens to a model, behind the tokens that its cache has seen.

    Args:
        model: the model.
        ids: `[rows, tokens]`, on the device of the model.
        cache: the cache.
        seen: how many tokens the cache has seen.
        scored_from: index of the first token whose logits are needed.
        step: most tokens in a pass, counted from the first; `None` for no limit.
        behind: most tokens in a pass behind others; `None` for no limit.
        scored: most tokens of a pass that logits are kept of; `None` for no limit.

    Yields:
        For each pass that has such tokens, the index of the first one, and logits `[rows, tokens, vocab]`.
    """
    name, positions = models.name_for(model), dict[str, Tensor]()
    tells_positions = models.remembers_positions(model)
    for begin, end in spans(ids.shape[1], seen, scored_from, step=step, behind=behind, scored=scored):
        kept = end - max(begin, scored_from)
        limit = models.newest_logits_only(model, max(kept, 1))
        if tells_positions:
            positions["position_ids"] = torch.arange(seen + begin, seen + end, device=ids.device)[None]
        arguments = {name: cache, "use_cache": True, "return_dict": True, **limit, **positions}
        logits = model(input_ids=ids[:, begin:end], **arguments).logits
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
