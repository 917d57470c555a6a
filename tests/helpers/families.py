"""Small models of the families that transformers runs: hybrids, indexers, shared KV, encoders with decoders."""

import copy
import functools
from typing import Any

import torch
import transformers as tf

import versions
from models import COMMON, WINDOW, prompt, tiny_model

WITHOUT_HEAD_DIM = {name: value for name, value in COMMON.items() if name != "head_dim"}


SPECIAL = {"vocab_size": 97, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": versions.NO_END}


MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 8, "mamba_chunk_size": 8}


EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1}


GATED_DELTA = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}


SHARED_KV = {
    **COMMON,
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "vocab_size_per_layer_input": 97,
    "hidden_size_per_layer_input": 8,
}


SEQ2SEQ = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "decoder_start_token_id": 1,
}


FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "mamba2": (
        "Mamba2Config",
        {**SPECIAL, "hidden_size": 32, "num_hidden_layers": 2, "num_heads": 8, "head_dim": 8, "state_size": 8,
         "n_groups": 1, "expand": 2, "chunk_size": 8},
    ),
    "falcon_mamba": (
        "FalconMambaConfig",
        {**SPECIAL, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4},
    ),
    "bamba": ("BambaConfig", {**WITHOUT_HEAD_DIM, **MAMBA, "attn_layer_indices": [1]}),
    "granitemoehybrid": (
        "GraniteMoeHybridConfig",
        {**WITHOUT_HEAD_DIM, **MAMBA, **EXPERTS, "layer_types": ["mamba", "attention"], "shared_intermediate_size": 32},
    ),
    "lfm2": ("Lfm2Config", {**WITHOUT_HEAD_DIM, "layer_types": ["conv", "full_attention"], "block_multiple_of": 8}),
    "qwen3_next": (
        "Qwen3NextConfig",
        {**COMMON, **GATED_DELTA, "num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16,
         "shared_expert_intermediate_size": 16},
    ),
    "qwen3_5": ("Qwen3_5TextConfig", {**COMMON, **GATED_DELTA}),
    "zamba2": (
        "Zamba2Config",
        {**SPECIAL, "hidden_size": 32, "num_hidden_layers": 3, "layers_block_type": ["mamba", "hybrid", "mamba"],
         "mamba_d_state": 8, "mamba_headdim": 8, "n_mamba_heads": 8, "mamba_ngroups": 1, "chunk_size": 8,
         "num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 32, "num_mem_blocks": 1,
         "use_mem_rope": True, "adapter_rank": 4},
    ),
    "falcon_h1": (
        "FalconH1Config",
        {**COMMON, "mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 8,
         "mamba_chunk_size": 8},
    ),
    "nemotron_h": (
        "NemotronHConfig",
        {**WITHOUT_HEAD_DIM, "layers_block_type": ["mamba", "attention"], "mamba_num_heads": 8, "mamba_head_dim": 8,
         "n_groups": 1, "ssm_state_size": 8, "chunk_size": 8},
    ),
    "recurrent_gemma": (
        "RecurrentGemmaConfig",
        {**SPECIAL, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
         "num_key_value_heads": 1, "lru_width": 32, "attention_window_size": WINDOW},
    ),
    "gpt_oss": ("GptOssConfig", {**COMMON, **EXPERTS, "sliding_window": WINDOW}),
    "gemma3n": (
        "Gemma3nTextConfig",
        {**SHARED_KV, "altup_num_inputs": 2, "laurel_rank": 4, "activation_sparsity_pattern": [0.0] * 4},
    ),
    "gemma4": ("Gemma4TextConfig", SHARED_KV),
    "deepseek_v32": (
        "DeepseekV32Config",
        {**WITHOUT_HEAD_DIM, "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
         "qk_nope_head_dim": 8, "v_head_dim": 12, "n_routed_experts": 4, "n_group": 2, "topk_group": 1,
         "num_experts_per_tok": 2, "moe_intermediate_size": 16, "first_k_dense_replace": 1, "index_n_heads": 2,
         "index_head_dim": 16, "index_topk": 4},
    ),
    "minimax": (
        "MiniMaxConfig",
        {**COMMON, **EXPERTS, "layer_types": ["linear_attention", "full_attention"], "block_size": 8},
    ),
    "bloom": ("BloomConfig", {**SPECIAL, "hidden_size": 32, "n_layer": 2, "n_head": 4}),
    "opt": (
        "OPTConfig",
        {**SPECIAL, "hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
         "word_embed_proj_dim": 32, "max_position_embeddings": 128},
    ),
    "marian": ("MarianConfig", {**SPECIAL, **SEQ2SEQ, "forced_eos_token_id": None}),
    "t5gemma": (
        "T5GemmaConfig",
        {"encoder": {**COMMON, "sliding_window": WINDOW, "query_pre_attn_scalar": 8},
         "decoder": {**COMMON, "sliding_window": WINDOW, "query_pre_attn_scalar": 8, "cross_attention_hidden_size": 32},
         "vocab_size": 97, "eos_token_id": versions.NO_END, "pad_token_id": 0, "bos_token_id": 1},
    ),
    "whisper": (
        "WhisperConfig",
        {**SPECIAL, **SEQ2SEQ, "eos_token_id": 2, "num_mel_bins": 8, "max_source_positions": 16,
         "max_target_positions": 64, "suppress_tokens": None, "begin_suppress_tokens": None},
    ),
}  # fmt: skip


HOLDS_ITS_OWN_CACHE = ("minimax", "whisper")
"""MiniMax makes a class of its own in its forward pass, and whisper splits what generate() returns by sequence."""


def model_and_inputs(family: str) -> tuple[Any, dict[str, torch.Tensor]]:
    """A random model whose states kvlayers holds, and a prompt."""
    versions.need_recurrent_layers(family)
    return any_model_and_inputs(family)


def model_of(family: str) -> Any:
    """A random model of a family of this module or of `models`."""
    return model_and_inputs(family)[0] if family in FAMILIES else tiny_model(family)


def any_model_and_inputs(family: str) -> tuple[Any, dict[str, torch.Tensor]]:
    """A random model, whoever holds its states, and a prompt."""
    model, inputs = _model_and_inputs(family)
    return copy.deepcopy(model), dict(inputs)


@functools.cache
def _model_and_inputs(family: str) -> tuple[Any, dict[str, torch.Tensor]]:
    class_name, options = FAMILIES[family]
    versions.need_model_class(class_name)
    torch.manual_seed(0)
    config = getattr(tf, class_name)(**options)
    if family == "whisper":
        model = tf.WhisperForConditionalGeneration(config)
        return model.eval(), {"input_features": torch.randn(2, 8, 32)}
    auto = tf.AutoModelForSeq2SeqLM if config.is_encoder_decoder else tf.AutoModelForCausalLM
    ids = prompt(2, 12)
    return auto.from_config(config).eval(), {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def generated(model: Any, inputs: dict[str, torch.Tensor], **how: Any) -> Any:
    torch.manual_seed(1)
    return model.generate(**inputs, max_new_tokens=14, return_dict_in_generate=True, **how)
