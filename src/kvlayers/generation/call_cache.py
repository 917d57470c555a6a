"""The cache of a call: one that a program passes to `generate()` or to a model, or one that is made by name.

A cache of kvlayers that is passed is checked for whether it fits the model and the prompt, and told what it must know.
An empty cache of transformers gets layers of kvlayers and stays the same otherwise: the same object of the same class,
whose methods call its layers. A cache that holds states is left alone. So are caches and layers that may behave
differently: subclasses, offloaded and quantized caches, and layer types that kvlayers does not have.

The memory of static caches that models are compiled around is reused by the next compiled call: a compiled program goes
on with the same addresses. Eager code takes any memory, so its caches are not kept: the next call may never come.
"""

import copy
import dataclasses
import functools
import gc
import itertools
import logging
import sys
import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import cache_utils as upstream
from transformers.generation.utils import GenerationMode

from kvlayers.core.arguments import crop_argument, crop_target
from kvlayers.core.cache import Cache
from kvlayers.core.cache_layer import CacheLayer
from kvlayers.core.forward_pass import check_is_new
from kvlayers.core.named_caches import CacheRequest
from kvlayers.core.preparation import left_padding_of
from kvlayers.core.token_layer import DynamicLayer, SlidingLayer
from kvlayers.errors import CapacityError, ConfigError, OptionError, StateMismatchError
from kvlayers.generation import cache_by_name
from kvlayers.generation.current_call import CURRENT, Acquired
from kvlayers.generation.patching import ScopedValue
from kvlayers.interop.adapter import TransformersLayer
from kvlayers.interop.aliases import HybridCache, HybridChunkedCache, SlidingWindowCache
from kvlayers.recurrent.linear_layer import LinearAttentionLayer
from kvlayers.static.slots import MaskMode
from kvlayers.static.static_cache import StaticCache, fixed_layers, share_mask_extents
from kvlayers.static.static_layer import StaticLayer, StaticSlidingLayer
from kvlayers.upstream import cache_argument, compat, generate_calls, model_layers, model_types
from kvlayers.upstream.callers import warn_the_caller
from kvlayers.utils.transforms import autocast_dtype

logger = logging.getLogger(__name__)


def padding_mask(model: Any, model_kwargs: Mapping[str, Any]) -> torch.Tensor | None:
    """The mask of self-attention, if it has the shape `[batch, tokens]` and thus says which tokens are padding."""
    mask = model_kwargs.get("decoder_attention_mask" if model.config.is_encoder_decoder else "attention_mask")
    return mask if isinstance(mask, torch.Tensor) and mask.dim() == 2 else None


def validate(
    model: Any,
    cache: Any,
    attention_mask: torch.Tensor | None,
    total_tokens: int | None,
    encoded: torch.Tensor | None = None,
    inputs_embeds: torch.Tensor | None = None,
) -> None:
    """Check that generation can continue from a cache, and tell an empty cache what it must know.

    Args:
        model: the model that generates.
        cache: the cache that it was given, if any.
        attention_mask: mask of the whole sequence, `[batch, tokens]`, if any of it is padding.
        total_tokens: length of the whole sequence, if known.
        encoded: output of the encoder, `[batch, tokens, hidden]`, if there is an encoder and it is to be checked.
        inputs_embeds: embeddings `[batch, tokens, hidden]` that the call was given instead of ids.

    Raises:
        StateMismatchError: the sequence is no longer than what the cache has seen, its embeddings are not those of all
            tokens, cross-attention has states of another encoder output, or the model keeps states outside a filled
            cache.
        CapacityError: too little is reserved for cross-attention.
        OptionError: the model has cross-attention, but the cache does not.
        ConfigError: as `check_windows`, `check_rope_dtype` and `SinkCache.prepare`; or the cache is static, and the
            model gets masks of all of its slots.
    """
    argument = cache_argument.name_in_generate(model)
    is_pair = isinstance(cache, transformers.EncoderDecoderCache)
    if model.config.is_encoder_decoder and isinstance(cache, transformers.Cache) and not is_pair:
        raise OptionError(
            f"`{argument}` must have a cache for self-attention and one for cross-attention, as {type(model).__name__} "
            f"has both, got a {type(cache).__name__}: pass EncoderDecoderCache(cache, DynamicCache())."
        )
    if not isinstance(cache, Cache):
        return
    seen = cache.length
    # In 5.12 and before, layers whose states the model keeps elsewhere are sliding ones, which see nothing.
    if (most := seen or cache.most_seen()) and (kept := model_types.kept_states(model)) is not None:
        raise StateMismatchError(
            f"`{argument}` must be an empty cache, as {type(model).__name__} keeps "
            f"states of its newest sequence outside of it, in {kept}, got one with {most} tokens: "
            "reset() the cache, and pass the whole text."
        )
    if cache.is_pair and encoded is not None:
        pair: Any = cache
        pair.check_encoded(encoded)
    self_attention = cache.self_attention
    check_windows(model, cache)
    if self_attention.is_static and generate_calls.masks_the_whole_reservation(model):
        raise ConfigError(
            f"`{argument}` must be a cache that grows, as this version of transformers gives {type(model).__name__} "
            f"masks of all slots of a static cache, got a {type(self_attention).__name__}: pass "
            "cache_implementation='static' instead, or a DynamicCache."
        )
    cache_by_name.check_rope_dtype(model, self_attention)
    if self_attention.learns_padding:
        if attention_mask is not None:
            left_padding_of(attention_mask)
        if not seen:
            self_attention.prepare(model.config, attention_mask)
    if self_attention.layers and not model.config.is_encoder_decoder:
        if total_tokens is not None:
            check_is_new(self_attention, seen, total_tokens)
        # transformers does not count what a cache of recurrent states has seen: such a model may get new ones alone.
        given = None if inputs_embeds is None or self_attention.is_recurrent else inputs_embeds.shape[1]
        # transformers would drop some of the embeddings of new tokens alone.
        if seen and given is not None and (given <= seen or given < (total_tokens or 0)):
            raise StateMismatchError(
                f"`inputs_embeds` must be of the whole sequence, of which the cache has seen {seen} tokens, got "
                f"embeddings of {given}{'' if total_tokens is None else f' of its {total_tokens} tokens'}: pass "
                "embeddings of all tokens (seen tokens may have any embeddings), or the input_ids of new tokens alone "
                "with an attention_mask for all; or crop() or reset() the cache to begin another sequence."
            )


def check_windows(model: Any, cache: Cache) -> None:
    """Raise `ConfigError` if a layer holds fewer tokens than the model attends to, as it was made for another model."""
    # A pair has no window for cross-attention.
    windows = [layer.sliding_window for layer in cache.adapted_layers()]
    # A model that has none may have a config that does not describe its layers.
    specs = model_layers.layer_specs(model.config) if set(windows) - {None} else []
    for index, (window, spec) in enumerate(zip(windows, specs, strict=False)):
        attended = spec.options.get("sliding_window")
        if window is not None and (attended is None or attended > window):
            raise ConfigError(
                f"layer {index} of the cache must hold {'all' if attended is None else attended} tokens, as "
                f"{type(model).__name__} attends to them, got a window of {window}: the cache was made for another "
                "model, make one with config=model.config."
            )


def check_whole_sequence(cache: Cache, input_ids: object) -> None:
    """Raise `StateMismatchError` if `input_ids` has no more tokens than the cache has seen.

    Before 5.4, transformers finds the new tokens by their positions in the whole sequence, so that new tokens alone do
    not work.
    """
    seen = cache.length if cache.layers else 0
    if seen and isinstance(input_ids, torch.Tensor) and input_ids.dim() == 2 and input_ids.shape[1] <= seen:
        raise StateMismatchError(
            f"`input_ids` must be the whole text, of which the cache has seen {seen} tokens, got {input_ids.shape[1]}: "
            "pass all of it, with the new tokens at its end and a mask as long (transformers before 5.4 does not go on "
            "from new tokens alone), or reset the cache."
        )


def check_rows(cache: Cache, attention_mask: Tensor | None, input_ids: Any) -> None:
    """Check that a call has as many prompts as a cache has sequences, and its mask the tokens that each row has seen.

    Args:
        cache: the cache that is passed to `generate()`.
        attention_mask: its mask, `[batch, tokens]`, if there is one.
        input_ids: its ids, `[batch, tokens]`, if there are any.

    Raises:
        StateMismatchError: there are other prompts than sequences, or a row has seen other tokens.
    """
    # Each prompt may have several sequences: its beams, or its samples.
    is_text = isinstance(input_ids, Tensor) and input_ids.dim() == 2
    if is_text and cache.length and cache.batch_size % input_ids.shape[0]:
        raise StateMismatchError(
            f"`input_ids` must have a prompt for each of the {cache.batch_size} sequences of the cache, got "
            f"{input_ids.shape[0]}: repeat them (batch_repeat_interleave), give each prompt a fork() of the cache, "
            "or reset() it."
        )
    counts_rows = any(layer.traits.counts_rows for layer in cache.self_attention.adapted_layers())
    if not counts_rows or (attention_mask is not None and attention_mask.dim() != 2):
        return
    lengths = cache.row_lengths
    columns = max(lengths)
    seen = [columns] * len(lengths) if attention_mask is None else attention_mask[:, :columns].sum(1).tolist()
    if seen != list(lengths):
        raise StateMismatchError(
            f"`attention_mask` must have the tokens of each row in its first {columns} columns, {list(lengths)}, after "
            f"padding, got {seen}: pad the ids as kvlayers.Rows(cache).attention_mask() does."
        )


def decoder_mask(model: Any, past: Cache, kwargs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """A mask which says that the decoder's ids are the whole sequence, if a cache has seen a part of it.

    Args:
        model: the model that generates.
        past: the pair of caches that it was given.
        kwargs: arguments of `generate()`.

    Returns:
        The mask, `[batch, tokens]`, by its name; empty if the call has a mask or needs none.

    Raises:
        StateMismatchError: there is no mask, and no more tokens than the cache has seen.
    """
    has_mask = kwargs.get("decoder_attention_mask") is not None
    seen = past.length if past.layers and not has_mask else 0
    if not seen or "decoder_attention_mask" not in generate_calls.forward_arguments(model):
        return {}
    ids = kwargs.get("decoder_input_ids")
    # Without ids, decoding starts with one token.
    tokens = ids.shape[1] if isinstance(ids, torch.Tensor) and ids.dim() == 2 else 1
    if ids is None or tokens <= seen:
        raise StateMismatchError(
            f"`decoder_input_ids` must be of the whole sequence, of which the cache has seen {seen} tokens already, "
            f"got {tokens}: pass all of it, or new tokens alone with a decoder_attention_mask for all, or reset the "
            "cache."
        )
    return {"decoder_attention_mask": torch.ones_like(ids)} if compat.PASTS_NEED_DECODER_MASKS else {}


REPLACE = ScopedValue("replace_empty_caches", True)
"""The option `replace_empty_caches` of `install()`."""

_WITH_LAYERS = frozenset({transformers.DynamicCache, transformers.StaticCache})

CLASSES = _WITH_LAYERS | {transformers.EncoderDecoderCache}
"""Classes of caches that get layers of kvlayers. Their subclasses do not."""

_logged: "weakref.WeakSet[Any]" = weakref.WeakSet()
"""Filled caches that the log has mentioned."""

_warned: "weakref.WeakSet[Any]" = weakref.WeakSet()
"""Models that were given another cache than the one that was named."""

named: "weakref.WeakSet[Any]" = weakref.WeakSet()
"""Caches that were made for the name of a call, by a factory that may be anybody's."""


def replace_layers(cache: Any, model: Any) -> None:
    """Give a cache layers of kvlayers if it is empty.

    Args:
        cache: a cache of one of `CLASSES`. The two parts of a pair are treated separately.
        model: the model that the cache was passed to.
    """
    is_pair = type(cache) is transformers.EncoderDecoderCache
    for part in (cache.self_attention_cache, cache.cross_attention_cache) if is_pair else (cache,):
        if type(part) in _WITH_LAYERS:
            _replace_layers(part, model)


def warn_of_another(cache: Any, name: str | None, model: Any) -> None:
    """Warn, once for a model, if it is given a cache of transformers where a call of `generate()` has named another.

    Args:
        cache: a cache of one of `CLASSES`.
        name: the name that the call asks for, if any. The class of "dynamic" is transformers' own as well.
        model: the model.
    """
    is_another = (
        name not in (None, cache_by_name.DYNAMIC) and type(cache) is not transformers.StaticCache and cache not in named
    )
    if is_another and cache_argument.is_generator(model) and model not in _warned:
        _warned.add(model)
        warn_the_caller(
            f"The cache {name!r} is not used: {type(model).__name__} is given a {type(cache).__name__} in its place, "
            "as PEFT does for prefix tuning, and guidance for the other prompt. Leave the name out."
        )


def leave_on_host(cache: Any, model: Any) -> None:
    """Turn off the offloading of a cache that transformers has made for a model on a CPU.

    Its states are on the host in any case, and transformers' offloading raises where there is no CUDA device.
    """
    if type(cache) in _WITH_LAYERS and cache.offloading and model_layers.model_device(model).type == "cpu":
        cache.offloading = False


def _replace_layers(cache: Any, model: Any) -> None:
    layers = cache.layers
    if layers and isinstance(layers[0], CacheLayer):
        # At each forward pass, so only as many layers are looked at as tell.
        modes = [layer.reserved.mask_extent.mode for layer in itertools.islice(fixed_layers(layers), 2)]
        # In a copy of the cache, which transformers makes, static layers do not know one another.
        if type(cache) is transformers.StaticCache and not all(mode is modes[0] for mode in modes):
            _link(layers)
        return
    if cache.offloading or not REPLACE.get():
        return
    if not all(TransformersLayer(layer).is_empty for layer in layers):
        if cache not in _logged:
            _logged.add(cache)
            logger.info(
                "A %s keeps its layers of transformers, as it holds states: only empty caches get kvlayers' layers.",
                type(cache).__name__,
            )
    elif layers:
        decoder = model_types.decoder_config(model.config)
        is_static = type(cache) is transformers.StaticCache
        # Some models keep states in their own cache, or attend to slots of a static cache that hold no token.
        needs_all_slots = is_static and model_types.counts_on_the_whole_reservation(decoder)
        if not needs_all_slots and decoder.model_type not in model_layers.MODELS_WITH_OWN_CACHE:
            layers[:] = _kvlayers_layers(layers, model)
            _link(layers)
    elif cache.layer_class_to_replicate is upstream.DynamicLayer:
        # A cache without a config holds every token in every layer, and still does so now.
        cache.layer_class_to_replicate = DynamicLayer


def _kvlayers_layers(layers: list[Any], model: Any) -> list[Any]:
    """Layers of kvlayers in the place of `layers`. Layers of other types are returned as they are."""
    reserved = [layer.max_cache_len for layer in layers if type(layer) is upstream.StaticLayer]

    def static_window(layer: Any) -> StaticSlidingLayer:
        # transformers has capped the window at the reservation. It accepts more tokens unless another layer refuses.
        return StaticSlidingLayer(
            max_cache_len=max(reserved, default=layer.max_cache_len),
            sliding_window=layer.max_cache_len,
            token_limit=max(reserved, default=None),
        )

    makers: dict[type, Callable[[Any], Any]] = {
        upstream.DynamicLayer: lambda layer: DynamicLayer(),
        upstream.DynamicSlidingWindowLayer: lambda layer: SlidingLayer(layer.sliding_window),
        upstream.StaticLayer: lambda layer: StaticLayer(layer.max_cache_len),
        upstream.StaticSlidingWindowLayer: static_window,
    }
    # If a scan starts from zero, kvlayers' layers refuse several tokens at once, which transformers' methods pass.
    if compat.MODELS_PASS_COLUMNS and model_types.tokens_at_once(model.config) is None:
        makers[upstream.LinearAttentionLayer] = lambda layer: LinearAttentionLayer(layer.number_of_states)
    return [makers[type(layer)](layer) if type(layer) in makers else layer for layer in layers]


def _link(layers: list[Any]) -> None:
    """Let the static layers of a cache agree on what attention reads, as in a `kvlayers.StaticCache`.

    A mask is made by asking the first layer of a kind, which must then ask the others to make room.
    """
    share_mask_extents(layers)
    for is_sliding in (False, True):
        same_kind = [layer for layer in fixed_layers(layers) if layer.is_sliding == is_sliding]
        if same_kind:
            same_kind[0].followers = tuple(same_kind[1:])


# Caches that are made by name

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
        KVLayersError: as `cache_by_name.make_cache` and `cache_by_name.check_rope_dtype`.
    """
    encoded = generate_calls.encoded_for(model, model_kwargs)
    # The config of a draft model has the options of the main model's cache, but not the name that they belong to.
    nameless = generation_config.cache_implementation in (None, compat.NAME_FOR_DRAFTS)
    options = None if generation_config.is_assistant and nameless else generation_config.cache_config
    most = generate_calls.most_tokens(generation_config, max_cache_length)
    if generation_mode == GenerationMode.ASSISTED_GENERATION:
        # A draft may reach beyond the end of the sequence before it is rolled back.
        most += 1 + max(generation_config.prompt_lookup_num_tokens or 0, generation_config.num_assistant_tokens or 0)
    request = cache_by_name.request_of(
        model,
        {} if options is None else options,
        batch_size=batch_size * generate_calls.sequences_per_prompt(generation_config),
        length_hint=most,
        encoder_length=None if encoded is None else encoded.shape[1],
        attention_mask=padding_mask(model, model_kwargs),
    )
    cache = _acquire(model, name, request, generation_config, generation_mode)
    named.add(cache)
    check_room(cache, generation_config, max_cache_length)
    cache_by_name.check_rope_dtype(model, cache)
    if generation_config.is_assistant:
        cache.activate_past_recording()
        if isinstance(cache, Cache) and (compat.CROPS_DRAFTS_TO_LENGTHS or cache.recurrent_parts()):
            cache = rolling_back(cache)
    return cache


class RollbackCache(Cache):
    """A cache whose `crop` may roll back further than it was asked to; see `rolling_back`."""

    @property
    def is_croppable(self) -> bool:
        """Whether drafts can be rolled back, as they always can: transformers asks after the prefill."""
        return True

    def crop(self, tokens_to_remove: int | None = None, *, max_length: int | None = None) -> None:
        """Roll back as `truncate` does, to a length that is given as for `Cache.crop`."""
        number = crop_argument(tokens_to_remove, max_length)
        to_nothing = compat.CROPS_DRAFTS_TO_LENGTHS and number == 0
        self.truncate(0 if to_nothing else crop_target(number, self.most_seen()))


def rolling_back(cache: Cache) -> RollbackCache:
    """What transformers' loops over drafts get in the place of a cache: another view of it, with the same layers."""
    view: RollbackCache = object.__new__(_class_that_rolls_back(type(cache)))
    view.__dict__ = cache.__dict__
    return view


@functools.cache
def _class_that_rolls_back(cache_class: type[Cache]) -> Any:
    return type(f"Rollback{cache_class.__name__}", (RollbackCache, cache_class), {})


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
            idle = _idle.pop(model, None)
        if request.length_hint is not None and request.length_hint < longest:
            # Another length would have another shape, for which the model would be compiled again.
            cache = cache_by_name.cache_for(name, dataclasses.replace(request, length_hint=longest))
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
    fixed = [*fixed_layers(part.layers)] if isinstance(part, transformers.StaticCache) else []
    return fixed[0].reserved.mask_extent.mode if fixed else None


def _reserve_early(model: Any, cache: Any, request: CacheRequest) -> bool:
    """Reserve memory before a compiled prefill, which would otherwise own the memory, and return whether it worked."""
    shape = (
        generate_calls.static_shape(model) if compat.RESERVES_AHEAD and not request.config.is_encoder_decoder else None
    )
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
        # Some models ask for their forward pass uncompiled.
        return bool(
            model._valid_auto_compile_criteria({cache_argument.name_in_generate(model): cache}, generation_config)
            and model.get_compiled_call(generation_config.compile_config) != model.__call__
        )
    finally:
        mode.compiled = was_compiled


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
    if not isinstance(cache, Cache) or generation_config.is_assistant:
        return
    layers: Any = cache.self_attention.adapted_layers()
    limits = {each.parts[0].unwrapped.token_limit for each in layers if each.parts[0].unwrapped.reserved is not None}
    limit = min(limits - {None}, default=None)
    if limit is None or needed <= limit:
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
            lengths[request.batch_size] = max(request.length_hint or 0, lengths.get(request.batch_size, 0))


def release(model: Any, acquired: list[Acquired]) -> None:
    """Keep acquired caches that nobody else refers to for the next call."""
    while acquired:
        cache, request = acquired.pop()
        if _static_parts(cache) is None:
            continue
        if sys.getrefcount(cache) > SOLE_REFERENCES:
            # Compiling leaves reference cycles that contain the cache.
            gc.collect()
        # Some models decode more sequences than requested, for example with guidance, which cannot be foreseen.
        if sys.getrefcount(cache) <= SOLE_REFERENCES and cache.batch_size == request.batch_size:
            cache.deactivate_past_recording()
            cache.reset()
            with _lock:
                _idle[model] = cache


def _static_parts(cache: object) -> tuple[Any, ...] | None:
    """The cache, or both parts of a pair, if each is of a reusable class and all of its layers reserve memory."""
    if not isinstance(cache, Cache):
        return None
    parts = cache.parts()
    all_static = all([*fixed_layers(part.layers)] == [*part.layers] for part in parts)
    return parts if all_static and type(parts[0]) in REUSABLE else None


def _can_replace(idle: Cache, new: Cache, request: CacheRequest) -> bool:
    idle_parts, new_parts = _static_parts(idle), _static_parts(new)
    if (
        idle_parts is None
        or new_parts is None
        or type(idle_parts[0]) is not type(new_parts[0])
        or [len(part.layers) for part in idle_parts] != [len(part.layers) for part in new_parts]
    ):
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
        and (*(form.dtype for form in old.forms), old.device) == (request.dtype, request.dtype, request.device)
        for old, other in layers
    )
