"""What recurrent layers hold, whatever the number of tokens: convolution and recurrent states, by the config."""

from collections.abc import Callable
from dataclasses import dataclass

from kvlayers.errors import ConfigError
from kvlayers.planning.fields import Fields


@dataclass(frozen=True)
class RecurrentShape:
    """Elements of the states of one sequence in one layer.

    Attributes:
        conv: those of the convolution state, `channels * kernel`, in the dtype of the model.
        recurrent: those of the recurrent state, which every model keeps in float32.
    """

    conv: int
    recurrent: int = 0


def recurrent_shape(fields: Fields) -> RecurrentShape:
    """What a layer with recurrent states holds.

    Raises:
        ConfigError: the config lacks a field, or it is not known what its model type holds.
    """
    model_type = str(fields.get("model_type"))
    if model_type not in _SHAPES:
        raise ConfigError(
            f"expected a model type whose recurrent states are known ({', '.join(sorted(_SHAPES))}), but saw "
            f"'{model_type}': make the cache, run the model, and ask the cache for nbytes."
        )
    return _SHAPES[model_type](fields)


def _selective_scan(fields: Fields) -> RecurrentShape:
    channels = fields.number("intermediate_size")
    return RecurrentShape(channels * fields.number("conv_kernel"), channels * fields.number("state_size"))


def _expanded_scan(fields: Fields) -> RecurrentShape:
    channels = fields.number("mamba_expand") * fields.number("hidden_size")
    return RecurrentShape(channels * fields.number("mamba_d_conv"), channels * fields.number("mamba_d_state"))


def _state_space_duality(channels: int, groups: int, state_size: int, kernel: int) -> RecurrentShape:
    """Mamba 2: the convolution is over what enters the state as well, for each group of heads."""
    return RecurrentShape((channels + 2 * groups * state_size) * kernel, channels * state_size)


def _mamba2(fields: Fields) -> RecurrentShape:
    channels = fields.number("num_heads") * fields.number("head_dim")
    return _state_space_duality(
        channels, fields.number("n_groups"), fields.number("state_size"), fields.number("conv_kernel")
    )


def _nemotron(fields: Fields) -> RecurrentShape:
    channels = fields.number("mamba_num_heads") * fields.number("mamba_head_dim")
    return _state_space_duality(
        channels, fields.number("n_groups"), fields.number("ssm_state_size"), fields.number("conv_kernel")
    )


def _mamba2_in_hybrids(fields: Fields) -> RecurrentShape:
    heads, head_dim = fields.number("n_mamba_heads", "mamba_n_heads"), fields.number("mamba_headdim", "mamba_d_head")
    groups = fields.number("mamba_ngroups", "mamba_n_groups")
    return _state_space_duality(heads * head_dim, groups, fields.number("mamba_d_state"), fields.number("mamba_d_conv"))


def _gated_delta(fields: Fields) -> RecurrentShape:
    key_head_dim, value_head_dim = fields.number("linear_key_head_dim"), fields.number("linear_value_head_dim")
    value_heads = fields.number("linear_num_value_heads")
    channels = 2 * fields.number("linear_num_key_heads") * key_head_dim + value_heads * value_head_dim
    return RecurrentShape(
        channels * fields.number("linear_conv_kernel_dim"), value_heads * key_head_dim * value_head_dim
    )


def _delta_attention(fields: Fields) -> RecurrentShape:
    heads, head_dim = fields.number("linear_num_heads"), fields.number("linear_head_dim")
    return RecurrentShape(3 * heads * head_dim * fields.number("linear_conv_kernel_dim"), heads * head_dim**2)


def _short_convolution(fields: Fields) -> RecurrentShape:
    return RecurrentShape(fields.number("hidden_size") * fields.number("conv_L_cache"))


def _none(fields: Fields) -> RecurrentShape:
    return RecurrentShape(0)


_SHAPES: dict[str, Callable[[Fields], RecurrentShape]] = {
    **dict.fromkeys(("mamba", "falcon_mamba"), _selective_scan),
    **dict.fromkeys(("jamba", "zamba"), _expanded_scan),
    "mamba2": _mamba2,
    "nemotron_h": _nemotron,
    **dict.fromkeys(("bamba", "falcon_h1", "granitemoehybrid", "zamba2"), _mamba2_in_hybrids),
    **dict.fromkeys(
        ("olmo_hybrid", "qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"), _gated_delta
    ),
    **dict.fromkeys(("bailing_hybrid", "kimi_linear"), _delta_attention),
    **dict.fromkeys(("lfm2", "lfm2_moe"), _short_convolution),
    # Its states are attributes of its modules, out of the reach of any cache.
    "recurrent_gemma": _none,
}
