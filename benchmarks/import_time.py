"""Measures what kvlayers adds to the time of importing transformers, and of importing transformers' caches.

    python benchmarks/import_time.py
    python benchmarks/import_time.py --runs 21

Whole processes with and without kvlayers take turns, and each comes first every other time. The figures are medians
over the turns, with the smallest and the largest, of each process and of the difference within a turn. They are given
for the clock and for processor time, which other work on the machine disturbs less. The first turn does not count: it
loads the files into memory.
"""

import argparse
import os
import statistics
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

Seconds = tuple[float, float]
"""Clock and processor time."""


def seconds(code: str) -> Seconds:
    """Time of a process that runs some code, from start to end."""
    begin = time.perf_counter()
    child = os.posix_spawn(sys.executable, [sys.executable, "-c", code], os.environ)
    _, status, used = os.wait4(child, 0)
    if status:
        raise SystemExit(f"'{code}' failed")
    return time.perf_counter() - begin, used.ru_utime + used.ru_stime


def turns(without: str, added: str, runs: int) -> list[tuple[Seconds, Seconds]]:
    taken = []
    for turn in range(runs + 1):
        times = {code: seconds(code) for code in ((without, added) if turn % 2 else (added, without))}
        taken.append((times[without], times[added]))
    return taken[1:]


def median(values: list[float]) -> str:
    return f"{1e3 * statistics.median(values):6.0f} ms ({1e3 * min(values):.0f} to {1e3 * max(values):.0f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=7, help="turns that are counted (7)")
    runs = parser.parse_args().runs
    for name, (without, added) in PAIRS.items():
        taken = turns(without, added, runs)
        print(name)
        for clock, index in {"clock": 0, "processor": 1}.items():
            print(f"    {clock:10}adds    {median([second[index] - first[index] for first, second in taken])}")
            print(f"    {clock:10}without {median([first[index] for first, _ in taken])}")
            print(f"    {clock:10}with    {median([second[index] for _, second in taken])}")


if __name__ == "__main__":
    main()
