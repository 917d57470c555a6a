"""What a cache says of itself, beside what it really holds."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from transformers import cache_utils as upstream

import kvlayers
import versions
from kvlayers.utils.units import readable_bytes
from models import COMMON, WINDOW, prompt, tiny_model

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


def test_bits_are_those_of_keys_and_values() -> None:
    cache = filled(kvlayers.QuantizedCache(config=LLAMA, key_nbits=8, value_nbits=4), tokens=400)
    assert cache.summary().layers[0].bits == (8, 4)
    assert " 8/4 " in repr(cache.summary())
    assert filled(kvlayers.QuantizedCache(config=LLAMA, nbits=2)).summary().layers[0].bits == (2, 2)


def test_windows_and_whole_layers_are_told_apart() -> None:
    model = tiny_model("gemma3")
    cache = kvlayers.DynamicCache(config=model.config)
    with torch.no_grad():
        model(prompt(1, WINDOW + 5), past_key_values=cache)
    found = [(layer.kind, len(layer.layers)) for layer in cache.summary().layers]
    assert sum(count for _, count in found) == len(cache.layers)
    assert {kind for kind, _ in found} == {"SlidingLayer", "DynamicLayer"}
    assert [layer.layers[0] for layer in cache.summary().layers][:2] == [0, len(cache.summary().layers[0].layers)]


def test_states_are_counted_where_they_are_at_home(tmp_path: Path) -> None:
    disk = {"offloading": True, "offload_device": "disk", "offload_directory": tmp_path}
    on_disk = filled(kvlayers.DynamicCache(config=LLAMA, **disk))
    assert on_disk.summary().bytes == {"device": 0, "host": 0, "disk": on_disk.nbytes}
    assert on_disk.summary().layers[0].kind == "DynamicLayer"
    # On a machine that computes on the host, that is the device.
    assert filled(kvlayers.OffloadedCache(config=LLAMA)).summary().bytes["host"] == 0


@versions.kvlayers_recurrent_layers
def test_an_evicting_cache_has_seen_more_than_it_holds() -> None:
    cache = kvlayers.EvictingCache(LLAMA, rule="knorm", keep=0.5, recent_tokens=16, per_head=False)
    [layers] = filled(cache, tokens=100).summary().layers
    assert (layers.kind, layers.tokens, layers.held) == ("EvictingLayer", 100, 50)
    assert layers.bytes["device"] == cache.nbytes
    assert "2 x EvictingLayer, 100 tokens" in repr(cache)


def test_layers_whose_heads_keep_different_numbers_of_tokens_are_one_row() -> None:
    cache = filled(kvlayers.EvictingCache(LLAMA, rule="knorm", keep=0.5, recent_tokens=16), tokens=100)
    # Tables of the layers may differ by some bytes.
    [layers] = cache.summary().layers
    assert layers.layers == range(2)
    assert layers.bytes["device"] == cache.nbytes


def test_a_cache_with_recall_holds_what_it_has_seen() -> None:
    cache = filled(kvlayers.DynamicCache(config=LLAMA, recall={"pages": 1}), tokens=300)
    [layers] = cache.summary().layers
    assert (layers.kind, layers.tokens, layers.held, layers.bits) == ("RecallLayer", 300, 300, None)
    assert layers.bytes["device"] > filled(kvlayers.DynamicCache(config=LLAMA), tokens=300).nbytes


def test_recurrent_layers_and_hybrid_ones_have_a_kind() -> None:
    model = tiny_model("jamba")
    cache = kvlayers.DynamicCache(config=model.config)
    with torch.no_grad():
        model(prompt(2, 5), past_key_values=cache)
    assert {layer.kind for layer in cache.summary().layers} == {"LinearAttentionLayer", "DynamicLayer"}
    assert cache.summary().bytes["device"] == sum(layer.nbytes for layer in cache.layers)


def test_a_pair_has_both_parts() -> None:
    model = tiny_model("bart")
    pair = kvlayers.EncoderDecoderCache(kvlayers.QuantizedCache(config=model.config), kvlayers.DynamicCache())
    with torch.no_grad():
        model(input_ids=prompt(1, 9), decoder_input_ids=prompt(1, 4), past_key_values=pair)
    summary = pair.summary()
    assert [layer.kind for layer in summary.layers] == ["self QuantizedLayer", "cross DynamicLayer"]
    assert [layer.tokens for layer in summary.layers] == [4, 9]
    assert summary.nbytes == pair.nbytes == sum(summary.bytes.values())


def test_layers_of_transformers_have_their_names() -> None:
    cache = filled(kvlayers.Cache(layers=[tf.cache_utils.DynamicLayer(), kvlayers.DynamicLayer()]))
    assert {layer.kind for layer in cache.summary().layers} == {"DynamicLayer"}
    assert cache.summary().bytes["device"] == cache.nbytes


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
    with kvlayers_named("<b>", lambda request: kvlayers.DynamicCache(config=request.config)):
        plan = kvlayers.plan(LLAMA, 100, names=["<b>", "int4"])
    pages = [cache._repr_html_(), cache.explain()._repr_html_(), plan._repr_html_()]
    for page in pages:
        assert not re.search("<(script|img|b)\\b", page)
        assert "&lt;" in page
    assert pages[2].count("<tr") == 3
    assert pages[2].count("font-weight: bold") == 1
    assert pages[2].count("<p>") == len(plan.notes)


@contextmanager
def kvlayers_named(name: str, factory: Any) -> Iterator[None]:
    kvlayers.register(name)(factory)
    try:
        yield
    finally:
        kvlayers.unregister(name)


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


WINDOWED = tf.MistralConfig(**COMMON, sliding_window=WINDOW)


@pytest.mark.parametrize(
    ("make", "held"),
    [
        (lambda: kvlayers.DynamicCache(config=WINDOWED), WINDOW - 1),
        (lambda: kvlayers.StaticCache(WINDOWED, 64), WINDOW - 1),
        (lambda: kvlayers.SinkCache(16, 4, config=LLAMA), 15),
        (lambda: kvlayers.DynamicCache(config=LLAMA), 40),
        (
            lambda: kvlayers.Cache(
                layers=[upstream.DynamicSlidingWindowLayer(sliding_window=WINDOW) for _ in range(2)]
            ),
            WINDOW - 1,
        ),
    ],
    ids=["window", "static window", "sink", "full", "transformers"],
)
def test_a_window_holds_fewer_tokens_than_it_has_seen(make: Any, held: int) -> None:
    cache = filled(make())
    [layers] = cache.summary().layers
    assert (layers.tokens, layers.held) == (40, held)
    head, row = repr(cache.summary()).splitlines()[1:]
    assert head.split()[2:4] == ["seen", "held"]
    assert row.split()[4:6] == ["40", str(held)]
