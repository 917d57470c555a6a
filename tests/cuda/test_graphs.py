"""Decode steps as CUDA graphs, recorded by hand and by compiled code."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import cuda_device
import kvlayers
from cuda_caches import KINDS, on_device
from cuda_device import DEVICE
from kvlayers import Quantization
from kvlayers.layers import TokenLayer
from kvlayers.stores import QuantizedStore
from kvlayers.upstream import compat
from models import prompt
from packed_reference import random_pair, relative_error
from spies import spy

pytestmark = cuda_device.on_cuda

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 64
compiles_packed_states = pytest.mark.skipif(
    not compat.COMPILES_TENSOR_SUBCLASSES, reason="TorchDynamo is known to trace packed states from torch 2.13"
)


def recorded(call: Callable[[], Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    """A graph of a call, and the tensor that a replay writes."""
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        out = call()
    return graph, out


@cuda_device.needs_streams
@pytest.mark.parametrize("kind", ["static", "static window"])
def test_a_static_update_can_be_recorded(kind: str) -> None:
    make: Callable[[], TokenLayer] = {
        "static": lambda: kvlayers.StaticLayer(200),
        "static window": lambda: kvlayers.StaticSlidingLayer(200, 64),
    }[kind]
    layers = [make(), make()]
    held = random_pair(1, KV_HEADS, 40, HEAD_DIM, torch.float32, DEVICE)
    new = random_pair(1, KV_HEADS, 1, HEAD_DIM, torch.float32, DEVICE, seed=1)
    query = torch.randn(1, HEADS, 1, HEAD_DIM, device=DEVICE)

    def step(layer: TokenLayer) -> Tensor:
        keys, values = layer.update(*new)
        return scaled_dot_product_attention(query, torch.clone(keys), torch.clone(values), enable_gqa=True)

    with torch.no_grad():
        for layer in layers:
            layer.update(*held)
            # Whatever is made at the first step.
            step(layer)
        graph, out = recorded(lambda: step(layers[0]))
        for states, changed in zip(new, random_pair(1, KV_HEADS, 1, HEAD_DIM, torch.float32, DEVICE, 2), strict=True):
            states.copy_(changed)
        graph.replay()
        torch.testing.assert_close(out, step(layers[1]))


@cuda_device.needs_streams
@pytest.mark.parametrize("nbits", [4, 8])
def test_packed_attention_can_be_recorded(nbits: int) -> None:
    store = QuantizedStore(Quantization(nbits=nbits))
    store.take_in(*random_pair(1, KV_HEADS, 1000, HEAD_DIM, torch.bfloat16, DEVICE))
    keys, values = store.take_in(*random_pair(1, KV_HEADS, 1, HEAD_DIM, torch.bfloat16, DEVICE, seed=1))
    query = torch.randn(1, HEADS, 1, HEAD_DIM, device=DEVICE, dtype=torch.bfloat16)

    def attend() -> Tensor:
        return scaled_dot_product_attention(query, keys, values, enable_gqa=True)

    attend()
    graph, out = recorded(attend)
    for _ in range(3):
        query.normal_()
        graph.replay()
        assert torch.equal(out, attend())


def graphs_and_logits(model: Any, cache: Any, forward: Any, ids: Tensor, prompt_tokens: int) -> list[Tensor]:
    """Logits of each step after the prompt."""
    found = []
    with torch.no_grad():
        model(input_ids=ids[:, :prompt_tokens], past_key_values=cache, use_cache=True)
        for step in range(prompt_tokens, ids.shape[1]):
            torch.compiler.cudagraph_mark_step_begin()
            output = forward(input_ids=ids[:, step : step + 1], past_key_values=cache, use_cache=True)
            found.append(output.logits.clone())
    return found


@pytest.mark.usefixtures("counted")
@pytest.mark.parametrize("name", ["static", "static windows", pytest.param("int4", marks=compiles_packed_states)])
def test_compiled_steps_are_those_of_eager_code(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    captures: list[Any] = []
    spy(monkeypatch, torch.cuda.graph, "__enter__", captures.append)
    kind = KINDS[name]
    model = on_device(kind.model(), DEVICE)
    ids = prompt(1, 110).to(DEVICE)
    options = {"mode": "reduce-overhead"} if DEVICE.type == "cuda" else {"backend": "eager"}
    compiled = torch.compile(model.forward, **options)
    expected = graphs_and_logits(model, kind.make(model.config), model, ids, 70)
    seen = graphs_and_logits(model, kind.make(model.config), compiled, ids, 70)
    for one, other in zip(expected, seen, strict=True):
        assert relative_error(other, one) < max(kind.tolerance, 1e-3)
    # One for each size of what is attended to; never one for each step.
    assert len(captures) <= 8 or name not in ("static", "static windows")
