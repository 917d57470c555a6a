"""What a cache says of itself, beside what it really holds: summaries, and explanations of what was done with it."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf

import kvlayers
import versions
from kvlayers.utils.units import readable_bytes
from models import COMMON, WINDOW, fresh_model, prompt, read, tiny_model
from named_factories import registered

LLAMA = tf.LlamaConfig(**COMMON)


def filled(cache: Any, tokens: int = 40, layers: int = 2) -> Any:
    for index in range(layers):
        cache.update(torch.randn(3, 2, tokens, 8), torch.randn(3, 2, tokens, 8), index)
    return cache


def test_layers_that_are_alike_are_one_row() -> None:
    cache = filled(kvlayers.DynamicCache(config=LLAMA))
    summary = cache.summary()
    assert (summary.kind, summary.tokens, summary.batch_size, summary.nbytes) == ("DynamicCache", 40, 3, cache.nbytes)
    [layers] = summary.layers
    assert (layers.layers, layers.kind, layers.tokens, layers.bits) == (range(2), "DynamicLayer", 40, None)
    assert layers.bytes == summary.bytes == {"device": cache.nbytes, "host": 0, "disk": 0}
    assert repr(summary).splitlines()[0] == f"DynamicCache: 40 tokens, batch 3, {readable_bytes(cache.nbytes)}"
    assert repr(summary).splitlines()[2].split() == ["0", "to", "1", "DynamicLayer", "40", "40", "60.0", "KiB"]


def test_states_are_counted_where_they_are_at_home(tmp_path: Path) -> None:
    disk = {"offloading": True, "offload_device": "disk", "offload_directory": tmp_path}
    on_disk = filled(kvlayers.DynamicCache(config=LLAMA, **disk))
    assert on_disk.summary().bytes == {"device": 0, "host": 0, "disk": on_disk.nbytes}
    assert on_disk.summary().layers[0].kind == "DynamicLayer"
    # On a machine that computes on the host, that is the device.
    assert filled(kvlayers.OffloadedCache(config=LLAMA)).summary().bytes["host"] == 0


@torch.no_grad()
def passed(family: str, cache: Any, **ids: Any) -> Any:
    """A cache that a model of a family has filled."""
    tiny_model(family)(**ids, past_key_values=cache)
    return cache


WINDOWED = tf.MistralConfig(**COMMON, sliding_window=WINDOW)
PACKED = {"config": LLAMA}
EVICTING = {"rule": "knorm", "keep": 0.5, "recent_tokens": 16}
Row = tuple[int, str, int, int | None, tuple[int, int] | None]
ROWS: dict[str, tuple[Callable[[], Any], list[Row]]] = {
    "full": (lambda: filled(kvlayers.DynamicCache(config=LLAMA)), [(2, "DynamicLayer", 40, 40, None)]),
    "window": (lambda: filled(kvlayers.DynamicCache(config=WINDOWED)), [(2, "SlidingLayer", 40, WINDOW - 1, None)]),
    "static window": (
        lambda: filled(kvlayers.StaticCache(WINDOWED, 64)),
        [(2, "StaticSlidingLayer", 40, WINDOW - 1, None)],
    ),
    "sink": (lambda: filled(kvlayers.SinkCache(16, 4, config=LLAMA)), [(2, "SinkLayer", 40, 15, None)]),
    "bits of keys and of values": (
        lambda: filled(kvlayers.QuantizedCache(**PACKED, key_nbits=8, value_nbits=4), tokens=400),
        [(2, "QuantizedLayer", 400, 400, (8, 4))],
    ),
    "bits": (lambda: filled(kvlayers.QuantizedCache(**PACKED, nbits=2)), [(2, "QuantizedLayer", 40, 40, (2, 2))]),
    "evicting": (
        lambda: filled(kvlayers.EvictingCache(LLAMA, **EVICTING, per_head=False), tokens=100),
        [(2, "EvictingLayer", 100, 50, None)],
    ),
    "recall": (
        lambda: filled(kvlayers.DynamicCache(config=LLAMA, recall={"pages": 1}), tokens=300),
        [(2, "RecallLayer", 300, 300, None)],
    ),
    "windows beside whole layers": (
        lambda: passed("gemma3", kvlayers.DynamicCache(config=tiny_model("gemma3").config), input_ids=prompt(1, 13)),
        [
            (2, "SlidingLayer", 13, WINDOW - 1, None),
            (1, "DynamicLayer", 13, 13, None),
            (1, "SlidingLayer", 13, WINDOW - 1, None),
        ],
    ),
    "a pair": (
        lambda: passed(
            "bart",
            kvlayers.EncoderDecoderCache(
                kvlayers.QuantizedCache(config=tiny_model("bart").config), kvlayers.DynamicCache()
            ),
            input_ids=prompt(1, 9),
            decoder_input_ids=prompt(1, 4),
        ),
        [(2, "self QuantizedLayer", 4, 4, (4, 4)), (2, "cross DynamicLayer", 9, 9, None)],
    ),
    "beside a layer of transformers": (
        lambda: filled(kvlayers.Cache(layers=[tf.cache_utils.DynamicLayer(), kvlayers.DynamicLayer()])),
        # One of the two has spare room.
        [(1, "DynamicLayer", 40, 40, None)] * 2,
    ),
    "a window of transformers": (
        lambda: filled(
            kvlayers.Cache(layers=[tf.cache_utils.DynamicSlidingWindowLayer(sliding_window=WINDOW) for _ in range(2)])
        ),
        [(2, "DynamicSlidingWindowLayer", 40, WINDOW - 1, None)],
    ),
}


@pytest.mark.parametrize(("make", "rows"), ROWS.values(), ids=ROWS)
def test_layers_that_hold_the_same_are_a_row(make: Callable[[], Any], rows: list[Row]) -> None:
    cache = make()
    summary = cache.summary()
    assert [(len(own.layers), own.kind, own.tokens, own.held, own.bits) for own in summary.layers] == rows
    assert summary.nbytes == cache.nbytes == sum(summary.bytes.values())
    for own in summary.layers:
        assert ("" if own.bits is None else "/".join(map(str, sorted(set(own.bits), reverse=True)))) in repr(summary)


def test_layers_whose_heads_keep_different_numbers_of_tokens_are_one_row() -> None:
    # Tables of the layers may differ by some bytes.
    [layers] = filled(kvlayers.EvictingCache(LLAMA, **EVICTING), tokens=100).summary().layers
    assert layers.layers == range(2)


@versions.kvlayers_recurrent_layers
def test_recurrent_layers_and_hybrid_ones_have_a_kind() -> None:
    cache = passed("jamba", kvlayers.DynamicCache(config=tiny_model("jamba").config), input_ids=prompt(2, 5))
    assert {layer.kind for layer in cache.summary().layers} == {"LinearAttentionLayer", "DynamicLayer"}
    assert cache.summary().bytes["device"] == sum(layer.nbytes for layer in cache.layers)


def test_an_empty_cache_has_a_summary() -> None:
    assert repr(kvlayers.DynamicCache().summary()).startswith("DynamicCache: 0 tokens, 0 B")
    assert kvlayers.DynamicCache(config=LLAMA).summary().layers[0].tokens == 0


def test_it_is_a_table_for_rich_and_for_notebooks() -> None:
    rich_console = pytest.importorskip("rich.console", reason="the extra 'cli' is not installed")
    summary = filled(kvlayers.QuantizedCache(config=LLAMA), tokens=400).summary()
    console = rich_console.Console(width=100)
    with console.capture() as shown:
        console.print(summary)
    assert summary.title in shown.get()
    assert "QuantizedLayer" in shown.get()
    page = summary._repr_html_()
    assert page.count("<tr>") == 2
    assert f"<caption>{summary.title}</caption>" in page
    assert "<td>QuantizedLayer</td><td>400</td><td>400</td><td>4</td>" in page


class Hostile(kvlayers.DynamicCache):
    """A cache whose class is called what no class should be."""


Hostile.__name__ = "<script>alert(1)</script>"


def test_caches_plans_and_explanations_are_html_in_notebooks_and_believe_no_name() -> None:
    cache = filled(Hostile(config=LLAMA))
    assert cache._repr_html_() == cache.summary()._repr_html_()
    cache.prefix_notes = ("<img src=x>",)
    with registered(**{"<b>": lambda request: kvlayers.DynamicCache(config=request.config)}):
        plan = kvlayers.plan(LLAMA, 100, names=["<b>", "int4"])
    pages = [cache._repr_html_(), cache.explain()._repr_html_(), plan._repr_html_()]
    for page in pages:
        assert not re.search("<(script|img|b)\\b", page)
        assert "&lt;" in page
    assert pages[2].count("<tr") == 3
    assert pages[2].count("font-weight: bold") == 1
    assert pages[2].count("<p>") == len(plan.notes)


def test_the_representation_says_tokens_bits_batch_and_bytes() -> None:
    assert repr(kvlayers.DynamicCache()) == "DynamicCache(0 tokens, 0 B)"
    quantized = filled(kvlayers.QuantizedCache(config=LLAMA, key_nbits=4, value_nbits=2), tokens=400)
    held = quantized.summary().title.rpartition(", ")[2]
    assert repr(quantized) == f"QuantizedCache(2 x QuantizedLayer of 4/2 bits, 400 tokens, batch 3, {held})"
    each = kvlayers.QuantizedCache(config=LLAMA, nbits=[2, 8])
    assert repr(each).startswith("QuantizedCache(1 x QuantizedLayer of 2 bits, 1 x QuantizedLayer of 8 bits, 0 tokens")
    # Layers that hold other bytes are of one kind all the same.
    uneven = filled(kvlayers.DynamicCache(config=LLAMA), layers=1)
    assert repr(uneven).startswith("DynamicCache(2 x DynamicLayer, 40 tokens, batch 3, ")


# What it tells of prefixes, of the ways that attention went, and of compilations


def quantized(tokens: int = 300) -> Any:
    model = tiny_model("llama")
    return read(model, prompt(1, tokens), kvlayers.QuantizedCache(config=model.config, nbits=4, residual_length=16))[0]


def ways(cache: Any) -> dict[str, int]:
    return dict(cache.explain().attention)


def test_a_plain_cache_has_nothing_to_tell() -> None:
    told = kvlayers.DynamicCache(config=LLAMA).explain()
    assert (told.prefixes, dict(told.attention), told.traces) == ((), {}, 0)


def test_attention_on_packed_states_is_counted_for_each_layer() -> None:
    cache = quantized()
    before = ways(cache)
    for _ in range(3):
        read(tiny_model("llama"), prompt(1, 1, seed=3), cache)
    [(way, count)] = (ways(cache).items() - before.items()) or [("", 0)]
    assert count - before.get(way, 0) == 3 * len(cache.layers)
    assert way.startswith(("a compiled kernel", "plain torch, block by block, as the kernel could not be compiled"))
    assert f"attention, {count} times: {way}" in repr(cache.explain())


def attended_by_autograd(cache: Any) -> None:
    states = cache.update(*torch.randn(2, 1, 2, 1, 8), 0)
    torch.nn.functional.scaled_dot_product_attention(torch.randn(1, 2, 1, 8, requires_grad=True), *states)


OTHER_WAYS: dict[str, tuple[Callable[[Any], object], str]] = {
    "many queries": (
        lambda cache: read(tiny_model("llama"), prompt(1, 200, seed=3), cache),
        "more than 128 queries for a kv head",
    ),
    "autograd": (attended_by_autograd, "in full precision, as autograd follows what is computed"),
    "a function": (lambda cache: cache.update(*torch.randn(2, 1, 2, 1, 8), 0)[0].exp(), "exp in full precision"),
}


@pytest.mark.parametrize(("use", "why"), OTHER_WAYS.values(), ids=OTHER_WAYS)
def test_what_cannot_read_codes_says_why(use: Callable[[Any], object], why: str) -> None:
    """And a fork counts its own ways."""
    cache = quantized()
    before, twin = ways(cache), cache.fork()
    use(twin)
    assert {why in way for way in ways(twin)} == {True}
    assert ways(cache) == before


def test_a_store_of_prefixes_says_what_it_had_of_a_prompt() -> None:
    model, ids = fresh_model("llama"), prompt(1, 40)
    longer = torch.cat([ids[:, :30], prompt(1, 10, seed=7)], dim=1)
    store = kvlayers.PrefixStore(max_bytes=2**24)
    how = {"max_new_tokens": 2, "do_sample": False, "return_dict_in_generate": True, "prefix_store": store}
    first, second = (kvlayers.generate(model, each, **how).past_key_values.explain() for each in (ids, longer))
    assert first.prefixes == ("0 of 40 tokens were stored: nothing is stored for this model and namespace",)
    assert second.prefixes == ("30 of 40 tokens were stored: the stored sequence diverges after 30",)
    assert "prefix: 30 of 40 tokens were stored" in repr(second)


def test_a_call_that_cannot_go_by_its_store_says_why() -> None:
    model, ids = fresh_model("llama"), prompt(1, 40)
    with kvlayers.installed(prefix_store=kvlayers.PrefixStore(max_bytes=2**24)):
        output = model.generate(ids, max_new_tokens=2, return_dict_in_generate=True, prompt_lookup_num_tokens=2)
        assert "could not use the store: its decoding mode is" in output.past_key_values.explain().prefixes[0]
        output = model.generate(ids, max_new_tokens=2, return_dict_in_generate=True)
        assert output.past_key_values.explain().prefixes[0].startswith("0 of 40")


@pytest.mark.slow
@torch.no_grad()
def test_traces_of_compiled_code_are_counted() -> None:
    versions.need_since("5.4", "compiled decode loops without cache_position")
    torch.compiler.reset()
    model = fresh_model("llama", num_hidden_layers=1)
    cache = kvlayers.StaticCache(model.config, max_cache_len=64)
    compiled = torch.compile(model.forward, backend="eager", fullgraph=True, dynamic=False)
    model(prompt(1, 8), past_key_values=cache)
    traces = [cache.explain().traces]
    for tokens in (1, 1, 1, 4):
        compiled(prompt(1, tokens), past_key_values=cache)
        traces.append(cache.explain().traces)
    assert traces == [0, 1, 1, 1, 2]
    assert "compiled: 2 times, of which 1 again" in repr(cache.explain())
