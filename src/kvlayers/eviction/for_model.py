"""A rule for each layer of a model."""

from kvlayers.eviction.contract import EvictionRule
from kvlayers.rope.from_config import rotaries, rotates_keys
from kvlayers.rope.rotary import Rotary
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
