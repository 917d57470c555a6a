"""Calls the C++ kernel for attention on a CPU. It is in wheels, or is compiled once for this machine and kept on disk.

While there is no library `library()` is `None`, and attention runs in plain torch instead (`attention/slabs.py`).

The arguments are bytes in the layout of `call.h`. Each layer needs them anew for each token, and setting the fields of
a `ctypes.Structure` one by one would take longer.

The kernel calls the functions that multiply codes by their address, which it is told with each side. They are compiled
apart from the kernel, so that attention in full precision is fast first, and then the common codes.
"""

import ctypes
import functools
import pathlib
import struct
from typing import Any

import torch
from torch import Tensor

from kvlayers.kernels.attention.segment_kinds import PackedSegment
from kvlayers.kernels.attention.segments import GatheredSegment, KVSegments, Segment
from kvlayers.kernels.codes import cpu_packing
from kvlayers.kernels.codes.packed_side import PackedSide
from kvlayers.utils.native_library import NativeLibrary

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""What the kernel takes, in the order of its `Dtype`."""

_MASK_DTYPES = (torch.float32, torch.bool, torch.bfloat16, torch.float16)
"""Dtypes of masks, in the order of the kernel's `MaskKind`. Only attention of many queries reads the last two."""

_FOLDER = pathlib.Path(__file__).parent
WHOLE = NativeLibrary(_FOLDER / "whole_products.cpp", "kvlayers_multiply", purpose="codes of 4 and 8 bits")
OTHER = NativeLibrary(_FOLDER / "other_products.cpp", "kvlayers_multiply", purpose="other codes")
MANY = NativeLibrary(_FOLDER / "many_queries.cpp", "kvlayers_attend_many", purpose="prompts")

COMMON_BITS = (4, 8)

# The fields are those of the structures in `call.h`, in the same order: P is a pointer, q an int64_t, d a double, x a
# byte that is not used.
_SIDE = struct.Struct("@2P 12q 3P")
_BLOCKS = struct.Struct("@3q P 2q 2P")
_GATHERED = struct.Struct("@3P 2q P")
_KIND = struct.Struct("@2q")
_AFTER_DENSE = 2 * _SIDE.size + _BLOCKS.size + _GATHERED.size
_DENSE = struct.Struct(f"@2q 2P 7q {_AFTER_DENSE}x")
_NO_DENSE = bytes(_DENSE.size - _AFTER_DENSE - _KIND.size)
_CALL = struct.Struct("@2P 6q 6q 2q 2d P q")
_MASK = struct.Struct("@P 5q")
_POINTER = struct.Struct("@P")

NO_MASK = bytes(_MASK.size)

NO_ROWS = bytes(_POINTER.size)
"""Of a segment of which each sequence of the batch reads its own sequence."""


def products_for(bits: int, is_whole: bool) -> NativeLibrary:
    """The library that multiplies codes.

    Args:
        bits: width of a code.
        is_whole: whether a code stands for itself, before its scale and its zero.
    """
    return WHOLE if is_whole and bits in COMMON_BITS else OTHER


def products_obstacle(segments: KVSegments) -> str | None:
    """Why the packed codes of segments cannot be multiplied; `None` if they can, or there are none."""
    for segment in segments.in_order:
        source = segment.source
        # What was prepared for the kernel has the address of its products.
        if isinstance(source, PackedSegment) and "cpu" not in source.kernel_cache:
            for side in (source.keys, source.values):
                needed = products_for(side.layout.format.bits, side.layout.format.has_zero)
                if needed.get() is None:
                    return f"the kernel for {needed.purpose} {needed.obstacle}"
    return None


def readable(states: Tensor) -> Tensor:
    """The states, or a copy of them, with a contiguous last axis."""
    return states if states.stride(3) == 1 else states.contiguous()


def of_call(
    query: Tensor,
    out: Tensor,
    kv_heads: int,
    head_dims: tuple[int, int],
    segments: int,
    scale: float,
    mask: Tensor | None = None,
    softcap: float = 0.0,
    sinks: int = 0,
) -> bytes:
    """The arguments of a call, without those of its segments.

    Args:
        query: queries, or weights, `[batch, heads, queries, any]`, `readable`.
        out: the result, `[batch, heads, queries, any]`, of which the last axis is contiguous.
        kv_heads: KV heads.
        head_dims: head_dim of the keys, and of the values.
        segments: how many segments there are.
        scale: factor of the scores.
        mask: `[batch, heads, queries, tokens]`, of one of `_MASK_DTYPES`, or `None`.
        softcap: limit of the scores, 0 for no limit.
        sinks: address of `[heads]` scores of keys without a value, float32; 0 for none.
    """
    batch, heads, queries, _ = query.shape
    numbers = _CALL.pack(
        *(query.data_ptr(), out.data_ptr()),
        *query.stride()[:3],
        *out.stride()[:3],
        *(batch, kv_heads, heads // kv_heads, queries, *head_dims),
        *(DTYPES.index(query.dtype), torch.get_num_threads(), scale, softcap, sinks, segments),
    )
    if mask is not None:
        return numbers + _MASK.pack(mask.data_ptr(), *mask.stride(), _MASK_DTYPES.index(mask.dtype))
    return numbers + NO_MASK


def of_segments(segments: KVSegments, device: torch.device) -> tuple[bytes, bytes]:
    """The segments, and for each of them the address of its rows, or 0."""
    described, rows = b"", b""
    for segment in segments.in_order:
        described += _of_segment(segment)
        rows += NO_ROWS if segment.rows is None else _POINTER.pack(segment.rows.on(device)[0].data_ptr())
    return described, rows


def _of_segment(segment: Segment) -> bytes:
    """A segment. Its kernel cache keeps the bytes, and memory that they point to."""
    found: tuple[bytes, Any] | None = segment.kernel_cache.get("cpu")
    if found is None:
        if isinstance(segment, GatheredSegment):
            found = _of_gathered(segment)
        elif isinstance(segment, PackedSegment):
            found = _of_packed(segment)
        else:
            found = of_dense(segment.key_slots, segment.value_slots, segment.start, segment.tokens)
        segment.kernel_cache["cpu"] = found
    return found[0]


def of_dense(keys: Tensor, values: Tensor, start: int, tokens: int) -> tuple[bytes, Any]:
    """`tokens` slots from `start` in full precision, and memory that must live as long as their description."""
    strides = keys.stride() + values.stride()
    if strides[3] != 1 or strides[7] != 1:
        keys, values = readable(keys), readable(values)
        strides = keys.stride() + values.stride()
    skipped = start * keys.itemsize
    addresses = keys.data_ptr() + skipped * strides[2], values.data_ptr() + skipped * strides[6]
    return _DENSE.pack(0, 0, *addresses, *strides[:3], *strides[4:7], tokens), (keys, values)


def _of_packed(segment: PackedSegment) -> tuple[bytes, Any]:
    ends = None if segment.ends is None else (ctypes.c_int32 * segment.blocks)(*segment.ends)
    blocks = _BLOCKS.pack(
        *(segment.blocks, segment.keys.layout.block_tokens, segment.first),
        0 if ends is None else ctypes.addressof(ends),
        *(segment.keys.layout.format.rotated, segment.values.layout.format.rotated),
        *(
            0 if vectors is None else vectors.data_ptr()
            for vectors in (segment.smoothing.factor, segment.smoothing.mean)
        ),
    )
    sides = _of_side(segment.keys) + _of_side(segment.values)
    return _KIND.pack(True, False) + _NO_DENSE + sides + blocks + bytes(_GATHERED.size), ends


def _of_gathered(segment: GatheredSegment) -> tuple[bytes, Any]:
    tables = [table.contiguous() for table in (segment.starts, segment.counts, segment.columns)]
    source_rows = 0
    if segment.source.rows is not None:
        tables.append(segment.source.rows.on(tables[0].device)[0])
        source_rows = tables[-1].data_ptr()
    source = _of_segment(segment.source)
    addresses = (table.data_ptr() for table in tables[:3])
    gathered = _GATHERED.pack(*addresses, segment.starts.shape[2], segment.width, source_rows)
    kind = _KIND.pack(isinstance(segment.source, PackedSegment), True)
    return kind + source[_KIND.size : -_GATHERED.size] + gathered, tables


def _of_side(side: PackedSide) -> bytes:
    code_format, layout, kv_heads = side.layout.format, side.layout, side.codes.shape[1]
    levels = scales = 0
    if code_format.levels:
        levels = ctypes.addressof(_floats(code_format.levels))
    if code_format.fixed_scales:
        code_format.check_heads(kv_heads)
        given = code_format.fixed_scales
        scales = ctypes.addressof(_floats(given * kv_heads if len(given) == 1 else given))
    products = products_for(code_format.bits, code_format.has_zero).get()
    if products is None:
        raise RuntimeError("The CPU kernel's products are not loaded: call obstacle() first.")
    return _SIDE.pack(
        *(side.codes.data_ptr(), side.parameters.data_ptr()),
        *side.codes.stride()[:3],
        *side.parameters.stride()[:3],
        *(code_format.bits, code_format.floating),
        *(layout.rows, layout.columns, layout.row_group, layout.column_group),
        *(levels, scales, ctypes.cast(products.kvlayers_multiply, ctypes.c_void_p).value or 0),
    )


@functools.cache
def _floats(numbers: tuple[float, ...]) -> Any:
    """Numbers as a C array, which lives as long as the process."""
    return (ctypes.c_float * len(numbers))(*numbers)


LIBRARY = NativeLibrary(
    _FOLDER / "kernel.cpp",
    *("kvlayers_attend", "kvlayers_score", "kvlayers_combine"),
    purpose="attention",
)

CPU_MAXIMUM_QUERIES = 16
"""Queries of a sequence up to which `LIBRARY` attends to states in full precision, and above which `MANY` does."""

CPU_MAXIMUM_ROWS = 128
"""Queries of one kv head, over all heads and sequences that share it, up to which the kernel beats matrix products on
packed blocks. Measured on a CPU."""

CPU_MAXIMUM_DENSE_ROWS = 512
"""As `CPU_MAXIMUM_ROWS`, if no token is packed: with more, `MANY` or torch's attention on a copy takes less time.
Of few queries of sequences that share segments, the kernel takes any number."""

CPU_MAXIMUM_GATHERED_ROWS = 32
"""As `CPU_MAXIMUM_DENSE_ROWS`, if each KV head reads its own tokens."""

_ALWAYS_TAKEN = min(CPU_MAXIMUM_ROWS, CPU_MAXIMUM_DENSE_ROWS, CPU_MAXIMUM_GATHERED_ROWS)


def obstacle(rows: Tensor, segments: KVSegments) -> str | None:
    """Why the kernel cannot take queries, or weights, `[batch, heads, queries, any]`; `None` if it can."""
    if not rows.is_cpu:
        return f"there is no kernel for {rows.device.type}"
    if rows.dtype not in DTYPES:
        return f"the kernel does not take {rows.dtype}"
    # No KV head has more queries than all heads of all sequences together. If these are few, as in a decode step,
    # nothing else is looked at.
    batch, heads, queries, _ = rows.shape
    are_few = batch * heads * queries <= _ALWAYS_TAKEN
    if not are_few and not (queries <= CPU_MAXIMUM_QUERIES and segments.are_dense and segments.shares_rows):
        of_dense_rows = CPU_MAXIMUM_DENSE_ROWS if segments.are_dense else CPU_MAXIMUM_GATHERED_ROWS
        maximum = CPU_MAXIMUM_ROWS if segments.holds_packed else of_dense_rows
        if heads // segments.kv_heads * queries * segments.most_readers > maximum:
            return f"there are more than {maximum} queries for a kv head, as in a prompt"
    return products_obstacle(segments) if library() is not None else f"the kernel {LIBRARY.obstacle}"


def takes_many(query: Tensor, segments: KVSegments) -> bool:
    """Whether `MANY` computes attention of queries that `LIBRARY` does not take."""
    return (
        query.shape[2] > CPU_MAXIMUM_QUERIES
        and query.dtype in DTYPES
        and bool(query.numel() * segments.tokens)
        and MANY.get() is not None
    )


def attend(query: Tensor, segments: KVSegments, mask: Tensor | None, scale: float) -> Tensor:
    """Softmax attention; arguments and result are those of `slabs.attend`. States have the dtype of the query."""
    if mask is not None and mask.dtype != torch.bool:
        mask = mask.float()
    query, out, numbers = _called(query, segments.kv_heads, segments.head_dims, len(segments.in_order), scale, mask)
    cpu_packing.loaded(LIBRARY).kvlayers_attend(numbers, *of_segments(segments, query.device))
    return out


def attend_many(query: Tensor, segments: KVSegments, mask: Tensor | None, scale: float) -> Tensor:
    """As `attend`, of many queries by `MANY`, which reads states in full precision: what is packed is unpacked once."""
    dense, held = segments.in_full_precision(query.dtype)
    query, out, numbers = _called(query, dense.kv_heads, dense.head_dims, len(dense.in_order), scale, mask)
    address = None if held is None else ctypes.c_void_p(held.data_ptr())
    described = of_segments(dense, query.device)
    cpu_packing.loaded(MANY).kvlayers_attend_many(numbers, *described, ctypes.c_int64(False), address)
    return out


def attend_dense(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    scale: float | None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    is_causal: bool = False,
) -> Tensor:
    """As `attend`, for states in full precision, one per token. `MANY` computes more than `CPU_MAXIMUM_QUERIES`.

    Args:
        query: `[batch, heads, queries, head_dim]`, of one of `DTYPES`.
        keys: `[batch, kv_heads, tokens, head_dim]`, of the same dtype.
        values: `[batch, kv_heads, tokens, value_head_dim]`, of the same dtype.
        mask: bool or additive, broadcast to `[batch, heads, queries, tokens]`, or `None`.
        scale: factor of the scores, `1 / sqrt(head_dim)` if `None`.
        softcap: limit of the scores, `None` for no limit.
        sinks: `[heads]`, scores of keys without a value, or `None`.
        is_causal: whether a query attends to the tokens up to its own number alone; only for `MANY`, without a mask.
    """
    # What is kept, and the sinks, must live until the kernel returns.
    segment, _kept = of_dense(keys, values, 0, keys.size(2))
    sinks = None if sinks is None else sinks.float().contiguous()
    address = 0 if sinks is None else sinks.data_ptr()
    many = query.size(2) > CPU_MAXIMUM_QUERIES
    if mask is not None:
        mask = mask if many or mask.dtype == torch.bool else mask.float()
        mask = mask.expand(*query.size()[:3], keys.size(2))
    head_dims = keys.size(3), values.size(3)
    scale = head_dims[0] ** -0.5 if scale is None else float(scale)
    query, out, numbers = _called(query, keys.size(1), head_dims, 1, scale, mask, softcap or 0.0, address)
    if many:
        cpu_packing.loaded(MANY).kvlayers_attend_many(numbers, segment, NO_ROWS, ctypes.c_int64(is_causal), None)
    else:
        cpu_packing.loaded(LIBRARY).kvlayers_attend(numbers, segment, NO_ROWS)
    return out


def _called(
    query: Tensor,
    kv_heads: int,
    head_dims: tuple[int, int],
    segments: int,
    scale: float,
    mask: Tensor | None,
    softcap: float = 0.0,
    sinks: int = 0,
) -> tuple[Tensor, Tensor, bytes]:
    """The query as the kernels read it, memory for the result, and the arguments, which are those of `of_call`."""
    query = readable(query)
    batch, heads, queries, _ = query.shape
    # In the layout of torch's own result: the transpose after it costs nothing.
    strides = (heads * queries * head_dims[1], head_dims[1], heads * head_dims[1], 1)
    out = query.new_empty_strided((batch, heads, queries, head_dims[1]), strides)
    return query, out, of_call(query, out, kv_heads, head_dims, segments, scale, mask, softcap, sinks)


def scores(query: Tensor, segments: KVSegments) -> Tensor:
    """Products of queries `[batch, heads, queries, head_dim]` and all keys, `[batch, heads, queries, tokens]`."""
    query = readable(query)
    # Nothing is written where a column of a gathered segment stands for no token.
    out = query.new_full((*query.shape[:3], segments.tokens), -torch.inf)
    cpu_packing.loaded(LIBRARY).kvlayers_score(*_call_without_mask(query, out, segments))
    return out


def combine(weights: Tensor, segments: KVSegments) -> Tensor:
    """Sums of the values, weighted by `[batch, heads, queries, tokens]`: `[batch, heads, queries, value_head_dim]`."""
    weights = readable(weights)
    out = weights.new_empty((*weights.shape[:3], segments.head_dims[1]))
    cpu_packing.loaded(LIBRARY).kvlayers_combine(*_call_without_mask(weights, out, segments))
    return out


def _call_without_mask(query: Tensor, out: Tensor, segments: KVSegments) -> tuple[bytes, bytes, bytes]:
    """What a function of the kernel is called with for a single product. The tensors must live until it returns."""
    numbers = of_call(query, out, segments.kv_heads, segments.head_dims, len(segments.in_order), 1.0)
    return numbers, *of_segments(segments, query.device)


def library() -> ctypes.CDLL | None:
    """The compiled kernel; `None` while it is compiled, and if that has failed."""
    return LIBRARY.get()


LIBRARIES = (LIBRARY, MANY, WHOLE, cpu_packing.LIBRARY, OTHER)
"""All libraries, the most used first."""


def compile_kernels() -> dict[str, pathlib.Path]:
    """Compile the kernels for this CPU, unless they are in the wheel or were compiled before: about half a minute.

    Of several processes, one compiles, and the others wait for it.

    Returns:
        The file that is used for each purpose.

    Raises:
        KernelError: there is no compiler, it fails, or the cache directory is not writable.

    Example:
        >>> import kvlayers
        >>> sorted(kvlayers.compile_kernels())
        ['attention', 'codes of 4 and 8 bits', 'other codes', 'packing', 'prompts']
    """
    return {library.purpose: library.compile() for library in LIBRARIES}
