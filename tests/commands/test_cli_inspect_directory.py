"""The command `kvlayers inspect` on the directory of a prefix store."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from fsspec.core import url_to_fs
from fsspec.implementations.memory import MemoryFileSystem

import command_line
import kvlayers
from backend_cases import filled, put
from kvlayers import PrefixStore

DOCUMENT = list(range(1, 301))
QUESTIONS = [[*DOCUMENT, 500 + question, 7, 7] for question in range(3)]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("COLUMNS", "200")
    return command_line.run


@pytest.fixture(params=["local", "memory"])
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    MemoryFileSystem.store.clear()
    place = str(tmp_path / "store") if request.param == "local" else "memory://bucket/store"
    store = PrefixStore(2**30, place)
    for ids in QUESTIONS:
        put(store, ids, filled(ids, heads=64))
    put(store, [1, 2, 9], namespace="x")
    return place


def test_what_a_directory_holds_is_drawn(run: Any, directory: str) -> None:
    result = run("inspect", directory)
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0].strip() == directory
    assert lines[1].startswith("4 entries, 312 tokens, ")
    # Each label is a digest.
    tops = [
        number for number, line in enumerate(lines) if re.search(r"^[├└]── model and namespace [0-9a-f]{12} *$", line)
    ]
    assert len(tops) == 2
    drawn = "\n".join(lines)
    assert re.search(r"300 tokens, \d+ KiB, shared", drawn)
    assert len(re.findall(r"    [├└]── 3 tokens, [\d.]+ (?:KiB|B), used \d+ s ago", drawn)) == 4


def test_the_json_says_the_same(run: Any, directory: str) -> None:
    result = run("inspect", directory, "--json")
    assert result.exit_code == 0, result.output
    said = json.loads(result.stdout)
    nodes = said["nodes"]
    assert (said["entries"], said["tokens"], sum(node["tokens"] for node in nodes)) == (4, 312, 312)
    assert said["nbytes"] == sum(node["nbytes"] for node in nodes) < said["unshared_nbytes"]
    assert (said["unreferenced_blocks"], said["problems"]) == ([], [])
    document = next(number for number, node in enumerate(nodes) if node["tokens"] == 300)
    assert not nodes[document]["is_entry"]
    below = [node for node in nodes if node["parent"] == document]
    assert [(node["tokens"], node["is_entry"]) for node in below] == [(3, True)] * 3
    assert sum(node["parent"] is None for node in nodes) == 2


def test_files_behind_a_missing_one_are_named(run: Any, directory: str) -> None:
    before = json.loads(run("inspect", directory, "--json").stdout)
    fs, place = url_to_fs(directory)
    sizes = {path: fs.size(path) for path in fs.find(place) if path.endswith(".safetensors")}
    # The first tokens of the document.
    root = max(sizes, key=lambda path: sizes[path])
    fs.rm_file(root)
    result = run("inspect", directory, "--json")
    assert result.exit_code == 1
    said = json.loads(result.stdout)
    assert said["entries"] == 1
    (problem,) = said["problems"]
    assert root.rpartition("/")[2] in problem
    assert "is missing: the tokens behind it are in other files" in problem
    assert len(said["unreferenced_blocks"]) == 3
    kept = said["nbytes"] + sum(block["nbytes"] for block in said["unreferenced_blocks"])
    assert before["nbytes"] - kept == sizes[root]
    assert re.search(r"No entry refers to 3 blocks \([\d.]+ KiB\)", run("inspect", directory).output)


def test_damaged_entries_do_not_hide_the_others(run: Any, tmp_path: Path) -> None:
    store = PrefixStore(2**30, tmp_path)
    put(store, [1, 2, 3])
    (tmp_path / f"{'0' * 64}.safetensors").write_bytes(b"damaged")
    result = run("inspect", tmp_path)
    assert result.exit_code == 1
    assert "1 entry, 3 tokens" in result.output
    assert f"{'0' * 64}.safetensors" in result.output


def test_nothing_is_made_and_nothing_is_written(run: Any, directory: str, tmp_path: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    run("inspect", directory)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before
    for place in (tmp_path / "nowhere", "memory://nowhere/at/all"):
        result = run("inspect", place)
        assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ("{empty}", "has no entries of a prefix store"),
        ("nowhere://host/x", "scheme that fsspec knows"),
        ("redis://me:hunter2@127.0.0.1:1/0", r"cannot reach redis://\*\*\*@127.0.0.1:1/0"),
    ],
)
def test_a_place_that_is_no_directory_of_a_store_is_one_line(run: Any, tmp_path: Path, place: str, words: str) -> None:
    pytest.importorskip("redis")
    kvlayers.save_cache(filled([1, 2]), tmp_path / "mine.safetensors", token_ids=torch.tensor([[1, 2]]))
    result = run("inspect", place.format(empty=tmp_path))
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert re.search(words, result.stderr)
    assert "hunter2" not in result.output
