"""The cache's argument by each of its names, on each version of transformers, and models that keep an old name."""

import pathlib
import re
import warnings
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import kvlayers
import kvlayers_lab
import versions
from kvlayers.upstream import cache_argument, compat
from models import CONFIGS, prompt, tiny_model

SOURCES = pathlib.Path(kvlayers.__file__).parent
OLD = "past_key_values"
CALLED_CACHE = pytest.mark.skipif(
    cache_argument.usual_name() != "cache", reason="the models of this transformers call the argument otherwise"
)


def test_only_one_file_spells_the_names() -> None:
    """A parameter of kvlayers' own may have such a name, and what reads it."""
    own_parameters = {"dynamic_cache.py", "encoder_decoder_cache.py", "transformers4_names.py"}
    found = {
        path.name
        for path in SOURCES.rglob("*.py")
        if re.search(r"past_key_value|cache_params", path.read_text()) and path.name != "cache_argument.py"
    }
    assert found == own_parameters


def test_the_word_cache_means_a_cache_only_where_transformers_says_so() -> None:
    """xlm and flaubert have called a dict so for years."""
    model = transformers.XLMWithLMHeadModel(transformers.XLMConfig(n_layers=1, n_heads=1, emb_dim=8, vocab_size=20))
    assert cache_argument.name_for(model) == cache_argument.usual_name()
    passed: dict[str, Any] = {"cache": {"slen": 0}}
    assert cache_argument.respelled(model, passed) is passed


@pytest.mark.parametrize("family", ["llama", "mamba", "bart"])
def test_a_model_is_asked_what_it_takes(family: str) -> None:
    model = tiny_model(family)
    expected = {"mamba": "cache_params"}.get(family, OLD) if compat.TRANSFORMERS.release < (5, 24) else "cache"
    assert cache_argument.name_for(model) == expected
    assert cache_argument.is_taken_by(model)
    assert not cache_argument.is_taken_by(torch.nn.Linear(1, 1))


@pytest.mark.parametrize("name", cache_argument.SPELLINGS)
@pytest.mark.parametrize("family", ["llama", "gpt2", "mamba"])
def test_under_install_every_name_is_taken(family: str, name: str) -> None:
    versions.need_recurrent_layers(family)
    model, ids = tiny_model(family), prompt(2, 12)
    with kvlayers.installed(), warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error", FutureWarning)
        cache = kvlayers.DynamicCache(config=model.config)
        output = model(ids[:, :8], **{name: cache})
        assert cache_argument.in_output(output) is cache
        output = model(ids[:, 8:9], **{name: cache})
        torch.testing.assert_close(output.logits[:, -1], model(ids[:, :9]).logits[:, -1], rtol=0, atol=1e-4)
        cache = kvlayers.DynamicCache(config=model.config)
        tokens = model.generate(ids, max_new_tokens=6, do_sample=False, **{name: cache})
        assert torch.equal(tokens, model.generate(ids, max_new_tokens=6, do_sample=False, use_cache=False))
        assert any(layer.is_initialized for layer in cache.layers)


def test_a_forward_pass_that_was_replaced_for_a_while_is_not_remembered() -> None:
    model = tiny_model("llama")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(model), "forward", lambda *arguments: None)
        assert not cache_argument.is_taken_by(model)
    assert cache_argument.is_taken_by(model)


def test_two_names_of_two_caches_are_refused() -> None:
    model, ids = tiny_model("llama"), prompt(1, 5)
    one, other = kvlayers.DynamicCache(), kvlayers.DynamicCache()
    both = {OLD: one, "cache": other}
    with kvlayers.installed():
        for call in (model, model.generate):
            with pytest.raises(kvlayers.OptionError, match="must be the same cache, got a DynamicCache"):
                call(ids, **both)
            assert one.get_seq_length() == other.get_seq_length() == 0
        model(ids, **{OLD: one, "cache": one})
        assert one.get_seq_length() == 5


def test_the_calls_of_kvlayers_itself_use_the_name_of_today() -> None:
    model, ids = tiny_model("llama"), prompt(1, 40)
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        kvlayers_lab.score(model, ids.tolist(), [[[1, 2, 3]]])
        for options in ({}, {"num_return_sequences": 3, "do_sample": True}, {"prompt_lookup_num_tokens": 3}):
            kvlayers.generate(model, ids, cache_implementation="int8", max_new_tokens=4, **options)
        kvlayers.generate(model, ids, prefix_store=kvlayers.PrefixStore(1 << 20), max_new_tokens=4)
        kvlayers.ExportableDecoder(model, 1, 64)


@pytest.mark.parametrize("extra", [{"kwargs": {"mask": None}}, {"cache_kwargs": {}}, {"anything": 1}])
def test_updates_take_what_models_pass_besides(extra: dict[str, Any]) -> None:
    states = torch.randn(1, 2, 5, 8), torch.randn(1, 2, 5, 8)
    makers = (
        kvlayers.DynamicCache,
        lambda: kvlayers.Cache([kvlayers.StaticLayer(8)]),
        lambda: kvlayers.Cache([kvlayers.SlidingLayer(4)]),
        lambda: kvlayers.Cache([kvlayers.QuantizedLayer(kvlayers.Quantization(residual_length=4))]),
        lambda: kvlayers.Cache([kvlayers.RecallLayer()]),
    )
    for make in makers:
        expected = make().update(*states, 0)
        assert all(map(torch.equal, make().update(*states, 0, "more", **extra), expected))
        cache = make()
        if cache.layers:
            assert all(map(torch.equal, cache.layers[0].update(*states, "more", **extra), expected))
        with pytest.raises(TypeError):
            make().update(states[0], layer_idx=0, **extra)


class OldForward(transformers.LlamaForCausalLM):
    """Code of a model repository that knows the old name, and ignores what else it is passed."""

    def forward(  # type: ignore[no-untyped-def]
        self, input_ids=None, attention_mask=None, position_ids=None, past_key_values=None, **unknown: Any
    ):
        passed = {cache_argument.usual_name(): past_key_values}
        return super().forward(input_ids, attention_mask=attention_mask, position_ids=position_ids, **passed)


class OldInputs(OldForward):
    """The same, with a method of its own that prepares the inputs of a forward pass."""

    def prepare_inputs_for_generation(  # type: ignore[no-untyped-def]
        self, input_ids, past_key_values=None, attention_mask=None, **unknown: Any
    ):
        if past_key_values is not None:
            input_ids = input_ids[:, past_key_values.get_seq_length() :]
        return {"input_ids": input_ids, "past_key_values": past_key_values}


def old_model(kind: type[OldForward]) -> Any:
    torch.manual_seed(0)
    return kind(CONFIGS["llama"]()).eval()


def expected_of(model: Any, ids: Tensor, tokens: int) -> Tensor:
    """By hand, as versions of transformers differ in what `generate()` passes to such code without a cache."""
    for _ in range(tokens):
        with torch.no_grad():
            ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], dim=1)
    return ids


@pytest.mark.parametrize("kind", [OldForward, OldInputs])
def test_models_that_keep_the_old_name_decode_with_their_cache_under_install(kind: type[OldForward]) -> None:
    model, ids = old_model(kind), prompt(1, 9)
    expected = expected_of(model, ids, 6)
    how: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}
    original = vars(kind).get("prepare_inputs_for_generation")
    with kvlayers.installed():
        output = model.generate(ids, cache_implementation="dynamic", return_dict_in_generate=True, **how)
        assert torch.equal(output.sequences, expected)
        assert cache_argument.in_output(output).get_seq_length() == expected.shape[1] - 1
        for name in (OLD, "cache"):
            cache = kvlayers.DynamicCache(config=model.config)
            assert torch.equal(model.generate(ids, **how, **{name: cache}), expected)
            assert cache.get_seq_length() == expected.shape[1] - 1
            longer = expected_of(model, expected, 3)
            assert torch.equal(model.generate(expected, max_new_tokens=3, do_sample=False, **{name: cache}), longer)
    assert vars(kind).get("prepare_inputs_for_generation") is original


@CALLED_CACHE
def test_a_cache_that_the_model_never_updates_says_so() -> None:
    model, ids = old_model(OldForward), prompt(1, 9)
    cache = kvlayers.DynamicCache(config=model.config)
    for _ in range(2):
        with pytest.raises(
            kvlayers.errors.UnusedCacheError, match=r"OldForward ignores, .* call kvlayers\.install\(\)"
        ):
            model.generate(ids, max_new_tokens=2, cache=cache)
        assert not torch.nn.modules.module._has_any_global_hook()
    # A pass without the cache is the caller's choice.
    model(ids)
    with kvlayers.installed():
        expected = expected_of(model, ids, 4)
        assert torch.equal(model.generate(ids, max_new_tokens=4, do_sample=False, cache=cache), expected)


def test_a_call_that_failed_leaves_a_cache_that_can_be_passed_again() -> None:
    model, ids = tiny_model("llama"), prompt(1, 9)
    cache = kvlayers.DynamicCache(config=model.config)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            model.generate(ids, max_new_tokens=2, logits_processor=[lambda *_: 1 / 0], **{OLD: cache})
        assert cache.get_seq_length() == 9
        cache.reset()
    assert model.generate(ids, max_new_tokens=2, **{OLD: cache}).shape == (1, 11)


def test_a_call_that_failed_leaves_nothing_for_the_next_one_to_fail_by() -> None:
    """Assisted decoding asks for the length within the model, where hooks on modules come too late for the pass."""
    model = tiny_model("llama")
    options: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "prompt_lookup_num_tokens": 3}
    hooks = len(torch.nn.modules.module._global_forward_hooks)
    caches = [kvlayers.DynamicCache(config=model.config, max_bytes=size) for size in (100, 100, "1GiB", 100, "1GiB")]
    for cache in caches:
        if cache.budget.max_bytes == 100:
            with pytest.raises(kvlayers.errors.CapacityError, match="max_bytes"):
                model.generate(prompt(1, 20), **{OLD: cache}, **options)
        else:
            seen = model.generate(prompt(1, 20), **{OLD: cache}, **options)
            assert torch.equal(seen, model.generate(prompt(1, 20), **options))
        assert len(torch.nn.modules.module._global_forward_hooks) == hooks
