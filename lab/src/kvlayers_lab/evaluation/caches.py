"""The model and the empty cache that scoring begins with, and copies of a cache of any library."""

import copy
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import transformers
import transformers.cache_utils as upstream
from torch import Tensor
from transformers import PreTrainedModel

import kvlayers
from kvlayers import Cache, calls, models
from kvlayers.calls import fidelity_of, validate
from kvlayers.errors import CapacityError, ConfigError, KVLayersError, OptionError, StateMismatchError
from kvlayers.layers import CacheLayer, adapted
from kvlayers.models import is_peft_model, kept_states, layer_specs
from kvlayers_lab.evaluation.requests import ScoringRequest


def check_model(model: Any) -> None:
    """Raise `ConfigError` if a model cannot score continuations behind a cache.

    Raises:
        ConfigError: it is not a model, has an encoder, takes no cache, has no logits of next tokens, keeps states
            outside its cache, has a learned prompt (PEFT), or is in training mode.
    """
    config = models.config_of(model)
    name = type(model).__name__
    if not callable(model):
        raise ConfigError(f"`model` must be a model, got its config, a {name}: pass the model itself.")
    if config.is_encoder_decoder:
        raise ConfigError(
            f"`model` must be a model without an encoder, got {name}: a continuation is scored behind its context by a "
            "decoder alone."
        )
    if not _takes(model, models.name_for(model)):
        raise ConfigError(f"`model` must take a cache, got {name}: pass a causal language model.")
    if not model.can_generate():
        raise ConfigError(f"`model` must predict next tokens, got {name}: pass a causal language model.")
    decoder = models.decoder_config(config)
    if kept_states(model) is not None or decoder.model_type in models.MODELS_WITH_OWN_CACHE:
        raise ConfigError(f"`model` must keep all of its states in the cache that it is given, got {name}.")
    # PEFT then passes virtual tokens, or their states, before each context.
    if is_peft_model(model) and model.active_peft_config.is_prompt_learning:
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
    vocab_size, most = models.decoder_config(model).vocab_size, most_tokens(model, cache)
    places = ((index, place, each) for index, group in enumerate(requests) for place, each in enumerate(group))
    for index, place, (context, continuation) in places:
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
    return None if is_unlimited else models.most_positions(model)


def check_count(name: str, given: object) -> None:
    """Raise `OptionError` unless an argument is a whole number, at least 1."""
    if not isinstance(given, int) or isinstance(given, bool) or given < 1:
        raise OptionError(f"`{name}` must be a whole number, at least 1, got {given!r}.")


def _takes(model: Any, argument: str) -> bool:
    """Whether a model takes an argument. Wrappers (PEFT, torch.compile) hand on whatever they are given."""
    parameters = inspect.signature(model.forward).parameters
    if argument in parameters or isinstance(model, PreTrainedModel):
        return argument in parameters
    return any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())


def empty_cache(model: Any, cache: object, cache_config: Mapping[str, Any] | None, tokens: int) -> transformers.Cache:
    """An empty cache for a model that can be copied for each sequence.

    `copy.deepcopy` copies it: for caches of kvlayers, that is a fork.

    Args:
        model: the model.
        cache: a name of `kvlayers.cache_names()`, or an empty cache of kvlayers or transformers, which is not changed.
        cache_config: options of the cache that `cache` names.
        tokens: the most tokens of a sequence, for a cache by name.

    Raises:
        RegistryError: the name is not registered.
        OptionError: `cache` is neither a name nor a cache; the cache has no such option; options are given with a
            cache; or the cache cannot be copied.
        StateMismatchError: the cache holds states.
        ConfigError: the cache was made for another model, or does not work with this one.
    """
    if isinstance(cache, str):
        named = calls.requested_cache(cache, cache_config)
        given = kvlayers.make_cache(
            named.name, model, length_hint=tokens, device=model.device, dtype=model.dtype, **named.options
        )
    elif cache_config is not None:
        raise OptionError("`cache_config` has options for a cache by name, got a cache: leave it out, or pass a name.")
    else:
        given = _checked_instance(cache)
    found = _copied(given)
    _check_layers(model, found)
    validate(model, found, None, None)
    return found


def _checked_instance(cache: object) -> transformers.Cache:
    if not isinstance(cache, transformers.Cache) or isinstance(cache, transformers.EncoderDecoderCache):
        shown = f"the class {cache.__name__}" if isinstance(cache, type) else f"a {type(cache).__name__}"
        raise OptionError(
            "`cache` must be the name of a cache, or an empty cache for a model without an encoder, got "
            f"{shown}: pass one of {', '.join(kvlayers.cache_names())}."
        )
    if holds_states(cache):
        raise StateMismatchError(
            f"`cache` must be empty, got a {type(cache).__name__} that holds states: reset() it, or pass a new one."
        )
    if any(layer.is_recording for layer in layers_of(cache)):
        raise OptionError(
            "`cache` must not record tokens for a rollback, as it would never drop them: call "
            "deactivate_past_recording() first, or pass a new cache."
        )
    return cache


def holds_states(cache: transformers.Cache) -> bool:
    """Whether a cache of any library has seen tokens. Memory that is reserved for them is no state."""
    return any(
        next(layer.held_tensors(), None) is not None if layer.length is None else layer.length > 0
        for layer in layers_of(cache)
    )


def _copied(cache: transformers.Cache) -> transformers.Cache:
    try:
        return copy.deepcopy(cache)
    except Exception as error:
        raise OptionError(
            f"`cache` must be a cache that copy.deepcopy can copy, since each context needs a cache of its own, got a "
            f"{type(cache).__name__}: {error}"
        ) from error


def _check_layers(model: Any, cache: transformers.Cache) -> None:
    """Raise `ConfigError` if a cache of kvlayers has more or fewer layers than the model."""
    if not isinstance(cache, Cache) or cache.layer_class_to_replicate is not None:
        return
    expected = len(layer_specs(model.config))
    if len(cache.layers) != expected:
        raise ConfigError(
            f"`cache` must have a layer for each of the {expected} layers of {type(model).__name__}, got "
            f"{len(cache.layers)}: make it with config=model.config."
        )


def layers_of(cache: transformers.Cache) -> Sequence[CacheLayer]:
    """The layers of a cache of any library, with the contract of kvlayers' layers."""
    return cache.adapted_layers() if isinstance(cache, Cache) else [adapted(layer) for layer in cache.layers]


_REPEATABLE = (upstream.DynamicLayer, upstream.DynamicSlidingWindowLayer)
"""Layers of transformers that repeat all tokens for several rows. Layers that pack tokens repeat only the others."""


def is_exact(cache: Any) -> bool:
    """Whether a model attends to the very states that came in. Classes of other libraries are not known to be exact.

    Raises:
        UnsupportedLayerError: the class of a layer of kvlayers' does not say.
    """
    if isinstance(cache, Cache):
        return fidelity_of(cache) == "exact"
    classes = [type(cache), *map(type, cache.layers)]
    if not all(each.__module__.startswith("transformers.") for each in classes):
        return False
    return all(adapted(layer).fidelity == "exact" for layer in cache.layers)


def fork(cache: Any) -> Any:
    """An independent continuation of a cache, which shares memory with it if it can."""
    if isinstance(cache, Cache):
        return cache.fork()
    held = (value for layer in cache.layers for value in vars(layer).values())
    # Packed tensors of quanto cannot be copied. Nobody writes to them: the layer replaces them.
    packed = {id(value): value for value in held if isinstance(value, Tensor) and type(value) is not Tensor}
    return copy.deepcopy(cache, packed)


def takes_rows(cache: Any, rows: int) -> bool:
    """Whether an empty cache takes several sequences, and a filled one can be repeated for them."""
    if not isinstance(cache, Cache):
        return type(cache) is transformers.DynamicCache and all(type(layer) in _REPEATABLE for layer in cache.layers)
    if cache.is_static:
        # It is reserved for one sequence, unless the first tokens came in several.
        return False
    try:
        cache.check_select(rows)
    except KVLayersError:
        return False
    return True


def repeat(cache: Any, rows: int) -> None:
    """Continue the one sequence of a cache in several rows. The cache must be empty, or `takes_rows` be true."""
    if rows > 1 and cache.get_seq_length():
        (cache.expand if isinstance(cache, Cache) else cache.batch_repeat_interleave)(rows)


class SharedCache:
    """A cache that several readers continue: all but the last one get a fork, and the last one the cache itself.

    Args:
        cache: the cache.
        readers: how many readers there are.
    """

    def __init__(self, cache: Any, readers: int) -> None:
        self._cache, self._readers = cache, readers

    def take(self) -> Any:
        """A cache for the next reader."""
        self._readers -= 1
        if self._readers:
            return fork(self._cache)
        cache, self._cache = self._cache, None
        return cache
