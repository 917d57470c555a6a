"""Caches by the names that transformers has or had for them: other caches with some arguments set."""

import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from kvlayers.core.cache_operations import LayerwiseOperations
from kvlayers.core.dynamic_cache import DynamicCache
from kvlayers.core.from_config import HYBRID, RECURRENT, AttentionMaker, Checkpoints
from kvlayers.core.named_caches import named, register, register_cache_class
from kvlayers.errors import ConfigError, LayerIndexError, OptionError
from kvlayers.quantized.quantized_cache import QuantizedCache
from kvlayers.static.slots import Buckets
from kvlayers.static.static_cache import StaticCache
from kvlayers.static.static_store import check_reserved
from kvlayers.upstream import model_layers
from kvlayers.utils.options import check_accepted, checks_options

# Static caches


@register_cache_class
class HybridCache(StaticCache):
    """A `StaticCache`, by the name that transformers had for models with sliding and full layers.

    Args: as for `StaticCache`.
    """


@register_cache_class
class HybridChunkedCache(StaticCache):
    """A `StaticCache`, by the name that transformers had for models with chunked and full layers.

    Args: as for `StaticCache`.
    """


@register_cache_class
class SlidingWindowCache(StaticCache):
    """A `StaticCache`, by the name that transformers had for models with sliding layers.

    Args: as for `StaticCache`.
    """


# Offloaded caches


@register_cache_class
class OffloadedCache(DynamicCache):
    """A `DynamicCache` with `offloading=True`, by the name of transformers 4.

    Args: as for `DynamicCache`, without `offloading`.

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
        recall: AttentionMaker | Mapping[str, Any] | None = None,
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
            recall,
        )


@register_cache_class
class OffloadedStaticCache(StaticCache):
    """A `StaticCache` with `offloading=True`, by the name of transformers 4.

    Args: as for `StaticCache`, without `offloading` and `compiled`.
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


# Quantized caches


def _options_of_backend(
    backend: str, config: object | None, cache_config: object | None, options: Mapping[str, Any]
) -> dict[str, Any]:
    """Arguments of a `QuantizedCache` whose class says the backend, with the signatures of transformers 4 and 5."""
    if isinstance(config, Mapping):
        config, cache_config = None, config
    given = {} if cache_config is None else cache_config
    if not isinstance(given, Mapping):
        raise OptionError(
            f"`cache_config` must be a QuantizedCacheConfig or a dict, got a {type(given).__name__}: pass, for "
            "example, {'nbits': 4}."
        )
    asked = str(given.get("backend", backend)).lower()
    if asked != backend:
        raise OptionError(
            f"`cache_config` must be one for {backend}, got one for {asked}: use QuantizedCache('{asked}', ...)."
        )
    return {**given, **options, "backend": backend, "config": config}


@register_cache_class
class QuantoQuantizedCache(QuantizedCache):
    """A `QuantizedCache` of the quanto backend, by the name of transformers 4.

    Args:
        config: config of the model, or the `cache_config` of transformers 4 in its place.
        cache_config: options, a `QuantizedCacheConfig` or another mapping.
        options: as for `QuantizedCache`.
    """

    def __init__(self, config: object | None = None, cache_config: object | None = None, **options: Any) -> None:
        super().__init__(**_options_of_backend("quanto", config, cache_config, options))


@register_cache_class
class HQQQuantizedCache(QuantizedCache):
    """A `QuantizedCache` of the hqq backend, by the name of transformers 4.

    Args:
        config: config of the model, or the `cache_config` of transformers 4 in its place.
        cache_config: options, a `QuantizedCacheConfig` or another mapping.
        options: as for `QuantizedCache`.
    """

    def __init__(self, config: object | None = None, cache_config: object | None = None, **options: Any) -> None:
        super().__init__(**_options_of_backend("hqq", config, cache_config, options))


# Caches of recurrent models


class _StatesOfLayers(tuple[Tensor | None, ...]):
    """The convolution states, or the recurrent states, of all layers, to be read by the index of a layer."""

    def __getitem__(self, index: Any) -> Any:
        try:
            return super().__getitem__(index)
        except IndexError:
            raise LayerIndexError(
                f"The layer index must be below {len(self)}, got {index}: use an index that the cache has a layer for."
            ) from None


class _RecurrentCache(LayerwiseOperations):
    """A cache for models with recurrent layers, which hands out their states as transformers 4 did."""

    @property
    def conv_states(self) -> _StatesOfLayers:
        """The convolution state of each layer, `[batch, channels, conv_kernel_size]`; `None` for a layer without."""
        return _StatesOfLayers(part and part.conv_states[0] for part in self._recurrent_parts())

    @property
    def ssm_states(self) -> _StatesOfLayers:
        """The recurrent state of each layer, whose first axis is the batch; `None` for a layer without."""
        return _StatesOfLayers(part and part.recurrent_states[0] for part in self._recurrent_parts())

    def _recurrent_parts(self) -> Iterator[Any]:
        return (
            next((part for part in layer.parts if part.traits.counts_columns), None) for layer in self.adapted_layers()
        )


@register_cache_class
class MambaCache(_RecurrentCache, DynamicCache):
    """A `DynamicCache` for mamba and falcon_mamba, by the name of transformers 4.

    Memory is taken when the first tokens come, for as many sequences as they are, in their dtype and on their device.

    Args:
        config: config of a model whose layers are all recurrent.
        max_batch_size: sequences that are expected; accepted for old code, without effect.
        dtype: accepted for old code, without effect: states keep the dtype that they come in.
        device: accepted for old code, without effect: states stay on the device that they come on.
        checkpoints: as for `DynamicCache`.

    Raises:
        ConfigError: a model with layers that attend, or no config.
        OptionError: an option that does not exist, or an argument of another kind.

    Example:
        >>> import kvlayers, transformers
        >>> kvlayers.MambaCache(transformers.MambaConfig(num_hidden_layers=2), max_batch_size=1)
        MambaCache(2 x LinearAttentionLayer, 0 tokens, 0 B)
    """

    @checks_options
    def __init__(
        self,
        config: object,
        max_batch_size: int | None = None,
        dtype: torch.dtype | str = torch.float16,
        device: torch.device | str | None = None,
        checkpoints: Checkpoints | Mapping[str, int | None] | None = None,
    ) -> None:
        others = _layer_types(config, max_batch_size, "max_batch_size", dtype, device) - {*RECURRENT, "dummy"}
        if others:
            raise ConfigError(
                f"`config` must be of a model whose layers are all recurrent, got a {type(config).__name__} with "
                f"others ({', '.join(sorted(others))}): use HybridMambaAttentionDynamicCache, or DynamicCache."
            )
        super().__init__(config=config, checkpoints=checkpoints)


@register_cache_class
class HybridMambaAttentionDynamicCache(_RecurrentCache, DynamicCache):
    """A `DynamicCache` for models with recurrent layers and layers that attend, by the name of transformers 4.

    Memory is taken as for `MambaCache`.

    Args:
        config: config of a model that has recurrent layers.
        batch_size: sequences that are expected; accepted for old code, without effect.
        dtype: accepted for old code, without effect.
        device: accepted for old code, without effect.
        checkpoints: as for `DynamicCache`.

    Raises:
        ConfigError: a model without recurrent layers, or no config.
        OptionError: an option that does not exist, or an argument of another kind.
    """

    @checks_options
    def __init__(
        self,
        config: object,
        batch_size: int | None = None,
        dtype: torch.dtype | str = torch.float16,
        device: torch.device | str | None = None,
        checkpoints: Checkpoints | Mapping[str, int | None] | None = None,
    ) -> None:
        layer_types = _layer_types(config, batch_size, "batch_size", dtype, device)
        if layer_types.isdisjoint((*RECURRENT, *HYBRID)):
            raise ConfigError(
                f"`config` must be of a model with recurrent layers, got a {type(config).__name__} with others alone "
                f"({', '.join(sorted(layer_types))}): use DynamicCache."
            )
        super().__init__(config=config, checkpoints=checkpoints)


def _layer_types(config: object, batch_size: object, name: str, dtype: object, device: object) -> set[str]:
    """The layer types of a model, after a check of the other arguments."""
    if batch_size is not None:
        check_reserved(batch_size, name, "sequences")
    check_accepted(dtype, device)
    return {spec.layer_type for spec in model_layers.layer_specs(config)}


_RESERVING: dict[str, type[StaticCache]] = {
    "sliding_window": SlidingWindowCache,
    "hybrid": HybridCache,
    "hybrid_chunked": HybridChunkedCache,
    **dict.fromkeys(("offloaded_static", "offloaded_hybrid", "offloaded_hybrid_chunked"), OffloadedStaticCache),
}
for _name, _class in _RESERVING.items():
    register(_name)(named(_class, "max_cache_len"))
register("offloaded")(named(OffloadedCache, "length_hint"))
