"""Pages of offloaded states on the device that computes, of which each KV head has its own."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Carry = Callable[[Sequence[Tensor]], Sequence[Tensor]]
"""Brings tensors of the host to the device, in an order with what is computed there."""

NO_PAGE = -1
"""The number of a page that is not there."""

SPARE_DIVISOR = 4
"""A pool has room for a quarter more pages than a step reads. A page that one step leaves out is often read by the
next."""


@dataclass(frozen=True, eq=False)
class PagedStates:
    """Offloaded keys and values, in pages.

    Attributes:
        keys: keys on the host, `[batch, kv_heads, tokens, key_head_dim]`.
        values: values on the host, `[batch, kv_heads, tokens, value_head_dim]`.
        page_tokens: tokens of a page. The newest page may have fewer.
    """

    keys: Tensor
    values: Tensor
    page_tokens: int

    @property
    def newest_page(self) -> int:
        """Number of the page of the newest token, which new tokens are added to."""
        return (self.keys.shape[2] - 1) // self.page_tokens

    def pages(self, states: Tensor, where: tuple[Tensor, Tensor], pages: Tensor) -> Tensor:
        """Pages of keys or of values.

        Args:
            states: the keys or the values.
            where: sequence and KV head of each page, int64 `[found]`.
            pages: number of each page, int64 `[found]`.

        Returns:
            `[found, page_tokens, head_dim]`. A page that is not full is filled up with the newest token.
        """
        tokens = pages[:, None] * self.page_tokens + torch.arange(self.page_tokens)
        return states[where[0][:, None], where[1][:, None], tokens.clamp_(max=states.shape[2] - 1)]


class PagePool:
    """Room on a device for some pages of each KV head of each sequence.

    A page that was read stays until its place is needed for another one, that which was read last the longest ago. So
    the pages of the last step are there for the next one, and only others travel.

    The newest page has a place of its own, the last one. New tokens are written to it on the device.

    Args:
        states: what the pages are of, for shapes and dtypes.
        device: where the states are computed.
        most: most pages that a step reads of a KV head, the newest one included.

    Attributes:
        keys: `[batch, kv_heads, places * page_tokens, key_head_dim]`.
        values: `[batch, kv_heads, places * page_tokens, value_head_dim]`.
        page_tokens: tokens of a page.
    """

    def __init__(self, states: PagedStates, device: torch.device, most: int) -> None:
        self.page_tokens = states.page_tokens
        places = most + most // SPARE_DIVISOR + 1

        def room(states: Tensor) -> Tensor:
            batch, kv_heads, _, head_dim = states.shape
            shape = (batch, kv_heads, places * self.page_tokens, head_dim)
            # A tensor that is made in inference mode could not be written to outside of it. Zeros, as a kernel may
            # read whole pages: a weight of 0 does not cancel what is not a number.
            with torch.inference_mode(False):
                return torch.zeros(shape, dtype=states.dtype, device=device)

        self.keys, self.values = room(states.keys), room(states.values)
        batch, kv_heads = states.keys.shape[:2]
        # Both on the host: the number of the page in each place, and the step that read it last.
        self._pages = torch.full((batch, kv_heads, places), NO_PAGE)
        self._read_in = torch.zeros((batch, kv_heads, places), dtype=torch.int64)
        self._step = 0

    @property
    def most(self) -> int:
        """Most pages that a step can read of a KV head, the newest one included."""
        return int(self._pages.shape[2])

    @property
    def _newest_place(self) -> int:
        return self.most - 1

    def bring(self, states: PagedStates, pages: Tensor, carry: Carry) -> Tensor:
        """Have pages on the device.

        Args:
            states: what the pages are of.
            pages: numbers of pages, int64 `[batch, kv_heads, wanted]` on the host, `NO_PAGE` for none.
            carry: brings pages that are not there.

        Returns:
            The place of each page, int64 `[batch, kv_heads, wanted]` on the host.
        """
        self._step += 1
        is_there = pages[..., None] == self._pages[:, :, None]
        self._read_in.masked_fill_(is_there.any(dim=2), self._step)
        missing = ~is_there.any(dim=3) & (pages != NO_PAGE)
        # A page that is wanted twice travels once.
        missing &= ~(pages[..., None] == pages[:, :, None]).tril(-1).any(dim=3)
        if missing.any():
            self._load(states, pages, missing, carry)
            is_there = pages[..., None] == self._pages[:, :, None]
        return is_there.int().argmax(dim=3)

    def _load(self, states: PagedStates, pages: Tensor, missing: Tensor, carry: Carry) -> None:
        oldest_first = self._read_in[:, :, : self._newest_place].argsort(dim=2, stable=True)
        is_newest = pages == states.newest_page
        number = ((missing & ~is_newest).cumsum(dim=2) - 1).clamp_(0, self._newest_place - 1)
        places = oldest_first.gather(2, number).masked_fill_(is_newest, self._newest_place)
        sequence, head, wanted = missing.nonzero(as_tuple=True)
        found, place = pages[sequence, head, wanted], places[sequence, head, wanted]
        where = sequence, head
        brought = carry([states.pages(each, where, found) for each in (states.keys, states.values)])
        # Until the new states are there, a place has no page: an error leaves nothing that is wrong.
        self._pages[sequence, head, place] = NO_PAGE
        device = self.keys.device
        target = sequence.to(device), head.to(device), place.to(device)
        with torch.no_grad():
            for room, new in zip((self.keys, self.values), brought, strict=True):
                room.view(*room.shape[:2], self.most, self.page_tokens, room.shape[3])[target] = new
        self._pages[sequence, head, place] = found
        self._read_in[sequence, head, place] = self._step

    def append(self, keys: Tensor, values: Tensor, position: int) -> None:
        """Write a new token to the newest page, and begin another one if that is full.

        Args:
            keys: keys on the device, `[batch, kv_heads, 1, key_head_dim]`.
            values: values on the device, `[batch, kv_heads, 1, value_head_dim]`.
            position: number of the token.
        """
        page, offset = divmod(position, self.page_tokens)
        newest = self._pages[:, :, self._newest_place]
        if offset == 0:
            newest.fill_(page)
        else:
            newest.masked_fill_(newest != page, NO_PAGE)
        slot = self._newest_place * self.page_tokens + offset
        with torch.no_grad():
            self.keys[:, :, slot : slot + 1].copy_(keys)
            self.values[:, :, slot : slot + 1].copy_(values)

    def forget_from(self, length: int) -> None:
        """Forget the pages that are not full when there are `length` tokens, or are not there any more."""
        self._pages.masked_fill_(self._pages >= length // self.page_tokens, NO_PAGE)

    def select(self, indices: Tensor) -> None:
        """Make sequence `indices[i]` sequence `i`; `indices` is int64 `[new_batch]`."""
        indices, there = indices.cpu(), indices.to(self.keys.device)
        self._pages, self._read_in = self._pages[indices], self._read_in[indices]
        with torch.inference_mode(False):
            self.keys, self.values = self.keys[there], self.values[there]

    @property
    def nbytes(self) -> int:
        """Bytes of the pool on its device."""
        return self.keys.nbytes + self.values.nbytes
