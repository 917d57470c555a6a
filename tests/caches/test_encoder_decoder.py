"""Pairs of caches: every kind beside every other, with all operations, in models that have an encoder."""

import contextlib
import copy
import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutput

import kvlayers
import versions
from agreement import bytes_reached
from decodings import OPERATIONS, Decoding, Operation, check_goes_on_after, crop_newest
from families import FAMILIES as OTHERS
from kvlayers.upstream import cache_argument
from matrix import once, seeds, some
from models import CONFIGS, fresh_model, prompt, read, tiny_model

Pair = kvlayers.EncoderDecoderCache
ENCODED, NEW_TOKENS, ROOM = 12, 6, 40
FEWER_IN_THE_ENCODER = {"encoder_layers": 1, "encoder_attention_heads": 2, "eos_token_id": versions.NO_END}
"""Where an encoder and its decoder differ, a cache must be made for the decoder."""

# What a random model says depends on its input only where some weights are large; another factor for each family.
MODELS: dict[str, tuple[dict[str, Any], dict[str, float]]] = {
    "t5": ({}, {"shared": 3, "EncDecAttention": 16, "": 3}),
    "bart": (FEWER_IN_THE_ENCODER, {"shared": 1, "embed": 1, "encoder_attn": 16, "": 3}),
    "marian": (FEWER_IN_THE_ENCODER, {"embed_positions": 1, "shared": 50, "embed": 50, "encoder_attn": 40, "": 3}),
    "whisper": ({**FEWER_IN_THE_ENCODER, "max_target_positions": 160}, {"embed": 1, "encoder_attn": 16, "": 20}),
    "t5gemma": ({}, {"": 8}),
}
FAMILIES = ("t5", "bart", "marian", "whisper")
Arguments = dict[str, Any]
WAYS: dict[str, Arguments] = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True, "temperature": 1.0, "top_k": 20},
    "beams": {"do_sample": False, "num_beams": 2},
}


@functools.cache
@torch.no_grad()
def model_of(family: str, seed: int = 1) -> Any:
    """A random model whose tokens depend on what its encoder has read."""
    changes, factors = MODELS[family]
    config = CONFIGS[family]() if family in CONFIGS else getattr(transformers, OTHERS[family][0])(**OTHERS[family][1])
    config.update(changes)
    torch.manual_seed(seed)
    auto = transformers.AutoModelForSpeechSeq2Seq if family == "whisper" else transformers.AutoModelForSeq2SeqLM
    model = auto.from_config(config).eval()
    for name, weight in model.named_parameters():
        if weight.dim() > 1 and "norm" not in name:
            weight.mul_(next(factor for part, factor in factors.items() if part in name))
    return model


def inputs(family: str, batch: int = 2, tokens: int = ENCODED, seed: int = 0, padded: bool = True) -> Arguments:
    """What generate() takes for the encoder; the second sequence is padded at its end, where the family has padding."""
    if family == "whisper":
        return {"input_features": torch.randn(batch, 8, 32, generator=torch.Generator().manual_seed(seed))}
    mask = torch.ones(batch, tokens, dtype=torch.long)
    if padded:
        mask[1:, -4:] = 0
    return {"input_ids": torch.where(mask == 1, prompt(batch, tokens, seed), 0), "attention_mask": mask}


def generate(family: str, given: Arguments | None = None, **arguments: Any) -> Any:
    # Made first: weights are random numbers too.
    model = model_of(family)
    torch.manual_seed(3)
    given = inputs(family) if given is None else given
    return model.generate(**given, **{"max_new_tokens": NEW_TOKENS, "do_sample": False, **arguments})


def upstream_pair() -> transformers.EncoderDecoderCache:
    return transformers.EncoderDecoderCache(transformers.DynamicCache(), transformers.DynamicCache())


@functools.cache
def tokens_of_transformers(family: str, way: str) -> Tensor:
    return generate(family, past_key_values=upstream_pair(), **WAYS[way])


# The two that quantize nothing are lossless: all that comes is in the newest tokens that stay as they are.
KINDS: dict[str, Callable[[Any], Any]] = {
    "dynamic": lambda config: kvlayers.DynamicCache(),
    "static": lambda config: kvlayers.StaticCache(config, max_cache_len=ROOM, max_batch_size=6),
    "quantized": lambda config: kvlayers.QuantizedCache(config=config, nbits=2, residual_length=512),
    "offloaded": lambda config: kvlayers.OffloadedCache(config=config),
    "offloaded static": lambda config: kvlayers.OffloadedStaticCache(config, max_cache_len=ROOM, max_batch_size=6),
    "offloaded quantized": lambda config: kvlayers.QuantizedCache(residual_length=512, offloading=True),
}
MIXED = tuple(zip(KINDS, [*KINDS][1:] + [*KINDS][:1], strict=True))
"""Each kind once in each part."""


def pair_of(family: str, own: str, cross: str) -> Pair:
    config = model_of(family).config
    return Pair(KINDS[own](config), KINDS[cross](config))


# generate()


@pytest.mark.slow
@pytest.mark.parametrize(("family", "way"), once(FAMILIES, WAYS))
def test_any_two_caches_in_a_pair_of_ours_or_of_transformers_give_its_tokens(family: str, way: str) -> None:
    """With one family every combination; with the others, each kind once in each part."""
    expected = tokens_of_transformers(family, way)
    assert not torch.equal(expected[0], expected[1])
    every_two = (family, way) == ("bart", "greedy")
    for index, (own, cross) in enumerate(itertools.product(KINDS, KINDS) if every_two else MIXED):
        found = [generate(family, past_key_values=pair_of(family, own, cross), **WAYS[way])]
        if index % 3 == 0:
            with kvlayers.installed():
                found.append(generate(family, past_key_values=pair_of(family, own, cross), **WAYS[way]))
        elif index % 3 == 1:
            pair = transformers.EncoderDecoderCache(*pair_of(family, own, cross).parts())
            found.append(generate(family, past_key_values=pair, **WAYS[way]))
        assert all(torch.equal(seen, expected) for seen in found), (own, cross)


Named = tuple[type[kvlayers.Cache], type[kvlayers.Cache], type[kvlayers.CacheLayer], bool]
NAMED: dict[str, Named] = {
    "dynamic": (kvlayers.DynamicCache, kvlayers.DynamicCache, kvlayers.DynamicLayer, False),
    "static": (kvlayers.StaticCache, kvlayers.Cache, kvlayers.StaticLayer, False),
    "offloaded": (kvlayers.OffloadedCache, kvlayers.DynamicCache, kvlayers.DynamicLayer, True),
    "offloaded_static": (kvlayers.OffloadedStaticCache, kvlayers.Cache, kvlayers.StaticLayer, True),
    "quantized": (kvlayers.QuantizedCache, kvlayers.QuantizedCache, kvlayers.QuantizedLayer, False),
}


@pytest.mark.parametrize(("family", "name"), once(FAMILIES, NAMED))
def test_a_name_gives_a_pair_of_its_kinds(family: str, name: str, installed: None) -> None:
    own_type, cross_type, layer_type, offloading = NAMED[name]
    used: list[Any] = []
    # Where nothing is packed yet, what is quantized is what it was.
    options = {"cache_config": {"residual_length": 512}} if name == "quantized" else {}

    def note(decoder: Any, args: Any, kwargs: dict[str, Any]) -> None:
        used.append(cache_argument.passed_in(kwargs))

    for way, arguments in WAYS.items():
        expected = tokens_of_transformers(family, way)
        # Whisper takes the cache apart before it returns it.
        with model_of(family).get_decoder().register_forward_pre_hook(note, with_kwargs=True):
            seen = generate(family, cache_implementation=name, **options, **arguments)
        assert torch.equal(seen, expected)
        pair = used[-1]
        own, cross = pair.self_attention_cache, pair.cross_attention_cache
        assert (type(pair), type(own), type(cross)) == (Pair, own_type, cross_type)
        assert pair.offloading is own.offloading is cross.offloading is offloading
        held = [layer.wrapped if offloading else layer for layer in cross.layers]
        encoded = 16 if family == "whisper" else ENCODED
        assert [(type(layer), layer.length) for layer in held] == [(layer_type, encoded)] * 2
        if layer_type is kvlayers.StaticLayer:
            assert {layer.max_cache_len for layer in held} == {encoded}


@pytest.mark.slow
@pytest.mark.parametrize("family", some(FAMILIES, ["t5", "whisper"]))
def test_drafts_are_verified_and_rolled_back_with_any_pair(family: str) -> None:
    given = inputs(family, batch=1)
    if family != "whisper":
        # What was generated is fed again as the prompt, so that look-up finds drafts in it. Whisper takes none.
        said = generate(family, given, max_new_tokens=6)
        given["decoder_input_ids"] = torch.cat([said[:, -6:]] * 2, dim=1)
    how = {"max_new_tokens": 12}
    expected = generate(family, given, past_key_values=upstream_pair(), **how)
    drafts: dict[str, Callable[[], Arguments]] = {
        "look-up": lambda: {"prompt_lookup_num_tokens": 3},
        "a model": lambda: {"assistant_model": copy.deepcopy(model_of(family, seed=2))},
        "the same model": lambda: {"assistant_model": copy.deepcopy(model_of(family))},
    }
    for index, (way, draft) in enumerate(drafts.items()):
        # Across the families, each of the three ways meets each pair.
        for own, cross in MIXED[(index + FAMILIES.index(family)) % 3 :: 3]:
            pair = pair_of(family, own, cross)
            seen = generate(family, given, past_key_values=pair, **how, **draft())
            assert torch.equal(seen[:, -12:], expected[:, -12:]), (way, own, cross)
        with kvlayers.installed():
            for name in (None, "static"):
                seen = generate(family, given, cache_implementation=name, **how, **draft())
                assert torch.equal(seen[:, -12:], expected[:, -12:]), (way, name)


@pytest.mark.slow
@pytest.mark.parametrize("cross", ["dynamic", "static"])
def test_steps_around_reserved_self_attention_are_one_graph(installed: None, cross: str) -> None:
    """Also where compiled code asks whether there is cross-attention, and reads it."""
    versions.need_since("5.4", "compiled steps of bart in one graph")
    expected = generate("bart", past_key_values=upstream_pair())
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    pair, compiling = pair_of("bart", "static", cross), transformers.CompileConfig(backend="eager", mode=None)
    assert torch.equal(generate("bart", past_key_values=pair, compile_config=compiling), expected)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert not torch._dynamo.utils.counters["graph_break"]


@pytest.mark.parametrize("family", FAMILIES)
def test_another_input_is_refused_until_the_first_one_is_forgotten(family: str, installed: None) -> None:
    given, other = inputs(family), inputs(family, seed=5)
    others = [other] if family == "whisper" else [other, inputs(family, batch=1), inputs(family, tokens=9)]
    for kind in [*KINDS][FAMILIES.index(family) % 2 :: 2]:
        pair = pair_of(family, kind, kind)
        decoded = generate(family, given, past_key_values=pair)
        # Whisper returns no start tokens.
        longer = torch.cat([decoded, decoded[:, :2]], dim=1)
        held = pair.get_seq_length()
        for another in others:
            rows = next(iter(another.values())).shape[0]
            with pytest.raises(kvlayers.errors.StateMismatchError, match=r"reset\(\) the"):
                generate(family, another, past_key_values=pair, decoder_input_ids=longer[:rows])
            with pytest.raises(kvlayers.errors.StateMismatchError, match="reset the cache"):
                generate(family, another, past_key_values=pair)
        assert pair.get_seq_length() == held
        pair.reset()
        assert torch.equal(generate(family, other, past_key_values=pair), generate(family, other))


@pytest.mark.parametrize("family", FAMILIES)
def test_an_input_that_cannot_be_held_is_refused_before_anything_is_changed(family: str, installed: None) -> None:
    config = model_of(family).config
    pair = Pair(kvlayers.DynamicCache(), kvlayers.StaticCache(config, max_cache_len=11))
    with pytest.raises(kvlayers.CapacityError, match="at most 11"):
        generate(family, past_key_values=pair)
    assert pair.get_seq_length() == 0


@pytest.mark.parametrize("family", FAMILIES)
def test_a_cache_without_cross_attention_is_refused(family: str, installed: None) -> None:
    """Transformers puts the states of both into it, and says nothing."""
    config = model_of(family).config
    for cache in (*(KINDS[kind](config) for kind in KINDS), transformers.DynamicCache()):
        with pytest.raises(kvlayers.OptionError, match="EncoderDecoderCache"):
            generate(family, past_key_values=cache)
        assert cache.get_seq_length() == 0


@pytest.mark.parametrize(("encoder_layers", "decoder_layers"), [(1, 3), (3, 1)])
def test_a_t5_with_other_layers_in_its_decoder_has_a_cache_for_each(encoder_layers: int, decoder_layers: int) -> None:
    model = fresh_model("t5", num_layers=encoder_layers, num_decoder_layers=decoder_layers)
    how = {"max_new_tokens": 6, "do_sample": False}
    expected = model.generate(**inputs("t5"), past_key_values=upstream_pair(), **how)
    with kvlayers.installed():
        for name in NAMED:
            seen = model.generate(**inputs("t5"), cache_implementation=name, return_dict_in_generate=True, **how)
            assert torch.equal(seen.sequences, expected)
            assert len(seen.past_key_values) == decoder_layers


# Whisper, which has a generate() of its own


@pytest.mark.parametrize("way", WAYS)
def test_whisper_returns_what_it_returns_with_caches_of_transformers(way: str) -> None:
    """It takes the cache apart, one sequence at a time, and puts it together again."""
    how = {"return_dict_in_generate": True, "output_scores": True, "output_attentions": True, **WAYS[way]}
    versions.need_since("5.6", "whisper without tokens to suppress")
    expected = generate("whisper", past_key_values=upstream_pair(), **how)

    def check(seen: Any) -> None:
        assert seen.keys() == expected.keys()
        assert torch.equal(seen.sequences, expected.sequences)
        assert torch.equal(torch.stack(seen.scores), torch.stack(expected.scores))
        torch.testing.assert_close([*seen.past_key_values], [*expected.past_key_values], rtol=0, atol=0)

    for own, cross in MIXED:
        pair = pair_of("whisper", own, cross)
        check(generate("whisper", past_key_values=pair, **how))
        assert (pair.get_seq_length(), pair.cross_attention_cache.get_seq_length()) == (NEW_TOKENS, 16)
    with kvlayers.installed():
        check(generate("whisper", **how))
        check(generate("whisper", cache_implementation="static", **how))


# Windows in the decoder


def test_self_attention_within_a_window_has_cross_attention_to_all() -> None:
    versions.need_since("5.12", "t5gemma with cross-attention to all tokens")
    model = model_of("t5gemma")
    given, config = inputs("t5", tokens=14), model.config
    how = {"max_new_tokens": 14, "do_sample": False}
    for way in ({}, {"num_beams": 2}):
        expected = model.generate(**given, **how, **way)
        for own in (
            kvlayers.SlidingWindowCache(config, max_cache_len=ROOM),
            kvlayers.HybridCache(config, max_cache_len=ROOM),
            kvlayers.DynamicCache(config=config),
            kvlayers.QuantizedCache(config=config, residual_length=512),
        ):
            pair = Pair(own, kvlayers.DynamicCache())
            assert torch.equal(model.generate(**given, past_key_values=pair, **how, **way), expected), own
            assert pair.is_sliding == [True, False]
            assert pair.cross_attention_cache.is_sliding == [False, False]
    # A window there would lose tokens of the input without a word.
    for cross in (
        kvlayers.DynamicCache(config=config),
        kvlayers.QuantizedCache(config=config),
        kvlayers.HybridCache(config, max_cache_len=ROOM),
        kvlayers.DynamicCache(config=config, offloading=True, offload_only_non_sliding=False),
    ):
        with pytest.raises(kvlayers.OptionError, match="must keep all tokens of the encoder"):
            Pair(kvlayers.DynamicCache(config=config), cross)


@pytest.mark.parametrize("lengths", [[0, 0], [0, 3]])
def test_rows_without_tokens_may_belong_to_another_input(lengths: list[int]) -> None:
    """A rollback of all rows to nothing forgets the input, as one of the whole cache does."""
    model, pair = model_of("bart"), Pair(kvlayers.DynamicCache(), kvlayers.DynamicCache())
    source, other, ids = prompt(2, 9, 1), prompt(2, 9, 2), prompt(2, 5, 3)
    # What is known of the input before the first token stays, as nothing is rolled back.
    pair.cross_attention_cache.update(torch.ones(2, 4, 9, 8), torch.ones(2, 4, 9, 8), 0)
    pair.truncate(0)
    assert pair.cross_attention_cache.length == 9
    pair.reset()
    read(model, source, pair, decoder_input_ids=ids)
    pair.crop_rows(lengths)
    assert pair.cross_attention_cache.length == (9 if any(lengths) else 0)
    if not any(lengths):
        expected = model(other, decoder_input_ids=ids, use_cache=False).logits
        torch.testing.assert_close(read(model, other, pair, decoder_input_ids=ids)[1], expected, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("name", ["dynamic", "static", "int8", "offloaded", "offloaded_quantized"])
def test_a_model_that_makes_the_cache_of_cross_attention_anew_keeps_what_was_asked_for(name: str) -> None:
    """T5Gemma makes one of the same class without options: 4 bits whatever was asked, and nothing on the host."""
    versions.need_since("5.12", "t5gemma with cross-attention to all tokens")
    model, given = model_of("t5gemma"), inputs("t5", tokens=14)
    how = {"max_new_tokens": 6, "do_sample": False, "return_dict_in_generate": True}

    def cross_attention(model: Any) -> tuple[Any, bool]:
        output = model.generate(**given, **how, cache_implementation=name)
        part = cache_argument.in_output(output).cross_attention_cache
        return part.adapted_layers()[0].describe(), part.offloading

    # One that a program has made stays as well.
    pair = kvlayers.make_cache(name, model, length_hint=ROOM)
    part = pair.cross_attention_cache
    with kvlayers.installed():
        assert cross_attention(model) == cross_attention(model_of("bart"))
        expected = model.generate(**given, **how, cache_implementation=name).sequences
        for _ in range(2):
            assert torch.equal(model.generate(**given, **how, past_key_values=pair).sequences, expected)
            assert pair.cross_attention_cache is part
            assert part.nbytes
            pair.reset()


# A decode loop of one's own, with every operation in the middle


@torch.no_grad()
def encoded(family: str, batch: int = 2, tokens: int = ENCODED, seed: int = 0) -> Tensor:
    """What the encoder makes of an input, `[batch, tokens, hidden]`."""
    given = inputs(family, batch, tokens, seed, padded=False)
    return model_of(family).get_encoder()(*given.values()).last_hidden_state


@torch.no_grad()
def logits(family: str, hidden: Tensor, tokens: Tensor, cache: Any = None) -> Tensor:
    past = {"past_key_values": cache, "use_cache": cache is not None}
    return model_of(family)(encoder_outputs=BaseModelOutput(hidden), decoder_input_ids=tokens, **past).logits


@dataclasses.dataclass
class PairDecoding(Decoding):
    """Of a decoder that attends to what an encoder has read."""

    family: str
    hidden: Tensor

    def logits(self, tokens: Tensor, cache: Any) -> Tensor:
        return logits(self.family, self.hidden, tokens, cache)

    def tolerance(self, expected: Tensor) -> dict[str, float]:
        return {"rtol": 1e-3, "atol": 1e-3 * float(expected.abs().max())}

    def check_at_rest(self) -> None:
        cache, batch, length = self.cache, self.tokens.shape[0], self.tokens.shape[1] - 1
        own, cross = cache.self_attention_cache, cache.cross_attention_cache
        assert cache.get_seq_length() == cache.seen_tokens == own.get_seq_length() == length
        assert (cache.get_mask_sizes(1, 0), cache.get_query_offset()) == ((length + 1, 0), length)
        assert cross.get_seq_length() == self.hidden.shape[1]
        assert cache.is_updated == {0: True, 1: True}
        assert cache.batch_size == own.batch_size == cross.batch_size == batch
        assert cache.nbytes == own.nbytes + cross.nbytes == bytes_reached([*own.layers, *cross.layers])
        assert cache.is_initialized
        assert len(cache) == len([*cache]) == 2
        lengths = (length,) * 2 + self.hidden.shape[1:2] * 2
        assert [states.shape for states in cache[-1]] == [(batch, 4, tokens, 8) for tokens in lengths]

    def select(self, rows: list[int]) -> None:
        super().select(rows)
        self.hidden = self.hidden[rows]

    def begin_anew(self) -> None:
        """From the first token, with another output of the encoder."""
        assert self.cache.is_updated == {0: False, 1: False}
        assert self.cache.cross_attention_cache.get_seq_length() == 0
        self.roll_back(0)
        self.hidden = encoded(self.family, 2, 9, seed=4)


def decoding_of(family: str, cache: Pair, make: Callable[[], Pair], decoded: Tensor, **of_encoder: int) -> PairDecoding:
    decoding = PairDecoding(decoded, cache, make, family, encoded(family, **of_encoder))
    decoding.step()
    return decoding


def crop_at_once(decoding: PairDecoding) -> None:
    """Without a record of the past, which neither part needs."""
    decoding.cache.crop(-2)
    decoding.roll_back(decoding.cache.get_seq_length())


def crop_all(decoding: PairDecoding) -> None:
    decoding.cache.crop(-decoding.cache.get_seq_length())
    decoding.begin_anew()


def stop_recording(decoding: PairDecoding) -> None:
    crop_newest(decoding)
    decoding.cache.deactivate_past_recording()
    assert not any(decoding.cache.is_recording_past(index) for index in range(2))


def lower_the_flags(decoding: PairDecoding) -> None:
    for index in decoding.cache.is_updated:
        decoding.cache.is_updated[index] = False


def expand(decoding: PairDecoding) -> None:
    decoding.cache.expand(2)
    decoding.select([0, 0, 1, 1])


def saved_over_another(decoding: PairDecoding) -> Decoding:
    """Into a pair that holds something else, whose parts stay what they are."""
    other = decoding_of(decoding.family, decoding.make(), decoding.make, prompt(1, 6), batch=1, tokens=5, seed=8)
    parts = other.cache.self_attention_cache, other.cache.cross_attention_cache
    other.cache.load_state(decoding.cache.state())
    assert (other.cache.self_attention_cache, other.cache.cross_attention_cache) == parts
    return decoding.twin(other.cache)


def reserved_early(decoding: PairDecoding) -> Decoding:
    cache = decoding.make()
    assert (cache.batch_size, cache.is_initialized) == (-1, False)
    for heads, head_dim in ((4, 8), ([4, 4], [8, 8])):
        cache.early_initialization(2, heads, head_dim, torch.float32, "cpu")
    reserves = [any(layer.supports_early_init for layer in part.adapted_layers()) for part in cache.parts()]
    assert (cache.batch_size, cache.is_initialized) == (2 if any(reserves) else -1, all(reserves))
    assert cache.get_seq_length() == 0
    assert not any(cache.is_updated.values())
    return decoding.twin(cache)


OF_PAIRS: tuple[Operation, ...] = (
    crop_at_once,
    crop_all,
    stop_recording,
    lower_the_flags,
    expand,
    saved_over_another,
    reserved_early,
)
"""What is done to pairs beside what is done to every cache."""


@pytest.mark.parametrize(("family", "operation"), once(FAMILIES, (*OPERATIONS, *OF_PAIRS)))
def test_decoding_goes_on_after_every_operation(family: str, operation: Operation) -> None:
    # The same layers are asked in every family: each of the pairs in one of them.
    for own, cross in MIXED[FAMILIES.index(family) :: len(FAMILIES)]:
        make = functools.partial(pair_of, family, own, cross)
        check_goes_on_after(decoding_of(family, make(), make, prompt(2, 4, seed=2)), operation)


# What the pair says of itself


def test_the_pair_answers_what_a_cache_answers() -> None:
    config = model_of("bart").config
    pair = Pair(kvlayers.StaticCache(config, max_cache_len=20), kvlayers.DynamicCache(config=config, offloading=True))
    own, plain = pair.self_attention_cache, Pair(kvlayers.DynamicCache(), kvlayers.DynamicCache())
    assert (pair.get_max_length(), pair.max_cache_len, pair.get_max_cache_shape(0)) == (20, 20, 20)
    assert (pair.is_croppable, pair.is_compileable) == (True, own.is_compileable)
    assert pair.is_sliding == pair.is_linear == pair.is_dummy == [False, False]
    assert (pair.offloading, plain.offloading, plain.traffic) == (True, False, None)
    assert pair.offloading_options() == own.offloading_options()
    assert (len(pair.layers_for(2)), len(plain.layers_for(3))) == (2, 3)
    reserved = pair.for_cross_attention(7).layers[0]
    assert (type(reserved), reserved.max_cache_len) == (kvlayers.StaticLayer, 7)
    assert repr(pair).startswith("EncoderDecoderCache(self=StaticCache(2 x ")
    assert pair.traffic.total == pair.cross_attention_cache.traffic.total
    pair.check_dynamic_cache("anything")


def test_traffic_is_that_of_both_parts() -> None:
    pair = Pair(*(kvlayers.OffloadedCache() for _ in range(2)))
    for part, moved in ((pair.self_attention_cache, 3), (pair.cross_attention_cache, 4)):
        part.traffic.count(0, kvlayers.offload.Traffic(to_host=moved, to_device=10 * moved))
    assert pair.traffic.total == kvlayers.offload.Traffic(to_host=7, to_device=70)


def test_flags_are_what_the_states_say() -> None:
    states, pair = torch.randn(1, 4, 5, 8), Pair(kvlayers.DynamicCache(), kvlayers.DynamicCache())
    assert (pair.is_updated, pair.is_updated.get(0)) == ({}, None)
    pair.is_updated[0] = True
    assert not pair.is_updated
    pair.cross_attention_cache.update(states, states, 1)
    assert (repr(pair.is_updated), len(pair.is_updated)) == ("{0: False, 1: True}", 2)
    with pytest.raises(KeyError):
        pair.is_updated[2]
    for index in (1, 7):
        pair.is_updated[index] = False
    assert pair.is_updated == {0: False, 1: False}
    assert pair.cross_attention_cache.get_seq_length(1) == 0
    of_transformers = kvlayers.Cache(layers=[transformers.cache_utils.DynamicLayer()])
    of_transformers.update(states, states, 0)
    assert Pair(kvlayers.DynamicCache(), of_transformers).is_updated == {0: True}


def test_cross_attention_that_was_computed_before_is_not_computed_again() -> None:
    hidden, tokens = encoded("bart"), prompt(2, 5)
    pair = Pair(kvlayers.DynamicCache(), kvlayers.DynamicCache())
    logits("bart", hidden, tokens, pair)
    ready = Pair(kvlayers.DynamicCache(), kvlayers.DynamicCache(list(pair.cross_attention_cache)))
    # The encoder's output is not looked at, so this one is wrong.
    seen = logits("bart", torch.zeros_like(hidden), tokens, ready)
    torch.testing.assert_close(seen, logits("bart", hidden, tokens))
    ready.crop(-1)
    assert all(ready.is_updated.values())


# A reservation that is too small


@pytest.mark.parametrize("family", FAMILIES)
def test_a_reservation_too_small_for_the_encoder_is_named_and_can_be_used_again(family: str) -> None:
    config, fits = model_of(family).config, 16 if family == "whisper" else 9
    pair = Pair(kvlayers.StaticCache(config, max_cache_len=ROOM), kvlayers.StaticCache(config, max_cache_len=fits))
    hidden = torch.cat([encoded(family), encoded(family, seed=1)], dim=1)
    with pytest.raises(kvlayers.CapacityError, match=f"at most {fits} .* {hidden.shape[1]} new"):
        logits(family, hidden, prompt(2, 3), pair)
    # Cross-attention comes behind self-attention of the same layer, which has taken the tokens in.
    assert [layer.length for layer in pair.layers] == [3, 0]
    assert not any(pair.is_updated.values())
    pair.truncate(0)
    assert {layer.length for part in pair.parts() for layer in part.layers} == {0}
    decoding_of(family, pair, lambda: pair, prompt(2, 3), tokens=9, seed=2).step()


# Bad input


def states(batch: int = 2, tokens: int = 3, head_dim: int = 8) -> Tensor:
    return torch.randn(batch, 4, tokens, head_dim)


def filled(own_batch: int = 2, cross_batch: int = 2, layers: int = 1) -> Pair:
    pair = Pair(kvlayers.DynamicCache(), kvlayers.DynamicCache())
    for index in range(layers):
        pair.self_attention_cache.update(states(own_batch), states(own_batch), index)
        pair.cross_attention_cache.update(states(cross_batch, 5), states(cross_batch, 5), index)
    return pair


ARGUMENTS: dict[str, tuple[type[Exception], Callable[[], object]]] = {
    "nothing": (kvlayers.OptionError, lambda: Pair()),
    "one cache": (kvlayers.OptionError, lambda: Pair(kvlayers.DynamicCache([(states(), states())]))),
    "one pair": (kvlayers.OptionError, lambda: Pair(filled())),
    "a config": (kvlayers.OptionError, lambda: Pair(model_of("bart").config)),
    "three caches": (kvlayers.OptionError, lambda: Pair(*(kvlayers.DynamicCache() for _ in range(3)))),
    "caches of transformers": (kvlayers.OptionError, lambda: Pair(*(transformers.DynamicCache() for _ in range(2)))),
    "a cache and a config": (kvlayers.OptionError, lambda: Pair(kvlayers.DynamicCache(), model_of("bart").config)),
    "a cache and tuples": (kvlayers.OptionError, lambda: Pair(kvlayers.DynamicCache(), ((states(), states()),))),
    "a pair in a pair": (kvlayers.OptionError, lambda: Pair(kvlayers.DynamicCache(), filled())),
    "a misspelt option": (kvlayers.OptionError, lambda: Pair(self_attention_cash=kvlayers.DynamicCache())),
    "a list of caches": (
        kvlayers.errors.LegacyFormatError,
        lambda: Pair([kvlayers.DynamicCache(), kvlayers.DynamicCache()]),
    ),
    "a number": (kvlayers.errors.LegacyFormatError, lambda: Pair(3)),
    "None": (kvlayers.errors.LegacyFormatError, lambda: Pair(None)),
    "tuples of three": (kvlayers.errors.LegacyFormatError, lambda: Pair([(states(),) * 3])),
    "cross-attention in a later layer alone": (
        kvlayers.errors.LegacyFormatError,
        lambda: Pair([(states(),) * 2, (states(),) * 4]),
    ),
    "cross-attention in an earlier layer alone": (
        kvlayers.errors.LegacyFormatError,
        lambda: Pair.from_legacy_cache([(states(),) * 4, (states(),) * 2]),
    ),
    "tuples of other batch sizes": (
        kvlayers.errors.StateMismatchError,
        lambda: Pair([(states(2), states(2), states(3), states(3))]),
    ),
    "caches of other batch sizes": (
        kvlayers.errors.StateMismatchError,
        lambda: Pair(kvlayers.DynamicCache([(states(2), states(2))]), kvlayers.DynamicCache([(states(3), states(3))])),
    ),
}


@pytest.mark.parametrize(("error", "make"), ARGUMENTS.values(), ids=ARGUMENTS)
def test_what_makes_no_pair_is_refused(error: type[Exception], make: Callable[[], object]) -> None:
    with pytest.raises(error, match=r"must|takes the options"):
        make()


MISUSES: dict[str, tuple[type[Exception], Callable[[Pair], object]]] = {
    "an update of both": (kvlayers.OptionError, lambda pair: pair.update(states(), states(), 0)),
    "a length that is no number": (kvlayers.OptionError, lambda pair: pair.crop("3")),
    "removing more than is held": (kvlayers.errors.RollbackError, lambda pair: pair.crop(-9)),
    "truncating beyond the end": (kvlayers.errors.RollbackError, lambda pair: pair.truncate(9)),
    "a batch index beyond the last": (kvlayers.errors.BatchIndexError, lambda pair: pair.reorder_cache([2])),
    "no repeats": (kvlayers.errors.BatchIndexError, lambda pair: pair.batch_repeat_interleave(0)),
    "expanding to nothing": (kvlayers.errors.BatchIndexError, lambda pair: pair.expand(0)),
    "a subscript beyond the last": (kvlayers.errors.LayerIndexError, lambda pair: pair[2]),
    "a batch of none": (
        kvlayers.OptionError,
        lambda pair: pair.early_initialization(0, 4, 8, torch.float32, "cpu"),
    ),
    "heads for other layers": (
        kvlayers.errors.LayerIndexError,
        lambda pair: pair.early_initialization(2, [4] * 3, [8] * 3, torch.float32, "cpu"),
    ),
    "something that is no state": (kvlayers.errors.StateMismatchError, lambda pair: pair.load_state({})),
    "the state of a part": (
        kvlayers.errors.StateMismatchError,
        lambda pair: pair.load_state(pair.self_attention_cache.state()),
    ),
    "a state with a part of another kind": (
        kvlayers.errors.StateMismatchError,
        lambda pair: pair.load_state(_of_parts(filled(layers=2), cross=kvlayers.QuantizedCache())),
    ),
    "a state with parts of other batch sizes": (
        kvlayers.errors.StateMismatchError,
        lambda pair: pair.load_state(
            _of_parts(filled(1, 1, layers=2), cross=filled(3, 3, layers=2).cross_attention_cache)
        ),
    ),
    "a state with a damaged part": (
        kvlayers.errors.StateMismatchError,
        lambda pair: pair.load_state(_damaged(pair.state())),
    ),
    "moving what stays": (kvlayers.errors.UnsupportedLayerError, lambda pair: pair.offload(0)),
    "asking for a recurrent state": (kvlayers.errors.UnsupportedLayerError, lambda pair: pair.get_conv_state(0)),
}


def _of_parts(pair: Pair, cross: kvlayers.Cache) -> Any:
    state = pair.state()
    return dataclasses.replace(state, parts=(state.parts[0], cross.state()))


def _damaged(state: Any) -> Any:
    tensors = state.parts[1].layers[1].tensors
    tensors["values"] = tensors["values"][:, :, 1:]
    return state


@pytest.mark.parametrize(("error", "use"), MISUSES.values(), ids=MISUSES)
def test_a_pair_decodes_correctly_after_misuse(error: type[Exception], use: Callable[[Pair], object]) -> None:
    pair = pair_of("bart", "dynamic", "dynamic")
    decoding = decoding_of("bart", pair, lambda: pair, prompt(2, 4))
    before = [states.clone() for layer in pair for states in layer]
    with pytest.raises(error, match="must|are not"):
        use(pair)
    torch.testing.assert_close([states for layer in pair for states in layer], before, rtol=0, atol=0)
    decoding.step()


def test_parts_are_selected_together_or_not_at_all() -> None:
    pair = filled(2, 3)
    with pytest.raises(kvlayers.errors.BatchIndexError, match="2 and 3"):
        pair.batch_select_indices([0])
    assert (pair.self_attention_cache.batch_size, pair.cross_attention_cache.batch_size) == (2, 3)
    # An empty part is of any batch size.
    before_decoding = Pair(kvlayers.DynamicCache(), pair.cross_attention_cache)
    before_decoding.batch_repeat_interleave(2)
    assert before_decoding.batch_size == pair.cross_attention_cache.batch_size == 6


def test_layers_of_both_parts_are_reserved_or_of_neither() -> None:
    config = model_of("bart").config
    other = copy.deepcopy(config)
    other.decoder_layers = 3
    pair = Pair(kvlayers.DynamicCache(config=config), kvlayers.DynamicCache(config=other))
    with pytest.raises(kvlayers.errors.LayerIndexError, match=r"\[2, 3\]"):
        pair.early_initialization(2, [4, 4], [8, 8], torch.float32, "cpu")
    assert not pair.self_attention_cache.is_initialized
    pair.early_initialization(2, 4, 8, torch.float32, "cpu")
    assert pair.is_initialized


def test_a_decoder_without_cross_attention_is_given_no_pair() -> None:
    """With a pair of transformers, a missing attribute is what it says."""
    model, ids = tiny_model("llama"), prompt(2)
    for kind in ("dynamic", "static", "quantized"):
        pair = Pair(KINDS[kind](model.config), KINDS[kind](model.config))
        for installed in (contextlib.nullcontext, kvlayers.installed):
            with installed(), pytest.raises(kvlayers.OptionError, match="cross-attention"):
                model.generate(ids, past_key_values=pair, max_new_tokens=3)
            assert pair.get_seq_length() == 0
        expected = model.generate(ids, max_new_tokens=3, do_sample=False)
        seen = model.generate(ids, past_key_values=pair.self_attention_cache, max_new_tokens=3, do_sample=False)
        assert torch.equal(seen, expected)


@pytest.mark.parametrize("family", ["bart", "t5"])
def test_generate_goes_on_from_a_past_without_a_mask_of_the_decoder(family: str, installed: None) -> None:
    model, encoder_ids = tiny_model(family), prompt(2, 9)
    mask = torch.ones_like(encoder_ids)
    mask[0, :3] = 0
    decoder_ids = prompt(2, 7, seed=5)
    decoder_ids[:, 0] = model.config.decoder_start_token_id
    how = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False}
    expected = model.generate(encoder_ids, decoder_input_ids=decoder_ids, **how)
    cache = kvlayers.EncoderDecoderCache(kvlayers.DynamicCache(), kvlayers.DynamicCache())
    with torch.no_grad():
        model(input_ids=encoder_ids, attention_mask=mask, decoder_input_ids=decoder_ids[:, :6], past_key_values=cache)
    for past in (cache.fork(), cache.to_legacy_cache()):
        seen = model.generate(encoder_ids, decoder_input_ids=decoder_ids, past_key_values=past, **how)
        assert torch.equal(seen, expected)
    for wrong in ({"decoder_input_ids": decoder_ids[:, :6]}, {}):
        with pytest.raises(kvlayers.errors.StateMismatchError, match="the whole sequence.* seen 6 tokens"):
            model.generate(encoder_ids, past_key_values=cache, **wrong, **how)


@pytest.mark.parametrize("index", seeds(2, 8))
def test_a_draft_that_is_rejected_at_once_is_begun_again(index: int, installed: None) -> None:
    """Until transformers 5.15 its cache is then cropped to a length of zero."""
    model, draft = tiny_model("t5"), tiny_model("t5", seed=1)
    ids = prompt(8, 14)[index : index + 1]
    how = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 14, "do_sample": False}
    assert torch.equal(model.generate(ids, assistant_model=draft, **how), model.generate(ids, **how))


@versions.prefills_apart
@pytest.mark.parametrize("family", ["bart", "t5"])
def test_a_decoder_reads_its_tokens_whole_whatever_the_chunks(family: str, installed: None) -> None:
    """transformers cuts the mask of the encoder to the tokens of the decoder that it has passed."""
    given = {**inputs(family), "decoder_input_ids": prompt(2, 5, seed=3)}
    how = {"return_dict_in_generate": True, "output_logits": True}
    expected = generate(family, given, **how)
    for chunk in (2, 5):
        seen = generate(family, given, prefill_chunk_size=chunk, **how)
        torch.testing.assert_close(torch.stack(seen.logits), torch.stack(expected.logits))


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_of_the_encoder_is_no_padding_of_what_the_decoder_evicts(side: str, installed: None) -> None:
    """A row in a batch evicts what it evicts alone. Of its own padding, a decoder has a mask of its own."""
    model, encoder_ids, decoder_ids = fresh_model("bart"), prompt(2, 30, seed=4), prompt(2, 24, seed=9)
    mask = torch.ones_like(encoder_ids)
    mask[1, slice(12) if side == "left" else slice(18, 30)] = 0
    decoder_ids[:, 0] = model.config.decoder_start_token_id
    own = torch.ones_like(decoder_ids)
    options = {"sink_tokens": 2, "recent_tokens": 4}
    how = {"max_new_tokens": 6, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}

    def generated(rows: slice, **given: Any) -> Tensor:
        output = model.generate(
            encoder_ids[rows], attention_mask=mask[rows], decoder_input_ids=decoder_ids[rows], **given, **how
        )
        return torch.stack(output.logits, dim=1)

    for rule, most in (("keydiff", {"keep": 0.5}), ("streaming", {"budget": 12})):
        config = {**options, **most}
        both = generated(slice(None), cache_implementation=rule, cache_config=config, decoder_attention_mask=own)
        for row in range(2):
            pair = Pair(kvlayers.EvictingCache(model.config, rule=rule, **config), kvlayers.DynamicCache())
            alone = generated(slice(row, row + 1), past_key_values=pair)
            torch.testing.assert_close(both[row], alone[0], rtol=0, atol=1e-4)
