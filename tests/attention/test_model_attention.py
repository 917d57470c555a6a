"""`attn_implementation`: of kvlayers, which reads codes for as long as asked, and of others, which read copies."""

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from transformers.masking_utils import AttentionMaskInterface

import flash_stand_in
import kvlayers
from flash_stand_in import flash_attention as flash_attention
from kvlayers.kernels.attention import dispatch, model_attention
from kvlayers.upstream import compat
from matrix import once, product, some
from models import COMMON, fresh_model, given, prompt

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
    return bool(paths) and all(path.startswith((*CODES, dispatch.SHARED)) for path in paths)


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
        with kvlayers.installed():
            assert tf.AttentionInterface()["kvlayers"] is model_attention.attention
            model.set_attn_implementation("kvlayers")
            assert model.config._attn_implementation == "kvlayers"
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


# Attention that reads states in full precision only: right with every cache, and said once

PACKED = {"nbits": 4, "residual_length": 8}
WINDOW = {"window_length": 90, "num_sink_tokens": 4}

MAKERS: dict[str, Callable[[Any], Any]] = {
    "dynamic": lambda config: kvlayers.DynamicCache(config=config),
    "offloaded": lambda config: kvlayers.DynamicCache(config=config, offloading=True),
    "static": lambda config: kvlayers.StaticCache(config, max_cache_len=160),
    "packed": lambda config: kvlayers.QuantizedCache(config=config, **PACKED),
    "packed, offloaded": lambda config: kvlayers.QuantizedCache(config=config, **PACKED, offloading=True),
    "packed windows": lambda config: kvlayers.QuantizedCache(config=config, **PACKED, quantize_sliding=True),
    "sinks": lambda config: kvlayers.SinkCache(config=config, **WINDOW),
    "packed sinks": lambda config: kvlayers.SinkCache(config=config, **WINDOW, quantization=PACKED),
}


@pytest.fixture(autouse=True)
def _not_warned_yet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(dispatch, "_warned", set())
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The attention 'fl")
        yield


def logits(model: Any, cache: Any, ids: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """A prompt, single tokens, and a second turn."""
    parts = [(0, 110), *((step, step + 1) for step in range(110, 116)), (116, 122), (122, 123)]
    parts = [(start, end) for start, end in parts if end <= ids.shape[1]]
    with torch.no_grad():
        return torch.cat(
            [
                model(
                    ids[:, start:end],
                    **given(cache),
                    **({} if mask is None else {"attention_mask": mask[:, :end]}),
                ).logits
                for start, end in parts
            ],
            1,
        )


@pytest.mark.usefixtures("flash_attention")
@pytest.mark.parametrize(
    ("family", "kind", "padded"),
    once(
        [*(("llama", kind) for kind in MAKERS), *(("mistral", kind) for kind in MAKERS if "sinks" not in kind)],
        [False, True],
    ),
)
def test_flash_attention_attends_to_what_sdpa_does(family: str, kind: str, padded: bool) -> None:
    model = fresh_model(family, **({"sliding_window": 90} if family == "mistral" else {}))
    ids = prompt(2, 123)
    mask = torch.ones_like(ids)
    mask[0, :9] = 0
    caches = [MAKERS[kind](model.config) for _ in range(2)]
    if padded:
        for cache in caches:
            cache.prepare(model.config, mask[:, :110])
    expected = logits(model, caches[0], ids, mask if padded else None)
    flash_stand_in.use(model)
    seen = logits(model, caches[1], ids, mask if padded else None)
    shown = mask.bool() if padded else torch.ones_like(mask).bool()
    torch.testing.assert_close(seen[shown], expected[shown], rtol=1e-4, atol=1e-4)
    assert set(flash_stand_in.CALLS) == {torch.Tensor}


@pytest.mark.usefixtures("flash_attention")
@pytest.mark.parametrize("name", ["flash_attention_2", "flash_attention_3", "kernels-community/flash-attn3"])
def test_copies_at_every_step_are_warned_about_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = fresh_model("llama")
    flash_stand_in.use(model, name)
    mapping = tf.AttentionInterface._global_mapping
    monkeypatch.setitem(mapping, name, mapping.get(name, mapping["flash_attention_2"]))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            logits(model, MAKERS["packed"](model.config), prompt(1, 123), None)
        logits(model, MAKERS["dynamic"](model.config), prompt(1, 123), None)
    (warning,) = [each for each in caught if "full precision" in str(each.message)]
    assert str(warning.message).startswith(f"The attention {name!r} reads states in full precision only.")
    assert "set_attn_implementation('sdpa')" in str(warning.message)
    assert warning.filename == __file__


@pytest.mark.parametrize("name", ["sdpa", "eager"])
def test_nothing_is_said_of_attention_that_reads_states_as_they_are_held(name: str) -> None:
    model = fresh_model("llama")
    model.set_attn_implementation(name)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cache = MAKERS["packed"](model.config)
        logits(model, cache, prompt(1, 123), None)
        # Outside of a model nobody can be told what to set.
        assert cache.layers[0].keys.sum().isfinite()


@pytest.mark.slow
@pytest.mark.usefixtures("counted")
@pytest.mark.skipif(
    not compat.COMPILES_TENSOR_SUBCLASSES, reason="TorchDynamo is known to trace packed states from torch 2.13"
)
def test_flex_attention_attends_to_what_sdpa_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers calls a compiled function; here its graph runs as it is, since only the arguments matter."""
    from transformers import masking_utils
    from transformers.integrations import flex_attention as flex

    make_mask = masking_utils.create_block_mask
    monkeypatch.setattr(
        masking_utils, "create_block_mask", lambda **options: make_mask(**{**options, "_compile": False})
    )
    compiled = torch.compile(flex.flex_attention, backend="eager")
    monkeypatch.setattr(flex.WrappedFlexAttention, "__init__", lambda self, training: None)
    monkeypatch.setattr(flex.WrappedFlexAttention, "_compiled_flex_attention", staticmethod(compiled))
    model = fresh_model("llama", head_dim=16, num_hidden_layers=1)
    ids = prompt(1, 115)
    expected = logits(model, MAKERS["packed"](model.config), ids, None)
    flash_stand_in.use(model, "flex_attention")
    cache = MAKERS["packed"](model.config)
    torch.testing.assert_close(logits(model, cache, ids, None), expected, rtol=1e-4, atol=1e-4)
    assert any("compiled code in full precision" in path for path in cache.explain().attention)
    assert "flex_attention" in dispatch._warned


def test_packed_states_have_no_address() -> None:
    """It would be that of a copy, whose memory is free again before a kernel reads it."""
    cache = kvlayers.QuantizedCache(**PACKED)
    keys, _ = cache.update(torch.randn(1, 2, 100, 8), torch.randn(1, 2, 100, 8), 0)
    keys, _ = cache.update(torch.randn(1, 2, 1, 8), torch.randn(1, 2, 1, 8), 0)
    with pytest.raises(kvlayers.errors.UnsupportedLayerError, match=r"have no address: pass a clone\(\)"):
        keys.data_ptr()
    assert not hasattr(keys, "__cuda_array_interface__")
    assert keys.clone().data_ptr()
