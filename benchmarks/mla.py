"""Compares decode steps of a model with multi-head latent attention with kvlayers' and transformers' dynamic caches.

    python benchmarks/mla.py                              # 4,096 and 16,384 tokens: most of the time is transformers'
    python benchmarks/mla.py --lengths 1024 --steps 3     # seconds

The model is like DeepSeek-V3, with random weights: 8 layers, 16 heads, latents of 512 channels and rotated keys of 64.
The caches are filled with the same random latents, and take turns step by step, in an order that rotates. A ratio
compares two steps of the same turn, and the figure is the median over all turns. Logits are compared with those of
transformers' DynamicCache in float32, over the same latents: the exit code is 1 if they are too far away. Run it on an
idle machine.
"""

import argparse
import pathlib
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import transformers
from torch import Tensor

import kvlayers
from kvlayers.tools.measuring.interleave import interleaved, quiet_clock
from kvlayers.tools.measuring.nbytes import cache_nbytes
from lib import report
from lib.timing import Disagreements

TRANSFORMERS, KVLAYERS, INT8, INT4 = "transformers dynamic", "kvlayers dynamic", "kvlayers int8", "kvlayers int4"
LATENT, ROTATED, LAYERS = 512, 64, 8

CACHES: dict[str, Callable[[Any], Any]] = {
    TRANSFORMERS: lambda config: transformers.DynamicCache(config=config),
    KVLAYERS: lambda config: kvlayers.DynamicCache(config=config),
    INT8: lambda config: kvlayers.QuantizedCache(config=config, nbits=8),
    INT4: lambda config: kvlayers.QuantizedCache(config=config, nbits=4),
}
EXACT = (TRANSFORMERS, KVLAYERS)

SPEED = {4096: 3.0, 16384: 8.0}
"""How many times as long a step in bfloat16 takes with transformers' cache, at least."""

FLOAT32_DIFFERENCE = 1e-4
"""Largest difference of logits in float32."""

INT4_BYTES = 0.32
"""Bytes at 4 bits as a part of those of the latents, at most, at the longest length."""

TIMES_THE_ERROR = 1.5
"""The error of logits in half precision as a multiple of that with transformers' cache, at most."""


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--lengths", type=_lengths, default=_lengths("4096,16384"), help="tokens that are held")
    parser.add_argument("--steps", type=int, default=5, help="decode steps, of which the first is not timed (5)")
    parser.add_argument("--threads", type=int, default=2, help="threads of torch (2)")
    parser.add_argument("--output", type=pathlib.Path, help="JSON file (benchmarks/results/mla-<date>.json)")
    given = parser.parse_args(arguments)
    if given.steps < 2:
        parser.error("--steps must be at least 2, because the first is not timed")
    given.output = given.output or report.output_path("mla")
    return given


def _lengths(text: str) -> list[int]:
    return [int(length) for length in text.split(",")]


def random_model() -> Any:
    """A model in float32, whose weights bfloat16 can hold."""
    torch.manual_seed(0)
    config = transformers.DeepseekV3Config(
        vocab_size=1024,
        hidden_size=1024,
        intermediate_size=2048,
        num_hidden_layers=LAYERS,
        num_attention_heads=16,
        num_key_value_heads=16,
        q_lora_rank=None,
        kv_lora_rank=LATENT,
        qk_rope_head_dim=ROTATED,
        qk_nope_head_dim=128,
        v_head_dim=128,
        # Without experts: rounding that chooses another expert would hide how near logits are.
        first_k_dense_replace=LAYERS,
        max_position_embeddings=32768,
    )
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    return model.bfloat16().float()


def fill(cache: Any, length: int, dtype: torch.dtype) -> None:
    """Write the same random latents to a cache, whatever its dtype."""
    generator = torch.Generator().manual_seed(length)
    for index in range(LAYERS):
        latents = torch.randn(1, 1, length, LATENT, generator=generator).bfloat16()
        rotated = torch.randn(1, 1, length, ROTATED, generator=generator).bfloat16()
        cache.update(latents.to(dtype), rotated.to(dtype), index)


@torch.no_grad()
def measure(
    model: Any, names: Sequence[str], length: int, steps: int
) -> tuple[dict[str, list[float]], dict[str, Tensor], dict[str, int]]:
    """Seconds of each timed step by cache, logits of all steps `[steps, vocab]`, and bytes held before the first."""
    caches = {name: CACHES[name](model.config) for name in names}
    for cache in caches.values():
        fill(cache, length, model.dtype)
    held = {name: cache_nbytes(cache) for name, cache in caches.items()}
    seconds: dict[str, list[float]] = {name: [] for name in names}
    logits: dict[str, list[Tensor]] = {name: [] for name in names}
    with quiet_clock():
        for index in range(steps):
            token = torch.tensor([[index + 1]])
            for name in interleaved(names, index):
                begin = time.perf_counter()
                out = model(input_ids=token, past_key_values=caches[name], use_cache=True)
                if index:
                    seconds[name].append(time.perf_counter() - begin)
                logits[name].append(out.logits[0, -1].float())
    return seconds, {name: torch.stack(found) for name, found in logits.items()}, held


def ratio(seconds: dict[str, list[float]], slow: str, fast: str) -> float:
    """How many times as long a step with one cache takes as a step with another in the same turn: the median."""
    return statistics.median(one / other for one, other in zip(seconds[slow], seconds[fast], strict=True))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it; return the exit code."""
    given = parse(arguments)
    torch.set_num_threads(given.threads)
    console = report.terminal()
    model, results = random_model(), {}
    distances: list[dict[str, Any]] = []
    promises: list[dict[str, Any]] = []
    exact: dict[int, Tensor] = {}
    table = report.new_table("A decode step, ms", "dtype, tokens, cache", "step", "times", "error of logits", "MB held")
    for dtype, names in ((torch.float32, EXACT), (torch.bfloat16, tuple(CACHES))):
        model = model.to(dtype)
        for length in given.lengths:
            seconds, logits, held = measure(model, names, length, given.steps)
            exact.setdefault(length, logits[TRANSFORMERS])
            case = f"{str(dtype).removeprefix('torch.')} {length}"
            errors = {name: float((found - exact[length]).abs().max()) for name, found in logits.items()}
            results[case] = {
                name: {
                    "median": statistics.median(seconds[name]),
                    "seconds": [seconds[name]],
                    "speed": ratio(seconds, TRANSFORMERS, name),
                    "error": errors[name],
                    "held": held[name],
                }
                for name in names
            }
            for name, entry in results[case].items():
                step, error = f"{entry['median'] * report.MILLI:.1f}", f"{errors[name]:.1e}"
                table.add_row(f"{case} {name}", step, f"{entry['speed']:.1f}", error, f"{held[name] / 1e6:.1f}")
            table.add_section()
            distances.append(_distance(dtype, length, results[case]))
            promises += _promises(dtype, length, results[case])
    console.print(table)
    report.show_targets(console, [*distances, *promises])
    failed = report.finish(
        console, given, report.environment(), results, [*distances, *promises], Disagreements(torch.bfloat16)
    )
    return failed or int(not all(distance["met"] for distance in distances))


def _distance(dtype: torch.dtype, length: int, measured: dict[str, Any]) -> dict[str, Any]:
    """How far the logits are away from those in float32."""
    error = measured[KVLAYERS]["error"]
    if dtype == torch.float32:
        return report.promised(f"difference of logits in float32 at {length}", error, at_most=FLOAT32_DIFFERENCE)
    times = error / measured[TRANSFORMERS]["error"]
    return report.promised(f"error of bfloat16 at {length}, times transformers'", times, at_most=TIMES_THE_ERROR)


def _promises(dtype: torch.dtype, length: int, measured: dict[str, Any]) -> list[dict[str, Any]]:
    """Speed and bytes in bfloat16."""
    if dtype == torch.float32 or length not in SPEED:
        return []
    what = f"step at {length}, times as fast as with transformers' cache"
    of_latents = measured[INT4]["held"] / (LAYERS * length * (LATENT + ROTATED) * dtype.itemsize)
    return [
        report.promised(what, measured[KVLAYERS]["speed"], at_least=SPEED[length]),
        report.promised(f"bytes at 4 bits at {length}, of those of the latents", of_latents, at_most=INT4_BYTES),
    ]


if __name__ == "__main__":
    sys.exit(main())
