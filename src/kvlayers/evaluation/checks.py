"""What is checked before anything is computed: the model, and whether it has ids and positions for all tokens."""

import inspect
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import transformers
from transformers import PreTrainedModel

from kvlayers.caches.base import Cache
from kvlayers.errors import CapacityError, ConfigError, OptionError
from kvlayers.evaluation.requests import ScoringRequest
from kvlayers.upstream import cache_argument, model_layers, model_types
from kvlayers.upstream.model_types import kept_states


def check_model(model: Any) -> None:
    """Raise `ConfigError` if a model cannot score continuations behind a cache.

    Raises:
        ConfigError: it is not a model, has an encoder, takes no cache, has no logits of next tokens, keeps states
            outside its cache, has a learned prompt (PEFT), or is in training mode.
    """
    config = model_types.config_of(model)
    name = type(model).__name__
    if not callable(model):
        raise ConfigError(f"`model` must be a model, got its config, a {name}: pass the model itself.")
    if config.is_encoder_decoder:
        raise ConfigError(
            f"`model` must be a model without an encoder, got {name}: a continuation is scored behind its context by a "
            "decoder alone."
        )
    if not _takes(model, cache_argument.name_for(model)):
        raise ConfigError(f"`model` must take a cache, got {name}: pass a causal language model.")
    if not model.can_generate():
        raise ConfigError(f"`model` must predict next tokens, got {name}: pass a causal language model.")
    decoder = model_types.decoder_config(config)
    # A model of several modalities keeps offsets of positions, which it does not read if it is given positions.
    keeps_states = decoder is config and kept_states(model) is not None
    if keeps_states or decoder.model_type in model_layers.MODELS_WITH_OWN_CACHE:
        raise ConfigError(f"`model` must keep all of its states in the cache that it is given, got {name}.")
    if _has_learned_prompt(model):
        raise ConfigError(f"`model` must not put a learned prompt before the context, got {name} with such an adapter.")
    if any(module.training for module in model.modules()):
        raise ConfigError(
            f"`model` must be in evaluation mode, as dropout changes scores, got {name} in training mode: call "
            "model.eval()."
        )


def check_tokens(model: Any, requests: Sequence[Sequence[ScoringRequest]], cache: transformers.Cache) -> None:
    """Raise if a model cannot compute the tokens of a request.

    Args:
        model: the model.
        requests: the requests of each context.
        cache: the cache that it computes them with.

    Raises:
        OptionError: an id is outside the vocabulary.
        CapacityError: a context and its continuation have more tokens than the model has positions.
    """
    vocab_size, most = model_types.decoder_config(model).vocab_size, most_tokens(model, cache)
    for index, place, (context, continuation) in _by_place(requests):
        for name, ids in ((f"contexts[{index}]", context), (f"continuations[{index}][{place}]", continuation)):
            if not 0 <= min(ids) <= max(ids) < vocab_size:
                raise OptionError(
                    f"`{name}` must have token ids from 0 to {vocab_size - 1}, those of the model, got {min(ids)} to "
                    f"{max(ids)}: use the tokenizer of the model."
                )
        # The last token of a continuation is scored, and not passed to the model.
        tokens = len(context) + len(continuation) - 1
        if most is not None and tokens > most:
            raise CapacityError(
                f"`contexts[{index}]` with `continuations[{index}][{place}]` must be within the {most} positions of "
                f"the model, got {len(context)} + {len(continuation)} tokens: shorten the context."
            )


def most_tokens(model: Any, cache: Any) -> int | None:
    """The most tokens that a model has positions for if it reads through a cache, `None` for any number."""
    # A sink cache rotates keys to positions within its window.
    is_unlimited = isinstance(cache, Cache) and cache.rotates_keys
    return None if is_unlimited else model_types.most_positions(model)


def check_count(name: str, given: object) -> None:
    """Raise `OptionError` unless an argument is a whole number, at least 1."""
    if not isinstance(given, int) or isinstance(given, bool) or given < 1:
        raise OptionError(f"`{name}` must be a whole number, at least 1, got {given!r}.")


def _by_place(requests: Sequence[Sequence[ScoringRequest]]) -> Iterator[tuple[int, int, ScoringRequest]]:
    for index, group in enumerate(requests):
        for place, request in enumerate(group):
            yield index, place, request


def _takes(model: Any, argument: str) -> bool:
    """Whether a model takes an argument. Wrappers (PEFT, torch.compile) hand on whatever they are given."""
    parameters = inspect.signature(model.forward).parameters
    if argument in parameters or isinstance(model, PreTrainedModel):
        return argument in parameters
    return any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())


def is_peft_model(model: Any) -> bool:
    """Whether PEFT has wrapped a model."""
    peft: Any = sys.modules.get("peft")
    # No model can be of a class that nobody has imported.
    return peft is not None and isinstance(model, peft.PeftModel)


def _has_learned_prompt(model: Any) -> bool:
    """Whether PEFT passes virtual tokens, or their states, before each context."""
    return is_peft_model(model) and bool(model.active_peft_config.is_prompt_learning)
