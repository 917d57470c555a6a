"""Offloaded layers on a device that is not the CPU: what is on which of the two, and what crosses between them."""

import copy
import gc
import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from typing_extensions import override

import kvlayers
from fake_device import CPU, DEVICE, IS_SUPPORTED, Crossings, DeviceTransfers, device
from kvlayers import OffloadedLayer, layers, offload
from kvlayers.kernels.attention.packed_tensor import PackedStates
from kvlayers.offload.transfers import BlockingTransfers, Transfers, transfers_for
from kvlayers.quantized.quantized_store import QuantizedStore
from matrix import once
from offloaded_pair import HEAD_DIM, KV_HEADS, TRANSFERS, OffloadedPair
from recording_transfers import devices_of, live_bytes

pytestmark = pytest.mark.skipif(not IS_SUPPORTED, reason="PyTorch has no devices that are written in Python")

WINDOW = 40
QUANTIZATION = kvlayers.Quantization(nbits=4, residual_length=16, sink_tokens=4, q_group_size=8)
IN_WINDOW = kvlayers.Quantization(nbits=4, residual_length=16, sink_tokens=0, q_group_size=8)
LAYERS: dict[str, Callable[[], layers.TokenLayer]] = {
    "dynamic": kvlayers.DynamicLayer,
    "window": lambda: kvlayers.SlidingLayer(WINDOW),
    "static": lambda: kvlayers.StaticLayer(700, max_batch_size=4),
    "static that grows": lambda: kvlayers.StaticLayer(32, grow=True),
    "static window": lambda: kvlayers.StaticSlidingLayer(700, WINDOW, max_batch_size=4),
    "quantized": lambda: kvlayers.QuantizedLayer(QUANTIZATION),
    "quantized window": lambda: kvlayers.SlidingLayer(WINDOW, store=QuantizedStore(IN_WINDOW)),
}
STATIC = ("static", "static that grows", "static window")
COUNTS = 2 * torch.int64.itemsize
"""Bytes that a reservation leaves on its device: how many tokens there are, as compiled code counts them."""

WITH_TRANSFERS = [*((kind, "late") for kind in LAYERS), ("quantized", "at once")]
"""The other tests run with immediate copies."""


class Pair(OffloadedPair):
    """A layer of a kind that is named, whose states are compared too."""

    def __init__(
        self,
        kind: str,
        transfers: Callable[[torch.device], Transfers | None] = BlockingTransfers,
        prefetcher: offload.Prefetcher | None = None,
    ) -> None:
        super().__init__(LAYERS[kind], prefetcher or offload.Prefetcher(transfers=transfers))

    @override
    def compare(self, query: Tensor, expected: tuple[Tensor, Tensor], seen: tuple[Tensor, Tensor]) -> None:
        check_equal(seen, expected)
        super().compare(query, expected, seen)

    def check(self) -> None:
        check_equal((self.offloaded.keys, self.offloaded.values), (self.plain.keys, self.plain.values))


def check_equal(seen: Any, expected: Any) -> None:
    for one, other in zip(seen, expected, strict=True):
        assert one.device == DEVICE
        # Matrix products, as quantizers have them, are not rounded alike on any two devices.
        tolerance = 1e-5 if isinstance(other, PackedStates) else 0
        torch.testing.assert_close((one + 0).to(CPU), other + 0, rtol=tolerance, atol=tolerance)


def bytes_in_use() -> int:
    """Memory of the device that is taken, without what is garbage."""
    gc.collect()
    return device.live_bytes


@pytest.fixture(scope="module", autouse=IS_SUPPORTED)
def _what_is_made_once_for_a_device_is_there() -> None:
    # Such as the matrix that quantizers rotate by.
    Pair("quantized").update(200)


# The device of the tests


def test_the_device_refuses_what_another_device_would() -> None:
    here, there = torch.ones(2, 3), torch.ones(2, 3, device=DEVICE)
    assert there.device == DEVICE
    for mixed in (
        lambda: here + there,
        lambda: torch.cat([there, here]),
        lambda: there.index_select(0, torch.tensor([0])),
        lambda: scaled_dot_product_attention(there[None], here[None], here[None]),
    ):
        with pytest.raises(RuntimeError, match="same device"):
            mixed()


# The same states


OPERATIONS: dict[str, Callable[[layers.TokenLayer], object]] = {
    "crop": lambda layer: layer.crop(-3),
    "crop to nothing": lambda layer: layer.crop(-layer.length),
    "crop to little": lambda layer: layer.crop(10),
    "reorder": lambda layer: layer.reorder_cache(torch.tensor([1, 0])),
    "select": lambda layer: layer.batch_select_indices([1]),
    "crop to little, select": lambda layer: (layer.crop(10), layer.batch_select_indices([1])),
    "repeat": lambda layer: layer.batch_repeat_interleave(2),
    "crop to little, repeat": lambda layer: (layer.crop(10), layer.batch_repeat_interleave(2)),
    "fork": lambda layer: layer.fork(),
    "reset": lambda layer: layer.reset(),
    "state": lambda layer: layer.state(),
    "end the recording": lambda layer: layer.deactivate_past_recording(),
}


@pytest.mark.parametrize(("kind", "operation", "transfers"), once(LAYERS, OPERATIONS, TRANSFERS, times=2))
def test_an_operation_is_done_at_home_and_what_follows_is_as_on_the_cpu(
    kind: str, operation: str, transfers: str
) -> None:
    pair = Pair(kind, TRANSFERS[transfers])
    pair.both(lambda layer: layer.activate_past_recording())
    for tokens in (0, 90, 0, *[1] * 12, 100):
        pair.update(tokens)
    crossings, _ = crossed(pair, lambda: pair.both(OPERATIONS[operation]))
    if transfers == "at once":
        assert (crossings.to_host, crossings.to_device, crossings.numbers) == (0, 0, 0)
        # A fork has counts of its own.
        assert device.allocated_bytes <= COUNTS * (kind in STATIC)
    assert devices_of(pair.offloaded) <= {CPU}
    pair.check()
    for tokens in (30, 0, *[1] * 12, 7):
        pair.update(tokens)
    pair.check()


@pytest.mark.parametrize(("kind", "transfers"), WITH_TRANSFERS)
def test_a_state_goes_to_a_layer_that_is_fresh_or_was_used_and_from_one_kind_of_placement_to_the_other(
    kind: str, transfers: str
) -> None:
    pair, used, fresh = (Pair(kind, TRANSFERS[transfers]) for _ in range(3))
    pair.update(90)
    pair.update(1, steps=5)
    used.update(70)
    state = pair.offloaded.state()
    assert {tensor.device for tensor in state.tensors.values()} == {CPU}
    for other, where in ((fresh, CPU), (used, CPU), (used, DEVICE)):
        tensors = {name: tensor.to(where) for name, tensor in state.tensors.items()}
        other.plain.load_state(state)
        other.offloaded.load_state(layers.LayerState(state.kind, tensors, {**state.facts}))
        other.check()
        other.update(1, steps=5)
        assert devices_of(other.offloaded) <= {CPU}


@pytest.mark.parametrize(("kind", "transfers"), WITH_TRANSFERS)
def test_states_that_are_put_in_place_of_others_come_home(kind: str, transfers: str) -> None:
    pair = Pair(kind, TRANSFERS[transfers])
    # Before a block is packed.
    pair.update(12 if "quantized" in kind else 90)
    pair.plain.keys = pair.plain.keys * 2
    pair.offloaded.keys = pair.offloaded.keys * 2
    pair.check()
    pair.update(1, steps=3)


@pytest.mark.parametrize(("kind", "place"), once(LAYERS, ["privateuseone:0", "privateuseone"]))
def test_a_form_that_is_reserved_early_is_that_of_the_states_to_come(kind: str, place: str) -> None:
    pair = Pair(kind)
    for layer, where in ((pair.plain, CPU), (pair.offloaded, torch.device(place))):
        no_tokens = torch.empty((2, KV_HEADS, 0, HEAD_DIM), device=where)
        layer.lazy_initialization(no_tokens, no_tokens)
    assert devices_of(pair.offloaded) <= {CPU}
    pair.check()
    pair.update(21)
    pair.update(1, steps=12)


@pytest.mark.parametrize("kind", LAYERS)
def test_where_tensors_are_made_by_default_does_not_matter(kind: str) -> None:
    with DEVICE:
        layer = OffloadedLayer(LAYERS[kind](), offload.Prefetcher(transfers=BlockingTransfers))
        for tokens in (30, *itertools.repeat(1, 10)):
            layer.update(*torch.randn(2, 2, KV_HEADS, tokens, HEAD_DIM).unbind())
        layer.batch_select_indices([1, 0])
        layer.batch_repeat_interleave(2)
        twin = layer.fork()
        twin.load_state(layer.state())
        for one in (layer, twin):
            one.update(*torch.randn(2, 4, KV_HEADS, 1, HEAD_DIM).unbind())
            assert devices_of(one) <= {CPU}


def test_a_device_without_streams_is_served_without() -> None:
    pair = Pair("dynamic", transfers_for)
    pair.update(30)
    pair.update(1, steps=3)


def test_states_without_memory_stay_where_they_are() -> None:
    layer = OffloadedLayer(kvlayers.DynamicLayer())
    keys, _ = layer.update(*torch.empty(2, 2, KV_HEADS, 3, HEAD_DIM, device="meta").unbind())
    assert keys.shape[2] == 3


@pytest.mark.parametrize("kind", LAYERS)
def test_inference_mode_and_no_grad_may_take_turns(kind: str) -> None:
    pair = Pair(kind)
    for step in range(12):
        with torch.inference_mode() if step // 2 % 2 == 0 else torch.no_grad():
            pair.update(1 if step else 60)


def test_many_layers_share_a_device_whatever_is_late_and_in_any_order() -> None:
    transfers, chance = DeviceTransfers(seed=5), random.Random(0)
    prefetcher = offload.Prefetcher(transfers=lambda device: transfers)
    pairs = [Pair(kind, prefetcher=prefetcher) for kind in LAYERS]
    for step in range(40):
        for pair in pairs if step < 20 else chance.sample(pairs, len(pairs) - step % 3):
            pair.update(1 if step else 60)
        if step % 10 == 9:
            for pair in pairs[::2]:
                pair.plain.reorder_cache(torch.tensor([1, 0]))
                pair.offloaded.reorder_cache(torch.tensor([1, 0], device=DEVICE))


# What crosses


def crossed(pair: Pair, act: Callable[[], object]) -> tuple[Crossings, offload.Traffic]:
    """What went over between the devices during an action, and what of that the meter has counted."""
    before = copy.copy(pair.offloaded.prefetcher.meter.total)
    with device.watched() as crossings:
        act()
    after = pair.offloaded.prefetcher.meter.total
    return crossings, offload.Traffic(after.to_host - before.to_host, after.to_device - before.to_device)


@pytest.mark.parametrize("kind", LAYERS)
def test_an_update_moves_what_the_meter_counts_and_the_host_waits_for_no_number(kind: str) -> None:
    pair, before = Pair(kind), bytes_in_use()
    for tokens in (60, *itertools.repeat(1, 70), 9, 9, 80, 1):
        new = tuple(states.to(DEVICE) for states in pair.states(tokens))
        held = live_bytes(pair.offloaded)
        crossings, counted = crossed(pair, lambda new=new: pair.offloaded.update(*new))
        del new
        assert device.live_bytes - before <= COUNTS * (kind in STATIC), "nothing is left between updates"
        assert (crossings.to_host, crossings.to_device) == (counted.to_host, counted.to_device)
        assert crossings.to_device == held
        assert crossings.numbers == 0


# What is left on the device


@pytest.mark.parametrize("kind", LAYERS)
def test_what_was_brought_is_let_go_when_the_layer_changes(kind: str) -> None:
    pair, before = Pair(kind), bytes_in_use()
    pair.update(90)
    pair.check()
    pair.both(lambda layer: layer.reset())
    assert device.live_bytes - before <= COUNTS * (kind in STATIC)


@pytest.mark.parametrize("kind", ["dynamic", "static", "quantized"])
def test_a_device_holds_two_layers_at_most_while_tokens_are_decoded(kind: str) -> None:
    prefetcher = offload.Prefetcher(transfers=BlockingTransfers)
    layers = [OffloadedLayer(LAYERS[kind](), prefetcher) for _ in range(4)]
    pair, before = Pair(kind), bytes_in_use()
    for step in range(8):
        new = [tuple(states.to(DEVICE) for states in pair.states(1 if step else 150)) for _ in layers]
        with device.watched():
            taken = device.live_bytes
            for layer, (keys, values) in zip(layers, new, strict=True):
                layer.update(keys, values)
        largest = max(layer.nbytes for layer in layers)
        if step > 1:
            assert device.peak_bytes - taken <= 2 * largest
            assert taken - before <= 2 * largest


@pytest.mark.parametrize(("kind", "transfers"), WITH_TRANSFERS)
def test_nothing_is_left_on_the_device_of_layers_that_are_gone(kind: str, transfers: str) -> None:
    before = bytes_in_use()
    prefetcher = offload.Prefetcher(transfers=TRANSFERS[transfers])
    pairs = [Pair(kind, prefetcher=prefetcher) for _ in range(3)]
    for tokens in (60, 1, 1):
        for pair in pairs:
            pair.update(tokens)
    del pair, pairs, prefetcher
    assert bytes_in_use() == before


# Where there is little memory


@pytest.mark.parametrize("kind", ["dynamic", "static", "quantized"])
def test_layers_are_not_brought_ahead_where_there_is_memory_for_one_alone(kind: str) -> None:
    before = bytes_in_use()
    prefetcher = offload.Prefetcher(transfers=BlockingTransfers)
    pairs = [Pair(kind, prefetcher=prefetcher) for _ in range(3)]
    for tokens in (150, 1, 1):
        for pair in pairs:
            pair.update(tokens)
    for _ in range(3):
        for pair in pairs:
            new = pair.states(1)
            on_device = [side.to(DEVICE) for side in new]
            with device.short_of_memory(before + pair.offloaded.nbytes * 3 // 2):
                seen = pair.offloaded.update(*on_device)
            check_equal(seen, pair.plain.update(*new))
            del seen


@pytest.mark.parametrize("kind", LAYERS)
def test_an_update_that_runs_out_of_memory_leaves_the_layer_as_it_was(kind: str) -> None:
    pair = Pair(kind)
    pair.update(60)
    for held in (60, 0):
        keys, values = (states.to(DEVICE) for states in pair.states(100))
        failures, taken = 0, device.live_bytes
        for free_bytes in range(0, 1_000_000, 5_000):
            try:
                with device.short_of_memory(device.live_bytes + free_bytes):
                    pair.offloaded.update(keys, values)
            except torch.OutOfMemoryError:
                failures += 1
                assert pair.offloaded.length == pair.plain.length == held
                assert devices_of(pair.offloaded) <= {CPU}
            else:
                pair.plain.update(keys.to(CPU), values.to(CPU))
                break
            assert device.live_bytes - taken <= COUNTS * (kind in STATIC)
        else:
            pytest.fail("no memory was enough")
        assert failures
        pair.check()
        pair.update(1, steps=3)
        pair = Pair(kind)
