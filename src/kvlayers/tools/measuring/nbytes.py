"""Bytes that a cache of either library holds."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from kvlayers.caches.base import Cache
from kvlayers.utils.tensor_memory import storages_of


def cache_nbytes(cache: Any) -> int:
    """Bytes of a cache: `nbytes` where it says so, else the memory behind its layers' tensors, each once.

    Codes, scales and zero points are found inside quanto's tensors and hqq's tuples, and the residual in full precision
    beside them. Memory counts whole, however little a view shows of it.

    Args:
        cache: of kvlayers or of transformers.
    """
    if isinstance(cache, Cache):
        return int(cache.nbytes)
    layers = [vars(layer) for layer in cache.layers]
    return sum(storages_of(_plain_tensors(layers)).values())


def _plain_tensors(value: object) -> Iterator[Tensor]:
    """Tensors in nested lists, tuples and dicts; of a tensor that is made of others, those others."""
    if isinstance(value, Tensor) and is_traceable_wrapper_subclass(value):
        names, _ = value.__tensor_flatten__()
        for name in names:
            yield from _plain_tensors(getattr(value, name))
    elif isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _plain_tensors(list(value.values()))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _plain_tensors(item)
