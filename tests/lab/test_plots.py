"""The plots are of what is recorded, and that is what the page of figures says."""

import importlib
import json
import pathlib
from typing import Any

import pytest

import versions

ROOT = pathlib.Path(__file__).parents[2]
RECORDED = ROOT / "lab" / "benchmarks" / "recorded"
PLOTS = ROOT / "docs" / "plots"


def recorded(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RECORDED / name).read_text())
    return found


@pytest.fixture
def record(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "lab" / "benchmarks"))
    return importlib.import_module("record")


@pytest.fixture
def plots(monkeypatch: pytest.MonkeyPatch) -> Any:
    pytest.importorskip("matplotlib", reason="no matplotlib here: the extra 'report' brings it")
    monkeypatch.syspath_prepend(str(ROOT / "lab" / "benchmarks"))
    return importlib.import_module("plots")


def test_the_page_has_the_figures_that_are_recorded() -> None:
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    results = recorded("decode-2026-11-21.json")["results"]
    for cache, measured in results["sliding"].items():
        library, _, kind = cache.partition(".")
        medians = [f"{seconds * 1e3:.1f}" for seconds in measured["medians"].values()]
        assert f"| {library} `{kind}` | {' | '.join(medians)} |" in page


def test_the_page_has_the_figures_of_prefixes_that_are_recorded() -> None:
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    results = recorded("prefix-2026-11-23.json")["results"]
    columns = ("document_bytes", "private_bytes", "bytes", "files", "copied_bytes")
    for case, held in results["memory"].items():
        mebibytes = [f"{held[column] / 2**20:,.1f}" for column in columns]
        assert f", {case.rpartition(', ')[2]} | {' | '.join(mebibytes)} |" in page
    steps = results["decode_behind_hit"]
    for length in ("1024", "4096", "16384"):
        kinds = [steps[f"{length}, {kind}"] for kind in ("float32", "bfloat16", "int4")]
        ratios = [f"{kind['processor_ratio']:.2f} ({kind['ratio']:.2f})" for kind in kinds]
        assert f"| {int(length):,} | {' | '.join(ratios)} |" in page
    cold, *others = results["one"]["medians"].values()
    assert f"| {cold:.3f} | 100 % |" in page
    assert all(f"| {seconds:.3f} | {seconds / cold:.1%} |".replace("% |", " % |") in page for seconds in others)


def test_the_page_has_the_divergences_that_are_recorded() -> None:
    budgets = recorded("calibration-2026-11-25.json")["results"]["calibration"]["budgets"]
    figures = (ROOT / "docs" / "benchmarks.md").read_text()
    for budget, found in budgets.items():
        names = sorted(found["uniform"], key=lambda name: found["uniform"][name])
        uniform = f"{'; '.join(names)} | {'; '.join(format(found['uniform'][name], '.5f') for name in names)}"
        calibrated = f"{found['divergence']:.5f} | {found['ratio']:.3f} |"
        assert found["bytes_per_token"] == float(budget)
        assert f"| {int(budget):,} | {uniform} | {calibrated}" in figures


def test_every_recorded_result_is_drawn_on_the_page(plots: Any, tmp_path: pathlib.Path) -> None:
    drawn = {path.name for results in RECORDED.glob("*.json") for path in plots.plots_of(results, tmp_path)}
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    assert drawn == {path.name for path in PLOTS.glob("*.png")}
    assert all(f"](plots/{name})" in page for name in drawn)


def test_a_plot_shows_the_medians_and_says_where_they_are_from(plots: Any) -> None:
    found = recorded("decode-2026-11-21.json")
    axes = plots.update_plot(found)
    shown = {bars.get_label(): list(bars.lines[0].get_ydata()) for bars in axes.containers}
    measured = found["results"]["update"]
    lengths = sorted(measured, key=int)
    assert set(shown) == set(measured["128"])
    for name, medians in shown.items():
        assert medians == [measured[length][name]["median"] * 1e6 for length in lengths]
    assert "AMD EPYC, 2 cores, 2 threads, 24 GiB, 2026-11-21" in axes.get_xlabel()
    assert "kvlayers 0.1.0" in axes.get_xlabel()


def test_a_result_without_a_part_gives_no_plot_of_it(plots: Any) -> None:
    found = recorded("calibration-2026-11-25.json")
    assert [name for name, plot in plots.DRAWN.items() if plot(found) is not None] == ["kl"]


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
