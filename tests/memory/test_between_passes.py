"""Memory that runs out between forward passes: where beams are reordered, and where sequences are repeated."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import kvlayers
from kvlayers import Cache, DynamicLayer, LinearAttentionLayer, SteppedDownWarning
from kvlayers.core.buffer import TokenBuffer
from kvlayers.generation.current_call import USES_KVLAYERS
from kvlayers.kernels.attention.packed_tensor import as_dense
from models import COMMON, tiny_model

LAYERS, TOKENS = 3, 500
MESSAGE = "CUDA out of memory. Tried to allocate 2.00 GiB."


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


@pytest.fixture
def allocations(monkeypatch: pytest.MonkeyPatch) -> Allocations:
    return Allocations(monkeypatch)


@pytest.fixture
def in_call() -> Iterator[None]:
    token = USES_KVLAYERS.set(True)
    yield
    USES_KVLAYERS.reset(token)


def states(tokens: int, batch: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    keys, values = (torch.randn(batch, 2, tokens, 16, generator=generator) for _ in range(2))
    return keys, values


def filled() -> Cache:
    cache = Cache([DynamicLayer() for _ in range(LAYERS)])
    for index in range(LAYERS):
        cache.update(*states(TOKENS, 2, index), index)
    return cache


CHANGES: dict[str, Callable[[Any], None]] = {
    "reorder": lambda cache: cache.reorder_cache(torch.tensor([1, 0])),
    "repeat": lambda cache: cache.batch_repeat_interleave(2),
    "expand": lambda cache: cache.expand(2),
    "select": lambda cache: cache.batch_select_indices([1]),
}


def test_beams_go_on_wherever_memory_runs_out(allocations: Allocations) -> None:
    model = tiny_model("llama")
    arguments: dict[str, Any] = {"max_new_tokens": 6, "num_beams": 3, "num_return_sequences": 2, "do_sample": False}
    ids = torch.arange(3, 43)[None] % COMMON["vocab_size"]
    with kvlayers.installed():
        expected = model.generate(ids, **arguments)
        total, allocations.asked = allocations.asked, 0
        assert total
        for failing in range(1, total + 1):
            allocations.asked, allocations.failing = 0, failing
            with pytest.warns(
                SteppedDownWarning, match="between forward passes .*CUDA out of memory.* step: int8"
            ) as seen:
                assert torch.equal(model.generate(ids, **arguments), expected)
            assert len(seen) == 1


@pytest.mark.parametrize("change", CHANGES)
def test_layers_that_had_changed_are_rounded_as_those_that_follow(
    change: str, allocations: Allocations, in_call: None
) -> None:
    expected = filled()
    CHANGES[change](expected)
    total = allocations.asked
    expected.pack(8)
    for failing in range(1, total + 1):
        cache = filled()
        allocations.asked, allocations.failing = 0, failing
        with pytest.warns(SteppedDownWarning):
            CHANGES[change](cache)
        assert cache.steps_taken == ("int8",)
        assert [layer.bits for layer in cache.layers] == [(8, 8)] * LAYERS
        for number in range(LAYERS):
            new = states(1, expected.batch_size, 100 + number)
            got, reference = cache.update(*new, number), expected.fork().update(*new, number)
            for side, other in zip(got, reference, strict=True):
                torch.testing.assert_close(as_dense(side), as_dense(other), rtol=0, atol=0.05)


@pytest.mark.parametrize("change", CHANGES)
def test_nothing_is_rounded_outside_of_a_call_and_no_layer_is_left_behind(
    change: str, allocations: Allocations
) -> None:
    CHANGES[change](filled())
    total = allocations.asked
    for failing in range(1, total + 1):
        cache = filled()
        allocations.asked, allocations.failing = 0, failing
        is_first = failing <= total // LAYERS
        words = "It is as it was.*fewer beams" if is_first else "pass all tokens again.*fewer beams"
        with pytest.raises(torch.OutOfMemoryError, match=f"(?s){MESSAGE}.*{words}"):
            CHANGES[change](cache)
        assert {layer.length for layer in cache.layers} == {TOKENS if is_first else 0}
        assert {layer.fidelity for layer in cache.layers} == {"exact"}
        if is_first:
            CHANGES[change](cache)


def test_the_ladder_ends_with_an_error(allocations: Allocations, in_call: None) -> None:
    cache = filled()
    while cache.give_way() is not None:
        pass
    allocations.failing = allocations.asked + 1
    with pytest.raises(torch.OutOfMemoryError, match="fewer beams"):
        cache.reorder_cache(torch.tensor([1, 0]))


def test_states_that_change_in_parts_are_not_changed_twice(monkeypatch: pytest.MonkeyPatch, in_call: None) -> None:
    cache = Cache([DynamicLayer(), LinearAttentionLayer()])
    cache.update(*states(TOKENS, 2, 0), 0)
    monkeypatch.setattr(LinearAttentionLayer, "select", lambda layer, rows: fails())
    with pytest.raises(torch.OutOfMemoryError, match="pass all tokens again"):
        cache.reorder_cache(torch.tensor([1, 0]))
    assert cache.get_seq_length() == 0
    monkeypatch.setattr(DynamicLayer, "select", lambda layer, rows: other_error())
    cache.update(*states(TOKENS, 2, 0), 0)
    with pytest.raises(RuntimeError, match=r"^a shape$"):
        cache.reorder_cache(torch.tensor([1, 0]))
    assert cache.get_seq_length() == TOKENS


def fails() -> None:
    raise torch.OutOfMemoryError(MESSAGE)


def other_error() -> None:
    raise RuntimeError("a shape")
