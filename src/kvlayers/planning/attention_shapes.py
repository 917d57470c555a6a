"""Shapes of the keys and values that layers of attention hold for a token, from the config."""

from kvlayers.layers.shape import TokenShape
from kvlayers.upstream import compat
from kvlayers.upstream.model_types import ConfigNumbers, kv_heads


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
    heads = numbers.number_or_none("num_attention_heads_per_layer", "num_attention_heads")
    return TokenShape(kv_heads(numbers, layer_type), head_dim, value_head_dim, heads=heads)


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
