"""Counts what each operation of a cache asks of a GPU, on any machine: launches, synchronisations and copies.

    python benchmarks/launches.py
    python benchmarks/launches.py --only "int4" --operators
    python benchmarks/launches.py --json

One layer of Llama 3.1 8B's shape in bfloat16, on meta tensors, whose operations take no time. A launch is a kernel, of
PyTorch or of kvlayers; PyTorch's attention counts as one. A synchronisation is a wait of the host for a number of the
device. A copy is one between the memory of the host and that of the device, for which the host waits too.

The column "before" has the launches of 2026-11-22, when most of these operations had no kernel of kvlayers. The exit
code is 1 if an operation asks for more than it may.
"""

import argparse
import importlib.util
import json
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
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
        before: launches on 2026-11-22, when no kernel of kvlayers quantized or merged; `None` if nobody counted.
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
    cache = held(quantized(name), 8192)
    return usual([step(cache, masked=masked) for _ in range(3)])


def after_crop(name: str) -> Counts:
    """The first step behind a crop into a block."""
    cache = held(quantized(name), 8192)
    cache.crop(5000)
    return step(cache)


def packing(name: str) -> Counts:
    return largest(updates(held(quantized(name), 2048), 80))


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
            may_wait=True,
        )
        yield Operation(f"{name}: update that packs a block", lambda name=name: packing(name), block, 8)
        yield Operation(f"{name}: decode step", lambda name=name: decoding(name), decode, 6)
        yield Operation(f"{name}: decode step with a mask", lambda name=name: decoding(name, masked=True), None, 6)
        yield Operation(f"{name}: decode step behind a crop into a block", lambda name=name: after_crop(name), None, 6)
    yield Operation("int4: second turn of 512 tokens behind 32k", lambda: second_turn("int4"), 22150, 60)


def _without_attention(counts: Counts) -> Counts:
    counts.kernels["scaled_dot_product_attention"] -= 1
    return counts


# A shared prompt


def samples(cache: kvlayers.Cache, tokens: int, prompts: int = 1) -> kvlayers.Cache:
    """The cache with eight sequences, as many for each prompt."""
    held(cache, tokens, batch=prompts).expand(8 // prompts)
    return held(cache, 1, batch=8)


def dense() -> kvlayers.Cache:
    return kvlayers.DynamicCache(config=config())


def reordered(cache: kvlayers.Cache) -> Counts:
    """A step of a beam search: the cache is reordered, updated and read."""
    new, beams = states(1, 8), torch.empty(8, dtype=torch.int64, device=DEVICE)
    with counted() as counts:
        cache.reorder_cache(beams)
        attend(cache.update(*new, 0), batch=8)
    return counts


def beams(cache: kvlayers.Cache, tokens: int, prompts: int = 1) -> Counts:
    samples(cache, tokens, prompts)
    return largest([reordered(cache) for _ in range(3)])


def shared_operations() -> Iterator[Operation]:
    for tokens, before in ((2048, 124), (8192, 328), (32768, 1144)):
        yield Operation(
            f"eight samples of a prompt of {tokens:,}: decode step",
            lambda tokens=tokens: step(samples(dense(), tokens), batch=8),
            before,
            8,
        )
    yield Operation(
        "eight samples of a prompt of 8,192: decode step with a mask",
        lambda: step(samples(dense(), 8192), batch=8, masked=True),
        None,
        30,
    )
    yield Operation(
        "eight beams of a prompt of 32,768: reorder and decode step", lambda: beams(dense(), 32768), None, 8
    )
    yield Operation(
        "four beams of each of two prompts: reorder and decode step", lambda: beams(dense(), 4096, 2), None, 14
    )


# Branches behind stored tokens


def branch_of(cache: kvlayers.Cache) -> kvlayers.Cache:
    """Another cache behind the same tokens, as a hit in a store gives: the first has written behind them."""
    branch = cache.fork()
    held(cache, 1)
    return branch


def branching(make: Callable[[], kvlayers.Cache], *private: int) -> kvlayers.Cache:
    """A branch of a branch for each number of private tokens, behind 8,192 tokens. It has a tail of its own."""
    branch = held(make(), 8192)
    for tokens in private:
        branch = held(branch_of(branch), tokens)
    return held(branch_of(branch), 1)


def turn_of_branch(stored: kvlayers.Cache) -> Counts:
    """Counts of a turn behind tokens that are stored."""
    return step(branch_of(held(stored, 32768)), 512, masked=True)


def branch_operations() -> Iterator[Operation]:
    makers: dict[str, Callable[[], kvlayers.Cache]] = {"DynamicCache": dense, "int4": lambda: quantized("int4")}
    for name, make in makers.items():
        for segments, private in (("one shared segment", ()), ("two shared segments", (3000,))):
            yield Operation(
                f"{name}: decode step behind {segments}",
                lambda make=make, private=private: usual([step(branching(make, *private)) for _ in range(3)]),
                None,
                8 + 2 * len(private),
            )
        yield Operation(
            f"{name}: turn of 512 tokens behind 32k shared",
            lambda make=make: turn_of_branch(make()),
            None,
            60 if name == "int4" else 12,
        )
    yield Operation(
        "int4: eight samples of a prompt of 32,768: decode step",
        lambda: step(samples(quantized("int4"), 32768), batch=8),
        None,
        10,
    )
    yield Operation(
        "int4: eight beams of a prompt of 32,768: reorder and decode step",
        lambda: beams(quantized("int4"), 32768),
        None,
        10,
    )


# Caches in full precision


def upstream_and_own() -> Iterator[tuple[str, Callable[[], Any], int | None]]:
    """Names of caches, what makes them, and the most launches of an update."""
    yield "transformers' DynamicCache", lambda: transformers.DynamicCache(config=config()), None
    yield "DynamicCache", lambda: kvlayers.DynamicCache(config=config()), 2
    yield "transformers' StaticCache", lambda: transformers.StaticCache(config=config(), max_cache_len=MOST), None
    yield "StaticCache", lambda: kvlayers.StaticCache(config(), max_cache_len=MOST), 3
    windowed = config(sliding_window=WINDOW)
    yield "transformers' DynamicCache, a window", lambda: transformers.DynamicCache(config=windowed), None
    yield "DynamicCache, a window", lambda: kvlayers.DynamicCache(config=windowed), 2
    yield (
        "transformers' StaticCache, a window",
        lambda: transformers.StaticCache(config=windowed, max_cache_len=MOST),
        None,
    )
    yield "StaticCache, a window", lambda: kvlayers.StaticCache(windowed, max_cache_len=MOST), 3
    yield "SinkCache", lambda: kvlayers.SinkCache(config=config(), window_length=1024), 12
    yield (
        "SinkCache, padded",
        lambda: kvlayers.SinkCache(config=config(), window_length=1024, left_padding=[7]),
        15,
    )
    for name, layer in (("DynamicLayer", kvlayers.DynamicLayer), ("StaticLayer", lambda: kvlayers.StaticLayer(MOST))):
        yield f"{name}, offloaded", lambda layer=layer: offloaded(layer()), 4


def offloaded(layer: Any) -> kvlayers.Cache:
    return kvlayers.Cache(layers=[kvlayers.OffloadedLayer(layer, kvlayers.offload.Prefetcher(transfers=Transfers))])


def full_precision_operations() -> Iterator[Operation]:
    windowed = config(sliding_window=WINDOW)
    for name, make, at_most in upstream_and_own():
        own = not name.startswith("transformers")
        yield Operation(
            f"{name}: update",
            lambda make=make: usual(updates(held(make(), 8192), 9)),
            None,
            at_most,
            may_wait=not own,
        )
    for name, make, number, most in (
        ("DynamicCache", lambda: kvlayers.DynamicCache(config=config()), 1100, 4),
        ("DynamicCache, a window", lambda: kvlayers.DynamicCache(config=windowed), 1100, 18),
        ("StaticCache, a window", lambda: kvlayers.StaticCache(windowed, max_cache_len=MOST), 1100, 15),
        ("SinkCache", lambda: kvlayers.SinkCache(config=config(), window_length=256), 300, 28),
    ):
        yield Operation(
            f"{name}: the largest of many updates, which moves tokens",
            lambda make=make, number=number: largest(updates(held(make(), 8192), number)),
            None,
            most,
        )


# A layer with a recurrent state


def recurrent_step(make: Callable[[], Any]) -> Counts:
    layer = make()
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


def recurrent_operations() -> Iterator[Operation]:
    yield Operation("LinearAttentionLayer: decode step", lambda: recurrent_step(kvlayers.LinearAttentionLayer), None, 4)


# Quantizers of other packages


def of_package(backend: str) -> kvlayers.QuantizedCache:
    # Within `counted`, since the package reads numbers of the device, for which only a counter has an answer.
    with counted():
        return held(kvlayers.QuantizedCache(config=config(), backend=backend, nbits=4), 2048)


def step_of_package(backend: str) -> Counts:
    cache = of_package(backend)
    return usual([step(cache) for _ in range(3)])


def packages_operations() -> Iterator[Operation]:
    for backend in filter(installed, ("hqq", "quanto")):
        yield Operation(
            f"{backend}: update that packs a block",
            lambda backend=backend: largest(updates(of_package(backend), 80)),
            may_wait=True,
        )
        yield Operation(f"{backend}: decode step", lambda backend=backend: step_of_package(backend), may_wait=True)


def installed(backend: str) -> bool:
    return importlib.util.find_spec({"hqq": "hqq", "quanto": "optimum.quanto"}[backend]) is not None


def operations() -> list[Operation]:
    return [
        *packed_operations(),
        *shared_operations(),
        *branch_operations(),
        *full_precision_operations(),
        *recurrent_operations(),
        *packages_operations(),
    ]


def row(operation: Operation, counts: Counts) -> dict[str, Any]:
    return {
        "operation": operation.name,
        "before": operation.before,
        "at_most": operation.at_most,
        "launches": counts.launches,
        "synchronisations": sum(counts.synchronisations.values()),
        "copies": sum(counts.copies.values()),
        "transfers": sum(counts.transfers.values()),
        "by_operator": {kind: dict(found) for kind, found in vars(counts).items() if found},
        "complaints": operation.complaints(counts),
    }


def show(found: dict[str, Any], operators: bool) -> None:
    before, at_most = ("" if found[name] is None else f"{found[name]:,}" for name in ("before", "at_most"))
    print(
        f"{found['operation']:66} {before:>8} {at_most:>8} {found['launches']:>8,} {found['synchronisations']:>6} "
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
        print(f"{'operation, one layer':66} {'before':>8} {'at most':>8} {'launches':>8} {'syncs':>6} {'copies':>6}")
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
