"""The cache that grows with the sequence."""

import functools
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import transformers
from torch import Tensor
from typing_extensions import Self, override

from kvlayers.core import legacy_api
from kvlayers.core.arguments import checked_hint, whole_number
from kvlayers.core.cache import Cache
from kvlayers.core.cache_layer import CacheLayer
from kvlayers.core.from_config import (
    BUDGET,
    RECALL,
    AttentionMaker,
    Checkpoints,
    budget_of,
    dynamic_layers,
    every_token_layers,
    full_attention_layer,
    recall_of,
)
from kvlayers.core.named_caches import CacheRequest, named, register, register_cache_class
from kvlayers.core.token_layer import DynamicLayer, SlidingLayer
from kvlayers.errors import LayerIndexError, LegacyFormatError, OptionError
from kvlayers.upstream import model_types
from kvlayers.utils.options import checks_options


@register_cache_class
class DynamicCache(Cache, transformers.DynamicCache):  # type: ignore[misc]
    """Grows in place as tokens come. Full attention keeps every token, sliding and chunked attention keep a window.

    Example:
        >>> import kvlayers, torch, transformers
        >>> config = transformers.LlamaConfig(hidden_size=32, num_attention_heads=2, num_hidden_layers=2)
        >>> model = transformers.LlamaForCausalLM(config)
        >>> cache = kvlayers.DynamicCache(config=model, length_hint="1k")
        >>> output = kvlayers.generate(model, torch.ones(1, 8, dtype=torch.int64), cache=cache, max_new_tokens=1)
        >>> cache
        DynamicCache(2 x DynamicLayer, 8 tokens, batch 1, ...)
        >>> cache.crop(-2)
        >>> cache.get_seq_length()
        6

    Args:
        config: the model, or its config. Without it, every layer has full attention.
        length_hint: the most tokens that are expected, if known, such as 4096 or "4k". Memory then grows to that number
            and no further, as long as no more tokens come.
        offloading: hold states on the host, and on their device only while they are attended to.
        offload_only_non_sliding: leave layers that attend within a window on the device.
        offload_device: "cpu" for the host's memory, "disk" for memory-mapped files.
        offload_directory: the directory of these files, for "disk".
        checkpoints: when recurrent layers take checkpoints and how many they keep, `Checkpoints` or a mapping of its
            arguments.
        recall: how a single query chooses the pages that it attends to in layers of full attention, `Recall` or a
            mapping of its arguments. Without it, a query attends to every token.
        max_bytes: the bytes that the cache stays within, such as "2GiB"; a share "50%" of what `length_hint` tokens
            take in full precision; or "50% of free", of the memory that is free. The cache is exact until it reaches
            them, and is rounded from its oldest tokens on after that. Without it, it takes as many as it needs.
        ladder: the steps that it may take to stay within `max_bytes`, of "int8", "int4" and "offloaded", in this order;
            all three if it is not given.
        ddp_cache_data: states to begin with. For each layer keys and values, `[batch, kv_heads, tokens, head_dim]`,
            and optionally the layer's sliding window as a tensor. `None` for keys and values leaves a layer empty.

    Raises:
        ConfigError: the config does not describe the model's layers.
        OptionError: an option that does not exist, a config as the first argument, or no such bytes or steps.
        CapacityError: later, by a forward pass whose tokens do not fit within `max_bytes` after all steps.
        UnsupportedLayerError: a layer cannot be offloaded, and offloading is asked for.
        LegacyFormatError: the states are nested in another way.
    """

    made_with = (RECALL, BUDGET)
    is_compileable = False
    """Shapes change at every token, and transformers does not compile around such a cache."""

    @checks_options
    def __init__(
        self,
        ddp_cache_data: Iterable[tuple[Tensor | None, ...]] | None = None,
        config: object | None = None,
        offloading: bool = False,
        offload_only_non_sliding: bool = False,
        length_hint: int | str | None = None,
        offload_device: str = "cpu",
        offload_directory: str | os.PathLike[str] | None = None,
        checkpoints: Checkpoints | Mapping[str, int | None] | None = None,
        recall: AttentionMaker | Mapping[str, Any] | None = None,
        max_bytes: int | str | None = None,
        ladder: Sequence[str] | None = None,
    ) -> None:
        self.recall = recall_of(recall)
        if isinstance(ddp_cache_data, transformers.PretrainedConfig | torch.nn.Module):
            raise OptionError(
                f"The first argument must be states, got a {type(ddp_cache_data).__name__}: pass it as `config`."
            )
        length_hint = checked_hint(length_hint)
        self.budget = budget_of(max_bytes, ladder, length_hint)
        if checkpoints is not None and config is None:
            raise OptionError(
                "`config` must be given with `checkpoints`, got none: it says which layers are recurrent."
            )
        given = legacy_api.check_nesting(() if ddp_cache_data is None else ddp_cache_data, width=(2, 3))
        if config is not None:
            layers = dynamic_layers(model_types.config_of(config), length_hint, checkpoints, self.recall)
            if len(given) > len(layers):
                raise LayerIndexError(
                    f"The states must be of at most {len(layers)} layers, as the config has, got {len(given)}: pass "
                    "the config of the model that computed them."
                )
        else:
            layers = [_layer_for(states, length_hint, self.recall) for states in given]
        make_layer = None if layers else functools.partial(full_attention_layer, length_hint, self.recall)
        super().__init__(
            layers or None, make_layer, offloading, offload_only_non_sliding, offload_device, offload_directory
        )
        for index, (keys, values, *_) in enumerate(given):
            if (keys is None) != (values is None):
                raise LegacyFormatError(
                    f"Layer {index} must have keys and values, or neither, got only one: pass both, or None twice."
                )
        if given:
            _fill([pair for pair in zip(self.adapted_layers(), given, strict=False) if pair[1][0] is not None])
        # Evicted states may have a different length in each layer. They were given so: no pass was interrupted.
        self._pass.in_step = len(given) - 1

    @override
    def _layer_maker(self) -> Callable[[], Any]:
        return functools.partial(full_attention_layer, recall=self.recall)

    @classmethod
    def from_legacy_cache(cls, past_key_values: object | None = None, config: object | None = None) -> Self:
        """A cache that holds copies of `((keys, values), ...)`; an empty cache for `None`.

        Args:
            past_key_values: for each layer keys and values, `[batch, kv_heads, tokens, head_dim]`.
            config: as for the cache itself.

        Raises:
            LegacyFormatError: the tuples are nested in another way.
        """
        pairs = legacy_api.check_tuples(() if past_key_values is None else past_key_values, width=(2,))
        if config is None:
            return cls(ddp_cache_data=pairs)
        cache = cls(config=config)
        attending = [layer for layer in cache.adapted_layers() if layer.traits.attends]
        if len(pairs) not in (0, len(attending)):
            raise LegacyFormatError(
                f"The states must be of the {len(attending)} layers of the model that attend, got {len(pairs)}: pass "
                "the states of every layer that attends."
            )
        _fill(list(zip(attending, pairs, strict=False)))
        return cache


def _fill(pairs: Sequence[tuple[CacheLayer, tuple[Any, ...]]]) -> None:
    """Update empty layers with the keys and values of a legacy cache, which come first in the tuple of each."""
    if any(layer.traits.has_other_states for layer, _ in pairs):
        raise LegacyFormatError(
            "Layers must have keys and values alone, got one that has other states, such as the keys of an "
            "indexer: use state() and load_state(), which keep all states."
        )
    for layer, states in pairs:
        layer.update(*legacy_api.with_dropped(states, layer.is_sliding))


def _layer_for(
    states: tuple[Tensor | None, ...], length_hint: int | None, recall: AttentionMaker | None
) -> DynamicLayer | SlidingLayer:
    if isinstance(states, legacy_api.WindowedStates):
        return SlidingLayer(states.sliding_window)
    sliding_window = states[2] if len(states) == 3 else None
    if sliding_window is None:
        return full_attention_layer(length_hint, recall)
    return SlidingLayer(whole_number(sliding_window, "`sliding_window`"))


register("dynamic")(named(DynamicCache, "length_hint"))


@register("dynamic_full")
def _dynamic_full(request: CacheRequest) -> Cache:
    """A cache that keeps every token, even if the model attends within windows, as in transformers before 5.14."""
    options = {"length_hint": request.length_hint, "checkpoints": None, **request.options}
    unknown = sorted(options.keys() - {"length_hint", "checkpoints"})
    if unknown:
        raise OptionError(
            f"`options` of 'dynamic_full' must be length_hint and checkpoints, got {unknown}: leave them out."
        )
    hint = checked_hint(options.pop("length_hint"))
    return Cache(layers=every_token_layers(request.config, hint, **options))
