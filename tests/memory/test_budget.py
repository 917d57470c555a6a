"""A cache within a budget: exact while it lasts, never beyond it, and never worse than the bits that it ends with."""

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor

import kvlayers
from kvlayers import DynamicCache, QuantizedCache
from kvlayers.errors import CapacityError, OptionError
from kvlayers.kernels.attention.packed_tensor import as_dense
from kvlayers.offload import Prefetcher
from kvlayers.offload.offloading import Offloading
from models import given
from recording_transfers import RecordingTransfers

LAYERS, HEADS, HEAD_DIM, TOKENS = 3, 2, 64, 1100
TOKEN_BYTES = LAYERS * 2 * HEADS * HEAD_DIM * 4
BLOCK_BYTES = 64 * 2 * HEADS * HEAD_DIM * 4
SMALL: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": HEADS,
    "head_dim": HEAD_DIM,
    "max_position_embeddings": 2048,
}
CHUNKS: dict[str, list[int]] = {
    "one token at a time": [300, *[1] * (TOKENS - 300)],
    "in turns": [500, 1, 1, 200, 1, 300, 97],
    "at once": [TOKENS],
}


def model_of(kind: str = "llama") -> Any:
    torch.manual_seed(0)
    if kind == "windows":
        types = ["sliding_attention", "full_attention", "sliding_attention"]
        config: Any = tf.Gemma3TextConfig(**SMALL, sliding_window=400, layer_types=types)
    else:
        config = tf.LlamaConfig(**SMALL)
    return tf.AutoModelForCausalLM.from_config(config).eval()


def states(tokens: int, batch: int = 1, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    keys, values = (torch.randn(batch, HEADS, tokens, HEAD_DIM, generator=generator) for _ in range(2))
    return keys, values


def exact_tokens(cache: Any) -> list[int]:
    return [layer.length - layer.exact_from for layer in cache.layers]


@torch.no_grad()
def read(cache: Any, chunks: list[int], batch: int = 1, first: int = 0) -> int:
    """Pass tokens to each layer; returns the most bytes that the cache has held meanwhile."""
    most, position = 0, first
    for tokens in chunks:
        for index in range(LAYERS):
            cache.update(*states(tokens, batch, 7 * position + index), index)
            most = max(most, cache.nbytes)
        position += tokens
    return most


MAKERS: dict[str, Callable[..., Any]] = {
    "dynamic": lambda **options: DynamicCache(config=tf.LlamaConfig(**SMALL), **options),
    "dynamic without a config": lambda **options: DynamicCache(**options),
    "quantized": lambda **options: QuantizedCache(config=tf.LlamaConfig(**SMALL), **options),
}


@pytest.mark.parametrize("chunks", CHUNKS)
@pytest.mark.parametrize("share", [1.0, 0.6, 0.4, 0.35])
@pytest.mark.parametrize("kind", MAKERS)
def test_bytes_stay_within_the_budget(kind: str, share: float, chunks: str) -> None:
    budget = int(TOKENS * TOKEN_BYTES * share)
    cache = MAKERS[kind](max_bytes=budget)
    most = read(cache, CHUNKS[chunks])
    assert most <= budget + LAYERS * BLOCK_BYTES
    assert cache.nbytes <= budget
    full = DynamicCache()
    read(full, CHUNKS[chunks])
    for own, other, kept in zip(cache.layers, full.layers, exact_tokens(cache), strict=True):
        assert own.length == TOKENS
        for side, exact in zip(own.peek(), other.peek(), strict=True):
            torch.testing.assert_close(as_dense(side)[:, :, -kept:], exact[:, :, -kept:], rtol=0, atol=0)
            torch.testing.assert_close(as_dense(side)[:, :, :16], exact[:, :, :16], rtol=0, atol=0)
    # No more is rounded than must be.
    room = budget - TOKENS * TOKEN_BYTES * 9 / 32
    assert min(exact_tokens(cache)) >= min(room / (TOKEN_BYTES * 23 / 32) - 3 * 64 - TOKENS / 16, TOKENS)
    assert share < 1 or cache.layers[0].fidelity == "exact" or kind == "quantized"


def test_it_ends_as_a_cache_of_the_last_bits_from_the_start() -> None:
    budget = int(TOKENS * TOKEN_BYTES * 0.35)
    cache = DynamicCache(max_bytes=budget, ladder=("int4",))
    read(cache, [TOKENS])
    reference = QuantizedCache(nbits=4)
    read(reference, [TOKENS])
    assert exact_tokens(cache)[0] >= exact_tokens(reference)[0]
    blocks = (cache.layers[0].exact_from - 16) // 64
    got, expected = (layer.peek()[0] for layer in (cache.layers[0], reference.layers[0]))
    torch.testing.assert_close(as_dense(got)[:, :, : 16 + 64 * blocks], as_dense(expected)[:, :, : 16 + 64 * blocks])


OPERATIONS: dict[str, Callable[[Any], Any]] = {
    "fork": lambda cache: cache.fork(),
    "row": lambda cache: cache.extract(0),
    "crop": lambda cache: cache.crop(700),
    "expand": lambda cache: cache.expand(2),
    "repeat": lambda cache: cache.batch_repeat_interleave(2),
    "merge": lambda cache: kvlayers.merge([cache, cache.fork()]),
    "compact": lambda cache: cache.compact(),
}


@pytest.mark.parametrize("operation", OPERATIONS)
def test_bytes_stay_within_the_budget_after(operation: str) -> None:
    budget = int(TOKENS * TOKEN_BYTES * 0.75)
    cache, full = DynamicCache(max_bytes=budget), DynamicCache()
    for each in (cache, full):
        read(each, [900])
    change = OPERATIONS[operation]
    cache, full = change(cache) or cache, change(full) or full
    batch = full.batch_size
    for each in (cache, full):
        read(each, [1] * 150, batch, first=900)
    assert cache.nbytes <= budget + batch * LAYERS * BLOCK_BYTES
    for own, other in zip(cache.layers, full.layers, strict=True):
        kept = own.length - own.exact_from
        assert 128 <= kept < own.length
        for side, exact in zip(own.peek(), other.peek(), strict=True):
            torch.testing.assert_close(as_dense(side)[:, :, -kept:], as_dense(exact)[:, :, -kept:], rtol=0, atol=0)
            torch.testing.assert_close(as_dense(side), as_dense(exact), rtol=0, atol=0.5)


def test_a_fork_has_a_budget_of_its_own() -> None:
    cache = DynamicCache(max_bytes=600 * TOKEN_BYTES)
    read(cache, [500])
    fork = cache.fork()
    read(cache, [400], first=500)
    assert cache.layers[0].fidelity == "rounded"
    assert fork.layers[0].fidelity == "exact"
    read(fork, [1] * 50, first=500)
    assert fork.layers[0].fidelity == "exact"


def test_it_is_exact_again_after_a_reset() -> None:
    cache = DynamicCache(max_bytes=600 * TOKEN_BYTES)
    read(cache, [900])
    assert cache.layers[0].exact_from > 0
    cache.reset()
    read(cache, [300, 1, 200])
    assert [layer.exact_from for layer in cache.layers] == [0] * LAYERS


@pytest.mark.parametrize("kind", ["llama", "windows"])
def test_a_model_decodes_as_without_a_budget_until_it_is_reached(kind: str) -> None:
    model, ids = model_of(kind), torch.randint(3, 97, (1, 700))
    outputs = []
    for options in ({}, {"max_bytes": 10**9}, {"max_bytes": "55%", "length_hint": 700}):
        cache = DynamicCache(config=model.config, **options)
        with torch.no_grad():
            logits = [
                model(ids[:, part], **given(cache)).logits for part in (slice(0, 600), slice(600, 601), slice(601, 700))
            ]
        outputs.append(torch.cat(logits, 1))
    torch.testing.assert_close(outputs[1], outputs[0], rtol=0, atol=0)
    torch.testing.assert_close(outputs[2], outputs[0], rtol=0, atol=0.05)
    assert cache.nbytes <= cache.budget.max_bytes
    assert cache.layers[1].fidelity == "rounded"


def test_generate_takes_a_budget_by_name() -> None:
    model = model_of()
    ids = torch.randint(3, 97, (1, 300))
    with kvlayers.installed():
        for name in ("dynamic", "quantized", "auto"):
            result = model.generate(
                ids,
                cache_implementation=name,
                cache_config={"max_bytes": 250 * TOKEN_BYTES},
                max_new_tokens=20,
                do_sample=False,
                return_dict_in_generate=True,
            )
            cache = result.past_key_values
            assert cache.nbytes <= 250 * TOKEN_BYTES
            assert cache.layers[0].fidelity == "rounded"


def test_saved_with_its_budget(tmp_path: Any) -> None:
    cache = DynamicCache(max_bytes=600 * TOKEN_BYTES, ladder=["int8"])
    read(cache, [800])
    kvlayers.save_cache(cache, tmp_path / "cache")
    loaded = kvlayers.load_cache(tmp_path / "cache")
    assert exact_tokens(loaded) == exact_tokens(cache)
    assert (loaded.budget.max_bytes, loaded.budget.ladder) == (600 * TOKEN_BYTES, ("int8",))
    for each in (cache, loaded):
        read(each, [1] * 60, first=800)
    assert exact_tokens(loaded) == exact_tokens(cache)
    torch.testing.assert_close(
        as_dense(loaded.layers[0].peek()[0]), as_dense(cache.layers[0].peek()[0]), rtol=0, atol=0
    )


def test_the_host_comes_when_codes_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        Offloading, "prefetcher", lambda self: Prefetcher(transfers=lambda device: RecordingTransfers())
    )
    cache = DynamicCache(max_bytes=300 * TOKEN_BYTES, ladder=("int8", "offloaded"))
    read(cache, [500, 400])
    assert cache.offloading
    assert "host" in cache.budget.note


@pytest.mark.parametrize("tokens", [600, 100])
def test_what_gave_way_by_hand_stays_rounded(tokens: int) -> None:
    """Also if it had so few tokens that all of them were exact."""
    cache = DynamicCache(max_bytes=900 * TOKEN_BYTES)
    read(cache, [tokens])
    assert cache.give_way() == "int8"
    read(cache, [1] * 200, first=tokens)
    assert max(exact_tokens(cache)) <= 128 + 64


def test_bytes_of_layers_that_cannot_give_way_count() -> None:
    budget = int(TOKENS * TOKEN_BYTES * 0.75)
    cache = DynamicCache(config=tf.LlamaConfig(**SMALL), max_bytes=budget)
    cache.layers[1] = kvlayers.StaticLayer(TOKENS)
    read(cache, [1, TOKENS - 1])
    assert cache.nbytes <= budget
    assert [layer.fidelity for layer in cache.layers] == ["rounded", "exact", "rounded"]


def test_nothing_changes_if_a_pass_does_not_fit() -> None:
    cache = DynamicCache(max_bytes=700 * TOKEN_BYTES, ladder=("int8",))
    read(cache, [600])
    before = cache.state()
    with pytest.raises(CapacityError, match="allow more bytes, or further steps"):
        cache.update(*states(4000), 0)
    for got, expected in zip(cache.state().layers, before.layers, strict=True):
        assert got.facts == expected.facts
        torch.testing.assert_close(got.tensors, expected.tensors, rtol=0, atol=0)
    read(cache, [50], first=600)


@pytest.mark.parametrize("ladder", [("int8", "int4", "offloaded"), ("int8", "int4"), ("int8",), ()])
@pytest.mark.parametrize("tokens", [5, 300, 900])
def test_the_least_bytes_that_the_error_names_are_enough_and_one_fewer_is_not(
    ladder: tuple[str, ...], tokens: int
) -> None:
    """Few tokens take the least bytes in full precision, and many of them do in codes."""
    with pytest.raises(CapacityError) as caught:
        read(DynamicCache(config=tf.LlamaConfig(**SMALL), max_bytes=1000, ladder=ladder), [tokens])
    # On a CPU the host is no other place, so only bits are left to allow.
    assert ("or further steps" in str(caught.value)) == (len(ladder) < 2)
    assert "offloaded" not in str(caught.value)
    least = int(str(caught.value).partition("(")[2].partition(" bytes")[0])
    assert (least == tokens * TOKEN_BYTES) == (tokens == 5 or not ladder)
    read(DynamicCache(config=tf.LlamaConfig(**SMALL), max_bytes=least, ladder=ladder), [tokens])
    with pytest.raises(CapacityError):
        read(DynamicCache(config=tf.LlamaConfig(**SMALL), max_bytes=least - 1, ladder=ladder), [tokens])


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no bytes": ({"max_bytes": 0}, "`max_bytes` must be a number of bytes"),
    "words": ({"max_bytes": "much"}, "`max_bytes`"),
    "a flag": ({"max_bytes": True}, "`max_bytes`"),
    "a fraction": ({"max_bytes": 0.5}, "`max_bytes`"),
    "a share of nothing": ({"max_bytes": "50%"}, "`length_hint` must be given"),
    "a ladder alone": ({"ladder": ("int8",)}, "`max_bytes` must be given"),
    "an unknown step": ({"max_bytes": 1000, "ladder": ("int3",)}, "`ladder` must be steps"),
    "steps upwards": ({"max_bytes": 1000, "ladder": ("int4", "int8")}, "`ladder` must be steps"),
    "a word as a ladder": ({"max_bytes": 1000, "ladder": "int8"}, "`ladder` must be steps"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_options_are_named(case: str) -> None:
    options, words = BAD[case]
    for kind in (DynamicCache, QuantizedCache):
        with pytest.raises(OptionError, match=words):
            kind(**options)


def test_a_plan_says_what_a_budget_would_hold(caplog: pytest.LogCaptureFixture) -> None:
    config = tf.LlamaConfig(**SMALL)
    planned = kvlayers.plan(config, TOKENS, dtype=torch.float32, names=["dynamic"], max_bytes="60%")
    cache = DynamicCache(config=config, max_bytes="60%", length_hint=TOKENS)
    with caplog.at_level(logging.ERROR):
        read(cache, [TOKENS])
    exact = f"of {TOKENS} tokens, the newest {min(exact_tokens(cache))} are exact after one pass"
    assert planned.within == f"a DynamicCache with max_bytes='60%': {exact} ({cache.budget.note})."
    # Without `memory`, the bytes are all that was asked for, and 'dynamic' takes more.
    assert planned.notes == (f"Use {planned.within}",)
    assert repr(planned).count(exact) == 1
    beside = kvlayers.plan(config, TOKENS, dtype=torch.float32, names=["dynamic"], max_bytes="60%", memory="1GiB")
    assert [note.partition(":")[0] for note in beside.notes] == [
        "Use 'dynamic'",
        "Or use a DynamicCache with max_bytes='60%'",
    ]
    # A plan rounds nothing, and the log does not say that it does.
    assert not caplog.records
    assert kvlayers.plan(config, TOKENS, names=["dynamic"]).within == ""
    with pytest.raises(CapacityError, match="`max_bytes` must be at least"):
        kvlayers.plan(config, TOKENS, names=["dynamic"], max_bytes="5%")


def test_contradictions_are_named() -> None:
    for bits in ({"nbits": 4}, {"key_nbits": 4}, {"value_nbits": 8}):
        with pytest.raises(OptionError, match="`nbits` must be left out"):
            QuantizedCache(max_bytes=1000, **bits)
    with pytest.raises(OptionError, match="nbits"):
        QuantizedCache(max_bytes=1000, backend="fp8")
    QuantizedCache(max_bytes=1000, backend="fp8", ladder=("int8",))
    with pytest.raises(OptionError, match="max_bytes"):
        kvlayers.StaticCache(tf.LlamaConfig(**SMALL), max_cache_len=64, max_bytes=1000)
    with pytest.raises(CapacityError, match="`max_bytes` must be at least"):
        read(DynamicCache(max_bytes=1000), [1])


def test_no_budget_costs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    assert DynamicCache().budget is None
    assert "max_bytes" not in DynamicCache().describe()
    assert "memory" not in repr(DynamicCache().explain())
    cache = DynamicCache(max_bytes=400 * TOKEN_BYTES)
    with caplog.at_level(logging.WARNING):
        read(cache, [500, *[1] * 100])
    assert len([record for record in caplog.records if "within max_bytes" in record.message]) == 1
    assert "memory: at least the newest" in repr(cache.explain())
