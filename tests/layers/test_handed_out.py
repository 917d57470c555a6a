"""What a cache hands out is the caller's: no other cache shows what is written to it, and no cache writes to it."""

import copy
import pickle
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import kvlayers
import versions
from agreement import check_at_rest, step
from kvlayers import CacheLayer, PrefixStore
from kvlayers.errors import LegacyFormatError, ReadOnlyStatesError, StaleStatesError
from kvlayers.kernels.attention.packed_tensor import PackedStates
from layer_kinds import KINDS as ALL_KINDS
from matrix import once, product
from models import prompt, tiny_model
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

Filled = tuple[kvlayers.Cache, Oracle]


def filled(kind: str, tokens: int, generator: torch.Generator) -> Filled:
    layer, oracle = ALL_KINDS[kind]()
    cache = kvlayers.Cache(layers=[layer])
    step(layer, oracle, tokens, generator)
    step(layer, oracle, 1, generator)
    return cache, oracle


def pairs(cache: kvlayers.Cache, read: Callable[[kvlayers.Cache], Any]) -> list[Tensor]:
    try:
        return [states for states in read(cache) if isinstance(states, Tensor)]
    except LegacyFormatError:
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


def spoil(handed_out: list[Tensor]) -> None:
    for given in handed_out:
        try:
            given.fill_(-1) if given.dtype != torch.bool else None
        except ReadOnlyStatesError:
            assert isinstance(given, PackedStates)


def go_on(cache: kvlayers.Cache, oracle: Oracle, generator: torch.Generator) -> None:
    for tokens in (1, 2):
        if oracle.fits(tokens):
            step(cache.layers[0], oracle, tokens, generator)
    check_at_rest(cache.layers[0], oracle)


@pytest.mark.parametrize(("kind", "tokens"), once(KINDS, LENGTHS))
def test_what_is_written_to_the_states_of_one_cache_does_not_show_in_its_twin(kind: str, tokens: int) -> None:
    generator = torch.Generator().manual_seed(0)
    for twin_name, make_twin in TWINS.items():
        for path, read in PATHS.items():
            for late in (False, True):
                cache, oracle = filled(kind, tokens, generator)
                # Handed out before there is a twin, or after.
                early = [] if late else pairs(cache, read)
                twin, twin_oracle = make_twin(cache), oracle.copy()
                late_states = pairs(cache, read) if late else []
                spoil([*early, *late_states])
                try:
                    go_on(twin, twin_oracle, generator)
                except AssertionError as error:
                    raise AssertionError(f"{path} of a cache with a twin by {twin_name}, late={late}") from error
            # And the other way round.
            cache, oracle = filled(kind, tokens, generator)
            twin = make_twin(cache)
            spoil(pairs(twin, read))
            go_on(cache, oracle, generator)


CHANGES: dict[str, Callable[[CacheLayer, Oracle], object]] = {
    "decode": lambda layer, oracle: None,
    "reset": lambda layer, oracle: (layer.reset(), oracle.reset()),
    "crop": lambda layer, oracle: (layer.crop(-3), oracle.truncate(oracle.length - 3)),
    "crop to nothing": lambda layer, oracle: (layer.crop(-oracle.length), oracle.truncate(0)),
    "select": lambda layer, oracle: (layer.batch_select_indices([1, 0]), oracle.select([1, 0])),
    "load": lambda layer, oracle: layer.load_state(layer.state()),
}


def is_live(kind: str, path: str, cache: kvlayers.Cache) -> bool:
    """Static layers that do not travel have one address, at which compiled code writes: see docs/static.md."""
    return kind.startswith("static") and path in LIVE_PATHS


@pytest.mark.parametrize(("kind", "tokens"), once(KINDS, LENGTHS))
def test_what_was_handed_out_is_not_written_again(kind: str, tokens: int) -> None:
    generator = torch.Generator().manual_seed(0)
    for name, change in CHANGES.items():
        # A reset lets static memory be written again, and a crop any other memory. The other changes move states.
        for path in PATHS if name in ("reset", "crop") else ("keys and values",):
            read = PATHS[path]
            cache, oracle = filled(kind, tokens, generator)
            if is_live(kind, path, cache):
                continue
            if name.startswith("crop") and not oracle.can_truncate(oracle.length - 3 if name == "crop" else 0):
                continue
            handed_out = pairs(cache, read)
            expected = [given.clone() for given in handed_out]
            change(cache.layers[0], oracle)
            # Far enough that a window moves to the front.
            for new in (9, *[1] * 12, 20):
                if oracle.fits(new):
                    step(cache.layers[0], oracle, new, generator)
            for given, before in zip(handed_out, expected, strict=True):
                try:
                    assert torch.equal(given, before), (name, path)
                except StaleStatesError:
                    assert isinstance(given, PackedStates)


@pytest.mark.parametrize("kind", ["static", "static that grows", "static sliding"])
def test_keys_of_a_static_layer_are_live(kind: str) -> None:
    generator = torch.Generator().manual_seed(0)
    cache, _ = filled(kind, 6, generator)
    layer = cache.layers[0]
    keys = layer.keys
    assert keys.shape[2] == layer.length
    assert keys.data_ptr() == layer.reserved.tensors()["keys"].data_ptr()
    layer.reset()
    assert not keys.any()


@pytest.mark.parametrize(
    ("kind", "path", "shared"),
    product(["dynamic", "sliding", "static", "static sliding", "quantized", "offloaded"], LIVE_PATHS, [False, True]),
)
def test_what_is_written_in_place_is_what_a_cache_holds(kind: str, path: str, shared: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    cache, oracle = filled(kind, 5, generator)
    if kind == "offloaded":
        # One that computes on the host, so that nothing travels.
        cache = kvlayers.Cache(layers=[kvlayers.DynamicLayer()], offloading=True)
        cache.update(oracle.keys, oracle.values, 0)
    forks = cache.fork(2) if shared else []
    keys, values = LIVE_PATHS[path](cache)
    keys[:, :, 1:3] *= 2
    values[:, 0] = 0
    oracle.keys, oracle.values = oracle.keys.clone(), oracle.values.clone()
    unchanged = oracle.copy()
    oracle.keys, oracle.values = oracle.keys.clone(), oracle.values.clone()
    oracle.keys[:, :, 1:3] *= 2
    oracle.values[:, 0] = 0
    go_on(cache, oracle, generator)
    for fork in forks:
        go_on(fork, unchanged.copy(), generator)


@pytest.mark.parametrize("kind", ["sink", "sink of padded sequences", "offloaded", "offloaded static"])
def test_keys_that_are_copies_are_changed_by_assignment(kind: str) -> None:
    generator = torch.Generator().manual_seed(0)
    cache, oracle = filled(kind, 5, generator)
    layer = cache.layers[0]
    layer.keys.zero_()
    check_at_rest(layer, oracle)
    layer.keys, layer.values = layer.keys * 2, layer.values * 3
    oracle.keys, oracle.values = oracle.keys * 2, oracle.values * 3
    for _ in range(12):
        step(layer, oracle, 1, generator)


def test_reading_keys_moves_the_reader_alone() -> None:
    generator = torch.Generator().manual_seed(0)
    cache, _ = filled("dynamic", 80, generator)
    forks = cache.fork(3)
    address = cache.layers[0].peek()[0].data_ptr()
    moved = forks[1].layers[0].keys.data_ptr()
    assert moved != address
    assert forks[1].layers[0].values.shape[2] == 81
    assert forks[1].layers[0].keys.data_ptr() == moved
    assert {one.layers[0].peek()[0].data_ptr() for one in (cache, forks[0], forks[2])} == {address}


@pytest.mark.parametrize("kind", ["dynamic", "sliding over a long window", "static", "quantized"])
def test_decoding_pays_nothing(kind: str) -> None:
    """Steps of a layer of which views were handed out, or that was forked, are those of one that is alone."""
    generator = torch.Generator().manual_seed(0)
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


def test_a_layer_that_is_read_at_each_step_is_not_copied() -> None:
    layer = kvlayers.DynamicLayer()
    generator = torch.Generator().manual_seed(0)
    layer.update(*states(2, 60, generator))
    addresses = set()
    for _ in range(50):
        layer.update(*states(2, 1, generator))
        addresses.add(layer.keys.data_ptr())
    assert len(addresses) == 1


def test_what_a_store_of_prefixes_found_is_the_callers() -> None:
    ids = torch.arange(12)
    cache = kvlayers.DynamicCache()
    generator = torch.Generator().manual_seed(0)
    given = [states(1, 12, generator) for _ in range(2)]
    for index, (keys, values) in enumerate(given):
        cache.update(keys, values, index)
    early = cache.layers[1].values
    store = PrefixStore(2**20)
    assert store.insert(ids, cache, model="tiny")
    cache.layers[0].keys.zero_()
    early.zero_()
    for _ in range(2):
        hit = store.lookup(torch.arange(13), model="tiny")
        assert hit.cache is not None
        for layer, (keys, values) in zip(hit.cache.layers, given, strict=True):
            assert torch.equal(layer.keys, keys)
            assert torch.equal(layer.values, values)
            layer.keys.zero_()
            layer.values.zero_()


def test_an_expanded_prompt_is_nobodys_view() -> None:
    cache = kvlayers.DynamicCache()
    keys, values = states(1, 20, torch.Generator().manual_seed(0))
    cache.update(keys, values, 0)
    view = cache.layers[0].keys
    cache.expand(3)
    view.zero_()
    assert torch.equal(cache.to_legacy_cache()[0][0], keys.repeat(3, 1, 1, 1))
    with pytest.raises(ReadOnlyStatesError):
        cache.layers[0].keys.zero_()


def test_parts_of_an_encoder_decoder_cache_are_the_callers() -> None:
    generator = torch.Generator().manual_seed(0)
    cache = kvlayers.EncoderDecoderCache(kvlayers.DynamicCache(), kvlayers.DynamicCache())
    for part in (cache.self_attention_cache, cache.cross_attention_cache):
        part.update(*states(1, 6, generator), 0)
    expected = [given.clone() for given in cache[0]]
    for make_twin in (lambda: cache.fork(), lambda: copy.deepcopy(cache)):
        for read in (lambda one: one[0], lambda one: next(iter(one)), lambda one: one.to_legacy_cache()[0]):
            for given in read(make_twin()):
                given.zero_()
    assert all(map(torch.equal, cache[0], expected))
    saved = list(cache[0])
    cache.reset()
    for part in (cache.self_attention_cache, cache.cross_attention_cache):
        part.update(*states(1, 6, generator), 0)
    assert all(map(torch.equal, saved, expected))


@versions.kvlayers_recurrent_layers
def test_recurrent_states_are_live_and_a_twin_has_its_own() -> None:
    """Models write to them in place, as in transformers, so they cannot be anything else."""
    layer = kvlayers.LinearAttentionLayer()
    generator = torch.Generator().manual_seed(0)
    layer.update_conv_state(torch.randn(1, 4, 6, generator=generator), conv_kernel_size=3)
    layer.update_recurrent_state(torch.randn(1, 4, 2, generator=generator))
    cache = kvlayers.Cache(layers=[layer])
    for make_twin in TWINS["deepcopy"], TWINS["pickle"]:
        twin = make_twin(cache)
        expected = twin.get_conv_state(0).clone(), twin.get_recurrent_state(0).clone()
        cache.get_conv_state(0).zero_()
        cache.get_recurrent_state(0).zero_()
        assert torch.equal(twin.get_conv_state(0), expected[0])
        assert torch.equal(twin.get_recurrent_state(0), expected[1])
        assert not cache.layers[0].conv_states[0].any()
        cache.layers[0].conv_states[0].copy_(expected[0])
        cache.layers[0].recurrent_states[0].copy_(expected[1])


@pytest.mark.filterwarnings("ignore:.*is from transformers 4:DeprecationWarning")
def test_tuples_of_a_forward_pass_stay_what_they_are_without_copies() -> None:
    model, ids = tiny_model("llama"), prompt(tokens=7)
    with kvlayers.installed(), torch.no_grad():
        past = model(ids, past_key_values=()).past_key_values
        expected = [given.clone() for layer in past for given in layer]
        after = model(ids[:, :1], past_key_values=past).past_key_values
    assert [layer[0].data_ptr() for layer in past] == [layer[0].data_ptr() for layer in after]
    assert all(map(torch.equal, (given for layer in past for given in layer), expected))
