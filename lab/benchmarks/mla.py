"""Compares decode steps of a model with multi-head latent attention with kvlayers' and transformers' dynamic caches.

    python lab/benchmarks/mla.py                              # 4,096 and 16,384 tokens: most time is transformers'
    python lab/benchmarks/mla.py --lengths 1024 --steps 3     # seconds

The model is like DeepSeek-V3, with random weights: 8 layers, 16 heads, latents of 512 channels and rotated keys of 64.
The caches are filled with the same random latents, and take turns step by step, in an order that rotates; figures are
medians. Steps are timed in bfloat16. In float32, logits are compared with those of transformers' DynamicCache over the
same latents: the exit code is 1 if they are too far away. Run it on an idle machine.
"""

import sys
from collections.abc import Sequence
from typing import Any

import torch
import transformers
from torch import Tensor

from lib import report
from lib.contenders import CONTENDERS, KVLAYERS, REFERENCE, Maker, packed
from lib.timing import Trials, measure_decode, summarise

LATENT, ROTATED, LAYERS = 512, 64, 8
CACHES: dict[str, Maker] = {
    REFERENCE: CONTENDERS[REFERENCE],
    KVLAYERS: CONTENDERS[KVLAYERS],
    "kvlayers 8 bits": packed(8),
    "kvlayers 4 bits": packed(4),
}
MOST_APART = 1e-4


def options() -> report.Options:
    made = report.Options("mla", __doc__, threads=2)
    made.sized("--lengths", [4096, 16384], None, "tokens that are held", report.numbers)
    made.sized("--steps", 5, None, "decode steps")
    return made


class LatentModel:
    """A model with latents, and caches with the same random latents."""

    name = "random DeepSeek-V3"

    def __init__(self, dtype: torch.dtype) -> None:
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
        self.model = transformers.AutoModelForCausalLM.from_config(config).eval().bfloat16().to(dtype)
        self.length = 0

    def prepare(self, length: int, batch: int) -> Tensor:
        self.length = length
        return torch.ones(batch, 1, dtype=torch.int64)

    def fill(self, cache: Any) -> None:
        generator = torch.Generator().manual_seed(self.length)
        for index in range(LAYERS):
            latents, rotated = (
                torch.randn(1, 1, self.length, channels, generator=generator).bfloat16()
                for channels in (LATENT, ROTATED)
            )
            cache.update(latents.to(self.model.dtype), rotated.to(self.model.dtype), index)


def exact(run: report.Session) -> dict[int, Any]:
    """How far logits in float32 are from those with transformers' cache."""
    trials = Trials(run.given.steps, 1, run.ticking, 1, run.disagreements(torch.float32))
    workload, makers = LatentModel(torch.float32), {name: CACHES[name] for name in (REFERENCE, KVLAYERS)}
    found = {length: measure_decode(workload, makers, length, trials) for length in run.given.lengths}
    run.table("float32", "tokens, cache", found, {"error of logits": report.shown("logit_distance", ".1e")})
    for length, measured in found.items():
        apart = measured[KVLAYERS]["logit_distance"]
        run.expect(apart <= MOST_APART, f"logits at {length} tokens are {apart:.1e} from transformers'")
    return found


def steps(run: report.Session) -> dict[int, Any]:
    # Other tokens are no failure here: packed latents round by design.
    trials, workload = Trials(run.given.steps, 1, run.ticking, 1), LatentModel(torch.bfloat16)
    found = {length: summarise(measure_decode(workload, CACHES, length, trials)) for length in run.given.lengths}
    columns = {"ms": report.ms("median", ".1f"), "times as fast": report.shown("speed", ".1f")}
    run.table("A decode step, bfloat16", "tokens, cache", found, {**columns, "MB held": report.mb("held")})
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    return report.run(options().parse(arguments), {"float32": exact, "bfloat16": steps})


if __name__ == "__main__":
    sys.exit(main())
