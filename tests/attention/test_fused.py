"""Attention by torch's fused kernels over slabs is that of the states: on a CPU, by its own fused kernel."""

import itertools
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from kvlayers.kernels.attention import dispatch, fused, slabs
from kvlayers.kernels.attention.cuda import kernel as cuda_kernel
from kvlayers.kernels.attention.dispatch import PathCounter
from kvlayers.kernels.attention.segment_kinds import DenseSegment, PackedSegment
from kvlayers.kernels.attention.segments import KVSegments
from kvlayers.kernels.codes.groups import BlockLayout
from kvlayers.kernels.codes.packed_side import PackedSide, pack_side
from kvlayers.kernels.codes.quantizer_contract import CodeFormat, QuantizedGroups, Side
from kvlayers.kernels.codes.smoothing import KeySmoothing
from matrix import product

BLOCK = 64
BLOCKS = 4
SINKS, RESIDUAL = 5, 70
KV_HEADS = 2


@pytest.fixture(autouse=True)
def small_slabs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slabs of two blocks, and a merge in between, so that few tokens go all ways."""
    monkeypatch.setattr(slabs, "SLAB_BYTES", 1)
    monkeypatch.setattr(slabs, "MINIMUM_SLAB_TOKENS", 2 * BLOCK)
    monkeypatch.setattr(slabs, "PARTS_AT_ONCE", 3)
    monkeypatch.setattr(slabs, "INTERPRETED", True)


def packed_side(side: Side, batch: int, head_dim: int, dtype: torch.dtype) -> PackedSide:
    form = CodeFormat(4, *((BLOCK, 1) if side == "keys" else (1, head_dim)), rotated=True)
    codes = torch.randint(0, 16, (batch, KV_HEADS, BLOCKS * BLOCK, head_dim), dtype=torch.uint8)
    groups = (batch, KV_HEADS, BLOCKS * BLOCK // form.group_tokens, head_dim // form.group_channels)
    scale = (0.1 + 0.1 * torch.rand(groups)).to(dtype)
    zero = (torch.randn(groups) * 0.3 - 1).to(dtype)
    layout = BlockLayout(form, side, head_dim, BLOCK)
    return PackedSide(*pack_side(QuantizedGroups(codes, scale, zero), layout), layout)


def segments(batch: int, head_dim: int, dtype: torch.dtype, cut: bool) -> KVSegments:
    """Sinks, packed blocks (with evicted and cropped tokens if `cut`), and a residual."""
    packed = PackedSegment(
        packed_side("keys", batch, head_dim, dtype),
        packed_side("values", batch, head_dim, dtype),
        3 if cut else 0,
        (BLOCK, 0, BLOCK - 7, BLOCK) if cut else None,
    )

    def dense(tokens: int) -> DenseSegment:
        # Views of larger buffers, as a store has them.
        keys, values = (torch.randn(batch, KV_HEADS, tokens + 9, head_dim).to(dtype) for _ in range(2))
        return DenseSegment(keys[:, :, 4 : tokens + 4], values[:, :, 2 : tokens + 2])

    return KVSegments((dense(SINKS), packed, dense(RESIDUAL)))


def queries_of_a_model(batch: int, heads: int, queries: int, head_dim: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(batch, queries, heads, head_dim).to(dtype).transpose(1, 2)


def exact(query: Tensor, held: KVSegments, mask: Tensor | None, scale: float) -> Tensor:
    """Attention in float64 to the states that the codes stand for."""
    group = query.shape[1] // KV_HEADS
    keys, values = (held.dense(side, torch.float32).double().repeat_interleave(group, 1) for side in SIDES)
    scores = query.double() @ keys.transpose(2, 3) * scale
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask.double()
    return torch.nan_to_num(scores.softmax(-1)) @ values


SIDES: tuple[Side, Side] = ("keys", "values")


def check(query: Tensor, held: KVSegments, mask: Tensor | None, scale: float) -> None:
    """No further from float64 than twice what torch's attention is to states in full precision and this dtype.

    The slabs lose as much as it does: states rounded to the dtype, weights rounded to it before the second product, and
    one rounding of each result. Merging adds one more rounding of a result for each slab, in float32 sums.
    """
    dtype = query.dtype
    full = None if mask is None else mask.expand(*query.shape[:3], held.tokens)
    seen = slabs.attend(query, held, full, scale)
    wanted = exact(query, held, full, scale)
    assert (seen.shape, seen.dtype) == (wanted.shape, dtype)
    assert seen.isfinite().all()
    keys, values = (held.dense(side, dtype) for side in SIDES)
    plain_mask = full if full is None or full.dtype == torch.bool else full.to(dtype)
    plain = scaled_dot_product_attention(query, keys, values, plain_mask, scale=scale, enable_gqa=True)
    limit = 2 * (plain.double() - wanted).norm() + 8 * torch.finfo(dtype).eps * wanted.norm()
    assert (seen.double() - wanted).norm() <= limit


DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.mark.parametrize(
    ("dtype", "group", "head_dim", "cut"), product(DTYPES, [1, 4, 7], [64, 80, 128], [False, True])
)
def test_sinks_packed_blocks_and_residual_are_one_attention(
    dtype: torch.dtype, group: int, head_dim: int, cut: bool
) -> None:
    for batch, queries in ((1, 1), (2, 1), (1, 6), (2, 6)):
        held = segments(batch, head_dim, dtype, cut)
        query = queries_of_a_model(batch, KV_HEADS * group, queries, head_dim, dtype)
        check(query, held, None, head_dim**-0.5)
        check(query.contiguous(), held, torch.rand(batch, 1, queries, held.tokens) > 0.4, head_dim**-0.5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_smoothed_keys_are_scored_as_they_were(dtype: torch.dtype) -> None:
    sinks, packed, residual = segments(2, 64, dtype, cut=True).in_order
    assert isinstance(packed, PackedSegment)
    factor, mean = (part.to(dtype) for part in (1 + torch.rand(2, KV_HEADS, 1, 64), torch.randn(2, KV_HEADS, 1, 64)))
    smoothed = replace(packed, smoothing=KeySmoothing(factor=factor, mean=mean))
    held = KVSegments((sinks, smoothed, residual))
    for queries in (1, 6):
        query = queries_of_a_model(2, KV_HEADS * 4, queries, 64, dtype)
        check(query, held, None, 0.1)
        check(query, held, torch.rand(2, 1, queries, held.tokens) > 0.4, 0.1)


@pytest.mark.parametrize(
    ("dtype", "group", "kind"), product(DTYPES, [1, 4], ["bool", "float32", "own dtype", "with -inf"])
)
def test_masks_of_every_shape_and_kind(dtype: torch.dtype, group: int, kind: str) -> None:
    heads = KV_HEADS * group
    for batch, queries in itertools.product((1, 3), (1, 4)):
        held = segments(batch, 64, dtype, cut=True)
        query = queries_of_a_model(batch, heads, queries, 64, dtype)
        for sizes in itertools.product({1, batch}, {1, heads}, {1, queries}):
            mask = torch.randn(*sizes, held.tokens)
            if kind == "bool":
                mask = mask > 0
            elif kind == "with -inf":
                mask = mask.masked_fill(mask > 0, -torch.inf)
            check(query, held, mask.to(dtype) if kind == "own dtype" else mask, 0.1)


@pytest.mark.parametrize("hidden", ["bool", "-inf", "lowest number"])
@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_query_that_sees_nothing_gets_zeros_and_one_that_sees_a_part_gets_that(
    dtype: torch.dtype, group: int, hidden: str
) -> None:
    for batch in (1, 2):
        held = segments(batch, 64, dtype, cut=False)
        query = queries_of_a_model(batch, KV_HEADS * group, 4, 64, dtype)
        seen = torch.ones(batch, 1, 4, held.tokens, dtype=torch.bool)
        seen[:, :, 0] = False
        seen[:, :, 1, :-RESIDUAL] = False
        seen[:, :, 2, SINKS:] = False
        lowest = -torch.inf if hidden == "-inf" else torch.finfo(torch.float32).min
        mask = seen if hidden == "bool" else torch.zeros(seen.shape).masked_fill(~seen, lowest)
        result = slabs.attend(query, held, mask.expand(-1, query.shape[1], -1, -1), 0.1)
        assert not result[:, :, 0].any()
        check(query, held, seen, 0.1)
        torch.testing.assert_close(
            result, slabs.attend(query, held, seen.expand(-1, query.shape[1], -1, -1), 0.1), rtol=0, atol=0
        )


def test_states_of_zeros_keep_their_weight_beside_hidden_tokens() -> None:
    # Kernels return a log-sum-exp of 0 for a query that sees none of the tokens: the same as for one score of 0.
    held = KVSegments(
        tuple(
            DenseSegment(torch.zeros(1, 1, 8, 64).bfloat16(), torch.full((1, 1, 8, 64), x).bfloat16()) for x in (1, 3)
        )
    )
    mask = torch.zeros(1, 1, 1, 16, dtype=torch.bool)
    mask[..., 9] = True
    seen = slabs.attend(torch.zeros(1, 1, 1, 64).bfloat16(), held, mask, 1.0)
    assert torch.equal(seen, torch.full_like(seen, 3))


def test_plain_torch_takes_a_few_queries_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slabs, "SCORES_AT_ONCE", 3 * 2 * 8 * 2 * BLOCK)
    held = segments(2, 64, torch.float32, cut=True)
    query = queries_of_a_model(2, 8, 11, 64, torch.float32)
    for mask in (None, torch.rand(2, 1, 11, held.tokens) > 0.5, torch.randn(1, 8, 1, held.tokens)):
        check(query, held, mask, 0.1)


@pytest.mark.parametrize(("key_dim", "value_dim"), [(64, 48), (20, 20), (264, 264)])
def test_states_that_no_fused_kernel_takes_go_through_plain_torch(key_dim: int, value_dim: int) -> None:
    keys, values = torch.randn(2, 2, 150, key_dim).bfloat16(), torch.randn(2, 2, 150, value_dim).bfloat16()
    held = KVSegments((DenseSegment(keys, values),))
    query = queries_of_a_model(2, 4, 3, key_dim, torch.bfloat16)
    assert not fused.takes(query, held.head_dims, has_mask=True)
    check(query, held, torch.rand(2, 1, 3, 150) > 0.5, 0.1)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_products_of_eager_attention_are_those_of_the_states(dtype: torch.dtype) -> None:
    held = segments(2, 64, dtype, cut=True)
    query = queries_of_a_model(2, 8, 3, 64, dtype)
    keys, values = (held.dense(side, torch.float32).double().repeat_interleave(4, 1) for side in SIDES)
    weights = torch.rand(2, 8, 3, held.tokens).to(dtype)
    # Each of 64 or 300 summands has two factors that are rounded, and each of four parts is rounded once.
    close = {"rtol": 0, "atol": 8 * torch.finfo(dtype).eps}
    seen, wanted = slabs.scores(query, held).double(), query.double() @ keys.transpose(2, 3)
    torch.testing.assert_close(seen / wanted.abs().max(), wanted / wanted.abs().max(), **close)
    seen, wanted = slabs.combine(weights, held).double(), weights.double() @ values
    torch.testing.assert_close(seen / wanted.abs().max(), wanted / wanted.abs().max(), **close)


def test_explanations_name_the_path() -> None:
    paths = PathCounter()
    for dtype in (torch.bfloat16, torch.float32):
        held = segments(1, 64, dtype, cut=False)
        query = queries_of_a_model(1, 4, 3, 64, dtype)
        dispatch.attend(query, held, None, None, paths)
        dispatch.scores(query, held, paths)
    assert dict(paths.counts) == {
        "torch's fused attention, slab by slab, as there are no Triton kernels for cpu": 1,
        "plain torch, slab by slab, as there are no Triton kernels for cpu": 1,
        "plain torch, slab by slab, as no kernel takes a single product of eager attention": 2,
    }


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_query_attends_to_anything(dtype: torch.dtype) -> None:
    held = segments(2, 64, dtype, cut=False)
    query = queries_of_a_model(2, 8, 0, 64, dtype)
    assert slabs.attend(query, held, None, 0.1).shape == (2, 8, 0, 64)
    assert slabs.attend(query, held, torch.ones(2, 8, 0, held.tokens, dtype=torch.bool), 0.1).shape == (2, 8, 0, 64)


def test_channels_need_not_be_neighbours() -> None:
    query, keys, values = (torch.randn(2, heads, 20, 32).half() for heads in (4, 2, 2))
    apart = [side.transpose(2, 3).contiguous().transpose(2, 3) for side in (keys, values)]
    expected = fused.attend_dense(query, keys, values, None, 0.2)
    for found, right in zip(fused.attend_dense(query, *apart, None, 0.2), expected, strict=True):
        assert torch.equal(found, right)


def test_kernels_are_those_that_torch_may_use_now(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is not allowed within a context is used again after it."""
    cuda = torch.backends.cuda
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch, "empty", lambda *args, **kwargs: None)
    monkeypatch.setattr(cuda, "SDPAParams", lambda *args: None)
    monkeypatch.setattr(cuda, "can_use_flash_attention", lambda asked: cuda.flash_sdp_enabled())
    monkeypatch.setattr(cuda, "can_use_efficient_attention", lambda asked: cuda.mem_efficient_sdp_enabled())

    def found() -> tuple[bool, bool]:
        device, dtype = torch.device("cuda", 77), torch.bfloat16
        unmasked, masked = (fused.kernel_for(device, dtype, (128, 128), has_mask) for has_mask in (False, True))
        return unmasked is not None, masked is not None

    with sdpa_kernel(SDPBackend.MATH):
        assert found() == (False, False)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        assert found() == (True, False)
    assert found() == (True, True)


def test_a_kernel_that_was_found_wrong_gives_its_place_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    states = torch.randn(1, 2, 30, 64)
    query, held = torch.randn(1, 4, 1, 64), KVSegments((DenseSegment(states, states + 1),))
    monkeypatch.setattr(slabs, "INTERPRETED", True)
    monkeypatch.setattr(cuda_kernel, "attend", lambda *args: "it differs")
    paths = PathCounter()
    seen = dispatch.attend(query, held, None, 0.1, paths)
    assert torch.equal(seen, slabs.attend(query, held, None, 0.1))
    assert "it differs" in next(iter(paths.counts))
