"""Facts about models, their configs and their tokenizers that do not depend on the version of transformers."""

import copy
import dis
import inspect
import itertools
import math
import re
import sys
import types
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

# Transformers 5 spells it PreTrainedConfig, and keeps this name as well.
from transformers import PretrainedConfig

from kvlayers.errors import ConfigError, OptionError
from kvlayers.upstream import compat

SCANS_FROM_ZERO = ("falcon_mamba", "jamba", "mamba", "zamba")
"""Model types whose scan over several tokens cannot start from a state: later tokens are passed one by one."""

DECODES_ONE_TOKEN = ("prophetnet", "xlm-prophetnet")
"""Model types that refuse several tokens behind others, since they have no mask for them."""

HAS_RELATIVE_POSITIONS = ("bloom", "mpt")
"""Model types without `position_ids`: their attention depends on the distance between tokens (ALiBi)."""

HAS_NO_POSITIONS = ("mamba", "mamba2", "falcon_mamba", "rwkv", "jamba")
"""Model types that compute the same for a token wherever it stands: their states know the order."""

BIASED_BY_COLUMN = ("bloom", "mpt", "prophetnet", "xlm-prophetnet")
"""Model types that add a bias to the scores of attention, or hide tokens, by the column of a token in the cache."""

SCALES_BY_SLOT = ("llama4_text",)
"""Model types that scale queries by their slots in the sequence, whatever their `position_ids`."""

HAS_IMAGES_IN_PLACE = ("gemma3", "idefics3", "llava", "qwen2_5_vl", "qwen3_vl")
"""Model types whose images stand in the sequence, as tokens with one id: `image_token_id` of the config. What is
computed of a token or an image does not depend on what follows. Tests show it for each of these."""

HAS_IMAGES_APART = ("mllama",)
"""Model types with layers of cross-attention, `cross_attention_layers` of the config, which hold states of images."""

FOR_ENCODERS = frozenset(
    ("pixel_values", "image_grid_thw", "pixel_attention_mask", "aspect_ratio_ids", "aspect_ratio_mask")
)
"""Arguments of models that only their encoder of images reads."""

TOKEN_TYPES = frozenset(("token_type_ids", "mm_token_type_ids"))
"""Arguments of models that say which tokens are placeholders, `[rows, tokens]`: 1 for those of images, 0 for text."""

FOR_IMAGES_IN_PLACE = frozenset(("pixel_values", "image_grid_thw", "pixel_attention_mask")) | TOKEN_TYPES
FOR_IMAGES_APART = frozenset(("pixel_values", "aspect_ratio_ids", "aspect_ratio_mask", "cross_attention_mask"))

ATTENDS_WITHIN_IMAGES = ("gemma3",)
"""Model types whose tokens of an image attend to each other."""

ATTENDS_AHEAD = ("paligemma",)
"""Model types whose tokens attend to all of the prompt, so that a prefix has other states in another prompt."""

MADE_ANEW = ("rope_deltas",)
"""Tensors that modules keep between passes, but that follow from the `position_ids` of a call, if it has any."""

HAS_A_LAYER_FOR_EACH_TYPE = ("zamba", "zamba2")
"""Model types with as many layers as `layer_types` has entries, whatever `num_hidden_layers` says."""


def config_of(model_or_config: object) -> PretrainedConfig:
    """The config of a model, or the config itself.

    Raises:
        ConfigError: it is neither of them.
    """
    # By attribute, since a model that wraps another one (torch.compile) forwards it.
    found = (
        getattr(model_or_config, "config", None) if isinstance(model_or_config, torch.nn.Module) else model_or_config
    )
    if not isinstance(found, PretrainedConfig):
        from transformers import PreTrainedTokenizerBase

        seen = "tokenizer" if isinstance(found, PreTrainedTokenizerBase) else type(model_or_config).__name__
        raise ConfigError(
            f"`config` must be a model or its config (a PreTrainedConfig), got a {seen}: pass the model itself, "
            f"{'or AutoConfig.from_pretrained(name)' if seen == 'str' else 'or model.config'}."
        )
    return found


def is_peft_model(model: Any) -> bool:
    """Whether PEFT has wrapped a model."""
    peft: Any = sys.modules.get("peft")
    # No model can be of a class that nobody has imported.
    return peft is not None and isinstance(model, peft.PeftModel)


def unwrapped(model: Any) -> Any:
    """The model of transformers that PEFT or `torch.compile` has wrapped, with the adapters that are within it.

    Raises:
        OptionError: PEFT puts a learned prompt before each text, which only its wrapper does.
    """
    if is_peft_model(model):
        if model.active_peft_config.is_prompt_learning:
            raise OptionError(
                "`model` must not put a learned prompt before each text, got one with such an adapter "
                f"({model.peft_type.value}): use model.generate()."
            )
        return unwrapped(model.get_base_model())
    dynamo: Any = sys.modules.get("torch._dynamo")
    is_compiled = dynamo is not None and isinstance(model, dynamo.OptimizedModule)
    return unwrapped(model._orig_mod) if is_compiled else model


def decoder_config(model_or_config: object) -> PretrainedConfig:
    """The config of the decoder's text model. For a plain language model, this is its config.

    Raises:
        ConfigError: it is neither a model nor a config.
    """
    config = config_of(model_or_config)
    decoder = config.get_text_config(decoder=True)
    # T5 has another name for the number of its decoder layers, which transformers overlooks.
    layers = vars(config).get("num_decoder_layers") if config.is_encoder_decoder else None
    if decoder.model_type in HAS_A_LAYER_FOR_EACH_TYPE:
        layers = len(decoder.layers_block_type)
    if isinstance(layers, int) and decoder.num_hidden_layers != layers:
        decoder = copy.copy(decoder)
        decoder.num_hidden_layers = layers
    return decoder


def image_arguments(config: PretrainedConfig) -> frozenset[str]:
    """Arguments of a model about images, by which the states of a prefix are known; none if it is not known how."""
    if not compat.PREPARES_POSITIONS:
        return frozenset()
    if config.model_type in HAS_IMAGES_APART:
        # Before, masks of images were cut by `cache_position`.
        return frozenset() if compat.MASKS_BY_CACHE_POSITION else FOR_IMAGES_APART
    is_right = compat.MASKS_IMAGES_BY_POSITION or config.model_type not in ATTENDS_WITHIN_IMAGES
    return FOR_IMAGES_IN_PLACE if is_right and config.model_type in HAS_IMAGES_IN_PLACE else frozenset()


def listed_per_layer(decoder: PretrainedConfig, field: str) -> list[Any]:
    """The entry of each layer in a field of a config that lists them.

    A list may have more entries than the model has layers, as if only the first layers of a checkpoint were loaded.

    Args:
        decoder: config of the decoder, see `decoder_config`.
        field: name of the field.

    Raises:
        ConfigError: the list has fewer entries than the model has layers.
    """
    listed, layers = getattr(decoder, field), decoder.num_hidden_layers
    if len(listed) < layers:
        raise ConfigError(
            f"`{field}` of {type(decoder).__name__} must have an entry for each of its {layers} layers "
            f"(num_hidden_layers), got {len(listed)}: set num_hidden_layers to at most {len(listed)}, or list "
            "the other layers too."
        )
    return list(listed[:layers])


def head_dims(config: object) -> tuple[int, int] | None:
    """head_dim of the keys and of the values that the model caches, `None` if its config does not say."""
    decoder = decoder_config(config)
    # By attribute, since configs map some of these to other names.
    if getattr(decoder, "qk_rope_head_dim", None) is not None:
        # Multi-head latent attention caches either the latent or the expanded states, depending on the model.
        return None
    try:
        head_dim = getattr(decoder, "head_dim", None)
    except Exception:
        # If layers differ in it (gemma4), the config refuses to return a single number.
        return None
    hidden_size, heads = getattr(decoder, "hidden_size", None), getattr(decoder, "num_attention_heads", None)
    if head_dim is None and isinstance(hidden_size, int) and isinstance(heads, int):
        head_dim = hidden_size // heads
    return (head_dim, head_dim) if isinstance(head_dim, int) else None


def most_positions(config: object) -> int | None:
    """The most tokens that a model has positions for, `None` if its config has no limit."""
    decoder = decoder_config(config)
    # transformers maps names such as n_positions to this one, but not in the dict of a config.
    field = decoder.attribute_map.get("max_position_embeddings", "max_position_embeddings")
    found = decoder.to_dict().get(field)
    return found if isinstance(found, int) else None


def tokens_at_once(config: object) -> int | None:
    """The most tokens that a model can take in one pass behind earlier ones, `None` for any number."""
    return 1 if decoder_config(config).model_type in SCANS_FROM_ZERO or decodes_one_token(config) else None


def decodes_one_token(config: object) -> bool:
    """Whether a model attends differently to the same tokens if they come one by one, and takes them no other way."""
    return decoder_config(config).model_type in DECODES_ONE_TOKEN


def depends_on_passes(config: object) -> bool:
    """Whether the states of a token depend on which tokens came in the same pass.

    Dory's loops may attend to what its last loop has computed of earlier passes, and to their own tokens.
    """
    return decodes_one_token(config) or vars(decoder_config(config)).get("recurrent_kv_cache_mode") == "last_loop"


def attention_implementation(config: PretrainedConfig) -> str | None:
    """The `attn_implementation` of a model, or of one of its layers."""
    return config._attn_implementation  # type: ignore[no-any-return]


def newest_logits_only(model: Any, tokens: int = 1) -> dict[str, Any]:
    """Arguments of a model's forward pass that limit the logits to the newest tokens; empty if it has no such argument.

    No tokens are asked for by a tensor of no positions, since 0 asks for all. A model that takes no tensor has one, and
    so has a model whose last layers read states of earlier ones: it passes them the newest tokens alone, if it is given
    their number.

    Example:
        >>> import torch, transformers
        >>> with torch.device("meta"):
        ...     newest_logits_only(transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=1)))
        {'logits_to_keep': 1}
    """
    parameter = inspect.signature(model.forward).parameters.get("logits_to_keep")
    if parameter is None:
        return {}
    takes_positions = "Tensor" in str(parameter.annotation)
    if not tokens and takes_positions and not getattr(decoder_config(model), "num_kv_shared_layers", None):
        return {"logits_to_keep": torch.empty(0, dtype=torch.int64)}
    return {"logits_to_keep": tokens or 1}


def bos_ids(tokenizer: Any) -> list[int]:
    """The BOS token if the tokenizer begins a text with it, else nothing."""
    first: list[int] = tokenizer("a").input_ids[:1]
    return first if first == [tokenizer.bos_token_id] else []


def goes_by_columns(config: object) -> bool:
    """Whether attention depends on the column of a token in the cache, so that no token before it may be missing."""
    decoder = decoder_config(config)
    fields = vars(decoder)
    return (
        decoder.model_type in BIASED_BY_COLUMN
        or bool(fields.get("alibi"))
        or "relative_attention_num_buckets" in fields
        or ("attention_layers" in fields and "local" in listed_per_layer(decoder, "attention_layers"))
    )


def caches_latents(config: object) -> bool:
    """Whether the cache gets the latents of multi-head latent attention, so that attention never reads its states."""
    return compat.CACHES_LATENTS and vars(decoder_config(config)).get("kv_lora_rank") is not None


def counts_on_the_whole_reservation(config: object) -> bool:
    """Whether the forward pass makes a bias for all slots of a static cache, so that buckets do not fit."""
    if not isinstance(config, PretrainedConfig):
        return False
    return config.model_type == "bloom" or bool(vars(config).get("alibi"))


class ConfigNumbers:
    """Reads the fields of a config that say what one layer holds.

    Fields are read as attributes, since configs have aliases for some of them.

    Args:
        config: config of the decoder, or of one of its layers.
        layer: index of the layer, for fields that list a number for each layer.
    """

    def __init__(self, config: Any, layer: int = 0) -> None:
        self._config = config
        self._layer = layer

    def get(self, name: str) -> Any:
        """A field, `None` if the config does not have it."""
        return getattr(self._config, name, None)

    def number(self, *names: str) -> int:
        """The first of these fields that is a number.

        Raises:
            ConfigError: no field is a number, or one lists numbers for fewer layers than there are.
        """
        found = self.number_or_none(*names)
        if found is None:
            raise ConfigError(
                f"The config ({type(self._config).__name__}) has no number in {' or '.join(names)}, which says what "
                "its layers hold: set it, or pass the config of the model itself."
            )
        return found

    def number_or_none(self, *names: str) -> int | None:
        """The first of these fields that is a number, `None` if no field is."""
        for name in names:
            found = self.get(name)
            if isinstance(found, list | tuple):
                found = listed_per_layer(self._config, name)[self._layer]
            if isinstance(found, int | float) and not isinstance(found, bool):
                return int(found)
        return None


def kv_heads(numbers: ConfigNumbers, layer_type: str) -> int:
    """KV heads of a layer of attention.

    Args:
        numbers: config of the layer.
        layer_type: as in its `LayerSpec`.

    Raises:
        ConfigError: the config lacks a field.
    """
    own = _OWN_KV_HEADS.get(str(numbers.get("model_type")))
    if own is not None:
        return own(numbers, layer_type)
    return numbers.number("num_key_value_heads", "num_attention_heads")


def _of_gemma4(numbers: ConfigNumbers, layer_type: str) -> int:
    shared = layer_type == "full_attention" and numbers.get("attention_k_eq_v")
    of_full_attention = numbers.number_or_none("num_global_key_value_heads") if shared else None
    return of_full_attention or numbers.number("num_key_value_heads")


_OWN_KV_HEADS: dict[str, Callable[[ConfigNumbers, str], int]] = {
    "dbrx": lambda numbers, _: ConfigNumbers(numbers.get("attn_config")).number("kv_n_heads"),
    "falcon": lambda numbers, _: (
        1
        if numbers.get("multi_query") and not numbers.get("new_decoder_architecture")
        else numbers.number("num_kv_heads")
    ),
    "gemma4_text": _of_gemma4,
    "gpt_bigcode": lambda numbers, _: 1 if numbers.get("multi_query") else numbers.number("num_attention_heads"),
    "mimo_v2_flash": lambda numbers, layer_type: (
        numbers.number("num_key_value_heads") * (2 if layer_type == "sliding_attention" else 1)
    ),
}
"""Model types whose heads of keys follow from more than one field."""


UNSCALED = ("diffusion_gemma_text", "gemma3n_text", "gemma4_text", "gemma4_unified_text", "gpt_neo", "opt")
"""Model types whose queries are multiplied by the factor before attention, or not at all."""

OF_HALF_THE_HEAD = ("zamba", "zamba2")
"""Model types whose heads are twice as wide as their factor says."""


def attention_scale(config: object) -> float | None:
    """The factor of the scores of attention, `None` for `1 / sqrt(head_dim)`.

    Raises:
        ConfigError: `config` is not a model config.
    """
    decoder = decoder_config(config)
    # By attribute, because configs have other names for some of these.
    scalar = getattr(decoder, "query_pre_attn_scalar", None)
    if scalar is not None:
        return 1 / math.sqrt(scalar)
    multiplier = getattr(decoder, "attention_multiplier", None)
    if multiplier is not None:
        return float(multiplier)
    if decoder.model_type in UNSCALED:
        return 1.0
    dims = head_dims(decoder) if decoder.model_type in OF_HALF_THE_HEAD else None
    return None if dims is None else 1 / math.sqrt(dims[0] / 2)


def remembers_positions(model: nn.Module) -> bool:
    """Whether a call without `position_ids` would get positions that follow from an earlier call with images."""
    return any(name in vars(module) for module in model.modules() for name in MADE_ANEW)


def reads_again_behind(model: nn.Module) -> int | None:
    """The length behind which `generate()` reads a sequence again, as the factors of its RoPE change (phi3).

    Such a model's `prepare_inputs_for_generation` gives up the cache there. `None` for other models.
    """
    # By attribute, since only some configs have the field.
    border = getattr(config_of(model), "original_max_position_embeddings", None)
    codes = () if border is None else _codes(model.__class__, "prepare_inputs_for_generation")
    return border if any("original_max_position_embeddings" in code.co_names for code in codes) else None


_PLACEHOLDER = re.compile("(image|video|audio|vision).*_token_(id|index)$")
"""Names of fields of configs that hold the id of a token in whose place something else than text stands."""


def forget_images(model: nn.Module, ids: Tensor, mask: Tensor | None) -> None:
    """Let a model forget the positions of an earlier call's images, if `ids` are of text alone.

    It would otherwise take them for those of a sequence that goes on behind a cache.

    Args:
        model: the model.
        ids: the whole sequence, `[batch, tokens]`.
        mask: its mask, `[batch, tokens]`; `None` if no token is padding.
    """
    placeholders = [
        value for name, value in vars(model.config).items() if _PLACEHOLDER.search(name) and value is not None
    ]
    if placeholders and not torch.isin(ids, torch.tensor(placeholders, device=ids.device)).any():
        # How far positions are behind columns without images. Before 5.3, a model that does not know takes what is
        # passed for the beginning of the sequence.
        behind = ids.new_zeros(len(ids), 1) if mask is None else mask.sum(-1, keepdim=True) - mask.shape[-1]
        for module in model.modules():
            for name in vars(module).keys() & MADE_ANEW:
                setattr(module, name, None if compat.PREPARES_POSITIONS else behind)


PASS_METHODS = ("forward", "prepare_inputs_for_generation")
"""Methods of a module that `generate()` calls for each pass."""


def kept_states(model: nn.Module) -> str | None:
    """Where a module of `model` keeps a tensor between forward passes: "layers.0.conv_state"; `None` for nowhere.

    Such a model must read each prompt whole, and finish it before it reads another one. Buffers and parameters are not
    meant, which modules assign when they move them to another device, nor what is `MADE_ANEW`.
    """
    for path, module in model.named_modules():
        for name in assigned_in_a_pass(module.__class__):
            is_registered = name in (*module._buffers, *module._parameters, *module._modules) or isinstance(
                inspect.getattr_static(type(module), name, None), property
            )
            if name not in MADE_ANEW and not is_registered and isinstance(vars(module).get(name), Tensor | None):
                return f"{path}.{name}" if path else name
    return None


@cache
def is_of_its_class(forward: Callable[..., Any], module_class: type[nn.Module]) -> bool:
    """Whether `forward`, which modules of a class have, was defined with the class, rather than put there later."""
    owner = next(each for each in module_class.__mro__ if "forward" in vars(each))
    return forward.__module__ == owner.__module__


@cache
def assigned_in_a_pass(module_class: type[nn.Module]) -> tuple[str, ...]:
    """Attributes of `self` that a pass assigns, in `PASS_METHODS` or in methods of `self` that they use."""
    assigned: set[str] = set()
    names = [*PASS_METHODS]
    for name in names:
        for code in _codes(module_class, name):
            read, stored = _attributes_of_self(code)
            assigned |= stored
            names += read.difference(names)
    return tuple(sorted(assigned))


def _codes(module_class: type, name: str) -> Iterator[types.CodeType]:
    """The code of a method in each class that defines it, apart from torch and the bases of transformers' models."""
    for owner in module_class.__mro__:
        package = f"{owner.__module__}."
        is_base = package.startswith("torch.") or (
            package.startswith("transformers.") and not package.startswith("transformers.models.")
        )
        method = None if is_base else vars(owner).get(name)
        if isinstance(method, types.FunctionType):
            unwrapped = inspect.unwrap(method)
            if isinstance(unwrapped, types.FunctionType):
                yield unwrapped.__code__


def _attributes_of_self(code: types.CodeType) -> tuple[set[str], set[str]]:
    """Attributes of its first argument: the names that code reads, and the names that it assigns."""
    own_name = code.co_varnames[:1]
    names: dict[str, set[str]] = defaultdict(set)
    for load, use in itertools.pairwise(dis.get_instructions(code)):
        # From Python 3.13 on, one instruction may load two variables.
        loaded = load.argval if isinstance(load.argval, tuple) else (load.argval,)
        if loaded[-1:] == own_name and load.opname.startswith(("LOAD_FAST", "LOAD_DEREF", "STORE_FAST_LOAD_FAST")):
            names[use.opname].add(use.argval)
    return names["LOAD_ATTR"] | names["LOAD_METHOD"], names["STORE_ATTR"]


_RATES = re.compile("^(?!classifier|summary).*(drop|jitter)")
"""Names of attributes and of fields of configs that are 0 if a module draws no random numbers while it trains."""


def effect_of_training(module: nn.Module) -> str | None:
    """What a module in training mode does beside what it does otherwise; `None` for nothing that changes states."""
    if not module.training:
        return None
    if isinstance(module, nn.modules.batchnorm._BatchNorm):
        return "statistics of the batch"
    config = vars(module).get("config")
    rates = {**(vars(config) if isinstance(config, PretrainedConfig) else {}), **vars(module)}
    if rates.get("gradient_checkpointing"):
        return "gradient checkpointing"
    if isinstance(module, nn.modules.dropout._DropoutNd):
        rates["dropout"] = module.p
    above_zero = (name for name, rate in rates.items() if isinstance(rate, int | float) and rate > 0)
    return next((f"{name}={rates[name]}" for name in above_zero if _RATES.search(name)), None)


def knows_pairs(model: Any) -> bool:
    """Whether the code of a model reads its cache as a pair, if it is one."""
    modules = {type(module).__module__ for module in model.modules()}
    return any("EncoderDecoderCache" in vars(sys.modules[name]) for name in modules)
