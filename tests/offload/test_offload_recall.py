"""Recall over offloaded states: what a query reads is that of a layer on its device, and little travels."""

import copy
import gc
import pathlib
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from fake_device import CPU, DEVICE, IS_SUPPORTED, DeviceTransfers, device
from kvlayers import OffloadedLayer, Prefetcher, Quantization, Recall, RecallLayer
from kvlayers.layers.shape import LayerShape, TokenShape
from kvlayers.offload import DiskMemory, Traffic
from kvlayers.offload.transfers import BlockingTransfers
from kvlayers.stores.quantized import QuantizedStore
from race_detector import RaceDetector

KV_HEADS, HEAD_DIM = 2, 8
HEADS = 2 * KV_HEADS
PAGE = 16
RECALL = Recall(pages=5, page_tokens=PAGE, sink_tokens=4, recent_tokens=20)
PAGE_BYTES = 2 * PAGE * HEAD_DIM * 4
"""Of keys and values of one KV head."""
BATCH = 2

on_a_device = pytest.mark.skipif(not IS_SUPPORTED, reason="PyTorch has no devices that are written in Python")

PLACES: dict[str, Callable[[pathlib.Path], tuple[Prefetcher, torch.device]]] = {
    "disk": lambda path: (Prefetcher(DiskMemory(path)), CPU),
    "host": lambda path: (Prefetcher(transfers=BlockingTransfers), DEVICE),
    "host, late copies": lambda path: (Prefetcher(transfers=lambda device: DeviceTransfers()), DEVICE),
    "disk, for a device": lambda path: (Prefetcher(DiskMemory(path), transfers=BlockingTransfers), DEVICE),
}
EVERYWHERE = pytest.mark.parametrize(
    "place", ["disk", *(pytest.param(place, marks=on_a_device) for place in PLACES if place != "disk")]
)


class Pair:
    """A layer on the CPU, and one that is offloaded, which must always answer the same."""

    def __init__(self, place: str, path: pathlib.Path, recall: Recall = RECALL, make: Any = RecallLayer) -> None:
        self.prefetcher, self.where = PLACES[place](path)
        self.plain, self.offloaded = make(recall), OffloadedLayer(make(recall), self.prefetcher)
        self.batch_size = BATCH
        self.is_exact = self.where == CPU
        """The device of the tests does not have the kernels of the CPU."""
        self.generator = torch.Generator().manual_seed(0)
        self.query: Tensor | None = None

    def update(self, tokens: int, steps: int = 1, mask: Tensor | None = None, change: float = 1.0) -> None:
        """Updates, whose queries differ from the last one by a part of `change`."""
        for _ in range(steps):
            keys, values = torch.randn((2, self.batch_size, KV_HEADS, tokens, HEAD_DIM), generator=self.generator)
            query = torch.randn((self.batch_size, HEADS, tokens, HEAD_DIM), generator=self.generator)
            if self.query is not None and self.query.shape == query.shape:
                query = (1 - change) * self.query + change * query
            self.query = query
            results = []
            for layer, place in ((self.plain, CPU), (self.offloaded, self.where)):
                states = layer.update(keys.to(place), values.to(place))
                assert states[0].device == place
                shown = None if mask is None else mask[..., : states[0].shape[2]].to(place)
                result = scaled_dot_product_attention(query.to(place), *states, shown, enable_gqa=True)
                results.append(result.to(CPU))
            if self.is_exact:
                assert torch.equal(*results)
            else:
                torch.testing.assert_close(*results)

    def both(self, act: Callable[[Any], Any]) -> None:
        act(self.plain)
        act(self.offloaded)
        assert self.offloaded.length == self.plain.length
        self.batch_size = self.plain.batch_size or self.batch_size

    def check(self) -> None:
        for one, other in ((self.plain.keys, self.offloaded.keys), (self.plain.values, self.offloaded.values)):
            assert other.device == self.where
            assert torch.equal(one, other.to(CPU))

    def twin(self) -> "Pair":
        other = copy.copy(self)
        other.plain, other.offloaded = self.plain.fork(), self.offloaded.fork()
        return other

    def step(self, change: float = 0.1) -> Traffic:
        before = self.prefetcher.meter.total
        before = Traffic(before.to_host, before.to_device)
        self.update(1, change=change)
        after = self.prefetcher.meter.total
        return Traffic(after.to_host - before.to_host, after.to_device - before.to_device)


@EVERYWHERE
def test_queries_read_the_same_after_every_operation(place: str, tmp_path: pathlib.Path) -> None:
    pair = Pair(place, tmp_path)
    pair.update(300)
    pair.update(1, steps=50)
    pair.check()
    pair.update(7)
    pair.update(1, steps=20)
    pair.both(lambda layer: layer.crop(-30))
    pair.update(1, steps=40)
    pair.both(lambda layer: layer.batch_select_indices([1, 0]))
    pair.update(1, steps=3)
    pair.both(lambda layer: layer.batch_repeat_interleave(2))
    pair.update(1, steps=20)
    # Forks without offloading share segments, which attention reads one after the other.
    pair.is_exact = False
    twin = pair.twin()
    pair.update(1, steps=20)
    twin.update(1, steps=30)
    pair.check()
    twin.check()
    state = twin.offloaded.state()
    assert {tensor.device for tensor in state.tensors.values()} == {CPU}
    pair.both(lambda layer: layer.load_state(state))
    pair.update(1, steps=20)
    pair.both(lambda layer: layer.reset())
    pair.batch_size = 1
    pair.update(1, steps=200)
    pair.check()


@EVERYWHERE
def test_padded_sequences_read_the_same(place: str, tmp_path: pathlib.Path) -> None:
    pair = Pair(place, tmp_path)
    pair.update(300)
    mask = torch.ones(BATCH, 1, 1, 400, dtype=torch.bool)
    mask[0, ..., :70] = False
    pair.update(1, steps=40, mask=mask)


@EVERYWHERE
def test_all_pages_are_the_states_without_recall(place: str, tmp_path: pathlib.Path) -> None:
    pair = Pair(place, tmp_path, Recall(pages="all", page_tokens=PAGE))
    pair.update(300)
    pair.update(1, steps=5)
    pair.check()


@EVERYWHERE
def test_eager_attention_and_other_functions_read_what_they_need(place: str, tmp_path: pathlib.Path) -> None:
    pair = Pair(place, tmp_path)
    pair.update(300)
    pair.update(1, steps=3)
    keys, values = torch.randn((2, BATCH, KV_HEADS, 1, HEAD_DIM))
    query = torch.randn(BATCH, HEADS, 1, HEAD_DIM)
    found = []
    for layer, where in ((pair.plain, CPU), (pair.offloaded, pair.where)):
        key, value = layer.update(keys.to(where), values.to(where))
        scores = query.to(where) @ key.repeat_interleave(2, 1).transpose(2, 3)
        attended = scores.softmax(-1) @ value.repeat_interleave(2, 1)
        found.append((attended.to(CPU), (key + 0).to(CPU), (value * 2).to(CPU)))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


def bytes_of_a_step(place: str, path: pathlib.Path, tokens: int, steps: int = 20) -> list[Traffic]:
    pair = Pair(place, path)
    pair.update(tokens)
    pair.update(1, steps=8, change=0.1)
    return [pair.step() for _ in range(steps)]


@EVERYWHERE
def test_what_travels_does_not_depend_on_the_length(place: str, tmp_path: pathlib.Path) -> None:
    all_chosen = BATCH * KV_HEADS * RECALL.pages * PAGE_BYTES
    sums = []
    for tokens in (1000, 4000):
        steps = bytes_of_a_step(place, tmp_path, tokens)
        assert all(step.to_device <= all_chosen for step in steps)
        # The keys and values of the new token.
        to_host = 0 if place == "disk" else BATCH * KV_HEADS * 2 * HEAD_DIM * 4
        assert {step.to_host for step in steps} == {to_host}
        sums.append(sum(step.to_device for step in steps) / len(steps))
        # Queries that change little choose few pages that are not there.
        assert 0 < sums[-1] < all_chosen / 2


@EVERYWHERE
def test_pages_that_are_there_do_not_travel_again(place: str, tmp_path: pathlib.Path) -> None:
    pair = Pair(place, tmp_path)
    pair.update(997)
    pair.update(1, change=0)
    # The first page and the newest tokens, and the chosen pages of each KV head.
    pair.query = None
    first = pair.step(change=1.0)
    assert first.to_device <= BATCH * KV_HEADS * (RECALL.pages + 4) * PAGE_BYTES
    again = [pair.step(change=0.0).to_device for _ in range(4)]
    assert again == [0] * 4


@on_a_device
def test_the_meter_counts_what_crosses(tmp_path: pathlib.Path) -> None:
    pair = Pair("host", tmp_path)
    pair.update(500)
    pair.update(1, steps=5, change=0.2)
    for _ in range(40):
        keys, values = (torch.randn(BATCH, KV_HEADS, 1, HEAD_DIM).to(DEVICE) for _ in range(2))
        query = torch.randn(BATCH, HEADS, 1, HEAD_DIM).to(DEVICE)
        with device.watched() as crossings:
            before = pair.prefetcher.meter.total + Traffic()
            scaled_dot_product_attention(query, *pair.offloaded.update(keys, values), enable_gqa=True)
            after = pair.prefetcher.meter.total
        # Beside the states, where the pages are.
        places = BATCH * KV_HEADS * RECALL.pages * torch.int64.itemsize
        assert 0 <= crossings.to_host - (after.to_host - before.to_host) <= 2 * places
        assert 0 <= crossings.to_device - (after.to_device - before.to_device) <= 4 * places


@on_a_device
def test_the_device_holds_a_bounded_part(tmp_path: pathlib.Path) -> None:
    pair = Pair("host", tmp_path)
    pair.update(3000)
    pair.update(1, steps=20)
    held = sum(tensor.nbytes for tensor in pair.offloaded.held_tensors() if tensor.device == DEVICE)
    assert held < pair.plain.nbytes / 4
    shape = LayerShape(BATCH, torch.float32, TokenShape(KV_HEADS, HEAD_DIM, HEAD_DIM))
    planned = OffloadedLayer(RecallLayer(RECALL), pair.prefetcher).planned_nbytes(shape, 3001, None)
    assert planned.resident + planned.copies == held
    pair.both(lambda layer: layer.reset())
    assert sum(tensor.nbytes for tensor in pair.offloaded.held_tensors() if tensor.device == DEVICE) == 0


@pytest.fixture
def detector(monkeypatch: pytest.MonkeyPatch) -> Iterator[RaceDetector]:
    with RaceDetector().installed(monkeypatch) as detector:
        yield detector
        gc.collect()


@on_a_device
def test_nothing_races(detector: RaceDetector) -> None:
    prefetcher = Prefetcher()
    layers = [OffloadedLayer(RecallLayer(RECALL), prefetcher) for _ in range(3)]

    def forward(*chunks: int) -> None:
        for tokens in chunks:
            for layer in layers:
                keys, values = (torch.ones(2, KV_HEADS, tokens, HEAD_DIM, device=DEVICE) for _ in range(2))
                query = torch.ones(2, HEADS, tokens, HEAD_DIM, device=DEVICE)
                scaled_dot_product_attention(query, *layer.update(keys, values), enable_gqa=True)

    forward(150, *[1] * 40, 7, 1, 1)
    for layer in layers:
        layer.crop(-2)
        layer.batch_select_indices([1, 0])
    forward(1, 1)
    read = [layer.keys for layer in layers]
    forward(1)
    twins = [layer.fork() for layer in layers]
    forward(1)
    del twins, read
    layers.clear()
    gc.collect()


def test_a_pickle_has_nothing_that_is_on_the_device(tmp_path: pathlib.Path) -> None:
    pair = Pair("disk", tmp_path)
    pair.update(300)
    pair.update(1, steps=5)
    pair.offloaded = pickle.loads(pickle.dumps(pair.offloaded))
    pair.plain = pickle.loads(pickle.dumps(pair.plain))
    pair.update(1, steps=20)
    pair.check()


@EVERYWHERE
def test_packed_states_travel_as_a_whole(place: str, tmp_path: pathlib.Path) -> None:
    few_bits = Quantization(nbits=4, residual_length=64, sink_tokens=16, q_group_size=8)
    pair = Pair(
        place,
        tmp_path,
        Recall(pages=2, page_tokens=64, recent_tokens=64),
        lambda recall: RecallLayer(recall, store=QuantizedStore(few_bits)),
    )
    pair.update(600)
    pair.update(1, steps=70)
    assert pair.step().to_device >= 0.2 * pair.plain.nbytes * (place != "disk")
