"""Clients that know nothing of kvlayers, under `kvlayers run` and without it: `transformers serve`, and smolagents.

    python lab/benchmarks/clients.py --threads 1

`chat`: a chat of some turns with `transformers serve` by the package openai, streamed and not: seconds to the first
token and `cached_tokens` of each turn. `agent`: a CodeAgent of smolagents, with its own system prompt, whose answers
need not be sensible. Texts must be equal.

It needs "transformers[serving]" and smolagents. The plain process runs first, so that neither finds the machine busy.
"""

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

from lib import report
from lib.serving import serving

STORE = "2GiB"
KVLAYERS = [sys.executable, "-m", "kvlayers", "run", "--prefix-store", STORE, "--"]
WAYS = {"plain": [], "kvlayers run": KVLAYERS}
NOTES = "The oak grows slowly, the birch fast; the larch loses its needles, and the yew keeps them. "
AGENT = """
import json, time
import torch, transformers
from smolagents import CodeAgent, TransformersModel

transformers.logging.set_verbosity_error()
options = json.loads({options!r})
model = TransformersModel(
    model_id=options["model"], device_map="cpu", torch_dtype=options["dtype"],
    max_new_tokens=options["tokens"], do_sample=False,
)
computed = []
model.model.register_forward_pre_hook(
    lambda module, args, kwargs: computed.append(kwargs["input_ids"].shape[1]), with_kwargs=True
)
agent = CodeAgent(tools=[], model=model, max_steps=options["steps"], verbosity_level=0)
began = time.perf_counter()
agent.run("What is the sum of the squares of the first twenty numbers?")
seconds = time.perf_counter() - began
texts = [step.model_output for step in agent.memory.steps if hasattr(step, "model_output")]
asked = [step.token_usage.input_tokens for step in agent.memory.steps if getattr(step, "token_usage", None)]
found = dict(seconds=seconds, computed=sum(computed), asked=asked, texts=texts)
open(options["output"], "w").write(json.dumps(found))
"""


def options() -> report.Options:
    made = report.Options("clients", __doc__, threads=1)
    made.some_of("--only", ("chat", "agent"), "sections")
    made.real_model(is_needed=True)
    made.dtype("float32")
    made.add("--turns", type=int, default=10, help="turns of the chat, and steps of the agent (10)")
    made.add("--tokens", type=int, default=24, help="tokens of an answer (24)")
    made.add("--system", type=int, default=40, help="times that the system prompt repeats its notes (40)")
    return made


@contextlib.contextmanager
def server(run: report.Session, before: Sequence[str]) -> Iterator[Any]:
    """A running `transformers serve`, as a client of the package openai; what stands before it in the command."""
    with serving(run.given.model, run.given.dtype, run.given.threads, before) as running:
        yield running.client


def ask(run: report.Session, client: Any, messages: list[dict[str, str]], streamed: bool) -> Any:
    """One request: its text, its seconds to the first token and to the end, and the server's count of tokens.

    Args:
        run: the run.
        client: the client.
        messages: the chat.
        streamed: whether tokens come one by one.
    """
    began, first, text, usage = time.perf_counter(), None, "", None
    given = run.given
    answer = client.chat.completions.create(
        model=given.model, messages=messages, temperature=0, max_tokens=given.tokens, stream=streamed
    )
    for chunk in answer if streamed else ():
        usage = chunk.usage or usage
        if chunk.choices and chunk.choices[0].delta.content:
            first = first or time.perf_counter() - began
            text += chunk.choices[0].delta.content
    if not streamed:
        text, usage = answer.choices[0].message.content, answer.usage
    seconds = time.perf_counter() - began
    details = usage.prompt_tokens_details
    cached = 0 if details is None else details.cached_tokens
    counts = {"asked": usage.prompt_tokens, "cached": cached, "answered": usage.completion_tokens}
    return {"text": text, "first": first or seconds, "seconds": seconds, **counts}


def chat(run: report.Session) -> dict[str, Any]:
    """A chat whose every turn is asked with all turns before it."""
    found: dict[str, Any] = {}
    for way, before in WAYS.items():
        with server(run, before) as client:
            for mode in ("streamed", "whole"):
                messages = [{"role": "system", "content": f"Answer a {mode} question. {NOTES * run.given.system}"}]
                turns = found[f"{way}, {mode}"] = {}
                for turn in range(run.given.turns):
                    messages.append({"role": "user", "content": f"Question {turn + 1}: which tree is it, and why?"})
                    turns[turn + 1] = ask(run, client, messages, mode == "streamed")
                    messages.append({"role": "assistant", "content": turns[turn + 1]["text"]})
    cells = {"s to the first token": report.shown("first"), "s": report.shown("seconds")}
    cells |= {"tokens": report.shown("asked", "d"), "cached": report.shown("cached", "d")}
    run.table("A chat with transformers serve", "", found, cells)
    for mode in ("streamed", "whole"):
        plain, reused = (list(found[f"{way}, {mode}"].values()) for way in WAYS)
        run.expect([turn["text"] for turn in plain] == [turn["text"] for turn in reused], f"{mode}: other texts")
        share = sum(turn["first"] for turn in reused[1:]) / sum(turn["first"] for turn in plain[1:])
        run.target(f"{mode}: seconds to the first token from the second turn on", share, at_most=0.5)
    return found


def agent(run: report.Session) -> dict[str, Any]:
    """A CodeAgent of smolagents in a process of its own."""
    found: dict[str, Any] = {}
    output = run.given.output.with_suffix(".agent.json")
    output.parent.mkdir(parents=True, exist_ok=True)
    given = {"model": run.given.model, "dtype": run.given.dtype, "tokens": run.given.tokens, "steps": run.given.turns}
    code = AGENT.format(options=json.dumps({**given, "output": str(output)}))
    environment = {**os.environ, "OMP_NUM_THREADS": str(run.given.threads)}
    for way, before in WAYS.items():
        began = time.perf_counter()
        subprocess.run([*before, sys.executable, "-c", code], env=environment, check=True)
        found[way] = {**json.loads(output.read_text()), "process": time.perf_counter() - began}
    output.unlink()
    cells = {"s": report.shown("seconds"), "s of the process": report.shown("process")}
    cells |= {"tokens computed": report.shown("computed", "d")}
    run.table(f"A CodeAgent of {run.given.turns} steps", "", {"": found}, cells)
    run.expect(found["plain"]["texts"] == found["kvlayers run"]["texts"], "other texts of the agent")
    for key in ("seconds", "computed"):
        run.target(f"the agent's {key}", found["kvlayers run"][key] / found["plain"][key], at_most=0.5)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    return report.run(options().parse(arguments), {"chat": chat, "agent": agent})


if __name__ == "__main__":
    sys.exit(main())
