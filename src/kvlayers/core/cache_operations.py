"""The layers of a cache: what they are and hold, and operations on them. Each is done to all layers, or to no layer."""

import copy
import operator
from abc import ABCMeta, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, overload

import torch
from torch import Tensor
from typing_extensions import Self

from kvlayers.core.arguments import (
    BatchIndices,
    as_batch_indices,
    check_rollback,
    crop_argument,
    crop_target,
    repeated_rows,
    unbounded_as_minus_one,
    whole_number,
)
from kvlayers.core.buffer import StateForm
from kvlayers.core.cache_layer import CacheLayer, LayerState, adapted, forked_once, let_static_layers_agree
from kvlayers.core.forward_pass import ForwardPassFollower, GivenToGenerate, SeenTokens
from kvlayers.errors import (
    BatchIndexError,
    LayerIndexError,
    OptionError,
    RollbackError,
    StateMismatchError,
    UnsupportedLayerError,
)
from kvlayers.upstream import compat
from kvlayers.utils import late
from kvlayers.utils.options import check_accepted, check_whole_number, checked_dtype
from kvlayers.utils.sending import sent_by_value
from kvlayers.utils.tensor_memory import Storages, storages_of


class Origin(NamedTuple):
    """How the states of a sequence differ from those that the model computes for its text from position 0 on.

    Attributes:
        first_position: position of the first token.
        exact_tokens: how many of the first tokens have the states of the text, `None` for all of them.
    """

    first_position: int = 0
    exact_tokens: int | None = None

    def cut(self, length: int) -> "Origin":
        """The origin of the first `length` tokens. A sequence without tokens may begin anywhere."""
        exact = self.exact_tokens
        return Origin(self.first_position if length else 0, None if exact is None or length <= exact else exact)


AS_TEXT = Origin()


@sent_by_value
@dataclass(frozen=True)
class CacheState:
    """Everything that a cache needs to go on decoding elsewhere.

    Attributes:
        kind: name of the cache's class.
        layers: the state of each layer.
        parts: for a cache that consists of other caches, the state of each of them.
        origins: `LayerwiseOperations.origins`.
    """

    kind: str
    layers: tuple[LayerState, ...] = ()
    parts: tuple["CacheState", ...] = ()
    origins: tuple[Origin, ...] = (AS_TEXT,)


class CacheClass(ABCMeta):
    """What classes of caches are, so that a class cannot be passed where a cache is meant.

    transformers' `generate()` marks the cache that it is given. A mark on a class would hold for all of its caches, and
    hide from them, for good, that they are given to a call.
    """

    def __setattr__(cls, name: str, value: object) -> None:
        if name == "_is_user_defined":
            raise OptionError(
                f"`cache` must be a cache, got the class {cls.__name__}: pass one that it makes, as in "
                f"{cls.__name__}(config=model.config)."
            )
        super().__setattr__(name, value)


class LayerwiseOperations(metaclass=CacheClass):
    """The part of a cache's interface that says what its layers are, and changes, copies or measures all of them.

    Each operation asks every layer first whether it can, so that an error leaves none of them changed.

    Attributes:
        layers: the layers, as users see them: a plain list that anybody may change.
    """

    layers: list[Any]
    layer_class_to_replicate: Callable[[], Any] | None
    _pass: ForwardPassFollower
    _given: GivenToGenerate | None = None
    _adapted: Sequence[CacheLayer] = ()
    """Each layer, or its adapter if it is one of transformers' layers, as of the last time that somebody asked."""
    _grows = False
    """Whether reservations of transformers' layers are made larger when they are too small."""
    known_ids: Tensor | None = None
    """Ids of the first tokens that the cache has seen, int64 `[batch, tokens]`, as far as they are known. Under
    `install()` the ids of prompts are known, and of sequences that `generate()` has returned. Forks share the tensor.
    """
    budget: Any = None
    """The bytes that the cache stays within, a `Budget` of the room `memory`, `None` for as many as it takes."""
    origins: tuple[Origin, ...] = (AS_TEXT,)
    """Where the states of each sequence come from, `[batch]`; one for all of them if they have the same.

    It goes wherever the states go, and only `moved`, `concatenate` and `replace` make another one.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        sent_by_value(cls)

    def adapted_layers(self) -> Sequence[CacheLayer]:
        """The layers with the operations of kvlayers' layers: each layer itself, or its adapter.

        `layers` is a plain list that anybody may change, and shows transformers' layers themselves. Their adapters
        stand beside it, are made once, and are found by the identity of the layer.
        """
        known = self._adapted
        if len(known) != len(self.layers) or not all(map(operator.is_, known, self.layers)):
            by_identity = {id(layer.original): layer for layer in known}
            self._adapted = known = [by_identity.get(id(layer)) or adapted(layer, self._grows) for layer in self.layers]
        return known

    def _layer_at(self, layer_idx: int) -> CacheLayer | None:
        """The layer, as in `adapted_layers()`; `None` for an index beyond the layers, whose layer may be made later."""
        try:
            if layer_idx >= len(self.layers):
                operator.index(layer_idx)
                return None
            layer = self.layers[layer_idx]
        except (IndexError, TypeError, ValueError, RuntimeError):
            raise self._no_layer(layer_idx) from None
        if -len(self._adapted) <= layer_idx < len(self._adapted):
            known = self._adapted[layer_idx]
            if known is layer or known.original is layer:
                return known
        return self.adapted_layers()[layer_idx]

    @property
    def length(self) -> int:
        """Tokens that the cache has seen and not rolled back. Raises as `get_seq_length`, for which it is the name in
        kvlayers.
        """
        return self._seen_by(0)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens that a layer has seen. If layer 0 does not attend, it stands for the first layer that does.

        Raises:
            UnsupportedLayerError: neither attends, and no layer with a recurrent state counts its tokens.
            InterruptedPassError: layer 0 is asked, outside of the model, and the last forward pass was interrupted, so
                that later layers have seen fewer tokens. `crop` to the length that they have, or `reset`.
        """
        seen = self._seen_by(layer_idx)
        is_asked = not torch.compiler.is_compiling() and self._is_in_prefill()
        return SeenTokens.of(self, seen) if is_asked else seen

    def _seen_by(self, layer_idx: int) -> int:
        layer = self._layer_at(layer_idx)
        if layer is None:
            return 0
        compiling = torch.compiler.is_compiling()
        if layer_idx == 0 and not compiling and self._pass.at < self._pass.in_step:
            self._pass.check_in_step(self)
        if not layer.traits.attends and (
            self._first_attending(layer_idx) is not None or not layer.traits.counts_columns
        ):
            layer = self._attending(layer_idx)
        seen = layer.get_seq_length()
        # transformers' layers may count in a tensor, and in compiled code all static layers do.
        return seen if compiling else int(seen)

    def forget_call(self) -> None:
        """Take the call of `generate()` that the cache was given to for one that ended."""
        if self._given is not None:
            self._given.end()
            self._given = None

    def _is_in_prefill(self) -> bool:
        """Whether `generate()` may be asking, to find the tokens of its sequence that are new."""
        if not compat.MARKS_GIVEN_CACHES:
            return compat.PREFILL_SUBTRACTS_LENGTHS
        given = self._given
        if given is None or given.is_measured:
            return False
        given.measure()
        return True

    def most_seen(self) -> int:
        """Tokens that the layer which has seen most has seen. After an interrupted pass, others have seen fewer."""
        most = 0
        for layer in self.adapted_layers():
            most = max(most, layer.length or 0)
        return most

    def _layer(self, layer_idx: int) -> CacheLayer:
        """As `adapted_layers()[layer_idx]`, without a look at the other layers.

        Raises:
            LayerIndexError: no layer has that index.
        """
        layer = self._layer_at(layer_idx)
        if layer is None:
            raise self._no_layer(layer_idx)
        return layer

    @property
    def keeps_every_token(self) -> bool:
        """Whether the cache can be put back to any number of tokens, whatever it has seen since."""
        return all(map(operator.attrgetter("traits.keeps_every_token"), self.adapted_layers()))

    def recurrent_parts(self) -> list[Any]:
        """The `LinearAttentionLayer` of each layer that has one: the layer itself, or a part of a hybrid layer."""
        return [part for layer in self.adapted_layers() for part in layer.parts if part.traits.counts_columns]

    def _no_layer(self, layer_idx: object) -> LayerIndexError:
        return LayerIndexError(
            f"`layer_idx` must be a whole number from 0 to {len(self.layers) - 1}, got a "
            f"{type(layer_idx).__name__}: pass keys, values and layer_idx in this order."
            if isinstance(layer_idx, Tensor)
            else f"`layer_idx` must be a whole number from 0 to {len(self.layers) - 1}, got {layer_idx!r}: make the "
            "cache from the config of the model that uses it."
        )

    @property
    def batch_size(self) -> int:
        """Sequences side by side, -1 before the first states."""
        return next((rows for layer in self.adapted_layers() if (rows := layer.batch_size) is not None), -1)

    @property
    def is_initialized(self) -> bool:
        """Whether every layer that can reserve memory knows the form of its states."""
        reserving = [layer for layer in self.adapted_layers() if layer.supports_early_init]
        return bool(reserving) and all(layer.is_initialized for layer in reserving)

    @property
    def is_compileable(self) -> bool:
        """Whether generate() may compile the forward pass around this cache."""
        return len(self.layers) > 0 and all(layer.is_compileable for layer in self.adapted_layers())

    @property
    def is_croppable(self) -> bool:
        """Whether `crop` can put every layer back as it was."""
        return all(layer.is_croppable for layer in self.adapted_layers())

    @property
    def is_sliding(self) -> list[bool]:
        """For each layer, whether it attends within a window."""
        return [layer.is_sliding for layer in self.adapted_layers()]

    @property
    def is_linear(self) -> list[bool]:
        """For each layer, whether it has a recurrent state and no attention."""
        return [layer.traits.is_recurrent and not layer.traits.attends for layer in self.adapted_layers()]

    @property
    def is_dummy(self) -> list[bool]:
        """For each layer, whether it holds nothing at all."""
        return [not layer.traits.is_recurrent and not layer.traits.attends for layer in self.adapted_layers()]

    def __len__(self) -> int:
        return len(self.layers)

    def _attending(self, layer_idx: int) -> CacheLayer:
        """The layer if it attends, or the first layer that does if it is layer 0."""
        layer = self._layer(layer_idx)
        found = layer if layer.traits.attends else self._first_attending(layer_idx)
        if found is None:
            raise UnsupportedLayerError(
                f"`layer_idx` must be that of a layer that attends, got {layer_idx}, a "
                f"{type(layer.original).__name__}: ask another layer, if the model has one that attends, or make the "
                "cache from the config of the model."
            )
        return found

    def _first_attending(self, layer_idx: int) -> CacheLayer | None:
        """The first layer that attends, if layer 0 is asked for."""
        return (
            next((layer for layer in self.adapted_layers() if layer.traits.attends), None) if layer_idx == 0 else None
        )

    def most_tokens(self, layer_idx: int | None = None) -> int:
        """As `get_max_length`, whose answer is different under `legacy_names`."""
        if layer_idx is not None:
            layer = self._layer_at(layer_idx)
            return unbounded_as_minus_one(None if layer is None else layer.capacity)
        capacities = [layer.capacity for layer in self.adapted_layers() if layer.traits.attends]
        bounded = [capacity for capacity in capacities if capacity is not None]
        return unbounded_as_minus_one(max(bounded) if bounded and len(bounded) == len(capacities) else None)

    def early_initialization(
        self,
        batch_size: int,
        num_heads: int | Sequence[int],
        head_dim: int | Sequence[int],
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        """Reserve memory before the first forward pass, in the layers that can.

        Args:
            batch_size: sequences side by side.
            num_heads: kv_heads, one number for all layers or one for each.
            head_dim: head_dim of keys and values, one number for all layers or one for each.
            dtype: dtype of the states.
            device: device of the states.

        Raises:
            OptionError: states cannot have such a number, dtype or device.
            LayerIndexError: the numbers are not one for each layer.
        """
        check_whole_number(batch_size, "`batch_size`", 1, of="sequences")
        dtype = checked_dtype(dtype)
        check_accepted(None, device)
        layers = self.adapted_layers()
        heads = num_heads if isinstance(num_heads, Sequence) else [num_heads] * len(layers)
        dims = head_dim if isinstance(head_dim, Sequence) else [head_dim] * len(layers)
        if len(heads) != len(layers) or len(dims) != len(layers):
            raise LayerIndexError(
                f"`num_heads` and `head_dim` must be given for each of {len(layers)} layers, got {len(heads)} and "
                f"{len(dims)}: pass one number for all, or one for each."
            )
        for number in (*heads, *dims):
            check_whole_number(number, "`num_heads` and `head_dim`", 1)
        device = torch.empty(0, device=device).device
        for layer, layer_heads, layer_dim in zip(layers, heads, dims, strict=True):
            if layer.supports_early_init and not layer.is_initialized:
                form = StateForm(batch_size, layer_heads, layer_dim, dtype, device)
                layer.reserve_form(form, form)

    # What linear-attention, hybrid and sparse-attention models call

    def _recurrent(self, layer_idx: int) -> Any:
        """The layer at `layer_idx`, which has recurrent states."""
        if not self.layers:
            raise UnsupportedLayerError(
                f"The cache of a model with recurrent layers must be made from its config, got a {type(self).__name__} "
                "without one: pass config=model.config."
            )
        layer = self._layer(layer_idx)
        if not layer.traits.is_recurrent:
            raise UnsupportedLayerError(
                f"`layer_idx` must be that of a layer with a recurrent state, got {layer_idx}, a "
                f"{type(layer.original).__name__}: the cache was made for another model, so make one from the config "
                "of the model that uses it."
            )
        return layer

    @staticmethod
    def _state(states: dict[int, Any], state_idx: int) -> Any:
        try:
            return states[state_idx]
        except (KeyError, TypeError, RuntimeError):
            raise LayerIndexError(
                f"`state_idx` must be a whole number from 0 to {len(states) - 1}, got {state_idx!r}: make the cache "
                "from the config of the model that uses it."
            ) from None

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Whether a recurrent layer (the last one by default) has seen tokens.

        Raises:
            UnsupportedLayerError: the layer has no recurrent states, or no layer of the cache has.
            LayerIndexError: the layer has no state of that index.
        """
        if layer_idx is None:
            layer: Any = next((layer for layer in reversed(self.adapted_layers()) if layer.traits.is_recurrent), None)
            if layer is None:
                raise UnsupportedLayerError(
                    "The cache must have a layer with a recurrent state, got none: make it from the config of the "
                    "model that uses it."
                )
        elif self._layer_at(layer_idx) is None:
            return False
        else:
            layer = self._recurrent(layer_idx)
        seen = layer.has_previous_state
        return all(seen.values()) if state_idx is None else bool(self._state(seen, state_idx))

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """Convolution state of a layer, `[batch, channels, conv_kernel_size]`, `None` before the first tokens.

        Raises:
            LayerIndexError: no layer has that index, or the layer has no state of that index.
            UnsupportedLayerError: the layer has no recurrent states.
        """
        layer = self._recurrent(layer_idx)
        return layer.conv_state(state_idx) if self._state(layer.has_previous_state, state_idx) else None

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """Recurrent state of a layer, `None` before the first tokens. Raises as `get_conv_state`."""
        layer = self._recurrent(layer_idx)
        return layer.recurrent_state(state_idx) if self._state(layer.has_previous_state, state_idx) else None

    @property
    def is_recurrent(self) -> bool:
        """Whether the layers hold recurrent states alone, so that no layer keeps tokens."""
        is_linear = self.is_linear
        return bool(is_linear) and all(is_linear)

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **layer_options: Any
    ) -> Tensor:
        """Take in the convolution inputs of new tokens in a layer, which checks `layer_options` itself.

        See `LinearAttentionLayer.update_conv_state`, whose option is `conv_kernel_size`.

        Raises:
            LayerIndexError: no layer has that index, or the layer has no state of that index.
            UnsupportedLayerError: the layer has no recurrent states, or the model cannot take in several tokens behind
                others.
            StateMismatchError: inputs of another batch size, channels, dtype, device or kernel than those held.
        """
        layer = self._recurrent(layer_idx)
        # A forward pass goes through a layer that attends as well when its keys come.
        followed = layer.traits.counts_columns and not torch.compiler.is_compiling()
        following = self._pass
        if followed and not state_idx and not following.at < layer_idx <= following.in_step:
            following.follow(self, layer_idx, layer, conv_states.shape[-1])
        updated: Tensor = layer.update_conv_state(conv_states, state_idx, **layer_options)
        if followed:
            following.at = layer_idx
        return updated

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **layer_options: Any
    ) -> Tensor:
        """Replace the recurrent state of a layer, which checks `layer_options`. Raises as `update_conv_state`."""
        updated: Tensor = self._recurrent(layer_idx).update_recurrent_state(
            recurrent_states, state_idx, **layer_options
        )
        return updated

    def is_recording_past(self, layer_idx: int) -> bool:
        """Whether a model must pass the states of every token to a layer, instead of writing to the held states.

        kvlayers' recurrent layers always say so, since they count tokens. A layer's `is_recording` says whether it
        holds more than it needs, for a later rollback.
        """
        return bool(self._layer(layer_idx).record_past)

    def update_indexer(self, indexer_key_states: Tensor, layer_idx: int) -> Tensor:
        """Take in the indexer keys of new tokens, `[batch, new, index_head_dim]`, in a sparse-attention layer."""
        layer: Any = self._layer(layer_idx)
        if not layer.traits.has_other_states:
            raise UnsupportedLayerError(
                f"`layer_idx` must be that of a layer with an indexer, got {layer_idx}, a "
                f"{type(layer.original).__name__}: make the cache from the config of the model that uses it."
            )
        updated: Tensor = layer.update_indexer(indexer_key_states)
        return updated

    @property
    def exact_tokens(self) -> int | None:
        """How many of the first tokens have the states that the model computes for their text; `None` for all of them.

        Documents that were concatenated, what follows a replaced middle, and tokens at other positions may have others.
        Of rows it is the least.
        """
        exact = [origin.exact_tokens for origin in self.origins if origin.exact_tokens is not None]
        return min(exact, default=None)

    @property
    def first_position(self) -> int:
        """Position of the first token: not 0 in a cache that was moved. Of rows it is the greatest."""
        return max(origin.first_position for origin in self.origins)

    @abstractmethod
    def layers_for(self, count: int) -> list[Any]:
        """The layers, and new ones up to `count`, if the cache makes layers when they are needed."""

    @property
    @abstractmethod
    def kind(self) -> str:
        """Name of the kind of cache, by which saved states are known."""

    def _forget_pass(self) -> None:
        """Take the next update for the beginning of a forward pass, since all layers have changed."""
        self._pass.forget()
        self.forget_call()

    # What is done to all layers

    def crop(self, tokens_to_remove: int | None = None, *, max_length: int | None = None) -> None:
        """Roll back, exactly.

        Args:
            tokens_to_remove: a positive number is the length to keep; a negative number removes as many of the newest
                tokens. Zero removes no token, but ends the recording of a past.
            max_length: the same number, by its name until transformers 5.15.

        Raises:
            OptionError: both or neither is given.
            RollbackError: fewer tokens are held, tokens that would be needed again are gone, or a recurrent state can
                only be put back to an earlier length (see `truncate`); nothing is changed.
        """
        number = crop_argument(tokens_to_remove, max_length)
        length = self.most_seen()
        target = crop_target(number, length)
        if number > 0:
            self._remove(self._removals(target))
        else:
            self._remove([(layer, length - target) for layer in self.adapted_layers()])

    def truncate(self, length: int) -> int:
        """Roll back to when the cache had seen `length` tokens, or to the nearest earlier length that its layers allow.

        Layers of tokens go back to any length that they hold. A recurrent state goes back to a checkpoint, and all
        layers go back with it. Afterwards `get_seq_length()` says how many tokens the cache has seen: pass it the
        tokens from there on again.

        Args:
            length: tokens to keep, 0 for none.

        Returns:
            How many tokens must be passed again to be at `length`: 0 if no layer has a recurrent state.

        Raises:
            RollbackError: fewer tokens are held, or tokens that would be needed again are gone; nothing is changed.
        """
        target = self.nearest_restorable(length)
        self._remove(self._removals(target))
        return int(length) - target

    def nearest_restorable(self, length: int) -> int:
        """The greatest length, `length` at most, to which all layers can be put back.

        Raises:
            RollbackError: as `truncate`.
        """
        length = check_rollback(length, self.most_seen())
        counting = [layer for layer in self.adapted_layers() if layer.length and not layer.traits.is_upstream]
        while True:
            nearest = min([layer.nearest_restorable(length) for layer in counting], default=length)
            if nearest == length:
                return length
            length = nearest

    def _removals(self, length: int) -> list[tuple[CacheLayer, int]]:
        """By how many tokens each layer must go back. An interrupted pass leaves some layers or parts ahead."""
        lengths = [
            (layer, layer.length or max(part.length or 0 for part in layer.parts)) for layer in self.adapted_layers()
        ]
        held = max([own for _, own in lengths], default=0)
        return [(layer, (own or held) - length) for layer, own in lengths]

    def _remove(self, removals: list[tuple[CacheLayer, int]]) -> None:
        if self._lacks_recurrent_states() and any(0 < tokens < self.most_seen() for _, tokens in removals):
            raise RollbackError(
                "Recurrent layers must have seen the same tokens as the others, got one that has seen nothing: the "
                "model keeps its states elsewhere, or a forward pass was interrupted; reset() the cache."
            )
        targets = [target for layer, tokens in removals for target in _without_newest(layer, tokens)]
        for layer, length in targets:
            layer.check_truncate(length)
        for layer, length in targets:
            layer.truncate(length)
        self.known_ids = None if self.known_ids is None else self.known_ids[:, : self.most_seen()]
        self._forget_what_is_gone(max([tokens for _, tokens in removals], default=0))
        self._forget_pass()

    def _forget_what_is_gone(self, removed: int) -> None:
        """Forget what belongs to tokens that a rollback has removed, `removed` at most of a sequence."""
        if self.origins != (AS_TEXT,):
            lengths = self.row_lengths or (self.most_seen(),)
            left = zip(self._origin_of_each(len(lengths)), lengths, strict=True)
            self.origins = _one_if_equal([origin.cut(length) for origin, length in left])

    def _origin_of_each(self, rows: int) -> tuple[Origin, ...]:
        return self.origins * rows if len(self.origins) == 1 else self.origins

    def _lacks_recurrent_states(self) -> bool:
        """Whether a recurrent layer has seen nothing, while others have: the model may keep its states elsewhere."""
        recurrent = (layer for layer in self.adapted_layers() if layer.traits.is_recurrent and not layer.traits.attends)
        # Layers of transformers do not count tokens.
        empty = any(layer.length == 0 or layer.batch_size is None for layer in recurrent)
        return empty and self.most_seen() > 0

    def _check_holds_states(self) -> None:
        if self._lacks_recurrent_states():
            raise UnsupportedLayerError(
                "Recurrent layers must have seen the same tokens as the others, got one that has seen nothing, so that "
                "a copy would lack its states: the model keeps them elsewhere, or a forward pass was interrupted; "
                "compute the tokens again for each continuation."
            )

    def reorder_cache(self, beam_idx: BatchIndices) -> None:
        """As `batch_select_indices`, by the name that beam search uses."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: BatchIndices) -> None:
        """Keep the sequences at `indices`, in that order. An index may occur more than once.

        Args:
            indices: whole numbers `[new_batch]`, or a boolean mask `[batch]`.

        Raises:
            BatchIndexError: an index is out of range; nothing is changed.
        """
        batch_size = self.batch_size
        if batch_size >= 0:
            rows = as_batch_indices(indices, batch_size)
            self._select(rows, lambda layer: layer.select(rows))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each sequence `repeats` times. The copies of a sequence follow one another."""
        batch_size = self.batch_size
        if batch_size >= 0:
            self.batch_select_indices(repeated_rows(repeats, batch_size))

    # Rows: sequences of lengths of their own

    def parts(self) -> "tuple[LayerwiseOperations, ...]":
        """The caches that have layers: this one, or both parts of a pair, self-attention first."""
        return (self,)

    @property
    def row_lengths(self) -> tuple[int, ...]:
        """Tokens that each row has seen and not rolled back, `[batch]`; empty before the first states.

        Rows are aligned on the right, as in a batch that is padded on the left. See `kvlayers.Rows`.
        """
        for layer in self.parts()[0].adapted_layers():
            lengths = tuple([length for length in layer.row_lengths if length is not None])
            if len(lengths) == layer.batch_size:
                return lengths
        return ()

    def extend(self, *others: Self) -> None:
        """Append the rows of other caches, whatever their lengths. The others do not change.

        Every row goes on as if it were alone: it counts, evicts and packs its own tokens.

        Args:
            others: caches of the same model, kind and settings, each with at least one token.

        Raises:
            OptionError: something that is not a cache of kvlayers.
            StateMismatchError: they differ in kind, settings, heads, dtype or device, or one is empty.
            UnsupportedLayerError: layers that cannot be rows, such as those of transformers.
        """
        caches = [self, *others]
        for cache in caches:
            if not isinstance(cache, LayerwiseOperations):
                raise OptionError(f"`caches` must be caches of kvlayers, got a {type(cache).__name__}: pass caches.")
            if not cache.row_lengths:
                raise StateMismatchError(f"`caches` must each have tokens, got {cache!r}: pass its prompt first.")
            expected, got = form_of_rows(self), form_of_rows(cache)
            if expected != got:
                pairs = zip(expected, got, strict=False)
                differing = next((pair for pair in pairs if pair[0] != pair[1]), (len(expected), len(got)))
                raise StateMismatchError(
                    f"`caches` must be of one model, kind and settings, got {differing[0]} and {differing[1]}: use "
                    "caches that were made with the same arguments for the same model."
                )
        joined = [part._rows_with(others) for part, *others in zip(*(cache.parts() for cache in caches), strict=True)]
        origins = [origin for cache in caches for origin in cache._origin_of_each(len(cache.row_lengths))]
        for part, layers in zip(self.parts(), joined, strict=True):
            part.replace_layers(layers)
        self.origins = _one_if_equal(origins)

    def _rows_with(self, others: "Sequence[LayerwiseOperations]" = ()) -> list[CacheLayer]:
        """New layers, whose rows are the sequences of this cache and then those of other caches."""
        joined = []
        for layers in zip(*(cache.adapted_layers() for cache in (self, *others)), strict=True):
            joined.append(layers[0].side_by_side(layers) if layers[0].batch_size else layers[0])
        return joined

    def replace_layers(self, layers: Sequence[CacheLayer]) -> None:
        """Hold other layers, which have seen other tokens.

        Raises:
            OptionError: something that is not a layer of kvlayers.
        """
        if not isinstance(layers, Sequence) or not all(isinstance(layer, CacheLayer) for layer in layers):
            raise OptionError(
                f"`layers` must be layers of kvlayers, got {layers!r}: pass what adapted_layers() returns."
            )
        self.layers, self.known_ids = [layer.original for layer in layers], None
        self._pass.goes_on_with = None
        self._forget_pass()

    def extract(self, row: int) -> Self:
        """A cache with one row, as if it had been decoded alone. It does not change when this cache does.

        Raises:
            BatchIndexError: there is no such row.
        """
        rows = max(self.batch_size, 0)
        index = whole_number(row, "`row`")
        if not -rows <= index < rows:
            raise BatchIndexError(f"`row` must be from {-rows} to {rows - 1}, got {row}: pass the index of a row.")
        layers = self.adapted_layers()
        alone = self._twin_with([layer.row(index % rows) if layer.batch_size else layer.fork() for layer in layers])
        alone.known_ids, alone.origins = None, (self._origin_of_each(rows)[index],)
        alone._forget_pass()
        return alone

    def keep_rows(self, indices: BatchIndices) -> None:
        """As `batch_select_indices`: keep the rows at `indices`, in that order.

        Memory of the others is given back once they are half of all.
        """
        self.batch_select_indices(indices)

    def crop_rows(self, lengths: Sequence[int]) -> None:
        """Roll each row back to its own length, exactly.

        Args:
            lengths: tokens that are left of each row, `[batch]`.

        Raises:
            BatchIndexError: there is not one length for each row.
            RollbackError: a row never had such a length, or cannot be put back to it; nothing is changed.
        """
        if not isinstance(lengths, Sequence) and not (isinstance(lengths, Tensor) and lengths.dim() == 1):
            raise BatchIndexError(f"`lengths` must have one length for each row, got {lengths!r}: pass a list.")
        held, wanted = self.row_lengths, [whole_number(length, "`length`") for length in lengths]
        if len(wanted) != len(held):
            raise BatchIndexError(
                f"`lengths` must have one length for each of {len(held)} rows, got {len(wanted)}: pass a list of them."
            )
        for row, (length, own) in enumerate(zip(wanted, held, strict=True)):
            if not 0 <= length <= own:
                raise RollbackError(
                    f"`lengths` must be from 0 to the tokens of each row, got {length} for row {row}, which has {own}: "
                    "pass lengths that the rows had."
                )
        part = self.parts()[0]
        layers: Sequence[Any] = part.adapted_layers()
        if not all(layer.traits.counts_rows for layer in layers if layer.batch_size):
            layers = part._rows_with()
        filled = [layer for layer in layers if layer.batch_size]
        for layer in filled:
            layer.check_truncate_rows(wanted)
        for layer in filled:
            layer.truncate_rows(wanted)
        part.replace_layers(layers)
        self._forget_what_is_gone(sum(held) - sum(wanted))

    def expand(self, repeats: int) -> None:
        """Let `repeats` sequences go on from each sequence.

        As `batch_repeat_interleave`, but layers of full attention that hold states in full precision on their device
        hold the common prefix once for all copies. Attention then reads it once, and the own tokens of each copy beside
        it.

        Raises:
            OptionError: `repeats` is less than 1.
            CapacityError: a static cache has no room for them; nothing is changed.
        """
        batch_size = self.batch_size
        if batch_size >= 0:
            self._select(repeated_rows(repeats, batch_size), lambda layer: layer.expand(repeats))

    def share_prefix(self, other: Self, tokens: int) -> None:
        """Hold the first `tokens` tokens in the memory in which another cache holds them, layer by layer.

        Use it for caches that have computed the same tokens independently of each other. Their states must be the same,
        which nobody checks. Layers that cannot share memory with the other cache do not change.

        Args:
            other: a cache of the same model with the same first tokens. Nobody may change it while this is done.
            tokens: how many tokens they have in common.

        Raises:
            OptionError: something that is not a cache of kvlayers, or not a number.
        """
        if not isinstance(other, LayerwiseOperations):
            raise OptionError(f"`other` must be a cache of kvlayers, got a {type(other).__name__}: pass such a cache.")
        common = whole_number(tokens, "`tokens`")
        for layer, other_layer in zip(self.adapted_layers(), other.adapted_layers(), strict=False):
            layer.share_prefix(other_layer, common)

    def trim(self) -> None:
        """Give back spare room, and memory of tokens that no cache reads any more.

        Memory is moved only if more than an eighth of it is given back.
        """
        for layer in self.adapted_layers():
            layer.trim()

    def compact(self) -> None:
        """Hold the tokens of each layer in one piece of memory that no other cache holds.

        A fork that shares its first tokens reads them in several pieces, and keeps all of the shared memory alive. In
        one piece it takes more memory in all, and attention may be faster. Layers of other kinds do not change.
        """
        for layer in self.adapted_layers():
            layer.compact()

    def _select(self, rows: Tensor, change: Callable[[CacheLayer], None]) -> None:
        """Hold the sequences at `rows`, as `change` makes each layer do. If memory runs out, the cache gives way first.

        What is known of the sequences goes with them.
        """
        # Indices on an accelerator are not read back, since that would stall it.
        if rows.device.type == "cpu" and rows.tolist() == list(range(self.batch_size)):
            return
        self.check_select(rows.shape[0])
        changed = 0
        while changed < len(layers := self.adapted_layers()):
            try:
                for layer in layers[changed:]:
                    change(layer)
                    changed += 1
            except (RuntimeError, MemoryError) as error:
                late.function("room between passes")(self, error, changed)
        if len(self.origins) > 1:
            self.origins = _one_if_equal([self.origins[row] for row in rows.tolist()])
        # On the device of the rows, so that nobody waits for an accelerator.
        if self.known_ids is not None:
            self.known_ids = self.known_ids.to(rows.device).index_select(0, rows)

    def check_select(self, batch_size: int) -> None:
        """Raise what selecting any `batch_size` sequences would raise."""
        sizes = {layer.batch_size for layer in self.adapted_layers() if layer.length and layer.batch_size is not None}
        if len(sizes) > 1:
            raise BatchIndexError(
                f"Layers must have one batch size, got {sorted(sizes)}: crop the cache to before the forward "
                "pass that was interrupted, or reset it."
            )
        for layer in self.adapted_layers():
            layer.check_select(batch_size)

    def reset(self) -> None:
        """Forget all tokens; the memory is kept for the next ones."""
        for layer in self.adapted_layers():
            layer.reset()
        self.known_ids, self.origins = None, (AS_TEXT,)
        self._forget_pass()

    def activate_past_recording(self) -> None:
        """From now on, let windows hold all tokens between one crop and the next, which may take them back."""
        for part in self.parts():
            # It has counted windows as full.
            part.budget = part.budget and part.budget.fork()
        for layer in self.adapted_layers():
            layer.activate_past_recording()

    def deactivate_past_recording(self) -> None:
        """Forget the recorded past, and record no more."""
        for layer in self.adapted_layers():
            layer.deactivate_past_recording()

    @overload
    def fork(self, n: None = None) -> Self: ...

    @overload
    def fork(self, n: int) -> list[Self]: ...

    def fork(self, n: int | None = None) -> Self | list[Self]:
        """An independent continuation: a change of one cache never shows in the other.

        Forks share memory until they write. docs/forks.md lists the kinds whose live tokens are copied at once.

        Args:
            n: number of forks, returned as a list. If it is not given, one fork is returned by itself.

        Raises:
            OptionError: `n` is not a whole number, or less than 1.
            UnsupportedLayerError: a recurrent layer has seen nothing, while others have: its states are elsewhere.
        """
        if n is None:
            return self._fork()
        count = whole_number(n, "`n`")
        if count < 1:
            raise OptionError(f"`n` must be a number of forks, at least 1, got {count}: pass 1 or more.")
        return [self._fork() for _ in range(count)]

    def _fork(self) -> Self:
        self._check_holds_states()
        return self._twin_with([layer.fork() for layer in self.adapted_layers()])

    def _twin_with(self, layers: Sequence[CacheLayer]) -> Self:
        """Another cache like this one, with layers of its own."""
        twin = copy.copy(self)
        twin._adapted = layers
        twin.layers = [layer.original for layer in twin._adapted]
        let_static_layers_agree(twin._adapted)
        return twin

    __deepcopy__ = forked_once

    def storages(self) -> Storages:
        """Bytes of each block of memory that is held, by its address. Forks may hold the same blocks."""
        return storages_of(
            tensor for part in self.parts() for layer in part.adapted_layers() for tensor in layer.held_tensors()
        )

    @property
    def nbytes(self) -> int:
        """Bytes of memory held, spare room included."""
        return sum(self.storages().values())

    def state(self) -> CacheState:
        """Copies of the live tensors of all layers, and the facts that belong to them.

        Raises:
            InterruptedPassError: a forward pass was interrupted, so that layers have seen different tokens.
            UnsupportedLayerError: a recurrent layer has seen nothing, while others have: its states are elsewhere.
        """
        self._pass.check_in_step(self)
        self._check_holds_states()
        layers = tuple(layer.state() for layer in self.adapted_layers())
        return CacheState(self.kind, layers, origins=self.origins)

    def load_state(self, state: CacheState) -> None:
        """Become what the cache was when `state` was taken.

        Raises:
            StateMismatchError: the state is of a cache with other layers; nothing is changed.
        """
        check_is_state(state)
        layers = self.layers_for(len(state.layers))
        if state.parts or len(state.layers) != len(layers):
            raise StateMismatchError(
                f"`state` must have the states of {len(self.layers)} layers, got {len(state.layers)}: load it into a "
                "cache that was made for the same model config."
            )
        adapters = [adapted(layer, self._grows) for layer in layers]
        pairs = list(zip(adapters, state.layers, strict=True))
        for layer, layer_state in pairs:
            layer.check_state(layer_state)
        batch_sizes = {batch for s in state.layers if s.facts.get("length") and (batch := _batch_of(s)) is not None}
        if len(batch_sizes) > 1:
            raise StateMismatchError(
                f"`state` must have one batch size, got {sorted(batch_sizes)}: take it from one cache."
            )
        self.layers, self.known_ids, self._pass.goes_on_with = layers, None, None
        self._adapted = adapters
        for layer, layer_state in pairs:
            layer.load_state(layer_state)
        self.origins = state.origins
        self._forget_pass()


def _without_newest(layer: CacheLayer, tokens: int) -> list[tuple[CacheLayer, int]]:
    """What must be truncated, and to which length, to take back the newest `tokens` tokens: the layer, or one part.

    What has seen nothing, as the model never used it, is left alone.
    """
    if layer.length or layer.traits.is_upstream:
        return [(layer, (layer.length or 0) - tokens)]
    # A first pass that was interrupted has left the tokens in one of two parts. A part that does not count its tokens
    # says that it cannot go back.
    return [
        (part, (part.length or 0) - tokens)
        for part in layer.parts
        if part.length or (tokens and part.length is None and part.batch_size is not None)
    ]


def form_of_rows(cache: LayerwiseOperations) -> list[Any]:
    """What caches must have in common so that their sequences can be rows of one: kinds, settings, and forms."""
    form: list[Any] = [cache.kind]
    for layer in (layer for part in cache.parts() for layer in part.adapted_layers()):
        states = [own._replace(batch_size=1) for own in layer.forms]
        settings = {name: fact for name, fact in layer.describe().items() if name not in layer.reservation_facts}
        form.append((layer.kind, layer.memory_tier, settings, states))
    return form


def _one_if_equal(origins: Sequence[Origin]) -> tuple[Origin, ...]:
    """The origins of sequences as `LayerwiseOperations.origins` has them."""
    return tuple(origins) if len(set(origins)) > 1 else tuple(origins[:1])


def _batch_of(state: LayerState) -> int | None:
    names = ("keys", *(name for name in state.tensors if "conv_states." in name))
    return next((state.tensors[name].shape[0] for name in names if name in state.tensors), None)


def check_is_state(state: object) -> None:
    """Raise `StateMismatchError` if `state` is not what a cache's `state()` returns."""
    if not isinstance(state, CacheState):
        raise StateMismatchError(
            f"`state` must be a CacheState, got a {type(state).__name__}: pass what the state() of a cache returned."
        )
