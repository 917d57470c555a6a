"""Attention to a few pages of offloaded states, which alone travel to the device."""

import functools
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from kvlayers.attention.packed_ops import packed_like
from kvlayers.attention.packed_tensor import PackedStates
from kvlayers.attention.segment_kinds import DenseSegment, PackedSegment
from kvlayers.attention.segments import GatheredSegment, KVSegments, Segment, is_packed
from kvlayers.errors import UnsupportedLayerError
from kvlayers.offload.device_queue import OffloadTarget
from kvlayers.offload.page_pool import NO_PAGE, Carry, PagePool
from kvlayers.offload.prefetcher import Prefetcher
from kvlayers.offload.traffic import Traffic
from kvlayers.stores.contract import KVPair
from kvlayers.stores.dense import DenseStore


class PagedReads:
    """What one offloaded layer has on its device while each of its queries reads a few pages.

    The layer takes in a new token where its pages are held. When attention shows the query, the layer chooses pages,
    and chosen pages that are not on the device are brought there. To know them, the host waits for the query in any
    case.

    On the device are the pages of the last step, which the next step is expected to read again (`PagePool`), and tokens
    that every step reads. So nothing need be copied ahead.

    If the pages are packed blocks, what the store holds in full precision is on the device already. If they are in full
    precision themselves, so are the newest tokens, which are kept here too.
    """

    def __init__(self) -> None:
        self._pool: PagePool | None = None
        self._always_read: dict[tuple[int, int], DenseSegment | PackedSegment] = {}
        """Tokens that every step reads, by the positions of the first of them and behind the last."""
        self._newest = DenseStore()
        self._newest_end = 0
        """Position behind the last token of `_newest`."""

    def __reduce__(self) -> tuple[type["PagedReads"], tuple[()]]:
        # A copy of a layer has nothing on the device.
        return PagedReads, ()

    def held_tensors(self) -> Iterator[Tensor]:
        """Every tensor on the device."""
        pages = () if self._pool is None else (self._pool.segment,)
        for segment in (*pages, *self._always_read.values()):
            yield from segment.tensors
        yield from self._newest.held_tensors()

    def attended(
        self, layer: OffloadTarget, prefetcher: Prefetcher, page_tokens: int, new: KVPair, states: KVPair
    ) -> KVPair:
        """The keys and values of an update, of which the chosen pages are brought to the device.

        Args:
            layer: the layer.
            prefetcher: brings pages, and counts what travels.
            page_tokens: tokens of a page. Pages in full precision begin at multiples of it.
            new: keys and values of the new token on the device, `[batch, kv_heads, 1, head_dim]`.
            states: keys and values that the layer returned, over pages that are where they are held.
        """
        keys, values = states
        if not isinstance(keys, PackedStates) or keys.snapshot.choose is None:
            raise UnsupportedLayerError(f"`update` must return keys that choose pages, got a {type(keys).__name__}.")
        device = new[0].device
        if not keys.snapshot.segments.holds_packed:
            if keys.shape[2] % page_tokens == 0:
                # The layer has looked at the keys of a page that is full now.
                nbytes = (page_tokens - 1) * new[0].nbytes
                prefetcher.meter.count(layer.index, Traffic(to_device=nbytes))
            self._add(new, keys.shape[2])
        bring = functools.partial(self._bring, page_tokens, functools.partial(prefetcher.carry, layer, device), device)
        snapshot = replace(keys.snapshot, device=device, bring=bring)
        return packed_like(keys, values, snapshot)

    def _add(self, new: KVPair, length: int) -> None:
        """Keep the newest of `length` tokens on the device, if the one before it is there."""
        if self._newest.length and self._newest_end == length - 1:
            self._newest.append(*new)
            self._newest_end = length

    def _bring(self, page_tokens: int, carry: Carry, device: torch.device, segments: KVSegments) -> KVSegments:
        """Segments on the device, instead of where the pages are held."""
        brought: list[Segment] = []
        always_read: dict[tuple[int, int], DenseSegment | PackedSegment] = {}
        end, tokens, are_packed, choose = 0, segments.tokens, segments.holds_packed, segments.holds_gathered
        for segment in segments.in_order:
            start, end = end, end + segment.tokens
            if are_packed and not is_packed(segment):
                brought.append(segment)
            elif isinstance(segment, GatheredSegment):
                brought.append(self._pages(segment, page_tokens, device, carry))
            elif not choose:
                brought.append(segment.with_tensors(_carried(segment, carry)))
            elif end == tokens and isinstance(segment, DenseSegment):
                brought.append(self._newest_tokens(segment, end, carry))
            else:
                kept = self._always_read.get((start, end))
                kept = segment.with_tensors(_carried(segment, carry)) if kept is None else kept
                always_read[start, end] = kept
                brought.append(kept)
        if choose:
            self._always_read = always_read
        return KVSegments(tuple(brought), segments.smoothing)

    def _pages(self, segment: GatheredSegment, page_tokens: int, device: torch.device, carry: Carry) -> GatheredSegment:
        """Chosen pages, from the pool."""
        source = segment.source
        slots = page_tokens if isinstance(source, DenseSegment) else 1
        starts, counts = torch.stack([segment.starts, segment.counts]).cpu()
        pages = starts.div(slots, rounding_mode="floor").masked_fill_(counts == 0, NO_PAGE)
        if self._pool is None or self._pool.places < pages.shape[2]:
            self._pool = PagePool(source, slots, pages.shape[2], device)
        places = self._pool.bring(source, pages, carry)
        inside = places * slots + starts % slots
        return replace(segment, source=self._pool.segment, starts=inside.to(device))

    def _newest_tokens(self, segment: DenseSegment, end: int, carry: Carry) -> DenseSegment:
        """The newest tokens, which end at position `end`."""
        newest = self._newest
        if self._newest_end != end or newest.length < segment.tokens:
            keys, values = _carried(segment, carry)
            newest.clear()
            newest.validate(keys, values)
            newest.append(keys, values)
            self._newest_end = end
        newest.drop_oldest(newest.length - segment.tokens)
        return DenseSegment(*newest.newest(segment.tokens))


def _carried(segment: DenseSegment | PackedSegment, carry: Carry) -> Sequence[Tensor]:
    return carry([states.contiguous() for states in segment.tensors])
