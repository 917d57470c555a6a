"""Attention to a few pages of offloaded states, which alone travel to the device."""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kvlayers.attention.packed_ops import packed_pair
from kvlayers.attention.packed_tensor import PackedStates
from kvlayers.attention.segments import DenseSegment, GatheredSegment, KVSegments, PackedSegment
from kvlayers.errors import UnsupportedLayerError
from kvlayers.offload.device_queue import OffloadTarget
from kvlayers.offload.page_pool import NO_PAGE, PagedStates, PagePool
from kvlayers.offload.prefetcher import Prefetcher
from kvlayers.offload.traffic import Traffic

Choose = Callable[[Tensor, KVSegments], KVSegments]


class PagedReads:
    """The pages of one offloaded layer that are on its device, and what is needed to read them.

    A step of a layer that reads chosen pages alone never brings the other ones. The layer is updated where its states
    are held: the new token goes there, and is added to the newest page on the device. When attention shows the query,
    the layer chooses pages, and those that are not on the device are copied. To know them, the host must wait for the
    query in any case.

    The pages of the last step stay on the device. They are what the next step is expected to read, so that nothing is
    copied ahead: see `PagePool`.
    """

    def __init__(self) -> None:
        self._pool: PagePool | None = None
        self._version = -1
        self._length = 0

    def __reduce__(self) -> tuple[type["PagedReads"], tuple[()]]:
        # A copy of a layer begins without pages.
        return PagedReads, ()

    def attended(
        self, layer: OffloadTarget, prefetcher: Prefetcher, new: tuple[Tensor, Tensor], states: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Keys and values of an update, of which the chosen pages are brought to the device.

        Args:
            layer: the layer.
            prefetcher: brings pages, and counts what travels.
            new: keys and values of the new token on the device, `[batch, kv_heads, 1, head_dim]`.
            states: keys and values that the layer returned, over states that are where they are held.
        """
        keys, values = states
        if not isinstance(keys, PackedStates) or keys.snapshot.choose is None:
            raise UnsupportedLayerError(f"`update` must return keys that choose what is read, got {type(keys).__name__}.")
        device = new[0].device
        if prefetcher.queue(device) is not None:
            prefetcher.meter.count(layer.index, Traffic(to_host=sum(each.nbytes for each in new)))
        self._add(layer, new, keys.shape[2] - 1)
        choose = functools.partial(self._choose, layer, prefetcher, device, keys.snapshot.choose)
        snapshot = replace(keys.snapshot, device=device, choose=choose)
        return packed_pair(snapshot, keys.shape[1], (keys.shape[3], values.shape[3]))

    def _add(self, layer: OffloadTarget, new: tuple[Tensor, Tensor], position: int) -> None:
        if self._version != layer.version:
            # Operations of the host may have changed any page.
            self._pool, self._version = None, layer.version
        if self._pool is not None:
            if self._length != position:
                # Several tokens came at once, which nobody has added.
                self._pool.forget_from(self._length)
            self._pool.append(*new, position)
        self._length = position + 1

    def _choose(
        self,
        layer: OffloadTarget,
        prefetcher: Prefetcher,
        device: torch.device,
        choose: Choose,
        query: Tensor,
        segments: KVSegments,
    ) -> KVSegments:
        """The segments that a layer has chosen, on the device."""

        def carry(states: Any) -> Any:
            return prefetcher.carry(layer, states, device)

        chosen = []
        for segment in choose(query, segments).in_order:
            if isinstance(segment, GatheredSegment) and isinstance(segment.source, DenseSegment):
                chosen.append(self._gathered(segment, segment.source, device, carry))
            elif isinstance(segment, DenseSegment) and segment.rows is None:
                chosen.append(DenseSegment(*carry([segment.keys.contiguous(), segment.values.contiguous()])))
            else:
                raise UnsupportedLayerError("Pages of states in full precision alone can be brought to the device.")
        return KVSegments(tuple(chosen))

    def _gathered(
        self, segment: GatheredSegment, source: DenseSegment, device: torch.device, carry: Any
    ) -> GatheredSegment:
        page_tokens = self.page_tokens
        states = PagedStates(source.keys, source.values, page_tokens)
        starts, counts = segment.starts.cpu(), segment.counts.cpu()
        pages = starts.div(page_tokens, rounding_mode="floor").masked_fill_(counts == 0, NO_PAGE)
        if self._pool is None or self._pool.most < pages.shape[2]:
            self._pool = PagePool(states, device, pages.shape[2])
        places = self._pool.bring(states, pages, carry)
        there = places * page_tokens + starts % page_tokens
        return replace(segment, source=self._pool.segment, starts=there.to(device))
