"""Tokens in packed codes, except for the oldest and the newest few."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Self, override

from kvlayers.core.arguments import checked_forms, mismatch, promoted_forms
from kvlayers.core.buffer import StateForm, form_of
from kvlayers.core.dense_store import DenseStore
from kvlayers.core.description import OptionsArgument
from kvlayers.core.returned_states import ReturnedStates
from kvlayers.core.token_store import BufferSwap, Fidelity, KVPair, TokenStore, keeps_updates_of, register_store
from kvlayers.errors import OptionError, StateMismatchError
from kvlayers.kernels.attention.cpu import kernel
from kvlayers.kernels.attention.dispatch import PathCounter
from kvlayers.kernels.attention.gqa import marked_for_sdpa
from kvlayers.kernels.attention.packed_tensor import as_dense
from kvlayers.kernels.attention.segment_kinds import DenseSegment
from kvlayers.kernels.attention.segments import KVSegments, Segment
from kvlayers.kernels.codes.quantizer_contract import backend
from kvlayers.kernels.codes.smoothing import NAMES as SMOOTHING_NAMES
from kvlayers.quantized.checks import check_quantized_state, checked_quantizers, in_one_dtype, planned_bits
from kvlayers.quantized.packed_blocks import PackedBlocks
from kvlayers.quantized.parts import QuantizedParts, append_states, residual_after_blocks, residual_length_hint
from kvlayers.quantized.quantization import Quantization, block_tokens, blocks_beyond
from kvlayers.quantized.smoothing_runs import SmoothingRuns


@register_store
class QuantizedStore(TokenStore):
    """Packed blocks between two parts in full precision: the sinks, and the residual of the newest tokens.

    The residual holds at least `residual_length` tokens. When new tokens would make it longer than that by more than a
    block, whole blocks of its oldest tokens are quantized, and their codes never change again. Until the first block is
    packed, all tokens are in the residual, and updates return plain views.

    An update attends to the held tokens as they were held before it, and to its own states in full precision.

    States that are not finite cannot be coded. A token with such a key or value is quantized as zeros, so that the
    other tokens of its group are not affected. The scales of its values become NaN, so that attention to it still
    gives NaN.

    Gradients flow only to the states of the newest update: held states are detached.

    Args:
        quantization: bits, groups, and the tokens that stay in full precision.
        length_hint: the most tokens that are expected, if known: memory then grows no further than that.

    Attributes:
        parts: the held tokens: sinks, packed blocks, and the residual.
        kept: newest tokens that stay in full precision at least: `residual_length`, or more while memory lasts.
    """

    is_opaque = True

    made_with = (OptionsArgument("quantization", options=Quantization),)
    hints = ("length_hint",)

    _appends_one = True

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls._appends_one = keeps_updates_of(cls, QuantizedStore)

    def __init__(self, quantization: Quantization, length_hint: int | None = None) -> None:
        if not isinstance(quantization, Quantization):
            raise OptionError(
                f"`quantization` must be a Quantization, got {quantization!r}: pass Quantization(nbits=4)."
            )
        self.quantization = quantization
        self.kept = quantization.residual_length
        # One is compiled at a time. Attention gains more by its kernel than packing.
        packs = backend(quantization.backend)
        sides = (quantization.keys, quantization.values)
        multiply = [kernel.products_for(side.nbits, packs.has_zero) for side in sides]
        for library in (kernel.LIBRARY, *multiply, packs.kernel):
            if library is not None:
                library.begin()
        self.length_hint = length_hint
        self._forms: tuple[StateForm, StateForm] | None = None
        self._validated: tuple[StateForm, StateForm] | None = None
        self.parts = QuantizedParts(DenseStore(), None, DenseStore())
        self._length = 0
        self._old_segments: tuple[Segment, ...] | None = None
        self._returned = ReturnedStates()
        self.packing = PathCounter()

    @classmethod
    def over(cls, states: DenseStore, quantization: Quantization) -> Self:
        """A store of the tokens of `states`, which become its residual. Nothing is packed until `keep`.

        Raises:
            StateMismatchError: such states cannot be quantized.
        """
        store = cls(quantization, states.length_hint)
        if states.key_form is not None and states.value_form is not None:
            store.reserve_form(states.key_form, states.value_form)
            store.parts.residual, store._length = states, states.length
        return store

    @property
    @override
    def length(self) -> int:
        return self._length

    @override
    def count(self, tokens: int) -> None:
        self._length = self._length + tokens

    @property
    @override
    def bits(self) -> tuple[int, int] | None:
        return self.quantization.keys.nbits, self.quantization.values.nbits

    @property
    @override
    def block_tokens(self) -> int:
        # Of the states that were validated last, which need not be taken in yet.
        forms = self._validated or self._forms
        return 1 if forms is None else block_tokens(checked_quantizers(self.quantization, *forms))

    @property
    @override
    def holds_pages_apart(self) -> bool:
        # Before there are blocks, tokens are few.
        return bool(self.parts.blocks)

    @property
    @override
    def first_block(self) -> int:
        return self.quantization.sink_tokens

    @property
    @override
    def key_form(self) -> StateForm | None:
        return None if self._forms is None else self._forms[0]

    @property
    @override
    def value_form(self) -> StateForm | None:
        return None if self._forms is None else self._forms[1]

    @property
    @override
    def attention_paths(self) -> Mapping[str, int]:
        return self._returned.paths.counts

    @property
    @override
    def packing_paths(self) -> Mapping[str, int]:
        return self.packing.counts

    @property
    def _missing_sinks(self) -> int:
        """Tokens at the front of the residual that become sinks when the first block is packed."""
        return 0 if self.parts.blocks else self.quantization.sink_tokens - self.parts.sinks.length

    @property
    def _room(self) -> int:
        """Tokens that the residual may hold."""
        size = 0 if self.parts.blocks is None else self.parts.blocks.block_tokens
        return self._missing_sinks + self.kept + size

    # Taking in states

    @override
    def take_in(self, keys: Tensor, values: Tensor) -> KVPair:
        parts = self.parts
        # Asked once, as of all that follows: each question is a call at every token.
        blocks, residual = parts.blocks or None, parts.residual
        room = self._room if blocks is None else self.kept + blocks.block_tokens
        fits = self._appends_one and residual.length < room
        if not fits or torch.compiler.is_compiling() or not residual.append_one(keys, values):
            return super().take_in(keys, values)
        length = self._length = self._length + 1
        self._validated = None
        if blocks is None:
            if not parts.old_tokens:
                return marked_for_sdpa(*residual.newest(length), 1)
            return self._attended(self._segments(length))
        old = self._all_old_segments() if self._old_segments is None else self._old_segments
        segments = KVSegments((*old, residual.tail_segment()))
        return self._returned.attended(self, segments, self._known_forms(), length, length)

    @override
    def validate(self, keys: Tensor, values: Tensor) -> int:
        forms = in_one_dtype(*checked_forms(keys, values))
        self._validated = None
        if forms != self._forms and self.length and self._forms is not None:
            promoted = promoted_forms(forms, self._forms)
            if promoted is None:
                raise mismatch(forms, self._forms, self.length)
            # States of other dtypes are converted when they are taken in.
            forms = promoted
        if forms != self._forms:
            checked_quantizers(self.quantization, *forms)
            self._validated = forms
        return int(keys.shape[2])

    @override
    def reserve_form(self, key_form: StateForm, value_form: StateForm) -> None:
        checked_quantizers(self.quantization, key_form, value_form)
        self._validated = key_form, value_form
        self._apply_form()

    def _apply_form(self) -> None:
        """Take on the form that was validated."""
        if self._validated is not None:
            forms, self._validated = self._validated, None
            if self.length:
                self.parts, self._forms = self.parts.promoted(forms), forms
                self._forget_segments()
            else:
                self._start_over(forms)

    def _start_over(self, forms: tuple[StateForm, StateForm]) -> None:
        """Hold no tokens, in memory of which nobody has a view."""
        quantizers = checked_quantizers(self.quantization, *forms)
        size, sinks = block_tokens(quantizers), self.quantization.sink_tokens
        self._forms = forms
        unpacked = sinks + self.quantization.residual_length + size
        most = None if self.length_hint is None else blocks_beyond(self.length_hint, unpacked, size)
        residual = DenseStore()
        residual.reserve_form(*forms)
        blocks = PackedBlocks(quantizers, forms, size, most)
        self.parts = QuantizedParts(DenseStore(length_hint=sinks), blocks, residual)
        self._invalidate_snapshots()
        self._length = 0

    @property
    @override
    def sized_for(self) -> int | None:
        return self.length_hint

    @property
    @override
    def fidelity(self) -> Fidelity:
        return "rounded"

    @property
    @override
    def exact_from(self) -> int:
        return self.parts.old_tokens if self.parts.blocks else 0

    @override
    def planned_bits(self, key_form: StateForm, value_form: StateForm) -> float:
        return planned_bits(self.quantization, (key_form, value_form))

    @override
    def append(self, keys: Tensor, values: Tensor) -> None:
        self._apply_form()
        keys, values = (
            states.detach() if states.requires_grad else states for states in map(self._in_held_dtype, (keys, values))
        )
        new = keys.shape[2]
        blocks = self._blocks_to_pack(new)
        if blocks:
            self.parts.pack(keys, values, blocks, self._missing_sinks, self.kept, self.length_hint)
            self._forget_segments()
            for path in () if self.parts.blocks is None else self.parts.blocks.packing_paths():
                self.packing.record(path)
        else:
            # If it must move, it goes to other memory: states that were returned, or are about to be, read this one.
            self.parts.residual.reserve(self.parts.residual.length + new)
            append_states(self.parts.residual, (keys, values))
        self._length += new

    def _in_held_dtype(self, states: Tensor) -> Tensor:
        """States in full precision and in the dtype of the held states."""
        states = as_dense(states)
        dtype = states.dtype if self._forms is None else self._forms[0].dtype
        return states if states.dtype == dtype else states.to(dtype)

    def _blocks_to_pack(self, new: int) -> int:
        """Blocks that must be packed so that the residual has room for `new` tokens."""
        blocks = self.parts.blocks
        size = 1 if blocks is None else blocks.block_tokens
        return blocks_beyond(self.parts.residual.length + new, self._room, size)

    @override
    def extend(self, keys: Tensor, values: Tensor, past: int | None = None) -> KVPair:
        past = self.length if past is None else past
        self._apply_form()
        new = keys.shape[2]
        differentiable = torch.is_grad_enabled() and (keys.requires_grad or values.requires_grad)
        if not differentiable and not self._blocks_to_pack(new):
            self.append(keys, values)
            return marked_for_sdpa(*self.newest(past + new), new)
        segments = self._segments_with(keys, values, past)
        self.append(keys, values)
        return marked_for_sdpa(*self._attended(segments), new)

    @override
    def extend_and_evict(self, keys: Tensor, values: Tensor, past: int, kept: int) -> KVPair:
        self._apply_form()
        segments = self._segments_with(keys, values, past)
        new = keys.shape[2]
        if new >= kept and self._forms is not None:
            fresh = QuantizedStore(self.quantization, self.length_hint)
            fresh.kept = self.kept
            fresh._start_over(self._forms)
            fresh.append(keys.narrow(2, new - kept, kept), values.narrow(2, new - kept, kept))
            self.parts = fresh.parts
            self._forget_segments()
            self._length = self.parts.tokens
        else:
            self.append(keys, values)
            self.drop_oldest(self.length - kept)
        return marked_for_sdpa(*self._attended(segments), new)

    # Giving way

    def keep(self, tokens: int) -> None:
        """Keep the newest `tokens` tokens in full precision at least, and pack the blocks before them that are full."""
        self.kept = tokens
        self._forget_segments()
        if self._forms is not None and self._blocks_to_pack(0):
            self.append(*self.parts.residual.newest(0))

    def repack(self, quantization: Quantization) -> None:
        """Pack all blocks again, by a quantization whose blocks have as many tokens. Keys stay smoothed as they are."""
        if self.parts.blocks is not None:
            forms = self._known_forms()
            self.parts.blocks = self.parts.blocks.repacked(checked_quantizers(quantization, *forms), forms)
        self.quantization = quantization
        self._invalidate_snapshots()

    # Reading

    @override
    def newest(self, count: int) -> KVPair:
        if count <= self.parts.residual.length and not self.parts.residual.has_segments:
            return self.parts.residual.newest(count)
        return self._returned.newest(
            count, lambda kept: self._attended(self._segments(kept)), self._known_forms(), self.length
        )

    @override
    def caller_views(self) -> KVPair:
        # Packed states cannot be written to, and know when they have become stale.
        return self.newest(self.length) if self.parts.old_tokens else self.parts.residual.caller_views()

    def _attended(self, segments: KVSegments) -> KVPair:
        """Keys and values for attention: plain tensors if no token is packed or in a shared segment."""
        forms = self._known_forms()
        if segments.are_dense and not self.parts.residual.has_segments:
            return segments.dense("keys", forms[0].dtype), segments.dense("values", forms[1].dtype)
        return self._returned.attended(self, segments, forms, self.length, segments.tokens)

    def _known_forms(self) -> tuple[StateForm, StateForm]:
        if self._forms is None:
            raise StateMismatchError("The store is empty, so it has no states to read: update the layer first.")
        return self._forms

    def _segments(self, count: int) -> KVSegments:
        """The newest `count` tokens."""
        skipped = self.length - count
        old = self.parts.old_segments(skipped) if skipped else self._all_old_segments()
        residual = self.parts.residual
        return KVSegments((*old, *residual.pieces(min(count, residual.length))))

    def _all_old_segments(self) -> tuple[Segment, ...]:
        """Sinks and packed blocks, as they were read for the last token."""
        if self._old_segments is None:
            self._old_segments = self.parts.old_segments()
        return self._old_segments

    def _segments_with(self, keys: Tensor, values: Tensor, past: int) -> KVSegments:
        """The newest `past` held tokens, and the new tokens."""
        segments = self._segments(past)
        new = DenseSegment(self._in_held_dtype(keys), self._in_held_dtype(values))
        return KVSegments((*segments.in_order, new))

    # Dropping, cropping and the batch

    @override
    def drop_oldest(self, count: int) -> None:
        self.parts.drop_oldest(count)
        self._length -= count
        # Returned states stay valid; only states that are returned from now on have fewer tokens.
        self._old_segments = None
        self._returned.forget()

    @override
    def truncate(self, length: int) -> None:
        # A rollback of a draft reaches no further than into the residual.
        unchanged = self._old_segments if length >= self.parts.old_tokens else None
        self.parts.truncate(length)
        self._length = self.parts.tokens
        self._invalidate_snapshots()
        self._old_segments = unchanged

    @override
    def reserve(self, tokens: int) -> None:
        """Do nothing: packed blocks and the residual grow in small steps."""

    @override
    def shrink(self, tokens: int) -> None:
        """Do nothing: the residual is short, and packed blocks have almost no spare room."""

    @override
    def select(self, indices: Tensor) -> None:
        if self._forms is None or self.parts.blocks is None:
            return
        self._hold(self.parts.selected(indices), indices.shape[0])

    @override
    def expand(self, repeats: int) -> None:
        if self._forms is not None:
            batch = self._forms[0].batch_size
            self._hold(self.parts.expanded(batch, repeats), batch * repeats)

    def _hold(self, parts: QuantizedParts, batch: int) -> None:
        """Hold parts of `batch` sequences instead."""
        if self._forms is not None:
            key_form, value_form = self._forms
            self.parts, self._forms = parts, (key_form.of_batch(batch), value_form.of_batch(batch))
            self._invalidate_snapshots()

    @override
    def clear(self) -> None:
        self.parts.clear()
        self._length = 0
        self._invalidate_snapshots()

    def _invalidate_snapshots(self) -> None:
        """Make all states that were returned so far stale."""
        self._returned.invalidate()
        self._forget_segments()

    def _forget_segments(self) -> None:
        """Build segments again for states that are returned from now on. Returned states stay valid."""
        self._old_segments = None
        self._returned.forget()
        parts = self.parts
        hint = residual_length_hint(self._room, self.length_hint, parts.old_tokens, parts.residual.length)
        parts.residual.length_hint = hint

    # Copies and state

    def _twin(self, parts: QuantizedParts) -> Self:
        twin = self.__class__.__new__(self.__class__)
        twin.__dict__.update(self.__getstate__())
        twin.parts, twin._returned, twin.packing = parts, ReturnedStates(), PathCounter()
        return twin

    @override
    def snapshot(self) -> Self:
        return self._twin(self.parts.snapshot())

    @override
    def fork(self) -> Self:
        return self._twin(self.parts.fork())

    @override
    def share_prefix(self, other: TokenStore, tokens: int) -> None:
        if isinstance(other, QuantizedStore) and (other.quantization, other._forms) == (self.quantization, self._forms):
            self.parts.share_prefix(other.parts, tokens)
            self._forget_segments()

    @override
    def trim(self) -> None:
        self.parts.trim()
        self._forget_segments()

    @override
    def compact(self) -> None:
        self.parts.compact()
        self._forget_segments()

    @override
    def swap_buffers(self, swap: BufferSwap) -> None:
        self.parts.swap_buffers(swap)
        self._read_other_buffers()

    @override
    def swap_unpaged_buffers(self, swap: BufferSwap) -> None:
        self.parts.swap_unpaged_buffers(swap)
        self._read_other_buffers()

    def _read_other_buffers(self) -> None:
        # Returned states keep the buffers that they are views of.
        self._old_segments = None
        self._returned.forget()

    def __getstate__(self) -> dict[str, Any]:
        # Segments are views; a copy of the store would contain copies of states that are in the parts already.
        return {**self.__dict__, "_old_segments": None, "_validated": None}

    @override
    def held_tensors(self) -> Iterator[Tensor]:
        yield from self.parts.held_tensors()

    @override
    def state(self) -> dict[str, Tensor]:
        return {} if self._forms is None else self.parts.state()

    @override
    def check_state(self, tensors: dict[str, Tensor]) -> int:
        return check_quantized_state(tensors, self.quantization)

    @override
    def load_state(self, tensors: dict[str, Tensor]) -> None:
        if not tensors:
            self.clear()
            return
        self._start_over((form_of(tensors["keys"]), form_of(tensors["values"])))
        parts = self.parts
        if "sink_keys" in tensors:
            append_states(parts.sinks, (tensors["sink_keys"], tensors["sink_values"]))
        if not {"block_ends", *SMOOTHING_NAMES}.isdisjoint(tensors):
            parts.runs = SmoothingRuns.of_state(tensors, len(tensors.get("block_ends", ())[1:]))
        if "block_ends" in tensors and parts.blocks is not None:
            parts.blocks.load_state(tensors)
            parts.residual = residual_after_blocks(parts.blocks.block_tokens)
        self._invalidate_snapshots()
        append_states(parts.residual, (tensors["keys"], tensors["values"]))
        self._length = parts.tokens
