"""Offloaded caches: the bytes moved for each token and, on an accelerator, the speed beside transformers' caches.

    python lab/benchmarks/offload.py                 # bytes a token, on any machine
    python lab/benchmarks/offload.py --device cuda   # tokens/s as well
    python lab/benchmarks/offload.py --quick         # fewer tokens, to see that it runs

On a CPU, the model is a random llama of a few million parameters: two pools of host memory stand for a device and its
host, and only bytes are measured. On an accelerator, this is the step "offloading" of `gpu.py first`, which
compares times with transformers' and with what the bus allows.

The exit code is 1 if a token differs from the one with a cache that is not offloaded.
"""

import functools
import statistics
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

import kvlayers
from lib import report
from lib.internals import recorded_transfers
from lib.workload import RandomModel, Shape

TRAFFIC_SHAPE = Shape(layers=4, heads=4, kv_heads=2, head_dim=32, intermediate=64, vocab=512)
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


def decode_greedily(model: Any, cache: Any, ids: torch.Tensor, new: int) -> list[int]:
    found = []
    with torch.no_grad():
        for _ in range(new):
            ids = model(input_ids=ids, past_key_values=cache, logits_to_keep=1).logits[:, -1:].argmax(-1)
            found.append(int(ids))
    return found


def traffic_of(model: Any, make: Callable[[], kvlayers.Cache], prompt: torch.Tensor, new: int) -> dict[str, Any]:
    """Bytes that a step moves with an offloaded cache, and the peak on the device, between two pools of host memory."""
    with recorded_transfers() as peak:
        cache = make()
    tokens = decode_greedily(model, cache, prompt, new)
    steps = [cache.traffic.of_step(step) for step in range(-new + 1, 0)]
    return {
        "tokens": tokens,
        "to_device": statistics.median(step.to_device for step in steps),
        "to_host": statistics.median(step.to_host for step in steps),
        "peak_on_device": peak(),
        "held": cache.nbytes,
    }


def count_traffic(model: Any, prompt: torch.Tensor, new: int) -> dict[str, Any]:
    return {
        name: traffic_of(model, functools.partial(make, model.config, prompt.shape[1], True), prompt, new)
        for name, make in CACHES.items()
    }


def options() -> report.Options:
    made = report.Options("offload", __doc__, quick="few tokens")
    made.add("--device", default="cpu", help="such as cpu or cuda (cpu)")
    made.sized("--present", 2048, 256, "tokens of context on a CPU")
    made.sized("--new", 32, 4, "tokens decoded on a CPU")
    return made


def measure(run: report.Session) -> dict[str, Any]:
    workload = RandomModel(TRAFFIC_SHAPE)
    model, prompt = workload.model, workload.prompt(run.given.present)
    measured = count_traffic(model, prompt, run.given.new)
    for name, entry in measured.items():
        plain = decode_greedily(model, CACHES[name](model.config, run.given.present, False), prompt, run.given.new)
        run.expect(entry["tokens"] == plain, f"{name} gives other tokens than without offloading")
    keys = {"to device": "to_device", "to host": "to_host", "peak there": "peak_on_device", "held": "held"}
    columns = {heading: report.shown(key, ",.0f") for heading, key in keys.items()}
    run.table("Bytes a step", "cache", {"": measured}, columns)
    return measured


def main(arguments: Sequence[str] | None = None) -> int:
    made = options()
    given = made.parse(arguments)
    if torch.device(given.device).type == "cpu":
        return report.run(given, {"traffic": measure})
    if not torch.accelerator.is_available():
        made.parser.error("there is no accelerator; --device cpu measures bytes")
    import gpu

    asked = ["first", "--only", "offloading", "--device", given.device, "--output", str(given.output.parent)]
    return gpu.main([*asked, *(["--quick"] if given.quick else [])])


if __name__ == "__main__":
    sys.exit(main())
