"""The way of a token through the package: which calls one update makes, and how wide the contracts are.

Ceilings go down with the code, and up only for a reason that the same commit gives.
"""

import collections
import contextlib
import functools
import importlib
import pathlib
import re
import sys
from collections.abc import Callable, Iterator
from types import FrameType

import pytest
import torch
import transformers

import fresh_process
import kvlayers
import versions

PACKAGE = pathlib.Path(kvlayers.__file__).parent
ROOT = pathlib.Path(__file__).parents[2]
DRAWN = re.compile(r"`(\w+\.)?(\w+)`, \*([\w/]+\.py)\*")
CONFIG = transformers.LlamaConfig(
    hidden_size=128, num_attention_heads=2, num_key_value_heads=2, num_hidden_layers=2, max_position_embeddings=4096
)
CACHES: dict[str, Callable[[], kvlayers.Cache]] = {
    "dense": lambda: kvlayers.DynamicCache(config=CONFIG),
    "packed": lambda: kvlayers.QuantizedCache(config=CONFIG, nbits=4, residual_length=16),
    "sinks": lambda: kvlayers.SinkCache(config=CONFIG, window_length=32, num_sink_tokens=4),
    "static": lambda: kvlayers.StaticCache(config=CONFIG, max_cache_len=256),
    # Heads of different lengths.
    "evicting": lambda: kvlayers.EvictingCache(CONFIG, budget=32, recent_tokens=16),
}
MOST_CALLS = {
    "dense": ((12, 5), (8, 4)),
    "packed": ((17, 9), (13, 8)),
    "sinks": ((40, 9), (37, 8)),
    "static": ((42, 8), (37, 8)),
    "evicting": ((42, 14), (39, 13)),
}
"""Most calls, and most files that they are in: at the first layer, where a token begins a forward pass, and at any
later one, where nothing is asked about the pass."""

MOST_MEMBERS = {kvlayers.DynamicLayer: 84, kvlayers.DynamicCache: 98, kvlayers.stores.DenseStore: 65}
"""Most public members of a class, inherited ones counted."""

MOST_MODULES = 75
"""Most modules of the package, packages included, that are imported for a `DynamicCache`."""


def states(tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(1, 2, tokens, 64), torch.randn(1, 2, tokens, 64)


@contextlib.contextmanager
def calls_noted() -> Iterator[list[tuple[str, str]]]:
    """The file and the name of each function of the package that is called within this block."""
    found: list[tuple[str, str]] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(str(PACKAGE)):
            found.append((pathlib.Path(code.co_filename).relative_to(PACKAGE).as_posix(), code.co_name))

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        yield found
    finally:
        sys.setprofile(before)


@torch.no_grad()
def calls_of_one_token(
    cache: kvlayers.Cache, layer_idx: int, prompt: int, then: Callable[..., object] = lambda *returned: None
) -> list[tuple[str, str]]:
    """The calls of one update after some tokens, and those of what is then done with the states that it returns."""
    for tokens in (prompt, 1, 1, 1):
        for index in range(2):
            cache.update(*states(tokens), index)
    for index in range(layer_idx):
        cache.update(*states(1), index)
    new = states(1)
    with calls_noted() as found:
        then(*cache.update(*new, layer_idx))
    return found


@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize("layer_idx", [0, 1], ids=["first", "later"])
def test_an_update_makes_no_more_calls_than_it_did(kind: str, layer_idx: int) -> None:
    # So many that blocks are packed, or so few that no kernel is chosen by their number.
    calls = calls_of_one_token(CACHES[kind](), layer_idx, 200 if kind == "packed" else 60)
    files = {file for file, _ in calls}
    most_calls, most_files = MOST_CALLS[kind][layer_idx]
    assert len(calls) <= most_calls, collections.Counter(calls)
    assert len(files) <= most_files, files


def test_a_dense_token_takes_the_way_that_the_core_draws() -> None:
    calls = calls_of_one_token(CACHES["dense"](), 1, 60)
    drawn = [
        ("core/cache.py", "update"),
        ("core/token_layer.py", "update"),
        ("core/dense_store.py", "take_in"),
        ("core/dense_store.py", "append_one"),
        ("core/buffer.py", "view"),
    ]
    assert list(dict.fromkeys(calls)) == drawn
    page = (PACKAGE / "core" / "README.md").read_text()
    assert all(pathlib.Path(file).name in page and name in page for file, name in drawn[:-1])


def drawn_columns() -> dict[str, list[tuple[str, str, str]]]:
    """By heading, the functions of each column of the table in docs/design.md: file, class or nothing, and name.

    Drawn is what stands in front of its file: "`Class.function`, *room/file.py*". "the same" is the cell on the left.
    """
    page = (ROOT / "docs" / "design.md").read_text()
    table = page.partition("### The way of a token")[2].partition("### ")[0]
    head, _, *rows = (
        [cell.strip() for cell in line.strip("| ").split("|")] for line in table.splitlines() if "|" in line
    )
    columns: dict[str, list[tuple[str, str, str]]] = {heading: [] for heading in head[-3:]}
    for first, *cells in rows:
        drawn: list[tuple[str, str, str]] = []
        for heading, cell in zip(columns, cells, strict=True):
            if not cell.startswith("the same"):
                drawn = [(file, owner, name) for owner, name, file in DRAWN.findall(cell)]
            columns[heading] += [(file, owner, name) for owner, name, file in DRAWN.findall(first)] + drawn
    return columns


@pytest.mark.parametrize(
    ("heading", "kind"), {"full precision": "dense", "quantized": "packed", "static": "static"}.items()
)
def test_a_token_takes_the_way_that_the_table_draws(heading: str, kind: str) -> None:
    attention = functools.partial(
        torch.nn.functional.scaled_dot_product_attention, torch.randn(1, 4, 1, 64), enable_gqa=True
    )
    drawn = drawn_columns()[heading]
    # The update, the layer, the store, what it returns, and who reads that.
    assert len(drawn) >= 5
    calls = iter(calls_of_one_token(CACHES[kind](), 1, 200, attention))
    for file, owner, name in drawn:
        assert (file, name) in calls, f"{file}: {name} is not called after those that are drawn before it"
        if owner:
            module = importlib.import_module(f"kvlayers.{file.removesuffix('.py').replace('/', '.')}")
            assert name in vars(getattr(module, owner[:-1])), f"{owner}{name} is not in {file}"


@pytest.mark.parametrize("contract", MOST_MEMBERS, ids=lambda contract: contract.__name__)
def test_no_contract_is_wider_than_it_was(contract: type) -> None:
    versions.need_since("5.17", "layers without some old members")
    members = [name for name in dir(contract) if not name.startswith("_")]
    assert len(members) <= MOST_MEMBERS[contract], members


def test_no_more_modules_are_reached_than_before() -> None:
    code = "import sys, kvlayers.core.dynamic_cache; print(sum(name.startswith('kvlayers') for name in sys.modules))"
    assert int(fresh_process.run(code).stdout) <= MOST_MODULES
