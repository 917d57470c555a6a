"""Tokens in packed codes, except for the oldest and the newest few."""

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Self, override

from kvlayers.core.arguments import checked_forms, checked_hint, promoted_forms
from kvlayers.core.buffer import StateForm, form_of, forms_of_batch, nbytes_of
from kvlayers.core.dense_store import DenseStore
from kvlayers.core.description import OptionsArgument
from kvlayers.core.returned_states import ReturnedStates
from kvlayers.core.token_store import BufferSwap, Fidelity, KVPair, TokenStore, keeps_updates_of, register_store
from kvlayers.errors import OptionError
from kvlayers.kernels.attention.cpu import kernel
from kvlayers.kernels.attention.gqa import marked_for_sdpa
from kvlayers.kernels.attention.packed_tensor import as_dense
from kvlayers.kernels.attention.segment_kinds import DenseSegment
from kvlayers.kernels.attention.segments import KVSegments, Segment
from kvlayers.kernels.codes.quantizer_contract import backend
from kvlayers.kernels.codes.smoothing import BLOCKS_ASKED, MOST_RUNS
from kvlayers.kernels.codes.smoothing import NAMES as SMOOTHING_NAMES
from kvlayers.quantized.checks import block_of, check_quantized_state, checked_quantizers, in_one_dtype
from kvlayers.quantized.packed_blocks import PackedBlocks
from kvlayers.quantized.quantization import Quantization, block_tokens, blocks_beyond
from kvlayers.quantized.smoothing_runs import SmoothingRuns

RESIDUAL_GROWTH_DIVISOR = 16
"""A full residual behind packed blocks grows by its size divided by this."""

GROWTHS_PER_BLOCK = 2
"""How often the residual grows while a block fills, at most. Packing the first block frees nearly half of its bytes or
more, so with half a block of spare room the store takes no more bytes than the tokens take in full precision."""

_HELD = ("sinks", "blocks", "residual", "runs", "follows_packed", "forms", "_length")
"""Attributes that say which tokens a store holds, and how."""


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
        sinks: the oldest tokens, in full precision; none before a block is packed.
        blocks: the packed tokens, `None` before the first states.
        residual: the newest tokens, in full precision.
        runs: how runs of packed blocks were smoothed; none before a block is packed.
        follows_packed: whether the tokens follow packed ones of another store, whose keys are smoothed as the first
            run.
        kept: newest tokens that stay in full precision at least: `residual_length`, or more while memory lasts.
    """

    is_opaque = True
    forms: tuple[StateForm, StateForm] | None = None
    fidelity: Fidelity = "rounded"

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
        multiply = [kernel.products_for(nbits, packs.has_zero) for nbits in self.bits or ()]
        for library in (kernel.LIBRARY, *multiply, packs.kernel):
            if library is not None:
                library.begin()
        self.length_hint = checked_hint(length_hint)
        self.forms = None
        self._validated: tuple[StateForm, StateForm] | None = None
        self.sinks, self.residual = DenseStore(), DenseStore()
        self.blocks: PackedBlocks | None = None
        self.runs, self.follows_packed = SmoothingRuns(), False
        self._length = 0
        self._old_segments: tuple[Segment, ...] | None = None
        self._returned = ReturnedStates()
        self._packing_paths: Counter[str] = Counter()

    @classmethod
    def over(cls, states: DenseStore, quantization: Quantization) -> Self:
        """A store of the tokens of `states`, which become its residual. Nothing is packed until `keep`.

        Raises:
            StateMismatchError: such states cannot be quantized.
        """
        store = cls(quantization, states.length_hint)
        if states.forms is not None:
            store.reserve_form(*states.forms)
            store.residual, store._length = states, states.length
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
    def bits(self) -> tuple[int, int] | None:  # type: ignore[override]
        return self.quantization.keys.nbits, self.quantization.values.nbits

    @property
    def block_tokens(self) -> int:
        """Tokens that are packed together and cannot be taken apart again; 1 if their form is not known yet."""
        # Of the states that were validated last, which need not be taken in yet.
        forms = self._validated or self.forms
        return 1 if forms is None else block_of(self.quantization, *forms)[0]

    @property
    @override
    def attention_paths(self) -> Mapping[str, int]:  # type: ignore[override]
        return self._returned.paths.counts

    @property
    @override
    def packing_paths(self) -> Mapping[str, int]:  # type: ignore[override]
        return self._packing_paths

    @property
    def old_tokens(self) -> int:
        """Tokens before the residual."""
        return self.sinks.length + (0 if self.blocks is None else self.blocks.tokens)

    @property
    def _missing_sinks(self) -> int:
        """Tokens at the front of the residual that become sinks when the first block is packed."""
        return 0 if self.blocks else self.quantization.sink_tokens - self.sinks.length

    @property
    def _room(self) -> int:
        """Tokens that the residual may hold."""
        size = 0 if self.blocks is None else self.blocks.block_tokens
        return self._missing_sinks + self.kept + size

    # Taking in states

    @override
    def take_in(self, keys: Tensor, values: Tensor) -> KVPair:
        # Asked once, as of all that follows: each question is a call at every token.
        blocks, residual, forms = self.blocks, self.residual, self.forms
        if blocks is not None and not blocks.tokens:
            blocks = None
        room = self._room if blocks is None else self.kept + blocks.block_tokens
        fits = self._appends_one and residual.length < room
        if not fits or forms is None or torch.compiler.is_compiling() or not residual.append_one(keys, values):
            return super().take_in(keys, values)
        length = self._length = self._length + 1
        self._validated = None
        if blocks is None:
            if not self.old_tokens:
                return marked_for_sdpa(*residual.newest(length), 1)
            return self._attended(self._segments(length))
        old = self._all_old_segments() if self._old_segments is None else self._old_segments
        return self._returned.attended(self, KVSegments((*old, residual.tail_segment())), forms, length, length)

    @override
    def validate(self, keys: Tensor, values: Tensor) -> int:
        forms = in_one_dtype(*checked_forms(keys, values))
        self._validated = None
        if forms != self.forms and self.length and self.forms is not None:
            # States of other dtypes are converted when they are taken in.
            forms = promoted_forms(forms, self.forms, self.length)
        if forms != self.forms:
            checked_quantizers(self.quantization, *forms)
            self._validated = forms
        return int(keys.shape[2])

    @override
    def reserve_form(self, key_form: StateForm, value_form: StateForm) -> None:
        # In memory of which nobody has a view.
        quantizers = checked_quantizers(self.quantization, key_form, value_form)
        size, sinks = block_tokens(quantizers), self.quantization.sink_tokens
        self.forms, self._validated = (key_form, value_form), None
        unpacked = sinks + self.quantization.residual_length + size
        most = None if self.length_hint is None else blocks_beyond(self.length_hint, unpacked, size)
        self.sinks, self.residual = DenseStore(length_hint=sinks), DenseStore()
        self.residual.reserve_form(key_form, value_form)
        self.blocks = PackedBlocks(quantizers, self.forms, size, most)
        self.clear()

    def _apply_form(self) -> None:
        """Take on the form that was validated."""
        if self._validated is not None:
            forms, self._validated = self._validated, None
            if self.length:
                self._hold(self._promoted(*forms))
            else:
                self.reserve_form(*forms)

    def _promoted(self, key_form: StateForm, value_form: StateForm) -> Self:
        twin = self.fork()
        for part in twin._parts():
            part.promote(key_form, value_form)
        twin.runs, twin.forms = self.runs.promoted(key_form.dtype), (key_form, value_form)
        return twin

    def in_validated_form(self) -> Self:
        """Its tokens in the form that was validated last: itself if it has that form."""
        return self if self._validated is None else self._promoted(*self._validated)

    @property
    @override
    def sized_for(self) -> int | None:  # type: ignore[override]
        return self.length_hint

    @property
    @override
    def exact_from(self) -> int:
        return self.old_tokens if self.blocks else 0

    @override
    def planned_bits(self, key_form: StateForm, value_form: StateForm) -> float:
        size, packed = block_of(self.quantization, key_form, value_form)
        return 8 * packed * key_form.dtype.itemsize / sum(nbytes_of(form, size) for form in (key_form, value_form))

    @override
    def append(self, keys: Tensor, values: Tensor) -> None:
        self._apply_form()
        keys, values = (
            states.detach() if states.requires_grad else states for states in map(self._in_held_dtype, (keys, values))
        )
        new, blocks, residual = keys.shape[2], self.blocks, self.residual
        count = self._blocks_to_pack(new)
        if blocks is not None and count:
            self._pack(blocks, keys, values, count)
            self._forget_segments()
            self._packing_paths.update(blocks.packing_paths())
        else:
            residual.length_hint = self._residual_hint(self._room, self.old_tokens, residual.length + new)
            # If it must move, it goes to other memory: states that were returned, or are about to be, read this one.
            residual.reserve(residual.length + new)
            _append(residual, keys, values)
        self._length += new

    def _in_held_dtype(self, states: Tensor) -> Tensor:
        """States in full precision and in the dtype of the held states."""
        return as_dense(states).to(self._known_forms()[0].dtype)

    def _blocks_to_pack(self, new: int) -> int:
        """Blocks that must be packed so that the residual has room for `new` tokens."""
        size = 1 if self.blocks is None else self.blocks.block_tokens
        return blocks_beyond(self.residual.length + new, self._room, size)

    def _residual_hint(self, room: int, old_tokens: int, held: int) -> int:
        """The most tokens that a residual is expected to hold.

        Args:
            room: tokens of a full residual.
            old_tokens: tokens before it.
            held: tokens in it. If they exceed the length hint, it no longer holds.
        """
        left = room if self.length_hint is None else self.length_hint - old_tokens
        return room if left < held else min(room, left)

    def _pack(self, blocks: PackedBlocks, keys: Tensor, values: Tensor, count: int) -> None:
        """Take in states, and pack `count` blocks of the oldest full-precision tokens after the new sinks.

        A residual that is shared goes on where it is, without those tokens. Any other is copied, which frees them.
        """
        sinks, size, held = self._missing_sinks, blocks.block_tokens, self.residual.length
        shared = self.residual.pieces(held)
        # Of each sequence of the batch, although some may read the same.
        states = [*(own.tensors for piece in shared for own in piece.pieces(held)), (keys, values)]
        packed = sinks + count * size
        # Everything that can fail comes first, and goes where nobody reads: held and returned states stay valid.
        blocks.prepare(count)
        runs = self.runs if self.runs.are_settled else self._runs_with(blocks, states, sinks, count)
        at_once = blocks.blocks_at_once
        for done in range(0, count, at_once):
            some = _tokens_of(states, sinks + done * size, min(at_once, count - done) * size)
            blocks.write(done, *some, runs.in_order[-1])
        new_sinks = self.sinks
        if sinks:
            new_sinks = self.sinks.fork()
            _append(new_sinks, *_tokens_of(states, 0, sinks))
        rest = held + keys.shape[2] - packed
        hint = self._residual_hint(self.kept + size, self.old_tokens + packed, rest)
        if packed < held and self.residual.is_shared:
            residual = self.residual.fork()
            residual.drop_oldest(packed)
            residual.length_hint, left = hint, [(keys, values)]
        else:
            residual = _residual_after_blocks(size, hint)
            residual.reserve_form(form_of(keys), form_of(values))
            residual.reserve(rest)
            left = _pieces_of(states, packed, rest)
        for piece in left:
            _append(residual, *piece)
        before, runs_before = blocks.tokens, self.runs
        self.runs = runs
        try:
            blocks.hold(count)
        except BaseException:
            # Interrupted: the residual still holds these tokens, so no block may hold them too, nor one side of it.
            blocks.truncate(before)
            self.runs = runs_before
            raise
        retired, self.sinks, self.residual = self.residual, new_sinks, residual
        retired.retire()

    @torch.no_grad()
    def _runs_with(self, blocks: PackedBlocks, states: list[KVPair], sinks: int, count: int) -> SmoothingRuns:
        """The runs if `count` more blocks are packed, of the tokens of these states behind `sinks`.

        The last run is that of the new blocks.
        """
        size, every = blocks.block_tokens, -(-count // BLOCKS_ASKED)
        pieces = _pieces_of(states, sinks, count * size)
        if len(pieces) == 1:
            keys = torch.unflatten(pieces[0][0], 2, (count, size))[:, :, ::every]
        else:
            keys = torch.stack(
                [_tokens_of(states, sinks + block * size, size)[0] for block in range(0, count, every)], 2
            )
        if not len(self.runs):
            return SmoothingRuns.of(blocks.smoothing_for(keys))
        last = self.runs.in_order[-1]
        own = blocks.smoothing_for(keys, last)
        if own is last:
            return self.runs
        return self.runs.followed(len(blocks), last.emptied() if len(self.runs) == MOST_RUNS - 1 else own)

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
        if new >= kept and self.forms is not None:
            fresh = self.snapshot()
            fresh.reserve_form(*self.forms)
            fresh.append(keys.narrow(2, new - kept, kept), values.narrow(2, new - kept, kept))
            self._hold(fresh)
        else:
            self.append(keys, values)
            self.drop_oldest(self.length - kept)
            # Beside tokens that went only now, those that came may have exceeded the length hint, which holds again.
            self.residual.shrink(self._residual_hint(self._room, self.old_tokens, self.residual.length))
        return marked_for_sdpa(*self._attended(segments), new)

    # Giving way

    def keep(self, tokens: int) -> None:
        """Keep the newest `tokens` tokens in full precision at least, and pack the blocks before them that are full."""
        self.kept = tokens
        self._forget_segments()
        if self.forms is not None and self._blocks_to_pack(0):
            self.append(*self.residual.newest(0))

    def repack(self, quantization: Quantization) -> None:
        """Pack all blocks again, by a quantization whose blocks have as many tokens. Keys stay smoothed as they are."""
        if self.blocks is not None:
            forms = self._known_forms()
            self.blocks = self.blocks.repacked(checked_quantizers(quantization, *forms), forms)
        self.quantization = quantization
        self._invalidate_snapshots()

    # Reading

    @override
    def newest(self, count: int) -> KVPair:
        if count <= self.residual.length and not self.residual.has_segments:
            return self.residual.newest(count)
        return self._returned.newest(
            count, lambda kept: self._attended(self._segments(kept)), self._known_forms(), self.length
        )

    @override
    def caller_views(self) -> KVPair:
        # Packed states cannot be written to, and know when they have become stale.
        return self.newest(self.length) if self.old_tokens else self.residual.caller_views()

    def _attended(self, segments: KVSegments) -> KVPair:
        """Keys and values for attention: plain tensors if no token is packed or in a shared segment."""
        forms = self._known_forms()
        if segments.are_dense and not self.residual.has_segments:
            return segments.dense("keys", forms[0].dtype), segments.dense("values", forms[1].dtype)
        return self._returned.attended(self, segments, forms, self.length, segments.tokens)

    def _segments(self, count: int) -> KVSegments:
        """The newest `count` tokens."""
        skipped = self.length - count
        old = self._old_without(skipped) if skipped else self._all_old_segments()
        return KVSegments((*old, *self.residual.pieces(min(count, self.residual.length))))

    def _all_old_segments(self) -> tuple[Segment, ...]:
        """Sinks and packed blocks, as they were read for the last token."""
        if self._old_segments is None:
            self._old_segments = self._old_without(0)
        return self._old_segments

    def _old_without(self, skipped: int) -> tuple[Segment, ...]:
        """Sinks and packed blocks, without the oldest `skipped` tokens."""
        sinks = self.sinks.length
        packed = () if self.blocks is None else self.blocks.segments(max(skipped - sinks, 0), self.runs)
        return *self.sinks.pieces(max(sinks - skipped, 0)), *packed

    def _segments_with(self, keys: Tensor, values: Tensor, past: int) -> KVSegments:
        """The newest `past` held tokens, and the new tokens."""
        segments = self._segments(past)
        new = DenseSegment(self._in_held_dtype(keys), self._in_held_dtype(values))
        return KVSegments((*segments.in_order, new))

    # Dropping, cropping and the batch

    @override
    def drop_oldest(self, count: int) -> None:
        from_sinks = min(count, self.sinks.length)
        self.sinks.drop_oldest(from_sinks)
        from_blocks = 0
        if self.blocks:
            held, from_blocks = len(self.blocks), min(count - from_sinks, self.blocks.tokens)
            self.blocks.drop_oldest(from_blocks)
            self.runs = self.runs.part(held - len(self.blocks), held, self.follows_packed)
        self.residual.drop_oldest(count - from_sinks - from_blocks)
        self._length -= count
        # Returned states stay valid; only states that are returned from now on have fewer tokens.
        self._forget_segments()

    @override
    def truncate(self, length: int) -> None:
        self._returned.invalidate()
        old = self.old_tokens
        self.residual.truncate(max(length - old, 0))
        # A rollback of a draft reaches no further than into the residual.
        if length < old:
            sinks = min(length, self.sinks.length)
            if self.blocks is not None:
                self.blocks.truncate(length - sinks)
            self.sinks.truncate(sinks)
            # Let the next block find its own vectors, if no packed token has any.
            self.runs = self.runs.part(0, len(self.blocks or ()), self.follows_packed)
            self._old_segments = None
        self._length = self.old_tokens + self.residual.length

    @override
    def reserve(self, tokens: int) -> None:
        """Do nothing: packed blocks and the residual grow in small steps."""

    @override
    def shrink(self, tokens: int) -> None:
        # Packed blocks have almost no spare room.
        self.residual.shrink(tokens - self.old_tokens)

    @override
    def select(self, indices: Tensor) -> None:
        if self.forms is not None:
            # If there is no memory for them, this one has not changed.
            twin = self._twin(lambda part: part.selected(indices), self.runs.selected(indices))
            self._hold(twin, indices.shape[0])

    @override
    def expand(self, repeats: int) -> None:
        if self.forms is not None:
            rows = torch.arange(self.forms[0].batch_size).repeat_interleave(repeats)
            twin = self.fork()
            for store in twin._stores():
                store.expand(repeats)
            twin.runs = self.runs.selected(rows)
            self._hold(twin, len(rows))

    @override
    def clear(self) -> None:
        for part in self._parts():
            part.clear()
        self.runs, self.follows_packed = SmoothingRuns(), False
        self._length = 0
        self._invalidate_snapshots()

    def _invalidate_snapshots(self) -> None:
        """Make all states that were returned so far stale."""
        self._returned.invalidate()
        self._old_segments = None

    def _forget_segments(self) -> None:
        """Build segments again for states that are returned from now on. Returned states stay valid."""
        self._old_segments = None
        self._returned.forget()

    # Copies and state

    def _parts(self) -> Iterator[DenseStore | PackedBlocks]:
        return (part for part in (self.sinks, self.blocks, self.residual) if part is not None)

    def _stores(self) -> Iterator[DenseStore]:
        return itertools.chain((self.sinks, self.residual), () if self.blocks is None else self.blocks.stores)

    def _twin(self, made: Callable[[Any], Any], runs: SmoothingRuns) -> Self:
        """A store like this one, with what is made from each of its parts."""
        twin = self.__class__.__new__(self.__class__)
        twin.__dict__.update(self.__getstate__(), runs=runs, _returned=ReturnedStates(), _packing_paths=Counter())
        twin.sinks, twin.residual = made(self.sinks), made(self.residual)
        twin.blocks = None if self.blocks is None else made(self.blocks)
        return twin

    def _hold(self, twin: Self, batch: int | None = None) -> None:
        """Hold what another store holds, which is not used any more, of `batch` sequences if their number changes."""
        if batch is not None and twin.forms is not None:
            twin.forms = forms_of_batch(twin.forms, batch)
            self._returned.invalidate()
        # At once, so that an interrupt finds all of it done, or nothing.
        self.__dict__.update({name: twin.__dict__[name] for name in _HELD})
        self._forget_segments()

    @override
    def snapshot(self) -> Self:
        return self._twin(lambda part: part.snapshot(), self.runs)

    @override
    def fork(self) -> Self:
        return self._twin(lambda part: part.fork(), self.runs.owned())

    @override
    def share_prefix(self, other: TokenStore, tokens: int) -> None:
        if not isinstance(other, QuantizedStore) or self.quantization != other.quantization:
            return
        sinks, blocks, others = self.sinks.length, self.blocks, other.blocks
        if not (blocks and others) or self.forms != other.forms or sinks != other.sinks.length or tokens < sinks:
            return
        self.sinks.share_prefix(other.sinks, sinks)
        most = self.runs.common_blocks(other.runs, min(len(blocks), len(others)))
        blocks.share_prefix(others, tokens - sinks, most)
        self._forget_segments()

    @override
    def trim(self) -> None:
        for store in self._stores():
            store.trim()
        self._forget_segments()

    @override
    def compact(self) -> None:
        for store in self._stores():
            store.compact()
        self._forget_segments()

    @override
    def swap_buffers(self, swap: BufferSwap) -> None:
        if self.blocks is not None:
            self.blocks.swap_buffers(swap)
        self.swap_unpaged_buffers(swap)

    @override
    def swap_unpaged_buffers(self, swap: BufferSwap) -> None:
        self.sinks.swap_buffers(swap)
        self.residual.swap_buffers(swap)
        self.runs = self.runs.swapped(swap)
        # Returned states keep the buffers that they are views of.
        self._forget_segments()

    def __getstate__(self) -> dict[str, Any]:
        # Segments are views; a copy of the store would contain copies of states that it has already.
        return {**self.__dict__, "_old_segments": None, "_validated": None}

    @override
    def held_tensors(self) -> Iterator[Tensor]:
        for store in self._stores():
            yield from store.held_tensors()
        yield from self.runs.held_tensors()

    @override
    def state(self) -> dict[str, Tensor]:
        if self.blocks is None:
            return {}
        sinks = self.sinks.state() if self.sinks.length else {}
        of_sinks = {f"sink_{name}": states for name, states in sinks.items()}
        return {**self.residual.state(), **self.blocks.state(), **of_sinks, **self.runs.state()}

    @override
    def check_state(self, tensors: dict[str, Tensor]) -> int:
        return check_quantized_state(tensors, self.quantization)

    @override
    def load_state(self, tensors: dict[str, Tensor]) -> None:
        if not tensors:
            self.clear()
            return
        self.reserve_form(form_of(tensors["keys"]), form_of(tensors["values"]))
        if "sink_keys" in tensors:
            _append(self.sinks, tensors["sink_keys"], tensors["sink_values"])
        if not {"block_ends", *SMOOTHING_NAMES}.isdisjoint(tensors):
            self.runs = SmoothingRuns.of_state(tensors, len(tensors.get("block_ends", ())[1:]))
        if "block_ends" in tensors and self.blocks is not None:
            self.blocks.load_state(tensors)
            self.residual = _residual_after_blocks(self.blocks.block_tokens)
        self.residual.length_hint = self._residual_hint(self._room, self.old_tokens, self.residual.length)
        _append(self.residual, tensors["keys"], tensors["values"])
        self._length = self.old_tokens + self.residual.length


def _residual_after_blocks(block_tokens: int, length_hint: int | None = None) -> DenseStore:
    """An empty residual that follows blocks of `block_tokens` tokens."""
    return DenseStore(length_hint, RESIDUAL_GROWTH_DIVISOR, block_tokens // GROWTHS_PER_BLOCK)


def _append(store: DenseStore, keys: Tensor, values: Tensor) -> None:
    store.validate(keys, values)
    store.append(keys, values)


def _pieces_of(pieces: list[KVPair], start: int, count: int) -> list[KVPair]:
    """Keys and values of `count` tokens from `start`, counted over all pieces, as views of them."""
    found: list[KVPair] = []
    for keys, values in pieces:
        tokens = keys.shape[2]
        begin, end = max(start, 0), min(start + count, tokens)
        if begin < end:
            found.append((keys[:, :, begin:end], values[:, :, begin:end]))
        start -= tokens
    return found


def _tokens_of(pieces: list[KVPair], start: int, count: int) -> KVPair:
    """Keys and values of `count` tokens from `start`, counted over all pieces: views if one piece has them all."""
    found = _pieces_of(pieces, start, count)
    if len(found) == 1:
        return found[0]
    keys, values = (torch.cat(side, dim=2) for side in zip(*found, strict=True))
    return keys, values
