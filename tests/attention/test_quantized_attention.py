"""Attention reads packed keys and values as exact attention reads the states that they stand for."""

import copy
import functools
import io
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._pytree import tree_iter
from transformers.integrations.sdpa_attention import repeat_kv
from transformers.models.llama.modeling_llama import repeat_kv as eager_repeat_kv

import kvlayers
from histories import History, dense_source, ordinary, side_by_side
from kvlayers.kernels.attention import slabs
from kvlayers.kernels.attention.cpu import kernel
from kvlayers.kernels.attention.packed_tensor import PackedStates
from kvlayers.kernels.attention.segment_kinds import DenseSegment, PackedSegment
from kvlayers.kernels.attention.segments import KVSegments
from kvlayers.kernels.codes import packed_side
from matrix import product
from random_states import SUMS, Rule, check, code_format, packed_states
from spies import Operators, spy

needs_compiler = pytest.mark.skipif(kernel.library() is None, reason="there is no C++ compiler for the kernel")
KERNELS = [pytest.param(kernel.attend, marks=needs_compiler, id="cpu"), pytest.param(slabs.attend, id="blocks")]
WIDTHS: list[int | str] = [1, 2, 3, 4, 5, 6, 8, "fp8", *(f"codebook {bits}" for bits in (1, 2, 3, 4))]
DTYPES = [torch.float32, torch.bfloat16]

ALONG_TOKENS, HALF_BLOCKS, ALONG_CHANNELS = (64, 1), (32, 1), (1, 16)
LAYOUTS: dict[str, tuple[int, int, int, Rule, Rule]] = {
    # key_head_dim, value_head_dim, block_tokens, groups of the keys, groups of the values
    "native": (64, 64, 64, ALONG_TOKENS, (1, 64)),
    "two groups in a block": (80, 48, 64, HALF_BLOCKS, ALONG_CHANNELS),
    "keys by token, values by channel": (96, 32, 64, (1, 32), ALONG_TOKENS),
    "all by channel": (32, 96, 64, HALF_BLOCKS, ALONG_TOKENS),
    "small groups across vectors": (16, 24, 64, (1, 2), (1, 4)),
    "smallest": (4, 4, 8, (8, 1), (1, 4)),
    "no multiple of anything": (6, 4, 8, (2, 1), (2, 1)),
    "largest": (256, 256, 64, ALONG_TOKENS, (1, 64)),
    "columns behind whole vectors": (64, 80, 64, ALONG_TOKENS, (1, 80)),
}


def case_of(
    width: int | str = 4,
    layout: str = "two groups in a block",
    dtype: torch.dtype = torch.float32,
    rotated: tuple[bool, bool] = (True, True),
    batch: int = 2,
    kv_heads: int = 2,
    block_count: int = 4,
    dense: tuple[int, ...] = (7, 70, 3),
    cut: bool = True,
) -> History:
    """A history of packed blocks behind the first dense run and before the others.

    The first packed block lacks its first tokens and others their last, as after windows and crops.
    """
    key_dim, value_dim, size, *groups = LAYOUTS[layout]
    first, ends = (3, (size, size - 2, 1, *[size] * (block_count - 3))) if cut else (0, None)
    sides, exact = [], []
    for side, group, mixed, head_dim in zip(("keys", "values"), groups, rotated, (key_dim, value_dim), strict=True):
        shape = (batch, kv_heads, block_count * size, head_dim)
        packed, states = packed_states(code_format(width, group, mixed), side, shape, size, dtype)
        sides.append(packed)
        exact.append(states)
    runs = [ordinary(dense_source(batch, tokens, dtype, key_dim, value_dim, kv_heads)) for tokens in dense]
    packed_run = ordinary((PackedSegment(*sides, first, ends), *exact))
    return side_by_side([*runs[:1], packed_run, *runs[1:]], dtype)


def full(mask: Tensor | None, query: Tensor, tokens: int) -> Tensor | None:
    return None if mask is None else mask.expand(*query.shape[:3], tokens)


# The kernels


@pytest.mark.parametrize(("attend", "width", "dtype", "layout"), product(KERNELS, WIDTHS, DTYPES, LAYOUTS))
def test_attention_is_that_of_the_states_that_the_codes_stand_for(
    attend: Callable[..., Tensor], width: int | str, dtype: torch.dtype, layout: str
) -> None:
    for rotated, groups, queries in (((True, True), 1, 1), ((False, False), 3, 2), ((True, False), 2, 3)):
        case = case_of(width, layout, dtype, rotated, kv_heads=1)
        query = case.query(groups, queries)
        check(attend(query, case.segments, None, 0.1), *case.attended(query, None, 0.1))


@needs_compiler
@pytest.mark.parametrize("width", [1, 2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize("layout", ["native", "largest", "columns behind whole vectors"])
def test_whole_blocks_in_half_precision_for_any_number_of_heads_that_share_keys(layout: str, width: int) -> None:
    """The kernel multiplies these as integers, if the CPU can: other numbers of queries are other loops."""
    for groups in range(1, 6):
        case = case_of(width, layout, torch.bfloat16, batch=1, kv_heads=1, cut=False)
        query = case.query(groups)
        check(kernel.attend(query, case.segments, None, 0.1), *case.attended(query, None, 0.1))


@needs_compiler
@pytest.mark.parametrize("dtype", DTYPES)
def test_nothing_of_a_call_is_left_for_the_next(dtype: torch.dtype) -> None:
    """Threads keep their memory from one call to the next."""
    case = case_of(4, "native", dtype, cut=False)
    query = case.query(2)
    mask = full(torch.rand(2, 1, 1, case.segments.tokens) > 0.3, query, case.segments.tokens)
    expected = [kernel.attend(query, case.segments, given, 0.1) for given in (None, mask)]
    lost = torch.full((2, 2, 600, 64), torch.nan, dtype=dtype)
    for given in (None, mask):
        larger = KVSegments((*case.segments.in_order, DenseSegment(lost, lost)))
        assert kernel.attend(query, larger, None, 0.1).isnan().all()
        again = kernel.attend(query, case.segments, given, 0.1)
        assert torch.equal(again, expected[0 if given is None else 1])


@needs_compiler
@pytest.mark.parametrize(("layout", "width", "dtype"), product(LAYOUTS, WIDTHS, DTYPES))
def test_the_products_of_eager_attention_are_those_of_the_states(
    width: int | str, dtype: torch.dtype, layout: str
) -> None:
    for rotated, groups, queries in (((True, True), 3, 2), ((False, True), 1, 1)):
        case = case_of(width, layout, dtype, rotated)
        query = case.query(groups, queries)
        case.check_products(query, kernel.scores, kernel.combine)


@pytest.mark.parametrize("queries", range(1, 10))
@pytest.mark.parametrize("attend", KERNELS)
def test_any_number_of_queries_and_of_heads_that_share_keys(attend: Callable[..., Tensor], queries: int) -> None:
    for groups in range(1, 6):
        case = case_of(3, "no multiple of anything", batch=1 + groups % 2)
        query = case.query(groups, queries)
        mask = torch.rand(query.shape[0], 1, queries, case.segments.tokens) > 0.3
        seen = attend(query, case.segments, full(mask, query, case.segments.tokens), 0.4)
        case.check(query, mask, seen, scale=0.4)


@needs_compiler
@pytest.mark.parametrize("width", [3, 4, 8])
def test_a_row_that_sees_nothing_leaves_the_rows_beside_it_alone(width: int) -> None:
    case = case_of(width, "native", torch.bfloat16, batch=1, kv_heads=1)
    query, mask = case.query(4), torch.ones(1, 4, 1, case.segments.tokens, dtype=torch.bool)
    expected = kernel.attend(query, case.segments, mask, 0.2)
    mask[:, 1] = False
    seen = kernel.attend(query, case.segments, mask, 0.2)
    assert torch.equal(seen[:, [0, 2, 3]], expected[:, [0, 2, 3]])
    assert not seen[:, 1].any()


@pytest.mark.parametrize("attend", KERNELS)
def test_a_finite_mask_that_is_as_low_as_it_gets_gives_all_tokens_one_weight(attend: Callable[..., Tensor]) -> None:
    case = case_of()
    query = case.query()
    mask = torch.full((1, 1, 1, case.segments.tokens), torch.finfo(torch.float32).min)
    check(
        attend(query, case.segments, full(mask, query, case.segments.tokens), 0.2),
        case.values.mean(2, keepdim=True).repeat_interleave(2, 1),
        case.values.norm(dim=-1).mean(2)[:, :, None, None].repeat_interleave(2, 1),
    )


@needs_compiler
@pytest.mark.parametrize("width", [3, 4, "fp8"])
def test_threads_that_share_one_head_split_its_tokens(width: int | str) -> None:
    torch.set_num_threads(2)
    case = case_of(width, batch=1, kv_heads=1, block_count=40, dense=(16, 130))
    query = case.query(3, 2)
    # Whole splits are masked in the first row.
    mask = torch.ones(1, 1, 2, case.segments.tokens, dtype=torch.bool)
    mask[..., 0, :1500] = False
    for given in (None, mask):
        seen = kernel.attend(query, case.segments, full(given, query, case.segments.tokens), 0.2)
        case.check(query, given, seen)
    case.check_products(query, kernel.scores, kernel.combine)


@pytest.mark.parametrize("attend", KERNELS)
def test_queries_may_lie_in_memory_in_any_way(attend: Callable[..., Tensor]) -> None:
    case = case_of(dtype=torch.bfloat16)
    query = case.query(2, 3)
    with_channels_apart = query.transpose(2, 3).contiguous().transpose(2, 3)
    part_of_more = torch.cat([query, query], 3)[..., : case.segments.head_dims[0]]
    for given in (query.contiguous(), with_channels_apart, part_of_more):
        case.check(query, None, attend(given, case.segments, None, 0.2))
    if attend is kernel.attend:
        case.check_products(with_channels_apart, kernel.scores, kernel.combine)


@pytest.mark.parametrize("attend", KERNELS)
def test_scores_far_apart_leave_one_token(attend: Callable[..., Tensor]) -> None:
    # Products of some hundreds: the exponentials of all but a few are zero, and none may overflow.
    case = case_of()
    query = case.query() * 100
    exact, magnitude = case.attended(query, None, 1.0)
    # The error of a score grows with it: |q| |k| is up to 8,000 here, and the score goes into the exponent.
    error = (attend(query, case.segments, None, 1.0).double() - exact).abs() / magnitude
    assert error.max() < 8000 * SUMS


@pytest.mark.parametrize("attend", KERNELS)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("where", ["before", "after"])
def test_a_query_over_a_state_that_is_not_finite_is_not_a_number(
    attend: Callable[..., Tensor], bad: float, where: str
) -> None:
    case = case_of(kv_heads=1)
    query = case.query().abs()
    run = case.segments.in_order[0 if where == "before" else 2]
    run.keys[0, 0, 2, 1] = bad
    # A mask that hides the token may hide this too, or not, as torch's own attention does not: it is never another
    # number.
    mask = torch.ones(1, 1, 1, case.segments.tokens, dtype=torch.bool)
    mask[..., 2 if where == "before" else case.segments.tokens - 73 + 2] = False
    for shown in (None, full(~mask, query, case.segments.tokens)):
        seen = attend(query, case.segments, shown, 0.2)
        assert seen[0].isnan().all()
        assert seen[1].isfinite().all()
    hidden = attend(query, case.segments, full(mask, query, case.segments.tokens), 0.2)
    run.keys[0, 0, 2, 1] = 0
    case.keys.nan_to_num_(0, 0, 0)
    exact, magnitude = case.attended(query, mask, 0.2)
    check(torch.where(hidden.isnan(), exact.float(), hidden), exact, magnitude)
    assert torch.equal(hidden[0].isnan().any(-1), hidden[0].isnan().all(-1))


# Handles

BATCH, KV_HEADS, KEY_DIM, VALUE_DIM, PAST = 2, 2, 16, 8, 300
QUANTIZATION = kvlayers.Quantization(nbits=4, residual_length=8, sink_tokens=4)


def some_states(tokens: int, batch: int = BATCH, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    keys = torch.randn(batch, KV_HEADS, tokens, KEY_DIM, dtype=dtype)
    return keys, torch.randn(batch, KV_HEADS, tokens, VALUE_DIM, dtype=dtype)


def filled_layer(past: int = PAST, batch: int = BATCH, dtype: torch.dtype = torch.float32) -> kvlayers.QuantizedLayer:
    layer = kvlayers.QuantizedLayer(QUANTIZATION)
    layer.update(*some_states(past, batch, dtype))
    return layer


def some_handles(new: int = 1, dtype: torch.dtype = torch.float32) -> tuple[PackedStates, PackedStates]:
    keys, values = filled_layer(dtype=dtype).update(*some_states(new, dtype=dtype))
    assert type(keys) is type(values) is PackedStates
    return keys, values


def some_query(groups: int = 2, queries: int = 1, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(BATCH, KV_HEADS * groups, queries, KEY_DIM, dtype=dtype)


@pytest.fixture
def no_copy(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Call it, and from then on no history is brought to full precision as a whole."""

    def refuse(*args: Any) -> Tensor:
        raise AssertionError("a dense copy of the history was made")

    return lambda: monkeypatch.setattr(KVSegments, "dense", refuse)


def close(seen: Tensor, expected: Tensor) -> None:
    assert (type(seen), seen.dtype) == (Tensor, expected.dtype)
    # Both are right to within sums in float32 of numbers no larger than about 10, and a rounding to bfloat16.
    coarse = torch.finfo(seen.dtype).eps if seen.dtype != torch.float32 else 1e-5
    torch.testing.assert_close(seen, expected, rtol=coarse, atol=2 * coarse)


METADATA: dict[str, Callable[[Tensor], Any]] = {
    "shape": lambda states: states.shape,
    "size": lambda states: (states.size(), states.size(-2), states.shape[2]),
    "dim": lambda states: (states.dim(), states.ndim),
    "len": len,
    "numel": lambda states: (states.numel(), torch.numel(states)),
    "dtype": lambda states: (states.dtype, states.is_floating_point(), states.element_size()),
    "device": lambda states: (states.device, states.is_cuda),
    "requires_grad": lambda states: states.requires_grad,
}


def test_metadata_of_packed_states_is_answered_without_reading_them(no_copy: Callable[[], None]) -> None:
    handles = some_handles(dtype=torch.bfloat16)
    expected = [[ask(states.dense()) for ask in METADATA.values()] for states in handles]
    no_copy()
    assert [[ask(states) for ask in METADATA.values()] for states in handles] == expected
    for states in handles:
        assert states.to(torch.bfloat16) is states.detach() is states.contiguous() is states
        assert str(PAST + 1) in repr(states)


def with_gqa(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    return scaled_dot_product_attention(query, keys, values, enable_gqa=True)


def with_a_mask_and_a_scale(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    mask = torch.arange(keys.shape[2]) % 3 > 0
    mask = mask.expand(query.shape[0], 1, query.shape[2], -1)
    return scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=0.7, enable_gqa=True)


def with_a_mask_of_two_dimensions(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    mask = torch.linspace(-2, 2, keys.shape[2]).repeat(query.shape[2], 1).to(query.dtype)
    return scaled_dot_product_attention(query, keys, values, mask, enable_gqa=True)


def repeated(repeat: Callable[[Tensor, int], Tensor], query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    copies = query.shape[1] // keys.shape[1]
    return scaled_dot_product_attention(query, repeat(keys, copies), repeat(values, copies))


def eager(repeat: Callable[[Tensor, int], Tensor], query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    copies = query.shape[1] // keys.shape[1]
    scores = torch.matmul(query, repeat(keys, copies).transpose(2, 3)) * 0.3
    weights = torch.nn.functional.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    return torch.matmul(weights, repeat(values, copies))


def eager_by_operators(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    copies = query.shape[1] // keys.shape[1]
    keys, values = keys.repeat_interleave(copies, dim=1), torch.repeat_interleave(values, copies, 1)
    return (query @ keys.mT).softmax(-1) @ values


def interleaved(states: Tensor, copies: int) -> Tensor:
    return torch.repeat_interleave(states, dim=1, repeats=copies)


ATTENTIONS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "enable_gqa": with_gqa,
    "mask and scale": with_a_mask_and_a_scale,
    "mask of two dimensions": with_a_mask_of_two_dimensions,
    "is_causal": functools.partial(scaled_dot_product_attention, is_causal=True, enable_gqa=True),
    "repeat_kv of sdpa": functools.partial(repeated, repeat_kv),
    "repeat_kv of eager": functools.partial(repeated, eager_repeat_kv),
    "repeat_interleave": functools.partial(repeated, interleaved),
    "eager": functools.partial(eager, eager_repeat_kv),
    "eager by repeat_interleave": functools.partial(eager, interleaved),
    "eager by operators": eager_by_operators,
}


@pytest.mark.parametrize(
    ("attention", "groups", "queries", "dtype", "compiled"),
    product(ATTENTIONS, [1, 3], [1, 3], [*DTYPES, torch.float16], [pytest.param(True, marks=needs_compiler), False]),
)
def test_attention_to_packed_states_makes_no_dense_copy(
    attention: str,
    groups: int,
    queries: int,
    dtype: torch.dtype,
    compiled: bool,
    no_copy: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not compiled:
        monkeypatch.setattr(kernel, "library", lambda: None)
    keys, values = some_handles(queries, dtype)
    query = some_query(groups, queries, dtype)
    expected = ATTENTIONS[attention](query, keys.dense(), values.dense())
    # Eager attention without the kernel reads dense states.
    if compiled or not attention.startswith("eager"):
        no_copy()
    seen = ATTENTIONS[attention](query, keys, values)
    if dtype != torch.float32 and ("eager" in attention or "scale" in attention):
        # Scores and weights are rounded to the dtype in between, on both sides and each in its own way, and dense keys
        # once more, after smoothing: a score of up to 16 that is rounded the other way is a sixteenth larger in
        # bfloat16, and so is its weight.
        tolerance = 0.0625 if dtype == torch.bfloat16 else 0.01
        torch.testing.assert_close(seen, expected, rtol=tolerance, atol=tolerance)
    else:
        close(seen, expected)


READERS: dict[str, Callable[[Tensor], Any]] = {
    "cat": lambda x: torch.cat([x, x], 2),
    "cat with a tensor": lambda x: torch.cat([torch.zeros_like(x), x], dim=-2),
    "stack": lambda x: torch.stack([x, x]),
    "sum with a number": lambda x: x + 1,
    "sum from the left": lambda x: 1 + x,
    "product of two": lambda x: x * x,
    "slice": lambda x: x[:, :, 3:-5],
    "number": lambda x: x[1],
    "ellipsis": lambda x: x[..., -1:, :],
    "new axis elsewhere": lambda x: x[:, None],
    "list": lambda x: x[:, [1, 0]],
    "tensor": lambda x: x[:, torch.tensor([1, 0])],
    "array": lambda x: x[:, np.array([1, 0])],
    "mask": lambda x: x[x > 1],
    "einsum": lambda x: torch.einsum("bhtd,bhsd->bhts", x[:, :, :4], x),
    "product from the left": lambda x: x @ x.transpose(2, 3)[..., :5],
    "clone": lambda x: x.clone(),
    "float64": lambda x: x.to(torch.float64),
    "half": lambda x: x.half(),
    "float": lambda x: x.bfloat16().float(),
    "copy of the same dtype": lambda x: x.to(torch.float32, copy=True),
    "to a device by name": lambda x: x.to("cpu"),
    "as another": lambda x: x.to(torch.zeros(1, dtype=torch.float16)),
    "numpy": lambda x: torch.from_numpy(x.numpy()),
    "asarray": lambda x: torch.from_numpy(np.asarray(x)),
    "list of numbers": lambda x: torch.tensor(x.tolist()),
    "permute": lambda x: x.permute(0, 2, 1, 3),
    "transpose of others": lambda x: x.transpose(1, 2),
    "transpose by name": lambda x: x.transpose(dim0=-1, dim1=-2).clone(),
    "transposed twice": lambda x: x.mT.mT.clone(),
    "reshape": lambda x: x.reshape(BATCH, -1),
    "reshape by name": lambda x: x.reshape(shape=(BATCH, -1)),
    "view as bytes": lambda x: x.view(torch.uint8),
    "view of the same shape": lambda x: x.view(x.shape).clone(),
    "expand": lambda x: x[None].expand(3, -1, -1, -1, -1),
    "expand by name": lambda x: x[:, :, None].expand(size=(BATCH, KV_HEADS, 3, *x.shape[2:])).clone(),
    "expand by -1": lambda x: x[:, :, None].expand(-1, -1, 3, -1, -1).clone(),
    "copies with an axis": lambda x: x[:, :, None].expand(BATCH, KV_HEADS, 3, *x.shape[2:]).clone(),
    "copies": lambda x: repeat_kv(x, 3).clone(),
    "copies of copies": lambda x: repeat_kv(repeat_kv(x, 3), 2).clone(),
    "copies, transposed": lambda x: repeat_kv(x, 3).transpose(2, 3).clone(),
    "no copies": lambda x: torch.repeat_interleave(x, 0, dim=1).clone(),
    "copies along tokens": lambda x: x.repeat_interleave(2, dim=2),
    "copies of all numbers": lambda x: x.repeat_interleave(2),
    "repeat": lambda x: x.repeat(1, 2, 1, 1),
    "mean": lambda x: x.mean(),
    "largest": lambda x: x.max(2),
    "comparison": lambda x: x == x.clone(),
    "split": lambda x: x.split(100, dim=2)[2],
    "iteration": lambda x: list(x)[1],
    "strides": lambda x: torch.tensor([*x.stride(), x.is_contiguous()]),
    "linear": lambda x: torch.nn.functional.linear(x, torch.ones(3, x.shape[3])),
    "vmap": lambda x: torch.vmap(lambda y: y * 2)(x),
    "shallow copy": copy.copy,
    "deep copy": copy.deepcopy,
    "deep copy of a list": lambda x: copy.deepcopy([x])[0],
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
    "saved": lambda x: saved_and_loaded(x),
}


def saved_and_loaded(states: Tensor) -> Tensor:
    file = io.BytesIO()
    torch.save({"states": states}, file)
    file.seek(0)
    loaded: Tensor = torch.load(file)["states"]
    return loaded


@pytest.mark.parametrize("reader", READERS)
def test_everything_else_reads_states_in_full_precision(reader: str) -> None:
    for states in some_handles():
        seen, expected = READERS[reader](states), READERS[reader](states.dense())
        for one, other in zip(tree_iter(seen), tree_iter(expected), strict=True):
            assert (type(one), one.dtype) == (Tensor, other.dtype)
            assert torch.equal(one, other)


WRITERS: dict[str, Callable[[Tensor], Any]] = {
    "add_": lambda x: x.add_(1),
    "+=": lambda x: x.__iadd__(1),
    "zero_": lambda x: x.zero_(),
    "copy_": lambda x: x.copy_(x.clone()),
    "masked_fill_": lambda x: x.masked_fill_(x.clone() > 0, 0.0),
    "index_put_": lambda x: x.index_put_((torch.tensor([0]),), torch.tensor(0.0)),
    "fill_ of torch": lambda x: torch.fill_(x, 0),
    "assignment": lambda x: x.__setitem__((slice(None), 0), 0.0),
    "out=": lambda x: torch.add(x.clone(), 1, out=x),
    "out= of several": lambda x: torch.sort(x.clone(), out=(x, torch.empty(0, dtype=torch.int64))),
    "foreach": lambda x: torch._foreach_add_([x], 1),
    "inplace=True": lambda x: torch.nn.functional.relu(x, inplace=True),
}


@pytest.mark.parametrize("writer", WRITERS)
def test_writing_to_packed_states_is_refused(writer: str) -> None:
    keys, values = some_handles()
    for states in (keys, values, repeat_kv(keys, 2), keys.transpose(2, 3)):
        before = states.dense()
        with pytest.raises(kvlayers.errors.ReadOnlyStatesError, match="clone"):
            WRITERS[writer](states)
        assert torch.equal(states.dense(), before)


CHANGES: dict[str, Callable[[kvlayers.QuantizedLayer], Any]] = {
    "crop of the residual": lambda layer: layer.crop(-1),
    "crop into codes": lambda layer: layer.crop(100),
    "crop to nothing": lambda layer: layer.crop(-layer.length),
    "reorder": lambda layer: layer.reorder_cache(torch.tensor([1, 0])),
    "select": lambda layer: layer.batch_select_indices(torch.tensor([0])),
    "repeat": lambda layer: layer.batch_repeat_interleave(2),
    "reset": lambda layer: layer.reset(),
    "a state": lambda layer: layer.load_state(filled_layer(200).state()),
}


@pytest.mark.parametrize("change", CHANGES)
def test_packed_states_are_not_read_after_the_cache_has_changed(change: str) -> None:
    layer = filled_layer()
    keys, values = layer.update(*some_states(1))
    seen_twice = repeat_kv(keys, 2)
    twin_keys, _ = layer.fork().update(*some_states(1))
    of_the_twin = twin_keys.clone()
    CHANGES[change](layer)
    readers: list[Callable[[], Any]] = [
        lambda: keys + 0,
        seen_twice.clone,
        lambda: with_gqa(some_query(), keys, values),
        lambda: some_query(1) @ keys.transpose(2, 3),
        lambda: copy.deepcopy(values),
        lambda: pickle.dumps(values),
    ]
    for read in readers:
        with pytest.raises(kvlayers.errors.StaleStatesError, match="These states are stale"):
            read()
    assert keys.shape == (BATCH, KV_HEADS, PAST + 1, KEY_DIM)
    assert torch.equal(twin_keys.clone(), of_the_twin)


def test_packed_states_of_two_updates_and_of_two_caches_do_not_mix() -> None:
    layer = filled_layer()
    first = layer.update(*some_states(1))
    second = layer.update(*some_states(1))
    other = filled_layer().update(*some_states(1))
    query, swapped = some_query(), torch.randn(BATCH, 4, 1, VALUE_DIM)
    copies = repeat_kv(first[0], 2)
    for queries, keys, values in (
        (query, first[0], other[1]),
        (query, first[0], first[0]),
        (swapped, first[1], first[0]),
        (query, first[0], first[1].dense()),
        (query, copies, first[1]),
    ):
        exact = [states.dense() if isinstance(states, PackedStates) else states for states in (keys, values)]
        close(with_gqa(queries, keys, values), with_gqa(queries, *exact))
    with pytest.raises(RuntimeError):
        with_gqa(query, first[0], second[1])
    with pytest.raises(RuntimeError):
        scaled_dot_product_attention(query, copies, first[1])


def test_what_the_kernels_are_not_for_is_computed_on_dense_states(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = some_handles(3)
    dense = packed[0].dense(), packed[1].dense()
    query = some_query(2, 3)
    for dropout in (0.5, 1.0):
        results = []
        for keys, values in (packed, dense):
            torch.manual_seed(1)
            results.append(scaled_dot_product_attention(query, keys, values, dropout_p=dropout, enable_gqa=True))
        assert torch.equal(*results)
    # A kernel that took the products and the sequence, or head, that torch broadcasts would write beyond its result.
    monkeypatch.setattr(kernel, "obstacle", lambda rows, history: "this is a test")
    one, head = torch.randn(1, 4, 3, KEY_DIM), torch.randn(BATCH, 1, 3, KEY_DIM)
    for attend in (
        lambda k, v: with_gqa(query[0], k[0], v[0]),
        lambda k, v: torch.bmm(query[0, :2], k[0].mT),
        lambda k, v: scaled_dot_product_attention(one, repeat_kv(k, 2), repeat_kv(v, 2)),
        lambda k, v: scaled_dot_product_attention(head, repeat_kv(k, 2), repeat_kv(v, 2)),
        lambda k, v: one[:, :KV_HEADS] @ k.transpose(2, 3),
    ):
        close(attend(*packed), attend(*dense))


REFUSED: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "another dtype of queries": lambda k, v: with_gqa(some_query(dtype=torch.float64), k, v),
    "another dtype in a product": lambda k, v: some_query(1, dtype=torch.bfloat16) @ k.transpose(2, 3),
    "more sequences": lambda k, v: with_gqa(torch.randn(4, 4, 1, KEY_DIM), k, v),
    "more sequences in a product": lambda k, v: torch.randn(4, KV_HEADS, 1, KEY_DIM) @ k.transpose(2, 3),
    "more weighted sequences": lambda k, v: torch.randn(4, KV_HEADS, 1, PAST + 1) @ v,
    "fewer channels": lambda k, v: with_gqa(torch.randn(BATCH, 4, 1, KEY_DIM - 8), k, v),
    "more channels": lambda k, v: with_gqa(torch.randn(BATCH, 4, 1, KEY_DIM + 8), k, v),
    "heads that share no keys": lambda k, v: scaled_dot_product_attention(some_query(2), k, v),
    "heads that are no multiple": lambda k, v: with_gqa(torch.randn(BATCH, 3, 1, KEY_DIM), k, v),
    "a short mask": lambda k, v: scaled_dot_product_attention(
        some_query(1), k, v, torch.ones(1, 1, 1, 10, dtype=torch.bool)
    ),
    "a mask of whole numbers": lambda k, v: scaled_dot_product_attention(
        some_query(1), k, v, torch.ones(1, 1, 1, PAST + 1, dtype=torch.int64)
    ),
    "a mask and is_causal": lambda k, v: scaled_dot_product_attention(
        some_query(1), k, v, torch.ones(1, 1, 1, PAST + 1, dtype=torch.bool), is_causal=True
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_torch_refuses_is_refused(case: str) -> None:
    keys, values = some_handles()
    for states in ((keys.dense(), values.dense()), (keys, values)):
        with pytest.raises(RuntimeError):
            REFUSED[case](*states)


@pytest.mark.parametrize(
    ("attention", "new", "of_queries_alone"),
    product(["enable_gqa", "repeat_kv of sdpa", "eager"], [1, 3, 150], [False, True]),
)
def test_gradients_are_those_of_dense_attention(attention: str, new: int, of_queries_alone: bool) -> None:
    layer = filled_layer()
    past = layer.keys.clone(), layer.values.clone()
    leaves = [some_query(2, new), *some_states(new)]
    grads, results = [], []
    for own in (True, False):
        query, *pair = (leaf.clone() for leaf in leaves)
        wanted = [query] if of_queries_alone else [query, *pair]
        for leaf in wanted:
            leaf.requires_grad_()
        if own:
            attended = layer.update(*pair)
            assert type(attended[0]) is PackedStates
        else:
            attended = tuple(torch.cat(sides, 2) for sides in zip(past, pair, strict=True))
        results.append(ATTENTIONS[attention](query, *attended))
        assert results[-1].requires_grad
        grads.append(torch.autograd.grad(results[-1].square().sum(), wanted))
    close(results[0].detach(), results[1].detach())
    for seen, expected in zip(*grads, strict=True):
        assert expected.abs().max() > 0
        # Sums of some thousands of products in float32, in another order.
        torch.testing.assert_close(seen, expected, rtol=1e-4, atol=1e-4)


# Memory


LONG = 64 * 64
STATE_BYTES = KV_HEADS * (KEY_DIM + VALUE_DIM) * 4


@pytest.fixture(scope="module")
def long_layer() -> kvlayers.QuantizedLayer:
    torch.manual_seed(0)
    # Just after a block was packed, so that the next tokens are not.
    return filled_layer(LONG + QUANTIZATION.sink_tokens + QUANTIZATION.residual_length + 1, batch=1)


def created_by(act: Callable[[], Any]) -> list[int]:
    """Sizes of the memory that torch functions allocate for their results, in bytes.

    What the C++ kernel allocates for itself does not show: it is a few vectors of one block of scores and of one token
    for each row of queries, whatever the length of the history.
    """
    sizes: list[int] = []

    def note(operator: Any, arguments: Any, result: Any) -> None:
        given = {t.untyped_storage().data_ptr() for t in tree_iter(arguments) if type(t) is Tensor}
        made = (tensor.untyped_storage() for tensor in tree_iter(result) if type(tensor) is Tensor)
        sizes.extend(storage.nbytes() for storage in made if storage.data_ptr() not in given)

    with Operators(note):
        act()
    return sizes


def created_by_a_step(layer: kvlayers.QuantizedLayer, tokens: int, attention: str = "enable_gqa") -> list[int]:
    keys, values = some_states(tokens, batch=1)
    query = torch.randn(1, 4, tokens, KEY_DIM)
    return created_by(lambda: ATTENTIONS[attention](query, *layer.update(keys, values)))


@needs_compiler
def test_a_decode_step_writes_its_token_and_makes_no_view_of_the_others() -> None:
    # Just after a block was packed, so that the next tokens are not.
    layer = filled_layer(LONG + QUANTIZATION.sink_tokens + QUANTIZATION.residual_length + 1, batch=1)
    layer.update(*some_states(1, batch=1))
    for _ in range(3):
        states, query = some_states(1, batch=1), torch.randn(1, 4, 1, KEY_DIM)
        names: list[str] = []
        with Operators(lambda operator, *_, names=names: names.append(operator.overloadpacket.__name__)):
            with_gqa(query, *layer.update(*states))
        # Of its own memory, it takes that of its result.
        assert names == ["as_strided", "copy_", "as_strided", "copy_", "new_empty_strided"]


@needs_compiler
def test_an_eager_decode_step_allocates_scores_and_no_states(long_layer: kvlayers.QuantizedLayer) -> None:
    sizes = created_by_a_step(long_layer.fork(), 1, "eager")
    scores = 4 * (LONG + 100) * 4
    # Products, scaled products, weights.
    assert max(sizes) <= scores
    assert sum(sizes) < 4 * scores < LONG * STATE_BYTES / 2


@pytest.mark.parametrize("with_kernel", [pytest.param(True, marks=needs_compiler), False])
def test_attention_allocates_no_tensor_as_large_as_the_held_states(
    long_layer: kvlayers.QuantizedLayer, with_kernel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not with_kernel:
        monkeypatch.setattr(kernel, "library", lambda: None)
        monkeypatch.setattr(kernel.MANY, "get", lambda: None)
    dense_keys = KV_HEADS * LONG * KEY_DIM * 4
    assert max(created_by(long_layer.fork().keys.clone)) >= dense_keys
    # Of a cache that is as many times longer than this one.
    monkeypatch.setattr(slabs, "CPU_CODES_AT_ONCE", KV_HEADS * LONG * KEY_DIM // 4)
    for tokens in (1, 40, 200):
        sizes = created_by_a_step(long_layer.fork(), tokens)
        # The largest are scores: as many as slabs.py says at once, for each kv head, or those of one block.
        at_once = 4 * max(KV_HEADS * max(slabs.CPU_SCORES_AT_ONCE, 2 * tokens * 64), slabs.CPU_CODES_AT_ONCE)
        codes_that_moved = LONG * STATE_BYTES // 3
        # Quantizing works on nine copies of the tokens that it packs: the new ones, and those before them in a block.
        packing = 9 * 4 * KV_HEADS * KEY_DIM * (tokens + 64)
        if with_kernel and tokens > kernel.CPU_MAXIMUM_QUERIES:
            # Many queries are given a copy of the layer's states, with the residual and the new tokens, for one call:
            # each block is unpacked once. No scores are written to memory.
            assert max(sizes) <= 1.1 * dense_keys
            continue
        assert max(sizes) <= max(at_once, codes_that_moved, packing) < dense_keys


@pytest.mark.parametrize("cut", [False, True], ids=["codes", "cropped"])
@pytest.mark.parametrize("queries", [1, 30, 400])
def test_slabs_rotate_what_is_smaller_and_once(queries: int, cut: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CPU_MAXIMUM_TOKENS_AT_ONCE", "CPU_CODES_AT_ONCE"):
        monkeypatch.setattr(slabs, name, 1)
    rotated = []
    for module in (slabs, packed_side):
        spy(monkeypatch, module, "rotate", lambda states: rotated.append(states.numel()))
    case = case_of(block_count=8, cut=cut)
    query, rows = case.query(2, queries), 2 * queries
    check(slabs.attend(query, case.segments, None, 0.2), *case.attended(query, None, 0.2))
    # The queries and the sums of the values, whatever the number of slabs; or the states of all blocks.
    of_each = min(rows, 8 * 64)
    assert sum(rotated) == case.segments.batch * case.segments.kv_heads * of_each * (
        case.segments.head_dims[0] + case.segments.head_dims[1]
    )


# While torch changes what is computed: autocast, `torch.func`, forward-mode derivatives, inference mode

LAYERS: dict[str, Callable[[], kvlayers.CacheLayer]] = {
    "dynamic": kvlayers.DynamicLayer,
    "packed": lambda: kvlayers.QuantizedLayer(kvlayers.Quantization(nbits=8)),
}
TOKENS = 2050
"""So many that the kernel takes attention to states in full precision, too."""


def states_of_four_heads(tokens: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    shape = 1, 4, tokens, 32
    return torch.randn(shape, dtype=dtype), torch.randn(shape, dtype=dtype)


@pytest.fixture(params=LAYERS)
def layer(request: pytest.FixtureRequest) -> kvlayers.CacheLayer:
    torch.manual_seed(0)
    return LAYERS[request.param]()


@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("computed", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_autocast_decides_the_dtype_of_the_result(
    layer: kvlayers.CacheLayer, dtype: torch.dtype, computed: torch.dtype, queries: int
) -> None:
    layer.update(*states_of_four_heads(TOKENS, dtype))
    with torch.no_grad(), torch.autocast("cpu", computed):
        returned = layer.update(*states_of_four_heads(queries, dtype))
        assert with_gqa(torch.randn(1, 8, queries, 32, dtype=dtype), *returned).dtype == computed


def test_vmap_gives_what_a_loop_gives(layer: kvlayers.CacheLayer) -> None:
    layer.update(*states_of_four_heads(TOKENS))
    returned = layer.update(*states_of_four_heads(1))
    queries = torch.randn(3, 1, 8, 1, 32)
    seen = torch.func.vmap(lambda query: with_gqa(query, *returned))(queries)
    expected = torch.stack([with_gqa(query, *returned) for query in queries])
    # Sums of 2,000 tokens in another order.
    torch.testing.assert_close(seen, expected, rtol=1e-4, atol=1e-5)


def test_forward_derivatives_are_those_of_states_in_full_precision(layer: kvlayers.CacheLayer) -> None:
    layer.update(*states_of_four_heads(TOKENS))
    returned = layer.update(*states_of_four_heads(1))
    query, direction = torch.randn(1, 8, 1, 32), torch.randn(1, 8, 1, 32)

    def tangent(keys: Tensor, values: Tensor) -> Tensor:
        # The only backend of torch that has forward derivatives.
        with sdpa_kernel(SDPBackend.MATH), forward_ad.dual_level():
            attended = with_gqa(forward_ad.make_dual(query, direction), keys, values)
            found: Tensor = forward_ad.unpack_dual(attended).tangent
            return found.clone()

    torch.testing.assert_close(tangent(*returned), tangent(*(states.clone() for states in returned)))


def test_a_layer_that_was_unpickled_in_inference_mode_goes_on_outside(layer: kvlayers.CacheLayer) -> None:
    layer.update(*states_of_four_heads(TOKENS))
    with torch.inference_mode():
        copied = pickle.loads(pickle.dumps(layer))
    for each in (layer, copied):
        each.crop(TOKENS - 3)
    states = states_of_four_heads(1)
    with torch.no_grad():
        seen, expected = ([side.clone() for side in each.update(*states)] for each in (copied, layer))
    assert all(map(torch.equal, seen, expected))
