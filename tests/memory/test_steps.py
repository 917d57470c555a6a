"""Steps that a cache takes in place, asked or as memory runs out: it goes on as one that was so from the start."""

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import kvlayers
from kvlayers import (
    Cache,
    DynamicCache,
    DynamicLayer,
    LinearAttentionLayer,
    OffloadedLayer,
    OptionError,
    Quantization,
    QuantizedCache,
    SlidingLayer,
    errors,
)
from kvlayers.core.buffer import TokenBuffer
from kvlayers.generation.current_call import USES_KVLAYERS
from kvlayers.kernels.attention.packed_tensor import as_dense
from matrix import product
from models import tiny_model

HEADS, HEAD_DIM, PROMPT, WINDOW = 2, 16, 500, 300


def states(tokens: int, batch: int = 2, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator, shape = torch.Generator().manual_seed(seed), (batch, HEADS, tokens, HEAD_DIM)
    keys, values = (torch.randn(shape, generator=generator) for _ in range(2))
    # A mean and a large channel, so that keys are smoothed.
    keys[..., 3] = keys[..., 3] * 8 + 20
    return keys, values


def filled(cache: Cache, tokens: int = PROMPT, batch: int = 2) -> Cache:
    for index in range(len(cache.layers)):
        cache.update(*states(tokens, batch, index), index)
    return cache


def dynamic() -> Cache:
    return Cache([DynamicLayer(), SlidingLayer(WINDOW), DynamicLayer()])


def rounded(nbits: int) -> Cache:
    """A cache of these bits from the start."""
    window = SlidingLayer(WINDOW, kvlayers.stores.QuantizedStore(Quantization(nbits=nbits, sink_tokens=0)))
    layers = [DynamicLayer(store=kvlayers.stores.QuantizedStore(Quantization(nbits=nbits))) for _ in range(2)]
    return Cache([layers[0], window, layers[1]])


def check_goes_on(cache: Any, reference: Any, updates: tuple[int, ...] = (1, 1, 70, 1, 64, 1), **close: float) -> None:
    """Both hold the same states, and return the same to further updates."""
    for number, tokens in enumerate((0, *updates)):
        for index in range(len(reference.layers)):
            if tokens:
                new = states(tokens, reference.batch_size, 100 * number + index)
                check_same(cache.update(*new, index), reference.update(*new, index), **close)
            check_same(cache.layers[index].peek(), reference.layers[index].peek(), **close)


def check_same(got: Any, expected: Any, **close: float) -> None:
    """Both are states of the same newest tokens, as far as both hold them."""
    for side, other in zip(got, expected, strict=True):
        length = min(side.shape[2], other.shape[2])
        both = (as_dense(states)[:, :, -length:] for states in (side, other))
        torch.testing.assert_close(*both, **(close or {"rtol": 0, "atol": 0}))


def _crop(cache: Cache, length: int) -> None:
    """Crop the layers that can go back: a full window cannot."""
    for layer in cache.layers:
        if not layer.is_sliding:
            layer.truncate(length)


OPERATIONS: dict[str, Callable[[Cache], Cache | None]] = {
    "nothing": lambda cache: None,
    "crop into a block": lambda cache: _crop(cache, PROMPT - 250),
    "crop into the residual": lambda cache: _crop(cache, PROMPT - 20),
    "reorder": lambda cache: cache.reorder_cache(torch.tensor([1, 0])),
    "repeat": lambda cache: cache.batch_repeat_interleave(2),
    "expand": lambda cache: cache.expand(2),
    "select one": lambda cache: cache.batch_select_indices([1]),
    "fork": lambda cache: cache.fork(),
    "row": lambda cache: cache.extract(1),
    "trim": lambda cache: cache.trim(),
    "compact": lambda cache: cache.compact(),
}


def changed(operation: str, *caches: Cache) -> list[Cache]:
    return [OPERATIONS[operation](cache) or cache for cache in caches]


@pytest.mark.parametrize("nbits", [8, 4])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_packed_cache_goes_on_as_one_of_these_bits_from_the_start(operation: str, nbits: int) -> None:
    cache, reference = filled(dynamic()), filled(rounded(nbits))
    cache.pack(nbits)
    cache, reference = changed(operation, cache, reference)
    check_goes_on(cache, reference)
    assert cache.nbytes <= reference.nbytes


@pytest.mark.parametrize("operation", OPERATIONS)
def test_packing_after_an_operation_is_as_good_as_before(operation: str) -> None:
    cache, exact = changed(operation, filled(dynamic()), filled(dynamic()))
    cache.pack(8)
    # A fortieth of the largest state: what codes of 8 bits lose at most.
    check_goes_on(cache, exact, rtol=0, atol=0.2)
    for layer, full in zip(cache.layers, exact.layers, strict=True):
        first = layer.exact_from - layer.length
        assert first < 0
        torch.testing.assert_close(
            as_dense(layer.peek()[0])[:, :, first:], as_dense(full.peek()[0])[:, :, first:], rtol=0, atol=0
        )


@pytest.mark.parametrize("operation", OPERATIONS)
def test_codes_of_8_bits_are_packed_again_as_what_they_stand_for(operation: str) -> None:
    cache, before = changed(operation, filled(rounded(8)), filled(rounded(8)))
    cache.pack(4)
    assert all(layer.bits == (4, 4) for layer in cache.layers)
    for layer, other in zip(cache.layers, before.layers, strict=True):
        # Slow: a store of 4 bits, whose blocks are packed one by one from what the codes of 8 bits stand for.
        held, reference = other.store, layer.store
        again = kvlayers.stores.QuantizedStore(layer.store.quantization).fork()
        again.reserve_form(*other.store.forms)
        for block, (keys, values) in enumerate(whole_blocks(other.store)):
            again.blocks.prepare(1)
            again.blocks.write(0, keys, values)
            again.blocks.hold(1)
            for side in ("keys_codes", "values_codes", "keys_parameters", "values_parameters"):
                got, expected = (store.blocks.state()[side][:, :, block] for store in (reference, again))
                torch.testing.assert_close(got, expected, rtol=0, atol=0)
        assert reference.blocks.state()["block_ends"].tolist() == held.blocks.state()["block_ends"].tolist()
        torch.testing.assert_close(reference.runs.state(), held.runs.state(), rtol=0, atol=0)
    check_goes_on(cache, before, rtol=0, atol=4.0)


def whole_blocks(store: kvlayers.stores.QuantizedStore) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """What the codes of each block stand for, cropped tokens included, smoothed as they are."""
    found = []
    for segment in store.blocks.segments(0, store.runs):
        rows = (lambda states: states) if segment.rows is None else segment.rows.select
        sides = [rows(segment.side(side).states(torch.float32)) for side in ("keys", "values")]
        found += list(zip(*(torch.split(side, store.block_tokens, 2) for side in sides), strict=True))
    return found


def test_an_empty_cache_packs_what_comes() -> None:
    for cache in (dynamic(), DynamicCache()):
        assert cache.give_way() == "int8"
        for index in range(3):
            cache.update(*states(PROMPT, 2, index), index)
        assert {layer.bits for layer in cache.layers} == {(8, 8)}
        assert cache.give_way() == "int4"
        assert cache.give_way() is None


def test_a_quantized_cache_has_fewer_bits_only() -> None:
    cache = filled(QuantizedCache(nbits=4, residual_length=64), 0)
    for index in range(2):
        cache.update(*states(PROMPT, 2, index), index)
    before = cache.state()
    cache.pack(8)
    assert cache.state().layers[0].facts == before.layers[0].facts
    cache.pack(2)
    assert {layer.bits for layer in cache.layers} == {(2, 2)}
    assert {layer.residual_length for layer in cache.layers} == {64}


def test_rows_are_rounded_each_by_itself() -> None:
    alone = [filled(Cache([DynamicLayer(), DynamicLayer()]), tokens, 1) for tokens in (500, 300)]
    rows = kvlayers.merge(alone)
    rows.pack(8)
    for cache in alone:
        cache.pack(8)
    new = states(1, 2, 7)
    for index in range(2):
        got = rows.update(*new, index)
        for row, cache in enumerate(alone):
            own = cache.update(*(side[row : row + 1] for side in new), index)
            for side, expected in zip(got, own, strict=True):
                length = expected.shape[2]
                torch.testing.assert_close(as_dense(side)[row : row + 1, :, -length:], as_dense(expected))


@pytest.mark.parametrize(("operation", "nbits", "back"), product(OPERATIONS, [None, 8], [False, True]))
def test_states_move_there_and_back(operation: str, nbits: int | None, back: bool, accelerator: None) -> None:
    cache, reference = (filled(dynamic() if nbits is None else rounded(nbits)) for _ in range(2))
    cache.offload(only_non_sliding=False)
    assert all(isinstance(layer, OffloadedLayer) and layer.memory_tier == "host" for layer in cache.layers)
    if back:
        check_goes_on(cache, reference, (1,))
        cache.onload()
        assert not any(isinstance(layer, OffloadedLayer) for layer in cache.layers)
        assert not cache.offloading
    cache, reference = changed(operation, cache, reference)
    check_goes_on(cache, reference)


@pytest.mark.parametrize("nbits", [8, 4])
def test_states_are_rounded_where_they_are_held(nbits: int, accelerator: None) -> None:
    cache, reference = filled(dynamic()), filled(rounded(nbits))
    cache.offload()
    cache.pack(nbits)
    assert [layer.memory_tier for layer in cache.layers] == ["host", "device", "host"]
    check_goes_on(cache, reference)


def test_the_host_comes_last(accelerator: None) -> None:
    cache, packed = filled(dynamic()), filled(dynamic())
    assert [cache.give_way() for _ in range(4)] == ["int8", "int4", "offloaded", None]
    packed.pack(8)
    packed.pack(4)
    check_goes_on(cache, packed)


def test_files_hold_states_of_a_machine_without_an_accelerator(tmp_path: Any) -> None:
    cache, reference = filled(dynamic()), filled(dynamic())
    cache.offload(device="disk", directory=tmp_path, only_non_sliding=False)
    assert {layer.memory_tier for layer in cache.layers} == {"disk"}
    check_goes_on(cache, reference, (1, 70))
    cache.onload()
    assert {layer.memory_tier for layer in cache.layers} == {"device"}
    check_goes_on(cache, reference)


STAY: dict[str, Callable[[], Any]] = {
    "static": lambda: kvlayers.StaticLayer(600, max_batch_size=2),
    "evicting": lambda: kvlayers.EvictingLayer("knorm", keep=0.5, per_head=False),
    "recall": lambda: kvlayers.RecallLayer(kvlayers.layers.Recall(pages=4)),
    "sink": lambda: kvlayers.SinkLayer(64, 4, None),
}


@pytest.mark.parametrize("kind", STAY)
def test_layers_that_cannot_stay_as_they_are_and_are_named(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    alone = filled(Cache([STAY[kind]()]))
    name = type(alone.layers[0]).__name__
    with pytest.raises(errors.UnsupportedLayerError, match=name):
        alone.pack(8)
    assert alone.give_way() is None
    beside: list[Any] = [STAY[kind](), DynamicLayer()]
    cache, exact = filled(Cache(beside)), filled(Cache([STAY[kind]()]))
    with caplog.at_level(logging.WARNING):
        cache.pack(8)
    assert name in caplog.text
    check_goes_on(Cache([beside[0]]), exact, (1,))
    assert beside[1].bits == (8, 8)


def test_what_is_held_elsewhere_or_rounded_is_named(tmp_path: Any) -> None:
    cache = filled(dynamic())
    cache.offload(device="disk", directory=tmp_path)
    with pytest.raises(OptionError, match="onload"):
        cache.offload()
    with pytest.raises(errors.StateMismatchError):
        dynamic().load_state(filled(rounded(8)).state())


# Memory that runs out between forward passes: where beams are reordered, and where sequences are repeated

MESSAGE = "CUDA out of memory. Tried to allocate 2.00 GiB."
CHANGES = ("reorder", "repeat", "select one")
LAYERS = 3


class Allocations:
    """Counts the buffers that are made where sequences are chosen; one of them finds no memory."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked, self.failing = 0, 0
        selected = TokenBuffer.selected

        def counted(buffer: TokenBuffer, *args: Any) -> TokenBuffer:
            self.asked += 1
            if self.asked == self.failing:
                raise torch.OutOfMemoryError(MESSAGE)
            return selected(buffer, *args)

        monkeypatch.setattr(TokenBuffer, "selected", counted)

    def each_fails(self) -> Iterator[int]:
        """The number of each allocation so far, which fails where it is made again."""
        total = self.asked
        assert total
        for number in range(1, total + 1):
            self.asked, self.failing = 0, number
            yield number


@pytest.fixture
def allocations(monkeypatch: pytest.MonkeyPatch) -> Allocations:
    return Allocations(monkeypatch)


@pytest.fixture
def in_call() -> Iterator[None]:
    token = USES_KVLAYERS.set(True)
    yield
    USES_KVLAYERS.reset(token)


def exact() -> Cache:
    return filled(Cache([DynamicLayer() for _ in range(LAYERS)]))


def test_beams_go_on_wherever_memory_runs_out(allocations: Allocations, installed: None) -> None:
    model, ids = tiny_model("llama"), torch.arange(3, 43)[None]
    arguments: dict[str, Any] = {"max_new_tokens": 6, "num_beams": 3, "num_return_sequences": 2, "do_sample": False}
    expected = model.generate(ids, **arguments)
    for _ in allocations.each_fails():
        words = "between forward passes .*CUDA out of memory.* step: int8"
        with pytest.warns(kvlayers.SteppedDownWarning, match=words) as seen:
            assert torch.equal(model.generate(ids, **arguments), expected)
        assert len(seen) == 1


@pytest.mark.parametrize("change", CHANGES)
def test_layers_that_had_changed_are_rounded_as_those_that_follow(
    change: str, allocations: Allocations, in_call: None
) -> None:
    expected = exact()
    OPERATIONS[change](expected)
    expected.pack(8)
    for _ in allocations.each_fails():
        cache = exact()
        with pytest.warns(kvlayers.SteppedDownWarning):
            OPERATIONS[change](cache)
        assert cache.steps_taken == ("int8",)
        assert [layer.bits for layer in cache.layers] == [(8, 8)] * LAYERS
        check_goes_on(cache, expected.fork(), (1,), rtol=0, atol=0.2)


@pytest.mark.parametrize("change", CHANGES)
def test_nothing_is_rounded_outside_of_a_call_and_no_layer_is_left_behind(
    change: str, allocations: Allocations
) -> None:
    OPERATIONS[change](exact())
    first_layer = allocations.asked // LAYERS
    for number in allocations.each_fails():
        cache, is_first = exact(), number <= first_layer
        words = "It is as it was.*fewer beams" if is_first else "pass all tokens again.*fewer beams"
        with pytest.raises(torch.OutOfMemoryError, match=f"(?s){MESSAGE}.*{words}"):
            OPERATIONS[change](cache)
        assert {layer.length for layer in cache.layers} == {PROMPT if is_first else 0}
        assert {layer.fidelity for layer in cache.layers} == {"exact"}
        if is_first:
            OPERATIONS[change](cache)


def test_the_ladder_ends_with_an_error(allocations: Allocations, in_call: None) -> None:
    cache = exact()
    while cache.give_way() is not None:
        pass
    allocations.failing = allocations.asked + 1
    with pytest.raises(torch.OutOfMemoryError, match="fewer beams"):
        cache.reorder_cache(torch.tensor([1, 0]))


def test_states_that_change_in_parts_are_not_changed_twice(monkeypatch: pytest.MonkeyPatch, in_call: None) -> None:
    def failing(error: Exception) -> Callable[..., None]:
        def select(*_: Any) -> None:
            raise error

        return select

    cache = Cache([DynamicLayer(), LinearAttentionLayer()])
    cache.update(*states(PROMPT), 0)
    monkeypatch.setattr(LinearAttentionLayer, "select", failing(torch.OutOfMemoryError(MESSAGE)))
    with pytest.raises(torch.OutOfMemoryError, match="pass all tokens again"):
        cache.reorder_cache(torch.tensor([1, 0]))
    assert cache.get_seq_length() == 0
    monkeypatch.setattr(DynamicLayer, "select", failing(RuntimeError("a shape")))
    cache.update(*states(PROMPT), 0)
    with pytest.raises(RuntimeError, match=r"^a shape$"):
        cache.reorder_cache(torch.tensor([1, 0]))
    assert cache.get_seq_length() == PROMPT
