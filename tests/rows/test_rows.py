"""Every row of a batch goes on as it would alone, after any merge, extraction, rollback and choice of rows.

An update of rows that stops between two rows has not happened, or is refused by name.
"""

import copy
import multiprocessing.reduction
import pickle
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import families
import kvlayers
from kvlayers.core.forward_pass import interruption
from kvlayers.errors import (
    BatchIndexError,
    CapacityError,
    InterruptedPassError,
    OptionError,
    PromptMismatchError,
    ReadOnlyStatesError,
    RollbackError,
    StateMismatchError,
    UnsupportedLayerError,
)
from kvlayers.kernels.attention.row_states import RowStates
from matrix import once, seeds
from models import continued, fresh_model, given, passes_of, prompt, read, row_logits, tiny_model, under_install

CACHES: dict[str, Callable[[Any], Any]] = {
    "dynamic": lambda config: kvlayers.DynamicCache(config=config),
    "static": lambda config: kvlayers.StaticCache(config, max_cache_len=200),
    "int4": lambda config: kvlayers.QuantizedCache(config=config, nbits=4, residual_length=16),
    "offloaded": lambda config: kvlayers.OffloadedCache(config=config),
    "recall": lambda config: kvlayers.DynamicCache(config=config, recall={"pages": 2}),
    "sink": lambda config: kvlayers.SinkCache(config=config, window_length=24, num_sink_tokens=4),
    # Not the norm of keys: RoPE leaves it, so that equal tokens tie.
    "keydiff": lambda config: kvlayers.EvictingCache(
        config=config, rule="keydiff", budget=12, sink_tokens=2, recent_tokens=4
    ),
    "snapkv": lambda config: kvlayers.EvictingCache(
        config=config, rule="snapkv", budget=16, sink_tokens=2, recent_tokens=4
    ),
}

CASES = [
    *(("llama", cache) for cache in CACHES),
    *(("mistral", cache) for cache in ("dynamic", "static", "int4", "offloaded")),
    *(("gemma3", cache) for cache in ("dynamic", "int4", "keydiff")),
    *(("deepseek_v3", cache) for cache in ("dynamic", "int4")),
    *((family, "dynamic") for family in ("mamba", "jamba", "mamba2", "lfm2", "qwen3_next")),
    ("jamba", "int4"),
]


def check_rows(model: Any, batch: Any, alone: list[Any], ids: Tensor, atol: float = 2e-4) -> None:
    """New tokens `[rows, new]` have the logits that they have behind each row alone."""
    logits = row_logits(model, batch, ids)
    for row, cache in enumerate(alone):
        # The sums are those of another order of float32.
        torch.testing.assert_close(logits[row], read(model, ids[row : row + 1], cache)[1][0], atol=atol, rtol=1e-4)


def recording(cache: Any) -> list[bool]:
    return [bool(layer.is_recording) for layer in cache.adapted_layers()]


class Schedule:
    """Random operations on a batch, and the same on one cache for each row, which are the reference."""

    def __init__(self, family: str, cache: str, seed: int, attention: str = "sdpa") -> None:
        self.model = families.model_of(family)
        self.attends = not family.startswith("mamba")
        if self.attends:
            self.model.set_attn_implementation(attention)
        else:
            # In float32, the exponentials of a scan make 2e-3 of the last bit, once in twenty schedules.
            self.model = copy.deepcopy(self.model).double()
        self.random, self.cache = random.Random(seed), cache
        self.alone: list[Any] = []
        self.texts: list[list[int]] = []
        with torch.no_grad():
            self.batch = kvlayers.merge([self.filled() for _ in range(3)])

    def filled(self) -> Any:
        """A cache with a prompt of its own, for a further row."""
        ids = prompt(1, self.random.choice([1, 5, 30, 80]), self.random.randrange(10**6))
        self.alone.append(read(self.model, ids, CACHES[self.cache](self.model.config))[0])
        self.texts.append(ids[0].tolist())
        return self.alone[-1]

    def decode(self, new: int = 1) -> None:
        """Pass random tokens, and compare each row."""
        ids = prompt(len(self.alone), new, self.random.randrange(10**6))
        check_rows(self.model, self.batch, self.alone, ids)
        self.texts = [[*text, *own] for text, own in zip(self.texts, ids.tolist(), strict=True)]
        assert self.batch.row_lengths == tuple(cache.get_seq_length() for cache in self.alone)

    def chunk(self) -> None:
        """Several tokens at once, which the scan of a mamba cannot take."""
        self.decode(self.random.choice([2, 5]) if self.attends and not self.batch.recurrent_parts() else 1)

    def extend(self) -> None:
        if len(self.alone) > 4:
            return
        self.batch.extend(*(self.filled() for _ in range(self.random.choice([1, 2]))))

    def keep_rows(self) -> None:
        rows = [self.any_row() for _ in range(self.random.choice([1, 2, 3]))]
        if self.random.random() < 0.3:
            # Each takes the place of another one.
            rows = [*range(len(self.alone))][::-1]
        self.batch.keep_rows(rows)
        self.alone = [self.alone[row].fork() for row in rows]
        self.texts = [self.texts[row] for row in rows]

    def any_row(self) -> int:
        """The index of a row, from the first one on or, below zero, from the last."""
        return self.random.randrange(-len(self.alone), len(self.alone))

    def extract(self) -> None:
        row = self.any_row()
        alone, expected = self.batch.extract(row), self.alone[row].fork()
        ids = prompt(1, 1, 7)
        for _ in range(3):
            logits = [self.model(ids, **given(cache, self.model)).logits for cache in (alone, expected)]
            torch.testing.assert_close(*logits, atol=2e-4, rtol=1e-4)

    def fork(self) -> None:
        """The fork or the original reads a token first, which the other one does not see."""
        self.batch, other = self.random.sample([self.batch, self.batch.fork()], 2)
        row_logits(self.model, self.batch, prompt(len(self.alone), 1, 3))
        self.batch = other

    def crop_rows(self) -> None:
        lengths = [max(cache.get_seq_length() - self.random.choice([0, 0, 1, 3, 99]), 0) for cache in self.alone]
        before = self.batch.row_lengths
        try:
            for cache, length in zip([cache.fork() for cache in self.alone], lengths, strict=True):
                cache.crop_rows([length])
        except RollbackError:
            with pytest.raises(RollbackError):
                self.batch.crop_rows(lengths)
            assert self.batch.row_lengths == before
        else:
            self.batch.crop_rows(lengths)
            for cache, length in zip(self.alone, lengths, strict=True):
                cache.crop_rows([length])
            self.texts = [text[:length] for text, length in zip(self.texts, lengths, strict=True)]

    def store(self) -> None:
        """A row is the beginning of a longer prompt, as a store gives it back, and joins once more."""
        row, store = self.any_row(), kvlayers.PrefixStore("1GiB")
        text = torch.tensor(self.texts[row])
        if self.cache == "dynamic" and len(text) and len(self.alone) < 5:
            store.insert(text, self.batch.extract(row), model="m")
            self.batch.extend(store.lookup(torch.cat([text, text[:1]]), model="m").cache)
            self.alone.append(self.alone[row].fork())
            self.texts.append(self.texts[row])

    def record(self) -> None:
        """Draft tokens that are taken back."""
        for cache in (self.batch, *self.alone):
            cache.activate_past_recording()
        # `generate()` leaves a cache recording that was recording before.
        assert recording(self.batch) == recording(self.alone[0])
        self.extract()
        self.chunk()
        self.crop_rows()
        self.decode()
        for cache in (self.batch, *self.alone):
            cache.deactivate_past_recording()
        assert not any(recording(self.batch))

    def run(self, steps: int) -> None:
        changes = (
            self.extend,
            self.keep_rows,
            self.extract,
            self.fork,
            self.crop_rows,
            self.record,
            self.chunk,
            self.store,
        )
        with torch.no_grad():
            for _ in range(steps):
                self.random.choice(changes)()
                self.decode()


@pytest.mark.parametrize("seed", seeds(1, 20))
@pytest.mark.parametrize(("family", "cache"), CASES)
def test_rows_go_on_as_if_they_were_alone(family: str, cache: str, seed: int) -> None:
    Schedule(family, cache, seed).run(12)


@pytest.mark.parametrize("cache", ["dynamic", "int4", "keydiff"])
@pytest.mark.parametrize("attention", ["eager", "kvlayers"])
def test_other_attentions_see_the_same_rows(cache: str, attention: str) -> None:
    with kvlayers.installed():
        try:
            Schedule("llama", cache, 1, attention).run(8)
        finally:
            tiny_model("llama").set_attn_implementation("sdpa")


# What merge() and the operations of rows refuse


def filled(cache: Any, tokens: int = 4, kv_heads: int = 2, dtype: torch.dtype = torch.float32) -> Any:
    """A cache with the states of some tokens in two layers."""
    for index in range(2):
        states = torch.randn(1, kv_heads, tokens, 8, dtype=dtype)
        cache.update(states, states, index)
    return cache


def dynamic(**form: Any) -> Any:
    return filled(kvlayers.DynamicCache(), **form)


def packed(nbits: int, **form: Any) -> Any:
    return filled(kvlayers.QuantizedCache(nbits=nbits), **form)


ROWS = {
    "side by side in one tensor": lambda: kvlayers.merge([dynamic(tokens=4), dynamic(tokens=2)]),
    "each in a layer": lambda: kvlayers.merge([packed(8, tokens=4), packed(8, tokens=2)]),
}

OTHERS: list[Callable[[], Any]] = [
    lambda: dynamic(kv_heads=4),
    lambda: dynamic(dtype=torch.bfloat16),
    lambda: kvlayers.DynamicCache(),
    lambda: packed(4),
    lambda: filled(kvlayers.Cache([kvlayers.SlidingLayer(sliding_window=4) for _ in range(2)])),
]
NEW = torch.zeros(2, 2, 1, 8)
WRONG_STATES: list[tuple[Any, Any]] = [
    *((NEW, torch.zeros(rows, 2, tokens, 8)) for rows, tokens in ((2, 2), (2, 0), (3, 1))),
    *((None, NEW), (NEW, "values")),
]


def each(values: Any, call: Callable[[Any, Any], Any], error: type[Exception], named: str) -> list[Any]:
    """What is refused: a call for each of some values, an error and what it names."""
    return [(lambda rows, value=value: call(rows, value), error, named) for value in values]


REFUSED = [
    *each([[], None, "cache", [1], [dynamic(), "cache"]], lambda rows, caches: kvlayers.merge(caches), OptionError,
          "`caches` must be a list of at least one cache of kvlayers, got"),
    *each(OTHERS, lambda rows, other: rows.extend(other()), StateMismatchError, "`caches` must"),
    *each([4], lambda rows, nbits: kvlayers.merge([packed(nbits), packed(8)]), StateMismatchError,
          "`caches` must be of one model, kind and settings"),
    *each([[1], [1, 2, 3]], lambda rows, lengths: rows.crop_rows(lengths), BatchIndexError, "`lengths` must"),
    *each([[5, 2], [-1, 2]], lambda rows, lengths: rows.crop_rows(lengths), RollbackError, "`lengths` must"),
    *each([2, -3, 17], lambda rows, row: rows.extract(row), BatchIndexError, "`row` must be from -2 to 1"),
    *each([2, -3, 17], lambda rows, row: rows.keep_rows([row]), BatchIndexError, "`"),
    *each([[[1, 1], [0, 1]], [[1, 1, 1, 0], [1, 1, 1, 1]], [[1, 1, 1, 1]]],
          lambda rows, mask: kvlayers.Rows(rows, torch.tensor(mask)), StateMismatchError, "mask"),
    *each(WRONG_STATES, lambda rows, states: rows.update(*states, 0), StateMismatchError, "Keys and values must"),
    *each(["rows.safetensors"], lambda rows, path: kvlayers.save_cache(rows, path), UnsupportedLayerError,
          r"save each cache\.extract\(row\)"),
    *each([1.5, "1", True, -1, None], lambda rows, new: kvlayers.Rows(rows).attention_mask(new_tokens=new), OptionError,
          "`new_tokens` must be"),
    *each([1.5, "1", True, -1, None], lambda rows, new: kvlayers.Rows(rows).position_ids(new_tokens=new), OptionError,
          "`new_tokens` must be"),
    *each([[2], [0.5], [], "0", None], lambda rows, indices: rows.layers[0].select(indices), BatchIndexError,
          "`indices` must be"),
]  # fmt: skip


@pytest.mark.parametrize("make", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize(("call", "error", "named"), REFUSED)
def test_what_is_refused_is_named_and_changes_nothing(
    make: Callable[[], Any], call: Callable[[Any], Any], error: type[Exception], named: str
) -> None:
    rows = make()
    before, kind = rows.layers[0].keys, type(rows.layers[0])
    with pytest.raises(error, match=named):
        call(rows)
    assert (rows.row_lengths, type(rows.layers[0])) == ((4, 2), kind)
    assert torch.equal(rows.layers[0].keys, before)


def test_rolling_back_dense_rows_moves_nothing() -> None:
    cache = kvlayers.merge([dynamic(tokens=400), dynamic(tokens=100)])
    keys, _ = cache.layers[0].held_tensors()
    cache.crop_rows([399, 1])
    assert next(cache.layers[0].held_tensors()).data_ptr() == keys.data_ptr()
    assert cache.row_lengths == (399, 1)


class Copied(TorchDispatchMode):
    """Counts the bytes of what operations return in memory of their own, or write in place."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and not func.is_view:
            self.nbytes += result.nbytes
        return result


def read_prompts(family: str, count: int) -> tuple[Any, list[Any]]:
    """A model, and a cache for each of several prompts."""
    model = families.model_of(family)
    empty = (kvlayers.DynamicCache(config=model.config) for _ in range(count))
    return model, [read(model, prompt(1, 20, seed), cache)[0] for seed, cache in enumerate(empty)]


def bytes_of_row(cache: Any) -> float:
    """Bytes of one of the rows that are held, without memory for more."""
    held = (states.nbytes for layer in cache.adapted_layers() for states in layer.held_tensors())
    return sum(held) / cache.batch_size


HYBRID = ["mamba2", "jamba", "lfm2", "qwen3_next"]


@pytest.mark.parametrize("family", ["llama", "mamba", *HYBRID])
def test_a_row_that_leaves_copies_one_of_the_others_at_most(family: str) -> None:
    cache = kvlayers.merge(read_prompts(family, 9)[1])
    of_row = bytes_of_row(cache)
    with Copied() as copied:
        cache.keep_rows([0, 1, 8, 3, 4, 5, 6, 7])
        assert 0 < copied.nbytes < 1.5 * of_row
        copied.nbytes = 0
        cache.keep_rows(range(7))
        assert copied.nbytes < 0.1 * of_row


@pytest.mark.parametrize("family", ["llama", "mamba", *HYBRID])
def test_a_row_that_joins_takes_the_memory_of_one_that_has_left(family: str) -> None:
    alone = read_prompts(family, 9)[1]
    cache = kvlayers.merge(alone[:8])
    of_row, nbytes = bytes_of_row(cache), cache.nbytes
    for count in range(5):
        cache.keep_rows(range(7))
        with Copied() as copied:
            cache.extend(alone[8])
        # The states and the zeros behind them, of which there is room for a few tokens more.
        assert copied.nbytes < 3 * of_row, count
    assert cache.nbytes == nbytes


def test_rows_that_join_one_after_another_copy_recurrent_states_a_few_times() -> None:
    alone = read_prompts("mamba2", 32)[1]
    cache = alone[0].fork()
    with Copied() as copied:
        for other in alone[1:]:
            cache.extend(other)
    # Each join would copy the states of all rows, 16 on average.
    assert copied.nbytes < 6 * 32 * bytes_of_row(cache)
    assert cache.nbytes < 1.5 * 32 * bytes_of_row(cache)


def test_a_join_that_one_of_the_layers_refuses_changes_nothing() -> None:
    model, alone = read_prompts("jamba", 4)
    cache = kvlayers.merge(alone[:3])
    attending = next(layer for layer in alone[3].adapted_layers() if layer.traits.attends)
    with pytest.MonkeyPatch.context() as patched:
        # After the first recurrent layers, as those of a device without memory.
        patched.setattr(attending, "row", lambda index: 1 / 0)
        patched.setattr(attending, "peek", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            cache.extend(alone[3])
    check_rows(model, cache, alone[:3], prompt(3, 1, 5), atol=1e-5)


def test_what_a_row_has_left_does_not_reach_the_next_one() -> None:
    model = tiny_model("llama")
    first, second = (read(model, prompt(1, tokens, tokens), CACHES["dynamic"](model.config))[0] for tokens in (30, 5))
    broken = kvlayers.DynamicCache(config=model.config)
    for index in range(model.config.num_hidden_layers):
        broken.update(torch.full((1, 2, 40, 8), torch.nan), torch.full((1, 2, 40, 8), torch.nan), index)
    cache = kvlayers.merge([first, first, broken])
    cache.keep_rows([0, 1])
    cache.extend(second)
    assert row_logits(model, cache, prompt(3, 1, 7)).isfinite().all()


def test_rows_of_pairs_go_on_as_if_they_were_alone() -> None:
    model = tiny_model("t5")
    with torch.no_grad():
        alone = [kvlayers.EncoderDecoderCache(kvlayers.DynamicCache(), kvlayers.DynamicCache()) for _ in range(2)]
        encoded = [model.encoder(prompt(1, 7, row)) for row in range(2)]
        for row, cache in enumerate(alone):
            model(encoder_outputs=encoded[row], decoder_input_ids=prompt(1, (2, 5)[row], row), **given(cache))
        batch = kvlayers.merge(alone)
        both = type(encoded[0])(torch.cat([own.last_hidden_state for own in encoded]))
        for step in range(4):
            new = prompt(2, 1, step)
            mask = kvlayers.Rows(batch).attention_mask()
            logits = model(
                encoder_outputs=both, decoder_input_ids=new, decoder_attention_mask=mask, **given(batch)
            ).logits
            for row, cache in enumerate(alone):
                expected = model(
                    encoder_outputs=encoded[row], decoder_input_ids=new[row : row + 1], **given(cache)
                ).logits
                torch.testing.assert_close(logits[row : row + 1], expected, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("columns", [3, 4, 7])
def test_masks_of_other_columns_than_the_longest_row_are_refused(columns: int) -> None:
    states = RowStates([torch.randn(1, 2, tokens, 8) for tokens in (3, 5)])
    mask = torch.ones(2, 1, 1, columns, dtype=torch.bool)
    with pytest.raises(RuntimeError, match="must match the size"):
        torch.nn.functional.scaled_dot_product_attention(torch.randn(2, 2, 1, 8), states, states, mask)


def test_copies_of_rows_with_an_axis_of_their_own_multiply() -> None:
    rows = [torch.randn(1, 2, tokens, 8) for tokens in (3, 5)]
    values = RowStates(rows)[:, :, None].expand(2, 2, 2, 5, 8)
    weights = torch.rand(2, 2, 2, 1, 5)
    weights[0, ..., :2] = 0
    padded = torch.cat([torch.nn.functional.pad(row, (0, 0, 5 - row.shape[2], 0)) for row in rows])
    expected = torch.matmul(weights, padded[:, :, None].expand(2, 2, 2, 5, 8))
    torch.testing.assert_close(torch.matmul(weights, values), expected)


# Updates that stop between two rows, and copies

PROMPTS = (prompt(1, 10, 1), prompt(1, 5, 0))
ROW_BY_ROW = ("static", "int4", "offloaded")
TOLERANCE = {"rtol": 0, "atol": 2e-4}
"""The same sums in another order of float32."""


def merged(cache: str, family: str = "llama") -> tuple[Any, Any]:
    """A model, and rows that have read the prompts."""
    model = tiny_model(family)
    return model, kvlayers.merge([read(model, ids, CACHES[cache](model.config))[0] for ids in PROMPTS])


@torch.no_grad()
def check_steps(model: Any, cache: Any, steps: int = 4) -> None:
    """Decode, and compare with the model without a cache."""
    texts = [ids[0] for ids in PROMPTS]
    for number in range(steps):
        new = prompt(2, 1, 10 + number)
        texts = [torch.cat([text, own]) for text, own in zip(texts, new, strict=True)]
        expected = torch.stack([model(text[None], use_cache=False).logits[0, -1] for text in texts])
        torch.testing.assert_close(row_logits(model, cache, new)[:, -1], expected, **TOLERANCE)


def interrupted(*args: object, **kwargs: object) -> None:
    raise KeyboardInterrupt


def interrupt(model: Any, rows: Any, layer: Any, row: int, method: str = "update") -> None:
    """Take a step that stops in the layer of one row."""
    setattr(layer.rows[row], method, interrupted)
    with pytest.raises(KeyboardInterrupt):
        row_logits(model, rows, prompt(2, 1, 9))
    delattr(layer.rows[row], method)


@pytest.mark.parametrize(("cache", "row"), once(ROW_BY_ROW, [0, 1], times=2))
def test_an_update_that_stops_in_the_first_layer_has_not_happened(cache: str, row: int) -> None:
    model, rows = merged(cache)
    interrupt(model, rows, rows.layers[0], row)
    assert interruption(rows) is None
    assert all(layer.row_lengths == (10, 5) for layer in rows.layers)
    fork, kept, alone = rows.fork(), rows.fork(), rows.extract(0)
    kept.keep_rows([0, 1])
    assert alone.get_seq_length() == 10
    # The model asks for the size of its mask before it updates the layer. The longest row may be ahead.
    assert fork.get_mask_sizes(1, 0) == (11, 0)
    for own in (rows, fork, kept):
        check_steps(model, own)


@pytest.mark.parametrize(("cache", "in_pair"), once(ROW_BY_ROW, [False, True]))
def test_a_loop_over_update_repeats_what_was_interrupted(cache: str, in_pair: bool) -> None:
    _, rows = merged(cache)
    if in_pair:
        rows = kvlayers.EncoderDecoderCache(rows, merged("dynamic")[1]).self_attention_cache
    layer, expected = rows.layers[0], [rows.extract(row) for row in range(2)]
    states = torch.randn(2, 2, 1, 8)
    layer.rows[1].update = interrupted
    with pytest.raises(KeyboardInterrupt):
        rows.update(states + 1, states + 1, 0)
    del layer.rows[1].update
    rows.update(states, states, 0)
    assert layer.row_lengths == (11, 6)
    for row, alone in enumerate(expected):
        alone.update(states[row : row + 1], states[row : row + 1], 0)
        torch.testing.assert_close(layer.row(row).keys, alone.layers[0].keys, rtol=0, atol=0)


@pytest.mark.parametrize("cache", ROW_BY_ROW)
def test_one_that_stops_in_the_last_layer_is_noticed(cache: str) -> None:
    model, rows = merged(cache)
    interrupt(model, rows, rows.layers[-1], 1)
    assert interruption(rows) is not None
    with pytest.raises(InterruptedPassError):
        rows.get_seq_length()
    rows.crop_rows([10, 5])
    check_steps(model, rows)


@pytest.mark.parametrize(
    ("family", "cache", "method"),
    [
        ("mistral", "int4", "update"),
        *((family, "dynamic", "update_conv_state") for family in ("mamba", "jamba")),
    ],
)
def test_rows_that_cannot_be_put_back_are_refused_by_name(family: str, cache: str, method: str) -> None:
    model, rows = merged(cache, family)
    layer = next(layer for layer in rows.layers if layer.traits.is_recurrent or family == "mistral")
    interrupt(model, rows, layer, 1, method)
    for own in (rows, rows.fork(), pickle.loads(pickle.dumps(rows))):
        for use in (lambda held: row_logits(model, held, prompt(2, 1, 9)), lambda held: held.extract(0)):
            with pytest.raises(InterruptedPassError, match="between two rows"):
                use(own)
    with pytest.raises(InterruptedPassError, match="between two rows"):
        rows.keep_rows([1])
    rows.reset()
    assert interruption(rows) is None


@pytest.mark.parametrize("offloading", [False, True])
def test_a_full_row_leaves_all_rows_as_they_were(offloading: bool) -> None:
    model = tiny_model("llama")
    caches = [kvlayers.StaticCache(model.config, max_cache_len=most, offloading=offloading) for most in (40, 5)]
    rows = kvlayers.merge([read(model, ids, own)[0] for ids, own in zip(PROMPTS, caches, strict=True)])
    states = torch.randn(2, 2, 1, 8)
    with pytest.raises(CapacityError):
        rows.update(states, states, 0)
    assert all([row.length for row in layer.rows] == [10, 5] for layer in rows.layers)
    rows.keep_rows([0])
    ids = prompt(1, 1, 9)
    expected = read(model, torch.cat([PROMPTS[0], ids], dim=1))[1][:, -1]
    torch.testing.assert_close(row_logits(model, rows, ids)[:, -1], expected, **TOLERANCE)


COPIES: dict[str, Callable[[Any], Any]] = {
    "pickle": lambda cache: pickle.loads(pickle.dumps(cache)),
    "deepcopy": copy.deepcopy,
    "process": lambda cache: pickle.loads(multiprocessing.reduction.ForkingPickler.dumps(cache)),
    "extracted": lambda cache: kvlayers.merge([COPIES["pickle"](cache.extract(row)) for row in range(2)]),
    "with its fork": lambda cache: pickle.loads(pickle.dumps([cache, cache.fork()]))[1],
}


@pytest.mark.parametrize(
    ("family", "cache", "how"),
    once(
        [*(("llama", cache) for cache in ("dynamic", *ROW_BY_ROW)), ("mamba", "dynamic"), ("jamba", "dynamic")],
        COPIES,
        times=2,
    ),
)
def test_a_copy_goes_on_as_the_rows_do(family: str, cache: str, how: str) -> None:
    model, rows = merged(cache, family)
    copied = COPIES[how](rows)
    check_steps(model, copied)
    # What the copy has read does not show in the original.
    check_steps(model, rows)


def test_a_pickled_copy_of_rows_that_one_has_joined_goes_on() -> None:
    """The layer that held the others before is no part of it: it would take their recurrent states back."""
    model = fresh_model("mamba")
    empty = kvlayers.DynamicCache(config=model.config)
    rows = [read(model, prompt(1, tokens, tokens), empty.fork())[0] for tokens in (3, 5, 4)]
    cache = kvlayers.merge(rows[:2])
    cache.extend(rows[2])
    copied = pickle.loads(pickle.dumps(cache))
    for seed in range(3):
        new = prompt(3, 1, seed)
        assert torch.equal(row_logits(model, copied, new), row_logits(model, cache, new))


# Drafts for several prompts: each row goes on with what it accepts


def padded_prompts() -> tuple[Tensor, Tensor]:
    """Prompts that repeat themselves, of which two are padded on the left, and their mask."""
    ids = torch.cat([prompt(4, 6, 1)] * 3, 1)
    mask = torch.ones_like(ids)
    mask[0, :4] = mask[2, :9] = 0
    return ids.masked_fill(mask == 0, 0), mask


def generated(model: Any, **how: Any) -> Any:
    ids, mask = padded_prompts()
    options = {"attention_mask": mask, "return_dict_in_generate": True, **how}
    return under_install(continued, model, ids, 14, **options)


DRAFTS: dict[str, Callable[[], dict[str, Any]]] = {
    "look-up": lambda: {"prompt_lookup_num_tokens": 3},
    "draft model": lambda: {"assistant_model": tiny_model("llama", 1)},
    "its own draft model": lambda: {"assistant_model": fresh_model("llama")},
}


HOW: list[dict[str, Any]] = [
    {},
    {"repetition_penalty": 1.3},
    {"no_repeat_ngram_size": 2},
    {"cache_implementation": "int4"},
    {"cache_implementation": "static"},
    {"cache_implementation": "offloaded"},
    {"eos_token_id": [5, 7, 11, 13, 17, 23, 29, 31, 37, 41]},
]


@pytest.mark.parametrize(
    ("family", "drafts", "how"),
    [
        *once(["llama"], DRAFTS, HOW),
        ("llama", "look-up", {"num_return_sequences": 2, "do_sample": True, "top_k": 1}),
        ("llama", "its own draft model", {}),
        # Windows, latents and absolute positions are rolled back by row.
        *((family, "look-up", {}) for family in ("gemma3", "mistral", "deepseek_v3", "gpt2")),
    ],
    ids=str,
)
def test_a_batch_with_drafts_has_the_tokens_of_plain_decoding(family: str, drafts: str, how: dict[str, Any]) -> None:
    model = tiny_model(family)
    with passes_of(model) as passes:
        expected = generated(model, **how)
        plain = len(passes)
        output = generated(model, **how, **DRAFTS[drafts]())
    assert torch.equal(output.sequences, expected.sequences)
    if (drafts, how) == ("its own draft model", {}):
        # Nearly every draft is accepted.
        assert len(passes) - plain < plain


def test_the_cache_goes_on_behind_the_answer() -> None:
    model = tiny_model("llama")
    cache, ids = kvlayers.DynamicCache(config=model.config), padded_prompts()[0][[1, 3]]
    first = under_install(continued, model, ids, 6, past_key_values=cache, prompt_lookup_num_tokens=3)
    assert cache.row_lengths == (first.shape[1] - 1,) * 2
    again = under_install(continued, model, first, 4, past_key_values=cache)
    assert torch.equal(again, continued(model, ids, 10))


def test_what_rows_have_seen_is_known_whatever_padding_they_had_and_wherever_they_ended() -> None:
    """A further turn drops the padding that all rows have, and rows that have ended before others begin later."""
    model = tiny_model("llama")
    ids, mask = (each[[0, 2]] for each in padded_prompts())
    plain = model.generate(ids, attention_mask=mask, max_new_tokens=14, do_sample=False)
    for ends in (None, plain[1, -14 + 3].item()):
        cache = kvlayers.DynamicCache(config=model.config)
        asked = {"do_sample": False, "eos_token_id": ends, "pad_token_id": 0, "past_key_values": cache}
        with kvlayers.installed(strict_prompts=True):
            first = model.generate(ids, attention_mask=mask, max_new_tokens=14, prompt_lookup_num_tokens=3, **asked)
            rows = [
                own[padding:][: length + 1]
                for own, padding, length in zip(first, (4, 9), cache.row_lengths, strict=True)
            ]
            turn = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_side="left")
            turn = torch.cat([turn, prompt(2, 3)], 1)
            seen = torch.tensor([[3 + len(own)] for own in rows])
            turn_mask = (torch.arange(turn.shape[1]) >= turn.shape[1] - seen).long()
            other = turn.clone()
            other[1, -8] += 1
            with pytest.raises(PromptMismatchError, match="of sequence 1"):
                model.generate(other, attention_mask=turn_mask, max_new_tokens=4, **asked)
            again = model.generate(turn, attention_mask=turn_mask, max_new_tokens=4, **asked)
        del asked["past_key_values"]
        assert torch.equal(again, model.generate(turn, attention_mask=turn_mask, max_new_tokens=4, **asked))


@pytest.mark.slow
@pytest.mark.parametrize("drafts", ["look-up", "draft model"])
def test_samples_with_drafts_are_distributed_as_without(drafts: str) -> None:
    model, ids = tiny_model("llama"), torch.tensor([[3, 4, 5, 3, 4], [6, 7, 8, 6, 7]]).repeat_interleave(150, 0)
    how: dict[str, Any] = {"do_sample": True, "top_k": 3, "temperature": 2.0}
    counts: list[Counter[Any]] = []
    for each in ({}, DRAFTS[drafts]()):
        torch.manual_seed(0)
        samples = under_install(continued, model, ids, 3, **how, **each)
        counts.append(Counter(map(tuple, samples[:, 5:].tolist())))
    # Two samples of one distribution: the statistic has as many degrees of freedom as kinds of answers less one.
    kinds = counts[0] | counts[1]
    statistic = sum((counts[0][kind] - counts[1][kind]) ** 2 / (counts[0][kind] + counts[1][kind]) for kind in kinds)
    freedom = len(kinds) - 1
    # Six standard deviations.
    assert statistic < freedom + 6 * (2 * freedom) ** 0.5


ALONE = "must come with a mask alone"


@pytest.mark.parametrize(
    ("family", "asked", "named"),
    [
        ("llama", {"output_scores": True}, "`output_scores"),
        ("llama", {"output_hidden_states": True}, "`output_hidden"),
        ("llama", {"prefix_allowed_tokens_fn": lambda row, ids: [row + 5]}, ALONE),
        ("llama", {"inputs_embeds": torch.zeros(4, 18, 32)}, ALONE),
        ("llama", {"position_ids": torch.arange(18).expand(4, 18)}, ALONE),
        ("jamba", {}, "cannot be assisted|leave out the assistance"),
    ],
    ids=lambda each: next(iter(each), "") if isinstance(each, dict) else "",
)
def test_what_rows_with_drafts_do_not_take_is_refused(family: str, asked: dict[str, Any], named: str) -> None:
    with pytest.raises((OptionError, RollbackError, ValueError), match=named):
        generated(tiny_model(family), prompt_lookup_num_tokens=3, **asked)


def test_a_turn_behind_padded_rows_is_refused_rather_than_answered_wrongly() -> None:
    model = tiny_model("llama")
    first = generated(model, prompt_lookup_num_tokens=3, max_new_tokens=4)
    with pytest.raises(StateMismatchError, match="`attention_mask` must have the tokens of each row"):
        under_install(continued, model, first.sequences, 2, past_key_values=first.to_tuple()[-1])


def test_windows_forget_what_they_have_recorded_for_drafts() -> None:
    model = tiny_model("mistral")
    cache = kvlayers.DynamicCache(config=model.config)
    ids = padded_prompts()[0][[1, 3]]
    under_install(continued, model, ids, 40, past_key_values=cache, assistant_model=model)
    assert max(layer.held_tokens for layer in cache.layers) < 30


def test_no_address_is_given_of_rows_and_nothing_is_written_to_them() -> None:
    cache = kvlayers.merge([dynamic(tokens=3), dynamic(tokens=2)])
    keys, _ = cache.update(torch.ones(2, 2, 1, 8), torch.ones(2, 2, 1, 8), 0)
    with pytest.raises(ReadOnlyStatesError):
        keys.mul_(2)
    with pytest.raises(UnsupportedLayerError, match="no address"):
        keys.data_ptr()


@pytest.mark.parametrize("limit", ["positions", "room"])
def test_the_draft_of_another_row_needs_no_room_behind_a_row_that_has_one_token_left(limit: str) -> None:
    """A table of positions that ends with the answers, and a reservation that does."""
    model = fresh_model("gpt2", n_positions=40) if limit == "positions" else fresh_model("llama")
    for seed in range(3):
        ids = torch.cat([prompt(2, 5, seed=seed)] * 4, dim=1)
        ids[1, 3] = 50
        expected = continued(model, ids, 20)
        for drafted in (3, 10):
            static = kvlayers.StaticCache(model.config, max_cache_len=39)
            room = {} if limit == "positions" else {"past_key_values": static}
            seen = under_install(continued, model, ids, 20, prompt_lookup_num_tokens=drafted, **room)
            assert torch.equal(seen, expected)
