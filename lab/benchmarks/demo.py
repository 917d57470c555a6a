"""Runs the demo, and shows what it prints in README.md.

python lab/benchmarks/demo.py            # run it, as `make demo` does, and print what README.md would show
python lab/benchmarks/demo.py --record   # keep it in lab/benchmarks/recorded/demo-<date>.json, and write README.md
python lab/benchmarks/demo.py --write    # write the newest record into README.md, and run nothing
"""

import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import pages
from pages import ROOT
from prompt_tables import CONVERTED, SMOLLM2

README = ROOT / "README.md"
FIRST, NOTE, SUMMARY, NEXT = " Library", "Prompt: the forward pass", "With kvlayers, ", "Next: "
LEGEND = (
    '"Prompt" is the time to read the prompt, "Step" is the time of one more token, and "Held" is what the cache '
    'keeps. "KL" is the distance from the predictions with transformers\' `DynamicCache`, in nats.'
)
OF_EXACT = re.compile(r"same tokens, KL (?P<distance>[\d.]+)")
ABOUT = re.compile(r"(?P<model>\S+) in (?P<dtype>\w+) on .*? Prompt: (?P<tokens>\d+) tokens")


def run() -> dict[str, Any]:
    """Run the demo on a terminal of 80 columns; return its record. Raises `CalledProcessError` if the demo fails."""
    # Imported late: a test that compares the page with the record needs no torch.
    from lib import report

    command = [sys.executable, str(ROOT / "lab" / "demo.py")]
    environment = {**os.environ, "COLUMNS": "80", "KVLAYERS_COMPILE": "wait"}
    done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return {**report.environment(), "results": {"demo": shown_of(done.stdout)}}


def shown_of(output: str) -> dict[str, Any]:
    """Of all that the demo prints: what it ran, the table of caches, and the summary."""
    about = ABOUT.search(" ".join(output[: output.index(FIRST)].split()))
    if about is None:
        raise ValueError("The demo must say its model, its dtype and its tokens first.")
    table = output[output.index(FIRST) : output.index(NOTE)].rstrip()
    summary = output[output.index(SUMMARY) : output.rindex(NEXT)].rstrip() if SUMMARY in output else ""
    lines = [line.rstrip() for line in f"{table}\n\n{summary}".rstrip().splitlines()]
    return {**about.groupdict(), "lines": lines}


def block(record: Mapping[str, Any]) -> str:
    """What README.md shows of a record."""
    hardware, versions, shown = record["hardware"], record["versions"], record["results"]["demo"]
    lines = "\n".join(shown["lines"])
    distances = OF_EXACT.findall(lines)
    noise = (
        f" Exact caches add in another order: their distance, up to {max(distances, key=float)}, is the rounding noise "
        f"of {shown['dtype']} itself."
        if distances
        else ""
    )
    converted = f" ({CONVERTED})" if shown["model"] == SMOLLM2 else ""
    return (
        f"```\n{lines}\n```\n\n{LEGEND}{noise}\n\n"
        f"That was {shown['model']} in {shown['dtype']}{converted} after {int(shown['tokens']):,} tokens "
        f"({hardware['cpu']}, {hardware['threads']} threads, transformers {versions['transformers']}, "
        f"{record['date'][:10]})."
    )


def written_pages() -> pages.Pages:
    return pages.written("demo", {(README, "demo"): block(pages.newest("demo"))})


def main(arguments: Sequence[str] | None = None) -> int:
    parser = pages.options(__doc__, written_pages)
    parser.add_argument("--record", action="store_true", help="record what the demo prints, and write README.md")
    given = parser.parse_args(arguments)
    record = run()
    print(block(record))
    if given.record:
        pages.keep("demo", record["results"]["demo"], record)
        pages.write_pages(written_pages())
    return 0


if __name__ == "__main__":
    sys.exit(main())
