"""Tokens in packed codes, but for the oldest and the newest few."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Self, override

from kvlayers.attention.packed_ops import handles
from kvlayers.attention.packed_tensor import PackedStates, Snapshot, Version, as_dense
from kvlayers.attention.path_counter import PathCounter
from kvlayers.attention.segments import DenseSegment, KVSegments, PackedSegment
from kvlayers.errors import StateMismatchError
from kvlayers.quantizers.contract import Quantizer, Side
from kvlayers.stores.buffer import StateForm, form_of, nbytes_of
from kvlayers.stores.contract import Fidelity, Mover, StatePair, TokenStore
from kvlayers.stores.dense import DenseStore
from kvlayers.stores.description import DescriptionContext, Fact, Facts
from kvlayers.stores.packed_blocks import (
    BLOCKS_AT_ONCE,
    PACKED_NAMES,
    SIDES,
    PackedBlocks,
    block_nbytes,
    check_packed_state,
    planned_nbytes,
)
from kvlayers.stores.quantization import Quantization, block_tokens, blocks_beyond
from kvlayers.stores.registry import register_store
from kvlayers.stores.residual import most_in_residual, residual_behind_blocks, unpacked_residual
from kvlayers.stores.validation import check_dense_state, check_one_batch, checked_forms, mismatch

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
"""Dtypes of states that are quantized. The arithmetic is in float32."""


@register_store
class QuantizedStore(TokenStore):
    """Packed blocks between two runs in full precision: the sinks, and the residual of the newest tokens.

    The residual holds `residual_length` tokens at least. When new ones would make it longer by more than a block, whole
    blocks of its oldest are quantized, and their codes never change again. Until the first block is packed, everything
    is in the residual, and what is returned are plain views.

    An update attends to what was held before it, as it was held, and to its own states in full precision.

    States that are not finite cannot be coded. A token that has such a key or value is quantized as zeros, so that the
    others of its group are not touched, and the scales of its values are not-a-number, so that whatever attends to it
    still comes out as that.

    Gradients flow to the states of the newest update alone: what is held is detached.

    Args:
        quantization: bits, groups, and the tokens that stay in full precision.
        length_hint: the most tokens that are expected, where known: memory then grows no further than that.
    """

    is_opaque = True

    def __init__(self, quantization: Quantization, length_hint: int | None = None) -> None:
        self.quantization = quantization
        self.length_hint = length_hint
        self._forms: tuple[StateForm, StateForm] | None = None
        self._admitted: tuple[StateForm, StateForm] | None = None
        self._blocks: PackedBlocks | None = None
        self._length = 0
        self._sinks = DenseStore()
        self._recent = unpacked_residual()
        self._edition = Version()
        self._old_runs: tuple[tuple[DenseSegment, ...], PackedSegment | None] | None = None
        self._held: Snapshot | None = None
        self.ways = PathCounter()
        self._recent_may_move = False
        """Whether the residual has room at its front, to which the next tokens may move it."""

    # What is held

    @property
    def _old_tokens(self) -> int:
        """Tokens before the residual."""
        return self._sinks.length + (0 if self._blocks is None else self._blocks.tokens)

    @property
    @override
    def length(self) -> int:
        return self._length

    @override
    def count(self, tokens: int) -> None:
        self._length = self._length + tokens

    def _recount(self) -> None:
        self._length = self._old_tokens + self._recent.length

    @property
    @override
    def bits(self) -> tuple[int, int] | None:
        return self.quantization.keys.nbits, self.quantization.values.nbits

    @property
    @override
    def attention_paths(self) -> Mapping[str, int]:
        return self.ways.counts

    @property
    @override
    def key_form(self) -> StateForm | None:
        return None if self._forms is None else self._forms[0]

    @property
    @override
    def value_form(self) -> StateForm | None:
        return None if self._forms is None else self._forms[1]

    @property
    def _missing_sinks(self) -> int:
        """Tokens at the front of the residual that are to be sinks when the first block is packed."""
        return 0 if self._blocks else self.quantization.sink_tokens - self._sinks.length

    @property
    def _room(self) -> int:
        """Tokens that the residual may hold."""
        size = 0 if self._blocks is None else self._blocks.block_tokens
        return self._missing_sinks + self.quantization.residual_length + size

    # Taking in states

    @override
    def validate(self, keys: Tensor, values: Tensor) -> int:
        forms = _of_one_dtype(*checked_forms(keys, values))
        self._admitted = None
        if forms != self._forms:
            if self.length and self._forms is not None:
                raise mismatch(forms, self._forms, self.length)
            self._quantizers_for(*forms)
            self._admitted = forms
        return int(keys.shape[2])

    def _quantizers_for(self, key_form: StateForm, value_form: StateForm) -> dict[Side, Quantizer]:
        """Quantizers for states of such forms.

        Raises:
            StateMismatchError: keys and values do not match each other.
        """
        check_one_batch(key_form, value_form)
        if key_form[1] != value_form[1] or key_form[3:] != value_form[3:] or not (key_form[2] and value_form[2]):
            raise StateMismatchError(
                f"expected keys and values of as many kv_heads, of a head_dim of at least 1, and on one device, but "
                f"saw {key_form} and {value_form}: pass the states of one forward pass together."
            )
        if key_form[3] not in DTYPES:
            raise StateMismatchError(
                f"expected states of {', '.join(map(str, DTYPES))}, but saw {key_form[3]}: convert them first, or "
                "use a DynamicCache."
            )
        return self.quantization.quantizers(key_form[2], value_form[2])

    @override
    def reserve_form(self, key_form: StateForm, value_form: StateForm) -> None:
        self._quantizers_for(key_form, value_form)
        self._admitted = key_form, value_form
        self._take_form()

    def _take_form(self) -> None:
        """Be the store of states of the form that was admitted."""
        if self._admitted is not None:
            self._start_over(self._admitted)
            self._admitted = None

    def _start_over(self, forms: tuple[StateForm, StateForm]) -> None:
        """Hold nothing, in memory that nothing was returned from."""
        quantizers = self._quantizers_for(*forms)
        size = block_tokens(quantizers)
        self._forms = forms
        self._blocks = PackedBlocks(quantizers, forms, size, self._most_blocks(size, self.length_hint))
        self._sinks = DenseStore(length_hint=self.quantization.sink_tokens)
        self._recent = unpacked_residual()
        self._recent.reserve_form(*forms)
        self._changed()
        self._length = 0

    def _most_blocks(self, size: int, length_hint: int | None) -> int | None:
        """The most blocks of `size` tokens that are expected, if that is known."""
        return None if length_hint is None else blocks_beyond(length_hint, self._unpacked_room(size), size)

    def _unpacked_room(self, size: int) -> int:
        """The most tokens that stay in full precision, beside blocks of `size` tokens."""
        return self.quantization.sink_tokens + self.quantization.residual_length + size

    @property
    @override
    def sized_for(self) -> int | None:
        return self.length_hint

    @property
    @override
    def fidelity(self) -> Fidelity:
        return "rounded"

    @override
    def planned_nbytes(self, key_form: StateForm, value_form: StateForm, tokens: int, sized_for: int | None) -> int:
        quantizers = self._quantizers_for(key_form, value_form)
        size, forms = block_tokens(quantizers), (key_form, value_form)
        room = self._unpacked_room(size)
        blocks = blocks_beyond(tokens, room, size)
        if not blocks:
            return unpacked_residual().planned_nbytes(*forms, tokens, most_in_residual(room, sized_for, 0))
        sinks = self.quantization.sink_tokens
        old = sinks + blocks * size
        hint = most_in_residual(self.quantization.residual_length + size, sized_for, old, tokens - old)
        residual = residual_behind_blocks(size).planned_nbytes(*forms, tokens - old, hint)
        packed = planned_nbytes(quantizers, forms, size, blocks, self._most_blocks(size, sized_for))
        return packed + residual + sum(nbytes_of(form, sinks) for form in forms)

    @override
    def planned_bits(self, key_form: StateForm, value_form: StateForm) -> float:
        quantizers = self._quantizers_for(key_form, value_form)
        size, forms = block_tokens(quantizers), (key_form, value_form)
        packed = sum(
            block_nbytes(quantizers[side].format, side, form, size) for side, form in zip(SIDES, forms, strict=True)
        )
        return 8 * packed * key_form[3].itemsize / sum(nbytes_of(form, size) for form in forms)

    @override
    def append(self, keys: Tensor, values: Tensor) -> None:
        self._take_form()
        if self._recent_may_move:
            self._changed()
        keys, values = self._as_held(keys).detach(), self._as_held(values).detach()
        new = keys.shape[2]
        blocks = self._blocks_to_pack(new)
        if blocks:
            self._pack(keys, values, blocks)
        else:
            _put(self._recent, (keys, values))
        self._length += new

    def _as_held(self, states: Tensor) -> Tensor:
        """States in full precision and in the dtype of those that are held."""
        states = as_dense(states)
        dtype = states.dtype if self._forms is None else self._forms[0][3]
        return states if states.dtype == dtype else states.to(dtype)

    def _blocks_to_pack(self, new: int) -> int:
        """Blocks that must be packed so that the residual has room for `new` tokens."""
        size = 1 if self._blocks is None else self._blocks.block_tokens
        return blocks_beyond(self._recent.length + new, self._room, size)

    @override
    def extend(
        self, keys: Tensor, values: Tensor, past: int | None = None, front: StatePair | None = None
    ) -> StatePair:
        past = self.length if past is None else past
        self._take_form()
        new = keys.shape[2]
        differentiable = torch.is_grad_enabled() and (keys.requires_grad or values.requires_grad)
        if not differentiable and not self._blocks_to_pack(new):
            self.append(keys, values)
            if front is None:
                return self.newest(past + new)
            return self._returned(self._history(past + new).behind(DenseSegment(*front)))
        history = self._history_with(keys, values, past, front)
        self.append(keys, values)
        return self._returned(history)

    @override
    def extend_and_evict(
        self, keys: Tensor, values: Tensor, past: int, kept: int, front: StatePair | None = None
    ) -> StatePair:
        self._take_form()
        history = self._history_with(keys, values, past, front)
        new = keys.shape[2]
        if new >= kept and self._forms is not None:
            fresh = QuantizedStore(self.quantization, self.length_hint)
            fresh._start_over(self._forms)
            fresh.append(keys.narrow(2, new - kept, kept), values.narrow(2, new - kept, kept))
            self._sinks, self._blocks, self._recent = fresh._sinks, fresh._blocks, fresh._recent
            self._forget_runs()
            self._recount()
        else:
            self.append(keys, values)
            self.drop_oldest(self.length - kept)
        return self._returned(history)

    def _pack(self, keys: Tensor, values: Tensor, count: int) -> None:
        """Take in states, and pack `count` blocks of the oldest tokens in full precision that are not to be sinks."""
        blocks = self._blocks
        if blocks is None:
            raise StateMismatchError("expected admitted states before any are packed: update the layer first.")
        sinks, held = self._missing_sinks, self._recent.length
        parts = [*([self._recent.newest(held)] if held else []), (keys, values)]
        size = blocks.block_tokens
        packed = sinks + count * size
        # All that can fail comes first, and into new memory: what is held, and what was returned, stays true.
        quantized = [
            blocks.quantized(*_tokens_of(parts, sinks + done * size, min(BLOCKS_AT_ONCE, count - done) * size))
            for done in range(0, count, BLOCKS_AT_ONCE)
        ]
        new_sinks = self._sinks
        if sinks:
            new_sinks = self._sinks.fork()
            _put(new_sinks, _tokens_of(parts, 0, sinks))
        rest = held + keys.shape[2] - packed
        recent = residual_behind_blocks(size)
        room, old = self.quantization.residual_length + size, self._old_tokens + packed
        recent.length_hint = most_in_residual(room, self.length_hint, old, rest)
        _put(recent, _tokens_of(parts, packed, rest))
        blocks.reserve(count)
        before = blocks.tokens
        try:
            for some in quantized:
                blocks.append(some)
        except BaseException:
            # Interrupted: what is in the residual still must not be packed as well, nor one side of it.
            blocks.truncate(before)
            raise
        self._sinks, self._recent = new_sinks, recent
        self._forget_runs()

    # Reading

    @override
    def newest_keys(self, count: int) -> Tensor:
        return self.newest(count)[0]

    @override
    def newest_values(self, count: int) -> Tensor:
        return self.newest(count)[1]

    @override
    def newest(self, count: int) -> StatePair:
        if count <= self._recent.length:
            return self._recent.newest(count)
        held = self._held
        # Keys and values that are asked for one after the other must be handles of one history.
        if held is not None and (count, self.length) == (held.history.tokens, held.length):
            return self._handles(held)
        returned = self._returned(self._history(count))
        if isinstance(returned[0], PackedStates):
            self._held = returned[0].attended
        return returned

    @override
    def hand_out(self) -> StatePair:
        # Handles cannot be written to, and know when they have become untrue.
        return self.newest(self.length) if self._old_tokens else self._recent.hand_out()

    def _returned(self, history: KVSegments) -> StatePair:
        """What attention gets: plain states where none are packed, else handles."""
        if self._forms is None:
            raise StateMismatchError("expected admitted states before any are read: update the layer first.")
        _, _, _, dtype, device = self._forms[0]
        if history.packed is None or torch.compiler.is_compiling():
            return history.dense("keys", dtype), history.dense("values", dtype)
        return self._handles(
            Snapshot(history, dtype, device, self._edition, self._edition.number, self.length, self.ways)
        )

    def _handles(self, attended: Snapshot) -> StatePair:
        (_, kv_heads, key_head_dim, _, _), (_, _, value_head_dim, _, _) = self._forms  # type: ignore[misc]
        return handles(attended, kv_heads, (key_head_dim, value_head_dim))

    def _history(self, count: int) -> KVSegments:
        """The newest `count` tokens."""
        skipped = self.length - count
        if skipped:
            before, packed = self._runs_without(skipped)
        else:
            if self._old_runs is None:
                self._old_runs = self._runs_without(0)
            before, packed = self._old_runs
        recent = min(count, self._recent.length)
        return KVSegments(before, packed, (DenseSegment(*self._recent.newest(recent)),) if recent else ())

    def _runs_without(self, skipped: int) -> tuple[tuple[DenseSegment, ...], PackedSegment | None]:
        """Sinks and packed tokens, but for the oldest `skipped` of them."""
        sinks = max(self._sinks.length - skipped, 0)
        before = (DenseSegment(*self._sinks.newest(sinks)),) if sinks else ()
        packed = None if self._blocks is None else self._blocks.run(max(skipped - self._sinks.length, 0))
        return before, packed

    def _history_with(self, keys: Tensor, values: Tensor, past: int, front: StatePair | None) -> KVSegments:
        """Those in front, where there are any, the newest `past` tokens that are held, and new ones."""
        history = self._history(past)
        new = DenseSegment(self._as_held(keys), self._as_held(values))
        history = KVSegments(history.before, history.packed, (*history.after, new))
        return history if front is None else history.behind(DenseSegment(*front))

    # Dropping, cropping and the batch

    @override
    def drop_oldest(self, count: int) -> None:
        from_sinks = min(count, self._sinks.length)
        self._sinks.drop_oldest(from_sinks)
        from_blocks = 0
        if self._blocks:
            from_blocks = min(count - from_sinks, self._blocks.tokens)
            self._blocks.drop_oldest(from_blocks)
        from_recent = count - from_sinks - from_blocks
        self._recent.drop_oldest(from_recent)
        self._length -= count
        self._recent_may_move = self._recent_may_move or from_recent > 0
        # What was returned stays true, and only what is returned next has fewer tokens.
        self._old_runs = self._held = None

    @override
    def truncate(self, length: int) -> None:
        old = self._old_tokens
        self._recent.truncate(max(length - old, 0))
        if length < old:
            sinks = min(length, self._sinks.length)
            if self._blocks is not None:
                self._blocks.truncate(length - sinks)
            if sinks < self._sinks.length:
                self._sinks.truncate(sinks)
        self._recount()
        self._changed()

    @override
    def reserve(self, tokens: int) -> None:
        """Nothing: packed blocks and the residual grow by little."""

    @override
    def shrink(self, tokens: int) -> None:
        """Nothing: the residual is short, and packed blocks have next to no spare room to give back."""

    @override
    def select(self, indices: Tensor) -> None:
        if self._forms is None or self._blocks is None:
            return
        # All of them before any is put in place: where there is no memory for one, nothing has changed.
        sinks, recent = self._sinks.selected(indices), self._recent.selected(indices)
        self._blocks, self._sinks, self._recent = self._blocks.selected(indices), sinks, recent
        key_form, value_form = self._forms
        batch = indices.shape[0]
        self._forms = (batch, *key_form[1:]), (batch, *value_form[1:])
        self._changed()

    @override
    def clear(self) -> None:
        self._sinks.clear()
        self._recent.clear()
        if self._blocks is not None:
            self._blocks.clear()
        self._length = 0
        self._changed()

    def _changed(self) -> None:
        """What was returned so far is no longer true."""
        self._edition.advance()
        self._forget_runs()

    def _forget_runs(self) -> None:
        """What is returned next is made anew; what was returned stays true."""
        self._old_runs = self._held = None
        self._recent_may_move = False
        recent = self._recent
        recent.length_hint = most_in_residual(self._room, self.length_hint, self._old_tokens, recent.length)

    # Copies

    @override
    def snapshot(self) -> Self:
        twin = self.__class__.__new__(self.__class__)
        twin.__dict__.update(self.__getstate__())
        twin._edition, twin.ways = Version(), PathCounter()
        twin._sinks, twin._recent = self._sinks.snapshot(), self._recent.snapshot()
        twin._blocks = None if self._blocks is None else self._blocks.snapshot()
        return twin

    @override
    def swap_buffers(self, move: Mover) -> None:
        self._sinks.swap_buffers(move)
        self._recent.swap_buffers(move)
        if self._blocks is not None:
            self._blocks.swap_buffers(move)
        # What was returned keeps the buffers that it is of.
        self._old_runs = self._held = None

    @override
    def fork(self) -> Self:
        twin = self.__class__.__new__(self.__class__)
        twin.__dict__.update(self.__getstate__())
        twin._edition, twin.ways = Version(), PathCounter()
        twin._sinks, twin._recent = self._sinks.fork(), self._recent.fork()
        twin._blocks = None if self._blocks is None else self._blocks.fork()
        return twin

    def __getstate__(self) -> dict[str, Any]:
        # Runs are views, and would travel as copies of what is in the stores.
        return {**self.__dict__, "_old_runs": None, "_held": None, "_admitted": None}

    @override
    def held_tensors(self) -> Iterator[Tensor]:
        for part in (self._sinks, self._blocks, self._recent):
            if part is not None:
                yield from part.held_tensors()

    @override
    def describe(self) -> dict[str, Fact]:
        return {"store": self.kind, **self.quantization.facts()}

    @classmethod
    @override
    def from_description(cls, facts: Facts, context: DescriptionContext) -> Self:
        return cls(Quantization.from_facts(facts), context.length_hint)

    @override
    def state(self) -> dict[str, Tensor]:
        if self._forms is None or self._blocks is None:
            return {}
        tensors = {**self._recent.state(), **self._blocks.state()}
        if self._sinks.length:
            tensors.update({f"sink_{name}": states for name, states in self._sinks.state().items()})
        return tensors

    @override
    def check_state(self, tensors: dict[str, Tensor]) -> int:
        packed = [name for name in PACKED_NAMES if name in tensors]
        unknown = set(tensors) - {"keys", "values", "sink_keys", "sink_values", *PACKED_NAMES}
        if unknown or (tensors and "keys" not in tensors) or len(packed) not in (0, len(PACKED_NAMES)):
            raise StateMismatchError(f"expected the state of a quantized store, but saw {sorted(tensors)}.")
        tokens = check_dense_state({name: tensors[name] for name in ("keys", "values") if name in tensors})
        if not tensors:
            return 0
        forms = form_of(tensors["keys"]), form_of(tensors["values"])
        quantizers = self._quantizers_for(*forms)
        sinks = {name: tensors[f"sink_{name}"] for name in ("keys", "values") if f"sink_{name}" in tensors}
        sink_tokens = check_dense_state(sinks)
        if sink_tokens > self.quantization.sink_tokens:
            raise StateMismatchError(
                f"expected a state of at most {self.quantization.sink_tokens} sinks, but saw {sink_tokens}: take the "
                "state again."
            )
        tokens += sink_tokens
        if sinks and (form_of(sinks["keys"]), form_of(sinks["values"])) != forms:
            raise StateMismatchError("expected sinks of the form of the other tokens: take the state again.")
        return tokens + (check_packed_state(tensors, quantizers, forms, block_tokens(quantizers)) if packed else 0)

    @override
    def load_state(self, tensors: dict[str, Tensor]) -> None:
        if not tensors:
            self.clear()
            return
        self._start_over((form_of(tensors["keys"]), form_of(tensors["values"])))
        if "sink_keys" in tensors:
            _put(self._sinks, (tensors["sink_keys"], tensors["sink_values"]))
        if "block_ends" in tensors and self._blocks is not None:
            self._blocks.load_state(tensors)
            self._recent = residual_behind_blocks(self._blocks.block_tokens)
        self._changed()
        _put(self._recent, (tensors["keys"], tensors["values"]))
        self._recount()


def _of_one_dtype(key_form: StateForm, value_form: StateForm) -> tuple[StateForm, StateForm]:
    """The forms as they are held: where autocast has made keys and values of two dtypes, in that which holds both."""
    dtype = torch.promote_types(key_form[3], value_form[3])
    return (*key_form[:3], dtype, key_form[4]), (*value_form[:3], dtype, value_form[4])


def _put(store: DenseStore, states: StatePair) -> None:
    store.validate(*states)
    store.append(*states)


def _tokens_of(parts: list[StatePair], start: int, count: int) -> StatePair:
    """Keys and values of `count` tokens from `start`, of those in all parts together."""
    found: list[StatePair] = []
    for keys, values in parts:
        tokens = keys.shape[2]
        begin, end = max(start, 0), min(start + count, tokens)
        if begin < end:
            found.append((keys[:, :, begin:end], values[:, :, begin:end]))
        start -= tokens
    if len(found) == 1:
        return found[0]
    if not found:
        keys, values = parts[0]
        return keys[:, :, :0], values[:, :, :0]
    keys, values = (torch.cat(side, dim=2) for side in zip(*found, strict=True))
    return keys, values
