"""Bytes that a cache of kvlayers or of transformers holds."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from kvlayers.caches.base import Cache
from kvlayers.utils.tensor_memory import storages_of


def cache_nbytes(cache: Any) -> int:
    """Bytes of a cache: `nbytes` of a kvlayers cache, otherwise the storage of all its layers' tensors.

    Codes, scales and zero points inside quanto's tensors and hqq's tuples are counted, and so is the residual in full
    precision. Each storage is counted once and whole, however small the view of it is.

    Args:
        cache: a cache of kvlayers or of transformers.
    """
    if isinstance(cache, Cache):
        return int(cache.nbytes)
    layers = [vars(layer) for layer in cache.layers]
    return sum(storages_of(_plain_tensors(layers)).values())


def _plain_tensors(value: object) -> Iterator[Tensor]:
    """Tensors in nested lists, tuples and dicts; instead of a wrapper tensor, the tensors inside it."""
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
