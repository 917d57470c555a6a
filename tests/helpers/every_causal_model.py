"""A tiny random model of every type of causal language model that the installed transformers has, if a small config of
this type is known."""

import inspect
from typing import Any

import pytest
import torch
import transformers as tf
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import versions
from models import with_larger_weights

MODEL_TYPES = tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)

MOST_PARAMETERS = 3_500_000
"""What is larger has a field of its own for its size, which is not known here."""

# Wider than any prompt of a test, so that layers with a window can be rolled back, and states beside the window show.
WINDOW = 64

# Enough heads and room for every token, since scores of zero would be ties, which rounding decides.
INDEXER = {"index_n_heads": 16, "index_head_dim": 16, "index_topk": 64}

SMALL: dict[str, Any] = {
    "vocab_size": 97,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": versions.NO_END,
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "embedding_size", "word_embed_proj_dim", "lru_width"), 32),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "d_ff", "intermediate_size_mlp"), 48),
    **dict.fromkeys(("decoder_ffn_dim", "encoder_ffn_dim"), 48),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 4),
    **dict.fromkeys(("decoder_layers", "encoder_layers", "num_decoder_layers", "num_encoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("decoder_attention_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(("num_encoder_attention_heads", "num_decoder_attention_heads"), 4),
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rotary_dim": 4,
    "query_pre_attn_scalar": 8,
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 256),
    **dict.fromkeys(("sliding_window", "attention_window_size", "attention_chunk_size", "sliding_window_size"), WINDOW),
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k"), 2),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "first_k_dense_replace"), 1),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 16),
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    **INDEXER,
    "state_size": 4,
    "ssm_state_size": 8,
    "chunk_size": 8,
    "block_size": 8,
    "mamba_chunk_size": 8,
    "mamba_d_state": 8,
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_n_groups": 1,
    "mamba_num_heads": 8,
    "mamba_head_dim": 8,
    "n_groups": 1,
    "mamba_headdim": 8,
    "n_mamba_heads": 8,
    "mamba_ngroups": 1,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "vocab_size_per_layer_input": 97,
    "hidden_size_per_layer_input": 8,
    "block_multiple_of": 8,
    "num_mem_blocks": 1,
    "adapter_rank": 4,
    "ngram": 2,
    "moe_layer_start_index": 1,
    "is_decoder": True,
    "use_cache": True,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 8,
    "d_rel": 8,
    "rel_extent": 16,
}
"""Small values of fields, by the names that configs have for them."""

ALWAYS = ("pad_token_id", "bos_token_id", "eos_token_id")
"""Fields of every config, which not every class names."""

ONE_HEAD_EACH = {"num_key_value_heads": 4}
ALTERNATING = {"layer_types": ["sliding_attention", "full_attention"] * 2}

BY_TYPE: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("axk1", "axk2", "deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite"), ONE_HEAD_EACH),
    **dict.fromkeys(("glm_moe_dsa", "minicpm3", "youtu"), ONE_HEAD_EACH),
    "longcat_flash": {
        **ONE_HEAD_EACH, "ffn_hidden_size": 48, "expert_ffn_hidden_size": 16, "zero_expert_num": 1, "num_layers": 2,
    },
    "bamba": {"attn_layer_indices": [1]},
    "bailing_hybrid": {**ONE_HEAD_EACH, "layer_types": ["linear_attention", "full_attention"] * 2},
    "cpmant": {"dim_head": 8, "dim_ff": 48, "prompt_types": 4, "prompt_length": 4, "segment_types": 4},
    "deepseek_v4": {
        "layer_types": ["heavily_compressed_attention", "compressed_sparse_attention"] * 2,
        "compress_rates": {"heavily_compressed_attention": 4, "compressed_sparse_attention": 2},
        "hc_mult": 2, "o_groups": 2, "o_lora_rank": 8,
    },
    "dory": {"n_input_layers": 1, "n_output_layers": 1},
    "falcon_h1": {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8},
    "gemma3n_text": {
        **ALTERNATING, "num_kv_shared_layers": 2, "altup_num_inputs": 2, "laurel_rank": 4,
        "activation_sparsity_pattern": [0.0] * 4,
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": 8},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2, "shared_intermediate_size": 32},
    "inkling_text": {"layer_types": ["hybrid_sliding", "hybrid"], "num_hidden_layers": 2},
    "inkling2_text": {"layer_types": ["hybrid_sliding", "hybrid"], "num_hidden_layers": 2},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "mamba2": {"expand": 2, "head_dim": 8, "num_heads": 8},
    "minimax": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "reformer": {
        "axial_pos_embds": False, "attn_layers": ["local", "lsh"], "feed_forward_size": 32, "attention_head_size": 8,
        "local_attn_chunk_length": 8, "lsh_attn_chunk_length": 8,
    },
    "roc_bert": {
        "pronunciation_vocab_size": 20, "shape_vocab_size": 20, "pronunciation_embed_dim": 8, "shape_embed_dim": 8,
    },
    "xlm": {"emb_dim": 32, "n_layers": 2, "n_heads": 4, "causal": True, "n_words": 97},
    "xmod": {"languages": ["en_XX"], "default_language": "en_XX"},
    "zamba": {
        **ONE_HEAD_EACH, "layers_block_type": ["mamba", "hybrid"] * 2, "attn_layer_period": 2, "attn_layer_offset": 1,
    },
    "zamba2": {
        **ONE_HEAD_EACH, "num_hidden_layers": 3, "layers_block_type": ["mamba", "hybrid", "mamba"],
        "use_mem_rope": True,
    },
    "zaya": {"num_experts_per_tok": 1},
}  # fmt: skip
"""What a type needs besides, or instead."""

HUGE = ("dots3_note", "dots3_note_text")
"""Types whose size is fixed by other fields: not even their shapes are made."""


def config_of(model_type: str) -> Any:
    """A small config of a type."""
    config_class = CONFIG_MAPPING[model_type]
    known = {*inspect.signature(config_class.__init__).parameters, *ALWAYS}
    known |= {*vars(config_class).get("__dataclass_fields__", {}), *config_class.attribute_map.values()}
    small = {name: value for name, value in SMALL.items() if name in known}
    return config_class(**{**small, **BY_TYPE.get(model_type, {})})


def model_of(model_type: str) -> Any:
    """A random model of a type, with weights that are large enough for attention to matter.

    The test is skipped if the model has parts that are not installed, or no small config of this type is known.
    """
    if model_type in HUGE:
        pytest.skip(f"no small config of {model_type} is known")
    try:
        config = config_of(model_type)
        with torch.device("meta"):
            shapes = tf.AutoModelForCausalLM.from_config(config)
    except Exception as reason:
        pytest.skip(f"no small config of {model_type} is known: {reason}")
    if sum(weight.numel() for weight in shapes.parameters()) > MOST_PARAMETERS:
        pytest.skip(f"no small config of {model_type} is known: the model is too large")
    torch.manual_seed(0)
    model = with_larger_weights(tf.AutoModelForCausalLM.from_config(config).eval())
    model.generation_config.use_cache = True
    return model


def of_loops() -> Any:
    """A model whose first loop attends to what the last one has computed in earlier passes, and to its own tokens."""
    config = config_of("dory")
    config.recurrent_kv_cache_mode = "last_loop"
    torch.manual_seed(0)
    return with_larger_weights(tf.AutoModelForCausalLM.from_config(config).eval())
