"""Stores whose heads hold different numbers of tokens, against lists of tokens."""

import pytest
import torch

from kvlayers import Quantization
from kvlayers.errors import StateMismatchError, UnsupportedLayerError
from kvlayers.eviction.evicting_layer import SMALL_STEP, SMALL_STEP_DIVISOR
from kvlayers.eviction.ragged_store import RaggedStore
from kvlayers.stores import DenseStore, QuantizedStore
from ragged_reference import (
    KEY_DIM,
    KV_HEADS,
    VALUE_DIM,
    RaggedLists,
    check,
    evict,
    generator,
    states,
    step,
)

RECENT = 5


@pytest.fixture(autouse=True)
def _same_numbers_in_each_test() -> None:
    generator.manual_seed(0)


def ragged(counts: list[list[int]] | None = None, tokens: int = 200) -> tuple[RaggedStore, RaggedLists]:
    """A store of uneven heads: the second sequence has very few tokens."""
    counts = [[150, 70], [9, 30]] if counts is None else counts
    lists = RaggedLists(len(counts))
    store = evict(DenseStore(None, SMALL_STEP_DIVISOR, SMALL_STEP), lists, counts, states(len(counts), tokens), RECENT)
    assert isinstance(store, RaggedStore)
    return store, lists


@pytest.mark.parametrize(
    "counts",
    [[[150, 70], [9, 30]], [[64, 128]], [[5, 6]], [[200, 5]], [[129, 65], [64, 63]]],
)
def test_heads_attend_to_the_tokens_that_they_keep(counts: list[list[int]]) -> None:
    store, lists = ragged(counts)
    check(store, lists)
    assert store.length == int(lists.counts.max())
    assert store.tail.length == RECENT
    for tokens in (1, 1, 3, 40, 1):
        step(store, lists, tokens)


def test_a_head_may_hold_nothing_at_all() -> None:
    lists = RaggedLists(2)
    store = evict(DenseStore(), lists, [[0, 30], [3, 0]], states(2, 50))
    assert isinstance(store, RaggedStore)
    assert store.tail.length == 0
    check(store, lists)
    for _ in range(3):
        step(store, lists)


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
    store, lists = ragged()
    flat = int(lists.counts.sum()) - 4 * RECENT
    pieces = store.flat.counts.shape[2]
    tail = 2 * KV_HEADS * (RECENT + RECENT)
    assert store.nbytes == (flat + tail) * (KEY_DIM + VALUE_DIM) * 4 + 3 * 4 * pieces * 8
    for _ in range(RECENT + 1):
        step(store, lists)
    tail = 2 * KV_HEADS * (RECENT + RECENT + 1 + 16)
    assert store.nbytes == (flat + tail) * (KEY_DIM + VALUE_DIM) * 4 + 3 * 4 * pieces * 8


def test_a_flat_part_that_was_loaded_has_no_spare_room() -> None:
    store, lists = ragged()
    loaded = RaggedStore(DenseStore(growth_divisor=40, minimum_growth=16))
    loaded.load_state(store.state())
    of_flat = [sum(tensor.nbytes for tensor in one.flat.held_tensors()) for one in (store, loaded)]  # type: ignore[union-attr]
    assert of_flat[0] == of_flat[1]
    step(loaded, lists)


def test_forks_share_the_flat_part_and_go_their_own_ways() -> None:
    store, lists = ragged()
    twins = [(store.fork(), lists.copy()) for _ in range(3)]
    storages = {tensor.untyped_storage().data_ptr() for tensor in store.flat.held_tensors()}  # type: ignore[union-attr]
    for twin, own in twins:
        assert {t.untyped_storage().data_ptr() for t in twin.flat.held_tensors()} == storages  # type: ignore[union-attr]
        step(twin, own, 3)
        twin.truncate(twin.length - 5)
        own.crop(5)
    for twin, own in [*twins, (store, lists)]:
        step(twin, own)


def test_sequences_are_repeated_and_reordered_without_a_copy_of_the_flat_part() -> None:
    store, _ = ragged()
    before = store.nbytes
    store.expand(3)
    store.select(torch.tensor([5, 0, 0, 3]))
    states_of_flat = (150 + 70 + 9 + 30 - 4 * RECENT) * (KEY_DIM + VALUE_DIM) * 4
    assert store.nbytes - before < states_of_flat / 4


def test_heads_that_hold_different_tokens_are_not_read_as_one_tensor() -> None:
    # By chance all heads may keep one more token than the recent ones, but not as many again.
    store, lists = ragged()
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
    store, lists = ragged()
    new = states(2, 1)
    assert not store.overwrite(3, *states(2, 2))
    keys, values = store.extend(*new, past=RECENT)
    assert keys.shape[2] == values.shape[2] == RECENT + 1
    lists.append(*new)
    assert torch.equal(keys[1, 1], torch.stack(lists.keys[1][1][-RECENT - 1 :]))
    step(store, lists)


def test_other_states_are_refused() -> None:
    store, lists = ragged([[3, 40], [20, 6]])
    store.truncate(store.length - store.tail.length)
    lists.crop(3)
    for take in (store.validate, store.take_in):
        with pytest.raises(StateMismatchError, match="batch size 2"):
            take(*states(3, 1))
        with pytest.raises(StateMismatchError, match="dtype"):
            take(*(side.half() for side in states(2, 1)))
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
