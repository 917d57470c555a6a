"""A running `transformers serve`, plain and under `kvlayers run`: requests, their times, and memory."""

import contextlib
import os
import pathlib
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

WAYS = {
    "plain": [],
    "kvlayers run": [sys.executable, "-m", "kvlayers", "run", "--prefix-store", "2GiB", "--"],
}
"""What stands before the command of the server."""

NOTES = "The oak grows slowly, the birch fast; the larch loses its needles, and the yew keeps them. "
"""What requests speak of: as often as they are to be long."""


class Server(NamedTuple):
    """A server that runs.

    Attributes:
        client: of the package openai.
        process: that of the server.
        model: what it serves.
    """

    client: Any
    process: "subprocess.Popen[bytes]"
    model: str


def most_memory(process: str) -> int:
    """The most bytes that a process has held, by its number, or "self"; on Linux."""
    lines = pathlib.Path(f"/proc/{process}/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("VmHWM:")).split()[1])


@contextlib.contextmanager
def serving(
    model: str, dtype: str, threads: int | None, before: Sequence[str] = (), options: Sequence[str] = ()
) -> Iterator[Server]:
    """A `transformers serve` until the block ends; what stands before it in the command, and its further options."""
    import openai

    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    transformers = shutil.which("transformers", path=pathlib.Path(sys.executable).parent)
    command = [*before, str(transformers), "serve", model, "--port", str(port), "--dtype", dtype, *options]
    environment = os.environ if threads is None else {**os.environ, "OMP_NUM_THREADS": str(threads)}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while process.poll() is None:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"http://localhost:{port}/health")
                break
            time.sleep(0.2)
        # Clients that have gone are no errors of the server, so nothing is asked twice.
        client = openai.OpenAI(base_url=f"http://localhost:{port}/v1", api_key="none", timeout=900, max_retries=0)
        yield Server(client, process, model)
    finally:
        process.terminate()
        process.wait()


def ask(server: Server, messages: list[dict[str, str]], tokens: int) -> dict[str, Any]:
    """One request: its `text`, `seconds` to its `first` token and to the end, and how many tokens were `answered`."""
    began, first, text, usage = time.perf_counter(), None, "", None
    answer = server.client.chat.completions.create(
        model=server.model, messages=messages, temperature=0, max_tokens=tokens, stream=True
    )
    for chunk in answer:
        usage = chunk.usage or usage
        if chunk.choices and chunk.choices[0].delta.content:
            first = first or time.perf_counter() - began
            text += chunk.choices[0].delta.content
    seconds = time.perf_counter() - began
    return {"text": text, "first": first or seconds, "seconds": seconds, "answered": usage.completion_tokens}
