"""The part of a cache that code for transformers 4 calls: tuples, subscripts, lists of states, and old names."""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast, overload

from torch import Tensor

from kvlayers.caches.layer_list import LayerList
from kvlayers.caches.nested_tuples import LegacyStates, StatePair, copied_states, pairs_of, with_window
from kvlayers.errors import LayerIndexError, LegacyFormatError, OptionError
from kvlayers.layers import LayerOperations
from kvlayers.upstream import compat
from kvlayers.upstream.deprecation import warn_of_old_use


class StateList(Sequence[Tensor | None]):
    """The keys, or the values, of all layers, as the list that caches of transformers 4 had.

    Args:
        layers: the layers of a cache.
        side: "keys" or "values".
    """

    def __init__(self, layers: Sequence[LayerOperations], side: str) -> None:
        self._layers: list[Any] = list(layers)
        self._side = side

    @overload
    def __getitem__(self, index: int) -> Tensor | None: ...
    @overload
    def __getitem__(self, index: slice) -> list[Tensor | None]: ...
    def __getitem__(self, index: int | slice) -> list[Tensor | None] | Tensor | None:
        if isinstance(index, slice):
            return [getattr(layer, self._side) for layer in self._layers[index]]
        states: Tensor | None = getattr(self._at(index), self._side)
        return states

    def __setitem__(self, index: int, states: Tensor) -> None:
        """Replace the states of layer `index` by those of as many tokens, `[batch, kv_heads, held, head_dim]`."""
        setattr(self._at(index), self._side, states)

    def assign(self, states: object) -> None:
        """Replace the states of all layers.

        Args:
            states: a list with the states of each layer.

        Raises:
            LegacyFormatError: it is not a list, or has another length; nothing is changed.
        """
        if not isinstance(states, Sequence) or len(states) != len(self):
            seen = f"{len(states)} entries" if isinstance(states, Sequence) else f"a {type(states).__name__}"
            raise LegacyFormatError(
                f"expected a list of the {self._side} of {len(self)} layers, but saw {seen}: pass the {self._side} of "
                "every layer, or take in new states by update()."
            )
        for index, of_layer in enumerate(states):
            self[index] = of_layer

    def _at(self, index: int) -> Any:
        if not -len(self._layers) <= index < len(self._layers):
            raise LayerIndexError(
                f"expected a layer index below {len(self._layers)}, but saw {index}: the cache has no such layer."
            )
        return self._layers[index]

    def __len__(self) -> int:
        return len(self._layers)


class LegacySurface(LayerList):
    """The part of a cache's interface that code written for transformers 4 calls."""

    @abstractmethod
    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens that a layer has seen."""

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """The most tokens that a layer, or the whole cache, can hold; -1 if there is no maximum.

        Under `install(legacy_names=True)` it is `None` instead of -1, as code for transformers 4 expects.
        """
        return self.most_tokens(layer_idx)

    def __getitem__(self, layer_idx: int) -> StatePair:
        """Keys and values that a layer holds, each `[batch, kv_heads, held, head_dim]`, `None` before the first."""
        layer_idx = self.check_layer(layer_idx)
        layer: Any = self.adapted_layers()[layer_idx]
        return layer.keys, layer.values

    def __iter__(self) -> Iterator[StatePair]:
        """A pair of keys and values for each layer."""
        layers: Sequence[Any] = self.adapted_layers()
        return (with_window((layer.keys, layer.values), layer) for layer in layers)

    @property
    def key_cache(self) -> StateList:
        """The keys of each layer, as a list."""
        return StateList(self.adapted_layers(), "keys")

    @key_cache.setter
    def key_cache(self, states: object) -> None:
        self.key_cache.assign(states)

    @property
    def value_cache(self) -> StateList:
        """The values of each layer, as a list."""
        return StateList(self.adapted_layers(), "values")

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
        return most - new_seq_length if most >= 0 and seen + new_seq_length > most else seen

    def to_legacy_cache(self) -> LegacyStates:
        """Copies of the states as nested tuples, `((keys, values), ...)`.

        Raises:
            LegacyFormatError: a layer has dropped tokens or has other states, which tuples cannot express.
        """
        return self.as_tuples(copied_states)

    def as_tuples(self, states_of: Callable[[Any], StatePair]) -> LegacyStates:
        """As `to_legacy_cache`, with the keys and values that `states_of` returns for a layer."""
        return pairs_of(self.adapted_layers(), states_of)


def crop_argument(tokens_to_remove: int | None, max_length: int | None) -> int:
    """The argument of `crop`, by its name of today or the one before.

    Raises:
        OptionError: both or neither is given.
    """
    if (tokens_to_remove is None) == (max_length is None):
        raise OptionError(
            f"expected crop to be given one number, but saw tokens_to_remove={tokens_to_remove!r} and "
            f"max_length={max_length!r}: pass crop(length), or crop(-count)."
        )
    if max_length is None:
        return cast("int", tokens_to_remove)
    warn_of_old_use("crop(max_length=...)", f"write crop({max_length})")
    return max_length
