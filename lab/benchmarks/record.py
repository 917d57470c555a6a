"""Records results in the repository: the parts that plots and tables need.

    cd lab/benchmarks
    python record.py results/rows-....json recorded/serving-2026-11-29.json
    python record.py results/first.json recorded/gpu-first-....json    # a stage of gpu.py

Medians, ranges, versions and hardware are kept; the times of single steps are dropped, and of a stage of `gpu.py` the
output of tests and other details.
"""

import argparse
import json
import pathlib
from typing import Any

LONGEST_TEXT = 160
"""Characters that are kept of a text: the rest of what CUDA says, if something is wrong, is advice."""


def without_single_times(found: Any) -> Any:
    """Results without the trials of their medians, which are lists of lists of seconds, and without details."""
    if isinstance(found, str):
        return found[:LONGEST_TEXT]
    if isinstance(found, list):
        return [without_single_times(each) for each in found]
    if not isinstance(found, dict):
        return found
    kept = {
        name: without_single_times(each) for name, each in found.items() if name != "details" and not _is_trials(each)
    }
    return {name: each for name, each in kept.items() if each != {} or found[name] == {}}


def _is_trials(found: Any) -> bool:
    return isinstance(found, list) and bool(found) and isinstance(found[0], list)


def in_results(found: dict[str, Any]) -> dict[str, Any]:
    """Results of a benchmark as they are; what `kvlayers fidelity --json` printed in the form of such results."""
    if "results" in found:
        return found
    of_run = {name: found[name] for name in ("date", "hardware", "versions")}
    return {**of_run, "results": {"fidelity": {name: each for name, each in found.items() if name not in of_run}}}


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
