"""Which calls of generate() go by a store: prompts with pad tokens, training mode, other threads; and what is said."""

import contextvars
import logging
import threading
from typing import Any

import pytest
import torch

import kvlayers
from kvlayers import PrefixStore
from kvlayers.generation.prefix_reuse.active_store import CURRENT
from models import fresh_model, prompt, tiny_model

PAD, END, TOKENS = 0, 7, 40
OPTIONS: dict[str, Any] = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False, "pad_token_id": PAD}


def plain(model: Any, ids: torch.Tensor, **options: Any) -> torch.Tensor:
    with CURRENT.override(None), kvlayers.installed():
        return model.generate(ids, **{**OPTIONS, **options})


def test_a_pad_token_that_may_end_a_sequence_is_text() -> None:
    model, store, ids = tiny_model("llama"), PrefixStore("1GiB"), prompt(tokens=TOKENS)
    ids[0, [3, TOKENS - 2]] = PAD
    for ends in (PAD, [END, PAD]):
        expected = plain(model, ids, eos_token_id=ends)
        for covered in (0, TOKENS - 1):
            output = kvlayers.generate(
                model, inputs=ids, prefix_store=store, eos_token_id=ends, return_dict_in_generate=True, **OPTIONS
            )
            assert torch.equal(output.sequences, expected)
            assert output.cached_tokens == (covered,)
        store.clear()


def test_a_pad_token_on_the_left_that_ends_nothing_is_padding() -> None:
    """transformers makes a mask then, and the store takes the same tokens for padding."""
    model, store, ids = tiny_model("llama"), PrefixStore("1GiB"), prompt(batch=2, tokens=TOKENS)
    ids[1, :5] = PAD
    expected = plain(model, ids, eos_token_id=END)
    for covered in ((0, 0), (TOKENS - 1, TOKENS - 6)):
        output = kvlayers.generate(
            model, ids, prefix_store=store, eos_token_id=END, return_dict_in_generate=True, **OPTIONS
        )
        assert torch.equal(output.sequences, expected)
        assert output.cached_tokens == covered


@pytest.mark.parametrize("change", ["", "module", "attribute", "config", "checkpointing", "batch norm"])
def test_training_mode_is_refused_if_it_changes_states(change: str) -> None:
    model = fresh_model("llama").train()
    attention = model.model.layers[0].self_attn
    if change == "module":
        model.model.layers[1].add_module("extra", torch.nn.Dropout(0.1))
    elif change == "attribute":
        attention.attention_dropout = 0.1
    elif change == "config":
        model.config.resid_pdrop = 0.1
    elif change == "checkpointing":
        model.gradient_checkpointing_enable()
    elif change == "batch norm":
        model.add_module("norm", torch.nn.BatchNorm1d(4))
    model.config.classifier_dropout = 0.5
    store, ids = PrefixStore("1GiB"), prompt(tokens=TOKENS)
    with torch.no_grad(), kvlayers.installed(prefix_store=store):
        for _ in range(2):
            model.generate(ids, **OPTIONS)
    assert (store.statistics.hits, store.statistics.bypassed) == ((0, 2) if change else (1, 0))
    assert ("is in training mode" in store.explain()) == bool(change)


def test_a_config_that_changes_between_calls_is_looked_at_again() -> None:
    """What a config says of a model is found once, and again if a field changes, also one within another."""
    model, store, ids = fresh_model("llama"), PrefixStore("1GiB"), prompt(tokens=TOKENS)
    with kvlayers.installed(prefix_store=store):
        for _ in range(2):
            model.generate(ids, **OPTIONS)
        assert (store.statistics.hits, store.statistics.bypassed) == (1, 0)
        # Before transformers 5, a config has no such field without a type.
        parameters = vars(model.config).get("rope_parameters")
        if parameters is None:
            model.config.rope_scaling = {"rope_type": "dynamic", "factor": 2.0}
        else:
            parameters["rope_type"] = "dynamic"
        model.generate(ids, **OPTIONS)
        assert (store.statistics.hits, store.statistics.bypassed) == (1, 1)
    assert "depends on the length of the prompt" in store.explain()


def test_each_reason_is_logged_once_and_counted_always(caplog: pytest.LogCaptureFixture) -> None:
    model, store, ids = tiny_model("llama"), PrefixStore("1GiB"), prompt(tokens=TOKENS)
    with caplog.at_level(logging.WARNING, logger="kvlayers"), kvlayers.installed(prefix_store=store):
        for _ in range(3):
            model.generate(ids, use_cache=False, **OPTIONS)
        cache = model.generate(ids.int(), return_dict_in_generate=True, **OPTIONS).past_key_values
    said = [record.getMessage() for record in caplog.records if record.name.startswith("kvlayers")]
    assert [text.partition(": ")[2] for text in said] == [
        "use_cache is False.",
        "its prompts are not token ids, int64 [rows, tokens].",
    ]
    assert store.statistics.bypasses == {
        "use_cache is False": 3,
        "its prompts are not token ids, int64 [rows, tokens]": 1,
    }
    assert store.statistics.bypassed == 4
    assert "3 calls went on without it: use_cache is False" in store.explain()
    assert "could not use the store" in repr(cache.explain())


def test_a_thread_within_a_block_is_counted_unless_it_takes_the_context_along() -> None:
    model, store, ids = tiny_model("llama"), PrefixStore("1GiB"), prompt(tokens=TOKENS)

    def ask() -> None:
        model.generate(ids, **OPTIONS)

    def run(target: Any, *args: Any) -> None:
        thread = threading.Thread(target=target, args=args)
        thread.start()
        thread.join()

    with kvlayers.installed(prefix_store=store):
        run(ask)
        assert (len(store), store.statistics.bypassed) == (0, 1)
        assert "another thread" in store.explain()
        run(contextvars.copy_context().run, ask)
        ask()
        assert (store.statistics.hits, store.statistics.bypassed) == (1, 1)
    with kvlayers.installed():
        run(ask)
        assert store.statistics.bypassed == 1
        try:
            kvlayers.install(prefix_store=store)
            run(ask)
        finally:
            kvlayers.uninstall()
    assert (store.statistics.hits, store.statistics.bypassed) == (2, 1)


@pytest.mark.parametrize("ends", [2, [2, 5]])
def test_without_a_pad_token_all_tokens_of_a_prompt_are_text(ends: Any) -> None:
    """generate() then pads with a token that ends a sequence, and makes no mask."""
    model, store, ids = tiny_model("llama"), PrefixStore("1GiB"), prompt(tokens=TOKENS)
    ids[0, [3, TOKENS - 2]] = 2
    options: dict[str, Any] = {**OPTIONS, "pad_token_id": None, "eos_token_id": ends}
    expected = plain(model, ids, **options)
    for covered in (0, TOKENS - 1):
        output = kvlayers.generate(model, ids, prefix_store=store, return_dict_in_generate=True, **options)
        assert torch.equal(output.sequences, expected)
        assert output.cached_tokens == (covered,)
    many = {name: value for name, value in options.items() if name != "pad_token_id"}
    (answer,) = kvlayers.generate_many(model, [ids], prefix_store=store, progress=False, **many)
    assert torch.equal(answer.ids, expected[0, TOKENS:])
