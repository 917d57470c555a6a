"""Runs a command of kvlayers in this process. A test file that imports this is skipped without the extra `cli`."""

import json
import re
from typing import Any

import pytest

typer_testing = pytest.importorskip("typer.testing", reason="the command line needs the extra 'cli'")

typer = pytest.importorskip("typer")

typer_main = pytest.importorskip("typer.main")

from kvlayers.__main__ import make_app  # noqa: E402


def run(*arguments: object, code: int | None = None, app: Any = None) -> Any:
    """The result of a command, which must end with `code` if that is given."""
    result = typer_testing.CliRunner().invoke(app or make_app(), [str(argument) for argument in arguments])
    assert code in (None, result.exit_code), (result.output, result.exception)
    return result


def said(*arguments: object, code: int = 0) -> Any:
    """What a command prints as JSON."""
    return json.loads(run(*arguments, "--json", code=code).stdout)


def words(output: str) -> str:
    """What is printed, as if lines had no end."""
    return " ".join(output.split())


def check_refused(pattern: str, command: str, *arguments: object) -> None:
    """See that a command ends with the code 2 and one line, which has the pattern."""
    result = run(command, *arguments, code=2)
    assert re.fullmatch(r"(Asking the hub for .*\n)?", result.stdout), result.output
    assert result.stderr.count("\n") == 1, result.output
    assert result.stderr.startswith(f"kvlayers {command}: ")
    assert re.search(pattern, result.stderr), result.stderr
