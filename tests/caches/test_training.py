"""Training with a cache: gradients flow through every token that it holds, however it grew."""

from typing import Any

import pytest
import torch

import kvlayers
from models import fresh_model, prompt

FAMILIES = ("llama", "gpt2", "mistral", "gemma3")


def gradients(model: Any, logits: torch.Tensor) -> list[torch.Tensor]:
    """Gradients of the cross-entropy with tokens that are the same in every call."""
    targets = prompt(*logits.shape[:2], seed=5)
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    return list(torch.autograd.grad(loss, weights))


def assert_alike(seen: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert max(gradient.abs().max() for gradient in expected) > 1e-2
    for mine, theirs in zip(seen, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("chunks", [(20,), (12, 8), (9, *[1] * 11)], ids=["whole", "halves", "token by token"])
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_through_a_cache_are_those_without_one(family: str, chunks: tuple[int, ...]) -> None:
    model, ids = fresh_model(family), prompt(2, 20)
    expected = gradients(model, model(ids, use_cache=False).logits)
    cache = kvlayers.DynamicCache(config=model.config)
    logits = torch.cat([model(chunk, past_key_values=cache).logits for chunk in ids.split(chunks, dim=1)], dim=1)
    assert_alike(gradients(model, logits), expected)


def test_a_prompt_that_was_not_followed_is_a_constant() -> None:
    model, ids = fresh_model("llama"), prompt(2, 20)
    cache = kvlayers.DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids[:, :12], past_key_values=cache)
    pairs = tuple((keys.clone(), values.clone()) for keys, values in cache)
    logits = model(ids[:, 12:], past_key_values=cache).logits
    again = model(ids[:, 12:], past_key_values=kvlayers.DynamicCache(pairs)).logits
    assert_alike(gradients(model, logits), gradients(model, again))


def test_decoding_on_does_not_touch_what_a_backward_pass_needs() -> None:
    model, ids = fresh_model("llama"), prompt(2, 20)
    expected = gradients(model, model(ids[:, :12], use_cache=False).logits)
    cache = kvlayers.DynamicCache(config=model.config)
    logits = model(ids[:, :12], past_key_values=cache).logits
    with torch.no_grad():
        model(ids[:, 12:], past_key_values=cache)
        cache.crop(5)
        model(ids[:, 12:], past_key_values=cache)
    assert_alike(gradients(model, logits), expected)
