"""Caches whose states say what tokens they are of, for tests that compare them with plain lists."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers

from kvlayers import Cache, DynamicCache, DynamicLayer, QuantizedCache, StaticCache
from kvlayers.stores import DenseStore

WINDOW = 4
MOST_TOKENS = 160

Ids = list[int]


@dataclass(frozen=True)
class Kind:
    """A kind of cache.

    Attributes:
        make: an empty one.
        channels: of its states.
        most: states are whole numbers below it.
        tolerance: how far from them states may be.
    """

    make: Callable[[], Cache]
    channels: int = 1
    most: int = 999_983
    tolerance: float = 0.0


KINDS = {
    "full": Kind(DynamicCache),
    # Forks share tokens from the third one on.
    "segments": Kind(lambda: Cache(layers=[DynamicLayer(store=DenseStore(minimum_growth=2))])),
    "window": Kind(lambda: DynamicCache([(None, None, torch.tensor(WINDOW))])),
    "static": Kind(lambda: StaticCache(transformers.LlamaConfig(num_hidden_layers=1), max_cache_len=MOST_TOKENS)),
    # Numbers so few that rounding to eight bits keeps them apart.
    "quantized": Kind(
        lambda: QuantizedCache(nbits=8, q_group_size=2, residual_length=0, sink_tokens=0),
        channels=2,
        most=16,
        tolerance=0.25,
    ),
}


def contents(ids: Ids) -> list[float]:
    """A number for each token that says what it and all before it are."""
    numbers, total = [], 0
    for position, token in enumerate(ids):
        total = (total * 31 + token + position + 1) % 999_983
        numbers.append(float(total))
    return numbers


def extend(kind: Kind, cache: Cache, ids: Ids, more: Ids) -> Ids:
    whole = [*ids, *more]
    states = torch.tensor(contents(whole)[len(ids) :])[None, None, :, None] % kind.most
    states = states.expand(-1, -1, -1, kind.channels).clone()
    cache.update(states, -states, layer_idx=0)
    return whole


def check(kind: Kind, cache: Any, ids: Ids) -> None:
    """`cache` holds what `ids` are, as far as it holds it."""
    assert cache.get_seq_length() == len(ids)
    if not ids:
        return
    layer = cache.layers[0]
    keys, values = layer.keys[0, 0] + 0, layer.values[0, 0] + 0
    assert len(keys) >= (min(len(ids), WINDOW - 1) if layer.is_sliding else len(ids))
    expected = torch.tensor(contents(ids)[len(ids) - len(keys) :])[:, None] % kind.most
    assert bool(((keys - expected).abs() <= kind.tolerance).all())
    assert bool(((values + expected).abs() <= kind.tolerance).all())
