"""The caches of recurrent models by the names that transformers 4 had for them."""

from collections.abc import Mapping, Sequence
from typing import Any, overload

import torch
from torch import Tensor
from transformers import PretrainedConfig

from kvlayers.caches.dynamic import DynamicCache
from kvlayers.caches.from_config import HYBRID, RECURRENT, recurrent_part
from kvlayers.caches.registry import register_cache_class
from kvlayers.errors import ConfigError, LayerIndexError
from kvlayers.layers import Checkpoints
from kvlayers.layers.static import check_reserved
from kvlayers.upstream import model_layers, model_types
from kvlayers.utils.options import check_accepted, checks_options


class _StateList(Sequence[Tensor | None]):
    """The convolution states, or the recurrent states, of all layers, to read as the lists that there were."""

    def __init__(self, states: list[Tensor | None]) -> None:
        self._states = states

    @overload
    def __getitem__(self, index: int) -> Tensor | None: ...
    @overload
    def __getitem__(self, index: slice) -> list[Tensor | None]: ...
    def __getitem__(self, index: int | slice) -> list[Tensor | None] | Tensor | None:
        try:
            return self._states[index]
        except IndexError:
            raise LayerIndexError(
                f"expected a layer index below {len(self._states)}, but saw {index}: the cache has no such layer."
            ) from None

    def __len__(self) -> int:
        return len(self._states)


class _RecurrentStates(DynamicCache):
    """What both old caches have beside a `DynamicCache`: lists of states."""

    @property
    def conv_states(self) -> Sequence[Tensor | None]:
        """The convolution state of each layer, `[batch, channels, conv_kernel_size]`, `None` where there is none."""
        return _StateList([_first(layer, "conv_states") for layer in self.layers])

    @property
    def ssm_states(self) -> Sequence[Tensor | None]:
        """The recurrent state of each layer, which begins with the batch, `None` where there is none."""
        return _StateList([_first(layer, "recurrent_states") for layer in self.layers])


@register_cache_class
class MambaCache(_RecurrentStates):
    """A `DynamicCache` for mamba and falcon_mamba, as transformers 4 called it. Models take it as `cache_params`.

    Memory is taken when the first tokens come: as many sequences as they are, in their dtype and on their device.

    Args:
        config: config of a model whose layers are all recurrent.
        max_batch_size: accepted for old code: sequences that are expected.
        dtype: accepted for old code, without effect: states keep the dtype that they come in.
        device: accepted for old code, without effect: states stay on the device that they come on.
        checkpoints: as for `DynamicCache`.

    Raises:
        ConfigError: a model with layers that attend, or no config.
        OptionError: an option that does not exist, or is nothing of the kind.

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
        config = _checked_config(config, max_batch_size, "max_batch_size", dtype, device)
        others = {spec.layer_type for spec in model_layers.layer_specs(config)} - {*RECURRENT, "dummy"}
        if others:
            raise ConfigError(
                f"expected a model whose layers are all recurrent, but {type(config).__name__} has others as well "
                f"({', '.join(sorted(others))}): use HybridMambaAttentionDynamicCache, or DynamicCache."
            )
        super().__init__(config=config, checkpoints=checkpoints)


@register_cache_class
class HybridMambaAttentionDynamicCache(_RecurrentStates):
    """A `DynamicCache` for models with recurrent layers and layers that attend, as transformers 4 called it.

    Memory is taken as for `MambaCache`.

    Args:
        config: config of a model that has recurrent layers.
        batch_size: accepted for old code: sequences that are expected.
        dtype: accepted for old code, without effect.
        device: accepted for old code, without effect.
        checkpoints: as for `DynamicCache`.

    Raises:
        ConfigError: a model without recurrent layers, or no config.
        OptionError: an option that does not exist, or is nothing of the kind.
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
        config = _checked_config(config, batch_size, "batch_size", dtype, device)
        layer_types = {spec.layer_type for spec in model_layers.layer_specs(config)}
        if layer_types.isdisjoint((*RECURRENT, *HYBRID)):
            raise ConfigError(
                f"expected a model with recurrent layers, but the layers of {type(config).__name__} are of other types "
                f"({', '.join(sorted(layer_types))}): use DynamicCache."
            )
        super().__init__(config=config, checkpoints=checkpoints)


def _checked_config(
    model_or_config: object, batch_size: object, name: str, dtype: object, device: object
) -> PretrainedConfig:
    """The config of a model, once the other arguments are what they should be."""
    if batch_size is not None:
        check_reserved(batch_size, name, "sequences")
    check_accepted(dtype, device)
    return model_types.config_of(model_or_config)


def _first(layer: Any, name: str) -> Tensor | None:
    part = recurrent_part(layer)
    states: Tensor | None = None if part is None else getattr(part, name)[0]
    return states
