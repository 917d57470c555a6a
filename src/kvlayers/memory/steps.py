"""Steps by which a cache takes less memory in place: tokens in fewer bits, then states on the host or on disk."""

import functools
import logging
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import torch

from kvlayers.core.buffer import TokenBuffer
from kvlayers.core.cache_layer import CacheLayer, beside_attention, rows_of
from kvlayers.core.dense_store import DenseStore, may_share
from kvlayers.core.token_layer import TokenLayer
from kvlayers.core.token_store import TokenStore
from kvlayers.errors import CapacityError, OptionError, StateMismatchError, UnsupportedLayerError
from kvlayers.offload.buffers import HostBuffer, StagedBuffer
from kvlayers.offload.offloaded_layer import OffloadedLayer
from kvlayers.offload.offloading import Offloading
from kvlayers.quantized.checks import block_of
from kvlayers.quantized.quantization import DEFAULT_SINK_TOKENS, Quantization
from kvlayers.quantized.quantized_store import QuantizedStore
from kvlayers.utils import late

logger = logging.getLogger(__name__)

BITS = {"int8": 8, "int4": 4}
"""Bits that tokens are rounded to by each step that rounds them."""

LADDER = ("int8", "int4", "offloaded")
"""The steps of a cache that was not told which it may take, in order."""


def give_way(cache: Any, ladder: Sequence[str] | None = None) -> str | None:
    """See `Cache.give_way`."""
    return next(
        # A set, as each cache of a pair takes the step.
        (
            step
            for step in (LADDER if ladder is None else ladder)
            if True in {_takes(part, step) for part in cache.parts()}
        ),
        None,
    )


def _takes(part: Any, step: str) -> bool:
    """Whether a cache could take a step, which it then has."""
    if part.budget is not None:
        if step not in part.budget.ladder:
            return False
        # There was no memory for as many as its bytes allow.
        part.budget.most_kept = 0
    return _round(part, BITS[step])[0] if step in BITS else place_elsewhere(part)


def place_elsewhere(part: Any, devices: Iterable[torch.device] = ()) -> bool:
    """Hold the states of a cache on the host, if that frees memory of a device. Returns whether it does.

    Args:
        part: the cache.
        devices: those of states that it is about to take in.
    """
    held = (layer.device for layer in part.adapted_layers() if layer.traits.attends)
    # Elsewhere, states would take memory of the device that computes all the same.
    if part.offloading or not any(map(Offloading().prefetcher().offloads, (*held, *devices))):
        return False
    try:
        _place(part, Offloading())
    except UnsupportedLayerError:
        return False
    return True


# Fewer bits


def pack(cache: Any, nbits: int = 4) -> None:
    """See `Cache.pack`."""
    Quantization(nbits=nbits)
    found = [_round(part, nbits) for part in cache.parts()]
    stay = [kind for _, kinds in found for kind in kinds]
    if stay and not any(changed for changed, _ in found):
        raise UnsupportedLayerError(
            f"`cache` must have layers whose tokens can be rounded, got {', '.join(stay)}: make the cache with "
            "cache_implementation='int4', or fill a DynamicCache under torch.no_grad()."
        )


def _round(part: Any, nbits: int) -> tuple[bool, list[str]]:
    """Hold the tokens of each layer in `nbits` bits at most, all but the residual.

    Returns:
        Whether any layer has changed, and the kinds of the layers that stay as they are because they must.
    """
    set_rows_apart(part)
    changed, stay = False, dict[str, None]()
    for layer in part.adapted_layers():
        for holder in holders(layer):
            before = settings_of(holder.store)
            exchange_store(holder, functools.partial(rounded, nbits=nbits, window=holder.is_sliding))
            changed |= settings_of(holder.store) != before
            if not isinstance(holder.store, QuantizedStore) or max(holder.store.bits or (0,)) > nbits:
                stay[type(holder.unwrapped).__name__] = None
        if layer.traits.attends and not holders(layer):
            stay[type(layer.parts[0].unwrapped.original).__name__] = None
    if (make_layer := part.layer_class_to_replicate) is not None:
        part.layer_class_to_replicate = functools.partial(_rounded_layer, make_layer, nbits)
        changed |= not part.layers
    if stay:
        logger.warning(
            "layers of these kinds stay as they are, as their tokens cannot be rounded: %s.", ", ".join(stay)
        )
    return changed, list(stay)


def is_followed(store: TokenStore) -> bool:
    """Whether autograd follows the states of a store, which must not be rounded then."""
    return any(states.requires_grad for states in store.held_tensors())


def settings_of(store: TokenStore) -> tuple[Any, ...]:
    """What tells whether the tokens of a store are rounded, and how."""
    return (store.quantization, store.kept) if isinstance(store, QuantizedStore) else ()


def holders(layer: CacheLayer) -> list[Any]:
    """The layers of tokens of each row, if they keep nothing beside their stores that depends on how these hold them,
    and the stores may be exchanged."""
    return [
        row
        for row in cast("list[Any]", layer.parts[0].separate_rows)
        if isinstance(row.unwrapped, TokenLayer)
        and not row.unwrapped.beside
        and (isinstance(row.store, QuantizedStore) or may_share(row.store))
    ]


def exchange_store(holder: Any, make: Callable[[TokenStore], TokenStore]) -> None:
    """Hold the tokens of a layer in the store that `make` returns for the present one, on the device that computes."""
    if isinstance(holder, OffloadedLayer):
        holder.exchange_store(make)
    else:
        holder.store = make(holder.store)


def is_shared(store: TokenStore) -> bool:
    """Whether other stores, or several sequences, read memory that a store reads."""
    parts = (store.residual, store.blocks) if isinstance(store, QuantizedStore) else (cast("DenseStore", store),)
    return any(part is not None and part.is_shared for part in parts)


def on_its_own(store: TokenStore) -> TokenStore:
    """A store of the same tokens that shares no memory, if it takes fewer bytes; the same store otherwise."""
    own = store.fork()
    own.compact()
    return own if own.nbytes < store.nbytes else store


def rounded(store: TokenStore, nbits: int, window: bool = False, kept: int = 0) -> TokenStore:
    """A store of the same tokens, in `nbits` bits at most; the same store if that is impossible.

    Args:
        store: how they are held now, which is not used any more.
        nbits: bits of a number.
        window: whether oldest tokens go, so that none can stay as a sink.
        kept: newest tokens that stay in full precision, the residual at least.
    """
    packed: Any = store
    try:
        if not isinstance(store, QuantizedStore):
            if not may_share(store) or is_followed(store):
                return store
            packed = QuantizedStore.over(store, quantization_of(store, nbits, window))
        if max(packed.bits) > nbits:
            quantization, forms = packed.quantization.narrowed(nbits), packed.forms
            if forms is not None and block_of(quantization, *forms)[0] != packed.block_tokens:
                return store
            packed.repack(quantization)
    except (OptionError, StateMismatchError):
        # Of a backend without such bits, or a dtype that cannot be coded.
        return store
    packed.keep(max(kept, packed.quantization.residual_length))
    return cast("TokenStore", packed)


def quantization_of(store: TokenStore, nbits: int, window: bool) -> Quantization:
    """How the tokens of a store are coded, or would be, in `nbits` bits. No token of a window could stay as a sink."""
    return (
        store.quantization
        if isinstance(store, QuantizedStore)
        else Quantization(nbits=nbits, sink_tokens=0 if window else DEFAULT_SINK_TOKENS)
    )


def _rounded_layer(make_layer: Callable[[], Any], nbits: int) -> Any:
    layer = make_layer()
    for holder in holders(layer):
        exchange_store(holder, functools.partial(rounded, nbits=nbits))
    return layer


def set_rows_apart(part: Any) -> None:
    """Let each row be a layer of its own, where rows stand side by side in one tensor."""
    for index, layer in enumerate(part.adapted_layers()):
        attention = layer.parts[0]
        if attention.traits.attends and attention.traits.counts_rows and attention.separate_rows[0] is attention:
            rows = late.function("separate rows")(rows_of([attention]))
            part.layers[index] = beside_attention(layer, rows).original


# Another place


def offload(
    cache: Any, device: str = "cpu", directory: str | os.PathLike[str] | None = None, only_non_sliding: bool = True
) -> None:
    """See `Cache.offload`."""
    placement = Offloading(only_non_sliding, device, directory)
    for part in cache.parts():
        if part.offloading and part.offloading_options() != placement.options():
            raise OptionError(
                f"`cache` must hold its states on their device, got one that is offloaded to "
                f"{part.offloading_options()['offload_device']!r}: call onload() first."
            )
    for part in [part for part in cache.parts() if not part.offloading]:
        _place(part, placement)


def onload(cache: Any) -> None:
    """See `Cache.onload`."""
    for part in cache.parts():
        if part.offloading:
            part._place([_onloaded(layer).original for layer in part.adapted_layers()], None)


def _place(part: Any, placement: Offloading) -> None:
    """Hold the states of a cache elsewhere. If there is no memory for them, nothing has changed.

    Raises:
        CapacityError: there is no memory for them.
        UnsupportedLayerError: a layer cannot be offloaded.
    """
    set_rows_apart(part)
    part._place(part.layers, placement)
    try:
        for layer in part.adapted_layers():
            for row in layer.parts[0].separate_rows:
                if isinstance(row, OffloadedLayer):
                    row.prefetcher.write_back(row)
    except CapacityError:
        onload(part)
        raise


def _onloaded(layer: CacheLayer) -> CacheLayer:
    rows: Sequence[Any] = layer.parts[0].separate_rows
    if not any(isinstance(row, OffloadedLayer) for row in rows):
        return layer
    here = [_on_device(row) if isinstance(row, OffloadedLayer) else row for row in rows]
    return beside_attention(layer, here[0] if rows[0] is layer.parts[0] else late.function("separate rows")(here))


def _on_device(layer: OffloadedLayer) -> TokenLayer:
    """The wrapped layer, with its states on their device from now on."""
    layer.prefetcher.synchronize(layer)
    layer.prefetcher.discard(layer)
    layer.wrapped.store.swap_buffers(_as_device_buffer)
    return layer.wrapped


def _as_device_buffer(buffer: TokenBuffer, start: int, end: int) -> TokenBuffer:
    """A buffer of the same tokens in memory of the device that computes: the same one if it is there."""
    if not isinstance(buffer, HostBuffer | StagedBuffer):
        return buffer
    # Zeros, since a reservation shows its free slots.
    held = TokenBuffer.allocate(buffer.form, buffer.capacity, torch.zeros)
    with torch.no_grad():
        held.write(start, buffer.read(start, end - start))
    return held
