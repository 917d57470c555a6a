"""Checks of what a call of `generate()` is given, before transformers looks at it."""

import contextlib
import difflib
import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation.utils import GenerationMixin

from kvlayers.core.cache import CACHE_CLASSES
from kvlayers.errors import OptionError
from kvlayers.upstream import cache_argument, generate_calls

_OPTIONS = {
    "input_ids",
    "attention_mask",
    *cache_argument.SPELLINGS,
    *generate_calls.SIGNATURE.parameters,
    *vars(GenerationConfig()),
}
"""What most calls pass, and what `generate()` takes besides."""

_TOKENIZE = "pass ids as tokenizer(texts, return_tensors='pt') returns them"


def check_is(kind: Any, given: object, name: str, what: str, advice: str) -> None:
    """Raise `OptionError` if an argument is not of a class, or of one of several (`list | None`).

    Args:
        kind: the class.
        given: the argument.
        name: its name.
        what: what it must be, for the error.
        advice: what to do, for the end of the error.
    """
    if not isinstance(given, kind):
        raise OptionError(f"`{name}` must be {what}, got a {type(given).__name__}: {advice}.")


def check_model(model: object) -> None:
    """Raise `OptionError` if what should be a model is something else: a config, a name, or the prompt."""
    check_is(
        torch.nn.Module | GenerationMixin,
        model,
        "model",
        "a model of transformers",
        "pass the model first, then the prompt",
    )


def check_generation_config(given: object) -> None:
    """Raise `OptionError` if a `generation_config` is another object, such as the second of two positional ones."""
    check_is(
        GenerationConfig | None,
        given,
        "generation_config",
        "a GenerationConfig",
        "pass options by their names, as in generate(model, input_ids, max_new_tokens=20)",
    )


def by_name(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """All arguments of a call of `generate()`, by their names.

    Raises:
        TypeError: an argument is given twice, or there are too many.
    """
    if not args:
        return kwargs
    generate_calls.SIGNATURE.bind(None, *args, **kwargs)
    return {**kwargs, **dict(zip([*generate_calls.SIGNATURE.parameters][1:], args, strict=False))}


def with_prompt_by_name(arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call, with what a tokenizer or a processor returns in the place of a prompt taken apart.

    Args:
        arguments: all arguments by name, which are not changed.

    Raises:
        OptionError: it has no `input_ids`, or an argument is given twice.
    """
    place = "inputs" if isinstance(arguments.get("inputs"), Mapping) else "input_ids"
    encoded = arguments.get(place)
    if not isinstance(encoded, Mapping):
        return arguments
    others = {name: value for name, value in arguments.items() if name != place}
    if twice := sorted(encoded.keys() & others.keys()):
        raise OptionError(f"`{twice[0]}` must be given once, got it in the encoded prompt as well: leave one out.")
    if encoded.keys().isdisjoint({"input_ids", "inputs_embeds", "input_features", "input_values", "pixel_values"}):
        raise OptionError(
            f"`input_ids` must be in the encoded prompt, got {', '.join(map(str, encoded)) or 'nothing'}: {_TOKENIZE}."
        )
    return {**others, **encoded}


def check_call(model: Any, given: Mapping[str, Any]) -> None:
    """Raise `OptionError` if the prompt, its mask or the config of a call is not of its kind.

    Args:
        model: the model.
        given: arguments of `generate()` by their names.
    """
    check_generation_config(given.get("generation_config"))
    for name in given.keys() - _OPTIONS:
        if (
            name in inspect.signature(model.forward).parameters
            or name in inspect.signature(model.prepare_inputs_for_generation).parameters
            or "custom_generate" in given
        ):
            continue
        if near := difflib.get_close_matches(name, (*_OPTIONS, "prefix_store", "namespace", "documents"), 1, 0.85):
            raise OptionError(
                f"`{name}` is no option of generate(): did you mean {near[0]!r}"
                f"{'' if near[0] in _OPTIONS else ' of kvlayers.generate()'}?"
            )
        if name != "config" and any(
            name in inspect.signature(CACHE_CLASSES.get(kind)).parameters  # type: ignore[arg-type]
            for kind in CACHE_CLASSES.names()
        ):
            raise OptionError(
                f"`{name}` is no option of generate(), but one of a cache: pass cache_config={{{name!r}: "
                f"{given[name]!r:.40}}}, or give it to the cache that you make."
            )
    if isinstance(given.get("max_new_tokens"), str):
        raise OptionError(
            f"`max_new_tokens` must be a whole number, got {given['max_new_tokens']!r}: pass one, such as 128."
        )
    if model.main_input_name == "input_ids":
        _check_ids(given, model)


def check_vocabulary(model: Any, ids: Tensor, name: str) -> None:
    """Raise `OptionError` if ids are outside of the model's vocabulary, before a GPU is lost to them.

    Args:
        model: the model. One of several parts, or with code or embeddings of its own, may take ids that stand for
            something else.
        ids: ids of tokens.
        name: the argument, for the error.
    """
    # transformers finds no table that has an uncommon name.
    with contextlib.suppress(NotImplementedError):
        table = model.get_input_embeddings()
        is_looked_up = type(table) is torch.nn.Embedding and type(model).__module__.startswith("transformers.")
        if is_looked_up and not model.config.sub_configs and ids.numel():
            least, most = torch.stack(ids.aminmax()).tolist()
            if least < 0 or most >= table.num_embeddings:
                raise OptionError(
                    f"`{name}` must be ids from 0 to {table.num_embeddings - 1}, the vocabulary of the model, got "
                    f"{least if least < 0 else most}: pass those of the model's own tokenizer."
                )


def _check_ids(given: Mapping[str, Any], model: Any) -> None:
    name = "input_ids" if given.get("inputs") is None else "inputs"
    ids, mask = given.get(name), given.get("attention_mask")
    if ids is None:
        return
    check_is(Tensor, ids, name, "token ids, an integer tensor [prompts, tokens]", _TOKENIZE)
    is_whole = ids.dtype in (torch.int32, torch.int64)
    # Beside embeddings, ids may be those of no token.
    is_empty = ids.numel() == 0 and given.get("inputs_embeds") is None
    if not (is_whole or model.config.is_encoder_decoder) or ids.dim() < 2 or is_empty or ids.is_meta:
        where = ", on the meta device" if ids.is_meta else ""
        advice = "add the dimension of prompts, as in ids[None]" if ids.dim() == 1 and is_whole else _TOKENIZE
        raise OptionError(
            f"`{name}` must be token ids, an integer tensor [prompts, tokens] of at least one token, got {ids.dtype} "
            f"of shape {list(ids.shape)}{where}: {advice}."
        )
    check_is(Tensor | None, mask, "attention_mask", "a tensor [prompts, tokens]", "pass what the tokenizer returns")
    if (
        mask is not None
        and mask.dim() == 2 == ids.dim()
        and (mask.shape[1] < ids.shape[1] or mask.shape[0] not in (1, ids.shape[0]))
    ):
        raise OptionError(
            f"`attention_mask` must have an entry for each of the {ids.shape[1]} tokens of `{name}`, in {ids.shape[0]} "
            f"rows, got {list(mask.shape)}: pass the mask that the tokenizer returns with the ids."
        )
    # A model that drafts is called for each draft, with ids that were looked at.
    is_draft = (given.get("generation_config") or model.generation_config).is_assistant
    if is_whole and not is_draft and given.get("inputs_embeds") is None:
        check_vocabulary(model, ids, name)
