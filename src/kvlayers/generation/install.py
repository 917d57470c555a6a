"""Let `generate()` resolve names to kvlayers' caches: explicit, reversible, and as little as possible.

What is replaced in transformers while kvlayers is installed, and why:

* `GenerationMixin._prepare_cache_for_generation` makes the cache that a name asks for. It is the one place to do so.
* `GenerationMixin._prepare_generation_config` forgets the name "hybrid" even where the user gave it; it is put back.
* `GenerationMixin._validate_generation_mode` and `_assisted_decoding` refuse models with recurrent states, which caches
  of ours can put back, and the latter passes a whole sequence whatever its cache has seen (`assisted.py`).
* `GenerationMixin._prefill` forgets what a cache has seen where the model's scan begins from zero (`passing.py`).
* `GenerationMixin.generate` takes legacy tuples and `return_legacy_cache=True`, which transformers 5 dropped, and goes
  by a store of prefixes where there is one (`prefixes.py`).
* `PreTrainedModel.__call__` takes and returns legacy tuples (`tuples.py`), gives empty caches of transformers layers of
  kvlayers (`empty_caches.py`), and lets a cache remember the ids of a prompt (`known_ids.py`).
* `HfExporter.__init__` lets torch take caches of kvlayers apart before an exporter does it in a way of its own.
* Under `legacy_names`, what transformers 4 had and later versions lack (`old_names.py`).
* `GenerationConfig.save_pretrained` and `GenerationConfig.__init__` keep a name that only kvlayers knows in a field
  that transformers ignores, so that what was saved can be loaded without kvlayers (`saved_names.py`).
* `ALL_CACHE_IMPLEMENTATIONS`, the names that a `GenerationConfig` accepts, has those of the registry added.
"""

import contextlib
import copy
import dataclasses
import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import transformers
import transformers.generation.configuration_utils as configuration
from torch import Tensor
from transformers.generation.utils import GenerationMixin, GenerationMode
from transformers.utils import ModelOutput

from kvlayers.caches.base import Cache
from kvlayers.caches.from_config import fixed_stores
from kvlayers.caches.pytrees import register_export_support
from kvlayers.caches.sink import SinkCache
from kvlayers.errors import LegacyFormatError
from kvlayers.generation import (
    assisted,
    chunked_prefill,
    empty_caches,
    forward,
    install_options,
    known_ids,
    legacy_tuples,
    registry,
    saved_names,
    shared_prefill,
    static_pool,
    transformers4_names,
    validate_cache,
)
from kvlayers.generation.calls import sequences_of_each_prompt
from kvlayers.generation.prefixes import active_store, prefixed_call
from kvlayers.generation.presence import Presence
from kvlayers.generation.replacement import Replacement
from kvlayers.prefix import PrefixStore
from kvlayers.stores.masking import MaskMode
from kvlayers.upstream import compat, model_types

CONTINUOUS_BATCHING = "paged"
"""A name that is no cache: generate() turns to another way of batching."""

COMPILED_MODES = (GenerationMode.SAMPLE, GenerationMode.GREEDY_SEARCH)
"""Ways of generating whose steps transformers compiles; with a prefill in chunks, it compiles those in every way."""

_added_names: tuple[str, ...] = ()
_offering = threading.Lock()

_changing = threading.RLock()
"""Held while `install` and `uninstall` change more than one thing, and while a block begins."""

_of_call: ContextVar[bool | None] = ContextVar("whether the current call of generate() goes by kvlayers", default=None)


def install(
    prefix_store: PrefixStore | None = None,
    namespace: str = "",
    legacy_names: bool = False,
    replace_empty_caches: bool | None = None,
    strict_prompts: bool | None = None,
) -> None:
    """From now on, `generate()` makes its caches with kvlayers.

    Args:
        prefix_store: a store that calls go by where they can: what it has of a prompt is not computed again, and what
            is computed is held there. Where not given, what an earlier `install` said stays.
        namespace: whose prefixes they are.
        legacy_names: from now on, old code also finds the caches that transformers 5 has dropped, in the modules where
            they were, and the methods that its own caches have lost.
        replace_empty_caches: whether an empty `transformers.DynamicCache` or `StaticCache` that a model is given gets
            layers of kvlayers, while its class stays. It does unless an earlier `install` said otherwise.
        strict_prompts: whether a prompt that begins with other tokens than those that the given cache has seen is a
            `PromptMismatchError`. It is a `PromptMismatchWarning`, once for each cache, unless an earlier `install`
            said otherwise.

    Raises:
        OptionError: `prefix_store` is no `PrefixStore`, or there is a `namespace` without one, or one of the others is
            neither true nor false.
    """
    counted = active_store.counting(prefix_store, namespace)
    transformers4_names.check_wanted(legacy_names)
    options = install_options.changed(install_options.for_all(), replace_empty_caches, strict_prompts)
    with _changing:
        if legacy_names:
            transformers4_names.PRESENCE.begin()
        if counted is not None:
            active_store.use_for_all(counted)
        install_options.use_for_all(options)
        _presence.begin()


def uninstall() -> None:
    """Put everything back as it was before `install`, also inside of an `installed()` block.

    Calls of `generate()` that other threads have begun end as they began: for calls that begin later, nothing is
    installed, and the last of the earlier ones to end puts the methods of transformers back.
    """
    with _changing:
        active_store.use_for_all(None)
        install_options.use_for_all(install_options.InstallOptions())
        transformers4_names.PRESENCE.end()
        _presence.end()


def is_installed() -> bool:
    """Whether `generate()` makes its caches with kvlayers."""
    return bool(_presence)


@contextmanager
def installed(
    prefix_store: PrefixStore | None = None,
    namespace: str = "",
    legacy_names: bool = False,
    replace_empty_caches: bool | None = None,
    strict_prompts: bool | None = None,
) -> Iterator[None]:
    """`install()` for the length of a `with` block. Blocks nest and overlap: the last one to end uninstalls.

    A `prefix_store` is for calls in the block's own thread, as those of others may be for other namespaces; so are
    `replace_empty_caches` and `strict_prompts`.
    """
    counted = active_store.counting(prefix_store, namespace)
    transformers4_names.check_wanted(legacy_names)
    options = install_options.changed(install_options.current(), replace_empty_caches, strict_prompts)
    with contextlib.ExitStack() as stack:
        with _changing:
            stack.enter_context(_presence.block())
            if legacy_names:
                stack.enter_context(transformers4_names.PRESENCE.block())
        if counted is not None:
            stack.enter_context(active_store.using(counted))
        if replace_empty_caches is not None or strict_prompts is not None:
            stack.enter_context(install_options.using(options))
        yield


def _wake() -> None:
    for replacement in _replacements:
        replacement.put()
    forward.accept(_goes_by_kvlayers)
    _offer_names()


def _sleep() -> None:
    for replacement in _replacements:
        replacement.take_back()
    forward.refuse()
    _offer_names()
    static_pool.free_reservations()


_presence = Presence(_wake, _sleep)


def _offer_names() -> None:
    """Let a `GenerationConfig` accept the names of the registry, beside those of transformers and of others."""
    global _added_names
    with _offering:
        theirs = tuple(name for name in configuration.ALL_CACHE_IMPLEMENTATIONS if name not in _added_names)
        names = registry.cache_names() if _presence.is_in_place else []
        _added_names = tuple(name for name in names if name not in theirs)
        configuration.ALL_CACHE_IMPLEMENTATIONS = theirs + _added_names


registry.on_change(_offer_names)


@contextmanager
def _call() -> Iterator[bool]:
    """The length of a call of `generate()`, which is told whether it goes by kvlayers.

    That is decided once, so that all methods of one call agree, whatever other threads install or uninstall meanwhile.
    A call within another one, of a draft model for example, goes by what the outer call goes by.
    """
    with _presence.call() as wanted, transformers4_names.PRESENCE.call():
        goes_by_kvlayers = wanted or bool(_of_call.get())
        token = _of_call.set(goes_by_kvlayers)
        try:
            yield goes_by_kvlayers
        finally:
            _of_call.reset(token)


@contextmanager
def own_call() -> Iterator[None]:
    """The length of a call that goes by kvlayers, installed or not. Calls of other threads do not, unless it is."""
    with _presence.own_call():
        token = _of_call.set(True)
        try:
            yield
        finally:
            _of_call.reset(token)


def _goes_by_kvlayers() -> bool:
    """Whether what is called now goes by kvlayers: as its call of `generate()` does, or as is installed."""
    of_call = _of_call.get()
    return is_installed() if of_call is None else of_call


def _wrapper(original: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator for what stands in for `original` in calls that go by kvlayers, and passes through to it in others.

    A model with a `generate()` of its own calls the other methods alone: then it counts what is installed.
    """

    def decorate(replacement: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            return (replacement if _goes_by_kvlayers() else original)(self, *args, **kwargs)

        return method

    return decorate


def _wrap_generate(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _call() as goes_by_kvlayers:
            return (by_kvlayers if goes_by_kvlayers else original)(self, *args, **kwargs)

    def by_kvlayers(self: Any, *args: Any, **kwargs: Any) -> Any:
        registry.name_instead_of_cache(model_types.cache_argument(self), kwargs)
        going_by = active_store.current()
        if going_by is None:
            return generate_plainly(self, *args, **kwargs)
        return prefixed_call.generate(going_by, functools.partial(generate_plainly, self), self, args, kwargs)

    def generate_plainly(self: Any, *args: Any, **kwargs: Any) -> Any:
        config = kwargs.get("generation_config", args[1] if len(args) > 1 else None)
        in_config = vars(config or self.generation_config).get("return_legacy_cache", False)
        as_tuples = kwargs.pop("return_legacy_cache", in_config)
        if in_config and compat.CONVERTS_TO_TUPLES:
            # An argument is more than a config. The cache itself is needed here.
            kwargs["return_legacy_cache"] = False
        if as_tuples and type(self).generate is not GenerationMixin.generate:
            raise LegacyFormatError(
                f"expected a model whose generate() is that of transformers, but {type(self).__name__} has one of its "
                "own, which takes the cache apart before it returns it: leave return_legacy_cache out."
            )
        cache_name = model_types.cache_argument(self)
        past = kwargs.get(cache_name)
        if isinstance(past, tuple | list):
            legacy_tuples.warn_of_tuples(cache_name)
            past = kwargs[cache_name] = legacy_tuples.cache_for_generate(self.config, past)
        input_ids = kwargs.get("input_ids", kwargs.get("inputs", args[0] if args else None))
        if compat.LOOPS_COUNT_CACHE_POSITION and isinstance(past, Cache) and not self.config.is_encoder_decoder:
            validate_cache.check_is_whole(past, input_ids)
        # A draft model's cache is given again and again, within one call.
        if not (config is not None and config.is_assistant):
            kwargs.update(validate_cache.decoder_mask(self, past, kwargs))
        if type(past) in empty_caches.KINDS:
            empty_caches.give_layers(past, self)
        recorded = past is not None and _is_recording(past)
        static = _reading_mode(past)
        compiled = static is not None and static.compiled
        sees_the_ids = (
            cache_name == "past_key_values"
            and not self.config.is_encoder_decoder
            and not (config is not None and config.is_assistant)
            and kwargs.get("inputs_embeds") is None
            and not prefixed_call.is_own(past)
        )
        call = known_ids.KnownIds(input_ids if sees_the_ids else None, kwargs.get("attention_mask"))
        try:
            with static_pool.lending() as loans, known_ids.calling(call):
                output = original(self, *args, **kwargs)
        finally:
            if static is not None:
                static.compiled = compiled
        cache = output.get(cache_name) if isinstance(output, ModelOutput) else past
        # A draft model's cache is rolled back between its calls of generate(); all others are whole when they end.
        if isinstance(cache, Cache) and not recorded and not (config is not None and config.is_assistant):
            cache.deactivate_past_recording()
        call.end(output, cache)
        if as_tuples and isinstance(output, ModelOutput) and cache is not None:
            output[cache_name] = legacy_tuples.tuples_of(cache)
        static_pool.remember_lengths(self, loans)
        if isinstance(output, Tensor):
            del cache
            static_pool.give_back(self, loans)
        return output

    return generate


def _is_recording(cache: Any) -> bool:
    return isinstance(cache, Cache) and any(layer.is_recording for layer in cache.adapted_layers())


def _wrap_prepare_config(original: Callable[..., Any]) -> Callable[..., Any]:
    @_wrapper(original)
    def prepare_generation_config(self: Any, generation_config: Any = None, *args: Any, **kwargs: Any) -> Any:
        asked = kwargs.get("cache_implementation")
        if asked is None and generation_config is not None:
            asked = generation_config.cache_implementation
        if asked is not None and asked not in (*configuration.ALL_CACHE_IMPLEMENTATIONS, CONTINUOUS_BATCHING):
            raise registry.unknown_name(asked)
        prepared, model_kwargs = original(self, generation_config, *args, **kwargs)
        if asked is not None and prepared.cache_implementation is None:
            prepared.cache_implementation = asked
        if model_kwargs.get(model_types.cache_argument(self)) is None:
            saved_names.apply(prepared)
        return prepared, model_kwargs

    return prepare_generation_config


def _wrap_config_init(original: Callable[..., Any]) -> Callable[..., Any]:
    @_wrapper(original)
    def init(self: Any, **kwargs: Any) -> None:
        original(self, **kwargs)
        saved_names.restore(self)

    return init


def _wrap_save_config(original: Callable[..., Any]) -> Callable[..., Any]:
    @_wrapper(original)
    def save_pretrained(self: Any, *args: Any, **kwargs: Any) -> None:
        if self.cache_implementation in _added_names:
            saved_names.save(original, self, args, kwargs)
        else:
            original(self, *args, **kwargs)

    return save_pretrained


def _wrap_prepare_cache(original: Callable[..., Any]) -> Callable[..., Any]:
    @_wrapper(original)
    def prepare_cache_for_generation(
        self: Any,
        generation_config: Any,
        model_kwargs: dict[str, Any],
        generation_mode: GenerationMode,
        batch_size: int,
        max_cache_length: int,
    ) -> None:
        cache_name = model_types.cache_argument(self)
        name = generation_config.cache_implementation or "dynamic"
        past = model_kwargs.get(cache_name)
        if prefixed_call.is_own(past):
            # It is of that name.
            generation_config.cache_implementation = None
        if isinstance(past, Cache) and generation_config.use_cache is False:
            # A config may say so (that of MPT does): then all tokens would be passed to the cache at every step.
            generation_config.use_cache = model_kwargs["use_cache"] = True
        attention_mask = validate_cache.padding_mask(model_kwargs)
        # A draft model is given its own cache again and again, within one call.
        outputs = None if generation_config.is_assistant else model_kwargs.get("encoder_outputs")
        encoded = None if outputs is None else outputs[0]
        validate_cache.prepare(
            self, past, attention_mask, compat.whole_length(generation_config, attention_mask), encoded
        )
        call = known_ids.current()
        if call is not None:
            call.begin(past, generation_config, attention_mask)
        if compat.CHUNKS_BEGIN_AT_ZERO and isinstance(past, Cache) and past.get_seq_length():
            # What is new is read at once instead.
            generation_config.prefill_chunk_size = None
        static = _reading_mode(past)
        # A cache of transformers says nothing itself.
        if static is not None and (generation_config.compile_config is not None or not isinstance(past, Cache)):
            static.compiled = _will_be_compiled(self, generation_config, generation_mode, cache_name, past)
        if (
            past is not None
            or generation_config.use_cache is False
            or not self._supports_default_dynamic_cache()
            or not registry.is_registered(name)
            or compat.makes_its_own_cache(self, name)
        ):
            original(self, generation_config, model_kwargs, generation_mode, batch_size, max_cache_length)
            return
        drafting = generation_mode == GenerationMode.ASSISTED_GENERATION
        encoder = None if model_types.replaces_cross_attention_cache(self) else model_kwargs.get("encoder_outputs")
        # A draft model's config has the options of the main model's cache, though not the name that they belong to.
        asked = generation_config.cache_implementation
        of_another = generation_config.is_assistant and asked in (None, compat.NAME_FOR_DRAFTS)
        options = None if of_another else generation_config.cache_config
        request = registry.CacheRequest(
            self.config,
            {} if options is None else options,
            batch_size=batch_size * sequences_of_each_prompt(generation_config),
            length_hint=compat.most_tokens(generation_config, max_cache_length)
            + (_draft_length(generation_config) if drafting else 0),
            device=self.device,
            dtype=self.dtype,
            encoder_length=None if encoder is None else encoder[0].shape[1],
            attention_mask=attention_mask,
        )
        cache = _cache_for(self, generation_config, generation_mode, cache_name, name, request)
        if isinstance(cache, SinkCache):
            validate_cache.check_rotation(self)
        if generation_config.is_assistant:
            cache.activate_past_recording()
            cache = assisted.drafting(cache)
        if drafting:
            # transformers refuses to verify drafts with a cache of a static name, since its own cannot be rolled back.
            generation_config.cache_implementation = None
        prefixed_call.note_bypass(cache)
        model_kwargs[cache_name] = cache

    return prepare_cache_for_generation


def _reading_mode(cache: Any) -> MaskMode | None:
    """What the layers of the static cache that self-attention has agree on, if it has one with layers of kvlayers."""
    own = cache.self_attention_cache if isinstance(cache, transformers.EncoderDecoderCache) else cache
    stores = fixed_stores(own.layers) if isinstance(own, transformers.StaticCache) else []
    return stores[0].reading.mode if stores else None


def _cache_for(
    model: Any, generation_config: Any, mode: GenerationMode, cache_name: str, name: str, request: registry.CacheRequest
) -> transformers.Cache:
    cache = registry.cache_for(name, request)
    if _reading_mode(cache) is None:
        return cache
    compiled = _will_be_compiled(model, generation_config, mode, cache_name, cache)
    if compiled and request.length_hint is not None:
        # Another length would be another shape, and be compiled again.
        cache = registry.cache_for(name, dataclasses.replace(request, length_hint=static_pool.longest(model, request)))
    cache = static_pool.lend(model, cache, request)
    if compiled and generation_config.prefill_chunk_size is not None:
        compiled = _reserved_ahead(model, cache, request)
    static = _reading_mode(cache)
    if static is not None:
        static.compiled = compiled
    return cache


def _reserved_ahead(model: Any, cache: Any, request: registry.CacheRequest) -> bool:
    """Reserve memory before a prefill that is compiled, which would own what it reserves; whether that is possible."""
    heads = None if request.config.is_encoder_decoder else compat.static_shape(model)
    if heads is None or request.batch_size is None:
        return False
    cache.early_initialization(request.batch_size, *heads, model.dtype, model.device)
    return True


def _will_be_compiled(
    model: Any, generation_config: Any, mode: GenerationMode, cache_name: str, cache: transformers.Cache
) -> bool:
    """Whether generate() is going to compile the forward pass around a cache of reserved memory."""
    static = _reading_mode(cache)
    if static is None or model_types.counts_on_the_whole_reservation(model.config):
        return False
    if mode not in COMPILED_MODES and generation_config.prefill_chunk_size is None:
        return False
    if generation_config.compile_config is not None:
        # transformers leaves a CPU out even where it is asked to compile.
        generation_config.compile_config = copy.copy(generation_config.compile_config)
        generation_config.compile_config._compile_all_devices = True
    before, static.compiled = static.compiled, True
    try:
        return bool(model._valid_auto_compile_criteria({cache_name: cache}, generation_config)) and (
            # Some models ask for their forward pass as it is.
            model.get_compiled_call(generation_config.compile_config) != model.__call__
        )
    finally:
        static.compiled = before


def _draft_length(generation_config: Any) -> int:
    """Tokens that a draft may reach beyond the end of the sequence, until they are rolled back."""
    return 1 + max(generation_config.prompt_lookup_num_tokens or 0, generation_config.num_assistant_tokens or 0)


def _wrap_validate_mode(original: Callable[..., Any]) -> Callable[..., Any]:
    @_wrapper(original)
    def validate_generation_mode(
        self: Any, generation_mode: Any, generation_config: Any, *args: Any, **kwargs: Any
    ) -> None:
        is_assisted = generation_mode == GenerationMode.ASSISTED_GENERATION
        model = assisted.as_checked(self, generation_config) if is_assisted else self
        original(model, generation_mode, generation_config, *args, **kwargs)

    return validate_generation_mode


def _wrap_assisted_decoding(original: Callable[..., Any]) -> Callable[..., Any]:
    @_wrapper(original)
    def assisted_decoding(self: Any, input_ids: Tensor, **kwargs: Any) -> Any:
        return assisted.decode(original, self, input_ids, kwargs)

    return assisted_decoding


def _wrap_prefill(original: Callable[..., Any]) -> Callable[..., Any]:
    @_wrapper(original)
    def prefill(
        self: Any, input_ids: Tensor, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        def plain(ids: Tensor, given_kwargs: dict[str, Any]) -> Any:
            return original(self, ids, generation_config, given_kwargs, *args, **kwargs)

        output = chunked_prefill.prefill_in_steps(self, input_ids, generation_config, model_kwargs)
        if output is None:
            output = shared_prefill.prefill_once(plain, input_ids, generation_config, model_kwargs, self)
        return plain(input_ids, model_kwargs) if output is None else output

    return prefill


def _wrap_exporter(original: Callable[..., Any]) -> Callable[..., Any]:
    @_wrapper(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        register_export_support()
        original(self, *args, **kwargs)

    return init


_replacements = [
    Replacement(GenerationMixin, name, wrap)
    for name, wrap in {
        "generate": _wrap_generate,
        "_prepare_generation_config": _wrap_prepare_config,
        "_prepare_cache_for_generation": _wrap_prepare_cache,
        "_validate_generation_mode": _wrap_validate_mode,
        "_assisted_decoding": _wrap_assisted_decoding,
        **({"_prefill": _wrap_prefill} if compat.PREFILLS_APART else {}),
    }.items()
] + [
    Replacement(configuration.GenerationConfig, "__init__", _wrap_config_init),
    Replacement(configuration.GenerationConfig, "save_pretrained", _wrap_save_config),
]
if compat.HAS_EXPORTERS:
    from transformers.exporters.base import HfExporter

    _replacements.append(Replacement(HfExporter, "__init__", _wrap_exporter))
