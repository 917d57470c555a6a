"""Bytes that a cache of any library holds, measured, or as a plan finds them."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from kvlayers import Cache
from kvlayers.calls import CacheTrial, layer_shapes
from kvlayers.errors import KVLayersError
from kvlayers.stores import LayerShape, storages_of


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
    for leaf in tree_leaves(value):
        if isinstance(leaf, Tensor) and is_traceable_wrapper_subclass(leaf):
            yield from _plain_tensors([getattr(leaf, name) for name in leaf.__tensor_flatten__()[0]])
        elif isinstance(leaf, Tensor):
            yield leaf


DTYPE_IN_USE = torch.bfloat16
"""Dtype of the states whose bytes are counted, whatever the model computes in."""


def bytes_of(make: Callable[[], Any], config: Any, tokens: int) -> int:
    """Bytes of a cache after `tokens` tokens of one sequence in `DTYPE_IN_USE`, as a plan finds them.

    Args:
        make: makes an empty cache for `tokens` tokens.
        config: config of the model.
        tokens: tokens that the cache has seen.

    Raises:
        ConfigError: the config does not say what the model's layers hold.
        OptionError: the model does not support the cache.
        UnsupportedLayerError: the cache is of another library.
    """
    shapes = layer_shapes(config, 1, DTYPE_IN_USE)
    return CacheTrial(lambda length_hint: make(), shapes, None).nbytes(tokens).total


def held_nbytes(make: Callable[[], Any], config: Any, tokens: int, chunk: int) -> int | None:
    """As `bytes_of` for a cache of any library; `None` if the bytes are not known.

    A cache that cannot be planned is filled with random states.

    Args:
        make: makes an empty cache for `tokens` tokens.
        config: config of the model.
        tokens: tokens that the cache has seen.
        chunk: tokens of each update. A cache may quantize again after each of them.
    """
    try:
        return bytes_of(make, config, tokens)
    except KVLayersError:
        pass
    try:
        return _filled_nbytes(make(), layer_shapes(config, 1, DTYPE_IN_USE), tokens, chunk)
    # The cache may be of any package. If it cannot hold random states, only its bytes are missing.
    except Exception:
        return None


def _filled_nbytes(cache: Any, shapes: list[LayerShape], tokens: int, chunk: int) -> int:
    """Bytes of the cache after updates with random states."""
    # A layer counts for all layers that are like it, because hqq takes minutes to quantize them all.
    alike = not isinstance(cache, Cache) and len({type(layer) for layer in cache.layers}) == len(set(shapes)) == 1
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for layer_idx, shape in enumerate(shapes[:1] if alike else shapes):
            states = [
                torch.randn((form.batch_size, form.kv_heads, tokens, form.head_dim), generator=generator)
                for form in shape.forms()
            ]
            for keys, values in zip(*(torch.split(each.to(DTYPE_IN_USE), chunk, 2) for each in states), strict=True):
                cache.update(keys, values, layer_idx)
    return cache_nbytes(cache) * (len(shapes) if alike else 1)
