"""Whatever is delayed, accesses to offloaded states come in order. Without any one mark of order there is a race."""

import gc
import pickle
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

import kvlayers
from fake_device import DEVICE, IS_SUPPORTED
from kvlayers import OffloadedLayer
from kvlayers.core.dense_store import DenseStore
from kvlayers.layers import TokenLayer
from kvlayers.offload import Prefetcher, transfers
from kvlayers.offload.device_queue import DeviceQueue
from kvlayers.stores import QuantizedStore, TokenStore
from race_detector import FakeStream, Race, RaceDetector
from short_steps import shorten_steps

pytestmark = pytest.mark.skipif(not IS_SUPPORTED, reason="PyTorch has no devices that are written in Python")

KV_HEADS, HEAD_DIM = 2, 8
QUANTIZATION = kvlayers.Quantization(nbits=4, residual_length=8, sink_tokens=2, q_group_size=8)
LAYERS: dict[str, Callable[[], TokenLayer]] = {
    "dynamic": lambda: kvlayers.DynamicLayer(store=DenseStore(minimum_growth=4)),
    "window": lambda: kvlayers.SlidingLayer(12),
    "static": lambda: kvlayers.StaticLayer(80, max_batch_size=2),
    "quantized": lambda: kvlayers.QuantizedLayer(QUANTIZATION),
    "evicting": lambda: kvlayers.EvictingLayer("knorm", budget=60, sink_tokens=4, recent_tokens=16),
    "evicting by queries": lambda: kvlayers.EvictingLayer("h2o", budget=60, sink_tokens=4, recent_tokens=16),
    "recall": lambda: _recall(DenseStore(), pages=5, page_tokens=16, recent_tokens=20),
    "recall of codes": lambda: _recall(QuantizedStore(QUANTIZATION), pages=3, recent_tokens=8),
}


PROMPTS = {"evicting": 100, "evicting by queries": 100, "recall": 502, "recall of codes": 470}
"""Tokens of a prompt of which some are evicted, or left out."""


def _recall(store: TokenStore, **options: int) -> TokenLayer:
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


def decode_and_pickle(kind: str) -> None:
    model = Model(kind)
    model.forward(PROMPTS.get(kind, 9))
    pickle.dumps(model.layers)


def streams_take_turns(detector: RaceDetector) -> None:
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
    decode_and_pickle("dynamic")


def test_the_current_stream_may_change(detector: RaceDetector) -> None:
    streams_take_turns(detector)


@pytest.mark.parametrize("pool", [1, 2, 3])
def test_the_user_may_have_the_same_streams(monkeypatch: pytest.MonkeyPatch, pool: int) -> None:
    with RaceDetector(pool).installed(monkeypatch) as detector:
        allocate_on_streams_of_the_pool(monkeypatch, detector)
        decode_and_change("dynamic")
        for stream in detector.pool:
            with stream:
                decode_and_change("static")


def allocate_on_streams_of_the_pool(patch: pytest.MonkeyPatch, detector: RaceDetector) -> None:
    """The user has the streams that copy, and allocates on them after every update."""
    update = OffloadedLayer.update

    def update_and_allocate(self: OffloadedLayer, *states: torch.Tensor) -> Any:
        attended = update(self, *states)
        for stream in detector.pool:
            with stream:
                torch.ones(1, device=DEVICE)
        return attended

    patch.setattr(OffloadedLayer, "update", update_and_allocate)


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


def events_come_early(direction: int) -> Callable[[pytest.MonkeyPatch], None]:
    """The events of copies in one direction do not come after the last copy."""

    def remove(patch: pytest.MonkeyPatch) -> None:
        record_event = FakeStream.record_event

        def record(self: FakeStream) -> Any:
            event = record_event(self)
            if copies(direction)(self):
                event.clock[self] -= 1
            return event

        patch.setattr(FakeStream, "record_event", record)

    return remove


def host_does_not_wait(function: str) -> Callable[[pytest.MonkeyPatch], None]:
    """The host does not wait for copies in one function of the package."""

    def called_by(transfers: Any) -> bool:
        frame = sys._getframe()
        while frame.f_back is not None and frame.f_code.co_name != function:
            frame = frame.f_back
        return frame.f_back is not None

    return skipped(transfers.StreamTransfers, "wait", called_by)


def skipped(owner: type, method: str, when: Callable[[Any], bool]) -> Callable[[pytest.MonkeyPatch], None]:
    """A method does nothing in some cases."""

    def remove(patch: pytest.MonkeyPatch) -> None:
        original = getattr(owner, method)
        patch.setattr(owner, method, lambda self, *given: None if when(self) else original(self, *given))

    return remove


def copies(direction: int) -> Callable[[Any], bool]:
    """Whether a stream, or the copy that it does, is of one direction: a cache takes two of the pool, inbound first."""

    def is_of(done: Any) -> bool:
        stream = getattr(done, "stream", done)
        pool = stream.detector.pool
        return stream in pool and pool.index(stream) % 2 == direction

    return is_of


def staged_in_memory_of_the_copying_stream(patch: pytest.MonkeyPatch) -> None:
    copy_to_device = transfers.StreamTransfers.copy_to_device
    make_room = transfers._with_room

    def copy(self: transfers.StreamTransfers, sources: Any) -> Any:
        def with_room(*given: Any) -> Any:
            with transfers._on(self._inbound):
                return make_room(*given)

        patch.setattr(transfers, "_with_room", with_room)
        return copy_to_device(self, sources)

    patch.setattr(transfers.StreamTransfers, "copy_to_device", copy)


MARKS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "copies to the device wait for computation": skipped(FakeStream, "wait_event", copies(INBOUND)),
    "copies to the host wait for computation": skipped(FakeStream, "wait_event", copies(OUTBOUND)),
    "computation waits for states to arrive": skipped(transfers._StreamCopy, "make_stream_wait", copies(INBOUND)),
    "computation waits for states that are written back": skipped(
        transfers._StreamCopy, "make_stream_wait", copies(OUTBOUND)
    ),
    "events of copies to the device come after the copies": events_come_early(INBOUND),
    "events of copies to the host come after the copies": events_come_early(OUTBOUND),
    "writing back is finished before an update": skipped(DeviceQueue, "finish_writing_back", lambda queue: True),
    "the allocator waits for copies to the device": skipped(transfers._StreamCopy, "__del__", copies(INBOUND)),
    "the allocator waits for copies to the host": skipped(transfers._StreamCopy, "__del__", copies(OUTBOUND)),
    "operations of the host wait for states that are written back": host_does_not_wait("_on_host"),
    "operations of the host wait for states that are read": host_does_not_wait("discard"),
    "a fork waits": host_does_not_wait("fork"),
    "another prefetcher waits": host_does_not_wait("use_prefetcher"),
    "a saved state waits": host_does_not_wait("state"),
    "a pickle waits": host_does_not_wait("__getstate__"),
    "a buffer that grows waits": host_does_not_wait("_host_buffer_of_staged"),
}

SCENARIOS: dict[str, tuple[Callable[[str], None], str]] = {
    "a buffer that grows waits": (decode_and_change, "dynamic"),
    "a pickle waits": (decode_and_pickle, "dynamic"),
}


@pytest.mark.parametrize("mark", MARKS)
def test_every_mark_of_order_is_needed(detector: RaceDetector, monkeypatch: pytest.MonkeyPatch, mark: str) -> None:
    # With every mark there is no race: see above.
    decode, kind = SCENARIOS.get(mark, (decode_and_change, "static"))
    MARKS[mark](monkeypatch)
    with pytest.raises(Race):
        decode(kind)


def test_the_allocator_must_be_told_of_another_current_stream(
    detector: RaceDetector, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = transfers._StreamCopy._record
    monkeypatch.setattr(
        transfers._StreamCopy,
        "_record",
        lambda self, stream: record(self, stream) if stream in detector.pool else None,
    )
    with pytest.raises(Race):
        streams_take_turns(detector)


def test_staged_states_may_not_be_in_memory_of_a_stream_that_the_user_may_have(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with RaceDetector().installed(monkeypatch) as detector:
        allocate_on_streams_of_the_pool(monkeypatch, detector)
        staged_in_memory_of_the_copying_stream(monkeypatch)
        with pytest.raises(Race):
            decode_and_change("dynamic")
