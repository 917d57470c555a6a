"""Caches that have seen the prefixes of contexts: found in a prefix store, or computed and stored."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from kvlayers.caches.base import Cache
from kvlayers.errors import ConfigError, KVLayersError
from kvlayers.evaluation.caches import SharedCache
from kvlayers.evaluation.passes import Division, PassSizes, scored_logits
from kvlayers.evaluation.prefix_plan import SharedPrefix
from kvlayers.generation.prefixes.active_store import ActiveStore
from kvlayers.generation.prefixes.eligibility import (
    IneligibleError,
    check_cache,
    check_model,
    model_identity,
    options_as_text,
)
from kvlayers.generation.prefixes.stored_caches import usable_cache
from kvlayers.prefix import Hit


class StoredContexts:
    """The part of a prefix store that belongs to one model and one cache.

    Args:
        model: the model.
        active: the store.
        cache_name: name of the cache.
        options: options of the cache.

    Raises:
        IneligibleError: the states of the model do not depend on tokens alone, or the store cannot hold such a cache.
    """

    def __init__(self, model: Any, active: ActiveStore, cache_name: str, options: Mapping[str, Any]) -> None:
        check_model(model, {})
        check_cache(model, cache_name)
        try:
            identity = model_identity(model)
        except ConfigError as error:
            raise IneligibleError(f"its weights cannot be identified: {error}") from error
        self.bypass = active.on_bypass
        self.device = model.device
        self._store = active.store
        self._key = {"config": model.config, "namespace": active.namespace}
        # As `generate()` labels its entries.
        self._label = f"{identity} {cache_name} {options_as_text(options)}"

    def lookup(self, ids: tuple[int, ...], division: str = "") -> Hit:
        """The longest stored prefix of tokens, without the last one.

        Args:
            ids: the tokens.
            division: how stored tokens were divided into passes, if their states depend on it.
        """
        return self._store.lookup(torch.tensor(ids), model=self._label + division, **self._key)

    def insert(self, ids: tuple[int, ...], cache: Cache, division: str = "") -> None:
        """Insert a cache that has seen these tokens, if the store can take it."""
        # Scores do not depend on whether it can.
        try:
            self._store.insert(torch.tensor(ids), cache, model=self._label + division, **self._key)
        except (KVLayersError, OSError, RuntimeError, MemoryError) as error:
            self._store.record_refusal(str(error))


def stored_contexts(
    model: Any, active: ActiveStore | None, cache_name: str, options: Mapping[str, Any]
) -> StoredContexts | None:
    """The part of a store for `score_tokens`; `None` if there is no store, or if it cannot be used.

    The store is told why it is bypassed, and may raise.
    """
    if active is None:
        return None
    try:
        return StoredContexts(model, active, cache_name, options)
    except IneligibleError as error:
        active.on_bypass(str(error))
        return None


class ExactEntries:
    """Entries of exact caches, which `generate()` shares.

    Args:
        contexts: the part of the store.
    """

    def __init__(self, contexts: StoredContexts) -> None:
        self._contexts = contexts

    def stored_length(self, length: int, cache: Any) -> int:
        """All tokens, if the cache can be rolled back by the last one."""
        return length if cache.keeps_every_token else length - 1

    def find(self, ids: tuple[int, ...], length: int, make_cache: Callable[[], Any]) -> Any | None:
        """The longest prefix."""
        hit = self._contexts.lookup(ids)
        return None if hit.cache is None else usable_cache(hit.cache, self._contexts.device, make_cache)

    def insert(self, ids: tuple[int, ...], cache: Any) -> None:
        """Insert a cache that has seen these tokens."""
        self._contexts.insert(ids, cache)


class ChunkedEntries:
    """Entries of caches that round or evict, for contexts that are read in the same chunks.

    What such a cache holds depends on where it stopped reading. So an entry serves contexts that start with all of its
    tokens, and is never rolled back.

    Args:
        contexts: the part of the store.
        chunk: tokens in one pass.
    """

    def __init__(self, contexts: StoredContexts, chunk: int) -> None:
        self._contexts, self._chunk = contexts, chunk

    def stored_length(self, length: int, cache: Any) -> int:
        """The whole chunks before the last token."""
        return (length - 1) // self._chunk * self._chunk

    def find(self, ids: tuple[int, ...], length: int, make_cache: Callable[[], Any]) -> Any | None:
        """Exactly `length` tokens."""
        hit = self._contexts.lookup((*ids[:length], 0), self._division(length))
        is_whole = hit.cache is not None and hit.covered == length
        return usable_cache(hit.cache, self._contexts.device, make_cache) if is_whole and hit.cache else None

    def insert(self, ids: tuple[int, ...], cache: Any) -> None:
        """Insert a cache that has seen these tokens, which are whole chunks."""
        self._contexts.insert(ids, cache, self._division(len(ids)))

    def _division(self, length: int) -> str:
        return f" {length} tokens in chunks of {self._chunk}"


ContextEntries = ExactEntries | ChunkedEntries
"""How the contexts of one kind of cache are stored."""


class ContextCaches:
    """Reads prefixes.

    Args:
        model: the model.
        make_cache: makes an empty cache.
        division: how prefixes are divided into passes.
        entries: where prefixes are looked up and inserted, `None` for no store.
    """

    def __init__(
        self, model: Any, make_cache: Callable[[], Any], division: Division, entries: ContextEntries | None
    ) -> None:
        self.make_cache = make_cache
        self._model, self._division, self._entries = model, division, entries
        self._sizes = PassSizes(division.context_step, division.pass_limit)

    def read(self, prefix: SharedPrefix, parent: SharedCache | None, seen: int) -> tuple[Any, Tensor | None]:
        """Read a prefix.

        Args:
            prefix: the prefix.
            parent: the cache of a shorter prefix, or `None` to begin with an empty cache.
            seen: how many tokens `parent` has seen, 0 without it.

        Returns:
            The cache, and the logits of the last token, `[1, 1, vocab]`; `None` if no context ends there and a store
            had all of it.
        """
        cache = self.make_cache() if parent is None else parent.take()
        if self._entries is None:
            return cache, self._pass(prefix.ids[seen:], cache, seen)
        asked = prefix.sequence[: prefix.length + (not prefix.ends_context)]
        stored = min(self._entries.stored_length(len(asked), cache), prefix.length)
        if seen < stored:
            found = self._entries.find(asked, stored, self.make_cache)
            if found is not None and self._is_nearer(found.get_seq_length(), seen, prefix.length):
                cache, seen = found, found.get_seq_length()
        if seen < stored < prefix.length:
            self._pass(prefix.ids[seen:stored], cache, seen)
            self._entries.insert(prefix.ids[:stored], cache)
            seen = stored
        if seen == prefix.length:
            return cache, None
        logits = self._pass(prefix.ids[seen:], cache, seen)
        if stored == prefix.length:
            self._entries.insert(prefix.ids, cache)
        return cache, logits

    def _pass(self, ids: tuple[int, ...], cache: Any, seen: int) -> Tensor:
        row = torch.tensor([ids], device=self._model.device)
        [(_, logits)] = scored_logits(self._model, row, cache, self._sizes, seen, scored_from=len(ids) - 1)
        return logits

    def _is_nearer(self, found: int, seen: int, length: int) -> bool:
        """Whether reading on behind `found` tokens takes less time than behind `seen`, the length of another cache."""
        limit, cost = self._division.pass_limit, self._division.pass_cost
        left = length - found if limit is None else (length - found) * cost / limit
        return found > seen and left < length - seen
