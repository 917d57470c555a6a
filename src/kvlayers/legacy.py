"""The nested tuples that models took and returned before there were caches."""

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, overload

from torch import Tensor

from .errors import LayerIndexError, LegacyFormatError

if TYPE_CHECKING:
    from .layers import CacheLayer, TransformersLayer

LegacyStates = tuple[tuple[Tensor, ...], ...]
"""`((keys, values), ...)`, or with cross-attention `((keys, values, cross_keys, cross_values), ...)`, one per layer."""


def to_pairs(layers: "Iterable[CacheLayer | TransformersLayer]") -> LegacyStates:
    """Keys and values of each layer.

    Raises:
        LegacyFormatError: a layer has dropped tokens or has states besides keys and values.
    """
    pairs = []
    for index, layer in enumerate(layers):
        keys, values = layer.keys, layer.values
        if layer.is_recurrent:
            raise LegacyFormatError(
                f"expected layers of keys and values alone, but layer {index} has a recurrent state: use state() and "
                "load_state(), which keep all of it."
            )
        if keys is None or values is None:
            continue
        seen = layer.length or 0
        if seen > keys.shape[2]:
            raise LegacyFormatError(
                f"expected layers that hold every token, but layer {index} has dropped {seen - keys.shape[2]} of "
                f"{seen} and tuples cannot say so: use state() and load_state()."
            )
        pairs.append((keys, values))
    return tuple(pairs)


def check_tuples(states: object, width: Sequence[int]) -> LegacyStates:
    """`states` as a tuple of tuples of tensors.

    Args:
        states: what the user passed.
        width: how many tensors a layer may have.

    Raises:
        LegacyFormatError: it is nested in another way.
    """
    layers = check_nesting(states, width)
    for index, layer in enumerate(layers):
        for tensor in layer:
            if not isinstance(tensor, Tensor) or tensor.dim() != 4:
                raise LegacyFormatError(
                    f"expected tensors [batch, kv_heads, tokens, head_dim] at layer {index}, but saw "
                    f"{tuple(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__}."
                )
    return layers


def check_nesting(states: object, width: Sequence[int]) -> tuple[tuple[Any, ...], ...]:
    """`states` as a tuple with a tuple of some width for each layer, whatever is in them.

    Raises:
        LegacyFormatError: it is nested in another way.
    """
    expected = f"a tuple with a tuple of {' or '.join(map(str, width))} tensors for each layer"
    if isinstance(states, Tensor) or not isinstance(states, Iterable):
        raise LegacyFormatError(f"expected {expected}, but saw a {type(states).__name__}.")
    layers = tuple(states)
    for index, layer in enumerate(layers):
        if not isinstance(layer, tuple | list) or len(layer) not in width:
            seen = f"{len(layer)} entries" if isinstance(layer, tuple | list) else f"a {type(layer).__name__}"
            raise LegacyFormatError(
                f"expected {expected}, but saw {seen} at layer {index}: nest the tensors one tuple per layer."
            )
    return tuple(tuple(layer) for layer in layers)


class StateList(Sequence[Tensor | None]):
    """The keys, or the values, of all layers, as the list that caches of transformers 4 had.

    Args:
        layers: the layers of a cache.
        side: "keys" or "values".
    """

    def __init__(self, layers: list[Any], side: str) -> None:
        self._layers = layers
        self._side = side

    @overload
    def __getitem__(self, index: int) -> Tensor | None: ...
    @overload
    def __getitem__(self, index: slice) -> list[Tensor | None]: ...
    def __getitem__(self, index: int | slice) -> list[Tensor | None] | Tensor | None:
        if isinstance(index, slice):
            return [getattr(layer, self._side) for layer in self._layers[index]]
        self._check(index)
        states: Tensor | None = getattr(self._layers[index], self._side)
        return states

    def __setitem__(self, index: int, states: Tensor) -> None:
        """Put `states` in place of what layer `index` holds: as many tokens, `[batch, kv_heads, held, head_dim]`."""
        self._check(index)
        setattr(self._layers[index], self._side, states)

    def _check(self, index: int) -> None:
        if not -len(self._layers) <= index < len(self._layers):
            raise LayerIndexError(
                f"expected a layer index below {len(self._layers)}, but saw {index}: the cache has no such layer."
            )

    def __len__(self) -> int:
        return len(self._layers)

    def __iter__(self) -> Iterator[Tensor | None]:
        return (getattr(layer, self._side) for layer in self._layers)
