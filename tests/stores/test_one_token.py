"""The short way of one token into a store: it changes nothing that a caller could see."""

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from kvlayers import DynamicLayer
from kvlayers.core.token_store import KVPair
from kvlayers.errors import StateMismatchError
from kvlayers.quantized.quantization import Quantization
from kvlayers.stores import DenseStore, QuantizedStore

STORES = [DenseStore, QuantizedStore]


def store_of(kind: Any) -> Any:
    return kind(Quantization(nbits=4)) if issubclass(kind, QuantizedStore) else kind()


def states(tokens: int, kv_heads: int = 2, head_dim: int = 64, batch: int = 1) -> KVPair:
    return torch.randn(batch, kv_heads, tokens, head_dim), torch.randn(batch, kv_heads, tokens, head_dim)


@pytest.mark.parametrize("inherited", [False, True])
@pytest.mark.parametrize("method", ["validate", "append", "extend"])
@pytest.mark.parametrize("kind", STORES)
def test_what_a_subclass_overrides_sees_every_token(kind: Any, method: str, inherited: bool) -> None:
    seen = []

    def overridden(store: Any, *arguments: Any) -> Any:
        seen.append(arguments)
        return getattr(super(subclass, store), method)(*arguments)

    subclass: Any = type("Overriding", (kind,), {method: overridden})
    layer = DynamicLayer(store=store_of(type("Inheriting", (subclass,), {}) if inherited else subclass))
    for tokens in (5, 1, 1, 1, 1):
        layer.update(*states(tokens))
    assert len(seen) == 5


@pytest.mark.parametrize("tokens", [5, 250])
@pytest.mark.parametrize("kind", STORES)
def test_later_tokens_go_the_short_way(kind: Any, tokens: int) -> None:
    layer = DynamicLayer(store=store_of(kind))
    for count in (tokens, 1):
        layer.update(*states(count))
    with mock.patch.object(kind, "validate", side_effect=AssertionError("the long way")):
        for _ in range(3):
            layer.update(*states(1))
    assert layer.get_seq_length() == tokens + 4


@pytest.mark.parametrize("kind", STORES)
def test_a_token_of_another_form_is_refused_behind_others(kind: Any) -> None:
    layer = DynamicLayer(store=store_of(kind))
    held = [states(5), states(1), states(1)]
    for pair in held:
        layer.update(*pair)
    keys, values = states(1)
    for wrong in (states(1, kv_heads=1), states(1, head_dim=1), states(1, batch=2)):
        with pytest.raises(StateMismatchError):
            layer.update(*wrong)
    attended = layer.update(keys, values)
    for side, found in enumerate(attended):
        assert torch.equal(found, torch.cat([*(pair[side] for pair in held), (keys, values)[side]], 2))


@pytest.mark.parametrize("tokens", [20, 150])
def test_attention_before_the_first_block_is_that_of_a_dense_store_to_the_last_bit(tokens: int) -> None:
    """With 150 tokens of 32 heads, the compiled kernel attends."""
    torch.manual_seed(0)
    layers = [DynamicLayer(store=store_of(kind)) for kind in STORES]
    prompt, token = states(tokens, 32), states(1, 32)
    query = torch.randn(1, 32, 1, 64, dtype=torch.bfloat16)
    found = []
    for layer in layers:
        for pair in (prompt, token, token):
            keys, values = layer.update(*(side.bfloat16() for side in pair))
        found.append(torch.nn.functional.scaled_dot_product_attention(query, keys, values))
        assert type(keys) is not Tensor
    assert torch.equal(*found)
