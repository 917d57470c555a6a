"""Evicting caches through `generate()`, against a model that attends to masked histories of all tokens."""

from typing import Any

import pytest
import torch
from torch import Tensor

import families
from eviction_oracle_model import OracleCache, oracle_model, oracle_tokens
from kvlayers import EvictingCache
from kvlayers.eviction import BUILTIN_RULES
from models import continued, fresh_model, prompt, tiny_model, under_install

OPTIONS = {"keep": 0.4, "sink_tokens": 2, "recent_tokens": 8}


@pytest.fixture(scope="module")
def model() -> Any:
    return fresh_model("llama").double()


@pytest.fixture(scope="module")
def slow(model: Any) -> Any:
    return oracle_model(model)


def oracle(rule: str) -> OracleCache:
    return OracleCache(2, rule, keep=0.4, sinks=2, recent=8, per_head=True)


def generated(model: Any, ids: Tensor, tokens: int = 10, **how: Any) -> Any:
    torch.manual_seed(0)
    return continued(model, ids, tokens, return_dict_in_generate=True, **how)


@pytest.mark.parametrize("rule", BUILTIN_RULES)
def test_every_rule_by_its_name_and_given_is_the_oracle(model: Any, slow: Any, rule: str) -> None:
    """The oracle does not know how a model rotates, which `expected_attention` learns."""
    ids, given = prompt(1, 60), EvictingCache(model.config, rule=rule, **OPTIONS)
    expected = generated(model, ids, past_key_values=given).sequences
    assert given.get_seq_length() == 69
    assert given.layers[0].held_tokens < 40
    if rule == "expected_attention":
        assert all(layer.rotary is not None for layer in given.layers)
    else:
        assert torch.equal(expected, oracle_tokens(slow, oracle(rule), ids, 10))
    for how in (
        {"cache_implementation": rule, "cache_config": OPTIONS},
        {"cache_implementation": "evicting", "cache_config": {"rule": rule, **OPTIONS}},
        {"past_key_values": EvictingCache(rule=rule, **OPTIONS)},
    ):
        output = under_install(generated, model, ids, **how)
        assert (type(output.past_key_values), output.past_key_values.rule) == (EvictingCache, rule)
        assert torch.equal(output.sequences, expected)


def test_a_padded_sequence_is_decoded_as_it_is_alone(model: Any, slow: Any) -> None:
    texts = [prompt(1, length, seed=length) for length in (60, 44)]
    ids = torch.cat([torch.nn.functional.pad(text, (60 - text.shape[1], 0)) for text in texts])
    mask = (torch.arange(60) >= torch.tensor([[0], [16]])).long()
    alone = torch.stack([oracle_tokens(slow, oracle("keydiff"), text, 10)[0, -10:] for text in texts])
    for how in (
        {"cache_implementation": "keydiff", "cache_config": OPTIONS},
        {"past_key_values": EvictingCache(rule="keydiff", **OPTIONS)},
        {"past_key_values": EvictingCache(model.config, rule="keydiff", **OPTIONS)},
    ):
        found = under_install(generated, model, ids, attention_mask=mask, **how)
        assert torch.equal(found.sequences[:, 60:], alone)
        assert found.past_key_values.layers[0].left_padding.tolist() == [0, 16]


@pytest.mark.parametrize("rule", ["keydiff", "snapkv"])
def test_samples_of_a_prompt_go_on_from_the_same_kept_tokens(rule: str) -> None:
    model, ids = tiny_model("llama"), prompt(2, 60)
    how = {"do_sample": True, "num_return_sequences": 2}
    named = {**how, "cache_implementation": rule, "cache_config": OPTIONS}
    cache = EvictingCache(model.config, rule=rule, **OPTIONS)
    given = generated(model, ids, past_key_values=cache, **how).sequences
    for _ in range(2):
        assert torch.equal(under_install(generated, model, ids, **named).sequences, given)
    layer = under_install(generated, model, ids, tokens=1, **named).past_key_values.layers[0]
    assert (layer.batch_size, layer.held_tokens) == (4, 24)


@pytest.mark.parametrize("how", [{"num_beams": 2}, {"num_return_sequences": 3, "do_sample": True}], ids=str)
def test_padding_is_known_of_each_prompt_that_is_read_once_beside_recurrent_states(how: dict[str, Any]) -> None:
    """A layer of a hybrid model has both, and its part that attends is told of the padding before it holds anything."""
    model, ids, mask = families.model_of("falcon_h1"), prompt(2, 40), torch.ones(2, 40, dtype=torch.int64)
    mask[0, :7] = 0
    expected = generated(model, ids, attention_mask=mask, **how).sequences
    # It evicts nothing here.
    named = {"cache_implementation": "keydiff", "cache_config": {"budget": 100}}
    assert torch.equal(under_install(generated, model, ids, attention_mask=mask, **named, **how).sequences, expected)
