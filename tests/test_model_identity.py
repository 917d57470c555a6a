"""What tells one model's states from another's: whatever changes them is noticed, and nothing else is."""

import copy
from typing import Any

import pytest
import torch

from kvlayers.generation.model_identity import model_identity
from models import fresh_model, prompt

pytestmark = pytest.mark.fast


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
    model.train()
    seen.append(model_identity(model))
    model.eval()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        seen.append(model_identity(model))
    seen.append(model_identity(model.bfloat16()))
    assert len(set(seen)) == len(seen)


def test_weights_are_looked_at_once(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    module = "kvlayers.generation.model_identity.weights_id"
    monkeypatch.setattr(module, lambda looked_at: calls.append(looked_at) or "id")
    for _ in range(3):
        model_identity(model)
    assert len(calls) == 1


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
