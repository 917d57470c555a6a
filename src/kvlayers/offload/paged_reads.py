"""Attention to a few pages of offloaded states, which alone travel to the device."""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from kvlayers.core.dense_store import DenseStore
from kvlayers.core.token_store import KVPair
from kvlayers.errors import UnsupportedLayerError
from kvlayers.kernels.attention.packed_ops import packed_like
from kvlayers.kernels.attention.packed_tensor import PackedStates
from kvlayers.kernels.attention.segment_kinds import DenseSegment, PackedSegment
from kvlayers.kernels.attention.segments import GatheredSegment, KVSegments, Segment, with_full_blocks
from kvlayers.offload.device_queue import OffloadTarget
from kvlayers.offload.prefetcher import Prefetcher
from kvlayers.offload.transfers import Traffic

Carry = Callable[[Sequence[Tensor]], Sequence[Tensor]]
"""Brings contiguous tensors of the host to the device, for all work that is queued there from now on."""

NO_PAGE = -1
"""The number of a page that is not there."""

SPARE_DIVISOR = 4
"""A pool has room for a quarter more pages than a step reads: a page that one step leaves out is often read by the next
one."""


def places_for(most: int) -> int:
    """Pages of a KV head that a pool has room for if a step reads at most `most`."""
    return most + most // SPARE_DIVISOR


class PagePool:
    """Room on a device for some pages of each KV head of each sequence.

    A page stays until its place is needed for another one, and the pages that were read last the longest ago go first.
    So the pages of the last step are there for the next one, and only other pages travel.

    Args:
        states: the offloaded tokens, for the shapes and dtypes of their tensors.
        page_slots: slots of a page, the third dimension of the tensors: tokens of dense states, and 1 for packed ones,
            of which a page is a block.
        most: most pages that a step reads of a KV head.
        device: where the states are computed.

    Attributes:
        segment: the pages on the device, in tensors `[batch, kv_heads, places * page_slots, ...]`.
        page_slots: slots of a page.
    """

    def __init__(self, states: DenseSegment | PackedSegment, page_slots: int, most: int, device: torch.device) -> None:
        self.page_slots = page_slots
        places = places_for(most)
        batch, kv_heads = states.tensors[0].shape[:2]
        shape = (batch, kv_heads, places * page_slots)
        # Zeros, as a kernel may read places that nothing was brought to: a weight of 0 does not cancel what is not a
        # number. And a tensor that is made in inference mode could not be written to outside of it.
        with torch.inference_mode(False):
            rooms = [torch.zeros((*shape, each.shape[3]), dtype=each.dtype, device=device) for each in states.tensors]
        self.segment = with_full_blocks(states.with_tensors(rooms))
        # Both on the host: the number of the page in each place, and the step that read it last.
        self._pages = torch.full((batch, kv_heads, places), NO_PAGE)
        self._read_in = torch.zeros((batch, kv_heads, places), dtype=torch.int64)
        self._step = 0

    @property
    def places(self) -> int:
        """Pages of a KV head that there is room for."""
        return int(self._pages.shape[2])

    def bring(self, states: DenseSegment | PackedSegment, pages: Tensor, carry: Carry) -> Tensor:
        """Have pages on the device.

        Args:
            states: the offloaded tokens.
            pages: numbers of the pages, int64 `[batch, kv_heads, wanted]` on the host, `NO_PAGE` for none.
            carry: brings pages that are not there.

        Returns:
            The place of each page, int64 `[batch, kv_heads, wanted]` on the host.
        """
        self._step += 1
        is_there = pages[..., None] == self._pages[:, :, None]
        self._read_in.masked_fill_(is_there.any(dim=2), self._step)
        missing = ~is_there.any(dim=3) & (pages != NO_PAGE)
        if missing.any():
            self._load(states, pages, missing, carry)
            is_there = pages[..., None] == self._pages[:, :, None]
        return is_there.int().argmax(dim=3)

    def _load(self, states: DenseSegment | PackedSegment, pages: Tensor, missing: Tensor, carry: Carry) -> None:
        oldest_first = self._read_in.argsort(dim=2, stable=True)
        places = oldest_first.gather(2, (missing.cumsum(dim=2) - 1).clamp_(min=0))
        sequence, head, wanted = missing.nonzero(as_tuple=True)
        found, place = pages[sequence, head, wanted], places[sequence, head, wanted]
        slots = found[:, None] * self.page_slots + torch.arange(self.page_slots)
        where = sequence[:, None], head[:, None], slots
        # An error leaves places without pages, and none with another page than it says.
        self._pages[sequence, head, place] = NO_PAGE
        with torch.no_grad():
            brought = carry([each[where] for each in states.tensors])
            target = [index.to(brought[0].device) for index in (sequence, head, place)]
            for room, new in zip(self.segment.tensors, brought, strict=True):
                room.view(*room.shape[:2], self.places, self.page_slots, room.shape[3])[tuple(target)] = new
        self._pages[sequence, head, place] = found
        self._read_in[sequence, head, place] = self._step


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
        self._pools: dict[int, PagePool] = {}
        """Pages of each segment of which pages are chosen, by its place among these: runs of blocks are apart."""
        self._always_read: dict[tuple[int, int], DenseSegment | PackedSegment] = {}
        """Tokens that every step reads, by the positions of the first of them and behind the last."""
        self._newest = DenseStore()
        self._newest_end: int | None = None
        """Position behind the last token of `_newest`, `None` before there is one."""

    def __reduce__(self) -> tuple[type["PagedReads"], tuple[()]]:
        # A copy of a layer has nothing on the device.
        return PagedReads, ()

    def held_tensors(self) -> Iterator[Tensor]:
        """Every tensor on the device."""
        for segment in (*(pool.segment for pool in self._pools.values()), *self._always_read.values()):
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
            length = keys.shape[2]
            if length % page_tokens == 0:
                # The layer has looked at the keys of a page that is full now.
                nbytes = (page_tokens - 1) * new[0].nbytes
                prefetcher.meter.count(layer.index, Traffic(to_device=nbytes))
            if self._newest_end == length - 1:
                # Kept on the device, as the token before it is there.
                self._newest.append(*new)
                self._newest_end = length
        bring = functools.partial(self._bring, page_tokens, functools.partial(prefetcher.carry, layer, device), device)
        snapshot = replace(keys.snapshot, device=device, bring=bring)
        return packed_like(keys, values, snapshot)

    def _bring(self, page_tokens: int, carry: Carry, device: torch.device, segments: KVSegments) -> KVSegments:
        """Segments on the device, instead of where the pages are held."""
        brought: list[Segment] = []
        pools = 0
        always_read: dict[tuple[int, int], DenseSegment | PackedSegment] = {}
        end, tokens, are_packed, choose = 0, segments.tokens, segments.holds_packed, segments.holds_gathered
        for segment in segments.in_order:
            start, end = end, end + segment.tokens
            if are_packed and not isinstance(segment.source, PackedSegment):
                brought.append(segment)
            elif isinstance(segment, GatheredSegment):
                brought.append(self._pages(pools, segment, page_tokens, device, carry))
                pools += 1
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
        return KVSegments(tuple(brought))

    def _pages(
        self, number: int, segment: GatheredSegment, page_tokens: int, device: torch.device, carry: Carry
    ) -> GatheredSegment:
        """Chosen pages, from the pool with a number."""
        source = segment.source
        slots = page_tokens if isinstance(source, DenseSegment) else 1
        starts, counts = torch.stack([segment.starts, segment.counts]).cpu()
        pages = starts.div(slots, rounding_mode="floor").masked_fill_(counts == 0, NO_PAGE)
        pool = self._pools.get(number)
        if pool is None or pool.places < pages.shape[2]:
            pool = self._pools[number] = PagePool(source, slots, pages.shape[2], device)
        places = pool.bring(source, pages, carry)
        inside = places * slots + starts % slots
        return replace(segment, source=pool.segment, starts=inside.to(device))

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
