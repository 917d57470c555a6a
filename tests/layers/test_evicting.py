"""An evicting layer against a history of all tokens with a mask of those that are kept."""

import copy
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers.models.llama.modeling_llama import repeat_kv

from eviction_oracle import EvictionOracle
from kvlayers import EvictingLayer, OptionError, Quantization
from kvlayers.errors import RollbackError, StateMismatchError, UnsupportedLayerError
from kvlayers.eviction import BUILTIN_RULES, EvictionRule, eviction_rule, register_eviction_rule
from kvlayers.eviction.eviction_progress import EvictionProgress
from kvlayers.eviction.held_tokens import held_tokens
from kvlayers.eviction.selection import HEAD_FLOOR, select
from kvlayers.stores import QuantizedStore, StaticStore
from matrix import once, product
from ragged_reference import of_head
from short_steps import STEP, shorten_steps

KV_HEADS, HEADS, HEAD_DIM = 2, 4, 8
SINKS, RECENT = 4, 16


@register_eviction_rule("test_window")
@dataclass(frozen=True)
class NewestQueries(EvictionRule):
    """A token is kept for what the newest queries make of it."""

    queries: int = 8

    def scores(self, keys: Tensor, values: Tensor, queries: Tensor | None) -> Tensor:
        assert queries is not None
        assert 0 < queries.shape[2] <= min(self.queries, keys.shape[2])
        grouped = queries.unflatten(1, (keys.shape[1], -1))
        return (grouped @ keys[:, :, None].transpose(3, 4)).mean((2, 3))


@register_eviction_rule("test_all_queries")
@dataclass(frozen=True)
class EveryQuery(NewestQueries):
    """The same with the queries of all tokens since the last eviction."""

    queries: int = -1

    def scores(self, keys: Tensor, values: Tensor, queries: Tensor | None) -> Tensor:
        assert queries is not None
        grouped = queries.unflatten(1, (keys.shape[1], -1))
        return (grouped @ keys[:, :, None].transpose(3, 4)).mean((2, 3)) * queries.shape[2]


@pytest.fixture(autouse=True)
def _few_tokens_between_evictions(monkeypatch: pytest.MonkeyPatch) -> None:
    shorten_steps(monkeypatch)


AMOUNTS: dict[str, dict[str, Any]] = {"keep": {"keep": 0.4}, "budget": {"budget": 48}}


def attend_by_sdpa(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
    return scaled_dot_product_attention(queries, keys, values, attn_mask=mask, enable_gqa=True)


def attend_by_products(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
    group = queries.shape[1] // keys.shape[1]
    keys, values = (repeat_kv(states, group) for states in (keys, values))
    scores = queries @ keys.transpose(2, 3) * HEAD_DIM**-0.5
    return (scores if mask is None else scores.masked_fill(~mask, -torch.inf)).softmax(-1) @ values


def attend_by_groups(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
    """The query heads of a KV head are queries, as transformers' "sdpa" has it beside a mask."""
    columns, rows = keys.shape[2], queries.shape[2]
    if mask is None:
        mask = torch.ones(rows, columns, dtype=torch.bool).tril(columns - rows)
    masks = mask.expand(*queries.shape[:3], columns).reshape(*keys.shape[:2], -1, columns)
    attended = attend_by_sdpa(queries.reshape(*keys.shape[:2], -1, HEAD_DIM), keys, values, masks)
    return attended.reshape(queries.shape)


class Pair:
    """A layer beside its oracle. Both get the same states."""

    def __init__(self, layer: EvictingLayer, oracle: EvictionOracle, batch: int = 2, seed: int = 0) -> None:
        self.layer, self.oracle, self.batch = layer, oracle, batch
        self.generator = torch.Generator().manual_seed(seed)
        self.attend = attend_by_sdpa

    def step(self, tokens: int) -> None:
        shapes = (HEADS, KV_HEADS, KV_HEADS)
        queries, keys, values = (
            torch.randn(self.batch, heads, tokens, HEAD_DIM, generator=self.generator, dtype=torch.float64)
            for heads in shapes
        )
        columns, first = self.layer.mask_sizes(tokens)
        positions = torch.arange(first, first + columns)
        mask = positions <= torch.arange(self.layer.length, self.layer.length + tokens)[:, None]
        held = self.layer.update(keys, values)
        assert held[0].shape[2] == columns
        is_plain = tokens == 1 or first + columns == tokens == columns
        if self.layer.left_padding is not None:
            mask = mask[None, None] & (positions >= self.layer.left_padding[:, None, None, None])
        elif is_plain and tokens == 1:
            mask = None
        found = self.attend(queries, *held, mask)
        expected = self.oracle.step(queries, keys, values)
        if self.oracle.padding is not None:
            found = found.nan_to_num()
        # Attention on states that show their queries computes in float32.
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
        self.check()

    def check(self) -> None:
        """What is held is what the oracle keeps."""
        layer, oracle = self.layer, self.oracle
        assert layer.length == oracle.seen
        # A sequence whose padding goes on has no token in common with the others.
        assert layer.exact_from == oracle.whole_from or layer.exact_from <= max(oracle.padding or [0])
        if not oracle.seen:
            assert not layer.held_tokens
            return
        held = held_tokens(layer.store)
        padding = oracle.padding or [0] * self.batch
        for row in range(self.batch):
            for head in range(KV_HEADS):
                kept = oracle.kept[row, head]
                keys, values = of_head(held, row, head)
                # Padding is held until an eviction drops it.
                first = keys.shape[2] - int(kept.sum()) if padding[row] > oracle.whole_from else 0
                expected = oracle.keys[row, head, kept], oracle.values[row, head, kept]
                assert all(map(torch.equal, (keys[0, 0, first:], values[0, 0, first:]), expected))

    def go_on(self) -> None:
        for tokens in (1, 1, 30, *[1] * (STEP + 2), 3, 1):
            self.step(tokens)


def pair(rule: str, per_head: bool = False, padding: list[int] | None = None, **amounts: Any) -> Pair:
    how = {"per_head": per_head, **amounts}
    layer = EvictingLayer(rule, sink_tokens=SINKS, recent_tokens=RECENT, left_padding=padding, **how)
    return Pair(layer, EvictionOracle(eviction_rule(rule), sinks=SINKS, recent=RECENT, padding=padding, **how))


READINGS: dict[str, tuple[list[int], list[int] | None]] = {
    "a prompt and tokens": ([100, *[1] * (2 * STEP + 4)], None),
    "chunks": ([50, 50, 3, 70, 2, 1, 1, 40], None),
    "token by token": ([1] * (48 + 2 * STEP + 4), None),
    "a short prompt": ([10, 1, 5, 1, 20, *[1] * (STEP + 16)], None),
    "padding that is evicted with the prompt": ([100, *[1] * (2 * STEP + 4), 20, 1], [0, 30]),
    "padding that is longer than the first chunks": ([30, 25, 1, 30, 1, 40, *[1] * 40], [0, 65]),
}
"""How tokens come, and the padding before each sequence."""


HOW = AMOUNTS, [False, True], [attend_by_sdpa, attend_by_products, attend_by_groups], READINGS
WITHOUT_AND_WITH_QUERIES = ["knorm", "test_window", "test_all_queries"]


@pytest.mark.parametrize(
    ("rule", "amount", "per_head", "attend", "reading"),
    [
        *product(WITHOUT_AND_WITH_QUERIES, *HOW),
        *once([rule for rule in BUILTIN_RULES if rule not in WITHOUT_AND_WITH_QUERIES], *HOW),
    ],
)
def test_attention_is_that_over_the_kept_tokens(
    rule: str, amount: str, per_head: bool, attend: Callable[..., Tensor], reading: str
) -> None:
    chunks, padding = READINGS[reading]
    together = pair(rule, per_head, padding, **AMOUNTS[amount])
    together.attend = attend
    for tokens in chunks:
        together.step(tokens)


@pytest.mark.parametrize("rule", ["knorm", "test_window"])
def test_no_sequences_are_held_as_any_others(rule: str) -> None:
    layer = EvictingLayer(rule, budget=48, sink_tokens=SINKS, recent_tokens=RECENT)
    for tokens in (100, 1, 100):
        keys, _ = layer.update(torch.zeros(0, KV_HEADS, tokens, HEAD_DIM), torch.zeros(0, KV_HEADS, tokens, HEAD_DIM))
    assert (layer.length, keys.shape[0], layer.nbytes) == (201, 0, 0)


def test_an_eviction_takes_no_token_of_a_sequence_that_is_not_due() -> None:
    """Packed heads keep whole blocks, so that the average of a sequence need not be a whole number."""
    counts = torch.tensor([[30, 33], [40, 43]])
    settings = EvictingLayer("knorm", budget=36, sink_tokens=SINKS, recent_tokens=RECENT).options
    wanted = EvictionProgress(settings).after_eviction(100, counts + 1, counts).wanted(100, 0, 2)
    kept = select(torch.randn(2, 2, 43), wanted, padding=43 - counts, floor=HEAD_FLOOR).counts
    assert (kept[0].tolist(), int(kept[1].sum())) == ([30, 33], 2 * 36)


def _state(layer: EvictingLayer) -> EvictingLayer:
    options = layer.options
    fresh = EvictingLayer(options.rule, options.keep, options.budget, SINKS, RECENT, options.per_head)
    fresh.load_state(layer.state())
    return fresh


OPERATIONS: dict[str, tuple[Callable[[EvictingLayer], Any], list[int], int | None]] = {
    "fork": (lambda layer: layer.fork(), [0, 1], 0),
    "deepcopy": (copy.deepcopy, [0, 1], 0),
    "pickle": (lambda layer: pickle.loads(pickle.dumps(layer)), [0, 1], 0),
    "state": (_state, [0, 1], 0),
    "crop one": (lambda layer: layer.crop(-1), [0, 1], 1),
    "crop many": (lambda layer: layer.crop(-RECENT), [0, 1], RECENT),
    "crop none": (lambda layer: layer.crop(0), [0, 1], 0),
    "select": (lambda layer: layer.batch_select_indices(torch.tensor([1, 0, 1])), [1, 0, 1], 0),
    "expand": (lambda layer: layer.expand(2), [0, 0, 1, 1], 0),
    "reset": (lambda layer: layer.reset(), [0, 1], None),
    "trim": (lambda layer: layer.trim(), [0, 1], 0),
    "compact": (lambda layer: layer.compact(), [0, 1], 0),
}
"""What is done to a layer, the sequences that are left, and how many of their tokens are taken back: `None` for all."""


@pytest.mark.parametrize(
    ("rule", "amount", "operation", "chunks"),
    product(["test_window", "test_all_queries"], AMOUNTS, OPERATIONS, [[100], [100, *[1] * (STEP + 4)], [RECENT, 1]]),
)
def test_decoding_goes_on_after(rule: str, amount: str, operation: str, chunks: list[int]) -> None:
    """The layer matrix has the same of a rule that reads no queries."""
    together = pair(rule, **AMOUNTS[amount])
    for tokens in chunks:
        together.step(tokens)
    change, rows, removed = OPERATIONS[operation]
    before, oracle = together.layer, together.oracle
    together.layer = change(before) or before
    if together.layer is not before:
        # The other one goes on elsewhere.
        states, queries = (torch.randn(2, heads, 30, HEAD_DIM, dtype=torch.float64) for heads in (KV_HEADS, HEADS))
        attend_by_sdpa(queries, *before.update(states, states), None)
    oracle.select(rows)
    oracle.truncate(0 if removed is None else oracle.seen - removed)
    together.batch = len(rows)
    together.check()
    together.go_on()


def test_a_crop_beyond_what_every_head_holds_is_refused() -> None:
    together = pair("knorm", keep=0.4)
    for tokens in (100, *[1] * 10):
        together.step(tokens)
    for length in (100 - RECENT - 1, 1, 50):
        with pytest.raises(RollbackError, match=f"to {100 - RECENT} to 110 tokens"):
            together.layer.crop(length)
        together.check()
    together.layer.crop(100 - RECENT)
    together.oracle.truncate(100 - RECENT)
    together.go_on()


def test_gradients_through_heads_of_different_lengths_are_refused_before_anything_changes() -> None:
    together = pair("knorm", keep=0.4, per_head=True)
    together.step(100)
    new = torch.randn(2, KV_HEADS, 1, HEAD_DIM, dtype=torch.float64, requires_grad=True)
    with pytest.raises(UnsupportedLayerError, match="per_head=False"):
        together.layer.update(new, new)
    together.check()
    together.go_on()
    even = pair("knorm", keep=0.4, per_head=False).layer
    states = torch.randn(2, KV_HEADS, 100, HEAD_DIM, dtype=torch.float64)
    even.update(states, states)
    assert even.update(new, new)[0].requires_grad


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("per_head", [False, True])
def test_announced_columns_stand_for_no_token(per_head: bool, tokens: int) -> None:
    layer = EvictingLayer("random", keep=0.4, sink_tokens=SINKS, recent_tokens=RECENT, per_head=per_head)
    layer.update(*torch.randn(2, 2, KV_HEADS, 100, HEAD_DIM).unbind())
    wider = layer.fork()
    wider.announce(wider.columns + 9)
    assert wider.mask_sizes(tokens)[0] == layer.mask_sizes(tokens)[0] + 9
    keys, values = torch.randn(2, 2, KV_HEADS, tokens, HEAD_DIM).unbind()
    query = torch.randn(2, HEADS, tokens, HEAD_DIM)
    mask = torch.rand(2, 1, tokens, layer.columns + tokens) < 0.7
    mask[..., -1] = True
    expected = attend_by_sdpa(query, *layer.update(keys, values), mask)
    visible = torch.cat([torch.ones(2, 1, tokens, 9, dtype=torch.bool), mask], 3)
    torch.testing.assert_close(attend_by_sdpa(query, *wider.update(keys, values), visible), expected)


def test_the_queries_of_a_prompt_are_not_copied_for_each_later_token() -> None:
    held = EvictionProgress(EvictingLayer("h2o", keep=0.5).options)
    held = held.with_queries(torch.randn(1, HEADS, 100, HEAD_DIM))
    prompt = held.shown[0]
    for _ in range(60):
        held = held.with_queries(torch.randn(1, HEADS, 1, HEAD_DIM))
    assert held.shown[0] is prompt
    assert len(held.shown) <= 1 + 6


@pytest.mark.parametrize("length", [None, 101, 100, 95])
def test_queries_that_attention_has_not_shown_leave_no_gap(length: int | None) -> None:
    layer = EvictingLayer("test_window", budget=400, sink_tokens=SINKS, recent_tokens=RECENT)
    shown = torch.randn(1, HEADS, 100, HEAD_DIM)
    states = torch.randn(1, KV_HEADS, 100, HEAD_DIM)
    attend_by_sdpa(shown, *layer.update(states, states), None)
    layer.update(states[:, :, :1], states[:, :, :1])
    if length is not None:
        layer.crop(length)
    last = torch.randn(1, HEADS, 1, HEAD_DIM)
    attend_by_sdpa(last, *layer.update(states[:, :, :1], states[:, :, :1]), None)
    known = last if length in (None, 101) else torch.cat([shown[:, :, :length], last], 2)
    held = layer._progress.queries
    assert held is not None
    assert held.shape[2] == {100: 8, 95: 4}.get(length, 1)
    assert torch.equal(held, known[:, :, -held.shape[2] :])


@pytest.mark.parametrize("padding", [None, 10])
def test_what_is_evicted_leaves_memory(padding: int | None) -> None:
    states = torch.randn(1, KV_HEADS, 4096, HEAD_DIM)
    for keep in (0.75, 0.5, 0.25, 0.1):
        layer = EvictingLayer("knorm", keep=keep, per_head=False, left_padding=None if padding is None else [padding])
        layer.update(states, states)
        assert layer.nbytes <= (keep + 0.03) * 2 * states.nbytes


class Wrong(EvictionRule):
    """Returns what no rule may return."""

    def __init__(self, wrong: Callable[[Tensor], Any], queries: int) -> None:
        self.wrong, self.queries = wrong, queries

    def scores(self, keys: Tensor, values: Tensor, queries: Tensor | None) -> Any:
        return self.wrong(keys)


@pytest.mark.parametrize("queries", [0, 4])
@pytest.mark.parametrize(("held", "tokens"), [(0, 100), (20, 100), (40 + STEP - 1, 1)])
@pytest.mark.parametrize(
    "wrong",
    [
        lambda keys: keys[..., 0, 0],
        lambda keys: keys.argmax(-1),
        lambda keys: None,
        lambda keys: keys[:, :1, :, 0],
        lambda keys: keys[..., 0].to("meta"),
        lambda keys: keys[..., 0].tolist(),
    ],
)
def test_scores_of_a_wrong_shape_change_nothing(
    wrong: Callable[[Tensor], Any], held: int, tokens: int, queries: int
) -> None:
    rule = Wrong(lambda keys: keys[..., 0], queries)
    layer = EvictingLayer(rule, budget=40, sink_tokens=SINKS, recent_tokens=RECENT, per_head=False)
    query, states = (torch.randn(1, heads, held + tokens, HEAD_DIM) for heads in (HEADS, KV_HEADS))
    for one, of_query in zip(states[:, :, :held].split(1, 2), query[:, :, :held].split(1, 2), strict=True):
        attend_by_sdpa(of_query, *layer.update(one, one), None)
    rule.wrong, new = wrong, states[:, :, held:]
    for _ in range(2):
        with pytest.raises(StateMismatchError, match=r"`Wrong.scores` must return floating-point scores \[1, 2, "):
            attend_by_sdpa(query[:, :, held:], *layer.update(new, new), None)
        assert (layer.length, layer.held_tokens, layer.mask_sizes(1)) == (held, held, (held + 1, 0))
        assert not held or torch.equal(layer.keys, states[:, :, :held])


@pytest.mark.parametrize("queries", [0, 4])
def test_a_rule_that_writes_to_states_is_named(queries: int) -> None:
    layer = EvictingLayer(Wrong(lambda keys: keys.zero_()[..., 0], queries), keep=0.4, recent_tokens=RECENT)
    query, states = torch.randn(1, HEADS, 100, HEAD_DIM), torch.randn(1, KV_HEADS, 100, HEAD_DIM)
    with pytest.raises(StateMismatchError, match=r"`Wrong.scores` must not write"):
        attend_by_sdpa(query, *layer.update(states, states.clone()), None)
    assert layer.length == 0


@pytest.mark.parametrize("queries", [None, "4", 2.5, -2, True])
def test_a_number_of_queries_is_checked(queries: Any) -> None:
    with pytest.raises(OptionError, match="`queries` of the rule Wrong"):
        EvictingLayer(Wrong(lambda keys: keys[..., 0], queries), keep=0.4)


def test_an_attention_that_shows_no_queries_is_an_error_that_changes_nothing() -> None:
    layer = EvictingLayer("test_window", keep=0.4, sink_tokens=SINKS, recent_tokens=RECENT, per_head=False)
    states, one = torch.randn(1, KV_HEADS, 100, HEAD_DIM), torch.randn(1, KV_HEADS, 1, HEAD_DIM)
    keys, _ = layer.update(states, states.clone())
    torch.testing.assert_close(keys.clone(), states)
    for operation in (
        lambda: layer.update(one, one),
        lambda: layer.peek(),
        lambda: layer.keys,
        lambda: layer.fork(),
        lambda: layer.state(),
        lambda: layer.expand(2),
        lambda: layer.batch_select_indices(torch.tensor([0])),
        lambda: layer.crop(-1),
    ):
        with pytest.raises(UnsupportedLayerError, match="needs the queries of the newest 100 tokens"):
            operation()
        assert (layer.length, layer.nbytes) == (100, 2 * states.nbytes)
    layer.crop(-100)
    assert (layer.length, layer.held_tokens) == (0, 0)


# The table of `tests/caches/test_evicting_cache.py` has the options that a cache takes as well.
@pytest.mark.parametrize(
    "options",
    [{"keep": 0.5, "budget": 100}, {"keep": 0.5, "window": 3}, {"keep": 0.5, "store": StaticStore(20)}],
    ids=["both amounts", "a misspelt option", "a store that reserves memory"],
)
def test_wrong_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(OptionError):
        EvictingLayer(**{"rule": "knorm", **options})


@pytest.mark.parametrize("padding", [1, 2, 10, 19])
@pytest.mark.parametrize("per_head", [False, True])
def test_a_row_keeps_its_tokens_and_drops_its_padding_where_a_packed_block_has_both(
    padding: int, per_head: bool
) -> None:
    states = torch.randn(2, KV_HEADS, 300, HEAD_DIM)
    store = QuantizedStore(Quantization(nbits=8, residual_length=8, sink_tokens=0))
    layer = EvictingLayer("knorm", None, 100, SINKS, RECENT, per_head, store=store, left_padding=[padding, 0])
    layer.update(states[:, :, :20], states[:, :, :20])
    for new in states[:, :, 20 : 100 + STEP].split(1, 2):
        layer.update(new, new)
    assert layer._progress.evicted.tolist() == [0, STEP]
    # The other row has evicted, and this one has not yet.
    text = states[:1, :, padding : layer.length]
    for head in range(KV_HEADS):
        keys, values = of_head(held_tokens(layer.store), 0, head)
        torch.testing.assert_close([keys, values], [text[:, head : head + 1]] * 2, atol=0.05, rtol=0)
    for new in states[:, :, layer.length :].split(1, 2):
        layer.update(new, new)
    assert layer.held_tokens < 100 + STEP
    for head in range(KV_HEADS):
        keys, _ = of_head(held_tokens(layer.store), 0, head)
        ends = text[:, head : head + 1, :SINKS], states[:1, head : head + 1, -RECENT:]
        torch.testing.assert_close((keys[:, :, :SINKS], keys[:, :, -RECENT:]), ends, atol=0.05, rtol=0)
