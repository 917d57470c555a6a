"""Evicting caches through `generate()`, against a model that attends to masked histories of all tokens."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import kvlayers
import versions
from eviction_oracle_model import OracleCache, oracle_logits, oracle_model, oracle_tokens
from kvlayers import DynamicCache, EvictingCache
from kvlayers.eviction import BUILTIN_RULES, EvictionRule, register_eviction_rule, unregister_eviction_rule
from matrix import once
from models import continued, fresh_model, prompt, tiny_model, under_install

PROTECTED = {"sink_tokens": 2, "recent_tokens": 8}
OPTIONS = {"keep": 0.4, **PROTECTED}
LAYERS = 2


@pytest.fixture(scope="module")
def model() -> Any:
    return fresh_model("llama").double()


@pytest.fixture(scope="module")
def slow(model: Any) -> Any:
    return oracle_model(model)


@pytest.fixture
def backwards() -> Iterator[None]:
    @register_eviction_rule("test_backwards")
    class Backwards(EvictionRule):
        """Evicts the newest tokens first."""

        def scores(self, keys: Tensor, values: Tensor, queries: Tensor | None) -> Tensor:
            return -torch.arange(keys.shape[2], dtype=keys.dtype).expand(keys.shape[:3])

    yield
    unregister_eviction_rule("test_backwards")


def oracles(rule: str, keep: float | None = 0.4, per_head: bool = True, **options: Any) -> OracleCache:
    return OracleCache(LAYERS, rule, keep=keep, sinks=2, recent=8, per_head=per_head, **options)


def generated(model: Any, ids: Tensor, tokens: int = 10, **how: Any) -> Any:
    torch.manual_seed(0)
    return continued(model, ids, tokens, return_dict_in_generate=True, **how)


@pytest.mark.parametrize("rule", [*BUILTIN_RULES, "test_backwards"])
def test_every_rule_by_its_name_and_given_is_the_oracle(model: Any, slow: Any, backwards: None, rule: str) -> None:
    """The oracle does not know how a model rotates, which `expected_attention` learns."""
    ids, given = prompt(1, 60), EvictingCache(model.config, rule=rule, **OPTIONS)
    expected = generated(model, ids, past_key_values=given).sequences
    assert given.get_seq_length() == 69
    assert given.layers[0].held_tokens < 40
    if rule == "expected_attention":
        assert all(layer.rotary is not None for layer in given.layers)
    else:
        assert torch.equal(expected, oracle_tokens(slow, oracles(rule), ids, 10))
    asked = {"cache_implementation": rule, "cache_config": OPTIONS}
    if rule not in BUILTIN_RULES:
        asked = {"cache_implementation": "evicting", "cache_config": {"rule": rule, **OPTIONS}}
    with kvlayers.installed():
        output = generated(model, ids, **asked)
        bare = generated(model, ids, past_key_values=EvictingCache(rule=rule, **OPTIONS))
    assert type(output.past_key_values) is EvictingCache
    assert output.past_key_values.rule == rule
    assert torch.equal(output.sequences, expected)
    assert torch.equal(bare.sequences, expected)


@pytest.mark.parametrize(("rule", "per_head"), once(["keydiff", "snapkv"], [True, False]))
def test_a_budget_evicts_while_decoding(model: Any, slow: Any, rule: str, per_head: bool) -> None:
    # Not by knorm: a token that the text repeats has the same norm in the first layer, whatever its position.
    ids = prompt(1, 40)
    expected = oracle_tokens(slow, oracles(rule, None, per_head, budget=24), ids, 80)
    cache = EvictingCache(model.config, rule=rule, budget=24, per_head=per_head, **PROTECTED)
    assert torch.equal(generated(model, ids, 80, past_key_values=cache).sequences, expected)
    assert cache.layers[0].held_tokens < 60


def test_a_padded_sequence_is_decoded_as_it_is_alone(model: Any, slow: Any) -> None:
    texts = [prompt(1, length, seed=length) for length in (60, 44)]
    ids = torch.cat([torch.nn.functional.pad(text, (60 - text.shape[1], 0)) for text in texts])
    mask = (torch.arange(60) >= torch.tensor([[0], [16]])).long()
    alone = [oracle_tokens(slow, oracles("keydiff"), text, 10)[0, -10:] for text in texts]
    with kvlayers.installed():
        for how in (
            {"cache_implementation": "keydiff", "cache_config": OPTIONS},
            {"past_key_values": EvictingCache(rule="keydiff", **OPTIONS)},
            {"past_key_values": EvictingCache(model.config, rule="keydiff", **OPTIONS)},
        ):
            found = generated(model, ids, attention_mask=mask, **how)
            assert torch.equal(found.sequences[:, 60:], torch.stack(alone))
            assert found.past_key_values.layers[0].left_padding.tolist() == [0, 16]


def test_chunks_and_turns_are_those_of_the_oracle(model: Any, slow: Any) -> None:
    versions.need_since("5.23", "a prompt in chunks behind tokens that are held")
    for rule in ("knorm", "tova"):
        loop, text = oracles(rule), prompt(1, 50)
        cache = EvictingCache(model.config, rule=rule, **OPTIONS)
        for turn in range(3):
            expected = oracle_tokens(slow, loop, text, 5, chunk=16)
            found = generated(model, text, 5, past_key_values=cache, prefill_chunk_size=16).sequences
            assert torch.equal(found, expected)
            text = torch.cat([found, prompt(1, 20, seed=turn)], dim=1)


@pytest.mark.parametrize("rule", ["knorm", "snapkv"])
def test_the_score_of_beams_is_that_of_the_oracle(model: Any, slow: Any, rule: str) -> None:
    ids = prompt(1, 50)
    output = under_install(
        generated,
        model,
        ids,
        num_beams=3,
        num_return_sequences=3,
        output_scores=True,
        cache_implementation=rule,
        cache_config=OPTIONS,
    )
    assert len({tuple(row) for row in output.sequences.tolist()}) == 3
    for row, score in zip(output.sequences, output.sequences_scores, strict=True):
        cache, total, new = oracles(rule), 0.0, ids
        for token in row[50:]:
            total += oracle_logits(slow, cache, new)[0].log_softmax(-1)[token].item()
            new = token[None, None]
        assert abs(score.item() - total / 10) < 1e-4


@pytest.mark.parametrize(
    ("how", "rule"),
    once(
        [
            {},
            {"num_beams": 3},
            {"do_sample": True, "num_return_sequences": 2},
            {"prefill_chunk_size": 16},
            {"prompt_lookup_num_tokens": 3},
        ],
        ["keydiff", "snapkv", "h2o"],
    ),
)
def test_all_tokens_kept_are_those_of_a_dynamic_cache(how: dict[str, Any], rule: str) -> None:
    model, ids = tiny_model("llama"), prompt(1, 30).repeat(1, 2)
    dense = generated(model, ids, past_key_values=DynamicCache(config=model), **how).sequences
    found = under_install(generated, model, ids, cache_implementation=rule, cache_config={"keep": 1.0}, **how)
    assert torch.equal(found.sequences, dense)


@pytest.mark.parametrize("rule", ["keydiff", "snapkv"])
def test_samples_of_a_prompt_go_on_from_the_same_kept_tokens(rule: str) -> None:
    model, ids = tiny_model("llama"), prompt(2, 60)
    how = {"do_sample": True, "num_return_sequences": 2}
    with kvlayers.installed():
        found = [
            generated(model, ids, **how, cache_implementation=rule, cache_config=OPTIONS).sequences for _ in range(2)
        ]
        prefilled = generated(model, ids, tokens=1, **how, cache_implementation=rule, cache_config=OPTIONS)
    given = generated(model, ids, past_key_values=EvictingCache(model.config, rule=rule, **OPTIONS), **how).sequences
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], given)
    layer = prefilled.past_key_values.layers[0]
    assert (layer.batch_size, layer.held_tokens) == (4, 24)
