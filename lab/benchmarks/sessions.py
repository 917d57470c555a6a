"""What conversations find in a prefix store: chats, agents, a trace of requests, and a server.

    python lab/benchmarks/sessions.py                          # all sections
    python lab/benchmarks/sessions.py --only chats --quick     # few families, to see that it runs
    python lab/benchmarks/sessions.py --record                 # also keep the figures in lab/benchmarks/recorded
    python lab/benchmarks/sessions.py --write                  # the recorded figures, into docs/prefix.md
    python lab/benchmarks/sessions.py --only trace --trace conversation_trace.jsonl

chats: for each family of models, what later turns of a chat find whose template drops the thinking of the answer, and
what other users find who share the system prompt. Answers must equal those without a store.
agent: ten turns of an agent on a hybrid model of 100M parameters: tokens computed, seconds to the first token.
trace: hit rates of a trace of conversations within budgets of bytes, beside an ideal tree of blocks from which the
least recently used leaf goes first. The trace has a line of JSON for each request, with `hash_ids`, as Mooncake
publishes it; without `--trace`, conversations are made up.
entries: milliseconds of a look-up and of an insertion into a full store, by the number of its entries, and memory after
many requests.
snapshots: seconds of a prompt that a store reads with snapshots between messages, and with the last state alone.
serve: rounds of several chats through `transformers serve`, with a store and without, by the package openai. It needs
`--model` and "transformers[serving]".

Models are random, in float32. The exit code is 1 if a text differs.
"""

import collections
import itertools
import json
import pathlib
import random
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import psutil
import torch
import transformers
from torch import Tensor

import kvlayers
import pages
from lib import report, serving
from lib.internals import quiet_clock, tiny_model
from lib.timing import Turns
from pages import shown

START, END, LINE, WORDS = 1, 2, 3, range(10, 97)
"""Tokens that a template puts around messages, and all others."""

SYSTEM, QUESTION, ANSWER, THINKING = 120, 30, 33, 20
GENERATION_PROMPT, KEPT_OF_IT = (START, 4, LINE, 5, LINE, LINE), 3
"""What a template puts before an answer, and how many tokens of it the next turn keeps."""

IN_COMMON = SYSTEM + QUESTION + KEPT_OF_IT
LEAST_OF_TURN, LEAST_OF_OTHERS = SYSTEM + QUESTION, SYSTEM - 8
FAMILIES = ("llama", "deepseek_v3", "gemma3", "qwen3_next", "lfm2", "mamba2", "jamba", "falcon_h1")
HYBRID = "lfm2"
LARGE = {
    "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 14, "num_attention_heads": 12,
    "num_key_value_heads": 4, "vocab_size": 32_000, "layer_types": ["conv", "full_attention"] * 7,
    "max_position_embeddings": 4096, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": END,
}  # fmt: skip
"""A hybrid model of 100M parameters."""
AGENT_SYSTEM, TOOL_RESULT, AGENT_ANSWER, TURNS = 1024, 160, 24, 10
OPERATIONS = ("a look-up", "an insertion")
BLOCK_TOKENS, BUDGETS = 16, (0.1, 0.25, 0.5)
TOKEN_BYTES = 2 * 8 * 4
"""Bytes of a token of the one layer with one head of 8 that stands for a model in `trace` and `entries`."""


def options() -> report.Options:
    made = report.Options(
        "sessions",
        __doc__,
        written_pages,
        threads=2,
        quick="few families, turns and requests",
        kind=lambda given: "sessions",
    )
    made.some_of("--only", list(SECTIONS), "sections")
    made.real_model()
    made.sized("--families", list(FAMILIES), ["llama", "gemma3"], "families of `chats`", lambda text: text.split(","))
    made.add("--trace", type=pathlib.Path, help="JSON lines with `hash_ids` (conversations that are made up)")
    made.sized("--requests", 2000, 100, "requests of `trace`")
    made.sized("--entries", [100, 1000, 10_000], [50], "entries of `entries`", report.numbers)
    made.sized("--trials", 15, 1, "trials of `snapshots`")
    made.sized("--lasting", 10_000, 100, "requests after which memory is measured")
    return made


def hybrid(run: report.Session) -> Any:
    """The model of `agent` and `snapshots`, in float32."""
    if run.quick:
        model = tiny_model(HYBRID)
        model.generation_config.eos_token_id = END
        return model
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(transformers.Lfm2Config(**LARGE)).eval()


class Chats:
    """Messages of random words between the tokens that a template puts around them."""

    def __init__(self, seed: int = 0) -> None:
        self._chance = random.Random(seed)

    def message(self, tokens: int) -> list[int]:
        return [START, *self._chance.choices(WORDS, k=tokens - 3), END, LINE]


def generated(model: Any, ids: Sequence[int], tokens: int, store: kvlayers.PrefixStore | None) -> list[int]:
    """The likeliest tokens behind a prompt, never the end of a message."""
    prompt = torch.tensor([ids])
    asked = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False}
    output = (
        model.generate(prompt, attention_mask=torch.ones_like(prompt), **asked)
        if store is None
        else kvlayers.generate(model, prompt, prefix_store=store, **asked)
    )
    return output[0, len(ids) :].tolist()


def chats(run: report.Session) -> dict[str, Any]:
    """What the second turn finds, and what other users find, in tokens."""
    found, tick = dict[str, Any](), run.ticking("chats", len(run.given.families))
    for family in run.given.families:
        found[family] = chats_of(run, family)
        run.target(f"{family}: found in turn 2", found[family]["turn 2"], at_least=LEAST_OF_TURN)
        run.target(f"{family}: found by the second other user", found[family]["user 2"], at_least=LEAST_OF_OTHERS)
        tick()
    return found


def chats_of(run: report.Session, family: str) -> dict[str, int]:
    """The tokens that each request finds in the store of one model."""
    model, store, made, found = tiny_model(family), kvlayers.PrefixStore("1GiB"), Chats(), dict[str, int]()
    model.generation_config.eos_token_id = END

    def answer(what: str, prompt: list[int]) -> list[int]:
        before = store.statistics.tokens_covered
        answered = generated(model, [*prompt, *GENERATION_PROMPT], ANSWER, store)
        found[what] = store.statistics.tokens_covered - before
        alone = generated(model, [*prompt, *GENERATION_PROMPT], ANSWER, None)
        run.expect(answered == alone, f"{family}, {what}: another answer")
        return answered

    system = made.message(SYSTEM)
    chat = [*system, *made.message(QUESTION)]
    answered = answer("turn 1", chat)
    for turn in (2, 3):
        chat += [*GENERATION_PROMPT[:KEPT_OF_IT], *answered[THINKING:], END, LINE, *made.message(QUESTION)]
        answered = answer(f"turn {turn}", chat)
    for other in (1, 2):
        answer(f"user {other}", [*system, *made.message(QUESTION)])
    return found


def agent(run: report.Session) -> dict[str, Any]:
    """Turns of an agent: a tool's result each, an answer whose thinking is dropped."""
    turns = 3 if run.quick else TURNS
    model, store, made = hybrid(run), kvlayers.PrefixStore("4GiB"), Chats()
    computed: list[int] = []
    model.register_forward_pre_hook(
        lambda module, args, kwargs: computed.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    chat, known, rows = made.message(AGENT_SYSTEM // (8 if run.quick else 1)), 0, dict[str, Any]()
    tick = run.ticking("agent", turns)
    for turn in range(1, turns + 1):
        chat += made.message(TOOL_RESULT)
        prompt = [*chat, *GENERATION_PROMPT]
        seconds, firsts = dict[str, float](), list[list[int]]()
        passes = 0
        for name, held in (("with a store", store), ("reading all", None)):
            computed.clear()
            with quiet_clock():
                begin = time.perf_counter()
                firsts.append(generated(model, prompt, 1, held))
                seconds[name] = time.perf_counter() - begin
            passes = passes or sum(computed)
        run.expect(firsts[0] == firsts[1], f"turn {turn} of the agent has another first token")
        new = len(prompt) - known
        rows[str(turn)] = {"tokens": len(prompt), "new": new, "computed": passes, **seconds}
        answered = generated(model, prompt, AGENT_ANSWER, store)
        # What the next turn has in common with this prompt.
        known = len(chat) + KEPT_OF_IT
        chat += [*GENERATION_PROMPT[:KEPT_OF_IT], *answered[AGENT_ANSWER // 2 :], END, LINE]
        tick()
    later = [row for turn, row in rows.items() if turn != "1"]
    share = sum(row["computed"] for row in later) / sum(row["new"] for row in later)
    soon = statistics.median(row["with a store"] / row["reading all"] for row in later)
    run.target("tokens computed, of the new ones, from the second turn on", share, at_most=1.1)
    run.target("seconds to the first token, of reading all", soon, at_most=0.15)
    return {"turns": rows, "computed_of_new": share, "first_token_of_all": soon}


def snapshots(run: report.Session) -> dict[str, Any]:
    """What a prompt of an agent takes that nobody has read before. The ways take turns."""
    model, made = hybrid(run), Chats()
    prompt = made.message(AGENT_SYSTEM // (8 if run.quick else 1))
    for _ in range(6):
        prompt += made.message(TOOL_RESULT)
    prompt += GENERATION_PROMPT
    ways: dict[str, dict[str, Any] | None] = {
        "no store": None,
        "the last state alone": {"snapshot_tokens": None},
        "snapshots": {},
    }
    turns, texts = Turns(ways), set[tuple[int, ...]]()
    entries, tick = dict[str, int](), run.ticking("snapshots", (run.given.trials + 1) * len(ways))

    def read(name: str) -> tuple[float, None]:
        options = ways[name]
        store = None if options is None else kvlayers.PrefixStore("4GiB", **options)
        # Without ends of messages, no border is known.
        model.generation_config.eos_token_id = END if name == "snapshots" else None
        with quiet_clock():
            begin = time.perf_counter()
            texts.add(tuple(generated(model, prompt, 1, store)))
            seconds = time.perf_counter() - begin
        entries[name] = 0 if store is None else len(store)
        tick()
        return seconds, None

    for trial in range(run.given.trials + 1):
        # The first one warms up.
        turns.take_timed(read, is_counted=trial > 0)
    run.expect(len(texts) == 1, "a first token depends on snapshots")
    rows = {name: {"seconds": turns.median(name), "entries": entries[name]} for name in ways}
    share = turns.ratio("snapshots", "the last state alone")
    run.target("seconds of a prompt with snapshots, of those without", share, at_most=1.02)
    return {"ways": rows, "of_without": share}


Blocks = tuple[int, ...]


class BlockTree:
    """An ideal store: every block of every prompt once; the least recently used leaf goes first."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._children: dict[Blocks, int] = {(): 0}
        self._leaves: collections.OrderedDict[Blocks, None] = collections.OrderedDict()

    def ask(self, blocks: Blocks) -> int:
        """Blocks that are found; then all of them are held."""
        found = next(n for n in range(len(blocks), -1, -1) if blocks[:n] in self._children)
        for end in range(found + 1, len(blocks) + 1):
            self._children[blocks[:end]] = 0
            self._children[blocks[: end - 1]] += 1
            self._leaves.pop(blocks[: end - 1], None)
        if blocks in self._leaves or not self._children[blocks]:
            self._leaves[blocks] = None
            self._leaves.move_to_end(blocks)
        while len(self._children) - 1 > self._most:
            leaf, _ = self._leaves.popitem(last=False)
            del self._children[leaf]
            above = leaf[:-1]
            self._children[above] -= 1
            if above and not self._children[above]:
                # It was used at least as late as its last child.
                self._leaves[above] = None
                self._leaves.move_to_end(above, last=False)
        return found


def made_up(requests: int) -> Iterator[Blocks]:
    """Conversations that share some system prompts; each goes on soon, late or never."""
    chance, fresh = random.Random(0), itertools.count(1)
    systems = [tuple(next(fresh) for _ in range(chance.randint(1, 8))) for _ in range(30)]
    waiting: list[Blocks] = []
    for _ in range(requests):
        if waiting and chance.random() < 0.5:
            blocks = waiting.pop(chance.randrange(len(waiting)))
        else:
            blocks = chance.choice(systems)
        blocks = (*blocks, *(next(fresh) for _ in range(chance.randint(1, 40))))
        if chance.random() < 0.6:
            waiting.append(blocks)
        yield blocks


def requests_of(run: report.Session) -> list[Blocks]:
    if run.given.trace is None:
        return [*made_up(run.given.requests)]
    with run.given.trace.open() as lines:
        return [tuple(json.loads(line)["hash_ids"]) for line in itertools.islice(lines, run.given.requests)]


def ask(store: kvlayers.PrefixStore, ids: Tensor) -> tuple[int, float, float]:
    """Look a prompt up, pass the rest, insert it: the tokens that were found, seconds of look-up and insertion."""
    begin = time.perf_counter()
    hit = store.lookup(ids, model="m")
    looked_up = time.perf_counter()
    cache = kvlayers.DynamicCache() if hit.cache is None else hit.cache
    states = torch.zeros(1, 1, len(ids) - hit.covered, 8)
    cache.update(states, states, 0)
    computed = time.perf_counter()
    store.insert(ids, cache, model="m")
    return hit.covered, looked_up - begin, time.perf_counter() - computed


def trace(run: report.Session) -> dict[str, Any]:
    requests = requests_of(run)
    distinct = len({request[:end] for request in requests for end in range(1, len(request) + 1)})
    asked = sum(len(request) for request in requests)
    found, tick = dict[str, Any](), run.ticking("trace", len(BUDGETS) * len(requests))
    for budget in BUDGETS:
        most = int(budget * distinct)
        ideal = BlockTree(most)
        store = kvlayers.PrefixStore(most * BLOCK_TOKENS * TOKEN_BYTES)
        of_ideal = of_store = 0
        for request in requests:
            tick()
            if len(request) > most:
                continue
            of_ideal += ideal.ask(request)
            ids = torch.tensor(request)[:, None] * BLOCK_TOKENS + torch.arange(BLOCK_TOKENS)
            of_store += ask(store, ids.view(-1))[0] // BLOCK_TOKENS
        entry = {"ideal": of_ideal / asked, "store": of_store / asked, "of_ideal": of_store / max(of_ideal, 1)}
        found[f"{budget:.0%}"] = entry
        run.target(f"hit rate within {budget:.0%}, of the ideal one", entry["of_ideal"], at_least=0.97)
    return found


def entries(run: report.Session) -> dict[str, Any]:
    """A full store of short prompts, which gives one away for each that comes."""
    tokens, found = 64, dict[str, Any]()
    numbers = itertools.count()

    def prompt() -> Tensor:
        # A first token in common, as with a tokenizer that has one.
        return torch.cat([torch.zeros(1, dtype=torch.int64), torch.arange(1, tokens) + tokens * (1 + next(numbers))])

    for count in run.given.entries:
        store, tick = kvlayers.PrefixStore(count * tokens * TOKEN_BYTES), run.ticking(f"{count} entries", count)
        for _ in range(count):
            ask(store, prompt())
            tick()
        _, *asked = zip(*(ask(store, prompt()) for _ in range(200)), strict=True)
        found[f"{count:,}"] = {
            f"{how} of {what}": choose(seconds) * 1e3
            for what, seconds in zip(OPERATIONS, asked, strict=True)
            for how, choose in (("median", statistics.median), ("worst", max))
        }
    last = found[f"{run.given.entries[-1]:,}"]
    run.target("median of an insertion, ms", last["median of an insertion"], at_most=1.0)
    run.target("worst of an insertion, ms", last["worst of an insertion"], at_most=20.0)
    store, lasting, sizes = kvlayers.PrefixStore(200 * tokens * TOKEN_BYTES), run.given.lasting, list[int]()
    for number in range(lasting):
        ask(store, prompt())
        if number in (lasting // 2, lasting - 1):
            sizes.append(psutil.Process().memory_info().rss)
    growth = (sizes[1] - sizes[0]) / 2**20
    run.target("MiB of growth in the second half of many requests", growth, at_most=4.0)
    return {"full": found, "growth_mib": growth}


SESSIONS, ROUNDS = 4, 4
ANSWER = 24
"""Tokens of an answer of the server."""


def serve(run: report.Session) -> dict[str, Any]:
    """Rounds of several chats through a server: seconds of all, and equal texts."""
    found, texts = dict[str, Any](), dict[str, list[str]]()
    system = {"role": "system", "content": serving.NOTES * (4 if run.quick else 40)}
    for way, before in serving.WAYS.items():
        with serving.serving(run.given.model, "float32", run.given.threads, before) as server:
            chats = [
                [system, {"role": "user", "content": f"I am user {user}. Which tree?"}] for user in range(SESSIONS)
            ]
            said, first, begin = list[str](), list[float](), time.perf_counter()
            for turn, chat in itertools.product(range(ROUNDS), chats):
                answer = serving.ask(server, chat, ANSWER)
                said.append(answer["text"])
                first.append(answer["first"])
                chat += [
                    {"role": "assistant", "content": answer["text"]},
                    {"role": "user", "content": f"And number {turn}?"},
                ]
        texts[way] = said
        found[way] = {"seconds": time.perf_counter() - begin, "first": statistics.median(first)}
    run.expect(len({tuple(said) for said in texts.values()}) == 1, "a text through the server differs")
    return found


Arguments = Mapping[str, Any]
Found = Mapping[str, Any]


def chats_table(arguments: Arguments, found: Found) -> str:
    names = {
        "turn 2": f"turn 2 of a chat, {IN_COMMON} tokens in common",
        "turn 3": "turn 3",
        "user 1": "first other user",
        "user 2": "second other user",
    }
    alike: dict[tuple[int, ...], list[str]] = {}
    for family, entry in found.items():
        alike.setdefault(tuple(entry[name] for name in names), []).append(family)
    rows = [[", ".join(families), *map(str, tokens)] for tokens, families in alike.items()]
    return pages.markdown(["model", *names.values()], rows)


def agent_text(arguments: Arguments, found: Found) -> str:
    return (
        f"An agent of {len(found['turns'])} turns on a random {HYBRID} of 100M parameters computes "
        f"{found['computed_of_new']:.2f} times its new tokens from the second turn on, and its first token comes after "
        f"{found['first_token_of_all']:.2f} of the time of reading all."
    )


def trace_text(arguments: Arguments, found: Found) -> str:
    hits = {budget: f"{entry['of_ideal']:.1%}" for budget, entry in found.items()}
    blocks = "every block" if set(hits.values()) == {"100.0%"} else f"{', '.join(hits.values())} of the blocks"
    kind = "made-up conversations" if arguments["trace"] is None else "a trace of conversations"
    return (
        f"In {kind}, the store found {blocks} that an ideal tree would find, with budgets of "
        f"{' and '.join(', '.join(hits).rsplit(', ', 1))} of all bytes."
    )


def snapshots_text(arguments: Arguments, found: Found) -> str:
    return f"With snapshots, a new prompt takes {found['of_without']:.2f} of the time without."


def serve_text(arguments: Arguments, found: Found) -> str:
    plain, stored = found.values()
    return (
        f"Through `transformers serve`, {SESSIONS} chats of {ROUNDS} rounds take {stored['seconds']:.0f} s under "
        f"`kvlayers run`, and {plain['seconds']:.0f} s without, with the same texts; the median first token comes "
        f"after {stored['first']:.2f} and {plain['first']:.2f} s."
    )


def entries_table(arguments: Arguments, found: Found) -> str:
    columns = [shown(f"{what}, {how} ms", f"{how} of {what}") for what in OPERATIONS for how in ("median", "worst")]
    return "\n\n".join(
        [
            "A full store of prompts of 64 tokens evicts one for each that comes:",
            pages.table("entries", found["full"], columns),
            f"The second half of {arguments['lasting']:,} requests took {found['growth_mib']:.1f} MiB more memory.",
        ]
    )


SECTIONS: dict[str, report.Section] = {
    "chats": (chats, chats_table),
    "agent": (agent, agent_text),
    "trace": (trace, trace_text),
    "snapshots": (snapshots, snapshots_text),
    "serve": (serve, serve_text),
    "entries": (entries, entries_table),
}


def written_pages() -> pages.Pages:
    record = pages.newest("sessions")
    texts = [show(record["arguments"], record["results"][name]) for name, (_, show) in SECTIONS.items()]
    tables = "\n\n".join([*texts, f"{pages.measured_at(record)}."])
    return pages.written("sessions", {(pages.DOCS / "prefix.md", "sessions"): tables})


def main(arguments: Sequence[str] | None = None) -> int:
    return report.run(options().parse(arguments), SECTIONS)


if __name__ == "__main__":
    sys.exit(main())
