"""No model that transformers runs is refused: hybrids, indexers, shared KV and states of a model's own."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import kvlayers
import versions
from families import FAMILIES, HOLDS_ITS_OWN_CACHE, any_model_and_inputs, generated
from kvlayers.upstream import compat, generate_calls
from matrix import once

WAYS: dict[str, Callable[[], dict[str, Any]]] = {
    "greedy": lambda: {"do_sample": False},
    "beams": lambda: {"num_beams": 3, "do_sample": False},
}


@pytest.mark.slow
@pytest.mark.parametrize(("family", "way"), once(FAMILIES, WAYS))
def test_every_family_generates_the_tokens_of_transformers(family: str, way: str) -> None:
    if (family, way) == ("lfm2", "beams"):
        versions.need_since("5.0", "beams of lfm2, whose cache of its own cannot be reordered")
    model, inputs = any_model_and_inputs(family)
    recurrent = family in versions.RECURRENT_FAMILIES
    # Before, transformers could not make the masks of static caches for them.
    static = compat.MODELS_PASS_COLUMNS or not recurrent
    # There, the static indexer of transformers is wrong, and there is none of ours.
    static = static and not (family == "deepseek_v32" and compat.INDEXERS_DEPEND_ON_CHUNKS)
    names = (None, "dynamic", "static") if static else (None, "dynamic")

    # Name by name: the static indexer of transformers (deepseek_v32) does not agree with its dynamic one under beams.
    def tokens_of_transformers(name: str | None) -> torch.Tensor:
        forgets = versions.CROSS_ATTENTION_FORGETS and family == "t5gemma"
        how = {"use_cache": False} if forgets else {"cache_implementation": name}
        return generated(model, inputs, **how, **WAYS[way]()).sequences

    expected = {name: tokens_of_transformers(name) for name in names if name != "dynamic"}
    # To transformers, no name is the name of its dynamic cache.
    expected["dynamic"] = expected[None]
    with kvlayers.installed():
        for name in names:
            output = generated(model, inputs, cache_implementation=name, **WAYS[way]())
            assert torch.equal(output.sequences, expected[name]), name
            # On versions where a model makes its own cache, not every model returns it.
            cache = next((output[key] for key in ("past_key_values", "cache_params") if key in output), None)
            ours = type(cache).__module__.startswith("kvlayers")
            left_to_model = family in HOLDS_ITS_OWN_CACHE or not model._supports_default_dynamic_cache()
            assert ours is not (left_to_model or generate_calls.makes_own_static_cache(model, name or ""))
