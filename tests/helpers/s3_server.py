"""An S3 server of the tests' own: moto's, in a thread of this process, on a free port of this machine."""

import contextlib
import importlib.util
import logging
from collections.abc import Iterator
from typing import Any

BUCKET = "bucket"

PACKAGES = ("moto", "s3fs", "flask", "flask_cors")


def why_not() -> str:
    """Why there can be no server here; empty where there can."""
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    return f"the packages {', '.join(missing)} are not installed" if missing else ""


@contextlib.contextmanager
def running() -> Iterator[int]:
    """The port of a server that runs for as long as the context lasts."""
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        yield server.get_host_and_port()[1]
    finally:
        server.stop()


def options(port: int, timeout: float = 30) -> dict[str, Any]:
    """Options of s3fs that reach a server at this port."""
    return {
        "key": "hunter2",
        "secret": "t0k3n",
        "endpoint_url": f"http://127.0.0.1:{port}",
        "config_kwargs": {"connect_timeout": timeout, "read_timeout": timeout, "retries": {"max_attempts": 0}},
        "client_kwargs": {"region_name": "eu-central-1"},
    }
