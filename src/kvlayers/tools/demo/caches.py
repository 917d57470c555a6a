"""One prompt through every cache: time, bytes, and what each makes the model predict."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from kvlayers.caches.base import Cache
from kvlayers.errors import KVLayersError
from kvlayers.tools.measuring.contenders import Contender, exact_names, is_installed, of_kvlayers, of_transformers
from kvlayers.tools.measuring.decoding import Row, measure, warm_up

ROUNDED_OR_EVICTING = ("int8", "int4", "int2", "sink")


def contenders(model: Any, length: int) -> list[Contender]:
    """The caches that are shown, transformers' `DynamicCache` first: the other rows are compared with it.

    Args:
        model: the model.
        length: the most tokens that a cache will hold.
    """
    transformers_names = ["dynamic", "static", *(["quanto"] if is_installed("quanto") else [])]
    names = [*exact_names(model.config), *ROUNDED_OR_EVICTING]
    kvlayers_caches = [of_kvlayers(name, model, length) for name in names]
    return [
        *(of_transformers(name, model, length) for name in transformers_names),
        *filter(_can_be_made, kvlayers_caches),
    ]


def compare(
    model: Any, ids: Tensor, tokens: int, trials: int, rivals: list[Contender], on_run: Callable[[Contender, int], None]
) -> list[Row]:
    """Time every cache on the same prompt and the same continuation; see `measuring.decoding.measure`.

    Args:
        model: the model.
        ids: the prompt, int64 `[1, tokens]`.
        tokens: tokens to predict, 2 or more.
        trials: runs of each cache.
        rivals: the caches; the first one is the reference.
        on_run: called before each run, with the cache and the index of the trial.
    """
    warm_up(model, ids, rivals)
    return measure(model, ids, tokens - 1, trials, rivals, on_run)


def _can_be_made(rival: Contender) -> bool:
    """Whether the model can have such a cache: a sink cache, say, needs rotary position embeddings."""
    try:
        cache = rival.make()
    except KVLayersError:
        return False
    return isinstance(cache, Cache)
