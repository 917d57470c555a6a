"""A packed cache takes no more memory than a dense one at any length, and pays little for growing."""

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import transformers as tf

from kvlayers import CacheLayer, DynamicCache, DynamicLayer, Quantization, QuantizedCache, QuantizedLayer, SinkCache
from kvlayers.core.buffer import TokenBuffer
from matrix import once
from models import COMMON
from spies import spy

HEAD_DIM = 64
LONGEST = 300
TOLERANCE = 1.05
"""Of the bytes of a dense cache."""

QUANTIZATIONS = [
    *(Quantization(nbits=nbits) for nbits in (2, 3, 4, 6, 8)),
    Quantization("fp8"),
    *(Quantization("hqq", nbits=nbits) for nbits in (4, 8)),
    Quantization("quanto", nbits=4),
]


def states(tokens: int, dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(1, 1, tokens, HEAD_DIM, dtype=dtype), torch.zeros(1, 1, tokens, HEAD_DIM, dtype=dtype)


def bytes_of(tokens: int, dtype: torch.dtype) -> int:
    return 2 * tokens * HEAD_DIM * dtype.itemsize


def check_beside_dense(packed: Any, dense: Any, updates: Iterable[int], dtype: torch.dtype) -> None:
    for tokens in updates:
        packed.update(*states(tokens, dtype))
        dense.update(*states(tokens, dtype))
        assert packed.nbytes <= TOLERANCE * dense.nbytes, packed.length


@pytest.mark.parametrize(("quantization", "dtype"), once(QUANTIZATIONS, [torch.bfloat16, torch.float32]))
def test_a_packed_layer_holds_no_more_than_a_dense_one(quantization: Quantization, dtype: torch.dtype) -> None:
    # A hint within the first block, one within the second, and one that is passed.
    for hint in (150, 230, LONGEST):
        packed, dense = QuantizedLayer(quantization, hint), DynamicLayer(hint)
        check_beside_dense(packed, dense, [1] * LONGEST, dtype)
    # A dense layer is full, without spare room, 128 tokens after its prompt.
    for prompt in (1, 72, 81, 113, 145, 208, 209):
        check_beside_dense(QuantizedLayer(quantization), DynamicLayer(), [prompt, *[1] * 128], dtype)
    # Once packed, it takes the bytes of its tokens at most, without the spare room that a dense layer has besides.
    packed, dense = QuantizedLayer(quantization), DynamicLayer()
    for length in range(1, LONGEST + 1):
        check_beside_dense(packed, dense, [1], dtype)
        assert length <= 208 or packed.nbytes <= TOLERANCE * bytes_of(length, dtype), length


LLAMA = tf.LlamaConfig(**{**COMMON, "head_dim": HEAD_DIM})
PACKED = {"nbits": 8, "residual_length": 32}


def of_windows(window: int) -> tuple[Any, Any]:
    config = tf.MistralConfig(**COMMON, sliding_window=window)
    packed = QuantizedCache(config=config, quantize_sliding=True, **PACKED)
    return packed, DynamicCache(config=config)


def of_sinks(window: int) -> tuple[Any, Any]:
    options = {"config": LLAMA, "window_length": window, "num_sink_tokens": 4}
    return SinkCache(**options, quantization=PACKED), SinkCache(**options)


def offloaded(_: int) -> tuple[Any, Any]:
    options = {"config": LLAMA, "offloading": True}
    return QuantizedCache(nbits=8, **options), DynamicCache(**options)


@pytest.mark.parametrize(
    ("make", "window"), [*itertools.product([of_windows, of_sinks], [40, 160, 400]), (offloaded, LONGEST)]
)
def test_a_packed_cache_holds_no_more_than_a_dense_one(make: Callable[[int], tuple[Any, Any]], window: int) -> None:
    packed, dense = (cache.layers[0] for cache in make(window))
    assert packed.bits == (8, 8)
    check_beside_dense(packed, dense, [1] * LONGEST, torch.bfloat16)


def loaded(make: Callable[[], CacheLayer], layer: CacheLayer) -> CacheLayer:
    twin = make()
    twin.load_state(layer.state())
    return twin


CHANGES: dict[str, Callable[[Callable[[], CacheLayer], CacheLayer], CacheLayer | None]] = {
    "fork": lambda make, layer: layer.fork(),
    "load": loaded,
    "crop": lambda make, layer: layer.crop(30),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("prompt", [50, 150, 209])
def test_a_packed_layer_that_was_changed_holds_no_more_than_a_dense_one(prompt: int, change: str) -> None:
    layers = []
    for make in (lambda: QuantizedLayer(Quantization(nbits=6)), DynamicLayer):
        layer = make()
        layer.update(*states(prompt))
        layers.append(CHANGES[change](make, layer) or layer)
    check_beside_dense(*layers, [1] * 60, torch.bfloat16)


def test_growing_copies_a_few_tokens_for_each_that_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[int] = []
    spy(monkeypatch, TokenBuffer, "write", lambda buffer, start, tokens: copied.append(tokens.nbytes))
    layer = QuantizedLayer(Quantization(nbits=8))
    for _ in range(2048):
        layer.update(*states(1))
    # Of each block's 64 tokens: themselves, the residual of 129 when they are packed, and that of 161 when it grows;
    # and at 8 bits the blocks themselves, 29 in the end, in half of a dense block's bytes each.
    each = 1 + (129 + 161) / 64 + 29 / 2 * 0.54
    assert sum(copied) <= each * bytes_of(2048, torch.bfloat16)
