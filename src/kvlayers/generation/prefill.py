"""A prompt that is computed and held once for all of its beams or samples, and for equal prompts side by side."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules import module as torch_modules

from kvlayers.core.cache import Cache
from kvlayers.errors import StateMismatchError
from kvlayers.upstream import compat, generate_calls, model_types

MIN_TOKENS = 32
"""A shorter prompt is not worth holding separately from what follows it."""

Prefill = Callable[[Tensor, dict[str, Any]], Any]


def prefill_once(
    prefill: Prefill, cache: Cache, input_ids: Tensor, generation_config: Any, model_kwargs: dict[str, Any], model: Any
) -> Any | None:
    """Prefill each prompt once, although it is repeated: for its beams or samples, or by the caller.

    Args:
        prefill: does the prefill for `(input_ids, model_kwargs)`.
        cache: the cache of the call.
        input_ids: `[prompts * repeats, tokens]`, the repeats of a prompt side by side.
        generation_config: says how often `generate()` has repeated each prompt.
        model_kwargs: arguments of the forward pass, with tensors repeated in the same way.
        model: the model that generates.

    Returns:
        The output of the prefill for all repeats; `None` if the prompt cannot be prefilled in this way.
    """
    if not _can_expand_later(model, cache, input_ids, generation_config, model_kwargs):
        return None
    rows, repeats = input_ids.shape[0], generate_calls.sequences_per_prompt(generation_config)
    # Else a row may have states of its own.
    if repeats < rows and reason_in_modules(model) is None:
        repeats = max(repeats, _repeats_in(input_ids, model_kwargs))
    if repeats == 1:
        return None
    once = {
        name: value[::repeats] if isinstance(value, Tensor) and value.dim() and value.shape[0] == rows else value
        for name, value in model_kwargs.items()
    }
    for layer in cache.adapted_layers():
        # Layers without tokens may know the padding of each sequence.
        layer.select(torch.arange(0, rows, repeats))
    output = prefill(input_ids[::repeats], once)
    if compat.LOOPS_COUNT_CACHE_POSITION and "cache_position" in once:
        # The decode loop continues counting from what the prefill leaves here.
        model_kwargs["cache_position"] = once["cache_position"]
    cache.expand(repeats)
    output.logits = output.logits.repeat_interleave(repeats, dim=0)
    return output


def _repeats_in(input_ids: Tensor, model_kwargs: dict[str, Any]) -> int:
    """How often each row is repeated, side by side: the same number for all rows, 1 if they are not repeated."""
    rows, differs = input_ids.shape[0], torch.zeros(input_ids.shape[0] - 1, dtype=torch.bool, device=input_ids.device)
    for value in (input_ids, *model_kwargs.values()):
        if isinstance(value, Tensor) and value.dim() and value.shape[0] == rows:
            differs |= (value[1:] != value[:-1]).reshape(rows - 1, -1).any(1).to(differs.device)
        elif isinstance(value, list | tuple) and len(value) == rows:
            # What belongs to each row is known to the model alone.
            return 1
    return math.gcd(rows, *(differs.nonzero()[:, 0] + 1).tolist())


def _can_expand_later(
    model: Any, cache: Cache, input_ids: Tensor, generation_config: Any, model_kwargs: dict[str, Any]
) -> bool:
    if cache.batch_size >= 0 or input_ids.dim() != 2:
        return False
    is_usual = (
        generation_config.prefill_chunk_size is None
        and input_ids.shape[1] >= MIN_TOKENS
        and model_kwargs.get("inputs_embeds") is None
        # Models with images or an encoder return more for a prompt, which kvlayers does not know how to repeat.
        and model.config is model_types.decoder_config(model.config)
        and not model.config.is_encoder_decoder
        # Some loops ask for hidden states themselves (csm).
        and not (generation_config.output_attentions or generation_config.output_hidden_states)
        and not model_kwargs.get("output_hidden_states")
    )
    shares = any(layer.traits.attends and layer.reserved is None for layer in cache.adapted_layers())
    # States in modules would have one row for each prompt, where the next pass has one for each sample.
    return is_usual and shares and not cache.is_static and model_types.kept_states(model) is None


def reason_in_modules(model: Any) -> str | None:
    """Why a module of a model may compute something else than its class and its weights say, `None` for no reason."""
    if "prepare_inputs_for_generation" in vars(model):
        # PEFT replaces it for prompt tuning.
        return f"its prepare_inputs_for_generation is not the one of {type(model).__name__}"
    for path, module in model.named_modules():
        attributes = vars(module)
        # The same tokens then have other states in every call, or none.
        if module.training and (cause := model_types.effect_of_training(module)) is not None:
            return f"{path or 'the model'} is in training mode, with {cause}: call model.eval()"
        # accelerate replaces forward() to load weights, and sets `_hf_hook`.
        is_replaced = "forward" in attributes and "_hf_hook" not in attributes
        # transformers 5.0 puts its own one back as an attribute, once a call has asked for hidden states.
        is_replaced = is_replaced and attributes["forward"] != module.__class__.forward.__get__(module)
        if is_replaced or not model_types.is_of_its_class(module.__class__.forward, module.__class__):
            return f"forward() of {path or 'the model'} is not the one of its class"
        # Hooks of the model as a whole do not change its states, and hooks that only take outputs do not either.
        hooks = [] if module is model else [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
        if not all(map(generate_calls.leaves_states_as_they_are, hooks)):
            return f"{path} has hooks, on which states may depend"
    hooks = [*torch_modules._global_forward_hooks.values(), *torch_modules._global_forward_pre_hooks.values()]
    if not all(map(generate_calls.leaves_states_as_they_are, hooks)):
        return "all modules have hooks, on which states may depend"
    return None


PER_TOKEN_ARGUMENTS = ("attention_mask", "position_ids", "token_type_ids", "mm_token_type_ids")
"""Arguments of a model that have one entry per token in their last dimension."""


def pass_limit(model: Any, cache: Any) -> int | None:
    """The most new tokens that a model can take in one pass after a filled cache; `None` for no limit."""
    if model_types.decodes_one_token(model.config):
        return 1
    parts = cache.recurrent_parts() if isinstance(cache, Cache) else []
    limits = [part.tokens_at_once for part in parts if part.tokens_at_once is not None]
    return min(limits, default=None)


def without_last(model_kwargs: dict[str, Any], tokens: int) -> dict[str, Any]:
    """Arguments of a model for all tokens except the last `tokens`."""
    return model_kwargs | {
        name: value[..., : value.shape[-1] - tokens]
        for name, value in model_kwargs.items()
        if tokens and name in PER_TOKEN_ARGUMENTS and isinstance(value, Tensor) and value.shape[-1] > tokens
    }


@torch.no_grad()
def pass_tokens(
    model: Any, input_ids: Tensor, model_kwargs: dict[str, Any], cache: Cache, start: int, chunk: int | None = None
) -> Any:
    """Pass the tokens from `start` on to a model, in as many forward passes as needed.

    Args:
        model: the model, with the methods that `generate()` calls.
        input_ids: `[batch, tokens]`. The cache has seen the tokens before `start`.
        model_kwargs: what `generate()` passes to the model for all of `input_ids`, the cache included.
        cache: the cache.
        start: index of the first token to pass.
        chunk: tokens per pass. Default: as many as the model can take.

    Returns:
        The output of the last forward pass.
    """
    end = input_ids.shape[1]
    limit = pass_limit(model, cache) if chunk is None else chunk
    step = end - start if limit is None else limit
    output = None
    for begin in range(start, end, step):
        stop = min(begin + step, end)
        arguments = without_last(model_kwargs, end - stop)
        is_first = begin == 0 == cache.length
        inputs = generate_calls.model_inputs(model, input_ids[:, :stop], stop - begin, arguments, is_first)
        output = model(**inputs, return_dict=True)
    if any(layer.is_recording for layer in cache.adapted_layers()):
        # The next tokens may be rolled back to this length.
        cache.activate_past_recording()
    return output


def is_told_positions(model: Any) -> bool:
    """Whether padding before a prompt changes no position: a model is told positions, has relative ones, or none."""
    is_free = model.config.model_type in (*model_types.HAS_RELATIVE_POSITIONS, *model_types.HAS_NO_POSITIONS)
    return is_free or "position_ids" in generate_calls.forward_arguments(model)


def check_no_padding(mask: Tensor | None, tokens: int) -> None:
    """Raise `StateMismatchError` if any of the newest `tokens` is padding, which the model would treat as a token.

    Args:
        mask: `[batch, tokens]`, 0 for padding, if there is any.
        tokens: number of new tokens, which the cache has not seen.
    """
    if mask is not None and tokens > 0 and bool((mask[:, -tokens:] == 0).any()):
        raise StateMismatchError(
            "`attention_mask` must have no padding behind tokens that a recurrent model has seen, as it reads the mask "
            "of the first pass only, got zeros there: pad on the left of the first pass, use an attention_mask of ones "
            "if the pad token is meant as text, or use one cache for each sequence."
        )


def prefill_in_chunks(
    model: Any, cache: Cache, input_ids: Tensor, generation_config: Any, model_kwargs: dict[str, Any]
) -> Any:
    """The prefill of prompts that the single forward pass of transformers would get wrong; `None` for other prompts.

    There are two such cases: new tokens after a filled cache, if the model takes them one by one, as its scan over
    several tokens starts from zero or it has no mask for them; and a whole sequence, if the cache holds recurrent
    states alone, since transformers does not ask such a cache how many tokens it has seen.
    """
    mask, embeds = model_kwargs.get("attention_mask"), model_kwargs.get("inputs_embeds")
    is_unusual = model.config.is_encoder_decoder or (isinstance(mask, Tensor) and mask.dim() != 2)
    if is_unusual or (not cache.recurrent_parts() and not model_types.decodes_one_token(model.config)):
        return None
    limit, chunk, tokens = pass_limit(model, cache), generation_config.prefill_chunk_size, input_ids.shape[1]
    seen = cache.length
    # transformers leaves out a mask of ones.
    total = vars(generation_config).get(generate_calls.MASK_LENGTH, tokens) if mask is None else mask.shape[1]
    if embeds is not None:
        # Those of all tokens may be passed, and transformers does not ask how many of them the cache has seen.
        model_kwargs["inputs_embeds"] = embeds[:, seen - total :] if cache.is_recurrent and seen < total else embeds
        return None
    if seen == 0:
        if chunk is not None and isinstance(mask, Tensor):
            # These models ignore the mask for single tokens, so the first pass must contain all padding.
            chunk = max(chunk, int(mask.ne(0).to(torch.int8).argmax(dim=1).max()) + 1)
        if chunk is None or chunk >= tokens:
            return None
        check_no_padding(mask, tokens - chunk)
        pass_tokens(model, input_ids[:, :chunk], without_last(model_kwargs, tokens - chunk), cache, 0, chunk)
        return pass_tokens(model, input_ids, model_kwargs, cache, chunk, limit or chunk)
    start = seen if total == tokens else 0
    if limit is not None or cache.is_recurrent:
        check_no_padding(mask, tokens - start)
    if start >= tokens or (not cache.is_recurrent and (limit is None or tokens - start <= limit)):
        return None
    return pass_tokens(model, input_ids, model_kwargs, cache, start)
