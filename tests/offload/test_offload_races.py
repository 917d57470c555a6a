"""Whatever is delayed, accesses to offloaded states come in order. Without any one mark of order there is a race."""

import gc
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

import kvlayers
from fake_device import DEVICE, IS_SUPPORTED
from kvlayers import OffloadedLayer, layers, stores
from kvlayers.core.dense_store import DenseStore
from kvlayers.offload import Prefetcher, transfers
from kvlayers.offload.device_queue import DeviceQueue
from race_detector import FakeStream, Race, RaceDetector
from short_steps import shorten_steps

pytestmark = pytest.mark.skipif(not IS_SUPPORTED, reason="PyTorch has no devices that are written in Python")

KV_HEADS, HEAD_DIM = 2, 8
QUANTIZATION = kvlayers.Quantization(nbits=4, residual_length=8, sink_tokens=2, q_group_size=8)
LAYERS: dict[str, Callable[[], layers.TokenLayer]] = {
    "dynamic": lambda: kvlayers.DynamicLayer(store=DenseStore(minimum_growth=4)),
    "window": lambda: kvlayers.SlidingLayer(12),
    "static": lambda: kvlayers.StaticLayer(80, max_batch_size=2),
    "quantized": lambda: kvlayers.QuantizedLayer(QUANTIZATION),
    "evicting": lambda: kvlayers.EvictingLayer("knorm", budget=60, sink_tokens=4, recent_tokens=16),
    "evicting by queries": lambda: kvlayers.EvictingLayer("h2o", budget=60, sink_tokens=4, recent_tokens=16),
    "recall": lambda: _recall(DenseStore(), pages=5, page_tokens=16, recent_tokens=20),
    "recall of codes": lambda: _recall(stores.QuantizedStore(QUANTIZATION), pages=3, recent_tokens=8),
}


PROMPTS = {"evicting": 100, "evicting by queries": 100, "recall": 502, "recall of codes": 470}
"""Tokens of a prompt of which some are evicted, or left out."""


def _recall(store: stores.TokenStore, **options: int) -> layers.TokenLayer:
    return kvlayers.RecallLayer(kvlayers.layers.Recall(sink_tokens=4, **options), store=store)


@pytest.fixture(autouse=True)
def _few_tokens_between_evictions(monkeypatch: pytest.MonkeyPatch) -> None:
    shorten_steps(monkeypatch)


@pytest.fixture
def detector(monkeypatch: pytest.MonkeyPatch) -> Iterator[RaceDetector]:
    """The device of the tests has streams, whose races raise `Race`."""
    # As a quantizer's constants would: made once, and brought to the device by a copy that the host waits for.
    Model("quantized").forward(200)
    with RaceDetector().installed(monkeypatch) as detector:
        yield detector
        gc.collect()


class Model:
    """Some layers of attention over offloaded states."""

    def __init__(self, kind: str) -> None:
        prefetcher = Prefetcher(transfers=transfers.transfers_for)
        self.layers = [OffloadedLayer(LAYERS[kind](), prefetcher) for _ in range(3)]

    def forward(self, tokens: int, times: int = 1) -> None:
        for _ in range(times):
            for layer in self.layers:
                # Made on the device: the host waits for nothing.
                keys, values = (torch.ones(2, KV_HEADS, tokens, HEAD_DIM, device=DEVICE) for _ in range(2))
                query = torch.ones(2, 2 * KV_HEADS, tokens, HEAD_DIM, device=DEVICE)
                scaled_dot_product_attention(query, *layer.update(keys, values), enable_gqa=True)

    def each(self, act: Callable[[OffloadedLayer], Any]) -> None:
        for layer in self.layers:
            act(layer)

    def fork(self) -> "Model":
        twin = Model.__new__(Model)
        twin.layers = [layer.fork() for layer in self.layers]
        twin.use_another_prefetcher()
        return twin

    def use_another_prefetcher(self) -> None:
        prefetcher = self.layers[0].prefetcher.for_another_cache()
        self.each(lambda layer: layer.use_prefetcher(prefetcher))


CHANGES: tuple[Callable[[OffloadedLayer], Any], ...] = (
    lambda layer: layer.crop(-2),
    lambda layer: layer.deactivate_past_recording(),
    lambda layer: layer.reorder_cache(torch.tensor([1, 0])),
    lambda layer: layer.state(),
)


def decode_and_change(kind: str) -> None:
    """A prompt and tokens; what the host does in between; and the cache goes while its copies are under way."""
    model = Model(kind)
    model.each(lambda layer: layer.activate_past_recording())
    model.forward(PROMPTS.get(kind, 9))
    model.forward(1, times=5)
    read = [layer.keys for layer in model.layers]
    for change in CHANGES:
        model.each(change)
        model.forward(7)
        model.forward(1, times=3)
    twin = model.fork()
    model.forward(1)
    twin.forward(1, times=2)
    model.use_another_prefetcher()
    model.each(lambda layer: layer.reorder_cache(torch.tensor([1, 0])))
    model.forward(1, times=2)
    del model, twin, read
    gc.collect()
    torch.ones(1, device=DEVICE)


def test_the_current_stream_may_change(detector: RaceDetector) -> None:
    """Two streams decode in turn, each after the other one, and each reuses what memory it may in between."""
    model = Model("dynamic")
    turn, other = FakeStream(detector, "one stream"), FakeStream(detector, "the other stream")
    turn.join(detector.current.clock)
    for tokens in (9, 1, 1, 1):
        with turn:
            model.forward(tokens)
        with other:
            torch.ones(1, device=DEVICE)
        other.wait_event(turn.record_event())
        turn, other = other, turn
    del model
    gc.collect()
    for stream in (turn, other):
        with stream:
            torch.ones(1, device=DEVICE)


@pytest.mark.parametrize("kind", LAYERS)
def test_nothing_races(detector: RaceDetector, kind: str) -> None:
    decode_and_change(kind)
    assert detector.current.clock.keys() >= {detector.current, *detector.pool[:2]}


def test_nothing_races_with_a_pickle(detector: RaceDetector) -> None:
    model = Model("dynamic")
    model.forward(9)
    pickle.dumps(model.layers)


@pytest.mark.parametrize("pool", [1, 2, 3])
def test_the_user_may_have_the_same_streams(monkeypatch: pytest.MonkeyPatch, pool: int) -> None:
    """And allocate on the streams that copy, after every update."""
    update = OffloadedLayer.update

    def update_and_allocate(self: OffloadedLayer, *states: torch.Tensor) -> Any:
        attended = update(self, *states)
        for stream in detector.pool:
            with stream:
                torch.ones(1, device=DEVICE)
        return attended

    with RaceDetector(pool).installed(monkeypatch) as detector:
        monkeypatch.setattr(OffloadedLayer, "update", update_and_allocate)
        decode_and_change("dynamic")
        for stream in detector.pool:
            with stream:
                decode_and_change("static")


def test_memory_outlives_a_copy_that_fails_halfway(detector: RaceDetector) -> None:
    made = transfers.StreamTransfers(DEVICE)
    source = torch.ones(4, 2, device=DEVICE)
    pairs = [
        (transfers.BufferRows(torch.empty(4, width), 0, 4), transfers.BufferRows(source, 0, 4)) for width in (2, 3)
    ]
    with pytest.raises(RuntimeError, match="must match"):
        made.copy_to_host(pairs)
    del source, pairs
    gc.collect()
    torch.ones(1, device=DEVICE)


# Without a mark of order

INBOUND, OUTBOUND = 0, 1


MARKS: dict[str, tuple[type, str, int | None]] = {
    "copies to the device wait for computation": (FakeStream, "wait_event", INBOUND),
    "copies to the host wait for computation": (FakeStream, "wait_event", OUTBOUND),
    "computation waits for states to arrive": (transfers._StreamCopy, "make_stream_wait", INBOUND),
    "computation waits for states that are written back": (transfers._StreamCopy, "make_stream_wait", OUTBOUND),
    "writing back is finished before an update": (DeviceQueue, "finish_writing_back", None),
    "the allocator waits for copies to the device": (transfers._StreamCopy, "__del__", INBOUND),
    "the allocator waits for copies to the host": (transfers._StreamCopy, "__del__", OUTBOUND),
    "the host waits": (transfers.StreamTransfers, "wait", None),
}
"""Methods that then do nothing, for streams and copies of one direction: a cache takes two streams, inbound first."""


@pytest.mark.parametrize(("owner", "method", "direction"), MARKS.values(), ids=MARKS)
def test_every_mark_of_order_is_needed(
    detector: RaceDetector, monkeypatch: pytest.MonkeyPatch, owner: type, method: str, direction: int | None
) -> None:
    original = getattr(owner, method)

    def skipped(self: Any, *given: Any) -> Any:
        stream = getattr(self, "stream", self)
        is_of = direction is None or (stream in detector.pool and detector.pool.index(stream) % 2 == direction)
        return None if is_of else original(self, *given)

    monkeypatch.setattr(owner, method, skipped)
    # With every mark there is no race: see above.
    with pytest.raises(Race):
        decode_and_change("static")
