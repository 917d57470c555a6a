"""Forks share memory until they write, and nothing that happens to one of them shows in another."""

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

import kvlayers
from agreement import step, tensors_in
from kvlayers import CacheLayer, DynamicLayer
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


@pytest.mark.parametrize("kind", SHARES)
def test_a_writer_copies_no_more_than_what_is_live(kind: str) -> None:
    generator = torch.Generator().manual_seed(0)
    layer, oracle = filled(kind, generator)
    alone = storages(layer)
    first, second = layer.fork(), layer.fork()
    step(first, oracle.copy(), 1, generator)
    step(second, oracle.copy(), 1, generator)
    more = sum(storages(layer, first, second).values()) - sum(alone.values())
    # One of the two goes on in place, and the other takes as much at most, or what a buffer grows by at least. Sinks
    # stand among the tokens that others read, so neither of two writers goes on in place.
    copies = 2 if kind.startswith("sink") else 1
    assert more <= copies * max(sum(alone.values()), 2 * 4096)


def test_who_is_left_alone_goes_on_in_place() -> None:
    generator = torch.Generator().manual_seed(0)
    layer, oracle = filled("dynamic", generator)
    fork = layer.fork()
    fork.update(*states(2, 1, generator))
    del fork
    before = layer.keys.untyped_storage().data_ptr()
    step(layer, oracle, 1, generator)
    assert layer.keys.untyped_storage().data_ptr() == before


def test_threads_that_write_at_once_do_not_meet() -> None:
    """Each thread goes on from a fork of its own: no two of them may take the same slots for theirs."""
    for _ in range(30):
        layer = DynamicLayer()
        layer.update(*states(1, 100, torch.Generator().manual_seed(0)))
        forks = [layer.fork() for _ in range(8)]
        barrier = threading.Barrier(len(forks))

        def go_on(which: int, forks: list[DynamicLayer] = forks, barrier: threading.Barrier = barrier) -> None:
            barrier.wait()
            for _ in range(20):
                forks[which].update(torch.full((1, 2, 1, 4), float(which)), torch.full((1, 2, 1, 6), float(which)))

        threads = [threading.Thread(target=go_on, args=(which,)) for which in range(len(forks))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for which, fork in enumerate(forks):
            assert torch.equal(fork.keys[:, :, 100:], torch.full((1, 2, 20, 4), float(which)))
            assert torch.equal(fork.keys[:, :, :100], layer.keys)


def test_several_forks_are_as_independent_as_one() -> None:
    cache = kvlayers.DynamicCache()
    states = torch.randn(1, 2, 5, 4)
    cache.update(states, states, layer_idx=0)
    forks = cache.fork(3)
    assert [fork.get_seq_length() for fork in forks] == [5, 5, 5]
    for number, fork in enumerate(forks):
        new = torch.full((1, 2, 1, 4), float(number))
        keys, _ = fork.update(new, new, layer_idx=0)
        assert torch.equal(keys, torch.cat([states, new], dim=2))
    assert torch.equal(cache.layers[0].keys, states)
    pair = kvlayers.EncoderDecoderCache(cache, kvlayers.DynamicCache())
    assert [type(fork) for fork in pair.fork(2)] == [type(pair)] * 2
    for number in (0, -1, 1.5, "two"):
        with pytest.raises(kvlayers.OptionError, match="`n` must be"):
            cache.fork(number)  # type: ignore[call-overload]
