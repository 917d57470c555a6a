"""Tokens in packed codes, but for the oldest and the newest few."""

import math
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Self, override

from ..attention.handle import Attended, Edition, as_dense, handles
from ..attention.history import DenseRun, History, PackedRun
from ..errors import StateMismatchError
from ..quantizers.base import CodeFormat, Quantizer, Side
from .admission import check_dense_state, check_one_batch, checked_forms, mismatch
from .base import Fact, TokenStore
from .buffer import StateForm, form_of
from .dense import DenseStore
from .packed_side import PackedSide, pack_side, side_bytes
from .quantization import Quantization, block_tokens

GROWTH_DIVISOR = 128
"""Packed blocks grow by one part in so many: moving them is cheap beside reading them all at every token."""

MINIMUM_GROWTH = 1
"""Blocks by which they grow at least."""

BLOCKS_AT_ONCE = 16
"""Blocks that are quantized together, which bounds what a long prefill needs besides."""

_SIDES: tuple[Side, Side] = ("keys", "values")
_PACKED_NAMES = ("keys_codes", "keys_parameters", "values_codes", "values_parameters", "block_ends")


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

    def __init__(self, quantization: Quantization, length_hint: int | None = None) -> None:
        self.quantization = quantization
        self.length_hint = length_hint
        self._forms: tuple[StateForm, StateForm] | None = None
        self._admitted: tuple[StateForm, StateForm] | None = None
        self._quantizers: dict[Side, Quantizer] = {}
        self._block_tokens = 0
        self._sinks = DenseStore(length_hint=quantization.sink_tokens)
        self._recent = DenseStore()
        self._packed = {side: DenseStore() for side in _SIDES}
        self._ends: list[int] = []
        self._first = 0
        self._edition = Edition()
        self._runs: tuple[tuple[DenseRun, ...], PackedRun | None] | None = None

    # What is held

    @property
    def _packed_tokens(self) -> int:
        return sum(self._ends) - self._first

    @property
    @override
    def length(self) -> int:
        return self._sinks.length + self._packed_tokens + self._recent.length

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
        return 0 if self._ends else self.quantization.sink_tokens - self._sinks.length

    @property
    def _room(self) -> int:
        """Tokens that the residual may hold."""
        return self._missing_sinks + self.quantization.residual_length + self._block_tokens

    # Taking in states

    @override
    def admit(self, keys: Tensor, values: Tensor) -> int:
        forms = checked_forms(keys, values)
        self._admitted = None
        if forms != self._forms:
            if self.length and self._forms is not None:
                raise mismatch(forms, self._forms, self.length)
            self._check_forms(*forms)
            self._admitted = forms
        return int(keys.shape[2])

    def _check_forms(self, key_form: StateForm, value_form: StateForm) -> None:
        check_one_batch(key_form, value_form)
        if key_form[1] != value_form[1] or key_form[3:] != value_form[3:]:
            raise StateMismatchError(
                f"expected keys and values of as many kv_heads, one dtype and one device, but saw {key_form} and "
                f"{value_form}: pass the states of one forward pass together."
            )
        if not key_form[3].is_floating_point:
            raise StateMismatchError(f"expected states of a floating dtype, but saw {key_form[3]}: convert them first.")
        self.quantization.quantizers(key_form[2], value_form[2])

    @override
    def reserve_form(self, key_form: StateForm, value_form: StateForm) -> None:
        self._check_forms(key_form, value_form)
        self._admitted = key_form, value_form
        self._take_form()

    def _take_form(self) -> None:
        """Be the store of states of the form that was admitted."""
        if self._admitted is None:
            return
        key_form, value_form = self._forms = self._admitted
        self._admitted = None
        self._quantizers = self.quantization.quantizers(key_form[2], value_form[2])
        self._block_tokens = block_tokens(self._quantizers)
        self._sinks = DenseStore(length_hint=self.quantization.sink_tokens)
        self._recent = DenseStore(length_hint=self._room)
        hint = None if self.length_hint is None else self._blocks_beyond(self.length_hint)
        for side in _SIDES:
            self._packed[side] = DenseStore(hint, GROWTH_DIVISOR, MINIMUM_GROWTH)
            form = key_form if side == "keys" else value_form
            forms = packed_forms(self._quantizers[side].format, side, form, self._block_tokens)
            self._packed[side].reserve_form(*forms)
        self._ends, self._first = [], 0
        self._changed()

    def _blocks_beyond(self, tokens: int) -> int:
        """Blocks that must be packed so that the residual has room for the rest of `tokens` that are not sinks yet."""
        return max(math.ceil((tokens - self._room) / self._block_tokens), 0)

    @override
    def append(self, keys: Tensor, values: Tensor) -> None:
        self._take_form()
        keys, values = as_dense(keys).detach(), as_dense(values).detach()
        blocks = self._blocks_beyond(self._recent.length + keys.shape[2])
        if blocks:
            self._pack(keys, values, blocks)
        else:
            self._recent.admit(keys, values)
            self._recent.append(keys, values)

    @override
    def extend(self, keys: Tensor, values: Tensor, past: int) -> tuple[Tensor, Tensor]:
        self._take_form()
        fits = not self._blocks_beyond(self._recent.length + keys.shape[2])
        if fits and not (torch.is_grad_enabled() and (keys.requires_grad or values.requires_grad)):
            self.append(keys, values)
            return self._newest(past + keys.shape[2])
        history = self._history_with(keys, values, past)
        self.append(keys, values)
        return self._returned(history)

    @override
    def pass_through(self, keys: Tensor, values: Tensor, past: int, kept: int) -> tuple[Tensor, Tensor]:
        self._take_form()
        history = self._history_with(keys, values, past)
        tokens = keys.shape[2]
        if tokens >= kept:
            # To new memory, as what is returned still has to be read.
            self._admitted = self._forms
            self._take_form()
            keys, values = keys.narrow(2, tokens - kept, kept), values.narrow(2, tokens - kept, kept)
        else:
            self.drop_oldest(self.length + tokens - kept)
        self.append(keys, values)
        return self._returned(history)

    def _pack(self, keys: Tensor, values: Tensor, blocks: int) -> None:
        """Take in states, and pack so many blocks of the oldest tokens in full precision that are no sinks."""
        sinks, held = self._missing_sinks, self._recent.length
        parts = [(keys, values)]
        if held:
            # A copy, since the residual is about to move to the front of its memory.
            parts.insert(0, tuple(states.clone() for states in self._recent.newest(held)))  # type: ignore[arg-type]
        if sinks:
            self._put(self._sinks, _tokens_of(parts, 0, sinks))
        for side in _SIDES:
            # To new memory where it must grow, never within: the states to come may be attended to as they are.
            self._packed[side].reserve(len(self._ends) + blocks)
        size = self._block_tokens
        for block in range(0, blocks, BLOCKS_AT_ONCE):
            count = min(BLOCKS_AT_ONCE, blocks - block)
            self._put_blocks(*_tokens_of(parts, sinks + block * size, count * size))
            self._ends += [size] * count
        packed = sinks + blocks * size
        if len(self._ends) == blocks:
            # What was returned before the first block was packed are plain views of the old memory: it is let go.
            self._recent = DenseStore()
        self._recent.clear()
        self._changed()
        self._put(self._recent, _tokens_of(parts, packed, held + keys.shape[2] - packed))

    def _put(self, store: DenseStore, states: tuple[Tensor, Tensor]) -> None:
        store.admit(*states)
        store.append(*states)

    @torch.no_grad()
    def _put_blocks(self, keys: Tensor, values: Tensor) -> None:
        finite = (keys.isfinite().all(-1) & values.isfinite().all(-1)).unsqueeze(-1)
        for side, states in zip(_SIDES, (keys, values), strict=True):
            quantizer = self._quantizers[side]
            groups = quantizer.quantize(torch.where(finite, states, 0))
            codes, parameters = pack_side(groups, quantizer.format, side, self._block_tokens)
            if side == "values":
                parameters = self._marked(parameters, finite)
            self._put(self._packed[side], (codes, parameters))

    def _marked(self, parameters: Tensor, finite: Tensor) -> Tensor:
        """Parameters of values, with those not-a-number that belong to tokens which are not finite."""
        group_tokens = self._quantizers["values"].format.group_tokens
        # The values of a group along tokens share their scale, and cannot be marked one by one.
        groups = torch.unflatten(finite, 2, (-1, self._block_tokens // group_tokens, group_tokens)).all(4).flatten(3)
        whole = torch.unflatten(parameters, 3, (self._quantizers["values"].format.parameters, groups.shape[3], -1))
        return torch.where(groups[:, :, :, None, :, None], whole, torch.nan).flatten(3)

    # Reading

    @override
    def newest_keys(self, count: int) -> Tensor:
        return self._newest(count)[0]

    @override
    def newest_values(self, count: int) -> Tensor:
        return self._newest(count)[1]

    @override
    def newest(self, count: int) -> tuple[Tensor, Tensor]:
        return self._newest(count)

    def _newest(self, count: int) -> tuple[Tensor, Tensor]:
        if count <= self._recent.length:
            return self._recent.newest(count)
        return self._returned(self._history(count))

    def _returned(self, history: History) -> tuple[Tensor, Tensor]:
        """What attention gets: plain states where none are packed, else handles."""
        key_form, value_form = self._forms  # type: ignore[misc]
        if history.packed is None or torch.compiler.is_compiling():
            return history.dense("keys", key_form[3]), history.dense("values", key_form[3])
        attended = Attended(history, key_form[3], key_form[4], self._edition, self._edition.number)
        return handles(attended, key_form[1], (key_form[2], value_form[2]))

    def _history(self, count: int) -> History:
        """The newest `count` tokens."""
        before, packed = self._old_runs(self.length - count)
        recent = min(count, self._recent.length)
        return History(before, packed, (DenseRun(*self._recent.newest(recent)),) if recent else ())

    def _history_with(self, keys: Tensor, values: Tensor, past: int) -> History:
        """The newest `past` tokens that are held, and new ones: true whatever happens to the residual."""
        history = self._history(past)
        copied = tuple(DenseRun(run.keys.clone(), run.values.clone()) for run in history.after)
        return History(history.before, history.packed, (*copied, DenseRun(as_dense(keys), as_dense(values))))

    def _old_runs(self, skipped: int) -> tuple[tuple[DenseRun, ...], PackedRun | None]:
        """Sinks and packed tokens, but for the oldest `skipped` of them."""
        if not skipped:
            if self._runs is None:
                self._runs = self._make_runs(0)
            return self._runs
        return self._make_runs(skipped)

    def _make_runs(self, skipped: int) -> tuple[tuple[DenseRun, ...], PackedRun | None]:
        sinks = max(self._sinks.length - skipped, 0)
        before = (DenseRun(*self._sinks.newest(sinks)),) if sinks else ()
        first = self._first + max(skipped - self._sinks.length, 0)
        block = 0
        while block < len(self._ends) and first >= self._ends[block]:
            first -= self._ends[block]
            block += 1
        blocks = len(self._ends) - block
        if not blocks:
            return before, None
        ends = tuple(self._ends[block:])
        return before, PackedRun(
            self._packed_side("keys", blocks),
            self._packed_side("values", blocks),
            first,
            None if set(ends) == {self._block_tokens} else ends,
        )

    def _packed_side(self, side: Side, blocks: int) -> PackedSide:
        form = self.key_form if side == "keys" else self.value_form
        codes, parameters = self._packed[side].newest(blocks)
        return PackedSide(codes, parameters, self._quantizers[side].format, side, form[2], self._block_tokens)  # type: ignore[index]

    # Dropping, cropping and the batch

    @override
    def drop_oldest(self, count: int) -> None:
        from_sinks = min(count, self._sinks.length)
        self._sinks.drop_oldest(from_sinks)
        from_packed = min(count - from_sinks, self._packed_tokens)
        self._first += from_packed
        gone = 0
        while gone < len(self._ends) and self._first >= self._ends[gone]:
            self._first -= self._ends[gone]
            gone += 1
        if gone:
            del self._ends[:gone]
            for store in self._packed.values():
                store.drop_oldest(gone)
        self._recent.drop_oldest(count - from_sinks - from_packed)
        self._runs = None

    @override
    def truncate(self, length: int) -> None:
        old = self._sinks.length + self._packed_tokens
        if length >= old:
            self._recent.truncate(length - old)
            self._changed()
            return
        self._recent.clear()
        from_packed = max(length - self._sinks.length, 0)
        kept = 0
        # A block that is cut keeps its codes, and says how many of its tokens still count.
        remaining = from_packed + self._first
        while from_packed and kept < len(self._ends) and remaining > 0:
            self._ends[kept] = min(self._ends[kept], remaining)
            remaining -= self._ends[kept]
            kept += 1
        del self._ends[kept:]
        for store in self._packed.values():
            store.truncate(kept)
        if not kept:
            self._first = 0
            self._sinks.truncate(min(length, self._sinks.length))
        self._changed()

    @override
    def reserve(self, tokens: int) -> None:
        """Nothing: packed blocks grow by little, and the residual does not grow at all."""

    @override
    def shrink(self, tokens: int) -> None:
        """Nothing: no more is held than what is needed."""

    @override
    def select(self, indices: Tensor) -> None:
        if self._forms is None:
            return
        for store in self._stores():
            store.select(indices)
        key_form, value_form = self._forms
        batch = indices.shape[0]
        self._forms = (batch, *key_form[1:]), (batch, *value_form[1:])
        self._changed()

    @override
    def clear(self) -> None:
        for store in self._stores():
            store.clear()
        self._ends, self._first = [], 0
        self._changed()

    def _stores(self) -> tuple[DenseStore, ...]:
        return self._sinks, self._packed["keys"], self._packed["values"], self._recent

    def _changed(self) -> None:
        self._edition.advance()
        self._runs = None
        self._recent.length_hint = self._room

    # Copies

    @override
    def fork(self) -> Self:
        twin = self.__class__.__new__(self.__class__)
        twin.__dict__.update(self.__getstate__())
        twin._edition = Edition()
        twin._sinks, twin._recent = self._sinks.fork(), self._recent.fork()
        twin._packed = {side: store.fork() for side, store in self._packed.items()}
        return twin

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_runs": None, "_admitted": None, "_ends": list(self._ends)}

    @property
    @override
    def nbytes(self) -> int:
        return sum(store.nbytes for store in self._stores())

    @override
    def settings(self) -> dict[str, Fact]:
        return self.quantization.facts()

    @override
    def state(self) -> dict[str, Tensor]:
        if self._forms is None:
            return {}
        tensors = dict(self._recent_or_empty().state())
        if self._sinks.length:
            tensors.update({f"sink_{name}": states for name, states in self._sinks.state().items()})
        if self._ends:
            for side in _SIDES:
                held = self._packed[side].state()
                tensors[f"{side}_codes"], tensors[f"{side}_parameters"] = held["keys"], held["values"]
            tensors["block_ends"] = torch.tensor([self._first, *self._ends], dtype=torch.int64)
        return tensors

    def _recent_or_empty(self) -> DenseStore:
        """The residual, which has a form even where it never held a token."""
        if self._recent.key_form is None:
            self._recent.reserve_form(*self._forms)  # type: ignore[misc]
        return self._recent

    @override
    def check_state(self, tensors: dict[str, Tensor]) -> int:
        recent = check_dense_state({name: tensors[name] for name in ("keys", "values") if name in tensors})
        sinks = check_dense_state({name: tensors[f"sink_{name}"] for name in _SIDES if f"sink_{name}" in tensors})
        unknown = set(tensors) - {"keys", "values", "sink_keys", "sink_values", *_PACKED_NAMES}
        packed = [name for name in _PACKED_NAMES if name in tensors]
        if unknown or (len(tensors) > 0 and "keys" not in tensors) or len(packed) not in (0, len(_PACKED_NAMES)):
            raise StateMismatchError(f"expected the state of a quantized store, but saw {sorted(tensors)}.")
        return recent + sinks + (self._check_packed_state(tensors) if packed else 0)

    def _check_packed_state(self, tensors: dict[str, Tensor]) -> int:
        keys, values, ends = tensors["keys"], tensors["values"], tensors["block_ends"].tolist()
        quantizers = self.quantization.quantizers(keys.shape[3], values.shape[3])
        size = block_tokens(quantizers)
        for side, states in zip(_SIDES, (keys, values), strict=True):
            batch, kv_heads = states.shape[:2]
            forms = packed_forms(quantizers[side].format, side, form_of(states), size)
            for name, form in zip((f"{side}_codes", f"{side}_parameters"), forms, strict=True):
                expected = (batch, kv_heads, len(ends) - 1, form[2])
                if tuple(tensors[name].shape) != expected or tensors[name].dtype != form[3]:
                    raise StateMismatchError(
                        f"expected {name} {list(expected)} of {form[3]}, but saw {list(tensors[name].shape)} of "
                        f"{tensors[name].dtype}: take the state again."
                    )
        first, *counts = map(int, ends)
        if not all(0 < count <= size for count in counts) or not 0 <= first < counts[0]:
            raise StateMismatchError(f"expected blocks of 1 to {size} tokens, but saw {counts}: take the state again.")
        return sum(counts) - first

    @override
    def load_state(self, tensors: dict[str, Tensor]) -> None:
        self.clear()
        if not tensors:
            return
        keys, values = tensors["keys"], tensors["values"]
        self.admit(keys, values)
        self._take_form()
        self._put(self._recent, (keys, values))
        if "sink_keys" in tensors:
            self._put(self._sinks, (tensors["sink_keys"], tensors["sink_values"]))
        if "block_ends" in tensors:
            for side in _SIDES:
                self._put(self._packed[side], (tensors[f"{side}_codes"], tensors[f"{side}_parameters"]))
            self._first, *self._ends = tensors["block_ends"].tolist()
        self._changed()


def packed_forms(
    code_format: CodeFormat, side: Side, form: StateForm, block_tokens: int
) -> tuple[StateForm, StateForm]:
    """Forms of the codes and of the parameters of one side, whose tokens are blocks."""
    batch, kv_heads, head_dim, dtype, device = form
    codes = side_bytes(code_format, side, head_dim, block_tokens, itemsize=0)
    parameters = side_bytes(code_format, side, head_dim, block_tokens, itemsize=1) - codes
    return (batch, kv_heads, codes, torch.uint8, device), (batch, kv_heads, parameters, dtype, device)


def _tokens_of(parts: list[tuple[Tensor, Tensor]], start: int, count: int) -> tuple[Tensor, Tensor]:
    """Keys and values of `count` tokens from `start`, of those in all parts together."""
    found: list[tuple[Tensor, Tensor]] = []
    for keys, values in parts:
        tokens = keys.shape[2]
        begin, end = max(start, 0), min(start + count, tokens)
        if begin < end:
            found.append((keys[:, :, begin:end], values[:, :, begin:end]))
        start -= tokens
    if not found:
        return parts[0][0][:, :, :0], parts[0][1][:, :, :0]
    if len(found) == 1:
        return found[0]
    keys, values = (torch.cat(side, dim=2) for side in zip(*found, strict=True))
    return keys, values
