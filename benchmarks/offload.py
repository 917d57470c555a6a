"""Offloaded caches: the bytes moved for each token and, on an accelerator, the speed beside transformers' caches.

    python benchmarks/offload.py                 # bytes a token, on any machine
    python benchmarks/offload.py --device cuda   # tokens/s as well
    python benchmarks/offload.py --quick         # a small model, to see that it runs

On an accelerator, the model is a random llama of 1.1 billion parameters in bfloat16. On a CPU, it has a few million:
two pools of host memory stand for a device and its host, and only bytes are measured.

On an accelerator, contenders take turns in an order that rotates, and figures are medians over the trials. "allowed" is
the rate at which the measured bandwidth from pinned memory could move the cached bytes.

The exit code is 1 if a token differs from the one with a cache that is not offloaded.
"""

import argparse
import functools
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import transformers

import kvlayers
import kvlayers.offload.offloading
from kvlayers.tools.measuring.interleave import quiet_clock
from lib.workload import RandomModel, Shape

# The tests' double of transfers, which runs on the host and counts bytes.
sys.path.append(str(Path(__file__).parents[1] / "tests" / "helpers"))
from recording_transfers import RecordingTransfers

QUICK_SHAPE = Shape(layers=4, heads=4, kv_heads=2, head_dim=32, intermediate=64, vocab=512)
SHAPE = Shape(layers=16, heads=32, kv_heads=8, head_dim=64, intermediate=8192, vocab=32768)
KVLAYERS, KVLAYERS_PACKED, TRANSFORMERS = "kvlayers, offloaded", "kvlayers, offloaded int4", "transformers, offloaded"

CACHES: dict[str, Callable[[Any, bool], Any]] = {
    KVLAYERS: lambda config, offloading: kvlayers.DynamicCache(config=config, offloading=offloading),
    KVLAYERS_PACKED: lambda config, offloading: kvlayers.QuantizedCache(config=config, nbits=4, offloading=offloading),
    TRANSFORMERS: lambda config, offloading: transformers.DynamicCache(config=config, offloading=offloading),
}
STATIC = "kvlayers, offloaded static"
COUNTED: dict[str, Callable[[Any, int], kvlayers.Cache]] = {
    KVLAYERS: lambda config, length: kvlayers.DynamicCache(config=config, offloading=True),
    STATIC: lambda config, length: kvlayers.StaticCache(config, max_cache_len=2 * length, offloading=True),
    KVLAYERS_PACKED: lambda config, length: kvlayers.QuantizedCache(config=config, nbits=4, offloading=True),
}
TARGETS = {(KVLAYERS, TRANSFORMERS): 1.8, (KVLAYERS_PACKED, KVLAYERS): 3}
"""How many times as fast the first contender should be as the second, at least."""
OF_BANDWIDTH = 0.85
"""The share of the allowed rate that kvlayers' dense cache should reach."""


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", help="such as cpu or cuda (cpu)")
    parser.add_argument("--present", type=int, help="tokens of context (32768 on an accelerator, 2048 on a CPU)")
    parser.add_argument("--new", type=int, help="tokens decoded in each trial (32)")
    parser.add_argument("--trials", type=int, help="trials (5)")
    parser.add_argument("--output", type=Path, help="folder for offload.json")
    parser.add_argument("--quick", action="store_true", help="a small model and few tokens")
    given = parser.parse_args(arguments)
    on_cpu = torch.device(given.device).type == "cpu"
    given.present = given.present or (256 if given.quick else 2048 if on_cpu else 32768)
    given.new = given.new or (4 if given.quick else 32)
    given.trials = given.trials or (2 if given.quick else 5)
    if not on_cpu and not torch.accelerator.is_available():
        parser.error("there is no accelerator; --device cpu measures bytes")
    return given


def count_traffic(model: Any, prompt: torch.Tensor, new: int) -> dict[str, Any]:
    """Bytes that a step moves, and the peak bytes on the device, between two pools of host memory."""
    found = {}
    for name, make in COUNTED.items():
        transfers = RecordingTransfers(lambda waiting: waiting)
        prefetcher = functools.partial(
            kvlayers.offload.Prefetcher, transfers=lambda device, transfers=transfers: transfers
        )
        with mock.patch.object(kvlayers.offload.offloading, "Prefetcher", prefetcher):
            cache = make(model.config, prompt.shape[1])
        tokens = decode(model, cache, prompt, new)
        steps = [cache.traffic.of_step(step) for step in range(-new + 1, 0)]
        found[name] = {
            "tokens": tokens,
            "to_device": statistics.median(step.to_device for step in steps),
            "to_host": statistics.median(step.to_host for step in steps),
            "peak_on_device": transfers.peak_bytes,
            "held": cache.nbytes,
        }
    return found


def decode(model: Any, cache: Any, ids: torch.Tensor, new: int) -> list[int]:
    """Decode greedily; return the tokens."""
    found = []
    with torch.no_grad():
        for _ in range(new):
            logits = model(input_ids=ids, past_key_values=cache, logits_to_keep=1).logits
            ids = logits[:, -1:].argmax(-1)
            found.append(ids)
    return [int(token) for token in torch.cat(found, dim=1)[0]]


def bandwidth(device: torch.device) -> float:
    """Bytes a second from pinned memory to the device."""
    home = torch.empty(1 << 28, dtype=torch.uint8, pin_memory=True)
    there = torch.empty_like(home, device=device)
    rates = []
    for _ in range(5):
        torch.accelerator.synchronize()
        begin = time.perf_counter()
        there.copy_(home, non_blocking=True)
        torch.accelerator.synchronize()
        rates.append(home.numel() / (time.perf_counter() - begin))
    return statistics.median(rates)


def time_steps(model: Any, prompt: torch.Tensor, new: int, trials: int) -> dict[str, Any]:
    """Seconds of each contender's decode steps, taken in turns, and its tokens."""
    caches = {name: make(model.config, True) for name, make in CACHES.items()}
    found: dict[str, Any] = {name: {"tokens": [], "seconds": []} for name in caches}
    steps = {}
    with quiet_clock():
        for name, cache in caches.items():
            first = decode(model, cache, prompt, 3)
            found[name]["tokens"] += first
            steps[name] = torch.tensor([[first[-1]]], device=prompt.device)
        for trial in range(trials):
            for name in itertools.islice(itertools.cycle(caches), trial, trial + len(caches)):
                torch.accelerator.synchronize()
                begin = time.perf_counter()
                tokens = decode(model, caches[name], steps[name], new)
                found[name]["seconds"].append((time.perf_counter() - begin) / new)
                found[name]["tokens"] += tokens
                steps[name] = torch.tensor([[tokens[-1]]], device=prompt.device)
            print(f"trial {trial + 1} of {trials}", flush=True)
    for name, cache in caches.items():
        if isinstance(cache, kvlayers.Cache):
            found[name]["to_device"] = cache.traffic.of_step().to_device
            found[name]["to_host"] = cache.traffic.of_step().to_host
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it; the exit code is 1 if tokens differ from those with a cache that is not offloaded."""
    given = parse(arguments)
    device = torch.device(given.device)
    on_cpu = device.type == "cpu"
    workload = RandomModel(QUICK_SHAPE if given.quick or on_cpu else SHAPE)
    model, prompt = workload.model.to(device), workload.prompt(given.present).to(device)
    result: dict[str, Any] = {
        "device": given.device if on_cpu else torch.get_device_module(device).get_device_name(),
        "versions": {package.__name__: package.__version__ for package in (torch, transformers, kvlayers)},
        "present": given.present,
        "parameters": model.num_parameters(),
    }
    failures = []
    if on_cpu:
        result["traffic"] = measured = count_traffic(model, prompt, given.new)
        expected = {
            name: decode(
                model,
                CACHES[KVLAYERS_PACKED if name == KVLAYERS_PACKED else KVLAYERS](model.config, False),
                prompt,
                given.new,
            )
            for name in measured
        }
        print(f"{'bytes a step':28} {'to device':>12} {'to host':>9} {'peak there':>12} {'held':>12}")
        for name, entry in measured.items():
            print(
                f"{name:28} {entry['to_device']:12,.0f} {entry['to_host']:9,.0f} {entry['peak_on_device']:12,} "
                f"{entry['held']:12,}"
            )
            failures += [name] if entry["tokens"] != expected[name] else []
    else:
        result["bandwidth"] = bandwidth(device)
        result["steps"] = measured = time_steps(model, prompt, given.new, given.trials)
        for name, entry in measured.items():
            entry["rate"] = 1 / statistics.median(entry["seconds"])
            plain = decode(model, CACHES[name](model.config, False), prompt, len(entry["tokens"]))
            failures += [name] if entry["tokens"] != plain else []
            allowed = result["bandwidth"] / entry["to_device"] if "to_device" in entry else float("nan")
            print(f"{name:28} {entry['rate']:8.2f} tokens/s, allowed {allowed:8.2f}")
        promises = {
            f"{one} over {other}": (measured[one]["rate"] / measured[other]["rate"], least)
            for (one, other), least in TARGETS.items()
        }
        allowed = result["bandwidth"] / measured[KVLAYERS]["to_device"]
        promises[f"{KVLAYERS} over what bandwidth allows"] = measured[KVLAYERS]["rate"] / allowed, OF_BANDWIDTH
        result["targets"] = promises
        for what, (value, least) in promises.items():
            print(f"{'met' if value >= least else 'missed'}: {what}: {value:.2f}, asked >= {least}")
    for name in failures:
        print(f"DISAGREEMENT: {name} gives other tokens than without offloading")
    if given.output is not None:
        given.output.mkdir(parents=True, exist_ok=True)
        (given.output / "offload.json").write_text(json.dumps(result, indent=1))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
