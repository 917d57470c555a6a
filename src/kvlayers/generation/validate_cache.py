"""A cache that the user gives to `generate()`: what it is told of the call, and what must be true of it."""

import inspect
from collections.abc import Mapping
from typing import Any

import torch
import transformers

from kvlayers.caches.base import Cache
from kvlayers.caches.encoder_decoder import EncoderDecoderCache
from kvlayers.caches.seen_tokens import check_is_new
from kvlayers.caches.sink import SinkCache, left_padding_of
from kvlayers.caches.static import StaticCache
from kvlayers.errors import ConfigError, OptionError, StateMismatchError
from kvlayers.upstream import compat, model_types


def padding_mask(model_kwargs: Mapping[str, Any]) -> torch.Tensor | None:
    """The mask `[batch, tokens]` that says what is padding, where there is one."""
    mask = model_kwargs.get("attention_mask")
    return mask if isinstance(mask, torch.Tensor) and mask.dim() == 2 else None


def prepare(
    model: Any,
    cache: Any,
    attention_mask: torch.Tensor | None,
    whole_length: int | None,
    encoded: torch.Tensor | None = None,
) -> None:
    """Check that a cache can go on with what `generate()` was given, and tell an empty one what it must know.

    Args:
        model: the model that generates.
        cache: what was given to it.
        attention_mask: `[batch, tokens]` of the whole sequence, where anything in it is padding.
        whole_length: tokens of the whole sequence, where known.
        encoded: the encoder's output, `[batch, tokens, hidden]`, where there is an encoder and that is to be checked.

    Raises:
        StateMismatchError: the sequence is not longer than what the cache holds, or cross-attention has states of
            another output of the encoder.
        CapacityError: too little is reserved for cross-attention.
        OptionError: a cache without cross-attention for a model that has it.
        ConfigError: as `check_rotation`, and as `SinkCache`; or a static cache whose model is given masks of all slots.
    """
    if (
        model.config.is_encoder_decoder
        and isinstance(cache, transformers.Cache)
        and not isinstance(cache, transformers.EncoderDecoderCache)
    ):
        raise OptionError(
            f"expected a cache for self-attention and one for cross-attention, as {type(model).__name__} has both, but "
            f"saw a {type(cache).__name__}: pass EncoderDecoderCache(cache, DynamicCache())."
        )
    if not isinstance(cache, Cache):
        return
    if isinstance(cache, EncoderDecoderCache) and encoded is not None:
        cache.check_encoded(encoded)
    own = cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache
    check_windows(model, own)
    if isinstance(own, StaticCache) and compat.masks_the_whole_reservation(model):
        raise ConfigError(
            f"expected a cache that grows, as this version of transformers gives {type(model).__name__} masks of all "
            f"slots of a static one, but saw a {type(own).__name__}: pass cache_implementation='static' instead, or a "
            "DynamicCache."
        )
    if isinstance(own, SinkCache):
        check_rotation(model)
        if attention_mask is not None:
            left_padding_of(attention_mask)
        if not own.get_seq_length():
            own.prepare(model.config, attention_mask)
    # Models that take their cache under another name (mamba) are given new tokens alone.
    counts_whole = model_types.cache_argument(model) == "past_key_values" and not model.config.is_encoder_decoder
    if whole_length is not None and counts_whole and own.layers:
        check_is_new(own, own.get_seq_length(), whole_length)


def check_windows(model: Any, cache: Cache) -> None:
    """Raise `ConfigError` where a layer holds fewer tokens than the model's layer attends to: that of another model."""
    windows = {
        index: layer.sliding_window
        for index, layer in enumerate(cache.adapted_layers())
        if layer.sliding_window is not None
    }
    if not windows:
        return
    for index, spec in enumerate(compat.layer_specs(model.config)):
        attended = spec.options.get("sliding_window")
        if index in windows and (attended is None or attended > windows[index]):
            raise ConfigError(
                f"expected layer {index} of the cache to hold {'all tokens' if attended is None else attended}, as "
                f"{type(model).__name__} attends to them, but saw a window of {windows[index]}: the cache was made for "
                "another model, make one with config=model.config."
            )


def check_is_whole(cache: Cache, input_ids: object) -> None:
    """Raise `StateMismatchError` where ids are no more than what a cache has seen.

    Before 5.4 transformers takes what is new by its position in them, so that new tokens alone will not do.
    """
    held = cache.get_seq_length() if cache.layers else 0
    if held and isinstance(input_ids, torch.Tensor) and input_ids.dim() == 2 and input_ids.shape[1] <= held:
        raise StateMismatchError(
            f"expected the whole sequence, of which the cache has seen {held} tokens already, but saw "
            f"{input_ids.shape[1]}: pass all of it as input_ids, with a mask as long (transformers before 5.4 does not "
            "go on from new tokens alone), or reset the cache."
        )


def decoder_mask(model: Any, past: Any, kwargs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """A mask that says that a decoder's ids are the whole sequence, where a cache has seen some of it.

    Args:
        model: the model that generates.
        past: the cache that it was given, if any.
        kwargs: arguments of `generate()`.

    Returns:
        The mask, `[batch, tokens]`, by its name, or nothing where there is a mask, or none is needed.

    Raises:
        StateMismatchError: there is no mask, and no more tokens than the cache has seen.
    """
    if not isinstance(past, EncoderDecoderCache) or kwargs.get("decoder_attention_mask") is not None:
        return {}
    held = past.get_seq_length() if past.self_attention_cache.layers else 0
    takes_mask = "decoder_attention_mask" in inspect.signature(model.forward).parameters
    if not held or not takes_mask:
        return {}
    ids = kwargs.get("decoder_input_ids")
    # Without any, it begins with one.
    tokens = ids.shape[1] if isinstance(ids, torch.Tensor) and ids.dim() == 2 else 1
    if ids is None or tokens <= held:
        raise StateMismatchError(
            f"expected decoder_input_ids of the whole sequence, of which the cache has seen {held} tokens already, but "
            f"saw {tokens}: pass all of it, or new tokens alone with a decoder_attention_mask for all, or reset the "
            "cache."
        )
    return {"decoder_attention_mask": torch.ones_like(ids)} if compat.PASTS_NEED_DECODER_MASKS else {}


def check_rotation(model: torch.nn.Module) -> None:
    """Raise `ConfigError` where the model rotates its keys by other angles than its config says.

    That is so after `model.to(torch.bfloat16)`, which rounds the frequencies as well.
    """
    for name, buffer in model.named_buffers():
        if name.endswith("inv_freq") and buffer.is_floating_point() and buffer.dtype.itemsize < 4:
            raise ConfigError(
                f"expected the frequencies of RoPE in float32, as the config gives them, but saw {name} rounded to "
                f"{buffer.dtype}: load the model with dtype={buffer.dtype}, rather than convert it."
            )
