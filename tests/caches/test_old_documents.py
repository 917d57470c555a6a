"""The loop that the documents about caches of transformers 4.4x to 4.57 taught, on every supported version.

The reference is a model that is given the whole text at every token, and no cache.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import kvlayers
from models import prompt, tiny_model

ROOM = 64
"""Tokens that static caches reserve, of which the loop takes 16."""

CACHES: dict[str, tuple[str, Callable[[Any], kvlayers.Cache]]] = {
    "dynamic": ("llama", lambda config: kvlayers.DynamicCache()),
    "dynamic with windows": ("gemma2", lambda config: kvlayers.DynamicCache(config=config)),
    "static": ("llama", lambda config: kvlayers.StaticCache(config=config, max_batch_size=1, max_cache_len=ROOM)),
    "sliding": ("mistral", lambda config: kvlayers.SlidingWindowCache(config, max_cache_len=ROOM)),
    "hybrid": ("gemma2", lambda config: kvlayers.HybridCache(config=config, max_batch_size=1, max_cache_len=ROOM)),
    "chunked": ("llama4", lambda config: kvlayers.HybridChunkedCache(config=config, max_cache_len=ROOM)),
    "offloaded": ("llama", lambda config: kvlayers.OffloadedCache()),
    "offloaded static": ("llama", lambda config: kvlayers.OffloadedStaticCache(config=config, max_cache_len=ROOM)),
    "quantized, but for the newest": ("llama", lambda config: kvlayers.QuantizedCache(residual_length=ROOM)),
    "sinks of a window that is not full": ("llama", lambda config: kvlayers.SinkCache(256, 4, config=config)),
}
"""For each kind a family and what makes a cache for it, which rounds nothing in a text of `ROOM` tokens."""


def without_cache(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """The sequences that are the most likely, token by token."""
    for _ in range(6):
        logits = model(ids, use_cache=False).logits
        ids = torch.cat([ids, logits[:, -1:].argmax(-1)], dim=1)
    return ids


@pytest.mark.parametrize(("family", "make_cache"), CACHES.values(), ids=CACHES)
@torch.no_grad()
def test_a_loop_that_grows_its_mask_and_its_positions(family: str, make_cache: Callable[[Any], kvlayers.Cache]) -> None:
    model, ids = tiny_model(family), prompt(1, 10)
    cache = make_cache(model.config)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    cache_position = torch.arange(ids.shape[1])
    for _ in range(6):
        outputs = model(**inputs, cache_position=cache_position, past_key_values=cache, use_cache=True)
        assert outputs.past_key_values is cache
        next_ids = outputs.logits[:, -1:].argmax(-1)
        ids = torch.cat([ids, next_ids], dim=1)
        mask = torch.cat([inputs["attention_mask"], inputs["attention_mask"].new_ones((1, 1))], dim=1)
        inputs = {"input_ids": next_ids, "attention_mask": mask}
        cache_position = cache_position[-1:] + 1
    assert torch.equal(ids, without_cache(model, prompt(1, 10)))
    assert cache.get_seq_length() == ids.shape[1] - 1
