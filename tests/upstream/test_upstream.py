"""What transformers' caches get wrong must come out right here, and what they offer must all be ours."""

import contextlib
from typing import Any

import pytest
import torch
import transformers
from transformers import cache_utils as upstream

import kvlayers
from families import model_of
from kvlayers.quantized import quantized_layer
from kvlayers.upstream import compat, model_types
from models import COMMON, prompt, tiny_model

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
    kvlayers.QuantizedCache: upstream.QuantizedCache,
    kvlayers.QuantoQuantizedCache: upstream.QuantizedCache,
    kvlayers.HQQQuantizedCache: upstream.QuantizedCache,
    kvlayers.QuantizedLayer: upstream.CacheLayerMixin,
    quantized_layer.QuantoQuantizedLayer: compat.QUANTO_LAYER,
    quantized_layer.HQQQuantizedLayer: compat.HQQ_LAYER,
    quantized_layer.Fp8QuantizedLayer: compat.FP8_LAYER,
}


NEVER_WORKED = {"EncoderDecoderCache.batch_split"}
"""What a version of transformers has, and what calls a method there that no cache has (4.57)."""


def members_left_to_transformers(ours: type, theirs: type) -> list[str]:
    """Public members of a class of transformers that a class of kvlayers inherits from transformers."""
    special = ("__init__", "__iter__", "__len__", "__getitem__", "__repr__", "__deepcopy__")
    names = {name for base in theirs.__mro__[:-1] for name in vars(base) if not name.startswith("_")} | set(special)
    # Nobody asks a layer for its `layer_type`, by which classes of transformers were listed.
    names -= {"register", "layer_type"}
    owners = {name: next((base for base in ours.__mro__ if name in vars(base)), object) for name in names}
    return [
        f"{owner.__name__}.{name}"
        for name, owner in owners.items()
        if not owner.__module__.startswith("kvlayers") and owner is not object
    ]


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


def test_an_encoder_decoder_cache_is_saved_before_there_is_an_encoder() -> None:
    cache = kvlayers.EncoderDecoderCache(kvlayers.DynamicCache(), kvlayers.DynamicCache())
    for index in range(2):
        cache.self_attention_cache.update(*states(3), index)
    again = kvlayers.EncoderDecoderCache(kvlayers.DynamicCache(), kvlayers.DynamicCache())
    again.load_state(cache.state())
    assert [len(part.layers) for part in (again.self_attention_cache, again.cross_attention_cache)] == [2, 0]
    assert again.is_updated == {}


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


@pytest.mark.parametrize(("family", "positions"), [("llama", 0), ("gemma3n", 1), ("gemma4", 1)])
def test_a_pass_for_states_alone_asks_for_as_few_logits_as_saves_time(family: str, positions: int) -> None:
    model = model_of(family)
    asked = model_types.newest_logits_only(model, 0)["logits_to_keep"]
    # Given no number, models whose last layers read states of earlier ones pass them all tokens.
    assert isinstance(asked, int) == (positions == 1)
    with torch.no_grad():
        assert model(prompt(tokens=6), logits_to_keep=asked).logits.shape[1] == positions
