"""The command `kvlayers lm-eval`: what it says without the harness, and which errors are one line."""

import functools
import importlib.util
import re
import sys

import pytest

import command_line
import kvlayers

run = functools.partial(command_line.run, "lm-eval")


def test_without_the_harness_the_command_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "lm_eval" else found(name))
    command_line.check_refused(r'pip install \. "./lab\[eval\]"', "lm-eval", "run", "--model", "kvlayers")


def test_help_is_that_of_the_command_and_behind_run_that_of_the_harness() -> None:
    assert "kvlayers lm-eval run --help" in run("--help").output
    pytest.importorskip("lm_eval", reason="lm-eval is not installed: it comes with the extra 'eval'")
    assert "--model_args" in run("run", "--help", code=0).output


def test_errors_of_kvlayers_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = pytest.importorskip("lm_eval.__main__", reason="lm-eval is not installed: it comes with the extra 'eval'")
    monkeypatch.setattr(sys, "argv", ["kvlayers"])

    def evaluate() -> None:
        raise kvlayers.OptionError(f"got {sys.argv[1:]}")

    monkeypatch.setattr(harness, "cli_evaluate", evaluate)
    arguments = ["run", "--model", "kvlayers", "--model_args", "cache=int3"]
    own = [*arguments, "--include_path", "tasks"]
    assert run(*own, code=2).stderr == f"kvlayers lm-eval: got {own}\n"
    # Only if the user includes no tasks, those of kvlayers are.
    assert re.search(r"'cache=int3', '--include_path', '.*tasks.harness'\]$", run(*arguments).stderr)
