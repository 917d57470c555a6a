"""No causal language model computes other logits with kvlayers, whatever it keeps, and wherever it keeps it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor

import every_causal_model
import kvlayers
import versions
from kvlayers.upstream import cache_argument, model_layers, model_types
from kvlayers.upstream.model_types import kept_states
from models import prompt, under_install
from rounds import ROUNDS

PROMPT = 36
"""Tokens of a prompt that is long enough to be computed once for all of its samples."""

TELLING = (
    *("bamba", "bloom", "cpmant", "deepseek_v3", "deepseek_v4", "gemma3_text", "llama", "mamba2", "mpt", "prophetnet"),
    *("inkling_text", "qwen3_next", "recurrent_gemma"),
)
"""Types of models that keep something else than the others, or keep it elsewhere. All types take half an hour."""

MODEL_TYPES = [each for each in every_causal_model.MODEL_TYPES if ROUNDS > 1 or each in TELLING]

pytestmark = pytest.mark.slow


def logits_and_ids(model: Any, ids: Tensor, **how: Any) -> tuple[list[Tensor], Tensor]:
    """The logits of each step of `generate()`, and the sequences."""
    torch.manual_seed(1)
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=3,
        return_dict_in_generate=True,
        output_logits=True,
        **{"do_sample": False, **how},
    )
    return list(output.logits), output.sequences


def assert_same(found: tuple[list[Tensor], Tensor], expected: tuple[list[Tensor], Tensor], where: str) -> None:
    """The logits of a step are compared if all tokens before are the same: rounding may decide between two tokens."""
    (logits, ids), (expected_logits, expected_ids) = found, expected
    begin = expected_ids.shape[1] - len(expected_logits)
    for step, (one, other) in enumerate(zip(logits, expected_logits, strict=True)):
        assert_close(one, other, f"{where}, step {step}")
        if not torch.equal(ids[:, : begin + step + 1], expected_ids[:, : begin + step + 1]):
            return


def assert_close(found: Tensor, expected: Tensor, where: str) -> None:
    # Other shapes of the same products round differently. What is wrong is wrong by a hundredth of the logits at least.
    largest = float(expected.abs().max())
    torch.testing.assert_close(
        found, expected, rtol=0, atol=1e-3 * max(largest, 1), msg=lambda text: f"{where}: {text}"
    )


def attempt(compute: Callable[[], Any]) -> Any:
    """What `compute` returns, or the error of transformers or of the model that it raises."""
    try:
        return compute()
    except Exception as error:
        return error


def model_that_decodes(model_type: str) -> Any:
    model = every_causal_model.model_of(model_type)
    name = cache_argument.name_for(model)
    if not model.can_generate() or isinstance(attempt(lambda: logits_and_ids(model, prompt(1, PROMPT))), Exception):
        pytest.skip(f"transformers alone does not generate with this {model_type}")
    if isinstance(attempt(lambda: model(prompt(1, 4), **{name: None})), Exception):
        pytest.skip(f"{model_type} takes no {name}")
    return model


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_no_model_computes_other_logits(model_type: str) -> None:
    model, ids = model_that_decodes(model_type), prompt(1, PROMPT)
    samples = {"do_sample": True, "num_return_sequences": 3}
    expected = logits_and_ids(model, ids, **samples)
    assert_same(under_install(logits_and_ids, model, ids, **samples), expected, "samples")
    _compare_stored_prefixes(model)
    _compare_chunks(model, ids)
    with torch.no_grad():
        _compare_rollback_and_fork(model)


def _compare_stored_prefixes(model: Any) -> None:
    """A prompt twice, another one that diverges from it, and the beginning of both, with an odd number of tokens."""
    store, ids = kvlayers.PrefixStore(2**26), prompt(1, PROMPT)
    diverging = torch.cat([ids[:, :29], prompt(1, 6, seed=2)], dim=1)
    for place, asked in enumerate((ids, ids, diverging, ids[:, :23])):
        expected = logits_and_ids(model, asked)
        with kvlayers.installed(prefix_store=store):
            assert_same(logits_and_ids(model, asked), expected, f"prompt {place} of a store")


def _compare_chunks(model: Any, ids: Tensor) -> None:
    """Chunks that transformers cannot pass may be passed by kvlayers in another way, or raise the same."""
    # transformers passes chunks to scans that begin from zero, with wrong logits.
    chunks = {} if model.config.model_type in model_types.SCANS_FROM_ZERO else {"prefill_chunk_size": 7}
    expected = attempt(lambda: logits_and_ids(model, ids, **chunks))
    found = attempt(lambda: under_install(logits_and_ids, model, ids, prefill_chunk_size=7))
    if isinstance(expected, Exception):
        # What a pass needs is what transformers has no mask for, so there is nothing else to compare with.
        own = type(expected) | kvlayers.KVLayersError
        # A version that makes no cache for chunks never asks the model, whose own errors are others.
        refusals = Exception if versions.LEAVES_THE_CACHE_TO_MODELS else own
        assert isinstance(found, tuple | refusals), found
    elif isinstance(found, Exception):
        raise found
    else:
        assert_same(found, expected, "chunks")


def _compare_rollback_and_fork(model: Any) -> None:
    """Roll back by three tokens and go on, beside a fork that goes on without: both as from a cache of transformers."""
    if model_types.decoder_config(model.config).model_type in model_layers.MODELS_WITH_OWN_CACHE:
        return
    name, ids, others = cache_argument.name_for(model), prompt(1, 6), prompt(1, 3, seed=3)

    def passed(cache: Any, tokens: Tensor) -> list[Tensor]:
        return [model(ids_, **{name: cache}, use_cache=True).logits[:, -1] for ids_ in tokens.split(1, dim=1)]

    def expected(length: int) -> Any:
        # Models that change their caches' layers get one of transformers with the same layers.
        cache = tf.DynamicCache(config=model.config)
        return attempt(lambda: (passed(cache, ids[:, :length]), passed(cache, others))[1])

    whole, shorter = expected(6), expected(3)
    if isinstance(whole, Exception):
        return
    cache = kvlayers.DynamicCache(config=model.config)
    passed(cache, ids)
    if kept_states(model) is not None:
        # No cache can roll back what is in a module (recurrent_gemma, before its states were in a cache).
        return
    if not any(layer.length for layer in cache.adapted_layers()):
        # The model takes a cache of this name and does not use it (xlnet, rwkv).
        return
    try:
        fork = cache.fork()
        cache.crop(-3)
    except kvlayers.KVLayersError:
        layers = cache.adapted_layers()
        holds_tokens_alone = not any(layer.traits.is_upstream or layer.traits.is_recurrent for layer in layers)
        assert not holds_tokens_alone
    else:
        for place, pair in enumerate(zip(passed(cache, others), shorter, strict=True)):
            assert_close(*pair, f"token {place} behind a rollback")
        for place, pair in enumerate(zip(passed(fork, others), whole, strict=True)):
            assert_close(*pair, f"token {place} of a fork")
