"""The pages claim only recorded figures, and the script that reruns the claims measures each of them."""

import json
import math
import os
import pathlib
import re
from typing import Any

import pytest
import torch

import kvlayers
import versions
from other_values import OtherValues

ROOT = pathlib.Path(__file__).parents[2]
FIGURE = re.compile(r"\d[\d.,]*\s?(?:times|%|ms\b|us\b|of\s(?:the|their|its)\b|graphs|tokens/s|MB\b(?! from PyPI))")
"""What a claim looks like: a number with a unit or a comparison."""


@pytest.fixture
def claimed(script: Any) -> Any:
    return script("claimed")


@pytest.fixture
def record(claimed: Any) -> Any:
    return claimed.pages.parts("claims")


@pytest.fixture
def claims(script: Any) -> Any:
    return script("claims")


@pytest.fixture
def plots(script: Any) -> Any:
    pytest.importorskip("matplotlib", reason="no matplotlib here: the extra 'report' brings it")
    return script("plots")


def without(text: str, begin: str, end: str) -> str:
    before, _, rest = text.partition(begin)
    return before + rest.partition(end)[2]


def test_the_readme_has_figures_in_written_sections_only(claimed: Any) -> None:
    page = claimed.README.read_text()
    for begin in re.findall(r"<!-- .*?: written by .*? -->", page):
        page = without(page, begin, begin.partition(":")[0].replace("<!-- ", "<!-- end of ") + " -->")
    prose = re.sub(r"```.*?```", "", page, flags=re.DOTALL)
    assert FIGURE.findall(" ".join(prose.split())) == []


def test_every_claim_holds_for_the_record(claimed: Any, record: Any) -> None:
    # What was never measured is on no page, as a test of `tables` says.
    for group in (each for each in claimed.GROUPS if each.name in record):
        for claim in group.claims:
            value = claimed.value_of(record, group, claim)
            where = f"{group.name}: {claim.row}, {claim.column}, asked {claim.asked}, recorded {value}"
            assert value is not None, where
            assert claim.holds(value), where


def test_a_group_that_was_never_measured_is_not_claimed(claimed: Any, record: Any) -> None:
    for measured in (record, {name: found for name, found in record.items() if name != "baseline"}):
        titles = [group.title for group in claimed.GROUPS if group.name in measured]
        assert re.findall("^### (.*)$", claimed.tables(measured), re.MULTILINE) == titles


def test_the_section_for_choosing_claims_only_what_is_recorded(claimed: Any) -> None:
    page = claimed.CHOOSING.read_text()
    measured = page[page.index("## What was measured") : page.index("## What each can do")]
    assert FIGURE.findall(without(measured, *claimed.pages.markers("table", "claims"))) == []


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


def failing(run: Any) -> Any:
    raise RuntimeError("no more")


@versions.benchmarks_of_transformers
def test_what_is_recorded_is_replaced_measurement_by_measurement(
    claims: Any, claimed: Any, record: Any, found_by: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    parts = ("claims", "steps", "table", "headline")
    markers = [line for part in parts for line in claimed.pages.markers(part, "claims")]
    for name in ("BENCHMARKS", "README", "HOME", "CHOOSING"):
        path = tmp_path / f"{name}.md"
        path.write_text("\n".join(["before", *markers, "after"]))
        monkeypatch.setattr(claimed, name, path)
    prompts = claimed.pages.newest("prompts")
    window = {"window": {claimed.DYNAMIC: {claimed.BYTES_OF_TRANSFORMERS: 0.125}}}
    monkeypatch.setattr(claimed.pages, "RECORDED", tmp_path)
    monkeypatch.setattr(claims, "MEASUREMENTS", {"window": lambda run: window, "offload": failing})
    monkeypatch.setattr(claims.plots, "PICTURE", tmp_path / "readme.svg")
    (tmp_path / "claims-2020-01-01.json").write_text(json.dumps({"results": {"claims": record}}))
    (tmp_path / "prompts-2020-01-01.json").write_text(json.dumps(prompts))
    assert found_by(claims, "--record", code=1)["failures"] == {"offload": "RuntimeError: no more"}
    (path,) = tmp_path.glob("claims-*.json")
    assert path.name != "claims-2020-01-01.json"
    kept = json.loads(path.read_text())["results"]["claims"]
    assert kept == {**record, "window": {**kept["window"], "cells": window["window"]}}
    assert "</svg>" in (tmp_path / "readme.svg").read_text()
    page = claimed.BENCHMARKS.read_text()
    assert page.startswith("before\n")
    assert page.endswith("after")
    assert "≤ 0.20 (0.125)" in page


@versions.benchmarks_of_transformers
def test_what_a_machine_lacks_a_model_for_is_skipped_and_keeps_its_record(
    claims: Any, found_by: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    monkeypatch.chdir(tmp_path)
    written = found_by(claims, "--only", "gemma")
    assert written["results"]["claims"] == written["failures"] == {}
    assert list(written["skipped"]) == ["gemma"]
    assert "--gemma" in written["skipped"]["gemma"]


QUICK = ("window", "offload", "update", "sinks", "latents", "prefix", "gemma", "attention")
"""Measurements that the gate makes as well, of small models. Those that compile take long."""


@versions.benchmarks_of_transformers
@pytest.mark.parametrize("every", [False, pytest.param(True, marks=[pytest.mark.nightly, pytest.mark.slow])])
def test_quick_runs_measure_the_claims(claims: Any, claimed: Any, found_by: Any, every: bool) -> None:
    threads = torch.get_num_threads()
    assert set(claims.MEASUREMENTS) == {group.measurement for group in claimed.GROUPS}
    names = tuple(claims.MEASUREMENTS) if every else QUICK
    written = found_by(claims, "--quick", "--only", ",".join(names), "--threads", "1")
    assert torch.get_num_threads() == threads
    assert written["failures"] == {}
    for group in (each for each in claimed.GROUPS if each.measurement in names):
        for claim in group.claims:
            value = claimed.value_of(written["results"]["claims"], group, claim)
            assert value is not None, (group.name, claim.row, claim.column)
            assert math.isfinite(value), claim
            # Counts and bytes are those of any model.
            assert group.name not in ("graphs", "window") or claim.holds(value), claim


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
    claims: Any, found_by: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    BROKEN[name](claims, monkeypatch)
    written = found_by(claims, "--quick", "--only", name, "--threads", "1", code=1)
    assert re.search("other tokens|logits in float32", written["failures"][name])


@versions.benchmarks_of_transformers
def test_the_picture_of_the_readme_is_drawn_from_the_record_of_its_table(
    plots: Any, record: Any, tmp_path: pathlib.Path
) -> None:
    claimed, found = plots.claimed, record["step"]
    figure = pytest.importorskip("matplotlib.figure").Figure()
    plots.draw(figure, found)
    steps, held = figure.axes
    for axes, column in ((steps, claimed.MILLISECONDS), (held, claimed.MEGABYTES)):
        shown = {line.get_label(): list(line.get_ydata()) for line in axes.lines}
        for row, (label, _) in plots.CACHES.items():
            assert shown[label] == [
                found["cells"][claimed.length_row(row, tokens)][column] for tokens in claimed.LENGTHS
            ]
    plots.draw_picture(found, tmp_path / "readme.svg")
    drawn = (tmp_path / "readme.svg").read_text()
    assert "prefers-color-scheme:dark" in drawn
    for line in plots.provenance(found["at"]).splitlines():
        assert line in drawn
        assert line in plots.PICTURE.read_text(), "run lab/benchmarks/claims.py --write"


@versions.benchmarks_of_transformers
def test_table_and_picture_say_the_same(plots: Any, record: Any) -> None:
    """At the greatest length, the ratio in the table is that of the times in the picture, and so are the bytes."""
    claimed, cells = plots.claimed, record["step"]["cells"]
    base = cells[claimed.length_row(claimed.TRANSFORMERS, claimed.LENGTHS[-1])]
    for row in (claimed.DYNAMIC, claimed.INT4):
        drawn = cells[claimed.length_row(row, claimed.LENGTHS[-1])]
        assert drawn[claimed.TIMES_AS_FAST] == cells[row][claimed.TIMES_AS_FAST]
        # The median of ratios beside the ratio of medians.
        ratio = base[claimed.MILLISECONDS] / drawn[claimed.MILLISECONDS]
        assert ratio == pytest.approx(drawn[claimed.TIMES_AS_FAST], rel=0.1)
        assert drawn[claimed.MEGABYTES] / base[claimed.MEGABYTES] == pytest.approx(
            cells[row][claimed.OF_DENSE], rel=0.02
        )


# Other records

BY_PAGES = ("claimed", "demo", "gpu_tables", "prompt_tables")
BY_BENCHMARKS = ("outliers", "rows", "documents", "peers", "sessions", "memory", "tasks")


@pytest.mark.parametrize(
    "writer",
    [*BY_PAGES, *(pytest.param(name, marks=versions.benchmarks_of_transformers) for name in BY_BENCHMARKS)],
)
def test_pages_have_what_is_recorded(script: Any, writer: str) -> None:
    for path, due in script(writer).written_pages().items():
        if os.environ.get("KVLAYERS_WRITE_DOCS"):
            path.write_text(due)
        assert path.read_text() == due, f"{path} lacks recorded figures: run its benchmark with --write"


@versions.benchmarks_of_transformers
def test_what_stands_between_markers_is_written(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pages, found = script("pages"), set()

    def noted(by: str, texts: Any) -> Any:
        found.update((path, pages.markers(name, by)[0]) for path, name in texts)
        return {}

    monkeypatch.setattr(pages, "written", noted)
    for writer in (*BY_PAGES, *BY_BENCHMARKS):
        script(writer).written_pages()
    there = (pages.ROOT / "README.md", *pages.DOCS.rglob("*.md"))
    assert found == {(path, begin) for path in there for begin in re.findall(r"<!-- .*? by .*? -->", path.read_text())}


def test_of_a_stage_figures_and_what_is_wrong_are_recorded(
    script: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    gpu_tables = script("gpu_tables")
    figures = {"ms a step": {"int4": {"8 x 1": 12.35}}, "GB/s": {"a copy": 3.0}}
    step = {"status": "wrong", "figures": figures, "wrong": ["int4: an error " + 500 * "."]}
    found = {"date": "2026-11-30 01:00", "versions": {}, "hardware": {"gpu": "GPU"}, "stage": "first"}
    details = {"8 x 1": {"ms": {"int4": [1.0, 2.0, 3.0, 4.0]}}, "test.py": {"output": 5000 * "."}}
    (tmp_path / "first.json").write_text(
        json.dumps({**found, "results": {"gpu": {"decoding": {**step, "details": details}}}})
    )
    monkeypatch.setattr(gpu_tables.pages, "RECORDED", tmp_path)
    gpu_tables.record(tmp_path / "first.json")
    kept = {**step, "wrong": [step["wrong"][0][: gpu_tables.LONGEST_TEXT]]}  # type: ignore[index]
    assert gpu_tables.read() == {**found, "results": {"gpu": {"decoding": kept}}}


PRINTED = """
SmolLM2-135M-Instruct in bfloat16 on cpu, torch threads: 2. Prompt: 4105 tokens,
4096 of them from the Python documentation.

...what follows from it.

 Library       Cache    Predictions         Prompt         Step      Held
 ────────────────────────────────────────────────────────────────────────
 transformers  dynamic  reference           5.52 s  81.1 ms ±1%  90.9 MiB

Prompt: the forward pass over 4105 tokens.
│ transformers │ 5.1 s │
{summary}Next: `kvlayers bench` and more.
"""
SUMMARY = "With kvlayers, dynamic decodes 3.0 times as fast\nas transformers' DynamicCache.\n"


@pytest.mark.parametrize("summary", ["", SUMMARY])
def test_of_the_demo_the_table_and_the_summary_are_shown(script: Any, summary: str) -> None:
    demo = script("demo")
    shown = demo.shown_of(PRINTED.format(summary=summary))
    at = {"date": "2026-11-29T01", "hardware": {"cpu": "CPU", "threads": 2}, "versions": {"transformers": "5.24.0"}}
    block = demo.block({**at, "results": {"demo": shown}})
    assert block.startswith("```\n Library       Cache ")
    assert "│" not in block
    assert summary.rstrip() in block
    assert ("With kvlayers" in block) == bool(summary)
    assert block.endswith(
        f"```\n\n{demo.LEGEND}\n\n"
        "That was SmolLM2-135M-Instruct in bfloat16 (weights of 4 and 8 bits, converted) after 4,105 tokens (CPU, "
        "2 threads, transformers 5.24.0, "
        "2026-11-29)."
    )
