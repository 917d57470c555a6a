"""One prompt through every cache: time, bytes and predictions."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from kvlayers.caches.base import Cache
from kvlayers.errors import KVLayersError
from kvlayers.tools.measuring.contenders import Contender, exact_names, make_contender
from kvlayers.tools.measuring.decoding import ContenderResult, measure_in_rounds, warm_up
from kvlayers.tools.names import KVLAYERS, TRANSFORMERS

ROUNDED_OR_EVICTING = ("int8", "int4", "sink")


def demo_contenders(model: Any, length: int) -> list[Contender]:
    """The caches that the demo shows. The first one, transformers' `DynamicCache`, is the reference.

    Args:
        model: a causal language model.
        length: the most tokens that a cache will hold.
    """
    names = [*exact_names(model.config), *ROUNDED_OR_EVICTING]
    kvlayers_contenders = [make_contender(KVLAYERS, name, model, length) for name in names]
    return [make_contender(TRANSFORMERS, "dynamic", model, length), *filter(_is_supported, kvlayers_contenders)]


def compare(
    model: Any,
    ids: Tensor,
    tokens: int,
    trials: int,
    contenders: list[Contender],
    on_run: Callable[[Contender, int], None],
) -> list[ContenderResult]:
    """Time every cache on the same prompt and the same continuation; see `measure_in_rounds`.

    Args:
        model: a causal language model.
        ids: the prompt, int64 `[1, tokens]`.
        tokens: tokens to predict, 2 or more.
        trials: runs of each cache.
        contenders: the caches, the reference first.
        on_run: called before each run, with the cache and the index of the trial.
    """
    warm_up(model, ids, contenders)
    return measure_in_rounds(model, ids, tokens - 1, trials, contenders, on_run)


def _is_supported(contender: Contender) -> bool:
    """Whether the model supports the cache. A sink cache, for example, needs rotary position embeddings."""
    try:
        cache = contender.make()
    except KVLayersError:
        return False
    return isinstance(cache, Cache)
