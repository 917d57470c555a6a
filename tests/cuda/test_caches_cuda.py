"""Caches on a CUDA device give what they give on a CPU, let the host wait for nothing, and can be recorded."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import cuda_device
import kvlayers
from cuda_caches import KINDS, Kind, on_device
from cuda_device import exact_products as exact_products
from kvlayers.layers import TokenLayer
from kvlayers.stores import QuantizedStore
from kvlayers.upstream import compat
from kvlayers.upstream.cache_argument import name_for
from models import prompt, tiny_model
from packed_reference import random_pair, relative_error
from spies import spy

pytestmark = [*cuda_device.on_cuda, pytest.mark.usefixtures("exact_products")]


class Pair:
    """A model and a cache on a CPU, and the same on the device."""

    def __init__(self, kind: Kind) -> None:
        self.kind = kind
        model = kind.model()
        self.models = model, on_device(model, cuda_device.DEVICE)
        self.caches = kind.make(model.config), kind.make(model.config)

    def feed(self, ids: torch.Tensor) -> None:
        """Feed tokens `[batch, tokens]` to both; the logits must agree."""
        with torch.no_grad():
            expected, seen = (
                model(input_ids=ids.to(model.device), use_cache=True, **{name_for(model): cache}).logits
                for model, cache in zip(self.models, self.caches, strict=True)
            )
        error = relative_error(seen.cpu(), expected)
        assert error < self.kind.tolerance, f"after {self.caches[0].get_seq_length()} tokens: {error:.1e}"

    def decode(self, ids: torch.Tensor) -> None:
        """Feed tokens `[batch, tokens]` one at a time."""
        for step in range(ids.shape[1]):
            self.feed(ids[:, step : step + 1])

    def both(self, operation: Callable[[kvlayers.Cache, torch.device], Any]) -> None:
        """Do the same with both caches: it succeeds on both, or fails on both."""
        failed = []
        for model, cache in zip(self.models, self.caches, strict=True):
            try:
                operation(cache, model.device)
                failed.append(None)
            except kvlayers.KVLayersError as error:
                failed.append(type(error))
        assert failed[0] == failed[1]


@pytest.mark.parametrize("name", KINDS)
def test_a_model_decodes_as_on_a_cpu(name: str) -> None:
    pair = Pair(KINDS[name])
    ids = prompt(2, 170, seed=3)
    pair.feed(ids[:, :70])
    # At 64 tokens to a block, one block is packed and another one is begun.
    pair.decode(ids[:, 70:110])
    pair.both(lambda cache, device: cache.crop(-3))
    pair.decode(ids[:, 110:120])
    pair.both(lambda cache, device: cache.reorder_cache(torch.tensor([1, 0], device=device)))
    pair.decode(ids[:, 120:125])
    # A second turn, and then more of it.
    (pair.decode if pair.kind.one_by_one else pair.feed)(ids[:, 125:140])
    pair.decode(ids[:, 140:150])
    fork = pair.caches[1].fork()
    pair.decode(ids[:, 150:155])
    # The fork is where the cache was: it may not notice what the cache did since.
    assert fork.get_seq_length() == pair.caches[1].get_seq_length() - 5
    pair.both(lambda cache, device: cache.reset())
    pair.feed(ids[:, :20])
    pair.decode(ids[:, 20:25])


@pytest.mark.parametrize(("family", "batch", "beams"), [("t5", 2, 1), ("bart", 2, 1), ("llama", 1, 3), ("llama", 3, 3)])
def test_models_with_an_encoder_and_beams_generate_as_on_a_cpu(family: str, batch: int, beams: int) -> None:
    model, ids = tiny_model(family), prompt(batch, 16)
    how = {"max_new_tokens": 10, "num_beams": beams, "do_sample": False}
    with kvlayers.installed():
        expected = model.generate(ids, **how)
        seen = on_device(model, cuda_device.DEVICE).generate(ids.to(cuda_device.DEVICE), **how)
    assert torch.equal(seen.cpu(), expected)


@pytest.mark.parametrize("name", ["dynamic", "windows", "static that grows", "int4"])
def test_eight_samples_of_a_prompt_are_those_of_a_cpu(name: str) -> None:
    pair = Pair(KINDS[name])
    pair.feed(prompt(1, 90))
    pair.both(lambda cache, device: cache.expand(8))
    pair.decode(prompt(8, 12, seed=1))


@pytest.mark.parametrize("name", ["dynamic", "windows", "static", "int4", "offloaded", "sinks"])
def test_a_saved_cache_goes_on_on_a_cpu(name: str, tmp_path: Any) -> None:
    kind = KINDS[name]
    pair = Pair(kind)
    ids = prompt(1, 100)
    pair.feed(ids[:, :90])
    path = tmp_path / "cache.safetensors"
    kvlayers.save_cache(pair.caches[1], path, config=pair.models[1].config)
    loaded = kvlayers.load_cache(path, "cpu", pair.models[0].config)
    pair.caches = loaded, pair.caches[1]
    pair.decode(ids[:, 90:])


# No decode step makes the host wait for the device

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 64
NOT_ATTENDED = ("recurrent", "recurrent and attention", "dynamic, head_dims that differ")
"""Kinds that are not only keys and values of one head_dim."""


@pytest.mark.parametrize("name", [name for name in KINDS if name not in NOT_ATTENDED])
def test_updates_and_attention_wait_for_nothing(name: str) -> None:
    kind = KINDS[name]
    config = kind.model().config
    cache: Any = kind.make(config)
    layers = config.num_hidden_layers
    query = torch.randn(1, HEADS, 1, HEAD_DIM, device=cuda_device.DEVICE)

    def step(tokens: int) -> None:
        pair = random_pair(1, KV_HEADS, tokens, HEAD_DIM, torch.float32, cuda_device.DEVICE)
        for layer in range(layers):
            keys, values = cache.update(*pair, layer)
            if tokens == 1:
                scaled_dot_product_attention(query, keys, values, enable_gqa=True)

    with torch.no_grad():
        step(90)
        # What grows, packs or is compiled for the first time does so here.
        for _ in range(70):
            step(1)
        with cuda_device.no_synchronisation():
            # At 64 tokens to a block, another one is packed.
            for _ in range(80):
                step(1)


# Decode steps as CUDA graphs, recorded by hand and by compiled code


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
    held = random_pair(1, KV_HEADS, 40, HEAD_DIM, torch.float32, cuda_device.DEVICE)
    new = random_pair(1, KV_HEADS, 1, HEAD_DIM, torch.float32, cuda_device.DEVICE, seed=1)
    query = torch.randn(1, HEADS, 1, HEAD_DIM, device=cuda_device.DEVICE)

    def step(layer: TokenLayer) -> Tensor:
        keys, values = layer.update(*new)
        return scaled_dot_product_attention(query, torch.clone(keys), torch.clone(values), enable_gqa=True)

    with torch.no_grad():
        for layer in layers:
            layer.update(*held)
            # Whatever is made at the first step.
            step(layer)
        graph, out = recorded(lambda: step(layers[0]))
        for states, changed in zip(
            new, random_pair(1, KV_HEADS, 1, HEAD_DIM, torch.float32, cuda_device.DEVICE, 2), strict=True
        ):
            states.copy_(changed)
        graph.replay()
        torch.testing.assert_close(out, step(layers[1]))


@cuda_device.needs_streams
@pytest.mark.parametrize("nbits", [4, 8])
def test_packed_attention_can_be_recorded(nbits: int) -> None:
    store = QuantizedStore(kvlayers.Quantization(nbits=nbits))
    store.take_in(*random_pair(1, KV_HEADS, 1000, HEAD_DIM, torch.bfloat16, cuda_device.DEVICE))
    keys, values = store.take_in(*random_pair(1, KV_HEADS, 1, HEAD_DIM, torch.bfloat16, cuda_device.DEVICE, seed=1))
    query = torch.randn(1, HEADS, 1, HEAD_DIM, device=cuda_device.DEVICE, dtype=torch.bfloat16)

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
    model = on_device(kind.model(), cuda_device.DEVICE)
    ids = prompt(1, 110).to(cuda_device.DEVICE)
    options = {"mode": "reduce-overhead"} if cuda_device.DEVICE.type == "cuda" else {"backend": "eager"}
    compiled = torch.compile(model.forward, **options)
    expected = graphs_and_logits(model, kind.make(model.config), model, ids, 70)
    seen = graphs_and_logits(model, kind.make(model.config), compiled, ids, 70)
    for one, other in zip(expected, seen, strict=True):
        assert relative_error(other, one) < max(kind.tolerance, 1e-3)
    # One for each size of what is attended to; never one for each step.
    assert len(captures) <= 8 or name not in ("static", "static windows")
