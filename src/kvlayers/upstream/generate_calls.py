"""What the `generate()` of the installed version of transformers passes around, and expects from a cache."""

from types import FunctionType
from typing import Any

import torch
import transformers
from packaging.version import Version

from kvlayers.upstream.compat import (
    BLOOM_MASKS_RESERVATION,
    KNOWS_FIRST_ITERATION,
    LOOPS_COUNT_CACHE_POSITION,
    MAKES_STATIC_CACHE,
    RESERVES_AHEAD,
    SLICES_BY_CACHE_POSITION,
    TRANSFORMERS,
)


def sequence_length(generation_config: Any, attention_mask: torch.Tensor | None) -> int | None:
    """Tokens of the whole sequence that `generate()` was given, including tokens that a cache has seen, if known.

    Some versions (5.23 and a few before) drop a mask without padding, and store its length in the config.
    """
    return attention_mask.shape[1] if attention_mask is not None else vars(generation_config).get("_mask_length")


def model_kwargs_after(
    model: Any, input_ids: torch.Tensor, model_kwargs: dict[str, Any], tokens: int
) -> dict[str, Any]:
    """The model's arguments in a loop of `generate()` after it has decoded some tokens, but with the cache unchanged.

    Args:
        model: the model that generates.
        input_ids: the prompt, `[batch, tokens]`.
        model_kwargs: arguments of the model for the prompt.
        tokens: number of decoded tokens.
    """
    from transformers.generation.utils import GenerationMixin
    from transformers.utils import ModelOutput

    if LOOPS_COUNT_CACHE_POSITION:
        model_kwargs = model._get_initial_cache_position(input_ids.shape[1], input_ids.device, model_kwargs)
    # One token at a time, as in the loop, since each step repeats the last entry.
    for _ in range(tokens):
        model_kwargs = GenerationMixin._update_model_kwargs_for_generation(
            model, ModelOutput(), model_kwargs, is_encoder_decoder=model.config.is_encoder_decoder
        )
    # The loop that follows makes its own, for all tokens.
    return {name: value for name, value in model_kwargs.items() if name != "cache_position"}


def most_tokens(generation_config: Any, max_cache_length: int) -> int:
    """Tokens that a call of `generate()` reserves. Since transformers 5.13, a config may ask for more than needed."""
    return max(max_cache_length, vars(generation_config).get("max_cache_len") or 0)


def default_generation_options() -> dict[str, Any]:
    """The default of each option of `generate()`.

    From transformers 5 on, most options of a `GenerationConfig` are `None`, and their defaults are stored elsewhere.
    """
    from transformers import GenerationConfig

    defaults: dict[str, Any] = dict(vars(GenerationConfig()))
    if Version("5.0") <= TRANSFORMERS:
        defaults |= GenerationConfig._get_default_generation_params()
    return defaults


def static_shape(model: Any) -> tuple[Any, Any] | None:
    """kv_heads and head_dim of the states of a static cache, if the model tells; otherwise `None`."""
    shape: tuple[Any, Any] | None = model._get_static_cache_init_shape() if RESERVES_AHEAD else None
    return shape


def model_inputs(model: Any, input_ids: torch.Tensor, new_tokens: int, model_kwargs: dict[str, Any]) -> dict[str, Any]:
    """What a model's `prepare_inputs_for_generation` returns for the last `new_tokens` of `input_ids`."""
    arguments: dict[str, Any] = {"is_first_iteration": False} if KNOWS_FIRST_ITERATION else {}
    if SLICES_BY_CACHE_POSITION:
        end = input_ids.shape[1]
        arguments["cache_position"] = torch.arange(end - new_tokens, end, device=input_ids.device)
    else:
        arguments["next_sequence_length"] = new_tokens
    inputs: dict[str, Any] = type(model).prepare_inputs_for_generation(model, input_ids, **arguments, **model_kwargs)
    return inputs


def only_captures_outputs(hook: Any) -> bool:
    """Whether a hook of a module is one that transformers leaves there once hidden states or attention were asked for.

    It keeps what a module returns in calls that ask for it again, and changes nothing.
    """
    return isinstance(hook, FunctionType) and hook.__module__ == f"{transformers.__name__}.utils.output_capturing"


def makes_own_static_cache(model: Any, name: str) -> bool:
    """Whether `name` is that of a static cache, which `model` must make itself.

    Either the model has its own code to size static caches, and knows more about its layers than its config says (the
    vision layers of mllama), or its forward pass assumes attention over the whole reservation (BLOOM's alibi, before
    5.21).
    """
    # Imported late, since generate() takes long to import, and not every use of a cache needs it.
    from transformers.generation.configuration_utils import ALL_STATIC_CACHE_IMPLEMENTATIONS
    from transformers.generation.utils import GenerationMixin

    if name not in ALL_STATIC_CACHE_IMPLEMENTATIONS:
        return False
    overridden = getattr(type(model), MAKES_STATIC_CACHE) is not getattr(GenerationMixin, MAKES_STATIC_CACHE)
    return overridden or masks_the_whole_reservation(model)


def masks_the_whole_reservation(model: Any) -> bool:
    """Whether `generate()` makes masks for all slots of a static cache of this model, in eager code as well."""
    return bool(model.config.model_type == "bloom" and BLOOM_MASKS_RESERVATION)
