"""The commands: what they print, as a table and as JSON, how they end, and those of other packages beside them."""

import importlib.metadata
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from fsspec.core import url_to_fs
from fsspec.implementations.memory import MemoryFileSystem

import command_line
import kvlayers
from backend_cases import filled, put
from command_line import check_refused, said
from kvlayers.__main__ import GROUP, make_app
from kvlayers.commands import commands
from kvlayers.utils.units import amount_of_bytes, tokens
from models import COMMON

CONFIG = tf.LlamaConfig(**COMMON, dtype="bfloat16")


@pytest.fixture(autouse=True)
def _wide_and_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is asked of the hub."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("COLUMNS", "400")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    CONFIG.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_the_table_of_a_plan_has_each_cache_and_what_to_use(model: Path) -> None:
    names = ["dynamic", "static", "int8", "int4", "quantized", "sink", "snapkv"]
    arguments = ("4k", "--batch", 2, "--memory", "600 KiB", "--cache", ",".join(names))
    output = command_line.run("plan", model, *arguments, code=0).output
    plan = kvlayers.plan(CONFIG, 4096, 2, torch.bfloat16, 600 * 1024, names=names)
    assert "4096 tokens, batch 2, bfloat16, 600 KiB for the cache" in output
    rows = [line.split() for line in output.splitlines()]
    firsts = [group[0] for group in plan.groups()]
    start = next(place for place, row in enumerate(rows) if row and set(row[0]) == {"─"}) + 1
    lines = {row[0]: row for row in rows[start : start + len(firsts)]}
    assert list(lines) == [cache.name for cache in firsts]
    for cache in firsts:
        longest = "no end" if cache.longest_context is None else str(cache.longest_context)
        assert " ".join(lines[cache.name]).endswith(f" {cache.fidelity} {longest}")
    for note in (*plan.notes, "int4 (quantized)", "the model has positions for 256 tokens, and 4096 are planned"):
        assert note in output
    assert "gives the reasons" not in output
    assert "positions" not in command_line.run("plan", model, "--context", 256).output


def test_a_plan_has_each_cost_once_the_fewest_bytes_first() -> None:
    plan = kvlayers.plan(CONFIG, 4096)
    assert sorted(cache.name for group in plan.groups() for cache in group) == [cache.name for cache in plan.caches]
    firsts = [group[0] for group in plan.groups()]
    assert len({row[1:] for row in plan.rows()[1:]}) == len(firsts) < len(plan.caches)
    assert [cache.device_bytes for cache in firsts] == sorted(cache.device_bytes for cache in firsts)


def test_the_context_may_be_the_second_argument(model: Path) -> None:
    assert said("plan", model, "4k") == said("plan", model, "--context", "4k")
    for given, got in (((), "none"), (("4k", "--context", "8k"), "4k and 8k")):
        check_refused(f"`--context` must be given once, got {got}: write", "plan", model, *given)


@pytest.mark.parametrize(
    ("given", "planned"),
    [
        (["dynamic, int4"], ["dynamic", "int4"]),
        (["sink:window_length=64,num_sink_tokens=2,int4"], ["sink:window_length=64,num_sink_tokens=2", "int4"]),
        (["quantized:nbits=[4,8],dynamic", "int8"], ["quantized:nbits=[4,8]", "dynamic", "int8"]),
    ],
)
def test_caches_are_separated_by_commas(model: Path, given: list[str], planned: list[str]) -> None:
    found = said("plan", model, "4k", *(part for text in given for part in ("--cache", text)))
    assert sorted(cache["name"] for cache in found["caches"]) == sorted(planned)


def test_a_plan_names_the_caches_that_a_model_cannot_have(tmp_path: Path) -> None:
    tf.MistralConfig(**COMMON, sliding_window=64).save_pretrained(tmp_path)
    assert "--json gives the reasons): evicting, " in command_line.run("plan", tmp_path, "4k", code=0).output


@pytest.mark.parametrize("where", ["", "config.json"])
def test_the_json_of_a_plan_is_what_plan_returns(model: Path, where: str) -> None:
    found = said("plan", model / where, "--context", 1000, "--dtype", "fp32")
    plan = kvlayers.plan(CONFIG, 1000, dtype=torch.float32)
    assert [(cache["name"], cache["nbytes"]) for cache in found["caches"]] == [
        (cache.name, cache.nbytes) for cache in plan.caches
    ]
    assert found["recommended"]["name"] == plan.recommended.name
    assert found["dtype"] == "float32"
    assert found["left_out"] == dict(plan.left_out)


def test_a_model_with_an_encoder_is_planned(tmp_path: Path) -> None:
    tf.T5Config(num_layers=2).save_pretrained(tmp_path)
    found = said("plan", tmp_path, "--context", 100, "--encoder-length", "1k", "--cache", "dynamic")
    expected = kvlayers.plan(tf.T5Config(num_layers=2), 100, names=["dynamic"], encoder_length=1024)
    assert found["recommended"]["nbytes"] == expected.recommended.nbytes


def saved(path: Path, cache: Any, batch: int = 1, **options: Any) -> Path:
    """A file of a cache with the states of five tokens."""
    for index in range(CONFIG.num_hidden_layers):
        cache.update(torch.randn(batch, 2, 5, 8), torch.randn(batch, 2, 5, 8), index)
    kvlayers.save_cache(cache, path, **options)
    return path


def test_a_saved_cache_is_shown(tmp_path: Path) -> None:
    file = saved(tmp_path / "cache.kv", kvlayers.DynamicCache(config=CONFIG), 3, config=CONFIG)
    output, seen = command_line.run("inspect", file, code=0).output, kvlayers.inspect_cache(file)
    assert f"{CONFIG.num_hidden_layers} x DynamicLayer" in output
    assert seen.checksum in output
    for words in ("tokens +5", "batch +3", "token ids +not in the file", r"bits +full precision +\n"):
        assert re.search(words, output)
    found = said("inspect", file)
    assert found["dtype"] == "float32"
    assert (found["length"], found["batch_size"], found["checksum"]) == (5, 3, seen.checksum)
    assert found["layers"] == list(seen.layers)
    assert seen.bits == (None,) * CONFIG.num_hidden_layers


def test_bits_and_backend_of_a_saved_cache_are_shown(tmp_path: Path) -> None:
    mixed = kvlayers.QuantizedCache(config=CONFIG, key_nbits=[8, 4], value_nbits=[8, 2])
    for cache, shown in (
        (kvlayers.QuantizedCache("fp8"), r"bits +8 \(fp8\) in layers 0 to 1 +\n"),
        (mixed, r"bits +8 \(native\) in layer 0; 4 for keys, 2 for values \(native\) in layer 1 +\n"),
    ):
        assert re.search(shown, command_line.run("inspect", saved(tmp_path / "cache.kv", cache)).output)
    found = said("inspect", tmp_path / "cache.kv")
    assert (found["bits"], found["backends"]) == ([[8, 8], [4, 2]], ["native", "native"])


# The directory of a prefix store

DOCUMENT = list(range(1, 301))


@pytest.fixture(params=["local", "memory"])
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    MemoryFileSystem.store.clear()
    place = str(tmp_path / "store") if request.param == "local" else "memory://bucket/store"
    store = kvlayers.PrefixStore(2**30, place)
    for question in range(3):
        ids = [*DOCUMENT, 500 + question, 7, 7]
        put(store, ids, filled(ids, heads=64))
    put(store, [1, 2, 9], namespace="x")
    return place


def test_what_a_directory_holds_is_drawn(directory: str) -> None:
    lines = command_line.run("inspect", directory, code=0).stdout.splitlines()
    assert lines[0].strip() == directory
    assert lines[1].startswith("4 entries, 312 tokens, ")
    drawn = "\n".join(lines)
    # Each label is a digest.
    assert len(re.findall(r"^[├└]── model and namespace [0-9a-f]{12} *$", drawn, re.MULTILINE)) == 2
    assert re.search(r"300 tokens, \d+ KiB, shared", drawn)
    assert len(re.findall(r"    [├└]── 3 tokens, [\d.]+ (?:KiB|B), used \d+ s ago", drawn)) == 4


def test_the_json_says_what_a_directory_holds(directory: str) -> None:
    found = said("inspect", directory)
    nodes = found["nodes"]
    assert (found["entries"], found["tokens"], sum(node["tokens"] for node in nodes)) == (4, 312, 312)
    assert found["nbytes"] == sum(node["nbytes"] for node in nodes) < found["unshared_nbytes"]
    assert (found["unreferenced_blocks"], found["problems"]) == ([], [])
    document = next(number for number, node in enumerate(nodes) if node["tokens"] == 300)
    assert not nodes[document]["is_entry"]
    below = [node for node in nodes if node["parent"] == document]
    assert [(node["tokens"], node["is_entry"]) for node in below] == [(3, True)] * 3
    assert sum(node["parent"] is None for node in nodes) == 2


def test_files_behind_a_missing_one_are_named(directory: str) -> None:
    before, (fs, place) = said("inspect", directory), url_to_fs(directory)
    sizes = {path: fs.size(path) for path in fs.find(place) if path.endswith(".safetensors")}
    # The first tokens of the document.
    root = max(sizes, key=lambda path: sizes[path])
    fs.rm_file(root)
    found = said("inspect", directory, code=1)
    assert found["entries"] == 1
    (problem,) = found["problems"]
    assert root.rpartition("/")[2] in problem
    assert "is missing: the tokens behind it are in other files" in problem
    assert len(found["unreferenced_blocks"]) == 3
    kept = found["nbytes"] + sum(block["nbytes"] for block in found["unreferenced_blocks"])
    assert before["nbytes"] - kept == sizes[root]
    shown = command_line.run("inspect", directory).output
    assert re.search(r"No entry refers to 3 blocks \([\d.]+ KiB\)", shown)


def test_damaged_entries_do_not_hide_the_others(tmp_path: Path) -> None:
    put(kvlayers.PrefixStore(2**30, tmp_path), [1, 2, 3])
    (tmp_path / f"{'0' * 64}.safetensors").write_bytes(b"damaged")
    output = command_line.run("inspect", tmp_path, code=1).output
    assert "1 entry, 3 tokens" in output
    assert f"{'0' * 64}.safetensors" in output


def test_nothing_is_made_and_nothing_is_written(directory: str, tmp_path: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    command_line.run("inspect", directory)
    for place in (tmp_path / "nowhere", "memory://nowhere/at/all"):
        check_refused("nowhere", "inspect", place)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ("{empty}", "has no entries of a prefix store"),
        ("nowhere://host/x", "scheme that fsspec knows"),
        ("redis://me:hunter2@127.0.0.1:1/0", r"cannot reach redis://\*\*\*@127.0.0.1:1/0"),
    ],
)
def test_a_place_that_is_no_directory_of_a_store_is_one_line(tmp_path: Path, place: str, words: str) -> None:
    pytest.importorskip("redis")
    kvlayers.save_cache(filled([1, 2]), tmp_path / "mine.safetensors", token_ids=torch.tensor([[1, 2]]))
    check_refused(f"^(?!.*hunter2).*{words}", "inspect", place.format(empty=tmp_path))


# Help, and what is refused

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
    assert (ran.returncode, ran.stderr.count("\n")) == (2, 1), ran.stderr
    assert ran.stderr.startswith("kvlayers: transformers must be >=4.57, got 4.40.0: install")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["plan", "{model}", "--context", "32q"], "a number of tokens.*got '32q'"),
        (["plan", "{model}", "--context", "0"], "`--context` must be .*at least 1, got 0"),
        (["plan", "{model}", "--context", "9" * 400], "more than any machine has"),
        (["plan", "{model}", "--context", "1k", "--memory", "9" * 400 + "GiB"], "more than any machine has"),
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
def test_bad_input_is_one_line_and_exit_code_2(model: Path, tmp_path: Path, arguments: list[str], words: str) -> None:
    (tmp_path / "other.json").write_text('{"no": "model"}')
    check_refused(words, *(each.format(model=model, other=tmp_path / "other.json") for each in arguments))


NO_QUANTITIES = ("", "-1k", "k", "1 KiB of", "1e3", "0x10")


def test_quantities_are_read_as_people_write_them() -> None:
    assert [tokens(text, "context") for text in ("17", "32k", "32K", "1M", "0.5k")] == [17, 2**15, 2**15, 2**20, 512]
    read = [amount_of_bytes(text, "memory") for text in ("5B", "24GiB", "24g", "80GB", "1.5 MiB", "10B", "1TiB", 1e9)]
    assert read == [5, 24 * 2**30, 24 * 2**30, 80 * 10**9, 3 * 2**19, 10, 2**40, 10**9]
    assert type(read[-1]) is int


@pytest.mark.parametrize(
    ("read", "written", "words"),
    [
        # Nobody can tell whether bytes or megabytes are meant.
        (amount_of_bytes, "100", "`` must be a number of bytes with its unit.*got '100'"),
        *((amount_of_bytes, wrong, "`` must be a number of bytes") for wrong in NO_QUANTITIES),
        *((tokens, wrong, "`` must be a number of tokens") for wrong in NO_QUANTITIES),
    ],
)
def test_what_is_no_quantity(read: Callable[[str, str], int], written: str, words: str) -> None:
    with pytest.raises(kvlayers.OptionError, match=words):
        read(written, "")


# Commands of other packages


def with_entry_points(monkeypatch: pytest.MonkeyPatch, **values: str) -> None:
    points = [importlib.metadata.EntryPoint(name, value, GROUP) for name, value in values.items()]
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: points if group == GROUP else [])


ADDITIONS = """
def fail(app): raise ValueError("a line\\nand another")
def silent(app): raise RuntimeError
def greet(app): app.command("greet")(lambda: print("hello"))
"""


def test_the_commands_of_the_lab_are_there() -> None:
    shown = command_line.run("--help").output
    assert all(re.search(rf"^│ {name} ", shown, re.M) for name in commands.OF_THE_LAB)
    assert "kvlayers-lab" not in shown


@pytest.mark.parametrize("arguments", [(), ("--help",), ("some", "--steps", "3", "-x")])
@pytest.mark.parametrize("name", commands.OF_THE_LAB)
def test_a_command_of_the_lab_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch, name: str, arguments: tuple[str, ...]
) -> None:
    with_entry_points(monkeypatch)
    words = r"this command is in the package kvlayers-lab: pip install \./lab \(in a checkout of kvlayers\)\n$"
    check_refused(words, name, *arguments)


def test_help_without_the_lab_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with_entry_points(monkeypatch)
    shown = command_line.run("--help").output
    assert not any(re.search(rf"^│ {name} ", shown, re.M) for name in commands.OF_THE_LAB)
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
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], value: str, reason: str
) -> None:
    (tmp_path / "additions.py").write_text(ADDITIONS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "additions", raising=False)
    with_entry_points(monkeypatch, broken=value, whole="additions:greet")
    assert command_line.run("greet").stdout == "hello\n"
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"kvlayers: the commands of {value} are not there: ")
    assert reason in line
