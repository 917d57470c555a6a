"""Counts what each operation of a cache asks of a GPU, on any machine: launches, synchronisations and copies.

    python lab/benchmarks/launches.py
    python lab/benchmarks/launches.py --only "int4" --operators
    python lab/benchmarks/launches.py --json

One layer of Llama 3.1 8B's shape in bfloat16, on meta tensors, whose operations take no time. A launch is a kernel, of
PyTorch or of kvlayers; PyTorch's attention counts as one. A synchronisation is a wait of the host for a number of the
device. A copy is one between the memory of the host and that of the device, for which the host waits too.

The exit code is 1 if an operation asks for more than it may.
"""

import argparse
import functools
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import kvlayers
from lib.counting import DEVICE, Counts, Transfers, counted, gpu
from lib.workload import Shape

HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
DTYPE = torch.bfloat16
WINDOW = 4096
CHANNELS = 8192
"""Channels of a convolution of the recurrent layer."""
MOST = 40960
"""Tokens that static caches reserve."""

Measure = Callable[[], Counts]


@dataclass(frozen=True)
class Operation:
    """An operation whose demands on the device are counted.

    Attributes:
        name: what is done.
        measure: does it and returns the counts.
        at_most: the most launches that it may take, `None` for any number.
        may_wait: whether the host may wait for the device.
    """

    name: str
    measure: Measure
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
    return Shape(1, HEADS, KV_HEADS, HEAD_DIM).config(131072, **options)


def states(tokens: int, batch: int = 1) -> tuple[Tensor, Tensor]:
    shape = (batch, KV_HEADS, tokens, HEAD_DIM)
    return torch.empty(shape, dtype=DTYPE, device=DEVICE), torch.empty(shape, dtype=DTYPE, device=DEVICE)


def attend(attended: tuple[Tensor, Tensor], tokens: int = 1, batch: int = 1, mask: Tensor | None = None) -> Tensor:
    """Attention of the queries of new tokens to what an update returned, as a model asks for it."""
    query = torch.empty((batch, HEADS, tokens, HEAD_DIM), dtype=DTYPE, device=DEVICE)
    return scaled_dot_product_attention(query, *attended, attn_mask=mask, enable_gqa=True)


def mask_over(attended: tuple[Tensor, Tensor], tokens: int = 1, batch: int = 1) -> Tensor:
    return torch.empty((batch, 1, tokens, attended[0].shape[2]), dtype=torch.bool, device=DEVICE)


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
        attend(attended, tokens, batch, mask_over(attended, tokens, batch) if masked else None)
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
    "transformers' DynamicCache": lambda: transformers.DynamicCache(config=config()),
    "transformers' StaticCache": lambda: transformers.StaticCache(config=config(), max_cache_len=MOST),
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

COUNTED: tuple[tuple[str, str, Callable[[Any], Counts], int | None], ...] = (
    *((cache, "prefill of 8,192 tokens, beyond attention's own kernel", prefill, 40) for cache in PACKED),
    *((cache, "update that packs a block", packing, 8) for cache in PACKED),
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
    ("transformers' DynamicCache", UPDATE, usual_update, None),
    ("DynamicCache", UPDATE, usual_update, 2),
    ("transformers' StaticCache", UPDATE, usual_update, None),
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


def operations() -> list[Operation]:
    return [
        Operation(
            f"{cache}: {what}" if cache else what,
            lambda make=CACHES[cache or "DynamicCache"], act=act: act(make()),
            at_most,
            # A prompt is coded with the help of the host, and nothing is asked of transformers' caches.
            may_wait=act is prefill or at_most is None,
        )
        for cache, what, act, at_most in COUNTED
    ]


def row(operation: Operation, counts: Counts) -> dict[str, Any]:
    return {
        "operation": operation.name,
        "at_most": operation.at_most,
        "launches": counts.launches,
        "synchronisations": sum(counts.synchronisations.values()),
        "copies": sum(counts.copies.values()),
        "transfers": sum(counts.transfers.values()),
        "by_operator": {kind: dict(found) for kind, found in vars(counts).items() if found},
        "complaints": operation.complaints(counts),
    }


def show(found: dict[str, Any], operators: bool) -> None:
    at_most = "" if found["at_most"] is None else f"{found['at_most']:,}"
    print(
        f"{found['operation']:66} {at_most:>8} {found['launches']:>8,} {found['synchronisations']:>6} "
        f"{found['copies']:>6}  {'' if not found['complaints'] else 'TOO MUCH'}",
        flush=True,
    )
    if operators:
        for kind, counted_by_name in found["by_operator"].items():
            print(f"    {kind}: {', '.join(f'{name} {count}' for name, count in counted_by_name.items())}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="only operations whose name has this text")
    parser.add_argument("--operators", action="store_true", help="also show the counts of each operator and kernel")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    arguments = parser.parse_args()
    chosen = [operation for operation in operations() if arguments.only in operation.name]
    if not chosen:
        parser.error(f"no operation has {arguments.only!r} in its name")
    rows = []
    if not arguments.json:
        print(f"{'operation, one layer':66} {'at most':>8} {'launches':>8} {'syncs':>6} {'copies':>6}")
    with torch.no_grad(), gpu():
        for operation in chosen:
            rows.append(row(operation, operation.measure()))
            if not arguments.json:
                show(rows[-1], arguments.operators)
    if arguments.json:
        print(json.dumps(rows, indent=1))
    return int(any(found["complaints"] for found in rows))


if __name__ == "__main__":
    sys.exit(main())
