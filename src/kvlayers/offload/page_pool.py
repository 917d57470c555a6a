"""Pages of offloaded states on the device that computes, of which each KV head has its own."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kvlayers.attention.segment_kinds import DenseSegment, PackedSegment
from kvlayers.attention.segments import with_full_blocks

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
