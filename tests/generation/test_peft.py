"""PEFT's prefix tuning: a prompt of keys and values is trained through a cache, and then decoded behind."""

from typing import Any

import pytest
import torch
from torch import Tensor

import kvlayers
import versions
from matrix import once
from models import ENCODER_DECODERS, fresh_model, prompt, under_install

peft = pytest.importorskip("peft", reason="PEFT is not installed")

FAMILIES = ("llama", "gpt2", "mistral", "gemma3", *ENCODER_DECODERS)

PASSES_IT = versions.peft_passes_prefixes()


@pytest.fixture
def peft_makes_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """PEFT makes its caches with kvlayers, by the arguments that it has for those of transformers."""
    monkeypatch.setattr("peft.peft_model.DynamicCache", kvlayers.DynamicCache)
    monkeypatch.setattr("peft.peft_model.EncoderDecoderCache", kvlayers.EncoderDecoderCache)


def tuned(family: str, projected: bool = True) -> Any:
    """A model with a prefix to be trained, the same one at every call."""
    model = fresh_model(family)
    config = peft.PrefixTuningConfig(
        task_type=peft.TaskType.SEQ_2_SEQ_LM if family in ENCODER_DECODERS else peft.TaskType.CAUSAL_LM,
        # More than fit in the window of the families that have one.
        num_virtual_tokens=10,
        prefix_projection=projected,
        encoder_hidden_size=16,
    )
    torch.manual_seed(0)
    return peft.get_peft_model(model, config).eval()


def training_steps(model: Any, steps: int = 3) -> tuple[list[float], list[Tensor]]:
    """Losses of some steps, and the gradients of the last one."""
    ids = prompt(2)
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimiser, losses = torch.optim.SGD(weights, lr=0.05), []
    for _ in range(steps):
        optimiser.zero_grad()
        loss = model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids).loss
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    gradients = [weight.grad for weight in weights]
    return losses, gradients


def continuation(model: Any) -> Any:
    ids = prompt(2)
    return model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=8,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
    )


def assert_same_continuation(seen: Any, expected: Any) -> None:
    assert torch.equal(seen.sequences, expected.sequences)
    torch.testing.assert_close(torch.stack(seen.logits), torch.stack(expected.logits), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("family", "projected"), once(FAMILIES, [False, True]))
def test_a_prefix_is_trained_through_our_caches_as_through_theirs(
    family: str, projected: bool, request: pytest.FixtureRequest
) -> None:
    losses, gradients = training_steps(tuned(family, projected))
    assert losses[-1] < losses[0]
    request.getfixturevalue("peft_makes_ours")
    seen_losses, seen_gradients = training_steps(tuned(family, projected))
    assert seen_losses == pytest.approx(losses, rel=1e-5)
    assert all(gradient.abs().max() > 0 for gradient in gradients)
    for seen, expected in zip(seen_gradients, gradients, strict=True):
        torch.testing.assert_close(seen, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(
    not PASSES_IT, reason="this PEFT passes its prefix by a name that this transformers ignores beside the new one"
)
@pytest.mark.parametrize("family", FAMILIES)
def test_decoding_behind_a_trained_prefix_is_the_same_under_install_and_in_our_caches(
    family: str, request: pytest.FixtureRequest
) -> None:
    model = tuned(family)
    training_steps(model)
    expected = continuation(model)
    assert_same_continuation(under_install(continuation, model), expected)
    request.getfixturevalue("peft_makes_ours")
    seen = continuation(model)
    assert isinstance(seen.past_key_values, kvlayers.DynamicCache | kvlayers.EncoderDecoderCache)
    assert_same_continuation(seen, expected)


@pytest.mark.skipif(PASSES_IT, reason="PEFT passes its prefix by the name that models take")
def test_a_trained_prefix_by_an_old_name_is_refused_under_install() -> None:
    """transformers ignores it beside the cache that `generate()` makes, and decodes as if there were no prefix."""
    model = tuned("llama")
    with kvlayers.installed(), pytest.raises(kvlayers.OptionError, match="must be the same cache"):
        continuation(model)


def test_a_prefix_is_trained_where_peft_has_moved_it_to_the_devices_of_layers(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, _ = training_steps(tuned("llama"))
    request.getfixturevalue("peft_makes_ours")
    model = tuned("llama")
    # As accelerate notes it. PEFT looks for a device other than the name "cpu", and finds this one.
    devices = {f"model.layers.{index}": torch.device("cpu") for index in range(2)}
    monkeypatch.setattr(model.get_base_model(), "hf_device_map", devices, raising=False)
    seen, _ = training_steps(model)
    assert seen == pytest.approx(expected, rel=1e-5)
