"""Rows that come and go: steps, rollback by row, drafts for batches, and many prompts, beside transformers in one run.

    python lab/benchmarks/rows.py            # SmolLM2, or the model of --model
    python lab/benchmarks/rows.py --quick    # a random model and few tokens, to see that it runs
    python lab/benchmarks/rows.py --write    # the recorded figures, into docs/rows.md

`steps`: a decode step of 8 rows of one length and of different lengths, beside an ordinary batch with transformers'
cache. `crop`: seconds of `crop_rows` at 16,384 tokens, and of joining a row. `drafts`: tokens a second of a batch that
repeats a text, by prompt look-up and without. `many`: 32 prompts whose answers differ 1 to 8 in length, by
`generate_many`, by one batch, and by batches of 8 that are sorted by length. `generate_batch`: the same prompts by
transformers' continuous batching, plain and under `install()`. `repeats`: the prefill of 8 equal prompts beside that of
one. Contenders take turns, and figures are medians over the trials.

`serve`: requests that arrive at random, by an exponential distribution, at `transformers serve` with and without
`--continuous-batching`, plain and under `kvlayers run`: seconds to the first token, milliseconds a token behind it,
and the most memory of the server. It needs `--model` and "transformers[serving]". It and `generate_batch` are recorded
by themselves:

    python lab/benchmarks/rows.py --only generate_batch,serve --threads 2 --trials 1 --least 12 --longest 256
    python lab/benchmarks/record.py lab/benchmarks/results/rows-....json lab/benchmarks/recorded/serving-....json

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
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor

import kvlayers
import pages
from lib import report
from lib.contenders import fill
from lib.internals import cache_nbytes, quiet_clock
from lib.serving import serving
from lib.timing import Turns
from lib.workload import FILL_CHUNK

ROWS = 8
SUMMARY = (
    "Repeat this text word by word. A cache holds keys and values of the tokens that a model has seen, so that each "
    "new token is computed from its own states and those that are held. A batch has several sequences, which end at "
    "different times. Repeat it: A cache holds keys and values of the tokens that a model has seen"
)


def options() -> report.Options:
    made = report.Options("rows", __doc__, threads=2, quick="a random model and few tokens", writes=written_pages)
    usual = [name for name in SECTIONS if name != "serve"]
    made.some_of("--only", list(SECTIONS), "sections", usual)
    made.real_model(in_quick="none")
    made.sized("--context", 512, 64, "tokens of the longest row")
    made.sized("--long", 16384, 512, "tokens of the rows that are rolled back")
    made.sized("--new", 64, 6, "tokens of an answer with drafts")
    made.sized("--prompts", 32, 6, "prompts of `many`")
    made.sized("--longest", 512, 64, "tokens of the longest prompt of `many`; the shortest has a quarter of them")
    made.sized("--least", 24, 2, "tokens of the shortest answer of `many`; the longest has eight times as many")
    made.sized("--prefix", 1024, 64, "tokens of the equal prompts")
    made.sized("--steps", 12, 3, "steps that are timed")
    made.sized("--requests", 20, 4, "requests of `serve`")
    made.sized("--interval", 1.5, 0.2, "seconds between two requests of `serve`, on average", float)
    made.sized("--trials", 3, 1, "trials")
    return made


class Subject:
    """A model in float32, and texts for it."""

    def __init__(self, run: report.Session) -> None:
        real = run.real(torch.float32)
        chosen: Any = run.random(dtype=torch.float32) if real is None else real
        self.model, self.name = chosen.model.eval(), chosen.name
        self.tokenizer = None if real is None else transformers.AutoTokenizer.from_pretrained(run.given.model)
        self.generator = torch.Generator().manual_seed(0)

    def ids(self, rows: int, tokens: int) -> Tensor:
        """Random ids `[rows, tokens]`."""
        most = min(self.model.config.vocab_size, 2000)
        return torch.randint(3, most, (rows, tokens), generator=self.generator)

    def text(self) -> Tensor:
        """A text that repeats itself, int64 `[tokens]`."""
        if self.tokenizer is None:
            return self.ids(1, 12)[0].repeat(3)
        return torch.tensor(self.tokenizer(SUMMARY).input_ids)


def cache_of(model: Any, ids: Tensor) -> kvlayers.Cache:
    cache = kvlayers.DynamicCache(config=model.config)
    model(ids, past_key_values=cache, logits_to_keep=1)
    return cache


def steps(run: report.Session) -> dict[str, Any]:
    """Milliseconds of a step of 8 rows, of one token and of five."""
    subject, given = Subject(run), run.given
    model, ids = subject.model, subject.ids(ROWS, given.context)
    lengths = [given.context - row * given.context // 16 for row in range(ROWS)]
    with torch.inference_mode(), quiet_clock():
        plain = transformers.DynamicCache(config=model.config)
        own = kvlayers.DynamicCache(config=model.config)
        for cache in (plain, own):
            model(ids, past_key_values=cache, logits_to_keep=1)
        rows = kvlayers.merge([cache_of(model, ids[row : row + 1, :length]) for row, length in enumerate(lengths)])
        packed = []
        for row, length in enumerate(lengths):
            cache = kvlayers.QuantizedCache(config=model.config, nbits=4)
            model(ids[row : row + 1, :length], past_key_values=cache, logits_to_keep=1)
            packed.append(cache)
        caches = {"transformers, one length": plain, "kvlayers, one length": own, "kvlayers, rows": rows}
        caches["kvlayers, rows in 4 bits"] = kvlayers.merge(packed)
        found: dict[str, dict[str, float]] = {name: {} for name in caches}
        for new in (1, 5):
            turns = Turns(caches)

            def one(name: str, tokens: Tensor) -> None:
                cache, arguments = caches[name], {}
                if "rows" in name:
                    seen = kvlayers.Rows(cache)
                    count = tokens.shape[1]
                    arguments = {
                        "attention_mask": seen.attention_mask(count),
                        "position_ids": seen.position_ids(count),
                    }
                model(tokens, past_key_values=cache, **arguments)

            for count in range(given.steps + 2):
                tokens = subject.ids(ROWS, new)
                turns.take(lambda name, tokens=tokens: one(name, tokens), is_counted=count > 1)
            for name in caches:
                found[name][f"of {new}"] = turns.median(name)
    columns = {"ms a step of one token": report.ms("of 1", ".1f"), "ms a step of five": report.ms("of 5", ".1f")}
    run.table(f"{ROWS} rows of up to {given.context} tokens, {subject.name}", "", {"": found}, columns)
    return found


def crop(run: report.Session) -> dict[str, Any]:
    """Seconds of rolling rows of many tokens back, each by its own number, and of letting one more join."""
    workload, tokens = run.random(), run.given.long
    model, found = workload.model, dict[str, Any]()
    states = workload.shape.states(tokens, model.dtype)
    alone = []
    for length in (tokens, tokens - 64):
        cache = kvlayers.DynamicCache(config=model.config)
        fill(cache, [[side[:, :, :length] for side in pair] for pair in states], FILL_CHUNK)
        alone.append(cache)
    with torch.no_grad(), quiet_clock():
        cache = kvlayers.merge(alone)
        lengths, seconds = list(cache.row_lengths), []
        for count in range(20):
            lengths[count % 2] -= 1 + count % 3
            begin = time.perf_counter()
            cache.crop_rows(lengths)
            seconds.append(time.perf_counter() - begin)
        begin = time.perf_counter()
        cache.extend(alone[1])
        found = {"crop_rows": statistics.median(seconds), "extend": time.perf_counter() - begin, "tokens": tokens}
        run.expect(cache.row_lengths == (*lengths, tokens - 64), "crop_rows left other lengths than it was asked for")
    columns = {"ms of crop_rows": report.ms("crop_rows", ".3f"), "ms of extend": report.ms("extend", ".1f")}
    run.table(f"Rows of {tokens:,} tokens, {workload.name}", "", {"": {"kvlayers": found}}, columns)
    run.target("milliseconds of crop_rows", found["crop_rows"] * 1e3, at_most=1)
    return found


def drafts(run: report.Session) -> dict[str, Any]:
    """Tokens a second of a batch that repeats a text, plainly and by prompt look-up."""
    subject, given = Subject(run), run.given
    model, text = subject.model, subject.text()
    pad = model.config.pad_token_id or 0
    lengths = [len(text) - 2 * row for row in range(ROWS)]
    ids = torch.stack([torch.cat([text.new_full((len(text) - own,), pad), text[-own:]]) for own in lengths])
    mask = torch.stack([torch.arange(len(text)) >= len(text) - own for own in lengths]).long()
    how = {"max_new_tokens": given.new, "min_new_tokens": given.new, "do_sample": False, "pad_token_id": pad}
    asked: dict[str, dict[str, Any]] = {"plain": {}, "prompt look-up of 6": {"prompt_lookup_num_tokens": 6}}
    passes: dict[str, int] = {}
    turns = Turns(asked)

    def generated(name: str) -> Tensor:
        calls: list[int] = []
        hook = model.register_forward_hook(lambda *_: calls.append(1))
        with kvlayers.installed():
            out: Tensor = model.generate(ids, attention_mask=mask, **how, **asked[name])
        hook.remove()
        passes[name] = len(calls)
        return out[:, len(text) :]

    with quiet_clock():
        for trial in range(given.trials + 1):
            seen = turns.take(generated, is_counted=trial > 0)
    equal = (seen["plain"] == seen["prompt look-up of 6"]).all(1)
    run.expect(bool(equal.sum() >= ROWS - 1), f"{int((~equal).sum())} rows with drafts have other tokens")
    made = ROWS * given.new
    found = {
        name: {"rate": made / turns.median(name), "passes": passes[name], "tokens a pass": made / ROWS / passes[name]}
        for name in asked
    }
    columns = {
        "tokens a second": report.shown("rate", ".1f"),
        "forward passes": report.shown("passes", ".0f"),
        "tokens a row and pass": report.shown("tokens a pass", ".2f"),
    }
    run.table(f"{ROWS} rows, {given.new} tokens each, {subject.name}", "", {"": found}, columns)
    run.target("drafts beside plain decoding", turns.ratio("plain", "prompt look-up of 6"), at_least=1.3)
    return {**found, "equal rows": int(equal.sum())}


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

    def __init__(self, subject: Subject, given: Any) -> None:
        self.model, self.most = subject.model, 8 * given.least
        count = given.prompts
        lengths = [given.longest // 4 + given.longest * 3 * number // (4 * count) for number in range(count)]
        self.prompts = [subject.ids(1, length)[0] for length in lengths]
        order = torch.randperm(count, generator=subject.generator).tolist()
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
    work, plain, by_rows = Many(Subject(run), run.given), "plain", "under install()"
    with work.managers() as managers:
        ways = {
            name: functools.partial(work.by_manager, manager)
            for name, manager in zip((plain, by_rows), managers, strict=False)
        }
        found = compared(run, ways, plain, plain) if ways else {}
    columns = {
        "s": report.shown("seconds", ".1f"),
        "s to a first token, median": report.shown("first", ".1f"),
        "MB of states": report.mb("bytes", ".0f"),
        "equal answers": report.shown("equal", ".0f"),
    }
    run.table(f"generate_batch of {run.given.prompts} prompts", "", {"": found}, columns)
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
    import clients

    chance, count, now = random.Random(0), run.given.requests, 0.0
    arrivals, chats = list[float](), list[list[dict[str, str]]]()
    for number in range(count):
        now += chance.expovariate(1 / run.given.interval)
        arrivals.append(now)
        notes = clients.NOTES * chance.randrange(1, 8)
        chats.append([{"role": "user", "content": f"{notes}Question {number}: which tree is it, and why?"}])
    run.given.tokens, found, texts = ANSWER, dict[str, Any](), dict[str, list[str]]()
    modes = {"": [], ", --continuous-batching": ["--continuous-batching", "--cb-num-blocks", BLOCKS]}
    for (way, before), (mode, options) in itertools.product(clients.WAYS.items(), modes.items()):
        with serving(run.given.model, "float32", run.given.threads, before, options) as server:
            # The first request loads what the others find loaded.
            clients.ask(run, server.client, [{"role": "user", "content": "Begin."}], streamed=True)

            def ask(number: int, client: Any = server.client, begin: float = time.perf_counter()) -> dict[str, Any]:
                time.sleep(max(0.0, begin + arrivals[number] - time.perf_counter()))
                answer: dict[str, Any] = clients.ask(run, client, chats[number], streamed=True)
                return answer

            with concurrent.futures.ThreadPoolExecutor(count) as crowd:
                answers = list(crowd.map(ask, range(count)))
            texts[f"{way}{mode}"] = [answer["text"] for answer in answers]
            first = [answer["first"] for answer in answers]
            rest = [(answer["seconds"] - answer["first"]) / max(answer["answered"] - 1, 1) for answer in answers]
            found[f"{way}{mode}"] = {
                "first": statistics.median(first),
                "late_first": statistics.quantiles(first, n=20, method="inclusive")[-1],
                "token": statistics.median(rest),
                "late_token": statistics.quantiles(rest, n=20, method="inclusive")[-1],
                "bytes": server.status("VmHWM") * 1024,
                "equal": sum(map(operator.eq, texts[f"{way}{mode}"], texts[next(iter(texts))])),
            }
    for name, way in found.items():
        run.expect(way["equal"] >= 0.8 * count, f"{count - way['equal']} of {count} texts of {name} differ")
    columns = {
        "s to the first token": report.shown("first"),
        "95th percentile": report.shown("late_first"),
        "ms a token": report.ms("token", ".0f"),
        "95th percentile ": report.ms("late_token", ".0f"),
        "MB of the server": report.mb("bytes", ".0f"),
        "equal texts": report.shown("equal", "d"),
    }
    title = f"{count} requests, one in {run.given.interval} s on average, answers of {ANSWER} tokens"
    run.table(title, "", {"": found}, columns)
    return found


def many(run: report.Session) -> dict[str, Any]:
    """Seconds of prompts whose answers differ 1 to 8 in length."""
    work, count = Many(Subject(run), run.given), run.given.prompts
    best, one, sorted_ones = "kvlayers, generate_many", "transformers, one batch", "transformers, sorted batches"
    ways: dict[str, Callable[[], Answers]] = {
        best: lambda: work.by_rows(count),
        f"{best} of {ROWS} rows": lambda: work.by_rows(ROWS),
        one: lambda: work.batch(range(count)),
        sorted_ones: lambda: work.batches(ROWS),
    }
    found = compared(run, ways, best, one)
    columns = {
        "s": report.shown("seconds", ".1f"),
        "generate_many's share": report.shown("share", ".2f"),
        "s to a first token, median": report.shown("first", ".1f"),
        "MB of states": report.mb("bytes", ".0f"),
        "answers as in one batch": report.shown("equal", ".0f"),
    }
    lengths = sorted(map(len, work.prompts))
    run.table(
        f"{count} prompts of {lengths[0]} to {lengths[-1]} tokens, answers of {min(work.wanted)} to "
        f"{max(work.wanted)}, {run.given.model or 'a random model'}",
        "",
        {"": found},
        columns,
    )
    run.target("generate_many beside one batch", found[one]["share"], at_most=0.65)
    run.target("generate_many beside sorted batches", found[sorted_ones]["share"], at_most=0.8)
    return found


def repeats(run: report.Session) -> dict[str, Any]:
    """The prefill of 8 equal rows beside that of one, under `install()`."""
    subject, given = Subject(run), run.given
    model, one = subject.model, subject.ids(1, given.prefix)
    turns = Turns(("one row", "8 equal rows"))
    how = {"max_new_tokens": 1, "do_sample": False, "pad_token_id": 0}

    def generated(name: str) -> Tensor:
        ids = one if name == "one row" else one.repeat(ROWS, 1)
        with kvlayers.installed():
            out: Tensor = model.generate(ids, attention_mask=torch.ones_like(ids), **how)
        return out

    with quiet_clock():
        for trial in range(given.trials + 1):
            turns.take(generated, is_counted=trial > 0)
    found = {name: {"seconds": turns.median(name)} for name in turns.seconds}
    run.table(
        f"A prompt of {given.prefix} tokens, {subject.name}", "", {"": found}, {"s": report.shown("seconds", ".2f")}
    )
    run.target("8 equal rows beside one", turns.ratio("8 equal rows", "one row"), at_most=1.15)
    return found


def page_tables(record: dict[str, Any]) -> str:
    found, arguments = record["results"], record["arguments"]
    ways = [
        [
            name,
            f"{way['seconds']:.1f}",
            f"{way['share']:.2f}",
            f"{way['first']:.1f}",
            f"{way['bytes'] / 1e6:,.0f}",
        ]
        for name, way in found["many"].items()
    ]
    head = ["", "s", "`generate_many`'s time, as a share", "s to a first token (median)", "MB of states"]
    plain, drafted = (found["drafts"][name] for name in ("plain", "prompt look-up of 6"))
    steps, crop, repeats = found["steps"], found["crop"], found["repeats"]
    rest = [
        [
            f"a step of {ROWS} rows of up to {arguments['context']} tokens, beside an ordinary batch of transformers",
            f"{steps['kvlayers, rows']['of 1'] * 1e3:.0f} ms, {steps['transformers, one length']['of 1'] * 1e3:.0f} ms",
        ],
        [f"`crop_rows` at {crop['tokens']:,} tokens", f"{crop['crop_rows'] * 1e3:.3f} ms"],
        [
            f"prompt look-up for {ROWS} rows of a text that repeats itself, beside plain decoding",
            f"{drafted['rate']:.0f} tokens a second, {plain['rate']:.0f}; "
            f"{drafted['tokens a pass']:.1f} tokens accepted a row and pass",
        ],
        [
            f"{ROWS} equal prompts of {arguments['prefix']:,} tokens under `install()`, beside one",
            f"{repeats['8 equal rows']['seconds']:.2f} s, {repeats['one row']['seconds']:.2f} s",
        ],
    ]
    flags = ("threads", "trials", "least", "longest", "context", "new", "prefix", "long", "steps")
    sizes = " ".join(f"--{flag} {arguments[flag]}" for flag in flags)
    model, least = pathlib.Path(arguments["model"]).name, arguments["least"]
    return "\n".join(
        [
            f"{arguments['prompts']} prompts of {arguments['longest'] // 4} to {arguments['longest']} tokens, answers "
            f"of {least} to {8 * least}, {model} in float32:",
            "",
            pages.markdown(head, ways, "---:"),
            "",
            pages.markdown(["", "measured"], rest),
            "",
            f"`python lab/benchmarks/rows.py {sizes}`, {pages.measured_at(record)}.",
        ]
    )


def serving_tables(record: dict[str, Any]) -> str:
    """What docs/rows.md shows of `generate_batch` and `serve`."""
    found, arguments = record["results"], record["arguments"]
    batches = [
        [f"`generate_batch`, {name}", f"{way['seconds']:.1f}", f"{way['first']:.1f}", f"{way['bytes'] / 1e6:,.0f}"]
        for name, way in found["generate_batch"].items()
    ]
    servers = [
        [
            name,
            *(f"{way[key]:.2f}" for key in ("first", "late_first")),
            *(f"{way[key] * 1e3:.0f}" for key in ("token", "late_token")),
            f"{way['bytes'] / 1e6:,.0f}",
        ]
        for name, way in found["serve"].items()
    ]
    heads = ["", "s to the first token", "95th percentile", "ms a token", "95th percentile", "MB of the server"]
    return "\n".join(
        [
            f"{arguments['prompts']} prompts, as below:",
            "",
            pages.markdown(["", "s", "s to a first token (median)", "MB of states"], batches, "---:"),
            "",
            f"`transformers serve`, {arguments['requests']} requests that arrive at random, one in "
            f"{arguments['interval']} s on average, answers of {ANSWER} tokens, medians and 95th percentiles:",
            "",
            pages.markdown(heads, servers, "---:"),
            "",
            f"{pathlib.Path(arguments['model']).name} in float32, {pages.measured_at(record)}. transformers' own "
            f"continuous batching reserves {BLOCKS} blocks here; by default it takes 60 % of the memory.",
        ]
    )


def written_pages() -> pages.Pages:
    made = {"rows": page_tables, "serving": serving_tables}
    records = {name: pages.newest(name) for name in made}
    found = {(pages.DOCS / "rows.md", name): made[name](record) for name, record in records.items() if record}
    return pages.written("rows", found)


def main(arguments: Sequence[str] | None = None) -> int:
    return report.run(options().parse(arguments), SECTIONS)


SECTIONS: dict[str, Callable[[report.Session], Any]] = {
    "steps": steps,
    "crop": crop,
    "drafts": drafts,
    "many": many,
    "generate_batch": generate_batch,
    "repeats": repeats,
    "serve": serve,
}


if __name__ == "__main__":
    sys.exit(main())
