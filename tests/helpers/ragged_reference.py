"""Tokens of each sequence and KV head in a list, and attention to them by its definition."""

import copy
import functools
import itertools
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from kvlayers.core.token_store import TokenStore
from kvlayers.eviction.evicted import evicted
from kvlayers.eviction.held_tokens import HeldTokens, attended_with, held_tokens
from kvlayers.eviction.selection import KeptTokens
from kvlayers.kernels.attention.packed_tensor import PackedStates
from kvlayers.kernels.attention.segment_kinds import DenseSegment
from kvlayers.kernels.attention.segments import GatheredSegment, KVSegments

HEADS = 4
"""Query heads, two of which share a KV head."""

KV_HEADS = 2
KEY_DIM = 64
VALUE_DIM = 32

FIRST = 8
"""First tokens of each head that an eviction of these tests keeps."""

generator = torch.Generator()

Pair = tuple[Tensor, Tensor]


def of_head(held: HeldTokens, sequence: int, kv_head: int) -> tuple[Tensor, Tensor]:
    """Keys and values of the tokens of one head, `[1, 1, tokens, head_dim]`."""
    first = held.keys.shape[2] - int(held.counts[sequence, kv_head])
    one = slice(sequence, sequence + 1), slice(kv_head, kv_head + 1), slice(first, None)
    return held.keys[one], held.values[one]


class RaggedLists:
    """Keys and values of each token of each sequence and head, and the numbers of the tokens in the text.

    Attributes:
        keys: for each sequence and head a list of keys `[key_head_dim]`.
        values: for each sequence and head a list of values `[value_head_dim]`.
        texts: for each sequence and head the numbers of these tokens in the text.
        seen: tokens of the text.
    """

    def __init__(self, batch: int) -> None:
        self.keys: list[list[list[Tensor]]] = [[[] for _ in range(KV_HEADS)] for _ in range(batch)]
        self.values: list[list[list[Tensor]]] = copy.deepcopy(self.keys)
        self.texts: list[list[list[int]]] = [[[] for _ in range(KV_HEADS)] for _ in range(batch)]
        self.seen = 0

    @property
    def batch(self) -> int:
        return len(self.texts)

    @property
    def counts(self) -> Tensor:
        return torch.tensor([[len(head) for head in heads] for heads in self.texts])

    def append(self, keys: Tensor, values: Tensor) -> None:
        for sequence, head in itertools.product(range(self.batch), range(KV_HEADS)):
            self.keys[sequence][head] += keys[sequence, head].unbind()
            self.values[sequence][head] += values[sequence, head].unbind()
            self.texts[sequence][head] += range(self.seen, self.seen + keys.shape[2])
        self.seen += keys.shape[2]

    def keep(self, places: list[list[list[int]]]) -> None:
        """Keep the tokens at these places of each list."""
        for side in (self.keys, self.values, self.texts):
            for sequence, heads in enumerate(places):
                for head, kept in enumerate(heads):
                    side[sequence][head] = [side[sequence][head][place] for place in kept]  # type: ignore[index]

    def crop(self, removed: int) -> None:
        """Forget the newest tokens, which every head holds."""
        assert removed <= self.common
        self.keep([[list(range(len(head) - removed)) for head in heads] for heads in self.texts])
        self.seen -= removed

    @property
    def common(self) -> int:
        """How many of the newest tokens every head holds."""
        held_by_all = set.intersection(*(set(head) for heads in self.texts for head in heads))
        return self.seen - 1 - max(set(range(self.seen)) - held_by_all, default=-1)

    def select(self, chosen: list[int]) -> None:
        self.keys, self.values, self.texts = (
            [[list(head) for head in side[row]] for row in chosen]  # type: ignore[misc]
            for side in (self.keys, self.values, self.texts)
        )

    def copy(self) -> "RaggedLists":
        return copy.deepcopy(self)

    def attention(self, query: Tensor) -> Tensor:
        """Attention of one query of each head, `[batch, HEADS, 1, KEY_DIM]`, to all tokens of its KV head."""

        def states_at(sequence: int, head: int) -> Iterable[Tensor]:
            return (torch.stack(side[sequence][head]) for side in (self.keys, self.values))

        return attention_by_head(query, states_at)


def kept_tokens(places: list[list[list[int]]], counts: Tensor, columns: int) -> KeptTokens:
    """The tokens at these places of the list of each head, which has `counts` tokens in the last of the columns."""
    mask = torch.zeros(*counts.shape, columns, dtype=torch.bool)
    for sequence, heads in enumerate(places):
        for head, kept in enumerate(heads):
            mask[sequence, head, torch.tensor(kept, dtype=torch.int64) + columns - int(counts[sequence, head])] = True
    return KeptTokens(mask, mask.sum(2))


def segments_of(keys: Tensor, values: Tensor) -> KVSegments:
    """What a store has returned, as segments."""
    if isinstance(keys, PackedStates):
        return keys.snapshot.read()
    return KVSegments((DenseSegment(keys, values),))


def attention_by_head(query: Tensor, states_at: Callable[[int, int], Iterable[Tensor]]) -> Tensor:
    """Attention in float64 of one query of each head to the keys and values of a sequence and KV head."""
    out = torch.zeros(*query.shape[:3], VALUE_DIM, dtype=torch.float64)
    for sequence, head in itertools.product(*map(range, query.shape[:2])):
        keys, values = (states.double() for states in states_at(sequence, head // (HEADS // KV_HEADS)))
        scores = keys @ query[sequence, head, 0].double() * query.shape[3] ** -0.5
        out[sequence, head, 0] = torch.softmax(scores, 0) @ values
    return out


def states_of_head(segments: KVSegments, sequence: int, kv_head: int) -> tuple[Tensor, Tensor]:
    """Keys and values of all tokens of a KV head of a sequence, `[tokens, head_dim]`."""
    parts = list[tuple[Tensor, ...]]()
    for segment in segments.in_order:
        source = segment.source if isinstance(segment, GatheredSegment) else segment
        row = sequence if source.rows is None else source.rows.on(torch.device("cpu"))[0][sequence]
        if isinstance(source, DenseSegment):
            states, size = (source.keys[row, kv_head], source.values[row, kv_head]), 1
        else:
            states = tuple(source.states(side, torch.float32)[row, kv_head] for side in ("keys", "values"))
            if source.smoothing.factor is not None:
                states = states[0] * source.smoothing.factor[sequence, kv_head], states[1]
            size = source.keys.layout.block_tokens
        if not isinstance(segment, GatheredSegment):
            parts.append(states)
            continue
        taken = torch.zeros(segment.width, dtype=torch.bool)
        tables = (table[sequence, kv_head].tolist() for table in (segment.starts, segment.counts, segment.columns))
        for start, count, column in zip(*tables, strict=True):
            assert not taken[column : column + count].any()
            assert column + count <= segment.width
            assert count <= max(size, 64)
            taken[column : column + count] = True
            parts.append(tuple(side[start * size : start * size + count] for side in states))
        # The tokens of a head are right-aligned.
        assert taken[segment.width - int(taken.sum()) :].all()
    keys, values = (torch.cat([part.float() for part in side]) for side in zip(*parts, strict=True))
    return keys, values


# Evictions and updates of a store, which lists follow


def states(batch: int, tokens: int) -> Pair:
    return (
        torch.randn(batch, KV_HEADS, tokens, KEY_DIM, generator=generator),
        torch.randn(batch, KV_HEADS, tokens, VALUE_DIM, generator=generator),
    )


def chosen(count: int, numbers: list[int], recent: int) -> list[int]:
    """About `count` places of a head: the first, the newest, and whole blocks or single tokens between them."""
    length = len(numbers)
    if count < FIRST + recent:
        return list(range(length - count, length))
    places = {*range(min(FIRST, length)), *range(max(length - recent, 0), length)}
    units: dict[tuple[bool, int], list[int]] = {}
    for place, number in enumerate(numbers):
        units.setdefault((number >= 0, number if number >= 0 else place), []).append(place)
    for at in torch.randperm(len(units), generator=generator).tolist():
        unit = list(units.values())[at]
        if len(places) + len(unit) <= count:
            places.update(unit)
    packed = [unit for (is_packed, _), unit in units.items() if is_packed and places & set(unit)]
    return sorted(places.union(*packed))


def head_numbers(held: HeldTokens | None, lists: RaggedLists, sequence: int, head: int, new: int) -> list[int]:
    """The number of the block of each token in the list of a head."""
    length = len(lists.texts[sequence][head])
    if held is None or held.blocks is None:
        return [-1] * length
    return [*held.blocks[sequence, head, held.keys.shape[2] - (length - new) :].tolist(), *[-1] * new]


def evict(
    store: TokenStore, lists: RaggedLists, counts: list[list[int]], new: Pair | None = None, recent: int = 12
) -> TokenStore:
    """The store after an eviction, which the lists follow. Packed tokens of the lists are rounded as in the store."""
    held = held_tokens(store) if store.length else None
    added = 0 if new is None else new[0].shape[2]
    if new is not None:
        lists.append(*new)
    numbers = [[head_numbers(held, lists, at, head, added) for head in range(KV_HEADS)] for at in range(lists.batch)]
    rows = list(zip(counts, numbers, strict=True))
    places = [[chosen(*pair, recent) for pair in zip(*row, strict=True)] for row in rows]
    kept = kept_tokens(places, lists.counts, store.length + added)
    was_packed = [
        [[own[place] >= 0 for place in head] for head, own in zip(row, of_row, strict=True)]
        for row, of_row in zip(places, numbers, strict=True)
    ]
    lists.keep(places)
    after = evicted(store, held_tokens(store, None if new is None else attended_with(store, *new)), kept)
    follow(after, lists, was_packed)
    return after


def follow(store: TokenStore, lists: RaggedLists, was_packed: list[list[list[bool]]]) -> None:
    """Compare, and round those tokens of the lists that the store has packed now."""
    held = held_tokens(store)
    assert torch.equal(held.counts, lists.counts)
    for sequence, head in itertools.product(range(lists.batch), range(KV_HEADS)):
        is_packed = torch.tensor(head_numbers(held, lists, sequence, head, 0)) >= 0
        was = torch.tensor(was_packed[sequence][head], dtype=torch.bool)
        assert is_packed[was].all()
        is_as_before = was | ~is_packed
        for side, seen in zip((lists.keys, lists.values), of_head(held, sequence, head), strict=True):
            expected = torch.stack(side[sequence][head]) if side[sequence][head] else seen[0, 0]
            # Codes are unpacked by matrix products, whose sums have another order in another shape. To pack
            # a block again changes some of its tokens by far more.
            torch.testing.assert_close(seen[0, 0, is_as_before], expected[is_as_before], atol=1e-5, rtol=0)
            torch.testing.assert_close(seen[0, 0], expected, atol=0.05, rtol=0)
            for place in torch.where(~is_as_before)[0].tolist():
                side[sequence][head][place] = seen[0, 0, place]


def check(store: TokenStore, lists: RaggedLists) -> None:
    """Compare what a store holds with the lists, without a change to it."""
    assert held_tokens(store).keys.shape[2] == store.length
    follow(store, lists, packed_in(store, lists))


def packed_in(store: TokenStore, lists: RaggedLists) -> list[list[list[bool]]]:
    held = held_tokens(store)
    return [
        [[number >= 0 for number in head_numbers(held, lists, at, head, 0)] for head in range(KV_HEADS)]
        for at in range(lists.batch)
    ]


def step(store: TokenStore, lists: RaggedLists, tokens: int = 1) -> None:
    """Take in tokens, and compare attention of the last one, which reads held tokens as they were held before."""
    new = states(lists.batch, tokens)
    store.validate(*new)
    before = packed_in(store, lists) if store.length else [[[]] * KV_HEADS] * lists.batch
    returned = store.extend(*new)
    lists.append(*new)
    query = torch.randn(lists.batch, HEADS, 1, KEY_DIM, generator=generator)
    attended = attention_by_head(query, functools.partial(states_of_head, segments_of(*returned)))
    torch.testing.assert_close(attended, lists.attention(query), atol=1e-5, rtol=1e-5)
    assert returned[0].shape[2] == store.length
    follow(store, lists, [[[*head, *[False] * tokens] for head in row] for row in before])
