"""Rows that come and go: steps, rollback by row, drafts for batches, and many prompts, beside transformers in one run.

    python benchmarks/rows.py            # SmolLM2, or the model of --model
    python benchmarks/rows.py --quick    # a random model and few tokens, to see that it runs

`steps`: a decode step of 8 rows of one length and of different lengths, beside an ordinary batch with transformers'
cache. `crop`: seconds of `crop_rows` at 16,384 tokens, and of joining a row. `drafts`: tokens a second of a batch that
repeats a text, by prompt look-up and without. `many`: 32 prompts whose answers differ 1 to 8 in length, by
`generate_many`, by one batch, and by batches of 8 that are sorted by length. `repeats`: the prefill of 8 equal prompts
beside that of one. Contenders take turns, and figures are medians over the trials.

The exit code is 1 if more tokens differ from plain decoding than ties explain.
"""

import itertools
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import transformers
from torch import Tensor

import kvlayers
from lib import report
from lib.contenders import fill
from lib.internals import quiet_clock
from lib.timing import Turns
from lib.workload import FILL_CHUNK

ROWS = 8
BEGINNING = 16
"""Tokens of the shortest prompt of `many`, by which its prompts are told apart."""
SUMMARY = (
    "Repeat this text word by word. A cache holds keys and values of the tokens that a model has seen, so that each "
    "new token is computed from its own states and those that are held. A batch has several sequences, which end at "
    "different times. Repeat it: A cache holds keys and values of the tokens that a model has seen"
)


def options() -> report.Options:
    made = report.Options("rows", __doc__, threads=2, quick="a random model and few tokens")
    made.some_of("--only", ("steps", "crop", "drafts", "many", "repeats"), "sections")
    made.real_model(in_quick="none")
    made.sized("--context", 512, 64, "tokens of the longest row")
    made.sized("--long", 16384, 512, "tokens of the rows that are rolled back")
    made.sized("--new", 64, 6, "tokens of an answer with drafts")
    made.sized("--prompts", 32, 6, "prompts of `many`")
    made.sized("--least", 24, 2, "tokens of the shortest answer of `many`; the longest has eight times as many")
    made.sized("--prefix", 1024, 64, "tokens of the equal prompts")
    made.sized("--steps", 12, 3, "steps that are timed")
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


def many(run: report.Session) -> dict[str, Any]:
    """Seconds of prompts whose answers differ 1 to 8 in length."""
    subject, given = Subject(run), run.given
    model = subject.model
    prompts = [subject.ids(1, BEGINNING + 5 * number % 48)[0] for number in range(given.prompts)]
    # In a shuffled order, so that every batch has long and short ones.
    order = torch.randperm(given.prompts, generator=subject.generator).tolist()
    wanted = [
        given.least + given.least * 7 * order[number] // max(given.prompts - 1, 1) for number in range(given.prompts)
    ]
    pad = model.config.pad_token_id or 0

    def stops(number_of: Callable[[Tensor], int]) -> Any:
        class Stop(transformers.StoppingCriteria):
            def __call__(self, ids: Tensor, scores: Any, **_: Any) -> Tensor:
                return torch.tensor([number_of(row) for row in ids], dtype=torch.bool)

        return Stop()

    by_prompt = {tuple(ids[:BEGINNING].tolist()): number for number, ids in enumerate(prompts)}

    def padded(numbers: Sequence[int]) -> tuple[Tensor, Tensor]:
        most = max(len(prompts[number]) for number in numbers)
        ids = torch.stack(
            [torch.cat([prompts[n].new_full((most - len(prompts[n]),), pad), prompts[n]]) for n in numbers]
        )
        mask = torch.stack([torch.arange(most) >= most - len(prompts[n]) for n in numbers]).long()
        return ids, mask

    def batch(numbers: Sequence[int]) -> dict[int, list[int]]:
        ids, mask = padded(numbers)
        ends = torch.tensor([wanted[n] + ids.shape[1] for n in numbers])

        class Stop(transformers.StoppingCriteria):
            def __call__(self, seen: Tensor, scores: Any, **_: Any) -> Tensor:
                return seen.shape[1] >= ends

        out = model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=8 * given.least,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=pad,
            stopping_criteria=[Stop()],
        )
        return {n: out[row, ids.shape[1] : ids.shape[1] + wanted[n]].tolist() for row, n in enumerate(numbers)}

    def by_many(max_rows: int) -> dict[int, list[int]]:
        def has_ended(ids: Tensor) -> bool:
            number = by_prompt[tuple(ids[:BEGINNING].tolist())]
            return len(ids) >= len(prompts[number]) + wanted[number]

        first: list[float] = []
        begin = time.perf_counter()
        answers = kvlayers.generate_many(
            model,
            prompts,
            max_new_tokens=8 * given.least,
            max_rows=max_rows,
            progress=False,
            do_sample=False,
            eos_token_id=None,
            stopping_criteria=[stops(has_ended)],
            on_token=lambda number, token: first.append(time.perf_counter() - begin) if not first else None,
        )
        found = {answer.index: answer.ids.tolist() for answer in answers}
        to_first.append(first[0])
        return found

    to_first: list[float] = []
    best = "kvlayers, generate_many"
    everyone = list(range(given.prompts))
    in_order = sorted(everyone, key=lambda number: wanted[number])
    ways: dict[str, Callable[[], dict[int, list[int]]]] = {
        best: lambda: by_many(len(prompts)),
        f"kvlayers, generate_many of {ROWS} rows": lambda: by_many(ROWS),
        "transformers, one batch": lambda: batch(everyone),
        f"transformers, sorted batches of {ROWS}": lambda: dict(
            itertools.chain.from_iterable(
                batch(in_order[at : at + ROWS]).items() for at in range(0, len(prompts), ROWS)
            )
        ),
    }
    turns = Turns(ways)
    with torch.no_grad(), quiet_clock():
        for _ in range(given.trials):
            seen = turns.take(lambda name: ways[name]())
    reference = seen["transformers, one batch"]
    equal = sum(seen["kvlayers, generate_many"][number] == reference[number] for number in everyone)
    # Padding changes the order of sums, and a tie the rest of an answer.
    run.expect(equal >= 0.8 * len(prompts), f"{len(prompts) - equal} of {len(prompts)} answers have other tokens")
    found: dict[str, Any] = {name: {"seconds": turns.median(name)} for name in ways}
    for name in ways:
        found[name]["share"] = turns.ratio(best, name)
    columns = {"s": report.shown("seconds", ".2f"), "generate_many's share": report.shown("share", ".2f")}
    title = f"{len(prompts)} prompts, answers of {min(wanted)} to {max(wanted)} tokens, {subject.name}"
    run.table(title, "", {"": found}, columns)
    run.target("generate_many beside one batch", found["transformers, one batch"]["share"], at_most=0.65)
    run.target(
        "generate_many beside sorted batches", found[f"transformers, sorted batches of {ROWS}"]["share"], at_most=0.8
    )
    return {**found, "equal answers": equal, "seconds to the first token": statistics.median(to_first)}


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


def main(arguments: Sequence[str] | None = None) -> int:
    sections = {"steps": steps, "crop": crop, "drafts": drafts, "many": many, "repeats": repeats}
    return report.run(options().parse(arguments), sections)


if __name__ == "__main__":
    sys.exit(main())
