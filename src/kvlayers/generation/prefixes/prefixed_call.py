"""`generate()` with a `PrefixStore`: look up what is stored, compute the rest, and insert what was computed.

Compared to a plain call, `generate()` gets another cache, and may get its padding in another place. There are three
ways to make the cache:

* One prompt: the cache of its longest stored prefix.
* Prompts with a common prefix: the cache of this prefix is expanded, so that the prefix is held once for all prompts.
  Padding moves from the left to behind the prefix. This is done only if nothing depends on the order of the ids except
  the model, which uses its `position_ids`.
* Other prompts, and caches that cannot be shared in this way: each prompt is computed separately from its own longest
  stored prefix, and the caches are stacked, padded as the prompts are.
"""

from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Any

from transformers.utils import ModelOutput

from kvlayers.caches.base import Cache
from kvlayers.caches.stacking import can_be_stacked, stack
from kvlayers.errors import ConfigError
from kvlayers.generation.prefixes import active_store
from kvlayers.generation.prefixes.active_store import ActiveStore
from kvlayers.generation.prefixes.eligibility import (
    ID_READERS,
    PADDING_INDEPENDENT_OPTIONS,
    IneligibleError,
    check_cache,
    check_model,
    check_options,
    ids_name,
    model_identity,
    options_as_text,
    options_of,
    prompts_of,
)
from kvlayers.generation.prefixes.stored_caches import StoredCaches, depends_on_chunks
from kvlayers.generation.saved_names import requested_name, resolve_name
from kvlayers.generation.shared_prefill import MIN_TOKENS
from kvlayers.prefix import Hit
from kvlayers.upstream import cache_argument, generate_calls, model_types
from kvlayers.upstream.generate_calls import bind_arguments, full_generation_config, sequences_per_prompt

_cache_from_store: ContextVar[Cache | None] = ContextVar("the cache that the current call starts from", default=None)

_bypass_reason: ContextVar[str | None] = ContextVar("why the current call does not use its store", default=None)

Generate = Callable[..., Any]


def explain_bypass(cache: object) -> None:
    """Tell a cache that `generate()` has made why its call does not use the active store."""
    reason = _bypass_reason.get()
    if reason is not None and isinstance(cache, Cache):
        cache.prefix_notes = (f"the call could not use the store: {reason}",)


def generate(active: ActiveStore, plain: Generate, model: Any, args: tuple[Any, ...], arguments: dict[str, Any]) -> Any:
    """Call `plain(*args, **arguments)`, which is `generate()`, with a cache from a store if possible.

    Args:
        active: the store.
        plain: `generate()` of the model, without a store.
        model: the model.
        args: positional arguments of the call.
        arguments: its arguments by name.

    Returns:
        What `plain` returns.

    Raises:
        OptionError: the call cannot use the store, and the store is required.
    """
    with active_store.CURRENT.override(None):
        try:
            call = PrefixedCall(active, model, args, arguments)
            cache, new_arguments = call.prepare()
        except IneligibleError as reason:
            active.on_bypass(str(reason))
            token = _bypass_reason.set(str(reason))
            try:
                return _with_cached_tokens(plain(*args, **arguments), ())
            finally:
                _bypass_reason.reset(token)
        cache_token = _cache_from_store.set(cache)
        try:
            output = plain(*call.unnamed, **new_arguments)
        finally:
            _cache_from_store.reset(cache_token)
        return call.finish(output, cache)


def _with_cached_tokens(output: Any, cached_tokens: tuple[int, ...]) -> Any:
    """What `generate()` returns, with the attribute `cached_tokens` unless it is a plain tensor."""
    if isinstance(output, ModelOutput):
        output.cached_tokens = cached_tokens
    return output


def is_from_store(cache: object) -> bool:
    """Whether the cache of the current call is one that this module has passed in place of a cache by name."""
    return cache is not None and cache is _cache_from_store.get()


class PrefixedCall:
    """A call of `generate()` that uses a store.

    Args:
        active: the store.
        model: the model.
        args: positional arguments of `generate()`.
        arguments: its arguments by name.

    Raises:
        IneligibleError: the call cannot use a store.
    """

    def __init__(self, active: ActiveStore, model: Any, args: tuple[Any, ...], arguments: Mapping[str, Any]) -> None:
        self._model = model
        self._cache_name = cache_argument.name_in_generate(model)
        self.unnamed, self._arguments = bind_arguments(model, args, dict(arguments))
        check_model(model, self._arguments)
        self._config, model_kwargs = full_generation_config(model, self._arguments)
        resolve_name(self._config, requested_name(self._arguments), is_given_a_cache=False)
        check_options(self._config, self._arguments, model_kwargs)
        self._prompts = prompts_of(self._config, self._arguments)
        self._repeats = sequences_per_prompt(self._config)
        name, options = self._config.cache_implementation or "dynamic", options_of(self._config)
        check_cache(model, name)
        try:
            identity = model_identity(model)
        except ConfigError as error:
            raise IneligibleError(f"its weights cannot be identified: {error}") from error
        label = f"{identity} {name} {options_as_text(options)}"
        key = {"config": model.config, "namespace": active.namespace, "model": label}
        prompt_tokens = self._prompts.input_ids.shape[1]
        self._cached_tokens: tuple[int, ...] = ()
        self._caches = StoredCaches(model, active.store, key, name, options, self._config, prompt_tokens)

    def prepare(self) -> tuple[Cache, dict[str, Any]]:
        """The cache to start from, and the arguments with which to call `generate()`.

        Raises:
            IneligibleError: the prompts differ, and their caches cannot be stacked.
        """
        changes: dict[str, Any] = {}
        if len(self._prompts) == self._repeats == 1 and not self._prompts.is_padded:
            cache = self._for_one_prompt()
        else:
            example = self._caches.empty()
            if depends_on_chunks(example):
                raise IneligibleError(f"the content of the layers of {example!r} depends on which tokens came at once")
            common, stackable = self._prompts.common_prefix_length(), can_be_stacked(example)
            shareable = self._can_share(example, common)
            if self._prompts.is_padded and not self._accounts_for_padding(example):
                raise IneligibleError("its prompts are padded, and the model counts padding in its positions")
            if not shareable and not stackable:
                raise IneligibleError(
                    f"its prompts have only {common} tokens in common or are padded, and caches like {example!r} "
                    "cannot be put side by side"
                )
            hits = [self._caches.lookup(row) for row in self._prompts.rows()] if stackable else []
            self._cached_tokens = tuple(hit.covered for hit in hits) or (0,) * len(self._prompts)
            if shareable and all(hit.covered <= common for hit in hits):
                cache, changes = self._for_shared_prefix(common, hits)
            else:
                cache = self._for_separate_prompts(common, hits)
        cache.prefix_notes = tuple(self._caches.notes)
        return cache, {**self._arguments, **changes, self._cache_name: cache}

    def finish(self, output: Any, cache: Cache) -> Any:
        """What `generate()` is to return. The states of a single sequence are inserted into the store."""
        sequences = output.sequences if isinstance(output, ModelOutput) else output
        ids = self._prompts.input_ids
        if self._prompts.is_padded:
            # The padding may have been moved.
            sequences[:, : ids.shape[1]] = ids.repeat_interleave(sequences.shape[0] // ids.shape[0], dim=0)
        elif cache.batch_size == sequences.shape[0] == 1:
            self._caches.insert(sequences, cache)
        return _with_cached_tokens(output, self._cached_tokens)

    def _for_one_prompt(self) -> Cache:
        ids = self._prompts.row(0)
        hit = self._caches.lookup(ids)
        self._cached_tokens = (hit.covered,)
        cache = self._caches.cache_of(hit)
        if not depends_on_chunks(cache) and not cache.keeps_every_token:
            self._caches.compute(ids, cache, ids.shape[1] - 1)
        return cache

    def _for_shared_prefix(self, common: int, hits: list[Hit]) -> tuple[Cache, dict[str, Any]]:
        cache = self._common_prefix(common, hits)
        cache.expand(len(self._prompts) * self._repeats)
        if not self._prompts.is_padded:
            return cache, {}
        moved, mask = self._prompts.with_padding_after(common)
        return cache, {ids_name(self._arguments): moved, "attention_mask": mask}

    def _common_prefix(self, common: int, hits: list[Hit]) -> Cache:
        """A cache that has seen the first `common` tokens, which all prompts start with."""
        ids = self._prompts.row(0)[:, : common + 1]
        usable = [hit for hit in hits if hit.covered <= common]
        hit = max(usable, key=lambda hit: hit.covered) if usable else self._caches.lookup(ids)
        self._cached_tokens = tuple(max(hit.covered, own) for own in self._cached_tokens)
        cache = self._caches.cache_of(hit)
        self._caches.compute(ids, cache, common)
        return cache

    def _for_separate_prompts(self, common: int, hits: list[Hit]) -> Cache:
        caches: list[Cache] = []
        shorter_hits = sum(hit.covered < common for hit in hits)
        shared = self._common_prefix(common, hits) if shorter_hits > 1 and common >= MIN_TOKENS else None
        for ids, hit in zip(self._prompts.rows(), hits, strict=True):
            cache = self._caches.cache_of(hit) if shared is None or hit.covered > common else shared.fork()
            self._caches.compute(ids, cache, ids.shape[1] - 1)
            # Reservations cannot be expanded, so each prompt is stacked as often as it is continued.
            caches.extend([cache] * self._repeats)
        stacked = self._caches.empty(rows=len(caches))
        stack(caches, stacked, self._prompts.input_ids.shape[1] - 1)
        return stacked

    def _can_share(self, example: Cache, common: int) -> bool:
        if example.is_static or common < (MIN_TOKENS if len(self._prompts) > 1 else 1):
            return False
        return not self._prompts.is_padded or (self._padding_can_move() and example.keeps_every_token)

    def _padding_can_move(self) -> bool:
        """Whether only the model can tell where the padding is, which uses the mask and `position_ids`.

        Callbacks that see the ids can tell, too, and so can modules that count slots for their own window.
        """
        model, config = self._model, self._config
        defaults = generate_calls.default_generation_options()
        options = {name: value for name, value in vars(config).items() if not name.startswith("_")}
        changed = {name for name, value in options.items() if value != defaults.get(name)}
        has_id_readers = any(self._arguments.get(name) for name in ID_READERS)
        uses_mask = model.is_backend_compatible() and model.config.model_type not in model_types.SCALES_BY_SLOT
        if has_id_readers or changed - PADDING_INDEPENDENT_OPTIONS:
            return False
        return self._caches.takes_positions and uses_mask

    def _accounts_for_padding(self, example: Cache) -> bool:
        """Whether the states of a token are the same with and without padding before it."""
        is_relative = self._model.config.model_type in model_types.HAS_RELATIVE_POSITIONS
        attends = any(layer.attends for layer in example.adapted_layers())
        return self._caches.takes_positions or is_relative or not attends
