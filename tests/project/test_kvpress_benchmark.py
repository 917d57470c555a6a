"""The comparison with kvpress passes if the same tokens are kept or scores are tied, and fails otherwise."""

import json
import pathlib
from typing import Any

import pytest
import torch

import versions
from kvlayers.eviction import eviction_rule
from kvlayers.eviction.selection import HEAD_FLOOR, select

BENCHMARKS = pathlib.Path(__file__).parents[2] / "lab" / "benchmarks"

pytestmark = [pytest.mark.slow, versions.benchmarks_of_transformers]


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Any:
    pytest.importorskip("rich")
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import kvpress_indices

    return kvpress_indices


def stand_in(benchmark: Any, layers: list[dict[str, torch.Tensor]]) -> dict[str, Any]:
    """What kvpress would find if it were kvlayers."""
    found: dict[str, Any] = {"versions": {"kvpress": "none"}}
    for name in benchmark.RULES:
        # A rule without the rotation keeps other tokens, so it is left out.
        if name == "expected_attention":
            continue
        for index, layer in enumerate(layers):
            scores = benchmark.scores_of(eviction_rule(name), layer)
            for keep in benchmark.KEEPS:
                for kind, floor in (("", 1.0), (" AdaKV", HEAD_FLOOR)):
                    count, recent = int(scores.shape[2] * keep), benchmark.NEWEST.get(name, 0)
                    kept = benchmark.sets_of(select(scores, count, recent=recent, floor=floor))
                    found[f"{name} {keep} {index}{kind}"] = [sorted(head) for head in kept]
    return found


@pytest.mark.parametrize("is_broken", [False, True])
def test_other_tokens_fail_the_comparison(
    benchmark: Any, is_broken: bool, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def found(python: str, config: Any, layers: list[dict[str, torch.Tensor]]) -> dict[str, Any]:
        kept = stand_in(benchmark, layers)
        if is_broken:
            head = kept["keydiff 0.25 1"][0]
            head[0] = next(token for token in range(70) if token not in head)
        return kept

    monkeypatch.setattr(benchmark, "kvpress_found", found)
    output = tmp_path / "found.json"
    arguments = ["--kvpress-python", "none", "--model", "none", "--tokens", "100", "--output", str(output)]
    assert benchmark.main(arguments) == (1 if is_broken else 0)
    rules = json.loads(output.read_text())["results"]["random llama"]
    assert rules["snapkv"]["0.5 AdaKV"]["agreement"] == 1
    assert rules["keydiff"]["0.25"]["tokens_apart"] == (1 if is_broken else 0)
