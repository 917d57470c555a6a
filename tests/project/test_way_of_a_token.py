"""The way of a token through the package: which calls one update makes, and how wide the contracts are.

Ceilings go down with the code, and up only for a reason that the same commit gives.
"""

import collections
import pathlib
import subprocess
import sys
from collections.abc import Callable
from types import FrameType

import pytest
import torch
import transformers

import kvlayers

PACKAGE = pathlib.Path(kvlayers.__file__).parent
CONFIG = transformers.LlamaConfig(
    hidden_size=128, num_attention_heads=2, num_key_value_heads=2, num_hidden_layers=2, max_position_embeddings=4096
)
CACHES: dict[str, Callable[[], kvlayers.Cache]] = {
    "dense": lambda: kvlayers.DynamicCache(config=CONFIG),
    "packed": lambda: kvlayers.QuantizedCache(config=CONFIG, nbits=4, residual_length=16),
    "sinks": lambda: kvlayers.SinkCache(config=CONFIG, window_length=32, num_sink_tokens=4),
    "static": lambda: kvlayers.StaticCache(config=CONFIG, max_cache_len=256),
}
MOST_CALLS = {"dense": (12, 5), "packed": (24, 12), "sinks": (42, 9), "static": (46, 9)}
"""Most calls, and most files that they are in, when a token begins a forward pass at the first layer."""

MOST_CALLS_OF_A_LATER_LAYER = {"dense": (8, 4), "packed": (18, 11), "sinks": (38, 8), "static": (40, 8)}
"""The same for any later layer, where nothing is asked about the forward pass."""

MOST_MEMBERS = {kvlayers.DynamicLayer: 112, kvlayers.DynamicCache: 100, kvlayers.stores.DenseStore: 70}
"""Most public members of a class, inherited ones counted."""

MOST_MODULES = 77
"""Most modules of the package, packages included, that are imported for a `DynamicCache`."""


def states(tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(1, 2, tokens, 64), torch.randn(1, 2, tokens, 64)


@torch.no_grad()
def calls_of_one_token(cache: kvlayers.Cache, layer_idx: int) -> list[tuple[str, str]]:
    """The file and the name of each function of the package that one update calls, after some tokens."""
    # So many that blocks are packed, or so few that no kernel is chosen by their number.
    for tokens in (200 if isinstance(cache, kvlayers.QuantizedCache) else 60, 1, 1, 1):
        for index in range(2):
            cache.update(*states(tokens), index)
    for index in range(layer_idx):
        cache.update(*states(1), index)
    found, new = [], states(1)

    def note(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(str(PACKAGE)):
            found.append((pathlib.Path(code.co_filename).relative_to(PACKAGE).as_posix(), code.co_name))

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        cache.update(*new, layer_idx)
    finally:
        sys.setprofile(before)
    return found


@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize(
    ("layer_idx", "most"), [(0, MOST_CALLS), (1, MOST_CALLS_OF_A_LATER_LAYER)], ids=["first", "later"]
)
def test_an_update_makes_no_more_calls_than_it_did(kind: str, layer_idx: int, most: dict[str, tuple[int, int]]) -> None:
    calls = calls_of_one_token(CACHES[kind](), layer_idx)
    files = {file for file, _ in calls}
    assert (len(calls), len(files)) <= most[kind], collections.Counter(calls)
    assert len(files) <= most[kind][1], files


def test_a_token_takes_the_way_that_the_pages_draw() -> None:
    calls = calls_of_one_token(CACHES["dense"](), 1)
    drawn = [
        ("core/cache.py", "update"),
        ("core/dynamic_layer.py", "update"),
        ("core/dense_store.py", "take_in"),
        ("core/dense_store.py", "append_one"),
        ("core/buffer.py", "view"),
    ]
    assert list(dict.fromkeys(calls)) == drawn
    page = (PACKAGE / "core" / "README.md").read_text()
    assert all(pathlib.Path(file).name in page and name in page for file, name in drawn[:-1])


@pytest.mark.parametrize("contract", MOST_MEMBERS, ids=lambda contract: contract.__name__)
def test_no_contract_is_wider_than_it_was(contract: type) -> None:
    members = [name for name in dir(contract) if not name.startswith("_")]
    assert len(members) <= MOST_MEMBERS[contract], members


def test_no_more_modules_are_reached_than_before() -> None:
    code = "import sys, kvlayers.core.dynamic_cache; print(sum(name.startswith('kvlayers') for name in sys.modules))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(ran.stdout) <= MOST_MODULES
