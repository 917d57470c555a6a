"""What an accelerator is given by attention: how many kernels over slabs, and which ones. On meta tensors."""

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import device_counts as counting
import kvlayers
from kvlayers.kernels.attention import dense_kernels, dispatch, slabs
from kvlayers.kernels.attention.segment_kinds import DenseSegment, PackedSegment
from kvlayers.kernels.attention.segments import KVSegments
from kvlayers.kernels.codes.groups import BlockLayout
from kvlayers.kernels.codes.packed_side import PackedSide
from kvlayers.kernels.codes.quantizer_contract import CodeFormat, Side
from spies import Operators

HEADS, KV_HEADS, HEAD_DIM, BLOCK = 32, 8, 128, 64
"""Of a layer of an 8B model."""


@pytest.fixture
def with_triton() -> Iterator[None]:
    """Triton runs on meta tensors."""
    with counting.gpu():
        yield


def launches(function: Callable[[], Tensor]) -> Any:
    """What a function launches the second time, as what is made once for a process does not count."""
    with torch.no_grad():
        function()
        with counting.counted() as counts:
            function()
    assert not counts.stalls
    return counts.kernels


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def packed_side(side: Side, batch: int, blocks: int) -> PackedSide:
    form = CodeFormat(4, *((BLOCK, 1) if side == "keys" else (1, HEAD_DIM)), rotated=True)
    groups = HEAD_DIM if side == "keys" else BLOCK
    codes = meta(batch, KV_HEADS, blocks, BLOCK * HEAD_DIM // 2, dtype=torch.uint8)
    return PackedSide(codes, meta(batch, KV_HEADS, blocks, 2 * groups), BlockLayout(form, side, HEAD_DIM, BLOCK))


def int4_segments(tokens: int, residual: int, batch: int = 1, ends: tuple[int, ...] | None = None) -> KVSegments:
    def dense(tokens: int) -> DenseSegment:
        return DenseSegment(*(meta(batch, KV_HEADS, tokens, HEAD_DIM) for _ in range(2)))

    sides = (packed_side(side, batch, tokens // BLOCK) for side in ("keys", "values"))
    return KVSegments((dense(16), PackedSegment(*sides, 0, ends), dense(residual)))


def query_of_a_model(batch: int, queries: int) -> Tensor:
    return meta(batch, queries, HEADS, HEAD_DIM).transpose(1, 2)


@pytest.mark.parametrize(("batch", "most"), [(1, 24), (2, 50)])
@pytest.mark.usefixtures("with_triton")
def test_a_second_turn_behind_packed_tokens(batch: int, most: int) -> None:
    # Several sequences take a call for each query head of a group: a mask of each sequence fits no other order of rows.
    held = int4_segments(32768, 128 + 512, batch)
    mask = meta(batch, 1, 512, held.tokens, dtype=torch.bool)
    counts = launches(lambda: dispatch.attend(query_of_a_model(batch, 512), held, mask, None, dispatch.PathCounter()))
    assert counts.total() <= most, counts
    assert not counts["clone"]


@pytest.mark.usefixtures("with_triton")
def test_slabs_do_not_become_many_after_a_crop() -> None:
    held = int4_segments(32768, 512, ends=(*[BLOCK] * 400, 17, *[BLOCK] * 111))
    counts = launches(lambda: dispatch.attend(query_of_a_model(1, 512), held, None, None, dispatch.PathCounter()))
    assert counts.total() <= 16, counts


@pytest.mark.parametrize("count", [1, 4])
def test_decoding_on_an_accelerator_without_triton(count: int) -> None:
    tokens = count * slabs.MINIMUM_SLAB_TOKENS
    held = int4_segments(tokens, 128)
    mask = meta(1, 1, 1, held.tokens, dtype=torch.bool)
    weights = meta(1, HEADS, 1, held.tokens)
    paths = dispatch.PathCounter()
    # Plain torch takes some 14 to unpack a side of a slab.
    assert launches(lambda: dispatch.attend(query_of_a_model(1, 1), held, None, None, paths)).total() <= 10 + 30 * count
    assert launches(lambda: dispatch.attend(query_of_a_model(1, 1), held, mask, None, paths)).total() <= 17 + 33 * count
    assert launches(lambda: dispatch.scores(query_of_a_model(1, 1), held, paths)).total() <= 4 + 16 * count
    assert launches(lambda: dispatch.combine(weights, held, paths)).total() <= 6 + 16 * count
    assert any(path.startswith("torch's fused attention, slab by slab") for path in paths.counts)


def test_eight_samples_of_a_long_prompt_without_triton() -> None:
    layer = kvlayers.DynamicLayer()
    layer.update(*(meta(1, KV_HEADS, 32768, HEAD_DIM) for _ in range(2)))
    layer.expand(8)

    def step() -> Tensor:
        states = layer.update(*(meta(8, KV_HEADS, 1, HEAD_DIM) for _ in range(2)))
        return scaled_dot_product_attention(query_of_a_model(8, 1), *states, enable_gqa=True)

    step()
    # The update is two of them.
    assert launches(step).total() <= 8


@pytest.mark.parametrize("queries", [1, 5, 33])
@pytest.mark.parametrize("value_dim", [128, 64])
@pytest.mark.parametrize("masked", [False, True])
def test_results_have_the_shapes_that_the_kernels_of_a_gpu_promise(queries: int, value_dim: int, masked: bool) -> None:
    # The kernel with a mask pads the log-sum-exp to a multiple of 32 queries.
    for batch, group in ((1, 1), (1, 4), (3, 4)):
        query = meta(batch, queries, 2 * group, 128).transpose(1, 2)
        parts = [DenseSegment(meta(batch, 2, tokens, 128), meta(batch, 2, tokens, value_dim)) for tokens in (7, 40)]
        mask = meta(batch, 1, queries, 47, dtype=torch.bool) if masked else None
        out = slabs.attend(query, KVSegments(tuple(parts)), mask, 0.1)
        assert out.shape == (*query.shape[:3], value_dim)


@pytest.mark.parametrize("sizes", [(1, 1), (3, 1), (1, 9), (3, 9)])
@pytest.mark.parametrize("kind", [torch.bool, torch.float32])
def test_the_kernel_with_a_mask_gets_aligned_rows_and_no_copied_keys(sizes: tuple[int, int], kind: torch.dtype) -> None:
    # What `check_supported` of the kernel asks for, in numbers of two bytes; on a CPU nobody would notice.
    batch, queries = sizes
    keys = meta(batch, KV_HEADS, 1003, HEAD_DIM)
    held = KVSegments((DenseSegment(keys, keys),))
    given: list[Any] = []

    def note(operator: Any, arguments: Any, result: Any) -> None:
        if operator is torch.ops.aten._scaled_dot_product_efficient_attention.default:
            given.append(arguments)

    for mask_heads in (1, HEADS):
        mask = meta(batch, mask_heads, queries, 1003, dtype=kind).expand(-1, HEADS, -1, -1)
        with Operators(note):
            slabs.attend(query_of_a_model(batch, queries), held, mask, 0.1)
    assert len(given) == (2 if batch == 1 or queries == 1 else 2 * HEADS // KV_HEADS)
    for query, its_keys, its_values, bias, wants_logsumexp, *_ in given:
        assert wants_logsumexp
        assert query.shape[:2] == its_keys.shape[:2] == its_values.shape[:2]
        assert bias.shape == (*query.shape[:3], 1003)
        assert its_keys.untyped_storage()._cdata == keys.untyped_storage()._cdata
        assert bias.stride(3) == query.stride(3) == 1
        for states in (query, bias):
            assert not any(stride % 8 for stride in states.stride()[:3])
            assert not states.storage_offset() % 8
        # What is read behind the last column is memory of the bias.
        assert bias.untyped_storage().nbytes() // 2 % 8 == 0


def test_a_long_mask_is_converted_piece_by_piece() -> None:
    held = int4_segments(1 << 18, 128)
    mask = meta(1, 1, 8192, held.tokens, dtype=torch.bool)
    sizes = [0]

    def note(operator: Any, arguments: Any, result: Any) -> None:
        if operator is torch.ops.aten.full.default:
            sizes.append(result.numel() * result.element_size())

    with Operators(note):
        slabs.attend(query_of_a_model(1, 8192), held, mask.expand(-1, HEADS, -1, -1), 0.1)
    assert 0 < max(sizes) <= slabs.SLAB_BYTES


# Decode steps call flash attention in place of cuDNN, and with a mask the Triton kernel


@pytest.fixture
def cudnn_is_preferred(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dense_kernels, "replaces_cudnn", lambda states: states.is_meta)


def states(tokens: int, heads: int = KV_HEADS) -> Tensor:
    return meta(2, heads, tokens, HEAD_DIM)


def calls_flash(keys: Tensor, values: Tensor, queries: int = 1, **options: object) -> bool:
    query = states(queries, HEADS).requires_grad_(bool(options.pop("gradients", False)))
    names: list[str] = []
    with Operators(lambda operator, *_: names.append(str(operator))):
        out = scaled_dot_product_attention(query, keys, values, enable_gqa=True, **options)
    assert out.shape == (2, HEADS, queries, HEAD_DIM)
    return "aten._scaled_dot_product_flash_attention.default" in names


CACHES = {
    "dynamic": lambda: kvlayers.DynamicCache(),
    "static": lambda: kvlayers.Cache(layers=[kvlayers.StaticLayer(64)]),
    "sliding": lambda: kvlayers.Cache(layers=[kvlayers.SlidingLayer(16)]),
    "static sliding": lambda: kvlayers.Cache(layers=[kvlayers.StaticSlidingLayer(max_cache_len=64, sliding_window=16)]),
    "quantized, before the first block": lambda: kvlayers.QuantizedCache(),
}


@pytest.mark.usefixtures("cudnn_is_preferred")
@pytest.mark.parametrize("name", CACHES)
def test_each_step_of_a_full_precision_cache_calls_flash_attention(name: str) -> None:
    cache = CACHES[name]()
    cache.update(states(20), states(20), 0)
    for _ in range(3):
        keys, values = cache.update(states(1), states(1), 0)
        assert calls_flash(keys, values)
        assert calls_flash(keys, values, scale=0.5)


@pytest.mark.usefixtures("cudnn_is_preferred")
@pytest.mark.parametrize(
    "options",
    [
        {"attn_mask": torch.ones(2, 1, 1, 21, dtype=torch.bool, device="meta")},
        {"dropout_p": 0.1},
        {"is_causal": True},
        {"gradients": True},
        {"queries": 3},
    ],
    ids=lambda options: next(iter(options)),
)
def test_other_attention_is_left_to_torch(options: dict[str, object]) -> None:
    cache = kvlayers.DynamicCache()
    cache.update(states(20), states(20), 0)
    keys, values = cache.update(states(1), states(1), 0)
    assert not calls_flash(keys, values, **options)


@pytest.mark.usefixtures("cudnn_is_preferred")
def test_a_prompt_and_states_of_other_gpus_are_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = kvlayers.DynamicCache()
    assert not calls_flash(*cache.update(states(20), states(20), 0), queries=20)
    monkeypatch.setattr(dense_kernels, "replaces_cudnn", lambda states: False)
    keys, values = cache.update(states(1), states(1), 0)
    assert type(keys) is Tensor
    assert not calls_flash(keys, values)


@pytest.fixture
def kernel_calls(cudnn_is_preferred: None, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Shapes of the query, of the keys and of the mask in each call of the Triton kernel."""
    seen = []

    def attend(query: Tensor, segments: KVSegments, mask: Tensor | None, scale: float, by_torch: object) -> Tensor:
        (segment,) = segments.in_order
        seen.append((tuple(query.shape), tuple(segment.keys.shape), None if mask is None else tuple(mask.shape), scale))
        batch, heads, queries, _ = query.shape
        return query.new_empty((batch, queries, heads, segment.values.shape[3])).transpose(1, 2)

    monkeypatch.setattr(dense_kernels, "serves_few_queries", lambda states: states.is_meta)
    monkeypatch.setattr(dense_kernels.cuda_kernel, "attend", attend)
    return seen


MODULE = SimpleNamespace(num_key_value_groups=HEADS // KV_HEADS, is_causal=True)
"""The module of attention of a model."""


@pytest.mark.parametrize("queries", [1, 5])
@pytest.mark.parametrize("name", CACHES)
def test_few_queries_with_a_mask_go_to_the_triton_kernel(
    name: str, queries: int, kernel_calls: list[tuple[int, ...]]
) -> None:
    cache = CACHES[name]()
    cache.update(states(10), states(10), 0)
    # As models do that make the mask.
    cache.get_mask_sizes(queries, 0)
    keys, values = cache.update(states(queries), states(queries), 0)
    tokens = keys.shape[2]
    mask = torch.ones(2, 1, queries, tokens, dtype=torch.bool, device="meta")
    copied = [0]
    with Operators(
        lambda operator, _, result: copied.append(result.numel() if str(operator) == "aten.clone.default" else 0)
    ):
        out, _ = sdpa_attention_forward(MODULE, states(queries, HEADS), keys, values, mask, scaling=0.5)
    assert out.shape == (2, queries, HEADS, HEAD_DIM)
    # transformers may take the query heads of a group for queries itself, if there is one.
    ((query, of_keys, of_mask, scale),) = kernel_calls
    assert (query[0], query[1] * query[2], query[3]) == (2, HEADS * queries, HEAD_DIM)
    assert (of_keys, of_mask, scale) == ((2, KV_HEADS, tokens, HEAD_DIM), (*query[:3], tokens), 0.5)
    # The result may be copied, but no key or value is repeated.
    assert max(copied) <= out.numel()


def test_a_prompt_with_a_mask_is_left_to_torch(kernel_calls: list[tuple[int, ...]]) -> None:
    cache = kvlayers.DynamicCache()
    keys, values = cache.update(states(40), states(40), 0)
    mask = torch.ones(2, 1, 40, 40, dtype=torch.bool, device="meta")
    sdpa_attention_forward(MODULE, states(40, HEADS), keys, values, mask)
    assert not kernel_calls
