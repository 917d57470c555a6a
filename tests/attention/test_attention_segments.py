"""Attention to tokens in any number of segments, dense and packed, and shared by sequences, against float64."""

import copy
import itertools
import pickle
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kvlayers.kernels.attention import dispatch, slabs
from kvlayers.kernels.attention.cpu import kernel
from kvlayers.kernels.attention.dispatch import PathCounter
from kvlayers.kernels.attention.packed_tensor import Snapshot, Version, packed_pair
from kvlayers.kernels.attention.segment_kinds import DenseSegment, PackedSegment, SegmentRows, of_repeats
from kvlayers.kernels.attention.segments import KVSegments, Segment
from kvlayers.kernels.codes.quantizer_contract import Side
from random_states import check, code_format, packed_states

needs_compiler = pytest.mark.skipif(kernel.library() is None, reason="there is no C++ compiler for the kernel")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SIDES: tuple[Side, Side] = ("keys", "values")
BLOCK = 16


@pytest.fixture(params=[pytest.param(True, marks=needs_compiler, id="kernel"), pytest.param(False, id="plain torch")])
def with_kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    if not request.param:
        monkeypatch.setattr(kernel, "library", lambda: None)
        monkeypatch.setattr(kernel.MANY, "get", lambda: None)
    return bool(request.param)


@dataclass
class History:
    """Segments, and the states that each sequence of the batch reads, in float64."""

    segments: KVSegments
    keys: Tensor
    values: Tensor
    dtype: torch.dtype

    def query(self, group: int, queries: int) -> Tensor:
        """As models have it: heads inside of tokens."""
        batch, kv_heads, _, head_dim = self.keys.shape
        return torch.randn(batch, queries, kv_heads * group, head_dim).to(self.dtype).transpose(1, 2)

    def check(self, query: Tensor, mask: Tensor | None, seen: Tensor) -> None:
        """Compare attention with exact attention."""
        group = query.shape[1] // self.keys.shape[1]
        keys, values = (side.repeat_interleave(group, 1) for side in (self.keys, self.values))
        scores = query.double() @ keys.transpose(2, 3) * 0.2
        if mask is not None:
            scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask.double()
        weights = torch.nan_to_num(scores.softmax(-1))
        check(seen, weights @ values, weights @ values.norm(dim=-1, keepdim=True))


def history(
    seed: int, count: int, dtype: torch.dtype = torch.float32, head_dim: int = 64, kinds: str = "dense packed rows"
) -> History:
    """So many random segments; as `kinds` says, some are packed, and sequences share some of them.

    Some sequences of shared segments have several readers, and some have none; some segments have no token.
    """
    random.seed(seed)
    torch.manual_seed(seed)
    batch = random.choice([1, 2, 4])
    segments: list[Segment] = []
    exact: list[tuple[Tensor, Tensor]] = []
    while len(segments) < count:
        rows = None
        if "rows" in kinds and random.random() < 0.6:
            rows = random_rows(batch)
        # The next segments have the same rows.
        for _ in range(min(random.choice([1, 1, 2, 3]), count - len(segments))):
            held = batch if rows is None else rows.sequences
            packed = "packed" in kinds and ("dense" not in kinds or random.random() < 0.5)
            segment, keys, values = (random_packed if packed else random_dense)(held, dtype, head_dim)
            segments.append(segment.with_rows(rows))
            chosen = list(range(batch)) if rows is None else list(rows.known or ())
            exact.append((keys[chosen], values[chosen]))
    keys, values = (torch.cat(sides, 2) for sides in zip(*exact, strict=True))
    return History(KVSegments(tuple(segments)), keys, values, dtype)


def random_rows(batch: int) -> SegmentRows:
    sequences = random.choice([number for number in (1, 2, 4) if number <= batch])
    if random.random() < 0.4:
        return SegmentRows(sequences, of_repeats(sequences, batch // sequences))
    return SegmentRows(sequences, tuple(random.randrange(sequences) for _ in range(batch)))


def random_dense(batch: int, dtype: torch.dtype, head_dim: int) -> tuple[DenseSegment, Tensor, Tensor]:
    tokens = random.choice([0, 1, 5, 64, 70, 130])
    # In larger buffers, as a store has them: views, or the buffers themselves.
    buffers = [torch.randn(batch, 2, tokens + 9, head_dim).to(dtype) for _ in SIDES]
    start = random.randrange(9)
    keys, values = (buffer[:, :, start : start + tokens] for buffer in buffers)
    segment = DenseSegment(keys, values)
    if random.random() < 0.5:
        segment = DenseSegment(*buffers, slots=(start, tokens))
    return segment, keys.double(), values.double()


def random_packed(batch: int, dtype: torch.dtype, head_dim: int) -> tuple[PackedSegment, Tensor, Tensor]:
    widths: list[int | str] = [3, 4, 8, "fp8"]
    blocks, width, rotated = random.choice([1, 2, 5]), random.choice(widths), random.random() < 0.5
    shape = (batch, 2, blocks * BLOCK, head_dim)
    packed_keys, keys = packed_states(code_format(width, (BLOCK, 1), rotated), "keys", shape, BLOCK, dtype)
    packed_values, values = packed_states(code_format(width, (1, 8), rotated), "values", shape, BLOCK, dtype)
    if random.random() < 0.4:
        return PackedSegment(packed_keys, packed_values), keys, values
    first, ends = random.randrange(3), [random.randrange(3, BLOCK + 1) for _ in range(blocks)]
    held = [block * BLOCK + token for block, end in enumerate(ends) for token in range(0 if block else first, end)]
    return PackedSegment(packed_keys, packed_values, first, tuple(ends)), keys[:, :, held], values[:, :, held]


def random_mask(kind: str, query: Tensor, tokens: int) -> Tensor | None:
    batch, heads, queries, _ = query.shape
    if kind == "none":
        return None
    if kind == "additive":
        return torch.randn(batch, 1, queries, tokens).masked_fill(torch.rand(1, 1, 1, tokens) > 0.7, -torch.inf)
    if kind == "by head":
        return torch.rand(1, heads, 1, tokens) > 0.3
    seen = torch.ones(batch, 1, queries, tokens, dtype=torch.bool)
    if kind == "causal":
        return seen.tril(tokens - queries)
    if kind == "window":
        return seen.tril(tokens - queries).triu(tokens - queries - 40)
    # Left padding beyond whole segments; the first sequence sees nothing.
    for sequence in range(batch):
        seen[sequence, :, :, : tokens - tokens * sequence // batch] = False
    return seen


MASKS = ["none", "additive", "by head", "causal", "window", "left padding"]
KINDS = ["dense", "packed", "dense packed", "dense rows", "dense packed rows"]


@pytest.mark.parametrize("kinds", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_is_that_to_the_states_of_all_segments(with_kernel: bool, dtype: torch.dtype, kinds: str) -> None:
    for seed, count in enumerate((1, 2, 3, 5, 8, 12)):
        held = history(seed, count, dtype, (64, 80, 128)[seed % 3], kinds)
        if not held.segments.tokens:
            continue
        for queries, group in ((1, 1 + seed % 4), (3, 2)):
            query = held.query(group, queries)
            if not with_kernel and queries > 1 and held.segments.are_dense and not held.segments.shares_rows:
                # As exact as torch, hence compared with torch below.
                continue
            mask = random_mask(MASKS[seed % len(MASKS)], query, held.segments.tokens)
            held.check(query, mask, dispatch.attend(query, held.segments, mask, 0.2, PathCounter()))


@pytest.mark.parametrize("kind", MASKS)
def test_masks_reach_the_tokens_that_they_are_for(with_kernel: bool, kind: str) -> None:
    for seed, queries in ((11, 1), (12, 4)):
        held = history(seed, 6)
        query = held.query(3, queries)
        mask = random_mask(kind, query, held.segments.tokens)
        held.check(query, mask, dispatch.attend(query, held.segments, mask, 0.2, PathCounter()))


@pytest.mark.parametrize("kinds", KINDS)
def test_the_products_of_eager_attention_are_those_of_all_segments(with_kernel: bool, kinds: str) -> None:
    for seed, dtype in ((1, torch.float32), (2, torch.bfloat16)):
        held = history(seed, 6, dtype, 64, kinds)
        query = held.query(2, 2)
        keys, values = (side.repeat_interleave(2, 1) for side in (held.keys, held.values))
        products = dispatch.scores(query, held.segments, PathCounter())
        sizes = query.double().norm(dim=-1, keepdim=True) * keys.norm(dim=-1).unsqueeze(2)
        check(products, query.double() @ keys.transpose(2, 3), sizes)
        weights = torch.rand(*query.shape[:3], held.segments.tokens).to(dtype)
        sums = dispatch.combine(weights, held.segments, PathCounter())
        sizes = weights.double() @ values.norm(dim=-1, keepdim=True)
        check(sums, weights.double() @ values, sizes)


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_many_queries_are_computed_as_on_a_contiguous_cache(with_kernel: bool, dtype: torch.dtype, kind: str) -> None:
    held = history(6, 5, dtype, kinds="dense")
    query = held.query(3, kernel.CPU_MAXIMUM_DENSE_ROWS // 3 + 1)
    mask, paths = random_mask(kind, query, held.segments.tokens), PathCounter()
    seen = dispatch.attend(query, held.segments, mask, 0.2, paths)
    keys, values = held.keys.to(dtype), held.values.to(dtype)
    wanted = scaled_dot_product_attention(query, keys, values, mask, scale=0.2, enable_gqa=True)
    exact = scaled_dot_product_attention(
        query.double(),
        held.keys,
        held.values,
        mask if mask is None or mask.dtype == torch.bool else mask.double(),
        scale=0.2,
        enable_gqa=True,
    )
    # The kernel for many queries adds up in another order than torch's attention.
    assert (seen - exact).abs().max() <= 2 * (wanted - exact).abs().max() + 1e-6
    expected = dispatch.COPY if kernel.MANY.get() is None else dispatch.MANY
    assert [path.startswith(expected) for path in paths.counts] == [True]


@pytest.mark.parametrize("kinds", ["dense rows", "packed rows", "dense packed rows"])
def test_many_queries_to_segments_that_sequences_share(with_kernel: bool, kinds: str) -> None:
    held = history(7, 5, kinds=kinds)
    for queries in (kernel.CPU_MAXIMUM_ROWS // 4 + 1, kernel.CPU_MAXIMUM_DENSE_ROWS // 3 + 1):
        query = held.query(3, queries)
        for kind in ("causal", "left padding", "none"):
            mask, paths = random_mask(kind, query, held.segments.tokens), PathCounter()
            held.check(query, mask, dispatch.attend(query, held.segments, mask, 0.2, paths))
            expected = dispatch.SHARED if kernel.MANY.get() is None else dispatch.MANY
            # The kernel for few queries takes the first number of them, unless they read packed tokens.
            first = "packed" not in kinds and queries < kernel.CPU_MAXIMUM_ROWS and with_kernel
            assert [path.startswith(dispatch.CPU if first else expected) for path in paths.counts] == [True]


@needs_compiler
def test_the_compiled_kernel_takes_what_it_is_fastest_for() -> None:
    """Up to a number of queries that all read the same keys."""

    def taken(queries: int, *segments: Segment) -> bool:
        paths = PathCounter()
        segments_of = KVSegments(segments)
        query = torch.randn(segments_of.batch, 2, queries, 64)
        dispatch.attend(query, segments_of, None, 0.2, paths)
        return list(paths.counts) == [dispatch.CPU]

    dense, (packed, _, _) = random_states_of(2, 20, torch.float32), packed_run(torch.float32, 2)
    rows = SegmentRows(2, (0, 1, 1, 1))
    own = random_states_of(4, 5, torch.float32)
    limit, dense_limit = kernel.CPU_MAXIMUM_ROWS, kernel.CPU_MAXIMUM_DENSE_ROWS
    assert taken(limit, packed, dense)
    assert not taken(limit + 1, packed, dense)
    assert taken(dense_limit, dense, dense)
    assert not taken(dense_limit + 1, dense, dense)
    assert taken(limit // 3, packed.with_rows(rows), own)
    assert not taken(limit // 3 + 1, packed.with_rows(rows), own)
    assert not taken(dense_limit + 1, dense.with_rows(rows), own)
    many_rows = SegmentRows(2, (0,) * (dense_limit // kernel.CPU_MAXIMUM_QUERIES) + (1,))
    own = random_states_of(len(many_rows), 5, torch.float32)
    assert taken(kernel.CPU_MAXIMUM_QUERIES, dense.with_rows(many_rows), own)


def test_states_in_full_precision_are_those_of_each_sequence() -> None:
    for seed in range(6):
        held = history(seed, 5)
        assert held.segments.batch == held.keys.shape[0]
        assert (held.segments.kv_heads, held.segments.head_dims) == (2, (64, 64))
        keys, values = (held.segments.dense(side, torch.float32).double() for side in SIDES)
        torch.testing.assert_close(keys, held.keys, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(values, held.values, rtol=1e-5, atol=1e-5)


@needs_compiler
@pytest.mark.parametrize("threads", [1, 2])
def test_segments_that_are_cut_are_read_bit_by_bit_as_one(threads: int) -> None:
    torch.set_num_threads(threads)
    try:
        for dtype in (torch.float32, torch.bfloat16):
            packed, _, _ = packed_run(dtype, 12)
            # Cut where units of dense tokens end (`UNIT_TOKENS` of plan.h), as blocks do of packed ones.
            dense = random_states_of(2, 1280, dtype)
            whole = KVSegments((packed, dense))
            query = torch.randn(2, 6, 2, 64).to(dtype)
            mask = torch.rand(2, 1, 2, whole.tokens) > 0.2
            for pieces, cuts in ((1, (256,)), (5, (256, 512, 1024)), (4, (768,))):
                tokens = [0, *cuts, 1280]
                cut = KVSegments(
                    (
                        *packed.pieces(pieces * BLOCK),
                        *(
                            DenseSegment(dense.keys[:, :, start:end], dense.values[:, :, start:end])
                            for start, end in itertools.pairwise(tokens)
                        ),
                    )
                )
                assert len(cut.in_order) == -(-12 // pieces) + len(cuts) + 1
                for given in (None, mask.expand(2, 6, 2, whole.tokens)):
                    assert torch.equal(kernel.attend(query, cut, given, 0.2), kernel.attend(query, whole, given, 0.2))
    finally:
        torch.set_num_threads(1)


def packed_run(dtype: torch.dtype, blocks: int) -> tuple[PackedSegment, Tensor, Tensor]:
    shape = (2, 2, blocks * BLOCK, 64)
    packed_keys, keys = packed_states(code_format(4, (BLOCK, 1), True), "keys", shape, BLOCK, dtype)
    packed_values, values = packed_states(code_format(4, (1, 8), True), "values", shape, BLOCK, dtype)
    return PackedSegment(packed_keys, packed_values), keys, values


def random_states_of(batch: int, tokens: int, dtype: torch.dtype) -> DenseSegment:
    keys, values = (torch.randn(batch, 2, tokens, 64).to(dtype) for _ in range(2))
    return DenseSegment(keys, values)


@needs_compiler
def test_threads_split_shared_and_own_segments() -> None:
    torch.set_num_threads(2)
    try:
        for seed in range(6):
            held = history(seed, 8, kinds="dense packed rows")
            query = held.query(3, 1)
            held.check(query, None, kernel.attend(query, held.segments, None, 0.2))
    finally:
        torch.set_num_threads(1)


@needs_compiler
def test_a_shared_sequence_is_read_once_for_all_that_read_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each other way of reading would need a copy for each sequence, or fail here."""
    monkeypatch.setattr(KVSegments, "dense", lambda *arguments: pytest.fail("a copy was made"))
    for plain in (slabs.attend, kernel.attend):
        held = history(5, 6, kinds="dense rows")
        query = held.query(2, 1)
        held.check(query, None, plain(query, held.segments, None, 0.2))


def test_groups_are_read_in_few_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain torch reads a run of segments with the same even rows in one call, and others in another."""
    even, uneven = SegmentRows(2, (0, 0, 1, 1)), SegmentRows(3, (2, 0, 0, 2))
    shared = [
        random_states_of(sequences, 20, torch.float32).with_rows(rows)
        for sequences, rows in ((2, even), (2, even), (3, uneven), (2, even))
    ]
    segments = KVSegments((*shared, random_states_of(4, 7, torch.float32), random_states_of(4, 0, torch.float32)))
    read: list[tuple[int, int]] = []
    of_part = slabs._attended

    def counted(query: Tensor, part: KVSegments, *rest: Any) -> Any:
        read.append((part.batch, part.tokens))
        return of_part(query, part, *rest)

    monkeypatch.setattr(slabs, "_attended", counted)
    slabs.attend(torch.randn(4, 4, 1, 64), segments, None, 0.2)
    assert read == [(2, 40), (4, 20), (2, 20), (4, 7)]


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda segments: pickle.loads(pickle.dumps(segments))])
@needs_compiler
def test_a_copy_of_a_segment_is_read_at_its_own_address(duplicate: Callable[[KVSegments], KVSegments]) -> None:
    held = history(3, 4)
    query = held.query(2, 1)
    kernel.attend(query, held.segments, None, 0.2)
    copied = duplicate(held.segments)
    for segment in held.segments.in_order:
        if isinstance(segment, DenseSegment):
            segment.keys.fill_(torch.nan)
        else:
            segment.keys.parameters.fill_(torch.nan)
    held.check(query, None, kernel.attend(query, copied, None, 0.2))
    assert kernel.attend(query, held.segments, None, 0.2).isnan().all()


@needs_compiler
def test_the_kernel_is_given_as_many_bytes_as_its_structures_have() -> None:
    # The numbers are those of `call.h`, where a compiler checks them.
    query = torch.randn(1, 2, 1, 64)
    assert len(kernel.of_call(query, query, 2, (64, 64), 1, 1.0)) == 208
    for make in (random_dense, random_packed):
        segments = KVSegments((make(1, torch.float32, 64)[0],))
        assert [len(part) for part in kernel.of_segments(segments, query.device)] == [472, 8]


@needs_compiler
def test_another_segment_made_from_one_has_its_own_arguments() -> None:
    one = random_states_of(2, 30, torch.float32)
    query = torch.randn(2, 2, 1, 64)
    kernel.attend(query, KVSegments((one,)), None, 0.2)
    other = one.with_tensors((torch.randn(2, 2, 30, 64), one.values))
    seen = kernel.attend(query, KVSegments((other,)), None, 0.2)
    History(KVSegments((other,)), other.keys.double(), other.values.double(), torch.float32).check(query, None, seen)


@pytest.fixture
def compiled_anew() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("kinds", ["dense", "dense packed rows"])
def test_compiled_code_reads_segments(with_kernel: bool, compiled_anew: None, kinds: str) -> None:
    held = history(4, 6, kinds=kinds)
    version, paths, tokens = Version(), PathCounter(), held.segments.tokens
    snapshot = Snapshot(held.segments, torch.float32, torch.device("cpu"), version, version.number, tokens, paths)
    query, shape = held.query(2, 1), (held.segments.batch, 2, tokens, 64)
    mask = torch.rand(query.shape[0], 1, 1, tokens) > 0.3

    @torch.compile(backend="eager", fullgraph=True)
    def attend(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        return scaled_dot_product_attention(query, keys, values, mask, scale=0.2, enable_gqa=True)

    with torch.no_grad():
        held.check(query, mask, attend(query, *packed_pair(snapshot, shape, shape), mask))
    assert sum(paths.counts.values()) == 1
