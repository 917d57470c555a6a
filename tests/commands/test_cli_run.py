"""`kvlayers run`: which processes install kvlayers and when, what the command refuses, and what it leaves alone."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from command_line import check_refused, run
from kvlayers.commands import running
from kvlayers.commands.running import Running
from kvlayers.errors import CachePathError

SOURCES = Path(running.__file__).parents[2]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--cache", "int9"], "must be a known name, got 'int9'"),
        (["--cache", "sink:windows=3"], "windows"),
        (["--prefix-store", "100"], "`--prefix-store` must be a number of bytes with its unit"),
        (["--prefix-store", "2Gigs"], "`--prefix-store` must be a number of bytes"),
        (["--prefix-store", "0B"], "`--prefix-store` must be a positive number of bytes"),
        (["--prefix-store", "redis://localhost:1"], "cannot reach redis://localhost:1"),
        (["--prefix-store", "/proc/none"], "/proc/none"),
        (["--namespace", "mine"], "`--namespace` needs a `--prefix-store`"),
        (["--namespace-by-key"], "`--namespace-by-key` needs a `--prefix-store`"),
        (["no-such-command"], "'no-such-command'"),
    ],
)
def test_what_cannot_be_used_is_one_line(options: list[str], message: str) -> None:
    check_refused(message, "run", *options, "--", sys.executable, "-c", "pass")


def test_an_option_that_is_misspelt_is_named() -> None:
    assert "--cach" in run("run", "--cach", "int4", "--", sys.executable, code=2).stderr


def test_the_command_gets_its_arguments_and_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(os, "execve", lambda *given: calls.append(given))
    monkeypatch.setenv("PYTHONPATH", "mine")
    run("run", "--cache", "int4", sys.executable, "x.py", "--cache", "b", code=0)
    ((program, command, environment),) = calls
    assert (program, command) == (sys.executable, [sys.executable, "x.py", "--cache", "b"])
    assert environment["PYTHONPATH"] == os.pathsep.join([str(running.STARTUP), "mine"])
    assert json.loads(environment[running.VARIABLE]) == {
        "cache": "int4",
        "prefix_store": None,
        "namespace": "",
        "by_key": False,
    }
    assert environment["PATH"] == os.environ["PATH"]


@pytest.mark.parametrize(("text", "memory", "files"), [("2GiB", 2**31, 0), ("2MiB,here", 2**21, 1), ("here", 2**30, 1)])
def test_a_store_in_memory_in_a_directory_or_in_both(
    text: str, memory: int, files: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    store = running.store_of(text)
    assert (store._index.max_bytes, store._writes is not None) == (memory, bool(files))


def test_a_store_that_is_gone_leaves_a_process_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvlayers.generation import install as generation

    calls: list[Any] = []

    def gone(text: str) -> Any:
        raise CachePathError("gone")

    monkeypatch.setattr(running, "store_of", gone)
    monkeypatch.setattr(generation, "install", lambda **options: calls.append(options))
    for name, value in Running("int4", "x", "mine", False).environment({}).items():
        monkeypatch.setenv(name, value)
    running._in_this_process.cache_clear()
    running.install()
    running._in_this_process.cache_clear()
    assert calls == [{"cache": "int4", "prefix_store": None, "namespace": ""}]


# What happens in a process: with packages that stand for transformers and kvlayers, since these take seconds to import


STAND_INS = {
    "transformers/__init__.py": "",
    # Both import each other, as transformers' modules do.
    "transformers/modeling_utils.py": "import transformers.generation.utils\nPreTrainedModel = 1",
    "transformers/generation/__init__.py": "",
    "transformers/generation/utils.py": "import transformers.modeling_utils\nGenerationMixin = 1",
    "transformers/cli/__init__.py": "",
    "transformers/cli/serving/__init__.py": "",
    "transformers/cli/serving/server.py": "",
    "kvlayers/__init__.py": "",
    "kvlayers/core.py": "import transformers.modeling_utils\nCache = 1",
    "kvlayers/commands/__init__.py": "",
    "kvlayers/commands/running.py": """
def install():
    from kvlayers.core import Cache
    from transformers.generation.utils import GenerationMixin
    from transformers.modeling_utils import PreTrainedModel
    print("installed")

def change_the_server():
    print("server")
""",
}


def run_script(root: Path, script: str, **changed: str) -> "subprocess.CompletedProcess[str]":
    """Run a script beside the stand-ins, some of which are changed."""
    for name, text in {**STAND_INS, **changed}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    variables = Running(None, None, "", False).environment({**os.environ, "PYTHONPATH": str(root)})
    return subprocess.run(
        [sys.executable, "-c", script], env=variables, capture_output=True, text=True, check=False, cwd=root
    )


PROCESSES: dict[str, tuple[dict[str, str], str, list[str]]] = {
    "no models": ({}, "import sys, transformers; print('kvlayers' in sys.modules)", ["False"]),
    "models": ({}, "import transformers.modeling_utils; print('after')", ["installed", "after"]),
    "generate": ({}, "import transformers.generation.utils; print('after')", ["installed", "after"]),
    "kvlayers half imported before the models": ({}, "import kvlayers.core; print('after')", ["installed", "after"]),
    "a server behind the models": (
        *({}, "import transformers.modeling_utils, transformers.cli.serving.server"),
        ["installed", "server"],
    ),
    "a server before the models": (
        *({}, "import transformers.cli.serving.server, transformers.modeling_utils"),
        ["server", "installed"],
    ),
    "a process below": (
        *({}, "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import transformers.modeling_utils'])"),
        ["installed"],
    ),
    "a sitecustomize of somebody else": (
        {"sitecustomize.py": "print('mine', __name__)\nhere = 1"},
        "import sitecustomize, transformers.modeling_utils; print(sitecustomize.here)",
        ["mine sitecustomize", "installed", "1"],
    ),
}
"""What is changed in the stand-ins, the script, and the lines that it prints."""


@pytest.mark.parametrize("what", PROCESSES)
def test_a_process_installs_once_its_models_are_imported(what: str, tmp_path: Path) -> None:
    changed, script, lines = PROCESSES[what]
    done = run_script(tmp_path, script, **changed)
    assert (done.stdout.splitlines(), done.stderr, done.returncode) == (lines, "", 0)


def test_a_process_that_cannot_install_goes_on(tmp_path: Path) -> None:
    broken = {"kvlayers/core.py": "raise ImportError('no kvlayers here')"}
    script = "import transformers.modeling_utils, transformers.cli.serving.server; print('after')"
    done = run_script(tmp_path, script, **broken)
    said = "kvlayers run: this process goes on without kvlayers: no kvlayers here\n"
    assert (done.stdout, done.stderr, done.returncode) == ("after\n", said, 0)


REAL = """
import multiprocessing, sys
import kvlayers
kvlayers.DynamicCache  # kvlayers imports transformers' models, half imported itself
import torch, transformers

def ask():
    config = transformers.LlamaConfig(
        num_hidden_layers=1, hidden_size=32, intermediate_size=32, num_attention_heads=2, vocab_size=99,
        eos_token_id=None, pad_token_id=0,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    ids = torch.arange(1, 41)[None]
    for _ in range(2):
        output = model.generate(ids, max_new_tokens=4, return_dict_in_generate=True)
    print(type(output.to_tuple()[-1]).__name__, output.cached_tokens, flush=True)

if __name__ == "__main__":
    ask()
    worker = multiprocessing.get_context("spawn").Process(target=ask)
    worker.start()
    worker.join()
"""


@pytest.mark.nightly
def test_calls_of_a_script_and_of_its_workers_have_the_cache_and_the_store(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(REAL)
    command = [sys.executable, "-m", "kvlayers", "run", "--cache", "int4", "--prefix-store", "64MiB", "--"]
    done = subprocess.run(
        [*command, sys.executable, str(tmp_path / "script.py")],
        env={**os.environ, "PYTHONPATH": str(SOURCES)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.splitlines() == ["QuantizedCache (39,)"] * 2, done.stderr
