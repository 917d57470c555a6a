"""Servers that the tests of prefix stores share, each started once, and stores that try again without waiting."""

import os
from collections.abc import Iterator

import pytest

import redis_server
import s3_server


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The store tries again sooner than it would, and does not wait for a disk: no machine loses power here."""
    monkeypatch.setattr("kvlayers.prefix.write_queue.FIRST_DELAY", 0.01)
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture(scope="session")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    if redis_server.why_not():
        pytest.skip(redis_server.why_not())
    with redis_server.running(tmp_path_factory.mktemp("server")) as url:
        yield url


@pytest.fixture(scope="session")
def s3_port() -> Iterator[int]:
    if s3_server.why_not():
        pytest.skip(s3_server.why_not())
    with s3_server.running() as port:
        yield port
