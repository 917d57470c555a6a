"""Offloaded caches: the bytes moved for each token and, on an accelerator, the speed beside transformers' caches.

    python benchmarks/offload.py                 # bytes a token, on any machine
    python benchmarks/offload.py --device cuda   # tokens/s as well
    python benchmarks/offload.py --quick         # a small model, to see that it runs

On a CPU, the model is a random llama of a few million parameters: two pools of host memory stand for a device and its
host, and only bytes are measured. On an accelerator, this is the step "offloading" of `gpu.py rest`, which
compares times with transformers' and with what the bus allows.

The exit code is 1 if a token differs from the one with a cache that is not offloaded.
"""

import argparse
import functools
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

import kvlayers
from lib.internals import recorded_transfers
from lib.workload import RandomModel, Shape

QUICK_SHAPE = Shape(layers=4, heads=4, kv_heads=2, head_dim=32, intermediate=64, vocab=512)
KVLAYERS, KVLAYERS_PACKED, STATIC = "kvlayers, offloaded", "kvlayers, offloaded int4", "kvlayers, offloaded static"
CACHES: dict[str, Callable[[Any, int, bool], kvlayers.Cache]] = {
    KVLAYERS: lambda config, length, offloading: kvlayers.DynamicCache(config=config, offloading=offloading),
    STATIC: lambda config, length, offloading: kvlayers.StaticCache(
        config, max_cache_len=2 * length, offloading=offloading
    ),
    KVLAYERS_PACKED: lambda config, length, offloading: kvlayers.QuantizedCache(
        config=config, nbits=4, offloading=offloading
    ),
}


def decode(model: Any, cache: Any, ids: torch.Tensor, new: int) -> tuple[list[int], torch.Tensor]:
    """Decode greedily; return the tokens, and the last logits `[vocab]`."""
    found = []
    with torch.no_grad():
        for _ in range(new):
            logits = model(input_ids=ids, past_key_values=cache, logits_to_keep=1).logits
            ids = logits[:, -1:].argmax(-1)
            found.append(int(ids))
    return found, logits[0, -1]


def traffic_of(model: Any, make: Callable[[], kvlayers.Cache], prompt: torch.Tensor, new: int) -> dict[str, Any]:
    """Bytes that a step moves with an offloaded cache, and the peak on the device, between two pools of host memory."""
    with recorded_transfers() as peak:
        cache = make()
    tokens, _ = decode(model, cache, prompt, new)
    steps = [cache.traffic.of_step(step) for step in range(-new + 1, 0)]
    return {
        "tokens": tokens,
        "to_device": statistics.median(step.to_device for step in steps),
        "to_host": statistics.median(step.to_host for step in steps),
        "peak_on_device": peak(),
        "held": cache.nbytes,
    }


def count_traffic(model: Any, prompt: torch.Tensor, new: int) -> dict[str, Any]:
    """The traffic of each cache."""
    return {
        name: traffic_of(model, functools.partial(make, model.config, prompt.shape[1], True), prompt, new)
        for name, make in CACHES.items()
    }


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", help="such as cpu or cuda (cpu)")
    parser.add_argument("--present", type=int, help="tokens of context on a CPU (2048)")
    parser.add_argument("--new", type=int, help="tokens decoded on a CPU (32)")
    parser.add_argument("--output", type=Path, help="folder for the JSON file")
    parser.add_argument("--quick", action="store_true", help="a small model and few tokens")
    given = parser.parse_args(arguments)
    given.present = given.present or (256 if given.quick else 2048)
    given.new = given.new or (4 if given.quick else 32)
    if torch.device(given.device).type != "cpu" and not torch.accelerator.is_available():
        parser.error("there is no accelerator; --device cpu measures bytes")
    return given


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it; the exit code is 1 if tokens differ from those with a cache that is not offloaded."""
    given = parse(arguments)
    if torch.device(given.device).type != "cpu":
        import gpu

        with tempfile.TemporaryDirectory() as folder:
            asked = ["rest", "--only", "offloading", "--device", given.device, "--output", str(given.output or folder)]
            return gpu.main([*asked, *(["--quick"] if given.quick else [])])
    workload = RandomModel(QUICK_SHAPE)
    model, prompt = workload.model, workload.prompt(given.present)
    measured = count_traffic(model, prompt, given.new)
    failures = []
    print(f"{'bytes a step':28} {'to device':>12} {'to host':>9} {'peak there':>12} {'held':>12}")
    for name, entry in measured.items():
        print(
            f"{name:28} {entry['to_device']:12,.0f} {entry['to_host']:9,.0f} {entry['peak_on_device']:12,} "
            f"{entry['held']:12,}"
        )
        plain = CACHES[name](model.config, given.present, False)
        if entry["tokens"] != decode(model, plain, prompt, given.new)[0]:
            failures.append(name)
            print(f"DISAGREEMENT: {name} gives other tokens than without offloading")
    if given.output is not None:
        result = {
            "versions": {package.__name__: package.__version__ for package in (torch, transformers, kvlayers)},
            "present": given.present,
            "parameters": model.num_parameters(),
            "traffic": measured,
        }
        given.output.mkdir(parents=True, exist_ok=True)
        (given.output / "offload.json").write_text(json.dumps(result, indent=1))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
