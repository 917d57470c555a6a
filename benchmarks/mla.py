"""Compares decode steps of a model with multi-head latent attention with kvlayers' and transformers' dynamic caches.

    python benchmarks/mla.py                              # 4,096 and 16,384 tokens: most of the time is transformers'
    python benchmarks/mla.py --lengths 1024 --steps 3     # seconds

The model is like DeepSeek-V3, with random weights: 8 layers, 16 heads, latents of 512 channels and rotated keys of 64.
The caches are filled with the same random latents, and take turns step by step, in an order that rotates. A ratio
compares two steps of the same turn, and the figure is the median over all turns. Logits are compared with those of
transformers' DynamicCache in float32, over the same latents: the exit code is 1 if they are too far away. Run it on an
idle machine.
"""

import sys
from collections.abc import Sequence
from typing import Any

import torch
import transformers
from torch import Tensor

from lib import contenders, report
from lib.contenders import Maker
from lib.internals import cache_nbytes, quiet_clock
from lib.turns import Turns

TRANSFORMERS, KVLAYERS, INT8, INT4 = "transformers dynamic", "kvlayers dynamic", "kvlayers int8", "kvlayers int4"
LATENT, ROTATED, LAYERS = 512, 64, 8

CACHES: dict[str, Maker] = {
    TRANSFORMERS: contenders.CONTENDERS[contenders.REFERENCE],
    KVLAYERS: contenders.CONTENDERS[contenders.KVLAYERS],
    INT8: contenders.packed(8),
    INT4: contenders.packed(4),
}
EXACT = (TRANSFORMERS, KVLAYERS)

SPEED = {4096: 3.0, 16384: 8.0}
"""How many times as long a step in bfloat16 takes with transformers' cache, at least."""


def options() -> report.Options:
    made = report.Options("mla", __doc__, threads=2)
    made.sized("--lengths", [4096, 16384], None, "tokens that are held", report.numbers)
    made.sized("--steps", 5, None, "decode steps, of which the first is not timed")
    return made


def random_model() -> Any:
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
        latents, rotated = (
            torch.randn(1, 1, length, channels, generator=generator).bfloat16() for channels in (LATENT, ROTATED)
        )
        cache.update(latents.to(dtype), rotated.to(dtype), index)


def measure(model: Any, names: Sequence[str], length: int, steps: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Figures of each cache, and its logits of all steps `[steps, vocab]`."""
    caches = {name: CACHES[name](model.config, length) for name in names}
    turns = Turns(names)
    logits: dict[str, list[Tensor]] = {name: [] for name in names}
    with quiet_clock():
        for cache in caches.values():
            fill(cache, length, model.dtype)
        held = {name: cache_nbytes(cache) for name, cache in caches.items()}
        for index in range(steps):
            ids = torch.tensor([[index + 1]])
            found = turns.take(
                lambda name, ids=ids: model(input_ids=ids, past_key_values=caches[name], use_cache=True).logits,
                is_counted=index > 0,
            )
            for name in names:
                logits[name].append(found[name][0, -1].float())
    figures = {
        name: {
            "median": turns.median(name),
            "seconds": [turns.seconds[name]],
            "speed": turns.ratio(TRANSFORMERS, name),
            "held": held[name],
        }
        for name in names
    }
    return figures, {name: torch.stack(found) for name, found in logits.items()}


def hold_to_targets(run: report.Session, dtype: torch.dtype, length: int, measured: dict[str, Any]) -> bool:
    """Hold the figures of a case against their bounds; return whether logits are near enough."""
    error = measured[KVLAYERS]["error"]
    if dtype == torch.float32:
        return run.target(f"difference of logits in float32 at {length}", error, at_most=1e-4)
    if length in SPEED:
        what = f"step at {length}, times as fast as with transformers' cache"
        run.target(what, measured[KVLAYERS]["speed"], at_least=SPEED[length])
        of_latents = measured[INT4]["held"] / (LAYERS * length * (LATENT + ROTATED) * dtype.itemsize)
        run.target(f"bytes at 4 bits at {length}, of those of the latents", of_latents, at_most=0.32)
    times = error / measured[TRANSFORMERS]["error"]
    return run.target(f"error of bfloat16 at {length}, times transformers'", times, at_most=1.5)


def main(arguments: Sequence[str] | None = None) -> int:
    made = options()
    given = made.parse(arguments)
    if given.steps < 2:
        made.parser.error("--steps must be at least 2, because the first is not timed")
    results: dict[str, Any] = {}
    exact: dict[int, Tensor] = {}
    is_near = True
    with report.session(given) as run:
        model = random_model()
        for dtype, names in ((torch.float32, EXACT), (torch.bfloat16, tuple(CACHES))):
            model = model.to(dtype)
            for length in given.lengths:
                figures, logits = measure(model, names, length, given.steps)
                exact.setdefault(length, logits[TRANSFORMERS])
                case = f"{str(dtype).removeprefix('torch.')} {length}"
                for name, entry in figures.items():
                    entry["error"] = float((logits[name] - exact[length]).abs().max())
                results[case] = figures
                is_near = hold_to_targets(run, dtype, length, figures) and is_near
    columns = {"step": report.ms("median", ".1f"), "times": report.shown("speed", ".1f")}
    columns |= {"error of logits": report.shown("error", ".1e"), "MB held": report.mb("held")}
    run.table("A decode step, ms", "dtype, tokens, cache", results, columns)
    run.finish(results)
    return int(not is_near)


if __name__ == "__main__":
    sys.exit(main())
