"""The table of the benchmark of tasks, also when there is nothing to compare."""

import pathlib
from typing import Any

import pytest

BENCHMARKS = pathlib.Path(__file__).parents[2] / "benchmarks"


def test_caches_that_fail_and_tasks_that_are_too_hard_leave_cells_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import tasks

    caches = {"kvlayers dynamic": (0.1, -2.0), "transformers hqq": (None, None)}
    counts = {"kvlayers dynamic": {"samples": 1, "failed": 0}, "transformers hqq": {"samples": 0, "failed": 1}}
    found: dict[str, Any] = {
        "model": "dir/tiny",
        "dtype": "float32",
        "date": "2026-11-23",
        "hardware": {"cpu": "a CPU"},
        "versions": {"torch": "2", "transformers": "5"},
        "tasks": ["needle"],
        "lengths": [256],
        "depths": [0.5],
        "samples": 1,
        "seed": 0,
        "results": {
            "tasks": {
                "reference": "kvlayers dynamic",
                "too_weak_below": 0.25,
                "too_weak": [["needle", 256]],
                "overall": [
                    {"cache": cache, "logprob": logprob, **counts[cache]} for cache, (_, logprob) in caches.items()
                ],
                "comparable": [],
                "by_length": [
                    {"cache": cache, "task": "needle", "length": 256, "score": score}
                    for cache, (score, _) in caches.items()
                ],
            }
        },
    }
    rows = [line for line in tasks.table(found).splitlines() if line.startswith("| ")]
    assert rows[1:] == [
        "| exact (`dynamic`) | (10) |  | -2.00 |",
        "| transformers hqq, 4 bits, failed at 1 of 1 samples | (-) |  | - |",
    ]


def test_the_page_has_the_tables_of_the_records(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import tasks

    page, records = tasks.CHOOSING.read_text(), tasks.recorded()
    assert len(records) == 2
    assert tasks.with_tables(page, records) == page
