"""The surface of transformers 4: nested tuples, subscripts, lists of keys and values, and old method names."""

import contextlib
import copy
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
import transformers

import kvlayers
from models import ENCODER_DECODERS, prompt, read, tiny_model

FAMILIES = ("llama", "gpt2", "deepseek_v3", *ENCODER_DECODERS)


def run(family: str, ids: torch.Tensor, **arguments: object) -> object:
    return tiny_model(family).generate(
        ids, **{"attention_mask": torch.ones_like(ids), "max_new_tokens": 6, "do_sample": False, **arguments}
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_tuples_come_out_of_generate_and_go_back_in(family: str, installed: None) -> None:
    ids = prompt(2)
    first = run(family, ids, return_dict_in_generate=True, return_legacy_cache=True)
    pasts = first.past_key_values
    assert isinstance(pasts, tuple)
    assert {len(layer) for layer in pasts} == {4 if family in ENCODER_DECODERS else 2}
    if family in ENCODER_DECODERS:
        expected = run(family, ids, decoder_input_ids=first.sequences)
        seen = run(family, ids, decoder_input_ids=first.sequences, past_key_values=pasts)
    else:
        longer = torch.cat([first.sequences, prompt(2, 3, seed=4)], dim=1)
        expected, seen = run(family, longer), run(family, longer, past_key_values=pasts)
    assert torch.equal(seen, expected)


@pytest.mark.parametrize("name", [None, "static"])
def test_a_config_may_ask_for_tuples(name: str | None, installed: None, monkeypatch: pytest.MonkeyPatch) -> None:
    how = {"return_dict_in_generate": True, "return_legacy_cache": True, "cache_implementation": name}
    expected = run("llama", prompt(1), **how).past_key_values
    model, asking = tiny_model("llama"), transformers.GenerationConfig(max_new_tokens=6, **how)
    monkeypatch.setattr(model, "generation_config", asking)
    for output in (model.generate(prompt(1), generation_config=asking), model.generate(prompt(1))):
        assert isinstance(output.past_key_values, tuple)
        torch.testing.assert_close(output.past_key_values, expected, rtol=0, atol=0)
    assert asking.return_legacy_cache is True


KINDS = {
    "dynamic": (kvlayers.DynamicCache, 5, 4, 0.0),
    # 8 bits: half a step of 1/255 of the range of a group, which is 6 or so.
    "quantized": (lambda: kvlayers.QuantizedCache(nbits=8, residual_length=16, sink_tokens=4), 200, 8, 0.03),
    "of transformers": (transformers.DynamicCache, 5, 4, 0.0),
}
"""What makes a cache, the tokens to fill it with, the head_dim of values, and how far off states may be."""


@pytest.fixture
def library(kind: str) -> Iterator[Any]:
    """Whose caches are tried. Those of transformers have these methods while they have their old names."""
    with kvlayers.installed(legacy_names=True) if kind == "of transformers" else contextlib.nullcontext():
        yield transformers if kind == "of transformers" else kvlayers


def filled(
    layers: int = 3, tokens: int | None = None, kind: str = "dynamic"
) -> tuple[kvlayers.Cache, list[tuple[torch.Tensor, torch.Tensor]]]:
    make, usual, value_dim, _ = KINDS[kind]
    tokens = tokens or usual
    pairs = [(torch.randn(2, 2, tokens, 8), torch.randn(2, 2, tokens, value_dim)) for _ in range(layers)]
    cache = make()
    for index, (keys, values) in enumerate(pairs):
        cache.update(keys, values, index)
    return cache, pairs


def check(seen: Iterable[Any], exact: Iterable[Any], kind: str) -> None:
    """The states of each layer are these, as far as the kind of cache has not rounded them."""
    layers = [[states + 0 for states in layer] for layer in seen]
    torch.testing.assert_close(layers, [[*layer] for layer in exact], rtol=0, atol=KINDS[kind][3])


@pytest.mark.parametrize("kind", KINDS)
def test_tuples_make_the_round_trip(kind: str, library: Any) -> None:
    cache, pairs = filled(kind=kind)
    tokens = cache.get_seq_length()
    legacy = cache.to_legacy_cache()
    assert {type(states) for layer in legacy for states in layer} == {torch.Tensor}
    again = library.DynamicCache.from_legacy_cache(legacy)
    assert type(again) is library.DynamicCache
    check(again.to_legacy_cache(), pairs, kind)
    again.update(*(states[:, :, :1] for states in pairs[0]), 0)
    assert (cache.get_seq_length(), again.get_seq_length()) == (tokens, tokens + 1)
    assert transformers.DynamicCache(legacy).get_seq_length() == tokens
    # They outlive what comes after, in the same memory.
    cache.crop(-3)
    for index, pair in enumerate(pairs):
        cache.update(*(states[:, :, :3] + 1 for states in pair), index)
    cache.reset()
    check(legacy, pairs, kind)


def test_no_tuples_make_an_empty_cache() -> None:
    dynamic, pair = kvlayers.DynamicCache, kvlayers.EncoderDecoderCache
    for empty in (
        dynamic(),
        dynamic.from_legacy_cache(None),
        dynamic.from_legacy_cache(),
        pair.from_legacy_cache(None),
    ):
        assert (len(empty), empty.get_seq_length(), list(empty), empty.to_legacy_cache()) == (0, 0, [], ())
    # What replicas return that have seen nothing, gathered.
    assert dynamic([(None, None)] * 2, config=tiny_model("llama").config).get_seq_length() == 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_cache_reads_as_a_sequence_of_pairs(kind: str, library: Any) -> None:
    cache, pairs = filled(kind=kind)
    check(cache, pairs, kind)
    for first in (0, -3):
        check([cache[first + index] for index in range(3)], pairs, kind)
    check(zip(cache.key_cache, cache.value_cache, strict=True), pairs, kind)
    assert len(cache) == len(cache.key_cache) == len(list(cache.value_cache)) == 3
    assert len(cache.key_cache[1:]) == 2
    keys, values = zip(*cache, strict=True)
    assert len(keys) == len(values) == 3


@pytest.mark.filterwarnings("ignore:.*is from transformers 4:DeprecationWarning")
def test_old_names_answer() -> None:
    cache, _ = filled()
    assert cache.seen_tokens == 5
    assert cache.get_usable_length(3) == cache.get_usable_length(3, 2) == 5
    assert [cache.get_seq_length(layer) for layer in (0, 2, 7)] == [5, 5, 0]
    assert cache.get_max_cache_shape() == cache.get_max_length() == -1
    static = kvlayers.StaticCache(tiny_model("llama").config, max_cache_len=8)
    static.update(torch.randn(2, 2, 6, 8), torch.randn(2, 2, 6, 8), 0)
    assert static.get_max_cache_shape() == static.max_cache_len == 8
    assert static.get_usable_length(2) == 6
    assert static.get_usable_length(4) == 4
    assert static.max_batch_size == 2


def test_crop_takes_its_number_by_its_old_name() -> None:
    cache, _ = filled(tokens=7)
    for number, left in ((5, 5), (-2, 3)):
        with pytest.warns(DeprecationWarning, match=rf"crop\(max_length=...\).*write crop\({number}\)"):
            cache.crop(max_length=number)
        assert cache.get_seq_length() == left
    for numbers in ({}, {"tokens_to_remove": -1, "max_length": 2}):
        with pytest.raises(kvlayers.OptionError, match="`crop` must be given one number"):
            cache.crop(**numbers)
    assert cache.get_seq_length() == 3


def without_states_of_layer_0() -> kvlayers.DynamicCache:
    cache = kvlayers.DynamicCache()
    cache.update(KEYS, KEYS, 1)
    return cache


def of_jamba() -> Any:
    model = tiny_model("jamba")
    return read(model, prompt(1), kvlayers.DynamicCache(config=model.config))[0]


def of_tuples(tuples: object, **options: Any) -> kvlayers.Cache:
    return kvlayers.DynamicCache.from_legacy_cache(tuples, **options)


KEYS, LONGER = torch.randn(1, 2, 3, 4), torch.randn(1, 2, 5, 4)
REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "flat": (lambda: of_tuples((KEYS,) * 2), "must .* got"),
    "no values": (lambda: of_tuples(((KEYS,),)), "must .* got"),
    "three": (lambda: of_tuples(((KEYS,) * 3,)), "must .* got"),
    "too deep": (lambda: of_tuples((((KEYS,) * 2,) * 2,)), "must .* got"),
    "three dimensions": (lambda: of_tuples(((KEYS[0],) * 2,)), "must .* got"),
    "a number": (lambda: of_tuples(3), "must .* got"),
    "numbers": (lambda: of_tuples(((1, 2),)), "must .* got"),
    "tokens of values": (lambda: of_tuples(((KEYS, LONGER),)), "must .* got"),
    "tokens of layer 1": (lambda: of_tuples(((KEYS,) * 2, (LONGER,) * 2)), "must .* got"),
    "batch of layer 1": (lambda: of_tuples(((KEYS,) * 2, (KEYS.repeat(2, 1, 1, 1),) * 2)), "must .* got"),
    "a layer too few": (
        lambda: of_tuples(((KEYS,) * 2,), config=tiny_model("llama").config),
        "of the 2 layers .* got 1",
    ),
    "an empty layer": (lambda: without_states_of_layer_0().to_legacy_cache(), "an empty layer 0 before layer 1"),
    "a recurrent state": (lambda: of_jamba().to_legacy_cache(), "recurrent state"),
}


@pytest.mark.parametrize(("make", "words"), REFUSED.values(), ids=REFUSED)
def test_what_is_no_tuples_of_keys_and_values_is_refused(make: Callable[[], object], words: str) -> None:
    with pytest.raises(kvlayers.errors.LegacyFormatError, match=words):
        make()


@pytest.mark.parametrize(("kind", "options"), [("DynamicCache", {}), ("StaticCache", {"max_cache_len": 32})])
def test_caches_of_transformers_give_tuples_of_their_tokens(
    kind: str, options: dict[str, int], installed: None
) -> None:
    theirs = getattr(transformers, kind)(config=tiny_model("llama").config, **options)
    output = run("llama", prompt(1), past_key_values=theirs, return_dict_in_generate=True, return_legacy_cache=True)
    assert [[states.shape[2] for states in layer] for layer in output.past_key_values] == [[17, 17]] * 2


def test_a_model_with_a_generate_of_its_own_is_refused_tuples(installed: None) -> None:
    class Own(transformers.LlamaForCausalLM):
        def generate(self, *args: object, **kwargs: object) -> object:
            return super().generate(*args, **kwargs)

    model = Own(tiny_model("llama").config).eval()
    with pytest.raises(kvlayers.errors.LegacyFormatError, match="generate"):
        model.generate(prompt(1), max_new_tokens=2, return_legacy_cache=True)


@pytest.mark.parametrize("kind", KINDS)
def test_an_encoder_decoder_cache_reads_as_tuples_of_four(kind: str, library: Any) -> None:
    (own, own_pairs), (cross, cross_pairs) = filled(kind=kind), filled(tokens=170, kind=kind)
    tokens = own.get_seq_length()
    cache = library.EncoderDecoderCache(own, cross)
    assert cache.is_updated == {0: True, 1: True, 2: True}
    pairs = [(*own_pair, *cross_pair) for own_pair, cross_pair in zip(own_pairs, cross_pairs, strict=True)]
    check(cache, pairs, kind)
    check([cache[1]], pairs[1:2], kind)
    again = library.EncoderDecoderCache.from_legacy_cache(cache.to_legacy_cache())
    assert (again.get_seq_length(), again.cross_attention_cache.get_seq_length()) == (tokens, 170)
    assert type(again) is library.EncoderDecoderCache
    own_alone = library.EncoderDecoderCache.from_legacy_cache(own.to_legacy_cache())
    assert {len(layer) for layer in own_alone.to_legacy_cache()} == {2}
    assert not any(own_alone.is_updated.values())
    six = [(k, v, None, ck, cv, None) for k, v, ck, cv in cache]
    assert kvlayers.EncoderDecoderCache(six).get_seq_length() == tokens


class Lists:
    """The cache of transformers 4: two lists of tensors."""

    def __init__(self) -> None:
        self.key_cache: list[torch.Tensor] = []
        self.value_cache: list[torch.Tensor] = []

    def update(self, keys: torch.Tensor, values: torch.Tensor, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        for states, held in ((keys, self.key_cache), (values, self.value_cache)):
            if index < len(held):
                held[index] = torch.cat([held[index], states], dim=2)
            else:
                held.append(states)
        return self.key_cache[index], self.value_cache[index]


def swapped(held: list[torch.Tensor], new: torch.Tensor) -> None:
    held[0], held[-1] = held[-1], held[0]


def extended(held: list[torch.Tensor], new: torch.Tensor) -> None:
    held += [new, new + 1]


CHANGES: dict[str, Any] = {
    "append": lambda held, new: held.append(new),
    "extend": lambda held, new: held.extend([new, new + 1]),
    "+=": extended,
    "insert": lambda held, new: held.insert(1, new),
    "pop": lambda held, new: held.pop(),
    "pop the first": lambda held, new: held.pop(0),
    "del": lambda held, new: held.__delitem__(1),
    "del a slice": lambda held, new: held.__delitem__(slice(1, None)),
    "assign": lambda held, new: held.__setitem__(1, new),
    "assign a slice": lambda held, new: held.__setitem__(slice(1, 3), [new]),
    "swap": swapped,
    "reverse": lambda held, new: held.reverse(),
    "clear": lambda held, new: held.clear(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_lists_of_states_change_as_those_of_transformers_4_do(change: str) -> None:
    caches = kvlayers.DynamicCache(), Lists()

    def step(index: int, tokens: int) -> None:
        pair = torch.randn(2, 1, 2, tokens, 8)
        for seen, expected in zip(*(cache.update(*pair, index) for cache in caches), strict=True):
            assert torch.equal(seen, expected)

    for index in range(3):
        step(index, 5)
    new = torch.randn(2, 1, 2, 3, 8)
    for side, states in zip(("key_cache", "value_cache"), new, strict=True):
        results = [CHANGES[change](getattr(cache, side), states) for cache in caches]
        assert results[0] is results[1] is None or torch.equal(*results)
    for _ in range(2):
        for side in ("key_cache", "value_cache"):
            ours, theirs = (getattr(cache, side) for cache in caches)
            assert len(ours) == len(theirs)
            assert all(map(torch.equal, ours, theirs))
            # They are lists for everybody else too.
            assert isinstance(ours, list)
            assert len(ours.__add__([new])) == len(theirs) + 1
            assert not ours or len({tuple(each.shape) for each in ours}) > 1 or len(torch.stack(ours)) == len(ours)
            assert type(copy.deepcopy(ours)) is list
        for index in range(len(caches[1].key_cache)):
            step(index, 1)


@pytest.mark.parametrize("name", ["dynamic", "int4", "static", "sink", "offloaded"])
def test_a_cache_that_is_emptied_by_its_lists_begins_anew_with_another_batch(name: str) -> None:
    model, ids = tiny_model("gemma3"), prompt(1, 9, seed=1)
    cache = kvlayers.make_cache(name, model, **({"max_cache_len": 64} if name == "static" else {}))
    read(model, prompt(1, 12), cache)
    cache.key_cache.clear()
    cache.value_cache.clear()
    assert (cache.key_cache, cache.value_cache, cache.get_seq_length()) == ([], [], 0)
    torch.testing.assert_close(read(model, ids, cache)[1], model(ids).logits)


def test_a_cache_whose_states_are_no_tensors_has_no_lists() -> None:
    cache = kvlayers.EvictingCache(tiny_model("llama").config, rule="keydiff", budget=72)
    read(tiny_model("llama"), prompt(1, 200), cache)
    assert not hasattr(cache, "key_cache")


def test_an_assignment_that_cannot_be_leaves_the_list_as_it_was() -> None:
    keys = filled()[0].key_cache
    before = list(keys)
    with pytest.raises(kvlayers.KVLayersError):
        keys[1] = torch.randn(3)
    assert all(own is old for own, old in zip(keys, before, strict=True))


def test_an_empty_cache_takes_the_states_of_all_its_layers() -> None:
    cache = kvlayers.DynamicCache(config=tiny_model("llama").config)
    states = [torch.randn(1, 2, 3, 8) for _ in cache.layers]
    cache.key_cache = states
    cache.value_cache = states
    assert all(torch.equal(layer.keys, own) for layer, own in zip(cache.layers, states, strict=True))


def test_clearing_a_list_forgets_the_ids_of_a_prompt() -> None:
    cache, _ = filled(layers=1)
    cache.known_ids = torch.tensor([[1, 2, 3]])
    cache.key_cache.clear()
    assert cache.known_ids is None
