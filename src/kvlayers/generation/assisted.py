"""Assisted decoding from filled caches, and for models with recurrent states.

From 5.4 on, transformers' loop starts with a pass over the whole sequence, whatever the cache has seen. It refuses
models with recurrent states, since transformers' caches cannot roll them back.

A rejected draft is rolled back to a checkpoint, and the tokens between the checkpoint and the draft are passed again:
together with the next draft if they are few, else in a pass of their own, which leaves a checkpoint.
"""

import copy
import functools
from collections.abc import Callable, Mapping
from typing import Any

import transformers
from torch import Tensor
from transformers.generation.utils import GenerationMixin, GenerationMode
from transformers.utils import ModelOutput

from kvlayers.core.cache import Cache
from kvlayers.errors import OptionError, RollbackError
from kvlayers.generation import row_decoding
from kvlayers.generation.call_cache import rolling_back
from kvlayers.generation.prefill import pass_limit, pass_tokens, without_last
from kvlayers.upstream import cache_argument, compat, generate_calls, model_types

ASKS_FOR_DRAFTS = ("assistant_model", "assistant_early_exit", "prompt_lookup_num_tokens", "use_mtp")
"""Arguments of `generate()`, and options of its config, without which it decodes without drafts."""

MAX_REPLAYED_WITH_DRAFT = 32
"""Tokens that are passed again together with the next draft. For more tokens, a checkpoint is worth a pass."""


class ModelView:
    """A model as one method of transformers sees it: the model itself, except for some attributes.

    The method gets the view as its `self`. Thus nothing is set on the model or on its class, where other threads that
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


@functools.cache
def _class_of_views() -> type[ModelView]:
    """The class of models as `generate()` sees them while it decodes with drafts.

    `generate()` takes the loop from the class of what it sees as the model, and reads the names of its arguments.
    """
    name = generate_calls.loop_name(GenerationMode.ASSISTED_GENERATION)

    @functools.wraps(getattr(GenerationMixin, name))
    def loop(view: Any, input_ids: Tensor, **kwargs: Any) -> Any:
        if kwargs["generation_config"].assistant_early_exit is None:
            return view.decoding(input_ids, kwargs)
        # transformers sets the number of layers for each draft, and puts it back only behind one that succeeds.
        config = getattr(view, view.base_model_prefix).config
        layers = config.num_hidden_layers
        try:
            return view.decoding(input_ids, kwargs)
        finally:
            config.num_hidden_layers = layers

    return type("AssistedModel", (ModelView,), {name: loop})


def view_for_generate(model: Any, arguments: Mapping[str, Any]) -> Any:
    """What `generate()` gets in the place of a model: the model itself, except for decoding with drafts.

    Args:
        model: the model.
        arguments: arguments of `generate()` by their names.
    """
    given, assistant = arguments.get("generation_config"), arguments.get("assistant_model")
    asks = False
    # Without a generator, as every call comes here.
    for source in (arguments, vars(model.generation_config), {} if given is None else vars(given)):
        for name in ASKS_FOR_DRAFTS:
            asks = asks or (source.get(name) is not None and source[name] is not False)
    # A draft model decodes without drafts, whatever its config says.
    if not asks or arguments.get("custom_generate") is not None or (given is not None and given.is_assistant):
        return model
    if (
        generate_calls.full_generation_config(model, arguments)[0].get_generation_mode(assistant)
        != GenerationMode.ASSISTED_GENERATION
    ):
        return model
    return _class_of_views()(
        model,
        decoding=functools.partial(
            decode,
            getattr(type(model), generate_calls.loop_name(GenerationMode.ASSISTED_GENERATION)),
            model,
            arguments,
        ),
        _validate_generation_mode=functools.partial(_check_mode, model),
    )


def _check_mode(model: Any, mode: Any, generation_config: Any, *args: Any, **kwargs: Any) -> None:
    """transformers' check of the decoding mode, for a model without recurrent states.

    kvlayers can roll recurrent states back. `check_rollback` later looks at the cache itself.
    """
    needs_hidden_states = getattr(generation_config, "use_mtp", None) or (
        getattr(generation_config, "speculation_type", None) is not None
    )
    view = model if needs_hidden_states else ModelView(model, _is_stateful=False)
    if not model.config.is_encoder_decoder:
        # transformers decodes one sequence with drafts, and kvlayers several.
        generation_config = copy.copy(generation_config)
        generation_config.num_return_sequences = 1
    type(model)._validate_generation_mode(view, mode, generation_config, *args, **kwargs)


def check_rollback(model: Any, cache: Any) -> None:
    """Raise `RollbackError` if drafts for a model with recurrent states could not be rolled back."""
    name, kept = type(model).__name__, model_types.kept_states(model)
    if kept is not None:
        raise RollbackError(
            f"`model` must keep all of its states in its cache, so that drafts can be rolled back, got a {name}, which "
            f"keeps some in {kept}: leave out the assistance."
        )
    if not model._is_stateful:
        return
    if cache_argument.name_in_generate(model) != cache_argument.usual_name():
        raise RollbackError(
            f"`model` must get its cache from transformers' loop over drafts, got a {name}, which calls it "
            f"`{cache_argument.name_for(model)}`: leave out the assistance, or install a newer transformers."
        )
    layers = cache.adapted_layers() if isinstance(cache, Cache) else []
    holds_all = not any(
        layer.traits.is_upstream and (layer.traits.attends or layer.traits.is_recurrent) for layer in layers
    )
    if not holds_all or not isinstance(cache, Cache) or not cache.recurrent_parts():
        raise RollbackError(
            f"`{cache_argument.name_in_generate(model)}` must be a cache of kvlayers that holds the states of {name}, "
            f"to roll drafts back, got {cache!r}: leave it out, or make it from the config of the model."
        )
    if pass_limit(model, cache) is not None:
        raise RollbackError(
            f"`model` must be one that can verify several tokens at once, got a {name}, whose scan starts from zero: "
            "leave out the assistance. (It can be used as the draft model of another one.)"
        )


def decode(
    original: Callable[..., Any], model: Any, given: Mapping[str, Any], input_ids: Tensor, kwargs: dict[str, Any]
) -> Any:
    """Run transformers' assisted decoding, with rollbacks that it does not know about.

    Args:
        original: the loop of the model's class.
        model: the model.
        given: arguments of the call of `generate()`, by name.
        input_ids: the prompts, `[batch, tokens]`. Of several, each row goes on with what it accepted.
        kwargs: its other arguments.

    Returns:
        What `original` returns.

    Raises:
        OptionError: the ids are new tokens alone, behind padding or of several prompts; or as
            `row_decoding.decode_batch`.
        RollbackError: as `check_rollback`; or the draft model keeps states in its modules.
    """
    name = cache_argument.name_in_generate(model)
    cache: Any = kwargs.get(name)
    check_rollback(model, cache)
    assistant = kwargs.get("assistant_model")
    if assistant is not None and (kept := model_types.kept_states(assistant)) is not None:
        raise RollbackError(
            f"`assistant_model` must keep its states in its cache, to roll drafts back, got a "
            f"{type(assistant).__name__}, which keeps some in {kept}: pass another model, or leave it out."
        )
    mask = kwargs.get("decoder_attention_mask" if model.config.is_encoder_decoder else "attention_mask")
    new = input_ids.shape[1]
    total = (
        (vars(kwargs["generation_config"]).get(generate_calls.MASK_LENGTH) or new) if mask is None else mask.shape[-1]
    )
    # transformers' loop would rotate tokens by the frequencies of a draft's length.
    is_apart = (
        isinstance(cache, Cache)
        and not model.config.is_encoder_decoder
        and (input_ids.shape[0] > 1 or row_decoding.frequencies_of(model, input_ids, kwargs) is None)
    )
    # transformers' loop cuts a mask to the length of the ids, which changes nothing in one of ones that is long enough.
    if total != new and (is_apart or (mask is not None and (2 * new <= total or not bool(mask.all())))):
        raise OptionError(
            f"`input_ids` must be whole sequences for drafts, got {new} tokens and a mask for {total}: pass the tokens "
            "that the cache has seen as well, or leave out the drafts."
        )
    if is_apart:
        return row_decoding.decode_batch(model, cache, input_ids, kwargs, given)
    if isinstance(cache, Cache) and not compat.RECORDS_BEFORE_DRAFTS:
        cache.activate_past_recording()
    rolls_back = isinstance(cache, Cache) and bool(cache.recurrent_parts())
    takes_new = compat.LOOPS_COUNT_CACHE_POSITION or not isinstance(cache, transformers.Cache) or total != new
    # Else transformers' first pass over a draft would take tokens that a filled cache has seen.
    if not rolls_back and (takes_new or not cache.get_seq_length()):
        return original(model, input_ids, **kwargs)
    replay = _Replay(model, rolling_back(cache) if rolls_back else cache, kwargs["generation_config"], total - new)
    output = original(
        ModelView(model, prepare_inputs_for_generation=replay.prepare_inputs),
        input_ids,
        **{**kwargs, name: replay.cache},
    )
    if rolls_back:
        replay.complete(output.sequences if isinstance(output, ModelOutput) else output)
        cache_argument.replace_in_output(output, lambda view: cache)
    return output


class _Replay:
    """During one call of transformers' loop, a pass takes what its cache has not seen.

    Tokens that a rollback has removed besides the draft are passed again, and those of a filled cache are not.

    Args:
        model: the model.
        cache: the cache of the loop.
        generation_config: config of the call.
        before: tokens that the cache has seen and the ids of the call lack.
    """

    def __init__(self, model: Any, cache: Any, generation_config: Any, before: int) -> None:
        self.cache: Any = cache
        self._model, self._name, self._before = model, cache_argument.name_in_generate(model), before
        # Outputs with one entry per token must be those of the draft alone.
        per_token = generation_config.output_hidden_states or generation_config.output_attentions
        self._max_with_draft = 0 if per_token else MAX_REPLAYED_WITH_DRAFT
        self._last: tuple[int, dict[str, Any]] | None = None

    def prepare_inputs(
        self,
        input_ids: Tensor,
        next_sequence_length: int | None = None,
        is_first_iteration: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Replaces the model's `prepare_inputs_for_generation`."""
        if kwargs[self._name] is self.cache:
            self._last = input_ids.shape[1], kwargs
            seen = self.cache.get_seq_length() - self._before
            missing = input_ids.shape[1] - seen
            new = missing if next_sequence_length is None and seen else next_sequence_length
            if new is not None and missing - new > self._max_with_draft:
                end = input_ids.shape[1] - new
                pass_tokens(self._model, input_ids[:, :end], without_last(kwargs, new), self.cache, seen)
            elif new is not None:
                new = max(missing, new)
            next_sequence_length = new
        return self._model.prepare_inputs_for_generation(
            input_ids,
            next_sequence_length=next_sequence_length,
            is_first_iteration=is_first_iteration,
            **kwargs,
        )

    def complete(self, sequences: Tensor) -> None:
        """Leave the cache as other decoding loops do: it has seen all tokens but the last."""
        end, seen = sequences.shape[1] - 1, self.cache.get_seq_length() - self._before
        if self._last is not None and seen < end:
            tokens, kwargs = self._last
            pass_tokens(self._model, sequences[:, :end], without_last(kwargs, tokens - end), self.cache, seen)
