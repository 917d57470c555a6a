"""The commands: what they print, as a table and as JSON, and how they end."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf

import command_line
import kvlayers
from kvlayers.__main__ import make_app
from kvlayers.commands import commands
from kvlayers.utils.units import amount_of_bytes, tokens
from models import COMMON

CONFIG = tf.LlamaConfig(**COMMON, dtype="bfloat16")


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs a command. Nothing is asked of the hub."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("COLUMNS", "400")
    return command_line.run


@pytest.fixture
def model(tmp_path: Path) -> Path:
    CONFIG.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_the_table_of_a_plan_has_each_cache_and_what_to_use(run: Any, model: Path) -> None:
    result = run("plan", model, "--context", "4k", "--batch", 2, "--memory", "600 KiB")
    assert result.exit_code == 0, result.output
    plan = kvlayers.plan(CONFIG, 4096, 2, torch.bfloat16, 600 * 1024)
    assert "4096 tokens, batch 2, bfloat16, 600 KiB for the cache" in result.output
    rows = [line.split() for line in result.output.splitlines()]
    firsts = [group[0] for group in plan.groups()]
    start = next(place for place, row in enumerate(rows) if row and set(row[0]) == {"─"}) + 1
    lines = {row[0]: row for row in rows[start : start + len(firsts)]}
    assert list(lines) == [cache.name for cache in firsts]
    for cache in firsts:
        longest = "no end" if cache.longest_context is None else str(cache.longest_context)
        assert " ".join(lines[cache.name]).endswith(f" {cache.fidelity} {longest}")
    for note in plan.notes:
        assert note in result.output
    assert "gives the reasons" not in result.output


def test_the_context_may_be_the_second_argument(run: Any, model: Path) -> None:
    assert run("plan", model, "4k", "--json").stdout == run("plan", model, "--context", "4k", "--json").stdout
    for given, got in (((), "none"), (("4k", "--context", "8k"), "4k and 8k")):
        result = run("plan", model, *given)
        assert result.exit_code == 2
        assert f"`--context` must be given once, got {got}: write" in result.stderr


@pytest.mark.parametrize(
    ("given", "planned"),
    [
        (["dynamic, int4"], ["dynamic", "int4"]),
        (["sink:window_length=64,num_sink_tokens=2,int4"], ["sink:window_length=64,num_sink_tokens=2", "int4"]),
        (["quantized:nbits=[4,8],dynamic", "int8"], ["quantized:nbits=[4,8]", "dynamic", "int8"]),
    ],
)
def test_caches_are_separated_by_commas(run: Any, model: Path, given: list[str], planned: list[str]) -> None:
    options = [part for text in given for part in ("--cache", text)]
    said = json.loads(run("plan", model, "4k", *options, "--json").stdout)
    assert sorted(cache["name"] for cache in said["caches"]) == sorted(planned)


def test_a_plan_names_the_caches_that_a_model_cannot_have(run: Any, tmp_path: Path) -> None:
    tf.MistralConfig(**COMMON, sliding_window=64).save_pretrained(tmp_path)
    result = run("plan", tmp_path, "--context", "4k")
    assert result.exit_code == 0, result.output
    assert "--json gives the reasons): evicting, " in result.output


def test_the_table_has_each_cost_once_the_fewest_bytes_first_and_says_what_positions_lack(
    run: Any, model: Path
) -> None:
    result = run("plan", model, "--context", "4k")
    plan = kvlayers.plan(CONFIG, 4096)
    firsts = [group[0] for group in plan.groups()]
    assert sorted(cache.name for group in plan.groups() for cache in group) == [cache.name for cache in plan.caches]
    figures = [row[1:] for row in plan.rows()[1:]]
    assert len(set(figures)) == len(firsts) < len(plan.caches)
    assert [cache.device_bytes for cache in firsts] == sorted(cache.device_bytes for cache in firsts)
    assert {"dynamic", "int4", "sink"} <= {cache.name for cache in firsts}
    assert "int4 (quantized)" in result.output
    assert "the model has positions for 256 tokens, and 4096 are planned" in result.output
    assert "positions" not in run("plan", model, "--context", 256).output


@pytest.mark.parametrize("where", ["", "config.json"])
def test_the_json_of_a_plan_is_what_plan_returns(run: Any, model: Path, where: str) -> None:
    result = run("plan", model / where, "--context", 1000, "--dtype", "fp32", "--json")
    assert result.exit_code == 0, result.output
    said, plan = json.loads(result.stdout), kvlayers.plan(CONFIG, 1000, dtype=torch.float32)
    assert [(cache["name"], cache["nbytes"]) for cache in said["caches"]] == [
        (cache.name, cache.nbytes) for cache in plan.caches
    ]
    assert said["recommended"]["name"] == plan.recommended.name
    assert said["dtype"] == "float32"
    assert said["left_out"] == dict(plan.left_out)


def test_a_model_with_an_encoder_is_planned(run: Any, tmp_path: Path) -> None:
    tf.T5Config(num_layers=2).save_pretrained(tmp_path)
    result = run("plan", tmp_path, "--context", 100, "--encoder-length", "1k", "--cache", "dynamic", "--json")
    expected = kvlayers.plan(tf.T5Config(num_layers=2), 100, names=["dynamic"], encoder_length=1024)
    assert json.loads(result.stdout)["recommended"]["nbytes"] == expected.recommended.nbytes


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    cache = kvlayers.DynamicCache(config=CONFIG)
    states = torch.randn(3, 2, 5, 8)
    for index in range(CONFIG.num_hidden_layers):
        cache.update(states, states, index)
    kvlayers.save_cache(cache, tmp_path / "cache.kv", config=CONFIG)
    return tmp_path / "cache.kv"


def test_a_saved_cache_is_shown(run: Any, saved: Path) -> None:
    result = run("inspect", saved)
    assert result.exit_code == 0, result.output
    seen = kvlayers.inspect_cache(saved)
    assert f"{CONFIG.num_hidden_layers} x DynamicLayer" in result.output
    assert seen.checksum in result.output
    for words in ("tokens +5", "batch +3", "token ids +not in the file", r"bits +full precision +\n"):
        assert re.search(words, result.output)
    said = json.loads(run("inspect", saved, "--json").stdout)
    assert said["dtype"] == "float32"
    assert (said["length"], said["batch_size"], said["checksum"]) == (5, 3, seen.checksum)
    assert said["layers"] == list(seen.layers)
    assert seen.bits == (None,) * CONFIG.num_hidden_layers


def test_bits_and_backend_of_a_saved_cache_are_shown(run: Any, tmp_path: Path) -> None:
    mixed = kvlayers.QuantizedCache(config=CONFIG, key_nbits=[8, 4], value_nbits=[8, 2])
    for name, cache in (("mixed", mixed), ("fp8", kvlayers.QuantizedCache("fp8"))):
        for index in range(2):
            cache.update(torch.randn(1, 2, 5, 8), torch.randn(1, 2, 5, 8), index)
        kvlayers.save_cache(cache, tmp_path / name)
    assert re.search(
        r"bits +8 \(native\) in layer 0; 4 for keys, 2 for values \(native\) in layer 1 +\n",
        run("inspect", tmp_path / "mixed").output,
    )
    assert re.search(r"bits +8 \(fp8\) in layers 0 to 1 +\n", run("inspect", tmp_path / "fp8").output)
    said = json.loads(run("inspect", tmp_path / "mixed", "--json").stdout)
    assert (said["bits"], said["backends"]) == ([[8, 8], [4, 2]], ["native", "native"])


COMMANDS = ("plan", "inspect", "compile", "run", *commands.OF_THE_LAB)

HELP = """
import sys
from kvlayers.__main__ import make_app
for command in ("", "plan", "bench", "fidelity", "calibrate", "inspect", "lm-eval"):
    try:
        make_app()([*command.split(), "--help"])
    except SystemExit as end:
        assert not end.code
heavy = {"torch", "transformers", "numpy", "huggingface_hub", "safetensors"} & set(sys.modules)
assert not heavy, heavy
"""


def started_as_command(directory: Path, content: str) -> list[str]:
    """A script of the name that the command has once it is installed."""
    (directory / "kvlayers").write_text(content)
    return [sys.executable, str(directory / "kvlayers")]


@pytest.mark.parametrize("name", ["", *COMMANDS])
def test_help_on_a_narrow_terminal_cuts_no_name(name: str) -> None:
    group: Any = command_line.typer_main.get_command(make_app())
    assert {*COMMANDS} == {*group.commands}
    command = group.commands[name] if name else group
    shown = command_line.typer_testing.CliRunner().invoke(make_app(), [*name.split(), "--help"], env={"COLUMNS": "80"})
    assert shown.exit_code == 0
    assert all(len(line) <= 80 for line in shown.output.splitlines())
    assert "…" not in shown.output
    for option in command.params:
        assert all(written in shown.output for written in option.opts if written.startswith("--"))
        # Those of typer itself say `<bool>`.
        assert not getattr(option, "is_flag", False) or option.metavar == "" or "completion" in str(option.name)


def test_help_imports_nothing_that_takes_long(tmp_path: Path) -> None:
    subprocess.run(started_as_command(tmp_path, HELP), check=True, capture_output=True)


@pytest.mark.parametrize("how", ["script", "module"])
def test_a_transformers_that_is_not_supported_is_one_line_and_exit_code_2(tmp_path: Path, how: str) -> None:
    (tmp_path / "transformers-4.40.dist-info").mkdir()
    (tmp_path / "transformers-4.40.dist-info" / "METADATA").write_text("Name: transformers\nVersion: 4.40.0\n")
    script = started_as_command(tmp_path, "from kvlayers.__main__ import main; main()")
    command = script if how == "script" else [sys.executable, "-m", "kvlayers"]
    path = os.pathsep.join([str(tmp_path), str(Path(kvlayers.__file__).parents[1])])
    ran = subprocess.run(
        [*command, "plan", "x", "--context", "1k"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert ran.returncode == 2, ran.stderr
    assert ran.stderr.count("\n") == 1
    assert ran.stderr.startswith("kvlayers: transformers must be >=4.57, got 4.40.0: install")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["plan", "{model}", "--context", "32q"], "a number of tokens.*got '32q'"),
        (["plan", "{model}", "--context", "0"], "`--context` must be .*at least 1, got 0"),
        (["plan", "{model}", "--context", "1k", "--memory", "lots"], "a number of bytes.*got 'lots'"),
        (
            ["plan", "{model}", "--context", "1k", "--memory", "1kB"],
            r"`--memory` must be at least \d+\.\d KiB \(\d+ bytes\) for 1024 tokens.*1000 bytes",
        ),
        (["plan", "{model}", "--context", "1k", "--cache", "dinamic"], "did you mean 'dynamic'"),
        (["plan", "{model}", "--context", "1k", "--cache", "int5"], "`--cache` must .* 'quantized:nbits=5'"),
        (["plan", "{model}", "--context", "1k", "--encoder-length", "5"], "`--encoder-length` .*without an encoder"),
        (["plan", "no/model", "--context", "1k"], "directory, its config.json, or its name.*no/model"),
        (["plan", "{model}/..", "--context", "1k"], "`MODEL`: the directory .* has no config.json"),
        (["plan", "{other}", "--context", "1k"], "config.json, or its name"),
        (["inspect", "{other}"], "other.json"),
        (["inspect", "missing.kv"], "missing.kv"),
        (["inspect", "{model}"], "kvlayers plan MODEL"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    run: Any, model: Path, tmp_path: Path, arguments: list[str], words: str
) -> None:
    (tmp_path / "other.json").write_text('{"no": "model"}')
    result = run(*(argument.format(model=model, other=tmp_path / "other.json") for argument in arguments))
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1
    assert result.stderr.startswith(f"kvlayers {arguments[0]}: ")
    assert re.search(words, result.stderr)


def test_quantities_are_read_as_people_write_them() -> None:
    assert [tokens(text, "context") for text in ("17", "32k", "32K", "1M", "0.5k")] == [17, 2**15, 2**15, 2**20, 512]
    read = [amount_of_bytes(text, "memory") for text in ("5B", "24GiB", "24g", "80GB", "1.5 MiB", "10B", "1TiB")]
    assert read == [5, 24 * 2**30, 24 * 2**30, 80 * 10**9, 3 * 2**19, 10, 2**40]
    whole = amount_of_bytes(1e9, "memory")
    assert (whole, type(whole)) == (10**9, int)
    for number in (1.5, float("inf"), float("nan")):
        with pytest.raises(kvlayers.OptionError, match="`memory` must be a whole number"):
            kvlayers.plan(CONFIG, 1000, memory=number)  # type: ignore[arg-type]
    # Nobody can tell whether bytes or megabytes are meant.
    with pytest.raises(kvlayers.OptionError, match="memory` must be a number of bytes with its unit.*got '100'"):
        amount_of_bytes("100", "memory")
    for wrong in ("", "-1k", "k", "1 KiB of", "1e3", "0x10"):
        with pytest.raises(kvlayers.OptionError, match="--context` must be a number of tokens"):
            tokens(wrong, "--context")
        with pytest.raises(kvlayers.OptionError, match="memory` must be a number of bytes"):
            amount_of_bytes(wrong, "memory")
