"""The caches that are offloaded by their name."""

import os
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from kvlayers.caches.dynamic import DynamicCache
from kvlayers.caches.registry import register_cache_class
from kvlayers.caches.static import StaticCache
from kvlayers.layers import Checkpoints
from kvlayers.stores import Buckets
from kvlayers.utils.options import checks_options


@register_cache_class
class OffloadedCache(DynamicCache):
    """A `DynamicCache` with `offloading=True`, as transformers 4 called it.

    Args: those of `DynamicCache`, other than `offloading`.

    Example:
        >>> import kvlayers
        >>> kvlayers.OffloadedCache().offloading
        True
    """

    @checks_options
    def __init__(
        self,
        ddp_cache_data: Iterable[tuple[Tensor | None, ...]] | None = None,
        config: object | None = None,
        offload_only_non_sliding: bool = False,
        length_hint: int | str | None = None,
        offload_device: str = "cpu",
        offload_directory: str | os.PathLike[str] | None = None,
        checkpoints: Checkpoints | Mapping[str, int | None] | None = None,
    ) -> None:
        super().__init__(
            ddp_cache_data,
            config,
            True,
            offload_only_non_sliding,
            length_hint,
            offload_device,
            offload_directory,
            checkpoints,
        )


@register_cache_class
class OffloadedStaticCache(StaticCache):
    """A `StaticCache` with `offloading=True`, as transformers 4 called it.

    Args: those of `StaticCache`, other than `offloading` and `compiled`.
    """

    @checks_options
    def __init__(
        self,
        config: object,
        max_cache_len: int | str,
        offload_only_non_sliding: bool = True,
        max_batch_size: int | None = None,
        buckets: Buckets | None = None,
        grow: bool = False,
        offload_device: str = "cpu",
        offload_directory: str | os.PathLike[str] | None = None,
        checkpoints: Checkpoints | Mapping[str, int | None] | None = None,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | str | None = None,
    ) -> None:
        super().__init__(
            config,
            max_cache_len,
            offloading=True,
            offload_only_non_sliding=offload_only_non_sliding,
            max_batch_size=max_batch_size,
            buckets=buckets,
            grow=grow,
            compiled=False,
            offload_device=offload_device,
            offload_directory=offload_directory,
            checkpoints=checkpoints,
            device=device,
            dtype=dtype,
        )
