"""Bytes that a store of tokens would hold."""

import functools
from dataclasses import dataclass

import torch

from kvlayers.errors import UnsupportedLayerError
from kvlayers.quantizers.contract import Side
from kvlayers.stores import DenseStore, QuantizedStore, StaticStore, TokenStore
from kvlayers.stores.buffer import StateForm
from kvlayers.stores.packed_blocks import GROWTH_DIVISOR, MINIMUM_GROWTH, SIDES, packed_forms
from kvlayers.stores.quantization import block_tokens, blocks_beyond
from kvlayers.stores.residual import most_in_residual, residual_behind_blocks, unpacked_residual

FOLLOWED = 1
"""The length hint that caches are made with to be planned. A number of a store that is this one follows the hint."""

COUNTER_BYTES = torch.int64.itemsize
"""Bytes of a count of tokens on a device."""

Forms = tuple[StateForm, StateForm]


@dataclass(frozen=True)
class Intake:
    """What a store takes in.

    Attributes:
        forms: forms of the keys and of the values.
        tokens: how many come at once, and are held.
        length_hint: the most tokens that the whole cache is made for.
    """

    forms: Forms
    tokens: int
    length_hint: int

    def following(self, number: int | None) -> int | None:
        """A number of a store, where it follows the length hint that of this plan."""
        return self.length_hint if number == FOLLOWED else number


def pair_bytes(forms: Forms, tokens: int) -> int:
    """Bytes of the keys and values of so many tokens."""
    return sum(batch * kv_heads * tokens * head_dim * dtype.itemsize for batch, kv_heads, head_dim, dtype, _ in forms)


@functools.singledispatch
def store_bytes(store: TokenStore, intake: Intake) -> int:
    """Bytes of a store that is made like an empty one, and takes in tokens: the `nbytes` that it then has.

    Raises:
        UnsupportedLayerError: it is not known how it grows.
    """
    raise UnsupportedLayerError(
        f"expected a store of kvlayers, whose growth is known, but saw a {type(store).__name__}: register its "
        "arithmetic with kvlayers.planning.store_bytes.store_bytes.register, or leave the cache out of the names."
    )


@store_bytes.register
def _dense(store: DenseStore, intake: Intake) -> int:
    if not intake.tokens:
        return 0
    alike = DenseStore(intake.following(store.length_hint), store.growth_divisor, store.minimum_growth)
    return pair_bytes(intake.forms, alike.grown_capacity(intake.tokens) + store.front_room)


@store_bytes.register
def _fixed(store: StaticStore, intake: Intake) -> int:
    capacity = intake.following(store.capacity) or 0
    while store.grow and capacity < intake.tokens:
        capacity = store.buckets.after(capacity)
    return reservation_bytes(store, intake.forms, capacity)


def reservation_bytes(store: StaticStore, forms: Forms, capacity: int) -> int:
    """Bytes of a reservation of so many tokens, for the sequences that there are or as many as were asked for."""
    keys, values = forms
    rows = max(keys[0], store.max_batch_size or 0)
    return pair_bytes(((rows, *keys[1:]), (rows, *values[1:])), capacity) + 2 * COUNTER_BYTES


@store_bytes.register
def _quantized(store: QuantizedStore, intake: Intake) -> int:
    given, forms, tokens = store.quantization, intake.forms, intake.tokens
    quantizers = given.quantizers(forms[0][2], forms[1][2])
    size = block_tokens(quantizers)
    room = given.sink_tokens + given.residual_length + size
    blocks = blocks_beyond(tokens, room, size)
    hint = intake.following(store.length_hint)
    if not blocks:
        residual = unpacked_residual()
        residual.length_hint = most_in_residual(room, hint, 0)
        return pair_bytes(forms, residual.grown_capacity(tokens)) if tokens else 0
    old = given.sink_tokens + blocks * size
    residual = residual_behind_blocks(size)
    residual.length_hint = most_in_residual(given.residual_length + size, hint, old, tokens - old)
    most_blocks = None if hint is None else blocks_beyond(hint, room, size)
    capacity = DenseStore(most_blocks, GROWTH_DIVISOR, MINIMUM_GROWTH).grown_capacity(blocks)
    packed = [packed_forms(quantizers[side].format, side, form, size) for side, form in zip(SIDES, forms, strict=True)]
    exact = given.sink_tokens + residual.grown_capacity(tokens - old)
    return pair_bytes(forms, exact) + sum(pair_bytes(side, capacity) for side in packed)


def bits_of_packed(store: QuantizedStore, forms: Forms) -> float:
    """Bits of a state in a packed block, its part of the scales and zeros included: the mean of keys and values."""
    quantizers = store.quantization.quantizers(forms[0][2], forms[1][2])
    size = block_tokens(quantizers)

    def block(side: Side, form: StateForm) -> int:
        return pair_bytes(packed_forms(quantizers[side].format, side, form, size), 1)

    return 8 * sum(map(block, SIDES, forms)) / (pair_bytes(forms, size) // forms[0][3].itemsize)
