"""What a cache hands out is the caller's: no other cache shows what is written to it, and no cache writes to it."""

import copy
import itertools
import pickle
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

import kvlayers
from agreement import check_at_rest, step
from kvlayers.kernels.attention.packed_tensor import PackedStates
from layer_kinds import KINDS as ALL_KINDS
from matrix import once, product, seeds
from oracle import Oracle, states
from spies import Operators

KINDS = [
    "dynamic",
    "sliding",
    "sliding over a long window",
    "static",
    "static that grows",
    "static sliding",
    "sink",
    "sink of padded sequences",
    "quantized",
    "quantized sliding",
    "offloaded",
    "offloaded sliding",
    "offloaded static",
    "offloaded quantized",
]
LENGTHS = [6, 80]
"""Tokens before anything is dropped or packed, and after."""


def filled(kind: str, tokens: int, generator: torch.Generator) -> tuple[kvlayers.Cache, Oracle]:
    layer, oracle = ALL_KINDS[kind]()
    cache = kvlayers.Cache(layers=[layer])
    step(layer, oracle, tokens, generator)
    step(layer, oracle, 1, generator)
    return cache, oracle


def pairs(cache: kvlayers.Cache, read: Callable[[kvlayers.Cache], Any]) -> list[torch.Tensor]:
    try:
        return [states for states in read(cache) if isinstance(states, torch.Tensor)]
    except kvlayers.errors.LegacyFormatError:
        # It has dropped tokens, which tuples cannot say.
        return []


LIVE_PATHS: dict[str, Callable[[kvlayers.Cache], Any]] = {
    "keys and values": lambda cache: (cache.layers[0].keys, cache.layers[0].values),
    "lists": lambda cache: (cache.key_cache[0], cache.value_cache[-1]),
    "slices of lists": lambda cache: (cache.key_cache[:][0], cache.value_cache[:][0]),
    "subscript": lambda cache: cache[0],
    "iteration": lambda cache: next(iter(cache)),
}
COPIES: dict[str, Callable[[kvlayers.Cache], Any]] = {
    "tuples": lambda cache: cache.to_legacy_cache()[0],
    "state": lambda cache: cache.state().layers[0].tensors.values(),
}
PATHS = {name: LIVE_PATHS[name] for name in ("keys and values", "iteration")} | COPIES
"""Lists and subscripts ask the layer for the same as the first one does."""
TWINS: dict[str, Callable[[kvlayers.Cache], kvlayers.Cache]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda cache: pickle.loads(pickle.dumps(cache)),
}


def spoil(handed_out: list[torch.Tensor]) -> None:
    for given in handed_out:
        try:
            given.fill_(-1) if given.dtype != torch.bool else None
        except kvlayers.errors.ReadOnlyStatesError:
            assert isinstance(given, PackedStates)


def go_on(cache: kvlayers.Cache, oracle: Oracle, generator: torch.Generator) -> None:
    for tokens in (1, 2):
        if oracle.fits(tokens):
            step(cache.layers[0], oracle, tokens, generator)
    check_at_rest(cache.layers[0], oracle)


@pytest.mark.parametrize("late", [False, True], ids=["before there is a twin", "after"])
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("twin", TWINS)
@pytest.mark.parametrize(("kind", "tokens"), once(KINDS, LENGTHS))
def test_what_is_written_to_the_states_of_one_cache_does_not_show_in_its_twin(
    kind: str, tokens: int, twin: str, path: str, late: bool, generator: torch.Generator
) -> None:
    cache, oracle = filled(kind, tokens, generator)
    handed_out = [] if late else pairs(cache, PATHS[path])
    other = TWINS[twin](cache)
    spoil(handed_out or pairs(cache, PATHS[path]))
    go_on(other, oracle.copy(), generator)
    # And the other way round.
    cache, oracle = filled(kind, tokens, generator)
    other = TWINS[twin](cache)
    spoil(pairs(other, PATHS[path]))
    go_on(cache, oracle, generator)


CHANGES: dict[str, Callable[[kvlayers.CacheLayer, Oracle], object]] = {
    "decode": lambda layer, oracle: None,
    "reset": lambda layer, oracle: (layer.reset(), oracle.reset()),
    "crop": lambda layer, oracle: (layer.crop(-3), oracle.truncate(oracle.length - 3)),
    "crop to nothing": lambda layer, oracle: (layer.crop(-oracle.length), oracle.truncate(0)),
    "select": lambda layer, oracle: (layer.batch_select_indices([1, 0]), oracle.select([1, 0])),
    "load": lambda layer, oracle: layer.load_state(layer.state()),
}


@pytest.mark.parametrize(("kind", "tokens"), once(KINDS, LENGTHS))
def test_what_was_handed_out_is_not_written_again(kind: str, tokens: int, generator: torch.Generator) -> None:
    # A reset lets static memory be written again, and a crop any other memory. The other changes move states.
    for name, path in [*itertools.product(("reset", "crop"), PATHS), *((name, "keys and values") for name in CHANGES)]:
        cache, oracle = filled(kind, tokens, generator)
        # Static layers that do not travel have one address, at which compiled code writes: see docs/static.md.
        is_live = kind.startswith("static") and path in LIVE_PATHS
        kept = {"crop": oracle.length - 3, "crop to nothing": 0}.get(name, oracle.length)
        if is_live or not oracle.can_truncate(kept):
            continue
        handed_out = pairs(cache, PATHS[path])
        expected = [given.clone() for given in handed_out]
        CHANGES[name](cache.layers[0], oracle)
        # Far enough that a window moves to the front.
        for new in (9, *[1] * 12, 20):
            if oracle.fits(new):
                step(cache.layers[0], oracle, new, generator)
        for given, before in zip(handed_out, expected, strict=True):
            try:
                assert torch.equal(given, before), (name, path)
            except kvlayers.errors.StaleStatesError:
                assert isinstance(given, PackedStates)


@pytest.mark.parametrize(
    ("kind", "path", "shared"),
    product(["dynamic", "sliding", "static", "static sliding", "quantized", "offloaded"], LIVE_PATHS, [False, True]),
)
def test_what_is_written_in_place_is_what_a_cache_holds(
    kind: str, path: str, shared: bool, generator: torch.Generator
) -> None:
    cache, oracle = filled(kind, 5, generator)
    if kind == "offloaded":
        # One that computes on the host, so that nothing travels.
        cache = kvlayers.Cache(layers=[kvlayers.DynamicLayer()], offloading=True)
        cache.update(oracle.keys, oracle.values, 0)
    forks = cache.fork(2) if shared else []
    keys, values = LIVE_PATHS[path](cache)
    keys[:, :, 1:3] *= 2
    values[:, 0] = 0
    unchanged = oracle.copy()
    oracle.keys, oracle.values = oracle.keys.clone(), oracle.values.clone()
    oracle.keys[:, :, 1:3] *= 2
    oracle.values[:, 0] = 0
    go_on(cache, oracle, generator)
    for fork in forks:
        go_on(fork, unchanged.copy(), generator)


def test_reading_keys_moves_the_reader_alone(generator: torch.Generator) -> None:
    cache, _ = filled("dynamic", 80, generator)
    forks = cache.fork(3)
    address = cache.layers[0].peek()[0].data_ptr()
    moved = forks[1].layers[0].keys.data_ptr()
    assert moved != address
    assert forks[1].layers[0].values.shape[2] == 81
    assert forks[1].layers[0].keys.data_ptr() == moved
    assert {one.layers[0].peek()[0].data_ptr() for one in (cache, forks[0], forks[2])} == {address}


@pytest.mark.parametrize("kind", ["dynamic", "sliding over a long window", "static", "quantized"])
def test_decoding_pays_nothing(kind: str, generator: torch.Generator) -> None:
    """Steps of a layer of which views were handed out, or that was forked, are those of one that is alone."""
    counts = []
    for prepare in (lambda layer: None, lambda layer: layer.keys, lambda layer: layer.fork() and None):
        # There is room for as many tokens again.
        cache, _ = filled(kind, 12, generator)
        layer = cache.layers[0]
        prepare(layer)
        new = [states(2, 1, generator) for _ in range(10)]
        seen = Counter[str]()
        with Operators(lambda operator, arguments, result, seen=seen: seen.update([str(operator)])):
            for keys, values in new:
                layer.mask_sizes(1)
                layer.update(keys, values)
        counts.append(seen)
    assert counts[0] == counts[1] == counts[2]
    assert sum(count for name, count in counts[0].items() if "copy_" in name) == 20
    assert not any(name.startswith(("aten.empty", "aten.clone", "aten.zeros", "aten.cat")) for name in counts[0])


def test_a_layer_that_is_read_at_each_step_is_not_copied(generator: torch.Generator) -> None:
    layer = kvlayers.DynamicLayer()
    layer.update(*states(2, 60, generator))
    addresses = set()
    for _ in range(50):
        layer.update(*states(2, 1, generator))
        addresses.add(layer.keys.data_ptr())
    assert len(addresses) == 1


def test_an_expanded_prompt_is_nobodys_view(generator: torch.Generator) -> None:
    keys, values = states(1, 20, generator)
    cache = kvlayers.DynamicCache()
    # Of what is empty, nothing is repeated.
    cache.expand(3)
    cache.update(keys, values, 0)
    view = cache.layers[0].keys
    cache.expand(3)
    view.zero_()
    assert torch.equal(cache.to_legacy_cache()[0][0], keys.repeat(3, 1, 1, 1))
    with pytest.raises(kvlayers.errors.ReadOnlyStatesError):
        cache.layers[0].keys.zero_()


# The states that an update returns are those of its tokens, and stay so while the cache and its forks go on

Pair = tuple[torch.Tensor, torch.Tensor]


def some_states(tokens: int) -> Pair:
    return torch.randn(2, 1, tokens, 8), torch.randn(2, 1, tokens, 8)


def test_a_forked_window_returns_new_states_if_those_before_are_held() -> None:
    layer, (keys, values) = kvlayers.SlidingLayer(300), some_states(299)
    layer.update(keys, values)
    # It takes the slots behind the tokens, so that the window goes on in another tail.
    layer.fork().update(*some_states(1))
    held = []
    for _ in range(4):
        new_keys, new_values = some_states(1)
        keys, values = torch.cat([keys, new_keys], 2), torch.cat([values, new_values], 2)
        held.append(layer.update(new_keys, new_values))
        seen = [side.clone() for side in held[-1]]
        assert all(map(torch.equal, seen, (keys[:, :, -300:], values[:, :, -300:])))


LAYERS: dict[str, Callable[[], kvlayers.CacheLayer]] = {
    "dynamic": kvlayers.DynamicLayer,
    "sliding": lambda: kvlayers.SlidingLayer(random.choice([5, 20, 50, 150])),
    "packed": lambda: kvlayers.QuantizedLayer(kvlayers.Quantization(nbits=4, residual_length=random.choice([8, 64]))),
    "packed sliding": lambda: kvlayers.SlidingLayer(
        random.choice([20, 50, 150, 400]),
        store=kvlayers.stores.QuantizedStore(kvlayers.Quantization(nbits=8, residual_length=8, sink_tokens=0)),
    ),
}


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("seed", seeds(2, 12))
def test_packed_states_stay_as_they_were_or_are_refused_while_forks_come_and_go(kind: str, seed: int) -> None:
    random.seed(seed)
    torch.manual_seed(seed)
    layer, forks = LAYERS[kind](), list[kvlayers.CacheLayer]()
    held: list[tuple[Pair, list[torch.Tensor]]] = []
    for _ in range(80):
        returned = layer.update(*some_states(random.choice([1, 1, 1, 1, 2, 5, 30])))
        if isinstance(returned[0], PackedStates):
            held = [*held[-20:], (returned, [states.clone() for states in returned])]
        chance = random.random()
        if chance < 0.1:
            forks.append(layer.fork())
        elif chance < 0.16 and forks:
            forks.pop(random.randrange(len(forks)))
        elif chance < 0.26 and forks:
            random.choice(forks).update(*some_states(3))
        elif chance < 0.3 and "sliding" not in kind and layer.length > 3:
            layer.crop(layer.length - random.choice([1, 3]))
        for returned, copies in random.sample(held, min(3, len(held))):
            try:
                now = [states.clone() for states in returned]
            except kvlayers.errors.StaleStatesError:
                continue
            assert all(torch.equal(states, copy) for states, copy in zip(now, copies, strict=True))


@pytest.mark.parametrize("end", ["packs", "is deleted"])
def test_nobody_writes_to_what_returned_states_read_when_their_layer(end: str) -> None:
    layer = kvlayers.QuantizedLayer(kvlayers.Quantization(nbits=4, residual_length=16, sink_tokens=0))
    layer.update(*some_states(100))
    fork = layer.fork()
    returned = layer.update(*some_states(1))
    copies = [states.clone() for states in returned]
    if end == "packs":
        layer.update(*some_states(300))
    else:
        del layer
    fork.update(*some_states(1))
    assert all(torch.equal(states.clone(), copy) for states, copy in zip(returned, copies, strict=True))


def test_keys_and_values_of_two_dtypes_are_never_read_as_one() -> None:
    layer, (keys, values) = kvlayers.DynamicLayer(), some_states(1300)
    layer.update(keys, values.half())
    layer.fork().update(keys[:, :, :1], values[:, :, :1].half())
    for _ in range(2):
        returned = layer.update(keys[:, :, :1], values[:, :, :1].half())
        assert [states.dtype for states in returned] == [torch.float32, torch.float16]
        with pytest.raises(RuntimeError, match="same dtype"):
            scaled_dot_product_attention(torch.randn(2, 4, 1, 8), *returned, enable_gqa=True)
