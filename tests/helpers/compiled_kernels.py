"""Compiles Triton kernels for GPUs that need not be there, and prints what each needs as JSON.

    python tests/helpers/compiled_kernels.py

The kernels are those that a quantized layer launches for a prompt, for a decoded token and for its states in full
precision, and that of a shared prefix, on meta tensors in place of a GPU's. triton compiles them for each compute
capability, and `ptxas`, which comes with triton, reports what they need.
"""

import dataclasses
import itertools
import json
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import kvlayers
from kvlayers.kernels.attention import dispatch
from kvlayers.kernels.attention.dispatch import PathCounter
from kvlayers.kernels.attention.packed_tensor import PackedStates
from kvlayers.kernels.attention.segment_kinds import DenseSegment, PackedSegment
from kvlayers.kernels.attention.segments import GatheredSegment, KVSegments
from kvlayers.quantized.quantization import Quantization
from kvlayers.quantized.quantized_store import QuantizedStore
from offline_gpu import META, Compiled, Launch, as_gpu, compiled, recorded_launches

KV_HEADS, GROUPS, PROMPT = 8, 4, 8192


@dataclasses.dataclass(frozen=True)
class Case:
    """A layer that is quantized, and the queries that read it.

    Attributes:
        queries: new tokens of a decode step.
        readers: sequences that share the prompt.
        gathered: whether each kv head reads its own pieces of the prompt.
    """

    quantization: Quantization
    head_dim: int = 128
    dtype: torch.dtype = torch.bfloat16
    queries: int = 1
    masked: bool = False
    readers: int = 1
    gathered: bool = False

    @property
    def name(self) -> str:
        options = self.quantization
        parts = [f"{options.backend} {options.nbits}", f"head_dim {self.head_dim}", str(self.dtype).split(".")[1]]
        queries = "1 query" if self.queries == 1 else f"{self.queries} queries"
        sharing = [f"{self.readers} readers"] if self.readers > 1 else []
        pieces = ["pieces"] if self.gathered else []
        return ", ".join([*parts, queries, *(["mask"] if self.masked else []), *sharing, *pieces])


def cases() -> Iterator[Case]:
    four, eight = Quantization(nbits=4), Quantization(nbits=8)
    yield from (Case(four), Case(four, 64), Case(eight), Case(eight, 64))
    yield from (Case(four, readers=4), Case(four, readers=8), Case(four, gathered=True))


FEW = {
    80: (
        "attend_split: native 4, head_dim 128",
        "attend_split: native 4, head_dim 128, bfloat16, 1 query, 4 readers",
        "pack_block: native 4, head_dim 128",
    ),
    86: ("attend_split: native 4, head_dim 128", "attend_split: native 4, head_dim 128, bfloat16, 1 query, pieces"),
    89: ("attend_split: native 4, head_dim 128",),
    90: (
        *(f"attend_split: native {bits}, head_dim {head_dim}" for bits in (4, 8) for head_dim in (64, 128)),
        *(
            f"{kernel}: native 4, head_dim 128"
            for kernel in ("merge_splits", "pack_block", "read_block", "merge_parts")
        ),
        "attend_split: native 4, head_dim 128, bfloat16, 1 query, 8 readers",
        "attend_split: native 4, head_dim 128, bfloat16, 1 query, pieces",
    ),
    120: ("attend_split: native 4, head_dim 128", "read_block: native 4, head_dim 128"),
}
"""The kernels that are compiled, for one query in bfloat16, by compute capability."""


def is_wanted(name: str, capability: int) -> bool:
    few = FEW[capability]
    return name in few or (name.endswith("bfloat16, 1 query") and name.rpartition(", bfloat16")[0] in few)


def launches_of(case: Case, capability: int) -> list[Launch]:
    """The distinct launches of a prompt, a decoded token, and the states in full precision."""
    with as_gpu(capability), recorded_launches() as launches, torch.no_grad():
        store = QuantizedStore(case.quantization)
        for batch, tokens in ((1, PROMPT), (case.readers, case.queries)):
            if batch > 1:
                store.expand(batch)
            shape = batch, KV_HEADS, tokens, case.head_dim
            new = [torch.empty(shape, dtype=case.dtype, device=META) for _ in range(2)]
            keys, values = store.take_in(*new)
        if not isinstance(keys, PackedStates) or not isinstance(values, PackedStates):
            raise RuntimeError(f"no token of {case.name} is packed")
        shape = case.readers, KV_HEADS * GROUPS, case.queries, case.head_dim
        query = torch.empty(shape, dtype=case.dtype, device=META)
        mask = torch.empty(1, 1, case.queries, keys.shape[2], dtype=torch.bool, device=META) if case.masked else None
        dispatch.attend(query, keys.snapshot.segments, mask, None, PathCounter())
        if case.gathered:
            for segments in gathered_segments(keys.snapshot.segments, new):
                dispatch.attend(query, segments, mask, None, PathCounter())
        keys.dense()
        values.dense()
        shared = kvlayers.DynamicCache()
        for batch, tokens in ((1, PROMPT), (2, case.queries)):
            states = [
                torch.empty(batch, KV_HEADS, tokens, case.head_dim, dtype=case.dtype, device=META) for _ in range(2)
            ]
            keys, values = shared.update(*states, 0)
            if batch == 1:
                shared.expand(2)
        scaled_dot_product_attention(query[:1].expand(2, -1, -1, -1), keys, values, enable_gqa=True)
    return list({launch.variant: launch for launch in launches}.values())


def gathered_segments(segments: KVSegments, new: list[Tensor]) -> Iterator[KVSegments]:
    """Segments of a prompt of which each kv head reads pieces, packed ones and in full precision, and new tokens."""
    kv_heads, head_dim = new[0].shape[1], new[0].shape[3]
    tables = [torch.empty(1, kv_heads, PROMPT // 64, dtype=torch.int64, device=META) for _ in range(3)]
    prompt = [torch.empty(1, kv_heads, PROMPT, head_dim, dtype=new[0].dtype, device=META) for _ in range(2)]
    width = segments.tokens - new[0].shape[2]
    for source in (DenseSegment(*prompt), *(each for each in segments.in_order if isinstance(each, PackedSegment))):
        yield KVSegments((GatheredSegment(source, *tables, width), DenseSegment(*new)))


def measured() -> Iterator[dict[str, Any]]:
    """What each kernel of each case needs. A kernel that several cases share is compiled once."""
    seen: set[tuple[Any, ...]] = set()
    for case, capability in itertools.product(cases(), FEW):
        for launch in launches_of(case, capability):
            name = f"{launch.kernel.name}: {case.name}"
            if (capability, launch.variant) in seen or not is_wanted(name, capability):
                continue
            seen.add((capability, launch.variant))
            needs: Compiled = compiled(launch, capability)
            yield {"kernel": launch.kernel.name, "case": case.name, **dataclasses.asdict(needs), "fits": needs.fits}


if __name__ == "__main__":
    print(json.dumps(list(measured())))
