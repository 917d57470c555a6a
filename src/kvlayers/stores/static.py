"""Tokens in full precision, in buffers that are reserved once and keep their address."""

from typing import Any

import torch
from torch import Tensor
from typing_extensions import Self, override

from kvlayers.attention.custom_masks import ReservedColumns, columns_of, marked_for_custom_masks
from kvlayers.attention.gqa import marked_for_sdpa, shared_in_graph
from kvlayers.stores.buckets import Buckets
from kvlayers.stores.contract import KVPair
from kvlayers.stores.description import DescriptionContext, Fact, Facts
from kvlayers.stores.registry import register_store
from kvlayers.stores.reservation import ReservedStore
from kvlayers.upstream import compat
from kvlayers.utils.module_calls import in_module


@register_store
class StaticStore(ReservedStore):
    """Full-precision states in reserved buffers, which eager code and compiled code write to.

    Eager code writes at the count on the host; compiled code writes at the count on the device, and returns buckets.
    See `ReservedStore` for the arguments.
    """

    @override
    def describe(self) -> dict[str, Fact]:
        return {
            "store": self.kind,
            "capacity": self.initial_capacity,
            "whole_from": self.whole_from,
            **self.describe_reservation(),
            **self.described_arguments(),
        }

    def describe_reservation(self) -> dict[str, Fact]:
        """Facts about the reservation other than its tokens: sequences, buckets, and whether it may grow."""
        return {"max_batch_size": self.max_batch_size, **self.buckets.facts(), "grow": self.grow}

    @classmethod
    @override
    def from_description(cls, facts: Facts, context: DescriptionContext) -> Self:
        given: Any = facts
        return cls(
            capacity=given["capacity"],
            max_batch_size=given["max_batch_size"],
            buckets=Buckets.from_facts(facts),
            whole_from=given["whole_from"],
            grow=given["grow"],
            **cls.arguments_from(facts),
        )

    @classmethod
    @override
    def reserved_by(cls, facts: Facts) -> tuple[int, int]:
        given: Any = facts
        return given["capacity"], given["max_batch_size"] or 0

    @override
    def validate(self, keys: Tensor, values: Tensor) -> int:
        if torch.compiler.is_compiling() and self._keys is not None and self._values is not None:
            # Compiled code checks the buffers' tensors at each call in any case, but it does not check forms.
            held = self._keys.tensor, self._values.tensor
            if all(map(_fits, (keys, values), held)) and keys.shape[2] == values.shape[2]:
                self._validated = None
                return keys.shape[2]
        return super().validate(keys, values)

    @override
    def append(self, keys: Tensor, values: Tensor) -> None:
        if torch.compiler.is_compiling():
            self._append_at_cursor(keys, values)
        else:
            super().append(keys, values)
            self._sync_cursor()

    def _append_at_cursor(self, keys: Tensor, values: Tensor) -> None:
        tokens = keys.shape[2]
        exporting = compat.is_exporting()
        self._reserve_in_graph(tokens)
        if not exporting and self.lacks_room_for(tokens):
            self.check_room(tokens)
            self.move_to_front(self.length)
        cursor: Tensor = self._cursor  # type: ignore[assignment]
        slots = cursor + torch.arange(tokens, device=cursor.device)
        for buffer, states in zip(self._buffers(), (keys, values), strict=True):
            buffer.tensor.index_copy_(2, slots, states.detach())
        cursor.add_(tokens)
        if not exporting:
            self._advance(tokens)

    def _reserve_in_graph(self, tokens: int) -> None:
        if self._validated is not None:
            self._apply_form(tokens)
        if self._tracks_gradients or self._cursor is None or self._capacity < self.capacity:
            self._allocate(self.capacity)

    @override
    def extend(
        self, keys: Tensor, values: Tensor, past: int | None = None, prefix_states: KVPair | None = None
    ) -> KVPair:
        bucket = self._bucket_for(keys.shape[2])
        if bucket is None or prefix_states is not None:
            has_custom_mask = self._may_have_custom_mask()
            attended = super().extend(keys, values, past, prefix_states)
            return marked_for_custom_masks(*attended, self._reserved_columns()) if has_custom_mask else attended
        self.append(keys, values)
        key_buffer, value_buffer = self._buffers()
        held = key_buffer.tensor[:, :, :bucket], value_buffer.tensor[:, :, :bucket]
        return shared_in_graph(*held) if torch.compiler.is_compiling() else marked_for_sdpa(*held, keys.shape[2])

    @override
    def extend_and_evict(
        self, keys: Tensor, values: Tensor, past: int, kept: int, prefix_states: KVPair | None = None
    ) -> KVPair:
        if not torch.compiler.is_compiling():
            return super().extend_and_evict(keys, values, past, kept, prefix_states)
        total = self.total + keys.shape[2]
        self._reserve_in_graph(kept)
        attended = keys.detach(), values.detach()
        for earlier in (self.newest(past) if past else None, prefix_states):
            if earlier is not None:
                attended = (
                    torch.cat([earlier[0], attended[0]], dim=2),
                    torch.cat([earlier[1], attended[1]], dim=2),
                )
        for buffer, states in zip(self._buffers(), attended, strict=True):
            buffer.tensor[:, :, :kept].copy_(states[:, :, states.shape[2] - kept :])
        self._set_position(kept, total)
        return attended

    def _may_have_custom_mask(self) -> bool:
        """Whether a model takes in the next tokens, and has not asked for the sizes of a mask."""
        return not self.mask_extent.was_asked_at(self._slot) and (torch.compiler.is_compiling() or in_module())

    # A constant of compiled code: a number may vary there, and cannot make a class.
    @torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
    def _reserved_columns(self) -> ReservedColumns:
        # The layers of transformers reserve no more than the window.
        return columns_of(self.capacity if self.whole_from is None else self.whole_from + 1)

    def tensors(self) -> dict[str, Tensor]:
        """The tensors that compiled code writes to: `keys`, `values`, and the `position` of the next token."""
        keys, values = self._buffers()
        return {"keys": keys.tensor, "values": values.tensor, "position": self._cursor}  # type: ignore[dict-item]


def _fits(states: Tensor, held: Tensor) -> bool:
    alike = states.dim() == 4 and states.dtype == held.dtype and states.device == held.device
    return alike and (*states.shape[:2], states.shape[3]) == (*held.shape[:2], held.shape[3])
