"""A prompt that is computed and held once for all of its beams or samples."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kvlayers.caches.base import Cache
from kvlayers.upstream import cache_argument, compat, model_types
from kvlayers.upstream.generate_calls import sequences_per_prompt
from kvlayers.upstream.model_types import kept_states

MIN_TOKENS = 32
"""A shorter prompt is not worth holding separately from what follows it."""

Prefill = Callable[[Tensor, dict[str, Any]], Any]


def prefill_once(
    prefill: Prefill, input_ids: Tensor, generation_config: Any, model_kwargs: dict[str, Any], model: Any
) -> Any | None:
    """Prefill each prompt once, although `generate()` has repeated it for its beams or samples.

    Args:
        prefill: does the prefill for `(input_ids, model_kwargs)`.
        input_ids: `[prompts * repeats, tokens]`, the repeats of a prompt side by side.
        generation_config: says how often each prompt is repeated.
        model_kwargs: arguments of the forward pass, with tensors repeated in the same way.
        model: the model that generates.

    Returns:
        The output of the prefill for all repeats; `None` if the prompt cannot be prefilled in this way.
    """
    repeats = sequences_per_prompt(generation_config)
    cache = model_kwargs.get(cache_argument.name_in_generate(model))
    if repeats == 1 or not _can_expand_later(model, cache, input_ids, generation_config, model_kwargs):
        return None
    rows = input_ids.shape[0]
    once = {name: _every(repeats, value, rows) for name, value in model_kwargs.items()}
    for layer in cache.adapted_layers():  # type: ignore[union-attr]
        # Layers without tokens may know the padding of each sequence.
        layer.select(torch.arange(0, rows, repeats))
    output = prefill(input_ids[::repeats], once)
    if compat.LOOPS_COUNT_CACHE_POSITION and "cache_position" in once:
        # The decode loop continues counting from what the prefill leaves here.
        model_kwargs["cache_position"] = once["cache_position"]
    cache.expand(repeats)  # type: ignore[union-attr]
    output.logits = output.logits.repeat_interleave(repeats, dim=0)
    return output


def _can_expand_later(
    model: Any, cache: Any, input_ids: Tensor, generation_config: Any, model_kwargs: dict[str, Any]
) -> bool:
    if not isinstance(cache, Cache) or cache.batch_size >= 0 or input_ids.dim() != 2:
        return False
    if generation_config.prefill_chunk_size is not None or input_ids.shape[1] < MIN_TOKENS:
        return False
    if model_kwargs.get("inputs_embeds") is not None:
        return False
    if model.config is not model_types.decoder_config(model.config) or model.config.is_encoder_decoder:
        # Models with images or an encoder return more for a prompt, which kvlayers does not know how to repeat.
        return False
    returns_more = generation_config.output_attentions or generation_config.output_hidden_states
    shares = any(layer.attends and layer.reserved is None for layer in cache.adapted_layers())
    # States in modules would have one row for each prompt, where the next pass has one for each sample.
    return shares and not returns_more and not cache.is_static and kept_states(model) is None


def _every(step: int, value: Any, rows: int) -> Any:
    """Every `step`-th row of a tensor that has `rows` rows; other values unchanged."""
    if isinstance(value, Tensor) and value.dim() and value.shape[0] == rows:
        return value[::step]
    return value
