"""The factor by which a model multiplies its scores of attention, found from the model's config."""

import math

from kvlayers.upstream.model_types import decoder_config, head_dims

UNSCALED = ("diffusion_gemma_text", "gemma3n_text", "gemma4_text", "gemma4_unified_text", "gpt_neo", "opt")
"""Model types whose queries are multiplied by the factor before attention, or not at all."""

OF_HALF_THE_HEAD = ("zamba", "zamba2")
"""Model types whose heads are twice as wide as their factor says."""


def attention_scale(config: object) -> float | None:
    """The factor of the scores of attention, `None` for `1 / sqrt(head_dim)`.

    Raises:
        ConfigError: `config` is not a model config.
    """
    decoder = decoder_config(config)
    # By attribute, because configs have other names for some of these.
    scalar = getattr(decoder, "query_pre_attn_scalar", None)
    if scalar is not None:
        return 1 / math.sqrt(scalar)
    multiplier = getattr(decoder, "attention_multiplier", None)
    if multiplier is not None:
        return float(multiplier)
    if decoder.model_type in UNSCALED:
        return 1.0
    dims = head_dims(decoder) if decoder.model_type in OF_HALF_THE_HEAD else None
    return None if dims is None else 1 / math.sqrt(dims[0] / 2)
