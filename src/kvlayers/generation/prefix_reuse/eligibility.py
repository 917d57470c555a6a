"""Which calls of `generate()` can use a prefix store, those whose states depend on tokens alone, and on which model."""

import dataclasses
import sys
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers.generation.utils import GenerationMode

from kvlayers.core.cache import Cache
from kvlayers.core.from_config import HYBRID, RECURRENT
from kvlayers.errors import ConfigError
from kvlayers.generation import cache_by_name
from kvlayers.generation.prefill import reason_in_modules
from kvlayers.generation.prefix_reuse.active_store import ActiveStore
from kvlayers.persistence.fingerprint import Remembered
from kvlayers.persistence.format import canonical
from kvlayers.prefix import Hit
from kvlayers.prefix.keys import common_tokens, tokens_of
from kvlayers.rope.from_config import depends_on_length
from kvlayers.upstream import cache_argument, compat, generate_calls, implementations, model_layers, model_types
from kvlayers.utils.transforms import autocast_dtype


@dataclasses.dataclass(frozen=True)
class PromptBatch:
    """Prompts side by side, padded on the left.

    Attributes:
        input_ids: int64 `[rows, tokens]`.
        padding: tokens of padding before each prompt.
    """

    input_ids: Tensor
    padding: tuple[int, ...]

    @classmethod
    def from_mask(cls, input_ids: Tensor, attention_mask: Tensor | None) -> "PromptBatch | None":
        """The prompts of a padded batch; `None` if the mask excludes anything but the first tokens of a row.

        Args:
            input_ids: int64 `[rows, tokens]`.
            attention_mask: `[rows, tokens]`, 0 for padding; `None` if there is no padding.
        """
        rows, tokens = input_ids.shape
        if attention_mask is None:
            return cls(input_ids, (0,) * rows)
        if attention_mask.shape != input_ids.shape:
            return None
        is_token = attention_mask.ne(0).cpu()
        padding = tokens - is_token.sum(dim=1)
        is_left = torch.equal(is_token, torch.arange(tokens) >= padding[:, None])
        return cls(input_ids, tuple(padding.tolist())) if is_left and int(padding.max()) < tokens else None

    def __len__(self) -> int:
        return len(self.padding)

    @property
    def is_padded(self) -> bool:
        """Whether any prompt has padding before it."""
        return any(self.padding)

    def row(self, index: int) -> Tensor:
        """The tokens of one prompt, `[1, tokens]`."""
        return self.input_ids[index : index + 1, self.padding[index] :]

    def common_prefix_length(self) -> int:
        """How many tokens all prompts start with; always less than the length of the shortest prompt."""
        first, *others = (tokens_of(self.row(index)) for index in range(len(self)))
        most = self.input_ids.shape[1] - max(self.padding) - 1
        return min([most, *(common_tokens(first, other) for other in others)])

    def with_padding_after(self, common: int) -> tuple[Tensor, Tensor]:
        """The prompts with their padding moved behind the first `common` tokens, and the mask that excludes it.

        If all prompts start with these tokens, the tokens then have the same slots in every row and can be held once.

        Returns:
            Ids and mask, int64 `[rows, tokens]`.
        """
        ids, mask = self.input_ids.clone(), torch.ones_like(self.input_ids)
        for index, padding in enumerate(self.padding):
            ids[index, :common] = self.input_ids[index, padding : padding + common]
            ids[index, common : common + padding] = self.input_ids[index, :padding]
            mask[index, common : common + padding] = 0
        return ids, mask


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


def check_generate(model: Any, arguments: Mapping[str, Any]) -> None:
    """Raise `IneligibleError` if a call is not for the `generate()` of transformers, or if tokens look ahead."""
    if not generate_calls.uses_transformers_generate(model, arguments):
        raise IneligibleError(f"{type(model).__name__} has its own generate(), or was given one (custom_generate)")
    if model.config.model_type in model_types.ATTENDS_AHEAD:
        raise IneligibleError(f"the tokens of {type(model).__name__} attend to those behind them")


_reasons: Remembered[str | None] = Remembered()
"""For each model, what in its config keeps calls from using a store."""


def _check_model(model: Any) -> None:
    """Raise `IneligibleError` if the states of a model depend on more than tokens, or are not in its cache."""
    reason = _reasons.of(model, vars(model.config), lambda: _reason_in_config(model))
    if reason is not None:
        raise IneligibleError(reason)
    name = type(model).__name__
    if (kept := model_types.kept_states(model)) is not None:
        raise IneligibleError(f"{name} keeps states outside its cache, in {kept}")
    # Neither a file nor a config says which device the states of a layer belong to.
    if len({parameter.device for parameter in model.parameters() if not parameter.is_meta}) > 1:
        raise IneligibleError(f"the weights of {name} are on several devices")
    if (reason := reason_in_modules(model)) is not None:
        raise IneligibleError(reason)


def _reason_in_config(model: Any) -> str | None:
    """What in the class or the config of a model lets states depend on more than tokens, `None` for nothing."""
    name, config = type(model).__name__, model.config
    if config.is_encoder_decoder:
        return f"the states of {name} depend on an encoder's input"
    has_parts = model_types.decoder_config(config) is not config or type(config).sub_configs
    reasons = {
        f"the states of {name} may depend on more than tokens": has_parts and not model_types.image_arguments(config),
        f"{name} takes no cache": not cache_argument.is_taken_by(model),
        f"{name} makes its own cache": not model._supports_default_dynamic_cache(),
        f"{name} computes other states for tokens that come one by one": model_types.depends_on_passes(config),
        f"the rotation of the keys of {name} depends on the length of the prompt (its rope_type)": depends_on_length(
            config
        ),
    }
    found = next((reason for reason, applies in reasons.items() if applies), None)
    if found is not None:
        return found
    types = {spec.layer_type for spec in model_layers.layer_specs(config)}
    if types.intersection(model_layers.INDEXED):
        # Of equal scores, topk() takes others if there are others to choose from.
        return f"what the indexers of {name} choose depends on which tokens came at once"
    if types.intersection((*RECURRENT, *HYBRID)) and not compat.MODELS_PASS_COLUMNS:
        return f"before transformers 5.15, {name} reads several tokens as if there were no states before them"
    return None


def check_options(
    config: Any, arguments: Mapping[str, Any], model_kwargs: Mapping[str, Any], of_images: Collection[str]
) -> None:
    """Raise `IneligibleError` if a call passes anything but its prompt to the model.

    Args:
        config: the full `GenerationConfig` of the call.
        arguments: arguments of the call.
        model_kwargs: the arguments among them that are passed to the model.
        of_images: names of those that a store can tell images apart by.
    """
    known = HARMLESS_ARGUMENTS.union(of_images)
    others = sorted({name for name, value in model_kwargs.items() if value is not None} - known)
    is_assisted = arguments.get("assistant_model") is not None or config.is_assistant
    mode = config.get_generation_mode()
    returns_states = config.output_attentions or config.output_hidden_states
    reasons = {
        f"states may depend on {', '.join(others)}": others,
        "it decodes with an assistant model, or is one": is_assisted,
        "it uses continuous batching": config.cache_implementation == "paged",
        f"its decoding mode is {mode.value}": mode not in MODES,
        "use_cache is False": config.use_cache is False,
        "token_healing changes the prompt": config.token_healing,
        "the attentions or hidden states of the prompt must be returned": config.return_dict_in_generate
        and returns_states,
    }
    for reason, applies in reasons.items():
        if applies:
            raise IneligibleError(reason)


def ids_name(arguments: Mapping[str, Any]) -> str:
    """Name of the argument in which a call was given its ids."""
    return "inputs" if arguments.get("inputs") is not None else "input_ids"


def prompts_of(model: Any, config: Any, arguments: Mapping[str, Any]) -> PromptBatch:
    """The prompts of a call. Which of their tokens are padding is what `generate()` takes for padding.

    Raises:
        IneligibleError: there are no prompts, or their padding is not on the left.
    """
    ids, mask = arguments.get(ids_name(arguments)), arguments.get("attention_mask")
    if (
        not isinstance(ids, Tensor)
        or ids.dtype != torch.int64
        or ids.dim() != 2
        or 0 in ids.shape
        or not isinstance(mask, Tensor | None)
    ):
        raise IneligibleError("its prompts are not token ids, int64 [rows, tokens]")
    if mask is None:
        mask = generate_calls.mask_of_prompts(model, config, ids)
    prompts = PromptBatch.from_mask(ids, mask)
    if prompts is None:
        raise IneligibleError("its attention_mask, or its pad token, excludes other tokens than padding on the left")
    return prompts


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


def model_identity(model: torch.nn.Module, weights: str, device: torch.device) -> str:
    """A text that differs between models that compute different states.

    Args:
        model: the model. The text depends on its active adapters, on autocast, and on the implementations of attention
            and of experts.
        weights: the id of its weights.
        device: the device of the model.

    Raises:
        IneligibleError: an implementation cannot be compared.
    """
    autocast = autocast_dtype(device)
    names, incomparable = implementations.of(model)
    if incomparable is not None:
        raise IneligibleError(f"{incomparable} is no function of transformers, and cannot be compared")
    return canonical([weights, None if autocast is None else str(autocast), names, list(_adapters(model))])


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


class StorePart:
    """The part of a prefix store that belongs to one model and one cache.

    Whatever uses a store makes one first, which decides whether it can, after `check_generate` for its call.

    Args:
        model: the model.
        active: the store.
        cache_name: name of the cache.
        options: options of the cache.

    Attributes:
        active: as passed.
        device: device of the model.

    Raises:
        IneligibleError: the states depend on more than tokens and the weights of the model, the cache is not one of
            kvlayers, its options are no text, or the model cannot be identified.
    """

    def __init__(self, model: Any, active: ActiveStore, cache_name: str, options: Mapping[str, Any]) -> None:
        _check_model(model)
        if not cache_by_name.is_made_here(model, cache_name):
            raise IneligibleError(f"the cache '{cache_name}' of {type(model).__name__} is not one of kvlayers")
        self.active, self.device = active, model_layers.model_device(model)
        try:
            identity = model_identity(model, active.store.weights_id(model), self.device)
        except ConfigError as error:
            raise IneligibleError(f"its weights cannot be identified ({str(error).partition(': ')[0]})") from error
        self._label = f"{identity} {cache_name} {options_as_text(options)}"
        self._key = {"config": model.config, "namespace": active.namespace}

    @classmethod
    def if_usable(
        cls, model: Any, active: ActiveStore | None, cache_name: str, options: Mapping[str, Any]
    ) -> "StorePart | None":
        """The part; `None` without a store, and if it cannot be used, after the store was told why.

        Raises:
            OptionError: the store is required, and cannot be used.
        """
        if active is None:
            return None
        try:
            check_generate(model, {})
            return cls(model, active, cache_name, options)
        except IneligibleError as reason:
            active.on_bypass(str(reason))
            return None

    def is_of_same_states(self, other: "StorePart") -> bool:
        """Whether both are of the same model in the same condition, so that what one has computed is for the other."""
        return self._label == other._label

    def lookup(self, ids: Tensor, division: str = "", leave: int = 1) -> Hit:
        """The longest stored prefix of tokens.

        Args:
            ids: the tokens.
            division: how stored tokens were divided into passes, if their states depend on it.
            leave: how many of the last tokens are not looked for.
        """
        return self.active.store.lookup(ids, model=self._label + division, leave=leave, **self._key)

    def insert(self, ids: Tensor, cache: Cache, division: str = "") -> None:
        """Insert a cache for the tokens that it has seen, if the store can take it."""
        if cache.steps_taken:
            self.active.store.record_refusal("its cache ran out of memory, and has given way")
            return
        # The caller gets the result whatever happens to the store: a full disk, no memory for a copy, a bad policy.
        try:
            self.active.store.insert(ids, cache, model=self._label + division, **self._key)
        except Exception as error:
            self.active.store.record_refusal(f"{type(error).__name__}: {error}")
