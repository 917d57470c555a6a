"""Compiles Triton kernels for GPUs that need not be there, and prints what each needs as JSON.

    python tests/helpers/compiled_kernels.py

The kernels are those that a quantized layer launches for a prompt, for a decoded token and for its states in full
precision, and that of a shared prefix, in bfloat16 on meta tensors in place of a GPU's. triton compiles them for each
compute capability, and `ptxas`, which comes with triton, reports what they need.
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
from offline_gpu import META, Launch, as_gpu, compiled, recorded_launches

KV_HEADS, GROUPS, PROMPT = 8, 4, 8192


@dataclasses.dataclass(frozen=True)
class Case:
    """A layer that is quantized, and the queries of new tokens that read it.

    Attributes:
        readers: sequences that share the prompt.
        gathered: whether each kv head reads its own pieces of the prompt.
    """

    nbits: int
    head_dim: int = 128
    readers: int = 1
    gathered: bool = False

    @property
    def name(self) -> str:
        sharing = [f"{self.readers} readers"] if self.readers > 1 else []
        pieces = ["pieces"] if self.gathered else []
        return ", ".join([f"{self.nbits} bits, head_dim {self.head_dim}", *sharing, *pieces])


CASES = (Case(4), Case(4, 64), Case(8), Case(8, 64), Case(4, readers=4), Case(4, readers=8), Case(4, gathered=True))

FEW = {
    80: {
        "attend_split: 4 bits, head_dim 128",
        "attend_split: 4 bits, head_dim 128, 4 readers",
        "pack_block: 4 bits, head_dim 128",
    },
    86: {"attend_split: 4 bits, head_dim 128", "attend_split: 4 bits, head_dim 128, pieces"},
    89: {"attend_split: 4 bits, head_dim 128"},
    90: {
        *(f"attend_split: {bits} bits, head_dim {head_dim}" for bits in (4, 8) for head_dim in (64, 128)),
        *(f"{kernel}: 4 bits, head_dim 128" for kernel in ("merge_splits", "pack_block", "read_block", "merge_parts")),
        "attend_split: 4 bits, head_dim 128, 8 readers",
        "attend_split: 4 bits, head_dim 128, pieces",
    },
    120: {"attend_split: 4 bits, head_dim 128", "read_block: 4 bits, head_dim 128"},
}
"""The kernels that are compiled, by compute capability."""


def empty(batch: int, heads: int, tokens: int, head_dim: int) -> Tensor:
    return torch.empty(batch, heads, tokens, head_dim, dtype=torch.bfloat16, device=META)


def launches_of(case: Case, capability: int) -> list[Launch]:
    """The distinct launches of a prompt, a decoded token, and the states in full precision."""
    with as_gpu(capability), recorded_launches() as launches, torch.no_grad():
        store = QuantizedStore(Quantization(nbits=case.nbits))
        for batch, tokens in ((1, PROMPT), (case.readers, 1)):
            if batch > 1:
                store.expand(batch)
            new = [empty(batch, KV_HEADS, tokens, case.head_dim)] * 2
            keys, values = store.take_in(*new)
        if not isinstance(keys, PackedStates) or not isinstance(values, PackedStates):
            raise RuntimeError(f"no token of {case.name} is packed")
        query = empty(case.readers, KV_HEADS * GROUPS, 1, case.head_dim)
        dispatch.attend(query, keys.snapshot.segments, None, None, PathCounter())
        if case.gathered:
            for segments in gathered_segments(keys.snapshot.segments, new):
                dispatch.attend(query, segments, None, None, PathCounter())
        keys.dense()
        values.dense()
        shared = kvlayers.DynamicCache()
        shared.update(*[empty(1, KV_HEADS, PROMPT, case.head_dim)] * 2, 0)
        shared.expand(2)
        attended = shared.update(*[empty(2, KV_HEADS, 1, case.head_dim)] * 2, 0)
        scaled_dot_product_attention(query[:1].expand(2, -1, -1, -1), *attended, enable_gqa=True)
    return list({launch.variant: launch for launch in launches}.values())


def gathered_segments(segments: KVSegments, new: list[Tensor]) -> Iterator[KVSegments]:
    """Segments of a prompt of which each kv head reads pieces, packed ones and in full precision, and new tokens."""
    tables = [torch.empty(1, KV_HEADS, PROMPT // 64, dtype=torch.int64, device=META) for _ in range(3)]
    prompt = DenseSegment(*[empty(1, KV_HEADS, PROMPT, new[0].shape[3])] * 2)
    for source in (prompt, *(each for each in segments.in_order if isinstance(each, PackedSegment))):
        yield KVSegments((GatheredSegment(source, *tables, segments.tokens - 1), DenseSegment(*new)))


def measured() -> Iterator[dict[str, Any]]:
    """What each kernel of each case needs. A kernel that several cases share is compiled once."""
    seen: set[tuple[Any, ...]] = set()
    for case, capability in itertools.product(CASES, FEW):
        for launch in launches_of(case, capability):
            is_wanted = f"{launch.kernel.name}: {case.name}" in FEW[capability]
            if is_wanted and (capability, launch.variant) not in seen:
                seen.add((capability, launch.variant))
                yield {"kernel": launch.kernel.name, "case": case.name, **compiled(launch, capability)}


if __name__ == "__main__":
    print(json.dumps(list(measured())))
