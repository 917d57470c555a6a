"""A rule for each layer of a model."""

from typing import Any

from kvlayers.core.from_config import FULL, HYBRID, dynamic_layers, with_attention
from kvlayers.errors import ConfigError
from kvlayers.eviction.evicting_config import EvictingConfig
from kvlayers.eviction.rule import EvictionRule
from kvlayers.eviction.settings import found_rule
from kvlayers.rope.from_config import rotaries, rotates_keys
from kvlayers.rope.rotary import Rotary
from kvlayers.upstream import model_layers, model_types
from kvlayers.upstream.model_layers import layer_specs
from kvlayers.upstream.model_types import attention_scale


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
