"""Which calls of `generate()` can go by a store of prefixes: those whose states depend on tokens alone."""

import dataclasses
import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers.generation.utils import GenerationMode

from kvlayers.generation.calls import generates_as_transformers
from kvlayers.generation.prompt_batch import PromptRows, is_token_ids
from kvlayers.persistence.format import canonical
from kvlayers.rope.from_config import depends_on_length
from kvlayers.upstream import model_types

MODES = (
    GenerationMode.GREEDY_SEARCH,
    GenerationMode.SAMPLE,
    GenerationMode.BEAM_SEARCH,
    GenerationMode.BEAM_SAMPLE,
)
"""Ways of generating that pass a prompt to one model, as a whole."""

UNRELATED = frozenset(("input_ids", "attention_mask", "tokenizer", "return_legacy_cache"))
"""Arguments for the model, or beside it, on which no state depends but through the ids."""


class UnusableError(Exception):
    """A call that cannot go by a store; the message says why. For this package alone."""


def check_model(model: Any, arguments: Mapping[str, Any]) -> None:
    """Raise `UnusableError` where states of a model depend on more than tokens, or are not in its cache."""
    name = type(model).__name__
    if not generates_as_transformers(model, arguments):
        raise UnusableError(f"{name} decodes in a way of its own, or one that was given (custom_generate)")
    if model.config.is_encoder_decoder:
        raise UnusableError(f"the states of {name} depend on an encoder's input")
    if model_types.decoder_config(model.config) is not model.config or type(model.config).sub_configs:
        raise UnusableError(f"the states of {name} may depend on more than tokens")
    if model_types.cache_argument(model) not in inspect.signature(model.forward).parameters:
        raise UnusableError(f"{name} takes no cache")
    _check_modules(model)
    if not model._supports_default_dynamic_cache():
        raise UnusableError(f"{name} makes a cache of its own")
    if model.config.model_type in model_types.KEEPS_STATES_IN_MODULES:
        raise UnusableError(f"{name} keeps states outside of its cache")
    if depends_on_length(model.config):
        raise UnusableError(f"{name} rotates keys by how long their prompt is (its rope_type)")
    if len({parameter.device for parameter in model.parameters()}) > 1:
        # Which layer's states belong where, neither a file nor a config says.
        raise UnusableError(f"the weights of {name} are on several devices")
    if arguments.get(model_types.cache_argument(model)) is not None:
        raise UnusableError("it is given a cache")


def _check_modules(model: Any) -> None:
    """Raise `UnusableError` where a module computes something else than its class and its weights say."""
    if "prepare_inputs_for_generation" in vars(model):
        # As PEFT does for prompt tuning.
        raise UnusableError(f"its prepare_inputs_for_generation is not that of {type(model).__name__}")
    for path, module in model.named_modules():
        own = vars(module)
        # Dropout: the next call would be given other states for the same tokens.
        if module.training:
            raise UnusableError(f"{path or 'the model'} is in training mode: call model.eval()")
        # accelerate replaces forward() to bring weights, and notes its hook.
        if "forward" in own and "_hf_hook" not in own:
            raise UnusableError(f"forward() of {path or 'the model'} is not that of its class")
        # What is done to the outside of the model is none of its states'.
        if module is not model and (module._forward_hooks or module._forward_pre_hooks):
            raise UnusableError(f"{path} has hooks, on which states may depend")


def check_options(config: Any, arguments: Mapping[str, Any], model_kwargs: Mapping[str, Any]) -> None:
    """Raise `UnusableError` where a call does not pass its prompt to the model, and nothing else.

    Args:
        config: its options, with their defaults.
        arguments: what it was given.
        model_kwargs: what of that is meant for the model.
    """
    others = sorted(name for name, value in model_kwargs.items() if value is not None and name not in UNRELATED)
    if others:
        raise UnusableError(f"states may depend on {', '.join(others)}")
    if arguments.get("assistant_model") is not None or config.is_assistant:
        raise UnusableError("it decodes with an assistant, or as one")
    if config.cache_implementation == "paged":
        raise UnusableError("it is one of continuous batches")
    mode = config.get_generation_mode()
    if mode not in MODES:
        raise UnusableError(f"it decodes by {mode.value}")
    if config.use_cache is False:
        raise UnusableError("use_cache is False")
    if config.token_healing:
        raise UnusableError("token_healing changes the prompt")
    if config.return_dict_in_generate and (config.output_attentions or config.output_hidden_states):
        raise UnusableError("what the prompt's tokens attend to, or their hidden states, are to be returned")


def ids_name(arguments: Mapping[str, Any]) -> str:
    """Under which name a call was given its ids."""
    return "inputs" if arguments.get("inputs") is not None else "input_ids"


def prompts_of(config: Any, arguments: Mapping[str, Any]) -> PromptRows:
    """The prompts of a call.

    Raises:
        UnusableError: it was given none, or it is not clear which of their tokens are padding.
    """
    ids, mask = arguments.get(ids_name(arguments)), arguments.get("attention_mask")
    if not is_token_ids(ids) or not (mask is None or isinstance(mask, Tensor)):
        raise UnusableError("its prompts are no ids of tokens, int64 [rows, tokens]")
    ids = torch.as_tensor(ids)
    if mask is None and config.pad_token_id is not None and bool((ids == config.pad_token_id).any()):
        raise UnusableError("the prompts have a pad token, and no attention_mask says whether it is padding")
    prompts = PromptRows.of(ids, mask)
    if prompts is None:
        raise UnusableError("its attention_mask leaves out other tokens than padding on the left")
    return prompts


def options_of(config: Any) -> dict[str, Any]:
    """The options of a call's cache.

    Raises:
        UnusableError: they are none.
    """
    options = config.cache_config
    if options is None:
        return {}
    if not isinstance(options, Mapping) or not all(isinstance(name, str) for name in options):
        raise UnusableError("its cache_config is no mapping of options by their names")
    return dict(options)


def options_as_text(options: Mapping[str, Any]) -> str:
    """The options of a cache as a text that is the same for the same ones, in every process.

    Raises:
        UnusableError: one of them cannot be written.
    """
    try:
        return canonical({name: _plain(value) for name, value in options.items()})
    except (TypeError, ValueError):
        raise UnusableError("the options of its cache cannot be compared with those of others") from None


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {type(value).__name__: dataclasses.asdict(value)}
    return str(value) if isinstance(value, torch.dtype | torch.device) else value
