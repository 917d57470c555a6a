"""Attention to a few pages of offloaded states, which alone travel to the device."""

import functools
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from kvlayers.attention.packed_ops import packed_pair
from kvlayers.attention.packed_tensor import PackedStates
from kvlayers.attention.segments import DenseSegment, GatheredSegment, KVSegments, Segment
from kvlayers.offload.device_queue import OffloadTarget
from kvlayers.offload.page_pool import NO_PAGE, Carry, PagePool
from kvlayers.offload.prefetcher import Prefetcher
from kvlayers.offload.traffic import Traffic
from kvlayers.stores.contract import KVPair
from kvlayers.stores.dense import DenseStore

class PagedReads:
    """What one offloaded layer has on its device while each of its queries reads a few pages.

    The layer takes in a new token where its states are held, and the token is kept on the device too. When attention
    shows the query, the layer chooses pages, and those that are not on the device are brought there. To know them, the
    host waits for the query in any case.

    On the device are the pages of the last step, which the next step is expected to read again (`PagePool`), the newest
    tokens, and the first ones. So nothing need be copied ahead.

    The states are in full precision.
    """

    def __init__(self) -> None:
        self._pool: PagePool | None = None
        self._first: DenseSegment | None = None
        self._newest = DenseStore()
        self._newest_end = 0
        """Position behind the last token of `_newest`."""

    def __reduce__(self) -> tuple[type["PagedReads"], tuple[()]]:
        # A copy of a layer has nothing on the device.
        return PagedReads, ()

    def held_tensors(self) -> Iterator[Tensor]:
        """Every tensor on the device."""
        for segment in (self._first, None if self._pool is None else self._pool.segment):
            if segment is not None:
                yield from (segment.keys, segment.values)
        yield from self._newest.held_tensors()

    def attended(
        self, layer: OffloadTarget, prefetcher: Prefetcher, page_tokens: int, new: KVPair, states: KVPair
    ) -> KVPair:
        """The keys and values of an update, of which the chosen pages are brought to the device.

        Args:
            layer: the layer.
            prefetcher: brings pages, and counts what travels.
            page_tokens: tokens of a page. Pages begin at multiples of it.
            new: keys and values of the new token on the device, `[batch, kv_heads, 1, head_dim]`.
            states: keys and values that the layer returned, over states that are where they are held.
        """
        keys, values = states
        if not isinstance(keys, PackedStates) or keys.snapshot.choose is None:
            raise TypeError(f"`states` must choose what is read, got a {type(keys).__name__}.")
        device = new[0].device
        if prefetcher.queue(device) is not None:
            prefetcher.meter.count(layer.index, Traffic(to_host=sum(each.nbytes for each in new)))
        self._add(new, keys.shape[2])
        bring = functools.partial(
            self._bring, page_tokens, functools.partial(prefetcher.carry, layer, device), device
        )
        snapshot = replace(keys.snapshot, device=device, bring=bring)
        return packed_pair(snapshot, keys.shape[1], (keys.shape[3], values.shape[3]))

    def _add(self, new: KVPair, length: int) -> None:
        """Keep the newest of `length` tokens on the device, if the one before it is there."""
        if self._newest.length and self._newest_end == length - 1:
            self._newest.append(*new)
            self._newest_end = length

    def _bring(self, page_tokens: int, carry: Carry, device: torch.device, segments: KVSegments) -> KVSegments:
        """Segments on the device, instead of where the states are held."""
        brought: list[Segment] = []
        start, tokens = 0, segments.tokens
        for segment in segments.in_order:
            end = start + segment.tokens
            if isinstance(segment, GatheredSegment):
                brought.append(self._pages(segment, page_tokens, device, carry))
            elif len(segments.in_order) == 1:
                brought.append(DenseSegment(*carry(_contiguous(segment))))
            elif end == tokens:
                brought.append(self._newest_tokens(segment, end, carry))
            else:
                brought.append(self._first_tokens(segment, carry))
            start = end
        return KVSegments(tuple(brought))

    def _pages(
        self, segment: GatheredSegment, page_tokens: int, device: torch.device, carry: Carry
    ) -> GatheredSegment:
        """Chosen pages, from the pool."""
        starts, counts = torch.stack([segment.starts, segment.counts]).cpu()
        pages = starts.div(page_tokens, rounding_mode="floor").masked_fill_(counts == 0, NO_PAGE)
        if self._pool is None or self._pool.places < pages.shape[2]:
            self._pool = PagePool(segment.source, page_tokens, pages.shape[2], device)
        places = self._pool.bring(segment.source, pages, carry)
        inside = places * page_tokens + starts % page_tokens
        return replace(segment, source=self._pool.segment, starts=inside.to(device))

    def _newest_tokens(self, segment: DenseSegment, end: int, carry: Carry) -> DenseSegment:
        """The newest tokens, which end at position `end`."""
        newest = self._newest
        if self._newest_end != end or newest.length < segment.tokens:
            newest.clear()
            keys, values = carry(_contiguous(segment))
            newest.validate(keys, values)
            newest.append(keys, values)
            self._newest_end = end
        newest.drop_oldest(newest.length - segment.tokens)
        return DenseSegment(*newest.newest(segment.tokens))

    def _first_tokens(self, segment: DenseSegment, carry: Carry) -> DenseSegment:
        """The first tokens, which stay as they are."""
        if self._first is None or self._first.tokens != segment.tokens:
            self._first = DenseSegment(*carry(_contiguous(segment)))
        return self._first


def _contiguous(segment: DenseSegment) -> list[Tensor]:
    return [segment.keys.contiguous(), segment.values.contiguous()]
