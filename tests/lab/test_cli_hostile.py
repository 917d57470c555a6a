"""Commands on models, files and numbers that are none: one line, the exit code 2, and nothing left behind."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.version import Version

import command_line
import versions
from matrix import once
from model_directories import save_with_tokenizer
from models import fresh_model

pytestmark = pytest.mark.usefixtures("text_directory")

COMMANDS = {
    "bench": ("--lengths", "16", "--steps", "2", "--trials", "1", "--cache", "dynamic"),
    "fidelity": ("--context", "64", "--scored", "8", "--passages", "1", "--chunk", "8", "--bits", "4"),
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_with_tokenizer(tmp_path_factory.mktemp("models") / "llama", fresh_model("llama"))


def run(command: str, *arguments: object) -> Any:
    usual = ("--text", "text.txt", *COMMANDS[command]) if command in COMMANDS else ()
    return command_line.run(command, *arguments, *usual)


def check_refused(result: Any, command: str, words: str = "") -> None:
    assert result.exit_code == 2, (result.output, result.exception)
    # Behind the bars of what was loaded before.
    last = result.stderr.splitlines()[-1]
    assert last.startswith(f"kvlayers {command}: "), result.stderr
    assert words in last
    assert "Traceback" not in result.output
    assert not result.stdout.strip().startswith("{")


def changed(**fields: Any) -> Callable[[Path], None]:
    """What makes a model's config say something else."""

    def change(model: Path) -> None:
        config = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps({**config, **fields}))

    return change


def text_of(name: str, content: bytes) -> Callable[[Path], None]:
    """What replaces a file of a model."""
    return lambda model: (model / name).write_bytes(content) and None


BROKEN: dict[str, Callable[[Path], None]] = {
    "a config that is a list": text_of("config.json", b"[1, 2]"),
    "a config of another kind of model": changed(model_type="zzz"),
    "code of its own": changed(model_type="zzz", auto_map={"AutoConfig": "x.X", "AutoModelForCausalLM": "x.Y"}),
    "weights of other shapes": changed(hidden_size=64),
    "layers that are a word": changed(num_hidden_layers="two"),
    "no heads": changed(num_attention_heads=0),
    "weights that are none": text_of("model.safetensors", b"\xff" * 300),
    "a tokenizer that is empty": text_of("tokenizer.json", b"{}"),
}


# Both commands find and load a model in the same way.
@pytest.mark.parametrize(("command", "broken"), once(COMMANDS, BROKEN))
def test_a_model_that_cannot_be_loaded(llama: Path, tmp_path: Path, command: str, broken: str) -> None:
    model = shutil.copytree(llama, tmp_path / "model")
    BROKEN[broken](model)
    # Before 5.0, configs of transformers do not check what they hold.
    said = broken == "layers that are a word" and Version("5.1") > versions.TRANSFORMERS
    check_refused(run(command, model, "--json"), command, "describes its layers" if said else "model cannot be loaded")


@pytest.mark.parametrize("broken", ["a config that is a list", "code of its own", "layers that are a word"])
def test_a_config_that_cannot_be_planned(llama: Path, tmp_path: Path, broken: str) -> None:
    model = shutil.copytree(llama, tmp_path / "model")
    BROKEN[broken](model)
    check_refused(run("plan", model, "--context", "1k", "--json"), "plan")


@pytest.mark.parametrize("command", COMMANDS)
def test_a_tokenizer_of_another_model(tmp_path: Path, command: str) -> None:
    model = save_with_tokenizer(tmp_path / "model", fresh_model("llama", vocab_size=40))
    check_refused(run(command, model), command, "token ids from 0 to 39")


def test_a_model_that_cannot_read(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any, **options: Any) -> None:
        raise RuntimeError("out of something\nand more of it")

    monkeypatch.setattr("transformers.LlamaForCausalLM.forward", fail)
    check_refused(run("fidelity", llama), "fidelity", "RuntimeError (out of something)")


@pytest.mark.parametrize("arguments", [("--context", "9" * 400), ("--context", "1k", "--memory", "9" * 400 + "GiB")])
def test_numbers_beyond_all_machines(llama: Path, arguments: tuple[str, ...]) -> None:
    check_refused(run("plan", llama, *arguments), "plan", "more than any machine has")


def test_a_link_that_leads_to_no_file_yet_stays_one(llama: Path, tmp_path: Path) -> None:
    link, target = tmp_path / "link.html", tmp_path / "target.html"
    link.symlink_to(target)
    check_refused(run("bench", llama, "--report", link, "--device", "meta"), "bench")
    assert link.is_symlink()
    assert not target.exists()
    assert run("bench", llama, "--report", link).exit_code == 0
    assert "</html>" in target.read_text()


def test_names_that_are_no_utf_8(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "\udcff.html"
    monkeypatch.setattr("sys.argv", ["kvlayers", "bench", "--report", name])
    result = run("bench", llama, "--report", name)
    assert result.exit_code == 0, result.output
    assert r"\udcff.html" in result.output
    assert r"\udcff.html" in (tmp_path / name).read_text()


@pytest.mark.parametrize("command", COMMANDS)
def test_a_model_whose_logits_are_nan_is_measured_and_fails(tmp_path: Path, command: str) -> None:
    made = fresh_model("llama")
    with torch.no_grad():
        made.lm_head.weight.fill_(torch.nan)
    result = run(command, save_with_tokenizer(tmp_path / "model", made), "--json")
    assert result.exit_code == 1
    assert "NaN" not in result.stdout
    json.loads(result.stdout)
