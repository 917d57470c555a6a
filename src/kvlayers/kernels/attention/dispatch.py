"""Chooses the kernel that attention on key-value segments runs on, and counts the choices."""

import functools
import math
from collections import Counter

import torch
from torch import Tensor

from kvlayers.kernels.attention import fused, slabs
from kvlayers.kernels.attention.cpu import kernel as cpu_kernel
from kvlayers.kernels.attention.cuda import kernel as cuda_kernel
from kvlayers.kernels.attention.gqa import attend_dense
from kvlayers.kernels.attention.segments import KVSegments
from kvlayers.upstream.callers import running_attention_implementation, warn_the_caller
from kvlayers.utils.transforms import without_autocast

CPU = "a compiled kernel on segments"
MANY = "a compiled kernel for many queries"
CUDA = "a Triton kernel on segments"
BLOCKS = "plain torch, block by block"
COPY = "torch's attention on a copy of segments"
FUSED = "torch's fused attention"
PLAIN = "plain torch"
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
        self.counts[path] += 1


def attend(
    query: Tensor,
    segments: KVSegments,
    mask: Tensor | None,
    scale: float | None,
    paths: PathCounter,
    is_causal: bool = False,
) -> Tensor:
    """Softmax attention of queries to the tokens of segments.

    Args:
        query: `[batch, heads, queries, key_head_dim]`, heads a multiple of the segments' kv_heads.
        segments: the keys and values.
        mask: bool or additive, broadcast to `[batch, heads, queries, tokens]`, or `None`.
        scale: factor of the scores, `1 / sqrt(key_head_dim)` if `None`.
        paths: counts the path that is taken.
        is_causal: whether a query attends to the tokens up to its own number alone; only without a mask.

    Returns:
        `[batch, heads, queries, value_head_dim]` in the dtype of the query.
    """
    batch, heads, queries, head_dim = query.shape
    if is_causal:
        mask = torch.ones(queries, segments.tokens, dtype=torch.bool, device=query.device).tril()
    if mask is not None:
        mask = mask.expand(batch, heads, queries, segments.tokens)
    # Torch takes a tensor for a number, and a kernel would take it for an address.
    scale = 1.0 / math.sqrt(head_dim) if scale is None else float(scale)
    if not slabs.are_of_accelerators(query):
        return _attend_on_cpu(query, segments, mask, scale, paths)
    by_torch = functools.partial(slabs.attend, query, segments, mask, scale)
    with without_autocast(query.device):
        found = cuda_kernel.attend(query, segments, mask, scale, by_torch)
        if isinstance(found, Tensor):
            paths.counts[CUDA] += 1
            return found
        by = FUSED if fused.takes(query, segments.head_dims, has_mask=True) else PLAIN
        paths.counts[f"{by}, {SHARED if segments.shares_rows else SLABS}, as {found}"] += 1
        return by_torch()


def _attend_on_cpu(
    query: Tensor, segments: KVSegments, mask: Tensor | None, scale: float, paths: PathCounter
) -> Tensor:
    obstacle = cpu_kernel.obstacle(query, segments)
    if obstacle is None:
        paths.counts[CPU] += 1
        return cpu_kernel.attend(query, segments, mask, scale)
    with without_autocast(query.device):
        if cpu_kernel.takes_many(query, segments):
            paths.counts[f"{MANY}, as {obstacle}"] += 1
            return cpu_kernel.attend_many(query, segments, mask, scale)
        if _copying_pays(query, segments):
            paths.counts[f"{COPY}, as {obstacle}"] += 1
            keys, values = segments.dense("keys", query.dtype), segments.dense("values", query.dtype)
            return attend_dense(query, keys, values, mask, False, scale)
        paths.counts[f"{SHARED if segments.shares_rows else BLOCKS}, as {obstacle}"] += 1
        return slabs.attend(query, segments, mask, scale)


def _copying_pays(query: Tensor, segments: KVSegments) -> bool:
    """Whether torch's attention on a copy of all states takes less time than a few of them at once in float32.

    It is slow for a single query of bfloat16, for any number of float16, and keeps all scores if head_dims differ.
    """
    if query.dtype == torch.float16 or segments.shares_rows or segments.holds_gathered:
        return False
    if segments.are_dense:
        return query.shape[2] > 1
    return query.shape[2] > cpu_kernel.CPU_MAXIMUM_QUERIES and len(set(segments.head_dims)) == 1


def scores(query: Tensor, segments: KVSegments, paths: PathCounter) -> Tensor:
    """Products of queries `[batch, heads, queries, head_dim]` and all keys, `[batch, heads, queries, tokens]`."""
    with without_autocast(query.device):
        by = cpu_kernel.scores if _are_compiled(query, segments, paths) else slabs.scores
        return by(query, segments)


def combine(weights: Tensor, segments: KVSegments, paths: PathCounter) -> Tensor:
    """Sums of the values, weighted by `[batch, heads, queries, tokens]`: `[batch, heads, queries, value_head_dim]`."""
    with without_autocast(weights.device):
        by = cpu_kernel.combine if _are_compiled(weights, segments, paths) else slabs.combine
        return by(weights, segments)


def _are_compiled(queries: Tensor, segments: KVSegments, paths: PathCounter) -> bool:
    """Whether the compiled kernel takes a product of eager attention with queries, or weights. The path is counted."""
    shares = segments.shares_rows
    if slabs.are_of_accelerators(queries):
        paths.counts[f"{PLAIN}, {SHARED}" if shares else f"{PLAIN}, {SLABS}, as {PRODUCT}"] += 1
        return False
    obstacle = cpu_kernel.obstacle(queries, segments)
    paths.counts[CPU if obstacle is None else f"{SHARED if shares else BLOCKS}, as {obstacle}"] += 1
    return obstacle is None
