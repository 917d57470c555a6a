"""Code compiled around a cache that grows: few graphs, none for one layer alone, and the logits of eager code."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as tf

import kvlayers
from kvlayers import compat
from models import COMMON, prompt

pytestmark = [
    pytest.mark.fast,
    pytest.mark.skipif(
        not compat.COMPILES_TENSOR_SUBCLASSES, reason="TorchDynamo is known to trace it from torch 2.13"
    ),
]

SIZES: dict[str, Any] = {**COMMON, "num_hidden_layers": 3}
QUANTIZATION = {"nbits": 4, "residual_length": 8}


def llama() -> Any:
    return tf.LlamaForCausalLM(tf.LlamaConfig(**SIZES)).eval()


def mistral() -> Any:
    return tf.MistralForCausalLM(tf.MistralConfig(**SIZES, sliding_window=30)).eval()


def packed(model: Any) -> Any:
    return kvlayers.QuantizedCache(config=model.config, **QUANTIZATION)


def packed_windows(model: Any) -> Any:
    return kvlayers.QuantizedCache(config=model.config, **QUANTIZATION, quantize_sliding=True)


def packed_sinks(model: Any) -> Any:
    options = {"window_length": 90, "num_sink_tokens": 4, "quantization": QUANTIZATION}
    return kvlayers.SinkCache(config=model.config, **options)


def dense(model: Any) -> Any:
    return kvlayers.DynamicCache(config=model.config)


KINDS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], int]] = {
    "packed": (llama, packed, 80),
    "packed windows": (mistral, packed_windows, 40),
    "packed sinks": (llama, packed_sinks, 80),
    # To where its buffers, which had room for 128 more, have grown.
    "dense": (llama, dense, 16),
}


def counting(graphs: list[Any]) -> Callable[[Any, Any], Any]:
    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    return backend


@pytest.mark.parametrize("kind", KINDS)
def test_no_layer_is_compiled_for_on_its_own(kind: str) -> None:
    torch._dynamo.reset()
    make_model, make_cache, tokens = KINDS[kind]
    model, graphs = make_model(), []
    forward = torch.compile(model.forward, backend=counting(graphs), fullgraph=True)
    ids = prompt(1, tokens + 140)
    cache, eager = make_cache(model), make_cache(model)
    steps = 140 if kind == "dense" else 80
    with torch.no_grad():
        for start, end in [(0, tokens), *((step, step + 1) for step in range(tokens, tokens + steps))]:
            part = ids[:, start:end]
            logits = forward(part, past_key_values=cache).logits
            # What is summed in another order in compiled code, a few units in the last place of float32.
            torch.testing.assert_close(logits, model(part, past_key_values=eager).logits, rtol=1e-4, atol=1e-5)
            assert cache.get_seq_length() == end
    # A prompt, and a step: with fixed numbers at first, then with any. Growing and its numbers are two more of dense
    # layers, where the graph itself grows.
    assert len(graphs) <= (5 if kind == "dense" else 3)


def test_another_cache_and_its_operations_go_on_in_the_same_graphs() -> None:
    torch._dynamo.reset()
    model, graphs = llama(), []
    forward = torch.compile(model.forward, backend=counting(graphs), fullgraph=True)
    ids = prompt(2, 120)

    def decoded(run: Any, cache: Any) -> torch.Tensor:
        model(ids[:, :90], past_key_values=cache)
        logits = [run(ids[:, step : step + 1], past_key_values=cache).logits for step in range(90, 94)]
        twin = cache.fork()
        cache.crop(85)
        cache.reorder_cache(torch.tensor([1, 0]))
        logits += [run(ids[:, step : step + 1], past_key_values=cache).logits for step in range(94, 97)]
        # The fork is called by a handle of its own.
        logits += [run(ids[:, step : step + 1], past_key_values=twin).logits for step in range(94, 97)]
        assert (cache.get_seq_length(), twin.get_seq_length()) == (88, 97)
        return torch.cat(logits, 1)

    with torch.no_grad():
        expected = decoded(model, packed(model))
        for _ in range(2):
            torch.testing.assert_close(decoded(forward, packed(model)), expected, rtol=1e-4, atol=1e-5)
    assert len(graphs) <= 3


def test_two_updates_in_one_graph_attend_each_to_what_it_was_given() -> None:
    torch._dynamo.reset()
    model = llama()
    ids = prompt(1, 100)

    def two(cache: Any) -> torch.Tensor:
        first = model(ids[:, 90:93], past_key_values=cache).logits
        return torch.cat([first, model(ids[:, 93:94], past_key_values=cache).logits], 1)

    caches = [packed(model) for _ in range(2)]
    with torch.no_grad():
        for cache in caches:
            model(ids[:, :90], past_key_values=cache)
        seen = torch.compile(two, backend="aot_eager", fullgraph=True)(caches[0])
        torch.testing.assert_close(seen, two(caches[1]), rtol=1e-4, atol=1e-5)
    assert caches[0].get_seq_length() == caches[1].get_seq_length() == 94


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_padded_batches_and_attention_in_plain_torch(attention: str) -> None:
    torch._dynamo.reset()
    config = tf.LlamaConfig(**{**SIZES, "num_hidden_layers": 1})
    config._attn_implementation = attention
    model = tf.LlamaForCausalLM(config).eval()
    forward = torch.compile(model.forward, backend="eager", fullgraph=True)
    ids, mask = prompt(2, 96), torch.ones(2, 96, dtype=torch.int64)
    mask[0, :5] = 0
    cache, eager = packed(model), packed(model)
    with torch.no_grad():
        for start, end in ((0, 90), (90, 91), (91, 96)):
            options = {"attention_mask": mask[:, :end]}
            logits = forward(ids[:, start:end], past_key_values=cache, **options).logits
            expected = model(ids[:, start:end], past_key_values=eager, **options).logits
            torch.testing.assert_close(logits[1], expected[1], rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(logits[0, -1], expected[0, -1], rtol=1e-4, atol=1e-5)


def test_compiled_code_does_not_run_on_a_cache_that_was_deleted() -> None:
    number, keys = kvlayers.QuantizedCache()._handle.number, torch.zeros(1, 2, 3, 64)
    with pytest.raises(kvlayers.StaleStatesError, match="but saw none: keep it"):
        torch.ops.kvlayers.take_in(number, 0, keys, keys)
