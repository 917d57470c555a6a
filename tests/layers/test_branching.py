"""Branches of one past in every kind of layer, against layers that went the same way alone and share nothing."""

import copy
import itertools
from collections.abc import Callable

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from agreement import bytes_reached, step
from branches import Branch, Kind, check_branches
from kvlayers import (
    CacheLayer,
    DynamicCache,
    DynamicLayer,
    EncoderDecoderCache,
    HybridLayer,
    LinearAttentionLayer,
    OffloadedLayer,
    Quantization,
    QuantizedLayer,
    SinkLayer,
    SlidingLayer,
    stores,
)
from kvlayers.eviction.flat_tokens import split_state
from kvlayers.eviction.held_tokens import held_tokens
from kvlayers.rope.rotary import Rotary
from kvlayers.utils.tensor_memory import storages_of
from layer_kinds import KINDS
from oracle import KV_HEADS, TOLERANCE, states
from ragged_reference import of_head
from rounds import NIGHTLY


def packed(**options: object) -> Callable[[], CacheLayer]:
    quantization = Quantization(**{"residual_length": 12, "sink_tokens": 4, **options})  # type: ignore[arg-type]
    return lambda: QuantizedLayer(quantization)


def attend(key_head_dim: int, value_head_dim: int) -> Callable[[CacheLayer, int, int, int], torch.Tensor]:
    """An update, and the attention of random queries to what it returned."""

    def of_new_tokens(layer: CacheLayer, rows: int, tokens: int, seed: int) -> torch.Tensor:
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
    # Padding is given for the sequences that a batch begins with, and reservations are copied.
    **{
        kind: Kind(lambda make=make: make()[0], attend(4, 6), TOLERANCE)
        for kind, make in KINDS.items()
        if "padded" not in kind and "static" not in kind
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
    """To the last bit, since nothing is computed from it; and all memory is counted."""
    shared = branch.shared
    held = (shared.wrapped, [*shared._pages.held_tensors()]) if isinstance(shared, OffloadedLayer) else shared
    assert shared.nbytes == bytes_reached(held)
    seen, expected = branch.shared.state(), branch.alone.state()
    assert (seen.kind, seen.facts) == (expected.kind, expected.facts)
    assert seen.tensors.keys() == expected.tensors.keys()
    if split_state(expected.tensors)[1]:
        # Where the tokens of a head stand depends on what branches share.
        pair = held_tokens(shared.store), held_tokens(branch.alone.store)
        for row, head in itertools.product(range(branch.rows), range(KV_HEADS)):
            assert all(map(torch.equal, *(of_head(held, row, head) for held in pair)))
        return
    for name, tensor in expected.tensors.items():
        assert torch.equal(seen.tensors[name], tensor), name


@pytest.mark.parametrize("kind", LAYERS)
def test_branches_hold_what_layers_hold_that_share_nothing(kind: str) -> None:
    if kind in NEEDS:
        pytest.importorskip(NEEDS[kind])
    for prefix, seed in itertools.product([5, 85], range(2 if NIGHTLY else 1)):
        check_branches(LAYERS[kind], f"{kind} {prefix} {seed}", prefix, changes=40, check=holds_the_same)


HEAD_DIM, PREFIX, OWN, BRANCHES = 64, 1000, 50, 6
TOKEN_BYTES = 2 * HEAD_DIM * 4
WINDOW = 512

SHARING: dict[str, Callable[[], CacheLayer]] = {
    "dynamic": DynamicLayer,
    "sliding": lambda: SlidingLayer(WINDOW),
    "sliding over more than is seen": lambda: SlidingLayer(4 * PREFIX),
    "sink": lambda: SinkLayer(WINDOW, 4, Rotary(10000.0 ** -(torch.arange(0, HEAD_DIM, 2) / HEAD_DIM), "halves")),
    "int8": lambda: QuantizedLayer(Quantization(nbits=8)),
    "int4": lambda: QuantizedLayer(Quantization(nbits=4)),
    "int2": lambda: QuantizedLayer(Quantization(nbits=2)),
    "fp8": lambda: QuantizedLayer(Quantization("fp8")),
    "int4 in a window": lambda: SlidingLayer(WINDOW, stores.QuantizedStore(Quantization(nbits=4, sink_tokens=0))),
    "attention beside a recurrent state": lambda: HybridLayer(DynamicLayer(), LinearAttentionLayer()),
    "on the host that computes": lambda: OffloadedLayer(DynamicLayer()),
}


def states_of_one(tokens: int, rows: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(rows, 1, tokens, HEAD_DIM), torch.randn(rows, 1, tokens, HEAD_DIM)


def own_bytes(layer: CacheLayer) -> int:
    """Bytes of the tokens of a branch: in full precision, and in codes if some of them have been packed by now."""
    # Sinks are written in front of a window, so each part of it in memory of its own has room for them.
    own = (OWN + (layer.num_sink_tokens if isinstance(layer, SinkLayer) else 0)) * TOKEN_BYTES
    if layer.bits is None:
        return own
    tensors = layer.state().tensors
    block = [states[:1, :, :1] for name, states in tensors.items() if "codes" in name or "parameters" in name]
    return own + sum(states.nbytes for states in block)


@pytest.mark.parametrize("in_one_batch", [False, True])
@pytest.mark.parametrize("kind", SHARING)
def test_branches_take_the_memory_of_one_prefix_and_of_their_own_tokens(kind: str, in_one_batch: bool) -> None:
    layer = SHARING[kind]()
    layer.update(*states_of_one(PREFIX))
    before, rows, branches = layer.nbytes, 1, [layer]
    if in_one_batch:
        rows = BRANCHES
        layer.expand(rows)
    else:
        branches = [layer.fork() for _ in range(BRANCHES)]
    for _ in range(OWN):
        for branch in branches:
            branch.update(*states_of_one(1, rows))
    for branch in branches:
        branch.trim()
    # Memory that several of them hold is counted once.
    held = storages_of(tensor for each in (layer, *branches) for tensor in each.held_tensors())
    assert sum(held.values()) <= before + 1.05 * BRANCHES * own_bytes(branches[0])


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "static" not in kind and "offloaded" not in kind])
def test_a_fork_takes_no_memory_until_it_writes(kind: str, generator: torch.Generator) -> None:
    layer, oracle = KINDS[kind]()
    for tokens in (70, 1, 1, 1):
        step(layer, oracle, tokens, generator)
    copies = [*(layer.fork() for _ in range(5)), *(copy.deepcopy(layer) for _ in range(5))]
    assert bytes_reached([layer, *copies]) == layer.nbytes


def test_who_is_left_alone_goes_on_in_place(generator: torch.Generator) -> None:
    layer = DynamicLayer()
    layer.update(*states(2, 70, generator))
    layer.fork().update(*states(2, 1, generator))
    before = layer.keys.untyped_storage().data_ptr()
    layer.update(*states(2, 1, generator))
    assert layer.keys.untyped_storage().data_ptr() == before


def test_a_cache_makes_as_many_forks_as_it_is_asked_for(generator: torch.Generator) -> None:
    cache = DynamicCache([states(1, 5, generator)])
    for one in (cache, EncoderDecoderCache(cache, DynamicCache())):
        assert [(type(fork), fork.get_seq_length()) for fork in one.fork(3)] == [(type(one), 5)] * 3
