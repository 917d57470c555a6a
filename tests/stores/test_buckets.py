"""Buckets: their sizes, the places in them, and the contract of static layers whose attention reads them.

And of stores of such layers in compiled code that evicts.
"""

import copy
import itertools
import pickle
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from agreement import step
from kvlayers import CacheLayer, CapacityError, OptionError, StaticLayer, StaticSlidingLayer
from kvlayers.core.token_store import KVPair
from kvlayers.layers import LayerState
from kvlayers.static.slots import ALIGNMENT, slots_of
from kvlayers.stores import Buckets, StaticStore
from layer_kinds import KINDS
from matrix import product
from oracle import states

# Sizes


@given(
    minimum=st.integers(1, 600),
    factor=st.floats(1.001, 50),
    capacity=st.integers(1, 5000),
    whole_from=st.one_of(st.none(), st.integers(0, 6000)),
)
def test_sizes_ascend_geometrically_to_the_capacity(
    minimum: int, factor: float, capacity: int, whole_from: int | None
) -> None:
    sizes = Buckets(minimum, factor).sizes(capacity, whole_from)
    assert all(isinstance(size, int) for size in sizes)
    assert list(sizes) == sorted(set(sizes))
    assert sizes[-1] == capacity
    # The smallest one is asked for; others are what attention kernels like, apart from the reservation itself.
    assert sizes[0] == min(minimum, capacity) or (whole_from is not None and minimum >= whole_from)
    assert all(size % ALIGNMENT == 0 for size in sizes[1:-1])
    for smaller, larger in itertools.pairwise(sizes[:-1]):
        assert smaller * factor <= larger + 1e-6 * larger or larger == smaller + ALIGNMENT
        assert larger <= max(smaller * factor + ALIGNMENT, smaller + ALIGNMENT)
    if len(sizes) > 1:
        assert capacity <= max(sizes[-2] * factor + ALIGNMENT, sizes[-2] + ALIGNMENT) or whole_from is not None
    if whole_from is not None:
        assert all(size < max(whole_from, 1) for size in sizes[:-1])


@given(minimum=st.integers(1, 40), factor=st.floats(1.01, 4), capacity=st.integers(1, 300))
def test_every_place_has_the_smallest_bucket_for_one_token_more(minimum: int, factor: float, capacity: int) -> None:
    sizes = Buckets(minimum, factor).sizes(capacity)
    every = slots_of(sizes)
    slot = every.at(0)
    for length in range(capacity):
        assert slot is every.at(length)
        assert slot.length == length
        assert slot.bucket == min(size for size in sizes if size > length)
        slot = slot.next
    assert (slot.length, slot.bucket, slot.next) == (capacity, None, None)


def test_the_default_sizes_are_those_of_the_documentation() -> None:
    assert Buckets().sizes(4096) == (256, 512, 1024, 2048, 4096)
    assert Buckets().sizes(100) == (100,)
    assert Buckets(minimum=64, factor=1.5).sizes(200) == (64, 96, 144, 200)
    # A window is read as a whole as soon as it is full.
    assert Buckets(minimum=8).sizes(40, whole_from=20) == (8, 16, 40)


def test_slots_of_one_reservation_are_made_once_and_no_copy_holds_them() -> None:
    sizes = Buckets().sizes(32768)
    every = slots_of(sizes)
    assert slots_of(sizes) is every
    assert slots_of(sizes).at(20000) is every.at(20000)
    layer = StaticLayer(32768)
    layer.update(torch.zeros(1, 1, 5, 2), torch.zeros(1, 1, 5, 2))
    # The slots of a reservation are as many as its tokens. A copy finds its own by the count.
    assert len(pickle.dumps(layer)) < 10_000
    assert pickle.loads(pickle.dumps(layer)).length == copy.deepcopy(layer).length == 5


def test_buckets_are_equal_by_value_and_survive_a_pickle() -> None:
    assert pickle.loads(pickle.dumps(Buckets(32, 1.5))) == Buckets(32, 1.5) != Buckets(32)


@pytest.mark.parametrize(
    "options",
    [
        {"minimum": 0},
        {"minimum": -8},
        {"minimum": 1.5},
        {"minimum": True},
        {"minimum": "256"},
        {"minimum": None},
        {"factor": 1},
        {"factor": 0.5},
        {"factor": float("nan")},
        {"factor": float("inf")},
        {"factor": "2"},
        {"factor": None},
    ],
    ids=str,
)
def test_buckets_that_do_not_grow_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(OptionError, match=next(iter(options))):
        Buckets(**options)


# Layers that read buckets: what they do as all layers do is in the layer matrix

READERS = {kind: make for kind, make in KINDS.items() if "reading buckets" in kind}


@torch.no_grad()
def test_a_step_reads_the_smallest_bucket_that_holds_its_token_from_the_first_slot_on() -> None:
    for layer, expected in (
        (StaticLayer(90, buckets=Buckets(minimum=16)), [16] * 16 + [32] * 16 + [64] * 32 + [90] * 26),
        # A window, and room for it to move.
        (StaticSlidingLayer(90, 6), [21] * 90),
    ):
        layer.reserved.mask_extent.mode.compiled = True
        sizes, addresses = [], set()
        for _ in range(90):
            sizes.append(layer.get_mask_sizes(1)[0])
            keys, values = layer.update(*states(2, 1, torch.Generator()))
            assert keys.shape[2] == values.shape[2] == sizes[-1]
            addresses.add((keys.data_ptr(), values.data_ptr()))
        assert sizes == expected
        assert len(addresses) == 1


def overfill(layer: CacheLayer, generator: torch.Generator) -> None:
    """A full layer refuses to say how tokens are masked, a window to take them in."""
    layer.get_mask_sizes(2)
    layer.update(*states(2, 2, generator))


@pytest.mark.parametrize("kind", ["static reading buckets", "static sliding up to a limit reading buckets"])
def test_tokens_that_do_not_fit_change_nothing(kind: str) -> None:
    generator = torch.Generator().manual_seed(2)
    layer, oracle = READERS[kind]()
    step(layer, oracle, oracle.capacity - 1, generator)
    message = rf"at most {oracle.capacity} tokens.*{oracle.length} held and 2 new"
    with torch.no_grad(), pytest.raises(CapacityError, match=message):
        overfill(layer, generator)
    step(layer, oracle, 1, generator)


def _reset_fork(layer: CacheLayer) -> CacheLayer:
    twin = layer.fork()
    twin.reset()
    return twin


WAYS: dict[str, Callable[[CacheLayer, LayerState], Any]] = {
    "reset": lambda layer, clean: layer.reset(),
    # Rows that are not in use keep what they held, until they are.
    "fewer rows, then more": lambda layer, clean: (layer.batch_select_indices([0]), layer.reset())[1],
    "fork": lambda layer, clean: _reset_fork(layer),
    "crop": lambda layer, clean: layer.crop(2),
    "load_state": lambda layer, clean: layer.load_state(clean),
}


@pytest.mark.parametrize(("kind", "way", "fill"), product(READERS, WAYS, [float("nan"), float("inf"), -float("inf")]))
def test_no_free_slot_keeps_what_is_not_finite(kind: str, way: str, fill: float) -> None:
    generator = torch.Generator().manual_seed(4)
    layer, oracle = READERS[kind]()
    step(layer, oracle, 2, generator)
    clean = layer.state()
    if way == "crop":
        layer.activate_past_recording()
    with torch.no_grad():
        for tokens in (3, 1, 1, 1):
            layer.get_mask_sizes(tokens)
            layer.update(*(torch.full_like(side, fill) for side in states(2, tokens, generator)))
    layer = WAYS[way](layer, clean) or layer
    layer.deactivate_past_recording()
    oracle = oracle if way in ("crop", "load_state") else oracle.empty()
    # The oracle looks for them in what each update returns.
    step(layer.fork(), oracle.copy(), 1, generator, batch=8)
    step(layer, oracle, 1, generator, batch=8)


# Compiled code that evicts gets the tokens that queries attend to, and holds the newest ones, whichever are more. The
# layer matrix has the same of eager code.

CASES = {
    "attends to more than it keeps": (6, 3, 4, 5),
    "keeps what it attends to": (6, 3, 4, 7),
    "keeps more than it attends to": (6, 3, 4, 8),
    "keeps everything": (6, 3, 1, 9),
    "attends to the new tokens alone": (6, 3, 0, 5),
    "attends to the new tokens alone, and keeps some": (6, 3, 0, 2),
    "a single token": (6, 1, 2, 6),
    "nothing held": (0, 3, 0, 2),
}
"""Tokens held, new tokens, held tokens that are attended to, and tokens to keep."""


def numbered(first: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values `[1, 2, tokens, 4]` that say which token they are of."""
    numbers = torch.arange(first, first + tokens, dtype=torch.float32)
    keys = numbers[None, None, :, None].expand(1, 2, tokens, 4).clone()
    return keys, -keys


def numbers_of(attended: tuple[torch.Tensor, torch.Tensor]) -> list[int]:
    """The tokens that states are of."""
    keys, values = attended
    assert torch.equal(values, -keys)
    assert torch.equal(keys, keys[:, :1, :, :1].expand_as(keys))
    return [int(number) for number in keys[0, 0, :, 0]]


@pytest.mark.usefixtures("counted")
@pytest.mark.parametrize("case", CASES)
def test_attended_tokens_and_kept_ones_are_those_of_a_list(case: str) -> None:
    held, new, past, kept = CASES[case]
    store = StaticStore(12)

    @torch.compile(fullgraph=True, backend="eager")
    def extend_and_evict(keys: torch.Tensor, values: torch.Tensor, past: int, kept: int) -> KVPair:
        attended = store.extend_and_evict(keys, values, past, kept)
        return attended[0].clone(), attended[1].clone()

    with torch.no_grad():
        if held:
            store.take_in(*numbered(0, held))
        store.validate(*numbered(held, new))
        attended = extend_and_evict(*numbered(held, new), past, kept)
        tokens = list(range(held + new))
        assert numbers_of(attended) == tokens[held - past :]
        assert (store.length, store.total) == (kept, held + new)
        # Decoding goes on with what is held.
        for step in range(held + new, held + new + 3):
            seen = numbers_of(store.take_in(*numbered(step, 1)))
            assert seen == [*tokens[-kept:], *range(held + new, step + 1)]
            assert numbers_of(store.newest(store.length)) == seen
