"""The caches of one call of `generate()` that uses a prefix store: found in the store, computed, and inserted."""

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from kvlayers.core import named_caches
from kvlayers.core.cache import Cache
from kvlayers.core.cache_operations import CacheState
from kvlayers.errors import KVLayersError
from kvlayers.generation import cache_by_name
from kvlayers.generation.chunked_prefill import pass_limit, pass_tokens
from kvlayers.generation.prefix_reuse.eligibility import IneligibleError
from kvlayers.prefix import Hit, PrefixStore
from kvlayers.upstream import cache_argument, model_types

ROOM_FOR_ANSWER = 256
"""Tokens of an answer for which memory is reserved at first. Stored caches keep the reservation, and most answers end
early."""

CHECKPOINTS = {"most": 16}
"""Checkpoints of recurrent states, so that one entry serves many of the places where prompts may diverge."""


class StoredCaches:
    """Caches by the name that a call asks for, with the states of prefixes that a store has.

    Args:
        model: the model that generates.
        store: the prefix store.
        key: what identifies entries of this call in the store: arguments of `PrefixStore.lookup`.
        name: name of the cache.
        options: options of the cache.
        config: the full `GenerationConfig` of the call.
        prompt_tokens: length of the padded prompts.

    Attributes:
        takes_positions: whether the model takes `position_ids`.
        notes: what each lookup has found.
    """

    def __init__(
        self,
        model: Any,
        store: PrefixStore,
        key: Mapping[str, Any],
        name: str,
        options: Mapping[str, Any],
        config: Any,
        prompt_tokens: int,
    ) -> None:
        self._model, self._store, self._key = model, store, key
        self._name, self._options, self._config, self._prompt_tokens = name, options, config, prompt_tokens
        self._cache_name = cache_argument.name_in_generate(model)
        self.takes_positions = "position_ids" in inspect.signature(model.forward).parameters
        self.notes: list[str] = []

    def lookup(self, ids: Tensor) -> Hit:
        """Look up a prompt, `[1, tokens]`."""
        hit = self._store.lookup(ids, **self._key)
        reason = f": {hit.reason}" if hit.reason else ""
        self.notes.append(f"{hit.covered} of {ids.shape[-1]} tokens were stored{reason}")
        return hit

    def insert(self, ids: Tensor, cache: Cache) -> None:
        """Insert a cache for the tokens that it has seen, if the store can take it."""
        # The caller gets the result whatever happens to the store, such as a full disk, or no memory for a copy.
        try:
            self._store.insert(ids, cache, **self._key)
        except (KVLayersError, OSError, RuntimeError, MemoryError) as error:
            self._store.record_refusal(str(error))

    def empty(self, rows: int = 1) -> Cache:
        """A cache like the one that `generate()` would make."""
        tokens = self._prompt_tokens
        total = tokens + _max_new_tokens(self._config, tokens)
        cache = self._make(rows, min(total, tokens + ROOM_FOR_ANSWER))
        return self._make(rows, total) if cache.is_static else cache

    def _make(self, rows: int, length_hint: int) -> Cache:
        options = self._options
        cache = self._from_registry(options, rows, length_hint)
        if cache.recurrent_parts() and "checkpoints" not in options:
            return self._from_registry({**options, "checkpoints": CHECKPOINTS}, rows, length_hint)
        return cache

    def _from_registry(self, options: Mapping[str, Any], rows: int, length_hint: int) -> Cache:
        model = self._model
        request = named_caches.CacheRequest(
            model.config, options, batch_size=rows, length_hint=length_hint, device=model.device, dtype=model.dtype
        )
        cache = cache_by_name.cache_for(self._name, request)
        if not isinstance(cache, Cache) or not cache.layers:
            raise IneligibleError(f"the cache '{self._name}' is a {type(cache).__name__}, which is not one of kvlayers")
        if not any(layer.attends or layer.counts_columns for layer in cache.adapted_layers()):
            raise IneligibleError(f"no layer of {cache!r} counts its tokens in this version of transformers")
        return cache

    def cache_of(self, hit: Hit) -> Cache:
        """The cache that was found, on the device of the model, or an empty cache."""
        return self.empty() if hit.cache is None else usable_cache(hit.cache, self._model.device, self.empty)

    def compute(self, ids: Tensor, cache: Cache, length: int) -> None:
        """Pass the first `length` tokens of `ids`, `[1, tokens]`, that `cache` has not seen, and store snapshots.

        Raises:
            IneligibleError: the cache has not counted these tokens.
        """
        begin, limit = cache.get_seq_length(), pass_limit(self._model, cache)
        ids, positions = ids.to(self._model.device), torch.arange(length, device=self._model.device)[None]
        for stop in self._snapshot_lengths(cache, begin, length):
            # A model that takes tokens one by one does so only behind others. Otherwise chunks are those of generate().
            chunk = self._config.prefill_chunk_size if limit is None else stop if begin == 0 else limit
            model_kwargs: dict[str, Any] = {self._cache_name: cache, "attention_mask": None, "use_cache": True}
            model_kwargs |= model_types.newest_logits_only(self._model)
            if self.takes_positions:
                model_kwargs["position_ids"] = positions[:, :stop]
            pass_tokens(self._model, ids[:, :stop], model_kwargs, cache, begin, chunk)
            if cache.get_seq_length() != stop:
                raise IneligibleError(f"{type(self._model).__name__} puts other tokens into its cache than it is given")
            self.insert(ids[:, :stop], cache)
            begin = stop

    def _snapshot_lengths(self, cache: Cache, begin: int, length: int) -> list[int]:
        """The lengths between `begin` and `length` at which the cache is inserted into the store."""
        if begin >= length:
            return []
        # A cache that cannot be rolled back does not serve prompts that diverge in between. With a model that takes
        # tokens one by one, snapshots in between would take long.
        every = self._store.snapshot_tokens
        if cache.keeps_every_token or pass_limit(self._model, cache) is not None or every is None:
            return [length]
        return [*range(begin - begin % every + every, length, every), length]


def usable_cache(found: Cache, device: torch.device, make_empty: Callable[[], Cache]) -> Cache:
    """A cache from a store, on `device` and with the reservation of a new one.

    Args:
        found: the cache, which belongs to the caller.
        device: device of the model.
        make_empty: makes an empty cache with the same options.
    """
    devices = {layer.parts[0].device for layer in found.adapted_layers() if layer.length}
    if not found.is_static and devices <= {device}:
        return found
    # It was reserved for another call, or loaded from a file.
    cache = make_empty()
    cache.load_state(_on_device(found.state(), device))
    return cache


def depends_on_chunks(cache: Cache) -> bool:
    """Whether what the cache holds depends on which tokens came together, as that of caches that evict does."""
    return any(not layer.is_upstream and layer.fidelity == "evicting" for layer in cache.adapted_layers())


def _max_new_tokens(config: Any, prompt_tokens: int) -> int:
    if config.max_new_tokens is not None:
        return int(config.max_new_tokens)
    # The default of generate() is 20 new tokens.
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
