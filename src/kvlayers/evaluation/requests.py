"""A continuation to be scored, and its score."""

import math
from dataclasses import dataclass
from typing import NamedTuple


class ScoringRequest(NamedTuple):
    """A context and one continuation of it.

    Attributes:
        context: token ids, at least one.
        continuation: token ids, at least one.
    """

    context: tuple[int, ...]
    continuation: tuple[int, ...]


@dataclass(frozen=True)
class ContinuationScore:
    """How likely a model finds a continuation of a context.

    Attributes:
        token_logprobs: log-probability of each token of the continuation, in nats, given the context and the tokens of
            the continuation before it. Computed in float32 at least.
        token_is_greedy: whether each of these tokens is the likeliest one at its place.
    """

    token_logprobs: tuple[float, ...]
    token_is_greedy: tuple[bool, ...]

    @property
    def logprob(self) -> float:
        """Log-probability of the whole continuation, in nats: the sum of `token_logprobs`."""
        return math.fsum(self.token_logprobs)

    @property
    def mean_logprob(self) -> float:
        """Log-probability per token, in nats."""
        return self.logprob / len(self.token_logprobs)

    @property
    def is_greedy(self) -> bool:
        """Whether greedy decoding of the context would give this continuation."""
        return all(self.token_is_greedy)
