"""`fidelity` and `calibrate` name the head whose keys lose far more than those of the others."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import kvlayers
from kvlayers.quantizers import NativeBackend, NativeQuantizer, register_quantizer, unregister_quantizer
from kvlayers_lab.measuring.fidelity import FULL, FidelityBudget, measure_fidelity
from kvlayers_lab.measuring.scoring import NoRecord
from kvlayers_lab.measuring.uneven_heads import UnevenHead, attended_states, uneven_head
from models import fresh_model

NAME = "native without smoothing"


@pytest.fixture(autouse=True)
def _without_smoothing() -> Iterator[None]:
    @register_quantizer(NAME)
    class Plain(NativeBackend):
        def quantizer(self, options: Any, head_dim: int) -> NativeQuantizer:
            quantizer = super().quantizer(options, head_dim)
            quantizer.smooths_keys = False
            return quantizer

    yield
    unregister_quantizer(NAME)


def model_with_a_large_channel(layer: int = 1, head: int = 0, factor: float = 100.0) -> Any:
    """A llama that is the same function as before: what the keys are multiplied by, the queries are divided by."""
    model = fresh_model("llama")
    attention = model.model.layers[layer].self_attn
    head_dim, group = attention.head_dim, model.config.num_attention_heads // model.config.num_key_value_heads
    with torch.no_grad():
        # Both channels of a rotary pair.
        for channel in (head_dim // 2 - 1, head_dim - 1):
            attention.k_proj.weight[head * head_dim + channel] *= factor
            for query in range(head * group, (head + 1) * group):
                attention.q_proj.weight[query * head_dim + channel] /= factor
    return model


def found(model: Any, backend: str, nbits: int = 4) -> UnevenHead | None:
    torch.manual_seed(0)
    ids = torch.randint(model.config.vocab_size, (1, 400))
    cache = kvlayers.QuantizedCache(backend, model.config, nbits=nbits, residual_length=16)
    return uneven_head(cache, attended_states(model, ids, 64))


@pytest.mark.parametrize(("layer", "head"), [(1, 0), (0, 1)])
def test_the_head_is_named_with_what_mends_it(layer: int, head: int) -> None:
    seen = found(model_with_a_large_channel(layer, head), NAME)
    assert (seen.layer, seen.head) == (layer, head)
    assert seen.times > 8
    assert f"KV head {head} in layer {layer}" in seen.sentence
    assert "backend='kivi'" in seen.sentence


@pytest.mark.parametrize(
    ("make", "backend", "nbits"),
    [
        *((model_with_a_large_channel, backend, 4) for backend in ("native", "kivi")),
        *((lambda: fresh_model("llama"), backend, nbits) for backend in ("native", "kivi", NAME) for nbits in (2, 4)),
    ],
)
def test_what_mends_it_does_and_even_heads_are_not_warned_of(make: Callable[[], Any], backend: str, nbits: int) -> None:
    assert found(make(), backend, nbits) is None


def test_a_cache_that_rounds_nothing_has_no_such_head() -> None:
    model = model_with_a_large_channel()
    states = attended_states(model, torch.randint(model.config.vocab_size, (1, 100)), 64)
    assert uneven_head(kvlayers.DynamicCache(config=model.config), states) is None
    assert uneven_head(kvlayers.QuantizedCache(config=model.config), states) is None


def test_fidelity_has_the_head_of_each_cache() -> None:
    model = model_with_a_large_channel()
    torch.manual_seed(0)
    ids = torch.randint(model.config.vocab_size, (1, 385))
    caches = {
        name: lambda name=name: kvlayers.QuantizedCache(name, model.config, nbits=4, residual_length=16)
        for name in (NAME, "native")
    }
    measured = measure_fidelity(model, [ids], caches, 320, 32, FidelityBudget(), NoRecord(), lambda: None)
    assert {each.name: each.uneven_head is not None for each in measured} == {FULL: False, NAME: True, "native": False}
