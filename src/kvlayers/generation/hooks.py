"""What replaces methods of transformers. Each function is called with the method that it replaces, and its arguments.

`PreTrainedModel.__call__` is one of them, since every forward pass of every model goes through it, and since what
replaces it costs next to nothing at each token. Models that were written for an older name of the cache argument get
their cache by the name that they take. A model that makes one part of a pair of caches anew keeps the pair of the call.
"""

import functools
import inspect
import threading
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, TypeGuard

import torch
import transformers
from torch import Tensor
from transformers.generation.utils import GenerationMixin, GenerationMode
from transformers.utils import ModelOutput

from kvlayers.core.cache import Cache
from kvlayers.errors import LegacyFormatError
from kvlayers.generation import (
    assisted,
    cache_by_name,
    call_arguments,
    call_cache,
    known_ids,
    legacy_tuples,
    retried_pass,
)
from kvlayers.generation.current_call import CURRENT, USES_KVLAYERS, Acquired, CurrentCall
from kvlayers.generation.patching import Method, Patch, overriding
from kvlayers.generation.prefill import prefill_in_chunks, prefill_once
from kvlayers.generation.prefix_reuse import active_store, prefixed_call
from kvlayers.rope.from_config import frequencies_within
from kvlayers.upstream import cache_argument, compat, generate_calls, model_types


def generate(original: Method, model: Any, *args: Any, **kwargs: Any) -> Any:
    """For `generate`: takes cache names, legacy tuples and caches, and uses the active prefix store."""
    cache_name = cache_argument.name_in_generate(model)
    kwargs = cache_argument.respelled(model, call_arguments.by_name(args, kwargs), cache_name)
    hand_over_cache(model)
    kwargs = call_arguments.with_prompt_by_name(kwargs)
    call_arguments.check_call(model, kwargs)
    cache_by_name.read_cache_argument(model, cache_name, kwargs)
    plain = functools.partial(_without_store, original, model, cache_by_name.requested_name(kwargs), cache_name)
    active = active_store.for_call()
    return plain(**kwargs) if active is None else prefixed_call.generate(active, plain, model, kwargs)


def _without_store(original: Method, model: Any, requested: str | None, cache_name: str, /, **kwargs: Any) -> Any:
    config = kwargs.get("generation_config")
    # A draft model gets the same cache several times within one call, and rolls it back in between.
    is_assistant, is_pair = config is not None and config.is_assistant, model.config.is_encoder_decoder
    returns_tuples = _pop_return_legacy_cache(model, config, kwargs)
    past: Any = kwargs.get(cache_name)
    if isinstance(past, tuple | list):
        legacy_tuples.warn_of_tuples(cache_name)
        past = kwargs[cache_name] = legacy_tuples.cache_for_generate(model.config, past)
    is_own, mask = isinstance(past, Cache), kwargs.get("attention_mask")
    input_ids = kwargs.get("input_ids", kwargs.get("inputs"))
    if compat.LOOPS_COUNT_CACHE_POSITION and is_own and not is_pair:
        call_cache.check_whole_sequence(past, input_ids)
    is_from_store = is_own and prefixed_call.is_from_store(past)
    if is_own and not is_assistant and not is_pair:
        if not is_from_store:
            call_cache.check_rows(past, mask, input_ids)
        _forget_images(model, past, input_ids, mask)
    if is_own and not is_assistant and past.is_pair:
        kwargs.update(call_cache.decoder_mask(model, past, kwargs))
    if type(past) in call_cache.CLASSES:
        call_cache.replace_layers(past, model)
    was_recording = is_own and any(layer.is_recording for layer in past.adapted_layers())
    mask_mode = None if past is None else call_cache.mask_mode(past)
    was_compiled = mask_mode is not None and mask_mode.compiled
    cache_sees_ids = not (is_pair or is_assistant or is_from_store) and kwargs.get("inputs_embeds") is None
    record = known_ids.TokenRecord(input_ids if cache_sees_ids else None, mask)
    may_be_stopped = bool(kwargs.get("stopping_criteria")) or kwargs.get("custom_generate") is not None
    acquired: list[Acquired] = []
    try:
        with overriding(CURRENT, CurrentCall(requested, record, may_be_stopped, acquired)):
            output = original(assisted.view_for_generate(model, kwargs), **kwargs)
    except BaseException as error:
        retried_pass.say_why_not(error)
        raise
    finally:
        if mask_mode is not None:
            mask_mode.compiled = was_compiled
    cache = cache_argument.in_output(output) if isinstance(output, ModelOutput) else past
    if isinstance(cache, Cache) and not was_recording and not is_assistant:
        cache.deactivate_past_recording()
    record.end(output, cache)
    if returns_tuples and isinstance(output, ModelOutput):
        cache_argument.replace_in_output(output, legacy_tuples.to_tuples)
    if acquired:
        call_cache.remember_lengths(model, acquired)
    if acquired and isinstance(output, Tensor):
        call_cache.release(model, acquired)
    return output


def _forget_images(model: Any, past: Cache, input_ids: Any, mask: Any) -> None:
    """Let a model forget the images of an earlier call before it goes on with a cache that has seen text alone."""
    if not model.config.sub_configs or not past.length or not isinstance(input_ids, Tensor):
        return
    is_whole = not isinstance(mask, Tensor) or mask.shape[-1] == input_ids.shape[1]
    before = input_ids[:, :0] if is_whole else past.known_ids
    if before is not None:
        model_types.forget_images(model, torch.cat([before.to(input_ids.device), input_ids], dim=1), mask)


def _pop_return_legacy_cache(model: Any, config: Any, kwargs: dict[str, Any]) -> bool:
    """Whether a call is to return legacy tuples. The argument takes precedence over the config.

    Raises:
        LegacyFormatError: it is, but the model has its own `generate()`.
    """
    in_config = vars(config or model.generation_config).get("return_legacy_cache", False)
    returns_tuples = bool(kwargs.pop("return_legacy_cache", in_config))
    if in_config and compat.CONVERTS_TO_TUPLES:
        # transformers must return the cache itself, from which kvlayers makes the tuples.
        kwargs["return_legacy_cache"] = False
    if returns_tuples and type(model).generate is not GenerationMixin.generate:
        raise LegacyFormatError(
            f"`model` must have the generate() of transformers for `return_legacy_cache`, got a {type(model).__name__}"
            ", whose own takes the cache apart before it returns: leave return_legacy_cache out."
        )
    return returns_tuples


def prepare_cache_for_generation(
    original: Method,
    model: Any,
    generation_config: Any,
    model_kwargs: dict[str, Any],
    generation_mode: GenerationMode,
    batch_size: int,
    max_cache_length: int,
) -> None:
    """For `_prepare_cache_for_generation`: checks the cache that the user passed, or makes a cache by name."""
    argument, call = cache_argument.name_in_generate(model), CURRENT.get()
    past = model_kwargs.get(argument)
    name = cache_by_name.resolve_name(model, generation_config, call.requested_name, past is not None)
    # A draft model gets its own cache several times within one call.
    is_checked = isinstance(past, transformers.Cache) and not generation_config.is_assistant
    encoded = generate_calls.encoded_for(model, model_kwargs) if is_checked else None
    if encoded is not None and not model.config.is_encoder_decoder:
        past = model_kwargs[argument] = cache_by_name.paired(past, encoded.shape[1])
    if past is not None:
        _prepare_passed_cache(model, past, generation_config, model_kwargs, max_cache_length, generation_mode, encoded)
    if call.record is not None:
        call.record.has_beams = (generation_config.num_beams or 1) > 1
        if past is not None:
            call.record.begin(model, past, generation_config, call_cache.padding_mask(model, model_kwargs))
    if generation_config.prefill_chunk_size is not None:
        is_filled = compat.CHUNKS_BEGIN_AT_ZERO and isinstance(past, Cache) and past.length
        # transformers cuts the mask of an encoder as if it were of the new tokens, and passes no part of embeddings.
        if (
            is_filled
            or model.config.is_encoder_decoder
            or model_kwargs.get("inputs_embeds") is not None
            or model_types.kept_states(model) is not None
        ):
            # The new tokens are read in one pass instead.
            generation_config.prefill_chunk_size = None
    if (
        past is not None
        or generation_config.use_cache is False
        or not model._supports_default_dynamic_cache()
        or not cache_by_name.is_made_here(model, name)
    ):
        original(model, generation_config, model_kwargs, generation_mode, batch_size, max_cache_length)
        if isinstance(past, Cache):
            # What the cache would look at by itself has been checked here.
            past.forget_call()
        elif past is None:
            call_cache.leave_on_host(model_kwargs.get(argument), model)
    else:
        model_kwargs[argument] = call_cache.for_call(
            model, name, generation_config, model_kwargs, generation_mode, batch_size, max_cache_length
        )
        if generation_mode == GenerationMode.ASSISTED_GENERATION:
            # transformers refuses to verify drafts with a static name, since its static caches cannot be rolled back.
            generation_config.cache_implementation = None
    cache = model_kwargs.get(argument)
    if (
        isinstance(cache, Cache)
        and cache.is_pair
        and model.config.is_encoder_decoder
        and call.record is not None
        and generate_calls.replaces_cross_attention_cache(model)
    ):
        # What it changes is this one, until `_keeping_pair` puts the other back.
        call.pair = cache
        model_kwargs[argument] = transformers.EncoderDecoderCache(
            transformers.DynamicCache(), transformers.DynamicCache()
        )
    # Passes note what they are prepared from: for a cache that cannot go back by one pass and reads earlier tokens
    # again, and for the ids of beams.
    if isinstance(cache, Cache) and (not cache.keeps_every_token or (generation_config.num_beams or 1) > 1):
        _replace_method(type(model), _noting)


def _prepare_passed_cache(
    model: Any,
    past: Any,
    generation_config: Any,
    model_kwargs: dict[str, Any],
    max_cache_length: int,
    generation_mode: GenerationMode,
    encoded: Tensor | None,
) -> None:
    """Check the cache that a call was given, and adapt the call to it."""
    if prefixed_call.is_from_store(past):
        # The name has been applied already, when this cache was made.
        generation_config.cache_implementation = None
    if isinstance(past, Cache) and generation_config.use_cache is False:
        # Some model configs say so (MPT). All tokens would then be passed to the cache at every step.
        generation_config.use_cache = model_kwargs["use_cache"] = True
    attention_mask = call_cache.padding_mask(model, model_kwargs)
    total_tokens = (
        vars(generation_config).get(generate_calls.MASK_LENGTH) if attention_mask is None else attention_mask.shape[1]
    )
    call_cache.validate(model, past, attention_mask, total_tokens, encoded, model_kwargs.get("inputs_embeds"))
    new_tokens = generation_config.max_new_tokens
    if new_tokens is not None and total_tokens is not None and not model.config.is_encoder_decoder:
        # The new tokens may have been passed alone, with a mask for all.
        max_cache_length = max(max_cache_length, total_tokens + new_tokens - 1)
    call_cache.check_room(past, generation_config, max_cache_length)
    mask_mode = call_cache.mask_mode(past)
    if mask_mode is not None:
        # A cache of transformers does not say whether it is compiled around, and no cache whether its masks are right.
        must_ask = not isinstance(past, Cache) or generate_calls.gives_windows_full_masks(model)
        if generation_config.compile_config is not None or must_ask:
            mask_mode.compiled = call_cache.will_be_compiled(model, generation_config, generation_mode, past)


def prefill(
    original: Method,
    model: Any,
    input_ids: Tensor,
    generation_config: Any,
    model_kwargs: dict[str, Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """For `_prefill`: see `prefill_in_chunks` and `prefill_once`."""

    def transformers_prefill(input_ids: Tensor, model_kwargs: dict[str, Any]) -> Any:
        return original(model, input_ids, generation_config, model_kwargs, *args, **kwargs)

    is_in_chunks, call = generation_config.prefill_chunk_size is not None, CURRENT.get()
    if is_in_chunks and call.record is not None:
        call.prompt = input_ids, dict(model_kwargs)
    if is_in_chunks and frequencies_within(model.config, 1, input_ids.shape[1]) is None:
        # Parts of the prompt would be rotated by the frequencies of shorter prompts.
        generation_config.prefill_chunk_size = None
    cache = model_kwargs.get(cache_argument.name_in_generate(model))
    if not isinstance(cache, Cache):
        return transformers_prefill(input_ids, model_kwargs)
    output = prefill_in_chunks(model, cache, input_ids, generation_config, model_kwargs)
    if output is None and input_ids.shape[0] > 1:
        output = prefill_once(transformers_prefill, cache, input_ids, generation_config, model_kwargs, model)
    return transformers_prefill(input_ids, model_kwargs) if output is None else output


PREPARES_INPUTS = "prepare_inputs_for_generation"

_handing_lock = threading.Lock()
_handing_over: dict[tuple[type, Callable[..., Any]], Patch] = {}


def hand_over_cache(model: Any) -> None:
    """Let a model that keeps an old name, or gives the cache up, get that of `generate()`, until `take_cache_back`."""
    if model.config.is_encoder_decoder and generate_calls.replaces_cross_attention_cache(model):
        _replace_method(type(model), _keeping_pair, "_prepare_cache_for_generation")
    if getattr(type(model), PREPARES_INPUTS) is getattr(GenerationMixin, PREPARES_INPUTS):
        return
    name = cache_argument.name_for(model)
    if name != cache_argument.name_in_generate(model) or model_types.reads_again_behind(model) is not None:
        _replace_method(type(model), functools.partial(_respelling, name))


def _replace_method(owner: type, wrap: Callable[[Method], Method], name: str = PREPARES_INPUTS) -> None:
    with _handing_lock:
        _handing_over.setdefault((owner, getattr(wrap, "func", wrap)), Patch(owner, name, wrap)).apply()


def take_cache_back() -> None:
    """Undo `hand_over_cache` for all classes, and what notes the inputs of passes."""
    with _handing_lock:
        for patch in reversed(_handing_over.values()):
            patch.remove()
        _handing_over.clear()


def _keeping_pair(original: Method) -> Method:
    @functools.wraps(original)
    def prepare_cache(self: Any, generation_config: Any, model_kwargs: Any, *args: Any, **kwargs: Any) -> None:
        original(self, generation_config, model_kwargs, *args, **kwargs)
        if (pair := CURRENT.get().pair) is not None:
            # The model has made one part of another pair anew, with none of the options of the first.
            model_kwargs[cache_argument.name_in_generate(self)] = pair

    return prepare_cache


def _noting(original: Method) -> Method:

    @functools.wraps(original)
    def prepare_inputs(self: Any, input_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        call = CURRENT.get()
        if call.record is not None:
            call.inputs = input_ids, kwargs
            call.record.note_beams(cache_argument.passed_in(kwargs), input_ids)
        return original(self, input_ids, *args, **kwargs)

    return prepare_inputs


def _respelling(old: str, original: Method) -> Method:
    @functools.wraps(original)
    def prepare_inputs(self: Any, input_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        def prepare(**options: Any) -> Any:
            return original(self, input_ids, *args, **cache_argument.respelled(self, options))

        is_own = isinstance(kwargs.get(cache_argument.name_in_generate(self)), Cache)
        return generate_calls.with_cache(self, input_ids, prepare, kwargs) if is_own else prepare(**kwargs)

    # transformers reads in the signature what a call of generate() may pass.
    signature = inspect.signature(original)
    new = cache_argument.usual_name()
    parameters = [each.replace(name=new) if each.name == old else each for each in signature.parameters.values()]
    prepare_inputs.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return prepare_inputs


is_active: Callable[[], bool] | None = None
"""Whether kvlayers is to handle a forward pass, asked in the thread of that pass. `install` sets it, and resets it to
`None` when it is no longer in place: another library may still call the replacement underneath its own."""


_MAKER: ContextVar[Any] = ContextVar("the model whose pass was given no cache", default=None)


def forward_pass(original: Callable[..., Any]) -> Callable[..., Any]:
    """For `PreTrainedModel.__call__`: looks at the caches that models are given."""

    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        # Read once: another thread may uninstall kvlayers meanwhile.
        is_active_now = is_active
        if is_active_now is None or type(kwargs.get("cache")).__name__ == cache_argument.OF_PAGES:
            return original(self, *args, **kwargs)
        name = cache_argument.name_for(self)
        kwargs = cache_argument.respelled(self, kwargs, name)
        past = kwargs.get(name)
        # Eager code prepares caches before a model is compiled.
        is_compiling = torch.compiler.is_compiling()
        # Of prompts alone ids are recorded, and by a call of generate() in a record of its own.
        if (
            not args
            and isinstance(past, Cache)
            and (is_compiling or CURRENT.get().record is not None or not _is_prompt(kwargs.get("input_ids")))
        ):
            if is_compiling:
                return original(self, *args, **kwargs)
            began = (past.self_attention_cache if past.is_pair else past)._pass.began
            try:
                return original(self, *args, **kwargs)
            except (RuntimeError, MemoryError) as error:
                if not (USES_KVLAYERS.get() and cache_argument.is_generator(self) and retried_pass.may_retry(error)):
                    raise
                retried_pass.make_room_in_call(self, past, began, error)
            return call(self, *args, **kwargs)
        if any(isinstance(argument, tuple | list) for argument in (past, *args)):
            return legacy_tuples.forward_with_tuples(original, self, args, kwargs)
        if is_compiling or not is_active_now():
            return original(self, *args, **kwargs)
        if past is None:
            with overriding(_MAKER, self):
                return original(self, *args, **kwargs)
        ids = kwargs.get("input_ids", args[0] if args else None)
        if isinstance(past, Cache) and _is_prompt(ids) and CURRENT.get().record is None:
            return known_ids.record_forward(past, ids, functools.partial(original, self, *args, **kwargs))
        if type(past) in call_cache.CLASSES:
            call_cache.replace_layers(past, self)
            call_cache.warn_of_another(past, CURRENT.get().requested_name, self)
        elif isinstance(past, str):
            kwargs = {**kwargs, name: cache_by_name.make_cache(past, self)}
        return original(self, *args, **kwargs)

    return call


def make_dynamic_cache(original: Callable[..., None], cache: Any, *args: Any, **kwargs: Any) -> None:
    """For `DynamicCache.__init__`: a cache that a model makes itself, as it was given none, gets layers of kvlayers.

    Such a cache is left alone if autograd may follow it.
    """
    original(cache, *args, **kwargs)
    is_active_now = is_active
    if torch.compiler.is_compiling() or torch.is_grad_enabled() or is_active_now is None:
        return
    maker = _MAKER.get()
    if maker is not None and type(cache) in call_cache.CLASSES and is_active_now():
        call_cache.replace_layers(cache, maker)


def _is_prompt(ids: Any) -> TypeGuard[Tensor]:
    """Whether token ids are to be recorded: those of a prompt, since a decode loop would pay for it at each token."""
    return isinstance(ids, Tensor) and ids.dim() == 2 and ids.shape[1] > 1
