"""Assisted decoding from caches that hold tokens already, and for models with recurrent states.

From 5.4 on transformers' loop begins with a pass over the whole sequence, whatever its cache has seen. It refuses
models with recurrent states, as its own caches cannot be put back.

A rejected draft is taken back to a checkpoint, and the tokens between there and the draft are passed again: together
with the next draft where they are few, else on their own, which leaves a checkpoint.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import transformers
from torch import Tensor
from transformers.utils import ModelOutput

from kvlayers.caches.base import Cache
from kvlayers.caches.legacy_api import crop_argument
from kvlayers.errors import RollbackError
from kvlayers.generation.chunked_prefill import at_once, cut, pass_tokens
from kvlayers.layers.arguments import crop_target
from kvlayers.upstream import compat, model_types

MOST_WITH_A_DRAFT = 32
"""Tokens that are passed again together with the next draft: beyond that, a checkpoint behind them is worth a pass."""


class RollingCache(Cache):
    """A cache that is another one, layers and all, but for a `crop` that may go back further than it was asked.

    transformers' loops over drafts get it in the place of the other one.

    Args:
        cache: the other one.
    """

    def __init__(self, cache: Cache) -> None:
        self.__dict__ = cache.__dict__

    def crop(self, tokens_to_remove: int | None = None, *, max_length: int | None = None) -> None:
        """As `truncate`, for a length as `Cache.crop` has it."""
        self.truncate(crop_target(crop_argument(tokens_to_remove, max_length), self._token_count()))


def rolling(cache: Any) -> Any:
    """A `RollingCache` where a cache has recurrent states of ours, else the cache itself."""
    if isinstance(cache, Cache) and cache.recurrent_parts():
        return RollingCache(cache)
    return cache


def drafting(cache: Any) -> Any:
    """What transformers' loop over drafts gets in the place of a draft model's cache."""
    if not compat.CROPS_DRAFTS_TO_LENGTHS:
        return rolling(cache)
    if not isinstance(cache, Cache):
        return cache
    draft = object.__new__(_draft_class(type(cache)))
    draft.__dict__ = cache.__dict__
    return draft


@functools.cache
def _draft_class(kind: type[Cache]) -> type[Cache]:
    """A class of caches of some kind that `crop` puts back to a length, which may be zero, or to one before it."""

    def crop(self: Cache, length: int) -> None:
        self.truncate(length)

    return type(f"Draft{kind.__name__}", (kind,), {"crop": crop})


class ModelView:
    """A model as one method of transformers sees it: the model itself, except for some attributes.

    The method gets the view as its `self`. So nothing is set on the model or on its class, where other threads that
    generate with the same model would find it.

    Args:
        model: the model.
        attributes: what the method sees instead of the attributes of the model.
    """

    def __init__(self, model: Any, **attributes: Any) -> None:
        self.__model = model
        self.__dict__.update(attributes)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__model, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """A forward pass of the model."""
        return self.__model(*args, **kwargs)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self.__model)


def as_checked(model: Any, generation_config: Any) -> Any:
    """A model as transformers' check of the mode sees it: without recurrent states, if a cache can roll them back.

    `check_rollback` looks at the cache itself.
    """
    needs_hidden_states = getattr(generation_config, "use_mtp", None) or (
        getattr(generation_config, "speculation_type", None) is not None
    )
    if not model._is_stateful or needs_hidden_states:
        return model
    return ModelView(model, _is_stateful=False)


def check_rollback(model: Any, cache: Any) -> None:
    """Raise `RollbackError` where drafts for a model with recurrent states could not be taken back."""
    if not model._is_stateful:
        return
    name = type(model).__name__
    if model_types.cache_argument(model) != "past_key_values":
        raise RollbackError(
            f"expected a model that takes past_key_values, but {name} takes cache_params, which transformers' loop "
            "over drafts does not pass: leave out the assistance."
        )
    layers = cache.adapted_layers() if isinstance(cache, Cache) else []
    holds_all = not any(layer.is_upstream and (layer.attends or layer.is_recurrent) for layer in layers)
    elsewhere = model.config.model_type in model_types.KEEPS_STATES_IN_MODULES
    if elsewhere or not holds_all or not isinstance(cache, Cache) or not cache.recurrent_parts():
        raise RollbackError(
            f"expected a cache of kvlayers that holds the states of {name}, so that drafts can be taken back, but saw "
            f"{cache!r}: leave out past_key_values, or make it from the config of the model; a model that keeps states "
            "elsewhere cannot be assisted."
        )
    if at_once(cache) is not None:
        raise RollbackError(
            f"expected a model that can verify several tokens at once, but the scan of {name} begins from zero: leave "
            "out the assistance. (As a draft model for another one, it can be used.)"
        )


def decode(original: Callable[..., Any], model: Any, input_ids: Tensor, kwargs: dict[str, Any]) -> Any:
    """transformers' assisted decoding, with rollbacks that it does not know of.

    Args:
        original: `GenerationMixin._assisted_decoding`.
        model: the model.
        input_ids: the prompt, `[1, tokens]`.
        kwargs: its other arguments.
    """
    cache = kwargs.get("past_key_values")
    check_rollback(model, cache)
    if isinstance(cache, Cache) and not compat.RECORDS_BEFORE_DRAFTS:
        cache.activate_past_recording()
    if not isinstance(cache, Cache) or rolling(cache) is cache:
        return original(_going_on(model, cache, input_ids, kwargs), input_ids, **kwargs)
    loop = _Loop(model, cache, kwargs["generation_config"])
    view = ModelView(model, prepare_inputs_for_generation=loop.prepare)
    output = original(view, input_ids, **{**kwargs, "past_key_values": loop.cache})
    is_output = isinstance(output, ModelOutput)
    loop.complete(output.sequences if is_output else output)
    if is_output:
        output["past_key_values"] = cache
    return output


def _going_on(model: Any, cache: Any, input_ids: Tensor, kwargs: Mapping[str, Any]) -> Any:
    """A model whose first pass over a draft takes the tokens that a filled cache lacks, not the whole sequence again.

    Args:
        model: the model.
        cache: what the call was given, or made.
        input_ids: the whole sequence, or new tokens alone beside a mask for all, `[1, tokens]`.
        kwargs: the other arguments of the loop.
    """
    if compat.LOOPS_COUNT_CACHE_POSITION or not isinstance(cache, transformers.Cache):
        return model
    mask = kwargs.get("decoder_attention_mask" if model.config.is_encoder_decoder else "attention_mask")
    is_whole = mask is None or mask.shape[-1] == input_ids.shape[1]
    held = cache.get_seq_length() if is_whole else 0
    if not held:
        return model

    def prepare(
        input_ids: Tensor,
        next_sequence_length: int | None = None,
        is_first_iteration: bool = False,
        **kwargs: Any,
    ) -> Any:
        if is_first_iteration:
            next_sequence_length = input_ids.shape[1] - held
        return model.prepare_inputs_for_generation(
            input_ids, next_sequence_length=next_sequence_length, is_first_iteration=is_first_iteration, **kwargs
        )

    return ModelView(model, prepare_inputs_for_generation=prepare)


class _Loop:
    """One call of transformers' loop: it passes the tokens that a rollback has taken away besides the draft."""

    def __init__(self, model: Any, cache: Cache, generation_config: Any) -> None:
        self.cache = RollingCache(cache)
        self._model = model
        # Outputs with an entry for each token have to be of the draft alone.
        per_token = generation_config.output_hidden_states or generation_config.output_attentions
        self._most_with_a_draft = 0 if per_token else MOST_WITH_A_DRAFT
        self._last: tuple[int, dict[str, Any]] | None = None

    def prepare(
        self,
        input_ids: Tensor,
        next_sequence_length: int | None = None,
        is_first_iteration: bool = False,
        **kwargs: Any,
    ) -> Any:
        """In the place of the model's `prepare_inputs_for_generation`."""
        if kwargs.get("past_key_values") is self.cache:
            self._last = input_ids.shape[1], kwargs
            seen = self.cache.get_seq_length()
            missing = input_ids.shape[1] - seen
            wanted = missing if next_sequence_length is None and seen else next_sequence_length
            if wanted is not None and missing - wanted > self._most_with_a_draft:
                end = input_ids.shape[1] - wanted
                pass_tokens(self._model, input_ids[:, :end], cut(kwargs, wanted), self.cache, seen)
            elif wanted is not None:
                wanted = max(missing, wanted)
            next_sequence_length = wanted
        return self._model.prepare_inputs_for_generation(
            input_ids,
            next_sequence_length=next_sequence_length,
            is_first_iteration=is_first_iteration,
            **kwargs,
        )

    def complete(self, sequences: Tensor) -> None:
        """Leave the cache as decoding leaves one: with all tokens but the last."""
        end, seen = sequences.shape[1] - 1, self.cache.get_seq_length()
        if self._last is not None and seen < end:
            tokens, kwargs = self._last
            pass_tokens(self._model, sequences[:, :end], cut(kwargs, tokens - end), self.cache, seen)
