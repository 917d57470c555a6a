"""A layer on the CPU beside one of the same kind that is offloaded: whatever is done to both, they must be equal."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from typing_extensions import Self

from fake_device import CPU, DEVICE, DeviceTransfers
from kvlayers import CacheLayer, OffloadedLayer
from kvlayers.layers import TokenLayer
from kvlayers.offload import Prefetcher
from kvlayers.offload.transfers import BlockingTransfers, Transfers

KV_HEADS, HEADS, HEAD_DIM = 2, 4, 8

TRANSFERS: dict[str, Callable[[torch.device], Transfers | None]] = {
    "at once": BlockingTransfers,
    "late": lambda device: DeviceTransfers(),
}
"""Late copies can go wrong in every way that immediate ones can."""


class OffloadedPair:
    """Both layers, and what they are given.

    Args:
        make: makes a layer.
        prefetcher: of the one that is offloaded.
        where: the device that it computes on.

    Attributes:
        tolerance: how far attention to both may differ; `None` for what is usual for its dtype.
    """

    def __init__(self, make: Callable[[], TokenLayer], prefetcher: Prefetcher, where: torch.device = DEVICE) -> None:
        self.plain, self.offloaded = make(), OffloadedLayer(make(), prefetcher)
        self.where, self.batch_size = where, 2
        self.generator = torch.Generator().manual_seed(0)
        self.tolerance: float | None = None

    def random(self, heads: int, tokens: int) -> Tensor:
        return torch.randn(self.batch_size, heads, tokens, HEAD_DIM, generator=self.generator)

    def queries(self, tokens: int) -> Tensor:
        return self.random(HEADS, tokens)

    def states(self, tokens: int) -> tuple[Tensor, Tensor]:
        """Keys and values of new tokens."""
        return self.random(KV_HEADS, tokens), self.random(KV_HEADS, tokens)

    def update(self, tokens: int, steps: int = 1) -> None:
        """Let both take in new tokens, so many in each step, and compare what queries make of them."""
        for _ in range(steps):
            new, query = self.states(tokens), self.queries(tokens)
            expected = self.plain.update(*new)
            seen = self.offloaded.update(*(side.to(self.where) for side in new))
            self.compare(query, expected, seen)

    def compare(self, query: Tensor, expected: tuple[Tensor, Tensor], seen: tuple[Tensor, Tensor]) -> None:
        """Fail where a query finds something else in what the offloaded layer has returned."""
        assert seen[0].device == seen[1].device == self.where
        attended = (self.attention(query.to(states[0].device), states).to(CPU) for states in (expected, seen))
        torch.testing.assert_close(*attended, rtol=self.tolerance, atol=self.tolerance)

    def attention(self, query: Tensor, states: tuple[Tensor, Tensor]) -> Tensor:
        return scaled_dot_product_attention(query, *states, enable_gqa=True)

    def both(self, act: Callable[[Any], Any]) -> None:
        """Do something to both, and go on with the layers that it makes, if it makes any."""
        made = [act(layer) for layer in (self.plain, self.offloaded)]
        if isinstance(made[1], CacheLayer):
            self.plain, self.offloaded = made
        assert self.offloaded.length == self.plain.length
        assert self.offloaded.batch_size == self.plain.batch_size
        self.batch_size = self.plain.batch_size or self.batch_size

    def fork(self) -> Self:
        """Forks of both."""
        twin = copy.copy(self)
        twin.plain, twin.offloaded = self.plain.fork(), self.offloaded.fork()
        return twin
