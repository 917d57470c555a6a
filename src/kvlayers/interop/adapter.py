"""Transformers' layers behind an adapter, which gives them the contract of kvlayers' layers.

It calls, rolls back, copies and saves them as the installed version of transformers does.
"""

import copy
from collections.abc import Iterator
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from typing_extensions import Self, override

from kvlayers.core.arguments import as_batch_indices, no_room_for_tokens, whole_number
from kvlayers.core.buffer import StateForm, TokenBuffer
from kvlayers.core.cache_layer import CacheLayer, LayerState, LayerTraits, check_kind_of_state, forwarded
from kvlayers.core.description import Fact
from kvlayers.core.token_store import Fidelity
from kvlayers.errors import OptionError, RollbackError, StateMismatchError, UnsupportedLayerError
from kvlayers.upstream import compat


def check_reservation(layer: Any, seen: int, tokens: int) -> None:
    """Raise `CapacityError` if `tokens` more tokens, after `seen`, exceed the reservation of transformers' layer."""
    if seen + tokens > layer.max_cache_len:
        raise no_room_for_tokens(layer.max_cache_len, seen, tokens)


class TransformersLayer(CacheLayer):
    """Adapter over one of transformers' layers: an indexer, compressed attention, or a class of a model's own.

    The layer itself stays in `cache.layers`, since models look at its class. A cache makes the adapter once, and finds
    it by the identity of the layer.

    Args:
        layer: the layer, which is changed in place.
        grows: whether a reservation that is too small is replaced by a larger one, instead of raising `CapacityError`.

    Raises:
        OptionError: it is no layer.
    """

    is_initialized = forwarded("layer")
    is_compileable = forwarded("layer")
    # A layer may count in a tensor, and static layers do so in compiled code.
    get_seq_length = forwarded("layer")
    offload = forwarded("layer")
    prefetch = forwarded("layer")

    def __init__(self, layer: Any, grows: bool = False) -> None:
        if not isinstance(layer, (compat.ATTENTION_LAYER, compat.LINEAR_LAYER, *compat.DUMMY_LAYER)):
            shown = f"the class {layer.__name__}" if isinstance(layer, type) else f"a {type(layer).__name__}"
            raise OptionError(
                f"A layer must be one of kvlayers or of transformers, got {shown}: pass layers, such as those of "
                "cache.layers."
            )
        self.layer: Any = layer
        self.grows = grows
        # A dummy holds nothing.
        is_dummy = isinstance(layer, compat.DUMMY_LAYER)
        self.traits = LayerTraits(
            attends=isinstance(layer, compat.ATTENTION_LAYER),
            is_recurrent=isinstance(layer, compat.LINEAR_LAYER),
            has_other_states=_has(layer, "update_indexer"),
            is_upstream=True,
            keeps_every_token=is_dummy,
            can_be_stacked=is_dummy,
        )

    @property
    @override
    def original(self) -> Any:
        return self.layer

    @property
    @override
    def kind(self) -> str:
        """Module and name of the layer's class. No kind of kvlayers has such a name."""
        return f"{type(self.layer).__module__}.{type(self.layer).__qualname__}"

    # Attention

    @override
    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """`update` of the layer, which is handed what the model has passed besides the states."""
        if not self.traits.attends:
            raise self._does_not_attend()
        layer = self.layer
        if self._is_checked_on_host(key_states):
            check_reservation(layer, int(layer.get_seq_length()), key_states.shape[-2])
        if compat.UPDATES_BY_CACHE_POSITION:
            # Static layers write to slot 0 unless a dict of arguments tells them another slot.
            told = dict((args[0] if args else kwargs.get("cache_kwargs")) or {})
            if told.get("cache_position") is None:
                seen = int(layer.get_seq_length())
                told["cache_position"] = torch.arange(seen, seen + key_states.shape[2], device=key_states.device)
            args, kwargs = (told,), {}
        return layer.update(key_states, value_states, *args, **kwargs)  # type: ignore[no-any-return]

    def update_indexer(self, indexer_key_states: Tensor) -> Tensor:
        """Take in the indexer keys of new tokens, `[batch, new, index_head_dim]`, and return those of all tokens."""
        if self._is_checked_on_host(indexer_key_states):
            # An indexer has a count of its own, since attention may have taken in the tokens already.
            seen = int(self.layer.indexer_cumulative_length) if self.layer.is_indexer_initialized else 0
            check_reservation(self.layer, seen, indexer_key_states.shape[-2])
        return self.layer.update_indexer(indexer_key_states)  # type: ignore[no-any-return]

    def _is_reserved(self) -> bool:
        """Whether every token is in a reservation, in code that eager Python runs: a static indexer, or a model's own
        class.
        """
        return (
            isinstance(self.layer, compat.STATIC_LAYER)
            and type(self.layer) is not compat.STATIC_LAYER
            and not self.layer.is_sliding
            and not torch.compiler.is_compiling()
        )

    def _is_checked_on_host(self, states: Tensor) -> bool:
        """Whether an update checks that its states fit. On an accelerator it would have to wait for the count."""
        return states.device.type == "cpu" and self._is_reserved()

    @override
    def mask_sizes(self, query_length: int) -> tuple[int, int]:
        asked = torch.empty(query_length) if compat.MASKS_BY_CACHE_POSITION else query_length
        return self.layer.get_mask_sizes(asked)  # type: ignore[no-any-return]

    @override
    def make_room(self, tokens: int) -> None:
        if not self._is_reserved():
            return
        layer = self.layer
        reserved, seen = layer.max_cache_len, int(layer.get_seq_length())
        if not self.grows:
            check_reservation(layer, seen, tokens)
        elif seen + tokens > reserved:
            layer.max_cache_len = max(seen + tokens, 2 * reserved)
            for name, states in vars(layer).items():
                # States have a row for each reserved token, and counts do not.
                if isinstance(states, Tensor) and states.dim() > 2 and states.shape[-2] == reserved:
                    with torch.inference_mode(False):
                        larger = states.new_zeros(*states.shape[:-2], layer.max_cache_len, states.shape[-1])
                    larger[..., :reserved, :] = states
                    torch._dynamo.mark_static_address(larger)
                    setattr(layer, name, larger)

    @property
    def supports_early_init(self) -> bool:  # type: ignore[override]
        """Whether memory can be reserved before the first states. Before 5.13, any layer that attends could."""
        return bool(self.layer.supports_early_init) if compat.SAYS_WHAT_RESERVES else self.traits.attends

    @override
    def reserve_form(self, key_form: StateForm, value_form: StateForm) -> None:
        no_tokens = TokenBuffer.allocate(key_form, 0).tensor
        self.layer.lazy_initialization(*([no_tokens] * (2 if compat.RESERVES_FOR_KEYS_AND_VALUES else 1)))

    @property
    @override
    def length(self) -> int | None:
        return int(self.layer.get_seq_length()) if self.traits.attends else None

    @property
    def counts_on_device(self) -> bool:  # type: ignore[override]
        """Whether the count stands in a tensor, as that of static layers does."""
        return self.traits.attends and not isinstance(self.layer.get_seq_length(), int)

    @property
    @override
    def capacity(self) -> int | None:
        if not self.traits.attends:
            return None
        most = int(self.layer.get_max_length() if compat.RENAMED_MAXIMA else self.layer.get_max_cache_shape())
        return None if most < 0 else most

    @property
    def is_sliding(self) -> bool:  # type: ignore[override]
        """Whether the layer attends within a window. Not every class of transformers says so."""
        return bool(getattr(self.layer, "is_sliding", False))

    @property
    def keys(self) -> Tensor | None:
        """Keys held, `[batch, kv_heads, tokens, head_dim]`, `None` for a layer that does not attend."""
        return self.layer.keys if self.traits.attends else None

    @property
    def values(self) -> Tensor | None:
        """Values held, `[batch, kv_heads, tokens, head_dim]`, `None` for a layer that does not attend."""
        return self.layer.values if self.traits.attends else None

    @property
    @override
    def held_tokens(self) -> int | None:
        keys = self.keys
        return self.length if keys is None or keys.dim() != 4 else min(self.length or 0, int(keys.shape[2]))

    # Recurrent states

    @property
    def has_previous_state(self) -> dict[int, bool]:
        """By state index, whether tokens have been seen."""
        return _by_index(self.layer.has_previous_state)

    def conv_state(self, state_idx: int) -> Tensor | None:
        """The convolution state, `None` before the first tokens."""
        return _by_index(self.layer.conv_states)[state_idx]  # type: ignore[no-any-return]

    def recurrent_state(self, state_idx: int) -> Tensor | None:
        """The recurrent state, `None` before the first tokens."""
        return _by_index(self.layer.recurrent_states)[state_idx]  # type: ignore[no-any-return]

    def update_conv_state(self, conv_states: Tensor, state_idx: int = 0, **layer_options: Any) -> Tensor:
        """Take in the inputs of a convolution, as the layer does, which checks `layer_options` itself."""
        which = (state_idx,) if compat.STATES_BY_INDEX else ()
        return self.layer.update_conv_state(conv_states, *which, **layer_options)  # type: ignore[no-any-return]

    def update_recurrent_state(self, recurrent_states: Tensor, state_idx: int = 0, **layer_options: Any) -> Tensor:
        """Replace a recurrent state, as the layer does, which checks `layer_options` itself."""
        which = (state_idx,) if compat.STATES_BY_INDEX else ()
        return self.layer.update_recurrent_state(recurrent_states, *which, **layer_options)  # type: ignore[no-any-return]

    # Planning

    @property
    @override
    def sized_for(self) -> int | None:  # type: ignore[override]
        return int(self.layer.max_cache_len) if isinstance(self.layer, compat.STATIC_INDEXED_LAYER) else None

    @property
    @override
    def fidelity(self) -> Fidelity:
        return "rounded" if isinstance(self.layer, compat.QUANTIZED_LAYERS) else "exact"

    # Both

    @property
    @override
    def batch_size(self) -> int | None:
        if self.keys is not None and self.keys.dim() == 4:
            return int(self.keys.shape[0])
        if not self.traits.is_recurrent:
            return None
        held = map(_by_index, (self.layer.conv_states, self.layer.recurrent_states))
        return next((int(one.shape[0]) for states in held for one in states.values() if one is not None), None)

    @property
    def device(self) -> torch.device | None:
        """Device of the states, `None` before the first ones."""
        return next((tensor.device for tensor in self.held_tensors()), None)

    @property
    def record_past(self) -> bool:  # type: ignore[override]
        """Whether more is held than is needed, for a later crop. Not every class of transformers says so."""
        return bool(vars(self.layer).get("record_past", False))

    # Rolling back

    @property
    def is_croppable(self) -> bool:  # type: ignore[override]
        """Whether `truncate` can put the layer back as it was."""
        return self._says_it_is_croppable() and self._crops_every_state()

    def _says_it_is_croppable(self) -> bool:
        # Before 5.17 layers did not say, and no recurrent one could do that.
        return (
            bool(self.layer.is_croppable)
            if compat.LAYERS_SAY_WHAT_THEY_CAN_CROP
            else self.traits.attends and not self.traits.is_recurrent
        )

    def _crops_every_state(self) -> bool:
        """Whether `crop` knows of every state that the layer holds: a class that adds states must define it anew.

        DeepSeek-V4 adds compressed states to a window, and inherits a `crop` that rolls the window back alone.
        """
        known = ("keys", "values", "cumulative_length")
        holds_more = any(
            isinstance(held, Tensor) and held.dim() and name.partition(".")[0] not in known
            for name, value in self._entries()
            for held in (value if isinstance(value, list | tuple) else (value,))
        )
        for owner in type(self.layer).__mro__:
            if "crop" in vars(owner):
                return True
            if holds_more and not {"__init__", "reorder_cache"}.isdisjoint(vars(owner)):
                return False
        return False

    @property
    def is_empty(self) -> bool:
        """Whether the layer holds nothing."""
        return next(self.held_tensors(), None) is None

    @override
    def check_truncate(self, length: int) -> None:
        tokens = (self.length or 0) - whole_number(length, "`length`")
        obstacle = None if self.is_empty or tokens == 0 else self._obstacle_to_removal(tokens)
        if obstacle is not None:
            raise RollbackError(f"A {type(self.layer).__name__} of transformers must {obstacle}.")

    def _obstacle_to_removal(self, tokens: int) -> str | None:
        """What is not so, but must be before the newest `tokens` tokens can be removed exactly; `None` for nothing."""
        layer: Any = self.layer
        length, recording = self.length, "call activate_past_recording() before the tokens that may be taken back"
        if tokens < 0:
            return f"hold all tokens that are to be kept, got {-tokens} fewer: pass a smaller length"
        window = vars(layer).get("sliding_window")
        if window is not None and (length or 0) >= window and not self.record_past:
            return f"have recorded its past to be rolled back, got a full window that did not: {recording}"
        forking = "fork() the cache before the tokens that may be taken back"
        if not _has(self.layer, "crop"):
            return f"have a crop() to be rolled back, got none: {forking}"
        if not self._crops_every_state():
            return f"have a crop() of all its states, got states beside its keys and values: {forking}"
        if self.traits.is_recurrent:
            if not self._says_it_is_croppable():
                return f"hold nothing recurrent to be rolled back, got a state without a past: {forking}"
            if not layer.record_past:
                return f"have recorded its past to be rolled back, got a recurrent state that did not: {recording}"
            kernels, held = layer.conv_kernel_size, layer.conv_states
            room = min((states.shape[-1] - kernels[index] for index, states in held.items()), default=tokens)
            if tokens > room:
                return f"be rolled back by at most the {room} tokens that it recorded, got {tokens}: {forking}"
        if length is not None and tokens > length:
            return f"be rolled back by at most the {length} tokens that it has, got {tokens}: remove fewer"
        return None

    @override
    def truncate(self, length: int) -> None:
        self.check_truncate(length)
        tokens = (self.length or 0) - length
        # A past that was recorded for this is forgotten.
        changes = _has(self.layer, "crop") and (tokens or (self.traits.is_recurrent and self.record_past))
        if changes and not self.is_empty:
            self.layer.crop(-tokens)

    @override
    def check_select(self, batch_size: int) -> None:
        if not _has(self.layer, "reorder_cache"):
            raise UnsupportedLayerError(
                "Layers must have a reorder_cache for their sequences to be selected, got a "
                f"{type(self.layer).__name__} of transformers without one: run one sequence at a time."
            )

    @override
    def select(self, indices: Tensor) -> None:
        indices = indices if self.batch_size is None else as_batch_indices(indices, self.batch_size)
        self.check_select(indices.shape[0])
        if self.is_empty:
            return
        rows, held = self.batch_size, vars(self.layer)
        by_name = [
            (attribute, name, states)
            for attribute, named in held.items()
            if isinstance(named, dict)
            for name, states in named.items()
            if isinstance(states, Tensor) and states.dim()
        ]
        self.layer.reorder_cache(indices)
        # Before 5.23, `reorder_cache` of deepseek_v4 leaves what its layers keep by name, besides keys and values.
        for attribute, name, states in by_name:
            if held[attribute][name] is states and states.shape[0] == rows:
                held[attribute][name] = states.index_select(0, indices.to(states.device))
        if "batch_size" in held:
            self.layer.batch_size = indices.shape[0]

    @override
    def activate_past_recording(self) -> None:
        if _has(self.layer, "activate_past_recording"):
            self.layer.activate_past_recording()

    @override
    def deactivate_past_recording(self) -> None:
        if not self.record_past:
            return
        layer = self.layer
        layer.record_past = False
        for index, states in _by_index(layer.conv_states).items() if self.traits.is_recurrent else ():
            if states is not None:
                # A layer that does not record writes its convolutions in place, and so needs them of their own size.
                columns = layer.conv_kernel_size[index]
                missing = max(columns - states.shape[-1], 0)
                layer.conv_states[index] = torch.nn.functional.pad(states[..., -columns:], (missing, 0)).contiguous()

    @override
    def reset(self) -> None:
        self.layer.reset()
        if self.traits.attends and self.length:
            # In transformers 5.17, layers that grow fill their tokens with zeros, and keep them.
            for name, value in vars(self.layer).items():
                if isinstance(value, Tensor) and value.dim():
                    setattr(self.layer, name, None)
                elif name in ("is_initialized", "is_indexer_initialized"):
                    setattr(self.layer, name, False)

    @override
    def fork(self) -> Self:
        twin = copy.copy(self.layer)
        vars(twin).update({name: _copied(value) for name, value in vars(self.layer).items()})
        return type(self)(twin, self.grows)

    # State

    def _entries(self) -> Iterator[tuple[str, Any]]:
        """The attributes of the layer. An entry of a dict is named `attribute.key`."""
        for name, value in vars(self.layer).items():
            if isinstance(value, dict):
                yield from ((f"{name}.{key}", item) for key, item in value.items())
            else:
                yield name, value

    @override
    def held_tensors(self) -> Iterator[Tensor]:
        """The tensors that hold states. Counts of tokens exist before the first token: scalars, or of one element."""
        for name, value in self._entries():
            if isinstance(value, Tensor) and value.dim() and name != "cumulative_length":
                yield value

    @override
    def state(self) -> LayerState:
        found = dict(self._entries())
        facts: dict[str, Fact] = {
            name: value for name, value in found.items() if isinstance(value, int | str | bool | None)
        }
        tensors = {name: value.clone() for name, value in found.items() if isinstance(value, Tensor)}
        return LayerState(self.kind, tensors, facts)

    @override
    def check_state(self, state: LayerState) -> None:
        check_kind_of_state(state, self.kind)
        known = {name for name, _ in self._entries()}
        if not vars(self.layer).get("is_initialized", True):
            # A layer of transformers gets the attributes that describe its states with the first ones.
            known |= {name for name in state.facts if "." not in name}
        needed = {
            name.replace("is_", "", 1).replace("_initialized", "", 1)
            for name, value in state.facts.items()
            if name.startswith("is_") and "states_initialized." in name and value
        }
        unknown, missing = {*state.facts, *state.tensors} - known, needed - set(state.tensors)
        if unknown or missing:
            raise StateMismatchError(
                f"`state` must be that of a {type(self.layer).__name__} as this one, got {sorted(unknown)} besides, "
                f"and not {sorted(missing)}: load it into a cache for the same config and version of transformers."
            )

    @override
    def load_state(self, state: LayerState) -> None:
        self.check_state(state)
        layer = self.layer
        tensors = {name: _copied(held) for name, held in state.tensors.items()}
        for name, value in {**state.facts, **tensors}.items():
            attribute, _, key = name.partition(".")
            if key:
                held = getattr(layer, attribute)
                held[next((known for known in held if str(known) == key), key)] = value
            else:
                setattr(layer, attribute, value)
        for name, states in state.tensors.items():
            if name == "indexer_keys":
                layer.indexer_dtype, layer.indexer_device = states.dtype, states.device
            else:
                layer.dtype, layer.device = states.dtype, states.device


def _has(layer: Any, method: str) -> bool:
    """Whether a layer has a method that some classes of transformers, or of a model's own code, lack."""
    return callable(getattr(layer, method, None))


def _by_index(held: Any) -> dict[int, Any]:
    """The states of a recurrent layer by their index. Before 5.14, transformers' layers had one state of each kind."""
    return held if isinstance(held, dict) else {0: held}


def _copied(value: Any) -> Any:
    # A clone that is made in inference mode could never be written to outside of it.
    with torch.inference_mode(False):
        return pytree.tree_map(
            lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else copy.deepcopy(leaf),
            value,
            is_leaf=lambda part: isinstance(part, torch.Size),
        )
