"""Bytes that a cache stays within: it is exact for as long as it can be, and then rounded from its oldest tokens on."""

import bisect
import contextlib
import functools
import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from kvlayers.core.buffer import StateForm, form_of, nbytes_of
from kvlayers.core.cache_layer import CacheLayer
from kvlayers.core.dense_store import DenseStore
from kvlayers.core.description import Fact, Facts
from kvlayers.errors import CapacityError, OptionError, StateMismatchError
from kvlayers.kernels.codes.smoothing import MOST_RUNS, vectors_for
from kvlayers.memory.steps import (
    BITS,
    LADDER,
    exchange_store,
    holders,
    is_followed,
    is_shared,
    on_its_own,
    place_elsewhere,
    quantization_of,
    rounded,
    set_rows_apart,
)
from kvlayers.quantized.checks import block_of
from kvlayers.quantized.packed_blocks import GROWTH_DIVISOR as BLOCKS_GROWTH_DIVISOR
from kvlayers.quantized.quantization import Quantization, blocks_beyond
from kvlayers.quantized.quantized_store import QuantizedStore
from kvlayers.utils.units import amount_of_bytes, exact_bytes, readable_bytes, share_of

logger = logging.getLogger(__name__)

OF_FREE = "of free"
"""What stands behind a share of the free memory."""

AHEAD_DIVISOR = 32
"""Room is made for a part of the tokens more than come now, so that a residual is moved once for many steps."""


@dataclass
class Budget:
    """The bytes that a cache may take, and the steps by which it stays within them.

    Args:
        max_bytes: bytes, or a share: of full precision at `length_hint` tokens, or of the memory that is free.
        ladder: steps that may be taken, in their order.
        is_of_free: whether a share is one of free memory.
        length_hint: the tokens at which a share is one of full precision.

    Attributes:
        most_kept: the most tokens that may stay exact: none beyond the residual once the cache has given way by hand.
        note: what `explain` says of it.
        said: bits that the log has named.
        asked: tokens of the layer that has asked for room last, and its index. A cache that went back may be exact
            again.
    """

    max_bytes: int | Fraction
    ladder: tuple[str, ...] = LADDER
    is_of_free: bool = False
    length_hint: int | None = None
    most_kept: int = sys.maxsize
    note: str = ""
    said: tuple[int, ...] = ()
    asked: tuple[int, int] = (-1, 0)
    _planned: tuple[int, int, object] = (-1, 0, None)
    """For how many tokens there is room, of how many layers, and the forms of their states."""

    @classmethod
    def of(cls, max_bytes: object, ladder: object, length_hint: int | None = None) -> "Budget":
        """What the options `max_bytes` and `ladder` of a cache say.

        Raises:
            OptionError: `max_bytes` is no number of bytes and no share, or a share of what is not known; `ladder` is
                not a sequence of steps in their order, or is given without `max_bytes`.
        """
        if max_bytes is None:
            raise OptionError(f"`max_bytes` must be given with `ladder`, got ladder={ladder!r} alone: pass both.")
        steps: Any = LADDER if ladder is None else ladder
        if isinstance(steps, str) or not isinstance(steps, Sequence) or [s for s in LADDER if s in steps] != [*steps]:
            raise OptionError(
                f"`ladder` must be steps of {LADDER} in this order, got {ladder!r}: pass those that may be taken."
            )
        text = max_bytes.rstrip() if isinstance(max_bytes, str) else ""
        is_of_free, share = text.endswith(OF_FREE), share_of(text.removesuffix(OF_FREE))
        # A text with a percent sign is no number of bytes.
        amount: Any = share if "%" in text else amount_of_bytes(max_bytes, "max_bytes")  # type: ignore[arg-type]
        if share is not None and not is_of_free and length_hint is None:
            raise OptionError(
                f"`length_hint` must be given with `max_bytes={max_bytes!r}`, which is a share of the bytes of so many "
                "tokens in full precision: pass both, or '50% of free' for a share of the memory that is free."
            )
        if isinstance(amount, bool) or not isinstance(amount, int | Fraction) or amount <= 0:
            raise OptionError(
                "`max_bytes` must be a number of bytes ('2GiB'), a share of full precision up to '100%' (with "
                f"`length_hint`), or one of free memory ('50% of free'), got {max_bytes!r}: pass one, or leave it out."
            )
        return cls(amount, tuple(steps), is_of_free, length_hint)

    @property
    def bits(self) -> list[int]:
        """Bits of the steps that round."""
        return [BITS[step] for step in self.ladder if step in BITS]

    def first_bits(self, backend: str, *given: object) -> int | None:
        """Bits of the first codes of a backend, `None` if no step rounds.

        Raises:
            OptionError: bits are given as well, or the backend lacks those of a step.
        """
        if any(bits is not None for bits in given):
            raise OptionError(
                f"`nbits` must be left out with `max_bytes`, as the steps {self.ladder} say the bits, got both: leave "
                "out one of them."
            )
        return next(iter([Quantization(backend, nbits=bits).keys.nbits for bits in self.bits]), None)

    def facts(self) -> dict[str, Fact]:
        """The budget as plain facts. A share that is not settled yet belongs to this machine alone."""
        return {"max_bytes": self.max_bytes, "ladder": " ".join(self.ladder)} if isinstance(self.max_bytes, int) else {}

    @classmethod
    def from_facts(cls, facts: Facts) -> "Budget":
        """The budget with these facts. Raises as `of`."""
        return cls.of(facts["max_bytes"], str(facts["ladder"]).split())

    def fork(self) -> "Budget":
        """The budget of a fork. Both caches ask for room anew, as one of them will not write where the other does."""
        self._planned = (-1, 0, None)
        return replace(self)

    def make_room(self, cache: Any, layers: Sequence[CacheLayer], layer_idx: int, keys: Tensor, values: Tensor) -> None:
        """Give way before a forward pass takes in tokens, if they would not fit.

        Args:
            cache: the cache.
            layers: its layers, and those that are made for the pass.
            layer_idx: index of the layer that comes next, which is usually the first one.
            keys: its new keys, `[batch, kv_heads, new, head_dim]`.
            values: its new values.

        Raises:
            CapacityError: they do not fit after all steps; nothing is changed.
        """
        length, forms = layers[layer_idx].length or 0, (form_of(keys), form_of(values))
        tokens, (last, known_layers, known_forms) = length + keys.shape[2], self._planned
        before, self.asked = self.asked, (length, layer_idx)
        if before < self.asked and tokens <= last and known_layers == len(layers) and known_forms == forms:
            return
        set_rows_apart(cache)
        layers = [*cache.adapted_layers(), *layers[len(cache.layers) :]]
        beyond = cache.nbytes - self.max_bytes
        new = len(layers) * sum(nbytes_of(form, keys.shape[2]) for form in forms)
        for row in [] if cache.offloading else [row for layer in layers for row in holders(layer)]:
            if beyond + new > 0 and is_shared(row.store):
                exchange_store(row, on_its_own)
            if beyond > 0:
                # Each sequence that was repeated has room for as many tokens as the first one had.
                row.store.shrink(row.store.length)
        # Of this plan alone: a backend may be registered again under its name, with other blocks.
        codes = functools.cache(_bytes_of_codes)
        # Layers that are empty are taken to have the forms that come now.
        held = [
            _Held(row, row.forms or forms, keys.shape[2] if index >= layer_idx else 0, codes)
            for index, layer in enumerate(layers)
            for row in holders(layer)
        ]
        if isinstance(self.max_bytes, Fraction):
            self.max_bytes = int(
                self.max_bytes * free_memory(keys.device)
                if self.is_of_free
                else self.max_bytes * sum(each.exact(self.length_hint or 0) for each in held)
            )
        # Of a hybrid layer the recurrent states.
        others_held = [part for layer in layers for part in layer.parts[bool(holders(layer)) :]]
        more = self._fitted(
            cache,
            held,
            self.max_bytes - sum(part.nbytes for part in others_held),
            tokens,
            # A cache without a config may make further layers in this pass.
            is_whole=cache.layer_class_to_replicate is None or known_layers == len(layers),
        )
        # What they hold is known once they have taken in tokens, and several tokens at once may add a checkpoint. Until
        # then, there is room for this pass alone.
        self._planned = (
            tokens + (more if not others_held or (length and keys.shape[2] == 1) else 0),
            len(layers),
            forms,
        )

    def _fitted(self, cache: Any, held: "list[_Held]", nbytes: int, tokens: int, is_whole: bool) -> int:
        """Give way so that all tokens fit in `nbytes` bytes. Returns how many more fit then.

        Raises:
            CapacityError: as `make_room`.
        """
        may_be_exact = self.most_kept > 0 and not any(each.layer.exact_from for each in held)
        # How many more tokens would fit in full precision, -1 if not even the new ones.
        most = -1 + bisect.bisect_right(
            range(sys.maxsize if may_be_exact else 0),
            nbytes,
            key=lambda more: sum(e.exact(e.tokens + more) for e in held),
        )
        if most >= 0:
            most = most if is_whole else 0
            if self.length_hint is not None and tokens <= self.length_hint:
                # If there are more than were expected, this is asked again.
                most = min(most, self.length_hint - tokens)
            for each in held:
                each.stay_exact(most)
            self.note = "all tokens are exact"
            return most
        for more in (max([tokens // AHEAD_DIVISOR, *(each.size for each in held)]), 0):
            kept, bits = self._rounded(held, nbytes, more)
            if bits:
                for each, own in zip(held, bits, strict=True):
                    if each.size:
                        each.give_way(own, kept, self.length_hint)
                    else:
                        each.stay_exact(more)
                self._say(min(each.layer.store.kept for each in held if each.size), bits)
                return more
        devices = {form.device for each in held for form in each.forms}
        if cache.offloading or ("offloaded" in self.ladder and place_elsewhere(cache, devices)):
            self.note = "states are on the host"
            return sys.maxsize
        # Few tokens are smaller in full precision than beside the room for those that come before a block is packed.
        sizes = [sum(each.rounded(0, 0, bits) for each in held) for bits in self.bits]
        if may_be_exact or not sizes:
            sizes.append(sum(each.exact(each.tokens) for each in held))
        # Layers that nobody knew of, and recurrent ones, may have begun the first pass.
        if cache.most_seen() == tokens and not all(each.layer.length for each in held):
            cache.reset()
            cache.trim()
        others = {*(BITS if all(device.type == "cpu" for device in devices) else LADDER)} - {*self.ladder}
        raise CapacityError(
            f"`max_bytes` must be at least {exact_bytes(min(sizes) + int(self.max_bytes) - nbytes)} for {tokens} "
            f"tokens, got {exact_bytes(int(self.max_bytes))}: allow more bytes, "
            f"{'or further steps, ' if others else ''}or pass fewer tokens."
        )

    def _rounded(self, held: "list[_Held]", nbytes: int, more: int) -> tuple[int, list[int]]:
        """How many tokens stay exact, and the bits of each layer, so that `more` tokens fit; no bits if they do not."""

        def fits(kept: int, bits: Sequence[int]) -> bool:
            return sum(each.rounded(more, kept, own) for each, own in zip(held, bits, strict=True)) <= nbytes

        bits = [min(self.bits[0], each.bits or self.bits[0]) for each in held] if self.bits else []
        size = max((each.size for each in held), default=0)
        if not (bits and size):
            return 0, []
        most = min(max(each.tokens for each in held) + more, self.most_kept) // size
        blocks = bisect.bisect_right(range(most + 1), 0, key=lambda own: not fits(own * size, bits))
        if blocks:
            return (blocks - 1) * size, bits
        for fewer in self.bits[1:]:
            for index in range(len(bits)):
                bits[index] = min(bits[index], fewer)
                if fits(0, bits):
                    return 0, bits
        return 0, []

    def _say(self, kept: int, bits: Sequence[int]) -> None:
        self.note = f"at least the newest {kept} tokens stay exact, and older ones have " + ", ".join(
            f"{own} bits in {bits.count(own)} of {len(bits)} layers" for own in sorted(set(bits), reverse=True)
        )
        if min(bits) not in self.said:
            self.said = (*self.said, min(bits))
            logger.warning("within max_bytes=%s: %s.", readable_bytes(int(self.max_bytes)), self.note)


def free_memory(device: torch.device) -> int:
    """Bytes that tensors on a device can still take: free memory, and memory that torch has reserved and not used.

    Raises:
        OptionError: torch does not report the free memory of such a device.
    """
    if device.type == "cpu":
        # Late, as nothing else needs it.
        import psutil

        return int(psutil.virtual_memory().available)
    if device.type in ("cuda", "xpu"):
        memory: Any = torch.get_device_module(device)
        return int(memory.mem_get_info(device)[0] + memory.memory_reserved(device) - memory.memory_allocated(device))
    if device.type == "mps":
        return int(torch.mps.recommended_max_memory() - torch.mps.current_allocated_memory())
    raise OptionError(
        f"`device` must be one whose free memory torch reports (cpu, cuda, xpu, mps), got {device}: pass `memory`, "
        "or `max_bytes`, in bytes, or name a cache."
    )


class _Held:
    """The tokens of one layer, or of one row of it, and the bytes that they would take.

    Args:
        layer: the layer.
        forms: forms of its keys and values.
        new: tokens that it is about to take in.
        codes: `_bytes_of_codes`.

    Attributes:
        forms: as given.
        tokens: tokens that it has with the new ones.
        window: the most tokens that it ever holds.
        bits: bits of a code if it packs tokens, `None` if it does not yet.
        size: tokens of a block, 0 if its states cannot be coded.
    """

    def __init__(
        self, layer: Any, forms: tuple[StateForm, StateForm], new: int, codes: Callable[..., tuple[int, int, int]]
    ) -> None:
        self.layer, self.forms, self._codes = layer, forms, codes
        self.window: int = layer.unwrapped.room if layer.is_sliding and not layer.unwrapped.record_past else sys.maxsize
        self.tokens: int = layer.held_tokens + new
        # Blocks of a window are packed before its oldest tokens leave, unless all of them do.
        self._packed_at_once = self.tokens if new < self.window else 0
        self.token_bytes = sum(nbytes_of(form, 1) for form in forms)
        store = layer.store
        # Beams hold once what they have in common, until it is rounded. Room that others may use is not counted.
        self._nbytes: int = store.nbytes
        self._in_common: int = max(
            layer.held_tokens * self.token_bytes - self._nbytes, -sys.maxsize if is_shared(store) else 0
        )
        is_packed = isinstance(store, QuantizedStore)
        self._quantization = quantization_of(store, max(BITS.values()), layer.is_sliding)
        self.bits = max(store.bits) if is_packed else None
        self.size, of_block = 0, 1
        with contextlib.suppress(StateMismatchError):
            self.size, of_block, _ = (0, 1, 0) if is_followed(store) else codes(self._quantization, *forms)
        self._blocks = sum(side.nbytes for side in store.blocks.stores) // of_block if is_packed and store.blocks else 0

    def exact(self, tokens: int) -> int:
        """Bytes of so many tokens in full precision."""
        # Memory that is there is not given back.
        return max(min(tokens, self.window) * self.token_bytes - self._in_common, self._nbytes)

    def rounded(self, more: int, kept: int, nbits: int) -> int:
        """Bytes of `more` tokens than with the new ones, of which the newest `kept` stay exact at least."""
        tokens = min(self.tokens + more, self.window)
        if not self.size:
            return self.exact(tokens)
        # Not an attribute, which would hold the memory of all layers until the last one has given way.
        residual: DenseStore = self.layer.store if self.bits is None else self.layer.store.residual
        quantization = self._quantization.narrowed(nbits)
        room = quantization.sink_tokens + max(kept, quantization.residual_length) + self.size
        packed = blocks_beyond(max(tokens, self._packed_at_once), room, self.size)
        most, blocks = min(room, self.window), max(packed, self._blocks)
        there = residual.nbytes // self.token_bytes
        # The residual has been full before its oldest block was packed.
        exact = most if blocks else there if tokens <= there else residual.capacity_for(tokens, most)
        _, of_block, of_run = self._codes(quantization, *self.forms)
        return (
            exact * self.token_bytes
            + (blocks + blocks // BLOCKS_GROWTH_DIVISOR) * of_block
            + min(blocks, MOST_RUNS) * of_run
        )

    def stay_exact(self, more: int) -> None:
        """Grow no further than for `more` tokens, in full precision."""
        store, most = self.layer.store, min(self.tokens + more, self.window)
        if self.bits is not None:
            # What a residual holds beside the sinks before it packs.
            self.give_way(self.bits, most - store.quantization.sink_tokens - self.size, None)
        self.layer.store.length_hint = most

    def give_way(self, nbits: int, kept: int, length_hint: int | None) -> None:
        """Hold all but the newest `kept` tokens in `nbits` bits at most, now and as further tokens come."""
        # Not the number of tokens that would have fitted in full precision.
        self.layer.store.length_hint = self.window if self.layer.is_sliding else length_hint
        exchange_store(self.layer, functools.partial(rounded, nbits=nbits, window=self.layer.is_sliding, kept=kept))
        if is_shared(self.layer.store):
            # Its tokens that are rounded now go with the last one that read them.
            self.layer.store.trim()


def _bytes_of_codes(quantization: Quantization, key_form: StateForm, value_form: StateForm) -> tuple[int, int, int]:
    """As `block_of`, and the bytes of the vectors that smooth the keys of a run of blocks."""
    size, nbytes = block_of(quantization, key_form, value_form)
    keys = quantization.quantizers(key_form.head_dim, value_form.head_dim)["keys"]
    return size, nbytes, sum(vectors_for(keys)) * nbytes_of(key_form, 1)
