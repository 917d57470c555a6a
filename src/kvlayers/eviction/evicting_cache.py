"""The cache that keeps the tokens which a rule scores highest."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from typing_extensions import override

from kvlayers.core.description import NestedArgument, RotaryArgument
from kvlayers.core.from_config import FULL, HYBRID, dynamic_layers, with_attention
from kvlayers.core.named_caches import named, register, register_cache_class
from kvlayers.core.preparation import PreparedCache, padding_of
from kvlayers.errors import ConfigError, UnsupportedLayerError
from kvlayers.eviction.evicting_layer import EvictingLayer
from kvlayers.eviction.options import EvictionOptions, LayerBudgets, layer_keeps, layer_tokens
from kvlayers.eviction.rule import EvictionRule
from kvlayers.quantized.quantization import Quantization
from kvlayers.quantized.quantized_store import QuantizedStore
from kvlayers.rope.from_config import rotaries, rotates_keys
from kvlayers.rope.rotary import Rotary
from kvlayers.upstream import compat, model_types
from kvlayers.upstream.model_layers import layer_specs
from kvlayers.upstream.model_types import attention_scale
from kvlayers.utils.options import checks_options
from kvlayers.utils.units import tokens

DEFAULT_RULE = "keydiff"
"""The rule if none is given. It looks at keys alone, so it serves any attention."""


@register_cache_class
class EvictingCache(PreparedCache):
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
        NestedArgument("evicting", "_options", made_from=EvictionOptions.from_facts),
        RotaryArgument("rotary", "_rotary"),
    )
    _options: EvictionOptions
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
        options = EvictionOptions.of(
            rule,
            keep,
            None if budget is None else tokens(budget, "budget"),
            sink_tokens=sink_tokens,
            recent_tokens=recent_tokens,
            per_head=per_head,
            # The caller may change a list.
            layer_budgets=tuple(layer_budgets) if isinstance(layer_budgets, list) else layer_budgets,
            quantization=Quantization.of(quantization),
            left_padding=padding_of(left_padding),
        )
        self._begin(options, config, rotary, offloading, offload_only_non_sliding, offload_device, offload_directory)

    @property
    def rule(self) -> str | EvictionRule:
        """Which tokens are evicted first: the name of a rule, or a rule without a name."""
        return self._options.rule_name or self._options.rule

    @override
    def _layer_without_config(self) -> EvictingLayer:
        options = self._options
        unknown = None
        if options.rule.needs_rotary and self._rotary is None:
            unknown = f"The eviction rule {options.rule_shown} needs to know how the model rotates its keys"
        elif options.layer_budgets != "uniform":
            unknown = f"`layer_budgets` {options.layer_budgets!r} needs to know the layers of the model"
        if unknown is not None:
            raise ConfigError(
                f"{unknown}, but the cache has no config: make it with config=model.config, call "
                "prepare(model.config), or generate() under kvlayers.install()."
            )
        return _layers(options, [self._rotary], None)[0]

    @override
    def _layers_for(self, config: Any, options: EvictionOptions) -> list[Any]:
        """As `dynamic_layers`, with full attention that evicts tokens. Layers with a window stay as they are.

        Raises:
            ConfigError: no layer has full attention, attention depends on the columns of tokens, the rule needs queries
                and the model caches latents, or the rule needs to know how keys are rotated, and kvlayers does not.
        """
        if model_types.goes_by_columns(config):
            raise ConfigError(
                f"The attention of '{model_types.decoder_config(config).model_type}' depends on how many tokens the "
                "cache holds before a token (ALiBi, relative positions, or local attention), so none of them may be "
                "evicted: use a DynamicCache."
            )
        specs, layers = layer_specs(config), dynamic_layers(config)
        full = [index for index, spec in enumerate(specs) if HYBRID.get(spec.layer_type, spec.layer_type) == FULL]
        if not full:
            raise ConfigError(
                f"A cache evicts tokens of full attention, but the layers of the model are "
                f"{', '.join(sorted({spec.layer_type for spec in specs}))}: use a DynamicCache."
            )
        if options.rule.queries and model_types.caches_latents(config):
            raise ConfigError(
                f"The eviction rule {options.rule_shown} needs queries, but "
                f"'{model_types.decoder_config(config).model_type}' has multi-head latent attention, which caches "
                "latents and shows no queries that fit them: use a rule without queries, such as 'keydiff'."
            )
        rotations: list[Rotary | None] = [self._rotary] * len(specs)
        if options.rule.needs_rotary and self._rotary is None and rotates_keys(config):
            rotations = rotaries(config)
        made = _layers(options, [rotations[index] for index in full], attention_scale(config))
        for index, layer in zip(full, made, strict=True):
            layers[index] = with_attention(layers[index], layer)
        return layers

    @override
    def get_mask_sizes(self, query_length: int | Tensor, layer_idx: int) -> tuple[int, int]:
        if compat.is_exporting():
            raise UnsupportedLayerError(
                "A cache that evicts cannot be part of an exported program, because which tokens it keeps depends on "
                "their states: export with kvlayers.ExportableDecoder."
            )
        # All layers of full attention share the mask of one of them, but may hold different numbers of tokens.
        evicting = [
            part
            for layer in self.adapted_layers()
            for row in layer.separate_rows
            # The part of a layer that attends, without a wrapper that moves its states.
            if isinstance(part := row.parts[0].unwrapped, EvictingLayer)
        ]
        columns = max((layer.columns for layer in evicting), default=0)
        for layer in evicting:
            layer.announce(columns)
        return super().get_mask_sizes(query_length, layer_idx)


def _layers(options: EvictionOptions, rotaries: Sequence[Rotary | None], scale: float | None) -> list[EvictingLayer]:
    """A layer for each layer of full attention of a model.

    Args:
        options: how they evict.
        rotaries: how each of these layers rotates its keys, if the rule needs to know.
        scale: factor of the scores of attention, `None` for `1 / sqrt(head_dim)`.
    """
    how, count, keep, budget = options.layer_budgets, len(rotaries), options.keep, options.budget
    parts: Sequence[float | None] = [None] * count if keep is None else layer_keeps(how, count, keep)
    budgets = [None] * count if budget is None else layer_tokens(how, count, budget, options.protected)
    return [
        EvictingLayer(
            options.rule_name or options.rule,
            part,
            held,
            options.sink_tokens,
            options.recent_tokens,
            options.per_head,
            rotary,
            scale,
            None if options.quantization is None else QuantizedStore(options.quantization),
            options.left_padding,
        )
        for part, held, rotary in zip(parts, budgets, rotaries, strict=True)
    ]


register("evicting")(named(EvictingCache))
