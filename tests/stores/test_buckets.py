"""Buckets: their sizes, the places in them, and the contract of static layers whose attention reads them."""

import contextlib
import copy
import itertools
import pickle
from collections.abc import Callable

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from hypothesis.stateful import initialize, invariant, precondition, rule

from agreement import check_at_rest
from kvlayers import CapacityError, OptionError, StaticLayer, StaticSlidingLayer
from kvlayers.errors import RollbackError
from kvlayers.static.slots import ALIGNMENT, slots_of
from kvlayers.stores import Buckets
from layer_rules import MOST_ROWS, LayerRules
from matrix import product
from oracle import Oracle, states

WINDOW = 6
Layer = StaticLayer | StaticSlidingLayer


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


# Layers that read buckets

KINDS: dict[str, Callable[[], tuple[Layer, Oracle]]] = {
    "static": lambda: (
        StaticLayer(90, max_batch_size=MOST_ROWS, buckets=Buckets(minimum=4, factor=1.7)),
        Oracle(capacity=90),
    ),
    "static in one bucket": lambda: (StaticLayer(40, max_batch_size=MOST_ROWS), Oracle(capacity=40)),
    "sliding": lambda: (
        StaticSlidingLayer(400, WINDOW, max_batch_size=MOST_ROWS, buckets=Buckets(minimum=4)),
        Oracle(WINDOW),
    ),
    "sliding over one token": lambda: (StaticSlidingLayer(400, 1, max_batch_size=MOST_ROWS), Oracle(1)),
    # Fills several buckets before it slides.
    "sliding over a long window": lambda: (
        StaticSlidingLayer(400, 40, max_batch_size=MOST_ROWS, buckets=Buckets(minimum=8, factor=1.5)),
        Oracle(40),
    ),
    "sliding over less than the window": lambda: (
        StaticSlidingLayer(50, 500, max_batch_size=MOST_ROWS, buckets=Buckets(minimum=8)),
        Oracle(500, capacity=50),
    ),
    "sliding up to a limit": lambda: (
        StaticSlidingLayer(70, WINDOW, token_limit=70, max_batch_size=MOST_ROWS),
        Oracle(WINDOW, capacity=70),
    ),
}


def reading_buckets(kind: str) -> tuple[Layer, Oracle]:
    """A layer of a kind that reads buckets where no gradients are followed, and its oracle."""
    layer, oracle = KINDS[kind]()
    layer.reserved.mask_extent.mode.compiled = True
    return layer, oracle


def address(layer: Layer) -> int | None:
    """Where the keys of a layer are: the reservation, whichever tokens of it are held."""
    return None if layer.keys is None else layer.keys.untyped_storage().data_ptr()


def bucket_step(
    layer: Layer, oracle: Oracle, tokens: int, generator: torch.Generator, batch: int = 2, fill: float | None = None
) -> None:
    """An update of both: what is returned is as long as was told, and right wherever a mask lets a query look."""
    if oracle.length:
        batch = oracle.keys.shape[0]
    keys, values = states(batch, tokens, generator)
    if fill is not None:
        keys, values = torch.full_like(keys, fill), torch.full_like(values, fill)
    kv_length, kv_offset = layer.get_mask_sizes(tokens)
    seen = layer.update(keys, values)
    first = oracle.first_attended(oracle.length)
    oracle.update(keys, values)
    assert seen[0].shape[2] == seen[1].shape[2] == kv_length
    # The token at position p is in slot p - kv_offset: that is what a mask goes by.
    assert kv_offset <= first
    assert kv_length >= oracle.length - kv_offset
    expected = oracle.keys[:, :, first:], oracle.values[:, :, first:]
    for side, right in zip(seen, expected, strict=True):
        attended = side[:, :, first - kv_offset : oracle.length - kv_offset]
        torch.testing.assert_close(attended, right, rtol=0, atol=0, equal_nan=True)


def overfill(layer: Layer, batch: int, tokens: int, generator: torch.Generator) -> None:
    """More tokens than fit: a full layer refuses to say how they are masked, a window to take them in."""
    layer.get_mask_sizes(tokens)
    layer.update(*states(batch, tokens, generator))


def check_finite_where_no_token_is(layer: Layer, oracle: Oracle, generator: torch.Generator) -> None:
    """Free slots of a bucket are masked, and a NaN is not masked by a zero: there must be none."""
    twin, twin_oracle = layer.fork(), oracle.copy()
    for some, its_oracle in ((layer, oracle), (twin, twin_oracle)):
        if its_oracle.fits(1):
            batch = its_oracle.keys.shape[0] if its_oracle.length else 2
            some.get_mask_sizes(1)
            keys, values = states(batch, 1, generator)
            seen = some.update(keys, values)
            its_oracle.update(keys, values)
            assert all(bool(side.isfinite().all()) for side in seen)


class BucketMachine(LayerRules):
    """A layer that reads buckets, its oracle, and forks of both, through everything that is done to a cache."""

    layer: Layer

    @initialize(kind=st.sampled_from(sorted(KINDS)), seed=st.integers(0, 2**20))
    def begin(self, kind: str, seed: int) -> None:
        self.layer, self.oracle = reading_buckets(kind)
        self.generator = torch.Generator().manual_seed(seed)
        self.address: int | None = None
        self.may_move = False
        self.forks = []

    def add(self, tokens: int) -> None:
        if self.oracle.fits(tokens):
            with torch.no_grad():
                bucket_step(self.layer, self.oracle, tokens, self.generator)
        else:
            with torch.no_grad(), pytest.raises(CapacityError):
                overfill(self.layer, self.rows, tokens, self.generator)

    @rule(tokens=st.one_of(st.just(1), st.integers(0, 30), st.integers(60, 90)))
    def update(self, tokens: int) -> None:
        self.add(tokens)

    @rule(count=st.integers(2, 25))
    def decode(self, count: int) -> None:
        for _ in range(count):
            self.add(1)

    @rule()
    def update_under_autograd(self) -> None:
        # Masks are those of tokens then; the states have no gradient, and go where the others are.
        if self.oracle.fits(1):
            kv_length, kv_offset = self.layer.get_mask_sizes(1)
            first = self.oracle.first_attended(self.oracle.length)
            new = states(self.rows, 1, self.generator)
            seen, expected = self.layer.update(*new), self.oracle.update(*new)
            assert (kv_length, kv_offset) == (expected[0].shape[2], first)
            assert torch.equal(seen[0], expected[0])
            assert torch.equal(seen[1], expected[1])

    def roll_back(self, length: int, roll_back: Callable[[], None]) -> None:
        # A token that a window has passed is there until the window moves, so that more can be taken back than must be.
        more = 0 <= length <= self.oracle.length and not self.oracle.can_truncate(length)
        if self.oracle.can_truncate(length):
            roll_back()
        else:
            with contextlib.suppress(RollbackError) if more else pytest.raises(RollbackError):
                roll_back()
        if self.layer.length == length:
            self.oracle.truncate(length)

    @rule(length=st.integers(0, 250))
    def truncate(self, length: int) -> None:
        self.roll_back(length, lambda: self.layer.truncate(length))

    @rule(count=st.integers(0, 8))
    def remove(self, count: int) -> None:
        self.roll_back(self.oracle.length - count, lambda: self.layer.crop(-count))

    @rule(swap=st.booleans())
    def fork(self, swap: bool) -> None:
        twin, twin_oracle = self.layer.fork(), self.oracle.copy()
        kept = (self.layer, self.oracle) if swap else (twin, twin_oracle)
        if swap:
            self.layer, self.oracle = twin, twin_oracle
            self.address, self.may_move = address(twin), False
        self.forks = [*self.forks[-2:], kept]

    @rule()
    def deepcopy(self) -> None:
        self.layer = copy.deepcopy(self.layer)
        self.address = address(self.layer)

    @rule()
    def travel(self) -> None:
        # Only tokens travel, and the reservation is taken again when more come.
        self.layer = pickle.loads(pickle.dumps(self.layer))
        self.address, self.may_move = address(self.layer), True

    @rule()
    def save_and_load(self) -> None:
        state = self.layer.state()
        self.layer.reset()
        with torch.no_grad():
            self.layer.get_mask_sizes(2)
            self.layer.update(*states(1, 2, self.generator))
        self.layer.load_state(state)

    @precondition(lambda self: self.oracle.fits(4))
    @rule(fill=st.sampled_from([float("nan"), float("inf"), -float("inf")]), tokens=st.integers(1, 4))
    def take_in_what_is_not_finite_and_take_it_back(self, fill: float, tokens: int) -> None:
        length, can_crop = self.oracle.length, self.oracle.recording or not self.layer.is_sliding
        with torch.no_grad():
            bucket_step(self.layer, self.oracle, tokens, self.generator, fill=fill)
        if can_crop:
            self.layer.truncate(length)
            self.oracle.truncate(length)
        else:
            self.layer.reset()
            self.oracle.reset()
        with torch.no_grad():
            check_finite_where_no_token_is(self.layer, self.oracle, self.generator)

    @invariant()
    def agrees(self) -> None:
        for layer, oracle in [(self.layer, self.oracle), *self.forks]:
            check_at_rest(layer, oracle)

    @invariant()
    def memory_stays_where_it_is(self) -> None:
        now = address(self.layer)
        if self.address is not None and now != self.address:
            # What is recorded may take more memory than was reserved.
            assert self.may_move or self.oracle.recording
            self.may_move = False
        self.address = now


TestLayersThatReadBuckets = BucketMachine.TestCase


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_that_reads_buckets_agrees_with_the_oracle_at_every_length(kind: str, tokens: int) -> None:
    layer, oracle = reading_buckets(kind)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        while oracle.fits(tokens) and oracle.length < 150:
            bucket_step(layer, oracle, tokens, generator)
            check_at_rest(layer, oracle)
        assert oracle.length > 30
        if not oracle.fits(tokens):
            held = layer.state()
            with pytest.raises(CapacityError, match=rf"at most {oracle.capacity} tokens.*{oracle.length} held and"):
                overfill(layer, 2, tokens, generator)
            assert torch.equal(layer.state().tensors["keys"], held.tensors["keys"])
            check_at_rest(layer, oracle)


def test_a_step_reads_the_smallest_bucket_that_holds_its_token() -> None:
    layer, oracle = StaticLayer(90, buckets=Buckets(minimum=16)), Oracle(capacity=90)
    layer.reserved.mask_extent.mode.compiled = True
    generator = torch.Generator().manual_seed(0)
    sizes = []
    with torch.no_grad():
        for _ in range(90):
            sizes.append(layer.get_mask_sizes(1)[0])
            bucket_step(layer, oracle, 1, generator)
    assert sizes == [16] * 16 + [32] * 16 + [64] * 32 + [90] * 26


def test_what_a_step_reads_is_in_the_reservation_and_starts_at_its_first_slot() -> None:
    for layer in (StaticLayer(90, buckets=Buckets(minimum=16)), StaticSlidingLayer(90, WINDOW)):
        layer.reserved.mask_extent.mode.compiled = True
        seen = set()
        with torch.no_grad():
            for _ in range(80):
                layer.get_mask_sizes(1)
                keys, values = layer.update(*states(2, 1, torch.Generator()))
                seen.add((keys.data_ptr(), values.data_ptr()))
        assert len(seen) == 1


@pytest.mark.parametrize(
    ("kind", "way", "fill"),
    product(
        KINDS,
        ["reset", "crop", "fewer rows, then more", "load_state", "fork"],
        [float("nan"), float("inf"), -float("inf")],
    ),
)
def test_no_free_slot_keeps_what_is_not_finite(kind: str, way: str, fill: float) -> None:
    layer, oracle = reading_buckets(kind)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        bucket_step(layer, oracle, 2, generator)
        clean = layer.state()
        if way == "crop" and layer.is_sliding:
            layer.activate_past_recording()
            oracle.recording = True
        length = oracle.length
        for tokens in (3, 1, 1, 1):
            bucket_step(layer, oracle, tokens, generator, fill=fill)
        if way == "crop":
            layer.crop(length)
            oracle.truncate(length)
            if layer.is_sliding:
                layer.deactivate_past_recording()
                oracle.recording = False
        elif way == "load_state":
            layer.load_state(clean)
            oracle.truncate(length)
            oracle.held_from = 0
        elif way == "fewer rows, then more":
            # Rows that are not in use keep what they held, until they are.
            layer.batch_select_indices([0])
            layer.reset()
            oracle.reset()
            bucket_step(layer, oracle, 1, generator, batch=MOST_ROWS)
        elif way == "fork":
            layer = layer.fork()
            layer.reset()
            oracle.reset()
        else:
            layer.reset()
            oracle.reset()
        check_finite_where_no_token_is(layer, oracle, generator)
