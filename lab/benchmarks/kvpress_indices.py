"""Compares the tokens that eviction rules keep with those that kvpress keeps on the same states.

    python lab/benchmarks/kvpress_indices.py --kvpress-python /tmp/kvpress/bin/python
    python lab/benchmarks/kvpress_indices.py --kvpress-python PYTHON --model none   # a random llama alone

kvpress supports other versions of transformers, so it runs in an environment of its own:

    python -m venv /tmp/kvpress && /tmp/kvpress/bin/pip install torch==2.13.0 kvpress==0.5.5

This interpreter reads a text with a random llama, and with the real model if there is one, in float32, and saves the
states of each layer. The other one runs the presses of kvpress on them (`lib/kvpress_side.py`). Where the two keep
different tokens, the table has the largest difference of the scores of a token that only one keeps and of the one that
the other keeps instead, in standard deviations of all scores: 0, or a few roundings of float32, is a tie.

The rules are compared as they are: without the sinks and the newest tokens that an `EvictingLayer` keeps whatever
their scores. kvpress does that in the presses: the newest token in TOVA, which is set here too, the window in SnapKV
and the sinks in expected attention, which are in kvlayers' rules too.

The exit code is 1 if kvlayers and kvpress disagree about a token whose score is no tie.
"""

import itertools
import pathlib
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

import torch
import transformers
from torch import Tensor

from kvlayers.eviction import ALL_QUERIES, EvictionRule, eviction_rule
from lib import report
from lib.internals import HEAD_FLOOR, KeptTokens, rules_for, select
from lib.report import shown
from lib.workload import RandomModel, Shape

NEWEST = {"tova": 1}
"""Tokens that a press of kvpress keeps whatever their scores, and kvlayers' rule does not."""

RULES = ("knorm", "keydiff", "snapkv", "expected_attention", "tova")
KEEPS = (0.5, 0.25)
TIE = 1e-4
"""Scores that differ by this part of their standard deviation count as equal: float32 rounds them differently."""

OTHER_SIDE = pathlib.Path(__file__).parent / "lib" / "kvpress_side.py"


def options() -> report.Options:
    made = report.Options("kvpress-indices", __doc__)
    made.add("--kvpress-python", required=True, help="an interpreter with kvpress")
    made.real_model()
    made.sized("--tokens", 1000, None, "tokens that are read")
    return made


def states_of(model: Any, ids: Tensor) -> list[dict[str, Tensor]]:
    """What each layer's attention saw, and the projection of its queries."""
    layers: list[dict[str, Tensor]] = []

    def record(module: Any, query: Tensor, key: Tensor, value: Tensor, *rest: Any, **options: Any) -> Any:
        layers[-1].update(queries=query, keys=key, values=value, q_proj=module.q_proj.weight.detach())
        return attend(module, query, key, value, *rest, **options)

    def before(_: Any, __: Any, passed: dict[str, Any]) -> None:
        cos, sin = passed["position_embeddings"]
        layers.append({"hidden": passed["hidden_states"], "cos": cos, "sin": sin})

    attend = transformers.AttentionInterface()["sdpa"]
    transformers.AttentionInterface.register("recording", record)
    transformers.masking_utils.AttentionMaskInterface.register(
        "recording", transformers.masking_utils.AttentionMaskInterface()["sdpa"]
    )
    model.set_attn_implementation("recording")
    hooks = [layer.self_attn.register_forward_pre_hook(before, with_kwargs=True) for layer in model.model.layers]
    with torch.no_grad():
        model(input_ids=ids, logits_to_keep=1)
    for hook in hooks:
        hook.remove()
    return [{name: states.clone().contiguous() for name, states in layer.items()} for layer in layers]


def kvpress_found(python: str, config: Any, layers: list[dict[str, Tensor]]) -> dict[str, Any]:
    """What kvpress keeps: lists of tokens by rule, keep and layer."""
    with tempfile.TemporaryDirectory() as folder:
        states, found = pathlib.Path(folder, "states.pt"), pathlib.Path(folder, "found.pt")
        plain = [{name: states for name, states in layer.items() if name != "queries"} for layer in layers]
        torch.save({"config": config.to_dict(), "layers": plain, "keeps": KEEPS}, states)
        subprocess.run([python, str(OTHER_SIDE), str(states), str(found)], check=True)
        content: dict[str, Any] = torch.load(found, weights_only=True)
    return content


def scores_of(rule: EvictionRule, layer: dict[str, Tensor]) -> Tensor:
    queries = layer["queries"]
    shown = {0: None, ALL_QUERIES: queries}.get(rule.queries, queries[:, :, -rule.queries :])
    return rule.scores(layer["keys"], layer["values"], shown)


def sets_of(kept: KeptTokens) -> list[set[int]]:
    return [set(head.nonzero().flatten().tolist()) for head in kept.mask[0]]


def distances(scores: Tensor, kept: list[set[int]], expected: list[set[int]]) -> list[float]:
    """How far the scores of tokens that only kvlayers keeps are from those that only kvpress keeps.

    Args:
        scores: `[heads, tokens]`, of heads whose tokens compete for one budget.
        kept: the tokens that kvlayers keeps in each head.
        expected: the tokens that kvpress keeps, as many in all.

    Returns:
        One distance for each token that only kvlayers keeps, in standard deviations of the scores.
    """
    pairs = list(zip(scores, kept, expected, strict=True))
    only = sorted(float(own[token]) for own, mine, other in pairs for token in mine - other)
    instead = sorted(float(own[token]) for own, mine, other in pairs for token in other - mine)
    deviation = float(scores[scores.isfinite()].std())
    return [abs(one - another) / deviation for one, another in zip(only, instead, strict=True)]


def compared(name: str, model: Any, layers: list[dict[str, Tensor]], found: dict[str, Any]) -> dict[str, Any]:
    """Figures of one rule by the part that is kept; "AdaKV" if heads keep different numbers of tokens."""
    rules = rules_for(eviction_rule(name), model.config)
    results: dict[str, Any] = {}
    for keep, (kind, floor) in itertools.product(KEEPS, (("", 1.0), (" AdaKV", HEAD_FLOOR))):
        parts, apart = [], []
        for index, (rule, layer) in enumerate(zip(rules, layers, strict=True)):
            expected = found.get(f"{name} {keep} {index}{kind}")
            if expected is None:
                continue
            scores, other = scores_of(rule, layer), list(map(set, expected))
            count = int(scores.shape[2] * keep)
            own = sets_of(select(scores, count, recent=NEWEST.get(name, 0), floor=floor))
            same = sum(len(one & another) for one, another in zip(own, other, strict=True))
            parts.append(same / sum(map(len, other)))
            heads = [slice(None)] if kind else [slice(head, head + 1) for head in range(len(own))]
            apart += [each for of in heads for each in distances(scores[0, of], own[of], other[of])]
        if parts:
            largest = max(apart, default=0.0)
            figures = {"agreement": statistics.fmean(parts), "tokens_apart": len(apart), "largest_distance": largest}
            results[f"{keep}{kind}"] = figures
    return results


def measure(run: report.Session) -> dict[str, Any]:
    random = RandomModel(Shape(layers=4, heads=8, kv_heads=2, head_dim=64, intermediate=512), dtype=torch.float32)
    results: dict[str, Any] = {}
    for workload in filter(None, (run.real(torch.float32), random)):
        layers = states_of(workload.model, workload.prompt(run.given.tokens))
        found = kvpress_found(run.given.kvpress_python, workload.model.config, layers)
        run.environment["versions"]["beside kvpress"] = found["versions"]
        results[workload.name] = {name: compared(name, workload.model, layers, found) for name in RULES}
    columns = {
        "agreement": shown("agreement", ".4%"),
        "apart": shown("tokens_apart", ""),
        "distance": shown("largest_distance", ".1e"),
    }
    groups = {f"{model} {name}": figures for model, rules in results.items() for name, figures in rules.items()}
    run.table(f"Tokens kept of {run.given.tokens}, float32", "rule, keep", groups, columns)
    for name, figures in groups.items():
        for keep, entry in figures.items():
            run.expect(entry["largest_distance"] <= TIE, f"{name}, {keep}: tokens are kept whose scores are no ties")
    return results


def main(arguments: Sequence[str] | None = None) -> int:
    with report.session(options().parse(arguments)) as run:
        found = measure(run)
    return run.finish(found)


if __name__ == "__main__":
    sys.exit(main())
