"""Caches that the user passes to `generate()` or to a model.

A cache of kvlayers is checked for whether it fits the model and the prompt, and told what it must know. An empty cache
of transformers gets layers of kvlayers and stays the same otherwise: the same object of the same class, whose methods
call its layers. A cache that holds states is left alone. So are caches and layers that may behave differently:
subclasses, offloaded and quantized caches, and layer types that kvlayers does not have.
"""

import inspect
import itertools
import logging
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import cache_utils as upstream

from kvlayers.core.cache import Cache
from kvlayers.core.dynamic_layer import DynamicLayer
from kvlayers.core.forward_pass import check_is_new
from kvlayers.core.layer_operations import LayerOperations
from kvlayers.core.preparation import left_padding_of
from kvlayers.core.sliding_layer import SlidingLayer
from kvlayers.errors import ConfigError, OptionError, StateMismatchError
from kvlayers.generation.patching import ScopedValue
from kvlayers.interop.adapter import TransformersLayer
from kvlayers.recurrent.linear_layer import LinearAttentionLayer
from kvlayers.static.static_cache import fixed_layers, iter_fixed_layers, share_mask_extents
from kvlayers.static.static_layer import StaticLayer, StaticSlidingLayer
from kvlayers.upstream import cache_argument, compat, generate_calls, model_layers, model_types
from kvlayers.upstream.callers import warn_the_caller
from kvlayers.upstream.compat import MODELS_PASS_COLUMNS
from kvlayers.upstream.model_layers import layer_specs


def padding_mask(model_kwargs: Mapping[str, Any]) -> torch.Tensor | None:
    """The attention mask, if it has the shape `[batch, tokens]` and thus says which tokens are padding."""
    mask = model_kwargs.get("attention_mask")
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
    seen = cache.get_seq_length()
    if seen and (kept := model_types.kept_states(model)) is not None:
        raise StateMismatchError(
            f"`{argument}` must be an empty cache, as {type(model).__name__} keeps "
            f"states of its newest sequence outside of it, in {kept}, got one with {seen} tokens: "
            "reset() the cache, and pass the whole text."
        )
    if cache.is_pair and encoded is not None:
        pair: Any = cache
        pair.check_encoded(encoded)
    self_attention = cache.self_attention
    check_windows(model, self_attention)
    if self_attention.is_static and generate_calls.masks_the_whole_reservation(model):
        raise ConfigError(
            f"`{argument}` must be a cache that grows, as this version of transformers gives {type(model).__name__} "
            f"masks of all slots of a static cache, got a {type(self_attention).__name__}: pass "
            "cache_implementation='static' instead, or a DynamicCache."
        )
    check_rope_dtype(model, self_attention)
    if self_attention.learns_padding:
        if attention_mask is not None:
            left_padding_of(attention_mask)
        if not seen:
            self_attention.prepare(model.config, attention_mask)
    # transformers does not count what a cache of recurrent states has seen: such a model gets the new tokens only.
    if self_attention.layers and not model.config.is_encoder_decoder and not self_attention.is_recurrent:
        if total_tokens is not None:
            check_is_new(self_attention, seen, total_tokens)
        given = None if inputs_embeds is None else inputs_embeds.shape[1]
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
    windows: dict[int, int] = {
        index: layer.sliding_window
        for index, layer in enumerate(cache.adapted_layers())
        if layer.sliding_window is not None
    }
    if not windows:
        return
    for index, spec in enumerate(layer_specs(model.config)):
        attended = spec.options.get("sliding_window")
        if index in windows and (attended is None or attended > windows[index]):
            raise ConfigError(
                f"layer {index} of the cache must hold {'all' if attended is None else attended} tokens, as "
                f"{type(model).__name__} attends to them, got a window of {windows[index]}: the cache was made for "
                "another model, make one with config=model.config."
            )


def check_whole_sequence(cache: Cache, input_ids: object) -> None:
    """Raise `StateMismatchError` if `input_ids` has no more tokens than the cache has seen.

    Before 5.4, transformers finds the new tokens by their positions in the whole sequence, so that new tokens alone do
    not work.
    """
    seen = cache.get_seq_length() if cache.layers else 0
    if seen and isinstance(input_ids, torch.Tensor) and input_ids.dim() == 2 and input_ids.shape[1] <= seen:
        raise StateMismatchError(
            f"`input_ids` must be the whole text, of which the cache has seen {seen} tokens, got {input_ids.shape[1]}: "
            "pass all of it, with the new tokens at its end and a mask as long (transformers before 5.4 does not go on "
            "from new tokens alone), or reset the cache."
        )


def check_rows(cache: Cache, attention_mask: Tensor | None) -> None:
    """Check that the mask of a call has as many tokens for each row as the row has seen.

    Args:
        cache: the cache that is passed to `generate()`.
        attention_mask: its mask, `[batch, tokens]`, if there is one.

    Raises:
        StateMismatchError: a row has seen other tokens.
    """
    counts_rows = any(layer.counts_rows for layer in cache.self_attention.adapted_layers())
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


def decoder_mask(model: Any, past: Any, kwargs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """A mask which says that the decoder's ids are the whole sequence, if a cache has seen a part of it.

    Args:
        model: the model that generates.
        past: the cache that it was given, if any.
        kwargs: arguments of `generate()`.

    Returns:
        The mask, `[batch, tokens]`, by its name; empty if the call has a mask or needs none.

    Raises:
        StateMismatchError: there is no mask, and no more tokens than the cache has seen.
    """
    has_mask = kwargs.get("decoder_attention_mask") is not None
    if not isinstance(past, Cache) or not past.is_pair or has_mask:
        return {}
    seen = past.get_seq_length() if past.layers else 0
    takes_mask = "decoder_attention_mask" in inspect.signature(model.forward).parameters
    if not seen or not takes_mask:
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


def check_rope_dtype(model: torch.nn.Module, cache: Any) -> None:
    """Raise `ConfigError` if a cache rotates keys, and its model does so by other angles than its config says.

    `model.to(torch.bfloat16)` has this effect, since it also rounds the frequencies.
    """
    if not isinstance(cache, Cache) or not cache.rotates_keys:
        return
    for name, buffer in model.named_buffers():
        if name.endswith("inv_freq") and buffer.is_floating_point() and buffer.dtype.itemsize < 4:
            raise ConfigError(
                f"`{name}` of `model` must be in float32, as the frequencies of RoPE are in its config, got "
                f"{buffer.dtype}: load the model with dtype={buffer.dtype} instead of converting it."
            )


logger = logging.getLogger(__name__)

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

DYNAMIC = "dynamic"


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
    is_another = name not in (None, DYNAMIC) and type(cache) is not transformers.StaticCache and cache not in named
    if is_another and cache_argument.is_generator(model) and model not in _warned:
        _warned.add(model)
        warn_the_caller(
            f"The cache {name!r} is not used: {type(model).__name__} is given a {type(cache).__name__} with "
            f"{int(cache.get_seq_length())} tokens in its place, as PEFT does for prefix tuning. Leave the name out."
        )


def leave_on_host(cache: Any, model: Any) -> None:
    """Turn off the offloading of a cache that transformers has made for a model on a CPU.

    Its states are on the host in any case, and transformers' offloading raises where there is no CUDA device.
    """
    if type(cache) in _WITH_LAYERS and cache.offloading and model_layers.model_device(model).type == "cpu":
        cache.offloading = False


def _replace_layers(cache: Any, model: Any) -> None:
    layers = cache.layers
    if layers and isinstance(layers[0], LayerOperations):
        # At each forward pass, so only as many layers are looked at as tell.
        modes = [layer.reserved.mask_extent.mode for layer in itertools.islice(iter_fixed_layers(layers), 2)]
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
    if MODELS_PASS_COLUMNS and model_types.tokens_at_once(model.config) is None:
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
