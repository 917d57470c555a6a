"""Shapes of the convolution and recurrent states that layers hold, whatever the number of tokens, from the config."""

from collections.abc import Callable

from kvlayers.errors import ConfigError
from kvlayers.layers.shape import RecurrentShape
from kvlayers.upstream.model_types import ConfigNumbers


def recurrent_shape(numbers: ConfigNumbers) -> RecurrentShape:
    """What a recurrent layer holds for a sequence.

    Raises:
        ConfigError: the config lacks a field, or the states of its model type have no known shape.
    """
    model_type = str(numbers.get("model_type"))
    if model_type not in _SHAPES:
        raise ConfigError(
            f"The recurrent states of models of type '{model_type}' have no known shape, as those of "
            f"{', '.join(sorted(_SHAPES))} do: make the cache, run the model, and ask the cache for `nbytes`."
        )
    return _SHAPES[model_type](numbers)


def _selective_scan(numbers: ConfigNumbers) -> RecurrentShape:
    channels = numbers.number("intermediate_size")
    return RecurrentShape(channels * numbers.number("conv_kernel"), channels * numbers.number("state_size"))


def _expanded_scan(numbers: ConfigNumbers) -> RecurrentShape:
    channels = numbers.number("mamba_expand") * numbers.number("hidden_size")
    return RecurrentShape(channels * numbers.number("mamba_d_conv"), channels * numbers.number("mamba_d_state"))


def _state_space_duality(channels: int, groups: int, state_size: int, kernel: int) -> RecurrentShape:
    """Mamba 2: the convolution is over what enters the state as well, for each group of heads."""
    return RecurrentShape((channels + 2 * groups * state_size) * kernel, channels * state_size)


def _mamba2(numbers: ConfigNumbers) -> RecurrentShape:
    channels = numbers.number("num_heads") * numbers.number("head_dim")
    return _state_space_duality(
        channels, numbers.number("n_groups"), numbers.number("state_size"), numbers.number("conv_kernel")
    )


def _nemotron(numbers: ConfigNumbers) -> RecurrentShape:
    channels = numbers.number("mamba_num_heads") * numbers.number("mamba_head_dim")
    return _state_space_duality(
        channels, numbers.number("n_groups"), numbers.number("ssm_state_size"), numbers.number("conv_kernel")
    )


def _mamba2_in_hybrids(numbers: ConfigNumbers) -> RecurrentShape:
    heads, head_dim = numbers.number("n_mamba_heads", "mamba_n_heads"), numbers.number("mamba_headdim", "mamba_d_head")
    groups = numbers.number("mamba_ngroups", "mamba_n_groups")
    return _state_space_duality(
        heads * head_dim, groups, numbers.number("mamba_d_state"), numbers.number("mamba_d_conv")
    )


def _gated_delta(numbers: ConfigNumbers) -> RecurrentShape:
    key_head_dim, value_head_dim = numbers.number("linear_key_head_dim"), numbers.number("linear_value_head_dim")
    value_heads = numbers.number("linear_num_value_heads")
    channels = 2 * numbers.number("linear_num_key_heads") * key_head_dim + value_heads * value_head_dim
    return RecurrentShape(
        channels * numbers.number("linear_conv_kernel_dim"), value_heads * key_head_dim * value_head_dim
    )


def _delta_attention(numbers: ConfigNumbers) -> RecurrentShape:
    heads, head_dim = numbers.number("linear_num_heads"), numbers.number("linear_head_dim")
    return RecurrentShape(3 * heads * head_dim * numbers.number("linear_conv_kernel_dim"), heads * head_dim**2)


def _short_convolution(numbers: ConfigNumbers) -> RecurrentShape:
    return RecurrentShape(numbers.number("hidden_size") * numbers.number("conv_L_cache"))


def _nothing(numbers: ConfigNumbers) -> RecurrentShape:
    return RecurrentShape(0)


_SHAPES: dict[str, Callable[[ConfigNumbers], RecurrentShape]] = {
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
    # Its states are attributes of its modules, which no cache reaches.
    "recurrent_gemma": _nothing,
}
