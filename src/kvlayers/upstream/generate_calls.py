"""What the `generate()` of the installed version of transformers passes around, and expects from a cache."""

import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from types import FunctionType, SimpleNamespace
from typing import Any

import torch
import transformers

# Transformers 5 spells it PreTrainedConfig, and keeps this name as well.
from transformers import GenerationConfig, PretrainedConfig, masking_utils
from transformers.generation import configuration_utils, utils
from transformers.generation.utils import GenerationMixin

from kvlayers.upstream import cache_argument, model_types
from kvlayers.upstream.compat import (
    BLOOM_MASKS_RESERVATION,
    KNOWS_FIRST_ITERATION,
    PREPARES_POSITIONS,
    SLICES_BY_CACHE_POSITION,
    STATIC_CACHES_MADE_APART,
)
from kvlayers.upstream.model_layers import layer_configs, layer_specs
from kvlayers.upstream.model_types import ConfigNumbers, head_dims, kv_heads

SIGNATURE = inspect.signature(GenerationMixin.generate)
"""That of `generate()`, whose own arguments are no options of a `GenerationConfig`."""

BATCHING_METHODS = ("init_continuous_batching", "destroy_cached_continuous_batching_manager")


MASK_LENGTH = "_mask_length"
"""From 5.18 on, `generate()` leaves out a mask of ones, and notes in this field of its config how long it was."""


def batching() -> type | None:
    """The class whose methods begin and end continuous batching, in versions that give it a config of its own."""
    owner: Any = getattr(utils, "ContinuousMixin", None)
    has_methods = owner is not None and all(name in vars(owner) for name in BATCHING_METHODS)
    takes = inspect.signature(owner.init_continuous_batching).parameters if has_methods else {}
    return owner if "continuous_batching_config" in takes else None


def loop_name(mode: Any) -> str:
    """Name of the method of a model that decodes in a `GenerationMode`."""
    return str(utils.GENERATION_MODES_MAPPING[mode])


def most_tokens(generation_config: Any, max_cache_length: int) -> int:
    """Tokens that a call of `generate()` reserves. Since transformers 5.13, a config may ask for more than needed."""
    return max(max_cache_length, vars(generation_config).get("max_cache_len") or 0)


@functools.cache
def default_generation_options() -> dict[str, Any]:
    """The default of each option of `generate()`: what it takes for a model that sets none.

    From transformers 5 on, most options of a `GenerationConfig` are `None`, and their defaults are stored elsewhere.
    """
    model = SimpleNamespace(config=PretrainedConfig(), generation_config=GenerationConfig())
    config, _ = GenerationMixin._prepare_generation_config(model, None)
    return dict(vars(config))


def static_shape(model: Any) -> tuple[list[int], list[int]] | None:
    """kv_heads and head_dim of each layer of a static cache; `None` if the config does not say what a device holds."""
    if len(set(vars(model).get("hf_device_map", {}).values())) > 1 or (model.tp_size or 1) > 1:
        return None
    specs, configs = layer_specs(model.config), layer_configs(model.config)
    dims = [head_dims(configs[spec.index]) for spec in specs]
    if not all(dims):
        return None
    heads = [kv_heads(ConfigNumbers(configs[spec.index]), spec.layer_type) for spec in specs]
    return heads, [own[0] for own in dims if own is not None]


def model_inputs(
    model: Any, input_ids: torch.Tensor, new_tokens: int, model_kwargs: dict[str, Any], is_first: bool = False
) -> dict[str, Any]:
    """What a model's `prepare_inputs_for_generation` returns for the last `new_tokens` of `input_ids`.

    `is_first` says that its cache has seen nothing: Mamba models read a mask then only.
    """
    # Only for the first pass, it returns images.
    is_first = is_first or model_kwargs.get("pixel_values") is not None
    arguments: dict[str, Any] = {"is_first_iteration": is_first} if KNOWS_FIRST_ITERATION else {}
    prepare = functools.partial(type(model).prepare_inputs_for_generation, model, input_ids)
    return with_cache(model, input_ids, prepare, {**arguments, **_slice_of(input_ids, new_tokens), **model_kwargs})


def _slice_of(input_ids: torch.Tensor, new_tokens: int) -> dict[str, Any]:
    """The argument that says how many tokens at the end of `input_ids` are new."""
    if not SLICES_BY_CACHE_POSITION:
        return {"next_sequence_length": new_tokens}
    return {
        "cache_position": torch.arange(input_ids.shape[1] - new_tokens, input_ids.shape[1], device=input_ids.device)
    }


def with_cache(
    model: Any, input_ids: torch.Tensor, prepare: Callable[..., dict[str, Any]], model_kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """What `prepare_inputs_for_generation` returns, with the cache that it is given.

    A model that reads the whole sequence again, with other factors of its RoPE, gives up the cache, so that a pass
    makes one of transformers. It gets its own cache, emptied.

    Args:
        model: the model.
        input_ids: the whole sequence, `[batch, tokens]`.
        prepare: that method, which lacks its further arguments alone.
        model_kwargs: these arguments.
    """
    name, inputs = cache_argument.name_in_generate(model), prepare(**model_kwargs)
    given = model_kwargs.get(name)
    if given is None or inputs.get(name) is not None or model_types.reads_again_behind(model) is None:
        return inputs
    # Up to 5.17 at least, transformers returned the new tokens alone, as if the model had kept its cache.
    inputs = prepare(**{**model_kwargs, **_slice_of(input_ids, input_ids.shape[1]), name: None})
    given.reset()
    return {**inputs, name: given}


def encoded_for(model: Any, model_kwargs: Mapping[str, Any]) -> torch.Tensor | None:
    """The output of an encoder `[batch, tokens, hidden]` that a call's cross-attention reads; `None` without it.

    A decoder alone (BLIP's for texts, BERT's, Whisper's) may be given one as well. Its code then reads its cache as a
    pair, which it makes of transformers' DynamicCache at most.
    """
    outputs = model_kwargs.get("encoder_outputs")
    given = model_kwargs.get("encoder_hidden_states") if outputs is None else outputs
    # Whisper's decoder may be given the tensor itself.
    encoded: torch.Tensor | None = given if isinstance(given, torch.Tensor | None) else given[0]
    if encoded is None or model.config.is_encoder_decoder:
        return encoded
    return encoded if model_types.knows_pairs(model) else None


def own_positions(model: Any, input_ids: torch.Tensor, model_kwargs: Mapping[str, Any]) -> torch.Tensor | None:
    """The positions that a model gives the tokens of prompts and images, `[axes, batch, tokens]`.

    Args:
        model: the model.
        input_ids: whole prompts, `[batch, tokens]`.
        model_kwargs: arguments of the model for them, without a cache.

    Returns:
        `None` if the model counts tokens like others.
    """
    method = "_prepare_position_ids_for_generation"
    if not PREPARES_POSITIONS or getattr(type(model), method) is getattr(GenerationMixin, method):
        return None
    mask = model_kwargs.get("attention_mask")
    arguments = {**model_kwargs, "attention_mask": torch.ones_like(input_ids) if mask is None else mask}
    return model._prepare_position_ids_for_generation(input_ids, arguments)  # type: ignore[no-any-return]


REQUIRES_GRADIENTS = ("make_inputs_require_grads", "make_inputs_require_grad")
"""Hooks with which transformers, PEFT and TRL let gradients through checkpoints of a frozen model."""


def leaves_states_as_they_are(hook: Any) -> bool:
    """Whether a hook of a module is one that a library put there, and that changes no states.

    One is left there once hidden states or attention were asked for, and keeps what a module returns in calls that ask
    for it again. Another has what a module returns require gradients.
    """
    if not isinstance(hook, FunctionType):
        return False
    keeps_outputs = hook.__module__ == f"{transformers.__name__}.utils.output_capturing"
    return keeps_outputs or (
        hook.__name__ in REQUIRES_GRADIENTS and hook.__module__.partition(".")[0] in ("transformers", "peft", "trl")
    )


def replaces_cross_attention_cache(model: Any) -> bool:
    """Whether a model (t5gemma) replaces the cross-attention cache by one that it makes from a config."""
    return bool(type(model)._prepare_cache_for_generation is not GenerationMixin._prepare_cache_for_generation)


def makes_own_static_cache(model: Any, name: str) -> bool:
    """Whether `name` is that of a static cache, which `model` must make itself.

    Either the model has its own code to size static caches, and knows more about its layers than its config says (the
    vision layers of mllama), or its forward pass assumes attention over the whole reservation (BLOOM's alibi, before
    5.21).
    """
    return name in configuration_utils.ALL_STATIC_CACHE_IMPLEMENTATIONS and (
        masks_the_whole_reservation(model)
        # Before 5.1 no model had its own.
        or (STATIC_CACHES_MADE_APART and type(model)._prepare_static_cache is not GenerationMixin._prepare_static_cache)
    )


def masks_the_whole_reservation(model: Any) -> bool:
    """Whether `generate()` makes masks for all slots of a static cache of this model, in eager code as well."""
    return bool(model.config.model_type == "bloom" and BLOOM_MASKS_RESERVATION)


def gives_windows_full_masks(model: Any) -> bool:
    """Whether the masks that `generate()` makes before a compiled pass show layers with a window every token.

    transformers' table has the mask of full attention for windows beside a recurrent state (inkling2, in 5.23). A model
    may make its masks itself.
    """
    table: dict[str, Any] = vars(masking_utils).get("LAYER_PATTERN_TO_MASK_FUNCTION_MAPPING", {})
    window = "sliding_attention"
    wrong = {
        layer_type
        for layer_type, masks in table.items()
        if isinstance(masks, dict) and masks.get(window) is masking_utils.create_causal_mask
    }
    # As transformers asks.
    makes_its_own = getattr(model, "create_masks_for_generate", None) is not None
    layer_types = vars(model.config.get_text_config(decoder=True)).get("layer_types")
    return not makes_its_own and not wrong.isdisjoint(layer_types or ())


def full_generation_config(model: Any, arguments: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The `GenerationConfig` of a call, with all defaults filled in, and the arguments that are for the model."""
    options = {name: value for name, value in arguments.items() if name not in SIGNATURE.parameters}
    config, model_kwargs = model._prepare_generation_config(arguments.get("generation_config"), **options)
    return config, model_kwargs


def mask_of_prompts(model: Any, generation_config: Any, ids: torch.Tensor) -> torch.Tensor | None:
    """The mask that `generate()` makes for prompts that come without one, `None` if all of their tokens count.

    A pad token is padding, unless it may end a sequence: then it may as well be text. Without a pad token,
    `generate()` pads with one that ends a sequence.

    Args:
        model: the model.
        generation_config: the full config of the call.
        ids: the prompts, `[rows, tokens]`.
    """
    pad, ends = generation_config.pad_token_id, generation_config.eos_token_id
    may_be_text = pad is None or (ends is not None and bool((torch.as_tensor(ends) == pad).any()))
    if may_be_text or "attention_mask" not in forward_arguments(model):
        return None
    mask = ids.ne(pad).long()
    return None if bool(mask.all()) else mask


def uses_transformers_generate(model: Any, arguments: Mapping[str, Any]) -> bool:
    """Whether a call runs the `generate()` of transformers, rather than one of the model or of the caller."""
    return (
        isinstance(model, GenerationMixin)
        and type(model).generate is GenerationMixin.generate
        and "generate" not in vars(model)
        and arguments.get("custom_generate") is None
    )


def sequences_per_prompt(generation_config: Any) -> int:
    """How many sequences are generated side by side from each prompt: its beams, or its samples."""
    return max(generation_config.num_beams or 1, generation_config.num_return_sequences or 1)


def forward_arguments(model: Any) -> frozenset[str]:
    """Names of the arguments that the forward pass of a model takes."""
    return frozenset(inspect.signature(model.forward).parameters)


def logits_processors(model: Any, generation_config: Any, ids: torch.Tensor, given: Mapping[str, Any]) -> Any:
    """What `generate()` would do to the scores of the next token of one prompt.

    Args:
        model: the model.
        generation_config: the full config, with the special tokens as tensors (`prepare_special_tokens`).
        ids: the prompt, `[1, tokens]`.
        given: arguments of `generate()`: `logits_processor` and `prefix_allowed_tokens_fn`.
    """
    return model._get_logits_processor(
        generation_config=generation_config,
        input_ids_seq_length=ids.shape[1],
        encoder_input_ids=ids,
        prefix_allowed_tokens_fn=given.get("prefix_allowed_tokens_fn"),
        logits_processor=transformers.LogitsProcessorList(given.get("logits_processor") or ()),
        device=ids.device,
        model_kwargs={},
    )


def stopping_criteria(model: Any, generation_config: Any, given: Mapping[str, Any]) -> Any:
    """When `generate()` would end; arguments as of `logits_processors`, and `stopping_criteria` and `tokenizer`."""
    return model._get_stopping_criteria(
        generation_config=generation_config,
        stopping_criteria=transformers.StoppingCriteriaList(given.get("stopping_criteria") or ()),
        tokenizer=given.get("tokenizer"),
    )


def prepare_special_tokens(model: Any, generation_config: Any) -> None:
    """Give a config the special tokens as tensors, as `generate()` does for prompts with a mask."""
    model._prepare_special_tokens(generation_config, True, device=model.device)


def prompt_lookup(generation_config: Any, tokens: int) -> Callable[[torch.Tensor], list[int]]:
    """A function that finds drafts of at most so many tokens in the ids of a row, `[1, tokens]`, as `generate()` does.

    Args:
        generation_config: the full config.
        tokens: most tokens of a draft.
    """
    from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

    ends = generation_config.eos_token_id
    finder = PromptLookupCandidateGenerator(
        # Before 5.13 it asks for a token that ends sequences. None has this id.
        eos_token_id=torch.tensor(-1 if ends is None else ends).reshape(-1),
        num_output_tokens=tokens,
        max_matching_ngram_size=generation_config.max_matching_ngram_size or 2,
        max_length=sys.maxsize,
    )

    # Some versions of transformers require it, although a look-up is the same in each iteration.
    is_told = "is_first_iteration" in inspect.signature(finder.get_candidates).parameters
    further = {"is_first_iteration": False} if is_told else {}

    def draft(ids: torch.Tensor) -> list[int]:
        found, _ = finder.get_candidates(ids, **further)
        return list(found[0, ids.shape[1] :].tolist())

    return draft
