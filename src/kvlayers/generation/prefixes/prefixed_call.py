"""`generate()` with a `PrefixStore`: what is held is looked up, the rest computed, and what was computed is held.

What differs from a plain call is the cache that `generate()` is given, and at most where the padding is. There are
three ways to make it:

* One prompt: the cache of its longest prefix goes on.
* Prompts that begin alike: the cache of what they have in common is expanded, so that it is held once for all of them.
  Padding, which is on the left, moves behind that, where nothing depends on the order of the ids but the model, which
  goes by its `position_ids`.
* Other prompts, and caches that cannot be shared so: each prompt is computed on its own, from its own longest prefix,
  and the caches are put side by side, padded as the prompts are.
"""

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from transformers.utils import ModelOutput

from kvlayers.caches.base import Cache
from kvlayers.caches.operations import CacheState
from kvlayers.caches.sink import SinkCache
from kvlayers.caches.stacking import can_be_stacked, stack
from kvlayers.caches.static import StaticCache
from kvlayers.errors import ConfigError, KVLayersError
from kvlayers.generation import registry
from kvlayers.generation.calls import by_name, sequences_of_each_prompt, whole_config
from kvlayers.generation.chunked_prefill import at_once, pass_tokens
from kvlayers.generation.prefixes.active_store import Prefixes, using
from kvlayers.generation.prefixes.eligibility import (
    UnusableError,
    check_model,
    check_options,
    ids_name,
    options_as_text,
    options_of,
    prompts_of,
)
from kvlayers.generation.prefixes.model_identity import model_identity
from kvlayers.generation.shared_prefill import LEAST_TOKENS
from kvlayers.prefix import Hit
from kvlayers.upstream import compat, model_types

BLIND_TO_ORDER = frozenset((
    "bos_token_id", "cache_config", "cache_implementation", "compile_config", "disable_compile", "diversity_penalty",
    "do_sample", "early_stopping", "eos_token_id", "epsilon_cutoff", "eta_cutoff", "forced_eos_token_id",
    "length_penalty", "max_length", "max_new_tokens", "max_time", "min_length", "min_new_tokens", "min_p", "num_beams",
    "num_return_sequences", "output_attentions", "output_hidden_states", "output_logits", "output_scores",
    "pad_token_id", "prefill_chunk_size", "remove_invalid_values", "renormalize_logits", "suppress_tokens",
    "temperature", "top_h", "top_k", "top_p", "transformers_version", "typical_p", "use_cache",
))  # fmt: skip
"""Options for which it is all the same where the padding is. (A penalty on repetition knows of padding on the left.)"""

READS_IDS = ("logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn", "streamer")
"""Arguments that are shown the ids of a prompt, and may do anything with them."""

ROOM_FOR_ANSWER = 256
"""Tokens of an answer that memory is reserved for at first: what is held keeps it, and most answers end early."""

CHECKPOINTS = {"most": 16}
"""Of recurrent states, so that one entry serves many of the places where prompts may part."""

_own_cache: ContextVar[Cache | None] = ContextVar("the cache that the current call goes on from", default=None)

_not_used_as: ContextVar[str | None] = ContextVar("why the current call does not go by its store", default=None)

Generate = Callable[..., Any]


def note_bypass(cache: object) -> None:
    """Let a cache that `generate()` has made know why its call does not go by the store that there is."""
    reason = _not_used_as.get()
    if reason is not None and isinstance(cache, Cache):
        cache.prefix_notes = (f"the call could not go by the store: {reason}",)


def generate(prefixes: Prefixes, plain: Generate, model: Any, args: tuple[Any, ...], arguments: dict[str, Any]) -> Any:
    """What `plain(*args, **arguments)` returns, by way of a store where that is possible.

    Raises:
        OptionError: it is not possible, and `prefixes` are required.
    """
    with using(None):
        try:
            call = PrefixedCall(prefixes, model, args, arguments)
            cache, given = call.prepared()
        except UnusableError as reason:
            prefixes.unusable(str(reason))
            bypass = _not_used_as.set(str(reason))
            try:
                return plain(*args, **arguments)
            finally:
                _not_used_as.reset(bypass)
        token = _own_cache.set(cache)
        try:
            output = plain(*call.unnamed, **given)
        finally:
            _own_cache.reset(token)
        return call.finished(output, cache)


def is_own(cache: object) -> bool:
    """Whether a cache that the current call was given was given by this module, in the place of one by name."""
    return cache is not None and cache is _own_cache.get()


class PrefixedCall:
    """A call of `generate()` that goes by a store.

    Args:
        prefixes: the store.
        model: the model.
        args: what `generate()` was given without a name.
        arguments: what it was given by name.

    Raises:
        UnusableError: it cannot.
    """

    def __init__(self, prefixes: Prefixes, model: Any, args: tuple[Any, ...], arguments: Mapping[str, Any]) -> None:
        self._model, self._store = model, prefixes.store
        self._cache_name = model_types.cache_argument(model)
        self.unnamed, self._arguments = by_name(model, args, dict(arguments))
        check_model(model, self._arguments)
        self._config, model_kwargs = whole_config(model, self._arguments)
        self._takes_positions = "position_ids" in inspect.signature(model.forward).parameters
        check_options(self._config, self._arguments, model_kwargs)
        self._prompts = prompts_of(self._config, self._arguments)
        self._repeats = sequences_of_each_prompt(self._config)
        self._name = self._config.cache_implementation or "dynamic"
        self._options = options_of(self._config)
        if not registry.is_registered(self._name) or compat.makes_its_own_cache(model, self._name):
            raise UnusableError(f"the cache '{self._name}' of {type(model).__name__} is none of kvlayers'")
        indexed = any(spec.layer_type == compat.INDEXED for spec in compat.layer_specs(model.config))
        if indexed and compat.INDEXERS_DEPEND_ON_CHUNKS:
            raise UnusableError(
                f"what its indexers choose on transformers {compat.TRANSFORMERS} depends on which tokens came at once"
            )
        try:
            identity = model_identity(model)
        except ConfigError as error:
            raise UnusableError(f"its weights cannot be told apart: {error}") from error
        kind = f"{identity} {self._name} {options_as_text(self._options)}"
        self._found: list[str] = []
        self._whose = {"config": model.config, "namespace": prefixes.namespace, "model": kind}

    def prepared(self) -> tuple[Cache, dict[str, Any]]:
        """The cache to go on from, and what to call `generate()` with.

        Raises:
            UnusableError: the prompts differ, and their caches cannot be put side by side.
        """
        changes: dict[str, Any] = {}
        if len(self._prompts) == self._repeats == 1 and not self._prompts.is_padded:
            cache = self._of_one_prompt()
        else:
            example = self._empty()
            if isinstance(example, SinkCache):
                raise UnusableError(f"what the layers of {example!r} hold depends on which tokens came at once")
            common, stackable = self._prompts.common_tokens(), can_be_stacked(example)
            shareable = self._can_share(example, common)
            if self._prompts.is_padded and not self._knows_of_padding(example):
                raise UnusableError("its prompts are padded, and the model counts that in its positions")
            if not shareable and not stackable:
                raise UnusableError(
                    f"its prompts begin alike for {common} tokens only or are padded, and caches like {example!r} "
                    "cannot be put side by side"
                )
            hits = [self._lookup(row) for row in self._prompts.rows()] if stackable else []
            if shareable and all(hit.covered <= common for hit in hits):
                cache, changes = self._of_common_tokens(common, hits)
            else:
                cache = self._of_each_prompt(common, hits)
        cache.prefix_notes = tuple(self._found)
        given = {**self._arguments, **changes, self._cache_name: cache}
        return cache, given

    def finished(self, output: Any, cache: Cache) -> Any:
        """What `generate()` is to return; what it has computed for one prompt is held."""
        sequences = output.sequences if isinstance(output, ModelOutput) else output
        ids = self._prompts.input_ids
        if self._prompts.is_padded:
            # It may have had the padding elsewhere.
            sequences[:, : ids.shape[1]] = ids.repeat_interleave(sequences.shape[0] // ids.shape[0], dim=0)
        elif cache.batch_size == sequences.shape[0] == 1:
            self._insert(sequences, cache)
        return output

    def _of_one_prompt(self) -> Cache:
        ids = self._prompts.row(0)
        cache = self._continued(self._lookup(ids))
        if not isinstance(cache, SinkCache) and not cache.keeps_every_token:
            self._compute(ids, cache, ids.shape[1] - 1)
        return cache

    def _of_common_tokens(self, common: int, hits: list[Hit]) -> tuple[Cache, dict[str, Any]]:
        cache = self._of_the_first(common, hits)
        cache.expand(len(self._prompts) * self._repeats)
        if not self._prompts.is_padded:
            return cache, {}
        moved, mask = self._prompts.with_padding_behind(common)
        return cache, {ids_name(self._arguments): moved, "attention_mask": mask}

    def _of_the_first(self, common: int, hits: list[Hit]) -> Cache:
        """A cache that has seen the tokens that all prompts begin with."""
        ids = self._prompts.row(0)[:, : common + 1]
        own = [hit for hit in hits if hit.covered <= common]
        cache = self._continued(max(own, key=lambda hit: hit.covered) if own else self._lookup(ids))
        self._compute(ids, cache, common)
        return cache

    def _of_each_prompt(self, common: int, hits: list[Hit]) -> Cache:
        caches: list[Cache] = []
        behind = sum(hit.covered < common for hit in hits)
        shared = self._of_the_first(common, hits) if behind > 1 and common >= LEAST_TOKENS else None
        for ids, hit in zip(self._prompts.rows(), hits, strict=True):
            cache = self._continued(hit) if shared is None or hit.covered > common else shared.fork()
            self._compute(ids, cache, ids.shape[1] - 1)
            # Reservations cannot be expanded, so each prompt comes as often as it is to be gone on from.
            caches.extend([cache] * self._repeats)
        together = self._empty(rows=len(caches))
        stack(caches, together, self._prompts.input_ids.shape[1] - 1)
        return together

    def _can_share(self, example: Cache, common: int) -> bool:
        if isinstance(example, StaticCache) or common < (LEAST_TOKENS if len(self._prompts) > 1 else 1):
            return False
        return not self._prompts.is_padded or (self._padding_can_move() and example.keeps_every_token)

    def _padding_can_move(self) -> bool:
        """Whether nobody notices where the padding is but the model, which goes by the mask and by `position_ids`.

        Those who are given the cache do, and so do modules that count slots for a window of their own.
        """
        model, config = self._model, self._config
        defaults = compat.default_generation_options()
        options = {name: value for name, value in vars(config).items() if not name.startswith("_")}
        asked = {name for name, value in options.items() if value != defaults.get(name)}
        shown = any(self._arguments.get(name) for name in READS_IDS)
        by_mask = model._supports_attention_backend and model.config.model_type not in model_types.SCALES_BY_SLOT
        return self._takes_positions and by_mask and not shown and asked <= BLIND_TO_ORDER

    def _knows_of_padding(self, example: Cache) -> bool:
        """Whether a token's states are the same with padding before it and without."""
        relative = self._model.config.model_type in model_types.HAS_RELATIVE_POSITIONS
        return self._takes_positions or relative or not any(layer.attends for layer in example.adapted_layers())

    def _lookup(self, ids: Tensor) -> Hit:
        hit = self._store.lookup(ids, **self._whose)
        why_not_more = f": {hit.reason}" if hit.reason else ""
        self._found.append(f"{hit.covered} of {ids.shape[-1]} tokens were there{why_not_more}")
        return hit

    def _insert(self, ids: Tensor, cache: Cache) -> None:
        # What was computed is the caller's, whatever becomes of the store: a full disk, or no memory to copy to.
        try:
            self._store.insert(ids, cache, **self._whose)
        except (KVLayersError, OSError, RuntimeError, MemoryError) as error:
            self._store.note_refused(str(error))

    def _empty(self, rows: int = 1) -> Cache:
        """A cache like the one that `generate()` would make."""
        tokens = self._prompts.input_ids.shape[1]
        whole = tokens + _most_new_tokens(self._config, tokens)
        cache = self._made(rows, min(whole, tokens + ROOM_FOR_ANSWER))
        return self._made(rows, whole) if isinstance(cache, StaticCache) else cache

    def _made(self, rows: int, length_hint: int) -> Cache:
        options = self._options
        cache = self._from_registry(options, rows, length_hint)
        if cache.recurrent_parts() and "checkpoints" not in options:
            return self._from_registry({**options, "checkpoints": CHECKPOINTS}, rows, length_hint)
        return cache

    def _from_registry(self, options: Mapping[str, Any], rows: int, length_hint: int) -> Cache:
        model = self._model
        request = registry.CacheRequest(
            model.config, options, batch_size=rows, length_hint=length_hint, device=model.device, dtype=model.dtype
        )
        cache = registry.cache_for(self._name, request)
        if not isinstance(cache, Cache) or not cache.layers:
            raise UnusableError(f"the cache '{self._name}' is a {type(cache).__name__}, which is none of kvlayers'")
        return cache

    def _continued(self, hit: Hit) -> Cache:
        """The cache that was found, or an empty one."""
        found = hit.cache
        if found is None:
            return self._empty()
        devices = {layer.parts[0].device for layer in found.adapted_layers() if layer.length}
        if not isinstance(found, StaticCache) and devices <= {self._model.device}:
            return found
        # It was reserved for another call, or comes from a file.
        cache = self._empty()
        cache.load_state(_on_device(found.state(), self._model.device))
        return cache

    def _compute(self, ids: Tensor, cache: Cache, length: int) -> None:
        """Pass the first `length` of `ids`, `[1, tokens]`, as far as they are new to `cache`, and hold the cache."""
        begin, limit = cache.get_seq_length(), at_once(cache)
        ids, whole = ids.to(self._model.device), torch.arange(length, device=self._model.device)[None]
        for stop in self._stops(cache, begin, length):
            # A model that takes tokens one by one does so behind others alone, and generate() in chunks else.
            most = self._config.prefill_chunk_size if limit is None else stop if begin == 0 else limit
            model_kwargs: dict[str, Any] = {self._cache_name: cache, "attention_mask": None, "use_cache": True}
            if self._takes_positions:
                model_kwargs["position_ids"] = whole[:, :stop]
            if self._model._supports_logits_to_keep():
                model_kwargs["logits_to_keep"] = 1
            pass_tokens(self._model, ids[:, :stop], model_kwargs, cache, begin, most)
            self._insert(ids[:, :stop], cache)
            begin = stop

    def _stops(self, cache: Cache, begin: int, length: int) -> list[int]:
        """Where to hold what is computed between `begin` and `length`."""
        if begin >= length:
            return []
        # A cache that cannot go back serves no prompt that parts in between; one that takes tokens one by one, behind
        # others, is slow to come there.
        every = self._store.snapshot_tokens
        if cache.keeps_every_token or at_once(cache) is not None or every is None:
            return [length]
        return [*range(begin - begin % every + every, length, every), length]


def _most_new_tokens(config: Any, prompt_tokens: int) -> int:
    if config.max_new_tokens is not None:
        return int(config.max_new_tokens)
    # As generate() has it, where nothing is said: 20 more.
    return max(int(config.max_length or 0) - prompt_tokens, 20)


def _on_device(state: CacheState, device: torch.device) -> CacheState:
    layers = tuple(
        dataclasses.replace(
            layer,
            tensors={name: tensor.to(device) for name, tensor in layer.tensors.items()},
            facts={**layer.facts, **({"device": str(device)} if "device" in layer.facts else {})},
        )
        for layer in state.layers
    )
    return dataclasses.replace(state, layers=layers)
