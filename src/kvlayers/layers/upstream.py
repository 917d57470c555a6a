"""The operations of our layers, on a layer of transformers' own."""

import copy
from collections.abc import Iterator
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from kvlayers.errors import RollbackError, StateMismatchError, UnsupportedLayerError
from kvlayers.layers import upstream_calls
from kvlayers.layers.batch_indices import repeated_rows
from kvlayers.layers.contract import LayerState
from kvlayers.layers.shape import LayerShape, PlannedBytes
from kvlayers.rope.rotary import Rotary
from kvlayers.stores.buffer import nbytes_of
from kvlayers.stores.contract import Fidelity
from kvlayers.stores.description import Fact
from kvlayers.upstream import compat
from kvlayers.utils.tensor_memory import storages_of


@runtime_checkable
class _Croppable(Protocol):
    def crop(self, tokens_to_remove: int) -> None: ...


@runtime_checkable
class _Reorderable(Protocol):
    def reorder_cache(self, beam_idx: Tensor) -> None: ...


@runtime_checkable
class _Recording(Protocol):
    def activate_past_recording(self) -> None: ...


@runtime_checkable
class _Indexed(Protocol):
    def update_indexer(self, indexer_key_states: Tensor) -> Tensor: ...


class TransformersLayer:
    """Adapter over a layer that kvlayers has no kind for: indexers, compressed attention, a model's own.

    The layer itself stays in the cache, since models look at its class; an adapter lives for one operation only.

    Args:
        layer: the layer, which is changed in place.
    """

    rotaries: tuple[Rotary, ...] = ()

    def __init__(self, layer: Any) -> None:
        self.layer = layer
        self.is_recurrent = isinstance(layer, compat.LINEAR_LAYER)
        self.attends = isinstance(layer, compat.ATTENTION_LAYER)

    @property
    def kind(self) -> str:
        """Module and name of the layer's class: no kind of kvlayers' own has such a name."""
        return f"{type(self.layer).__module__}.{type(self.layer).__qualname__}"

    @property
    def keeps_every_token(self) -> bool:
        """Whether it can be put back to any number of tokens: if it holds nothing at all."""
        return isinstance(self.layer, compat.DUMMY_LAYER)

    @property
    def can_be_stacked(self) -> bool:
        """Whether states of several such layers can be put side by side: if it holds nothing at all."""
        return isinstance(self.layer, compat.DUMMY_LAYER)

    @property
    def has_other_states(self) -> bool:
        """Whether keys and values are not all that the layer holds of a token."""
        return isinstance(self.layer, _Indexed)

    @property
    def length(self) -> int | None:
        """Tokens seen, `None` for a layer that does not count them."""
        return int(self.layer.get_seq_length()) if self.attends else None

    @property
    def record_past(self) -> bool:
        """Whether the layer holds more than it needs, for a later crop. Not every class of transformers says so."""
        return bool(vars(self.layer).get("record_past", False))

    @property
    def device(self) -> torch.device | None:
        """Device of what the layer holds, `None` where it holds nothing."""
        return next((tensor.device for tensor in self.held_tensors()), None)

    @property
    def is_recording(self) -> bool:
        """As `record_past`."""
        return self.record_past

    @property
    def is_sliding(self) -> bool:
        """Whether the layer attends within a window. Not every class of transformers says so."""
        return bool(getattr(self.layer, "is_sliding", False))

    @property
    def keys(self) -> Tensor | None:
        """Keys held, `[batch, kv_heads, tokens, head_dim]`, where the layer has any."""
        return self.layer.keys if self.attends else None

    @keys.setter
    def keys(self, states: Tensor) -> None:
        self.layer.keys = states

    @property
    def values(self) -> Tensor | None:
        """Values held, `[batch, kv_heads, tokens, head_dim]`, where the layer has any."""
        return self.layer.values if self.attends else None

    @values.setter
    def values(self, states: Tensor) -> None:
        self.layer.values = states

    def peek(self) -> tuple[Tensor | None, Tensor | None]:
        """Keys and values held."""
        return self.keys, self.values

    @property
    def capacity(self) -> int | None:
        """The most tokens that the layer can hold, `None` where there is no such number."""
        most = upstream_calls.max_length(self.layer)
        return None if most < 0 else most

    @property
    def sized_for(self) -> int | None:
        """The number of tokens that the layer reserves, `None` if it makes room as tokens come."""
        return int(self.layer.max_cache_len) if isinstance(self.layer, compat.STATIC_INDEXED_LAYER) else None

    @property
    def fidelity(self) -> Fidelity:
        """What the layer does to the states that the model attends to."""
        return "rounded" if isinstance(self.layer, compat.QUANTIZED_LAYERS) else "exact"

    def planned_nbytes(self, shape: LayerShape, tokens: int, sized_for: int | None) -> PlannedBytes:
        """See `LayerOperations.planned_nbytes`. Counters are not included.

        Raises:
            UnsupportedLayerError: it is not known how much memory a layer of this class takes.
        """
        if isinstance(self.layer, compat.DUMMY_LAYER):
            return PlannedBytes()
        if isinstance(self.layer, compat.INDEXED_LAYER):
            held = tokens
        elif isinstance(self.layer, compat.STATIC_INDEXED_LAYER):
            held = self.layer.max_cache_len if sized_for is None else sized_for
        else:
            raise UnsupportedLayerError(
                f"The memory of transformers' `{type(self.layer).__name__}` cannot be planned: make the cache, run the "
                "model, and ask the cache for `nbytes`."
            )
        return PlannedBytes(sum(nbytes_of(form, held) for form in shape.forms()) + shape.indexer_nbytes(held))

    def planned_bits(self, shape: LayerShape) -> float:
        """See `LayerOperations.planned_bits`."""
        return 8.0 * shape.dtype.itemsize

    @property
    def batch_size(self) -> int | None:
        """Sequences side by side, `None` before the first states."""
        if self.keys is not None and self.keys.dim() == 4:
            return int(self.keys.shape[0])
        if self.is_recurrent:
            return next((int(states.shape[0]) for states in upstream_calls.recurrent_states(self.layer)), None)
        return None

    @property
    def is_croppable(self) -> bool:
        """Whether `remove_newest` can put the layer back as it was."""
        return upstream_calls.is_croppable(self.layer)

    def _can_crop(self) -> bool:
        return isinstance(self.layer, _Croppable)

    @property
    def is_empty(self) -> bool:
        """Whether the layer holds nothing."""
        return next(self._tensors(), None) is None

    def check_removal(self, tokens: int) -> None:
        """Raise `RollbackError` where `remove_newest(tokens)` would."""
        if self.is_empty or tokens == 0:
            return
        name = type(self.layer).__name__
        if tokens < 0:
            raise RollbackError(f"expected to remove tokens, but {name} holds {-tokens} fewer than are to be kept.")
        window = vars(self.layer).get("sliding_window")
        if window is not None and (self.length or 0) >= window and not vars(self.layer).get("record_past"):
            raise RollbackError(
                f"expected a past to roll back {tokens} tokens to, but the window of {name} is full and it did not "
                "record it: call activate_past_recording() before the tokens that may be taken back."
            )
        if not self._can_crop():
            raise RollbackError(
                f"expected a layer that can be rolled back, but {name} cannot: fork() the cache before."
            )
        if self.is_recurrent:
            if not self.is_croppable:
                raise RollbackError(
                    f"expected layers that can be rolled back by {tokens} tokens, but the recurrent state of {name} "
                    "has no past to go back to: fork() the cache before the tokens that may be taken back."
                )
            if not self.layer.record_past:
                raise RollbackError(
                    f"expected a past to roll back {tokens} tokens to, but {name} did not record it: call "
                    "activate_past_recording() before the tokens that may be taken back."
                )
            for index, states in self.layer.conv_states.items():
                room = states.shape[-1] - self.layer.conv_kernel_size[index]
                if tokens > room:
                    raise RollbackError(
                        f"expected to roll back at most the {room} tokens that {name} recorded, but was asked for "
                        f"{tokens}."
                    )
        if self.attends and self.length is not None and tokens > self.length:
            raise RollbackError(f"expected to remove at most {self.length} tokens from {name}, but was asked {tokens}.")

    def remove_newest(self, tokens: int) -> None:
        """Roll back the newest `tokens` tokens, and forget a past that was recorded for that."""
        self.check_removal(tokens)
        if self.is_empty or not self._can_crop():
            return
        if tokens or (self.is_recurrent and self.record_past):
            self.layer.crop(-tokens)

    def check_select(self, batch_size: int) -> None:
        """Raise `UnsupportedLayerError` where `select` would."""
        if not isinstance(self.layer, _Reorderable):
            raise UnsupportedLayerError(
                f"expected layers whose sequences can be selected, but transformers' {type(self.layer).__name__} has "
                "no reorder_cache: run one sequence at a time."
            )

    def select(self, indices: Tensor) -> None:
        """Make sequence `i` what sequence `indices[i]` was; `indices` is int64 `[new_batch]`."""
        self.check_select(indices.shape[0])
        if self.is_empty:
            return
        self.layer.reorder_cache(indices)
        if "batch_size" in vars(self.layer):
            self.layer.batch_size = indices.shape[0]

    def expand(self, repeats: int) -> None:
        """Repeat each sequence `repeats` times, copies side by side."""
        if self.batch_size is not None:
            self.select(repeated_rows(repeats, self.batch_size))

    def activate_past_recording(self) -> None:
        """Hold what a later removal needs, where the layer can."""
        if isinstance(self.layer, _Recording):
            self.layer.activate_past_recording()

    def deactivate_past_recording(self) -> None:
        """Record no more, and hold no more than is needed without."""
        if not vars(self.layer).get("record_past"):
            return
        self.layer.record_past = False
        for index, states in upstream_calls.by_index(self.layer.conv_states).items() if self.is_recurrent else ():
            if states is not None:
                # A layer that does not record writes its convolutions in place, and so needs them of their own size.
                self.layer.conv_states[index] = _newest_columns(states, self.layer.conv_kernel_size[index])

    def reset(self) -> None:
        """Forget all tokens."""
        self.layer.reset()
        if self.attends and self.length:
            # In transformers 5.17, layers that grow fill their tokens with zeros, and keep them.
            for name, value in vars(self.layer).items():
                if isinstance(value, Tensor) and value.dim():
                    setattr(self.layer, name, None)
                elif name in ("is_initialized", "is_indexer_initialized"):
                    setattr(self.layer, name, False)

    def fork(self) -> Any:
        """An independent layer with the same states."""
        twin = copy.copy(self.layer)
        for name, value in vars(self.layer).items():
            setattr(twin, name, _copied(value))
        return twin

    def held_tensors(self) -> Iterator[Tensor]:
        """Every tensor that keeps memory alive."""
        yield from (tensor for _, tensor in self._tensors())

    @property
    def nbytes(self) -> int:
        """Bytes of memory held."""
        return sum(storages_of(self.held_tensors()).values())

    def state(self) -> LayerState:
        """Copies of every tensor that the layer holds, and its plain facts."""
        facts: dict[str, Fact] = {
            name: value for name, value in self._entries() if isinstance(value, int | str | bool | None)
        }
        tensors = {name: states.clone() for name, states in self._tensors(skip_empty=False)}
        return LayerState(self.kind, tensors, facts)

    def check_state(self, state: LayerState) -> None:
        """Raise what `load_state(state)` would raise."""
        # Files of the first version have the name of the class alone.
        if state.kind not in (self.kind, type(self.layer).__name__):
            raise StateMismatchError(
                f"expected the state of a {type(self.layer).__name__}, but saw that of a {state.kind}: load it into a "
                "cache that was made for the same model config."
            )
        known = {name for name, _ in self._entries()}
        if not vars(self.layer).get("is_initialized", True):
            # Before its first states a layer of transformers has no fields for what they look like.
            known |= {name for name in state.facts if "." not in name}
        needed = {
            name.replace("is_", "", 1).replace("_initialized", "", 1)
            for name, value in state.facts.items()
            if name.startswith("is_") and "states_initialized." in name and value
        }
        unknown, missing = {*state.facts, *state.tensors} - known, needed - set(state.tensors)
        if unknown or missing:
            raise StateMismatchError(
                f"expected the state of a {type(self.layer).__name__} as this one, but saw {sorted(unknown)} besides, "
                f"and not {sorted(missing)}: load it into a cache for the same config and version of transformers."
            )

    def load_state(self, state: LayerState) -> None:
        """Become what the layer was when `state` was taken."""
        self.check_state(state)
        entries: dict[str, Fact | Tensor] = {**state.facts, **{k: _copied(v) for k, v in state.tensors.items()}}
        for name, value in entries.items():
            attribute, _, key = name.partition(".")
            if key:
                held = getattr(self.layer, attribute)
                held[next((known for known in held if str(known) == key), key)] = value
            else:
                setattr(self.layer, attribute, value)
        for name, states in state.tensors.items():
            if name == "indexer_keys":
                self.layer.indexer_dtype, self.layer.indexer_device = states.dtype, states.device
            else:
                self.layer.dtype, self.layer.device = states.dtype, states.device

    def _entries(self) -> Iterator[tuple[str, Any]]:
        for name, value in vars(self.layer).items():
            if isinstance(value, dict):
                yield from ((f"{name}.{key}", item) for key, item in value.items())
            else:
                yield name, value

    def _tensors(self, skip_empty: bool = True) -> Iterator[tuple[str, Tensor]]:
        """Tensors that hold states. Scalars count tokens, and are there before any came."""
        for name, value in self._entries():
            if isinstance(value, Tensor) and not (skip_empty and value.dim() == 0):
                yield name, value


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        # A clone that is made in inference mode could never be written to outside of it.
        with torch.inference_mode(False):
            return value.clone()
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_copied(item) for item in value)
    if isinstance(value, int | str | bool | None | torch.dtype | torch.device):
        return value
    return copy.deepcopy(value)


def _newest_columns(states: Tensor, columns: int) -> Tensor:
    """The last `columns` of states `[batch, channels, any]`, after zeros where there are fewer."""
    missing = max(columns - states.shape[-1], 0)
    return torch.nn.functional.pad(states[..., -columns:], (missing, 0)).contiguous()
