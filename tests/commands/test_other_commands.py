"""Commands of other packages, which join `kvlayers` by entry points, and those of the lab where it is not installed."""

import importlib.metadata
import re
import sys
import types
from typing import Any

import pytest

import command_line
from kvlayers.__main__ import GROUP
from kvlayers.commands.commands import OF_THE_LAB


def with_entry_points(monkeypatch: pytest.MonkeyPatch, **values: str) -> None:
    points = [importlib.metadata.EntryPoint(name, value, GROUP) for name, value in values.items()]
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: points if group == GROUP else [])


def test_the_commands_of_the_lab_are_there() -> None:
    shown = command_line.run("--help").output
    assert all(re.search(rf"^│ {name} ", shown, re.M) for name in OF_THE_LAB)
    assert "kvlayers-lab" not in shown


@pytest.mark.parametrize("arguments", [(), ("--help",), ("some", "--steps", "3", "-x")])
@pytest.mark.parametrize("name", OF_THE_LAB)
def test_a_command_of_the_lab_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch, name: str, arguments: tuple[str, ...]
) -> None:
    with_entry_points(monkeypatch)
    result = command_line.run(name, *arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr == (
        f"kvlayers {name}: this command is in the package kvlayers-lab: pip install ./lab (in a checkout of kvlayers)\n"
    )


def test_help_without_the_lab_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with_entry_points(monkeypatch)
    shown = command_line.run("--help").output
    assert not any(re.search(rf"^│ {name} ", shown, re.M) for name in OF_THE_LAB)
    assert "pip install ./lab (in a checkout of kvlayers)" in " ".join(shown.split())


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("no_such_package:add_to", "No module named 'no_such_package'"),
        ("additions:missing", "has no attribute 'missing'"),
        ("additions:fail", "a line and another"),
        ("additions:silent", "RuntimeError"),
    ],
)
def test_a_package_that_cannot_be_loaded_hides_no_other_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], value: str, reason: str
) -> None:
    additions: Any = types.ModuleType("additions")

    def fail(app: Any) -> None:
        raise ValueError("a line\nand another")

    def silent(app: Any) -> None:
        raise RuntimeError

    def greet(app: Any) -> None:
        app.command("greet")(lambda: print("hello"))

    additions.fail, additions.silent, additions.greet = fail, silent, greet
    monkeypatch.setitem(sys.modules, "additions", additions)
    with_entry_points(monkeypatch, broken=value, whole="additions:greet")
    assert command_line.run("greet").stdout == "hello\n"
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"kvlayers: the commands of {value} are not there: ")
    assert reason in line
