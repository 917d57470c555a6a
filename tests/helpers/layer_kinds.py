"""Every kind of layer beside its oracle, the states it can be in, and the operations that it supports."""

import copy
import dataclasses
import pickle
from collections.abc import Callable

import torch

import kvlayers
from agreement import check_at_rest, continue_decoding, roll_back, step
from eviction_oracle import KeptOracle
from kvlayers import (
    CacheLayer,
    DynamicLayer,
    EvictingLayer,
    OffloadedLayer,
    Quantization,
    QuantizedLayer,
    SlidingLayer,
    StaticLayer,
    StaticSlidingLayer,
)
from kvlayers.layers import TokenLayer, layer_names
from kvlayers.offload import Prefetcher
from kvlayers.rope.rotary import Rotary
from kvlayers.stores import Buckets, QuantizedStore
from oracle import INV_FREQ, BucketOracle, Oracle, QuantizedOracle, RecentOracle, SinkOracle
from other_package import RecentLayer, SteppedStore
from recording_transfers import recording_transfers

WINDOW = 8


QUANTIZATION = Quantization(nbits=8, q_group_size=2, residual_length=5, sink_tokens=3)


# Groups along tokens on both sides, so that blocks are cut within groups, and 3 bits, whose codes are in two planes.
QUANTIZATION_ALONG_TOKENS = Quantization(nbits=3, q_group_size=2, residual_length=0, sink_tokens=0)


QUANTIZATION_BY_FIXED_SCALES = Quantization(
    "fp8", residual_length=5, sink_tokens=3, key_scales=0.02, value_scales=(0.01, 0.03)
)


def _quantized_window(window: int) -> tuple[SlidingLayer, Oracle]:
    quantization = dataclasses.replace(QUANTIZATION, sink_tokens=0)
    layer = SlidingLayer(window, QuantizedStore(quantization))
    return layer, QuantizedOracle(quantization, window=window, room=layer.room)


def _offloaded(layer: TokenLayer, oracle: Oracle) -> tuple[CacheLayer, Oracle]:
    return OffloadedLayer(layer, Prefetcher(transfers=recording_transfers)), oracle


def _evicting(per_head: bool, **amount: float) -> tuple[EvictingLayer, KeptOracle]:
    layer = EvictingLayer("knorm", sink_tokens=2, recent_tokens=4, per_head=per_head, **amount)
    return layer, KeptOracle("knorm", 2, 4, per_head, **amount)


def _recall() -> CacheLayer:
    return kvlayers.RecallLayer(kvlayers.layers.Recall(pages=2, page_tokens=8, sink_tokens=2, recent_tokens=4))


def _sink(window: int, sinks: int, padding: list[int] | None = None) -> tuple[CacheLayer, SinkOracle]:
    layer = kvlayers.SinkLayer(window, sinks, Rotary(INV_FREQ, "halves"), left_padding=padding)
    return layer, SinkOracle(window, sinks, padding)


def _reading_buckets(
    layer: StaticLayer | StaticSlidingLayer, window: int | None = None, capacity: int | None = None
) -> tuple[CacheLayer, Oracle]:
    layer.reserved.mask_extent.mode.compiled = True
    return layer, BucketOracle(window, capacity)


KINDS: dict[str, Callable[[], tuple[CacheLayer, Oracle]]] = {
    "dynamic": lambda: (DynamicLayer(), Oracle()),
    "dynamic with a hint": lambda: (DynamicLayer(length_hint=20), Oracle()),
    "sliding": lambda: (SlidingLayer(WINDOW), Oracle(WINDOW)),
    # Longer than its spare room, so that it moves to the front in several pieces.
    "sliding over a long window": lambda: (SlidingLayer(40), Oracle(40)),
    "sliding over one token": lambda: (SlidingLayer(1), Oracle(1)),
    "sliding over more than is seen": lambda: (SlidingLayer(500), Oracle(500)),
    "static": lambda: (StaticLayer(90, max_batch_size=8), Oracle(capacity=90)),
    "static that grows": lambda: (StaticLayer(4, grow=True), Oracle()),
    "static sliding": lambda: (StaticSlidingLayer(90, WINDOW, max_batch_size=8), Oracle(WINDOW)),
    "static sliding over a long window": lambda: (StaticSlidingLayer(90, 40, max_batch_size=8), Oracle(40)),
    "static sliding over less than the window": lambda: (
        StaticSlidingLayer(90, 500, max_batch_size=8),
        Oracle(500, capacity=90),
    ),
    "static sliding that grows": lambda: (StaticSlidingLayer(4, WINDOW, grow=True), Oracle(WINDOW)),
    "static reading buckets": lambda: _reading_buckets(
        StaticLayer(90, max_batch_size=8, buckets=Buckets(minimum=4, factor=1.7)), capacity=90
    ),
    "static sliding reading buckets": lambda: _reading_buckets(
        StaticSlidingLayer(400, WINDOW, max_batch_size=8, buckets=Buckets(minimum=4)), WINDOW
    ),
    "static sliding over one token reading buckets": lambda: _reading_buckets(
        StaticSlidingLayer(400, 1, max_batch_size=8), 1
    ),
    # Fills several buckets before it slides.
    "static sliding over a long window reading buckets": lambda: _reading_buckets(
        StaticSlidingLayer(400, 40, max_batch_size=8, buckets=Buckets(minimum=8, factor=1.5)), 40
    ),
    "static sliding over less than the window reading buckets": lambda: _reading_buckets(
        StaticSlidingLayer(50, 500, max_batch_size=8, buckets=Buckets(minimum=8)), 500, capacity=50
    ),
    "static sliding up to a limit reading buckets": lambda: _reading_buckets(
        StaticSlidingLayer(70, WINDOW, token_limit=70, max_batch_size=8), WINDOW, capacity=70
    ),
    "sink": lambda: _sink(WINDOW, 3),
    "sink over a long window": lambda: _sink(40, 4),
    "sink that is nearly all of the window": lambda: _sink(WINDOW, WINDOW - 1),
    "sink of padded sequences": lambda: _sink(WINDOW, 3, [0, 6]),
    "evicting": lambda: _evicting(per_head=False, keep=0.5),
    "evicting within a budget": lambda: _evicting(per_head=False, budget=24),
    "evicting from heads": lambda: _evicting(per_head=True, keep=0.5),
    "evicting from heads within a budget": lambda: _evicting(per_head=True, budget=24),
    "recall": lambda: (_recall(), Oracle()),
    "recall of codes": lambda: (
        kvlayers.RecallLayer(
            kvlayers.layers.Recall(pages=1, sink_tokens=2, recent_tokens=4), store=QuantizedStore(QUANTIZATION)
        ),
        QuantizedOracle(QUANTIZATION),
    ),
    "quantized": lambda: (QuantizedLayer(QUANTIZATION), QuantizedOracle(QUANTIZATION)),
    "quantized without sinks": lambda: (
        QuantizedLayer(QUANTIZATION_ALONG_TOKENS, length_hint=100),
        QuantizedOracle(QUANTIZATION_ALONG_TOKENS),
    ),
    "quantized by fixed scales": lambda: (
        QuantizedLayer(QUANTIZATION_BY_FIXED_SCALES),
        QuantizedOracle(QUANTIZATION_BY_FIXED_SCALES),
    ),
    "quantized sliding": lambda: _quantized_window(100),
    "quantized sliding within the residual": lambda: _quantized_window(WINDOW),
    "offloaded": lambda: _offloaded(DynamicLayer(), Oracle()),
    "offloaded sliding": lambda: _offloaded(SlidingLayer(40), Oracle(40)),
    "offloaded sink": lambda: _offloaded(*_sink(40, 4)),
    "offloaded evicting": lambda: _offloaded(*_evicting(per_head=False, budget=24)),
    "offloaded evicting from heads": lambda: _offloaded(*_evicting(per_head=True, budget=24)),
    "offloaded recall": lambda: _offloaded(_recall(), Oracle()),
    "offloaded static": lambda: _offloaded(StaticLayer(90, max_batch_size=8), Oracle(capacity=90)),
    "offloaded static that grows": lambda: _offloaded(StaticLayer(4, grow=True), Oracle()),
    "offloaded static sliding": lambda: _offloaded(StaticSlidingLayer(90, 40, max_batch_size=8), Oracle(40)),
    "offloaded quantized": lambda: _offloaded(QuantizedLayer(QUANTIZATION), QuantizedOracle(QUANTIZATION)),
    "offloaded quantized sliding": lambda: _offloaded(*_quantized_window(100)),
    "layer of another package": lambda: (RecentLayer(30, 8), RecentOracle(30, 8)),
    "store of another package": lambda: (DynamicLayer(store=SteppedStore(64)), Oracle()),
    "layer and store of another package, offloaded": lambda: _offloaded(
        RecentLayer(30, 8, SteppedStore(64)), RecentOracle(30, 8)
    ),
}


for room, layer in (("recall", "RecallLayer"), ("sink", "SinkLayer")):
    # A test removes these rooms.
    if layer not in layer_names():
        KINDS = {name: make for name, make in KINDS.items() if room not in name}


STATES: dict[str, list[int]] = {
    "empty": [],
    "after prefill": [5],
    "decoding": [5, 1, 1],
    "past the window": [5, *[1] * 40],
    "prefilled past the window": [70],
    "after several chunks": [3, 4, 1, 9, 2, 30, 1],
    "after long chunks": [30, 50, 1, 220, 1, 40, *[1] * 30],
}


Operation = Callable[[CacheLayer, Oracle], CacheLayer]


def _reset(layer: CacheLayer, oracle: Oracle) -> CacheLayer:
    layer.reset()
    oracle.reset()
    return layer


def _crop(length_of: Callable[[int], int], by_count: bool = False) -> Operation:
    """A crop to a length, or by the count of the tokens to remove, as it must be where none is left."""

    def crop(layer: CacheLayer, oracle: Oracle) -> CacheLayer:
        length = length_of(oracle.length)
        argument = length - oracle.length if by_count or length <= 0 else length
        roll_back(layer, oracle, length, lambda: layer.crop(argument))
        return layer

    return crop


def _record_and_roll_back(layer: CacheLayer, oracle: Oracle) -> CacheLayer:
    layer.activate_past_recording()
    oracle.recording = True
    generator, before = torch.Generator().manual_seed(7), oracle.length
    for tokens in (1, 4, 1):
        if oracle.fits(tokens):
            step(layer, oracle, tokens, generator)
    # A full layer records nothing, and what has left its window before does not come back.
    taken_back = min(4, oracle.length - before)
    layer.crop(-taken_back)
    oracle.truncate(oracle.length - taken_back)
    check_at_rest(layer, oracle)
    layer.crop(0)
    return layer


def _selecting(rows: list[int], select: Callable[[CacheLayer], object]) -> Operation:
    def operation(layer: CacheLayer, oracle: Oracle) -> CacheLayer:
        select(layer)
        oracle.select(rows)
        return layer

    return operation


def _expand(layer: CacheLayer, oracle: Oracle) -> CacheLayer:
    layer.expand(3)
    oracle.select([0, 0, 0, 1, 1, 1])
    # What sequences have in common may be held once.
    oracle.least_bytes = lambda tokens: 0
    return layer


def _twin(make: Callable[[CacheLayer], CacheLayer]) -> Operation:
    def twin(layer: CacheLayer, oracle: Oracle) -> CacheLayer:
        other, other_oracle = make(layer), oracle.copy()
        check_at_rest(other, other_oracle)
        # The original goes another way: neither may notice the other.
        continue_decoding(layer, oracle.copy(), torch.Generator().manual_seed(5))
        return other

    return twin


def _state_round_trip(layer: CacheLayer, oracle: Oracle) -> CacheLayer:
    state = layer.state()
    fresh = layer.fork()
    fresh.reset()
    continue_decoding(fresh, oracle.empty(), torch.Generator().manual_seed(6))
    fresh.load_state(state)
    return fresh


OPERATIONS: dict[str, Operation] = {
    "nothing": lambda layer, oracle: layer,
    "reset": _reset,
    "crop to nothing": _crop(lambda length: 0),
    "crop to half": _crop(lambda length: length // 2),
    "crop to all": _crop(lambda length: length),
    "remove none": _crop(lambda length: length, by_count=True),
    "remove one": _crop(lambda length: max(length - 1, 0), by_count=True),
    "remove three": _crop(lambda length: max(length - 3, 0), by_count=True),
    "record and roll back": _record_and_roll_back,
    "reorder": _selecting([1, 1], lambda layer: layer.reorder_cache(torch.tensor([1, 1]))),
    "select one": _selecting([1], lambda layer: layer.batch_select_indices(torch.tensor([1]))),
    "select by a mask": _selecting([1], lambda layer: layer.batch_select_indices(torch.tensor([False, True]))),
    "select more": _selecting([1, 0, 1, 1, 0], lambda layer: layer.batch_select_indices(torch.tensor([1, 0, 1, 1, 0]))),
    "repeat": _selecting([0, 0, 0, 1, 1, 1], lambda layer: layer.batch_repeat_interleave(3)),
    "expand": _expand,
    "fork": _twin(lambda layer: layer.fork()),
    # As that of a layer of transformers.
    "shallow copy": _twin(copy.copy),
    "deepcopy": _twin(copy.deepcopy),
    "pickle": _twin(lambda layer: pickle.loads(pickle.dumps(layer))),
    "state": _state_round_trip,
}
