"""Bytes that a cache would hold: its own layers take in states on the meta device, which have shapes and no memory."""

import contextlib
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch

from kvlayers.core.buffer import LayerShape, StateForm, nbytes_of
from kvlayers.core.cache import Cache
from kvlayers.core.cache_layer import CacheLayer, adapted
from kvlayers.core.dense_store import MINIMUM_GROWTH
from kvlayers.core.token_layer import TokenLayer, planned_bits
from kvlayers.core.token_store import Fidelity, TokenStore, filled_nbytes, least_faithful, states_on_meta
from kvlayers.errors import KVLayersError, UnsupportedLayerError
from kvlayers.eviction.evicting_layer import SMALL_STEP, EvictingLayer
from kvlayers.eviction.flat_tokens import tables_nbytes
from kvlayers.kernels.attention.segment_kinds import DENSE_PIECE_TOKENS
from kvlayers.quantized.checks import block_of
from kvlayers.quantized.quantized_store import QuantizedStore
from kvlayers.upstream import compat
from kvlayers.utils.tensor_memory import storages_of

PERIOD = 2**19
"""From twice as many tokens on, bytes grow by the same amount for each `PERIOD` tokens: it is a whole number of blocks
and pages, and longer than windows. Longer contexts are not tried, because stores list their blocks."""

PERIOD_OF_RESERVATIONS = 2**12
"""As `PERIOD`, for caches that reserve room for each token and have shorter windows: they list every token."""

LONGEST_HEAD = 1.5
"""Tokens of the longest head, for which all tables have room, over those of an average head."""

SHORTEST_HEAD = 0.25
"""Tokens of the shortest head, over those of an average head. `HEAD_FLOOR` leaves it a fifth at least, and some head
often has no more. If all heads are alike, the plan is a few percent too high."""

UNUSED_BLOCKS = 0.25
"""Parts of a block that are not used for each head but the first. The number of tokens in full precision is chosen so
that they are few."""


class CacheBytes(NamedTuple):
    """Bytes of a cache.

    Attributes:
        resident: bytes that are always on the device.
        host: bytes that are kept on the host, with what the allocator of pinned memory rounds up to.
        staged: the most of the host's bytes that are on the device at once: those of the layer that is attended to, and
            of the next one, and the pages that layers with recall leave there.
    """

    resident: int = 0
    host: int = 0
    staged: int = 0

    @property
    def total(self) -> int:
        """The `nbytes` of the cache: each byte once, where it is kept."""
        return self.resident + self.host

    @property
    def device(self) -> int:
        """The most bytes that the device must have room for."""
        return self.resident + self.staged


def _together(costs: Iterable[CacheBytes]) -> CacheBytes:
    return CacheBytes(*map(sum, zip(*costs, strict=True)))


BytesByDevice = dict[torch.device | None, CacheBytes]
"""Bytes on each device, and of what travels to it; the device is `None` if all layers are on one."""


class CacheTrial:
    """Bytes, bits and fidelity of the caches that a factory makes, for any number of tokens.

    Args:
        make: makes a cache for a model from a length hint.
        shapes: shapes of the layers of the model's decoder.
        encoder_length: tokens of the encoder's output, if the model has an encoder.
        devices: device of each layer, empty if all are on one device.

    Raises:
        UnsupportedLayerError: the cache is of another package.
    """

    def __init__(
        self,
        make: Callable[[int], Any],
        shapes: Sequence[LayerShape],
        encoder_length: int | None,
        devices: Sequence[torch.device] = (),
    ) -> None:
        self._make, self._shapes = make, shapes
        listed: list[torch.device | None] = [*devices] or [None]
        # Layers that the model does not list, such as extra prediction layers, count for its last device.
        self._devices = listed + listed[-1:] * len(shapes)
        self._encoder_length = encoder_length or 0
        parts = [[*zip(layers, shapes, strict=False)] for layers in _parts(make(1), len(shapes))]
        self.fidelity: Fidelity = least_faithful(layer.fidelity for part in parts for layer, _ in part)
        """What the caches do to the states that the model attends to."""
        self.bits = min(planned_bits(layer, shape) for layer, shape in parts[0])
        """Bits of one number of a key or value, scales and zeros included, in the layers with the fewest."""
        self._alike = [_alike(part) for part in parts]
        attending = [layer.parts[0].unwrapped for layer, _ in parts[0]]
        # Those that reserved room for one token, as the length hint said.
        windows = [each.sliding_window or 0 for each in attending if each.reserved is not None and each.sized_for == 1]
        self._reserves = bool(windows)
        self._period = max(PERIOD_OF_RESERVATIONS, *windows) if windows else PERIOD
        self._tried = functools.cache(self._try)

    def nbytes(self, tokens: int) -> CacheBytes:
        """Bytes of a cache that is made for `tokens` tokens, after it took them in at once.

        Raises:
            UnsupportedLayerError: it is not known what a layer holds.
            CapacityError: a layer reserves a number of its own, which is smaller.
        """
        return _together(self.nbytes_by_device(tokens).values())

    def nbytes_by_device(self, tokens: int) -> BytesByDevice:
        """As `nbytes`, for each device by itself."""
        period = self._period
        if tokens < 2 * period:
            return self._tried(tokens)
        # A reservation grows by tokens, anything else by blocks or pages.
        near = period if self._reserves else period + tokens % period
        found, further = self._tried(near), self._tried(near + period)
        return {
            device: CacheBytes(
                *(
                    here + (there - here) * (tokens - near) // period
                    for here, there in zip(costs, further[device], strict=True)
                )
            )
            for device, costs in found.items()
        }

    def _try(self, tokens: int) -> BytesByDevice:
        found: dict[torch.device | None, list[CacheBytes]] = {}
        parts = _parts(self._make(tokens), len(self._shapes))
        for layers, alike, held in zip(parts, self._alike, (tokens, self._encoder_length), strict=False):
            costs = {index: layer_bytes(layers[index], self._shapes[index], held) for index in dict.fromkeys(alike)}
            for device in dict.fromkeys(self._devices[: len(alike)]):
                there = [costs[tried] for tried, place in zip(alike, self._devices, strict=False) if place == device]
                found.setdefault(device, []).append(_summed(there))
        return {device: _together(costs) for device, costs in found.items()}


def fidelity_of(cache: Any) -> Fidelity:
    """What a cache of kvlayers does to the states that the model attends to.

    Raises:
        UnsupportedLayerError: the class of a layer does not say.
    """
    return least_faithful(layer.fidelity for part in cache.parts() for layer in part.adapted_layers())


def _parts(cache: Any, count: int) -> list[list[CacheLayer]]:
    """The layers of the decoder, and those of cross-attention if there are any."""
    if not isinstance(cache, Cache):
        raise UnsupportedLayerError(
            f"A `{type(cache).__module__}.{type(cache).__name__}` is not a cache of kvlayers, whose bytes are known: "
            "leave it out of the names."
        )
    return [[adapted(layer) for layer in part.layers_for(count)] for part in cache.parts()]


def _alike(layers: Sequence[tuple[CacheLayer, LayerShape]]) -> list[int]:
    """For each layer the number of the first one that is made with the same arguments for states of the same shape."""
    first: dict[Any, int] = {}
    alike: list[int] = []
    for index, (layer, shape) in enumerate(layers):
        kind: Any = index
        # A layer of another package may not say how it is made.
        with contextlib.suppress(UnsupportedLayerError):
            kind = type(layer), layer.sized_for, repr(layer.describe()), shape
        alike.append(first.setdefault(kind, index))
    return alike


# Layers


class LayerBytes(NamedTuple):
    """The bytes that a layer holds, each counted once.

    Attributes:
        device: bytes that stay on the device.
        host: bytes that are kept on the host, and are on the device only while the layer is attended to.
        spare: further bytes that the allocator of the host's memory rounds up to, which stay on the host.
        copies: bytes of the host that are on the device too, between one token and the next.
    """

    device: int = 0
    host: int = 0
    spare: int = 0
    copies: int = 0


def layer_bytes(layer: Any, shape: LayerShape, tokens: int) -> LayerBytes:
    """Bytes of an empty layer after it took in states of this shape.

    Raises:
        UnsupportedLayerError: it is not known how much memory such a layer takes.
        CapacityError: the layer reserves room for fewer tokens.
        ConfigError: the layer attends, and the model's layer does not.
    """
    try:
        if len(layer.parts) > 1:
            attention, linear = (layer_bytes(part, shape, tokens) for part in layer.parts)
            return attention._replace(device=attention.device + linear.device)
        if layer.traits.counts_columns:
            return LayerBytes(_recurrent_nbytes(layer, shape, tokens))
        if layer.traits.is_upstream:
            return LayerBytes(_upstream_nbytes(layer, shape, tokens))
        states, beside = _states_and_beside(layer.unwrapped, shape, tokens)
        if layer.unwrapped is layer:
            return LayerBytes(sum(states) + beside)
        spare = sum(layer.prefetcher.memory.allocated_nbytes(nbytes) - nbytes for nbytes in states)
        return LayerBytes(
            beside,
            sum(states),
            spare,
            # The pages that a query chooses are brought to the device.
            0 if layer.wrapped.recall is None else layer.wrapped.copies_nbytes(shape, tokens),
        )
    except KVLayersError:
        raise
    # torch's error for code that reads the numbers of a meta tensor is one of these.
    except RuntimeError as error:
        raise UnsupportedLayerError(
            f"The memory of a `{type(layer).__name__}` cannot be planned, because it cannot take in states on the meta "
            f"device, which have no numbers ({error}): make the cache, run the model, and ask the cache for `nbytes`."
        ) from error


def _states_and_beside(layer: Any, shape: LayerShape, tokens: int) -> tuple[list[int], int]:
    """Bytes of each buffer of states, and bytes beside them, which stay on the device of an offloaded layer."""
    if isinstance(layer, EvictingLayer):
        return _evicting_nbytes(layer, shape, tokens)
    with torch.no_grad():
        layer.update(*states_on_meta(shape.forms(), tokens))
    holder = layer.store if isinstance(layer, TokenLayer) else layer
    states = list(storages_of(holder.held_tensors()).values())
    return states, layer.nbytes - sum(states)


def _recurrent_nbytes(layer: Any, shape: LayerShape, tokens: int) -> int:
    recurrent = shape.recurrent
    if recurrent is None or not recurrent.conv:
        return 0
    batch = shape.batch_size
    # A plan knows how many numbers a convolution keeps, and not how many of them are columns: all are channels here.
    layer.update_conv_state(torch.empty(batch, recurrent.conv, tokens, dtype=shape.dtype, device="meta"), 0, 1)
    if recurrent.recurrent:
        layer.update_recurrent_state(torch.empty(batch, recurrent.recurrent, dtype=torch.float32, device="meta"))
    return int(layer.nbytes)


def _upstream_nbytes(adapter: Any, shape: LayerShape, tokens: int) -> int:
    """Bytes of one of transformers' layers, without its counters."""
    if isinstance(adapter.layer, compat.DUMMY_LAYER):
        return 0
    if not isinstance(adapter.layer, (compat.INDEXED_LAYER, compat.STATIC_INDEXED_LAYER)):
        raise UnsupportedLayerError(
            f"The memory of transformers' `{type(adapter.layer).__name__}` cannot be planned: make the cache, run the "
            "model, and ask the cache for `nbytes`."
        )
    reserved = adapter.sized_for
    held = tokens if reserved is None else reserved
    return sum(nbytes_of(form, held) for form in shape.forms()) + shape.indexer_nbytes(held)


def _summed(layers: Sequence[LayerBytes]) -> CacheBytes:
    travelling = [layer.host for layer in layers if layer.host]
    # The first layer follows the last one, at the next token.
    following = [*travelling[1:], *travelling[:1]] if len(travelling) > 1 else [0] * len(travelling)
    staged = max((one + other for one, other in zip(travelling, following, strict=True)), default=0)
    return CacheBytes(
        resident=sum(layer.device for layer in layers),
        host=sum(layer.host + layer.spare for layer in layers),
        staged=staged + sum(layer.copies for layer in layers),
    )


# Layers that evict: which tokens they keep depends on the states, so only the budget is known.


def _evicting_nbytes(layer: EvictingLayer, shape: LayerShape, tokens: int) -> tuple[list[int], int]:
    """As `_states_and_beside`: kept tokens, and retained queries."""
    settings, forms = layer.options, shape.forms()
    held = min(tokens, settings.allowed(tokens))
    queries = nbytes_of(shape.query_form(), settings.retained_queries(tokens))
    if held < tokens and settings.heads_differ and forms[0].kv_heads > 1:
        return ([_ragged_nbytes(layer.store, forms, held)] if held else []), queries
    return filled_nbytes(layer.store, forms, held), queries


def _ragged_nbytes(tail: TokenStore, forms: tuple[StateForm, StateForm], tokens: int) -> int:
    """Bytes of a store of which each head holds its own number of tokens: an estimate.

    The bytes of tables, of blocks that are not full, and of the tokens that every head holds can only be guessed. They
    are a few percent of all.

    Args:
        tail: an empty store of the kind that holds the tokens of every head.
        forms: forms of the keys and of the values.
        tokens: tokens of an average head, at least 1.
    """
    tables = tables_nbytes(forms[0], round(LONGEST_HEAD * tokens), DENSE_PIECE_TOKENS)
    if not isinstance(tail, QuantizedStore):
        return tables + sum(nbytes_of(form, tokens + SMALL_STEP) for form in forms)
    quantization = tail.quantization
    size, block = block_of(quantization, *forms)
    # The tail holds up to a block more than the residual, whatever fills the blocks best.
    in_tail = quantization.sink_tokens + quantization.residual_length + size // 2
    in_tail = min(in_tail, round(SHORTEST_HEAD * tokens))
    # It has grown at least once, unless that is more than it ever holds.
    room = min(in_tail + MINIMUM_GROWTH, quantization.sink_tokens + quantization.residual_length + size)
    heads = forms[0].batch_size * forms[0].kv_heads
    blocks = heads * (tokens - in_tail) / size + UNUSED_BLOCKS * (heads - 1)
    return tables + sum(nbytes_of(form, room) for form in forms) + round(blocks) * block // heads
