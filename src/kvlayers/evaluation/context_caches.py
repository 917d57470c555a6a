"""Caches that have seen the prefixes of contexts: found in a store, or computed and stored."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kvlayers.evaluation.cache_copies import SharedCache
from kvlayers.evaluation.division import Division
from kvlayers.evaluation.forward_passes import PassSizes, scored_logits
from kvlayers.evaluation.prefix_plan import SharedPrefix
from kvlayers.evaluation.stored_contexts import ContextEntries


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
