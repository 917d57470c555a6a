"""What tells one model's states from another's: whatever changes them is noticed, and nothing else is."""

import copy
from typing import Any

import pytest
import torch

import kvlayers
from kvlayers.generation.prefix_reuse import eligibility
from models import fresh_model


def model_identity(model: Any) -> str:
    return eligibility.model_identity(model, kvlayers.weights_id(model), model.device)


@pytest.fixture
def model() -> Any:
    return fresh_model("llama")


def test_adapters_that_are_switched_or_merged_are_noticed(model: Any) -> None:
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
    assert wrapped.merge_and_unload() is model
    seen.append(model_identity(model))
    assert len({*seen, with_both}) == len(seen) + 1


def test_weights_written_to_in_inference_mode_are_noticed(model: Any) -> None:
    with torch.inference_mode():
        inferring = copy.deepcopy(model)
        before = model_identity(inferring)
        inferring.model.embed_tokens.weight.mul_(1.5)
        assert model_identity(inferring) != before


def test_other_weights_in_the_place_of_those_that_were_read_are_noticed(model: Any) -> None:
    layer = model.model.layers[0].mlp.up_proj
    first, seen = layer.weight.detach().clone(), [model_identity(model)]
    layer.weight.data.copy_(torch.randn_like(first))
    seen.append(model_identity(model))
    # Those that were swapped back are the ones they were.
    layer.weight.data.copy_(first)
    assert model_identity(model) == seen[0]
    for _ in range(6):
        layer.weight = None
        layer.weight = torch.nn.Parameter(torch.randn_like(first))
        seen.append(model_identity(model))
    assert len(set(seen)) == len(seen)
