"""A prompt that is computed, and held, once for all of its beams or samples."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from kvlayers.caches.base import Cache
from kvlayers.caches.static import StaticCache
from kvlayers.generation.calls import sequences_of_each_prompt
from kvlayers.upstream import compat, model_types

LEAST_TOKENS = 32
"""A prompt shorter than this is not worth telling apart from what comes behind it."""

Prefill = Callable[..., Any]


def prefill_once(
    prefill: Prefill, input_ids: Tensor, generation_config: Any, model_kwargs: dict[str, Any], model: Any
) -> Any | None:
    """Prefill with each prompt once, though `generate()` has repeated it; `None` where that cannot be.

    Args:
        prefill: does it for `(input_ids, model_kwargs)`.
        input_ids: `[prompts * repeats, tokens]`, the repeats side by side.
        generation_config: says how often a prompt is repeated.
        model_kwargs: of the forward pass, its tensors repeated alike.
        model: that generates.
    """
    repeats = sequences_of_each_prompt(generation_config)
    cache = model_kwargs.get("past_key_values")
    if repeats == 1 or not _can_be_repeated_later(model, cache, input_ids, generation_config, model_kwargs):
        return None
    rows = input_ids.shape[0]
    once = {name: _each_once(value, rows, repeats) for name, value in model_kwargs.items()}
    output = prefill(input_ids[::repeats], once)
    if compat.LOOPS_COUNT_CACHE_POSITION and "cache_position" in once:
        # A prefill leaves it to the loop, which counts on from there.
        model_kwargs["cache_position"] = once["cache_position"]
    cache.expand(repeats)  # type: ignore[union-attr]
    output.logits = output.logits.repeat_interleave(repeats, dim=0)
    return output


def _can_be_repeated_later(
    model: Any, cache: Any, input_ids: Tensor, generation_config: Any, model_kwargs: dict[str, Any]
) -> bool:
    if not isinstance(cache, Cache) or cache.batch_size >= 0 or input_ids.dim() != 2:
        return False
    if generation_config.prefill_chunk_size is not None or input_ids.shape[1] < LEAST_TOKENS:
        return False
    if model_kwargs.get("inputs_embeds") is not None:
        return False
    if model.config is not model_types.decoder_config(model.config) or model.config.is_encoder_decoder:
        # What else models with images or an encoder return for a prompt, nobody here knows how to repeat.
        return False
    returns_more = generation_config.output_attentions or generation_config.output_hidden_states
    grows = any(layer.attends and layer.capacity is None for layer in cache.adapted_layers())
    return grows and not returns_more and not isinstance(cache, StaticCache)


def _each_once(value: Any, rows: int, repeats: int) -> Any:
    if isinstance(value, Tensor) and value.dim() and value.shape[0] == rows:
        return value[::repeats]
    return value
