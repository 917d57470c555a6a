"""Eviction from packed stores: codes move as they are, and every other token stays as it came."""

import copy
from collections.abc import Callable

import pytest
import torch

from kvlayers import Quantization
from kvlayers.core.token_store import TokenStore
from kvlayers.errors import RollbackError, StaleStatesError, UnsupportedLayerError
from kvlayers.eviction.evicted import evicted
from kvlayers.eviction.held_tokens import held_tokens
from kvlayers.eviction.ragged_store import RaggedStore
from kvlayers.quantized.packed_blocks import SIDES, block_nbytes
from kvlayers.stores import QuantizedStore
from ragged_reference import (
    KEY_DIM,
    KV_HEADS,
    VALUE_DIM,
    RaggedLists,
    evict,
    follow,
    generator,
    kept_tokens,
    of_head,
    segments_of,
    states,
    step,
)

BLOCK = 64
RESIDUAL = 32
SINKS = 8


@pytest.fixture(autouse=True)
def _same_numbers_in_each_test() -> None:
    # Whether single tokens between two blocks are kept, which then stand behind these, depends on the numbers.
    generator.manual_seed(0)


def quantization(**options: int | str) -> Quantization:
    return Quantization(residual_length=RESIDUAL, sink_tokens=SINKS, nbits=8, **options)  # type: ignore[arg-type]


def ragged(counts: list[list[int]] | None = None, tokens: int = 700) -> tuple[RaggedStore, RaggedLists]:
    counts = [[40 + 7 * BLOCK, 40 + 2 * BLOCK], [40 + BLOCK, 300]] if counts is None else counts
    lists = RaggedLists(len(counts))
    store = evict(QuantizedStore(quantization()), lists, counts, states(len(counts), tokens))
    assert isinstance(store, RaggedStore)
    return store, lists


def test_the_first_eviction_chooses_before_it_packs() -> None:
    store, lists = ragged()
    assert store.flat.sinks == SINKS
    assert store.tail.length >= SINKS + RESIDUAL
    for tokens in (1, 3, 50, 1, 70, 1):
        step(store, lists, tokens)


def test_budgets_that_differ_by_whole_blocks_fill_every_block() -> None:
    counts = [[50 + 7 * BLOCK, 50 + 2 * BLOCK], [50 + BLOCK, 50 + 5 * BLOCK]]
    store, _ = ragged(counts)
    counts_of_pieces = store.flat.counts
    assert set(counts_of_pieces.unique().tolist()) <= {0, BLOCK}
    assert store.tail.length == 50
    assert store.flat.places == 7 + 2 + 1 + 5
    quantizers = quantization().quantizers(KEY_DIM, VALUE_DIM)
    forms = {"keys": store.forms[0].of_batch(1)._replace(kv_heads=1)}
    forms["values"] = forms["keys"]._replace(head_dim=VALUE_DIM)
    block = sum(block_nbytes(quantizers[side].format, side, forms[side], BLOCK) for side in SIDES)
    assert store.nbytes == 15 * block + 3 * 8 * counts_of_pieces.numel() + store.tail.nbytes
    # The tail has room for the tokens that it holds before it packs some of them, but at most for as many as it has
    # again; and the factors of packed keys.
    room = min(SINKS + RESIDUAL + BLOCK, 2 * store.tail.length) * (KEY_DIM + VALUE_DIM)
    assert store.tail.nbytes == 2 * KV_HEADS * (room + KEY_DIM) * 4


@pytest.mark.parametrize("ragged_from_the_start", [False, True])
def test_codes_move_and_are_never_packed_again(ragged_from_the_start: bool) -> None:
    lists = RaggedLists(2)
    inner = QuantizedStore(quantization())
    store: TokenStore = RaggedStore(inner) if ragged_from_the_start else inner
    for round_ in range(3):
        store = evict(store, lists, [[200 + 64 * round_, 420], [333, 250]], states(2, 300))
        for tokens in (1, 90, 1):
            step(store, lists, tokens)
        store = evict(store, lists, [[200, 300], [240, 264]])
        assert store.flat.places == int((store.flat.counts > 0).sum())
        for tokens in (1, 2):
            step(store, lists, tokens)


def keeping(store: TokenStore, lists: RaggedLists, places: list[list[int]]) -> TokenStore:
    """The store with the tokens at these places of each head of its one sequence, which the lists follow."""
    held = held_tokens(store)
    was_packed = [[(held.blocks[0, head, own] >= 0).tolist() for head, own in enumerate(places)]]
    kept = kept_tokens([places], lists.counts, store.length)
    lists.keep([places])
    after = evicted(store, held, kept)
    follow(after, lists, was_packed)
    return after


def test_whole_blocks_may_leave_heads_even() -> None:
    lists = RaggedLists(1)
    store: TokenStore = QuantizedStore(quantization())
    step(store, lists, SINKS + 4 * BLOCK + RESIDUAL)
    held = held_tokens(store)
    blocks = int(held.blocks.max()) + 1
    places = []
    for head in range(KV_HEADS):
        gone = [number == head for number in held.blocks[0, head].tolist()]
        places.append([place for place, is_gone in enumerate(gone) if not is_gone])
    after = keeping(store, lists, places)
    assert type(after) is QuantizedStore
    assert len(after.blocks) == blocks - 1
    for tokens in (1, 80, 1):
        step(after, lists, tokens)


def test_sequences_with_very_few_tokens_are_held_beside_long_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    # Vectors of three tokens hold for no block, and an eviction packs keys of older runs again.
    monkeypatch.setattr("kvlayers.quantized.smoothing_runs.MOST_RUNS", 1)
    store, lists = ragged(FEW)
    assert store.tail.length <= 3
    for tokens in (1, 60, 80, 1):
        step(store, lists, tokens)
    other = evict(store, lists, [[150, 200], [100, 90]])
    step(other, lists)


def loaded(store: RaggedStore) -> RaggedStore:
    """A store with the same state, made of an empty one."""
    twin = store.fork()
    twin.clear()
    state = store.state()
    assert twin.check_state(state) == store.length
    twin.load_state(state)
    assert twin.length == store.length
    return twin


Change = Callable[[RaggedStore], RaggedStore | None]
OPERATIONS: dict[str, tuple[Change, list[int] | None, int]] = {
    "fork": (lambda store: store.fork(), None, 0),
    "select": (lambda store: store.select(torch.tensor([1, 0, 1])), [1, 0, 1], 0),
    "drop": (lambda store: store.select(torch.tensor([1])), [1], 0),
    "expand": (lambda store: store.expand(2), [0, 0, 1, 1], 0),
    "truncate": (lambda store: store.truncate(store.length - 3), None, 3),
    "state": (loaded, None, 0),
    "copy": (copy.deepcopy, None, 0),
    "compact": (lambda store: store.compact(), None, 0),
    "trim": (lambda store: store.trim(), None, 0),
    "offload": (
        lambda store: store.swap_buffers(lambda buffer, start, end: buffer.reallocated(0, end, buffer.capacity)),
        None,
        0,
    ),
}
"""What is done to a store, the sequences that are left if not all are, and how many of their tokens are taken back."""


FEW = [[300, 200], [3, 3]]
"""One sequence reads no block."""


@pytest.mark.parametrize(
    ("operations", "counts"),
    [
        *(((name,), None) for name in OPERATIONS),
        (("drop", "trim"), None),
        (("drop", "compact", "state"), FEW),
    ],
    ids=str,
)
def test_decoding_and_eviction_go_on_after_operations(
    operations: tuple[str, ...], counts: list[list[int]] | None
) -> None:
    store, lists = ragged(counts)
    step(store, lists, 1 if counts else 90)
    for change, rows, removed in map(OPERATIONS.__getitem__, operations):
        store = change(store) or store
        lists.select(list(range(lists.batch)) if rows is None else rows)
        lists.crop(removed)
    for tokens in (1, 90, 1):
        step(store, lists, tokens)
    other = evict(store, lists, (lists.counts // 2).tolist())
    for tokens in (1, 90):
        step(other, lists, tokens)


def test_heads_that_keep_as_many_tokens_of_other_blocks_are_rolled_back_within_the_newest() -> None:
    lists = RaggedLists(1)
    store: TokenStore = QuantizedStore(quantization())
    step(store, lists, SINKS + 4 * BLOCK + RESIDUAL)
    step(store, lists, BLOCK - 4)
    places = [list(range(store.length)) for _ in range(KV_HEADS)]
    # A block of one head, and as many single tokens of the other, which keeps the newest.
    del places[0][SINKS : SINKS + BLOCK]
    del places[1][SINKS + 4 * BLOCK : SINKS + 5 * BLOCK]
    after = keeping(store, lists, places)
    assert isinstance(after, RaggedStore)
    assert after.length - after.first_common == lists.common == RESIDUAL - 4
    after.truncate(after.first_common)
    lists.crop(lists.common)
    step(after, lists)


def test_tokens_are_rolled_back_only_within_the_tokens_that_every_head_holds() -> None:
    store, lists = ragged()
    step(store, lists, 4)
    returned = store.attended_states()
    assert store.length - store.first_common == lists.common
    assert lists.common < store.tail.length - SINKS
    with pytest.raises(RollbackError):
        store.truncate(store.first_common - 1)
    with pytest.raises(UnsupportedLayerError):
        store.newest(lists.common + 1)
    segments_of(*returned)
    store.truncate(store.first_common)
    with pytest.raises(StaleStatesError):
        segments_of(*returned)
    lists.crop(lists.common)
    step(store, lists)


@pytest.mark.parametrize("backend", ["native", "quanto", "hqq", "fp8"])
def test_blocks_of_every_backend_move(backend: str) -> None:
    options = Quantization(
        backend=backend, residual_length=RESIDUAL, sink_tokens=SINKS, nbits=8 if backend == "fp8" else 4
    )
    new = states(1, 400)
    store: TokenStore = QuantizedStore(options)
    store.take_in(*new)
    held = held_tokens(store)
    places = [
        [place for place, number in enumerate(held.blocks[0, head].tolist()) if number not in (head, 2 * head)]
        for head in range(KV_HEADS)
    ]
    after = evicted(store, held_tokens(store), kept_tokens([places], held.counts, 400))
    assert isinstance(after, RaggedStore)
    left = held_tokens(after)
    for head in range(KV_HEADS):
        for before, now in zip(of_head(held, 0, head), of_head(left, 0, head), strict=True):
            assert torch.equal(before[:, :, places[head]], now)
