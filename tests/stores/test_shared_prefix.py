"""A prompt that is held once for all sequences that go on from it."""

import pytest
import torch

import kvlayers
from kvlayers import DynamicCache, DynamicLayer


def test_expanding_an_empty_cache_or_by_one_changes_nothing() -> None:
    cache = DynamicCache()
    cache.expand(3)
    assert cache.batch_size == -1
    cache.update(*(torch.randn(2, 1, 4, 8) for _ in range(2)), 0)
    cache.expand(1)
    assert cache.batch_size == 2
    for bad in (0, -1, 1.5, "2"):
        with pytest.raises(kvlayers.KVLayersError):
            cache.expand(bad)
    assert cache.batch_size == 2


def test_states_of_another_form_are_refused_while_a_prefix_is_held() -> None:
    layer = DynamicLayer()
    layer.update(torch.randn(1, 2, 9, 8), torch.randn(1, 2, 9, 8))
    layer.expand(4)
    with pytest.raises(kvlayers.errors.StateMismatchError, match="batch size 4"):
        layer.update(torch.randn(1, 2, 1, 8), torch.randn(1, 2, 1, 8))
    assert layer.length == 9
