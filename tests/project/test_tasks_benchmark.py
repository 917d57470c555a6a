"""The table of the benchmark of tasks, also when there is nothing to compare."""

from typing import Any

import pytest


@pytest.fixture
def tasks(script: Any) -> Any:
    return script("tasks")


def test_caches_that_fail_and_tasks_that_are_too_hard_leave_cells_empty(tasks: Any) -> None:
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


def test_each_rule_is_measured_at_each_part_with_budgets_of_heads_and_without(tasks: Any) -> None:
    names = tasks.eviction_names()
    assert len(set(names)) == len(names)
    assert {"snapkv:keep=0.25", "snapkv:keep=0.25,per_head=false", "random:keep=0.75"} <= set(names)
    assert "tova:keep=0.5,per_head=false" not in names
    [run] = tasks.CACHES_OF["eviction"].runs([1024])
    assert run.arguments == tasks.as_arguments(names)
    assert [tasks.label(f"kvlayers {name}", "") for name in names if name.startswith("snapkv:keep=0.5")] == [
        "`snapkv`, 0.5 kept",
        "`snapkv`, 0.5 kept, even heads",
        "`snapkv`, 0.5 kept, 4 bits",
    ]


def test_recall_of_a_part_of_the_pages_is_one_cache_at_all_lengths(tasks: Any) -> None:
    short, long = tasks.recall_runs([1024, 4096])
    assert short.called["recall:recall.pages=4"] == long.called["recall:recall.pages=16"] == "recall:part=1/4"
    assert tasks.label("kvlayers recall:part=1/4", "") == "`recall`, 1/4 of the pages"

    def printed(run: Any, pages: int, length: int, logprob: float) -> dict[str, Any]:
        outcome = {"task": "needle", "length": length, "depth": 0.5, "index": 0, "answer": "", "failure": None}
        caches = {"kvlayers dynamic": -1.0, f"kvlayers recall:recall.pages={pages}": logprob}
        return {
            **dict.fromkeys(tasks.KEPT),
            "caches": [{"name": name, "nbytes": length} for name in caches],
            "outcomes": [
                {**outcome, "cache": name, "score": 1.0, "logprob": logprob} for name, logprob in caches.items()
            ],
            "summary": {"reference": "kvlayers dynamic"},
        }

    runs = [(short, printed(short, 4, 1024, -2.0)), (long, printed(long, 16, 4096, -4.0))]
    found = tasks.merged(runs, [1024, 4096])
    assert found["lengths"] == [1024, 4096]
    assert found["caches"][1] == {"name": "kvlayers recall:part=1/4", "nbytes": 4096}
    _, recall = found["results"]["tasks"]["overall"]
    assert (recall["cache"], recall["samples"], recall["logprob"]) == ("kvlayers recall:part=1/4", 2, -3.0)
