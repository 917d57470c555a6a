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
from kvlayers.errors import LegacyFormatError
from kvlayers.generation.legacy_tuples import PastTuples
from kvlayers.upstream import cache_argument
from models import ENCODER_DECODERS, fresh_model, prompt, tiny_model

DECODERS = ("llama", "gpt2", "mistral", "gemma3", "llama4", "deepseek_v3")

pytestmark = pytest.mark.filterwarnings("ignore:past_key_values as tuples:DeprecationWarning")


@torch.no_grad()
def read(model: Any, ids: torch.Tensor, past: Any = (), **inputs: Any) -> tuple[Any, torch.Tensor]:
    """The past behind these tokens, in the form in which a forward pass leaves it, and their logits."""
    own = "decoder_input_ids" if model.config.is_encoder_decoder else "input_ids"
    output = model(**{own: ids}, **inputs, past_key_values=past)
    return output.past_key_values, output.logits


def plain(past: Any) -> tuple[tuple[torch.Tensor, ...], ...]:
    """The same states in plain tuples."""
    return tuple(tuple(states.clone() for states in layer) for layer in past)


@pytest.mark.parametrize("family", [*DECODERS, *ENCODER_DECODERS])
def test_an_old_loop_says_what_one_pass_says(family: str, installed: None) -> None:
    model, ids = tiny_model(family), prompt(2, 24)
    inputs = {"input_ids": prompt(2, 9, seed=1)} if family in ENCODER_DECODERS else {}
    _, expected = read(model, ids, **inputs)
    past, _ = read(model, ids[:, :12], **inputs)
    past = plain(past)
    for token in range(12, 24):
        # Where old loops read the length of the past.
        assert past[0][0].shape[2] == token
        past, logits = read(model, ids[:, token : token + 1], past, **inputs)
        torch.testing.assert_close(logits[:, 0], expected[:, token], rtol=1e-4, atol=1e-4)
    assert {type(layer) for layer in past} == {tuple}
    if inputs:
        assert [[states.shape[2] for states in layer] for layer in past] == [[24, 24, 9, 9]] * 2


@pytest.mark.parametrize("form", [tuple, list])
def test_tuples_come_out_wherever_the_argument_stands(form: type, installed: None) -> None:
    model, ids = tiny_model("llama"), prompt(1)
    past = form(form(layer) for layer in plain(read(model, ids[:, :8])[0]))
    before, name = {"attention_mask": None, "position_ids": None}, cache_argument.name_for(model)
    names = list(inspect.signature(model.forward).parameters)
    assert names[: names.index(name)] == ["input_ids", *before]
    with torch.no_grad():
        by_name = model(ids[:, 8:], past_key_values=past)
        by_position = model(ids[:, 8:], *before.values(), past)
        unnamed = model(ids[:, 8:], past_key_values=past, return_dict=False)
    for output in (by_position, unnamed):
        assert torch.equal(output[0], by_name.logits)
        assert torch.equal(output[1][1][0], by_name.past_key_values[1][0])
    assert isinstance(unnamed[1], tuple)
    assert list(by_name.keys()) == ["logits", name]
    assert by_name["past_key_values"] is by_name.past_key_values is by_name[1]


def test_the_given_tuples_stay_as_they_are(installed: None) -> None:
    model, ids = tiny_model("llama"), prompt(1, 40)
    # With room behind them, as views of a larger tensor have.
    roomy = [[torch.randn(1, 2, 64, 8) for _ in range(2)] for _ in range(2)]
    before = copy.deepcopy(roomy)
    first, _ = read(model, ids[:, :4], tuple(tuple(states[:, :, :5] for states in layer) for layer in roomy))
    kept = plain(first)
    # Enough tokens to grow more than once.
    past = first
    for token in ids[:, 4:].split(1, dim=1):
        past, _ = read(model, token, past)
    for layer, states in zip((*roomy, *first), (*before, *kept), strict=True):
        assert all(map(torch.equal, layer, states))


def test_the_same_tuples_go_on_twice_and_reordered(installed: None) -> None:
    """Beams and contrastive search try several tokens behind one past."""
    model, ids = tiny_model("llama"), prompt(2, 8)
    past, _ = read(model, ids)

    def check(past: Any, before: torch.Tensor, token: torch.Tensor) -> tuple[Any, torch.Tensor]:
        after, logits = read(model, token, past)
        whole = torch.cat([before, token], dim=1)
        torch.testing.assert_close(logits[:, -1], model(whole).logits[:, -1])
        return after, whole

    for token in prompt(2, 3, seed=5).split(1, dim=1):
        after, whole = check(past, ids, token)
        assert [layer[0].shape[2] for layer in past] == [8, 8]
        check(after, whole, token)
    check(tuple(tuple(states.flip(0) for states in layer) for layer in past), ids.flip(0), token)


@pytest.mark.parametrize("seed", [0, 1], ids=["its own", "of another model"])
def test_a_step_copies_a_past_of_another_model_alone(seed: int, installed: None) -> None:
    model, ids = tiny_model("llama"), prompt(1, 8)
    past, _ = read(model, ids)
    after, _ = read(tiny_model("llama", seed), ids[:, :1], past)
    assert [layer[0].shape[2] for layer in (*past, *after)] == [8, 8, 9, 9]
    for layer, longer in zip(past, after, strict=True):
        assert (layer[0].data_ptr() == longer[0].data_ptr()) is (seed == 0)


def test_returned_tuples_are_tuples_to_copies_and_files(installed: None) -> None:
    past, _ = read(tiny_model("llama"), prompt(1))
    assert type(past) is PastTuples
    for twin in (copy.deepcopy(past), pickle.loads(pickle.dumps(past)), copy.copy(past)):
        assert type(twin) is tuple
        assert torch.equal(twin[1][1], past[1][1])
    assert type(past)(list(past)) == past


def test_gradients_flow_into_tuples(installed: None) -> None:
    """A learnt prefix: what was computed in one pass with it, and what is learnt by, agree with the cache's own way."""
    model, ids = fresh_model("llama"), prompt(2, 6)
    prefix, theirs = torch.nn.Parameter(torch.randn(4, 2, 2, 5, 8)), transformers.DynamicCache()
    layers = tuple(zip(prefix[::2], prefix[1::2], strict=True))
    for index, (keys, values) in enumerate(layers):
        theirs.update(keys, values, index)
    seen, expected = (
        torch.autograd.grad(
            model(ids, attention_mask=torch.ones(2, 11).long(), past_key_values=past, labels=ids).loss,
            prefix,
            retain_graph=True,
        )[0]
        for past in (layers, theirs)
    )
    torch.testing.assert_close(seen, expected)
    assert seen.abs().sum() > 0


def test_what_is_no_past_passes_through(installed: None) -> None:
    class Odd(transformers.LlamaPreTrainedModel):
        def forward(self, pair: tuple[int, int], past_key_values: object = None) -> tuple[object, object]:
            return pair, past_key_values

    model, cache = Odd(tiny_model("llama").config), kvlayers.DynamicCache()
    assert model((1, 2)) == ((1, 2), None)
    for output in (model((1, 2), cache), model((1, 2), past_key_values=cache)):
        assert output[1] is cache


def test_a_repository_that_reads_tuples_itself_is_given_them(installed: None) -> None:
    class Old(transformers.LlamaPreTrainedModel):
        def forward(self, past_key_values: object = None) -> object:
            return past_key_values

    Old.forward.__module__ = "transformers_modules.old.modeling_old"
    # Neither keys nor values, and of a depth of its own.
    past = (torch.randn(2, 1, 3),)
    assert Old(tiny_model("llama").config)(past_key_values=past) is past
    Old._supports_cache_class = True
    with pytest.raises(LegacyFormatError, match="got a tensor .2, 1, 3. at layer 0"):
        Old(tiny_model("llama").config)(past_key_values=past)


def test_compiled_models_with_hooks_take_tuples_and_other_calls_as_before(installed: None) -> None:
    model, ids = fresh_model("llama", num_hidden_layers=1), prompt(1)
    outputs = []
    model.register_forward_hook(lambda module, args, output: outputs.append(type(output)))
    compiled = torch.compile(model, backend="eager")
    past = tuple(map(tuple, read(model, ids[:, :8])[0]))
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
        assert torch.equal(compiled(ids, use_cache=False).logits, expected)
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
OWN, CROSS = (1, 4, 3, 8), (1, 4, 12, 8)
TOO_FEW = "the 2 layers .* (?:got|saw) 1"

WRONG: dict[str, tuple[Any, str]] = {
    "flat": ((torch.randn(RIGHT),) * 2, r"got a tensor \[1, 2, 3, 8\] at layer 0"),
    "no values": (layers(RIGHT), "got 1 entries at layer 0"),
    "with cross-attention": (layers(*[RIGHT] * 4), "got 4 entries at layer 0"),
    "three dimensions": (layers((2, 3, 8), (2, 3, 8)), r"got \[2, 3, 8\]"),
    "batch of values": (layers(RIGHT, (2, 2, 3, 8)), r"got \[1, 2, 3, 8\] and \[2, 2, 3, 8\] at layer 0"),
    "kv_heads of values": (layers(RIGHT, (1, 1, 3, 8)), r"and \[1, 1, 3, 8\] at layer 0"),
    "tokens of values": (layers(RIGHT, (1, 2, 4, 8)), r"and \[1, 2, 4, 8\] at layer 0"),
    "tokens of layer 1": (
        layers(RIGHT, RIGHT)[:1] + layers((1, 2, 4, 8), (1, 2, 4, 8))[:1],
        r"at layer 0 and \[1, 2, 4, 8\] at layer 1",
    ),
    "batch of layer 1": (
        layers(RIGHT, RIGHT)[:1] + layers((2, 2, 3, 8), (2, 2, 3, 8))[:1],
        r"and \[2, 2, 3, 8\] at layer 1",
    ),
    "a layer too few": (layers(RIGHT, RIGHT)[:1], TOO_FEW),
    "layers too many": (layers(RIGHT, RIGHT) * 2, "the 2 layers .* (?:got|saw) 4"),
    "kv_heads of another model": (layers((1, 4, 3, 8), (1, 4, 3, 8)), "LlamaForCausalLM.*(kv_heads|heads)"),
    "head_dim of another model": (layers((1, 2, 3, 4), (1, 2, 3, 4)), "LlamaForCausalLM.*head_dim"),
    "another batch": (layers((3, 2, 3, 8), (3, 2, 3, 8)), "LlamaForCausalLM.*batch"),
}
WRONG_PAIRS: dict[str, tuple[Any, str]] = {
    "a pair too few": (layers(OWN, OWN, CROSS, CROSS)[:1], TOO_FEW),
    "tokens of cross-attention": (
        layers(OWN, OWN, CROSS, OWN),
        r"got \[1, 4, 12, 8\] and \[1, 4, 3, 8\] at layer 0",
    ),
    "cross-attention of layer 1 alone": (
        layers(OWN, OWN)[:1] + layers(OWN, OWN, CROSS, CROSS)[:1],
        "got 2 there and 4 at layer 1",
    ),
    "batch of cross-attention": (layers(OWN, OWN, (2, 4, 12, 8), (2, 4, 12, 8)), "one batch size"),
}


@pytest.mark.parametrize(
    ("family", "wrong"),
    [*(("llama", wrong) for wrong in WRONG), *((name, wrong) for name in ENCODER_DECODERS for wrong in WRONG_PAIRS)],
)
def test_a_forward_pass_refuses_tuples_that_do_not_fit(family: str, wrong: str, installed: None) -> None:
    past, message = {**WRONG, **WRONG_PAIRS}[wrong]
    inputs = {"input_ids": prompt(1)} if family in ENCODER_DECODERS else {}
    before = copy.deepcopy(past)
    with pytest.raises(LegacyFormatError, match=message):
        read(tiny_model(family), prompt(1, 1 if inputs else 2), past, **inputs)
    flat, kept = (torch.utils._pytree.tree_leaves(states) for states in (past, before))
    assert all(map(torch.equal, flat, kept))


@pytest.mark.parametrize("wrong", ["tokens of values", "a layer too few"])
def test_generate_refuses_as_forward_does(wrong: str, installed: None) -> None:
    past, message = WRONG[wrong]
    with pytest.raises(LegacyFormatError, match=message):
        tiny_model("llama").generate(prompt(1), past_key_values=past, max_new_tokens=2)


def test_tuples_warn_at_the_line_that_passes_them(installed: None) -> None:
    model, ids, past = tiny_model("llama"), prompt(1), layers(RIGHT, RIGHT)
    with torch.no_grad(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model(ids, past_key_values=past)
        model.generate(ids, past_key_values=past, max_new_tokens=1, attention_mask=torch.ones_like(ids))
    ours = [warning for warning in caught if "pass kvlayers.DynamicCache" in str(warning.message)]
    assert [warning.filename for warning in ours] == [__file__] * 2
