"""The cache: a list of layers, with the interface that transformers, generate() and decode loops call."""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor
from typing_extensions import Self

from . import compat, legacy
from .errors import ConfigError, LayerIndexError, StateMismatchError, UnsupportedLayerError
from .layers import CacheLayer, LayerState, TransformersLayer
from .layers.base import crop_target, unbounded_as_minus_one
from .layers.batch import BatchIndices, as_batch_indices, is_identity, repeated_rows
from .options import checks_options

StatePair = tuple[Tensor | None, Tensor | None]


@dataclass(frozen=True)
class CacheState:
    """All that a cache must keep to go on decoding elsewhere: a state for each layer."""

    kind: str
    layers: tuple[LayerState, ...]


class Cache(transformers.Cache):  # type: ignore[misc]
    """A list of layers, one for each layer of the model, and no storage of its own.

    Args:
        layers: the layers, of kvlayers or of transformers.
        layer_class_to_replicate: instead of `layers`, what makes a layer whenever the model uses one more.

    Raises:
        OptionError: an option that does not exist.
        ConfigError: both or neither of the two arguments are given.
    """

    layers: list[Any]

    @checks_options
    def __init__(
        self,
        layers: list[Any] | None = None,
        layer_class_to_replicate: Callable[[], Any] | None = None,
    ) -> None:
        if (layers is None) == (layer_class_to_replicate is None):
            raise ConfigError(
                "expected either layers or layer_class_to_replicate, but saw "
                f"{'neither' if layers is None else 'both'}: pass the layers of the model, or what makes one."
            )
        self.layers = [] if layers is None else layers
        self.layer_class_to_replicate = layer_class_to_replicate

    # Taking in states

    def update(
        self,
        key_states: Tensor,
        value_states: Tensor,
        layer_idx: int,
        cache_kwargs: Mapping[str, object] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Take in the states of new tokens in one layer, and return the states that their queries attend to.

        Args:
            key_states: `[batch, kv_heads, new, key_head_dim]`.
            value_states: `[batch, kv_heads, new, value_head_dim]`.
            layer_idx: index of the model's layer.
            cache_kwargs: what models written for transformers 4 pass besides; no kind of layer here needs it.

        Returns:
            Keys and values `[batch, kv_heads, attended, head_dim]`; see `CacheLayer.update`.

        Raises:
            LayerIndexError: no layer has that index.
            StateMismatchError: states of another batch size, kv_heads, head_dim, dtype or device than those held.
            CapacityError: more tokens than fit.
        """
        if not 0 <= layer_idx < len(self.layers):
            self._add_layers_up_to(layer_idx)
        attended: tuple[Tensor, Tensor] = self.layers[layer_idx].update(key_states, value_states)
        return attended

    def _add_layers_up_to(self, layer_idx: int) -> None:
        if self.layer_class_to_replicate is None or layer_idx < 0:
            raise self._no_layer(layer_idx)
        while len(self.layers) <= layer_idx:
            self.layers.append(self.layer_class_to_replicate())

    def _no_layer(self, layer_idx: int) -> LayerIndexError:
        return LayerIndexError(
            f"expected a layer index from 0 to {len(self.layers) - 1}, but saw {layer_idx}: make the cache from the "
            "config of the model that uses it."
        )

    def early_initialization(
        self,
        batch_size: int,
        num_heads: int | Sequence[int],
        head_dim: int | Sequence[int],
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        """Reserve what can be reserved before the first forward pass.

        Args:
            batch_size: sequences side by side.
            num_heads: kv_heads, for all layers or for each.
            head_dim: head_dim of keys and values, for all layers or for each.
            dtype: dtype of the states.
            device: device of the states.
        """
        heads = [num_heads] * len(self.layers) if isinstance(num_heads, int) else list(num_heads)
        dims = [head_dim] * len(self.layers) if isinstance(head_dim, int) else list(head_dim)
        if len(heads) != len(self.layers) or len(dims) != len(self.layers):
            raise LayerIndexError(
                f"expected num_heads and head_dim for each of {len(self.layers)} layers, but saw {len(heads)} and "
                f"{len(dims)}: pass one number for all, or one for each."
            )
        for layer, layer_heads, layer_dim in zip(self.layers, heads, dims, strict=True):
            if layer.supports_early_init and not layer.is_initialized:
                no_tokens = torch.empty((batch_size, layer_heads, 0, layer_dim), dtype=dtype, device=device)
                layer.lazy_initialization(no_tokens, no_tokens)

    # Lengths and masks

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens that a layer has seen. Where layer 0 does not attend, it stands for the first one that does."""
        if layer_idx >= len(self.layers):
            return 0
        return int(self.layers[self._attending(layer_idx)].get_seq_length())

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Length of what the next update of a layer returns, and the position of its first token."""
        if layer_idx >= len(self.layers):
            return query_length, 0
        kv_length, kv_offset = self.layers[self._attending(layer_idx)].get_mask_sizes(query_length)
        return kv_length, kv_offset

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """Position of the next token in a layer."""
        return self.get_seq_length(layer_idx)

    def _attending(self, layer_idx: int) -> int:
        if isinstance(self.layers[layer_idx], compat.ATTENTION_LAYER):
            return layer_idx
        if layer_idx == 0:
            for index, layer in enumerate(self.layers):
                if isinstance(layer, compat.ATTENTION_LAYER):
                    return index
        raise UnsupportedLayerError(
            f"expected a layer that counts tokens, but layer {layer_idx} is a {type(self.layers[layer_idx]).__name__}: "
            "ask an attention layer, where the model has one."
        )

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """The most tokens that a layer, or the whole cache, can hold; -1 where there is no such number."""
        if layer_idx is not None:
            return -1 if layer_idx >= len(self.layers) else int(self.layers[layer_idx].get_max_length())
        capacities = [layer.capacity for layer in self.operable() if layer.attends]
        bounded = [capacity for capacity in capacities if capacity is not None]
        return unbounded_as_minus_one(max(bounded) if bounded and len(bounded) == len(capacities) else None)

    # Operations on all layers

    def operable(self) -> Iterator[CacheLayer | TransformersLayer]:
        """The layers, those of transformers behind an adapter that gives them the operations of ours."""
        for layer in self.layers:
            yield layer if isinstance(layer, CacheLayer) else TransformersLayer(layer)

    def crop(self, tokens_to_remove: int) -> None:
        """Roll back: a positive number is the length to keep, zero or a negative one removes the newest tokens.

        Zero removes no token, but lets go of what was recorded for a rollback.

        Raises:
            RollbackError: fewer tokens are held, or tokens that would be needed again are gone; nothing is changed.
        """
        length = self._token_count()
        removed = length - crop_target(tokens_to_remove, length)
        for layer in self.operable():
            layer.check_removal(removed)
        for layer in self.operable():
            layer.remove_newest(removed)

    def truncate(self, length: int) -> None:
        """Roll back, exactly, to when the cache had seen `length` tokens; 0 is allowed here.

        Raises:
            RollbackError: as `crop`.
        """
        if length == 0:
            self.crop(-self._token_count())
        else:
            self.crop(length)

    def _token_count(self) -> int:
        return max((layer.length or 0 for layer in self.operable()), default=0)

    def reorder_cache(self, beam_idx: BatchIndices) -> None:
        """As `batch_select_indices`, under the name that beam search uses."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: BatchIndices) -> None:
        """Keep the sequences at `indices`, in that order; an index may come more than once.

        Raises:
            BatchIndexError: an index that no sequence has; nothing is changed.
        """
        batch_size = self.batch_size
        if batch_size >= 0:
            self._select(as_batch_indices(indices, batch_size))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each sequence `repeats` times, copies side by side."""
        batch_size = self.batch_size
        if batch_size >= 0:
            self._select(repeated_rows(repeats, batch_size))

    def _select(self, rows: Tensor) -> None:
        if is_identity(rows, self.batch_size):
            return
        for layer in self.operable():
            layer.check_select()
        for layer in self.operable():
            layer.select(rows)

    def reset(self) -> None:
        """Forget all tokens; the memory is kept for the next ones."""
        for layer in self.layers:
            layer.reset()

    def activate_past_recording(self) -> None:
        """From now on, let windows hold what a later crop may need, until that crop."""
        for layer in self.operable():
            layer.activate_past_recording()

    def is_recording_past(self, layer_idx: int) -> bool:
        """Whether a layer holds more than it needs, for a later crop."""
        return bool(vars(self.layers[layer_idx]).get("record_past", False))

    def fork(self) -> Self:
        """An independent continuation: what happens to the one never shows in the other. Copies live tokens only."""
        twin = copy.copy(self)
        twin.layers = [layer.fork() for layer in self.operable()]
        return twin

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        twin = self.fork()
        memo[id(self)] = twin
        return twin

    @property
    def nbytes(self) -> int:
        """Bytes of memory held, spare room included."""
        return sum(layer.nbytes for layer in self.operable())

    def state(self) -> CacheState:
        """Copies of the live tensors of all layers, and the facts beside them."""
        return CacheState(type(self).__name__, tuple(layer.state() for layer in self.operable()))

    def load_state(self, state: CacheState) -> None:
        """Become what the cache was when `state` was taken.

        Raises:
            StateMismatchError: the state is of a cache with other layers; nothing is changed.
        """
        if self.layer_class_to_replicate is not None and state.layers:
            self._add_layers_up_to(len(state.layers) - 1)
        if len(state.layers) != len(self.layers):
            raise StateMismatchError(
                f"expected the states of {len(self.layers)} layers, but saw {len(state.layers)}: load the state into a "
                "cache that was made for the same model config."
            )
        pairs = list(zip(self.operable(), state.layers, strict=True))
        for layer, layer_state in pairs:
            layer.check_state(layer_state)
        for layer, layer_state in pairs:
            layer.load_state(layer_state)

    # Recurrent states, of layers that are transformers' own

    def _recurrent(self, layer_idx: int | None) -> Any:
        candidates = reversed(self.layers) if layer_idx is None else [self.layers[layer_idx]]
        for layer in candidates:
            if isinstance(layer, compat.LINEAR_LAYER):
                return layer
        raise UnsupportedLayerError(
            "expected a layer with a recurrent state, but saw "
            f"{'none' if layer_idx is None else f'a {type(self.layers[layer_idx]).__name__} at {layer_idx}'}: make the "
            "cache from the config of the model that uses it."
        )

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Whether a recurrent layer (the last one by default) has seen tokens."""
        if layer_idx is not None and layer_idx >= len(self.layers):
            return False
        seen = self._recurrent(layer_idx).has_previous_state
        return all(seen.values()) if state_idx is None else bool(seen[state_idx])

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """Convolution state of a layer, `None` before the first tokens."""
        layer = self._recurrent(layer_idx)
        return layer.conv_states[state_idx] if layer.has_previous_state[state_idx] else None

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """Recurrent state of a layer, `None` before the first tokens."""
        layer = self._recurrent(layer_idx)
        return layer.recurrent_states[state_idx] if layer.has_previous_state[state_idx] else None

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **layer_options: Any
    ) -> Tensor:
        """Take in the convolution inputs of new tokens in a layer, which checks `layer_options` itself."""
        updated: Tensor = self._recurrent(layer_idx).update_conv_state(conv_states, state_idx, **layer_options)
        return updated

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **layer_options: Any
    ) -> Tensor:
        """Replace the recurrent state of a layer, which checks `layer_options` itself."""
        updated: Tensor = self._recurrent(layer_idx).update_recurrent_state(
            recurrent_states, state_idx, **layer_options
        )
        return updated

    def update_indexer(self, indexer_key_states: Tensor, layer_idx: int) -> Tensor:
        """Take in the indexer keys of new tokens, `[batch, new, index_head_dim]`, in a sparse-attention layer."""
        layer = self.layers[layer_idx]
        if isinstance(layer, CacheLayer):
            raise UnsupportedLayerError(
                f"expected a layer with an indexer, but layer {layer_idx} is a {type(layer).__name__}: make the cache "
                "from the config of the model that uses it."
            )
        updated: Tensor = layer.update_indexer(indexer_key_states)
        return updated

    # The surface of transformers 4

    def __getitem__(self, layer_idx: int) -> StatePair:
        """Keys and values that a layer holds, each `[batch, kv_heads, held, head_dim]`, `None` before the first."""
        if not 0 <= layer_idx < len(self.layers):
            raise self._no_layer(layer_idx)
        return self._states(layer_idx)

    def _states(self, layer_idx: int) -> StatePair:
        layer = self.layers[layer_idx]
        operable = layer if isinstance(layer, CacheLayer) else TransformersLayer(layer)
        return operable.keys, operable.values

    def __iter__(self) -> Iterator[StatePair]:
        """A pair of keys and values for each layer."""
        return (self._states(layer_idx) for layer_idx in range(len(self.layers)))

    @property
    def key_cache(self) -> legacy.StateList:
        """The keys of each layer, as a list."""
        return legacy.StateList(self.layers, "keys")

    @property
    def value_cache(self) -> legacy.StateList:
        """The values of each layer, as a list."""
        return legacy.StateList(self.layers, "values")

    @property
    def seen_tokens(self) -> int:
        """Tokens that the cache has seen."""
        return self.get_seq_length()

    @property
    def max_batch_size(self) -> int:
        """The name of `batch_size` for static caches before transformers 5.16."""
        return self.batch_size

    @property
    def max_cache_len(self) -> int:
        """The name of `get_max_length()` for static caches before transformers 5.16."""
        return self.get_max_length()

    def get_max_cache_shape(self, layer_idx: int | None = None) -> int:
        """The name of `get_max_length` before transformers 5.13."""
        return self.get_max_length(layer_idx)

    def get_usable_length(self, new_seq_length: int, layer_idx: int = 0) -> int:
        """Tokens of the past that remain when `new_seq_length` more come: fewer than held once a maximum is met."""
        most, seen = self.get_max_length(layer_idx), self.get_seq_length(layer_idx)
        return most - new_seq_length if most >= 0 and seen + new_seq_length > most else seen

    def to_legacy_cache(self) -> legacy.LegacyStates:
        """The states as nested tuples, `((keys, values), ...)`: views of the cache's memory, not copies.

        Raises:
            LegacyFormatError: a layer has dropped tokens or has other states, which tuples cannot say.
        """
        return legacy.to_pairs(self.operable())

    # Placement

    def offload(self, layer_idx: int, only_non_sliding: bool = True) -> None:
        """Move a layer's states to the host, where its kind can.

        Raises:
            UnsupportedLayerError: it cannot.
        """
        if not (only_non_sliding and self.is_sliding[layer_idx]):
            self.layers[layer_idx].offload()

    def prefetch(self, layer_idx: int, only_non_sliding: bool = True) -> None:
        """Bring a layer's states back from the host, where its kind can leave.

        Raises:
            UnsupportedLayerError: it cannot.
        """
        if not (only_non_sliding and self.is_sliding[layer_idx]):
            self.layers[layer_idx].prefetch()

    # What the layers are

    @property
    def batch_size(self) -> int:
        """Sequences side by side, -1 before the first states."""
        return next((layer.batch_size for layer in self.operable() if layer.batch_size is not None), -1)

    @property
    def is_initialized(self) -> bool:
        """Whether every layer that takes tokens knows what they look like."""
        attending = [layer for layer in self.layers if layer.supports_early_init]
        return bool(attending) and all(layer.is_initialized for layer in attending)

    @property
    def is_compileable(self) -> bool:
        """Whether generate() may compile the forward pass around this cache."""
        return bool(self.layers) and all(layer.is_compileable for layer in self.layers)

    @property
    def is_croppable(self) -> bool:
        """Whether `crop` can put every layer back as it was."""
        return all(layer.is_croppable for layer in self.layers)

    @property
    def is_sliding(self) -> list[bool]:
        """For each layer, whether it attends within a window."""
        return [layer.is_sliding for layer in self.operable()]

    @property
    def is_linear(self) -> list[bool]:
        """For each layer, whether it has a recurrent state and no attention."""
        return [layer.is_recurrent and not layer.attends for layer in self.operable()]

    @property
    def is_dummy(self) -> list[bool]:
        """For each layer, whether it holds nothing at all."""
        return [not layer.is_recurrent and not layer.attends for layer in self.operable()]

    def __len__(self) -> int:
        return len(self.layers)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(layers={self.layers})"
