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
from lib.branches import BEHIND_HIT, CONTIGUOUS, KINDS, measure_insert, measure_steps
from lib.internals import quiet_clock
from lib.prefix_memory import CASES, QUICK_CASES, ROOM, measure_memory
from lib.report import Cell, shown
from lib.timing import Disagreements, Tick
from lib.workload import QUICK_SHAPE, RealModel, Shape, real_workload

COLD, COPIED = "transformers, all of it", "transformers, deepcopy of the prefix's cache"
MEMORY, DISK = "kvlayers, from memory", "kvlayers, from disk"
WAYS = (COLD, COPIED, MEMORY, DISK)
TURNS, TURN_TOKENS, ANSWER_TOKENS = 10, 24, 8
SMOLLM2_SHAPE = Shape(layers=30, heads=9, kv_heads=3, head_dim=64)
SECTIONS = ("memory", "first", "chat", "decode", "insert")
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def options() -> report.Options:
    made = report.Options("prefix", __doc__, quick="a short prefix")
    made.real_model("directory or hub name", report.default_model())
    made.some_of("--only", SECTIONS, "sections")
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


class Sections:
    """The sections of a run."""

    def __init__(self, run: report.Session) -> None:
        self.run, self.given = run, run.given
        self.disagreements = {dtype: Disagreements(dtype) for dtype in DTYPES.values()}
        self._models: dict[torch.dtype, RealModel | None] = {}

    def _real(self, dtype: torch.dtype) -> RealModel | None:
        if dtype not in self._models:
            found = real_workload(self.given.model, self.given.text, self.run.console.print, dtype)
            if found is not None:
                found.model.generation_config.pad_token_id = found.model.config.eos_token_id
            self._models[dtype] = found
        return self._models[dtype]

    def memory(self) -> dict[str, Any]:
        """Bytes of the store, of its directory and of deep copies, for each case and dtype."""
        found: dict[str, Any] = {}
        cases = QUICK_CASES if self.given.quick else CASES
        tick = self.run.ticking("memory", 3 * len(cases) * len(self.given.dtypes))
        for name in self.given.dtypes:
            dtype = DTYPES[name]
            workload = self._real(dtype)
            if workload is None:
                return {}
            for case in cases:
                key = f"{case.questions} on {case.tokens}, {name}"
                entry = found[key] = measure_memory(workload, case, self.disagreements[dtype], tick)
                for where, prefix in (("memory", ""), ("files", "files_")):
                    if case.of_private is not None:
                        what = f"{key}: bytes of {where} behind the document, of those of the private tokens"
                        self.run.target(what, entry[f"{prefix}behind_document_of_private"], at_most=case.of_private)
                    if case.of_document is not None:
                        what = f"{key}: bytes of {where}, of one document"
                        self.run.target(what, entry[f"{prefix}of_document"], at_most=case.of_document)
                if dtype == torch.bfloat16:
                    what = f"{key}: evictions at {case.budget / 2**20:.0f} MiB"
                    self.run.target(what, entry["bounded_evictions"], at_most=0)
        keys = ("document_bytes", "private_bytes", "bytes", "files", "copied_bytes")
        headings = ("document", "private", "store", "files (du)", "transformers, deepcopies")
        columns = {heading: shown(key, ".2f", 2**-20) for heading, key in zip(headings, keys, strict=True)}
        columns |= {"entries": shown("entries", ""), "evictions with a budget": shown("bounded_evictions", "")}
        self.run.table("Bytes, in MiB", "questions, tokens, dtype", {"": found}, columns)
        return {"memory": found}

    def first(self) -> dict[str, Any]:
        """Time to the first token of one prompt and of a batch, and of opening the store."""
        given, workload = self.given, self._real(torch.float32)
        if workload is None:
            return {}
        model, tokens, found = workload.model, given.prefix, dict[str, Any]()
        text = workload.prompt(tokens + max(given.rows, 1) * given.question)
        prefix, questions = text[:, :tokens], text[0, tokens:].view(-1, given.question)
        with tempfile.TemporaryDirectory() as place:
            directory = stored_in(place, model, prefix)
            begin = time.perf_counter()
            kvlayers.PrefixStore(ROOM, directory)
            found["opening"] = time.perf_counter() - begin
            batches = {"one": (questions[:1], given.trials)}
            if given.rows:
                batches["batch"] = questions, max(given.trials // 2, 1)
            for name, (rows, trials) in batches.items():
                title = f"First tokens of {len(rows)}, behind {tokens} tokens and {given.question} more"
                tick, disagreements = self.run.ticking(title, trials), self.disagreements[torch.float32]
                entry = FirstTokens(model, prefix, rows, directory).measure(trials, WAYS, disagreements, tick)
                found[name], cold = entry, entry["medians"][COLD]
                ways = {way: {"s": median, "of_cold": median / cold} for way, median in entry["medians"].items()}
                columns = {"s": shown("s", ".3f"), "of transformers'": shown("of_cold", ".1%")}
                self.run.table(title, "", {"": ways}, columns)
        medians = found["one"]["medians"]
        for way, most in ((MEMORY, 0.025), (DISK, 0.04)):
            of_cold = medians[way] / medians[COLD]
            self.run.target(f"time to the first token, {way}, relative to no store", of_cold, at_most=most)
        self.run.console.print(f"the store was opened in {found['opening']:.3f} s")
        return found

    def chat(self) -> dict[str, Any]:
        """Ten turns of a chat with a store and without: tokens, tokens found in the store, seconds, equal answers."""
        workload = self._real(torch.float32)
        if workload is None:
            return {}
        model, opening, store = workload.model, self.given.prefix // 4, kvlayers.PrefixStore(ROOM)
        text = workload.prompt(opening + TURNS * TURN_TOKENS)
        turns, ids, tick = [], text[:, :opening], self.run.ticking("chat", TURNS)
        asked = {"max_new_tokens": ANSWER_TOKENS, "min_new_tokens": ANSWER_TOKENS, "do_sample": False}
        for turn in range(TURNS):
            before = store.statistics.tokens_covered
            with quiet_clock():
                begin = time.perf_counter()
                answered = kvlayers.generate(model, ids, prefix_store=store, **asked)
                middle = time.perf_counter()
                expected = model.generate(ids, attention_mask=torch.ones_like(ids), **asked)
                end = time.perf_counter()
            entry = {
                "tokens": ids.shape[1],
                "covered": store.statistics.tokens_covered - before,
                "seconds": middle - begin,
                "transformers": end - middle,
                "same": torch.equal(answered, expected),
            }
            turns.append(entry)
            begin_of_turn = opening + turn * TURN_TOKENS
            ids = torch.cat([expected, text[:, begin_of_turn : begin_of_turn + TURN_TOKENS]], dim=1)
            tick()
        columns = {"tokens": shown("tokens", ""), "covered": shown("covered", ""), "s": shown("seconds", ".3f")}
        columns["transformers, s"] = shown("transformers", ".3f")
        self.run.table("A chat", "turn", {"": {str(turn + 1): entry for turn, entry in enumerate(turns)}}, columns)
        self.run.console.print(store.statistics)
        return {"chat": turns}

    def decode(self) -> dict[str, Any]:
        given, found = self.given, {}
        shape = QUICK_SHAPE if given.quick else Shape()
        tick = self.run.ticking("decode", len(given.lengths) * len(given.kinds) * given.trials)
        for length in given.lengths:
            for name in given.kinds:
                disagreements = self.disagreements[KINDS[name].dtype]
                entry = measure_steps(shape, name, length, given.steps, given.trials, disagreements, tick)
                found[f"{length}, {name}"] = entry
                what = f"step behind a hit at {length}, {name}, of a contiguous cache's"
                self.run.target(what, entry["ratio"], at_most=1.05)
        columns: dict[str, Cell] = {
            f"{way}, ms": lambda entry, way=way: f"{entry['medians'][way] * report.MILLI:.2f}"
            for way in (CONTIGUOUS, BEHIND_HIT)
        }
        columns |= {"ratio": shown("ratio", ".3f"), "of processor time": shown("processor_ratio", ".3f")}
        self.run.table("Decode step behind a hit, random llama", "tokens, cache", {"": found}, columns)
        return {"decode_behind_hit": found}

    def insert(self) -> dict[str, Any]:
        given = self.given
        shape, branches = (QUICK_SHAPE, 3) if given.quick else (SMOLLM2_SHAPE, 12)
        tick = self.run.ticking("insert", branches)
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
        title = f"A branch of {given.branch} tokens on {given.document}, bfloat16"
        columns = {name: shown(name, ".3f") for name in ("median", "largest")}
        self.run.table(title, "", {"": figures}, columns)
        processor = statistics.median(found["processor"]) * report.MILLI
        self.run.target("ms of the processor for an insertion", processor, at_most=5)
        self.run.target("bytes that an insertion writes, of the branch's", max(found["moved"]) / of_branch, at_most=1)
        in_all = max(found["moved_in_all"]) / of_branch
        self.run.target("bytes that a branch writes in all, of its own", in_all, at_most=2)
        return {"insert": found}


def main(arguments: Sequence[str] | None = None) -> int:
    given = options().parse(arguments)
    results: dict[str, Any] = {}
    with report.session(given) as run:
        sections = Sections(run)
        for name in SECTIONS:
            if name in given.only:
                results |= getattr(sections, name)()
    other_answers = sum(not turn["same"] for turn in results.get("chat", []))
    run.console.print(f"{other_answers} turns with other answers")
    code = run.finish(results, *sections.disagreements.values())
    return 1 if other_answers else code


if __name__ == "__main__":
    sys.exit(main())
