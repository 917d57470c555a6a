"""The cache of models with an encoder: one part for self-attention, one for cross-attention."""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import transformers
from torch import Tensor
from typing_extensions import Self, override

from kvlayers.core import legacy_api
from kvlayers.core.cache import Cache
from kvlayers.core.cache_layer import CacheLayer, forwarded
from kvlayers.core.cache_operations import CacheState, check_is_state
from kvlayers.core.description import DescriptionContext
from kvlayers.core.dynamic_cache import DynamicCache
from kvlayers.core.named_caches import register_cache_class
from kvlayers.encoder_decoder.cross_attention import CrossAttentionFlags, Fingerprint, are_alike, fingerprint
from kvlayers.errors import BatchIndexError, LayerIndexError, LegacyFormatError, OptionError, StateMismatchError
from kvlayers.offload.transfers import Traffic, TrafficMeter
from kvlayers.utils.options import checks_options


@register_cache_class
class EncoderDecoderCache(Cache, transformers.EncoderDecoderCache):  # type: ignore[misc]
    """A pair of caches. Lengths, masks, crop and rollback refer to self-attention; batches and bytes refer to both.

    Cross-attention's states are computed once, from the output of one encoder pass. `reset()` forgets them, and so does
    a rollback to no tokens at all, since the next ones may belong to another output. Under `install()`, `generate()`
    refuses to go on with another output. A loop of your own must call `reset()` before it reads another one.

    Args:
        caches: the self-attention cache and the cross-attention cache; or one iterable that has, for each layer, keys
            and values of both, each `[batch, kv_heads, tokens, head_dim]` (4 tensors, or 6 with sliding windows).

    Raises:
        OptionError: neither two caches nor one iterable; or cross-attention would keep a window of its tokens.
        LegacyFormatError: the iterable is nested in another way.
        StateMismatchError: the caches hold tokens of different numbers of sequences.

    Example:
        >>> import kvlayers, transformers
        >>> config = transformers.BartConfig(decoder_layers=2)
        >>> kvlayers.EncoderDecoderCache(kvlayers.DynamicCache(config=config), kvlayers.DynamicCache())
        EncoderDecoderCache(self=DynamicCache(2 x DynamicLayer, 0 tokens, 0 B), cross=DynamicCache(0 tokens, 0 B))
    """

    is_pair = True
    self_attention_cache: Cache
    cross_attention_cache: Cache

    @checks_options
    def __init__(self, *caches: Any) -> None:
        if len(caches) == 1 and not isinstance(caches[0], transformers.Cache | transformers.PretrainedConfig):
            caches = _caches_of(caches[0])
        if len(caches) != 2 or not all(isinstance(cache, Cache) for cache in caches):
            raise OptionError(
                "An EncoderDecoderCache must be made of a self-attention and a cross-attention cache of kvlayers, got "
                f"{', '.join(f'{type(cache).__module__}.{type(cache).__name__}' for cache in caches) or 'nothing'}: "
                "pass two caches."
            )
        own, cross = caches
        if own.is_pair or cross.is_pair:
            raise OptionError("The two caches must not be pairs themselves, got a pair: pass its parts.")
        if any(cross.is_sliding):
            raise OptionError(
                "Cross-attention must keep all tokens of the encoder, got layers that keep a window: pass the "
                "for_cross_attention() of the self-attention cache."
            )
        if {id(layer) for layer in own.layers} & {id(layer) for layer in cross.layers} or own is cross:
            raise OptionError("The two caches must share nothing, got shared layers: make one for each part.")
        _check_sequences({part.batch_size for part in caches if _holds_tokens(part)})
        self.self_attention_cache, self.cross_attention_cache = own, cross
        self._read: Fingerprint | None = None

    def check_encoded(self, encoded: Tensor) -> None:
        """Check that cross-attention has read this output of the encoder, or has read nothing yet.

        Args:
            encoded: the output, `[batch, tokens, hidden]`. Its fingerprint is remembered until the next reset.

        Raises:
            StateMismatchError: cross-attention has the states of another output.
            CapacityError: it has no states yet, and too few tokens are reserved for them.
        """
        seen = fingerprint(encoded)
        for layer in self.cross_attention_cache.adapted_layers():
            if not layer.length:
                layer.make_room(encoded.shape[1])
            elif (layer.length, layer.batch_size) != (encoded.shape[1], encoded.shape[0]):
                raise StateMismatchError(
                    f"The encoder's output must be the one that cross-attention has read, of {layer.length} tokens for "
                    f"{layer.batch_size} sequences, got {encoded.shape[1]} for {encoded.shape[0]}: reset() the "
                    "cache before another input."
                )
            elif self._read is not None and not are_alike(self._read, seen):
                raise StateMismatchError(
                    "The encoder's output must be the one that cross-attention has read, got another one: reset() the "
                    "cache before another input."
                )
        self._read = seen

    @property
    def is_updated(self) -> CrossAttentionFlags:
        """For each layer, whether cross-attention has its states. Setting a flag to `False` forgets the states."""
        return CrossAttentionFlags(self.cross_attention_cache)

    @property
    def layers(self) -> list[Any]:  # type: ignore[override]
        """The layers of self-attention."""
        return self.self_attention_cache.layers

    # What is asked of one cache is asked of the one of self-attention.
    self_attention = forwarded("self_attention_cache")
    origins = forwarded("self_attention_cache")
    adapted_layers = forwarded("self_attention_cache")
    _layer_at = forwarded("self_attention_cache")
    layers_for = forwarded("self_attention_cache")
    for_cross_attention = forwarded("self_attention_cache")
    offloading_options = forwarded("self_attention_cache")
    is_compileable = forwarded("self_attention_cache")
    get_seq_length = forwarded("self_attention_cache")
    _seen_by = forwarded("self_attention_cache")

    @override
    def parts(self) -> tuple[Cache, Cache]:
        return self.self_attention_cache, self.cross_attention_cache

    @override
    def describe(self) -> dict[str, Any]:
        return {}

    @classmethod
    @override
    def from_description(cls, options: Mapping[str, Any], layers: list[Any], context: DescriptionContext) -> Self:
        """A pair of two empty caches, which stand in the place of layers. See `Cache.from_description`."""
        return cls(*layers)

    @override
    def update(
        self,
        key_states: Tensor,
        value_states: Tensor,
        layer_idx: int,
        *args: object,
        **kwargs: object,
    ) -> tuple[Tensor, Tensor]:
        """Refuse: models with cross-attention update one of the two caches.

        Raises:
            OptionError: always; nothing is changed.
        """
        raise OptionError(
            "A model must update the two caches of a pair, as one with cross-attention does, got an update of the "
            "pair: pass the self_attention_cache to a model without cross-attention."
        )

    @override
    def early_initialization(
        self,
        batch_size: int,
        num_heads: int | Sequence[int],
        head_dim: int | Sequence[int],
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        """Reserve memory in both parts before the first forward pass, in the layers that can.

        Args: as for `Cache.early_initialization`.
        """
        # A part that makes its layers when they are needed has no layer yet that could reserve.
        parts = [part for part in self.parts() if part.layers]
        counts = {len(part.layers) for part in parts}
        if len(counts) > 1 and not (isinstance(num_heads, int) and isinstance(head_dim, int)):
            raise LayerIndexError(
                f"Self-attention must have as many layers as cross-attention, got {sorted(counts)}: pass one "
                "number for all, or reserve each part on its own."
            )
        for part in parts:
            part.early_initialization(batch_size, num_heads, head_dim, dtype, device)

    @override
    def _forget_pass(self) -> None:
        for part in self.parts():
            part._forget_pass()

    @property
    @override
    def offloading(self) -> bool:
        """Whether either part holds states on the host."""
        return any(part.offloading for part in self.parts())

    @property
    def traffic(self) -> TrafficMeter | None:
        """Bytes that both parts together have moved, `None` if nothing is offloaded. Ask a part for single steps."""
        meters = [part.traffic for part in self.parts() if part.traffic is not None]
        if not meters:
            return None
        both = TrafficMeter()
        both.total = sum((meter.total for meter in meters), Traffic())
        return both

    @override
    def _forget_what_is_gone(self, removed: int) -> None:
        super()._forget_what_is_gone(removed)
        if removed and not self.most_seen():
            self.cross_attention_cache.reset()
            self._read = None

    @property
    def batch_size(self) -> int:
        """Sequences side by side, -1 before the first states of either part."""
        return next((part.batch_size for part in self.parts() if part.batch_size >= 0), -1)

    def check_select(self, batch_size: int) -> None:
        """Raise what selecting `batch_size` sequences would raise, whatever the indices: in both parts.

        Raises:
            BatchIndexError: the parts have different batch sizes.
        """
        sizes = [part.batch_size for part in self.parts() if part.batch_size >= 0]
        if len(set(sizes)) > 1:
            raise BatchIndexError(
                f"Both parts must have one batch size, got {sizes[0]} and {sizes[1]}: repeat the smaller."
            )
        for part in self.parts():
            part.check_select(batch_size)

    @override
    def _select(self, rows: Tensor, change: Callable[[CacheLayer], None]) -> None:
        self.check_select(rows.shape[0])
        for part in self.parts():
            if part.batch_size >= 0:
                part._select(rows, change)
        self._read = None

    def reset(self) -> None:
        """Forget all tokens of both parts."""
        for part in self.parts():
            part.reset()
        self._read = None

    def _fork(self) -> Self:
        twin = copy.copy(self)
        twin.self_attention_cache, twin.cross_attention_cache = (copy.deepcopy(part) for part in self.parts())
        return twin

    @override
    def extract(self, row: int) -> Self:
        twin = copy.copy(self)
        twin.self_attention_cache, twin.cross_attention_cache = (part.extract(row) for part in self.parts())
        twin._read = None
        return twin

    def state(self) -> CacheState:
        """Copies of the live tensors of both parts: self-attention, then cross-attention."""
        return CacheState(self.kind, parts=tuple(part.state() for part in self.parts()))

    def load_state(self, state: CacheState) -> None:
        """Become what the cache was when `state` was taken.

        Raises:
            StateMismatchError: the state is of a cache with other parts; nothing is changed.
        """
        check_is_state(state)
        if state.kind != self.kind or len(state.parts) != 2:
            raise StateMismatchError(
                f"`state` must be that of an {self.kind}, got that of a {state.kind}: load it into a cache "
                "of the kind that it was taken from."
            )
        pairs = list(zip(self.parts(), state.parts, strict=True))
        # Both states are tried on copies first: if one part refuses its state, the other must not have changed.
        _check_sequences({batch for part, part_state in pairs if (batch := _batch_size_after(part, part_state)) >= 0})
        for part, part_state in pairs:
            part.load_state(part_state)
        self._read = None

    @property
    def is_initialized(self) -> bool:
        """Whether both parts know the form of their states."""
        return all(part.is_initialized for part in self.parts())

    def __getitem__(self, layer_idx: int) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        """Keys and values of self-attention, then keys and values of cross-attention, that a layer holds."""
        own, cross = self.parts()
        pair, index = own[layer_idx], layer_idx % len(own.layers)
        # Cross-attention may make its layers when they are needed, so that it has fewer.
        return (*pair, *(cross[index] if index < len(cross.layers) else (None, None)))

    def __iter__(self) -> Iterator[tuple[Tensor | None, ...]]:  # type: ignore[override]
        """For each layer, the four tensors of `cache[layer]`."""
        return (legacy_api.with_window(self[index], layer) for index, layer in enumerate(self.adapted_layers()))

    @override
    def as_tuples(self, states_of: Callable[[Any], legacy_api.StatePair]) -> legacy_api.LegacyStates:
        """For each layer, `(keys, values, cross_keys, cross_values)`; only `(keys, values)` without cross-attention."""
        own, cross = (part.as_tuples(states_of) for part in self.parts())
        if not cross:
            return own
        if len(own) != len(cross):
            raise LegacyFormatError(
                f"Self-attention must have as many layers as cross-attention to be tuples, got {len(own)} and "
                f"{len(cross)}: take the tuples of each part."
            )
        return tuple((*own_pair, *cross_pair) for own_pair, cross_pair in zip(own, cross, strict=True))

    @classmethod
    def from_legacy_cache(cls, past_key_values: object | None = None) -> Self:
        """A cache that holds copies of `((keys, values, cross_keys, cross_values), ...)`; an empty cache for `None`.

        Raises:
            LegacyFormatError: the tuples are nested in another way.
        """
        return cls(() if past_key_values is None else legacy_api.check_tuples(past_key_values, width=(2, 4)))

    def check_dynamic_cache(self, method: str) -> None:
        """Do nothing: every operation works for every kind of cache. Kept for code that asks first."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}(self={self.self_attention_cache}, cross={self.cross_attention_cache})"


def _holds_tokens(cache: Cache) -> bool:
    return any(layer.length for layer in cache.adapted_layers())


def _check_sequences(batch_sizes: set[int]) -> None:
    if len(batch_sizes) > 1:
        raise StateMismatchError(
            "Self-attention must have as many sequences as cross-attention, got "
            f"{' and '.join(map(str, sorted(batch_sizes)))}: repeat or select the sequences of one part."
        )


def _batch_size_after(cache: Cache, state: CacheState) -> int:
    """Batch size of a cache after `load_state`, -1 if it would hold no tokens. Raises what `load_state` would raise."""
    twin = cache.fork()
    twin.load_state(state)
    return twin.batch_size if _holds_tokens(twin) else -1


def _caches_of(states: Any) -> tuple[DynamicCache, DynamicCache]:
    layers = legacy_api.check_nesting(states, width=(2, 4, 6))
    for index, layer in enumerate(layers):
        if len(layer) != len(layers[0]):
            raise LegacyFormatError(
                f"Each layer must have as many tensors as the first, got {len(layers[0])} there and "
                f"{len(layer)} at layer {index}: give all layers cross-attention, or none."
            )
    own = [type(layer)(layer[: max(len(layer) // 2, 2)]) for layer in layers]
    return DynamicCache(own), DynamicCache([layer[len(layer) // 2 :] for layer in layers if len(layer) > 2])
