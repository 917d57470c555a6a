"""The cache that a call of `generate()` asks for by name, and whether transformers will compile a model around it.

The memory of static caches that models are compiled around is reused by the next compiled call: a compiled program goes
on with the same addresses. Eager code takes any memory, so its caches are not kept: the next call may never come.
"""

import copy
import dataclasses
import gc
import logging
import sys
import threading
import weakref
from typing import Any

import transformers
from transformers.generation.utils import GenerationMode

from kvlayers.core.cache import Cache
from kvlayers.core.named_caches import CacheRequest
from kvlayers.errors import CapacityError
from kvlayers.generation import assisted, cache_by_name, passed_caches
from kvlayers.generation.current_call import CURRENT, Acquired
from kvlayers.interop.aliases import HybridCache, HybridChunkedCache, SlidingWindowCache
from kvlayers.static.slots import MaskMode
from kvlayers.static.static_cache import StaticCache, fixed_layers
from kvlayers.upstream import cache_argument, compat, generate_calls, model_types
from kvlayers.upstream.generate_calls import sequences_per_prompt
from kvlayers.utils.transforms import autocast_dtype

COMPILED_MODES = (GenerationMode.SAMPLE, GenerationMode.GREEDY_SEARCH)
"""Decoding modes whose steps transformers compiles. With a chunked prefill, it compiles the prefill in every mode."""


def for_call(
    model: Any,
    name: str,
    generation_config: Any,
    model_kwargs: dict[str, Any],
    generation_mode: GenerationMode,
    batch_size: int,
    max_cache_length: int,
) -> transformers.Cache:
    """The cache called `name` for one call of `generate()`.

    Args:
        model: the model that generates.
        name: a registered name.
        generation_config: config of the call.
        model_kwargs: arguments of the model for the prompt.
        generation_mode: how the call decodes.
        batch_size: number of prompts.
        max_cache_length: most tokens that the call may reach.

    Raises:
        CapacityError: the options reserve fewer tokens than the call needs.
        KVLayersError: as `cache_by_name.make_cache` and `passed_caches.check_rope_dtype`.
    """
    replaces = model_types.replaces_cross_attention_cache(model)
    encoded = None if replaces else generate_calls.encoded_for(model, model_kwargs)
    # The config of a draft model has the options of the main model's cache, but not the name that they belong to.
    own_name = generation_config.cache_implementation
    foreign_options = generation_config.is_assistant and own_name in (None, compat.NAME_FOR_DRAFTS)
    options = None if foreign_options else generation_config.cache_config
    most = generate_calls.most_tokens(generation_config, max_cache_length)
    if generation_mode == GenerationMode.ASSISTED_GENERATION:
        # A draft may reach beyond the end of the sequence before it is rolled back.
        most += 1 + max(generation_config.prompt_lookup_num_tokens or 0, generation_config.num_assistant_tokens or 0)
    request = cache_by_name.request_of(
        model,
        {} if options is None else options,
        batch_size=batch_size * sequences_per_prompt(generation_config),
        length_hint=most,
        encoder_length=None if encoded is None else encoded.shape[1],
        attention_mask=passed_caches.padding_mask(model_kwargs),
    )
    cache = _acquire(model, name, request, generation_config, generation_mode)
    passed_caches.named.add(cache)
    check_room(cache, generation_config, max_cache_length)
    passed_caches.check_rope_dtype(model, cache)
    if generation_config.is_assistant:
        cache.activate_past_recording()
        cache = assisted.as_draft_cache(cache)
    return cache


def _acquire(
    model: Any, name: str, request: CacheRequest, generation_config: Any, generation_mode: GenerationMode
) -> transformers.Cache:
    cache = cache_by_name.cache_for(name, request)
    if mask_mode(cache) is None:
        return cache
    compiled = will_be_compiled(model, generation_config, generation_mode, cache)
    if compiled:
        with _lock:
            longest = _lengths.get(model, {}).get(request.batch_size, 0)
        if request.length_hint is not None and request.length_hint < longest:
            # Another length would have another shape, for which the model would be compiled again.
            cache = cache_by_name.cache_for(name, dataclasses.replace(request, length_hint=longest))
        with _lock:
            idle = _idle.pop(model, None)
        # Under autocast, the dtype of states differs from that of the model.
        autocast = None if request.device is None else autocast_dtype(request.device)
        if idle is not None and autocast is None and _can_replace(idle, cache, request):
            # An earlier compiled call on the model has released it.
            cache = idle
        acquired = CURRENT.get().acquired
        if acquired is not None:
            acquired.append((cache, request))
    if compiled and generation_config.prefill_chunk_size is not None:
        compiled = _reserve_early(model, cache, request)
    mode = mask_mode(cache)
    if mode is not None:
        mode.compiled = compiled
    return cache


def mask_mode(cache: Any) -> MaskMode | None:
    """How attention masks are made for the self-attention of a static cache; `None` for any other cache.

    The layers of kvlayers in one static cache share this object. The cache itself may be one of transformers.
    """
    part = cache.self_attention_cache if isinstance(cache, transformers.EncoderDecoderCache) else cache
    fixed = fixed_layers(part.layers) if isinstance(part, transformers.StaticCache) else []
    return fixed[0].reserved.mask_extent.mode if fixed else None


def _reserve_early(model: Any, cache: Any, request: CacheRequest) -> bool:
    """Reserve memory before a compiled prefill, which would otherwise own the memory, and return whether it worked."""
    reserves = compat.RESERVES_AHEAD and not request.config.is_encoder_decoder
    shape = generate_calls.static_shape(model) if reserves else None
    if shape is None or request.batch_size is None:
        return False
    cache.early_initialization(request.batch_size, *shape, model.dtype, model.device)
    return True


def will_be_compiled(
    model: Any, generation_config: Any, generation_mode: GenerationMode, cache: transformers.Cache
) -> bool:
    """Whether `generate()` is going to compile the forward pass around a static cache."""
    mode = mask_mode(cache)
    is_mode_compiled = generation_mode in COMPILED_MODES or generation_config.prefill_chunk_size is not None
    has_own_masks = model_types.counts_on_the_whole_reservation(model.config)
    if mode is None or has_own_masks or generate_calls.gives_windows_full_masks(model) or not is_mode_compiled:
        return False
    if generation_config.compile_config is not None:
        # transformers does not compile for a CPU otherwise, even if it is asked to.
        generation_config.compile_config = copy.copy(generation_config.compile_config)
        generation_config.compile_config._compile_all_devices = True
    was_compiled, mode.compiled = mode.compiled, True
    try:
        arguments = {cache_argument.name_in_generate(model): cache}
        return bool(model._valid_auto_compile_criteria(arguments, generation_config)) and (
            # Some models ask for their forward pass uncompiled.
            model.get_compiled_call(generation_config.compile_config) != model.__call__
        )
    finally:
        mode.compiled = was_compiled


logger = logging.getLogger(__name__)


def check_room(cache: object, generation_config: Any, needed: int) -> None:
    """Check that a call does not run for long only to find that its cache is full.

    A call that may end before that goes on, with a warning: at a token that ends a sequence, at a string, by the time,
    or by code of the caller. A draft ends when its model is unsure, and is never warned of.

    Args:
        cache: the cache of the call.
        generation_config: config of the call, with all of its lengths.
        needed: tokens that the cache must hold if the call generates as many as it may.

    Raises:
        CapacityError: the call cannot end before the cache is full.
    """
    limit = _reserved_tokens(cache)
    if limit is None or needed <= limit or generation_config.is_assistant:
        return
    advice = (
        f"reserve {needed} or more (max_cache_len), let it generate fewer tokens (max_new_tokens), or make the cache "
        "with grow=True."
    )
    # Tokens that the cache holds at the end, however early that is.
    fewest = needed if generation_config.eos_token_id is None else (generation_config.min_length or 0) - 1
    if (
        CURRENT.get().may_be_stopped
        or generation_config.max_time is not None
        or generation_config.stop_strings is not None
    ):
        fewest = 0
    if fewest > limit:
        raise CapacityError(
            f"the cache of this call must have room for {needed} tokens, its prompt and all new tokens but the last, "
            f"got a reservation of {limit}: {advice}"
        )
    logger.warning(
        "The cache has room for %d tokens, and this call of generate() fails if it does not end before it needs more: "
        "it may need %d. To be safe, %s",
        limit,
        needed,
        advice,
    )


def _reserved_tokens(cache: object) -> int | None:
    """The most tokens that the layers of a cache can take in, `None` if there is no such number."""
    if not isinstance(cache, Cache):
        return None
    limits: list[int | None] = []
    for layer in cache.self_attention.adapted_layers():
        attention: Any = layer.parts[0].unwrapped
        if attention.reserved is not None and not attention.reserved.grow:
            limits.append(attention.token_limit if attention.is_sliding else attention.capacity)
    return min((limit for limit in limits if limit is not None), default=None)


REUSABLE = (StaticCache, HybridCache, HybridChunkedCache, SlidingWindowCache)
"""Classes whose `reset` is known to leave nothing behind. Subclasses from elsewhere may hold more."""

SOLE_REFERENCES = 2
"""What `sys.getrefcount` counts for a cache that only one variable refers to: the variable, and the argument."""

_lock = threading.Lock()
_idle: "weakref.WeakKeyDictionary[Any, Cache]" = weakref.WeakKeyDictionary()
_lengths: "weakref.WeakKeyDictionary[Any, dict[int | None, int]]" = weakref.WeakKeyDictionary()


def free_reservations() -> None:
    """Free the memory that is kept, for every model, for the next call of `generate()` with a static cache."""
    with _lock:
        _idle.clear()
        _lengths.clear()


def remember_lengths(model: Any, acquired: list[Acquired]) -> None:
    """Let later compiled calls reserve as many tokens as these, so that nothing is compiled for another size."""
    with _lock:
        lengths = _lengths.setdefault(model, {})
        for _, request in acquired:
            if request.length_hint is not None:
                lengths[request.batch_size] = max(request.length_hint, lengths.get(request.batch_size, 0))


def release(model: Any, acquired: list[Acquired]) -> None:
    """Keep acquired caches that nobody else refers to for the next call."""
    while acquired:
        cache, request = acquired.pop()
        if _static_parts(cache) is None:
            continue
        if sys.getrefcount(cache) > SOLE_REFERENCES:
            # Compiling leaves reference cycles that contain the cache.
            gc.collect()
        is_unshared = sys.getrefcount(cache) <= SOLE_REFERENCES
        # Some models decode more sequences than requested, for example with guidance, which cannot be foreseen.
        if is_unshared and cache.batch_size == request.batch_size:
            cache.deactivate_past_recording()
            cache.reset()
            with _lock:
                _idle[model] = cache


def _static_parts(cache: object) -> list[Any] | None:
    """The cache, or both parts of a pair, if each is of a reusable class and all of its layers reserve memory."""
    if not isinstance(cache, Cache):
        return None
    pair: Any = cache
    parts = [pair.self_attention_cache, pair.cross_attention_cache] if cache.is_pair else [cache]
    all_static = all(fixed_layers(part.layers) == list(part.layers) for part in parts)
    return parts if all_static and type(parts[0]) in REUSABLE else None


def _can_replace(idle: Cache, new: Cache, request: CacheRequest) -> bool:
    idle_parts, new_parts = _static_parts(idle), _static_parts(new)
    if idle_parts is None or new_parts is None or type(idle_parts[0]) is not type(new_parts[0]):
        return False
    if [len(part.layers) for part in idle_parts] != [len(part.layers) for part in new_parts]:
        return False
    # A caller who asks for an exact reservation expects an error for one token more.
    is_exact = "max_cache_len" in request.options
    layers = [
        pair
        for old, other in zip(idle_parts, new_parts, strict=True)
        for pair in zip(old.layers, other.layers, strict=True)
    ]
    return all(
        old.covers(other, request.batch_size)
        and (not is_exact or old.max_cache_len == other.max_cache_len)
        and (old.dtype, old.values_dtype, old.device) == (request.dtype, request.dtype, request.device)
        for old, other in layers
    )
