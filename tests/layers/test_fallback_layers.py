"""Layers that kvlayers has no kind for are of transformers' own classes: sparse attention and shared states."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
import transformers.cache_utils as upstream

import kvlayers
import versions
from agreement import same_state
from decodings import CROPPING, OPERATIONS, Decoding, Operation, check_goes_on_after, crop_nothing
from fallback_models import FAMILIES, INDEXERS, SHARING, model_of
from kvlayers.upstream import compat
from matrix import once
from models import WINDOW, prompt, tiny_model

PROMPT, NEW_TOKENS, ROOM = 12, 8, 40
KINDS: dict[str, Callable[[Any], kvlayers.Cache]] = {
    "dynamic": lambda config: kvlayers.DynamicCache(config=config),
    "static": lambda config: kvlayers.StaticCache(config, max_cache_len=ROOM, max_batch_size=6),
    "offloaded": lambda config: kvlayers.OffloadedCache(config=config),
}


def cases() -> list[Any]:
    """Families with the kinds of caches; a static indexer has to be one that chooses among tokens alone."""
    return [
        pytest.param(family, kind, marks=versions.static_indexers if family in INDEXERS and kind == "static" else ())
        for family in (*INDEXERS, *SHARING)
        for kind in [*KINDS][: 3 if family == "gemma3n" else 2]
    ]


def cache_of(family: str, kind: str) -> kvlayers.Cache:
    return KINDS[kind](model_of(family).config)


def of_transformers(family: str, kind: str) -> upstream.Cache:
    config = model_of(family).config
    return (
        upstream.StaticCache(config, max_cache_len=ROOM) if "static" in kind else upstream.DynamicCache(config=config)
    )


def generate(family: str, ids: torch.Tensor, **arguments: Any) -> Any:
    torch.manual_seed(3)
    defaults = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    return model_of(family).generate(ids, **{**defaults, **arguments})


@pytest.mark.parametrize(("family", "kind"), cases())
def test_layers_without_a_kind_are_those_of_transformers(family: str, kind: str) -> None:
    layers, theirs = cache_of(family, kind).layers, of_transformers(family, kind).layers
    foreign = [not isinstance(layer, kvlayers.CacheLayer) for layer in layers]
    # Transformers 5.17 leaves out the layers that share states with earlier ones, later versions have dummies for them.
    assert foreign == ([True, True] if family in INDEXERS else [False, False, True, True])[: len(theirs)]
    for layer, other, is_foreign in zip(layers, theirs, foreign, strict=True):
        assert (type(layer) is type(other)) is is_foreign
    assert cache_of(family, kind).is_dummy == ([False, False] if family in INDEXERS else foreign)


@pytest.mark.parametrize(("family", "kind", "draft"), once(cases(), ["of the prompt", "of a model"], times=2))
def test_drafts_are_verified_as_transformers_verifies_them(family: str, kind: str, draft: str) -> None:
    ids = torch.cat([prompt(1, 6)] * 4, dim=1)
    versions.need_since("5.14", "drafts with windows, whose past its caches record")
    how = {"prompt_lookup_num_tokens": 4} if draft == "of the prompt" else {"assistant_model": model_of(family, seed=1)}
    if family in INDEXERS and kind == "static" and not versions.CROPS_STATIC_LAYERS:
        # Transformers refuses static caches by their name, and then fails on a missing method.
        with pytest.raises(kvlayers.errors.RollbackError, match="StaticIndexedLayer"):
            generate(family, ids, past_key_values=cache_of(family, kind), **how)
        return
    expected = generate(family, ids, past_key_values=of_transformers(family, "dynamic"), **how)
    assert torch.equal(generate(family, ids, past_key_values=cache_of(family, kind), **how), expected)
    with kvlayers.installed():
        assert torch.equal(generate(family, ids, cache_implementation=kind, **how), expected)


# Operations


@torch.no_grad()
def logits(family: str, tokens: torch.Tensor, cache: Any = None) -> torch.Tensor:
    return model_of(family)(tokens, past_key_values=cache, use_cache=cache is not None).logits


@dataclasses.dataclass
class FallbackDecoding(Decoding):
    """Of a model whose layers are partly those of transformers."""

    family: str

    def logits(self, tokens: torch.Tensor, cache: Any) -> torch.Tensor:
        # Before 5.14, layers that share states with earlier ones found them in a cache alone.
        needs_one = cache is None and not compat.STATES_BY_INDEX
        return logits(self.family, tokens, of_transformers(self.family, "dynamic") if needs_one else cache)

    def check_at_rest(self) -> None:
        super().check_at_rest()
        assert self.cache.nbytes == sum(map(bytes_held, self.cache.layers))


def decoding_of(family: str, kind: str, tokens: int) -> FallbackDecoding:
    made = functools.partial(cache_of, family, kind)
    decoding = FallbackDecoding(prompt(2, tokens), made(), made, family)
    decoding.step()
    return decoding


def bytes_held(layer: Any) -> int:
    if isinstance(layer, kvlayers.CacheLayer):
        return layer.nbytes
    storages = {
        item.untyped_storage().data_ptr(): item.untyped_storage().nbytes()
        for item in vars(layer).values()
        if isinstance(item, torch.Tensor) and item.dim()
    }
    return sum(storages.values())


@pytest.mark.parametrize(("family", "kind", "operation"), once(cases(), OPERATIONS, times=2))
def test_decoding_goes_on_after_every_operation(family: str, kind: str, operation: Operation) -> None:
    decoding = decoding_of(family, kind, PROMPT)
    if operation in CROPPING and family in INDEXERS and kind == "static" and not versions.CROPS_STATIC_LAYERS:
        with pytest.raises(kvlayers.errors.RollbackError, match="StaticIndexedLayer.*: fork"):
            operation(decoding)
        operation = crop_nothing
    check_goes_on_after(decoding, operation)


@pytest.mark.parametrize("family", SHARING)
def test_tuples_are_of_the_layers_that_hold_states(family: str) -> None:
    config = model_of(family).config
    decoding = decoding_of(family, "dynamic", WINDOW - 3)
    pairs = decoding.cache.to_legacy_cache()
    assert len(pairs) == 2
    decoding.twin(kvlayers.DynamicCache.from_legacy_cache(pairs, config=config)).step()
    with pytest.raises(kvlayers.errors.LegacyFormatError, match="2 layers of the model that attend, got 3"):
        kvlayers.DynamicCache.from_legacy_cache((*pairs, pairs[0]), config=config)
    decoding.step()


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_asked_of_single_layers(family: str) -> None:
    cache = cache_of(family, "dynamic")
    logits(family, prompt(2, PROMPT), cache)
    assert cache.get_seq_length() == cache.get_query_offset() == PROMPT
    assert cache.is_sliding == ([False, False] if family in INDEXERS else [True, False, False, False])[: len(cache)]
    assert cache.is_linear == [False] * len(cache)
    flags = cache.is_croppable, cache.is_initialized, cache.is_compileable
    assert (cache.get_max_length(), flags) == (-1, (True, True, False))
    if family in SHARING:
        with pytest.raises(kvlayers.errors.UnsupportedLayerError, match="indexer"):
            cache.update_indexer(torch.zeros(2, 1, 16), 0)
        if len(cache) > 2:
            with pytest.raises(kvlayers.errors.UnsupportedLayerError, match="DummyLayer"):
                cache.get_seq_length(2)
            assert cache[3] == (None, None)
        return
    held = [layer.indexer_keys.clone() for layer in cache.layers]
    more = torch.randn(2, 1, held[0].shape[2])
    assert torch.equal(cache.update_indexer(more, 1), torch.cat([held[1], more], dim=1))
    assert torch.equal(cache.layers[0].indexer_keys, held[0])


@pytest.mark.parametrize("family", INDEXERS)
def test_tuples_cannot_say_what_an_indexer_holds(family: str) -> None:
    decoding = decoding_of(family, "dynamic", PROMPT)
    pairs, config = tuple(decoding.cache), model_of(family).config
    for refused in (
        lambda: decoding.cache.to_legacy_cache(),
        lambda: kvlayers.DynamicCache.from_legacy_cache(pairs, config=config),
        lambda: kvlayers.DynamicCache(pairs, config=config),
    ):
        with pytest.raises(kvlayers.errors.LegacyFormatError, match="indexer"):
            refused()
    decoding.step()


@pytest.mark.parametrize("family", SHARING)
def test_shared_states_may_be_quantized(family: str) -> None:
    """The layers of gemma4 differ in head_dim, for which its config has no one number."""
    ids = prompt(2, PROMPT)
    expected = generate(family, ids)
    cache = kvlayers.QuantizedCache(config=model_of(family).config, residual_length=512)
    assert torch.equal(generate(family, ids, past_key_values=cache), expected)
    with kvlayers.installed():
        assert torch.equal(generate(family, ids, cache_implementation="quantized"), expected)


def test_a_model_whose_layers_share_nothing_is_given_no_cache_with_shared_ones() -> None:
    cache = cache_of("gemma3n", "dynamic")
    if len(cache) == 2:
        pytest.skip(f"transformers {transformers.__version__} leaves out the layers that share")
    with pytest.raises(kvlayers.errors.UnsupportedLayerError, match="got 2, which holds nothing"):
        tiny_model("gemma3")(prompt(2, PROMPT), past_key_values=cache)
    assert "2 x DummyLayer, " in repr(cache)


@versions.static_indexers
@pytest.mark.parametrize("family", INDEXERS)
def test_a_reservation_of_an_indexer_that_is_too_small_grows_or_is_a_named_error(family: str) -> None:
    config = model_of(family).config
    small, growing, enough = (
        kvlayers.StaticCache(config, max_cache_len=tokens, grow=grow)
        for tokens, grow in ((PROMPT + 2, False), (PROMPT + 2, True), (3 * PROMPT, False))
    )
    for cache in (small, growing, enough):
        logits(family, prompt(2, PROMPT), cache)
    held, layer = small.state(), small.layers[1]
    new = layer.keys.new_zeros(2, layer.keys.shape[1], 3, layer.keys.shape[3])
    for refused in (
        lambda: logits(family, prompt(2, 3), small),
        # Without a mask, too, and for keys of the indexer as for those of attention.
        lambda: small.update(new, layer.values[:, :, :3], 1),
        lambda: small.update_indexer(layer.indexer_keys[:, :3], 1),
    ):
        with pytest.raises(kvlayers.CapacityError, match=f"{PROMPT} held and 3 new"):
            refused()
    assert all(map(same_state, held.layers, small.state().layers))
    for seed, tokens in enumerate((1, 3, 1, 9)):
        more = prompt(2, tokens, seed)
        expected = logits(family, more, enough)
        # Sums over other numbers of slots, of which all but the same ones are masked, round differently.
        torch.testing.assert_close(logits(family, more, growing), expected, rtol=1e-4, atol=1e-4)
        if growing.get_seq_length() <= PROMPT + 2:
            torch.testing.assert_close(logits(family, more, small), expected, rtol=1e-4, atol=1e-4)
    assert growing.get_max_length() == 2 * (PROMPT + 2)
    twin = kvlayers.StaticCache(config, max_cache_len=PROMPT + 2, grow=True)
    twin.load_state(growing.state())
    expected = logits(family, prompt(2, 1), enough)
    for cache in (growing.fork(), twin):
        torch.testing.assert_close(logits(family, prompt(2, 1), cache), expected, rtol=1e-4, atol=1e-4)


# Where they cannot


@pytest.mark.parametrize("family", INDEXERS)
def test_indexers_are_not_offloaded(family: str) -> None:
    config, ids = model_of(family).config, prompt(2, PROMPT)
    made: tuple[Callable[[], object], ...] = (
        lambda: kvlayers.DynamicCache(config=config, offloading=True),
        lambda: kvlayers.OffloadedCache(config=config),
        lambda: kvlayers.StaticCache(config, max_cache_len=ROOM, offloading=True),
        lambda: kvlayers.OffloadedStaticCache(config, max_cache_len=ROOM),
        lambda: kvlayers.QuantizedCache(config=config, offloading=True),
        lambda: kvlayers.Cache(layers=[upstream.DynamicIndexedLayer()], offloading=True),
        lambda: kvlayers.OffloadedLayer(upstream.DynamicIndexedLayer()),
    )
    # Static ones that are wrong are not even made.
    refused = (kvlayers.errors.UnsupportedLayerError, kvlayers.errors.ConfigError)
    reason = "IndexedLayer|has a cache for" if compat.INDEXERS_DEPEND_ON_CHUNKS else "IndexedLayer"
    for make in made:
        with pytest.raises(refused, match=reason):
            make()
    expected = generate(family, ids)
    with kvlayers.installed():
        for name in ("offloaded", "offloaded_static", "offloaded_quantized"):
            with pytest.raises(refused, match=reason):
                generate(family, ids, cache_implementation=name)
        # Quantized, they stay what they are.
        assert torch.equal(generate(family, ids, cache_implementation="quantized"), expected)


def test_shared_states_are_read_packed_by_the_layers_that_share_them() -> None:
    ids, options = prompt(2, 100), {"nbits": 8, "q_group_size": 8, "residual_length": 16, "sink_tokens": 4}
    how = {"return_dict_in_generate": True, "output_logits": True}
    expected = generate("gemma3n", ids, **how)
    for offloading in (False, True):
        cache = kvlayers.QuantizedCache(config=model_of("gemma3n").config, offloading=offloading, **options)
        seen = generate("gemma3n", ids, past_key_values=cache, **how)
        assert "keys_codes" in cache.state().layers[1].tensors
        assert torch.equal(seen.sequences, expected.sequences)
        difference = torch.stack(seen.logits) - torch.stack(expected.logits)
        assert 0 < float(difference.norm()) < 0.02 * float(torch.stack(expected.logits).norm())


@pytest.mark.parametrize("family", FAMILIES)
def test_a_state_of_other_layers_is_refused(family: str) -> None:
    decoding = decoding_of(family, "dynamic", PROMPT)
    others = [kvlayers.DynamicCache(config=transformers.LlamaConfig(num_hidden_layers=n)) for n in (2, 4)]
    if family in SHARING or not compat.INDEXERS_DEPEND_ON_CHUNKS:
        others.append(cache_of(family, "static"))
    for other in others:
        for one, given in ((decoding.cache, other), (other, decoding.cache)):
            with pytest.raises(kvlayers.errors.StateMismatchError, match="must|are not"):
                one.load_state(given.state())
    for misuse in (
        lambda cache: cache.batch_select_indices([2]),
        lambda cache: cache.batch_repeat_interleave(0),
        lambda cache: cache.crop(-PROMPT - 1),
        lambda cache: cache.crop(PROMPT + 1),
        lambda cache: cache.update(torch.zeros(2, 2, 1, 8), torch.zeros(2, 2, 1, 8), len(cache)),
    ):
        with pytest.raises(kvlayers.KVLayersError, match="must|are not"):
            misuse(decoding.cache)
    decoding.step()
    decoding.step()
