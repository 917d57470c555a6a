"""What transformers' caches get wrong must come out right here, and what they offer must all be ours."""

import contextlib
from typing import Any

import pytest
import torch
import transformers
from transformers import cache_utils as upstream

import kvlayers
from kvlayers.upstream import compat
from models import COMMON, prompt, tiny_model
from namesakes import members_left_to_transformers

NAMESAKES = {
    kvlayers.Cache: upstream.Cache,
    kvlayers.DynamicCache: upstream.DynamicCache,
    kvlayers.StaticCache: upstream.StaticCache,
    kvlayers.SlidingWindowCache: upstream.StaticCache,
    kvlayers.HybridCache: upstream.StaticCache,
    kvlayers.EncoderDecoderCache: upstream.EncoderDecoderCache,
    kvlayers.DynamicLayer: upstream.CacheLayerMixin,
    kvlayers.SlidingLayer: upstream.CacheLayerMixin,
    kvlayers.StaticLayer: upstream.CacheLayerMixin,
    kvlayers.StaticSlidingLayer: upstream.CacheLayerMixin,
    kvlayers.HybridLayer: upstream.CacheLayerMixin,
    kvlayers.LinearAttentionLayer: compat.LINEAR_LAYER,
    kvlayers.MambaCache: upstream.DynamicCache,
    kvlayers.HybridMambaAttentionDynamicCache: upstream.DynamicCache,
}


NEVER_WORKED = {"EncoderDecoderCache.batch_split"}
"""What a version of transformers has, and what calls a method there that no cache has (4.57)."""


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [*NAMESAKES.items(), (kvlayers.HybridLayer, compat.LINEAR_LAYER)],
    ids=lambda kind: kind.__name__,
)
def test_no_public_member_is_still_that_of_transformers(ours: type, theirs: type) -> None:
    """So that a release of transformers cannot change what a cache of kvlayers does."""
    assert issubclass(ours, theirs)
    assert set(members_left_to_transformers(ours, theirs)) <= NEVER_WORKED


def states(tokens: int, batch: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(batch, 2, tokens, 8), torch.randn(batch, 2, tokens, 8)


LLAMA = transformers.LlamaConfig(**COMMON)
GEMMA = transformers.Gemma3TextConfig(**COMMON, sliding_window=8, layer_types=["sliding_attention", "full_attention"])


def test_a_cache_with_one_unbounded_layer_is_unbounded() -> None:
    assert kvlayers.DynamicCache(config=GEMMA).get_max_length() == -1
    assert kvlayers.DynamicCache(config=GEMMA).get_max_length(0) == 8


def test_an_encoder_decoder_cache_answers_for_the_pair() -> None:
    cache = kvlayers.EncoderDecoderCache(kvlayers.DynamicCache(config=LLAMA), kvlayers.DynamicCache(config=LLAMA))
    assert cache.batch_size == -1
    assert not cache.is_initialized
    cache.early_initialization(3, 2, 8, torch.float32, "cpu")
    assert cache.batch_size == 3
    assert cache.is_initialized


def test_an_encoder_decoder_cache_is_saved_before_there_is_an_encoder() -> None:
    cache = kvlayers.EncoderDecoderCache(kvlayers.DynamicCache(), kvlayers.DynamicCache())
    for index in range(2):
        cache.self_attention_cache.update(*states(3), index)
    again = kvlayers.EncoderDecoderCache(kvlayers.DynamicCache(), kvlayers.DynamicCache())
    again.load_state(cache.state())
    assert [len(part.layers) for part in (again.self_attention_cache, again.cross_attention_cache)] == [2, 0]
    assert again.is_updated == {}


def test_an_encoder_decoder_cache_with_one_empty_part_is_repeated() -> None:
    cross = kvlayers.DynamicCache([states(4, batch=2)])
    cache = kvlayers.EncoderDecoderCache(kvlayers.DynamicCache(), cross)
    cache.batch_repeat_interleave(3)
    assert cache.batch_size == cross.batch_size == 6
    uneven = kvlayers.EncoderDecoderCache(kvlayers.DynamicCache(), cross)
    uneven.self_attention_cache.update(*states(4, batch=4), 0)
    with pytest.raises(kvlayers.errors.BatchIndexError):
        uneven.batch_select_indices([3, 2])
    assert (uneven.self_attention_cache.batch_size, cross.batch_size) == (4, 6)


@pytest.mark.parametrize("library", [upstream, kvlayers], ids=["transformers", "kvlayers"])
def test_what_is_caught_of_transformers_is_caught_of_kvlayers(library: Any) -> None:
    cache = library.StaticCache(config=LLAMA, max_cache_len=8)
    told = {"cache_kwargs": {"cache_position": torch.arange(9)}} if compat.UPDATES_BY_CACHE_POSITION else {}
    with pytest.raises((IndexError, RuntimeError)):
        cache.update(*states(9), 0, **told)
    with pytest.raises(ValueError, match="backend"):
        library.QuantizedCache("of nobody", LLAMA)
    pytest.importorskip("optimum.quanto", reason="it checks the options of quanto")
    model, ids = tiny_model("llama"), prompt()
    with contextlib.nullcontext() if library is upstream else kvlayers.installed():
        for wrong in ({"nbits": 60}, {"axis_key": 5}):
            with pytest.raises(ValueError, match="60|5"):
                model.generate(
                    ids, max_new_tokens=2, cache_implementation="quantized", cache_config={"backend": "quanto", **wrong}
                )
        with pytest.raises(ValueError, match="cache_implementation"):
            model.generate(
                ids, max_new_tokens=2, cache_implementation="quantized", past_key_values=library.DynamicCache()
            )
