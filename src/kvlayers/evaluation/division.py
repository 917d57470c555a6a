"""How the tokens of scored requests are divided into forward passes, and which of them are read once for several."""

import math
from dataclasses import dataclass
from typing import Any

import torch

from kvlayers.rope.from_config import depends_on_length
from kvlayers.upstream import compat, model_layers, model_types

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
    if _depends_on_passes(model):
        return Division(None, math.inf, None, None, None, may_pad=False, may_split=False)
    limit = model_types.tokens_at_once(model)
    step = chunk if limit is None else None
    return Division(1, _pass_cost(model), step, step, limit, may_pad=True, may_split=limit is None)


def lossy_division(model: Any, chunk: int | None) -> Division:
    """The same passes for a request whatever other requests there are, since they decide what is rounded or evicted.

    Args:
        model: the model.
        chunk: tokens in one pass, of the context and of the continuation. `None`: the context in one pass and the
            continuation token by token, as `generate()` does.
    """
    step = chunk or 1
    return Division(chunk, 0, chunk, step, model_types.tokens_at_once(model), may_pad=step == 1, may_split=False)


def _depends_on_passes(model: Any) -> bool:
    """Whether a model computes other states if the same tokens come in other passes, whatever its cache does."""
    specs = model_layers.layer_specs(model.config) if compat.INDEXERS_DEPEND_ON_CHUNKS else []
    return depends_on_length(model.config) or any(spec.layer_type == model_layers.INDEXED for spec in specs)


def _pass_cost(model: Any) -> float:
    """Tokens whose arithmetic takes as long as what a forward pass costs besides."""
    if torch.device(model.device).type == "cpu":
        return PASS_COST_ON_CPU
    return PASS_FLOPS_ON_ACCELERATOR / (2 * int(model.num_parameters()))
