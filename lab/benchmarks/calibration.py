"""Compares calibrated bits with the same bits in every layer, on text that calibration has not seen.

    python lab/benchmarks/calibration.py                     # the demo model, about forty minutes on two idle cores
    python lab/benchmarks/calibration.py --model DIR_OR_HUB  # another model
    python lab/benchmarks/calibration.py --quick             # a small random model, to see that it runs

Sensitivities are measured once. The budgets are the bytes of uniform bits. For each budget, the calibrated setting and
every uniform setting with as many bytes read passages from other places in the text, in chunks, and their predictions
are compared with full precision. Bytes are for states in bfloat16, whatever dtype the model computes in.

The exit code is 1 if a calibrated setting takes more bytes than its budget.
"""

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.utils import logging

import kvlayers
import kvlayers_lab
from lib import report
from lib.internals import DivergenceInUse
from lib.quantized import RANDOM, load
from lib.report import shown
from lib.workload import Shape

UNIFORM = ((3, 2), (2, 3), (4, 2), (3, 3), (2, 4), (4, 3), (3, 4), (4, 4))
"""Bits of keys and values in every layer. Their bytes are the budgets."""

QUICK_SHAPE = Shape(layers=3, heads=4, kv_heads=2, head_dim=64, intermediate=128, vocab=256)


def options() -> report.Options:
    made = report.Options("calibration", __doc__, quick="a small random model and short passages")
    made.real_model(RANDOM, is_needed=True)
    made.sized("--passages", 4, 1, "that are calibrated on")
    made.sized("--held-out", 8, 1, "from other places, that settings are compared on")
    made.sized("--context", 1024, 320, "tokens of each that are read before scoring begins")
    made.sized("--scored", 64, 64, "tokens of each that are scored")
    return made


def divided(found: list[Tensor], held_out: int) -> tuple[list[Tensor], list[Tensor]]:
    apart = {len(found) * index // held_out for index in range(held_out)}
    return [ids for index, ids in enumerate(found) if index not in apart], [found[index] for index in sorted(apart)]


def uniform_bytes(model: Any, key_nbits: int, value_nbits: int) -> float:
    """Bytes of a token with the same bits in every layer, if the model runs in bfloat16."""
    plan = kvlayers.plan(model.config, 8192, dtype=torch.bfloat16, names=["dynamic"])
    states = plan["dynamic"].bytes_per_token / 2 / torch.bfloat16.itemsize
    # A scale and a zero point in bfloat16 for each 64 numbers of keys and of values.
    return states * ((key_nbits + value_nbits) / 8 + 2 * 4 / 64)


def measure(run: report.Session) -> dict[str, Any]:
    """For each budget, the calibrated setting and the uniform settings, in order of bytes."""
    given = run.given
    count, tokens = given.passages + given.held_out, given.context + given.scored
    model, found = load(given.model, given.text, "float32", count, tokens, QUICK_SHAPE)
    seen, unseen = divided(found, given.held_out)
    held_out = DivergenceInUse(model, unseen, given.scored)

    def divergence_of(**options: Any) -> float:
        return held_out.of(lambda: kvlayers.QuantizedCache(config=model.config, **options))

    uniform: dict[float, dict[str, float]] = {}
    for key_nbits, value_nbits in UNIFORM:
        by_bits = uniform.setdefault(uniform_bytes(model, key_nbits, value_nbits), {})
        by_bits[f"K{key_nbits}V{value_nbits}"] = divergence_of(key_nbits=key_nbits, value_nbits=value_nbits)
    budgets: dict[str, Any] = {}
    sensitivities = None
    for budget, by_bits in sorted(uniform.items()):
        calibration = kvlayers_lab.calibrate(
            model,
            [ids[0] for ids in seen],
            kvlayers_lab.BytesBudget(budget),
            passages=len(seen),
            context_length=given.context,
            scored_tokens=given.scored,
            dtype=torch.bfloat16,
            sensitivities=sensitivities,
        )
        sensitivities, options = calibration.sensitivities, calibration.cache_config
        best, taken = min(by_bits, key=lambda name: by_bits[name]), calibration.bytes_per_token
        entry = {"bytes_per_token": taken, "divergence": divergence_of(**options), "uniform": by_bits, "best": best}
        budgets[f"{budget:g}"] = {**entry, "ratio": entry["divergence"] / by_bits[best], "options": options}
        run.expect(taken <= budget, f"calibrated for {budget:g} bytes a token, and takes {taken:g}")
    columns = {"best uniform bits": shown("best", ""), "its KL": lambda entry: f"{entry['uniform'][entry['best']]:.3g}"}
    columns |= {"calibrated, bytes a token": shown("bytes_per_token", "g"), "KL": shown("divergence", ".3g")}
    title = (
        f"{given.held_out} passages that were not calibrated on, {given.context} tokens before {given.scored} scored"
    )
    run.table(title, "bytes a token", {"": budgets}, {**columns, "of the uniform": shown("ratio", ".3f")})
    return {"budgets": budgets}


def main(arguments: Sequence[str] | None = None) -> int:
    given = options().parse(arguments)
    if given.quick:
        logging.disable_progress_bar()
    return report.run(given, {"calibration": measure})


if __name__ == "__main__":
    sys.exit(main())
