"""The caches that reserve their memory once."""

import transformers

from . import compat
from .cache import Cache
from .errors import ConfigError
from .layers.dispatch import WINDOWED, static_layers
from .options import checks_options, refuse_offloading


class StaticCache(Cache, transformers.StaticCache):  # type: ignore[misc]
    """Reserves memory for `max_cache_len` tokens when the first ones come, and keeps it at one address.

    Sliding and chunked attention reserve their window and some room to move it in.

    Args:
        config: config of the model.
        max_cache_len: tokens to reserve: prompt and continuation together.
        offloading: must be False for now. Here, as in transformers, so that code which says so goes on working.
        offload_only_non_sliding: which layers would be offloaded.

    Raises:
        NotYetError: offloading is asked for.
        ConfigError: the config does not describe the model's layers.
        OptionError: an option that does not exist, or `max_cache_len` is no number of tokens.

    Example:
        >>> import torch, kvlayers, transformers
        >>> config = transformers.LlamaConfig(num_hidden_layers=1)
        >>> cache = kvlayers.StaticCache(config, max_cache_len=4)
        >>> _ = cache.update(torch.randn(1, 2, 3, 8), torch.randn(1, 2, 3, 8), layer_idx=0)
        >>> cache.get_seq_length(), cache.get_max_length()
        (3, 4)
        >>> cache.update(torch.randn(1, 2, 2, 8), torch.randn(1, 2, 2, 8), layer_idx=0)  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        kvlayers.errors.CapacityError: expected at most 4 tokens, ... but saw 3 held and 2 new: reserve 5 or more, ...
    """

    @checks_options
    def __init__(
        self,
        config: object,
        max_cache_len: int,
        offloading: bool = False,
        offload_only_non_sliding: bool = True,
    ) -> None:
        refuse_offloading(offloading)
        super().__init__(layers=static_layers(config, max_cache_len))


class HybridCache(StaticCache):
    """A `StaticCache` by the name that models with some sliding and some full layers had for it.

    Args:
        config: config of the model.
        max_cache_len: tokens to reserve: prompt and continuation together.
    """


class SlidingWindowCache(StaticCache):
    """A `StaticCache` for models that attend within a window.

    Args:
        config: config of a model with sliding or chunked attention.
        max_cache_len: tokens that are expected: prompt and continuation together.

    Raises:
        ConfigError: no layer of the model attends within a window.
    """

    @checks_options
    def __init__(
        self,
        config: object,
        max_cache_len: int,
        offloading: bool = False,
        offload_only_non_sliding: bool = True,
    ) -> None:
        layer_types = {spec.layer_type for spec in compat.layer_specs(config)}
        if layer_types.isdisjoint(WINDOWED):
            raise ConfigError(
                f"expected a model with sliding or chunked attention, but the layers of {type(config).__name__} are of "
                f"other types ({', '.join(sorted(layer_types))}): use StaticCache."
            )
        super().__init__(config, max_cache_len, offloading, offload_only_non_sliding)
