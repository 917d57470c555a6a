"""What attention caches of a token: heads and head_dims of keys and of values, by the config."""

from collections.abc import Callable
from dataclasses import dataclass

from kvlayers.planning.fields import Fields
from kvlayers.upstream import compat


@dataclass(frozen=True)
class TokenShape:
    """The states of one token of one sequence in one layer.

    Attributes:
        kv_heads: heads of the keys, and of the values.
        key_head_dim: channels of a key.
        value_head_dim: channels of a value.
        indexer_head_dim: channels of the key of an indexer besides, 0 where the layer has none.
    """

    kv_heads: int
    key_head_dim: int
    value_head_dim: int
    indexer_head_dim: int = 0


def token_shape(fields: Fields, layer_type: str) -> TokenShape:
    """What a layer that attends caches of a token.

    Args:
        fields: config of the layer.
        layer_type: as in its `LayerSpec`.

    Raises:
        ConfigError: the config lacks a field.
    """
    if fields.number_or_none("kv_lora_rank") is not None:
        return _latent(fields, layer_type)
    head_dim = _head_dim(fields, layer_type)
    value_head_dim = fields.number_or_none("v_head_dim") or head_dim
    return TokenShape(_kv_heads(fields, layer_type), head_dim, value_head_dim)


def _latent(fields: Fields, layer_type: str) -> TokenShape:
    """Multi-head latent attention: the latent that heads are made from, or what it expands to before that."""
    indexer = fields.number("index_head_dim") if layer_type in INDEXED else 0
    caches_latents = compat.INDEXERS_CACHE_LATENTS if layer_type in INDEXED else compat.CACHES_LATENTS
    rope = fields.number("qk_rope_head_dim")
    if caches_latents:
        return TokenShape(1, fields.number("kv_lora_rank"), rope, indexer)
    keys, values = fields.number("qk_nope_head_dim") + rope, fields.number("v_head_dim")
    return TokenShape(fields.number("num_attention_heads"), keys, values, indexer)


INDEXED = ("indexed_attention", "deepseek_sparse_attention")
"""Layer types that cache the key of an indexer besides, by the names of all versions."""


def _head_dim(fields: Fields, layer_type: str) -> int:
    # Until transformers 5.13 gemma4 had a field of its own for it.
    if layer_type == "full_attention":
        of_full_attention = fields.number_or_none("global_head_dim")
        if of_full_attention is not None:
            return of_full_attention
    found = fields.number_or_none("attention_head_dim", "head_dim", "d_kv")
    return fields.number("hidden_size") // fields.number("num_attention_heads") if found is None else found


def _kv_heads(fields: Fields, layer_type: str) -> int:
    own = _OWN_KV_HEADS.get(str(fields.get("model_type")))
    if own is not None:
        return own(fields, layer_type)
    return fields.number("num_key_value_heads", "num_attention_heads")


def _of_falcon(fields: Fields, layer_type: str) -> int:
    one = fields.get("multi_query") and not fields.get("new_decoder_architecture")
    return 1 if one else fields.number("num_kv_heads")


def _of_gpt_bigcode(fields: Fields, layer_type: str) -> int:
    return 1 if fields.get("multi_query") else fields.number("num_attention_heads")


def _of_dbrx(fields: Fields, layer_type: str) -> int:
    return Fields(fields.get("attn_config")).number("kv_n_heads")


def _of_gemma4(fields: Fields, layer_type: str) -> int:
    shared = layer_type == "full_attention" and fields.get("attention_k_eq_v")
    of_full_attention = fields.number_or_none("num_global_key_value_heads") if shared else None
    return of_full_attention or fields.number("num_key_value_heads")


def _of_mimo(fields: Fields, layer_type: str) -> int:
    return fields.number("num_key_value_heads") * (2 if layer_type == "sliding_attention" else 1)


_OWN_KV_HEADS: dict[str, Callable[[Fields, str], int]] = {
    "dbrx": _of_dbrx,
    "falcon": _of_falcon,
    "gemma4_text": _of_gemma4,
    "gpt_bigcode": _of_gpt_bigcode,
    "mimo_v2_flash": _of_mimo,
}
"""Model types whose heads of keys follow from more than one field."""
