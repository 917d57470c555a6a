"""The scores of every rule are those of its paper, computed slowly with whole matrices in float64."""

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor

import kvlayers
from kvlayers.eviction import (
    ALL_QUERIES,
    EvictionRule,
    ExpectedAttention,
    HeavyHitters,
    KeyDiff,
    KNorm,
    RandomEviction,
    SnapKV,
    Streaming,
    Tova,
    eviction_rule,
    eviction_rule_names,
    register_eviction_rule,
    rules,
    unregister_eviction_rule,
)
from kvlayers.eviction.rule import scores_of as checked_scores
from kvlayers.rope.rotary import Layout, Rotary
from kvlayers.upstream.model_types import attention_scale
from turned_by_hand import turned_by_hand

BATCH, KV_HEADS, GROUPS, HEAD_DIM = 2, 3, 2, 8
FREQUENCIES = torch.tensor([1.0, 0.3, 0.05, 0.01], dtype=torch.float64)
NAMES = ["expected_attention", "h2o", "keydiff", "knorm", "random", "snapkv", "streaming", "tova"]


def states(tokens: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Keys, values (of another width) and queries of as many tokens."""
    keys = torch.randn(BATCH, KV_HEADS, tokens, HEAD_DIM, dtype=torch.float64) * 2
    values = torch.randn(BATCH, KV_HEADS, tokens, 5, dtype=torch.float64)
    queries = torch.randn(BATCH, KV_HEADS * GROUPS, tokens, HEAD_DIM, dtype=torch.float64) * 2 + 1
    return keys.to(dtype), values.to(dtype), queries.to(dtype)


def probabilities(keys: Tensor, queries: Tensor, scale: float | None = None) -> Tensor:
    """Whole causal attention, one query at a time, float64 `[batch, heads, observed, tokens]`."""
    tokens, observed = keys.shape[2], queries.shape[2]
    result = torch.zeros(*queries.shape[:3], tokens, dtype=torch.float64)
    for row in range(keys.shape[0]):
        for head in range(queries.shape[1]):
            for number in range(observed):
                seen = tokens - observed + number + 1
                own = keys[row, head // (queries.shape[1] // keys.shape[1]), :seen].double()
                logits = own @ queries[row, head, number].double()
                logits = logits * (scale if scale is not None else 1 / math.sqrt(keys.shape[3]))
                result[row, head, number, :seen] = logits.softmax(0)
    return result


def scores_of(rule: EvictionRule, keys: Tensor, values: Tensor, queries: Tensor) -> Tensor:
    """The scores, with the queries that the rule asks for."""
    shown = {0: None, ALL_QUERIES: queries}.get(rule.queries, queries[:, :, -rule.queries :])
    counts = torch.full(keys.shape[:2], keys.shape[2])
    return checked_scores(rule, keys, values, shown, counts, torch.tensor([queries.shape[2]]))


def assert_near(found: Tensor, expected: Tensor, near: float = 1e-5) -> None:
    assert torch.equal(found.isinf(), expected.isinf())
    torch.testing.assert_close(found.double(), expected.double(), atol=near, rtol=near)


def test_all_rules_are_registered() -> None:
    # Other tests register rules of their own.
    assert [name for name in eviction_rule_names() if not name.startswith("test_")] == NAMES


def slow_knorm(keys: Tensor, queries: Tensor, scale: float | None) -> Tensor:
    norms = [keys[..., token, :].double().square().sum(-1).sqrt() for token in range(keys.shape[2])]
    return -torch.stack(norms, dim=-1)


def slow_keydiff(keys: Tensor, queries: Tensor, scale: float | None) -> Tensor:
    expected = torch.empty(keys.shape[:3], dtype=torch.float64)
    for row, head in itertools.product(range(BATCH), range(KV_HEADS)):
        own = keys[row, head].double()
        anchor = torch.stack([key / key.norm() for key in own]).mean(0)
        expected[row, head] = torch.stack([-(key @ anchor) / (key.norm() * anchor.norm()) for key in own])
    return expected


def slow_tova(keys: Tensor, queries: Tensor, scale: float | None) -> Tensor:
    return probabilities(keys, queries[:, :, -1:], scale)[:, :, 0].mean(1)[:, None].expand(-1, KV_HEADS, -1)


@pytest.mark.parametrize(("rule", "slow"), [(KNorm(), slow_knorm), (KeyDiff(), slow_keydiff), (Tova(), slow_tova)])
@pytest.mark.parametrize("scale", [None, 0.1])
@pytest.mark.parametrize("tokens", [1, 2, 40])
def test_scores_are_those_of_the_paper(
    rule: EvictionRule, slow: Callable[..., Tensor], tokens: int, scale: float | None
) -> None:
    keys, values, queries = states(tokens)
    assert_near(scores_of(rule.for_attention(None, scale), keys, values, queries), slow(keys, queries, scale))


def test_keydiff_of_keys_of_zeros_is_finite() -> None:
    keys, values, queries = states(5)
    assert scores_of(KeyDiff(), torch.zeros_like(keys), values, queries).isfinite().all()


@pytest.mark.parametrize("scale", [None, 0.1])
@pytest.mark.parametrize(("tokens", "observed"), [(1, 1), (7, 3), (7, 7), (50, 8), (3, 2)])
def test_snapkv(tokens: int, observed: int, scale: float | None) -> None:
    keys, values, queries = states(tokens)
    whole = probabilities(keys, queries[:, :, -observed:], scale)[..., : tokens - observed].mean(2)
    expected = torch.full((BATCH, KV_HEADS, tokens), torch.inf, dtype=torch.float64)
    for token in range(tokens - observed):
        near = [other for other in range(token - 2, token + 3) if 0 <= other < tokens - observed]
        pooled = whole[..., near].sum(-1) / 5
        expected[..., token] = pooled.unflatten(1, (KV_HEADS, GROUPS)).mean(2)
    rule = SnapKV(queries=8).for_attention(None, scale)
    # Of more queries than it asks for, a rule looks at the newest.
    shown = queries if observed == rule.queries else queries[:, :, -observed:]
    assert_near(rule.scores(keys, values, shown), expected)


@pytest.mark.parametrize("at_once", [1, 200, 1 << 21])
@pytest.mark.parametrize("scale", [None, 0.1])
@pytest.mark.parametrize(("tokens", "observed"), [(1, 1), (30, 30), (30, 7)])
def test_h2o(tokens: int, observed: int, scale: float | None, at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "CPU_SCORES_AT_ONCE", at_once)
    keys, values, queries = states(tokens)
    shown = queries[:, :, -observed:]
    whole = probabilities(keys, shown, scale)
    expected = torch.empty(BATCH, KV_HEADS, tokens, dtype=torch.float64)
    for token in range(tokens):
        seen_by = [number for number in range(observed) if tokens - observed + number >= token]
        mean = whole[:, :, seen_by, token].mean(2)
        expected[..., token] = mean.unflatten(1, (KV_HEADS, GROUPS)).mean(2)
    assert_near(HeavyHitters().for_attention(None, scale).scores(keys, values, shown), expected)


def test_h2o_never_builds_all_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "CPU_SCORES_AT_ONCE", 5000)
    largest, softmax = 0, Tensor.softmax

    def noting(scores: Tensor, dim: int) -> Tensor:
        nonlocal largest
        largest = max(largest, scores.numel())
        return softmax(scores, dim=dim)

    monkeypatch.setattr(Tensor, "softmax", noting)
    HeavyHitters().scores(*states(300))
    assert 0 < largest <= 5000


def rotated(states: Tensor, positions: Tensor, layout: Layout) -> Tensor:
    """States `[..., tokens, head_dim]` rotated to their positions."""
    return turned_by_hand(states, positions[..., None] * FREQUENCIES, layout)


def expected_scores(
    keys: Tensor, values: Tensor, plain: Tensor, first: int, rule: ExpectedAttention, layout: Layout | None
) -> Tensor:
    """Expected attention from queries that were never rotated, with one rotation matrix for each later position."""
    tokens, head_dim = keys.shape[2], keys.shape[3]
    matrix = torch.eye(head_dim, dtype=torch.float64)
    if layout is not None:
        later = [torch.tensor(float(first + tokens + step)) for step in range(rule.future)]
        matrix = torch.stack([rotated(matrix, position, layout).T for position in later]).mean(0)
    factor = 1 / math.sqrt(head_dim) if rule.scale is None else rule.scale
    scores = torch.full((keys.shape[0], KV_HEADS, tokens), torch.inf, dtype=torch.float64)
    for row in range(keys.shape[0]):
        for head in range(KV_HEADS):
            own, chances = keys[row, head, rule.sinks :].double(), []
            for member in range(GROUPS):
                queries = plain[row, head * GROUPS + member].double()
                mean = matrix @ queries.mean(0)
                covariance = matrix @ queries.T.cov(correction=0).reshape(head_dim, head_dim) @ matrix.T
                logits = [key @ mean * factor + key @ covariance @ key * factor**2 / 2 for key in own]
                chances.append(torch.stack(logits).softmax(0))
            norms = values[row, head, rule.sinks :].double().norm(dim=-1)
            scores[row, head, rule.sinks :] = (torch.stack(chances).mean(0) + rule.epsilon) * norms
    return scores


@pytest.mark.parametrize("layout", ["halves", "pairs", None])
@pytest.mark.parametrize(("tokens", "first", "at_once"), [(6, 0, 512), (60, 1000, 512), (60, 0, 16)])
def test_expected_attention(
    layout: Layout | None, tokens: int, first: int, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rules, "TOKENS_AT_ONCE", at_once)
    keys, values, plain = states(tokens, torch.float64)
    positions = torch.arange(first, first + tokens, dtype=torch.float64)
    turned_keys, turned_queries = (
        side if layout is None else rotated(side, positions, layout) for side in (keys, plain)
    )
    rotary = None if layout is None else Rotary(FREQUENCIES, layout)
    # The newest queries alone are those that it is given.
    for scale, epsilon, newest in ((None, 0.0, tokens), (0.05, 0.02, tokens), (None, 0.0, tokens // 3)):
        rule = ExpectedAttention(future=20, epsilon=epsilon).for_attention(rotary, scale)
        unsunk = plain[:, :, max(rule.sinks, tokens - newest) :]
        expected = expected_scores(turned_keys, values, unsunk, first, rule, layout)
        for dtype, near in ((torch.float64, 1e-9), (torch.float32, 1e-3)):
            given = (side.to(dtype) for side in (turned_keys, values, turned_queries[:, :, -newest:]))
            assert_near(scores_of(rule, *given), expected, near)


def test_expected_attention_is_exact_if_the_mean_is_far_from_zero() -> None:
    keys, values, queries = states(40, torch.float64)
    rule, far = ExpectedAttention(), queries + 300
    exact = rule.scores(keys * 0.01, values, far)
    assert_near(rule.scores((keys * 0.01).float(), values.float(), far.float()), exact, 1e-3)


def test_streaming_scores_the_newest_highest() -> None:
    keys, values, queries = states(40)
    found = scores_of(Streaming(), keys, values, queries)
    assert torch.equal(found.argsort(dim=-1), torch.arange(40).expand(found.shape))


def test_random_is_a_hash_of_the_key() -> None:
    keys, values, queries = states(500)
    before = torch.random.get_rng_state()
    found = scores_of(RandomEviction(), keys, values, queries)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.equal(found, scores_of(RandomEviction(), keys.clone(), values, queries))
    assert torch.equal(found[:, 1:, 100:], scores_of(RandomEviction(), keys[:, 1:, 100:], values, queries))
    low = keys.bfloat16()
    assert torch.equal(RandomEviction().scores(low, values, None), RandomEviction().scores(low.float(), values, None))
    assert not torch.equal(found, scores_of(RandomEviction(1), keys, values, queries))


@pytest.mark.parametrize("seed", [0, 1, -5, 1 << 70])
def test_random_is_spread_evenly_and_differs_by_head_and_sequence(seed: int) -> None:
    keys = torch.randn(1, 1, 2000, HEAD_DIM).expand(2, 4, -1, -1).clone()
    keys += torch.arange(8).view(2, 4, 1, 1) * 1e-3
    found = RandomEviction(seed).scores(keys, keys, None) / (1 << 24)
    rows = torch.stack([*found[0], found[1, 0]])
    assert ((rows >= 0) & (rows < 1)).all()
    close = {"rtol": 0, "check_dtype": False}
    torch.testing.assert_close(rows.mean(1), torch.full((5,), 0.5), atol=0.03, **close)
    torch.testing.assert_close(rows.std(1), torch.full((5,), 12**-0.5), atol=0.02, **close)
    torch.testing.assert_close(torch.corrcoef(rows), torch.eye(5), atol=0.1, **close)


@pytest.mark.parametrize("name", NAMES)
def test_a_rule_is_exact_about_its_contract(name: str) -> None:
    rule = eviction_rule(name)
    for tokens in (1, 2, 5, 130):
        for dtype in (torch.bfloat16, torch.float16, torch.float64):
            keys, values, queries = states(tokens, dtype)
            copies = keys.clone(), values.clone(), queries.clone()
            found = scores_of(rule, keys, values, queries)
            assert not found.isnan().any()
            assert found.dtype in (torch.float32, torch.float64)
            assert all(map(torch.equal, copies, (keys, values, queries)))
            if rule.shares_heads:
                assert torch.equal(found, found[:, :1].expand_as(found))
            for row in range(BATCH):
                alone = scores_of(rule, keys[row : row + 1], values[row : row + 1], queries[row : row + 1])
                torch.testing.assert_close(alone[0], found[row], rtol=1e-4, atol=1e-6)
    assert hash(rule) == hash(eviction_rule(name))
    assert rule == eviction_rule(name)


@pytest.mark.parametrize("name", ["snapkv", "tova", "h2o", "expected_attention"])
def test_a_rule_that_needs_queries_says_so(name: str) -> None:
    keys, values, queries = states(5)
    for missing in (None, queries[:, :, :0]):
        with pytest.raises(kvlayers.errors.StateMismatchError, match="needs the queries"):
            eviction_rule(name).scores(keys, values, missing)


@pytest.mark.parametrize(
    ("factory", "options"),
    [
        (SnapKV, {"queries": 0}),
        (SnapKV, {"queries": 2.5}),
        (SnapKV, {"kernel": 4}),
        (SnapKV, {"kernel": -1}),
        (ExpectedAttention, {"future": 0}),
        (ExpectedAttention, {"sinks": -1}),
        (ExpectedAttention, {"epsilon": -0.5}),
        (ExpectedAttention, {"epsilon": math.nan}),
        (RandomEviction, {"seed": 0.5}),
    ],
)
def test_wrong_options_are_named(factory: type[EvictionRule], options: dict[str, object]) -> None:
    with pytest.raises(kvlayers.errors.OptionError, match=next(iter(options))):
        factory(**options)


class Backwards(EvictionRule):
    """A rule of another package: the oldest tokens are kept."""

    def scores(self, keys: Tensor, values: Tensor, queries: Tensor | None) -> Tensor:
        return -torch.arange(keys.shape[2], dtype=torch.float32).expand(keys.shape[:3])


def test_a_rule_of_another_package_has_a_name() -> None:
    register_eviction_rule("backwards")(Backwards)
    try:
        assert isinstance(eviction_rule("backwards"), Backwards)
        assert "backwards" in eviction_rule_names()
        with pytest.raises(kvlayers.errors.RegistryError, match="backwards"):
            register_eviction_rule("backwards")
    finally:
        unregister_eviction_rule("backwards")
    with pytest.raises(kvlayers.errors.OptionError, match="backwards"):
        eviction_rule("backwards")


LLAMA = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 16}


def rules_for(rule: EvictionRule, config: tf.PretrainedConfig, rotary: Rotary | None = None) -> list[Any]:
    return [layer.options.rule for layer in kvlayers.EvictingCache(config, rule, rotary=rotary).layers]


GEMMA = tf.Gemma2Config(**LLAMA, head_dim=8, query_pre_attn_scalar=64, layer_types=["full_attention"] * 2)


@pytest.mark.parametrize(
    ("rule", "config", "scale"),
    [(SnapKV(), tf.LlamaConfig(**LLAMA), None), (SnapKV(), GEMMA, 1 / 8), (Tova(scale=0.3), GEMMA, 0.3)],
    ids=["of its own", "of the model", "given"],
)
def test_a_model_tells_its_rules_how_it_scales(rule: EvictionRule, config: Any, scale: float | None) -> None:
    assert [own.scale for own in rules_for(rule, config)] == [scale, scale]


def test_a_model_tells_its_rules_how_it_rotates() -> None:
    own, without_rope = Rotary(FREQUENCIES, "pairs"), tf.GPT2Config(n_layer=2, n_embd=32, n_head=4)
    assert None not in [rule.rotary for rule in rules_for(ExpectedAttention(), tf.LlamaConfig(**LLAMA))]
    assert [rule.rotary for rule in rules_for(ExpectedAttention(), GEMMA, own)] == [own, own]
    assert [rule.rotary for rule in rules_for(ExpectedAttention(), without_rope)] == [None, None]


class RemoteConfig(tf.LlamaConfig):
    """A model with its own code."""

    model_type = "remote"


def test_a_rule_that_needs_the_rotation_does_not_guess_it() -> None:
    with pytest.raises(kvlayers.errors.ConfigError, match="rotary"):
        rules_for(ExpectedAttention(), RemoteConfig(**LLAMA))
    assert rules_for(SnapKV(), RemoteConfig(**LLAMA)) == [SnapKV(), SnapKV()]


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (tf.LlamaConfig(**LLAMA), None),
        (tf.GraniteConfig(**LLAMA, attention_multiplier=0.25), 0.25),
        (tf.Gemma3TextConfig(**LLAMA, query_pre_attn_scalar=16), 0.25),
        (tf.OPTConfig(num_hidden_layers=1, hidden_size=32, num_attention_heads=4), 1.0),
    ],
)
def test_the_scale_of_a_model(config: tf.PretrainedConfig, expected: float | None) -> None:
    assert attention_scale(config) == expected


class Needy(EvictionRule):
    """A rule that cannot be made without an argument."""

    def __init__(self, power: float) -> None:
        self.power = power

    def scores(self, keys: Tensor, values: Tensor, queries: Tensor | None) -> Tensor:
        return keys[..., 0] ** self.power


class Unfinished(EvictionRule):
    """A rule that gives no scores."""


@pytest.mark.parametrize(
    ("factory", "says"),
    [(Needy, "'power'"), (Unfinished, "`scores`"), (dict, "derived from"), (lambda power: 1, "power")],
)
def test_factories_that_can_make_no_rule_are_refused(factory: Any, says: str) -> None:
    with pytest.raises(kvlayers.errors.RegistryError, match=says):
        register_eviction_rule("refused")(factory)
    assert "refused" not in eviction_rule_names()


def test_a_rule_that_cannot_be_made_concerns_only_its_own_name() -> None:
    def fail() -> EvictionRule:
        raise OSError("no such file")

    register_eviction_rule("broken")(fail)
    register_eviction_rule("variant")(lambda: SnapKV(queries=9))
    try:
        settings = [kvlayers.EvictingLayer(SnapKV(queries=queries), keep=0.5).describe() for queries in (64, 9)]
        assert [facts["eviction_rule"] for facts in settings] == ["snapkv", "variant"]
        with pytest.raises(OSError, match="no such file"):
            kvlayers.EvictingLayer("broken", keep=0.5)
    finally:
        unregister_eviction_rule("broken")
        unregister_eviction_rule("variant")
