"""Compares calibrated bits with the same bits in every layer, on text that calibration has not seen.

    python benchmarks/calibration.py                     # the demo model, about forty minutes on two idle cores
    python benchmarks/calibration.py --model DIR_OR_HUB  # another model
    python benchmarks/calibration.py --quick             # a small random model, to see that it runs

Sensitivities are measured once. The budgets are the bytes of uniform bits. For each budget, the calibrated setting and
every uniform setting with as many bytes read passages from other places in the text, in chunks, and their predictions
are compared with full precision. Bytes are for states in bfloat16, whatever dtype the model computes in.

The exit code is 1 if a calibrated setting takes more bytes than its budget.
"""

import argparse
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers.utils import logging

import kvlayers
from fidelity import passages
from kvlayers.tools.calibration.settings import DivergenceInUse
from lib import report
from lib.workload import RandomModel, Shape, default_model, default_text

UNIFORM = ((3, 2), (2, 3), (4, 2), (3, 3), (2, 4), (4, 3), (3, 4), (4, 4))
"""Bits of keys and values in every layer. Their bytes are the budgets."""

QUICK_SHAPE = Shape(layers=3, heads=4, kv_heads=2, head_dim=64, intermediate=128, vocab=256)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", help="directory or hub name of a model; 'none' for a random one")
    parser.add_argument("--text", type=pathlib.Path, help="what is read (the topics of Python's help)")
    parser.add_argument("--passages", type=int, help="that are calibrated on (4)")
    parser.add_argument("--held-out", type=int, help="from other places, that settings are compared on (8)")
    parser.add_argument("--context", type=int, help="tokens of each that are read before scoring begins (1024)")
    parser.add_argument("--scored", type=int, default=64, help="tokens of each that are scored (64)")
    parser.add_argument("--threads", type=int, help="threads of torch")
    parser.add_argument("--output", type=pathlib.Path, help="JSON file (benchmarks/results/calibration-<date>.json)")
    parser.add_argument("--quick", action="store_true", help="a small random model and short passages")
    given = parser.parse_args(arguments)
    given.model = given.model or ("none" if given.quick else default_model())
    given.passages = given.passages or (1 if given.quick else 4)
    given.held_out = given.held_out or (1 if given.quick else 8)
    given.context = given.context or (320 if given.quick else 1024)
    given.output = given.output or report.output_path("calibration")
    return given


def load(given: argparse.Namespace) -> tuple[Any, list[Tensor]]:
    """A model in float32, and passages `[1, tokens]` from places spread over the text."""
    tokens, count = given.context + given.scored, given.passages + given.held_out
    if given.model == "none":
        ids = torch.randint(0, QUICK_SHAPE.vocab, (count, tokens), generator=torch.Generator().manual_seed(0))
        return RandomModel(QUICK_SHAPE).model.float(), list(ids[:, None])
    text = default_text() if given.text is None else given.text.read_text()
    model = transformers.AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.float32).eval()
    return model, passages(transformers.AutoTokenizer.from_pretrained(given.model), text, count, tokens)


def divided(found: list[Tensor], held_out: int) -> tuple[list[Tensor], list[Tensor]]:
    """Passages to calibrate on and passages to compare on, both spread over the text."""
    apart = {len(found) * index // held_out for index in range(held_out)}
    return [ids for index, ids in enumerate(found) if index not in apart], [found[index] for index in sorted(apart)]


def uniform_bytes(model: Any, key_nbits: int, value_nbits: int) -> float:
    """Bytes of a token with the same bits in every layer, if the model runs in bfloat16."""
    plan = kvlayers.plan(model.config, 8192, dtype=torch.bfloat16, names=["dynamic"])
    states = plan["dynamic"].bytes_per_token / 2 / torch.bfloat16.itemsize
    cache = kvlayers.QuantizedCache(config=model.config)
    quantized = [layer.parts[0] for layer in cache.adapted_layers()]
    assert all(isinstance(layer, kvlayers.QuantizedLayer) for layer in quantized)
    # A scale and a zero point in bfloat16 for each 64 numbers of keys and of values.
    return states * ((key_nbits + value_nbits) / 8 + 2 * 4 / 64)


def measure(model: Any, given: argparse.Namespace, found: list[Tensor]) -> dict[str, Any]:
    """For each budget, the calibrated setting and the uniform settings, in order of bytes."""
    seen, unseen = divided(found, given.held_out)
    held_out = DivergenceInUse(model, unseen, given.scored)
    uniform: dict[float, dict[str, float]] = {}
    for key_nbits, value_nbits in logging.tqdm(UNIFORM, desc="Uniform settings"):
        divergence = held_out.of(
            lambda keys=key_nbits, values=value_nbits: kvlayers.QuantizedCache(
                config=model.config, key_nbits=keys, value_nbits=values
            )
        )
        by_bits = uniform.setdefault(uniform_bytes(model, key_nbits, value_nbits), {})
        by_bits[f"K{key_nbits}V{value_nbits}"] = divergence
    budgets: dict[str, Any] = {}
    sensitivities = None
    for budget, by_bits in sorted(uniform.items()):
        calibration = kvlayers.calibrate(
            model,
            [ids[0] for ids in seen],
            kvlayers.BytesBudget(budget),
            passages=len(seen),
            context_length=given.context,
            scored_tokens=given.scored,
            dtype=torch.bfloat16,
            sensitivities=sensitivities,
        )
        sensitivities = calibration.sensitivities
        options = calibration.cache_config
        divergence = held_out.of(lambda options=options: kvlayers.QuantizedCache(config=model.config, **options))
        best = min(by_bits, key=lambda name: by_bits[name])
        budgets[f"{budget:g}"] = {
            "bytes_per_token": calibration.bytes_per_token,
            "divergence": divergence,
            "uniform": by_bits,
            "best": best,
            "ratio": divergence / by_bits[best],
            "key_nbits": options["key_nbits"],
            "value_nbits": options["value_nbits"],
            "while_calibrating": calibration.divergence,
        }
    return {
        "budgets": budgets,
        "sensitivities": [[part.layer, part.side, part.divergence] for part in sensitivities or ()],
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it; the exit code is 1 if a setting exceeds its budget."""
    given = parse(arguments)
    console = report.terminal()
    if given.threads:
        torch.set_num_threads(given.threads)
    if given.quick:
        logging.disable_progress_bar()
    environment = report.environment()
    model, found = load(given)
    measured = measure(model, given, found)
    table = report.new_table(
        f"{given.held_out} passages that were not calibrated on, {given.context} tokens before {given.scored} scored",
        "bytes a token", "best uniform bits", "KL", "calibrated, bytes a token", "KL", "of the uniform",
    )  # fmt: skip
    for budget, entry in measured["budgets"].items():
        table.add_row(
            budget,
            entry["best"],
            f"{entry['uniform'][entry['best']]:.3g}",
            f"{entry['bytes_per_token']:g}",
            f"{entry['divergence']:.3g}",
            f"{entry['ratio']:.3f}",
        )
    console.print(table)
    report.write(console, given, environment, {"results": {"calibration": measured}})
    within = all(entry["bytes_per_token"] <= float(budget) for budget, entry in measured["budgets"].items())
    return 0 if within else 1


if __name__ == "__main__":
    sys.exit(main())
