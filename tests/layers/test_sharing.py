"""Forks share memory until they write, and nothing that happens to one of them shows in another."""

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

import kvlayers
from agreement import check_at_rest, step, tensors_in
from kvlayers import CacheLayer, DynamicCache, DynamicLayer
from layer_kinds import KINDS
from matrix import product
from models import prompt, tiny_model
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
    # One of the two goes on in place, and the other takes as much at most, or what a buffer grows by at least.
    assert more <= max(sum(alone.values()), 2 * 4096)


ORDERS = [(0, 1, 2), (1, 0, 2), (2, 1, 0)]
"""A layer and its two forks: each writes first in one order."""


@pytest.mark.parametrize("kind", KINDS)
def test_whoever_writes_first_the_others_do_not_notice(kind: str) -> None:
    for order in ORDERS:
        generator = torch.Generator().manual_seed(0)
        layer, oracle = filled(kind, generator)
        family = [(layer, oracle), *((layer.fork(), oracle.copy()) for _ in range(2))]
        for which in (*order, order[0], *order):
            one, reference = family[which]
            if reference.fits(2):
                step(one, reference, 2, generator)
            for other, other_oracle in family:
                check_at_rest(other, other_oracle)


CHANGES: dict[str, Callable[[CacheLayer, Oracle], object]] = {
    "truncate": lambda layer, oracle: (layer.truncate(40), oracle.truncate(40)) if oracle.can_truncate(40) else None,
    "select": lambda layer, oracle: (layer.batch_select_indices([1]), oracle.select([1])),
    "repeat": lambda layer, oracle: (layer.batch_repeat_interleave(2), oracle.select([0, 0, 1, 1])),
    "reset": lambda layer, oracle: (layer.reset(), oracle.reset()),
    "load another state": lambda layer, oracle: (layer.load_state(layer.fork().state()), None),
    "record": lambda layer, oracle: (layer.activate_past_recording(), setattr(oracle, "recording", True)),
}


@pytest.mark.parametrize(("kind", "change", "changed"), product(KINDS, CHANGES, ["original", "fork"]))
def test_what_is_done_to_one_does_not_show_in_the_other(kind: str, change: str, changed: str) -> None:
    generator = torch.Generator().manual_seed(0)
    layer, oracle = filled(kind, generator)
    twin, twin_oracle = layer.fork(), oracle.copy()
    one, other = (
        ((layer, oracle), (twin, twin_oracle)) if changed == "original" else ((twin, twin_oracle), (layer, oracle))
    )
    CHANGES[change](*one)
    for tokens in (1, 3, 1):
        for pair, beside in ((one, other), (other, one)):
            if pair[1].fits(tokens):
                step(*pair, tokens, generator)
            check_at_rest(*beside)


def test_forks_of_forks_outlive_those_that_they_came_from() -> None:
    generator = torch.Generator().manual_seed(0)
    layer, oracle = filled("dynamic", generator)
    child, child_oracle = layer.fork(), oracle.copy()
    step(child, child_oracle, 5, generator)
    grandchild, grandchild_oracle = child.fork(), child_oracle.copy()
    step(child, child_oracle, 5, generator)
    del layer, child
    late, late_oracle = grandchild.fork(), grandchild_oracle.copy()
    for pair in ((grandchild, grandchild_oracle), (late, late_oracle)) * 3:
        step(*pair, 2, generator)
        check_at_rest(grandchild, grandchild_oracle)
        check_at_rest(late, late_oracle)


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


@pytest.mark.parametrize("kind", ["dynamic", "static", "quantized", "sink"])
def test_generate_given_a_fork_leaves_the_original_alone(kind: str) -> None:
    model, ids = tiny_model("llama"), prompt(1, 40)
    cache = kvlayers.make_cache(
        kind, model, **{"static": {"max_cache_len": 80}, "sink": {"window_length": 30}}.get(kind, {})
    )
    with torch.no_grad():
        model(ids[:, :35], past_key_values=cache)
    before = cache.state()
    outputs = [
        model.generate(ids, past_key_values=cache.fork(), max_new_tokens=20, do_sample=False, pad_token_id=0)
        for _ in range(3)
    ]
    assert all(torch.equal(output, outputs[0]) for output in outputs)
    assert cache.get_seq_length() == 35
    for one, other in zip(before.layers, cache.state().layers, strict=True):
        assert all(torch.equal(one.tensors[name], other.tensors[name]) for name in one.tensors)
    assert torch.equal(
        model.generate(ids, past_key_values=cache, max_new_tokens=20, do_sample=False, pad_token_id=0), outputs[0]
    )


def test_a_fork_of_a_long_cache_moves_nothing() -> None:
    cache = DynamicCache()
    for layer in range(3):
        cache.update(*states(1, 5000, torch.Generator().manual_seed(layer)), layer)
    fork, twin = cache.fork(), copy.deepcopy(cache)
    for other in (fork, twin):
        assert storages(*other.layers) == storages(*cache.layers)
    fork.update(*states(1, 1, torch.Generator().manual_seed(9)), 1)
    changed = [storages(mine) != storages(theirs) for mine, theirs in zip(twin.layers, cache.layers, strict=True)]
    assert changed == [False] * 3
    assert [layer.length for layer in cache.layers] == [5000] * 3


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
        with pytest.raises(kvlayers.OptionError, match="number of forks"):
            cache.fork(number)  # type: ignore[call-overload]
