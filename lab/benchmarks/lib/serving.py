"""A running `transformers serve`: its clients, its memory and its threads."""

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


class Server(NamedTuple):
    """A server that runs.

    Attributes:
        client: of the package openai.
        process: that of the server.
        port: where it listens.
    """

    client: Any
    process: "subprocess.Popen[bytes]"
    port: int

    def status(self, name: str) -> int:
        """A number of Linux's status of the process, such as `Threads`, or `VmHWM` and `VmRSS` in KiB."""
        lines = pathlib.Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        return int(next(line for line in lines if line.startswith(f"{name}:")).split()[1])


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
        yield Server(client, process, port)
    finally:
        process.terminate()
        process.wait()
