"""Offloaded layers that evict: the same tokens as without offloading, and nothing that was evicted travels."""

import gc
import pathlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from typing_extensions import override

from fake_device import CPU, DEVICE, IS_SUPPORTED, device
from kvlayers import Quantization, errors, offload, stores
from kvlayers.eviction import ALL_QUERIES, EvictionRule, register_eviction_rule, unregister_eviction_rule
from kvlayers.eviction.evicting_layer import EvictingLayer
from kvlayers.offload.transfers import BlockingTransfers
from matrix import some
from offloaded_pair import HEAD_DIM, HEADS, KV_HEADS, TRANSFERS, OffloadedPair
from recording_transfers import buffers_of, devices_of, held_bytes
from short_steps import STEP, shorten_steps

SINKS, RECENT = 4, 16

on_a_device = pytest.mark.skipif(not IS_SUPPORTED, reason="PyTorch has no devices that are written in Python")


@dataclass(frozen=True)
class Attended(EvictionRule):
    """A token is kept for its products with the newest queries."""

    queries: int = 6

    @override
    def scores(self, keys: Tensor, values: Tensor, queries: Tensor | None) -> Tensor:
        assert queries.device == keys.device
        grouped = queries.unflatten(1, (keys.shape[1], -1)).flatten(2, 3)
        return (grouped @ keys.transpose(2, 3)).amax(2)


@pytest.fixture(scope="module", autouse=True)
def _rules_by_name() -> Iterator[None]:
    register_eviction_rule("attended in the tests")(Attended)
    register_eviction_rule("attended by all in the tests")(lambda: Attended(ALL_QUERIES))
    yield
    unregister_eviction_rule("attended in the tests")
    unregister_eviction_rule("attended by all in the tests")


@pytest.fixture(autouse=True)
def _few_tokens_between_evictions(monkeypatch: pytest.MonkeyPatch) -> None:
    shorten_steps(monkeypatch)


LAYERS: dict[str, Callable[[], EvictingLayer]] = {
    "keys": lambda: _layer("knorm", keep=0.5),
    "keys, budget": lambda: _layer("knorm", budget=60),
    "queries": lambda: _layer("attended in the tests", keep=0.25),
    "queries, budget": lambda: _layer("attended in the tests", budget=60),
    "all queries, budget": lambda: _layer("attended by all in the tests", budget=60),
}
PER_HEAD: dict[str, Callable[[], EvictingLayer]] = {
    "queries, budget, per head": lambda: _layer("attended in the tests", budget=60, per_head=True),
    "packed, per head": lambda: _layer(
        "knorm", budget=150, per_head=True, store=stores.QuantizedStore(Quantization(nbits=4))
    ),
}


def _layer(rule: Any, per_head: bool = False, **options: Any) -> EvictingLayer:
    return EvictingLayer(rule, **options, sink_tokens=SINKS, recent_tokens=RECENT, per_head=per_head)


class Pair(OffloadedPair):
    """A layer of a kind that is named, which says what it holds."""

    def __init__(self, kind: str, prefetcher: offload.Prefetcher, where: torch.device = DEVICE) -> None:
        super().__init__((LAYERS | PER_HEAD)[kind], prefetcher, where)

    @override
    def update(self, tokens: int, steps: int = 1) -> None:
        for _ in range(steps):
            super().update(tokens)
            self.check_counts()

    @override
    def both(self, act: Callable[[Any], Any]) -> None:
        super().both(act)
        self.check_counts()

    def check_counts(self) -> None:
        for name in ("length", "held_tokens", "batch_size", "exact_from"):
            assert getattr(self.offloaded, name) == getattr(self.plain, name), name
        assert self.offloaded.mask_sizes(3) == self.plain.mask_sizes(3)

    def check(self) -> None:
        one, other = self.plain.state(), self.offloaded.state()
        assert one.tensors.keys() == other.tensors.keys()
        for name, tensor in one.tensors.items():
            assert other.tensors[name].device == CPU
            torch.testing.assert_close(other.tensors[name], tensor, msg=name)

    def go_through_every_operation(self) -> None:
        self.update(200)
        for operation in OPERATIONS:
            self.update(1, steps=STEP + 4)
            self.both(operation)
            self.check()
            self.update(30)
        twin = self.fork()
        for each in (self, twin, self):
            each.update(40)
        for each in (self, twin):
            each.check()
        self.both(lambda layer: layer.reset())
        self.batch_size = 1
        self.update(120)
        self.update(1, steps=3)
        self.check()


OPERATIONS: tuple[Callable[[EvictingLayer], object], ...] = (
    lambda layer: layer.crop(-3),
    lambda layer: layer.activate_past_recording(),
    lambda layer: layer.crop(-STEP - 20),
    lambda layer: layer.deactivate_past_recording(),
    lambda layer: layer.batch_select_indices([1, 0]),
    lambda layer: layer.batch_repeat_interleave(2),
    lambda layer: layer.load_state(layer.state()),
)


# The layer matrix has those that go by keys alone.
@on_a_device
@pytest.mark.parametrize(
    ("kind", "transfers"),
    [*((kind, "late") for kind in LAYERS | PER_HEAD if "keys" not in kind), ("queries, budget", "at once")],
)
def test_the_same_tokens_are_kept_on_the_host(kind: str, transfers: str) -> None:
    pair = Pair(kind, offload.Prefetcher(transfers=TRANSFERS[transfers]), DEVICE)
    pair.go_through_every_operation()
    assert devices_of(pair.offloaded) == {CPU}


@on_a_device
@pytest.mark.parametrize(
    "give_back", [lambda layer: layer.trim(), lambda layer: layer.compact()], ids=["trim", "compact"]
)
@pytest.mark.parametrize("kind", PER_HEAD)
def test_memory_of_other_sequences_is_given_back_on_the_host(kind: str, give_back: Callable[[Any], None]) -> None:
    pair = Pair(kind, offload.Prefetcher(transfers=BlockingTransfers), DEVICE)
    pair.update(200)
    pair.both(lambda layer: layer.batch_select_indices([1]))
    before = held_bytes(pair.offloaded)
    pair.both(give_back)
    assert held_bytes(pair.offloaded) < before
    pair.update(1, steps=3)
    pair.check()


@pytest.mark.parametrize("kind", some(LAYERS | PER_HEAD, ["all queries, budget", "packed, per head"]))
def test_the_same_tokens_are_kept_on_disk(kind: str, tmp_path: pathlib.Path) -> None:
    pair = Pair(kind, offload.Prefetcher(offload.DiskMemory(tmp_path)), CPU)
    pair.go_through_every_operation()
    assert pair.offloaded.memory_tier == "disk"
    assert {type(buffer).__name__ for buffer, *_ in buffers_of(pair.offloaded)} == {"HostBuffer"}


@on_a_device
@pytest.mark.parametrize("kind", LAYERS)
def test_what_is_evicted_leaves_the_host_and_does_not_travel_there(kind: str) -> None:
    prefetcher = offload.Prefetcher(transfers=BlockingTransfers)
    pair = Pair(kind, prefetcher, DEVICE)
    pair.update(400)
    kept = pair.plain.held_tokens
    assert kept <= 200
    token = 2 * 2 * KV_HEADS * HEAD_DIM * 4
    assert prefetcher.meter.total == offload.Traffic(to_host=kept * token, to_device=0)
    assert held_bytes(pair.offloaded) <= (kept + 32) * token
    largest = kept
    for _ in range(2 * STEP + 4):
        pair.update(1)
        largest = max(largest, pair.plain.held_tokens)
    if "budget" in kind:
        assert largest <= 60 + STEP
        assert held_bytes(pair.offloaded) <= (largest + 32) * token


@on_a_device
@pytest.mark.parametrize("kind", LAYERS)
def test_between_updates_the_device_holds_queries_alone(kind: str) -> None:
    gc.collect()
    before = device.live_bytes
    pair = Pair(kind, offload.Prefetcher(transfers=BlockingTransfers), DEVICE)
    for tokens in (200, *[1] * (STEP + 4), 30, 1):
        pair.update(tokens)
        gc.collect()
        queries = sum(tensor.nbytes for tensor in pair.offloaded.held_tensors() if tensor.device == DEVICE)
        assert device.live_bytes - before <= queries
        assert queries < 2 * HEADS * HEAD_DIM * 4 * (2 * 6 if "all" not in kind else STEP + 60 + 1)


@on_a_device
@pytest.mark.parametrize("kind", [kind for kind in LAYERS if "queries" in kind])
def test_queries_that_nobody_shows_are_an_error_and_can_be_taken_back(kind: str) -> None:
    pair = Pair(kind, offload.Prefetcher(transfers=TRANSFERS["late"]), DEVICE)
    pair.update(200)
    keys, values = torch.randn(2, 2, KV_HEADS, 80, HEAD_DIM).unbind()
    for layer, place in ((pair.plain, CPU), (pair.offloaded, DEVICE)):
        layer.update(keys.to(place), values.to(place))
        for _ in range(2):
            with pytest.raises(errors.UnsupportedLayerError, match="queries"):
                layer.update(keys.to(place), values.to(place))
    pair.both(lambda layer: layer.crop(200))
    pair.check()
    pair.update(60)
    pair.update(1, steps=STEP + 4)
    pair.check()
