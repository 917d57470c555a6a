"""The cache of models with an encoder: one part for self-attention, one for cross-attention."""

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import transformers
from torch import Tensor
from typing_extensions import Self

from . import legacy
from .cache import Cache
from .dynamic_cache import DynamicCache
from .errors import BatchIndexError, LegacyFormatError, OptionError, StateMismatchError
from .operations import CacheState, check_is_state
from .options import checks_options


class EncoderDecoderCache(Cache, transformers.EncoderDecoderCache):  # type: ignore[misc]
    """A pair of caches. Lengths, masks, crop and rollback speak of self-attention; batches and bytes of both.

    Args:
        caches: the self-attention cache and the cross-attention cache; or one iterable with, for each layer, keys and
            values of both, each `[batch, kv_heads, tokens, head_dim]` (4 tensors, or 6 with sliding windows).

    Raises:
        OptionError: other than two caches, or one iterable.
        LegacyFormatError: an iterable that is nested in another way.
    """

    @checks_options
    def __init__(self, *caches: Any) -> None:
        if len(caches) == 1:
            caches = _caches_of(caches[0])
        if len(caches) != 2 or not all(isinstance(cache, Cache) for cache in caches):
            raise OptionError(
                "expected a self-attention cache and a cross-attention cache, both of kvlayers, but saw "
                f"{', '.join(f'{type(cache).__module__}.{type(cache).__name__}' for cache in caches) or 'nothing'}: "
                "pass two caches."
            )
        own, cross = caches
        if isinstance(own, EncoderDecoderCache) or isinstance(cross, EncoderDecoderCache):
            raise OptionError("expected two caches that are no pairs themselves, but saw a pair: pass its parts.")
        if {id(layer) for layer in own.layers} & {id(layer) for layer in cross.layers} or own is cross:
            raise OptionError("expected two caches that share nothing, but saw shared layers: make one for each part.")
        self.self_attention_cache, self.cross_attention_cache = own, cross
        self.is_updated = {index: bool(cross.get_seq_length(index) > 0) for index in range(len(cross.layers))}

    @property
    def layers(self) -> list[Any]:  # type: ignore[override]
        """The layers of self-attention."""
        layers: list[Any] = self.self_attention_cache.layers
        return layers

    def _parts(self) -> tuple[Any, Any]:
        return self.self_attention_cache, self.cross_attention_cache

    def update(
        self,
        key_states: Tensor,
        value_states: Tensor,
        layer_idx: int,
        cache_kwargs: Mapping[str, object] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Take in states of self-attention; cross-attention is updated through `cross_attention_cache`."""
        attended: tuple[Tensor, Tensor] = self.self_attention_cache.update(key_states, value_states, layer_idx)
        return attended

    def early_initialization(
        self, batch_size: int, num_heads: Any, head_dim: Any, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        """Reserve what can be reserved in both parts before the first forward pass."""
        for part in self._parts():
            part.early_initialization(batch_size, num_heads, head_dim, dtype, device)

    @property
    def batch_size(self) -> int:
        """Sequences side by side, -1 before the first states of either part."""
        return next((part.batch_size for part in self._parts() if part.batch_size >= 0), -1)

    def check_select(self, batch_size: int) -> None:
        """Raise what selecting `batch_size` sequences would raise, whatever the indices: in both parts.

        Raises:
            BatchIndexError: the parts have different batch sizes.
        """
        sizes = [part.batch_size for part in self._parts() if part.batch_size >= 0]
        if len(set(sizes)) > 1:
            raise BatchIndexError(
                f"expected both parts to have one batch size, but saw {sizes[0]} and {sizes[1]}: repeat the smaller."
            )
        for part in self._parts():
            part.check_select(batch_size)

    def _select(self, rows: Tensor) -> None:
        self.check_select(rows.shape[0])
        for part in self._parts():
            part.batch_select_indices(rows)

    def reset(self) -> None:
        """Forget all tokens of both parts."""
        for part in self._parts():
            part.reset()
        self.is_updated = dict.fromkeys(self.is_updated, False)

    def fork(self) -> Self:
        """An independent continuation of both parts."""
        twin = copy.copy(self)
        twin.self_attention_cache, twin.cross_attention_cache = (copy.deepcopy(part) for part in self._parts())
        twin.is_updated = dict(self.is_updated)
        return twin

    @property
    def nbytes(self) -> int:
        """Bytes of memory held by both parts, spare room included."""
        return sum(part.nbytes for part in self._parts())

    def state(self) -> CacheState:
        """Copies of the live tensors of both parts: self-attention, then cross-attention."""
        return CacheState(type(self).__name__, parts=tuple(part.state() for part in self._parts()))

    def load_state(self, state: CacheState) -> None:
        """Become what the cache was when `state` was taken.

        Raises:
            StateMismatchError: the state is of a cache with other parts; nothing is changed.
        """
        check_is_state(state)
        if state.kind != type(self).__name__ or len(state.parts) != 2:
            raise StateMismatchError(
                f"expected the state of an {type(self).__name__}, but saw that of a {state.kind}: load it into a cache "
                "of the kind that it was taken from."
            )
        twin = self.fork()
        for part, part_state in zip(twin._parts(), state.parts, strict=True):
            part.load_state(part_state)
        self.self_attention_cache, self.cross_attention_cache = twin._parts()
        cross = self.cross_attention_cache
        self.is_updated = {index: cross.get_seq_length(index) > 0 for index in range(len(cross.layers))}

    @property
    def is_initialized(self) -> bool:
        """Whether both parts know what their states look like."""
        return all(part.is_initialized for part in self._parts())

    @property
    def is_compileable(self) -> bool:
        """Whether generate() may compile the forward pass around self-attention's cache."""
        return bool(self.self_attention_cache.is_compileable)

    def __getitem__(self, layer_idx: int) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        """Keys and values of self-attention, then keys and values of cross-attention, that a layer holds."""
        return self._four(self.check_layer(layer_idx))

    def _four(self, layer_idx: int) -> tuple[Tensor | None, ...]:
        cross = self.cross_attention_cache
        crossed: legacy.StatePair = cross[layer_idx] if layer_idx < len(cross.layers) else (None, None)
        return (*self.self_attention_cache[layer_idx], *crossed)

    def __iter__(self) -> Iterator[tuple[Tensor | None, ...]]:  # type: ignore[override]
        """For each layer, the four tensors of `cache[layer]`."""
        return (self._four(layer_idx) for layer_idx in range(len(self.layers)))

    def to_legacy_cache(self) -> legacy.LegacyStates:
        """The states as `((keys, values, cross_keys, cross_values), ...)`; the pairs alone before there is an encoder.

        Raises:
            LegacyFormatError: a layer has dropped tokens, which tuples cannot say.
        """
        own, cross = (part.to_legacy_cache() for part in self._parts())
        if not cross:
            return own  # type: ignore[no-any-return]
        if len(own) != len(cross):
            raise LegacyFormatError(
                f"expected as many layers of self-attention as of cross-attention, but saw {len(own)} and {len(cross)}."
            )
        return tuple((*mine, *theirs) for mine, theirs in zip(own, cross, strict=True))

    @classmethod
    def from_legacy_cache(cls, past_key_values: object | None = None) -> Self:
        """A cache that holds copies of `((keys, values, cross_keys, cross_values), ...)`; an empty one for `None`.

        Raises:
            LegacyFormatError: the tuples are nested in another way.
        """
        return cls(() if past_key_values is None else legacy.check_tuples(past_key_values, width=(2, 4)))

    def check_dynamic_cache(self, method: str) -> None:
        """Nothing to refuse: every operation is defined for every kind. Kept for code that asks first."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}(self={self.self_attention_cache}, cross={self.cross_attention_cache})"


def _caches_of(states: Any) -> tuple[DynamicCache, DynamicCache]:
    own: list[Any] = []
    cross: list[Any] = []
    for layer in legacy.check_nesting(states, width=(2, 4, 6)):
        half = 2 if len(layer) == 2 else len(layer) // 2
        own.append(layer[:half])
        if layer[half:]:
            cross.append(layer[half:])
    return DynamicCache(own), DynamicCache(cross)
