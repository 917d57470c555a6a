"""Shapes of the keys and values that layers of attention hold for a token, from the config."""

from collections.abc import Callable

from kvlayers.layers.shape import TokenShape
from kvlayers.planning.config_numbers import ConfigNumbers
from kvlayers.upstream import compat


def token_shape(numbers: ConfigNumbers, layer_type: str) -> TokenShape:
    """What a layer of attention holds for a token.

    Args:
        numbers: config of the layer.
        layer_type: as in its `LayerSpec`.

    Raises:
        ConfigError: the config lacks a field.
    """
    if numbers.number_or_none("kv_lora_rank") is not None:
        return _latent(numbers, layer_type)
    head_dim = _head_dim(numbers, layer_type)
    value_head_dim = numbers.number_or_none("v_head_dim") or head_dim
    heads = numbers.number_or_none("num_attention_heads")
    return TokenShape(_kv_heads(numbers, layer_type), head_dim, value_head_dim, heads=heads)


def _latent(numbers: ConfigNumbers, layer_type: str) -> TokenShape:
    """Multi-head latent attention: the latent that heads are made from, or in older versions the heads themselves."""
    indexer = numbers.number("index_head_dim") if layer_type in INDEXED else 0
    caches_latents = compat.INDEXERS_CACHE_LATENTS if layer_type in INDEXED else compat.CACHES_LATENTS
    rope = numbers.number("qk_rope_head_dim")
    if caches_latents:
        return TokenShape(1, numbers.number("kv_lora_rank"), rope, indexer)
    keys, values = numbers.number("qk_nope_head_dim") + rope, numbers.number("v_head_dim")
    return TokenShape(numbers.number("num_attention_heads"), keys, values, indexer)


INDEXED = ("indexed_attention", "deepseek_sparse_attention")
"""Layer types that cache the key of an indexer besides, by the names of all versions."""


def _head_dim(numbers: ConfigNumbers, layer_type: str) -> int:
    # Until transformers 5.13 gemma4 had a field of its own for it.
    if layer_type == "full_attention":
        of_full_attention = numbers.number_or_none("global_head_dim")
        if of_full_attention is not None:
            return of_full_attention
    found = numbers.number_or_none("attention_head_dim", "head_dim", "d_kv")
    return numbers.number("hidden_size") // numbers.number("num_attention_heads") if found is None else found


def _kv_heads(numbers: ConfigNumbers, layer_type: str) -> int:
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
