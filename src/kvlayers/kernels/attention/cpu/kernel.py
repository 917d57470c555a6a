"""Calls the C++ kernel for attention on a CPU. It is in wheels, or is compiled once for this machine and kept on disk.

While there is no library `library()` is `None`, and attention runs in plain torch instead (`attention/reference.py`).
"""

import ctypes
import pathlib

import torch
from torch import Tensor

from kvlayers.kernels.attention.cpu import call
from kvlayers.kernels.attention.segments import KVSegments
from kvlayers.utils.native_library import NativeLibrary

LIBRARY = NativeLibrary(
    pathlib.Path(__file__).with_name("kernel.cpp"),
    *("kvlayers_attend", "kvlayers_score", "kvlayers_combine"),
    purpose="attention",
)

CPU_MAXIMUM_ROWS = 128
"""Queries of one kv head, over all heads and sequences that share it, up to which the kernel beats matrix products on
packed blocks. Measured on a CPU."""

CPU_MAXIMUM_DENSE_ROWS = 512
"""As `CPU_MAXIMUM_ROWS`, if no token is packed: with more, torch's attention on a copy of the states takes less time.
Where sequences share segments, that would be a copy for each sequence, so the kernel takes any number."""

CPU_MAXIMUM_GATHERED_ROWS = 32
"""As `CPU_MAXIMUM_DENSE_ROWS`, if each KV head reads its own tokens: with more, torch's attention on one KV head after
another takes less time."""

_ALWAYS_TAKEN = min(CPU_MAXIMUM_ROWS, CPU_MAXIMUM_DENSE_ROWS, CPU_MAXIMUM_GATHERED_ROWS)


def obstacle(rows: Tensor, segments: KVSegments) -> str | None:
    """Why the kernel cannot take queries, or weights, `[batch, heads, queries, any]`; `None` if it can."""
    if not rows.is_cpu:
        return f"there is no kernel for {rows.device.type}"
    if rows.dtype not in call.DTYPES:
        return f"the kernel does not take {rows.dtype}"
    # No KV head has more queries than all heads of all sequences together. If these are few, as in a decode step,
    # nothing else is looked at.
    batch, heads, queries, _ = rows.shape
    if batch * heads * queries > _ALWAYS_TAKEN and not (segments.are_dense and segments.shares_rows):
        maximum = _maximum_rows(segments)
        if heads // segments.kv_heads * queries * segments.most_readers > maximum:
            return f"there are more than {maximum} queries for a kv head, as in a prompt"
    return call.products_obstacle(segments) if library() is not None else f"the kernel {LIBRARY.obstacle}"


def _maximum_rows(segments: KVSegments) -> int:
    if segments.holds_packed:
        return CPU_MAXIMUM_ROWS
    return CPU_MAXIMUM_DENSE_ROWS if segments.are_dense else CPU_MAXIMUM_GATHERED_ROWS


def attend(query: Tensor, segments: KVSegments, mask: Tensor | None, scale: float) -> Tensor:
    """Softmax attention; arguments and result are those of `reference.attend`. States have the dtype of the query."""
    described, smoothing = call.of_segments(segments, query.device), call.of_smoothing(segments)
    count = len(segments.in_order)
    return _attend(query, segments.kv_heads, segments.head_dims, mask, scale, described, count, smoothing=smoothing)


def attend_dense(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """As `attend`, for states in full precision, one per token.

    Args:
        query: `[batch, heads, queries, head_dim]`, of one of `call.DTYPES`.
        keys: `[batch, kv_heads, tokens, head_dim]`, of the same dtype.
        values: `[batch, kv_heads, tokens, value_head_dim]`, of the same dtype.
        mask: bool or additive, `[batch, heads, queries, tokens]`, or `None`.
        scale: factor of the scores.
        softcap: limit of the scores, `None` for no limit.
        sinks: `[heads]`, scores of keys without a value, or `None`.
    """
    # What is kept, and the sinks, must live until the kernel returns.
    segment, _kept = call.of_dense(keys, values, 0, keys.shape[2])
    sinks = None if sinks is None else sinks.float().contiguous()
    address = 0 if sinks is None else sinks.data_ptr()
    head_dims = keys.shape[3], values.shape[3]
    return _attend(
        query, keys.shape[1], head_dims, mask, scale, (segment, call.NO_ROWS), 1, softcap=softcap or 0.0, sinks=address
    )


def _attend(
    query: Tensor,
    kv_heads: int,
    head_dims: tuple[int, int],
    mask: Tensor | None,
    scale: float,
    segments: tuple[bytes, bytes],
    count: int,
    softcap: float = 0.0,
    sinks: int = 0,
    smoothing: tuple[int, int] = (0, 0),
) -> Tensor:
    """Attention to `count` segments; the arguments are those of `call.of_call`."""
    query = call.readable(query)
    batch, heads, queries, _ = query.shape
    # In the layout of torch's own result: the transpose after it costs nothing.
    strides = (heads * queries * head_dims[1], head_dims[1], heads * head_dims[1], 1)
    out = query.new_empty_strided((batch, heads, queries, head_dims[1]), strides)
    if mask is not None and mask.dtype != torch.bool:
        mask = mask.float()
    of_mask = call.NO_MASK if mask is None else call.of_mask(mask)
    numbers = call.of_call(query, out, kv_heads, head_dims, count, scale, of_mask, softcap, sinks, smoothing)
    _loaded().kvlayers_attend(numbers, *segments)
    return out


def scores(query: Tensor, segments: KVSegments) -> Tensor:
    """Products of queries `[batch, heads, queries, head_dim]` and all keys, `[batch, heads, queries, tokens]`."""
    query = call.readable(query)
    # Nothing is written where a column of a gathered segment stands for no token.
    out = query.new_full((*query.shape[:3], segments.tokens), -torch.inf)
    _loaded().kvlayers_score(*_call_without_mask(query, out, segments))
    return out


def combine(weights: Tensor, segments: KVSegments) -> Tensor:
    """Sums of the values, weighted by `[batch, heads, queries, tokens]`: `[batch, heads, queries, value_head_dim]`."""
    weights = call.readable(weights)
    out = weights.new_empty((*weights.shape[:3], segments.head_dims[1]))
    _loaded().kvlayers_combine(*_call_without_mask(weights, out, segments))
    return out


def _call_without_mask(query: Tensor, out: Tensor, segments: KVSegments) -> tuple[bytes, bytes, bytes]:
    """What a function of the kernel is called with for a single product. The tensors must live until it returns."""
    smoothing = call.of_smoothing(segments)
    count = len(segments.in_order)
    numbers = call.of_call(query, out, segments.kv_heads, segments.head_dims, count, 1.0, smoothing=smoothing)
    return numbers, *call.of_segments(segments, query.device)


def _loaded() -> ctypes.CDLL:
    kernel = library()
    if kernel is None:
        raise RuntimeError("The CPU kernel is not loaded: call obstacle() first.")
    return kernel


def library() -> ctypes.CDLL | None:
    """The compiled kernel; `None` while it is compiled, and if that has failed."""
    return LIBRARY.get()
