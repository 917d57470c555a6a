"""A model that speaks: its loop in generate() asks for the hidden states of a prompt by itself."""

from typing import Any

import torch
import transformers

import kvlayers
import versions
from models import prompt


def speaking_model() -> Any:
    """A random model that speaks (CSM): its loop asks for the hidden states of a prompt, for a decoder of codes."""
    versions.need_since("5.4", "CSM with the caches of generate()")
    attends = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_hidden_layers": 2}
    codes = {"num_codebooks": 4, "vocab_size": 32, "num_key_value_heads": 2}
    mimi = {"num_filters": 4, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    mimi |= {
        "upsample_groups": 16,
        "intermediate_size": 16,
        "codebook_size": 32,
        "model_type": "mimi",
        "vector_quantization_hidden_dimension": 8,
    }
    config = transformers.CsmConfig(
        **attends, **codes, text_vocab_size=97, pad_token_id=0, codebook_pad_token_id=31, audio_token_id=90,
        audio_eos_token_id=91, depth_decoder_config={**attends, **codes, "backbone_hidden_size": 32},
        codec_config={**mimi, "upsampling_ratios": [2, 2], "num_quantizers": 4, "num_semantic_quantizers": 1},
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.CsmForConditionalGeneration(config).eval()
    model.depth_decoder.generation_config.update(min_new_tokens=3, max_new_tokens=3)
    return model


def test_a_loop_that_asks_for_hidden_states_reads_a_prompt_for_each_of_its_samples() -> None:
    model, ids = speaking_model(), prompt(2, 40)
    for prompts, how in (
        (ids, {"num_return_sequences": 2, "do_sample": True}),
        (ids[[0, 0, 1, 1]], {"do_sample": False}),
    ):
        given = {"attention_mask": torch.ones_like(prompts), "max_new_tokens": 3, **how}
        torch.manual_seed(0)
        expected = model.generate(input_ids=prompts, **given)
        torch.manual_seed(0)
        with kvlayers.installed():
            assert torch.equal(model.generate(input_ids=prompts, **given), expected)
