"""What a cache tells of prefixes, of the ways that attention went, and of compilations."""

from typing import Any

import pytest
import torch
import transformers as tf

import kvlayers
import versions
from models import COMMON, fresh_model, prompt, tiny_model

LLAMA = tf.LlamaConfig(**COMMON)


def quantized(model: Any, tokens: int = 300) -> Any:
    cache = kvlayers.QuantizedCache(config=model.config, nbits=4, residual_length=16)
    with torch.no_grad():
        model(prompt(1, tokens), past_key_values=cache)
    return cache


def step(model: Any, cache: Any, tokens: int = 1) -> None:
    with torch.no_grad():
        model(prompt(1, tokens, seed=3), past_key_values=cache)


def ways(cache: Any) -> dict[str, int]:
    return dict(cache.explain().attention)


def test_a_plain_cache_has_nothing_to_tell() -> None:
    told = kvlayers.DynamicCache(config=LLAMA).explain()
    assert (told.prefixes, dict(told.attention), told.traces) == ((), {}, 0)


def test_attention_on_packed_states_is_counted_for_each_layer() -> None:
    model = tiny_model("llama")
    cache = quantized(model)
    before = ways(cache)
    for _ in range(3):
        step(model, cache)
    [(way, count)] = (ways(cache).items() - before.items()) or [("", 0)]
    assert count - before.get(way, 0) == 3 * len(cache.layers)
    assert way.startswith(("a compiled kernel", "plain torch, block by block, as the kernel could not be compiled"))
    assert f"attention, {count} times: {way}" in repr(cache.explain())


def test_many_queries_say_why_they_take_another_way() -> None:
    model = tiny_model("llama")
    cache = quantized(model)
    step(model, cache, tokens=200)
    assert any("more than 128 queries for a kv head" in way for way in ways(cache))


def test_autograd_and_other_functions_say_why_states_are_dequantized() -> None:
    cache = quantized(tiny_model("llama"))
    keys, values = cache.update(*(torch.randn(1, 2, 1, 8) for _ in range(2)), 0)
    queries = torch.randn(1, 2, 1, 8, requires_grad=True)
    torch.nn.functional.scaled_dot_product_attention(queries, keys, values).sum().backward()
    assert any(way.endswith("in full precision, as autograd follows what is computed") for way in ways(cache))
    keys.exp()
    assert any(way.startswith("exp in full precision") for way in ways(cache))


def test_a_store_of_prefixes_says_what_it_had_of_a_prompt() -> None:
    model, ids = fresh_model("llama"), prompt(1, 40)
    store = kvlayers.PrefixStore(max_bytes=2**24)
    how = {"max_new_tokens": 2, "do_sample": False, "return_dict_in_generate": True, "prefix_store": store}
    first = kvlayers.generate(model, ids, **how).past_key_values
    assert first.explain().prefixes == ("0 of 40 tokens were stored: nothing is stored for this model and namespace",)
    longer = torch.cat([ids[:, :30], prompt(1, 10, seed=7)], dim=1)
    second = kvlayers.generate(model, longer, **how).past_key_values
    assert second.explain().prefixes == ("30 of 40 tokens were stored: the stored sequence diverges after 30",)
    assert "prefix: 30 of 40 tokens were stored" in repr(second.explain())


def test_a_call_that_cannot_go_by_its_store_says_why() -> None:
    model, ids = fresh_model("llama"), prompt(1, 40)
    with kvlayers.installed(prefix_store=kvlayers.PrefixStore(max_bytes=2**24)):
        output = model.generate(ids, max_new_tokens=2, return_dict_in_generate=True, prompt_lookup_num_tokens=2)
        assert "could not use the store: its decoding mode is" in output.past_key_values.explain().prefixes[0]
        output = model.generate(ids, max_new_tokens=2, return_dict_in_generate=True)
        assert output.past_key_values.explain().prefixes[0].startswith("0 of 40")


@pytest.mark.slow
def test_traces_of_compiled_code_are_counted() -> None:
    versions.need_since("5.4", "compiled decode loops without cache_position")
    torch.compiler.reset()
    model = tiny_model("llama")
    cache = kvlayers.StaticCache(model.config, max_cache_len=64)
    compiled = torch.compile(model.forward, backend="eager", fullgraph=True, dynamic=False)
    with torch.no_grad():
        model(prompt(1, 8), past_key_values=cache)
        assert cache.explain().traces == 0
        for _ in range(3):
            compiled(prompt(1, 1), past_key_values=cache)
        once = cache.explain().traces
        compiled(prompt(1, 4), past_key_values=cache)
    assert once == 1
    assert cache.explain().traces == 2
    assert "compiled: 2 times, of which 1 again" in repr(cache.explain())
    torch.compiler.reset()


def test_a_fork_counts_its_own_ways() -> None:
    cache = quantized(tiny_model("llama"))
    before, twin = ways(cache), cache.fork()
    keys, _ = twin.update(*(torch.randn(1, 2, 1, 8) for _ in range(2)), 0)
    keys.exp()
    assert ways(cache) == before
    assert sum(ways(twin).values()) == 1
