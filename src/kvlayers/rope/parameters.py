"""What configs say of RoPE, in the words of transformers 5, whichever version is installed."""

import copy
from typing import Any

from transformers import PretrainedConfig

from kvlayers.upstream import compat


def rope_parameters(decoder: PretrainedConfig) -> list[dict[str, Any]]:
    """What a config says of RoPE, in words of today: once for all layers, or for each kind that rotates its keys."""
    # By attribute, as configs have other names for some of these.
    if compat.ROPE_HAS_ONE_DICT:
        parameters = getattr(decoder, "rope_parameters", None) or {}
        nested = [own for own in parameters.values() if isinstance(own, dict)]
        return nested or ([parameters] if parameters else [])
    theta, of_windows = getattr(decoder, "rope_theta", None), rope_config_of_windows(decoder)
    if theta is None:
        return []
    scaling = getattr(decoder, "rope_scaling", None) or {}
    # Older configs have "type" for it.
    rope_type = scaling.get("rope_type", scaling.get("type", "default"))
    own = [{**scaling, "rope_theta": theta, "rope_type": rope_type}]
    return own if of_windows is None else [*own, *rope_parameters(of_windows)]


def rope_config_of_windows(decoder: PretrainedConfig) -> PretrainedConfig | None:
    """The config that the rotary embedding of windows is made of, where that is another one than for other layers."""
    if compat.ROPE_HAS_ONE_DICT:
        return None
    theta = getattr(decoder, "rope_local_base_freq", None)
    if theta is None and decoder.model_type == "olmo3" and decoder.rope_scaling is not None:
        # It scales full attention alone.
        theta = decoder.rope_theta
    if theta is None:
        return None
    own = copy.copy(decoder)
    own.rope_theta, own.rope_scaling, own.rope_local_base_freq = theta, None, None
    return own


def config_fields(config: PretrainedConfig) -> dict[str, Any]:
    """All that a config says, in words of today as far as states depend on them."""
    fields: dict[str, Any] = config.to_dict()
    if not compat.ROPE_HAS_ONE_DICT and fields.get("rope_theta") is not None:
        said = rope_parameters(config)
        kinds = ("full_attention", "sliding_attention")[: len(said)]
        fields["rope_parameters"] = said[0] if len(said) == 1 else dict(zip(kinds, said, strict=True))
        for name in ("rope_theta", "rope_scaling", "rope_local_base_freq"):
            fields.pop(name, None)
    return fields
