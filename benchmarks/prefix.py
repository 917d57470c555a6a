"""What a PrefixStore costs and saves: bytes, time to the first token, decode steps behind a hit, insertions.

    python benchmarks/prefix.py                        # all sections
    python benchmarks/prefix.py --only memory,insert   # some of them
    python benchmarks/prefix.py --quick                # fewer tokens, to see that it runs

memory: bytes of a store, of its directory and of deep copies of transformers' cache, for six questions about a document
of 1,000 tokens and for ten about 3,000.
first: time to the first token of a prompt of 4,096 stored tokens and a question of 16, and of eight such prompts.
chat: ten turns of a chat.
decode: a decode step behind a hit, beside that of a contiguous cache, on a random llama.
insert: a branch of 100 tokens on a document of 8,192 in the shape of SmolLM2: time, bytes written, bytes held more.

The first three need a real model: `--model`, or the model from `make demo`. Contenders take turns, and figures are
medians over the trials. "from disk" does not open a store, and reads a file that the system may have cached; opening is
timed separately.

The exit code is 1 if a token differs from transformers' (in `decode`, from that of the contiguous cache), except for
ties.
"""

import argparse
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
from rich.console import Console
from torch import Tensor

import kvlayers
from kvlayers.tools.measuring.interleave import quiet_clock
from lib import report
from lib.branches import BEHIND_HIT, CONTIGUOUS, KINDS, measure_insert, measure_steps
from lib.prefix_memory import CASES, QUICK_CASES, measure_memory
from lib.timing import Disagreements, Tick, Ticking
from lib.workload import QUICK_SHAPE, RealModel, Shape, default_model, real_workload

COLD, COPIED = "transformers, all of it", "transformers, deepcopy of the prefix's cache"
MEMORY, DISK = "kvlayers, from memory", "kvlayers, from disk"
ROOM = 2**34
TURNS, TURN_TOKENS, ANSWER_TOKENS = 10, 24, 8
SMOLLM2_SHAPE = Shape(layers=30, heads=9, kv_heads=3, head_dim=64)
SECTIONS = ("memory", "first", "chat", "decode", "insert")
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default=default_model(), help="directory or hub name")
    parser.add_argument("--text", type=pathlib.Path, help="what the model reads")
    parser.add_argument("--only", default=",".join(SECTIONS), help=f"sections ({','.join(SECTIONS)})")
    parser.add_argument("--prefix", type=int, help="tokens that are held (4096)")
    parser.add_argument("--question", type=int, default=16, help="tokens behind them (16)")
    parser.add_argument("--rows", type=int, default=8, help="questions of a batch; 0 for none (8)")
    parser.add_argument("--trials", type=int, help="times that each is timed (5)")
    parser.add_argument("--dtypes", default="bfloat16,float32", help="dtypes of `memory` (bfloat16,float32)")
    parser.add_argument("--kinds", default=",".join(KINDS), help=f"caches of `decode` ({','.join(KINDS)})")
    parser.add_argument("--lengths", help="tokens that the caches of `decode` hold (1024,4096,16384)")
    parser.add_argument("--steps", type=int, help="steps of each trial of `decode` (24)")
    parser.add_argument("--document", type=int, help="tokens of the document of `insert` (8192)")
    parser.add_argument("--branch", type=int, default=100, help="tokens of a branch of `insert` (100)")
    parser.add_argument("--output", type=pathlib.Path, help="JSON file (benchmarks/results/prefix-<date>.json)")
    parser.add_argument("--quick", action="store_true", help="a short prefix")
    given = parser.parse_args(arguments)
    for option, names in (("only", SECTIONS), ("dtypes", tuple(DTYPES)), ("kinds", tuple(KINDS))):
        chosen = getattr(given, option).split(",")
        if not set(chosen) <= set(names):
            parser.error(f"`--{option}` takes {', '.join(names)}, got {getattr(given, option)!r}.")
        setattr(given, option, chosen)
    given.prefix = given.prefix or (256 if given.quick else 4096)
    given.trials = given.trials or (2 if given.quick else 5)
    given.lengths = [
        int(length) for length in (given.lengths or ("64" if given.quick else "1024,4096,16384")).split(",")
    ]
    given.steps = given.steps or (4 if given.quick else 24)
    given.document = given.document or (512 if given.quick else 8192)
    given.output = given.output or report.output_path("prefix")
    return given


class FirstTokens:
    """Prompts with one prefix, and the ways to compute their first tokens.

    Args:
        model: the model.
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

    def _copy_of_files(self) -> str:
        copy = tempfile.mkdtemp(dir=self.directory.parent)
        return shutil.copytree(self.directory, copy, dirs_exist_ok=True)

    def _way(self, name: str) -> Callable[[], Tensor]:
        """The call to time, ready to run."""
        if name == COLD:
            return self._generate
        if name == COPIED:
            return lambda: self._generate(past_key_values=copy.deepcopy(self.kept))
        store = kvlayers.PrefixStore(ROOM, self._copy_of_files())
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
                for own, other in zip(expected, logits, strict=True):
                    disagreements.compare_step(where, own, other)
                tick()
        return {"seconds": seconds, "medians": {name: statistics.median(times) for name, times in seconds.items()}}


def chat(model: Any, text: Tensor, opening: int, store: kvlayers.PrefixStore, tick: Tick) -> list[dict[str, Any]]:
    """Ten turns with the store and without: tokens, tokens found in the store, seconds of each, and answers."""
    turns, ids = [], text[:, :opening]
    asked = {"max_new_tokens": ANSWER_TOKENS, "min_new_tokens": ANSWER_TOKENS, "do_sample": False}
    for turn in range(TURNS):
        before = store.statistics.tokens_covered
        with quiet_clock():
            begin = time.perf_counter()
            answered = kvlayers.generate(model, ids, prefix_store=store, **asked)
            middle = time.perf_counter()
            expected = model.generate(ids, attention_mask=torch.ones_like(ids), **asked)
            end = time.perf_counter()
        turns.append(
            {
                "tokens": ids.shape[1],
                "covered": store.statistics.tokens_covered - before,
                "seconds": middle - begin,
                "transformers": end - middle,
                "same": torch.equal(answered, expected),
            }
        )
        begin_of_turn = opening + turn * TURN_TOKENS
        ids = torch.cat([expected, text[:, begin_of_turn : begin_of_turn + TURN_TOKENS]], dim=1)
        tick()
    return turns


def first_tokens_table(found: dict[str, Any], title: str) -> Any:
    table = report.new_table(title, "", "s", "of transformers'")
    cold = found["medians"][COLD]
    for name, median in found["medians"].items():
        table.add_row(name, f"{median:.3f}", f"{median / cold:.1%}")
    return table


class Run:
    """What a section needs: arguments, the terminal, bars, and the lists to which it adds what it finds."""

    def __init__(self, given: argparse.Namespace, console: Console, ticking: Ticking) -> None:
        self.given, self.console, self.ticking = given, console, ticking
        self.promises: list[dict[str, Any]] = []
        self.disagreements = {dtype: Disagreements(dtype) for dtype in DTYPES.values()}
        self.models: dict[torch.dtype, RealModel | None] = {}

    def real(self, dtype: torch.dtype) -> RealModel | None:
        """The real model in a dtype; `None` if there is none."""
        if dtype not in self.models:
            self.models[dtype] = real_workload(self.given.model, self.given.text, self.console.print, dtype)
            if (workload := self.models[dtype]) is not None:
                workload.model.generation_config.pad_token_id = workload.model.config.eos_token_id
        return self.models[dtype]

    def promise(self, what: str, value: float, at_most: float) -> None:
        """Add a target, unless the run is a quick one, whose figures mean nothing."""
        if not self.given.quick:
            self.promises.append(report.promised(what, value, at_most=at_most))


def measure_all_memory(run: Run) -> dict[str, Any]:
    """Bytes of the store, of its directory and of deep copies, for each case and dtype."""
    found: dict[str, Any] = {}
    cases = QUICK_CASES if run.given.quick else CASES
    table = report.new_table(
        "Bytes, in MiB",
        "questions, tokens, dtype",
        "document",
        "private",
        "store",
        "files (du)",
        "transformers, deepcopies",
        "entries",
        "evictions with a budget",
    )
    tick = run.ticking("memory", 3 * len(cases) * len(run.given.dtypes))
    for name in run.given.dtypes:
        dtype = DTYPES[name]
        workload = run.real(dtype)
        if workload is None:
            return {}
        for case in cases:
            key = f"{case.questions} on {case.tokens}, {name}"
            entry = found[key] = measure_memory(workload, case, run.disagreements[dtype], tick)
            columns = ("document_bytes", "private_bytes", "bytes", "files", "copied_bytes")
            sizes = [f"{entry[column] / 2**20:.2f}" for column in columns]
            evictions = f"{entry['bounded_evictions']} at {case.budget / 2**20:.0f} MiB"
            table.add_row(key, *sizes, str(entry["entries"]), evictions)
            for where, prefix in (("memory", ""), ("files", "files_")):
                if case.of_private is not None:
                    what = f"{key}: bytes of {where} behind the document, of those of the private tokens"
                    run.promise(what, entry[f"{prefix}behind_document_of_private"], case.of_private)
                if case.of_document is not None:
                    run.promise(
                        f"{key}: bytes of {where}, of one document", entry[f"{prefix}of_document"], case.of_document
                    )
            if dtype == torch.bfloat16:
                run.promise(f"{key}: evictions at {case.budget / 2**20:.0f} MiB", entry["bounded_evictions"], 0)
    run.console.print(table)
    return found


def measure_first(run: Run) -> dict[str, Any]:
    """Time to the first token of one prompt and of a batch, and of opening the store."""
    given, workload = run.given, run.real(torch.float32)
    if workload is None:
        return {}
    model, tokens = workload.model, given.prefix
    text = workload.prompt(tokens + max(given.rows, 1) * given.question)
    prefix, rest = text[:, :tokens], text[0, tokens:]
    questions, disagreements = rest.view(-1, given.question), run.disagreements[torch.float32]
    ways, found = (COLD, COPIED, MEMORY, DISK), {}
    with tempfile.TemporaryDirectory() as place:
        directory = pathlib.Path(place) / "store"
        store = kvlayers.PrefixStore(ROOM, directory)
        kvlayers.generate(model, prefix, prefix_store=store, max_new_tokens=1, do_sample=False)
        store.flush()
        begin = time.perf_counter()
        kvlayers.PrefixStore(ROOM, directory)
        found["opening"] = time.perf_counter() - begin
        tick = run.ticking("first token", given.trials * len(ways))
        one = FirstTokens(model, prefix, questions[:1], directory).measure(given.trials, ways, disagreements, tick)
        found["one"] = one
        run.console.print(first_tokens_table(one, f"First token behind {tokens} tokens and {given.question} more"))
        if given.rows:
            few = max(given.trials // 2, 1)
            tick = run.ticking("first tokens of a batch", few * len(ways))
            batch = FirstTokens(model, prefix, questions, directory).measure(few, ways, disagreements, tick)
            found["batch"] = batch
            run.console.print(first_tokens_table(batch, f"{given.rows} first tokens of {given.rows} such prompts"))
    cold = one["medians"][COLD]
    run.promise("time to the first token from memory, relative to no store", one["medians"][MEMORY] / cold, 0.025)
    run.promise("time to the first token from disk, relative to no store", one["medians"][DISK] / cold, 0.04)
    run.console.print(f"the store was opened in {found['opening']:.3f} s")
    return found


def measure_chat(run: Run) -> dict[str, Any]:
    """Ten turns of a chat, with a store and without."""
    workload = run.real(torch.float32)
    if workload is None:
        return {}
    opening, store = run.given.prefix // 4, kvlayers.PrefixStore(ROOM)
    turns = chat(
        workload.model, workload.prompt(opening + TURNS * TURN_TOKENS), opening, store, run.ticking("chat", TURNS)
    )
    table = report.new_table("A chat", "turn", "tokens", "covered", "s", "transformers, s")
    for number, turn in enumerate(turns, 1):
        cells = (number, turn["tokens"], turn["covered"], f"{turn['seconds']:.3f}", f"{turn['transformers']:.3f}")
        table.add_row(*map(str, cells))
    run.console.print(table)
    run.console.print(store.statistics)
    return {"chat": turns}


def measure_decode(run: Run) -> dict[str, Any]:
    """Steps behind a hit and of a contiguous cache."""
    given, found = run.given, {}
    shape = QUICK_SHAPE if given.quick else Shape()
    table = report.new_table(
        "Decode step behind a hit, random llama",
        "tokens, cache",
        f"{CONTIGUOUS}, ms",
        f"{BEHIND_HIT}, ms",
        "ratio",
        "of processor time",
    )
    tick = run.ticking("decode", len(given.lengths) * len(given.kinds) * given.trials)
    for length in given.lengths:
        for name in given.kinds:
            disagreements = run.disagreements[KINDS[name].dtype]
            entry = measure_steps(shape, name, length, given.steps, given.trials, disagreements, tick)
            found[f"{length}, {name}"] = entry
            times = [f"{entry['medians'][way] * report.MILLI:.2f}" for way in (CONTIGUOUS, BEHIND_HIT)]
            table.add_row(f"{length:>6} {name}", *times, f"{entry['ratio']:.3f}", f"{entry['processor_ratio']:.3f}")
            run.promise(f"step behind a hit at {length}, {name}, of a contiguous cache's", entry["ratio"], 1.05)
    run.console.print(table)
    return found


def measure_inserts(run: Run) -> dict[str, Any]:
    """Insertion of branches."""
    given = run.given
    shape, branches = (QUICK_SHAPE, 3) if given.quick else (SMOLLM2_SHAPE, 12)
    tick = run.ticking("insert", branches)
    found = measure_insert(shape, torch.bfloat16, given.document, given.branch, branches, tick)
    of_branch = found["branch_bytes"]
    table = report.new_table(
        f"A branch of {given.branch} tokens on {given.document}, bfloat16", "", "median", "largest"
    )
    table.add_row("insert(), ms", *(f"{found[key] * report.MILLI:.3f}" for key in ("median", "slowest")))
    processor = statistics.median(found["processor"]), max(found["processor"])
    table.add_row("insert(), ms of the processor", *(f"{value * report.MILLI:.3f}" for value in processor))
    rows = {
        "moved": "bytes that insert() writes, of the branch's",
        "moved_in_all": "bytes that look-up, states and insert() write, of the branch's",
        "more_bytes": "bytes that the store holds more, of the branch's",
    }
    for key, what in rows.items():
        median, largest = (value / of_branch for value in (statistics.median(found[key]), max(found[key])))
        table.add_row(what, f"{median:.3f}", f"{largest:.3f}")
    run.console.print(table)
    run.promise("ms of the processor for an insertion", processor[0] * report.MILLI, 5)
    run.promise("bytes that an insertion writes, of the branch's", max(found["moved"]) / of_branch, 1)
    run.promise("bytes that a branch writes in all, of its own", max(found["moved_in_all"]) / of_branch, 2)
    return {"insert": found}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the sections; the exit code is 1 if tokens differ."""
    given = parse(arguments)
    console = report.terminal()
    environment = report.environment()
    results: dict[str, Any] = {}
    with report.progress_bars(console) as progress:
        run = Run(given, console, report.ticking_in(progress))
        if "memory" in given.only:
            results["memory"] = measure_all_memory(run)
        if "first" in given.only:
            results |= measure_first(run)
        if "chat" in given.only:
            results |= measure_chat(run)
        if "decode" in given.only:
            results["decode_behind_hit"] = measure_decode(run)
        if "insert" in given.only:
            results |= measure_inserts(run)
    report.show_targets(console, run.promises)
    other_answers = sum(not turn["same"] for turn in results.get("chat", []))
    console.print(f"{other_answers} turns with other answers")
    code = report.finish(console, given, environment, results, run.promises, *run.disagreements.values())
    return 1 if other_answers else code


if __name__ == "__main__":
    sys.exit(main())
