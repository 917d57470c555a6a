"""Branches of one past in every kind of layer, against layers that went the same way alone and share nothing."""

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from branches import Branch, Kind, check_branches
from kvlayers import CacheLayer, Quantization, QuantizedLayer
from layer_kinds import KINDS
from oracle import KV_HEADS, TOLERANCE


def packed(**options: object) -> Callable[[], CacheLayer]:
    quantization = Quantization(**{"residual_length": 12, "sink_tokens": 4, **options})  # type: ignore[arg-type]
    return lambda: QuantizedLayer(quantization)


def attend(key_head_dim: int, value_head_dim: int) -> Callable[[CacheLayer, int, int, int], Tensor]:
    """An update, and the attention of random queries to what it returned."""

    def of_new_tokens(layer: CacheLayer, rows: int, tokens: int, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        keys = torch.randn(rows, KV_HEADS, tokens, key_head_dim, generator=generator)
        values = torch.randn(rows, KV_HEADS, tokens, value_head_dim, generator=generator)
        query = torch.randn(rows, 2 * KV_HEADS, tokens, key_head_dim, generator=generator)
        seen_keys, seen_values = layer.update(keys, values)
        past = seen_keys.shape[2] - tokens
        mask = torch.ones(tokens, past + tokens, dtype=torch.bool).tril(past)
        return scaled_dot_product_attention(query, seen_keys, seen_values, mask, enable_gqa=True)

    return of_new_tokens


LAYERS: dict[str, Kind] = {
    # Padding is given for the sequences that a batch begins with. A store of another package is not expanded as such.
    **{
        kind: Kind(lambda make=make: make()[0], attend(4, 6), TOLERANCE)
        for kind, make in KINDS.items()
        if "padded" not in kind and kind != "store of another package"
    },
    "int8": Kind(packed(nbits=8), attend(16, 16), TOLERANCE),
    "int4": Kind(packed(nbits=4), attend(16, 16), TOLERANCE),
    "int2": Kind(packed(nbits=2), attend(16, 16), TOLERANCE),
    "int4 without a residual": Kind(packed(nbits=4, residual_length=0, sink_tokens=0), attend(16, 16), TOLERANCE),
    "fp8": Kind(packed(backend="fp8"), attend(16, 16), TOLERANCE),
    "hqq": Kind(packed(backend="hqq", nbits=4, q_group_size=16), attend(16, 16), TOLERANCE),
    "quanto": Kind(packed(backend="quanto", nbits=4, q_group_size=32), attend(32, 32), TOLERANCE),
}
NEEDS = {"hqq": "hqq", "quanto": "optimum.quanto"}


def holds_the_same(branch: Branch) -> None:
    """To the last bit: nothing is computed from what is held."""
    seen, expected = branch.shared.state(), branch.alone.state()
    assert (seen.kind, seen.facts) == (expected.kind, expected.facts)
    assert seen.tensors.keys() == expected.tensors.keys()
    for name, tensor in expected.tensors.items():
        assert torch.equal(seen.tensors[name], tensor), name


@pytest.mark.parametrize("kind", LAYERS)
def test_branches_hold_what_layers_hold_that_share_nothing(kind: str) -> None:
    if kind in NEEDS:
        pytest.importorskip(NEEDS[kind])
    for prefix, seed in itertools.product([5, 70, 85], range(2)):
        check_branches(LAYERS[kind], f"{kind} {prefix} {seed}", prefix, changes=40, check=holds_the_same)
