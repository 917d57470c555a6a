"""The number of KV heads of a layer, from the config."""

from collections.abc import Callable

from kvlayers.upstream.config_numbers import ConfigNumbers


def kv_heads(numbers: ConfigNumbers, layer_type: str) -> int:
    """KV heads of a layer of attention.

    Args:
        numbers: config of the layer.
        layer_type: as in its `LayerSpec`.

    Raises:
        ConfigError: the config lacks a field.
    """
    own = _OWN_KV_HEADS.get(str(numbers.get("model_type")))
    if own is not None:
        return own(numbers, layer_type)
    return numbers.number("num_key_value_heads", "num_attention_heads")


def _of_falcon(numbers: ConfigNumbers, layer_type: str) -> int:
    one = numbers.get("multi_query") and not numbers.get("new_decoder_architecture")
    return 1 if one else numbers.number("num_kv_heads")


def _of_gpt_bigcode(numbers: ConfigNumbers, layer_type: str) -> int:
    return 1 if numbers.get("multi_query") else numbers.number("num_attention_heads")


def _of_dbrx(numbers: ConfigNumbers, layer_type: str) -> int:
    return ConfigNumbers(numbers.get("attn_config")).number("kv_n_heads")


def _of_gemma4(numbers: ConfigNumbers, layer_type: str) -> int:
    shared = layer_type == "full_attention" and numbers.get("attention_k_eq_v")
    of_full_attention = numbers.number_or_none("num_global_key_value_heads") if shared else None
    return of_full_attention or numbers.number("num_key_value_heads")


def _of_mimo(numbers: ConfigNumbers, layer_type: str) -> int:
    return numbers.number("num_key_value_heads") * (2 if layer_type == "sliding_attention" else 1)


_OWN_KV_HEADS: dict[str, Callable[[ConfigNumbers, str], int]] = {
    "dbrx": _of_dbrx,
    "falcon": _of_falcon,
    "gemma4_text": _of_gemma4,
    "gpt_bigcode": _of_gpt_bigcode,
    "mimo_v2_flash": _of_mimo,
}
"""Model types whose heads of keys follow from more than one field."""
