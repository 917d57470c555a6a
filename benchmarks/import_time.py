"""What `import kvlayers` adds to `import transformers`, and what the caches add to transformers' own.

    python benchmarks/import_time.py
    python benchmarks/import_time.py --runs 21

Whole processes, each pair in turns, which of the two first alternating; the medians of their times and of the differences
within a turn, with the least and the greatest. The first turn is not counted: it brings the files into memory.
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
"""By what is measured: code without it, and with it."""


def seconds(code: str) -> float:
    """Time of a process that runs some code, from its start to its end."""
    begin = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True)
    return time.perf_counter() - begin


def turns(without: str, added: str, runs: int) -> list[tuple[float, float]]:
    """Seconds of both, turn by turn."""
    taken = []
    for turn in range(runs + 1):
        order = (without, added) if turn % 2 else (added, without)
        times = {code: seconds(code) for code in order}
        taken.append((times[without], times[added]))
    return taken[1:]


def median(values: list[float]) -> str:
    return f"{1e3 * statistics.median(values):7.0f} ms ({1e3 * min(values):.0f} to {1e3 * max(values):.0f})"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=11, help="turns that are counted (11)")
    for name, (without, added) in PAIRS.items():
        taken = turns(without, added, parser.parse_args().runs)
        print(f"{name}: {median([second - first for first, second in taken])}")
        print(f"    without {median([first for first, _ in taken])}")
        print(f"    with    {median([second for _, second in taken])}")


if __name__ == "__main__":
    main()
