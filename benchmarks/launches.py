"""Counts what each operation of a cache asks of a GPU, on any machine: launches, synchronisations and copies.

    python benchmarks/launches.py
    python benchmarks/launches.py --only "int4" --operators
    python benchmarks/launches.py --json

One layer of Llama 3.1 8B's shape in bfloat16, on meta tensors, whose operations take no time. A launch is a kernel, of
PyTorch or of kvlayers; PyTorch's attention counts as one. A synchronisation is a wait of the host for a number of the
device. A copy is one between the memory of the host and that of the device, for which the host waits too.

It exits with 1 if an operation asks for more than it may.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import kvlayers
from lib.counting import DEVICE, Counts, Transfers, counted, gpu

HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
DTYPE = torch.bfloat16
WINDOW = 4096

Measure = Callable[[], Counts]


@dataclass(frozen=True)
class Operation:
    """An operation whose demands on the device are counted.

    Attributes:
        name: what is done.
        measure: does it and returns the counts.
        before: launches on 2026-11-22, before kernels of kvlayers' own quantized and merged; `None` if nobody counted.
        at_most: the most launches that it may take, `None` for any number.
        may_wait: whether the host may wait for the device.
    """

    name: str
    measure: Measure
    before: int | None = None
    at_most: int | None = None
    may_wait: bool = False

    def complaints(self, counts: Counts) -> list[str]:
        """How the counts exceed what the operation may take."""
        found = []
        if self.at_most is not None and counts.launches > self.at_most:
            found.append(f"{counts.launches} launches instead of at most {self.at_most}: {dict(counts.kernels)}")
        if counts.stalls and not self.may_wait:
            found.append(f"the host waits for the device: {counts.stalls}")
        return found


def config(**options: Any) -> transformers.PretrainedConfig:
    return transformers.LlamaConfig(
        num_hidden_layers=1,
        hidden_size=HEADS * HEAD_DIM,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        max_position_embeddings=131072,
        **options,
    )


def windowed_config() -> transformers.PretrainedConfig:
    return transformers.MistralConfig(
        num_hidden_layers=1,
        hidden_size=HEADS * HEAD_DIM,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        sliding_window=WINDOW,
        max_position_embeddings=131072,
    )


def states(tokens: int, batch: int = 1) -> tuple[Tensor, Tensor]:
    """Keys and values of new tokens."""
    shape = (batch, KV_HEADS, tokens, HEAD_DIM)
    return torch.empty(shape, dtype=DTYPE, device=DEVICE), torch.empty(shape, dtype=DTYPE, device=DEVICE)


def attend(attended: tuple[Tensor, Tensor], tokens: int = 1, batch: int = 1, mask: Tensor | None = None) -> Tensor:
    """Attention of the queries of new tokens to what an update returned, as a model asks for it."""
    query = torch.empty((batch, HEADS, tokens, HEAD_DIM), dtype=DTYPE, device=DEVICE)
    return scaled_dot_product_attention(query, *attended, attn_mask=mask, enable_gqa=True)


def mask_over(attended: tuple[Tensor, Tensor], tokens: int = 1, batch: int = 1) -> Tensor:
    return torch.empty((batch, 1, tokens, attended[0].shape[2]), dtype=torch.bool, device=DEVICE)


def update(cache: Any, tokens: int = 1, batch: int = 1) -> Counts:
    """Counts of an update."""
    new = states(tokens, batch)
    with counted() as counts:
        cache.update(*new, 0)
    return counts


def step(cache: Any, tokens: int = 1, batch: int = 1, masked: bool = False) -> Counts:
    """Counts of an update and of attention to what it returns."""
    new = states(tokens, batch)
    with counted() as counts:
        attended = cache.update(*new, 0)
        attend(attended, tokens, batch, mask_over(attended, tokens, batch) if masked else None)
    return counts


def held(cache: Any, *updates: int, batch: int = 1) -> Any:
    """The cache, after updates of so many tokens each."""
    for tokens in updates:
        cache.update(*states(tokens, batch), 0)
    return cache


def usual(measure: Measure, steps: int) -> Counts:
    """The counts of the usual step among many."""
    found = [measure() for _ in range(steps)]
    middle = statistics.median_low(counts.launches for counts in found)
    return next(counts for counts in found if counts.launches == middle)


def largest(measure: Measure, steps: int) -> Counts:
    """The counts of the step among many that takes the most launches, with everything that the host waited for."""
    found = [measure() for _ in range(steps)]
    worst = max(found, key=lambda counts: counts.launches)
    return next((counts for counts in found if counts.stalls), worst)


# Packed caches


QUANTIZED: dict[str, dict[str, Any]] = {
    "int4": {"nbits": 4},
    "int8": {"nbits": 8},
    "int2": {"nbits": 2},
    "fp8": {"backend": "fp8"},
}
BEFORE = {"int4": (122914, 1981, 48), "int8": (4032, None, None)}


def quantized(name: str) -> kvlayers.QuantizedCache:
    return kvlayers.QuantizedCache(config=config(), **QUANTIZED[name])


def decoding(name: str, masked: bool = False) -> Counts:
    return usual(lambda cache=held(quantized(name), 8192): step(cache, masked=masked), 3)


def after_crop(name: str) -> Counts:
    """The first step behind a crop into a block."""
    cache = held(quantized(name), 8192)
    cache.crop(5000)
    return step(cache)


def packing(name: str) -> Counts:
    """The update that packs a block."""
    cache = held(quantized(name), 2048)
    return largest(lambda: update(cache), 80)


def second_turn(name: str) -> Counts:
    return step(held(quantized(name), 32768, 1), 512, masked=True)


def packed_operations() -> Iterator[Operation]:
    for name in QUANTIZED:
        prefill, block, decode = BEFORE.get(name, (None, None, None))
        yield Operation(
            f"{name}: prefill of 8,192 tokens, beyond attention's own kernel",
            lambda name=name: _without_attention(step(quantized(name), 8192)),
            prefill,
            40,
        )
        yield Operation(f"{name}: update that packs a block", lambda name=name: packing(name), block, 8)
        yield Operation(f"{name}: decode step", lambda name=name: decoding(name), decode, 6)
        yield Operation(f"{name}: decode step with a mask", lambda name=name: decoding(name, masked=True), None, 6)
        yield Operation(f"{name}: decode step behind a crop into a block", lambda name=name: after_crop(name), None, 6)
    yield Operation(
        "int4: second turn of 512 tokens behind 32k", lambda: second_turn("int4"), 22150, 60
    )


def _without_attention(counts: Counts) -> Counts:
    counts.kernels["scaled_dot_product_attention"] -= 1
    return counts


# A shared prompt


def shared(tokens: int) -> kvlayers.DynamicCache:
    cache = held(kvlayers.DynamicCache(config=config()), tokens)
    cache.expand(8)
    return held(cache, 1, batch=8)


def reordered(tokens: int) -> Counts:
    """A step of a beam search: the cache is reordered, updated and read."""
    cache, new = shared(tokens), states(1, 8)
    beams = torch.empty(8, dtype=torch.int64, device=DEVICE)
    with counted() as counts:
        cache.reorder_cache(beams)
        attend(cache.update(*new, 0), batch=8)
    return counts


def shared_operations() -> Iterator[Operation]:
    for tokens, before in ((2048, 124), (8192, 328), (32768, 1144)):
        yield Operation(
            f"eight samples of a prompt of {tokens:,}: decode step",
            lambda tokens=tokens: step(shared(tokens), batch=8),
            before,
            8,
        )
    yield Operation("eight beams of a prompt of 32,768: reorder and decode step", lambda: reordered(32768), None, None)


# Caches in full precision


def dense_operations() -> Iterator[Operation]:
    ours, theirs = kvlayers, transformers
    caches: list[tuple[str, Callable[[], Any], int | None]] = [
        ("transformers' DynamicCache", lambda: transformers.DynamicCache(config=config()), None),
        ("DynamicCache", lambda: kvlayers.DynamicCache(config=config()), 2),
    ]
    for name, make, at_most in caches:
        yield Operation(f"{name}: update", lambda make=make: usual(lambda cache=held(make(), 8192): update(cache), 3), None, at_most)
