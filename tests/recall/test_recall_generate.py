"""Recall through models, `generate()`, names of caches, and files."""

import pathlib
from typing import Any

import pytest
import torch

import kvlayers
from kvlayers import DynamicCache, QuantizedCache, RecallLayer, SlidingLayer, layers
from models import prompt, tiny_model

RECALL = {"pages": 3, "page_tokens": 8, "recent_tokens": 8}
BLOCKS = {"pages": 1, "recent_tokens": 1}
TOKENS = 20


def read(model: Any, cache: Any, ids: torch.Tensor, prefill: int, mask: torch.Tensor | None = None) -> torch.Tensor:
    """Logits of the tokens behind a prompt of `prefill` tokens, which come one by one."""
    logits = []
    with torch.no_grad():
        for start, end in [(0, prefill), *((at, at + 1) for at in range(prefill, ids.shape[1]))]:
            options = {}
            if mask is not None:
                positions = (mask[:, :end].cumsum(1) - 1).clamp(min=0)
                options = {"attention_mask": mask[:, :end], "position_ids": positions[:, start:]}
            logits.append(model(ids[:, start:end], past_key_values=cache, **options).logits[:, -1])
    return torch.stack(logits[1:], 1)


def test_a_padded_sequence_is_decoded_as_it_is_alone() -> None:
    """If whole pages of padding come before it: pages stand at multiples of their size in the batch."""
    model, ids = tiny_model("llama"), prompt(2, 100 + TOKENS)
    ids[1, :24] = 0
    mask = torch.ones_like(ids)
    mask[1, :24] = 0
    together = read(model, DynamicCache(config=model, recall=RECALL), ids, 100, mask)
    for row, padded in ((0, 0), (1, 24)):
        alone = read(model, DynamicCache(config=model, recall=RECALL), ids[row : row + 1, padded:], 100 - padded)
        torch.testing.assert_close(together[row : row + 1], alone, rtol=0, atol=1e-4)


@pytest.mark.parametrize("make", [DynamicCache, QuantizedCache], ids=["dense", "packed"])
def test_caches_go_on_from_files_and_forks(make: Any, tmp_path: pathlib.Path) -> None:
    model, recall = tiny_model("llama"), layers.Recall(**BLOCKS)
    options = {} if make is DynamicCache else {"residual_length": 0}
    ids = prompt(2, 220 + TOKENS)
    cache = make(config=model.config, recall=recall, **options)
    read(model, cache, ids[:, :220], 200)
    kvlayers.save_cache(cache, tmp_path / "cache.safetensors")
    loaded = kvlayers.load_cache(tmp_path / "cache.safetensors")
    assert type(loaded) is make
    assert loaded.recall == recall
    assert all(type(layer) is RecallLayer and layer.recall == recall for layer in loaded.layers)
    expected = read(model, cache.fork(), ids[:, 220:], 1)
    assert torch.equal(read(model, loaded, ids[:, 220:], 1), expected)
    read(model, cache, prompt(2, 30, seed=5), 10)
    cache.crop(220)
    assert torch.equal(read(model, cache, ids[:, 220:], 1), expected)


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"num_return_sequences": 2, "do_sample": True}], ids=str)
def test_generate_takes_the_option(options: dict[str, Any]) -> None:
    model, ids = tiny_model("llama"), prompt(2, 100)
    settings, found = {"max_new_tokens": 12, **options}, []
    for cache_options in (
        {"past_key_values": DynamicCache(config=model, recall=RECALL)},
        {"cache_implementation": "dynamic", "cache_config": {"recall": RECALL}},
        {"cache_implementation": "recall", "cache_config": {"recall": RECALL}},
    ):
        torch.manual_seed(0)
        with kvlayers.installed():
            found.append(model.generate(ids, **settings, **cache_options))
    assert all(torch.equal(tokens, found[0]) for tokens in found)


def test_names_and_summaries_say_recall() -> None:
    config = tiny_model("llama").config
    assert kvlayers.make_cache("recall", config).recall == layers.Recall()
    packed = kvlayers.make_cache("int4", config, recall={"pages": 8})
    assert "2 x RecallLayer of 4 bits" in repr(packed)
    assert "2 x RecallLayer" in repr(kvlayers.make_cache("offloaded", config, recall={"pages": 8}))
    for alias in (kvlayers.QuantoQuantizedCache, kvlayers.HQQQuantizedCache):
        assert alias(config, recall=RECALL).layers[0].recall == layers.Recall(**RECALL)


def test_cross_attention_reads_the_whole_encoding() -> None:
    for cache in (DynamicCache(recall=RECALL), QuantizedCache(recall=BLOCKS)):
        assert cache.for_cross_attention(12).recall is None  # type: ignore[attr-defined]


def test_windows_are_left_alone() -> None:
    cache = DynamicCache(config=tiny_model("gemma3").config, recall=RECALL)
    assert [type(layer) for layer in cache.layers] == [SlidingLayer, SlidingLayer, RecallLayer, SlidingLayer]


def test_a_cache_without_a_config_recalls() -> None:
    model, ids = tiny_model("llama"), prompt(1, 110)
    expected = read(model, DynamicCache(config=model, recall=RECALL), ids, 100)
    assert torch.equal(read(model, DynamicCache(recall=RECALL), ids, 100), expected)
    assert torch.equal(read(model, DynamicCache(recall=RECALL, offloading=True), ids, 100), expected)
