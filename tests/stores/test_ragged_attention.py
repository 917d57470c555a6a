"""What torch's attention computes on the states of a packed ragged store, with masks of left-padded batches.

`tests/layers/test_evicting.py` has the same of states in full precision.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kvlayers import Quantization
from kvlayers.core.token_store import TokenStore
from kvlayers.eviction.evicted import evicted
from kvlayers.eviction.held_tokens import held_tokens
from kvlayers.eviction.ragged_store import RaggedStore
from kvlayers.stores import QuantizedStore
from ragged_reference import HEADS, KEY_DIM, KV_HEADS, RaggedLists, generator, kept_tokens, of_head, states

PROMPT = 300
PADDING = [0, 270]
RECENT = 16
KEPT = [[150, 90], [30, 20]]

PACKED = Quantization(residual_length=32, sink_tokens=8)


def held_lists(store: TokenStore, lists: RaggedLists) -> RaggedLists:
    """The lists with the states as the store holds them."""
    held = held_tokens(store)
    for sequence in range(lists.batch):
        for head in range(KV_HEADS):
            keys, values = of_head(held, sequence, head)
            lists.keys[sequence][head], lists.values[sequence][head] = [*keys[0, 0].unbind()], [*values[0, 0].unbind()]
    return lists


def padded_prompt() -> tuple[RaggedStore, RaggedLists]:
    """A store of what is left of a left-padded prompt: no padding, and recent tokens of each head."""
    lists, new = RaggedLists(2), states(2, PROMPT)
    lists.append(*new)
    places = []
    for padding, of_heads in zip(PADDING, KEPT, strict=True):
        row = []
        for count in of_heads:
            others = torch.randperm(PROMPT - padding - RECENT, generator=generator)[: count - RECENT] + padding
            row.append([*sorted(others.tolist()), *range(PROMPT - RECENT, PROMPT)])
        places.append(row)
    kept = kept_tokens(places, lists.counts, PROMPT)
    lists.keep(places)
    store = evicted(empty := QuantizedStore(PACKED), held_tokens(empty, new), kept)
    assert isinstance(store, RaggedStore)
    return store, held_lists(store, lists)


def mask_of(store: TokenStore, lists: RaggedLists, padding: list[int], queries: int) -> Tensor:
    """The mask that a model makes: positions that are no padding, and no later ones than that of the query."""
    columns = torch.arange(lists.seen - store.length, lists.seen)
    of_queries = torch.arange(lists.seen - queries, lists.seen)
    visible = columns[None, :] <= of_queries[:, None]
    return (visible & (columns >= torch.tensor(padding)[:, None, None]))[:, None]


def by_sdpa(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    return scaled_dot_product_attention(query, keys, values, mask, enable_gqa=True)


def eagerly(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    keys, values = (side.repeat_interleave(HEADS // KV_HEADS, 1) for side in (keys, values))
    scores = query @ keys.transpose(2, 3) * KEY_DIM**-0.5
    return torch.softmax(scores.masked_fill(~mask, torch.finfo(scores.dtype).min), -1) @ values


@pytest.mark.parametrize("attend", [by_sdpa, eagerly])
def test_left_padding_hides_no_token_that_a_head_holds(attend: Callable[..., Tensor]) -> None:
    store, lists = padded_prompt()
    for queries in (1, 1, 5, 1):
        new = states(lists.batch, queries)
        held = store.take_in(*new)
        query = torch.randn(lists.batch, HEADS, queries, KEY_DIM, generator=generator)
        lists.append(*new)
        attended = attend(query, *held, mask_of(store, lists, PADDING, queries))
        expected = lists.attention(query[:, :, -1:])
        torch.testing.assert_close(attended[:, :, -1:].double(), expected, atol=1e-5, rtol=1e-4)
        held_lists(store, lists)
