"""Recall over offloaded states: what a query reads is that of a layer on its device, and little travels."""

import pathlib
import pickle
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from typing_extensions import override

from fake_device import CPU, DEVICE, IS_SUPPORTED, DeviceTransfers, device
from kvlayers import CapacityError, OffloadedLayer, Quantization, RecallLayer, offload, stores
from kvlayers.core.buffer import LayerShape, TokenShape
from kvlayers.kernels.attention.packed_tensor import as_dense
from kvlayers.layers import Recall
from kvlayers.offload.transfers import BlockingTransfers
from kvlayers.planning.cache_bytes import layer_bytes
from kvlayers.quantized.quantized_store import QuantizedStore
from matrix import once
from offloaded_pair import HEAD_DIM, HEADS, KV_HEADS, OffloadedPair

BATCH = 2
FEW_BITS = Quantization(nbits=4, residual_length=16, sink_tokens=16, q_group_size=8)


@dataclass(frozen=True)
class Kind:
    """How the pages of a layer are held.

    Attributes:
        recall: which pages are read.
        store: makes the store.
        page_bytes: bytes of a page, keys and values of one KV head.
        to_a_page: tokens after which the tenth token more fills a page, or packs one.
    """

    recall: Recall
    store: Callable[[], stores.TokenStore]
    page_bytes: int
    to_a_page: int

    def layer(self) -> RecallLayer:
        return RecallLayer(self.recall, store=self.store())


DENSE = Kind(
    Recall(pages=5, page_tokens=16, sink_tokens=4, recent_tokens=20), stores.DenseStore, 2 * 16 * HEAD_DIM * 4, 502
)
# A code takes half a byte, and each group of 8 of them has a scale and a zero.
PACKED = Kind(
    Recall(pages=3, page_tokens=64, sink_tokens=4, recent_tokens=8),
    lambda: QuantizedStore(FEW_BITS),
    2 * 64 * HEAD_DIM // 2 + 2 * 64 * HEAD_DIM // 8 * 2 * 4,
    16 + 6 * 64 + 71,
)
BOTH = {"dense": DENSE, "packed": PACKED}
KINDS = pytest.mark.parametrize("kind", BOTH, indirect=True)


@pytest.fixture
def kind(request: pytest.FixtureRequest) -> Kind:
    return BOTH[request.param]


on_a_device = pytest.mark.skipif(not IS_SUPPORTED, reason="PyTorch has no devices that are written in Python")

PLACES: dict[str, Callable[[pathlib.Path], tuple[offload.Prefetcher, torch.device]]] = {
    "disk": lambda path: (offload.Prefetcher(offload.DiskMemory(path)), CPU),
    "host": lambda path: (offload.Prefetcher(transfers=BlockingTransfers), DEVICE),
    "host, late copies": lambda path: (offload.Prefetcher(transfers=lambda device: DeviceTransfers()), DEVICE),
    "disk, for a device": lambda path: (
        offload.Prefetcher(offload.DiskMemory(path), transfers=BlockingTransfers),
        DEVICE,
    ),
}
ALL_PLACES = ["disk", *(pytest.param(place, marks=on_a_device) for place in PLACES if place != "disk")]
HERE_AND_THERE = pytest.mark.parametrize("place", ALL_PLACES[:2])
EVERYWHERE = pytest.mark.parametrize(("place", "kind"), once(ALL_PLACES, BOTH), indirect=["kind"])


class Pair(OffloadedPair):
    """A layer that reads some pages, where the queries of single tokens differ from the last ones by `change`."""

    def __init__(self, place: str, path: pathlib.Path, kind: Kind = DENSE) -> None:
        self.prefetcher, where = PLACES[place](path)
        super().__init__(kind.layer, self.prefetcher, where)
        # The device of the tests does not have the kernels of the CPU.
        self.tolerance = 0 if where == CPU else None
        self.mask: Tensor | None = None
        self.change, self.query = 1.0, torch.empty(0)

    @override
    def queries(self, tokens: int) -> Tensor:
        new = super().queries(tokens)
        self.query = torch.lerp(self.query, new, self.change) if self.query.shape == new.shape else new
        return self.query

    @override
    def attention(self, query: Tensor, states: tuple[Tensor, Tensor]) -> Tensor:
        mask = None if self.mask is None else self.mask[..., : states[0].shape[2]].to(query.device)
        return scaled_dot_product_attention(query, *states, mask, enable_gqa=True)

    def check(self) -> None:
        for one, other in ((self.plain.keys, self.offloaded.keys), (self.plain.values, self.offloaded.values)):
            assert other.device == self.where
            # The CPU computes scales, and states from codes, in another order than the device does.
            torch.testing.assert_close(as_dense(one), as_dense(other).to(CPU))

    def step(self, change: float = 0.1) -> offload.Traffic:
        """What travels for a token."""
        self.change = change
        before = self.prefetcher.meter.total + offload.Traffic()
        self.update(1)
        after = self.prefetcher.meter.total
        return offload.Traffic(after.to_host - before.to_host, after.to_device - before.to_device)


OPERATIONS: tuple[Callable[[RecallLayer], object], ...] = (
    lambda layer: layer.crop(-100),
    lambda layer: layer.batch_select_indices([1, 0]),
    lambda layer: layer.batch_repeat_interleave(2),
    lambda layer: layer.load_state(layer.state()),
)


@EVERYWHERE
def test_queries_read_the_same_after_every_operation(place: str, kind: Kind, tmp_path: pathlib.Path) -> None:
    pair = Pair(place, tmp_path, kind)
    pair.update(kind.to_a_page)
    pair.update(1, steps=12)
    for operation in OPERATIONS:
        pair.both(operation)
        for tokens in (1, 1, 7, 1):
            pair.update(tokens)
        pair.check()
    # Forks without offloading share segments, which attention reads one after the other.
    pair.tolerance = None
    twin = pair.fork()
    for each in (pair, twin, pair):
        each.update(1, steps=2)
    for each in (pair, twin):
        each.check()
        assert {tensor.device for tensor in each.offloaded.state().tensors.values()} == {CPU}
    pair.both(lambda layer: layer.reset())
    pair.batch_size = 1
    pair.update(kind.to_a_page)
    pair.update(1, steps=3)
    pair.check()


@HERE_AND_THERE
def test_packed_pages_that_every_step_reads(place: str, tmp_path: pathlib.Path) -> None:
    # The first block is a sink, and the newest blocks are recent. The first of these was cropped once.
    store = QuantizedStore(replace(FEW_BITS, sink_tokens=0))
    recall = Recall(pages=2, page_tokens=64, sink_tokens=4, recent_tokens=150)
    pair = Pair(place, tmp_path, replace(PACKED, recall=recall, store=store.fork))
    pair.update(384)
    pair.both(lambda layer: layer.crop(300))
    pair.update(PACKED.to_a_page - 300 - 16)
    pair.update(1, steps=12)
    again = [pair.step(change=0.0).to_device for _ in range(4)]
    assert again == [0] * 4


@HERE_AND_THERE
def test_padded_sequences_read_the_same(place: str, tmp_path: pathlib.Path) -> None:
    pair = Pair(place, tmp_path)
    pair.update(300)
    mask = torch.ones(BATCH, 1, 1, 400, dtype=torch.bool)
    mask[0, ..., :70] = False
    pair.mask = mask
    pair.update(1, steps=10)


@EVERYWHERE
def test_eager_attention_and_other_functions_read_what_they_need(
    place: str, kind: Kind, tmp_path: pathlib.Path
) -> None:
    pair = Pair(place, tmp_path, kind)
    pair.update(kind.to_a_page)
    pair.update(1, steps=3)
    keys, values = torch.randn((2, BATCH, KV_HEADS, 1, HEAD_DIM))
    query, found = torch.randn(BATCH, HEADS, 1, HEAD_DIM), []
    for layer, where in ((pair.plain, CPU), (pair.offloaded, pair.where)):
        key, value = layer.update(keys.to(where), values.to(where))
        scores = query.to(where) @ key.repeat_interleave(2, 1).transpose(2, 3)
        attended = scores.softmax(-1) @ value.repeat_interleave(2, 1)
        found.append((attended.to(CPU), (key + 0).to(CPU), (value * 2).to(CPU)))
    torch.testing.assert_close(*found)


@pytest.mark.parametrize(("place", "kind"), once(ALL_PLACES[:2], BOTH), indirect=["kind"])
def test_what_travels_does_not_depend_on_the_length(place: str, kind: Kind, tmp_path: pathlib.Path) -> None:
    all_chosen, sums = BATCH * KV_HEADS * int(kind.recall.pages) * kind.page_bytes, []
    for times in (2, 8):
        pair = Pair(place, tmp_path, kind)
        pair.update(kind.to_a_page + 256 * times)
        pair.change = 0.1
        pair.update(1, steps=2)
        steps = [pair.step() for _ in range(10)]
        assert all(step.to_device <= all_chosen for step in steps)
        # The keys and values of the new token, or the block that is packed.
        sent = {BATCH * KV_HEADS * 2 * HEAD_DIM * 4} if kind is DENSE else {0, BATCH * KV_HEADS * kind.page_bytes}
        assert {step.to_host for step in steps} == ({0} if place == "disk" else sent)
        sums.append(sum(step.to_device for step in steps) / len(steps))
        # Queries that change little choose few pages that are not there.
        assert 0 < sums[-1] < all_chosen / 2


@KINDS
@on_a_device
def test_the_meter_counts_what_crosses(kind: Kind, tmp_path: pathlib.Path) -> None:
    pair = Pair("host", tmp_path, kind)
    pair.update(kind.to_a_page)
    pair.change = 0.2
    pair.update(1)
    for _ in range(12):
        keys, values = (torch.randn(BATCH, KV_HEADS, 1, HEAD_DIM).to(DEVICE) for _ in range(2))
        query = torch.randn(BATCH, HEADS, 1, HEAD_DIM).to(DEVICE)
        with device.watched() as crossings:
            before = pair.prefetcher.meter.total + offload.Traffic()
            scaled_dot_product_attention(query, *pair.offloaded.update(keys, values), enable_gqa=True)
            after = pair.prefetcher.meter.total
        # Beside the states, where the pages are.
        places = BATCH * KV_HEADS * int(kind.recall.pages) * torch.int64.itemsize
        assert 0 <= crossings.to_host - (after.to_host - before.to_host) <= 2 * places
        assert 0 <= crossings.to_device - (after.to_device - before.to_device) <= 4 * places


@KINDS
@on_a_device
def test_the_device_holds_a_bounded_part(kind: Kind, tmp_path: pathlib.Path) -> None:
    pair = Pair("host", tmp_path, kind)
    pair.update(3000)
    pair.update(1, steps=5)
    held = sum(tensor.nbytes for tensor in pair.offloaded.held_tensors() if tensor.device == DEVICE)
    assert held < pair.plain.nbytes / 4
    shape = LayerShape(BATCH, torch.float32, TokenShape(KV_HEADS, HEAD_DIM, HEAD_DIM))
    planned = layer_bytes(OffloadedLayer(kind.layer(), pair.prefetcher), shape, 3001)
    # The newest tokens of a packed store have room for a few more or less.
    assert planned.device + planned.copies == pytest.approx(held, rel=0.01 if kind is PACKED else 0)
    pair.both(lambda layer: layer.reset())
    assert sum(tensor.nbytes for tensor in pair.offloaded.held_tensors() if tensor.device == DEVICE) == 0


@KINDS
def test_a_pickle_has_nothing_that_is_on_the_device(kind: Kind, tmp_path: pathlib.Path) -> None:
    pair = Pair("disk", tmp_path, kind)
    pair.update(kind.to_a_page)
    pair.update(1, steps=5)
    pair.offloaded = pickle.loads(pickle.dumps(pair.offloaded))
    pair.plain = pickle.loads(pickle.dumps(pair.plain))
    pair.update(1, steps=12)
    pair.check()


class MemoryThatFills(offload.HostMemory):
    """Memory of the host that has room until it is full."""

    is_full = False

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if self.is_full:
            raise CapacityError("the memory of the test is full: empty it.")
        return super().empty(shape, dtype)


@on_a_device
def test_a_block_for_which_there_is_no_room_at_home_changes_nothing(tmp_path: pathlib.Path) -> None:
    pair = Pair("host", tmp_path, PACKED)
    memory = pair.prefetcher.memory = MemoryThatFills()
    pair.update(PACKED.to_a_page)
    pair.update(1, steps=9)
    memory.is_full = True
    with pytest.raises(CapacityError, match="full"):
        pair.offloaded.update(*torch.randn(2, BATCH, KV_HEADS, 1, HEAD_DIM).to(DEVICE))
    assert pair.offloaded.length == pair.plain.length
    memory.is_full = False
    pair.update(1, steps=3)
    pair.check()


@pytest.mark.usefixtures("usual_smoothing")
def test_pages_of_each_run_of_blocks_are_apart(tmp_path: pathlib.Path) -> None:
    """Blocks of a later run have other vectors, and are numbered from its beginning."""
    generator = torch.Generator().manual_seed(0)
    keys, values = torch.randn(2, 1, KV_HEADS, 480, 64, generator=generator)
    keys[:, 0, :130, 5] *= 30
    keys[:, 1, :130, 40] *= 30
    recall = Recall(pages=3, page_tokens=64, sink_tokens=4, recent_tokens=8)
    plain, other = (
        RecallLayer(recall, store=QuantizedStore(Quantization(nbits=4, residual_length=16, sink_tokens=4)))
        for _ in range(2)
    )
    offloaded = OffloadedLayer(other, offload.Prefetcher(offload.DiskMemory(tmp_path)))
    for start in range(0, 400, 64):
        end = min(start + 64, 400)
        for layer in (plain, offloaded):
            layer.update(keys[:, :, start:end], values[:, :, start:end])
    assert len(plain.store.runs) > 1
    for token in range(400, 480):
        query = torch.randn(1, HEADS, 1, 64, generator=generator)
        new = keys[:, :, token : token + 1], values[:, :, token : token + 1]
        found = [layer.update(*new) for layer in (plain, offloaded)]
        assert torch.equal(*(scaled_dot_product_attention(query, *states, enable_gqa=True) for states in found))
