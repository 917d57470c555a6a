"""Caches on a CUDA device give what they give on a CPU, let the host wait for nothing, and can be recorded.

Offloaded states are right however late copies are.
"""

from collections.abc import Callable, Sequence
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
from kvlayers.offload import Prefetcher
from kvlayers.offload.transfers import BufferRows, Event, PendingCopy, StreamTransfers, Transfers, transfers_for
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


# Offloaded states are right however late copies and computation are

LAYERS = 3
CYCLES = 1_000_000
"""Half a millisecond: many times as long as a copy of these few states takes."""

QUANTIZATION = kvlayers.Quantization(nbits=4, residual_length=16, sink_tokens=4)
LAYER_KINDS: dict[str, Callable[[], TokenLayer]] = {
    "dynamic": kvlayers.DynamicLayer,
    "window": lambda: kvlayers.SlidingLayer(40),
    "static": lambda: kvlayers.StaticLayer(300, max_batch_size=2),
    "static that grows": lambda: kvlayers.StaticLayer(32, grow=True),
    "static window": lambda: kvlayers.StaticSlidingLayer(300, 40, max_batch_size=2),
    "quantized": lambda: kvlayers.QuantizedLayer(QUANTIZATION),
}


class LateTransfers(StreamTransfers):
    """Copies that begin late."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._idle = torch.Stream(device=device)

    def copy_to_device(self, sources: Sequence[BufferRows]) -> PendingCopy:
        self._inbound.wait_event(self._later())
        return super().copy_to_device(sources)

    def copy_to_host(self, pairs: Sequence[tuple[BufferRows, BufferRows]]) -> PendingCopy:
        self._outbound.wait_event(self._later())
        return super().copy_to_host(pairs)

    def _later(self) -> Event:
        current = torch.accelerator.current_stream(self.device)
        torch.accelerator.set_stream(self._idle)
        torch.cuda._sleep(CYCLES)
        torch.accelerator.set_stream(current)
        return self._idle.record_event()


@cuda_device.needs_streams
@pytest.mark.parametrize("compute", ["late", "at once"])
@pytest.mark.parametrize("copies", ["late", "at once"])
@pytest.mark.parametrize("kind", LAYER_KINDS)
def test_late_work_changes_no_result(kind: str, copies: str, compute: str) -> None:
    transfers: Callable[[torch.device], Transfers | None] = LateTransfers if copies == "late" else transfers_for
    prefetcher = Prefetcher(transfers=transfers)
    plain = [LAYER_KINDS[kind]() for _ in range(LAYERS)]
    offloaded = [kvlayers.OffloadedLayer(LAYER_KINDS[kind](), prefetcher) for _ in range(LAYERS)]
    outs: list[Tensor] = []
    with torch.no_grad():
        for step, tokens in enumerate([90, *[1] * 25, 30, *[1] * 10]):
            query = torch.randn(2, HEADS, 1, HEAD_DIM, device=cuda_device.DEVICE)
            pairs = [
                random_pair(
                    2, KV_HEADS, tokens, HEAD_DIM, torch.float32, cuda_device.DEVICE, seed=LAYERS * step + layer
                )
                for layer in range(LAYERS)
            ]
            # All of the plain layers first, so that the offloaded ones follow each other as in a model.
            for layers in (plain, offloaded):
                for layer, pair in zip(layers, pairs, strict=True):
                    keys, values = layer.update(*pair)
                    if compute == "late":
                        torch.cuda._sleep(CYCLES)
                    outs.append(scaled_dot_product_attention(query, keys, values, enable_gqa=True))
                    # Memory that is free from here on is used again, and overwritten.
                    torch.full_like(pair[0], torch.nan)
    for step in range(0, len(outs), 2 * LAYERS):
        for layer in range(LAYERS):
            expected, seen = outs[step + layer], outs[step + LAYERS + layer]
            # The same numbers with other strides: torch may choose another kernel.
            torch.testing.assert_close(seen, expected, rtol=1e-4, atol=1e-4)
    for one, other in zip(plain, offloaded, strict=True):
        for states, expected in zip(other.peek(), one.peek(), strict=True):
            assert torch.equal(torch.clone(states).cpu(), torch.clone(expected).cpu())


@cuda_device.needs_streams
def test_what_was_offloaded_outlives_its_prefetcher() -> None:
    layer = kvlayers.OffloadedLayer(kvlayers.DynamicLayer(), Prefetcher(transfers=LateTransfers))
    pair = random_pair(1, KV_HEADS, 50, HEAD_DIM, torch.float32, cuda_device.DEVICE)
    with torch.no_grad():
        layer.update(*pair)
        state = layer.state()
    expected = [states.clone() for states in pair]
    del layer
    for name, states in zip(("keys", "values"), expected, strict=True):
        assert torch.equal(state.tensors[name].cpu(), states.cpu())
