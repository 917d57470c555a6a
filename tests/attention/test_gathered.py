"""Attention to pieces of segments, other ones for each head, against sums in float64 over the tokens of each head."""

import copy
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from gathered_states import (
    BLOCK,
    KV_HEADS,
    Held,
    Mixed,
    dense_source,
    gathered,
    mixed,
    ordinary,
    packed_source,
    random_pieces,
)
from kvlayers.errors import StateMismatchError, UnsupportedLayerError
from kvlayers.kernels.attention import dispatch, slabs
from kvlayers.kernels.attention.cpu import kernel
from kvlayers.kernels.attention.dispatch import PathCounter
from kvlayers.kernels.attention.packed_tensor import Snapshot, Version, packed_pair
from kvlayers.kernels.attention.segment_kinds import DenseSegment, PackedSegment, SegmentRows
from kvlayers.kernels.attention.segments import GatheredSegment, KVSegments
from matrix import once
from random_states import SUMS, check

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SOURCES = [
    "dense", "flat", "packed 2", "packed 4", "packed 8", "packed fp8", "packed heads", "packed 3", "flat packed",
    "cut packed",
]  # fmt: skip
needs_compiler = pytest.mark.skipif(kernel.library() is None, reason="there is no C++ compiler for the kernel")


@pytest.fixture(params=[pytest.param(True, marks=needs_compiler, id="kernel"), pytest.param(False, id="plain torch")])
def with_kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    if not request.param:
        monkeypatch.setattr(kernel, "library", lambda: None)
        monkeypatch.setattr(kernel.MANY, "get", lambda: None)
    return bool(request.param)


@pytest.fixture(params=[True, False], ids=["kernel or not", "accelerator"])
def anywhere(request: pytest.FixtureRequest, with_kernel: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention in float32 by each way that there is."""
    monkeypatch.setattr(slabs, "INTERPRETED", not request.param)


def source_of(
    name: str, batch: int, dtype: torch.dtype, rotated: bool = True
) -> tuple[DenseSegment | PackedSegment, Tensor, Tensor]:
    if "packed" not in name:
        return dense_source(batch, 300, dtype, flat=name == "flat")
    width: int | str = name.split()[-1]
    width = width if width in ("fp8", "heads") else int(width) if width != "packed" else 4
    return packed_source(
        batch, 9, dtype, width=width, rotated=rotated, flat=name.startswith("flat"), first=5 if "cut" in name else 0
    )


def held_pieces(name: str, batch: int, dtype: torch.dtype, seed: int, most: int = 7) -> Held:
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    source = source_of(name, batch, dtype, rotated=seed % 2 == 0)
    return gathered(source, random_pieces(source[0], batch, most, generator), gap=seed % 3)


def around(held: Held, batch: int, dtype: torch.dtype) -> Mixed:
    """Pieces between ordinary segments, as a cache has them: packed tokens, and the newest in full precision."""
    newest = ordinary(dense_source(batch, 70, dtype))
    return mixed([ordinary(packed_source(batch, 2, dtype)), held, newest], dtype)


def random_mask(kind: str, query: Tensor, held: Mixed) -> Tensor | None:
    batch, heads, queries, _ = query.shape
    tokens = held.segments.tokens
    if kind == "none":
        return None
    if kind == "additive":
        return torch.randn(batch, 1, queries, tokens).masked_fill(torch.rand(1, 1, 1, tokens) > 0.7, -torch.inf)
    if kind == "by head":
        return torch.rand(1, heads, 1, tokens) > 0.3
    seen = torch.ones(batch, 1, queries, tokens, dtype=torch.bool)
    if kind == "causal":
        return seen.tril(tokens - queries)
    for sequence in range(batch):
        # The first sequence sees nothing.
        seen[sequence, :, :, : tokens - tokens * sequence // batch] = False
    return seen


MASKS = ["none", "additive", "by head", "causal", "left padding"]


@pytest.mark.parametrize(("dtype", "name"), once(DTYPES, SOURCES))
def test_each_head_attends_to_its_own_pieces(with_kernel: bool, dtype: torch.dtype, name: str) -> None:
    for seed in range(4):
        batch = 1 + seed % 2
        held = around(held_pieces(name, batch, dtype, seed), batch, dtype)
        for queries, group in ((1, 1 + seed), (3, 2)):
            query = held.query(group, queries)
            mask = random_mask(MASKS[(seed + queries) % len(MASKS)], query, held)
            held.check(query, mask, dispatch.attend(query, held.segments, mask, 0.2, PathCounter()))


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("name", ["dense", "cut packed"])
def test_masks_reach_the_columns_that_they_are_for(anywhere: None, name: str, kind: str) -> None:
    for seed, queries in ((1, 1), (2, 4)):
        pieces = [held_pieces(name, 2, torch.float32, seed + step) for step in (0, 10)]
        held = mixed([*pieces, ordinary(dense_source(2, 5, torch.float32))], torch.float32)
        query = held.query(3, queries)
        mask = random_mask(kind, query, held)
        held.check(query, mask, dispatch.attend(query, held.segments, mask, 0.2, PathCounter()))


@pytest.mark.parametrize("name", ["dense", "flat packed"])
def test_a_head_without_tokens_gets_zeros(anywhere: None, name: str) -> None:
    source = source_of(name, 2, torch.float32)
    held = mixed([gathered(source, [[[(1, 9)], []], [[], [(2, 5), (0, 3)]]])], torch.float32)
    query = held.query(2, 2)
    for mask in (None, torch.ones(2, 1, 2, 9, dtype=torch.bool)):
        seen = dispatch.attend(query, held.segments, mask, 0.2, PathCounter())
        held.check(query, mask, seen)
        assert not seen[0, 2:].any()
        assert not seen[1, :2].any()


def test_segments_of_which_no_head_reads_a_token(anywhere: None) -> None:
    empty, newest = (ordinary(dense_source(2, tokens, torch.float32)) for tokens in (0, 5))
    for nothing in (
        gathered(dense_source(2, 70, torch.float32), [[[], []], [[], []]]),
        gathered(dense_source(2, 70, torch.float32), [[[(0, 0)], []], [[], []]], gap=3),
        gathered(dense_source(2, 0, torch.float32), [[[(0, 0)], []], [[], []]], gap=3),
    ):
        held = mixed([empty, nothing, empty, newest, empty], torch.float32)
        query = held.query(2, 2)
        held.check(query, None, dispatch.attend(query, held.segments, None, 0.2, PathCounter()))
        products = dispatch.scores(query, held.segments, PathCounter())
        held.check(query, None, dispatch.combine(products.mul(0.2).softmax(-1), held.segments, PathCounter()))


@pytest.mark.parametrize(("dtype", "name"), once([torch.float32, torch.bfloat16], SOURCES))
def test_the_products_of_eager_attention(with_kernel: bool, dtype: torch.dtype, name: str) -> None:
    held = around(held_pieces(name, 2, dtype, 3), 2, dtype)
    query = held.query(2, 3)
    keys, values, is_token = (part.repeat_interleave(2, 1) for part in (held.keys, held.values, held.is_token))
    is_token = is_token[:, :, None].expand(-1, -1, 3, -1)
    products = dispatch.scores(query, held.segments, PathCounter())
    assert products.shape == (*query.shape[:3], held.segments.tokens)
    assert bool((products[~is_token] == -torch.inf).all())
    sizes = query.double().norm(dim=-1, keepdim=True) * keys.norm(dim=-1).unsqueeze(2)
    check(products.masked_fill(~is_token, 0), (query.double() @ keys.transpose(2, 3)).masked_fill(~is_token, 0), sizes)
    weights = torch.rand(*query.shape[:3], held.segments.tokens).to(dtype)
    sums = dispatch.combine(weights.masked_fill(~is_token, torch.nan), held.segments, PathCounter())
    weights = weights.masked_fill(~is_token, 0)
    check(sums, weights.double() @ values, weights.double() @ values.norm(dim=-1, keepdim=True))


@pytest.mark.parametrize(
    ("dtype", "name"), once(DTYPES, [name for name in SOURCES if name not in ("packed 2", "packed 4", "packed 8")])
)
def test_many_queries(dtype: torch.dtype, name: str) -> None:
    for seed, group in ((5, 1), (6, 3)):
        held = around(held_pieces(name, 2, dtype, seed), 2, dtype)
        query = held.query(group, kernel.CPU_MAXIMUM_ROWS // group + 1)
        for kind in MASKS[seed % 2 :: 2]:
            check_by_head(held, query, random_mask(kind, query, held))


def test_fixed_scales_for_other_heads_are_refused(with_kernel: bool) -> None:
    """Those of all heads beside the codes of one: the numbers would be wrong, or beside the memory."""
    segment, _, _ = packed_source(1, 9, torch.float32, width="heads")
    one = PackedSegment(
        *(
            replace(side, codes=side.codes[:, :1], parameters=side.parameters[:, :1])
            for side in (segment.keys, segment.values)
        )
    )
    with pytest.raises(StateMismatchError, match="one for each of 1 KV heads, got 2"):
        dispatch.attend(torch.randn(1, 1, 1, 64), KVSegments((one,)), None, 0.2, PathCounter())
    with pytest.raises(StateMismatchError, match="one for each of 1 KV heads, got 2"):
        one.states("keys", torch.float32)


def check_by_head(held: Mixed, query: Tensor, mask: Tensor | None) -> None:
    """Weights are rounded to bfloat16, as in torch's attention, and so are codes and queries that are not."""
    paths = PathCounter()
    seen = dispatch.attend(query, held.segments, mask, 0.2, paths)
    held.check(query, mask, seen, sums={torch.bfloat16: 0.03, torch.float16: 0.004}.get(query.dtype, SUMS))
    expected = dispatch.BLOCKS if kernel.MANY.get() is None else dispatch.MANY
    assert [path.startswith(expected) for path in paths.counts] == [True]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_many_queries_of_right_aligned_heads(dtype: torch.dtype) -> None:
    """As a store of evicted tokens has them: each head one run, in left-padded sequences, and new tokens behind it."""
    pieces = [[[(0, 64), (64, 31)], [(95, 64), (159, 64), (223, 2)]], [[(225, 40)], []]]
    held = mixed(
        [gathered(dense_source(2, 300, dtype, flat=True), pieces), ordinary(dense_source(2, 50, dtype))], dtype
    )
    tokens, query = held.segments.tokens, held.query(2, 50)
    padded = torch.ones(2, 1, 50, tokens, dtype=torch.bool).tril(tokens - 50)
    padded[1, :, :, : tokens - 70] = False
    for mask in (padded, torch.zeros(padded.shape).masked_fill_(~padded, -torch.inf), None):
        check_by_head(held, query, mask)


@pytest.mark.parametrize("name", ["dense", "flat packed"])
@pytest.mark.parametrize("queries", [1, 3, kernel.CPU_MAXIMUM_ROWS])
def test_threads_change_nothing_but_the_order_of_sums(with_kernel: bool, queries: int, name: str) -> None:
    held = around(held_pieces(name, 2, torch.float32, 5, most=15), 2, torch.float32)
    query, before = held.query(2, queries), torch.get_num_threads()
    mask, seen = random_mask("causal", query, held), []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            seen.append(dispatch.attend(query, held.segments, mask, 0.2, PathCounter()))
    finally:
        torch.set_num_threads(before)
    for result in seen:
        held.check(query, mask, result)


def test_sequences_may_share_a_source(anywhere: None) -> None:
    """As beams do, and sequences with the same prefix."""
    rows = SegmentRows(2, (1, 0, 1))
    for name in ("dense", "packed 4"):
        segment, keys, values = source_of(name, 2, torch.float32)
        of_rows = (
            DenseSegment(segment.keys, segment.values, rows)
            if isinstance(segment, DenseSegment)
            else PackedSegment(segment.keys, segment.values, rows=rows)
        )
        generator = torch.Generator().manual_seed(1)
        pieces = gathered((of_rows, keys, values), random_pieces(segment, 3, 5, generator))
        shared, exact_keys, exact_values = dense_source(2, 30, torch.float32)
        beside = Held(
            DenseSegment(shared.keys, shared.values, rows),
            exact_keys[[1, 0, 1]],
            exact_values[[1, 0, 1]],
            torch.ones(3, KV_HEADS, 30, dtype=torch.bool),
        )
        held = mixed([beside, pieces, ordinary(dense_source(3, 7, torch.float32))], torch.float32)
        for queries in (1, 3, kernel.CPU_MAXIMUM_ROWS):
            query = held.query(2, queries)
            mask = random_mask("causal", query, held)
            held.check(query, mask, dispatch.attend(query, held.segments, mask, 0.2, PathCounter()))
            products = dispatch.scores(query, held.segments, PathCounter())
            seen = dispatch.combine(products.mul(0.2).softmax(-1), held.segments, PathCounter())
            held.check(query, None, seen)


@pytest.mark.parametrize("name", ["dense", "flat packed"])
def test_what_stands_beside_the_pieces_is_not_read(anywhere: None, name: str) -> None:
    """It may be nan, as memory that nobody has written."""
    segment, keys, values = source_of(name, 1, torch.float32)
    pieces = [[[(3, 7), (6, 10)], [(4, 16)]]]
    held = mixed(
        [gathered((segment, keys, values), pieces), ordinary(dense_source(1, 3, torch.float32))], torch.float32
    )
    chosen = torch.zeros(300, dtype=torch.bool)
    for start, count in [piece for of_head in pieces[0] for piece in of_head]:
        chosen[start : start + count if isinstance(segment, DenseSegment) else start + 1] = True
    if isinstance(segment, DenseSegment):
        segment.keys[:, :, ~chosen] = torch.nan
        segment.values[:, :, ~chosen] = torch.nan
    else:
        for side in (segment.keys, segment.values):
            side.parameters[:1, :1, ~chosen[: segment.blocks]] = torch.nan
    query = held.query(2, 2)
    held.check(query, None, dispatch.attend(query, held.segments, None, 0.2, PathCounter()))
    seen = dispatch.combine(
        dispatch.scores(query, held.segments, PathCounter()).mul(0.2).softmax(-1), held.segments, PathCounter()
    )
    held.check(query, None, seen)


@pytest.mark.parametrize(("dtype", "name"), once([torch.float32, torch.bfloat16], SOURCES))
def test_the_path_of_accelerators(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, name: str) -> None:
    monkeypatch.setattr(slabs, "MINIMUM_SLAB_TOKENS", 2 * BLOCK)
    monkeypatch.setattr(slabs, "SLAB_BYTES", 1)
    tolerance = 1e-5 if dtype == torch.float32 else 0.03

    def accelerated(compute: Callable[..., Tensor], *arguments: object) -> Tensor:
        with monkeypatch.context() as accelerator:
            accelerator.setattr(slabs, "INTERPRETED", True)
            return compute(*arguments, PathCounter())

    for seed in range(3):
        held = around(held_pieces(name, 2, dtype, seed), 2, dtype)
        for queries in (1, 3):
            query = held.query(2, queries)
            for kind in MASKS[seed % 2 :: 2]:
                mask = random_mask(kind, query, held)
                seen = accelerated(dispatch.attend, query, held.segments, mask, 0.2)
                wanted = slabs.attend(query, held.segments, full_mask(mask, query, held), 0.2)
                torch.testing.assert_close(seen, wanted, rtol=tolerance, atol=tolerance)
            wanted = slabs.scores(query, held.segments)
            seen = accelerated(dispatch.scores, query, held.segments)
            torch.testing.assert_close(seen, wanted, rtol=tolerance, atol=tolerance * 8)
            weights = wanted.mul(0.2).softmax(-1)
            seen, wanted = (
                accelerated(dispatch.combine, weights, held.segments),
                slabs.combine(weights, held.segments),
            )
            torch.testing.assert_close(seen, wanted, rtol=tolerance, atol=tolerance)


def full_mask(mask: Tensor | None, query: Tensor, held: Mixed) -> Tensor | None:
    return None if mask is None else mask.expand(*query.shape[:3], held.segments.tokens)


def test_models_read_pieces_by_both_implementations(with_kernel: bool) -> None:
    held = around(held_pieces("dense", 2, torch.float32, 3), 2, torch.float32)
    version, tokens = Version(), held.segments.tokens
    snapshot = Snapshot(
        held.segments, torch.float32, torch.device("cpu"), version, version.number, tokens, PathCounter()
    )
    shape = (held.segments.batch, KV_HEADS, tokens, 64)
    keys, values = packed_pair(snapshot, shape, shape)
    query = held.query(1, 1)
    held.check(query, None, scaled_dot_product_attention(query, keys, values, scale=0.2))
    eager = ((query @ keys.transpose(2, 3)) * 0.2).softmax(-1) @ values
    held.check(query, None, eager)


def test_states_in_full_precision_if_all_heads_have_as_many_tokens() -> None:
    for name in ("flat", "cut packed"):
        source = source_of(name, 2, torch.float32)
        held = mixed([gathered(source, [[[(5, 7), (0, 4)], [(1, 5), (3, 6)]], [[(6, 11)], [(0, 11)]]])], torch.float32)
        for side, exact in (("keys", held.keys), ("values", held.values)):
            seen = held.segments.dense(side, torch.float32)  # type: ignore[arg-type]
            torch.testing.assert_close(seen.double(), exact, rtol=1e-5, atol=1e-5)


def test_states_of_uneven_heads_have_no_tensor() -> None:
    held = gathered(dense_source(1, 70, torch.float32), [[[(1, 9)], [(0, 4)]]])
    with pytest.raises(UnsupportedLayerError, match="different numbers of tokens"):
        KVSegments((held.segment,)).dense("keys", torch.float32)


def test_sizes_are_those_of_the_pieces() -> None:
    held = gathered(packed_source(3, 4, torch.bfloat16, flat=True), [[[(1, 9)], [(0, 4)]], [[], []], [[], [(2, 5)]]])
    segments = KVSegments((held.segment,))
    assert (segments.batch, segments.kv_heads, segments.tokens, segments.head_dims) == (3, KV_HEADS, 9, (64, 64))
    assert not segments.are_dense
    assert not segments.shares_rows
    assert segments.device == torch.device("cpu")


def test_a_copy_has_tables_of_its_own(anywhere: None) -> None:
    held = around(held_pieces("dense", 1, torch.float32, 3), 1, torch.float32)
    query = held.query(2, 1)
    dispatch.attend(query, held.segments, None, 0.2, PathCounter())
    copied = copy.deepcopy(held.segments)
    segment = held.segments.in_order[1]
    assert isinstance(segment, GatheredSegment)
    segment.counts.zero_()
    held.check(query, None, dispatch.attend(query, copied, None, 0.2, PathCounter()))
