"""Attention to any number of segments, dense and packed, shared by sequences and gathered by heads, against float64."""

import copy
import itertools
import pickle
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import kvlayers
from histories import (
    BLOCK,
    KINDS,
    KV_HEADS,
    MASKS,
    ROUNDED,
    Draws,
    History,
    dense_source,
    gathered,
    history,
    ordinary,
    packed_source,
    random_mask,
    side_by_side,
    sinks_codes_and_residual,
    source_of,
)
from kvlayers.kernels.attention import dispatch, slabs
from kvlayers.kernels.attention.cpu import kernel
from kvlayers.kernels.attention.segment_kinds import DenseSegment, SegmentRows
from kvlayers.kernels.attention.segments import GatheredSegment, KVSegments, Segment
from matrix import once, product
from spies import spy

needs_compiler = pytest.mark.skipif(kernel.library() is None, reason="there is no C++ compiler for the kernel")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
WAYS = [pytest.param("kernel", marks=needs_compiler), "plain torch", "accelerator"]


@pytest.fixture
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Attention by one of the ways that there are. Those of accelerators go slab by slab."""
    if request.param != "kernel":
        monkeypatch.setattr(kernel, "library", lambda: None)
        monkeypatch.setattr(kernel.MANY, "get", lambda: None)
        # Few scores and codes at once, so that few tokens are several slabs.
        for name in ("CPU_SCORES_AT_ONCE", "CPU_CODES_AT_ONCE"):
            monkeypatch.setattr(slabs, name, 1)
    if request.param == "accelerator":
        monkeypatch.setattr(slabs, "INTERPRETED", True)
        monkeypatch.setattr(slabs, "MINIMUM_SLAB_TOKENS", 2 * BLOCK)
        monkeypatch.setattr(slabs, "SLAB_BYTES", 1)
        monkeypatch.setattr(slabs, "PARTS_AT_ONCE", 3)
    return str(request.param)


every_way = pytest.mark.parametrize("way", WAYS, indirect=True)


def attend(query: Tensor, held: History, mask: Tensor | None = None) -> Tensor:
    return dispatch.attend(query, held.segments, mask, 0.2, dispatch.PathCounter())


def eager(query: Tensor, held: History) -> Tensor:
    """Attention by the products of eager attention."""
    weights = dispatch.scores(query, held.segments, dispatch.PathCounter()).mul(0.2).softmax(-1)
    return dispatch.combine(weights, held.segments, dispatch.PathCounter())


def rounded(way: str, dtype: torch.dtype) -> float | None:
    return ROUNDED[dtype] if way == "accelerator" else None


@pytest.mark.parametrize(("way", "dtype", "kind"), product(WAYS, DTYPES, KINDS), indirect=["way"])
def test_attention_is_that_to_the_states_of_all_segments(way: str, dtype: torch.dtype, kind: str) -> None:
    for seed, count in enumerate((1, 2, 5, 12)):
        held = history(kind, seed, dtype, count, (64, 80, 128)[seed % 3])
        # Plain torch reads several queries by its own attention, which is as exact as `test_dense_kernel` asks.
        by_torch = way == "plain torch" and held.segments.are_dense and not held.segments.shares_rows
        for queries, group in ((1, 1 + seed), (3, 2)):
            query = held.query(group, queries)
            if not held.segments.tokens or (by_torch and queries > 1):
                continue
            mask = random_mask(MASKS[(seed + queries) % len(MASKS)], query, held.segments.tokens)
            held.check(query, mask, attend(query, held, mask), rounded(way, dtype))


@pytest.mark.parametrize(
    ("way", "dtype", "group", "kind"),
    product(WAYS, DTYPES, [1, 3], ["bool", "float32", "bfloat16", "own dtype", "with -inf"]),
    indirect=["way"],
)
def test_masks_of_every_shape_and_kind(way: str, dtype: torch.dtype, group: int, kind: str) -> None:
    for batch, queries in itertools.product((1, 3), (1, 4)):
        held = sinks_codes_and_residual(batch, dtype)
        query = held.query(group, queries)
        for sizes in itertools.product({1, batch}, {1, query.shape[1]}, {1, queries}):
            mask = torch.randn(*sizes, held.segments.tokens)
            if kind == "bool":
                mask = mask > 0
            elif kind == "with -inf":
                mask = mask.masked_fill(mask > 0, -torch.inf)
            elif kind != "float32":
                mask = mask.to(torch.bfloat16 if kind == "bfloat16" else dtype)
            held.check(query, mask, attend(query, held, mask), rounded(way, dtype))


@pytest.mark.parametrize(
    ("way", "dtype", "kind"), product(WAYS, [torch.float32, torch.bfloat16], KINDS), indirect=["way"]
)
def test_the_products_of_eager_attention_are_those_of_all_segments(way: str, dtype: torch.dtype, kind: str) -> None:
    held, paths = history(kind, 3, dtype), dispatch.PathCounter()
    held.check_products(
        held.query(2, 3),
        lambda query, segments: dispatch.scores(query, segments, paths),
        lambda weights, segments: dispatch.combine(weights, segments, paths),
        rounded(way, dtype),
    )


@pytest.mark.parametrize(("way", "dtype", "kind"), once(WAYS[:2], DTYPES, KINDS), indirect=["way"])
def test_many_queries(way: str, dtype: torch.dtype, kind: str) -> None:
    held = history(kind, 5, dtype, 5)
    limit = kernel.CPU_MAXIMUM_ROWS if held.segments.holds_packed else kernel.CPU_MAXIMUM_DENSE_ROWS
    query = held.query(3, limit // 3 + 1)
    for mask in MASKS:
        check_many(held, query, random_mask(mask, query, held.segments.tokens))


def check_many(held: History, query: Tensor, mask: Tensor | None) -> None:
    """Weights are rounded to bfloat16, as in torch's attention, and so are codes and queries that are not."""
    paths = dispatch.PathCounter()
    seen = dispatch.attend(query, held.segments, mask, 0.2, paths)
    if held.segments.are_dense and not held.segments.holds_gathered:
        keys, values = held.keys.to(held.dtype), held.values.to(held.dtype)
        plain = scaled_dot_product_attention(query, keys, values, mask, scale=0.2, enable_gqa=True)
        exact = held.attended(query, mask)[0]
        # The kernel for many queries adds up in another order than torch's attention.
        assert (seen - exact).abs().max() <= 2 * (plain - exact).abs().max() + 1e-6
    else:
        held.check(query, mask, seen, {torch.bfloat16: 0.03, torch.float16: 0.004}.get(held.dtype))
    expected = dispatch.COPY
    if held.segments.holds_gathered or held.dtype == torch.float16:
        expected = dispatch.BLOCKS
    if held.segments.shares_rows:
        expected = dispatch.SHARED
    if kernel.MANY.get() is not None:
        expected = dispatch.MANY
    assert [path.startswith(expected) for path in paths.counts] == [True]


@needs_compiler
def test_the_compiled_kernel_takes_what_it_is_fastest_for() -> None:
    """Up to a number of queries that all read the same keys."""

    def taken(queries: int, *segments: Segment) -> bool:
        paths = dispatch.PathCounter()
        segments_of = KVSegments(segments)
        query = torch.randn(segments_of.batch, 2, queries, 64)
        dispatch.attend(query, segments_of, None, 0.2, paths)
        return list(paths.counts) == [dispatch.CPU]

    dense, packed = dense_source(2, 20, torch.float32)[0], packed_source(2, 2, torch.float32)[0]
    rows = SegmentRows(2, (0, 1, 1, 1))
    own = dense_source(4, 5, torch.float32)[0]
    limit, dense_limit = kernel.CPU_MAXIMUM_ROWS, kernel.CPU_MAXIMUM_DENSE_ROWS
    for most, *segments in (
        (limit, packed, dense),
        (dense_limit, dense, dense),
        (limit // 3, packed.with_rows(rows), own),
    ):
        assert [taken(most, *segments), taken(most + 1, *segments)] == [True, False]
    assert not taken(dense_limit + 1, dense.with_rows(rows), own)
    many_rows = SegmentRows(2, (0,) * (dense_limit // kernel.CPU_MAXIMUM_QUERIES) + (1,))
    own = dense_source(len(many_rows), 5, torch.float32)[0]
    assert taken(kernel.CPU_MAXIMUM_QUERIES, dense.with_rows(many_rows), own)


@pytest.mark.parametrize("kind", ["dense packed rows", "pieces of dense", "pieces of flat packed"])
@pytest.mark.parametrize("queries", [1, 3])
def test_threads_change_nothing_but_the_order_of_sums(queries: int, kind: str) -> None:
    for seed in (3, 5):
        held = history(kind, seed, count=8, most=15)
        query = held.query(3, queries)
        mask = random_mask("causal", query, held.segments.tokens)
        for threads in (1, 2):
            torch.set_num_threads(threads)
            held.check(query, mask, attend(query, held, mask))


# Ordinary segments


@pytest.mark.parametrize("new", [1, 5])
def test_what_sequences_share_is_attended_to_in_float64(new: int) -> None:
    begun, queries, states = (
        torch.randn(4, 2, tokens, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(tokens))
        for tokens in (300, new, 2 * new)
    )
    cache = kvlayers.DynamicCache()
    cache.update(begun[:1], begun[:1], 0)
    cache.expand(4)
    keys, values = cache.update(states[:, :, :new], states[:, :, new:], 0)
    written_out = [torch.cat([begun[:1].expand(4, -1, -1, -1), part], 2) for part in states.split(new, 2)]
    mask = torch.ones(new, 300 + new, dtype=torch.bool).tril(300)
    assert type(keys) is not Tensor
    seen, expected = (
        [
            scaled_dot_product_attention(queries, *states, mask),
            (queries @ states[0].transpose(2, 3)).softmax(-1) @ states[1],
        ]
        for states in ((keys, values), written_out)
    )
    torch.testing.assert_close(seen, expected, atol=1e-12, rtol=1e-12)


@needs_compiler
@pytest.mark.parametrize("threads", [1, 2])
def test_segments_that_are_cut_are_read_bit_by_bit_as_one(threads: int) -> None:
    torch.set_num_threads(threads)
    for dtype in (torch.float32, torch.bfloat16):
        packed = packed_source(2, 12, dtype)[0]
        # Cut where units of dense tokens end (`UNIT_TOKENS` of plan.h), as blocks do of packed ones.
        dense = dense_source(2, 1280, dtype)[0]
        whole = KVSegments((packed, dense))
        query = torch.randn(2, 6, 2, 64).to(dtype)
        mask = torch.rand(2, 1, 2, whole.tokens) > 0.2
        for pieces, cuts in ((1, (256,)), (5, (256, 512, 1024)), (4, (768,))):
            bounds = itertools.pairwise((0, *cuts, 1280))
            parts = (DenseSegment(*(side[:, :, start:end] for side in dense.tensors)) for start, end in bounds)
            cut = KVSegments((*packed.pieces(pieces * BLOCK), *parts))
            assert len(cut.in_order) == -(-12 // pieces) + len(cuts) + 1
            for given in (None, mask.expand(2, 6, 2, whole.tokens)):
                assert torch.equal(kernel.attend(query, cut, given, 0.2), kernel.attend(query, whole, given, 0.2))


def test_groups_are_read_in_few_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain torch reads a run of segments with the same even rows in one call, and others in another."""
    even, uneven = SegmentRows(2, (0, 0, 1, 1)), SegmentRows(3, (2, 0, 0, 2))
    shared = [
        dense_source(sequences, 20, torch.float32)[0].with_rows(rows)
        for sequences, rows in ((2, even), (2, even), (3, uneven), (2, even))
    ]
    own = (dense_source(4, tokens, torch.float32)[0] for tokens in (7, 0))
    read: list[tuple[int, int]] = []
    spy(monkeypatch, slabs, "_attended", lambda query, part, *rest: read.append((part.batch, part.tokens)))
    slabs.attend(torch.randn(4, 4, 1, 64), KVSegments((*shared, *own)), None, 0.2)
    assert read == [(2, 40), (4, 20), (2, 20), (4, 7)]


@every_way
@pytest.mark.parametrize("kind", ["dense packed rows", "pieces of dense"])
@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda segments: pickle.loads(pickle.dumps(segments))])
def test_a_copy_is_read_at_its_own_address(way: str, kind: str, duplicate: Callable[[KVSegments], KVSegments]) -> None:
    held = history(kind, 3)
    query = held.query(2, 1)
    attend(query, held)
    copied = replace(held, segments=duplicate(held.segments))
    for segment in held.segments.in_order:
        for part in (segment.counts,) if isinstance(segment, GatheredSegment) else segment.tensors:
            part.zero_()
    held.check(query, None, attend(query, copied))
    assert not attend(query, held).any()


@needs_compiler
def test_the_kernel_is_given_as_many_bytes_as_its_structures_have() -> None:
    # The numbers are those of `call.h`, where a compiler checks them.
    query = torch.randn(1, 2, 1, 64)
    assert len(kernel.of_call(query, query, 2, (64, 64), 1, 1.0)) == 208
    for source in (dense_source(1, 5, torch.float32), packed_source(1, 2, torch.float32)):
        assert [len(part) for part in kernel.of_segments(KVSegments((source[0],)), query.device)] == [472, 8]


@needs_compiler
def test_another_segment_made_from_one_has_its_own_arguments() -> None:
    one, other = (dense_source(2, 30, torch.float32) for _ in range(2))
    query = torch.randn(2, 2, 1, 64)
    kernel.attend(query, KVSegments((one[0],)), None, 0.2)
    made = one[0].with_tensors(other[0].tensors)
    held = side_by_side([ordinary((made, *other[1:]))], torch.float32)
    held.check(query, None, kernel.attend(query, held.segments, None, 0.2))


# Pieces


@every_way
@pytest.mark.parametrize("name", ["dense", "flat packed"])
def test_a_head_without_tokens_gets_zeros(way: str, name: str) -> None:
    source = source_of(name, 2, torch.float32)
    held = side_by_side([gathered(source, [[[(1, 9)], []], [[], [(2, 5), (0, 3)]]])], torch.float32)
    query = held.query(2, 2)
    for mask in (None, torch.ones(2, 1, 2, 9, dtype=torch.bool)):
        seen = attend(query, held, mask)
        held.check(query, mask, seen)
        assert not torch.cat([seen[0, 2:], seen[1, :2]]).any()


@every_way
def test_segments_of_which_no_head_reads_a_token(way: str) -> None:
    empty, newest = (ordinary(dense_source(2, tokens, torch.float32)) for tokens in (0, 5))
    for nothing in (
        gathered(dense_source(2, 70, torch.float32), [[[], []], [[], []]]),
        gathered(dense_source(2, 70, torch.float32), [[[(0, 0)], []], [[], []]], gap=3),
        gathered(dense_source(2, 0, torch.float32), [[[(0, 0)], []], [[], []]], gap=3),
    ):
        held = side_by_side([empty, nothing, empty, newest, empty], torch.float32)
        query = held.query(2, 2)
        held.check(query, None, attend(query, held))
        held.check(query, None, eager(query, held))


@pytest.mark.parametrize("way", WAYS[:2], indirect=True)
def test_fixed_scales_for_other_heads_are_refused(way: str) -> None:
    """Those of all heads beside the codes of one: the numbers would be wrong, or beside the memory."""
    segment = packed_source(1, 9, torch.float32, width="heads")[0]
    one = segment.with_tensors(states[:, :1] for states in segment.tensors)
    with pytest.raises(kvlayers.errors.StateMismatchError, match="one for each of 1 KV heads, got 2"):
        dispatch.attend(torch.randn(1, 1, 1, 64), KVSegments((one,)), None, 0.2, dispatch.PathCounter())
    with pytest.raises(kvlayers.errors.StateMismatchError, match="one for each of 1 KV heads, got 2"):
        one.states("keys", torch.float32)


@every_way
@pytest.mark.parametrize("name", ["dense", "packed 4"])
def test_sequences_may_share_a_source(way: str, name: str) -> None:
    """As beams do, and sequences with the same prefix."""
    rows = SegmentRows(2, (1, 0, 1))
    segment, *exact = source_of(name, 2, torch.float32)
    pieces = gathered((segment.with_rows(rows), *exact), Draws(1).pieces(segment, 3, 5))
    beside = ordinary(dense_source(2, 30, torch.float32), rows)
    held = side_by_side([beside, pieces, ordinary(dense_source(3, 7, torch.float32))], torch.float32)
    for queries in (1, 3, kernel.CPU_MAXIMUM_ROWS):
        query = held.query(2, queries)
        mask = random_mask("causal", query, held.segments.tokens)
        held.check(query, mask, attend(query, held, mask))
        held.check(query, None, eager(query, held))


@every_way
@pytest.mark.parametrize("name", ["dense", "flat packed"])
def test_what_stands_beside_the_pieces_is_not_read(way: str, name: str) -> None:
    """It may be nan, as memory that nobody has written."""
    segment, *exact = source_of(name, 1, torch.float32)
    pieces = [[[(3, 7), (6, 10)], [(4, 16)]]]
    newest = ordinary(dense_source(1, 3, torch.float32))
    held = side_by_side([gathered((segment, *exact), pieces), newest], torch.float32)
    chosen = torch.zeros(300, dtype=torch.bool)
    for start, count in itertools.chain(*pieces[0]):
        chosen[start : start + (count if isinstance(segment, DenseSegment) else 1)] = True
    if isinstance(segment, DenseSegment):
        for states in segment.tensors:
            states[:, :, ~chosen] = torch.nan
    else:
        for side in (segment.keys, segment.values):
            side.parameters[:1, :1, ~chosen[: segment.blocks]] = torch.nan
    query = held.query(2, 2)
    held.check(query, None, attend(query, held))
    held.check(query, None, eager(query, held))


def test_states_in_full_precision_if_all_heads_have_as_many_tokens() -> None:
    even = [[[(5, 7), (0, 4)], [(1, 5), (3, 6)]], [[(6, 11)], [(0, 11)]]]
    pieces = (gathered(source_of(name, 2, torch.float32), even) for name in ("flat", "cut packed"))
    for held in (
        *(history("dense packed rows", seed, count=5) for seed in range(6)),
        *(side_by_side([part], torch.float32) for part in pieces),
    ):
        segments = held.segments
        assert (segments.batch, segments.kv_heads, segments.head_dims) == (len(held.keys), KV_HEADS, (64, 64))
        states = [segments.dense(side, torch.float32) for side in ("keys", "values")]
        torch.testing.assert_close(states, [held.keys.float(), held.values.float()])
    uneven = gathered(dense_source(1, 70, torch.float32), [[[(1, 9)], [(0, 4)]]])
    with pytest.raises(kvlayers.errors.UnsupportedLayerError, match="different numbers of tokens"):
        KVSegments((uneven.segment,)).dense("keys", torch.float32)
