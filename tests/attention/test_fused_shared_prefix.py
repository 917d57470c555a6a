"""Shared prefixes as accelerators read them: one fused call over the prefix, and numbers that the host never reads."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kvlayers import DynamicLayer
from kvlayers.kernels.attention import segment_kinds, slabs
from kvlayers.kernels.attention.packed_tensor import PackedStates
from matrix import product

PREFIXES, REPEATS, PREFIX_TOKENS = 2, 3, 50

CHOICES = {
    "as they were": [0, 1, 2, 3, 4, 5],
    "within their prefix": [2, 2, 0, 3, 3, 5],
    "across prefixes": [5, 0, 3, 1, 1, 4],
    "unevenly": [0, 0, 0, 0, 5],
    "of one prefix": [4, 5],
}


@pytest.fixture(params=["read", "not read"])
def indices_are(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Attention as on an accelerator, where indices come from the host, or from the accelerator."""
    monkeypatch.setattr(slabs, "INTERPRETED", True)
    monkeypatch.setattr(segment_kinds, "reading_waits", lambda indices: request.param == "not read")
    return str(request.param)


class Twin:
    """A layer with a shared prefix, and the states of all its sequences."""

    def __init__(self, kv_heads: int, dtype: torch.dtype, head_dims: tuple[int, int], prefixes: int = PREFIXES) -> None:
        self.kv_heads, self.dtype, self.head_dims = kv_heads, dtype, head_dims
        self.layer = DynamicLayer()
        self.states = self._new(prefixes, PREFIX_TOKENS)
        self.layer.update(*self.states)
        self.layer.expand(REPEATS)
        self.states = tuple(side.repeat_interleave(REPEATS, 0) for side in self.states)

    def _new(self, batch: int, tokens: int) -> tuple[Tensor, ...]:
        return tuple(torch.randn(batch, self.kv_heads, tokens, width).to(self.dtype) for width in self.head_dims)

    def update(self, tokens: int) -> tuple[Tensor, Tensor]:
        new = self._new(self.states[0].shape[0], tokens)
        self.states = tuple(torch.cat([side, more], 2) for side, more in zip(self.states, new, strict=True))
        keys, values = self.layer.update(*new)
        assert isinstance(keys, PackedStates)
        return keys, values

    def select(self, rows: list[int]) -> None:
        self.layer.select(torch.tensor(rows))
        self.states = tuple(side[rows] for side in self.states)


def check(twin: Twin, keys: Tensor, values: Tensor, group: int, queries: int, mask: Tensor | None) -> None:
    """No further from float64 than twice what torch's attention loses in this dtype, as for slabs; see `test_fused`.

    In addition two results are merged in this dtype, with shares that are rounded to it.
    """
    batch, kv_heads, _, head_dim = twin.states[0].shape
    query = torch.randn(batch, queries, kv_heads * group, head_dim).to(twin.dtype).transpose(1, 2)
    seen = scaled_dot_product_attention(query, keys, values, mask, scale=0.2, enable_gqa=True)
    double = mask if mask is None or mask.dtype == torch.bool else mask.double()
    wanted = scaled_dot_product_attention(
        query.double(), *(side.double() for side in twin.states), double, scale=0.2, enable_gqa=True
    )
    plain = scaled_dot_product_attention(query, *twin.states, mask, scale=0.2, enable_gqa=True)
    assert (seen.shape, seen.dtype) == (plain.shape, plain.dtype)
    limit = 2 * (plain.double() - wanted).norm() + 4 * torch.finfo(twin.dtype).eps * wanted.norm()
    assert (seen.double() - wanted).norm() <= limit


@pytest.mark.parametrize(("choice", "group", "dtype"), product(CHOICES, [1, 3], [torch.float32, torch.bfloat16]))
def test_attention_is_that_over_prefix_and_own_tokens(
    indices_are: str, choice: str, group: int, dtype: torch.dtype
) -> None:
    # Torch's kernel for a CPU takes values as wide as keys only: others go through plain torch.
    twin = Twin(2, dtype, (16, 24 if dtype == torch.float32 else 16))
    twin.update(4)
    twin.select(CHOICES[choice])
    for queries in (1, 3):
        keys, values = twin.update(queries)
        seen = torch.rand(twin.states[0].shape[0], 1, queries, keys.shape[2]) > 0.4
        seen[:, :, 0] = False
        check(twin, keys, values, group, queries, None)
        check(twin, keys, values, group, queries, seen)


def test_only_the_prefix_without_own_tokens(indices_are: str) -> None:
    twin = Twin(2, torch.bfloat16, (16, 16))
    twin.select([2, 2, 0, 3, 3, 5])
    keys, values = twin.layer.store.newest(PREFIX_TOKENS)
    check(twin, keys, values, 2, 2, None)


def test_beams_are_selected_step_by_step(indices_are: str) -> None:
    generator = torch.Generator().manual_seed(0)
    for prefixes in (1, PREFIXES):
        twin = Twin(2, torch.bfloat16, (16, 16), prefixes)
        for _ in range(6):
            keys, values = twin.update(1)
            check(twin, keys, values, 2, 1, None)
            torch.testing.assert_close(keys.dense(), twin.states[0], rtol=0, atol=0)
            # Beams stay with their prompt, as in transformers.
            rows = torch.randint(0, REPEATS, (prefixes, REPEATS), generator=generator)
            twin.select((rows + torch.arange(prefixes)[:, None] * REPEATS).flatten().tolist())
        twin.layer.crop(-(twin.states[0].shape[2] - PREFIX_TOKENS + 7))
        twin.states = tuple(side[:, :, : PREFIX_TOKENS - 7] for side in twin.states)
        check(twin, *twin.update(2), 2, 2, None)


def test_forks_and_copies_have_their_own_sequences(indices_are: str) -> None:
    twin = Twin(1, torch.bfloat16, (16, 16))
    twin.update(3)
    twin.select([5, 0, 3])
    other = twin.layer.fork()
    twin.select([1, 1, 2, 0])
    check(twin, *twin.update(1), 4, 1, None)
    # The fork has sequences 5, 0, 3, and the other one 0, 0, 3, 5 and one more token.
    other.select(torch.tensor([2, 1]))
    twin.layer, twin.states = other, tuple(side[[2, 0], :, :-1] for side in twin.states)
    check(twin, *twin.update(1), 4, 1, None)


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


def test_eager_attention_on_an_accelerator(indices_are: str) -> None:
    twin = Twin(2, torch.float32, (16, 24))
    twin.update(4)
    twin.select(CHOICES["across prefixes"])
    keys, values = twin.update(2)
    query = torch.randn(6, 4, 2, 16)
    options: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-5}
    whole_keys, whole_values = (side.repeat_interleave(2, 1) for side in twin.states)
    products = query @ keys.repeat_interleave(2, 1).transpose(2, 3)
    torch.testing.assert_close(products, query @ whole_keys.transpose(2, 3), **options)
    weights = products.softmax(-1)
    torch.testing.assert_close(weights @ values.repeat_interleave(2, 1), weights @ whole_values, **options)


def test_autograd_can_use_numbers_that_were_first_read_in_inference_mode() -> None:
    numbers = segment_kinds.SegmentRows(2, (0, 1, 1))
    with torch.inference_mode():
        numbers.on(torch.device("cpu"))
    states = torch.randn(2, 3, requires_grad=True)
    states.index_select(0, numbers.on(states.device)[0]).sum().backward()
    assert states.grad is not None
    assert states.grad[:, 0].tolist() == [1, 2]
