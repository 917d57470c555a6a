"""The pages claim only recorded figures, and the script that reruns the claims measures each of them."""

import json
import math
import pathlib
import re
from typing import Any

import pytest
import torch

import kvlayers
import versions

ROOT = pathlib.Path(__file__).parents[2]
FIGURE = re.compile(r"\d[\d.,]*\s?(?:times|%|ms\b|us\b|of\s(?:the|their|its)\b|graphs|tokens/s|MB\b(?! from PyPI))")
"""What a claim looks like: a number with a unit or a comparison."""


@pytest.fixture
def claimed(script: Any) -> Any:
    return script("claimed")


@pytest.fixture
def gpu_tables(script: Any) -> Any:
    return script("gpu_tables")


@pytest.fixture
def record(claimed: Any) -> Any:
    return claimed.pages.parts("claims")


@pytest.fixture
def claims(script: Any) -> Any:
    return script("claims")


def without(text: str, begin: str, end: str) -> str:
    before, _, rest = text.partition(begin)
    return before + rest.partition(end)[2]


def prose_of(page: str) -> str:
    return " ".join(re.sub(r"```.*?```", "", page, flags=re.DOTALL).split())


def test_the_readme_has_figures_in_written_sections_only(claimed: Any, gpu_tables: Any) -> None:
    page = claimed.README.read_text()
    for name, script in (("table", "claims"), ("prompts", "prompts"), ("demo", "demo"), ("headline", "claims")):
        page = without(page, *claimed.pages.markers(name, script))
    assert FIGURE.findall(prose_of(without(page, gpu_tables.BEGIN_README, gpu_tables.END))) == []


def test_every_claim_holds_for_the_record(claimed: Any, record: Any) -> None:
    # What was never measured is on no page, as a test of `tables` says.
    for group in (each for each in claimed.GROUPS if each.name in record):
        for claim in group.claims:
            value = claimed.value_of(record, group, claim)
            where = f"{group.name}: {claim.row}, {claim.column}, asked {claim.asked}, recorded {value}"
            assert value is not None, where
            assert claim.holds(value), where


def test_only_what_was_measured_is_claimed(claimed: Any, record: Any) -> None:
    without_baseline = {name: found for name, found in record.items() if name != "baseline"}
    cells = {
        claimed.EXACT_STATIC: {claimed.TIMES_AS_FAST: 2.5, claimed.OF_DENSE: 1.0},
        claimed.DYNAMIC: {claimed.OVER_EXACT_STATIC: 1.5},
        claimed.INT4: {claimed.OVER_EXACT_STATIC: 1.75},
    }
    measured = {**without_baseline, "baseline": {**record["step"], "cells": cells}}
    row = f"| {claimed.EXACT_STATIC} | 1.00 | 2.5 | exact |"
    assert (row in claimed.readme_table(without_baseline, "")) is False
    assert (row in claimed.readme_table(measured, "")) is True
    assert "≥ 1.2 (1.50)" in claimed.tables(measured)
    titles = [group.title for group in claimed.GROUPS if group.name in measured]
    assert claimed.tables(measured).count("### ") == len(titles)
    assert claimed.tables(without_baseline).count("### ") == len(titles) - 1


def test_the_headline_names_a_large_model_if_it_was_measured(claimed: Any, record: Any) -> None:
    ratios = zip(claimed.LARGE_LENGTHS, (1.24, 1.96), strict=True)
    cells = {claimed.length_row(claimed.DYNAMIC, tokens): {claimed.TIMES_AS_FAST: ratio} for tokens, ratio in ratios}
    others = {name: found for name, found in record.items() if name != "large"}
    line = (
        "- a random llama with 1.2 billion weights decodes 1.2 times as fast after 4,096 tokens and 2.0 after 16,384;"
    )
    assert line in claimed.headline({**others, "large": {"cells": cells}}, {}).splitlines()
    assert "billion" not in claimed.headline(others, {})


def test_the_section_for_choosing_claims_only_what_is_recorded(claimed: Any) -> None:
    page = claimed.CHOOSING.read_text()
    measured = page[page.index("## What was measured") : page.index("## What each can do")]
    assert FIGURE.findall(without(measured, *claimed.pages.markers("table", "claims"))) == []


def test_tables_link_to_sections_that_there_are(claimed: Any) -> None:
    headings = re.findall(r"^#+ (.*)$", (ROOT / "docs" / "benchmarks.md").read_text(), flags=re.MULTILINE)
    anchors = {heading.lower().replace(" ", "-") for heading in headings}
    assert {group.figures for group in claimed.GROUPS if group.figures} <= anchors


def test_the_readme_of_the_benchmarks_has_a_command_for_every_figure(claimed: Any) -> None:
    directory = ROOT / "lab" / "benchmarks"
    readme = (directory / "README.md").read_text()
    for group in claimed.GROUPS:
        assert f"`python lab/benchmarks/claims.py --only {group.measurement}`" in readme
    for script in directory.glob("*.py"):
        if "__main__" in script.read_text():
            assert f"{script.name}" in readme, f"lab/benchmarks/README.md lacks {script.name}"
    for section in re.findall(r"^## (.*)$", (ROOT / "docs" / "benchmarks.md").read_text(), flags=re.MULTILINE):
        assert f"benchmarks.md#{section.lower().replace(' ', '-')})" in readme


def test_a_bound_decides(claimed: Any) -> None:
    least, most = claimed.at_least("a", "b", 2), claimed.at_most("a", "b", 2)
    assert [least.holds(value) for value in (1.9, 2, 2.1, math.nan, math.inf)] == [False, True, True, False, False]
    assert [most.holds(value) for value in (1.9, 2, 2.1, math.nan, -math.inf)] == [True, True, False, False, False]


@pytest.mark.nightly
@pytest.mark.slow
@versions.benchmarks_of_transformers
def test_a_quick_run_measures_every_claim(claims: Any, claimed: Any, tmp_path: pathlib.Path) -> None:
    output = tmp_path / "quick.json"
    threads = torch.get_num_threads()
    assert claims.main(["--quick", "--output", str(output)]) == 0
    assert torch.get_num_threads() == threads
    written = json.loads(output.read_text())
    assert written["failures"] == {}
    found = written["results"]["claims"]
    for group in claimed.GROUPS:
        for claim in group.claims:
            value = claimed.value_of(found, group, claim)
            assert value is not None, (group.name, claim.row, claim.column)
            assert math.isfinite(value)
    assert set(claims.MEASUREMENTS) == {group.measurement for group in claimed.GROUPS}
    # Counts and bytes are those of any model.
    for group in claimed.GROUPS:
        if group.name in ("graphs", "window"):
            assert all(claim.holds(claimed.value_of(found, group, claim)) for claim in group.claims)


@versions.benchmarks_of_transformers
def test_what_is_recorded_is_replaced_measurement_by_measurement(
    claims: Any, claimed: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    def failing(run: Any) -> Any:
        raise RuntimeError("no more")

    for name, marked in {"BENCHMARKS": "claims", "README": "table", "HOME": "table", "CHOOSING": "table"}.items():
        path = tmp_path / f"{name}.md"
        path.write_text("\n".join(["before", *claimed.pages.markers(marked, "claims"), "after"]))
        monkeypatch.setattr(claimed, name, path)
    page = claimed.BENCHMARKS
    window = {"window": {claimed.DYNAMIC: {claimed.BYTES_OF_TRANSFORMERS: 0.125}}}
    monkeypatch.setattr(claimed.pages, "RECORDED", tmp_path)
    monkeypatch.setattr(claims, "MEASUREMENTS", {"window": lambda run: window, "offload": failing})
    old = {"step": {"cells": {}, "threads": 2, "at": claims.report.environment()}, "window": {"cells": {}}}
    (tmp_path / "claims-2020-01-01.json").write_text(json.dumps({"results": {"claims": old}}))
    assert claims.main(["--record", "--output", str(tmp_path / "found.json")]) == 1
    (path,) = tmp_path.glob("claims-*.json")
    assert path.name != "claims-2020-01-01.json"
    kept = json.loads(path.read_text())["results"]["claims"]
    assert list(kept) == ["step", "window"]
    assert kept["window"]["cells"] == window["window"]
    assert json.loads((tmp_path / "found.json").read_text())["failures"] == {"offload": "RuntimeError: no more"}
    assert page.read_text().startswith("before\n")
    assert page.read_text().endswith("after")
    assert "≤ 0.20 (0.125)" in page.read_text()


@versions.benchmarks_of_transformers
def test_what_a_machine_lacks_a_model_for_is_skipped_and_keeps_its_record(
    claims: Any, claimed: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    monkeypatch.chdir(tmp_path)
    output = tmp_path / "found.json"
    assert claims.main(["--only", "gemma", "--output", str(output)]) == 0
    written = json.loads(output.read_text())
    assert written["results"]["claims"] == written["failures"] == {}
    assert list(written["skipped"]) == ["gemma"]
    assert "--gemma" in written["skipped"]["gemma"]


QUICK = ("window", "offload", "update", "sinks", "latents", "prefix", "gemma", "attention")
"""Measurements that the gate makes as well, of small models. Those that compile take long."""


@versions.benchmarks_of_transformers
def test_quick_runs_measure_the_claims(claims: Any, claimed: Any, tmp_path: pathlib.Path) -> None:
    output = tmp_path / "found.json"
    assert claims.main(["--quick", "--only", ",".join(QUICK), "--threads", "1", "--output", str(output)]) == 0
    found = json.loads(output.read_text())["results"]["claims"]
    for group in (each for each in claimed.GROUPS if each.name in QUICK):
        for claim in group.claims:
            value = claimed.value_of(found, group, claim)
            assert math.isfinite(value), claim
            # Bytes are those of any model.
            assert group.name != "window" or claim.holds(value), claim


class OtherValues(kvlayers.DynamicCache):
    """Returns values of the opposite sign, as no cache should."""

    def update(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = super().update(*args, **kwargs)
        return keys, -values


class OtherKeys(kvlayers.DynamicCache):
    """Returns the keys of other tokens."""

    def update(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = super().update(*args, **kwargs)
        return keys.flip(2), values


def other(cache: Any) -> Any:
    return lambda config, length: cache(config=config)


def negated_in_static_layers(patch: pytest.MonkeyPatch) -> None:
    update = kvlayers.StaticLayer.update

    def other_values(layer: Any, *states: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = update(layer, *states, **options)
        return keys, -values

    patch.setattr(kvlayers.StaticLayer, "update", other_values)


BROKEN = {
    "update": lambda claims, patch: patch.setitem(claims.CONTENDERS, claims.KVLAYERS, other(OtherKeys)),
    "batches": lambda claims, patch: patch.setitem(claims.CONTENDERS, claims.KVLAYERS, other(OtherValues)),
    "step": lambda claims, patch: patch.setitem(claims.QUANTIZED, claims.KVLAYERS, other(OtherValues)),
    "latents": lambda claims, patch: patch.setitem(
        claims.CONTENDERS,
        claims.KVLAYERS,
        lambda config, length: kvlayers.QuantizedCache(config=config, nbits=2, residual_length=32),
    ),
    "graphs": lambda claims, patch: negated_in_static_layers(patch),
    "offload": lambda claims, patch: patch.setitem(
        claims.cases.OFFLOADED,
        "dynamic",
        lambda config, offloading: (OtherValues if offloading else kvlayers.DynamicCache)(
            config=config, offloading=offloading
        ),
    ),
}
"""What lets the caches of a measurement attend to other states."""


@versions.benchmarks_of_transformers
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.nightly] if name == "graphs" else []) for name in BROKEN]
)
def test_a_cache_with_other_states_fails(
    claims: Any, name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    BROKEN[name](claims, monkeypatch)
    output = tmp_path / "found.json"
    assert claims.main(["--quick", "--only", name, "--threads", "1", "--output", str(output)]) == 1
    assert re.search("other tokens|logits in float32", json.loads(output.read_text())["failures"][name])


@versions.benchmarks_of_transformers
@pytest.mark.parametrize("arguments", [["--only", "nothing"], ["--quick", "--record"]])
def test_arguments_that_mean_nothing_are_refused(claims: Any, arguments: list[str]) -> None:
    with pytest.raises(SystemExit):
        claims.main(arguments)
