"""How the evicting layers of a cache are made."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from torch import Tensor
from typing_extensions import Self

from kvlayers.core.from_config import FULL, HYBRID, dynamic_layers, with_attention
from kvlayers.core.preparation import padding_of
from kvlayers.errors import ConfigError
from kvlayers.eviction.budgets import LayerBudgets, check_layer_budgets, layer_keeps, layer_tokens
from kvlayers.eviction.evicted import check_evictable
from kvlayers.eviction.evicting_layer import EvictingLayer
from kvlayers.eviction.rule import EvictionRule
from kvlayers.eviction.settings import check_amounts, found_rule, name_of
from kvlayers.quantized.quantization import Quantization
from kvlayers.quantized.quantized_store import QuantizedStore
from kvlayers.rope.from_config import rotaries, rotates_keys
from kvlayers.rope.rotary import Rotary
from kvlayers.upstream import model_layers, model_types
from kvlayers.upstream.model_layers import layer_specs
from kvlayers.upstream.model_types import attention_scale


@dataclass(frozen=True, eq=False)
class EvictingConfig:
    """How the layers of an `EvictingCache` are made; see `EvictingLayer` for the arguments.

    Attributes:
        rule: which tokens are evicted first.
        keep: part of the tokens that an average layer keeps.
        budget: tokens that an average layer keeps.
        sink_tokens: first tokens that are always kept.
        recent_tokens: newest tokens that an eviction always keeps.
        per_head: whether KV heads keep different numbers of tokens.
        layer_budgets: how tokens are divided among layers; see `layer_keeps`.
        quantization: how kept tokens are held in packed codes, `None` for full precision.
        left_padding: tokens of padding before each sequence, int64 `[batch]`; `None` if there is no padding.

    Raises:
        OptionError: the quantization has more than one fixed scale for keys, or for values.
    """

    rule: str | EvictionRule
    keep: float | None = None
    budget: int | None = None
    sink_tokens: int = 4
    recent_tokens: int = 64
    per_head: bool = True
    layer_budgets: LayerBudgets = "uniform"
    quantization: Quantization | None = None
    left_padding: Tensor | None = None

    def __post_init__(self) -> None:
        if self.quantization is not None:
            check_evictable(self.quantization)

    def with_padding(self, padding: Tensor | None) -> "EvictingConfig":
        """The same behind other padding."""
        return replace(self, left_padding=padding)

    def facts(self) -> dict[str, Any]:
        """The fields as plain values, from which `from_facts` makes an equal config.

        Raises:
            OptionError: the rule has no name.
        """
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {
            **values,
            "rule": name_of(self.rule),
            "quantization": None if self.quantization is None else self.quantization.facts(),
            "left_padding": None if self.left_padding is None else self.left_padding.tolist(),
        }

    @classmethod
    def from_facts(cls, facts: Mapping[str, Any]) -> Self:
        """A config from what `facts` returned.

        Raises:
            OptionError: a fact has a value that the cache does not take.
        """
        values = {field.name: facts[field.name] for field in fields(cls)}
        quantization, padding = Quantization.of(facts["quantization"]), padding_of(facts["left_padding"])
        config = cls(**{**values, "quantization": quantization, "left_padding": padding})
        check_amounts(config.keep, config.budget, config.sink_tokens, config.recent_tokens)
        check_layer_budgets(config.layer_budgets)
        return config

    def layers(self, rotaries: Sequence[Rotary | None], scale: float | None) -> list[EvictingLayer]:
        """A layer for each layer of full attention of a model.

        Args:
            rotaries: how each of these layers rotates its keys, if the rule needs to know.
            scale: factor of the scores of attention, `None` for `1 / sqrt(head_dim)`.

        Raises:
            OptionError: an argument has a wrong value.
        """
        count = len(rotaries)
        keeps: list[float | None] = [None] * count
        budgets: list[int | None] = [None] * count
        if self.budget is None:
            keeps = [*layer_keeps(self.layer_budgets, count, 1.0 if self.keep is None else self.keep)]
        else:
            budgets = [*layer_tokens(self.layer_budgets, count, self.budget, self.sink_tokens + self.recent_tokens)]
        return [self._layer(*of_layer, scale) for of_layer in zip(keeps, budgets, rotaries, strict=True)]

    def _layer(
        self, keep: float | None, budget: int | None, rotary: Rotary | None, scale: float | None
    ) -> EvictingLayer:
        return EvictingLayer(
            self.rule,
            keep,
            budget,
            self.sink_tokens,
            self.recent_tokens,
            self.per_head,
            rotary,
            scale,
            None if self.quantization is None else QuantizedStore(self.quantization),
            self.left_padding,
        )


def rules_for(rule: EvictionRule, config: object, rotary: Rotary | None = None) -> list[EvictionRule]:
    """The rule for each layer that has a cache, in order.

    Args:
        rule: the rule, as its name gives it.
        config: the model's config, or that of its text model.
        rotary: how all layers rotate their keys. Default: as the config says.

    Raises:
        ConfigError: `config` is not a model config, or the rule needs to know how the model rotates its keys, and
            kvlayers does not know that.
    """
    scale = attention_scale(config)
    return [rule.for_attention(own, scale) for own in rotaries_for(rule, config, rotary)]


def rotaries_for(rule: EvictionRule, config: object, rotary: Rotary | None = None) -> list[Rotary | None]:
    """How each layer that has a cache rotates its keys, in order; `None` if the rule does not need to know.

    The arguments and errors are those of `rules_for`.
    """
    if rule.needs_rotary and rotary is None and rotates_keys(config):
        return rotaries(config)
    return [rotary] * len(layer_specs(config))


def evicting_layers(config: object, evicting: EvictingConfig, rotary: Rotary | None = None) -> list[Any]:
    """As `dynamic_layers`, with full attention that evicts tokens. Layers with a window stay as they are.

    Args:
        config: config of the model.
        evicting: how evicting layers are made.
        rotary: how the keys of all layers are rotated; as the config says if it is not given.

    Raises:
        ConfigError: no layer has full attention, attention depends on the columns of tokens, the rule needs queries
            and the model caches latents, or the rule needs to know how keys are rotated, and kvlayers does not.
    """
    if model_types.goes_by_columns(config):
        raise ConfigError(
            f"The attention of '{model_types.decoder_config(config).model_type}' depends on how many tokens the cache "
            "holds before a token (ALiBi, relative positions, or local attention), so none of them may be evicted: use "
            "a DynamicCache."
        )
    specs, layers = model_layers.layer_specs(config), dynamic_layers(config)
    full = [index for index, spec in enumerate(specs) if HYBRID.get(spec.layer_type, spec.layer_type) == FULL]
    if not full:
        raise ConfigError(
            f"A cache evicts tokens of full attention, but the layers of the model are "
            f"{', '.join(sorted({spec.layer_type for spec in specs}))}: use a DynamicCache."
        )
    rule = found_rule(evicting.rule)[0]
    if rule.queries and model_types.caches_latents(config):
        raise ConfigError(
            f"The eviction rule {evicting.rule!r} needs queries, but '{model_types.decoder_config(config).model_type}' "
            "has multi-head latent attention, which caches latents and shows no queries that fit them: use a rule "
            "without queries, such as 'keydiff'."
        )
    rotations = rotaries_for(rule, config, rotary)
    made = evicting.layers([rotations[index] for index in full], attention_scale(config))
    for index, layer in zip(full, made, strict=True):
        layers[index] = with_attention(layers[index], layer)
    return layers
