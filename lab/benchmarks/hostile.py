"""Hostile clients of `transformers serve --continuous-batching` under `kvlayers run`: no other answer changes.

    python lab/benchmarks/hostile.py            # SmolLM2, or the model of --model
    python lab/benchmarks/hostile.py --crowd 50 # fewer requests at once

`leave`: clients that hang up in the middle of a stream. `crowd`: many requests at once. `endless`: a prompt longer than
the model, and one that asks for more tokens than the model has positions. `wrong`: requests whose options the server or
the model refuses. Beside each of them other clients ask, whose texts must be those of a quiet server. From the second
section on, what the first has let grow is there: threads and memory must come back.

It needs "transformers[serving]". The exit code is 1 if a text differs, or something is left.
"""

import concurrent.futures
import json
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from typing import Any

import clients
from lib import report
from lib.serving import Server, serving

OTHERS, ANSWER = 4, 16
GROWTH_MIB, GROWTH_THREADS = 200, 2
"""What a section may leave in the process, apart from the first."""


def options() -> report.Options:
    made = report.Options("hostile", __doc__, threads=2)
    made.some_of("--only", list(SECTIONS), "sections")
    made.real_model(is_needed=True)
    made.add("--crowd", type=int, default=500, help="requests at once (500)")
    return made


def chat(number: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"{clients.NOTES * (1 + number % 3)}Question {number}: which tree is it?"}]


def posted(server: Server, body: dict[str, Any]) -> int:
    """The status of an answer to a body that a client of openai would not send."""
    request = urllib.request.Request(
        f"http://localhost:{server.port}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=300) as answer:
            answer.read()
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def asked(run: report.Session, server: Server, number: int, chunks: int = -1) -> str:
    answer: dict[str, Any] = clients.ask(run, server.client, chat(number), streamed=True, chunks=chunks)
    text: str = answer["text"]
    return text


def leave(run: report.Session, server: Server) -> dict[str, Any]:
    """Twelve clients that hang up after a few tokens."""
    with concurrent.futures.ThreadPoolExecutor(12) as crowd:
        list(crowd.map(lambda number: asked(run, server, number, 1 + number % 5), range(12)))
    return {"hung up": 12}


def crowd(run: report.Session, server: Server) -> dict[str, Any]:
    """Many requests at once, each of one token."""
    count, body = run.given.crowd, {"model": run.given.model, "max_tokens": 1, "temperature": 0}
    began = time.perf_counter()
    with concurrent.futures.ThreadPoolExecutor(count) as many:
        statuses = list(many.map(lambda number: posted(server, {**body, "messages": chat(number)}), range(count)))
    run.expect(set(statuses) == {200}, f"of {count} requests at once, some had the status {set(statuses)}")
    return {"requests": count, "seconds": time.perf_counter() - began}


def endless(run: report.Session, server: Server) -> dict[str, Any]:
    """A prompt longer than the model takes, and an answer without end that is given up."""
    body = {"model": run.given.model, "max_tokens": ANSWER, "temperature": 0}
    endless_prompt = [{"role": "user", "content": "oak " * 20_000}]
    status = posted(server, {**body, "messages": endless_prompt})
    run.expect(status >= 400, f"a prompt without end had the status {status}")
    run.given.tokens = 10**9
    asked(run, server, 1, chunks=5)
    run.given.tokens = ANSWER
    return {"status": status}


def wrong(run: report.Session, server: Server) -> dict[str, Any]:
    """Requests that are refused, or whose processors raise."""
    body = {"model": run.given.model, "messages": chat(0), "max_tokens": ANSWER}
    bodies = {
        "no messages": {"model": run.given.model},
        "no tokens": {**body, "max_tokens": 0},
        "less than no tokens": {**body, "max_tokens": -3},
        "a temperature in words": {**body, "temperature": "warm"},
        "a wrong option": {**body, "generation_config": json.dumps({"no_such_option": 1})},
        "another model": {**body, "model": "no/such-model"},
    }
    statuses = {name: posted(server, each) for name, each in bodies.items()}
    run.console.print(f"statuses: {statuses}")
    return {"statuses": statuses}


SECTIONS: dict[str, Callable[[report.Session, Server], dict[str, Any]]] = {
    "leave": leave,
    "crowd": crowd,
    "endless": endless,
    "wrong": wrong,
}


def attack(run: report.Session) -> dict[str, Any]:
    """All sections that were chosen, each beside clients that only ask."""
    run.given.tokens, found = ANSWER, dict[str, Any]()
    arguments = (run.given.model, "float32", run.given.threads, clients.KVLAYERS, ["--continuous-batching"])
    with serving(*arguments) as server, concurrent.futures.ThreadPoolExecutor(OTHERS) as others:

        def of_others() -> list[str]:
            return list(others.map(lambda number: asked(run, server, 100 + number), range(OTHERS)))

        expected = of_others()
        asked(run, server, 0)
        for name in run.given.only:
            before = {what: server.status(what) for what in ("Threads", "VmRSS")}
            at_once = [others.submit(asked, run, server, 100 + number) for number in range(OTHERS)]
            found[name] = SECTIONS[name](run, server)
            texts = [each.result() for each in at_once]
            run.expect(texts == expected, f"beside {name}: a text of another client differs")
            run.expect(of_others() == expected, f"after {name}: a text of another client differs")
            time.sleep(1)
            after = {what: server.status(what) for what in ("Threads", "VmRSS")}
            found[name] |= {
                "threads": after["Threads"] - before["Threads"],
                "mib": (after["VmRSS"] - before["VmRSS"]) / 1024,
                "equal": sum(text == own for text, own in zip(texts, expected, strict=True)),
            }
        first = next(iter(found.values()))
        for name, each in found.items():
            if each is not first:
                run.expect(each["threads"] <= GROWTH_THREADS, f"after {name} {each['threads']} threads more are left")
                run.expect(each["mib"] <= GROWTH_MIB, f"after {name} {each['mib']:.0f} MiB more are left")
    columns = {
        "equal texts of others": report.shown("equal", "d"),
        "threads more": report.shown("threads", "d"),
        "MiB more": report.shown("mib", ".0f"),
    }
    run.table("transformers serve --continuous-batching under kvlayers run", "", {"": found}, columns)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    given = options().parse(arguments)
    with report.session(given) as running:
        found = attack(running)
    return running.finish(found)


if __name__ == "__main__":
    sys.exit(main())
