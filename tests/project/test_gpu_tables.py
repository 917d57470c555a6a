"""The page on GPUs and README.md have the figures of the records, and a record has what a stage of `gpu.py` found."""

import importlib
import json
import os
import pathlib
import re
from typing import Any

import pytest

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture
def gpu_tables(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("gpu_tables")


@pytest.mark.parametrize(("path", "write"), [("PAGE", "with_tables"), ("README", "with_readme_figures")])
def test_a_page_has_what_the_records_say(gpu_tables: Any, path: str, write: str) -> None:
    file = getattr(gpu_tables, path)
    page = file.read_text()
    due = getattr(gpu_tables, write)(page)
    if os.environ.get("KVLAYERS_WRITE_DOCS"):
        file.write_text(due)
        page = due
    assert page == due, f"{file.name} lacks recorded figures: run benchmarks/gpu_tables.py --write"


def test_every_table_stands_on_the_page_once(gpu_tables: Any) -> None:
    page = gpu_tables.PAGE.read_text()
    assert re.findall(r"<!-- gpu: (.*), written", page) == list(gpu_tables.ON_PAGE)
    assert page.count(gpu_tables.END) == len(gpu_tables.ON_PAGE)


def test_other_figures_make_another_page(gpu_tables: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    record = json.loads(json.dumps(gpu_tables.read("first")))
    speed = gpu_tables.read("speed")
    record["results"]["gpu"]["decoding"]["figures"]["ms a step"]["kvlayers int4"]["32,768 x 1"] = 1.234
    monkeypatch.setattr(gpu_tables, "read", {"first": record, "speed": speed}.__getitem__)
    assert "| 1.23 |" in gpu_tables.with_tables(gpu_tables.PAGE.read_text())
    assert "1.23 ms with `int4`" in gpu_tables.with_readme_figures(gpu_tables.README.read_text())


def test_of_a_stage_figures_and_what_is_wrong_are_recorded(
    gpu_tables: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    record = importlib.import_module("record")
    step = {
        "name": "decoding",
        "status": "wrong",
        "seconds": 1.23,
        "figures": [
            {"what": "int4", "value": 12.3456, "unit": "ms a step", "predicted": "", "column": "8 x 1"},
            {"what": "int4", "value": 2.0, "unit": "x as fast as the first", "predicted": "", "column": "8 x 1"},
            {"what": "a copy", "value": 3.0, "unit": "GB/s", "predicted": "4"},
            {"what": "  of the rate", "value": 75.0, "unit": "%", "predicted": ""},
        ],
        "wrong": ["int4: an error " + 500 * "."],
        "details": {"8 x 1": {"ms": {"int4": [1.0, 2.0, 3.0, 4.0]}}, "test.py": {"output": 5000 * "."}},
    }
    found = {"date": "today", "versions": {}, "device": "GPU", "total_memory": 1, "cuda": "13.0", "steps": [step]}
    (tmp_path / "first.json").write_text(json.dumps(found))
    monkeypatch.setattr("sys.argv", ["record.py", str(tmp_path / "first.json"), str(tmp_path / "recorded.json")])
    record.main()
    written = json.loads((tmp_path / "recorded.json").read_text())
    assert written["hardware"]["gpu"] == "GPU"
    assert written["results"]["gpu"]["decoding"] == {
        "status": "wrong",
        "seconds": 1.2,
        "figures": {"ms a step": {"int4": {"8 x 1": 12.35}}, "GB/s": {"a copy": 3.0}},
        "middle half, ms": {"8 x 1": {"int4": {"from": 1.25, "to": 3.75}}},
        "wrong": [step["wrong"][0][: record.LONGEST_REASON]],  # type: ignore[index]
    }
