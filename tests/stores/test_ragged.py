"""Stores whose heads hold different numbers of tokens, against lists of tokens.

Codes move as they are, and every other token stays as it came.
"""

import copy
from collections.abc import Callable

import pytest
import torch

from kvlayers import Quantization
from kvlayers.errors import RollbackError, StaleStatesError, StateMismatchError, UnsupportedLayerError
from kvlayers.eviction.evicted import evicted
from kvlayers.eviction.evicting_layer import SMALL_STEP, SMALL_STEP_DIVISOR
from kvlayers.eviction.held_tokens import held_tokens
from kvlayers.eviction.ragged_store import RaggedStore
from kvlayers.quantized.packed_blocks import SIDES, block_nbytes
from kvlayers.stores import DenseStore, QuantizedStore, TokenStore
from ragged_reference import (
    KEY_DIM,
    KV_HEADS,
    VALUE_DIM,
    RaggedLists,
    check,
    evict,
    follow,
    generator,
    kept_tokens,
    segments_of,
    states,
    step,
)

RECENT = 5
BLOCK, RESIDUAL, SINKS = 64, 32, 8
QUANTIZATION = Quantization(nbits=8, residual_length=RESIDUAL, sink_tokens=SINKS)
Counts = list[list[int]]


@pytest.fixture(autouse=True)
def _same_numbers_in_each_test() -> None:
    # Whether single tokens between two blocks are kept, which then stand behind these, depends on the numbers.
    generator.manual_seed(0)


def ragged(store: TokenStore, counts: Counts, tokens: int, recent: int) -> tuple[RaggedStore, RaggedLists]:
    """A store of uneven heads, which hold so many of some tokens."""
    lists = RaggedLists(len(counts))
    after = evict(store, lists, counts, states(len(counts), tokens), recent)
    assert isinstance(after, RaggedStore)
    return after, lists


FEW_OF_THE_SECOND = [[150, 70], [9, 30]]


def dense(counts: Counts = FEW_OF_THE_SECOND) -> tuple[RaggedStore, RaggedLists]:
    return ragged(DenseStore(None, SMALL_STEP_DIVISOR, SMALL_STEP), counts, 200, RECENT)


@pytest.mark.parametrize(
    "counts",
    # Of the last ones, two heads hold nothing at all.
    [[[150, 70], [9, 30]], [[64, 128]], [[5, 6]], [[200, 5]], [[129, 65], [64, 63]], [[0, 30], [3, 0]]],
)
def test_heads_attend_to_the_tokens_that_they_keep(counts: Counts) -> None:
    store, lists = dense(counts)
    check(store, lists)
    assert store.length == int(lists.counts.max())
    assert store.tail.length == min(RECENT, lists.common)
    for tokens in (1, 1, 3, 40, 1):
        step(store, lists, tokens)


def test_heads_that_keep_as_many_tokens_stay_in_a_dense_store_with_little_spare_room() -> None:
    lists = RaggedLists(2)
    store = evict(DenseStore(growth_divisor=40, minimum_growth=16), lists, [[80, 80]] * 2, states(2, 160))
    assert type(store) is DenseStore
    assert store.nbytes == 2 * KV_HEADS * (80 + 16) * (KEY_DIM + VALUE_DIM) * 4
    check(store, lists)
    for _ in range(40):
        step(store, lists)
    assert store.nbytes <= 2 * KV_HEADS * (120 + 16) * (KEY_DIM + VALUE_DIM) * 4


def test_memory_is_that_of_the_kept_tokens_their_tables_and_the_tail() -> None:
    store, lists = dense()
    flat = int(lists.counts.sum()) - 4 * RECENT
    pieces = store.flat.counts.shape[2]
    tail = 2 * KV_HEADS * (RECENT + RECENT)
    assert store.nbytes == (flat + tail) * (KEY_DIM + VALUE_DIM) * 4 + 3 * 4 * pieces * 8
    for _ in range(RECENT + 1):
        step(store, lists)
    tail = 2 * KV_HEADS * (RECENT + RECENT + 1 + 16)
    assert store.nbytes == (flat + tail) * (KEY_DIM + VALUE_DIM) * 4 + 3 * 4 * pieces * 8


def test_a_flat_part_that_was_loaded_has_no_spare_room() -> None:
    store, lists = dense()
    loaded = RaggedStore(DenseStore(growth_divisor=40, minimum_growth=16))
    loaded.load_state(store.state())
    of_flat = [sum(tensor.nbytes for tensor in one.flat.held_tensors()) for one in (store, loaded)]  # type: ignore[union-attr]
    assert of_flat[0] == of_flat[1]
    step(loaded, lists)


def test_sequences_are_repeated_and_reordered_without_a_copy_of_the_flat_part() -> None:
    store, _ = dense()
    before = store.nbytes
    store.expand(3)
    store.select(torch.tensor([5, 0, 0, 3]))
    states_of_flat = (150 + 70 + 9 + 30 - 4 * RECENT) * (KEY_DIM + VALUE_DIM) * 4
    assert store.nbytes - before < states_of_flat / 4


def test_heads_that_hold_different_tokens_are_not_read_as_one_tensor() -> None:
    # By chance all heads may keep one more token than the recent ones, but not as many again.
    store, lists = dense()
    for read in (
        lambda: store.newest(store.length),
        lambda: store.newest(2 * RECENT),
        store.caller_views,
        lambda: store.drop_oldest(1),
        lambda: store.extend_and_evict(*states(2, 1), past=3, kept=4),
        lambda: store.extend(*states(2, 1), past=2 * RECENT),
    ):
        with pytest.raises(UnsupportedLayerError, match="different tokens"):
            read()
    check(store, lists)
    newest = store.newest(RECENT)
    assert torch.equal(newest[0][1, 1], torch.stack(lists.keys[1][1][-RECENT:]))


def test_a_window_within_the_tail_is_attended_to() -> None:
    store, lists = dense()
    new = states(2, 1)
    assert not store.overwrite(3, *states(2, 2))
    keys, values = store.extend(*new, past=RECENT)
    assert keys.shape[2] == values.shape[2] == RECENT + 1
    lists.append(*new)
    assert torch.equal(keys[1, 1], torch.stack(lists.keys[1][1][-RECENT - 1 :]))
    step(store, lists)


def test_other_states_are_refused() -> None:
    store, lists = dense([[3, 40], [20, 6]])
    store.truncate(store.length - store.tail.length)
    lists.crop(3)
    for take in (store.validate, store.take_in):
        for wrong, said in ((states(3, 1), "batch size 2"), ([side.half() for side in states(2, 1)], "dtype")):
            with pytest.raises(StateMismatchError, match=said):
                take(*wrong)
    step(store, lists)


@pytest.mark.parametrize(
    ("name", "change", "message", "kind"),
    [
        ("flat_piece_counts", lambda table: table - 1000, "0 to 64", "dense"),
        ("flat_piece_counts", lambda table: table.int(), "int64", "dense"),
        ("flat_piece_counts", lambda table: table.float(), "int64", "dense"),
        ("flat_piece_counts", lambda table: table[:1], "int64", "dense"),
        ("flat_piece_counts", lambda table: table[:, :, 0], "int64", "dense"),
        ("flat_piece_counts", lambda table: table.clamp(max=3) + 62, "0 to 64", "dense"),
        ("flat_piece_starts", lambda table: table - 1, "within", "dense"),
        ("flat_piece_starts", lambda table: table + 2**62, "within", "dense"),
        ("flat_piece_starts", lambda table: table + 30, "within", "dense"),
        ("flat_piece_starts", lambda table: table[:, :, :1], "int64", "dense"),
        ("flat_columns", lambda numbers: numbers * 0, "column", "dense"),
        ("flat_columns", lambda numbers: numbers * 1000, "column", "dense"),
        ("flat_columns", lambda numbers: numbers + 100, "tail", "dense"),
        ("flat_columns", lambda numbers: -numbers - 1, "tail", "dense"),
        ("flat_columns", lambda numbers: numbers[:2], "int64", "dense"),
        ("flat_columns", lambda numbers: numbers.double(), "int64", "dense"),
        ("flat_keys", lambda keys: keys[:, :, :5], "same tokens", "dense"),
        ("flat_keys", lambda keys: keys.half(), "form", "dense"),
        ("flat_values", lambda values: values[..., :4], "form", "dense"),
        ("keys", lambda keys: keys[:1], "same tokens", "dense"),
        ("flat_piece_counts", lambda table: table + 1, "0 to 64", "packed"),
        ("flat_piece_starts", lambda table: table + 30, "within", "packed"),
        ("flat_keys_codes", lambda codes: codes[:, :, :1], "must be", "packed"),
        ("flat_keys_codes", lambda codes: codes.float(), "must be", "packed"),
        ("flat_values_parameters", lambda parameters: parameters[0], "must be", "packed"),
        ("flat_block_ends", lambda ends: ends + 64, "1 to 64", "packed"),
        ("flat_columns", lambda numbers: numbers + 2**40, "tail", "packed"),
        *(
            (name, None, "take the state again", "dense")
            for name in ("flat_piece_counts", "flat_columns", "flat_keys", "keys")
        ),
    ],
)
def test_states_of_damaged_files_are_refused(name: str, change: object, message: str, kind: str) -> None:
    tails = {"dense": DenseStore, "packed": lambda: QuantizedStore(Quantization(nbits=8, residual_length=32))}
    lists = RaggedLists(2)
    state = evict(tails[kind](), lists, [[150, 70], [9, 130]], states(2, 200), RECENT).state()
    assert RaggedStore(tails[kind]()).check_state(state) == int(lists.counts.max())
    with pytest.raises(StateMismatchError):
        RaggedStore(tails["packed" if kind == "dense" else "dense"]()).check_state(state)
    taken = state.pop(name)
    if change is not None:
        state[name] = change(taken)  # type: ignore[operator]
    with pytest.raises(StateMismatchError, match=message):
        RaggedStore(tails[kind]()).check_state(state)


# Packed stores


UNEVEN = [[40 + 7 * BLOCK, 40 + 2 * BLOCK], [40 + BLOCK, 300]]


def packed(counts: Counts = UNEVEN) -> tuple[RaggedStore, RaggedLists]:
    return ragged(QuantizedStore(QUANTIZATION), counts, 700, 12)


def test_the_first_eviction_chooses_before_it_packs() -> None:
    store, lists = packed()
    assert store.flat.sinks == SINKS
    assert store.tail.length >= SINKS + RESIDUAL
    for tokens in (1, 3, 50, 1, 70, 1):
        step(store, lists, tokens)


def test_budgets_that_differ_by_whole_blocks_fill_every_block() -> None:
    counts = [[50 + 7 * BLOCK, 50 + 2 * BLOCK], [50 + BLOCK, 50 + 5 * BLOCK]]
    store, _ = packed(counts)
    counts_of_pieces = store.flat.counts
    assert set(counts_of_pieces.unique().tolist()) <= {0, BLOCK}
    assert store.tail.length == 50
    assert store.flat.places == 7 + 2 + 1 + 5
    quantizers = QUANTIZATION.quantizers(KEY_DIM, VALUE_DIM)
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
    inner = QuantizedStore(QUANTIZATION)
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
    store: TokenStore = QuantizedStore(QUANTIZATION)
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
    store, lists = packed(FEW)
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


OPERATIONS: dict[str, tuple[Callable[[RaggedStore], RaggedStore | None], list[int] | None, int]] = {
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
        *(((name,), UNEVEN) for name in OPERATIONS),
        (("drop", "trim"), UNEVEN),
        (("drop", "compact", "state"), FEW),
    ],
    ids=str,
)
def test_decoding_and_eviction_go_on_after_operations(operations: tuple[str, ...], counts: Counts) -> None:
    store, lists = packed(counts)
    step(store, lists, 1 if counts is FEW else 90)
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
    store: TokenStore = QuantizedStore(QUANTIZATION)
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
    store, lists = packed()
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
