"""Calls the C++ kernel for attention on a CPU, which is compiled once for this machine and kept on disk.

Without a C++ compiler `library()` is `None`, and attention runs in plain torch instead (`attention/reference.py`).
"""

import ctypes
import pathlib
from typing import Any

import torch
from torch import Tensor

from kvlayers.attention.segments import DenseSegment, KVSegments, PackedSegment
from kvlayers.quantizers.hadamard import rotation_size
from kvlayers.quantizers.packed_side import PackedSide
from kvlayers.utils.native_library import compiled_library, once

SOURCE = pathlib.Path(__file__).with_name("kernel.cpp")
DTYPES = (torch.float32, torch.bfloat16)
MAXIMUM_DENSE_SEGMENTS = 4
CPU_MAXIMUM_ROWS = 128
"""Queries of one kv head, over all heads that share it, up to which the kernel beats matrix products on blocks.

Measured on a CPU.
"""


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
    ]


class _Packed(ctypes.Structure):
    _fields_ = [
        ("keys", _Side),
        ("values", _Side),
        *((name, ctypes.c_int64) for name in ("blocks", "block_tokens", "first")),
        ("ends", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("key_rotation", "value_rotation")),
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
        *((name, ctypes.c_int64) for name in ("is_bfloat16", "threads")),
        ("scale", ctypes.c_double),
        ("mask", _Mask),
        *((name, ctypes.c_int64) for name in ("dense_before", "dense_after")),
        ("dense", _Dense * MAXIMUM_DENSE_SEGMENTS),
        ("packed", _Packed),
    ]


def obstacle(rows: Tensor, segments: KVSegments) -> str | None:
    """Why the kernel cannot take queries, or weights, `[batch, heads, queries, any]`; `None` if it can."""
    if rows.device.type != "cpu":
        return f"there is no kernel for {rows.device.type}"
    if rows.dtype not in DTYPES:
        return f"the kernel does not take {rows.dtype}"
    if rows.shape[1] // segments.kv_heads * rows.shape[2] > CPU_MAXIMUM_ROWS:
        return f"there are more than {CPU_MAXIMUM_ROWS} queries for a kv head, as in a prompt"
    if not segments.has_one_packed_run:
        return "packed tokens are in several segments"
    if len(segments.before) + len(segments.after) > MAXIMUM_DENSE_SEGMENTS:
        return f"there are more than {MAXIMUM_DENSE_SEGMENTS} segments in full precision"
    return None if library() is not None else "the kernel could not be compiled (the log says why)"


def attend(query: Tensor, segments: KVSegments, mask: Tensor | None, scale: float) -> Tensor:
    """Softmax attention; arguments and result are those of `reference.attend`."""
    batch, heads, queries, _ = query.shape
    call, kept = _call(query, segments, heads, queries, scale)
    if mask is not None:
        kept.append(_set_mask(call.mask, mask))
    # In the memory layout of torch's own attention, so that the transpose after it costs nothing.
    out = query.new_empty((batch, queries, heads, call.value_dim)).transpose(1, 2)
    _set_out(call, out)
    _loaded().kvlayers_attend(ctypes.byref(call))
    return out


def scores(query: Tensor, segments: KVSegments) -> Tensor:
    """Products of queries `[batch, heads, queries, head_dim]` and all keys, `[batch, heads, queries, tokens]`."""
    batch, heads, queries, _ = query.shape
    call, _kept = _call(query, segments, heads, queries, 1.0)
    out = query.new_empty((batch, heads, queries, segments.tokens))
    _set_out(call, out)
    _loaded().kvlayers_score(ctypes.byref(call))
    return out


def combine(weights: Tensor, segments: KVSegments) -> Tensor:
    """Sums of the values, weighted by `[batch, heads, queries, tokens]`: `[batch, heads, queries, value_head_dim]`."""
    batch, heads, queries, _ = weights.shape
    call, _kept = _call(weights, segments, heads, queries, 1.0)
    out = weights.new_empty((batch, heads, queries, call.value_dim))
    _set_out(call, out)
    _loaded().kvlayers_combine(ctypes.byref(call))
    return out


def _call(query: Tensor, segments: KVSegments, heads: int, queries: int, scale: float) -> tuple[_Call, list[Any]]:
    """Arguments of the kernel, and objects that must stay alive until it returns."""
    call = _Call()
    if query.stride(3) != 1:
        query = query.contiguous()
    kept: list[Any] = [query, segments]
    call.query = query.data_ptr()
    call.query_batch, call.query_head, call.query_token, _ = query.stride()
    call.query_tokens = queries
    call.is_bfloat16 = query.dtype == torch.bfloat16
    call.threads = torch.get_num_threads()
    call.scale = scale
    call.dense_before, call.dense_after = len(segments.before), len(segments.after)
    for entry, segment in zip(call.dense, (*segments.before, *segments.after), strict=False):
        kept.append(_set_dense(entry, segment))
        call.batch, call.kv_heads = segment.keys.shape[0], segment.keys.shape[1]
        call.key_dim, call.value_dim = segment.keys.shape[3], segment.values.shape[3]
    if segments.packed is not None:
        call.packed = _packed(segments.packed)
        codes = segments.packed.keys.codes
        call.batch, call.kv_heads = codes.shape[0], codes.shape[1]
        call.key_dim, call.value_dim = segments.packed.keys.head_dim, segments.packed.values.head_dim
    call.groups = heads // call.kv_heads
    return call, kept


def _set_dense(entry: _Dense, segment: DenseSegment) -> tuple[Tensor, Tensor]:
    keys = segment.keys if segment.keys.stride(3) == 1 else segment.keys.contiguous()
    values = segment.values if segment.values.stride(3) == 1 else segment.values.contiguous()
    entry.keys, entry.values = keys.data_ptr(), values.data_ptr()
    entry.key_batch, entry.key_head, entry.key_token, _ = keys.stride()
    entry.value_batch, entry.value_head, entry.value_token, _ = values.stride()
    entry.tokens = segment.tokens
    return keys, values


def _packed(segment: PackedSegment) -> _Packed:
    packed: _Packed | None = segment.kernel_cache.get("cpu")
    if packed is None:
        packed = _Packed(blocks=segment.blocks, block_tokens=segment.keys.block_tokens, first=segment.first)
        _set_side(packed.keys, segment.keys)
        _set_side(packed.values, segment.values)
        if segment.ends is not None:
            ends = (ctypes.c_int32 * segment.blocks)(*segment.ends)
            packed.ends = ctypes.addressof(ends)
            segment.kernel_cache["ends"] = ends
        packed.key_rotation, packed.value_rotation = _rotation(segment.keys), _rotation(segment.values)
        segment.kernel_cache["cpu"] = packed
    return packed


def _rotation(side: PackedSide) -> int:
    """Channels that are mixed with each other, 0 if the side is not rotated."""
    return rotation_size(side.head_dim) if side.format.rotated else 0


def _set_side(entry: _Side, side: PackedSide) -> None:
    entry.codes, entry.parameters = side.codes.data_ptr(), side.parameters.data_ptr()
    entry.code_batch, entry.code_head, entry.code_block, _ = side.codes.stride()
    entry.parameter_batch, entry.parameter_head, entry.parameter_block, _ = side.parameters.stride()
    entry.bits, entry.floating = side.format.bits, side.format.floating
    entry.rows, entry.columns = side.rows, side.columns
    entry.row_group, entry.column_group = side.row_group, side.column_group


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
        raise RuntimeError("The CPU kernel is not compiled: call obstacle() first.")
    return kernel


@once
def library() -> ctypes.CDLL | None:
    """The compiled kernel, `None` if it cannot be compiled; the reason is logged once."""
    return compiled_library(SOURCE, "kvlayers_attend", "kvlayers_score", "kvlayers_combine")
