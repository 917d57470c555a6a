"""Which prefixes of scored requests are read once, and the caches that have seen them: stored ones, or computed."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kvlayers.calls import StorePart, usable_cache
from kvlayers_lab.evaluation.caches import SharedCache
from kvlayers_lab.evaluation.passes import Division, scored_logits
from kvlayers_lab.evaluation.requests import ScoringRequest


@dataclass
class ScoredRow:
    """One sequence that is read, for all requests that read the same tokens behind the same context.

    Attributes:
        context: the context. Rows share its memory with the requests, which may be many and long.
        read: the continuation without its last token, which nothing is predicted from.
        requests: indices of the requests. Their continuations differ in the last token at most.
    """

    context: tuple[int, ...]
    read: tuple[int, ...]
    requests: list[int] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        """How many tokens are read, those of the context among them."""
        return len(self.context) + len(self.read)

    def ids(self, seen: int) -> tuple[int, ...]:
        """What is read behind the first `seen` tokens."""
        return self.context[seen:] + self.read[max(seen - len(self.context), 0) :]


@dataclass
class SharedPrefix:
    """Tokens that are read once, in a cache of their own.

    Attributes:
        sequence: a context that begins with these tokens.
        length: how many of its tokens these are.
        rows: what is read behind them, in batches.
        children: longer prefixes, each of which is read behind a fork.
    """

    sequence: tuple[int, ...]
    length: int
    rows: list[ScoredRow] = field(default_factory=list)
    children: list["SharedPrefix"] = field(default_factory=list)

    @property
    def ids(self) -> tuple[int, ...]:
        """The tokens."""
        return self.sequence[: self.length]

    @property
    def ends_context(self) -> bool:
        """Whether the context of one of the rows ends here."""
        return any(len(row.context) == self.length for row in self.rows)


def plan_prefixes(requests: Sequence[ScoringRequest], division: Division, stored_from: int | None) -> SharedPrefix:
    """The tree of shared prefixes. Its root has no tokens.

    Args:
        requests: the requests.
        division: which prefixes may be shared, and which are worth a pass.
        stored_from: a context of at least this many tokens is read in a pass of its own even if nobody shares it, to
            be stored; `None` for no store.

    Example:
        >>> from kvlayers_lab.evaluation.passes import Division
        >>> from kvlayers_lab.evaluation.requests import ScoringRequest
        >>> requests = [ScoringRequest((1, 2, 3), (4,)), ScoringRequest((1, 2, 9), (4, 5))]
        >>> root = plan_prefixes(requests, Division(1, 2, None, None, None, True, True), None)
        >>> [(prefix.ids, [row.ids(0) for row in prefix.rows]) for prefix in root.children]
        [((1, 2), [(1, 2, 3), (1, 2, 9, 4)])]
    """
    root = _tree(_rows_by_context(requests), division)
    prefixes = [root]
    # Not recursive, since contexts that continue one another make a deep tree.
    for prefix in prefixes:
        prefixes.extend(prefix.children)
    for prefix in reversed(prefixes):
        children, prefix.children = prefix.children, []
        for child in children:
            is_stored = stored_from is not None and child.length >= stored_from and child.ends_context
            if is_stored or _is_worth_a_pass(child, prefix, division):
                prefix.children.append(child)
            else:
                prefix.children += child.children
                prefix.rows += child.rows
    return root


def _is_worth_a_pass(prefix: SharedPrefix, parent: SharedPrefix, division: Division) -> bool:
    cost = division.pass_cost
    if division.pass_limit is not None and cost:
        if prefix.children:
            # They would be read token by token.
            return False
        longest = max(row.tokens for row in prefix.rows) - prefix.length
        cost *= 1 + -(-longest // division.pass_limit)
    saved = (len(prefix.rows) + len(prefix.children) - 1) * (prefix.length - parent.length)
    return saved >= cost


def _rows_by_context(requests: Sequence[ScoringRequest]) -> dict[tuple[int, ...], list[ScoredRow]]:
    rows: dict[tuple[tuple[int, ...], tuple[int, ...]], ScoredRow] = {}
    by_context: dict[tuple[int, ...], list[ScoredRow]] = {}
    for index, (context, continuation) in enumerate(requests):
        key = context, continuation[:-1]
        if key not in rows:
            rows[key] = ScoredRow(context, continuation[:-1])
            by_context.setdefault(context, []).append(rows[key])
        rows[key].requests.append(index)
    return by_context


def _tree(rows: dict[tuple[int, ...], list[ScoredRow]], division: Division) -> SharedPrefix:
    """A node for each context, and one for each prefix at which contexts that may share it diverge."""
    branch = [SharedPrefix((), 0)]
    previous: tuple[int, ...] = ()
    for context in sorted(rows):
        shared = division.shared_tokens(_common_tokens(previous, context))
        _climb(branch, shared)
        branch.append(SharedPrefix(context, len(context), rows[context]))
        previous = context
    _climb(branch, 0)
    return branch[0]


def _climb(branch: list[SharedPrefix], length: int) -> None:
    """Hang the prefixes at the end of `branch` under one another until the last has `length` tokens at most."""
    while branch[-1].length > length:
        prefix = branch.pop()
        if branch[-1].length < length:
            branch.append(SharedPrefix(prefix.sequence, length))
        branch[-1].children.append(prefix)


def _common_tokens(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """Length of the common prefix: by halves, as comparing slices is faster than comparing tokens."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


class ContextEntries:
    """How the contexts of one kind of cache are stored.

    Entries of exact caches are shared with `generate()`. What a cache that rounds or evicts holds depends on where it
    stopped reading. So contexts are read in the same chunks. An entry is never rolled back: it serves contexts that
    start with all of its tokens.

    Args:
        part: the part of the store.
        chunk: tokens in one pass, `None` for an exact cache.
    """

    def __init__(self, part: StorePart, chunk: int | None) -> None:
        self._part, self._chunk = part, chunk

    def stored_length(self, length: int, cache: Any) -> int:
        """How many of the first `length` tokens are stored."""
        if self._chunk is not None:
            # The whole chunks before the last token.
            return (length - 1) // self._chunk * self._chunk
        # All tokens, if the cache can be rolled back by the last one.
        return length if cache.keeps_every_token else length - 1

    def find(self, ids: tuple[int, ...], length: int, make_cache: Callable[[], Any]) -> Any | None:
        """The longest prefix; in chunks, exactly `length` tokens."""
        asked = ids if self._chunk is None else (*ids[:length], 0)
        hit = self._part.lookup(torch.tensor(asked), self._division(length))
        if hit.cache is None or (self._chunk is not None and hit.covered != length):
            return None
        return usable_cache(hit.cache, self._part.device, make_cache)

    def insert(self, ids: tuple[int, ...], cache: Any) -> None:
        """Insert a cache that has seen these tokens, as many as `stored_length` says."""
        self._part.insert(torch.tensor(ids), cache, self._division(len(ids)))

    def _division(self, length: int) -> str:
        return "" if self._chunk is None else f" {length} tokens in chunks of {self._chunk}"


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
        step, behind = self._division.context_step, self._division.pass_limit
        [(_, logits)] = scored_logits(self._model, row, cache, seen, len(ids) - 1, step=step, behind=behind)
        return logits

    def _is_nearer(self, found: int, seen: int, length: int) -> bool:
        """Whether reading on behind `found` tokens takes less time than behind `seen`, the length of another cache."""
        limit, cost = self._division.pass_limit, self._division.pass_cost
        left = length - found if limit is None else (length - found) * cost / limit
        return found > seen and left < length - seen
