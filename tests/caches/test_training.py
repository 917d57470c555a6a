"""Training with a cache: gradients flow through every token that it holds, however it grew."""

import pytest
import torch

import kvlayers
from models import fresh_model, prompt


@pytest.mark.parametrize("chunks", [(20,), (12, 8), (9, *[1] * 11)], ids=["whole", "halves", "token by token"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "mistral", "gemma3"])
def test_gradients_through_a_cache_are_those_without_one(family: str, chunks: tuple[int, ...]) -> None:
    model, ids, targets = fresh_model(family), prompt(2, 20), prompt(2, 20, seed=5)
    cache, gradients = kvlayers.DynamicCache(config=model.config), []
    expected = model(ids, use_cache=False).logits
    seen = torch.cat([model(chunk, past_key_values=cache).logits for chunk in ids.split(chunks, dim=1)], dim=1)
    # Decoding on does not touch what a backward pass needs.
    with torch.no_grad():
        if family in ("llama", "gpt2"):
            cache.crop(5)
        model(ids[:, 12:], past_key_values=cache)
    for logits in (seen, expected):
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        gradients.append(torch.autograd.grad(loss, [*model.parameters()]))
    assert max(gradient.abs().max() for gradient in gradients[1]) > 1e-2
    torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-5)
