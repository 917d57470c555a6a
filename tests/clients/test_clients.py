"""The example of each client in docs/ecosystem.md, with the real package: what it prints, and which tokens it computes.

`nox -s clients` installs the packages, those that want another transformers in an environment of their own.
"""

import ast
import contextlib
import functools
import importlib.metadata
import io
import json
import os
import pathlib
import re
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch

import kvlayers
from kvlayers import PrefixStore

ROOT = pathlib.Path(__file__).parents[2]
PAGE = ROOT / "docs" / "ecosystem.md"
MODEL = pathlib.Path(os.environ.get("KVLAYERS_DEMO_MODEL", ROOT / ".models" / "SmolLM2-135M-Instruct"))
MODEL_OF_PAGES = "HuggingFaceTB/SmolLM2-135M-Instruct"
WITH_A_NAME = (
    ("do_sample=False", 'do_sample=False, cache_implementation="int4"'),
    ('"do_sample": False', '"do_sample": False, "cache_implementation": "int4"'),
)
"""How the name of a cache comes beside another option of `generate()`."""


class Client(NamedTuple):
    """A client, its example, and what the table of the page says of it."""

    package: str
    code: str
    version: str
    transformers: str
    tokens: str
    place: str


def clients() -> Iterator[Client]:
    page = PAGE.read_text()
    for section in page.split("\n### ")[1:]:
        heading = section.partition("\n")[0]
        found = re.search(r"```python title=\"(.*?)\"\n(.*?)```", section, flags=re.DOTALL)
        if found is not None:
            (row,) = re.findall(rf"^\| \[.*?\]\(#{anchor(heading)}\)[^|]*\|(.*)\|$", page, flags=re.MULTILINE)
            yield Client(*found.groups(), *(cell.strip() for cell in row.split("|")))


def anchor(heading: str) -> str:
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


CLIENTS = {client.package: client for client in clients()}
BY_A_SERVER = ("dspy",)
IN_THIS_PROCESS = sorted(CLIENTS.keys() - set(BY_A_SERVER))


def installed_client(package: str) -> Client:
    """The client, or a skip if this is not the environment that the table says."""
    client = CLIENTS[package]
    wanted = {package: client.version, "transformers": client.transformers}
    for each, version in wanted.items():
        try:
            here = importlib.metadata.version(each)
        except importlib.metadata.PackageNotFoundError:
            here = "none"
        if here != version:
            pytest.skip(f"this needs {each} {version}, and {here} is installed: nox -s clients brings it")
    return client


class Run(NamedTuple):
    """What an example printed, the prompt tokens that the model computed, and its names."""

    printed: str
    tokens: int
    names: dict[str, Any]


@functools.cache
def model_in_float32() -> str:
    """The demo model, so loaded that its answers do not depend on how products of other shapes round."""
    folder = pathlib.Path(tempfile.mkdtemp())
    for file in MODEL.iterdir():
        (folder / file.name).symlink_to(file.resolve())
    config = json.loads((MODEL / "config.json").read_text())
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps({**config, "dtype": "float32"}))
    return str(folder)


def run(client: Client) -> Run:
    """Run an example as a reader would, behind the names that all examples share."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    (shared,) = (block for block in blocks if block.startswith("NAME ="))
    names: dict[str, Any] = {"__name__": "__main__"}
    tokens: list[int] = []

    embedding = torch.nn.functional.embedding

    def count(ids: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        # Steps of a decode loop have one column.
        if not torch.is_grad_enabled() and ids.shape[-1] > 1:
            tokens.append(ids.numel())
        return embedding(ids, *args, **options)

    torch.manual_seed(0)
    printed = io.StringIO()
    # No hook of modules, on which states may depend, so that no store would serve the model.
    with mock.patch.object(torch.nn.functional, "embedding", count), contextlib.redirect_stdout(printed):
        exec(shared.replace(MODEL_OF_PAGES, model_in_float32()), names)
        exec(compile(client.code, client.package, "exec"), names)
    # What a trainer says of its speed is never the same.
    lines = [line for line in printed.getvalue().splitlines() if not line.startswith("{")]
    return Run("\n".join(lines), sum(tokens), names)


@contextlib.contextmanager
def everywhere(store: PrefixStore | None = None, **options: Any) -> Iterator[None]:
    """kvlayers in every thread, as some clients generate in threads of their own."""
    kvlayers.install(prefix_store=store, **options)
    try:
        yield
    finally:
        kvlayers.uninstall()


pytestmark = [
    pytest.mark.nightly,
    pytest.mark.slow,
    pytest.mark.skipif(not MODEL.is_dir(), reason=f"no model at {MODEL}: `make test` brings it"),
]


def test_the_session_of_nox_installs_what_the_table_says() -> None:
    # Read as text, since nox is in no environment of its own sessions.
    (listed,) = re.findall(r"^CLIENTS = ({.*?^})", (ROOT / "noxfile.py").read_text(), flags=re.DOTALL | re.MULTILINE)
    for client in CLIENTS.values():
        installed = (*ast.literal_eval(listed)[client.transformers], f"transformers=={client.transformers}")
        assert f"{client.package}=={client.version}" in installed


@pytest.mark.parametrize("package", IN_THIS_PROCESS)
def test_a_client_prints_the_same_and_computes_less(
    package: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, store = installed_client(package), PrefixStore(2**30)
    monkeypatch.chdir(tmp_path)
    plain = run(client)
    with everywhere():
        installed = run(client)
    with everywhere(store):
        stored = run(client)
    assert plain.printed.strip()
    assert installed.printed == stored.printed == plain.printed
    assert client.tokens == f"{plain.tokens} → {stored.tokens}"
    assert (stored.tokens < installed.tokens) == (store.statistics.hits > 0)


@pytest.mark.parametrize("package", [package for package in IN_THIS_PROCESS if package not in ("kvpress", "trl")])
def test_a_client_takes_the_name_of_a_cache(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    client, made = installed_client(package), []
    code = client.code
    for old, new in WITH_A_NAME:
        code = code.replace(old, new)
    has_no_place = client.place == 'nowhere: `install(cache="int4")`'
    init = kvlayers.QuantizedCache.__init__

    def note(cache: kvlayers.QuantizedCache, *args: Any, **options: Any) -> None:
        init(cache, *args, **options)
        made.append(cache.get_seq_length())

    monkeypatch.setattr(kvlayers.QuantizedCache, "__init__", note)
    with everywhere(**({"cache": "int4"} if has_no_place else {})):
        assert run(client if has_no_place else client._replace(code=code)).printed.strip()
    assert made


def test_a_store_that_does_not_look_at_weights_serves_those_on_disk() -> None:
    client, store = installed_client("accelerate"), PrefixStore(2**30)
    store.forget_weights()
    plain = run(client)
    with everywhere(store):
        stored = run(client)
    assert stored.printed == plain.printed
    assert stored.tokens < plain.tokens


def test_mellea_empties_the_caches_that_it_drops() -> None:
    client = installed_client("mellea")
    imports = "from mellea.backends import cache, huggingface\n"
    kept = "cache=cache.SimpleLRUCache(1, on_evict=huggingface._cleanup_kv_cache)"
    changed = client._replace(code=imports + client.code.replace("LocalHFBackend(NAME", f"LocalHFBackend(NAME, {kept}"))
    plain = run(changed)
    with everywhere():
        assert run(changed).printed == plain.printed


@contextlib.contextmanager
def served(*before: str) -> Iterator[str]:
    """A running `transformers serve`, behind the start of its command: its address."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    script = "from transformers.cli.transformers import main; main()"
    command = [*before, sys.executable, "-c", script, "serve", str(MODEL), "--port", address.partition(":")[2]]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while process.poll() is None:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"http://{address}/health")
                break
            time.sleep(0.2)
        yield address
    finally:
        process.terminate()
        process.wait()


@pytest.mark.parametrize("package", BY_A_SERVER)
def test_a_client_of_a_server_prints_the_same_and_finds_its_prompts(package: str) -> None:
    client, found = installed_client(package), []
    for before in ((), (sys.executable, "-m", "kvlayers", "run", "--prefix-store", "1GiB", "--")):
        with served(*before) as address:
            made = run(client._replace(code=client.code.replace("localhost:8000", address)))
        usages = [call["usage"] for call in made.names["model"].history]
        details = [usage["prompt_tokens_details"] or {"cached_tokens": 0} for usage in usages]
        asked = sum(usage["prompt_tokens"] for usage in usages)
        found.append((made.printed, asked - sum(detail["cached_tokens"] for detail in details)))
    (plain, computed), (stored, rest) = found
    assert plain == stored
    assert client.tokens == f"{computed} → {rest}"


def test_rollouts_of_equal_rows_are_computed_once(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    client = installed_client("trl")
    monkeypatch.chdir(tmp_path)
    plain = run(client)
    with everywhere():
        shared = run(client)
    assert shared.printed == plain.printed
    assert shared.tokens * 8 == plain.tokens
    one, other = (each.names["trainer"] for each in (plain, shared))
    for log, same in zip(one.state.log_history, other.state.log_history, strict=True):
        assert all(log[name] == same[name] for name in ("loss", "grad_norm", "reward") if name in log)
    for weight, same_weight in zip(one.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(weight, same_weight)
