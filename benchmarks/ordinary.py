"""Compares the ordinary case: short contexts, prefill, and `generate()` under `kvlayers.install()`.

    python benchmarks/ordinary.py                              # all of it, a quarter of an hour on two idle cores
    python benchmarks/ordinary.py --only steps --cases 1x128   # one section, one batch x tokens
    python benchmarks/ordinary.py --quick                      # a small model, to see that it runs

`steps` decodes with quantized caches that still hold nearly all tokens in full precision. `prefill` reads a prompt into
each kind of cache, more often if it is short. `generate` compares `generate()` of plain transformers with the same call
after `kvlayers.install()`, for a model of the shape of SmolLM2-135M, and for one so small that its time is Python's.

The model of the first two is a random llama with 8 layers in bfloat16. Caches take turns, in an order that rotates. A
ratio compares a cache with transformers' DynamicCache in the same turn, and the figure is the median over all turns.
Tokens of exact caches are compared with those of transformers' DynamicCache: the exit code is 1 if they differ by more
than rounding explains. Run it on an idle machine.
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
from lib import report
from lib.contenders import CONTENDERS, KVLAYERS, KVLAYERS_STATIC, REFERENCE, Maker
from lib.timing import Disagreements
from lib.workload import QUICK_SHAPE, RandomModel, Shape

SECTIONS = ("steps", "prefill", "generate")

QUANTIZED: dict[str, Maker] = {
    f"kvlayers {nbits} bits": lambda config, length, nbits=nbits: kvlayers.QuantizedCache(config=config, nbits=nbits)
    for nbits in (8, 4, 2)
}

EXACT: dict[str, Maker] = {
    KVLAYERS: CONTENDERS[KVLAYERS],
    KVLAYERS_STATIC: CONTENDERS[KVLAYERS_STATIC],
    "kvlayers.SinkCache": lambda config, length: kvlayers.SinkCache(
        window_length=length, num_sink_tokens=4, config=config
    ),
}
"""Caches that give a prompt the attention that transformers' DynamicCache gives it."""

STEP_CASES = "1x128,8x128,1x1024,8x1024"
PREFILL_CASES = "1x128,8x128,32x128,1x1024,8x1024,1x4096,1x8192"

TOKENS_IN_ALL = 16_384
"""Tokens of the prompts that each cache reads at least, in at most `MOST_TURNS`."""

MOST_TURNS = 40

GENERATE_MODELS: dict[str, dict[str, int]] = {
    "SmolLM2-135M": {
        "num_hidden_layers": 30,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "vocab_size": 49_152,
    },
    "4 layers of 64 channels": {
        "num_hidden_layers": 4,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 256,
    },
}

ROUNDINGS = 4
"""Roundings of bfloat16 by which a logit may differ: attention adds up in another order in each of 8 layers."""

STEP, EXACT_PREFILL, PACKED_PREFILL, GENERATE = 1.05, 1.03, 1.06, 1.02
"""The time with a cache of kvlayers as a multiple of that with transformers' DynamicCache, at most."""


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", type=_sections, default=SECTIONS, help=f"some of {','.join(SECTIONS)}")
    parser.add_argument("--cases", type=_cases, help=f"batches x tokens ({STEP_CASES}; prefill {PREFILL_CASES})")
    parser.add_argument("--steps", type=int, help="decode steps with each cache (48)")
    parser.add_argument("--turns", type=int, help="fewest turns of prefill, and turns of generate (5)")
    parser.add_argument("--new-tokens", type=int, help="tokens of each call of generate (128)")
    parser.add_argument("--threads", type=int, help="threads of torch")
    parser.add_argument("--output", type=pathlib.Path, help="JSON file (benchmarks/results/ordinary-<date>.json)")
    parser.add_argument("--quick", action="store_true", help="a small model, and few tokens")
    given = parser.parse_args(arguments)
    given.steps = given.steps or (4 if given.quick else 48)
    given.turns = given.turns or (3 if given.quick else 5)
    given.new_tokens = given.new_tokens or (8 if given.quick else 128)
    quick = _cases("1x64,2x96") if given.quick else None
    given.step_cases = given.cases or quick or _cases(STEP_CASES)
    given.prefill_cases = given.cases or quick or _cases(PREFILL_CASES)
    given.generate_models = list(GENERATE_MODELS)[-1:] if given.quick else list(GENERATE_MODELS)
    given.output = given.output or report.output_path("ordinary")
    return given


def _sections(text: str) -> tuple[str, ...]:
    found = tuple(text.split(","))
    if not set(found) <= set(SECTIONS):
        raise argparse.ArgumentTypeError(f"sections are {', '.join(SECTIONS)}, got {text}")
    return found


def _cases(text: str) -> list[tuple[int, int]]:
    return [(int(batch), int(tokens)) for batch, _, tokens in (case.partition("x") for case in text.split(","))]


def forward(model: Any, ids: Tensor, cache: Any) -> tuple[float, Tensor]:
    """A forward pass of `ids` `[batch, tokens]`: its seconds, and the logits of the last token `[batch, vocab]`."""
    begin = time.perf_counter()
    logits: Tensor = model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
    return time.perf_counter() - begin, logits[:, -1].float()


class Comparison:
    """Seconds of caches that take turns, and where their tokens differ.

    Args:
        workload: the model.
        makers: the caches, the reference among them.
        exact: names of the caches whose tokens are compared.
        case: batch and tokens.
        disagreements: where differences are recorded.
    """

    def __init__(
        self,
        workload: RandomModel,
        makers: dict[str, Maker],
        exact: Sequence[str],
        case: tuple[int, int],
        disagreements: Disagreements,
    ) -> None:
        self.model, self.makers, self.exact = workload.model, makers, exact
        self.batch, self.length = case
        self.name, self.disagreements = workload.name, disagreements
        self.prompts = workload.prompt(self.batch * self.length).reshape(case)
        self.seconds: dict[str, list[float]] = {name: [] for name in makers}

    def cache(self, name: str, more: int = 0) -> Any:
        """An empty cache for the prompts and `more` tokens."""
        return self.makers[name](self.model.config, self.length + more)

    def turn(self, index: int, run: Callable[[str], tuple[float, Tensor]]) -> Tensor:
        """Run all caches once; return the logits with the reference `[batch, vocab]`. The first turn warms up."""
        seen = {}
        for name in interleaved(list(self.makers), index):
            took, seen[name] = run(name)
            if index:
                self.seconds[name].append(took)
        for name in self.exact:
            where = {"model": self.name, "cache": name, "tokens": self.length, "batch": self.batch, "trial": index}
            for expected, row in zip(seen[REFERENCE], seen[name], strict=True):
                self.disagreements.compare_step(where, expected, row)
        return seen[REFERENCE]

    def ratios(self) -> dict[str, dict[str, float]]:
        """The median seconds of each cache, and the median of its times over the reference's in the same turn."""
        return {
            name: {
                "median": statistics.median(found),
                "ratio": statistics.median(
                    mine / other for mine, other in zip(found, self.seconds[REFERENCE], strict=True)
                ),
            }
            for name, found in self.seconds.items()
        }


def measure_steps(comparison: Comparison, steps: int) -> dict[str, dict[str, float]]:
    """Decode behind the prompts, with each cache in turn."""
    caches = {name: comparison.cache(name, steps + 1) for name in comparison.makers}
    with quiet_clock():
        for cache in caches.values():
            _, logits = forward(comparison.model, comparison.prompts, cache)
        for index in range(steps):
            tokens = logits.argmax(-1)[:, None]
            logits = comparison.turn(index, lambda name, tokens=tokens: forward(comparison.model, tokens, caches[name]))
    return comparison.ratios()


def measure_prefill(comparison: Comparison, turns: int) -> dict[str, dict[str, float]]:
    """Read the prompts into an empty cache of each kind in turn."""
    with quiet_clock():
        for index in range(turns + 1):
            comparison.turn(index, lambda name: forward(comparison.model, comparison.prompts, comparison.cache(name)))
    return comparison.ratios()


def measure_generate(shape: dict[str, int], new_tokens: int, turns: int) -> dict[str, Any]:
    """Generate with plain transformers and under `install()` in turn, with a random llama in float32."""
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape, eos_token_id=None)).eval()
    ids = torch.arange(16)[None]

    def generated() -> tuple[float, Tensor]:
        begin = time.perf_counter()
        found = model.generate(ids, max_new_tokens=new_tokens, do_sample=False)
        return (time.perf_counter() - begin) / new_tokens, found

    def installed() -> tuple[float, Tensor]:
        with kvlayers.installed():
            return generated()

    runs = {"transformers": generated, "installed": installed}
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    same = True
    with quiet_clock():
        for turn in range(turns + 1):
            found = {}
            for name in interleaved(list(runs), turn):
                took, found[name] = runs[name]()
                if turn:
                    seconds[name].append(took)
            same = same and torch.equal(found["transformers"], found["installed"])
    pairs = zip(seconds["installed"], seconds["transformers"], strict=True)
    return {
        "seconds_per_token": {name: statistics.median(each) for name, each in seconds.items()},
        "ratio": statistics.median(mine / other for mine, other in pairs),
        "same_tokens": same,
    }


def promises(results: dict[str, Any]) -> list[dict[str, Any]]:
    """The targets for these figures."""
    found = []
    for case, measured in results["steps"].items():
        for name in QUANTIZED:
            found.append(report.promised(f"step at {case}, {name}", measured[name]["ratio"], at_most=STEP))
    for case, measured in results["prefill"].items():
        for name, entry in measured.items():
            if name != REFERENCE:
                most = EXACT_PREFILL if name in EXACT else PACKED_PREFILL
                found.append(report.promised(f"prefill of {case}, {name}", entry["ratio"], at_most=most))
    for name, measured in results["generate"].items():
        what = f"time per token of generate() under install(), {name}"
        found.append(report.promised(what, measured["ratio"], at_most=GENERATE))
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it; return the exit code."""
    given = parse(arguments)
    if given.threads:
        torch.set_num_threads(given.threads)
    transformers.utils.logging.set_verbosity_error()
    console, environment = report.terminal(), report.environment()
    disagreements = Disagreements(roundings_of=lambda name: ROUNDINGS)
    workload = RandomModel(QUICK_SHAPE if given.quick else Shape())
    reference = {REFERENCE: CONTENDERS[REFERENCE]}
    results: dict[str, Any] = {section: {} for section in SECTIONS}
    with report.progress_bars(console) as progress:
        ticking = report.ticking_in(progress)
        if "steps" in given.only:
            tick = ticking("steps", len(given.step_cases))
            makers = {**reference, KVLAYERS: EXACT[KVLAYERS], **QUANTIZED}
            for case in given.step_cases:
                comparison = Comparison(workload, makers, [KVLAYERS], case, disagreements)
                results["steps"]["{}x{}".format(*case)] = measure_steps(comparison, given.steps)
                tick()
        if "prefill" in given.only:
            tick = ticking("prefill", len(given.prefill_cases))
            makers = {**reference, **EXACT, **QUANTIZED}
            for case in given.prefill_cases:
                comparison = Comparison(workload, makers, list(EXACT), case, disagreements)
                more = 0 if given.quick else min(TOKENS_IN_ALL // comparison.prompts.numel(), MOST_TURNS)
                results["prefill"]["{}x{}".format(*case)] = measure_prefill(comparison, max(given.turns, more))
                tick()
        if "generate" in given.only:
            tick = ticking("generate", len(given.generate_models))
            for name in given.generate_models:
                results["generate"][name] = measure_generate(GENERATE_MODELS[name], given.new_tokens, given.turns)
                tick()
    for section in ("steps", "prefill"):
        table = report.new_table(f"{section}, {workload.name}", "batch x tokens, cache", "ms", "ratio")
        for case, measured in results[section].items():
            for name, entry in measured.items():
                table.add_row(f"{case:>7} {name}", f"{entry['median'] * report.MILLI:.2f}", f"{entry['ratio']:.3f}")
            table.add_section()
        console.print(table)
    asked = [] if given.quick else promises(results)
    report.show_targets(console, asked)
    failed = report.finish(console, given, environment, results, asked, disagreements)
    return failed or int(not all(measured["same_tokens"] for measured in results["generate"].values()))


if __name__ == "__main__":
    sys.exit(main())
