"""Offloaded caches: the bytes moved for each token and, on an accelerator, the speed beside transformers' caches.

    python benchmarks/offload.py                 # bytes a token, on any machine
    python benchmarks/offload.py --device cuda   # tokens/s as well
    python benchmarks/offload.py --quick         # a small model, to see that it runs

On a CPU, the model is a random llama of a few million parameters: two pools of host memory stand for a device and its
host, and only bytes are measured. On an accelerator, this is the step "offloading" of `gpu.py rest`, which
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
    return {
        name: traffic_of(model, functools.partial(make, model.config, prompt.shape[1], True), prompt, new)
        for name, make in CACHES.items()
    }


def options() -> report.Options:
    made = report.Options("offload", __doc__, quick="a small model and few tokens")
    made.add("--device", default="cpu", help="such as cpu or cuda (cpu)")
    made.sized("--present", 2048, 256, "tokens of context on a CPU")
    made.sized("--new", 32, 4, "tokens decoded on a CPU")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    made = options()
    given = made.parse(arguments)
    if torch.device(given.device).type != "cpu":
        if not torch.accelerator.is_available():
            made.parser.error("there is no accelerator; --device cpu measures bytes")
        import gpu

        asked = ["rest", "--only", "offloading", "--device", given.device, "--output", str(given.output.parent)]
        return gpu.main([*asked, *(["--quick"] if given.quick else [])])
    workload = RandomModel(QUICK_SHAPE)
    model, prompt = workload.model, workload.prompt(given.present)
    failures = []
    with report.session(given) as run:
        measured = count_traffic(model, prompt, given.new)
        for name, entry in measured.items():
            plain = CACHES[name](model.config, given.present, False)
            if entry["tokens"] != decode(model, plain, prompt, given.new)[0]:
                failures.append(f"DISAGREEMENT: {name} gives other tokens than without offloading")
    keys = {"to device": "to_device", "to host": "to_host", "peak there": "peak_on_device", "held": "held"}
    columns = {heading: report.shown(key, ",.0f") for heading, key in keys.items()}
    run.table("Bytes a step", "cache", {"": measured}, columns)
    for line in failures:
        run.console.print(line)
    run.finish({"parameters": model.num_parameters(), "traffic": measured})
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
