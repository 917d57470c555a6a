"""Runs a command of kvlayers in this process. A test file that imports this is skipped without the extra `cli`."""

from typing import Any

import pytest

typer_testing = pytest.importorskip("typer.testing", reason="the command line needs the extra 'cli'")

typer = pytest.importorskip("typer")

typer_main = pytest.importorskip("typer.main")

from kvlayers.__main__ import make_app  # noqa: E402


def run(*arguments: object) -> Any:
    return typer_testing.CliRunner().invoke(make_app(), [str(argument) for argument in arguments])
