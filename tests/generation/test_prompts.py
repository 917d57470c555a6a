"""generate() computes and holds a prompt once for all of its beams or samples; `test_generate.py` has the tokens."""

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import kvlayers
import versions
from kvlayers.generation import prefill
from models import fresh_model, prompt, tiny_model, tokens_passed

WAYS: dict[str, dict[str, Any]] = {
    "beams": {"num_beams": 4, "do_sample": False},
    "several beams returned": {"num_beams": 4, "num_return_sequences": 3, "do_sample": False},
    "samples": {"num_return_sequences": 5, "do_sample": True},
    "sampled beams": {"num_beams": 3, "num_return_sequences": 2, "do_sample": True},
}


def generated(model: Any, ids: Tensor, **how: Any) -> Any:
    torch.manual_seed(0)
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    given = {"attention_mask": mask, "max_new_tokens": 20, "pad_token_id": 0, "return_dict_in_generate": True, **how}
    return model.generate(ids, **given)


@versions.prefills_apart
@pytest.mark.parametrize("way", WAYS)
def test_the_model_reads_each_prompt_once_and_the_cache_holds_it_once(way: str) -> None:
    model, ids = tiny_model("llama"), prompt(2, 40)
    with kvlayers.installed(), tokens_passed(model) as passed:
        output = generated(model, ids, **WAYS[way])
    repeats = max(WAYS[way].get("num_beams", 1), WAYS[way].get("num_return_sequences", 1))
    assert passed == [2 * 40, *[2 * repeats] * (len(passed) - 1)]
    assert all(layer.store.pieces(40 + 1)[0].rows is not None for layer in output.past_key_values.layers)
    assert torch.equal(output.sequences, generated(model, ids, **WAYS[way]).sequences)


KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "packed": ("llama", {"cache_implementation": "quantized", "cache_config": {"nbits": 4, "residual_length": 8}}),
    "sinks": ("llama", {"cache_implementation": "sink", "cache_config": {"window_length": 100, "num_sink_tokens": 4}}),
    "windows": ("mistral", {}),
}


@versions.prefills_apart
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", ["beams", "samples"])
def test_other_caches_hold_a_prompt_once_too(kind: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    family, options = KINDS[kind]
    model, ids = fresh_model(family), prompt(2, 120)
    if family == "mistral":
        # Longer than the prompt.
        model.config.sliding_window = 150
    with kvlayers.installed():
        once = generated(model, ids, **options, **WAYS[way])
        monkeypatch.setattr(prefill, "MIN_TOKENS", 1000)
        repeated = generated(model, ids, **options, **WAYS[way])
    assert torch.equal(once.sequences, repeated.sequences)
    # Less than half of the tokens are those of the prompts.
    assert once.past_key_values.nbytes < 0.6 * repeated.past_key_values.nbytes


def test_a_short_prompt_a_given_cache_and_a_static_one_are_left_to_transformers() -> None:
    model = tiny_model("llama")
    with kvlayers.installed(), tokens_passed(model) as passed:
        for ids, how in [
            (prompt(1, 12), {}),
            (prompt(1, 40), {"cache_implementation": "static"}),
            (prompt(1, 40), {"output_hidden_states": True}),
        ]:
            passed.clear()
            generated(model, ids, num_beams=3, do_sample=False, **how)
            assert passed[0] == 3 * ids.shape[1]


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
