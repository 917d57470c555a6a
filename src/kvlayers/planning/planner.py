"""What each kind of cache costs for a model and a context, and which to use within a budget."""

import dataclasses
from collections.abc import Sequence
from types import MappingProxyType

import torch
from transformers import PretrainedConfig

from .. import compat
from ..errors import CapacityError, KVLayersError, OptionError
from ..generation.registry import CacheRequest, cache_names
from ..layers.base import whole_number
from .cache_bytes import CacheBytes
from .layer_shapes import layer_shapes
from .longest import longest_context
from .planned_cache import Plan, PlannedCache
from .planned_kind import PlannedKind, planned_kind
from .recommending import best_of, nothing_fits, why_not, why_recommended

TOKENS_AHEAD = 4096
"""Tokens behind the context over which `bytes_per_token` is the mean, as packed blocks come many tokens at a time."""


def plan(
    config: PretrainedConfig,
    context_length: int,
    batch_size: int = 1,
    dtype: torch.dtype | None = None,
    memory: int | None = None,
    *,
    names: Sequence[str] | None = None,
    encoder_length: int | None = None,
) -> Plan:
    """What each kind of cache costs for a model, by arithmetic from its config: nothing is loaded or allocated.

    Bytes are the `nbytes` of a cache that `generate()` has made for `context_length` tokens, and that has read them in
    one forward pass: spare room, scales, checkpoints and counters included.

    Args:
        config: config of the model.
        context_length: tokens of a sequence, prompt and continuation together.
        batch_size: sequences side by side, beams included.
        dtype: dtype of the model, as the config says where not given (float32 where it does not).
        memory: bytes of the device that the cache may take, `None` for no budget.
        names: names of caches, those that were registered included; all that there are where not given. Those that
            there cannot be for the model are then left out, rather than an error.
        encoder_length: tokens of the encoder's output, for a model that has one.

    Raises:
        OptionError: a number that is none or too small, a dtype that is none, or a missing encoder_length.
        ConfigError: no model config, one that lacks a field, or layers whose states are not known.
        CapacityError: no cache that holds the context is within the budget.
        RegistryError: a name that is not known.

    Example:
        >>> import kvlayers, torch, transformers
        >>> config = transformers.LlamaConfig(num_hidden_layers=2)
        >>> planned = kvlayers.plan(config, 1000, dtype=torch.bfloat16, names=["dynamic", "int4"])
        >>> planned["dynamic"].nbytes == 2 * 2 * 1000 * 4096 * 2
        True
        >>> planned  # doctest: +NORMALIZE_WHITESPACE
        1000 tokens, batch 1, torch.bfloat16
        cache       device  host    a token  bits   states
        dynamic  31.25 MiB   0 B  32.00 KiB    16    exact
        int4     13.81 MiB   0 B   9.00 KiB   4.5  rounded
        Use 'dynamic': it is exact, and the smallest such cache on the device.
    """
    context_length = _count(context_length, "context_length", "tokens")
    batch_size = _count(batch_size, "batch_size", "sequences")
    memory = None if memory is None else _count(memory, "memory", "bytes")
    decoder = compat.decoder_config(config)
    dtype = _dtype_of(decoder, dtype)
    request = CacheRequest(
        config, batch_size=batch_size, dtype=dtype, encoder_length=_encoder_length(config, encoder_length)
    )
    asked = _names(names)
    shapes = layer_shapes(config, batch_size, dtype)
    caches: list[PlannedCache] = []
    left_out: dict[str, str] = {}
    for name in asked:
        try:
            kind = planned_kind(name, request, shapes)
            caches.append(_planned(kind, kind.bytes_for(context_length), context_length, memory))
        except KVLayersError as error:
            if names is not None:
                raise
            left_out[name] = str(error)
    best = best_of(caches)
    if best is None:
        raise nothing_fits(caches, left_out, context_length, memory)
    reasoned = tuple(
        dataclasses.replace(
            cache, reason=why_recommended(cache, memory) if cache is best else why_not(cache, best, memory)
        )
        for cache in caches
    )
    recommended = reasoned[caches.index(best)]
    return Plan(context_length, batch_size, dtype, memory, reasoned, recommended, MappingProxyType(left_out))


def _planned(kind: PlannedKind, costs: CacheBytes, context_length: int, memory: int | None) -> PlannedCache:
    return PlannedCache(
        name=kind.name,
        nbytes=costs.held,
        device_bytes=costs.device,
        host_bytes=costs.host,
        bytes_per_token=_bytes_per_token(kind, costs, context_length),
        longest_context=None if memory is None else _longest(kind, costs, context_length, memory),
        fidelity=kind.fidelity,
        bits=kind.bits,
        fits=memory is None or costs.device <= memory,
        reason="",
    )


def _longest(kind: PlannedKind, costs: CacheBytes, context_length: int, memory: int) -> int | None:
    # Nearly all kinds grow nearly evenly.
    guess = context_length * memory // max(costs.device, 1)
    return longest_context(lambda tokens: _fits(kind, tokens, memory), guess)


def _fits(kind: PlannedKind, tokens: int, memory: int) -> bool:
    try:
        return kind.bytes_for(tokens).device <= memory
    except CapacityError:
        return False


def _bytes_per_token(kind: PlannedKind, costs: CacheBytes, context_length: int) -> float:
    try:
        further = kind.bytes_for(context_length + TOKENS_AHEAD)
    except CapacityError:
        # What is reserved is reserved.
        return 0.0
    return (further.held - costs.held) / TOKENS_AHEAD


def _count(number: object, name: str, what: str) -> int:
    count = whole_number(number, name)
    if isinstance(number, bool) or count < 1:
        raise OptionError(f"expected {name} to be a whole number of {what}, at least 1, but saw {number!r}.")
    return count


def _names(names: Sequence[str] | None) -> list[str]:
    if names is None:
        return cache_names()
    if isinstance(names, str) or not names:
        raise OptionError(
            f"expected a list of names with at least one name of a cache, but saw {names!r}: pass a list, or leave "
            "names out."
        )
    return list(names)


def _dtype_of(decoder: PretrainedConfig, dtype: object) -> torch.dtype:
    found = (decoder.dtype or torch.float32) if dtype is None else dtype
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise OptionError(
            f"expected dtype to be a floating-point torch.dtype, but saw {found!r}: pass, for example, torch.bfloat16."
        )
    return found


def _encoder_length(config: PretrainedConfig, encoder_length: int | None) -> int | None:
    if not config.is_encoder_decoder:
        if encoder_length is not None:
            raise OptionError(
                f"expected no encoder_length for a model without an encoder, but saw {encoder_length!r}: leave it out."
            )
        return None
    if encoder_length is None:
        raise OptionError(
            "expected encoder_length for a model with an encoder, as cross-attention caches its output, but saw none: "
            "pass the tokens of that output."
        )
    return _count(encoder_length, "encoder_length", "tokens")
