"""Nested tuples into and out of forward passes, as models of transformers 4 took and returned them."""

import copy
import inspect
import pickle
import warnings
from typing import Any

import pytest
import torch
import transformers

import kvlayers
from kvlayers.generation.legacy_tuples import PastTuples
from kvlayers.upstream import cache_argument
from models import ENCODER_DECODERS, fresh_model, prompt, tiny_model

DECODERS = ("llama", "gpt2", "mistral", "gemma3", "llama4", "deepseek_v3")

pytestmark = pytest.mark.filterwarnings("ignore:past_key_values as tuples:DeprecationWarning")


def tuples(family: str, ids: torch.Tensor, **inputs: Any) -> tuple[tuple[torch.Tensor, ...], ...]:
    """What a forward pass over `ids` leaves, in plain tuples."""
    own = "decoder_input_ids" if family in ENCODER_DECODERS else "input_ids"
    with torch.no_grad():
        past = tiny_model(family)(**{own: ids}, **inputs, past_key_values=()).past_key_values
    return tuple(tuple(states.clone() for states in layer) for layer in past)


@pytest.mark.parametrize("family", DECODERS)
def test_an_old_loop_says_what_one_pass_says(family: str, installed: None) -> None:
    model, ids = tiny_model(family), prompt(2, 24)
    with torch.no_grad():
        expected = model(ids).logits
        past = tuples(family, ids[:, :12])
        for token in range(12, 24):
            # Where old loops read the length of the past.
            assert past[0][0].shape[2] == token
            output = model(ids[:, token : token + 1], past_key_values=past)
            past = output.past_key_values
            torch.testing.assert_close(output.logits[:, 0], expected[:, token])
    assert isinstance(past, tuple)
    assert {type(layer) for layer in past} == {tuple}


@pytest.mark.parametrize("family", ENCODER_DECODERS)
def test_an_old_loop_with_cross_attention_says_what_one_pass_says(family: str, installed: None) -> None:
    model, ids, decoded = tiny_model(family), prompt(2, 9, seed=1), prompt(2, 8)
    with torch.no_grad():
        expected = model(ids, decoder_input_ids=decoded).logits
        past = tuples(family, decoded[:, :4], input_ids=ids)
        assert [[states.shape[2] for states in layer] for layer in past] == [[4, 4, 9, 9]] * 2
        for token in range(4, 8):
            output = model(ids, decoder_input_ids=decoded[:, token : token + 1], past_key_values=past)
            past = output.past_key_values
            torch.testing.assert_close(output.logits[:, 0], expected[:, token], rtol=1e-4, atol=1e-4)
    assert [[states.shape[2] for states in layer] for layer in past] == [[8, 8, 9, 9]] * 2


@pytest.mark.parametrize("form", [tuple, list])
def test_tuples_come_out_wherever_the_argument_stands(form: type, installed: None) -> None:
    model, ids = tiny_model("llama"), prompt(1)
    past = form(form(layer) for layer in tuples("llama", ids[:, :8]))
    names = list(inspect.signature(model.forward).parameters)
    before = {"attention_mask": None, "position_ids": None}
    name = cache_argument.name_for(model)
    assert names[: names.index(name)] == ["input_ids", *before]
    with torch.no_grad():
        by_name = model(ids[:, 8:], past_key_values=past)
        by_position = model(ids[:, 8:], *before.values(), past)
        plain = model(ids[:, 8:], past_key_values=past, return_dict=False)
    for output in (by_position, plain):
        assert torch.equal(output[0], by_name.logits)
        assert torch.equal(output[1][1][0], by_name.past_key_values[1][0])
    assert isinstance(plain[1], tuple)
    assert list(by_name.keys()) == ["logits", name]
    assert by_name["past_key_values"] is by_name.past_key_values is by_name[1]


def test_the_given_tuples_stay_as_they_are(installed: None) -> None:
    model, ids = tiny_model("llama"), prompt(1, 40)
    # With room behind them, as views of a larger tensor have.
    roomy = [[torch.randn(1, 2, 64, 8) for _ in range(2)] for _ in range(2)]
    before = copy.deepcopy(roomy)
    given = tuple(tuple(states[:, :, :5] for states in layer) for layer in roomy)
    with torch.no_grad():
        first = model(ids[:, :4], past_key_values=given)
        kept = [[states.clone() for states in layer] for layer in first.past_key_values]
        # Enough tokens to grow more than once.
        past = first.past_key_values
        for token in range(4, 40):
            past = model(ids[:, token : token + 1], past_key_values=past).past_key_values
    for layer, states in zip(roomy, before, strict=True):
        assert all(map(torch.equal, layer, states))
    for layer, states in zip(first.past_key_values, kept, strict=True):
        assert all(map(torch.equal, layer, states))


def test_the_same_tuples_go_on_twice(installed: None) -> None:
    """Beams and contrastive search try several tokens behind one past."""
    model, ids = tiny_model("llama"), prompt(1, 8)
    tries = prompt(1, 3, seed=5)
    with torch.no_grad():
        past = model(ids, past_key_values=()).past_key_values
        for token in tries[0]:
            seen = model(token.view(1, 1), past_key_values=past)
            expected = model(torch.cat([ids, token.view(1, 1)], dim=1)).logits[:, -1]
            torch.testing.assert_close(seen.logits[:, -1], expected)
            assert [layer[0].shape[2] for layer in past] == [8, 8]
            again = model(tries[:, :1], past_key_values=seen.past_key_values).logits[:, -1]
            longer = torch.cat([ids, token.view(1, 1), tries[:, :1]], dim=1)
            torch.testing.assert_close(again, model(longer).logits[:, -1])


def test_reordered_tuples_are_taken_as_they_are(installed: None) -> None:
    model, ids = tiny_model("llama"), prompt(2, 8)
    with torch.no_grad():
        past = model(ids, past_key_values=()).past_key_values
        swapped = tuple(tuple(states.flip(0) for states in layer) for layer in past)
        token = prompt(2, 1, seed=3)
        seen = model(token, past_key_values=swapped).logits[:, -1]
        torch.testing.assert_close(seen, model(torch.cat([ids.flip(0), token], dim=1)).logits[:, -1])


def test_no_step_copies_what_is_held(installed: None) -> None:
    model, ids = tiny_model("llama"), prompt(1, 8)
    with torch.no_grad():
        past = model(ids, past_key_values=()).past_key_values
        after = model(ids[:, :1], past_key_values=past).past_key_values
    assert [layer[0].data_ptr() for layer in after] == [layer[0].data_ptr() for layer in past]


def test_a_past_of_another_model_is_copied(installed: None) -> None:
    model, other, ids = tiny_model("llama"), fresh_model("llama", seed=1), prompt(1, 8)
    with torch.no_grad():
        past = model(ids, past_key_values=()).past_key_values
        after = other(ids[:, :1], past_key_values=past).past_key_values
    assert [layer[0].shape[2] for layer in (*past, *after)] == [8, 8, 9, 9]
    assert past[0][0].data_ptr() != after[0][0].data_ptr()


def test_returned_tuples_are_tuples_to_copies_and_files(installed: None) -> None:
    with torch.no_grad():
        past = tiny_model("llama")(prompt(1), past_key_values=()).past_key_values
    assert type(past) is PastTuples
    for twin in (copy.deepcopy(past), pickle.loads(pickle.dumps(past)), copy.copy(past)):
        assert type(twin) is tuple
        assert torch.equal(twin[1][1], past[1][1])
    assert type(past)(list(past)) == past


def test_gradients_flow_into_tuples(installed: None) -> None:
    """A learnt prefix: what was computed in one pass with it, and what is learnt by, agree with the cache's own way."""
    model, ids = fresh_model("llama"), prompt(2, 6)
    prefix = torch.nn.Parameter(torch.randn(4, 2, 2, 5, 8))
    mask = torch.ones(2, 11, dtype=torch.long)

    def loss(past: Any) -> torch.Tensor:
        return model(ids, attention_mask=mask, past_key_values=past, labels=ids).loss

    layers = tuple((prefix[2 * index], prefix[2 * index + 1]) for index in range(2))
    (seen,) = torch.autograd.grad(loss(layers), prefix)
    theirs = transformers.DynamicCache()
    for index, (keys, values) in enumerate(layers):
        theirs.update(keys, values, index)
    (expected,) = torch.autograd.grad(loss(theirs), prefix)
    torch.testing.assert_close(seen, expected)
    assert seen.abs().sum() > 0


def test_what_is_no_past_passes_through(installed: None) -> None:
    class Odd(transformers.LlamaPreTrainedModel):
        def forward(self, pair: tuple[int, int], past_key_values: object = None) -> tuple[object, object]:
            return pair, past_key_values

    model = Odd(tiny_model("llama").config)
    cache = kvlayers.DynamicCache()
    assert model((1, 2)) == ((1, 2), None)
    assert model((1, 2), cache)[1] is cache
    assert model((1, 2), past_key_values=cache)[1] is cache


def test_a_repository_that_reads_tuples_itself_is_given_them(installed: None) -> None:
    class Old(transformers.LlamaPreTrainedModel):
        def forward(self, past_key_values: object = None) -> object:
            return past_key_values

    Old.forward.__module__ = "transformers_modules.old.modeling_old"
    # Neither keys nor values, and of a depth of its own.
    past = (torch.randn(2, 1, 3),)
    assert Old(tiny_model("llama").config)(past_key_values=past) is past
    Old._supports_cache_class = True
    with pytest.raises(kvlayers.errors.LegacyFormatError, match="got a tensor .2, 1, 3. at layer 0"):
        Old(tiny_model("llama").config)(past_key_values=past)


def test_compiled_models_with_hooks_take_tuples_and_other_calls_as_before(installed: None) -> None:
    model, ids = fresh_model("llama", num_hidden_layers=1), prompt(1)
    outputs = []
    model.register_forward_hook(lambda module, args, output: outputs.append(type(output)))
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
        assert torch.equal(compiled(ids, use_cache=False).logits, expected)
        past = tuple(map(tuple, model(ids[:, :8], past_key_values=()).past_key_values))
        with warnings.catch_warnings():
            warnings.simplefilter("error", DeprecationWarning)
            seen = compiled(ids[:, 8:], past_key_values=past)
    assert outputs
    assert isinstance(seen.past_key_values, tuple)
    torch.testing.assert_close(seen.logits, expected[:, 8:])


def layers(*shapes: tuple[int, ...]) -> tuple[tuple[torch.Tensor, ...], ...]:
    """Two layers with tensors of the same shapes."""
    return (tuple(torch.randn(shape) for shape in shapes),) * 2


RIGHT = (1, 2, 3, 8)


@pytest.mark.parametrize(
    ("past", "message"),
    [
        ((torch.randn(RIGHT),) * 2, r"got a tensor \[1, 2, 3, 8\] at layer 0"),
        (layers(RIGHT), "got 1 entries at layer 0"),
        (layers(*[RIGHT] * 4), "got 4 entries at layer 0"),
        (layers((2, 3, 8), (2, 3, 8)), r"got \[2, 3, 8\]"),
        (layers(RIGHT, (2, 2, 3, 8)), r"got \[1, 2, 3, 8\] and \[2, 2, 3, 8\] at layer 0"),
        (layers(RIGHT, (1, 1, 3, 8)), r"and \[1, 1, 3, 8\] at layer 0"),
        (layers(RIGHT, (1, 2, 4, 8)), r"and \[1, 2, 4, 8\] at layer 0"),
        (
            layers(RIGHT, RIGHT)[:1] + layers((1, 2, 4, 8), (1, 2, 4, 8))[:1],
            r"at layer 0 and \[1, 2, 4, 8\] at layer 1",
        ),
        (layers(RIGHT, RIGHT)[:1] + layers((2, 2, 3, 8), (2, 2, 3, 8))[:1], r"and \[2, 2, 3, 8\] at layer 1"),
        (layers(RIGHT, RIGHT)[:1], "the 2 layers .* (?:got|saw) 1"),
        (layers(RIGHT, RIGHT) * 2, "the 2 layers .* (?:got|saw) 4"),
        (layers((1, 4, 3, 8), (1, 4, 3, 8)), "LlamaForCausalLM.*(kv_heads|heads)"),
        (layers((1, 2, 3, 4), (1, 2, 3, 4)), "LlamaForCausalLM.*head_dim"),
        (layers((3, 2, 3, 8), (3, 2, 3, 8)), "LlamaForCausalLM.*batch"),
    ],
    ids=[
        "flat",
        "no values",
        "with cross-attention",
        "three dimensions",
        "batch of values",
        "kv_heads of values",
        "tokens of values",
        "tokens of layer 1",
        "batch of layer 1",
        "a layer too few",
        "layers too many",
        "kv_heads of another model",
        "head_dim of another model",
        "another batch",
    ],
)
def test_a_forward_pass_refuses_tuples_that_do_not_fit(past: Any, message: str, installed: None) -> None:
    before = copy.deepcopy(past)
    with torch.no_grad(), pytest.raises(kvlayers.errors.LegacyFormatError, match=f"must .*{message}"):
        tiny_model("llama")(prompt(1, 2), past_key_values=past)
    flat, kept = (torch.utils._pytree.tree_leaves(states) for states in (past, before))
    assert all(map(torch.equal, flat, kept))


@pytest.mark.parametrize("family", ENCODER_DECODERS)
def test_an_encoder_decoder_refuses_tuples_that_do_not_fit(family: str, installed: None) -> None:
    model, ids = tiny_model(family), prompt(1)
    own, cross = (1, 4, 3, 8), (1, 4, 12, 8)

    def refused(past: Any, message: str) -> None:
        with torch.no_grad(), pytest.raises(kvlayers.errors.LegacyFormatError, match=message):
            model(ids, decoder_input_ids=ids[:, :1], past_key_values=past)

    refused(layers(own, own, cross, cross)[:1], "the 2 layers .* (?:got|saw) 1")
    refused(layers(own, own, cross, own), r"got \[1, 4, 12, 8\] and \[1, 4, 3, 8\] at layer 0")
    refused(layers(own, own)[:1] + layers(own, own, cross, cross)[:1], "got 2 there and 4 at layer 1")
    refused(layers(own, own, (2, 4, 12, 8), (2, 4, 12, 8)), "one batch size")


def test_generate_refuses_as_forward_does(installed: None) -> None:
    for past, message in (
        (layers(RIGHT, (1, 2, 4, 8)), r"and \[1, 2, 4, 8\] at layer 0"),
        (layers(RIGHT, RIGHT)[:1], "the 2 layers .* (?:got|saw) 1"),
    ):
        with pytest.raises(kvlayers.errors.LegacyFormatError, match=message):
            tiny_model("llama").generate(prompt(1), past_key_values=past, max_new_tokens=2)


def test_tuples_warn_at_the_line_that_passes_them(installed: None) -> None:
    model, ids = tiny_model("llama"), prompt(1)
    past = tuple(tuple(states) for states in kvlayers.DynamicCache.from_legacy_cache(layers(RIGHT, RIGHT)))
    with torch.no_grad(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model(ids, past_key_values=past)
        model.generate(ids, past_key_values=past, max_new_tokens=1, attention_mask=torch.ones_like(ids))
    ours = [warning for warning in caught if "pass kvlayers.DynamicCache" in str(warning.message)]
    assert [warning.filename for warning in ours] == [__file__] * 2
