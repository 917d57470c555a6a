"""Measures what kvlayers adds to the time of importing transformers, and of importing transformers' caches.

Whole processes with and without kvlayers take turns, and each comes first every other time. The figures are medians
over the turns, with the smallest and the largest, of each process and of the difference within a turn.
"""

import argparse
import statistics
import subprocess
import sys

from lib.timing import Turns

PAIRS = (
    ("import transformers", "import transformers, kvlayers"),
    (
        "from transformers import DynamicCache",
        "import transformers, kvlayers; transformers.DynamicCache, kvlayers.DynamicCache",
    ),
)
"""The code without kvlayers and with it."""


def figures(seconds: list[float]) -> str:
    return f"{1e3 * statistics.median(seconds):6.0f} ms ({1e3 * min(seconds):.0f} to {1e3 * max(seconds):.0f})"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=7, help="turns that are counted (7)")
    runs = parser.parse_args().runs
    for codes in PAIRS:
        turns = Turns(codes)
        for turn in range(runs + 1):
            # The first one loads the files into memory.
            turns.take(lambda code: subprocess.run([sys.executable, "-c", code], check=True), is_counted=turn > 0)
        without, added = turns.seconds.values()
        print(f"{figures([one - other for one, other in zip(added, without, strict=True)])} are added:")
        for code, seconds in turns.seconds.items():
            print(f"    {figures(seconds)} {code}")
