"""Measures what kvlayers adds to the time of importing transformers, and of importing transformers' caches.

    python lab/benchmarks/import_time.py
    python lab/benchmarks/import_time.py --runs 21

Whole processes with and without kvlayers take turns, and each comes first every other time. The figures are medians
over the turns, with the smallest and the largest, of each process and of the difference within a turn. The first turn
does not count: it loads the files into memory.
"""

import argparse
import statistics
import subprocess
import sys
import time

PAIRS = {
    "import kvlayers": ("import transformers", "import transformers, kvlayers"),
    "from kvlayers import DynamicCache": (
        "from transformers import DynamicCache",
        "from transformers import DynamicCache; from kvlayers import DynamicCache",
    ),
}
"""For each measurement, the code without kvlayers and with it."""


def seconds(code: str) -> float:
    """Seconds of a process that runs some code, from start to end."""
    begin = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True)
    return time.perf_counter() - begin


def median(values: list[float]) -> str:
    return f"{1e3 * statistics.median(values):6.0f} ms ({1e3 * min(values):.0f} to {1e3 * max(values):.0f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=7, help="turns that are counted (7)")
    runs = parser.parse_args().runs
    for name, codes in PAIRS.items():
        taken: dict[str, list[float]] = {code: [] for code in codes}
        for turn in range(runs + 1):
            for code in codes if turn % 2 else reversed(codes):
                taken[code].append(seconds(code))
        without, added = (taken[code][1:] for code in codes)
        print(name)
        print(f"    adds    {median([one - other for one, other in zip(added, without, strict=True)])}")
        print(f"    without {median(without)}")
        print(f"    with    {median(added)}")


if __name__ == "__main__":
    main()
