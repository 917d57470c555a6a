"""How many kernels an accelerator is given by attention over slabs and shared prefixes, counted on meta tensors."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

from kvlayers import DynamicLayer
from kvlayers.attention import dispatch, fused
from kvlayers.attention.dispatch import PathCounter
from kvlayers.attention.segments import DenseSegment, KVSegments, PackedSegment
from kvlayers.quantizers.contract import CodeFormat, Side
from kvlayers.quantizers.packed_side import PackedSide
from kvlayers.utils.triton_support import TritonKernel

HEADS, KV_HEADS, HEAD_DIM, BLOCK = 32, 8, 128, 64
"""Of a layer of an 8B model."""

NO_KERNEL = {
    *("view", "as_strided", "transpose", "permute", "expand", "slice", "select", "unsqueeze", "squeeze", "split"),
    *("unbind", "detach", "alias", "t", "_unsafe_view", "unflatten", "narrow", "split_with_sizes", "_reshape_alias"),
    *("empty", "empty_strided", "new_empty", "empty_like", "new_empty_strided"),
}
WAITS = {"_local_scalar_dense", "nonzero", "equal", "is_nonzero"}


class Launches(TorchDispatchMode):
    """Counts operators that launch a kernel on meta tensors. Waiting for the device, or copying to it, is an error."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._overloadpacket.__name__
        assert name not in WAITS
        result = func(*args, **(kwargs or {}))
        tensors = [leaf for leaf in torch.utils._pytree.tree_leaves((args, kwargs, result)) if isinstance(leaf, Tensor)]
        if any(tensor.is_meta for tensor in tensors) and name not in NO_KERNEL:
            assert all(tensor.is_meta or not tensor.dim() for tensor in tensors)
            self.counts[name] += 1
        return result


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], Tensor]], Counter[str]]:
    """Counts what a function launches the second time, as what is made once for a process does not count."""
    # Torch does not know autocast on meta tensors.
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device_type=None: False)
    current: list[Launches] = []

    def launch(self: TritonKernel, *args: Any) -> None:
        if current:
            current[-1].counts[self.name] += 1

    monkeypatch.setattr(TritonKernel, "launch", launch)

    def count(function: Callable[[], Tensor]) -> Counter[str]:
        function()
        with torch.no_grad(), Launches() as mode:
            current.append(mode)
            function()
        current.clear()
        return mode.counts

    return count


@pytest.fixture
def with_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton runs on meta tensors, and unpacks a side by one kernel."""

    def states(self: PackedSide, dtype: torch.dtype) -> Tensor:
        shape = (*self.codes.shape[:2], self.blocks * self.block_tokens, self.head_dim)
        return torch.zeros(shape, dtype=dtype, device=self.codes.device)

    monkeypatch.setattr(fused, "runs_triton", lambda device: True)
    monkeypatch.setattr(PackedSide, "states", states)


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def packed_side(side: Side, batch: int, blocks: int) -> PackedSide:
    form = CodeFormat(4, *((BLOCK, 1) if side == "keys" else (1, HEAD_DIM)), rotated=True)
    groups = HEAD_DIM if side == "keys" else BLOCK
    codes = meta(batch, KV_HEADS, blocks, BLOCK * HEAD_DIM // 2, dtype=torch.uint8)
    return PackedSide(codes, meta(batch, KV_HEADS, blocks, 2 * groups), form, side, HEAD_DIM, BLOCK)


def int4_segments(tokens: int, residual: int, batch: int = 1, ends: tuple[int, ...] | None = None) -> KVSegments:
    def dense(tokens: int) -> DenseSegment:
        return DenseSegment(*(meta(batch, KV_HEADS, tokens, HEAD_DIM) for _ in range(2)))

    sides = (packed_side(side, batch, tokens // BLOCK) for side in ("keys", "values"))
    return KVSegments((dense(16),), PackedSegment(*sides, 0, ends), (dense(residual),))


def query_of_a_model(batch: int, queries: int) -> Tensor:
    return meta(batch, queries, HEADS, HEAD_DIM).transpose(1, 2)


Count = Callable[[Callable[[], Tensor]], Counter[str]]


@pytest.mark.parametrize(("batch", "most"), [(1, 24), (2, 50)])
@pytest.mark.usefixtures("with_triton")
def test_a_second_turn_behind_packed_tokens(launches: Count, batch: int, most: int) -> None:
    # Several sequences take a call for each query head of a group: a mask of each sequence fits no other order of rows.
    held = int4_segments(32768, 128 + 512, batch)
    mask = meta(batch, 1, 512, held.tokens, dtype=torch.bool)
    counts = launches(lambda: dispatch.attend(query_of_a_model(batch, 512), held, mask, None, PathCounter()))
    assert counts.total() <= most, counts
    assert not counts["clone"]


@pytest.mark.usefixtures("with_triton")
def test_slabs_do_not_become_many_after_a_crop(launches: Count) -> None:
    held = int4_segments(32768, 512, ends=(*[BLOCK] * 400, 17, *[BLOCK] * 111))
    counts = launches(lambda: dispatch.attend(query_of_a_model(1, 512), held, None, None, PathCounter()))
    assert counts.total() <= 16, counts


@pytest.mark.parametrize("slabs", [1, 4])
def test_decoding_on_an_accelerator_without_triton(launches: Count, slabs: int) -> None:
    tokens = slabs * fused.MINIMUM_SLAB_TOKENS
    held = int4_segments(tokens, 128)
    mask = meta(1, 1, 1, held.tokens, dtype=torch.bool)
    weights = meta(1, HEADS, 1, held.tokens)
    paths = PathCounter()
    # Plain torch takes some 14 to unpack a side of a slab.
    assert launches(lambda: dispatch.attend(query_of_a_model(1, 1), held, None, None, paths)).total() <= 10 + 30 * slabs
    assert launches(lambda: dispatch.attend(query_of_a_model(1, 1), held, mask, None, paths)).total() <= 17 + 33 * slabs
    assert launches(lambda: dispatch.scores(query_of_a_model(1, 1), held, paths)).total() <= 4 + 16 * slabs
    assert launches(lambda: dispatch.combine(weights, held, paths)).total() <= 6 + 16 * slabs
    assert any(path.startswith("torch's fused attention, slab by slab") for path in paths.counts)


class Samples:
    """A layer that several sequences go on from, whose prompt is held once."""

    def __init__(self, prefixes: int, tokens: int, sequences: int) -> None:
        self.batch = prefixes * sequences
        self.layer = DynamicLayer()
        self.layer.update(*(meta(prefixes, KV_HEADS, tokens, HEAD_DIM) for _ in range(2)))
        self.layer.expand(sequences)
        self.step()

    def step(self) -> Tensor:
        keys, values = self.layer.update(*(meta(self.batch, KV_HEADS, 1, HEAD_DIM) for _ in range(2)))
        return scaled_dot_product_attention(query_of_a_model(self.batch, 1), keys, values, enable_gqa=True)

    def step_of_beams(self) -> Tensor:
        self.layer.reorder_cache(meta(self.batch, dtype=torch.int64))
        return self.step()


@pytest.mark.parametrize("triton", [True, False])
def test_eight_samples_of_a_long_prompt(launches: Count, triton: bool, request: pytest.FixtureRequest) -> None:
    if triton:
        request.getfixturevalue("with_triton")
    samples = Samples(1, 32768, 8)
    counts = launches(samples.step)
    # The update is two of them.
    assert counts.total() <= (6 if triton else 8), counts
    assert counts["merge_pair"] == triton


def test_beams_of_one_prompt_and_of_several(launches: Count) -> None:
    # Selecting copies the own tokens, and gathers the prefix of each beam if there is more than one.
    assert launches(Samples(1, 8192, 8).step_of_beams).total() <= 10
    assert launches(Samples(4, 2048, 4).step_of_beams).total() <= 14


@pytest.mark.parametrize("queries", [1, 5, 33])
@pytest.mark.parametrize("value_dim", [128, 64])
@pytest.mark.parametrize("masked", [False, True])
def test_results_have_the_shapes_that_the_kernels_of_a_gpu_promise(queries: int, value_dim: int, masked: bool) -> None:
    # The kernel with a mask pads the log-sum-exp to a multiple of 32 queries.
    for batch, group in ((1, 1), (1, 4), (3, 4)):
        query = meta(batch, queries, 2 * group, 128).transpose(1, 2)
        parts = [DenseSegment(meta(batch, 2, tokens, 128), meta(batch, 2, tokens, value_dim)) for tokens in (7, 40)]
        mask = meta(batch, 1, queries, 47, dtype=torch.bool) if masked else None
        out, logsumexp = fused.attend_partly(query, KVSegments(tuple(parts), None, ()), mask, 0.1)
        assert out.shape == (*query.shape[:3], value_dim)
        assert logsumexp.shape == query.shape[:3]
