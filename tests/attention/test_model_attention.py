"""`attn_implementation="kvlayers"`: the tokens of transformers' attention, read from codes, for as long as asked."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from transformers.masking_utils import AttentionMaskInterface

import kvlayers
from kvlayers.kernels.attention import model_attention
from kvlayers.kernels.attention.dispatch import SHARED
from kvlayers.upstream import compat
from matrix import product, some
from models import COMMON, fresh_model, prompt

QUANTIZATION = {"residual_length": 8}
CODES = ("a compiled kernel on segments", "plain torch, block by block")

CACHES: dict[str, dict[str, Any]] = {
    "dynamic": {},
    "static": {},
    "sliding_window": {},
    "offloaded": {},
    "int4": QUANTIZATION,
    "int2": QUANTIZATION,
    "fp8": QUANTIZATION,
    "offloaded_quantized": QUANTIZATION,
}


def generated(model: Any, name: str, **options: Any) -> Any:
    ids = prompt(2, 100)
    mask = torch.ones_like(ids)
    mask[0, :7] = 0
    arguments = {"max_new_tokens": 12, "do_sample": False, "return_dict_in_generate": True, **options}
    return model.generate(
        ids, attention_mask=mask, cache_implementation=name, cache_config=CACHES.get(name) or None, **arguments
    )


def reads_codes(cache: Any) -> bool:
    """Whether attention read packed states, and no state in full precision."""
    paths = cache.explain().attention
    return bool(paths) and all(path.startswith((*CODES, SHARED)) for path in paths)


@pytest.mark.parametrize(
    ("family", "name", "beams"),
    [
        *product(["llama"], CACHES, [1]),
        *product(["mistral"], some(CACHES, ["dynamic", "int4"]), [1]),
        # They share the prompt.
        ("llama", "dynamic", 3),
    ],
)
def test_every_cache_gives_the_tokens_of_sdpa(family: str, name: str, beams: int, installed: None) -> None:
    model = fresh_model(family)
    expected = generated(model, name, num_beams=beams)
    model.set_attn_implementation("kvlayers")
    seen = generated(model, name, num_beams=beams)
    assert torch.equal(seen.sequences, expected.sequences)
    assert seen.past_key_values.explain().attention == expected.past_key_values.explain().attention
    if family == "llama" and (CACHES[name] or beams > 1):
        # Before 5.0, `generate()` has no prefill of its own, in which beams could share the prompt.
        assert reads_codes(seen.past_key_values) is (beams == 1 or compat.PREFILLS_APART)


def gpt_oss() -> Any:
    config = tf.GptOssConfig(
        **COMMON,
        sliding_window=48,
        layer_types=["full_attention", "sliding_attention"],
        num_local_experts=2,
        num_experts_per_tok=1,
        attn_implementation="eager",
    )
    model = tf.GptOssForCausalLM(config).eval()
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.self_attn.sinks)
    return model


def gemma2() -> Any:
    model = fresh_model("gemma2", attn_logit_softcapping=2.0, sliding_window=48)
    model.set_attn_implementation("eager")
    return model


@pytest.mark.parametrize("make_model", [gemma2, gpt_oss])
@pytest.mark.parametrize("name", ["dynamic", "int4"])
def test_soft_caps_and_learned_sinks_are_those_of_eager_attention(make_model: Any, name: str, installed: None) -> None:
    model = make_model()
    expected = generated(model, name, output_logits=True)
    model.set_attn_implementation("kvlayers")
    seen = generated(model, name, output_logits=True)
    assert torch.equal(seen.sequences, expected.sequences)
    # Sums in another order.
    torch.testing.assert_close(torch.stack(seen.logits), torch.stack(expected.logits), rtol=1e-4, atol=1e-4)
    if name == "int4":
        assert reads_codes(seen.past_key_values)


def test_queries_without_a_mask_are_those_of_the_newest_tokens() -> None:
    """Models that share states between layers drop the other queries after the masks are made."""
    layer, generator = torch.nn.Identity(), torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, 2, 9, 8, generator=generator) for _ in range(3))
    whole, _ = model_attention.attention(layer, query, key, value, None)
    for options in ({}, {"softcap": 1e6}):
        part, _ = model_attention.attention(layer, query[:, :, -3:], key, value, None, **options)
        torch.testing.assert_close(part, whole[:, -3:], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", model_attention.REFUSED)
def test_arguments_that_would_be_ignored_are_refused(name: str) -> None:
    states = torch.zeros(1, 2, 3, 8)
    with pytest.raises(kvlayers.errors.ConfigError, match=f"Identity passes `{name}` to its attention"):
        model_attention.attention(torch.nn.Identity(), states, states, states, None, **{name: states})
    with pytest.raises(kvlayers.errors.ConfigError, match="passes `position_bias` beside `softcap`"):
        model_attention.attention(torch.nn.Identity(), states, states, states, None, softcap=1.0, position_bias=states)


def test_it_is_there_while_kvlayers_is_installed() -> None:
    model = fresh_model("llama")
    for _ in range(2):
        with pytest.raises(ValueError, match='attn_implementation="kvlayers"'):
            model.set_attn_implementation("kvlayers")
        assert "kvlayers" not in (*tf.AttentionInterface(), *AttentionMaskInterface())
        kvlayers.install()
        try:
            assert tf.AttentionInterface()["kvlayers"] is model_attention.attention
            model.set_attn_implementation("kvlayers")
            assert model.config._attn_implementation == "kvlayers"
        finally:
            kvlayers.uninstall()
        with pytest.raises(KeyError, match="kvlayers"):
            model(prompt())
        model.set_attn_implementation("sdpa")


def test_another_function_of_that_name_stays() -> None:
    def other() -> None:
        """Another library's."""

    kvlayers.install()
    tf.AttentionInterface.register("kvlayers", other)
    kvlayers.uninstall()
    try:
        assert tf.AttentionInterface()["kvlayers"] is other
    finally:
        del tf.AttentionInterface._global_mapping["kvlayers"]


def test_a_saved_model_can_be_loaded_without_kvlayers(tmp_path: Path) -> None:
    model = fresh_model("llama")
    with kvlayers.installed():
        model.set_attn_implementation("kvlayers")
        model.save_pretrained(tmp_path)
        again = tf.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="kvlayers").eval()
        assert again.config._attn_implementation == "kvlayers"
        expected = again(prompt()).logits
    assert "kvlayers" not in (tmp_path / "config.json").read_text()
    loaded = tf.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    torch.testing.assert_close(loaded(prompt()).logits, expected)


def test_a_prompt_before_free_slots_gets_a_mask() -> None:
    """transformers' static cache returns all of its slots, so the prompt is not that of the newest tokens."""
    queries: dict[str, Any] = {"q_length": 4}
    if compat.MASKS_BY_CACHE_POSITION:
        queries = {"cache_position": torch.arange(4)}
    mask = model_attention.attention_mask(batch_size=1, kv_length=8, **queries)
    assert torch.equal(mask[0, 0], torch.ones(4, 8, dtype=torch.bool).tril())
    assert model_attention.attention_mask(batch_size=1, kv_length=4, **queries) is None
