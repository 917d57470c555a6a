"""Pages have what is recorded, and a record has what was measured."""

import json
import os
import pathlib
import re
from typing import Any

import pytest

import versions


@pytest.fixture
def gpu_tables(script: Any) -> Any:
    return script("gpu_tables")


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
    gpu_tables: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
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
