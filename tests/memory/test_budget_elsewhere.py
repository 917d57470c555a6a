"""What other parts know of a cache within a budget: prefix stores, files, explanations, plans; what is alive in it."""

import itertools
import os
import re
import weakref
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor

import kvlayers
from kvlayers import CapacityError, DynamicCache
from kvlayers.core.buffer import TokenBuffer
from kvlayers.kernels.attention.packed_tensor import as_dense
from models import fresh_model

CONFIG = tf.LlamaConfig(
    vocab_size=97,
    hidden_size=64,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    num_hidden_layers=2,
    max_position_embeddings=2048,
)
TOKEN_BYTES = 2 * 2 * 2 * 16 * 4
LENGTHS = range(1, 601, 1 if os.environ.get("KVLAYERS_NIGHTLY") else 47)


def states(tokens: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    keys, values = (torch.randn(1, 2, tokens, 16, generator=generator) for _ in range(2))
    return keys, values


def filled(tokens: int, **options: Any) -> Any:
    cache = DynamicCache(config=CONFIG, **options)
    for index in range(2):
        cache.update(*states(tokens, index), index)
    return cache


@pytest.mark.parametrize("name", ["dynamic", "int8", "int4", "offloaded"])
def test_what_is_planned_for_each_step_is_what_it_takes(name: str) -> None:
    for tokens in LENGTHS:
        cache = kvlayers.make_cache(name, CONFIG, length_hint=tokens)
        for index in range(2):
            cache.update(*states(tokens, index), index)
        planned = kvlayers.plan(CONFIG, tokens, dtype=torch.float32, names=[name]).caches[0].nbytes
        assert planned == cache.nbytes, tokens


@pytest.mark.parametrize("ladder", [("int8",), ("int4",), ("int8", "int4")], ids=str)
def test_the_least_bytes_are_those_that_a_full_residual_takes(ladder: tuple[str, ...]) -> None:
    """Beside what is held: a block that is not full yet, and vectors of eight runs."""
    for tokens in LENGTHS:
        with pytest.raises(CapacityError) as caught:
            filled(tokens, max_bytes=1, ladder=ladder)
        found = re.search(r"(\d+) bytes", str(caught.value))
        assert found
        held = filled(tokens, max_bytes=int(found[1]), ladder=ladder).nbytes
        assert 0 <= int(found[1]) - held < 64 * TOKEN_BYTES + 2 * 8 * 2 * 16 * 4, tokens


def test_prefix_stores_know_what_is_exact() -> None:
    """What a budget has rounded is handed out to nobody who asked for exact states, and stays what it is."""
    model, ids = fresh_model("llama"), torch.arange(300)[None] % 90 + 3
    size = kvlayers.plan(model, 300, names=["dynamic"]).caches[0].device_bytes
    budget = {"cache_implementation": "dynamic", "cache_config": {"max_bytes": int(size * 0.85)}}
    wanted: dict[str, Any] = {
        "max_new_tokens": 3,
        "do_sample": False,
        "return_dict_in_generate": True,
        "output_logits": True,
    }
    expected = model.generate(ids, **wanted)
    store = kvlayers.PrefixStore(max_bytes=2**26)
    with kvlayers.installed(prefix_store=store):
        within = model.generate(ids, **wanted, **budget)
        assert within.past_key_values.layers[0].exact_from > 0
        for _ in range(2):
            exact = model.generate(ids, **wanted)
            assert exact.past_key_values.layers[0].fidelity == "exact"
            torch.testing.assert_close(exact.logits, expected.logits, rtol=1e-4, atol=1e-5)
        # The exact prompt is a prefix for the budget too, which rounds it again.
        again = model.generate(ids, **wanted, **budget)
        assert again.past_key_values.nbytes <= int(size * 0.85)
    assert torch.equal(again.sequences, within.sequences)


def test_it_is_explained_and_shown_what_stays_exact() -> None:
    cache = filled(300, max_bytes=400 * TOKEN_BYTES)
    assert "memory: all tokens are exact" in repr(cache.explain())
    for index in range(2):
        cache.update(*states(300, 5 + index), index)
    kept = cache.layers[0].length - cache.layers[0].exact_from
    said = r"memory: at least the newest (\d+) tokens stay exact, and older ones have 8 bits in 2 of 2 layers"
    noted = re.search(said, repr(cache.explain()))
    assert noted
    assert int(noted[1]) <= kept < int(noted[1]) + 64
    assert "8" in repr(cache.summary())
    fork = cache.fork()
    cache.reset()
    assert fork.layers[0].exact_from > 0
    assert cache.layers[0].fidelity == "exact" or not cache.layers[0].exact_from


def test_a_rollback_of_drafts_stays_within_the_budget() -> None:
    """Recorded windows hold more than their room until the next crop, and count as what they hold."""
    config = tf.MistralConfig(**{**CONFIG.to_dict(), "sliding_window": 100, "model_type": "mistral"})
    for share in (450, 260):
        cache = DynamicCache(config=config, max_bytes=share * TOKEN_BYTES)
        full = DynamicCache(config=config)
        for each in (cache, full):
            each.activate_past_recording()
            for index in range(2):
                each.update(*states(200, index), index)
            for step in range(8):
                for index in range(2):
                    each.update(*states(20, 10 + step), index)
                assert each is full or each.nbytes <= share * TOKEN_BYTES
                each.crop(-15)
                for index in range(2):
                    each.update(*states(1, 90 + step), index)
        for own, other in zip(cache.layers, full.layers, strict=True):
            for side, exact in zip(own.peek(), other.peek(), strict=True):
                torch.testing.assert_close(as_dense(side)[:, :, -90:], exact[:, :, -90:], rtol=0, atol=0.5)


def test_no_more_is_alive_while_it_gives_way_than_a_block_a_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each layer is packed by itself, and what it held is freed before the next one."""
    alive: dict[int, int] = {}
    most, made, allocate = 0, itertools.count(), TokenBuffer.allocate

    def counted(*args: Any, **kwargs: Any) -> TokenBuffer:
        nonlocal most
        buffer, number = allocate(*args, **kwargs), next(made)
        alive[number] = buffer.tensor.untyped_storage().nbytes()
        weakref.finalize(buffer.tensor, alive.pop, number, None)
        most = max(most, sum(alive.values()))
        return buffer

    monkeypatch.setattr(TokenBuffer, "allocate", counted)
    layers, tokens = 8, 700
    token_bytes = layers * TOKEN_BYTES // 2
    cache = DynamicCache(
        max_bytes=tokens * token_bytes * 6 // 10,
        config=tf.LlamaConfig(**{**CONFIG.to_dict(), "num_hidden_layers": layers}),
    )
    for step in [300, *[1] * (tokens - 300)]:
        for index in range(layers):
            cache.update(*states(step, index), index)
    assert cache.layers[-1].exact_from > 0
    assert most <= cache.budget.max_bytes + 64 * token_bytes


def test_layers_that_cannot_be_coded_grow_no_further_than_others_leave_room() -> None:
    cache = DynamicCache(config=CONFIG, max_bytes=620 * TOKEN_BYTES)
    with torch.no_grad():
        for step in [200, *[1] * 250]:
            for index, dtype in enumerate((torch.float32, torch.float64)):
                cache.update(*(side.to(dtype) for side in states(step, index)), index)
            assert cache.nbytes <= 620 * TOKEN_BYTES
    assert [layer.fidelity for layer in cache.layers] == ["rounded", "exact"]
