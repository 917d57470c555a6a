"""An update of rows that stops between two rows has not happened, or is refused by name; copies go on like the rows."""

import copy
import io
import multiprocessing.reduction
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

import kvlayers
from kvlayers.core.forward_pass import interruption
from kvlayers.errors import CapacityError, InterruptedPassError
from matrix import once
from models import prompt, read, row_logits, tiny_model

PROMPTS = (prompt(1, 5, 0), prompt(1, 10, 1))
CACHES: dict[str, Callable[[Any], Any]] = {
    "dynamic": lambda config: kvlayers.DynamicCache(config=config),
    "static": lambda config: kvlayers.StaticCache(config, max_cache_len=40),
    "int4": lambda config: kvlayers.QuantizedCache(config=config, nbits=4, residual_length=32),
    "offloaded": lambda config: kvlayers.OffloadedCache(config=config),
}
TOLERANCE = {"rtol": 0, "atol": 2e-4}
"""The same sums in another order of float32."""


def merged(model: Any, cache: str) -> Any:
    return kvlayers.merge([read(model, ids, CACHES[cache](model.config))[0] for ids in PROMPTS])


def check_steps(model: Any, cache: Any, steps: int = 4) -> None:
    """Decode, and compare with the model without a cache."""
    texts = [ids[0] for ids in PROMPTS]
    for number in range(steps):
        new = prompt(2, 1, 10 + number)
        texts = [torch.cat([text, own]) for text, own in zip(texts, new, strict=True)]
        got = row_logits(model, cache, new)[:, -1]
        with torch.no_grad():
            expected = torch.stack([model(text[None], use_cache=False).logits[0, -1] for text in texts])
        torch.testing.assert_close(got, expected, **TOLERANCE)


def interrupted(*args: object, **kwargs: object) -> None:
    raise KeyboardInterrupt


def interrupt(model: Any, rows: Any, layer: Any, row: int, method: str = "update") -> None:
    """Take a step that stops in the layer of one row."""
    setattr(layer.rows[row], method, interrupted)
    with pytest.raises(KeyboardInterrupt):
        row_logits(model, rows, prompt(2, 1, 9))
    delattr(layer.rows[row], method)


@pytest.mark.parametrize(("cache", "row"), once(["static", "int4", "offloaded"], [0, 1]))
def test_an_update_that_stops_in_the_first_layer_has_not_happened(cache: str, row: int) -> None:
    model = tiny_model("llama")
    rows = merged(model, cache)
    interrupt(model, rows, rows.layers[0], row)
    assert interruption(rows) is None
    assert all(layer.row_lengths == (5, 10) for layer in rows.layers)
    fork, kept, alone = rows.fork(), rows.fork(), rows.extract(0)
    kept.keep_rows([0, 1])
    assert alone.get_seq_length() == 5
    for own in (rows, fork, kept):
        check_steps(model, own)


@pytest.mark.parametrize("cache", ["static", "int4", "offloaded"])
def test_the_longest_row_may_be_the_one_ahead(cache: str) -> None:
    model = tiny_model("llama")
    rows = merged(model, cache)
    rows.keep_rows([1, 0])
    interrupt(model, rows, rows.layers[0], 1)
    # The model asks for the size of its mask before it updates the layer.
    assert rows.get_mask_sizes(1, 0) == (11, 0)
    rows.keep_rows([1, 0])
    check_steps(model, rows)


@pytest.mark.parametrize(("cache", "in_pair"), once(["static", "int4", "offloaded"], [False, True]))
def test_a_loop_over_update_repeats_what_was_interrupted(cache: str, in_pair: bool) -> None:
    model = tiny_model("llama")
    rows = merged(model, cache)
    if in_pair:
        crossed = merged(model, "dynamic")
        rows = kvlayers.EncoderDecoderCache(rows, crossed).self_attention_cache
    layer, expected = rows.layers[0], [rows.extract(row) for row in range(2)]
    states = torch.randn(2, model.config.num_key_value_heads, 1, model.config.head_dim)
    layer.rows[1].update = interrupted
    with pytest.raises(KeyboardInterrupt):
        rows.update(states + 1, states + 1, 0)
    del layer.rows[1].update
    rows.update(states, states, 0)
    assert layer.row_lengths == (6, 11)
    for row, alone in enumerate(expected):
        alone.update(states[row : row + 1], states[row : row + 1], 0)
        torch.testing.assert_close(layer.row(row).keys, alone.layers[0].keys, rtol=0, atol=0)


@pytest.mark.parametrize("cache", ["static", "int4", "offloaded"])
def test_one_that_stops_in_the_last_layer_is_noticed(cache: str) -> None:
    model = tiny_model("llama")
    rows = merged(model, cache)
    interrupt(model, rows, rows.layers[-1], 1)
    assert interruption(rows) is not None
    with pytest.raises(InterruptedPassError):
        rows.get_seq_length()
    rows.crop_rows([5, 10])
    check_steps(model, rows)


def test_a_row_that_cannot_be_put_back_is_refused_by_name() -> None:
    model = tiny_model("mistral")
    window = model.config.sliding_window
    caches = [kvlayers.QuantizedCache(config=model.config, nbits=4, residual_length=4) for _ in PROMPTS]
    rows = kvlayers.merge([read(model, prompt(1, window + 4, number), own)[0] for number, own in enumerate(caches)])
    interrupt(model, rows, rows.layers[0], 1)
    for use in (lambda: row_logits(model, rows, prompt(2, 1, 9)), lambda: rows.extract(0), lambda: rows.keep_rows([1])):
        with pytest.raises(InterruptedPassError, match="between two rows"):
            use()
    rows.reset()
    assert interruption(rows) is None


@pytest.mark.parametrize("family", ["mamba", "jamba"])
def test_recurrent_rows_that_were_interrupted_are_refused_by_name(family: str) -> None:
    model = tiny_model(family)
    rows = merged(model, "dynamic")
    recurrent = next(layer for layer in rows.layers if layer.traits.is_recurrent)
    interrupt(model, rows, recurrent, 1, "update_conv_state")
    for own in (rows, rows.fork(), pickle.loads(pickle.dumps(rows))):
        with pytest.raises(InterruptedPassError, match="between two rows"):
            row_logits(model, own, prompt(2, 1, 9))
        with pytest.raises(InterruptedPassError):
            own.extract(0)


@pytest.mark.parametrize("offloading", [False, True])
def test_a_full_row_leaves_all_rows_as_they_were(offloading: bool) -> None:
    model = tiny_model("llama")
    caches = [kvlayers.StaticCache(model.config, max_cache_len=most, offloading=offloading) for most in (40, 10)]
    rows = kvlayers.merge([read(model, ids, own)[0] for ids, own in zip(PROMPTS, caches, strict=True)])
    states = torch.randn(2, model.config.num_key_value_heads, 1, model.config.head_dim)
    with pytest.raises(CapacityError):
        rows.update(states, states, 0)
    assert all([row.length for row in layer.rows] == [5, 10] for layer in rows.layers)
    rows.keep_rows([0])
    ids = prompt(1, 1, 9)
    with torch.no_grad():
        expected = model(torch.cat([PROMPTS[0], ids], dim=1), use_cache=False).logits[:, -1]
    torch.testing.assert_close(row_logits(model, rows, ids)[:, -1], expected, **TOLERANCE)


def saved(cache: Any) -> Any:
    memory = io.BytesIO()
    torch.save(cache, memory)
    memory.seek(0)
    return torch.load(memory, weights_only=False)


COPIES: dict[str, Callable[[Any], Any]] = {
    "pickle": lambda cache: pickle.loads(pickle.dumps(cache)),
    "torch.save": saved,
    "deepcopy": copy.deepcopy,
    "process": lambda cache: pickle.loads(multiprocessing.reduction.ForkingPickler.dumps(cache)),
    "extracted": lambda cache: kvlayers.merge([COPIES["pickle"](cache.extract(row)) for row in range(2)]),
    "with its fork": lambda cache: pickle.loads(pickle.dumps([cache, cache.fork()]))[1],
}


@pytest.mark.parametrize(
    ("family", "cache", "how"),
    once([*(("llama", cache) for cache in CACHES), ("mamba", "dynamic"), ("jamba", "dynamic")], COPIES, times=2),
)
def test_a_copy_goes_on_as_the_rows_do(family: str, cache: str, how: str) -> None:
    model = tiny_model(family)
    rows = merged(model, cache)
    copied = COPIES[how](rows)
    check_steps(model, copied)
    # What the copy has read does not show in the original.
    check_steps(model, rows)
