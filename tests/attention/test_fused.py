"""Attention by torch's fused kernels over slabs is that of the states: on a CPU, by its own fused kernel."""

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import kvlayers
from histories import (
    BLOCK,
    KV_HEADS,
    RESIDUAL,
    ROUNDED,
    SINKS,
    History,
    dense_source,
    ordinary,
    side_by_side,
    sinks_codes_and_residual,
)
from kvlayers.kernels.attention import dispatch, fused, segment_kinds, slabs
from kvlayers.kernels.attention.packed_tensor import PackedStates, as_dense
from kvlayers.kernels.attention.segments import KVSegments
from kvlayers.kernels.codes.smoothing import KeySmoothing

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.fixture(autouse=True)
def small_slabs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slabs of two blocks, and a merge in between, so that few tokens go all ways."""
    monkeypatch.setattr(slabs, "SLAB_BYTES", 1)
    monkeypatch.setattr(slabs, "MINIMUM_SLAB_TOKENS", 2 * BLOCK)
    monkeypatch.setattr(slabs, "PARTS_AT_ONCE", 3)
    monkeypatch.setattr(slabs, "INTERPRETED", True)


def check(query: Tensor, held: History, mask: Tensor | None) -> None:
    full = None if mask is None else mask.expand(*query.shape[:3], held.segments.tokens)
    held.check(query, mask, slabs.attend(query, held.segments, full, 0.2), ROUNDED[query.dtype])


@pytest.mark.parametrize("dtype", DTYPES)
def test_smoothed_keys_are_scored_as_they_were(dtype: torch.dtype) -> None:
    factor, mean = (part.to(dtype) for part in (1 + torch.rand(2, KV_HEADS, 1, 64), torch.randn(2, KV_HEADS, 1, 64)))
    held = sinks_codes_and_residual(2, dtype, smoothing=KeySmoothing(factor=factor, mean=mean))
    for queries in (1, 6):
        query = held.query(4, queries)
        check(query, held, None)
        check(query.contiguous(), held, torch.rand(2, 1, queries, held.segments.tokens) > 0.4)


@pytest.mark.parametrize("hidden", ["bool", "-inf", "lowest number"])
@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_query_that_sees_nothing_gets_zeros_and_one_that_sees_a_part_gets_that(
    dtype: torch.dtype, group: int, hidden: str
) -> None:
    for batch in (1, 2):
        held = sinks_codes_and_residual(batch, dtype, cut=False)
        query = held.query(group, 4)
        seen = torch.ones(batch, 1, 4, held.segments.tokens, dtype=torch.bool)
        seen[:, :, 0] = False
        seen[:, :, 1, :-RESIDUAL] = False
        seen[:, :, 2, SINKS:] = False
        lowest = -torch.inf if hidden == "-inf" else torch.finfo(torch.float32).min
        mask = seen if hidden == "bool" else torch.zeros(seen.shape).masked_fill(~seen, lowest)
        result, by_bool = (
            slabs.attend(query, held.segments, given.expand(-1, query.shape[1], -1, -1), 0.2) for given in (mask, seen)
        )
        assert not result[:, :, 0].any()
        held.check(query, seen, result, ROUNDED[dtype])
        torch.testing.assert_close(result, by_bool, rtol=0, atol=0)


def test_states_of_zeros_keep_their_weight_beside_hidden_tokens() -> None:
    # Kernels return a log-sum-exp of 0 for a query that sees none of the tokens: the same as for one score of 0.
    keys, *values = (torch.full((1, 1, 8, 64), number).bfloat16() for number in (0, 1, 3))
    held = KVSegments(tuple(segment_kinds.DenseSegment(keys, states) for states in values))
    mask = torch.zeros(1, 1, 1, 16, dtype=torch.bool)
    mask[..., 9] = True
    seen = slabs.attend(torch.zeros(1, 1, 1, 64).bfloat16(), held, mask, 1.0)
    assert torch.equal(seen, torch.full_like(seen, 3))


def test_plain_torch_takes_a_few_queries_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slabs, "SCORES_AT_ONCE", 3 * 2 * 8 * 2 * BLOCK)
    held = sinks_codes_and_residual(2, torch.float32)
    query = held.query(4, 11)
    for mask in (None, torch.rand(2, 1, 11, held.segments.tokens) > 0.5, torch.randn(1, 8, 1, held.segments.tokens)):
        check(query, held, mask)


@pytest.mark.parametrize(("key_dim", "value_dim"), [(64, 48), (20, 20), (264, 264)])
def test_states_that_no_fused_kernel_takes_go_through_plain_torch(key_dim: int, value_dim: int) -> None:
    held = side_by_side([ordinary(dense_source(2, 150, torch.bfloat16, key_dim, value_dim))], torch.bfloat16)
    query = held.query(2, 3)
    assert not fused.takes(query, held.segments.head_dims, has_mask=True)
    check(query, held, torch.rand(2, 1, 3, 150) > 0.5)


def test_explanations_name_the_path() -> None:
    paths = dispatch.PathCounter()
    for dtype in (torch.bfloat16, torch.float32):
        held = sinks_codes_and_residual(1, dtype)
        query = held.query(2, 3)
        dispatch.attend(query, held.segments, None, None, paths)
        dispatch.scores(query, held.segments, paths)
    assert dict(paths.counts) == {
        "torch's fused attention, slab by slab, as there are no Triton kernels for cpu": 1,
        "plain torch, slab by slab, as there are no Triton kernels for cpu": 1,
        "plain torch, slab by slab, as no kernel takes a single product of eager attention": 2,
    }


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_query_attends_to_anything(dtype: torch.dtype) -> None:
    held = sinks_codes_and_residual(2, dtype)
    query, tokens = held.query(4, 0), held.segments.tokens
    for mask in (None, torch.ones(2, 8, 0, tokens, dtype=torch.bool)):
        assert slabs.attend(query, held.segments, mask, 0.1).shape == (2, 8, 0, 64)


def test_channels_need_not_be_neighbours() -> None:
    query, keys, values = (torch.randn(2, heads, 20, 32).half() for heads in (4, 2, 2))
    apart = [side.transpose(2, 3).contiguous().transpose(2, 3) for side in (keys, values)]
    expected = fused.attend_dense(query, keys, values, None, 0.2)
    assert all(map(torch.equal, fused.attend_dense(query, *apart, None, 0.2), expected))


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


# Prefixes that sequences share: one call over the prefix, and numbers that the host never reads

PREFIXES, REPEATS, PREFIX_TOKENS = 2, 3, 50


@pytest.fixture(params=["read", "not read"])
def indices_are(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Whether the host reads indices, as they come from it, or from the accelerator."""
    monkeypatch.setattr(segment_kinds, "reading_waits", lambda indices: request.param == "not read")
    return str(request.param)


def states(batch: int, kv_heads: int, tokens: int) -> tuple[Tensor, ...]:
    return tuple(torch.randn(batch, kv_heads, tokens, 16).bfloat16() for _ in range(2))


def layers_of(kv_heads: int, prefixes: int = PREFIXES) -> list[kvlayers.DynamicLayer]:
    """A layer whose sequences share prefixes, and one that has copies of them."""
    layers, begun = [kvlayers.DynamicLayer(), kvlayers.DynamicLayer()], states(prefixes, kv_heads, PREFIX_TOKENS)
    for layer in layers:
        layer.update(*begun)
    layers[0].expand(REPEATS)
    layers[1].batch_repeat_interleave(REPEATS)
    return layers


def check_layers(layers: list[kvlayers.DynamicLayer], tokens: int, group: int) -> None:
    """No further from float64 than twice what torch's attention loses in this dtype, as for slabs.

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


def select(layers: list[kvlayers.DynamicLayer], rows: list[int]) -> None:
    for layer in layers:
        layer.select(torch.tensor(rows))


def test_beams_are_selected_step_by_step(indices_are: str) -> None:
    generator = torch.Generator().manual_seed(0)
    for prefixes in (1, PREFIXES):
        layers = layers_of(2, prefixes)
        for _ in range(6):
            check_layers(layers, 1, 2)
            # Beams stay with their prompt, as in transformers.
            rows = torch.randint(0, REPEATS, (prefixes, REPEATS), generator=generator)
            select(layers, (rows + torch.arange(prefixes)[:, None] * REPEATS).flatten().tolist())
        # Across prefixes, and unevenly.
        select(layers, [prefixes * REPEATS - 1, 0, 0, 1])
        check_layers(layers, 3, 2)
        for layer in layers:
            layer.crop(PREFIX_TOKENS - 7)
        check_layers(layers, 2, 2)


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
