"""Calls the C++ kernel for attention on a CPU. It is in wheels, or is compiled once for this machine and kept on disk.

While there is no library `library()` is `None`, and attention runs in plain torch instead (`attention/reference.py`).
"""

import ctypes
import functools
import pathlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kvlayers.attention.segments import GatheredSegment, KVSegments, PackedSegment, Segment
from kvlayers.quantizers.packed_side import PackedSide
from kvlayers.utils.native_library import NativeLibrary

LIBRARY = NativeLibrary(
    pathlib.Path(__file__).with_name("kernel.cpp"), "kvlayers_attend", "kvlayers_score", "kvlayers_combine"
)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""What the kernel takes, in the order of its `Dtype`."""

CPU_MAXIMUM_ROWS = 128
"""Queries of one kv head, over all heads and sequences that share it, up to which the kernel beats matrix products on
packed blocks. Measured on a CPU."""

CPU_MAXIMUM_DENSE_ROWS = 512
"""As `CPU_MAXIMUM_ROWS`, if no token is packed: with more, torch's attention on a copy of the states takes less time.
Where sequences share segments, that would be a copy for each sequence, so the kernel takes any number."""

CPU_MAXIMUM_GATHERED_ROWS = 32
"""As `CPU_MAXIMUM_DENSE_ROWS`, if each KV head reads its own tokens: with more, torch's attention on one KV head after
another takes less time."""


class _Dense(ctypes.Structure):
    _fields_ = [
        ("keys", ctypes.c_void_p),
        ("values", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("key_batch", "key_head", "key_token")),
        *((name, ctypes.c_int64) for name in ("value_batch", "value_head", "value_token")),
        ("tokens", ctypes.c_int64),
    ]


class _Side(ctypes.Structure):
    _fields_ = [
        ("codes", ctypes.c_void_p),
        ("parameters", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("code_batch", "code_head", "code_block")),
        *((name, ctypes.c_int64) for name in ("parameter_batch", "parameter_head", "parameter_block")),
        *((name, ctypes.c_int64) for name in ("bits", "floating", "rows", "columns", "row_group", "column_group")),
        *((name, ctypes.c_void_p) for name in ("levels", "fixed_scales")),
    ]


class _Packed(ctypes.Structure):
    _fields_ = [
        ("keys", _Side),
        ("values", _Side),
        *((name, ctypes.c_int64) for name in ("blocks", "block_tokens", "first")),
        ("ends", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("keys_rotated", "values_rotated")),
    ]


class _Gathered(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("starts", "counts", "columns")),
        *((name, ctypes.c_int64) for name in ("pieces", "width")),
        ("source_rows", ctypes.c_void_p),
    ]


class _Segment(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("is_packed", "is_gathered")),
        *(("dense", _Dense), ("packed", _Packed), ("gathered", _Gathered)),
    ]


class _Mask(ctypes.Structure):
    _fields_ = [
        ("entries", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("batch", "head", "query", "key", "is_bool")),
    ]


class _Call(ctypes.Structure):
    _fields_ = [
        ("query", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("query_batch", "query_head", "query_token")),
        *((name, ctypes.c_int64) for name in ("out_batch", "out_head", "out_token")),
        *((name, ctypes.c_int64) for name in ("batch", "kv_heads", "groups", "query_tokens", "key_dim", "value_dim")),
        *((name, ctypes.c_int64) for name in ("dtype", "threads")),
        *((name, ctypes.c_double) for name in ("scale", "softcap")),
        ("sinks", ctypes.c_void_p),
        ("mask", _Mask),
        ("segment_count", ctypes.c_int64),
        ("segments", ctypes.c_void_p),
        ("rows", ctypes.c_void_p),
    ]


def obstacle(rows: Tensor, segments: KVSegments) -> str | None:
    """Why the kernel cannot take queries, or weights, `[batch, heads, queries, any]`; `None` if it can."""
    if rows.device.type != "cpu":
        return f"there is no kernel for {rows.device.type}"
    if rows.dtype not in DTYPES:
        return f"the kernel does not take {rows.dtype}"
    queries = rows.shape[1] // segments.kv_heads * rows.shape[2]
    # At most all sequences read one, so that a step of decoding need not look closer.
    if queries * rows.shape[0] > CPU_MAXIMUM_GATHERED_ROWS and not (segments.are_dense and segments.shares_rows):
        maximum = _maximum_rows(segments)
        if queries * segments.most_readers > maximum:
            return f"there are more than {maximum} queries for a kv head, as in a prompt"
    return None if library() is not None else f"the kernel {LIBRARY.obstacle}"


def _maximum_rows(segments: KVSegments) -> int:
    if segments.holds_packed:
        return CPU_MAXIMUM_ROWS
    return CPU_MAXIMUM_DENSE_ROWS if segments.are_dense else CPU_MAXIMUM_GATHERED_ROWS


def attend(query: Tensor, segments: KVSegments, mask: Tensor | None, scale: float) -> Tensor:
    """Softmax attention; arguments and result are those of `reference.attend`."""
    call, kept = _call(query, segments, scale)
    if mask is not None:
        kept.append(_set_mask(call.mask, mask))
    return _attended(call, query)


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
        query: `[batch, heads, queries, head_dim]`, of one of `DTYPES`.
        keys: `[batch, kv_heads, tokens, head_dim]`, of the same dtype.
        values: `[batch, kv_heads, tokens, value_head_dim]`, of the same dtype.
        mask: bool or additive, `[batch, heads, queries, tokens]`, or `None`.
        scale: factor of the scores.
        softcap: limit of the scores, `None` for no limit.
        sinks: `[heads]`, scores of keys without a value, or `None`.
    """
    call, kept = _call_of(query, keys.shape[1], (keys.shape[3], values.shape[3]), scale)
    segment = _Segment()
    kept += _set_dense(segment.dense, keys, values)
    kept += _set_segments(call, [segment])
    if mask is not None:
        kept.append(_set_mask(call.mask, mask))
    call.softcap = softcap or 0.0
    if sinks is not None:
        sinks = sinks.float().contiguous()
        call.sinks = sinks.data_ptr()
    return _attended(call, query)


def _attended(call: _Call, query: Tensor) -> Tensor:
    batch, heads, queries, _ = query.shape
    # In the memory layout of torch's own attention, so that the transpose after it costs nothing.
    out = query.new_empty((batch, queries, heads, call.value_dim)).transpose(1, 2)
    _set_out(call, out)
    _loaded().kvlayers_attend(ctypes.byref(call))
    return out


def scores(query: Tensor, segments: KVSegments) -> Tensor:
    """Products of queries `[batch, heads, queries, head_dim]` and all keys, `[batch, heads, queries, tokens]`."""
    batch, heads, queries, _ = query.shape
    call, _kept = _call(query, segments, 1.0)
    # Nothing is written where a column of a gathered segment stands for no token.
    out = query.new_full((batch, heads, queries, segments.tokens), -torch.inf)
    _set_out(call, out)
    _loaded().kvlayers_score(ctypes.byref(call))
    return out


def combine(weights: Tensor, segments: KVSegments) -> Tensor:
    """Sums of the values, weighted by `[batch, heads, queries, tokens]`: `[batch, heads, queries, value_head_dim]`."""
    batch, heads, queries, _ = weights.shape
    call, _kept = _call(weights, segments, 1.0)
    out = weights.new_empty((batch, heads, queries, call.value_dim))
    _set_out(call, out)
    _loaded().kvlayers_combine(ctypes.byref(call))
    return out


def _call(query: Tensor, segments: KVSegments, scale: float) -> tuple[_Call, list[Any]]:
    """Arguments of the kernel, and objects that must stay alive until it returns."""
    call, kept = _call_of(query, segments.kv_heads, segments.head_dims, scale)
    rows = [
        None if segment.rows is None else segment.rows.on(query.device)[0].data_ptr() for segment in segments.in_order
    ]
    kept += _set_segments(call, [_prepared(segment) for segment in segments.in_order], rows)
    return call, [segments, *kept]


def _call_of(query: Tensor, kv_heads: int, head_dims: tuple[int, int], scale: float) -> tuple[_Call, list[Any]]:
    """As `_call`, without the segments."""
    call = _Call()
    if query.stride(3) != 1:
        query = query.contiguous()
    call.query = query.data_ptr()
    call.query_batch, call.query_head, call.query_token, _ = query.stride()
    call.batch, heads, call.query_tokens, _ = query.shape
    call.kv_heads, call.groups = kv_heads, heads // kv_heads
    call.key_dim, call.value_dim = head_dims
    call.dtype = DTYPES.index(query.dtype)
    call.threads = torch.get_num_threads()
    call.scale = scale
    return call, [query]


def _set_segments(call: _Call, prepared: list[_Segment], rows: Sequence[int | None] | None = None) -> list[Any]:
    """Set the segments of a call, and the addresses of their rows. Without, every sequence reads its own row."""
    count = call.segment_count = len(prepared)
    addresses = (ctypes.c_void_p * count)(*map(ctypes.addressof, prepared))
    of_rows = (ctypes.c_void_p * count)(*(rows or ()))
    call.segments, call.rows = ctypes.addressof(addresses), ctypes.addressof(of_rows)
    return [prepared, addresses, of_rows]


def _prepared(segment: Segment) -> _Segment:
    """The arguments that describe a segment. Its kernel cache keeps them."""
    prepared: _Segment | None = segment.kernel_cache.get("cpu")
    if prepared is None:
        if isinstance(segment, GatheredSegment):
            prepared = _Segment.from_buffer_copy(_prepared(segment.source))
            prepared.is_gathered = True
            segment.kernel_cache["cpu arrays"] = _set_gathered(prepared.gathered, segment)
        elif isinstance(segment, PackedSegment):
            prepared = _Segment(is_packed=True)
            segment.kernel_cache["cpu arrays"] = _set_packed(prepared.packed, segment)
        else:
            prepared = _Segment(is_packed=False)
            segment.kernel_cache["cpu arrays"] = _set_dense(prepared.dense, segment.keys, segment.values)
        segment.kernel_cache["cpu"] = prepared
    return prepared


def _set_gathered(entry: _Gathered, segment: GatheredSegment) -> list[Tensor]:
    """As `_set_dense`."""
    tables = [table.contiguous() for table in (segment.starts, segment.counts, segment.columns)]
    entry.starts, entry.counts, entry.columns = (table.data_ptr() for table in tables)
    entry.pieces, entry.width = tables[0].shape[2], segment.width
    if segment.source.rows is not None:
        tables.append(segment.source.rows.on(tables[0].device)[0])
        entry.source_rows = tables[-1].data_ptr()
    return tables


def _set_dense(entry: _Dense, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Describe states; return memory that must live as long as the description."""
    keys = keys if keys.stride(3) == 1 else keys.contiguous()
    values = values if values.stride(3) == 1 else values.contiguous()
    entry.keys, entry.values = keys.data_ptr(), values.data_ptr()
    entry.key_batch, entry.key_head, entry.key_token, _ = keys.stride()
    entry.value_batch, entry.value_head, entry.value_token, _ = values.stride()
    entry.tokens = keys.shape[2]
    return keys, values


def _set_packed(entry: _Packed, segment: PackedSegment) -> Any:
    """As `_set_dense`."""
    entry.blocks, entry.block_tokens, entry.first = segment.blocks, segment.keys.block_tokens, segment.first
    _set_side(entry.keys, segment.keys)
    _set_side(entry.values, segment.values)
    entry.keys_rotated, entry.values_rotated = segment.keys.format.rotated, segment.values.format.rotated
    if segment.ends is None:
        return None
    ends = (ctypes.c_int32 * segment.blocks)(*segment.ends)
    entry.ends = ctypes.addressof(ends)
    return ends


def _set_side(entry: _Side, side: PackedSide) -> None:
    entry.codes, entry.parameters = side.codes.data_ptr(), side.parameters.data_ptr()
    entry.code_batch, entry.code_head, entry.code_block, _ = side.codes.stride()
    entry.parameter_batch, entry.parameter_head, entry.parameter_block, _ = side.parameters.stride()
    entry.bits, entry.floating = side.format.bits, side.format.floating
    entry.rows, entry.columns = side.rows, side.columns
    entry.row_group, entry.column_group = side.row_group, side.column_group
    if side.format.levels:
        entry.levels = ctypes.addressof(_floats(side.format.levels))
    if side.format.fixed_scales:
        scales, kv_heads = side.format.fixed_scales, side.codes.shape[1]
        side.format.check_heads(kv_heads)
        entry.fixed_scales = ctypes.addressof(_floats(scales * kv_heads if len(scales) == 1 else scales))


@functools.cache
def _floats(numbers: tuple[float, ...]) -> Any:
    """Numbers as a C array, which lives as long as the process."""
    return (ctypes.c_float * len(numbers))(*numbers)


def _set_mask(entry: _Mask, mask: Tensor) -> Tensor:
    if mask.dtype != torch.bool:
        mask = mask.float()
    entry.entries = mask.data_ptr()
    entry.batch, entry.head, entry.query, entry.key = mask.stride()
    entry.is_bool = mask.dtype == torch.bool
    return mask


def _set_out(call: _Call, out: Tensor) -> None:
    call.out = out.data_ptr()
    call.out_batch, call.out_head, call.out_token, _ = out.stride()


def _loaded() -> ctypes.CDLL:
    kernel = library()
    if kernel is None:
        raise RuntimeError("The CPU kernel is not loaded: call obstacle() first.")
    return kernel


def library() -> ctypes.CDLL | None:
    """The compiled kernel; `None` while it is compiled, and if that has failed."""
    return LIBRARY.get()
