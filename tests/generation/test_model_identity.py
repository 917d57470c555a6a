"""What tells one model's states from another's: whatever changes them is noticed, and nothing else is."""

import copy
from typing import Any

import pytest
import torch

import kvlayers
from kvlayers.generation.prefix_reuse import eligibility
from models import fresh_model, prompt


def model_identity(model: Any) -> str:
    return eligibility.model_identity(model, kvlayers.weights_id(model), model.device)


@pytest.fixture
def model() -> Any:
    return fresh_model("llama")


def test_it_is_the_same_for_the_same_weights(model: Any) -> None:
    assert model_identity(model) == model_identity(model) == model_identity(copy.deepcopy(model))
    with torch.no_grad():
        model(prompt(tokens=4))
    assert model_identity(model) == model_identity(copy.deepcopy(model))


def test_it_changes_with_weights_and_modes(model: Any) -> None:
    seen = [model_identity(model)]
    with torch.no_grad():
        model.model.layers[1].self_attn.k_proj.weight.add_(1)
    seen.append(model_identity(model))
    model.load_state_dict(fresh_model("llama", seed=1).state_dict())
    seen.append(model_identity(model))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        seen.append(model_identity(model))
    seen.append(model_identity(model.bfloat16()))
    assert len(set(seen)) == len(seen)


def test_adapters_that_are_switched_are_noticed(model: Any) -> None:
    peft = pytest.importorskip("peft", reason="PEFT is not installed")
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    seen = [model_identity(model)]
    wrapped = peft.get_peft_model(model, config, adapter_name="one")
    seen.append(model_identity(model))
    wrapped.add_adapter("two", config)
    wrapped.set_adapter("one")
    with_both = model_identity(model)
    wrapped.set_adapter("two")
    seen.append(model_identity(model))
    with wrapped.disable_adapter():
        seen.append(model_identity(model))
    wrapped.set_adapter("one")
    assert model_identity(model) == with_both
    wrapped.merge_adapter()
    seen.append(model_identity(model))
    assert len({*seen, with_both}) == len(seen) + 1


def test_an_adapter_that_is_merged_for_good_is_noticed(model: Any) -> None:
    peft = pytest.importorskip("peft", reason="PEFT is not installed")
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    before = model_identity(model)
    merged = peft.get_peft_model(model, config).merge_and_unload()
    assert merged is model
    assert model_identity(model) != before


def test_weights_written_to_in_inference_mode_are_noticed(model: Any) -> None:
    with torch.inference_mode():
        inferring = copy.deepcopy(model)
        before = model_identity(inferring)
        inferring.model.embed_tokens.weight.mul_(1.5)
        assert model_identity(inferring) != before


def test_weights_that_are_not_in_memory_are_refused() -> None:
    with torch.device("meta"):
        model = type(fresh_model("llama"))(fresh_model("llama").config)
    with pytest.raises(kvlayers.errors.ConfigError, match="weights must be in memory"):
        model_identity(model)


def test_a_write_to_one_element_is_noticed(model: Any) -> None:
    weight = model.model.embed_tokens.weight
    seen = [model_identity(model)]
    for _ in range(2):
        with torch.no_grad():
            weight[17, 11] += 0.5
        seen += [model_identity(model)] * 2
    assert [seen.count(text) for text in dict.fromkeys(seen)] == [1, 2, 2]


def test_another_weight_in_the_place_of_one_is_noticed(model: Any) -> None:
    layer, seen = model.model.layers[0].mlp.up_proj, []
    for _ in range(6):
        form = layer.weight.shape
        layer.weight = None
        layer.weight = torch.nn.Parameter(torch.randn(form))
        seen.append(model_identity(model))
    assert len(set(seen)) == len(seen)


def test_weights_that_were_swapped_back_are_the_ones_they_were(model: Any) -> None:
    weight = model.model.layers[0].mlp.up_proj.weight
    first, other = weight.detach().clone(), torch.randn_like(weight)
    before = model_identity(model)
    weight.data.copy_(other)
    swapped = model_identity(model)
    weight.data.copy_(first)
    assert model_identity(model) == before != swapped
