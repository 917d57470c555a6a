"""Which prefixes of scored requests are read once, and what is read behind each of them."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvlayers.evaluation.passes import Division
from kvlayers.evaluation.requests import ScoringRequest


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
    def context_tokens(self) -> int:
        """How many tokens the context has."""
        return len(self.context)

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
        return any(row.context_tokens == self.length for row in self.rows)


def plan_prefixes(requests: Sequence[ScoringRequest], division: Division, stored_from: int | None) -> SharedPrefix:
    """The tree of shared prefixes. Its root has no tokens.

    Args:
        requests: the requests.
        division: which prefixes may be shared, and which are worth a pass.
        stored_from: a context of at least this many tokens is read in a pass of its own even if nobody shares it, to
            be stored; `None` for no store.

    Example:
        >>> from kvlayers.evaluation.passes import Division
        >>> from kvlayers.evaluation.requests import ScoringRequest
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
