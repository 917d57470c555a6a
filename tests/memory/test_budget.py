"""A cache within a budget: exact while it lasts, never beyond it, and never worse than the bits that it ends with."""

import dataclasses
import itertools
import logging
import sys
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers as tf

import families
import kvlayers
from kvlayers import CapacityError, DynamicCache, OptionError, QuantizedCache, quantizers
from kvlayers.core.buffer import TokenBuffer
from kvlayers.kernels.attention.packed_tensor import as_dense
from models import fresh_model
from models import read as read_by_model

LAYERS, HEADS, HEAD_DIM, TOKENS, WINDOW = 3, 2, 64, 800, 400
TOKEN_BYTES = LAYERS * 2 * HEADS * HEAD_DIM * 4
BLOCK_BYTES = 64 * 2 * HEADS * HEAD_DIM * 4
RUN_BYTES = HEADS * HEAD_DIM * 4
"""Of the vectors that smooth the keys of a run of blocks, of which a layer has eight at most."""
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
    "one token at a time": [500, *[1] * (TOKENS - 500)],
    "in turns": [300, 1, 1, 200, 1, 200, 97],
    "at once": [TOKENS],
}


def config_of(kind: str = "llama", window: int = WINDOW) -> Any:
    if kind != "windows":
        return tf.LlamaConfig(**SMALL)
    types = ["sliding_attention", "full_attention", "sliding_attention"]
    return tf.Gemma3TextConfig(**SMALL, sliding_window=window, layer_types=types)


def model_of(kind: str = "llama") -> Any:
    torch.manual_seed(0)
    return tf.AutoModelForCausalLM.from_config(config_of(kind)).eval()


def states(tokens: int, batch: int = 1, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    keys, values = (torch.randn(batch, HEADS, tokens, HEAD_DIM, generator=generator) for _ in range(2))
    return keys, values


def exact_tokens(cache: Any) -> list[int]:
    return [layer.length - layer.exact_from for layer in cache.layers]


@torch.no_grad()
def read(cache: Any, chunks: list[int]) -> int:
    """Pass tokens to each layer; returns the most bytes that the cache has held meanwhile."""
    most = 0
    for tokens in chunks:
        position, batch = cache.get_seq_length(), max(cache.batch_size, 1)
        for index in range(LAYERS):
            cache.update(*states(tokens, batch, 7 * position + index), index)
            if tokens > 1 or index == LAYERS - 1:
                most = max(most, cache.nbytes)
    return most


def bits_of(cache: Any) -> list[int]:
    """Bits of each layer, 0 of one that is exact."""
    return [layer.bits[0] if layer.bits else 0 for layer in cache.layers]


def check_states(cache: Any, full: Any, off: float) -> None:
    """What a cache says is exact is what one without a budget holds, and its other states are not further off."""
    for own, other in zip(cache.layers, full.layers, strict=True):
        for side, exact in zip(map(as_dense, own.peek()), map(as_dense, other.peek()), strict=True):
            tokens = min(side.shape[2], exact.shape[2])
            for newest, difference in ((tokens, off), (min(own.length - own.exact_from, tokens), 0.0)):
                torch.testing.assert_close(side[:, :, -newest:], exact[:, :, -newest:], rtol=0, atol=difference)


def least_bytes(cache: Any, tokens: int) -> tuple[int, str]:
    """The bytes that a pass would have had to be allowed, and the error that names them."""
    with pytest.raises(CapacityError) as caught:
        read(cache, [tokens])
    message = str(caught.value)
    return int(message.partition("(")[2].partition(" bytes")[0]), message


MAKERS: dict[str, Callable[..., Any]] = {
    "dynamic": lambda **options: DynamicCache(config=config_of(), **options),
    "dynamic without a config": lambda **options: DynamicCache(**options),
    "quantized": lambda **options: QuantizedCache(config=config_of(), **options),
}


CASES = [("dynamic", share, chunks) for share in (1.0, 0.6, 0.43, 0.39) for chunks in CHUNKS]
CASES += [(kind, share, "in turns") for kind in list(MAKERS)[1:] for share in (1.0, 0.6, 0.39)]


@pytest.mark.parametrize(("kind", "share", "chunks"), CASES)
def test_bytes_stay_within_the_budget(kind: str, share: float, chunks: str) -> None:
    budget = int(TOKENS * TOKEN_BYTES * share)
    cache, full = MAKERS[kind](max_bytes=budget), DynamicCache()
    most = read(cache, CHUNKS[chunks])
    assert most <= budget + LAYERS * BLOCK_BYTES
    assert cache.nbytes <= budget
    read(full, CHUNKS[chunks])
    check_states(cache, full, 0.5)
    for own, other in zip(cache.layers, full.layers, strict=True):
        assert own.length == TOKENS
        # Sinks.
        assert torch.equal(as_dense(own.peek()[0])[:, :, :16], other.peek()[0][:, :, :16])
    # No more is rounded than must be.
    room = budget - TOKENS * TOKEN_BYTES * 9 / 32
    assert min(exact_tokens(cache)) >= min(room / (TOKEN_BYTES * 23 / 32) - 3 * 64 - TOKENS / 16, TOKENS)
    assert share < 1 or cache.layers[0].fidelity == "exact" or kind == "quantized"


@pytest.mark.parametrize("chunks", [[400], [300, *[1] * 100], [50, 1, 50, *[1] * 150, 149]], ids=len)
@pytest.mark.parametrize("hint", [None, 100, 400, 5000])
@pytest.mark.parametrize("kind", [*MAKERS, "windows"])
def test_it_is_exact_to_the_last_token_that_fits(kind: str, hint: int | None, chunks: list[int]) -> None:
    """Whatever was expected, in buffers that grow no further, and in windows that lose tokens meanwhile."""
    window = 100 + 100 // 4 - 1
    budget = (400 + 2 * window if kind == "windows" else LAYERS * 400) * TOKEN_BYTES // LAYERS
    hints = {} if kind == "dynamic without a config" else {"length_hint": hint}
    cache = (
        DynamicCache(config=config_of(kind, 100), max_bytes=budget, **hints)
        if kind == "windows"
        else MAKERS[kind](max_bytes=budget, **hints)
    )
    assert read(cache, chunks) <= budget
    assert [layer.exact_from for layer in cache.layers] == [0] * LAYERS
    assert cache.budget.note == "all tokens are exact"
    assert read(cache, [1]) <= budget
    assert cache.layers[1].exact_from > 0


@pytest.mark.parametrize("chunks", [[784], [300, *[1] * 484], [100, 300, 200, 1, 1, 182]], ids=len)
@pytest.mark.parametrize("share", [0.8, 0.7, 0.5, 0.4, 0.36])
def test_windows_stay_within_the_budget(share: float, chunks: list[int]) -> None:
    """Also one that is full again after it lost tokens, and one that packs a pass before it loses them."""
    budget = int(784 * TOKEN_BYTES * share)
    cache, full = (DynamicCache(config=config_of("windows"), **given) for given in ({"max_bytes": budget}, {}))
    assert read(cache, chunks) <= budget
    assert (min(bits_of(cache)), max(bits_of(cache))) in {0.8: [(0, 0)], 0.7: [(8, 8)], 0.5: [(8, 8)]}.get(
        share, [(4, 8), (4, 4)]
    )
    read(full, chunks)
    check_states(cache, full, 1.0)


def test_windows_stay_within_the_budget_that_begin_to_record_when_they_are_full() -> None:
    cache = DynamicCache(config=config_of("windows", 100), max_bytes=(300 + 2 * 124) * TOKEN_BYTES // LAYERS)
    read(cache, [90, *[1] * 60])
    cache.activate_past_recording()
    assert read(cache, [1] * 10) <= cache.budget.max_bytes
    with pytest.raises(CapacityError):
        read(cache, [1] * 200)
    assert cache.nbytes <= cache.budget.max_bytes


def test_a_first_pass_that_does_not_fit_leaves_nothing_in_layers_that_have_begun_it() -> None:
    """Without a config nobody knows how many there are, and recurrent layers ask no budget."""
    cache = DynamicCache(max_bytes=2 * 100 * TOKEN_BYTES // LAYERS)
    assert least_bytes(cache, 150)[0] == 2 * 150 * TOKEN_BYTES // LAYERS
    assert cache.most_seen() == 0
    read(cache, [50])
    assert [layer.length for layer in cache.layers] == [50] * LAYERS
    model = families.model_of("lfm2")
    cache = DynamicCache(config=model.config, max_bytes=20_000)
    with pytest.raises(CapacityError):
        read_by_model(model, torch.ones(1, 500, dtype=torch.int64), cache)
    assert cache.most_seen() == 0
    read_by_model(model, torch.ones(1, 5, dtype=torch.int64), cache)
    assert cache.most_seen() == 5


@pytest.mark.parametrize("narrow", [1, 2])
def test_layers_narrow_from_the_first_on_and_none_before_it_must(narrow: int) -> None:
    """Residuals are full at so many tokens, and there must be room for one block more."""
    tokens = 16 + 128 + 64 + 9 * 64
    bits = [4] * narrow + [8] * (LAYERS - narrow)
    reference = QuantizedCache(config=config_of(), nbits=bits)
    read(reference, [tokens + 64])
    least = reference.nbytes + LAYERS * 7 * RUN_BYTES
    for max_bytes, expected in ((least, bits), (least - 1, [4] * (narrow + 1) + [8] * (LAYERS - narrow - 1))):
        cache = DynamicCache(config=config_of(), max_bytes=max_bytes)
        read(cache, [tokens])
        assert bits_of(cache) == expected
        assert exact_tokens(cache) == [192] * LAYERS
        in_8, in_4 = expected.count(8), expected.count(4)
        eights = [f"8 bits in {in_8} of 3 layers"] if in_8 else []
        layers = ", ".join([*eights, f"4 bits in {in_4} of 3 layers"])
        assert cache.budget.note == f"at least the newest 128 tokens stay exact, and older ones have {layers}"
    # Layers that have fewer bits count with these: the same bytes suffice for the next tokens.
    cache = DynamicCache(config=config_of(), max_bytes=least)
    read(cache, [500, tokens - 500])
    assert bits_of(cache) == bits
    cache.crop(600)
    read(cache, [1])
    assert bits_of(cache) == bits
    assert f"4 bits in {narrow} of 3 layers" in cache.budget.note


def test_the_newest_tokens_that_fit_stay_exact() -> None:
    """As many as can be beside codes of 8 bits, to the byte."""
    tokens, kept = 16 + 320 + 64 + 6 * 64, 320
    reference = QuantizedCache(config=config_of(), nbits=8, residual_length=kept)
    read(reference, [tokens + 64])
    least = reference.nbytes + LAYERS * RUN_BYTES * 6
    for fewer, expected in ((0, kept), (1, kept - 64)):
        cache = DynamicCache(config=config_of(), max_bytes=least - fewer)
        read(cache, [tokens])
        assert {layer.store.kept for layer in cache.layers} == {expected}


def test_what_beams_share_counts_once_until_it_is_rounded() -> None:
    budget = (400 + 4 * 60) * TOKEN_BYTES
    cache = DynamicCache(config=config_of(), max_bytes=budget, length_hint=400)
    wider, full = (DynamicCache(config=config_of(), max_bytes=most) for most in (1200 * TOKEN_BYTES, 10**9))
    for each in (cache, wider, full):
        read(each, [400])
        each.expand(4)
    assert read(cache, [1] * 60) <= budget
    assert [layer.exact_from for layer in cache.layers] == [0] * LAYERS
    with pytest.raises(CapacityError, match="`max_bytes` must be at least"):
        read(cache, [1])
    for each in (wider, full):
        read(each, [200])
    assert wider.nbytes <= 1200 * TOKEN_BYTES
    assert wider.layers[0].exact_from > 0
    check_states(wider, full, 0.5)


def test_rows_share_the_budget_and_the_longest_keeps_more_than_others_have() -> None:
    """Also if they stood side by side in one tensor while all of them were exact."""
    budget = 1000 * TOKEN_BYTES
    alone = [DynamicCache(config=config_of(), max_bytes=budget) for _ in range(2)]
    for cache, tokens in zip(alone, (700, 60), strict=True):
        read(cache, [tokens])
    rows = kvlayers.merge(alone)
    read(rows, [1] * 40)
    assert {layer.fidelity for layer in rows.layers} == {"exact"}
    assert read(rows, [1] * 130) <= budget
    longest = rows.adapted_layers()[0].separate_rows[0]
    assert 128 + 2 * 64 < longest.length - longest.exact_from < 870


def test_a_row_that_cannot_be_coded_counts_as_it_is() -> None:
    """Also one that autograd follows: what it holds is never rounded."""
    for dtype in (torch.float64, torch.float32):
        cache = DynamicCache(max_bytes=300 * TOKEN_BYTES * dtype.itemsize // 4)
        for tokens, index in [(200, 0), (200, 1), (200, 2), (90, 0), (90, 1), (90, 2)]:
            keys, values = (side.to(dtype) for side in states(tokens))
            cache.update(keys.requires_grad_(dtype == torch.float32), values, index)
        with pytest.raises(CapacityError, match=r"301 tokens|340 tokens"):
            cache.update(*(side.to(dtype) for side in states(50)), 0)
        assert [layer.fidelity for layer in cache.layers] == ["exact"] * LAYERS
        assert {layer.length for layer in cache.layers} == {290}


def test_layers_of_other_forms_count_by_their_own() -> None:
    cache = DynamicCache(config=config_of(), max_bytes=400 * TOKEN_BYTES * 4 // 3)

    def step(tokens: int) -> None:
        for index in range(LAYERS):
            keys, values = states(tokens, seed=index)
            cache.update(
                *((keys.repeat(1, 2, 1, 1), values.repeat(1, 2, 1, 1)) if index == 1 else (keys, values)), index
            )

    with torch.no_grad():
        # The forms of layers that hold nothing are taken for those of the first one.
        for tokens in [100, *[1] * 300]:
            step(tokens)
        assert [layer.exact_from for layer in cache.layers] == [0] * LAYERS
        assert cache.nbytes <= cache.budget.max_bytes
        step(1)
    assert cache.nbytes <= cache.budget.max_bytes
    assert cache.layers[0].exact_from > 0


STEPS: dict[str, dict[str, Any]] = {
    "exact": {"max_bytes": 10**8},
    "exact, with a hint": {"max_bytes": 10**8, "length_hint": 2000},
    "rounded": {"max_bytes": 550 * TOKEN_BYTES},
    "beside a layer that cannot give way": {"max_bytes": 10**8},
    "on the host": {"max_bytes": 200 * TOKEN_BYTES, "ladder": ("offloaded",)},
}


@pytest.mark.parametrize("case", STEPS)
def test_steps_ask_the_budget_nothing_that_is_known(case: str, accelerator: None) -> None:
    """Calls within the room of budgets, of 60 tokens behind 600 others: a comparison each, and the layers seldom."""
    cache = DynamicCache(config=config_of(), **STEPS[case])
    if "beside" in case:
        cache.layers[1] = kvlayers.StaticLayer(TOKENS)
    calls = 0

    def count(frame: Any, event: str, argument: object) -> None:
        nonlocal calls
        calls += event == "call" and frame.f_code.co_filename.endswith("memory/budget.py")

    def counted(chunks: list[int]) -> int:
        nonlocal calls
        calls = 0
        sys.setprofile(count)
        try:
            read(cache, chunks)
        finally:
            sys.setprofile(None)
        return calls

    # Layers are asked once in the first pass, with some numbers of tokens that may fit.
    assert LAYERS - 1 < counted([600]) < 700
    read(cache, [1] * 4)
    assert counted([1] * 60) <= 60 * (20 if case == "rounded" else 1)


def test_many_tokens_are_planned_ahead_of_many() -> None:
    """A thirty-second part of the tokens, so that residuals of long contexts are not moved for each block."""
    cache = DynamicCache(max_bytes=3000 * TOKEN_BYTES)
    read(cache, [6400, 1])
    kept = {layer.store.kept for layer in cache.layers}
    # Codes of 200 tokens take as much as 78 exact ones do beside theirs, which is more than a block.
    read(cache, [1] * 190)
    assert {layer.store.kept for layer in cache.layers} == kept
    read(cache, [1] * 64)
    assert {layer.store.kept for layer in cache.layers} != kept
    assert cache.nbytes <= 3000 * TOKEN_BYTES


@pytest.mark.parametrize("share", [0.62, 0.7, 0.8, 0.9])
def test_chunks_that_windows_pack_before_they_lose_tokens_count(share: float) -> None:
    """A chunk nearly as long as the window is packed behind it, and the memory of its blocks stays."""
    config = tf.MistralConfig(**SMALL, sliding_window=WINDOW)
    cache = DynamicCache(config=config, max_bytes=int(499 * TOKEN_BYTES * share))
    assert read(cache, [400, 390, *[20] * 16, *[1] * 40]) <= cache.budget.max_bytes


@pytest.mark.parametrize("chunk", [5, 20])
@pytest.mark.parametrize("window", [32, 48])
def test_a_chunk_that_packed_windows_take_beside_what_leaves_them_stays_within_the_budget(
    window: int, chunk: int
) -> None:
    """A window that has not packed a block holds both for a while, which are more tokens than it has room for."""
    config = config_of("windows", window)
    full = DynamicCache(config=config)
    read(full, [200, *[1] * 64])
    budget = int(full.nbytes * 0.8)
    cache = DynamicCache(config=config, max_bytes=budget)
    assert read(cache, [200, *[1] * 63]) <= budget
    assert cache.layers[0].bits
    assert read(cache, [chunk, 1, 1] * 2) <= budget


def test_the_least_bytes_of_windows_are_those_of_full_ones_without_sinks() -> None:
    """Room for 499 tokens in windows of 400: the residual of 192 tokens, and 5 blocks with vectors of their own."""
    fewer, more = (QuantizedCache(config=config_of(), nbits=8) for _ in range(2))
    read(fewer, [784])
    read(more, [848])
    windows = tf.MistralConfig(**SMALL, sliding_window=WINDOW)
    least, _ = least_bytes(DynamicCache(config=windows, max_bytes=1, ladder=("int8",)), 784)
    assert least == 192 * TOKEN_BYTES + 5 * (more.nbytes - fewer.nbytes + LAYERS * RUN_BYTES)


def test_a_buffer_grows_as_without_a_budget_while_there_is_room() -> None:
    for kind in ("dynamic", "dynamic without a config"):
        cache, plain = MAKERS[kind](max_bytes=10**9), MAKERS[kind]()
        for each in (cache, plain):
            read(each, [300, 1, 1])
        # Without a config, no room is taken for further tokens before all layers are known.
        assert 0 <= cache.nbytes - plain.nbytes <= (TOKEN_BYTES if kind != "dynamic" else 0)


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
    budget = 825 * TOKEN_BYTES
    cache, full = DynamicCache(max_bytes=budget), DynamicCache()
    for each in (cache, full):
        read(each, [900])
    change = OPERATIONS[operation]
    cache, full = change(cache) or cache, change(full) or full
    batch = full.batch_size
    for each in (cache, full):
        read(each, [1] * 150)
    assert cache.nbytes <= budget + batch * LAYERS * BLOCK_BYTES
    assert all(128 <= kept < layer.length for kept, layer in zip(exact_tokens(cache), cache.layers, strict=True))
    check_states(cache, full, 0.5)


@pytest.mark.parametrize(("tokens", "room"), [(21, 240), (300, 700)])
def test_room_behind_repeated_sequences_is_given_back_before_tokens_are_rounded_or_refused(
    tokens: int, room: int
) -> None:
    """Each sequence has the room for further tokens that the first one had, and twice as many tokens would fit."""
    cache, full = DynamicCache(config=config_of(), max_bytes=room * TOKEN_BYTES), DynamicCache(config=config_of())
    for each in (cache, full):
        read(each, [1] * tokens)
        each.batch_repeat_interleave(2)
    assert cache.nbytes > room * TOKEN_BYTES
    more = room // 2 - tokens
    assert read(cache, [1] * more) <= room * TOKEN_BYTES
    read(full, [1] * more)
    assert exact_tokens(cache) == [room // 2] * LAYERS
    check_states(cache, full, 0)
    # The next token of each sequence has no room in full precision.
    if tokens > 208:
        assert read(cache, [1, 1]) <= room * TOKEN_BYTES
        assert min(bits_of(cache)) == 8
    else:
        with pytest.raises(CapacityError, match="max_bytes"):
            read(cache, [1])


def test_a_backend_that_is_registered_again_counts_by_its_new_blocks() -> None:
    """Nothing is kept by its name."""
    most = []
    for name in ("own", "once", "own"):

        class Own(type(quantizers.backend("native"))):  # type: ignore[misc]
            tokens = 128 if most else 32

            def quantizer(self, options: Any, head_dim: int) -> Any:
                size = self.tokens if options.side == "keys" else None
                return super().quantizer(dataclasses.replace(options, group_size=size), head_dim)

        quantizers.register_quantizer(name)(Own)
        try:
            cache = QuantizedCache(name, config=config_of(), max_bytes=int(TOKENS * TOKEN_BYTES * 0.6))
            read(cache, [TOKENS, 1])
            most.append((cache.nbytes, exact_tokens(cache)))
        finally:
            quantizers.unregister_quantizer(name)
    assert most[2] == most[1] != most[0]


def test_a_fork_has_a_budget_of_its_own_and_all_is_exact_again_after_a_reset() -> None:
    cache = DynamicCache(max_bytes=600 * TOKEN_BYTES)
    read(cache, [500])
    fork = cache.fork()
    for each, tokens, fidelity in ((cache, 400, "rounded"), (fork, 50, "exact")):
        read(each, [tokens])
        assert each.layers[0].fidelity == fidelity
    for each in (cache, fork):
        each.reset()
        read(each, [300, 1, 200])
        assert [layer.exact_from for layer in each.layers] == [0] * LAYERS
        # The fork, which follows, does not give way.
        cache.give_way()


@pytest.mark.parametrize("cropped", [None, 100])
@pytest.mark.parametrize("goes_first", ["cache", "fork"])
def test_what_forks_share_is_within_the_budget_of_each(goes_first: str, cropped: int | None) -> None:
    budget = 600 * TOKEN_BYTES
    cache = DynamicCache(max_bytes=budget)
    read(cache, [500, 20])
    both = {"cache": cache, "fork": cache.fork()}
    read(both.pop(goes_first), [30])
    (last,) = both.values()
    if cropped is not None:
        last.crop(cropped)
    assert read(last, [10] * 8) <= budget
    # What is alone has room for as many.
    assert last.layers[0].exact_from == 0


@pytest.mark.parametrize("kind", ["llama", "windows"])
def test_a_model_decodes_as_without_a_budget_until_it_is_reached(kind: str) -> None:
    model, ids = model_of(kind), torch.randint(3, 97, (1, 700))
    outputs = []
    for options in ({}, {"max_bytes": 10**9}, {"max_bytes": "55%", "length_hint": 700}):
        cache = DynamicCache(config=model.config, **options)
        logits = [read_by_model(model, part, cache)[1] for part in ids.split([600, 1, 99], dim=1)]
        outputs.append(torch.cat(logits, 1))
    torch.testing.assert_close(outputs[1], outputs[0], rtol=0, atol=0)
    torch.testing.assert_close(outputs[2], outputs[0], rtol=0, atol=0.05)
    assert cache.nbytes <= cache.budget.max_bytes
    assert cache.layers[1].fidelity == "rounded"


@pytest.mark.parametrize("family", ["lfm2", "qwen3_next", "zamba2", "falcon_h1"])
def test_models_whose_passes_begin_with_recurrent_states_stay_within_the_budget(family: str) -> None:
    """These states count, and so do their checkpoints, also where they are a part of a layer that attends."""
    model, full = families.model_of(family), DynamicCache(config=families.model_of(family).config)
    parts = torch.randint(3, 97, (1, 800)).split([300, 100, *[1] * 150, 100, *[1] * 150], dim=1)
    for ids in parts[:-150]:
        read_by_model(model, ids, full)
    cache = DynamicCache(config=model.config, max_bytes=int(full.nbytes * 0.6))
    for ids in parts:
        read_by_model(model, ids, cache)
        assert cache.nbytes <= cache.budget.max_bytes, cache.length
    assert cache.layers[1].fidelity == "rounded"


def test_generate_takes_a_budget_by_name() -> None:
    model, ids = model_of(), torch.randint(3, 97, (1, 300))
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


@pytest.mark.parametrize("max_bytes", [600 * TOKEN_BYTES, 24 * 2**30])
def test_saved_with_its_budget(max_bytes: int, tmp_path: Any) -> None:
    cache = DynamicCache(max_bytes=max_bytes, ladder=["int8"])
    read(cache, [800])
    kvlayers.save_cache(cache, tmp_path / "cache")
    loaded = kvlayers.load_cache(tmp_path / "cache")
    assert exact_tokens(loaded) == exact_tokens(cache)
    assert (loaded.budget.max_bytes, loaded.budget.ladder) == (max_bytes, ("int8",))
    for each in (cache, loaded):
        read(each, [1] * 60)
    assert exact_tokens(loaded) == exact_tokens(cache)
    torch.testing.assert_close(
        as_dense(loaded.layers[0].peek()[0]), as_dense(cache.layers[0].peek()[0]), rtol=0, atol=0
    )


def test_the_host_comes_when_codes_do_not_fit(accelerator: None) -> None:
    cache = DynamicCache(max_bytes=300 * TOKEN_BYTES, ladder=("int8", "offloaded"))
    read(cache, [500, 400])
    assert (cache.offloading, cache.budget.note) == (True, "states are on the host")
    read(cache, [1] * 3)


@pytest.mark.parametrize("tokens", [600, 100])
def test_what_gave_way_by_hand_stays_rounded(tokens: int) -> None:
    """Also if it had so few tokens that all of them were exact."""
    cache = DynamicCache(max_bytes=900 * TOKEN_BYTES)
    read(cache, [tokens])
    assert cache.give_way() == "int8"
    read(cache, [1] * 200)
    assert max(exact_tokens(cache)) <= 128 + 64


def test_few_tokens_that_gave_way_by_hand_take_what_their_first_buffers_take() -> None:
    """A buffer that doubles, rather than all that the residual may come to hold."""
    cache = DynamicCache(config=config_of(), max_bytes=100 * TOKEN_BYTES)
    assert cache.give_way() == "int8"
    assert read(cache, [40, 1]) == 80 * TOKEN_BYTES
    assert "8 bits" in cache.budget.note
    full = DynamicCache(config=config_of(), max_bytes=100 * TOKEN_BYTES)
    full.give_way()
    with pytest.raises(CapacityError, match=f"{2 * 90 * TOKEN_BYTES} bytes"):
        read(full, [90])


@pytest.mark.parametrize("tokens", [30, 130, 180])
@pytest.mark.parametrize("kind", ["quantized", "packed"])
def test_few_exact_tokens_of_a_cache_of_codes_stay_within_the_budget(kind: str, tokens: int) -> None:
    """Its buffers take no room for tokens that would not fit."""
    budget = (tokens + 5) * TOKEN_BYTES
    cache = MAKERS["quantized" if kind == "quantized" else "dynamic"](max_bytes=budget)
    if kind == "packed":
        cache.pack(8)
    assert read(cache, [tokens, 1, 1]) <= budget
    assert exact_tokens(cache) == [tokens + 2] * LAYERS


@pytest.mark.parametrize("chunks", [[900], [30, 200, 300, 200, 200]], ids=len)
def test_what_beams_share_is_given_back_where_it_is_rounded(chunks: list[int]) -> None:
    budget, blocks = 810 * TOKEN_BYTES, 2 * LAYERS * BLOCK_BYTES
    cache = DynamicCache(config=config_of(), max_bytes=budget)
    read(cache, chunks)
    cache.expand(2)
    assert read(cache, [1, 1, 90, 1]) <= budget + blocks


def test_bytes_of_layers_that_cannot_give_way_count() -> None:
    budget = int(TOKENS * TOKEN_BYTES * 0.75)
    cache = DynamicCache(config=config_of(), max_bytes=budget)
    cache.layers[1] = kvlayers.StaticLayer(TOKENS)
    read(cache, [1, TOKENS - 1])
    assert cache.nbytes <= budget
    assert [layer.fidelity for layer in cache.layers] == ["rounded", "exact", "rounded"]
    # The least bytes that the error names are those of all.
    least, _ = least_bytes(cache, 4000)
    assert least > cache.layers[1].nbytes + 4000 * TOKEN_BYTES * 2 / 3 / 8


def test_nothing_changes_if_a_pass_does_not_fit() -> None:
    cache = DynamicCache(max_bytes=700 * TOKEN_BYTES, ladder=("int8",))
    read(cache, [600])
    before = cache.state()
    with pytest.raises(CapacityError, match="allow more bytes, or further steps"):
        cache.update(*states(4000), 0)
    for got, expected in zip(cache.state().layers, before.layers, strict=True):
        assert got.facts == expected.facts
        torch.testing.assert_close(got.tensors, expected.tensors, rtol=0, atol=0)
    read(cache, [50])


@pytest.mark.parametrize("ladder", [("int8", "int4", "offloaded"), ("int8", "int4"), ("int8",), ()])
@pytest.mark.parametrize("tokens", [5, 300, 900])
def test_the_least_bytes_that_the_error_names_are_enough_and_one_fewer_is_not(
    ladder: tuple[str, ...], tokens: int
) -> None:
    """Few tokens take the least bytes in full precision, and many of them do in codes."""
    least, message = least_bytes(DynamicCache(config=config_of(), max_bytes=1000, ladder=ladder), tokens)
    # On a CPU the host is no other place, so only bits are left to allow.
    assert ("or further steps" in message) == (len(ladder) < 2)
    assert "offloaded" not in message
    assert (least == tokens * TOKEN_BYTES) == (tokens == 5 or not ladder)
    read(DynamicCache(config=config_of(), max_bytes=least, ladder=ladder), [tokens])
    with pytest.raises(CapacityError):
        read(DynamicCache(config=config_of(), max_bytes=least - 1, ladder=ladder), [tokens])


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
    "no word as a ladder": ({"max_bytes": 1000, "ladder": ""}, "`ladder` must be steps"),
    "a number as a ladder": ({"max_bytes": 1000, "ladder": 8}, "`ladder` must be steps"),
    "steps in no order": ({"max_bytes": 1000, "ladder": {"int8"}}, "`ladder` must be steps"),
    "a share of something": ({"max_bytes": "50% of it"}, "`max_bytes` must be a number of bytes"),
    "bytes that are free": ({"max_bytes": "2GiB of free"}, "`max_bytes`"),
    "more than all": ({"max_bytes": "101%", "length_hint": 10}, "`max_bytes` must be a number of bytes"),
}


@pytest.mark.parametrize(("options", "words"), BAD.values(), ids=BAD)
def test_bad_options_are_named(options: dict[str, Any], words: str) -> None:
    for kind in (DynamicCache, QuantizedCache):
        with pytest.raises(OptionError, match=words):
            kind(**options)


def test_a_plan_says_what_a_budget_would_hold(caplog: pytest.LogCaptureFixture) -> None:
    config = config_of()
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


@pytest.mark.parametrize(
    ("share", "kind", "length_hint", "expected"),
    [
        ("50% of free", "llama", None, 400 * TOKEN_BYTES),
        ("35 % of free  ", "llama", None, 280 * TOKEN_BYTES),
        ("60%", "llama", 500, 300 * TOKEN_BYTES),
        # Windows of 100 have room for 124.
        ("60%", "windows", 500, (500 + 2 * 124) * TOKEN_BYTES // LAYERS * 6 // 10),
    ],
)
def test_shares_of_free_memory_and_of_full_precision(
    share: str, kind: str, length_hint: int | None, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = SimpleNamespace(available=800 * TOKEN_BYTES, total=10**15)
    monkeypatch.setattr("psutil.virtual_memory", lambda: free)
    cache = DynamicCache(config=config_of(kind, 100), max_bytes=share, length_hint=length_hint)
    assert "max_bytes" not in cache.describe()
    read(cache, [10])
    assert cache.budget.max_bytes == cache.describe()["max_bytes"] == expected


CONTRADICTIONS: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "bits": (lambda: QuantizedCache(max_bytes=1000, nbits=4), OptionError, "`nbits` must be left out"),
    "bits of keys": (lambda: QuantizedCache(max_bytes=1000, key_nbits=4), OptionError, "`nbits` must be left out"),
    "bits of values": (lambda: QuantizedCache(max_bytes=1000, value_nbits=8), OptionError, "`nbits` must be left out"),
    "codes of one number of bits": (lambda: QuantizedCache(max_bytes=1000, backend="fp8"), OptionError, "nbits"),
    "a reservation": (lambda: kvlayers.StaticCache(config_of(), 64, max_bytes=1000), OptionError, "max_bytes"),
    "a token": (lambda: read(DynamicCache(max_bytes=1000), [1]), CapacityError, "`max_bytes` must be at least"),
}


@pytest.mark.parametrize(("make", "error", "words"), CONTRADICTIONS.values(), ids=CONTRADICTIONS)
def test_what_no_budget_can_be_for_is_named(make: Callable[[], Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        make()
    # One number of bits is enough for a ladder of one step.
    QuantizedCache(max_bytes=1000, backend="fp8", ladder=("int8",))


def test_no_budget_costs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    assert DynamicCache().budget is None
    assert "max_bytes" not in DynamicCache().describe()
    assert "memory" not in repr(DynamicCache().explain())
    cache = DynamicCache(max_bytes=400 * TOKEN_BYTES)
    with caplog.at_level(logging.WARNING):
        read(cache, [500, *[1] * 100])
        read(cache, [400, 40, 40])
    said = [record.message for record in caplog.records if "within max_bytes" in record.message]
    assert ["8 bits" in message for message in said] == [True, "8 bits" in said[-1]]
    assert ["4 bits" in message for message in said] == [False, True]
    assert "memory: at least the newest" in repr(cache.explain())


def test_what_a_crop_leaves_rounded_is_not_called_exact() -> None:
    cache = DynamicCache(config=config_of(), max_bytes=600 * TOKEN_BYTES)
    read(cache, [800])
    first = cache.layers[0].exact_from
    cache.crop(first - 70)
    read(cache, [1, 1])
    assert cache.layers[0].fidelity == "rounded"
    assert cache.budget.note.startswith("at least the newest")
    cache.crop(10)
    read(cache, [1, 300])
    assert [layer.exact_from for layer in cache.layers] == [0] * LAYERS
    assert cache.budget.note == "all tokens are exact"


def test_compiled_code_asks_the_budget_for_layers_that_it_makes() -> None:
    cache, states = DynamicCache(max_bytes=20_000), torch.randn(1, 2, 100, 32)
    # What it refuses in eager code too.
    with torch.no_grad(), pytest.raises(CapacityError, match=r"`max_bytes` must be at least 50\.0 KiB"):
        torch.compile(lambda: cache.update(states, states, 0), backend="eager")()
    assert not cache.layers


def test_prefix_stores_know_what_is_exact() -> None:
    """What a budget has rounded is handed out to nobody who asked for exact states, and stays what it is."""
    model, ids = fresh_model("llama"), torch.arange(300)[None] % 90 + 3
    size = kvlayers.plan(model, 300, names=["dynamic"]).caches[0].device_bytes
    budget = {"cache_implementation": "dynamic", "cache_config": {"max_bytes": int(size * 0.85)}}
    wanted = {"max_new_tokens": 3, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    expected = model.generate(ids, **wanted)
    with kvlayers.installed(prefix_store=kvlayers.PrefixStore(max_bytes=2**26)):
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


@pytest.mark.parametrize("tokens", [450, 260])
def test_a_rollback_of_drafts_stays_within_the_budget(tokens: int) -> None:
    """Recorded windows hold more than their room until the next crop, and count as what they hold."""
    config, budget = tf.MistralConfig(**SMALL, sliding_window=100), tokens * TOKEN_BYTES
    cache, full = (DynamicCache(config=config, max_bytes=max_bytes) for max_bytes in (budget, 10**9))
    for each in (cache, full):
        each.activate_past_recording()
        read(each, [200])
        for _ in range(8):
            assert read(each, [20]) <= each.budget.max_bytes
            each.crop(-15)
            read(each, [1])
    check_states(cache, full, 0.5)


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
    token_bytes = layers * TOKEN_BYTES // LAYERS
    config = tf.LlamaConfig(**{**SMALL, "num_hidden_layers": layers})
    cache = DynamicCache(max_bytes=tokens * token_bytes * 6 // 10, config=config)
    for new in [300, *[1] * (tokens - 300)]:
        for index in range(layers):
            cache.update(*states(new, seed=index), index)
    assert cache.layers[-1].exact_from > 0
    assert most <= cache.budget.max_bytes + 64 * token_bytes


@torch.no_grad()
def test_layers_that_cannot_be_coded_grow_no_further_than_others_leave_room() -> None:
    cache = DynamicCache(config=config_of(), max_bytes=525 * TOKEN_BYTES)
    for tokens in [200, *[1] * 250]:
        for index, dtype in enumerate((torch.float32, torch.float64, torch.float32)):
            cache.update(*(side.to(dtype) for side in states(tokens, seed=index)), index)
        assert cache.nbytes <= 525 * TOKEN_BYTES
    assert [layer.fidelity for layer in cache.layers] == ["rounded", "exact", "rounded"]
