"""What a cache says of itself, beside what it really holds."""

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
from models import COMMON, WINDOW, prompt, tiny_model
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


def passed(family: str, cache: Any, **ids: Any) -> Any:
    """A cache that a model of a family has filled."""
    with torch.no_grad():
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


@pytest.mark.parametrize("case", ROWS)
def test_layers_that_hold_the_same_are_a_row(case: str) -> None:
    make, rows = ROWS[case]
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
