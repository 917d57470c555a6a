"""Chooses the kernel that attention on key-value segments runs on, and counts the choices."""

import math
from collections import Counter
from types import ModuleType

from torch import Tensor

from kvlayers.attention import fused, reference, shared_segments
from kvlayers.attention.cpu import kernel as cpu_kernel
from kvlayers.attention.cuda import kernel as cuda_kernel
from kvlayers.attention.segments import KVSegments
from kvlayers.upstream.deprecation import warn_the_caller
from kvlayers.upstream.generate_calls import running_attention_implementation
from kvlayers.utils.transforms import without_autocast

CPU = "a compiled kernel on segments"
CUDA = "a Triton kernel on segments"
BLOCKS = "plain torch, block by block"
COPY = "torch's attention on a copy of segments"
HEADS = "torch's attention, one KV head after another"
SLABS = "slab by slab"
SHARED = "shared segments once for all sequences"
"""Paths on which no state is brought to full precision for longer than it is used."""

PRODUCT = "no kernel takes a single product of eager attention"


READ_AS_HELD = ("sdpa", "eager", "kvlayers")
"""The attention implementations that read codes, and a prefix that sequences share, as they are held."""

_warned: set[str] = set()


class PathCounter:
    """Counts which path attention on the states of a store took.

    Attributes:
        counts: how often each path was taken, by its description.
    """

    __slots__ = ("counts",)

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def record(self, path: str) -> None:
        """Count one more call on this path."""
        self.counts[path] += 1

    def note_dense_read(self, path: str) -> None:
        """Count that states are read in full precision.

        It warns once in a process for each `attn_implementation` of models that cannot do otherwise.

        Args:
            path: what reads the states, and why not as they are held.
        """
        if path not in self.counts:
            name = running_attention_implementation()
            if name is not None and name not in (*READ_AS_HELD, *_warned):
                _warned.add(name)
                warn_the_caller(
                    f"The attention {name!r} reads states in full precision only. So at every step each layer of this "
                    "cache copies all of its states to full precision, which is slower than a DynamicCache and takes "
                    "the memory of one layer's copy. Use model.set_attn_implementation('sdpa'), or 'kvlayers' after "
                    "kvlayers.install(): both read the states as the cache holds them."
                )
        self.record(path)


def attend(query: Tensor, segments: KVSegments, mask: Tensor | None, scale: float | None, paths: PathCounter) -> Tensor:
    """Softmax attention of queries to the tokens of segments.

    Args:
        query: `[batch, heads, queries, key_head_dim]`, heads a multiple of the segments' kv_heads.
        segments: the keys and values.
        mask: bool or additive, broadcast to `[batch, heads, queries, tokens]`, or `None`.
        scale: factor of the scores, `1 / sqrt(key_head_dim)` if `None`.
        paths: counts the path that is taken.

    Returns:
        `[batch, heads, queries, value_head_dim]` in the dtype of the query.
    """
    batch, heads, queries, head_dim = query.shape
    if mask is not None:
        mask = mask.expand(batch, heads, queries, segments.tokens)
    # Torch takes a tensor for a number, and a kernel would take it for an address.
    scale = 1.0 / math.sqrt(head_dim) if scale is None else float(scale)
    if not fused.serves(query):
        return _attend_on_cpu(query, segments, mask, scale, paths)
    with without_autocast(query.device):
        obstacle = cuda_kernel.obstacle(query, segments, mask)
        if obstacle is None:
            out = cuda_kernel.attend(query, segments, mask, scale)
            to_compare = cuda_kernel.variants_to_compare(query, segments, mask)
            if not to_compare:
                paths.record(CUDA)
                return out
        shares = segments.shares_rows
        expected = (shared_segments.attend if shares else fused.attend)(query, segments, mask, scale)
        if obstacle is None:
            obstacle = cuda_kernel.compare(to_compare, out, expected)
            if obstacle is None:
                paths.record(CUDA)
                return out
        paths.record(f"{fused.description(query, segments)}, {SHARED if shares else SLABS}, as {obstacle}")
        return expected


def _attend_on_cpu(
    query: Tensor, segments: KVSegments, mask: Tensor | None, scale: float, paths: PathCounter
) -> Tensor:
    obstacle = cpu_kernel.obstacle(query, segments)
    if obstacle is None:
        paths.record(CPU)
        return cpu_kernel.attend(query, segments, mask, scale)
    with without_autocast(query.device):
        if reference.copying_pays(query, segments):
            paths.record(f"{COPY}, as {obstacle}")
            return reference.attend_to_copy(query, segments, mask, scale)
        if reference.by_head_pays(query, segments):
            paths.record(f"{HEADS}, as {obstacle}")
            return reference.attend_by_head(query, segments, mask, scale)
        out: Tensor = _cpu_means(segments, obstacle, paths).attend(query, segments, mask, scale)
        return out


def scores(query: Tensor, segments: KVSegments, paths: PathCounter) -> Tensor:
    """Products of queries `[batch, heads, queries, head_dim]` and all keys, `[batch, heads, queries, tokens]`."""
    with without_autocast(query.device):
        products: Tensor = _means_of_products(query, segments, paths).scores(query, segments)
        return products


def combine(weights: Tensor, segments: KVSegments, paths: PathCounter) -> Tensor:
    """Sums of the values, weighted by `[batch, heads, queries, tokens]`: `[batch, heads, queries, value_head_dim]`."""
    with without_autocast(weights.device):
        sums: Tensor = _means_of_products(weights, segments, paths).combine(weights, segments)
        return sums


def _cpu_means(segments: KVSegments, obstacle: str | None, paths: PathCounter) -> ModuleType:
    """The module that computes attention on a CPU, given the obstacle to the compiled kernel. It is counted."""
    if obstacle is None:
        paths.record(CPU)
        return cpu_kernel
    shares = segments.shares_rows
    paths.record(f"{SHARED if shares else BLOCKS}, as {obstacle}")
    return shared_segments if shares else reference


def _means_of_products(queries: Tensor, segments: KVSegments, paths: PathCounter) -> ModuleType:
    """The module that computes a product of eager attention with queries, or weights, of four dimensions."""
    if not fused.serves(queries):
        return _cpu_means(segments, cpu_kernel.obstacle(queries, segments), paths)
    shares = segments.shares_rows
    paths.record(f"{fused.PLAIN}, {SHARED}" if shares else f"{fused.PLAIN}, {SLABS}, as {PRODUCT}")
    return shared_segments if shares else reference
