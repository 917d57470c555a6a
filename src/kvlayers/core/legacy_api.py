"""The part of a cache that code for transformers 4 calls: tuples, subscripts, lists of states, and old names."""

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from kvlayers.core.arguments import whole_number
from kvlayers.core.cache_layer import CacheLayer
from kvlayers.core.cache_operations import LayerwiseOperations
from kvlayers.errors import LayerIndexError, LegacyFormatError, UnsupportedLayerError
from kvlayers.kernels.attention.packed_tensor import PackedStates, as_dense
from kvlayers.upstream import compat
from kvlayers.upstream.callers import warn_of_old_use

StatePair = tuple[Tensor | None, Tensor | None]
"""Keys and values that a layer holds, each `[batch, kv_heads, held, head_dim]`; `None` before the first states."""

LegacyStates = tuple[tuple[Tensor, ...], ...]
"""`((keys, values), ...)`, or with cross-attention `((keys, values, cross_keys, cross_values), ...)`, one per layer."""


def copied_states(layer: Any) -> StatePair:
    """Copies of the keys and values of a layer."""
    # A handle of packed states is not copied: its states are unpacked to full precision.
    keys, values = (
        states.dense() if isinstance(states, PackedStates) else None if states is None else states.clone()
        for states in layer.peek()
    )
    return keys, values


def handed_out_states(layer: Any) -> StatePair:
    """Keys and values of a layer, copied only if they are not held in full precision; see `TokenLayer.keys`."""
    keys, values = layer.keys, layer.values
    return None if keys is None else as_dense(keys), None if values is None else as_dense(values)


def check_tuples(states: object, width: Sequence[int]) -> LegacyStates:
    """`states` as a tuple of tuples of tensors.

    Args:
        states: what the user passed.
        width: how many tensors a layer may have.

    Raises:
        LegacyFormatError: the states are nested in another way, or their shapes disagree.
    """
    layers = check_nesting(states, width)
    for index, layer in enumerate(layers):
        for tensor in layer:
            if not isinstance(tensor, Tensor) or tensor.dim() != 4:
                raise LegacyFormatError(
                    f"Tensors must be [batch, kv_heads, tokens, head_dim] at layer {index}, got "
                    f"{_shown(tensor) if isinstance(tensor, Tensor) else f'a {type(tensor).__name__}'}: nest keys and "
                    "values as they are, one tuple per layer."
                )
        _check_shapes(index, layer, layers[0])
    return layers


def _check_shapes(index: int, layer: tuple[Tensor, ...], first: tuple[Tensor, ...]) -> None:
    for keys, values in zip(layer[::2], layer[1::2], strict=True):
        if keys.shape[:3] != values.shape[:3]:
            raise LegacyFormatError(
                "Keys and values must be of one batch size, with as many kv_heads and tokens, got "
                f"{_shown(keys)} and {_shown(values)} at layer {index}: pass both as one forward pass returned them."
            )
    if len(layer) != len(first):
        raise LegacyFormatError(
            f"Each layer must have as many tensors as the first, got {len(first)} there and {len(layer)} at "
            f"layer {index}: give all layers cross-attention, or none."
        )
    for place in range(0, len(layer), 2):
        if layer[place].shape[0] != first[0].shape[0] or _tokens(layer, place) != _tokens(first, place):
            raise LegacyFormatError(
                f"Layers must be of one batch size with as many tokens, got {_shown(first[place])} at layer 0 and "
                f"{_shown(layer[place])} at layer {index}: pass all layers as one forward pass returned them."
            )


def _tokens(states: tuple[Tensor, ...], place: int) -> int:
    """Tokens of the keys at a place, including tokens that a window of self-attention has dropped."""
    return states.seen if isinstance(states, WindowedStates) and place == 0 else states[place].shape[2]


def _shown(tensor: Tensor) -> str:
    return str(list(tensor.shape))


def check_nesting(states: object, width: Sequence[int]) -> tuple[tuple[Any, ...], ...]:
    """`states` as a tuple with a tuple for each layer. What the inner tuples contain is not checked.

    Args:
        states: what the user passed.
        width: how many entries the tuple of a layer may have.

    Raises:
        LegacyFormatError: the states are nested in another way.
    """
    expected = f"a tuple with a tuple of {' or '.join(map(str, width))} tensors for each layer"
    if isinstance(states, Tensor) or not isinstance(states, Iterable):
        seen = f"a tensor {_shown(states)}" if isinstance(states, Tensor) else f"a {type(states).__name__}"
        raise LegacyFormatError(f"A legacy cache must be {expected}, got {seen}: pass what to_legacy_cache() returns.")
    # PEFT has a layer as one tensor, `[count, batch, kv_heads, tokens, head_dim]`.
    layers = tuple(layer.unbind() if isinstance(layer, Tensor) and layer.dim() == 5 else layer for layer in states)
    for index, layer in enumerate(layers):
        if not isinstance(layer, tuple | list) or len(layer) not in width:
            seen = f"{len(layer)} entries" if isinstance(layer, tuple | list) else f"a {type(layer).__name__}"
            if isinstance(layer, Tensor):
                seen = f"a tensor {_shown(layer)}"
            raise LegacyFormatError(
                f"A legacy cache must be {expected}, got {seen} at layer {index}: nest the tensors one tuple per layer."
            )
    return tuple(layer if isinstance(layer, WindowedStates) else tuple(layer) for layer in layers)


class WindowedStates(tuple[Any, ...]):
    """States of a layer that attends within a window: a tuple whose type tells how many tokens were dropped.

    The facts stand on the type because torch, when it gathers the results of replicas, makes each tuple anew from the
    gathered tensors, and keeps nothing of a tuple but its type.
    """

    sliding_window: int
    """Tokens that a query attends to, itself included."""
    seen: int
    """Tokens that the layer has seen."""

    def __reduce__(self) -> tuple[type, tuple[tuple[Any, ...]]]:
        # Another process could not import a type that was made for one layer.
        return tuple, (tuple(self),)


def check_is_whole(states: tuple[Any, ...], index: int) -> None:
    """Raise `LegacyFormatError` if the states of layer `index` are of a window that has dropped tokens."""
    if isinstance(states, WindowedStates) and states.seen > states[0].shape[2]:
        raise LegacyFormatError(
            f"States must be those of every token, got layer {index}, which has dropped "
            f"{states.seen - states[0].shape[2]} of {states.seen}: pass the cache itself."
        )


def with_dropped(states: tuple[Any, ...], slides: bool) -> tuple[Tensor, Tensor]:
    """Keys and values with zeros in the place of tokens that a window has dropped, so that positions stay the same.

    Args:
        states: the states of a layer.
        slides: whether the layer that is to take them in drops these tokens as well.

    Raises:
        LegacyFormatError: tokens were dropped, and the layer would attend to the zeros in their place.
    """
    keys, values = states[:2]
    if not isinstance(states, WindowedStates) or states.seen == keys.shape[2]:
        return keys, values
    dropped = states.seen - keys.shape[2]
    if not slides:
        raise LegacyFormatError(
            f"A layer of full attention must get states of every token, got those of a window of "
            f"{states.sliding_window}, which has dropped {dropped} of {states.seen}: make the cache from the config of "
            "the model that computed them."
        )
    return tuple(torch.nn.functional.pad(held, (0, 0, dropped, 0)) for held in (keys, values))  # type: ignore[return-value]


def with_window(states: tuple[Any, ...], layer: CacheLayer) -> tuple[Any, ...]:
    """The states of a layer as `WindowedStates` if the layer attends within a window."""
    if not layer.is_sliding or layer.capacity is None:
        return states
    facts = {"sliding_window": layer.capacity, "seen": layer.length or 0}
    windowed: type[WindowedStates] = type(WindowedStates.__name__, (WindowedStates,), facts)
    return windowed(states)


def _writing(name: str) -> Any:
    """The method of lists called `name`, which then writes to the layers what has changed."""
    change = getattr(list, name)

    @functools.wraps(change)
    def method(self: "StateList", *args: Any, **kwargs: Any) -> Any:
        before = list(self)
        result = change(self, *args, **kwargs)
        try:
            self.write(before)
        except Exception:
            list.__setitem__(self, slice(None), before)
            raise
        return result

    return method


class StateList(list[Tensor | None]):
    """The keys, or the values, of the layers that hold some, as the list that caches of transformers 4 had.

    What is done to the list is done to the cache: an assigned tensor replaces the states of its layer, a layer without
    an entry holds none, and an entry behind the last one fills the next layer. A layer cannot be used while it has keys
    without values, or the reverse. Copies and slices are plain lists.

    Args:
        cache: the cache.
        side: "keys" or "values".
    """

    def __init__(self, cache: Any, side: str) -> None:
        self._cache, self._side = cache, side
        states = [getattr(layer, side) for layer in cache.adapted_layers()]
        while states and (states[-1] is None or not states[-1].shape[2]):
            states.pop()
        super().__init__(states)

    def __reduce__(self) -> tuple[type[list[Any]], tuple[list[Any]]]:
        return list, (list(self),)

    def clear(self) -> None:
        """Empty the cache: keys and values, as no layer could be used with one of them."""
        super().clear()
        self._cache.reset()

    def assign(self, states: object) -> None:
        """Replace the states of all layers.

        Args:
            states: a list with the states of each layer.

        Raises:
            LegacyFormatError: it is not a list, or has another length; nothing is changed.
        """
        if not isinstance(states, Sequence) or len(states) not in (len(self), len(self._cache.layers)):
            seen = f"{len(states)} entries" if isinstance(states, Sequence) else f"a {type(states).__name__}"
            raise LegacyFormatError(
                f"The assigned states must be a list of the {self._side} of {len(self)} layers, got {seen}: pass the "
                f"{self._side} of every layer, or take in new states by update()."
            )
        self[:] = states

    def write(self, before: list[Tensor | None]) -> None:
        """Write to the layers what differs from `before`.

        Raises:
            LayerIndexError: there are more entries than the cache can have layers.
            StateMismatchError: a layer cannot hold such states.
        """
        layers = self._cache.layers_for(len(self))
        if len(self) > len(layers):
            raise LayerIndexError(
                f"The list must have the {self._side} of at most {len(layers)} layers, got {len(self)}: the cache has "
                "no other layer."
            )
        self._cache.layers.extend(layers[len(self._cache.layers) :])
        changes: Iterable[tuple[Any, ...]] = itertools.zip_longest(self._cache.adapted_layers(), before, self)
        for layer, old, new in changes:
            if new is not old:
                setattr(layer, self._side, old[:, :, :0] if new is None else new)


CHANGES_OF_A_LIST = (
    *("__setitem__", "__delitem__", "__iadd__", "__imul__"),
    *("append", "extend", "insert", "pop", "remove", "reverse"),
)
for _name in CHANGES_OF_A_LIST:
    setattr(StateList, _name, _writing(_name))


def _state_list(cache: Any, side: str) -> StateList:
    try:
        return StateList(cache, side)
    except UnsupportedLayerError as error:
        # What asks whether there is such a list takes this for an answer.
        raise AttributeError(str(error)) from error


class LegacySurface(LayerwiseOperations):
    """The part of a cache's interface that code written for transformers 4 calls."""

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """The most tokens that a layer, or the whole cache, can hold; -1 if there is no maximum.

        Under `install(legacy_names=True)` it is `None` instead of -1, as code for transformers 4 expects.
        """
        return self.most_tokens(layer_idx)

    def __getitem__(self, layer_idx: int) -> StatePair:
        """Keys and values that a layer holds, each `[batch, kv_heads, held, head_dim]`, `None` before the first."""
        layer = self._layer(layer_idx)
        return layer.keys, layer.values

    def __iter__(self) -> Iterator[StatePair]:
        """A pair of keys and values for each layer."""
        layers: Sequence[Any] = self.adapted_layers()
        return (with_window((layer.keys, layer.values), layer) for layer in layers)

    @property
    def key_cache(self) -> StateList:
        """The keys of the layers that hold some, as a list."""
        return _state_list(self, "keys")

    @key_cache.setter
    def key_cache(self, states: object) -> None:
        self.key_cache.assign(states)

    @property
    def value_cache(self) -> StateList:
        """The values of the layers that hold some, as a list."""
        return _state_list(self, "values")

    @value_cache.setter
    def value_cache(self, states: object) -> None:
        self.value_cache.assign(states)

    @property
    def seen_tokens(self) -> int:
        """Tokens that the cache has seen; an old name of `get_seq_length()`."""
        warn_of_old_use("cache.seen_tokens", "use cache.get_seq_length()")
        return self.get_seq_length()

    @property
    def max_batch_size(self) -> int:
        """The name of `batch_size` for static caches before transformers 5.13."""
        if compat.RENAMED_MAXIMA:
            warn_of_old_use("cache.max_batch_size", "use cache.batch_size")
        return self.batch_size

    @property
    def max_cache_len(self) -> int:
        """The name of `get_max_length()` for static caches before transformers 5.13."""
        if compat.RENAMED_MAXIMA:
            warn_of_old_use("cache.max_cache_len", "use cache.get_max_length()")
        return self.most_tokens()

    def get_max_cache_shape(self, layer_idx: int | None = None) -> int:
        """The name of `get_max_length` before transformers 5.13."""
        if compat.RENAMED_MAXIMA:
            warn_of_old_use("cache.get_max_cache_shape()", "use cache.get_max_length()")
        return self.most_tokens(layer_idx)

    def get_usable_length(self, new_seq_length: int, layer_idx: int = 0) -> int:
        """Tokens of the past that remain if `new_seq_length` more come: fewer than held if they exceed the maximum."""
        warn_of_old_use(
            "cache.get_usable_length()", "use cache.get_seq_length(), and cache.get_max_length() for limits"
        )
        most, seen = self.most_tokens(layer_idx), self.get_seq_length(layer_idx)
        new = whole_number(new_seq_length, "`new_seq_length`")
        return most - new if most >= 0 and seen + new > most else seen

    def to_legacy_cache(self) -> LegacyStates:
        """Copies of the states as nested tuples, `((keys, values), ...)`.

        Raises:
            LegacyFormatError: a layer has dropped tokens or has other states, which tuples cannot express.
        """
        return self.as_tuples(copied_states)

    def as_tuples(self, states_of: Callable[[Any], StatePair]) -> LegacyStates:
        """As `to_legacy_cache`, with the keys and values that `states_of` returns for a layer."""
        pairs: list[tuple[Tensor, Tensor]] = []
        empty: int | None = None
        for index, layer in enumerate(self.adapted_layers()):
            keys, values = states_of(layer)
            if layer.traits.is_recurrent or (layer.traits.attends and layer.traits.has_other_states):
                more = (
                    "a recurrent state" if layer.traits.is_recurrent else "other states, such as the keys of an indexer"
                )
                raise LegacyFormatError(
                    f"Layers must have keys and values alone, got layer {index}, which has {more}: use state() and "
                    "load_state(), which keep all states."
                )
            if not layer.traits.attends:
                continue
            if keys is None or values is None:
                empty = index
                continue
            if empty is not None:
                raise LegacyFormatError(
                    f"Layers before a filled one must be filled, got an empty layer {empty} before layer {index}, "
                    "which tuples cannot express: use state() and load_state()."
                )
            # Layers of transformers that have just packed all their tokens show tensors of one dimension.
            seen, shown = layer.length or 0, keys.shape[2] if keys.dim() == 4 else 0
            if seen > shown:
                raise LegacyFormatError(
                    f"Layers must hold every token, got layer {index}, which has dropped {seen - shown} of {seen}, "
                    "which tuples cannot express: use state() and load_state()."
                )
            # transformers' static layers have zeros behind their tokens.
            pairs.append((keys[:, :, :seen], values[:, :, :seen]))
        return tuple(pairs)
