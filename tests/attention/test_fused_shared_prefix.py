"""Shared prefixes as accelerators read them: one fused call over the prefix, and numbers that the host never reads."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kvlayers import DynamicLayer
from kvlayers.kernels.attention import segment_kinds, slabs
from kvlayers.kernels.attention.packed_tensor import PackedStates, as_dense

PREFIXES, REPEATS, PREFIX_TOKENS = 2, 3, 50


@pytest.fixture(params=["read", "not read"])
def indices_are(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Attention as on an accelerator, where indices come from the host, or from the accelerator."""
    monkeypatch.setattr(slabs, "INTERPRETED", True)
    monkeypatch.setattr(segment_kinds, "reading_waits", lambda indices: request.param == "not read")
    return str(request.param)


def states(batch: int, kv_heads: int, tokens: int) -> tuple[Tensor, ...]:
    return tuple(torch.randn(batch, kv_heads, tokens, 16).bfloat16() for _ in range(2))


def layers_of(kv_heads: int, prefixes: int = PREFIXES) -> list[DynamicLayer]:
    """A layer whose sequences share prefixes, and one that has copies of them."""
    layers, begun = [DynamicLayer(), DynamicLayer()], states(prefixes, kv_heads, PREFIX_TOKENS)
    for layer in layers:
        layer.update(*begun)
    layers[0].expand(REPEATS)
    layers[1].batch_repeat_interleave(REPEATS)
    return layers


def check(layers: list[DynamicLayer], tokens: int, group: int) -> None:
    """No further from float64 than twice what torch's attention loses in this dtype, as for slabs; see `test_fused`.

    In addition two results are merged in this dtype, with shares that are rounded to it.
    """
    batch, kv_heads = layers[1].peek()[0].shape[:2]
    new = states(batch, kv_heads, tokens)
    shared, copies = layers[0].update(*new), [as_dense(side) for side in layers[1].update(*new)]
    assert isinstance(shared[0], PackedStates)
    torch.testing.assert_close(shared[0].dense(), copies[0], rtol=0, atol=0)
    query = torch.randn(batch, tokens, kv_heads * group, 16).bfloat16().transpose(1, 2)
    seen, plain, wanted = (
        scaled_dot_product_attention(rows, *sides, scale=0.2, enable_gqa=True)
        for rows, sides in ((query, shared), (query, copies), (query.double(), (side.double() for side in copies)))
    )
    assert (seen.shape, seen.dtype) == (plain.shape, plain.dtype)
    limit = 2 * (plain.double() - wanted).norm() + 4 * torch.finfo(torch.bfloat16).eps * wanted.norm()
    assert (seen.double() - wanted).norm() <= limit


def select(layers: list[DynamicLayer], rows: list[int]) -> None:
    for layer in layers:
        layer.select(torch.tensor(rows))


def test_beams_are_selected_step_by_step(indices_are: str) -> None:
    generator = torch.Generator().manual_seed(0)
    for prefixes in (1, PREFIXES):
        layers = layers_of(2, prefixes)
        for _ in range(6):
            check(layers, 1, 2)
            # Beams stay with their prompt, as in transformers.
            rows = torch.randint(0, REPEATS, (prefixes, REPEATS), generator=generator)
            select(layers, (rows + torch.arange(prefixes)[:, None] * REPEATS).flatten().tolist())
        # Across prefixes, and unevenly.
        select(layers, [prefixes * REPEATS - 1, 0, 0, 1])
        check(layers, 3, 2)
        for layer in layers:
            layer.crop(PREFIX_TOKENS - 7)
        check(layers, 2, 2)


def test_many_sequences_of_several_prefixes_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segment_kinds, "reading_waits", lambda indices: True)
    numbers = segment_kinds.SegmentRows(2, segment_kinds.of_repeats(2, 100))
    few = numbers.selected(torch.arange(0, 200, 10))
    assert few.known is None
    assert not few.are_even
    again = few.selected(torch.arange(20).repeat_interleave(5))
    assert again.known == segment_kinds.of_repeats(2, 50)
    assert again.are_even
    assert segment_kinds.SegmentRows(1, (0, 0)).selected(torch.zeros(500, dtype=torch.int64)).are_even


def test_autograd_can_use_numbers_that_were_first_read_in_inference_mode() -> None:
    numbers = segment_kinds.SegmentRows(2, (0, 1, 1))
    with torch.inference_mode():
        numbers.on(torch.device("cpu"))
    states = torch.randn(2, 3, requires_grad=True)
    states.index_select(0, numbers.on(states.device)[0]).sum().backward()
    assert states.grad is not None
    assert states.grad[:, 0].tolist() == [1, 2]
