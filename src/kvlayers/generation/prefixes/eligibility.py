"""Which calls of `generate()` can use a prefix store, those whose states depend on tokens alone, and on which model."""

import dataclasses
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers.generation.utils import GenerationMode

from kvlayers.generation import registry
from kvlayers.generation.prompt_batch import PromptBatch, is_token_ids
from kvlayers.persistence import weights_id
from kvlayers.persistence.format import canonical
from kvlayers.rope.from_config import depends_on_length
from kvlayers.upstream import cache_argument, compat, generate_calls, model_layers, model_types
from kvlayers.upstream.generate_calls import uses_transformers_generate
from kvlayers.upstream.model_types import kept_states
from kvlayers.utils.transforms import autocast_dtype

MODES = (
    GenerationMode.GREEDY_SEARCH,
    GenerationMode.SAMPLE,
    GenerationMode.BEAM_SEARCH,
    GenerationMode.BEAM_SAMPLE,
)
"""Decoding modes that pass a whole prompt to one model."""

HARMLESS_ARGUMENTS = frozenset(("input_ids", "attention_mask", "tokenizer", "return_legacy_cache"))
"""Arguments on which no state depends except through the ids."""

PADDING_INDEPENDENT_OPTIONS = frozenset((
    "bos_token_id", "cache_config", "cache_implementation", "compile_config", "disable_compile", "diversity_penalty",
    "do_sample", "early_stopping", "eos_token_id", "epsilon_cutoff", "eta_cutoff", "forced_eos_token_id",
    "length_penalty", "max_length", "max_new_tokens", "max_time", "min_length", "min_new_tokens", "min_p", "num_beams",
    "num_return_sequences", "output_attentions", "output_hidden_states", "output_logits", "output_scores",
    "pad_token_id", "prefill_chunk_size", "remove_invalid_values", "renormalize_logits", "suppress_tokens",
    "temperature", "top_h", "top_k", "top_p", "transformers_version", "typical_p", "use_cache",
))  # fmt: skip
"""Options that work the same wherever the padding is. (A repetition penalty expects it on the left, for example.)"""

ID_READERS = ("logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn", "streamer")
"""Arguments that see the ids of a prompt, and may do anything with them."""


class IneligibleError(Exception):
    """A call cannot use a store, for the reason in the message. It never leaves kvlayers."""


def check_model(model: Any, arguments: Mapping[str, Any]) -> None:
    """Raise `IneligibleError` if the states of a model depend on more than tokens, or are not in its cache."""
    name = type(model).__name__
    if not uses_transformers_generate(model, arguments):
        raise IneligibleError(f"{name} has its own generate(), or was given one (custom_generate)")
    if model.config.is_encoder_decoder:
        raise IneligibleError(f"the states of {name} depend on an encoder's input")
    if model_types.decoder_config(model.config) is not model.config or type(model.config).sub_configs:
        raise IneligibleError(f"the states of {name} may depend on more than tokens")
    if not cache_argument.is_taken_by(model):
        raise IneligibleError(f"{name} takes no cache")
    _check_modules(model)
    if not model._supports_default_dynamic_cache():
        raise IneligibleError(f"{name} makes its own cache")
    kept = kept_states(model)
    if kept is not None:
        raise IneligibleError(f"{name} keeps states outside its cache, in {kept}")
    if model_types.decodes_one_token(model.config):
        raise IneligibleError(f"{name} computes other states for tokens that come one by one")
    if depends_on_length(model.config):
        raise IneligibleError(f"the rotation of the keys of {name} depends on the length of the prompt (its rope_type)")
    if len({parameter.device for parameter in model.parameters()}) > 1:
        # Neither a file nor a config says which device the states of a layer belong to.
        raise IneligibleError(f"the weights of {name} are on several devices")
    if cache_argument.passed_in(arguments) is not None:
        raise IneligibleError("it is given a cache")


def _check_modules(model: Any) -> None:
    """Raise `IneligibleError` if a module may compute something else than its class and its weights say."""
    if "prepare_inputs_for_generation" in vars(model):
        # PEFT replaces it for prompt tuning.
        raise IneligibleError(f"its prepare_inputs_for_generation is not the one of {type(model).__name__}")
    for path, module in model.named_modules():
        attributes = vars(module)
        # With dropout, the same tokens have other states in every call.
        if module.training:
            raise IneligibleError(f"{path or 'the model'} is in training mode: call model.eval()")
        # accelerate replaces forward() to load weights, and sets `_hf_hook`.
        if "forward" in attributes and "_hf_hook" not in attributes:
            raise IneligibleError(f"forward() of {path or 'the model'} is not the one of its class")
        # Hooks of the model as a whole do not change its states, and hooks that only take outputs do not either.
        hooks = [] if module is model else [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
        if not all(map(generate_calls.only_captures_outputs, hooks)):
            raise IneligibleError(f"{path} has hooks, on which states may depend")


def check_cache(model: Any, name: str) -> None:
    """Raise `IneligibleError` if the cache called `name` is not one of kvlayers, or its states depend on chunks."""
    if not registry.is_registered(name) or generate_calls.makes_own_static_cache(model, name):
        raise IneligibleError(f"the cache '{name}' of {type(model).__name__} is not one of kvlayers")
    specs = model_layers.layer_specs(model.config)
    if compat.INDEXERS_DEPEND_ON_CHUNKS and any(spec.layer_type == model_layers.INDEXED for spec in specs):
        raise IneligibleError(
            f"on transformers {compat.TRANSFORMERS}, what its indexers choose depends on which tokens came at once"
        )


def check_options(config: Any, arguments: Mapping[str, Any], model_kwargs: Mapping[str, Any]) -> None:
    """Raise `IneligibleError` if a call passes anything but its prompt to the model.

    Args:
        config: the full `GenerationConfig` of the call.
        arguments: arguments of the call.
        model_kwargs: the arguments among them that are passed to the model.
    """
    given = {name for name, value in model_kwargs.items() if value is not None}
    others = sorted(given - HARMLESS_ARGUMENTS)
    if others:
        raise IneligibleError(f"states may depend on {', '.join(others)}")
    if arguments.get("assistant_model") is not None or config.is_assistant:
        raise IneligibleError("it decodes with an assistant model, or is one")
    if config.cache_implementation == "paged":
        raise IneligibleError("it uses continuous batching")
    mode = config.get_generation_mode()
    if mode not in MODES:
        raise IneligibleError(f"its decoding mode is {mode.value}")
    if config.use_cache is False:
        raise IneligibleError("use_cache is False")
    if config.token_healing:
        raise IneligibleError("token_healing changes the prompt")
    if config.return_dict_in_generate and (config.output_attentions or config.output_hidden_states):
        raise IneligibleError("the attentions or hidden states of the prompt must be returned")


def ids_name(arguments: Mapping[str, Any]) -> str:
    """Name of the argument in which a call was given its ids."""
    return "inputs" if arguments.get("inputs") is not None else "input_ids"


def prompts_of(config: Any, arguments: Mapping[str, Any]) -> PromptBatch:
    """The prompts of a call.

    Raises:
        IneligibleError: there are no prompts, or it is not clear which of their tokens are padding.
    """
    ids, mask = arguments.get(ids_name(arguments)), arguments.get("attention_mask")
    if not is_token_ids(ids) or not (mask is None or isinstance(mask, Tensor)):
        raise IneligibleError("its prompts are not token ids, int64 [rows, tokens]")
    ids = torch.as_tensor(ids)
    if mask is None and config.pad_token_id is not None and bool((ids == config.pad_token_id).any()):
        raise IneligibleError("the prompts contain the pad token, and no attention_mask says whether it is padding")
    prompts = PromptBatch.from_mask(ids, mask)
    if prompts is None:
        raise IneligibleError("its attention_mask excludes other tokens than padding on the left")
    return prompts


def options_of(config: Any) -> dict[str, Any]:
    """The options of a call's cache.

    Raises:
        IneligibleError: they are not a mapping from names to values.
    """
    options = config.cache_config
    if options is None:
        return {}
    if not isinstance(options, Mapping) or not all(isinstance(name, str) for name in options):
        raise IneligibleError("its cache_config is not a mapping from names to values")
    return dict(options)


def options_as_text(options: Mapping[str, Any]) -> str:
    """The options of a cache as text. Equal options have the same text in every process.

    Raises:
        IneligibleError: an option cannot be written as text.
    """
    try:
        return canonical({name: _plain(value) for name, value in options.items()})
    except (TypeError, ValueError):
        raise IneligibleError("the options of its cache cannot be written as text, and so not be compared") from None


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {type(value).__name__: dataclasses.asdict(value)}
    return str(value) if isinstance(value, torch.dtype | torch.device) else value


def model_identity(model: torch.nn.Module) -> str:
    """A text that differs between models that compute different states.

    It depends on the weights, the active adapters and autocast. Weights are hashed again if torch has counted a write
    to one of them, or if a few sampled elements have changed, as after a training step or after merging an adapter; see
    `weights_id`.

    Raises:
        ConfigError: the weights are not in memory.
    """
    weights = weights_id(model)
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    autocast = autocast_dtype(device)
    return canonical([weights, None if autocast is None else str(autocast), list(_adapters(model))])


def _adapters(model: torch.nn.Module) -> Iterator[list[Any]]:
    """The PEFT adapters that are active in each layer. Their weights are weights of the model; this is not."""
    tuners: Any = sys.modules.get("peft.tuners.tuners_utils")
    if tuners is None:
        # No module can be of a class that nobody has imported.
        return
    for name, module in model.named_modules():
        if isinstance(module, tuners.BaseTunerLayer):
            scaling = vars(module).get("scaling", {})
            yield [
                name,
                sorted(module.active_adapters),
                bool(module.disable_adapters),
                sorted(module.merged_adapters),
                sorted((str(adapter), float(scale)) for adapter, scale in scaling.items()),
            ]
