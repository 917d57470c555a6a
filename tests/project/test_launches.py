"""What each operation of a cache asks of a GPU: no more launches than it may, and the host waits for no decode step.

One layer of Llama 3.1 8B's shape in bfloat16, on meta tensors, whose operations take no time. A launch is a kernel, of
PyTorch or of kvlayers; PyTorch's attention counts as one.
"""

import functools
import gc
import pathlib
import re
import statistics
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import kvlayers
from device_counts import DEVICE, Counts, Transfers, counted, gpu
from kvlayers.quantized.quantization import Quantization
from kvlayers.quantized.quantized_store import QuantizedStore

HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
DTYPE = torch.bfloat16
WINDOW = 4096
CHANNELS = 8192
"""Channels of a convolution of the recurrent layer."""
MOST = 40960
"""Tokens that static caches reserve."""


@pytest.fixture(autouse=True)
def _on_a_gpu() -> Iterator[None]:
    with torch.no_grad(), gpu():
        yield


def config(**options: Any) -> transformers.PretrainedConfig:
    """That of Llama 3.1 8B with one layer; with `sliding_window`, of a mistral."""
    config_class = transformers.MistralConfig if options else transformers.LlamaConfig
    return config_class(
        hidden_size=HEADS * HEAD_DIM,
        num_hidden_layers=1,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        max_position_embeddings=131072,
        **options,
    )


def states(tokens: int, batch: int = 1) -> tuple[Tensor, Tensor]:
    shape = (batch, KV_HEADS, tokens, HEAD_DIM)
    return torch.empty(shape, dtype=DTYPE, device=DEVICE), torch.empty(shape, dtype=DTYPE, device=DEVICE)


def attend(attended: tuple[Tensor, Tensor], tokens: int = 1, batch: int = 1, mask: Tensor | None = None) -> Tensor:
    """Attention of the queries of new tokens to what an update returned, as a model asks for it."""
    query = torch.empty((batch, HEADS, tokens, HEAD_DIM), dtype=DTYPE, device=DEVICE)
    return scaled_dot_product_attention(query, *attended, attn_mask=mask, enable_gqa=True)


def update(cache: Any, tokens: int = 1, batch: int = 1) -> Counts:
    new = states(tokens, batch)
    with counted() as counts:
        cache.update(*new, 0)
    return counts


def step(cache: Any, tokens: int = 1, batch: int = 1, masked: bool = False) -> Counts:
    """Counts of an update and of attention to what it returns."""
    new = states(tokens, batch)
    with counted() as counts:
        attended = cache.update(*new, 0)
        of_mask = (batch, 1, tokens, attended[0].shape[2])
        attend(attended, tokens, batch, torch.empty(of_mask, dtype=torch.bool, device=DEVICE) if masked else None)
    return counts


def held(cache: Any, *updates: int, batch: int = 1) -> Any:
    for tokens in updates:
        cache.update(*states(tokens, batch), 0)
    return cache


def usual(found: Sequence[Counts]) -> Counts:
    """The counts of the usual step among several."""
    middle = statistics.median_low(counts.launches for counts in found)
    return next(counts for counts in found if counts.launches == middle)


def largest(found: Sequence[Counts]) -> Counts:
    """The counts of the step with the most launches, or of one for which the host waited."""
    return max(found, key=lambda counts: (bool(counts.stalls), counts.launches))


def updates(cache: Any, number: int) -> list[Counts]:
    return [update(cache) for _ in range(number)]


# What is done with a new cache


def prefill(cache: Any) -> Counts:
    counts = step(cache, 8192)
    counts.kernels["scaled_dot_product_attention"] -= 1
    return counts


def decoding(cache: Any, masked: bool = False) -> Counts:
    held(cache, 8192)
    return usual([step(cache, masked=masked) for _ in range(3)])


def after_crop(cache: Any) -> Counts:
    """The first step behind a crop into a block."""
    held(cache, 8192).crop(5000)
    return step(cache)


def packing(cache: Any) -> Counts:
    return largest(updates(held(cache, 2048), 80))


def second_turn(cache: Any) -> Counts:
    return step(held(cache, 32768, 1), 512, masked=True)


def usual_update(cache: Any) -> Counts:
    return usual(updates(held(cache, 8192), 9))


def largest_update(cache: Any, number: int = 1100) -> Counts:
    return largest(updates(held(cache, 8192), number))


def samples(cache: Any, tokens: int, prompts: int = 1) -> Any:
    """The cache with eight sequences, as many for each prompt."""
    held(cache, tokens, batch=prompts).expand(8 // prompts)
    return held(cache, 1, batch=8)


def of_samples(tokens: int, masked: bool = False) -> Callable[[Any], Counts]:
    return lambda cache: step(samples(cache, tokens), batch=8, masked=masked)


def beams(tokens: int, prompts: int = 1) -> Callable[[Any], Counts]:
    """Steps of a beam search: the cache is reordered, updated and read."""

    def reordered(cache: Any) -> Counts:
        new, order = states(1, 8), torch.empty(8, dtype=torch.int64, device=DEVICE)
        with counted() as counts:
            cache.reorder_cache(order)
            attend(cache.update(*new, 0), batch=8)
        return counts

    return lambda cache: largest([reordered(samples(cache, tokens, prompts)), reordered(cache), reordered(cache)])


def branch_of(cache: Any) -> Any:
    """Another cache behind the same tokens, as a hit in a store gives: the first has written behind them."""
    branch = cache.fork()
    held(cache, 1)
    return branch


def behind(*private: int) -> Callable[[Any], Counts]:
    """A step of a branch of a branch for each number of private tokens, behind 8,192 tokens. It has its own tail."""

    def measure(cache: Any) -> Counts:
        branch = held(cache, 8192)
        for tokens in private:
            branch = held(branch_of(branch), tokens)
        return usual([step(held(branch_of(branch), 1)) for _ in range(3)])

    return measure


def turn_of_branch(cache: Any) -> Counts:
    """A turn behind tokens that are stored."""
    return step(branch_of(held(cache, 32768)), 512, masked=True)


def recurrent_step(layer: Any) -> Counts:
    columns = torch.empty((1, CHANNELS, 1024), dtype=DTYPE, device=DEVICE)
    column = columns[:, :, :1]
    state = torch.empty((1, HEADS, HEAD_DIM, HEAD_DIM), dtype=torch.float32, device=DEVICE)
    for new in (columns, column):
        layer.update_conv_state(new, conv_kernel_size=4)
        layer.update_recurrent_state(state)
    with counted() as counts:
        layer.update_conv_state(column, conv_kernel_size=4)
        layer.update_recurrent_state(state)
    return counts


def offloaded(layer: Any) -> kvlayers.Cache:
    return kvlayers.Cache(layers=[kvlayers.OffloadedLayer(layer, kvlayers.offload.Prefetcher(transfers=Transfers))])


CACHES: dict[str, Callable[[], Any]] = {
    "int4": lambda: kvlayers.QuantizedCache(config=config(), nbits=4),
    "int8": lambda: kvlayers.QuantizedCache(config=config(), nbits=8),
    "int2": lambda: kvlayers.QuantizedCache(config=config(), nbits=2),
    "fp8": lambda: kvlayers.QuantizedCache(config=config(), backend="fp8"),
    "DynamicCache": lambda: kvlayers.DynamicCache(config=config()),
    "StaticCache": lambda: kvlayers.StaticCache(config(), max_cache_len=MOST),
    "DynamicCache, a window": lambda: kvlayers.DynamicCache(config=config(sliding_window=WINDOW)),
    "StaticCache, a window": lambda: kvlayers.StaticCache(config(sliding_window=WINDOW), max_cache_len=MOST),
    "SinkCache": lambda: kvlayers.SinkCache(config=config(), window_length=1024),
    "SinkCache, padded": lambda: kvlayers.SinkCache(config=config(), window_length=1024, left_padding=[7]),
    "SinkCache of 256": lambda: kvlayers.SinkCache(config=config(), window_length=256),
    "DynamicLayer, offloaded": lambda: offloaded(kvlayers.DynamicLayer()),
    "StaticLayer, offloaded": lambda: offloaded(kvlayers.StaticLayer(MOST)),
    "LinearAttentionLayer": kvlayers.LinearAttentionLayer,
}
PACKED = ("int4", "int8", "int2", "fp8")
UPDATE, MOVING = "update", "the largest of many updates, which moves tokens"
SHARED, SHARED_TWICE = "decode step behind one shared segment", "decode step behind two shared segments"
SAMPLES = "eight samples of a prompt of {}: decode step"
BEAMS = "eight beams of a prompt of 32,768: reorder and decode step"
TURN = "turn of 512 tokens behind 32k shared"

COUNTED: tuple[tuple[str, str, Callable[[Any], Counts], int], ...] = (
    *((cache, "prefill of 8,192 tokens, beyond attention's own kernel", prefill, 40) for cache in PACKED),
    *((cache, "update that packs a block", packing, 10) for cache in PACKED),
    *((cache, "decode step", decoding, 6) for cache in PACKED),
    *((cache, "decode step with a mask", functools.partial(decoding, masked=True), 6) for cache in PACKED),
    *((cache, "decode step behind a crop into a block", after_crop, 6) for cache in PACKED),
    ("int4", "second turn of 512 tokens behind 32k", second_turn, 60),
    ("", SAMPLES.format("2,048"), of_samples(2048), 8),
    ("", SAMPLES.format("8,192"), of_samples(8192), 8),
    ("", SAMPLES.format("32,768"), of_samples(32768), 8),
    ("int4", SAMPLES.format("32,768"), of_samples(32768), 10),
    ("", f"{SAMPLES.format('8,192')} with a mask", of_samples(8192, masked=True), 30),
    ("", BEAMS, beams(32768), 8),
    ("int4", BEAMS, beams(32768), 10),
    ("", "four beams of each of two prompts: reorder and decode step", beams(4096, 2), 14),
    *((cache, SHARED, behind(), 8) for cache in ("DynamicCache", "int4")),
    *((cache, SHARED_TWICE, behind(3000), 10) for cache in ("DynamicCache", "int4")),
    ("DynamicCache", TURN, turn_of_branch, 12),
    ("int4", TURN, turn_of_branch, 60),
    ("DynamicCache", UPDATE, usual_update, 2),
    ("StaticCache", UPDATE, usual_update, 3),
    ("DynamicCache, a window", UPDATE, usual_update, 2),
    ("StaticCache, a window", UPDATE, usual_update, 3),
    ("SinkCache", UPDATE, usual_update, 12),
    ("SinkCache, padded", UPDATE, usual_update, 15),
    ("DynamicLayer, offloaded", UPDATE, usual_update, 4),
    ("StaticLayer, offloaded", UPDATE, usual_update, 4),
    ("DynamicCache", MOVING, largest_update, 4),
    ("DynamicCache, a window", MOVING, largest_update, 18),
    ("StaticCache, a window", MOVING, largest_update, 15),
    ("SinkCache of 256", MOVING, functools.partial(largest_update, number=300), 28),
    ("LinearAttentionLayer", "decode step", recurrent_step, 4),
)
"""The cache, what is done with it, how, and the most launches. If no cache is named, it is a dense one."""


PAGE = pathlib.Path(__file__).parents[2] / "docs" / "gpu.md"
STATED = dict(re.findall(r"^\| ([^|]+) \| [\d,]* ?\| (\d+) \|$", PAGE.read_text(), re.MULTILINE))
OPERATIONS = {f"{cache}: {what}" if cache else what: (cache or "DynamicCache", *rest) for cache, what, *rest in COUNTED}


@pytest.mark.parametrize("operation", OPERATIONS)
def test_an_operation_asks_for_no_more_than_it_may(operation: str) -> None:
    cache, act, at_most = OPERATIONS[operation]
    counts = act(CACHES[cache]())
    assert counts.launches <= at_most, counts.kernels
    # A prompt is coded with the help of the host.
    assert act is prefill or not counts.stalls
    if operation in STATED:
        assert str(counts.launches) == STATED[operation], "docs/gpu.md has another count"


def test_every_row_of_the_page_is_counted() -> None:
    assert len(STATED) == 12
    assert STATED.keys() <= OPERATIONS.keys()


@pytest.mark.parametrize(
    ("head_dim", "path"), [(128, "by a Triton kernel"), (512, "in plain torch, as the head_dim is 512, above 256")]
)
def test_explain_says_how_blocks_were_packed(head_dim: int, path: str) -> None:
    cache = kvlayers.QuantizedCache(nbits=8)
    for tokens in (300, *[1] * 80):
        cache.update(*[torch.empty(1, 8, tokens, head_dim, dtype=torch.bfloat16, device=DEVICE) for _ in range(2)], 0)
    assert dict(cache.explain().packing) == {f"keys {path}": 2, f"values {path}": 2}
    assert f"packing, 2 times: keys {path}" in repr(cache.explain())


def test_packed_memory_goes_with_the_last_reference_to_it() -> None:
    store = QuantizedStore(Quantization(nbits=4))
    gc.collect()
    gc.disable()
    try:
        for tokens in (300, 1):
            states = [torch.empty(1, 8, tokens, 128, dtype=torch.bfloat16, device=DEVICE) for _ in range(2)]
            store.validate(*states)
            keys, values = store.extend(*states)
        query = torch.empty(1, 32, 1, 128, dtype=torch.bfloat16, device=DEVICE)
        torch.nn.functional.scaled_dot_product_attention(query, keys, values, enable_gqa=True)
        segment = weakref.ref(keys.snapshot.segments.in_order[1])
        assert segment().kernel_cache
        del store, keys, values
        assert segment() is None
    finally:
        gc.enable()
