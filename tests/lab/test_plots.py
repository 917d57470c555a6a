"""The picture of README.md is of what is recorded."""

import importlib
import pathlib
from typing import Any

import pytest

import versions

ROOT = pathlib.Path(__file__).parents[2]
PLOTS = ROOT / "docs" / "plots"


@pytest.fixture
def record(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "lab" / "benchmarks"))
    return importlib.import_module("record")


@pytest.fixture
def plots(monkeypatch: pytest.MonkeyPatch) -> Any:
    pytest.importorskip("matplotlib", reason="no matplotlib here: the extra 'report' brings it")
    monkeypatch.syspath_prepend(str(ROOT / "lab" / "benchmarks"))
    return importlib.import_module("plots")


def test_what_is_recorded_lacks_the_single_times_alone(record: Any) -> None:
    found = {
        "versions": {"torch": "2.13"},
        "update": {"64": {"a cache": {"seconds": [[0.1, 0.2], [0.3]], "median": 0.2, "median_range": [0.1, 0.3]}}},
        "sliding": {"a cache": {"stations": {"600": [[0.1]]}, "medians": {"600": 0.1}}},
        "chat": [{"tokens": 3, "seconds": 0.5}],
        "decode": {},
    }
    assert record.without_single_times(found) == {
        "versions": {"torch": "2.13"},
        "update": {"64": {"a cache": {"median": 0.2, "median_range": [0.1, 0.3]}}},
        "sliding": {"a cache": {"medians": {"600": 0.1}}},
        "chat": [{"tokens": 3, "seconds": 0.5}],
        "decode": {},
    }


@versions.benchmarks_of_transformers
def test_the_picture_of_the_readme_is_drawn_from_the_record_of_its_table(plots: Any, tmp_path: pathlib.Path) -> None:
    claimed = plots.claimed
    found = claimed.pages.parts("claims")["step"]
    steps, held = plots.picture(found).axes
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
        assert line in (PLOTS / "readme.svg").read_text(), "run lab/benchmarks/claims.py --write"


@versions.benchmarks_of_transformers
def test_table_and_picture_say_the_same(plots: Any) -> None:
    """At the greatest length, the ratio in the table is that of the times in the picture, and so are the bytes."""
    claimed = plots.claimed
    cells = claimed.pages.parts("claims")["step"]["cells"]
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
