"""Records results in the repository: the parts that plots and tables need.

    python benchmarks/record.py benchmarks/results/decode-....json benchmarks/recorded/decode-2026-11-21.json
    python benchmarks/record.py FILE benchmarks/recorded/fidelity-....json    # what kvlayers fidelity --json printed
    python benchmarks/record.py results/first.json benchmarks/recorded/gpu-first-....json    # a stage of gpu.py

Medians, ranges, versions and hardware are kept; the times of single steps are dropped. Of a stage of `gpu.py`, the
output of tests and all details but the middle half of times are dropped too.
"""

import argparse
import json
import pathlib
import statistics
from typing import Any

LONGEST_REASON = 160
"""Characters that are kept of what a stage of `gpu.py` says to be wrong or missing: the rest is advice of CUDA's."""


def without_single_times(found: Any) -> Any:
    """Results without the trials of their medians, which are lists of lists of seconds."""
    if isinstance(found, list):
        return [without_single_times(each) for each in found]
    if not isinstance(found, dict):
        return found
    kept = {name: without_single_times(each) for name, each in found.items() if not _is_trials(each)}
    return {name: each for name, each in kept.items() if each != {} or found[name] == {}}


def _is_trials(found: Any) -> bool:
    return isinstance(found, list) and bool(found) and isinstance(found[0], list)


def in_results(found: dict[str, Any]) -> dict[str, Any]:
    """Results of a benchmark as they are; others in the form of such results.

    Others are what `kvlayers fidelity --json` printed, and what a stage of `gpu.py` wrote.
    """
    if "results" in found:
        return found
    if "steps" in found:
        hardware = {"gpu": found["device"], "gpu_memory_bytes": found["total_memory"], "cuda": found["cuda"]}
        steps = {step["name"]: _of_gpu_step(step) for step in found["steps"]}
        return {name: found[name] for name in ("date", "versions")} | {"hardware": hardware, "results": {"gpu": steps}}
    of_run = {name: found[name] for name in ("date", "hardware", "versions")}
    measured = {name: value for name, value in found.items() if name not in of_run}
    return {**of_run, "results": {"fidelity": measured}}


def _of_gpu_step(step: dict[str, Any]) -> dict[str, Any]:
    """A step of `gpu.py`: its figures by unit, name and column."""
    figures: dict[str, Any] = {}
    for figure in step["figures"]:
        unit, what, column = figure["unit"], figure["what"], figure.get("column", "")
        value = float(f"{figure['value']:.4g}")
        if column:
            figures.setdefault(unit, {}).setdefault(what, {})[column] = value
        else:
            figures.setdefault(unit, {})[what] = value
    middle = {
        column: {name: _middle_half(times) for name, times in found["ms"].items()}
        for column, found in step["details"].items()
        if isinstance(found, dict) and isinstance(found.get("ms"), dict)
    }
    kept = {
        "status": step["status"],
        "seconds": round(step["seconds"], 1),
        "figures": figures,
        "middle half, ms": middle,
        "wrong": [line[:LONGEST_REASON] for line in step["wrong"]],
        "missing": {name: reason[:LONGEST_REASON] for name, reason in step.get("missing", {}).items()},
        "cut": step.get("cut", []),
    }
    return {name: value for name, value in kept.items() if value}


def _middle_half(times: list[float]) -> dict[str, float]:
    low, _, high = statistics.quantiles(times, n=4)
    return {"from": round(low, 2), "to": round(high, 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=pathlib.Path, help="what a benchmark wrote")
    parser.add_argument("recorded", type=pathlib.Path, help="where to")
    arguments = parser.parse_args()
    kept = without_single_times(in_results(json.loads(arguments.results.read_text())))
    arguments.recorded.parent.mkdir(parents=True, exist_ok=True)
    arguments.recorded.write_text(json.dumps(kept, indent=1) + "\n")
    print(arguments.recorded)


if __name__ == "__main__":
    main()
