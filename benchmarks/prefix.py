"""Time to the first token of a prompt whose prefix is in a PrefixStore, beside transformers without a store.

    python benchmarks/prefix.py                # 4,096 tokens in the store and a question of 16; a chat of ten turns
    python benchmarks/prefix.py --quick        # fewer tokens, to see that it runs

It needs a real model: `--model`, or the model from `make demo`. Contenders take turns, and figures are medians over the
trials. "from disk" does not open a store, and reads a file that the system may have cached; opening is timed
separately.

The exit code is 1 if a token differs from transformers', except for ties.
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
from torch import Tensor

import kvlayers
from kvlayers.tools.measuring.interleave import quiet_clock
from lib import report
from lib.timing import Disagreements, Tick
from lib.workload import default_model, real_workload

COLD, COPIED = "transformers, all of it", "transformers, deepcopy of the prefix's cache"
MEMORY, DISK = "kvlayers, from memory", "kvlayers, from disk"
ROOM = 2**34
TURNS, TURN_TOKENS, ANSWER_TOKENS = 10, 24, 8


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default=default_model(), help="directory or hub name")
    parser.add_argument("--text", type=pathlib.Path, help="what the model reads")
    parser.add_argument("--prefix", type=int, help="tokens that are held (4096)")
    parser.add_argument("--question", type=int, default=16, help="tokens behind them (16)")
    parser.add_argument("--rows", type=int, default=8, help="questions of a batch (8)")
    parser.add_argument("--trials", type=int, help="times that each is timed (5)")
    parser.add_argument("--output", type=pathlib.Path, help="JSON file (benchmarks/results/prefix-<date>.json)")
    parser.add_argument("--quick", action="store_true", help="a short prefix")
    given = parser.parse_args(arguments)
    given.prefix = given.prefix or (256 if given.quick else 4096)
    given.trials = given.trials or (2 if given.quick else 5)
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


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it; the exit code is 1 if tokens differ from transformers'."""
    given = parse(arguments)
    console = report.terminal()
    environment = report.environment()
    workload = real_workload(given.model, given.text, console.print, torch.float32)
    if workload is None:
        return 0
    model, tokens = workload.model, given.prefix
    model.generation_config.pad_token_id = model.config.eos_token_id
    needed = tokens + given.rows * given.question + TURNS * TURN_TOKENS
    text, disagreements = workload.prompt(needed), Disagreements(torch.float32)
    prefix, rest = text[:, :tokens], text[0, tokens:]
    questions = rest[: given.rows * given.question].view(given.rows, given.question)
    with tempfile.TemporaryDirectory() as place, report.progress_bars(console) as progress:
        directory = pathlib.Path(place) / "store"
        store = kvlayers.PrefixStore(ROOM, directory)
        kvlayers.generate(model, prefix, prefix_store=store, max_new_tokens=1, do_sample=False)
        store.flush()
        begin = time.perf_counter()
        kvlayers.PrefixStore(ROOM, directory)
        opening = time.perf_counter() - begin
        ticking = report.ticking_in(progress)
        ways = (COLD, COPIED, MEMORY, DISK)
        tick = ticking("first token", given.trials * len(ways))
        one = FirstTokens(model, prefix, questions[:1], directory).measure(given.trials, ways, disagreements, tick)
        few = max(given.trials // 2, 1)
        tick = ticking("first tokens of a batch", few * len(ways))
        batch = FirstTokens(model, prefix, questions, directory).measure(few, ways, disagreements, tick)
        talk_store = kvlayers.PrefixStore(ROOM)
        turns = chat(model, text, tokens // 4, talk_store, ticking("chat", TURNS))
    console.print(first_tokens_table(one, f"First token behind {tokens} tokens and {given.question} more"))
    console.print(first_tokens_table(batch, f"{given.rows} first tokens of {given.rows} such prompts"))
    table = report.new_table("A chat", "turn", "tokens", "covered", "s", "transformers, s")
    for number, turn in enumerate(turns, 1):
        cells = (number, turn["tokens"], turn["covered"], f"{turn['seconds']:.3f}", f"{turn['transformers']:.3f}")
        table.add_row(*map(str, cells))
    console.print(table)
    console.print(talk_store.statistics)
    cold = one["medians"][COLD]
    promises = [
        report.promised(
            "time to the first token from memory, relative to no store", one["medians"][MEMORY] / cold, at_most=0.1
        ),
        report.promised(
            "time to the first token from disk, relative to no store", one["medians"][DISK] / cold, at_most=0.25
        ),
    ]
    report.show_targets(console, promises)
    results = {"one": one, "batch": batch, "chat": turns, "opening": opening}
    other_answers = sum(not turn["same"] for turn in turns)
    console.print(f"{other_answers} turns with other answers; the store of one file was opened in {opening:.3f} s")
    code = report.finish(console, given, environment, results, promises, disagreements)
    return 1 if other_answers else code


if __name__ == "__main__":
    sys.exit(main())
