"""Forks share memory until they write, and nothing that happens to one of them shows in another."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

import kvlayers
from agreement import step, tensors_in
from kvlayers import CacheLayer
from layer_kinds import KINDS
from oracle import Oracle, states

SHARES = [kind for kind in KINDS if "static" not in kind and "offloaded" not in kind]


def storages(*things: Any) -> dict[int, int]:
    """Bytes of each storage that any of them reaches."""
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for thing in things for t in tensors_in(thing)}


def filled(kind: str, generator: torch.Generator, tokens: int = 70) -> tuple[CacheLayer, Oracle]:
    layer, oracle = KINDS[kind]()
    step(layer, oracle, tokens, generator)
    for _ in range(3):
        step(layer, oracle, 1, generator)
    return layer, oracle


@pytest.mark.parametrize("kind", SHARES)
@pytest.mark.parametrize("make", [lambda layer: layer.fork(), copy.deepcopy], ids=["fork", "deepcopy"])
def test_a_fork_takes_no_memory_until_it_writes(kind: str, make: Callable[[CacheLayer], CacheLayer]) -> None:
    layer, _ = filled(kind, torch.Generator().manual_seed(0))
    alone = storages(layer)
    forks = [make(layer) for _ in range(10)]
    assert storages(layer, *forks) == alone


def test_who_is_left_alone_goes_on_in_place() -> None:
    generator = torch.Generator().manual_seed(0)
    layer, oracle = filled("dynamic", generator)
    fork = layer.fork()
    fork.update(*states(2, 1, generator))
    del fork
    before = layer.keys.untyped_storage().data_ptr()
    step(layer, oracle, 1, generator)
    assert layer.keys.untyped_storage().data_ptr() == before


def test_a_cache_makes_as_many_forks_as_it_is_asked_for() -> None:
    cache = kvlayers.DynamicCache([states(1, 5, torch.Generator().manual_seed(0))])
    pair = kvlayers.EncoderDecoderCache(cache, kvlayers.DynamicCache())
    for one in (cache, pair):
        assert [(type(fork), fork.get_seq_length()) for fork in one.fork(3)] == [(type(one), 5)] * 3
    for number in (0, -1, 1.5, "two"):
        with pytest.raises(kvlayers.OptionError, match="`n` must be"):
            cache.fork(number)  # type: ignore[call-overload]
