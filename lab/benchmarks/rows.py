"""Rows that come and go: many prompts and requests to a server, beside transformers in one run.

    python lab/benchmarks/rows.py            # SmolLM2, or the model of --model
    python lab/benchmarks/rows.py --quick    # a random model and few tokens, to see that it runs
    python lab/benchmarks/rows.py --write    # the recorded figures, into docs/rows.md

`many`: 32 prompts whose answers differ 1 to 8 in length, by `generate_many`, by one batch, and by batches of 8 that are
sorted by length. `generate_batch`: the same prompts by transformers' continuous batching, plain and under `install()`.
Contenders take turns, and figures are medians over the trials.

`serve`: requests that arrive at random, by an exponential distribution, at `transformers serve` with and without
`--continuous-batching`, plain and under `kvlayers run`: seconds to the first token, milliseconds a token behind it,
and the most memory of the server. It needs `--model` and "transformers[serving]". It and `generate_batch` are recorded
by themselves:

    python lab/benchmarks/rows.py --only generate_batch,serve --trials 1 --least 12 --longest 256 --record

The exit code is 1 if more tokens differ from plain decoding than ties explain.
"""

import concurrent.futures
import contextlib
import copy
import functools
import itertools
import operator
import pathlib
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor

import kvlayers
import pages
from lib import report
from lib.internals import cache_nbytes, quiet_clock
from lib.serving import NOTES, WAYS, Server, ask, most_memory, serving
from lib.timing import Turns
from pages import shown

ROWS = 8


def options() -> report.Options:
    made = report.Options(
        "rows",
        __doc__,
        written_pages,
        threads=2,
        quick="a random model and few tokens",
        kind=lambda given: "rows" if "many" in given.only else "serving",
    )
    usual = [name for name in SECTIONS if name != "serve"]
    made.some_of("--only", list(SECTIONS), "sections", usual)
    made.real_model()
    made.sized("--prompts", 32, 6, "prompts of `many`")
    made.sized("--longest", 512, 64, "tokens of the longest prompt of `many`; the shortest has a quarter of them")
    made.sized("--least", 24, 2, "tokens of the shortest answer of `many`; the longest has eight times as many")
    made.sized("--requests", 20, 4, "requests of `serve`")
    made.sized("--interval", 1.5, 0.2, "seconds between two requests of `serve`, on average", float)
    made.sized("--trials", 3, 1, "trials")
    return made


class Answers(NamedTuple):
    """What one way of answering many prompts gives.

    Attributes:
        ids: new tokens by prompt.
        first: seconds to the first token of each prompt.
        nbytes: the most bytes that states have taken.
    """

    ids: dict[int, list[int]]
    first: list[float]
    nbytes: int


class Many:
    """Prompts whose answers differ 1 to 8 in length, in an order in which long and short ones are mixed."""

    def __init__(self, run: report.Session) -> None:
        given, chance = run.given, torch.Generator().manual_seed(0)
        self.model: Any = run.some_model(torch.float32).model
        self.most, count, known = 8 * given.least, given.prompts, min(self.model.config.vocab_size, 2000)
        lengths = [given.longest // 4 + given.longest * 3 * number // (4 * count) for number in range(count)]
        self.prompts = [torch.randint(3, known, (length,), generator=chance) for length in lengths]
        order = torch.randperm(count, generator=chance).tolist()
        self.wanted = [given.least + given.least * 7 * order[number] // max(count - 1, 1) for number in range(count)]
        self.pad = self.model.config.pad_token_id or 0
        self.options = {"max_new_tokens": self.most, "do_sample": False, "eos_token_id": None, "pad_token_id": self.pad}

    def batch(self, numbers: Sequence[int]) -> Answers:
        """One call of `generate()` with transformers' cache, which goes on until the longest answer is complete."""
        prompts = [self.prompts[number] for number in numbers]
        columns = max(map(len, prompts))
        ids = torch.stack([torch.nn.functional.pad(own, (columns - len(own), 0), value=self.pad) for own in prompts])
        mask = torch.stack([torch.arange(columns) >= columns - len(own) for own in prompts]).long()
        ends = torch.tensor([self.wanted[number] for number in numbers]) + columns
        first: list[float] = []
        begin = time.perf_counter()

        class Stop(transformers.StoppingCriteria):
            def __call__(self, seen: Tensor, scores: Any, **_: Any) -> Tensor:
                first.append(time.perf_counter() - begin)
                return seen.shape[1] >= ends

        output = self.model.generate(
            ids, attention_mask=mask, stopping_criteria=[Stop()], return_dict_in_generate=True, **self.options
        )
        found = {
            number: own[columns : columns + self.wanted[number]].tolist()
            for number, own in zip(numbers, output.sequences, strict=True)
        }
        _, cache = output.to_tuple()
        return Answers(found, first[:1] * len(numbers), cache_nbytes(cache))

    def batches(self, rows: int) -> Answers:
        """Calls for batches that are sorted by the lengths of answers, which nobody knows before."""
        order = sorted(range(len(self.prompts)), key=self.wanted.__getitem__)
        ids: dict[int, list[int]] = {}
        first, nbytes, begin = list[float](), 0, time.perf_counter()
        for at in range(0, len(order), rows):
            before = time.perf_counter() - begin
            part = self.batch(order[at : at + rows])
            ids |= part.ids
            first += [before + seconds for seconds in part.first]
            nbytes = max(nbytes, part.nbytes)
        return Answers(ids, first, nbytes)

    def by_rows(self, rows: int) -> Answers:
        """`generate_many`."""
        left, first = dict(enumerate(self.wanted)), dict[int, float]()
        held: list[int] = []
        begin = time.perf_counter()

        def ends(number: int, token: int) -> bool:
            first.setdefault(number, time.perf_counter() - begin)
            left[number] -= 1
            return left[number] == 0

        def look(_: Any, arguments: Any, options: Any) -> None:
            held.append(options["cache" if "cache" in options else "past_key_values"].nbytes)

        with self.model.register_forward_pre_hook(look, with_kwargs=True):
            answers = kvlayers.generate_many(
                self.model, self.prompts, max_rows=rows, progress=False, on_token=ends, **self.options
            )
            found = {answer.index: answer.ids.tolist() for answer in answers}
        return Answers(found, list(first.values()), max(held))

    def by_manager(self, manager: Any) -> Answers:
        """Continuous batching, whose start is not timed."""
        held = [0]

        def look(_: Any, arguments: Any, options: Any) -> None:
            cache = options.get("cache", options.get("past_key_values"))
            held.append(cache.nbytes if isinstance(cache, kvlayers.Cache) else 0)

        begin = time.perf_counter()
        with manager.model.register_forward_pre_hook(look, with_kwargs=True):
            names = [
                manager.add_request(own.tolist(), max_new_tokens=wanted, record_timestamps=True)
                for own, wanted in zip(self.prompts, self.wanted, strict=True)
            ]
            ids, first = dict[int, list[int]](), list[float]()
            while len(ids) < len(names):
                result = manager.get_result(timeout=600)
                if result is None:
                    raise RuntimeError("generate_batch gave no answer within ten minutes")
                ids[names.index(result.request_id)] = result.generated_tokens
                first.append(result.timestamps[0] - begin)
        pages = 0 if max(held) else manager.batch_processor.cache.cache_tensor.nbytes
        return Answers(ids, first, max(*held, pages))

    @contextmanager
    def managers(self) -> Iterator[list[Any]]:
        """Managers of transformers and of kvlayers, each over a model of its own; none in versions without them."""
        if not hasattr(self.model, "continuous_batching_context_manager"):
            yield []
            return
        config = transformers.GenerationConfig(**self.options)
        tokens = sum(map(len, self.prompts)) + sum(self.wanted)
        # By default it reserves 60 % of the memory, and warms up in proportion.
        blocks = transformers.ContinuousBatchingConfig(num_blocks=2 * (tokens // 256 + len(self.prompts)))
        with ExitStack() as stack:
            running = []
            for settings in (contextlib.nullcontext(), kvlayers.installed()):
                with settings:
                    manager = copy.deepcopy(self.model).continuous_batching_context_manager(
                        generation_config=config, continuous_batching_config=blocks
                    )
                    running.append(stack.enter_context(manager))
            yield running


def compared(run: report.Session, ways: dict[str, Callable[[], Answers]], first: str, reference: str) -> dict[str, Any]:
    """Ways of answering the same prompts, which take turns.

    Args:
        run: the run.
        ways: by name.
        first: the way whose time the others are shown as a share of.
        reference: the way whose answers the others must have.
    """
    turns = Turns(ways)
    with torch.no_grad(), quiet_clock():
        for _ in range(run.given.trials):
            seen = turns.take(lambda name: ways[name]())
    expected, found = seen[reference].ids, dict[str, Any]()
    for name, answers in seen.items():
        equal = sum(answers.ids[number] == ids for number, ids in expected.items())
        # Padding changes the order of sums, and a tie the rest of an answer.
        run.expect(equal >= 0.8 * len(expected), f"{len(expected) - equal} answers of {name} have other tokens")
        found[name] = {
            "seconds": turns.median(name),
            "share": turns.ratio(first, name),
            "first": statistics.median(answers.first),
            "bytes": answers.nbytes,
            "equal": equal,
        }
    return found


def generate_batch(run: report.Session) -> dict[str, Any]:
    """The prompts of `many` by transformers' continuous batching, plain and under `install()`."""
    work, plain, by_rows = Many(run), "plain", "under install()"
    with work.managers() as managers:
        ways = {
            name: functools.partial(work.by_manager, manager)
            for name, manager in zip((plain, by_rows), managers, strict=False)
        }
        found = compared(run, ways, plain, plain) if ways else {}
    if found:
        seconds = (found[name]["seconds"] for name in (by_rows, plain))
        run.target("generate_batch by rows, of transformers' time", operator.truediv(*seconds), at_most=0.5)
    return found


ANSWER = 32
"""Tokens of an answer of `serve`."""

BLOCKS = "128"
"""Blocks of 256 tokens that transformers' continuous batching reserves. By default it takes 60 % of the memory."""


def serve(run: report.Session) -> dict[str, Any]:
    """Requests that arrive at random at a server: the first token, the others, and memory."""
    chance, count, now = random.Random(0), run.given.requests, 0.0
    arrivals, chats = list[float](), list[list[dict[str, str]]]()
    for number in range(count):
        now += chance.expovariate(1 / run.given.interval)
        arrivals.append(now)
        notes = NOTES * chance.randrange(1, 8)
        chats.append([{"role": "user", "content": f"{notes}Question {number}: which tree is it, and why?"}])
    found, texts = dict[str, Any](), dict[str, list[str]]()
    modes = {"": [], ", --continuous-batching": ["--continuous-batching", "--cb-num-blocks", BLOCKS]}
    for (way, before), (mode, options) in itertools.product(WAYS.items(), modes.items()):
        with serving(run.given.model, "float32", run.given.threads, before, options) as server:
            # The first request loads what the others find loaded.
            ask(server, [{"role": "user", "content": "Begin."}], ANSWER)

            def at_its_time(number: int, server: Server = server, begin: float = time.perf_counter()) -> dict[str, Any]:
                time.sleep(max(0.0, begin + arrivals[number] - time.perf_counter()))
                return ask(server, chats[number], ANSWER)

            with concurrent.futures.ThreadPoolExecutor(count) as crowd:
                answers = list(crowd.map(at_its_time, range(count)))
            texts[f"{way}{mode}"] = [answer["text"] for answer in answers]
            first = [answer["first"] for answer in answers]
            rest = [(answer["seconds"] - answer["first"]) / max(answer["answered"] - 1, 1) for answer in answers]
            found[f"{way}{mode}"] = {
                "first": statistics.median(first),
                "late_first": statistics.quantiles(first, n=20, method="inclusive")[-1],
                "token": statistics.median(rest),
                "late_token": statistics.quantiles(rest, n=20, method="inclusive")[-1],
                "bytes": most_memory(str(server.process.pid)),
                "equal": sum(map(operator.eq, texts[f"{way}{mode}"], texts[next(iter(texts))])),
            }
    for name, way in found.items():
        run.expect(way["equal"] >= 0.8 * count, f"{count - way['equal']} of {count} texts of {name} differ")
    return found


def many(run: report.Session) -> dict[str, Any]:
    """Seconds of prompts whose answers differ 1 to 8 in length."""
    work, count = Many(run), run.given.prompts
    best, one, sorted_ones = "kvlayers, generate_many", "transformers, one batch", "transformers, sorted batches"
    ways: dict[str, Callable[[], Answers]] = {
        best: lambda: work.by_rows(count),
        f"{best} of {ROWS} rows": lambda: work.by_rows(ROWS),
        one: lambda: work.batch(range(count)),
        sorted_ones: lambda: work.batches(ROWS),
    }
    found = compared(run, ways, best, one)
    run.target("generate_many beside one batch", found[one]["share"], at_most=0.65)
    run.target("generate_many beside sorted batches", found[sorted_ones]["share"], at_most=0.8)
    return found


SECONDS, FIRST = shown("s", "seconds", ".1f"), shown("s to a first token (median)", "first", ".1f")
STATES = shown("MB of states", "bytes", ",.0f", 1e-6)


def many_table(arguments: Mapping[str, Any], found: Mapping[str, Any]) -> str:
    columns = (SECONDS, shown("`generate_many`'s time, as a share", "share"), FIRST, STATES)
    longest, least = arguments["longest"], arguments["least"]
    return (
        f"{arguments['prompts']} prompts of {longest // 4} to {longest} tokens, answers of {least} to {8 * least}, "
        f"{pages.model_name(arguments)} in float32:\n\n"
        f"{pages.table('', found, columns, '---:')}"
    )


def batch_table(arguments: Mapping[str, Any], found: Mapping[str, Any]) -> str:
    named = {f"`generate_batch`, {name}": way for name, way in found.items()}
    return f"{arguments['prompts']} prompts, as below:\n\n{pages.table('', named, (SECONDS, FIRST, STATES), '---:')}"


def serve_table(arguments: Mapping[str, Any], found: Mapping[str, Any]) -> str:
    columns = (
        shown("s to the first token", "first"),
        shown("95th percentile", "late_first"),
        shown("ms a token", "token", ".0f", 1e3),
        shown("95th percentile", "late_token", ".0f", 1e3),
        shown("MB of the server", "bytes", ",.0f", 1e-6),
    )
    return (
        f"`transformers serve`, {arguments['requests']} requests that arrive at random, one in "
        f"{arguments['interval']} s on average, answers of {ANSWER} tokens, medians and 95th percentiles:\n\n"
        f"{pages.table('', found, columns, '---:')}"
    )


def written_pages() -> pages.Pages:
    of_many, of_serving = pages.newest("rows"), pages.newest("serving")
    arguments = of_many["arguments"]
    sizes = " ".join(f"--{flag} {arguments[flag]}" for flag in ("threads", "trials", "least", "longest"))
    rows = (
        f"{many_table(arguments, of_many['results']['many'])}\n\n`python lab/benchmarks/rows.py {sizes}`, "
        f"{pages.measured_at(of_many)}."
    )
    arguments, found = of_serving["arguments"], of_serving["results"]
    serving = "\n\n".join(
        [
            batch_table(arguments, found["generate_batch"]),
            serve_table(arguments, found["serve"]),
            f"{pathlib.Path(arguments['model']).name} in float32, {pages.measured_at(of_serving)}. transformers' own "
            f"continuous batching reserves {BLOCKS} blocks here; by default it takes 60 % of the memory.",
        ]
    )
    page = pages.DOCS / "rows.md"
    return pages.written("rows", {(page, "rows"): rows, (page, "serving"): serving})


def main(arguments: Sequence[str] | None = None) -> int:
    return report.run(options().parse(arguments), SECTIONS)


SECTIONS: dict[str, report.Section] = {
    "many": (many, many_table),
    "generate_batch": (generate_batch, batch_table),
    "serve": (serve, serve_table),
}


if __name__ == "__main__":
    sys.exit(main())
