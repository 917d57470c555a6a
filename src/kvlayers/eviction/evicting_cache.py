"""The cache that keeps the tokens which a rule scores highest."""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
from typing_extensions import override

from kvlayers.core.cache import Cache
from kvlayers.core.description import NestedArgument, RotaryArgument
from kvlayers.core.layer_operations import LayerOperations
from kvlayers.core.named_caches import named, register, register_cache_class
from kvlayers.core.preparation import check_rotary, left_padding_of, padding_of, prepare_layers
from kvlayers.errors import ConfigError, UnsupportedLayerError
from kvlayers.eviction.budgets import LayerBudgets, check_layer_budgets
from kvlayers.eviction.evicting_config import EvictingConfig, evicting_layers
from kvlayers.eviction.evicting_layer import EvictingLayer
from kvlayers.eviction.rule import EvictionRule
from kvlayers.eviction.settings import check_amounts, found_rule
from kvlayers.quantized.quantization import Quantization
from kvlayers.rope.rotary import Rotary
from kvlayers.upstream import compat
from kvlayers.upstream.model_types import config_of
from kvlayers.utils.options import checks_options
from kvlayers.utils.units import tokens

DEFAULT_RULE = "keydiff"
"""The rule if none is given. It looks at keys alone, so it serves any attention."""


@register_cache_class
class EvictingCache(Cache):
    """Holds a part of the tokens: the sinks, the newest tokens, and the tokens with the highest scores.

    What is evicted leaves memory. `EvictingLayer` says when tokens are evicted. Positions stay those of the text.
    Layers of the model that slide a window keep their own window, and recurrent layers their states.

    The config says which layers have full attention, and for some rules how keys are rotated. It may also come later:
    `prepare` takes it, and `generate()` under `install()` passes it to a cache without a config.

    Example:
        >>> import kvlayers, transformers
        >>> config = transformers.LlamaConfig(num_hidden_layers=2)
        >>> kvlayers.EvictingCache(config, rule="knorm", keep=0.25)
        EvictingCache(2 x EvictingLayer, 0 tokens, 0 B)
        >>> kvlayers.EvictingCache(config, rule="knorm", budget="4k", keep=0.5)
        Traceback (most recent call last):
        kvlayers.errors.OptionError: ...

    Args:
        config: config of the model, or the model.
        rule: which tokens are evicted first: the name of a rule, an `EvictionRule`, or a
            `ScorerPress` of kvpress.
        keep: part of the tokens that is kept, larger than 0 and at most 1; a half if no `budget` is given either.
        budget: tokens that are kept, whatever the length of the text: 4096, or "4k".
        sink_tokens: first tokens of each sequence that are always kept.
        recent_tokens: newest tokens that an eviction always keeps. A cache can be cropped within them.
        per_head: whether KV heads keep different numbers of tokens, with the same average.
        layer_budgets: how tokens are divided among layers: "uniform", "pyramid" for fewer from layer to layer, or a
            positive weight for each layer that evicts.
        rotary: how the model's keys are rotated, for a model that kvlayers does not know and a rule that needs it.
        left_padding: tokens of padding before each sequence, beams included. `generate()` under `install()` finds them.
        quantization: how kept tokens are held in packed codes: a `Quantization`, or a mapping of its options. Without
            it, they are held in full precision. Fixed scales of fp8 are its `key_scales` and `value_scales`, one number
            for all layers and KV heads; it does not take the option `scales` of `QuantizedCache`.
        offloading: hold states on the host, and on their device only while they are attended to.
        offload_only_non_sliding: leave layers that attend within a window on the device.
        offload_device: "cpu" for the host's memory, "disk" for memory-mapped files.
        offload_directory: the directory of these files, for "disk".

    Raises:
        OptionError: an option that does not exist or has a wrong value, an unknown rule, or `keep` beside `budget`.
        ConfigError: no layer has full attention, attention depends on the columns of tokens, or the rule needs to know
            how keys are rotated, and kvlayers does not know that.
    """

    made_with = (
        NestedArgument("evicting", "_evicting", made_from=EvictingConfig.from_facts),
        RotaryArgument("rotary", "_rotary"),
    )
    learns_padding = True
    is_compileable = False
    """Which tokens are kept depends on their states."""

    @checks_options
    def __init__(
        self,
        config: object | None = None,
        rule: str | EvictionRule = DEFAULT_RULE,
        keep: float | None = None,
        budget: int | str | None = None,
        sink_tokens: int = 4,
        recent_tokens: int = 64,
        per_head: bool = True,
        layer_budgets: LayerBudgets = "uniform",
        rotary: Rotary | None = None,
        left_padding: Sequence[int] | Tensor | None = None,
        quantization: Quantization | Mapping[str, Any] | None = None,
        offloading: bool = False,
        offload_only_non_sliding: bool = True,
        offload_device: str = "cpu",
        offload_directory: str | os.PathLike[str] | None = None,
    ) -> None:
        if config is not None:
            config = config_of(config)
        check_rotary(rotary)
        budget = None if budget is None else tokens(budget, "budget")
        found = found_rule(rule)[0]
        keep = found.keep if keep is None and budget is None else keep
        check_amounts(keep, budget, sink_tokens, recent_tokens)
        self._evicting = EvictingConfig(
            rule if isinstance(rule, str) else found,
            keep,
            budget,
            sink_tokens,
            recent_tokens,
            per_head,
            _checked_layer_budgets(layer_budgets),
            Quantization.of(quantization),
            padding_of(left_padding),
        )
        self._rotary = rotary
        placement = offloading, offload_only_non_sliding, offload_device, offload_directory
        if config is None:
            super().__init__(None, self._layer_without_config, *placement)
        else:
            super().__init__(self._layers_of_model(config), None, *placement)

    @property
    def rule(self) -> str | EvictionRule:
        """Which tokens are evicted first."""
        return self._evicting.rule

    def _layer_without_config(self) -> EvictingLayer:
        if found_rule(self.rule)[0].needs_rotary and self._rotary is None:
            raise ConfigError(
                f"The eviction rule {self.rule!r} needs to know how the model rotates its keys, but the cache has no "
                "config: make it with config=model.config, call prepare(model.config), or generate() under "
                "kvlayers.install()."
            )
        if self._evicting.layer_budgets != "uniform":
            raise ConfigError(
                f"`layer_budgets` {self._evicting.layer_budgets!r} needs to know the layers of the model, but the "
                "cache has no config: make it with config=model.config, call prepare(model.config), or generate() "
                "under kvlayers.install()."
            )
        return self._evicting.layers([self._rotary], None)[0]

    @override
    def prepare(self, config: object, attention_mask: Tensor | None = None) -> None:
        """Tell an empty cache which model it is for, and which tokens are padding.

        Args:
            config: config of the model, or the model.
            attention_mask: `[batch, tokens]`, 0 for padding on the left.

        Raises:
            StateMismatchError: tokens are held, or there is padding that is not on the left.
            ConfigError: as for the cache itself.
        """
        padding = self._evicting.left_padding if attention_mask is None else left_padding_of(attention_mask)
        evicting = self._evicting.with_padding(padding)
        prepare_layers(self, evicting_layers(config_of(config), evicting, self._rotary), padding)
        self._evicting = evicting

    @override
    def get_mask_sizes(self, query_length: int | Tensor, layer_idx: int) -> tuple[int, int]:
        if compat.is_exporting():
            raise UnsupportedLayerError(
                "A cache that evicts cannot be part of an exported program, because which tokens it keeps depends on "
                "their states: export with kvlayers.ExportableDecoder."
            )
        # All layers of full attention share the mask of one of them, but may hold different numbers of tokens.
        rows = [row for layer in self.adapted_layers() for row in layer.separate_rows]
        evicting = [layer for layer in map(_unwrapped, rows) if isinstance(layer, EvictingLayer)]
        columns = max((layer.columns for layer in evicting), default=0)
        for layer in evicting:
            layer.announce(columns)
        return super().get_mask_sizes(query_length, layer_idx)

    @override
    def _layer_maker(self) -> Callable[[], Any]:
        return self._layer_without_config

    @override
    def _layers_of_model(self, config: Any) -> list[Any]:
        return evicting_layers(config, self._evicting, self._rotary)

    @override
    def reset(self) -> None:
        """Forget all tokens, and the padding before them; the memory is kept for the next ones."""
        super().reset()
        self._evicting = self._evicting.with_padding(None)


def _checked_layer_budgets(given: LayerBudgets) -> LayerBudgets:
    check_layer_budgets(given)
    return given if isinstance(given, str) else tuple(given)


def _unwrapped(layer: LayerOperations) -> LayerOperations:
    """The part of a layer that attends, without a wrapper that moves its states."""
    return layer.parts[0].unwrapped


register("evicting")(named(EvictingCache))
