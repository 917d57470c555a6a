"""Branches of one past of a model, in caches of every kind, against caches that went the same way alone."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import kvlayers
from branches import Kind, check_branches
from families import FAMILIES, model_and_inputs
from matrix import seeds
from models import prompt, tiny_model

TOLERANCE = 1e-4
"""Of logits of about 1 in float32, after some layers whose segments are summed one after the other."""


def continued(model: Any) -> Callable[[Any, int, int, int], Tensor]:
    """The logits of new tokens."""

    def of_new_tokens(cache: Any, rows: int, tokens: int, seed: int) -> Tensor:
        ids = prompt(rows, tokens, seed)
        # The scan of this model over several tokens begins from zero.
        one_by_one = model.config.model_type == "jamba" and cache.get_seq_length() > 0
        with torch.no_grad():
            for part in ids.split(1 if one_by_one else tokens, dim=1):
                logits: Tensor = model(part, past_key_values=cache).logits
        return logits

    return of_new_tokens


def translated(model: Any) -> Callable[[Any, int, int, int], Tensor]:
    """The logits of new tokens of the decoder, which continue a translation of one text."""

    def of_new_tokens(cache: Any, rows: int, tokens: int, seed: int) -> Tensor:
        inputs = {"input_ids": prompt(1, 20).expand(rows, -1), "decoder_input_ids": prompt(rows, tokens, seed)}
        with torch.no_grad():
            logits: Tensor = model(**inputs, past_key_values=cache).logits
        return logits

    return of_new_tokens


def kind_of(family: str, make: Callable[[Any], Any]) -> Callable[[], Kind]:
    def found() -> Kind:
        model = model_and_inputs(family)[0] if family in FAMILIES else tiny_model(family)
        attend = translated(model) if model.config.is_encoder_decoder else continued(model)
        return Kind(lambda: make(model.config), attend, TOLERANCE)

    return found


QUANTIZATION = {"nbits": 4, "residual_length": 12, "sink_tokens": 4}


def pair(config: Any) -> kvlayers.EncoderDecoderCache:
    return kvlayers.EncoderDecoderCache(kvlayers.DynamicCache(), kvlayers.DynamicCache())


CACHES: dict[str, Callable[[], Kind]] = {
    "full attention": kind_of("llama", lambda config: kvlayers.DynamicCache(config=config)),
    "windows and full attention": kind_of("gemma3", lambda config: kvlayers.DynamicCache(config=config)),
    "sinks": kind_of("llama", lambda config: kvlayers.SinkCache(config=config, window_length=40, num_sink_tokens=4)),
    "packed": kind_of("llama", lambda config: kvlayers.QuantizedCache(config=config, **QUANTIZATION)),
    "packed windows": kind_of(
        "mistral", lambda config: kvlayers.QuantizedCache(config=config, **QUANTIZATION, quantize_sliding=True)
    ),
    "reserved": kind_of("gemma3", lambda config: kvlayers.StaticCache(config, max_cache_len=240)),
    "offloaded": kind_of("llama", lambda config: kvlayers.DynamicCache(config=config, offloading=True)),
    "recurrent": kind_of("mamba", lambda config: kvlayers.DynamicCache(config=config)),
    "recurrent layers and attention": kind_of("jamba", lambda config: kvlayers.DynamicCache(config=config)),
    "recurrent and attending layers": kind_of("falcon_h1", lambda config: kvlayers.DynamicCache(config=config)),
    "packed, recurrent and attending layers": kind_of(
        "falcon_h1", lambda config: kvlayers.QuantizedCache(config=config, **QUANTIZATION)
    ),
    "a pair": kind_of("bart", pair),
}


@pytest.mark.parametrize("seed", seeds(1, 3))
@pytest.mark.parametrize("kind", CACHES)
def test_a_model_continues_branches_as_it_continues_caches_that_share_nothing(kind: str, seed: int) -> None:
    check_branches(CACHES[kind](), f"{kind} {seed}", prefix=50, changes=20)
