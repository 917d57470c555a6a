"""What a PrefixStore costs and saves: bytes, time to the first token, decode steps behind a hit, insertions.

    python lab/benchmarks/prefix.py                        # all sections
    python lab/benchmarks/prefix.py --only memory,insert   # some of them
    python lab/benchmarks/prefix.py --quick                # fewer tokens, to see that it runs

memory: bytes of a store, of its directory and of deep copies of transformers' cache, for six questions about a document
of 1,000 tokens and for ten about 3,000.
first: time to the first token of a prompt of 4,096 stored tokens and a question of 16, and of eight such prompts.
decode: a decode step behind a hit, beside that of a contiguous cache, on a random llama.
insert: a branch of 100 tokens on a document of 8,192 in the shape of SmolLM2: time, bytes written, bytes held more.

The first two need a real model: `--model`, or the model from `make demo`. Contenders take turns, and figures are
medians over the trials. "from disk" does not open a store, and reads a file that the system may have cached.

The exit code is 1 if a token differs from transformers' (in `decode`, from that of the contiguous cache), except for
ties.
"""

import copy
import pathlib
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import transformers
from torch import Tensor

import kvlayers
from lib import report
from lib.internals import quiet_clock
from lib.report import shown
from lib.stored import (
    BEHIND_HIT,
    CASES,
    CONTIGUOUS,
    KINDS,
    QUESTION_TOKENS,
    QUICK_CASES,
    ROOM,
    Branches,
    measure_insert,
    measure_memory,
)
from lib.timing import Disagreements, Tick, Trials, measure_decode
from lib.workload import QUICK_SHAPE, Shape

COLD, COPIED = "transformers, all of it", "transformers, deepcopy of the prefix's cache"
MEMORY, DISK = "kvlayers, from memory", "kvlayers, from disk"
WAYS = (COLD, COPIED, MEMORY, DISK)
SMOLLM2_SHAPE = Shape(layers=30, heads=9, kv_heads=3, head_dim=64)
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def options() -> report.Options:
    made = report.Options("prefix", __doc__, quick="a short prefix")
    made.real_model(report.default_model())
    made.some_of("--only", list(SECTIONS), "sections")
    made.sized("--prefix", 4096, 256, "tokens that are held")
    made.sized("--question", 16, 16, "tokens behind them")
    made.sized("--rows", 8, 8, "questions of a batch; 0 for none")
    made.sized("--trials", 5, 2, "times that each is timed")
    made.some_of("--dtypes", list(DTYPES), "dtypes of `memory`")
    made.some_of("--kinds", list(KINDS), "caches of `decode`")
    made.sized("--lengths", [1024, 4096, 16384], [64], "tokens that the caches of `decode` hold", report.numbers)
    made.sized("--steps", 24, 4, "steps of each trial of `decode`")
    made.sized("--document", 8192, 512, "tokens of the document of `insert`")
    made.sized("--branch", 100, 100, "tokens of a branch of `insert`")
    return made


def stored_in(place: str, model: Any, prefix: Tensor) -> pathlib.Path:
    """A directory below `place` with the files that a store makes of a prefix `[1, tokens]`."""
    directory = pathlib.Path(place) / "store"
    store = kvlayers.PrefixStore(ROOM, directory)
    kvlayers.generate(model, prefix, prefix_store=store, max_new_tokens=1, do_sample=False)
    store.flush()
    return directory


class FirstTokens:
    """Prompts with one prefix, and the ways to compute their first tokens.

    Args:
        prefix: ids of the common prefix, `[1, tokens]`.
        questions: ids that follow, one row for each prompt.
        directory: a directory with the file that a store has made of the prefix's cache.
    """

    def __init__(self, model: Any, prefix: Tensor, questions: Tensor, directory: pathlib.Path) -> None:
        self.model, self.prefix, self.directory = model, prefix, directory
        self.ids = torch.cat([prefix.expand(questions.shape[0], -1), questions], dim=1)
        self.kept = transformers.DynamicCache(config=model.config)
        with torch.no_grad():
            model(prefix, past_key_values=self.kept, logits_to_keep=1)
        self.kept.batch_repeat_interleave(questions.shape[0])

    def _generate(self, **options: Any) -> Tensor:
        asked = {"max_new_tokens": 1, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
        output = self.model.generate(self.ids, attention_mask=torch.ones_like(self.ids), **asked, **options)
        return output.logits[0]  # type: ignore[no-any-return]

    def _by_store(self, store: kvlayers.PrefixStore) -> Tensor:
        with kvlayers.installed(prefix_store=store):
            return self._generate()

    def _way(self, name: str) -> Callable[[], Tensor]:
        """The call to time, ready to run."""
        if name == COLD:
            return self._generate
        if name == COPIED:
            return lambda: self._generate(past_key_values=copy.deepcopy(self.kept))
        files = tempfile.mkdtemp(dir=self.directory.parent)
        store = kvlayers.PrefixStore(ROOM, shutil.copytree(self.directory, files, dirs_exist_ok=True))
        if name == MEMORY:
            kvlayers.generate(self.model, self.prefix, prefix_store=store, max_new_tokens=1, do_sample=False)
        return lambda: self._by_store(store)

    def measure(self, trials: int, names: Sequence[str], disagreements: Disagreements, tick: Tick) -> dict[str, Any]:
        """Seconds of each way in each trial; tokens that differ from the first way's are recorded."""
        seconds: dict[str, list[float]] = {name: [] for name in names}
        for trial in range(trials):
            expected: Tensor | None = None
            for name in names:
                way = self._way(name)
                with quiet_clock():
                    begin = time.perf_counter()
                    logits = way()
                    seconds[name].append(time.perf_counter() - begin)
                expected = logits if expected is None else expected
                where = {"cache": name, "model": "", "tokens": self.ids.shape[1], "trial": trial}
                disagreements.compare_step(where, expected, logits)
            tick()
        return {"seconds": seconds, "medians": {name: statistics.median(times) for name, times in seconds.items()}}


def padded(workload: Any) -> Any:
    """The workload, if there is one, for a model of which `generate()` knows the padding."""
    if workload is not None:
        workload.model.generation_config.pad_token_id = workload.model.config.eos_token_id
    return workload


def memory(run: report.Session) -> dict[str, Any]:
    """Bytes of the store, of its directory and of deep copies, for each case and dtype."""
    found: dict[str, Any] = {}
    cases = QUICK_CASES if run.quick else CASES
    tick = run.ticking("memory", len(cases) * len(run.given.dtypes))
    for name in run.given.dtypes:
        workload = padded(run.real(DTYPES[name]))
        if workload is None:
            return {}
        disagreements = run.disagreements(DTYPES[name])
        for case in cases:
            key = f"{case.questions} on {case.tokens}, {name}"
            found[key] = measure_memory(workload, case, disagreements, tick)
    keys = ("document_bytes", "private_bytes", "bytes", "files", "copied_bytes")
    headings = ("document", "private", "store", "files (du)", "transformers, deepcopies")
    columns = {heading: shown(key, ".2f", 2**-20) for heading, key in zip(headings, keys, strict=True)}
    columns["evictions with a budget"] = shown("bounded_evictions", "")
    run.table("Bytes, in MiB", "questions, tokens, dtype", {"": found}, columns)
    return found


def first(run: report.Session) -> dict[str, Any]:
    """Time to the first token of one prompt and of a batch."""
    given, workload = run.given, padded(run.real(torch.float32))
    if workload is None:
        return {}
    model, tokens, found = workload.model, given.prefix, dict[str, Any]()
    text = workload.prompt(tokens + max(given.rows, 1) * given.question)
    prefix, questions = text[:, :tokens], text[0, tokens:].view(-1, given.question)
    batches = {"one": (questions[:1], given.trials)}
    if given.rows:
        batches["batch"] = questions, max(given.trials // 2, 1)
    with tempfile.TemporaryDirectory() as place:
        directory = stored_in(place, model, prefix)
        for name, (rows, trials) in batches.items():
            title = f"First tokens of {len(rows)}, behind {tokens} tokens and {given.question} more"
            first_tokens = FirstTokens(model, prefix, rows, directory)
            disagreements, tick = run.disagreements(torch.float32), run.ticking(title, trials)
            found[name] = first_tokens.measure(trials, WAYS, disagreements, tick)
            medians = found[name]["medians"]
            ways = {way: {"s": median, "of_cold": median / medians[COLD]} for way, median in medians.items()}
            columns = {"s": shown("s", ".3f"), "of transformers'": shown("of_cold", ".1%")}
            run.table(title, "", {"": ways}, columns)
    return found


def decode(run: report.Session) -> dict[str, Any]:
    """Steps behind a hit on a document and a question, and with a contiguous cache of equal states, in turns."""
    given, found = run.given, dict[str, Any]()
    shape = QUICK_SHAPE if run.quick else Shape()
    for name in given.kinds:
        workload, disagreements = Branches(shape, name), run.disagreements(KINDS[name].dtype)
        trials = Trials(given.steps, given.trials, run.ticking, 1, disagreements)
        for length in given.lengths:
            measured = measure_decode(workload, workload.makers, length + QUESTION_TOKENS, trials)
            entry: dict[str, Any] = {way: each["seconds"] for way, each in measured.items()}
            for key, kind in (("ratio", "seconds"), ("processor_ratio", "processor")):
                times = {way: [took for trial in each[kind] for took in trial] for way, each in measured.items()}
                pairs = zip(times[BEHIND_HIT], times[CONTIGUOUS], strict=True)
                entry[key] = statistics.median(behind / contiguous for behind, contiguous in pairs)
                entry |= {f"{way}, {kind}": statistics.median(taken) for way, taken in times.items()}
            found[f"{length}, {name}"] = entry
    columns = {f"{way}, ms": report.ms(f"{way}, seconds") for way in (CONTIGUOUS, BEHIND_HIT)}
    columns |= {"ratio": shown("ratio", ".3f"), "of processor time": shown("processor_ratio", ".3f")}
    run.table("Decode step behind a hit, random llama", "tokens, cache", {"": found}, columns)
    return found


def insert(run: report.Session) -> dict[str, Any]:
    given = run.given
    shape, branches = (QUICK_SHAPE, 3) if run.quick else (SMOLLM2_SHAPE, 12)
    tick = run.ticking("insert", branches)
    found = measure_insert(shape, torch.bfloat16, given.document, given.branch, branches, tick)
    of_branch, milli = found["branch_bytes"], 1 / report.MILLI
    rows = {
        "insert(), ms": ("seconds", milli),
        "insert(), ms of the processor": ("processor", milli),
        "bytes that insert() writes, of the branch's": ("moved", of_branch),
        "bytes that look-up, states and insert() write, of the branch's": ("moved_in_all", of_branch),
        "bytes that the store holds more, of the branch's": ("more_bytes", of_branch),
    }
    figures = {
        what: {"median": statistics.median(found[key]) / unit, "largest": max(found[key]) / unit}
        for what, (key, unit) in rows.items()
    }
    columns = {name: shown(name, ".3f") for name in ("median", "largest")}
    run.table(f"A branch of {given.branch} tokens on {given.document}, bfloat16", "", {"": figures}, columns)
    return found


SECTIONS = {"memory": memory, "first": first, "decode": decode, "insert": insert}


def main(arguments: Sequence[str] | None = None) -> int:
    return report.run(options().parse(arguments), SECTIONS)


if __name__ == "__main__":
    sys.exit(main())
