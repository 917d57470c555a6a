"""Forks and sequences that share packed blocks: what they hold, what is packed, and what memory it takes."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from kvlayers import Quantization
from kvlayers.kernels.attention.segment_kinds import PackedSegment
from kvlayers.quantized.packed_blocks import SIDES, PackedBlocks
from kvlayers.stores import DenseStore, QuantizedStore
from kvlayers.utils.tensor_memory import storages_of
from spies import spy

QUANTIZATION = Quantization(nbits=4, residual_length=24, sink_tokens=4)
BLOCK, PREFIX = 64, 1000


def add(store: QuantizedStore, tokens: int, seed: int) -> tuple[Tensor, Tensor]:
    rows, generator = 2 if store.forms is None else store.forms[0].batch_size, torch.Generator().manual_seed(seed)
    return store.take_in(*(torch.randn(rows, 2, tokens, 16, generator=generator) for _ in range(2)))


def filled(*updates: int) -> QuantizedStore:
    store = QuantizedStore(QUANTIZATION)
    for seed, tokens in enumerate(updates):
        add(store, tokens, seed)
    return store


def assert_same(store: QuantizedStore, other: QuantizedStore) -> None:
    """To the last bit, and still so after more blocks."""
    for _ in range(2):
        state, expected = store.state(), other.state()
        assert state.keys() == expected.keys()
        for name, tensor in expected.items():
            assert torch.equal(state[name], tensor), name
        for seen, wanted in zip(store.newest(store.length), other.newest(other.length), strict=True):
            assert torch.equal(seen + 0, wanted + 0)
        for each in (store, other):
            add(each, 100, seed=99)


def bytes_of_all(*stores: QuantizedStore) -> int:
    return sum(storages_of(tensor for store in stores for tensor in store.held_tensors()).values())


def packed_segments(states: Tensor) -> list[PackedSegment]:
    return [segment for segment in states.snapshot.segments.in_order if isinstance(segment, PackedSegment)]


def test_a_block_is_packed_once_and_read_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    packed: list[int] = []
    spy(monkeypatch, PackedBlocks, "write", lambda blocks, at, keys, *others: packed.append(keys.shape[2] // BLOCK))
    store = filled(PREFIX)
    forks = [store.fork() for _ in range(3)]
    before = sum(packed)
    for number, fork in enumerate(forks):
        for step in range(BLOCK):
            add(fork, 1, 1000 * number + step)
    assert sum(packed) == before + len(forks)
    prefixes = [packed_segments(add(each, 1, 7)[0])[0].keys.codes for each in (store, *forks)]
    assert {codes.data_ptr() for codes in prefixes} == {prefixes[0].data_ptr()}


def test_caches_of_the_same_tokens_that_were_filled_apart_hold_them_once_afterwards() -> None:
    one, other = filled(PREFIX), filled(PREFIX)
    add(one, 200, seed=1)
    add(other, 90, seed=2)
    alone = filled(PREFIX)
    add(alone, 90, seed=2)
    before = bytes_of_all(one, other)
    other.share_prefix(one, PREFIX)
    packed = next(iter(one.blocks.segments()))
    shared_blocks = (PREFIX - QUANTIZATION.sink_tokens) // BLOCK
    block = (packed.keys.codes[:, :, :1].nbytes + packed.keys.parameters[:, :, :1].nbytes) * 2
    assert bytes_of_all(one, other) <= before - (shared_blocks - 1) * block
    assert_same(other, alone)


def test_what_two_stores_do_not_hold_alike_is_not_shared() -> None:
    for differs in ("length", "quantization", "sinks"):
        store, other = filled(PREFIX), filled(PREFIX)
        if differs == "length":
            # A cropped block holds other tokens behind it.
            other.truncate(100)
            add(other, PREFIX - 100, seed=0)
        elif differs == "quantization":
            other = QuantizedStore(Quantization(nbits=2, residual_length=24, sink_tokens=4))
            add(other, PREFIX, seed=0)
        else:
            other.drop_oldest(3)
        store.share_prefix(other, 900)
        assert_same(store, filled(PREFIX))


CHANGES: dict[str, tuple[Callable[[QuantizedStore], None], Callable[[QuantizedStore], None]]] = {
    "nothing": (lambda store: None, lambda store: None),
    "expand": (lambda store: store.expand(3), lambda store: store.select(torch.tensor([0, 0, 0, 1, 1, 1]))),
    "select": (lambda store: store.select(torch.tensor([1, 0])), lambda store: store.select(torch.tensor([1, 0]))),
    "truncate": (lambda store: store.truncate(500), lambda store: store.truncate(500)),
}
"""What is done to a store that shares memory, and to one that does not."""


@pytest.mark.parametrize("call", [0, 1])
@pytest.mark.parametrize("then", CHANGES)
def test_memory_for_one_side_alone_leaves_both_as_they_were(
    call: int, then: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, alone = filled(PREFIX), filled(PREFIX)
    fork = store.fork()
    add(store, BLOCK, seed=5)
    prepare, calls = DenseStore.prepare_slots, itertools.count()

    def failing(codes: DenseStore, tokens: int) -> None:
        if next(calls) == call:
            raise torch.OutOfMemoryError("There is no memory for one side.")
        prepare(codes, tokens)

    with monkeypatch.context() as patched:
        patched.setattr(DenseStore, "prepare_slots", failing)
        with pytest.raises(torch.OutOfMemoryError):
            add(fork, BLOCK, seed=6)
    assert fork.length == PREFIX
    for change, each in zip(CHANGES[then], (fork, alone), strict=True):
        change(each)
    assert_same(fork, alone)


@pytest.mark.parametrize("side", ["keys", "values"])
@pytest.mark.parametrize("then", CHANGES)
def test_threads_may_each_have_got_the_slots_of_one_side(side: Any, then: str) -> None:
    store, alone = filled(PREFIX), filled(PREFIX)
    for codes in store.blocks.stores:
        codes.reserve(2 * PREFIX // BLOCK)
    # Another thread is about to write there.
    fork = store.fork()
    fork.blocks.stores[SIDES.index(side)].prepare_slots(1)
    for each in (store, alone):
        add(each, BLOCK, seed=5)
    for change, each in zip(CHANGES[then], (store, alone), strict=True):
        change(each)
    assert_same(store, alone)
