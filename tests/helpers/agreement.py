"""How the tests compare a layer with the oracle, and what memory they find in it."""

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor

from kvlayers import CacheLayer, OffloadedLayer
from kvlayers.errors import RollbackError
from kvlayers.eviction.eviction_progress import EvictionProgress
from kvlayers.kernels.attention.packed_tensor import Version
from kvlayers.layers import LayerState
from kvlayers.rope.rotary import Rotary
from oracle import Oracle, states


def tensors_in(thing: Any) -> list[Tensor]:
    """Every tensor that an object of kvlayers reaches, by walking all of its attributes.

    How keys are rotated is left out: a handful of numbers, which all layers of a model share. So are the number by
    which compiled code knows a store, and how many tokens of each sequence were evicted, which the host counts.
    """
    found, seen, waiting = [], {id(thing)}, [thing]
    while waiting:
        thing = waiting.pop()
        if isinstance(thing, Tensor):
            found.append(thing)
            continue
        for part in _parts(thing):
            # Most attributes are numbers, and this walks through millions of them.
            if type(part) not in PLAIN and id(part) not in seen:
                seen.add(id(part))
                waiting.append(part)
    return found


PLAIN = (int, bool, float, str, type(None))


def _parts(thing: Any) -> Iterable[Any]:
    if isinstance(thing, dict):
        return thing.values()
    if isinstance(thing, list | tuple):
        return thing
    if isinstance(thing, Rotary | Version):
        return ()
    if isinstance(thing, EvictionProgress):
        return thing.shown
    if not type(thing).__module__.startswith(("kvlayers", "other_package")):
        return ()
    slots = [getattr(thing, name) for name in getattr(type(thing), "__slots__", ())]
    return [*getattr(thing, "__dict__", {}).values(), *slots]


def bytes_reached(thing: Any) -> int:
    """Bytes of the distinct storages that an object keeps alive."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors_in(thing)}
    return sum(storages.values())


def same_state(state: LayerState, other: LayerState) -> bool:
    """Whether two layers hold the same, to the last bit."""
    return (state.facts, state.tensors.keys()) == (other.facts, other.tensors.keys()) and all(
        torch.equal(states.nan_to_num(7), other.tensors[name].nan_to_num(7)) for name, states in state.tensors.items()
    )


def check_at_rest(layer: CacheLayer, oracle: Oracle) -> None:
    """Length, contents and bytes agree between two updates."""
    assert layer.get_seq_length() == layer.length == oracle.length
    assert type(layer.get_seq_length()) is int
    assert layer.exact_from == oracle.exact_from
    # What is on its way is the prefetcher's, and comes and goes.
    assert layer.nbytes == bytes_reached(layer.wrapped if isinstance(layer, OffloadedLayer) else layer)
    if oracle.length:
        kept = oracle.length - oracle.first_attended(oracle.length)
        # Not `keys` and `values`, which are handed out for good, and so change what a fork shares.
        held_keys, held_values = oracle.peeked(layer)
        assert held_keys.shape[2] >= kept
        start = oracle.length - held_keys.shape[2]
        recorded = oracle.keys[:, :, start:], oracle.values[:, :, start:]
        keys, values = oracle.attended_next() if held_keys.shape[2] == kept else recorded
        oracle.check_states(held_keys, keys)
        oracle.check_states(held_values, values)
        assert layer.batch_size == oracle.keys.shape[0]
        assert layer.nbytes >= oracle.least_bytes(kept)


def step(layer: CacheLayer, oracle: Oracle, tokens: int, generator: torch.Generator, batch: int = 2) -> None:
    """One update of both: what is returned is what the mask was told, and what the oracle says."""
    if oracle.length:
        batch = oracle.keys.shape[0]
    keys, values = states(batch, tokens, generator)
    # Where gradients may be followed, nothing reads buckets.
    with torch.set_grad_enabled(not oracle.reads_buckets):
        kv_length, kv_offset = layer.get_mask_sizes(tokens)
        attended = layer.update(keys, values)
    hidden = oracle.first_attended(oracle.length) - kv_offset
    for seen, expected in zip(attended, oracle.update(keys, values), strict=True):
        assert seen.shape[2] == kv_length
        oracle.check_states(oracle.unmasked(seen, hidden, expected.shape[2]), expected)
    check_at_rest(layer, oracle)


def roll_back(layer: CacheLayer, oracle: Oracle, length: int, act: Callable[[], None]) -> None:
    """Take both back to a length, or see that the layer refuses what the oracle says it cannot do."""
    if oracle.can_truncate(length):
        act()
        oracle.truncate(length)
    elif oracle.reads_buckets and 0 <= length <= oracle.length:
        # Tokens that a window has passed are there until it moves: more can be taken back than must be.
        with contextlib.suppress(RollbackError):
            act()
            oracle.truncate(length)
    else:
        with pytest.raises(RollbackError):
            act()


def continue_decoding(layer: CacheLayer, oracle: Oracle, generator: torch.Generator) -> None:
    """Single tokens and a chunk more, as far as they fit."""
    for tokens in (1, 1, 1, 3, 1):
        if oracle.fits(tokens):
            step(layer, oracle, tokens, generator)
