"""Offloaded states are right however late copies and computation are."""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import cuda_device
import kvlayers
from kvlayers.layers import TokenLayer
from kvlayers.offload import Prefetcher
from kvlayers.offload.transfers import BufferRows, Event, PendingCopy, StreamTransfers, Transfers, transfers_for
from packed_reference import random_pair

pytestmark = [*cuda_device.on_cuda, cuda_device.needs_streams]

LAYERS, HEADS, KV_HEADS, HEAD_DIM = 3, 4, 2, 64
CYCLES = 1_000_000
"""Half a millisecond: many times as long as a copy of these few states takes."""

QUANTIZATION = kvlayers.Quantization(nbits=4, residual_length=16, sink_tokens=4)
KINDS: dict[str, Callable[[], TokenLayer]] = {
    "dynamic": kvlayers.DynamicLayer,
    "window": lambda: kvlayers.SlidingLayer(40),
    "static": lambda: kvlayers.StaticLayer(300, max_batch_size=2),
    "static that grows": lambda: kvlayers.StaticLayer(32, grow=True),
    "static window": lambda: kvlayers.StaticSlidingLayer(300, 40, max_batch_size=2),
    "quantized": lambda: kvlayers.QuantizedLayer(QUANTIZATION),
}


class LateTransfers(StreamTransfers):
    """Copies that begin late."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._idle = torch.Stream(device=device)

    def copy_to_device(self, sources: Sequence[BufferRows]) -> PendingCopy:
        self._inbound.wait_event(self._later())
        return super().copy_to_device(sources)

    def copy_to_host(self, pairs: Sequence[tuple[BufferRows, BufferRows]]) -> PendingCopy:
        self._outbound.wait_event(self._later())
        return super().copy_to_host(pairs)

    def _later(self) -> Event:
        current = torch.accelerator.current_stream(self.device)
        torch.accelerator.set_stream(self._idle)
        torch.cuda._sleep(CYCLES)
        torch.accelerator.set_stream(current)
        return self._idle.record_event()


@pytest.mark.parametrize("compute", ["late", "at once"])
@pytest.mark.parametrize("copies", ["late", "at once"])
@pytest.mark.parametrize("kind", KINDS)
def test_late_work_changes_no_result(kind: str, copies: str, compute: str) -> None:
    transfers: Callable[[torch.device], Transfers | None] = LateTransfers if copies == "late" else transfers_for
    prefetcher = Prefetcher(transfers=transfers)
    plain = [KINDS[kind]() for _ in range(LAYERS)]
    offloaded = [kvlayers.OffloadedLayer(KINDS[kind](), prefetcher) for _ in range(LAYERS)]
    outs: list[Tensor] = []
    with torch.no_grad():
        for step, tokens in enumerate([90, *[1] * 25, 30, *[1] * 10]):
            query = torch.randn(2, HEADS, 1, HEAD_DIM, device=cuda_device.DEVICE)
            pairs = [
                random_pair(
                    2, KV_HEADS, tokens, HEAD_DIM, torch.float32, cuda_device.DEVICE, seed=LAYERS * step + layer
                )
                for layer in range(LAYERS)
            ]
            # All of the plain layers first, so that the offloaded ones follow each other as in a model.
            for layers in (plain, offloaded):
                for layer, pair in zip(layers, pairs, strict=True):
                    keys, values = layer.update(*pair)
                    if compute == "late":
                        torch.cuda._sleep(CYCLES)
                    outs.append(scaled_dot_product_attention(query, keys, values, enable_gqa=True))
                    # Memory that is free from here on is used again, and overwritten.
                    torch.full_like(pair[0], torch.nan)
    for step in range(0, len(outs), 2 * LAYERS):
        for layer in range(LAYERS):
            expected, seen = outs[step + layer], outs[step + LAYERS + layer]
            # The same numbers with other strides: torch may choose another kernel.
            torch.testing.assert_close(seen, expected, rtol=1e-4, atol=1e-4)
    for one, other in zip(plain, offloaded, strict=True):
        for states, expected in zip(other.peek(), one.peek(), strict=True):
            assert torch.equal(torch.clone(states).cpu(), torch.clone(expected).cpu())


def test_what_was_offloaded_outlives_its_prefetcher() -> None:
    layer = kvlayers.OffloadedLayer(kvlayers.DynamicLayer(), Prefetcher(transfers=LateTransfers))
    pair = random_pair(1, KV_HEADS, 50, HEAD_DIM, torch.float32, cuda_device.DEVICE)
    with torch.no_grad():
        layer.update(*pair)
        state = layer.state()
    expected = [states.clone() for states in pair]
    del layer
    for name, states in zip(("keys", "values"), expected, strict=True):
        assert torch.equal(state.tensors[name].cpu(), states.cpu())
