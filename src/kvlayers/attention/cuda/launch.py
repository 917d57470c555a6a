"""Attention of few queries to packed keys and values on a CUDA device, without unpacking them to memory.

The blocks are divided among so many programs that all multiprocessors have work (flash-decoding): each program attends
to a run of blocks, and a second kernel merges what the runs give. All query heads and query tokens that share a kv head
are rows of one product, so that its codes are read once. A scale that a whole row of keys shares is multiplied into the
queries, and one that a whole row of values shares into the weights: what is done for every code is unpacking alone.

triton is imported by the first call, never by `import kvlayers`.
"""

import contextlib
import functools
import importlib
import importlib.metadata
import importlib.util
import math
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from packaging.version import Version
from torch import Tensor

from kvlayers.attention.cuda.unpacking import unpacking_instructions
from kvlayers.errors import OptionError, StateMismatchError
from kvlayers.quantizers.contract import CodeFormat, Side

if TYPE_CHECKING:
    # Stores import attention.
    from kvlayers.quantizers.packed_side import PackedSide

WIDTHS = (2, 4, 8)
"""Bits of a code that the kernel unpacks."""

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
"""Dtypes of the states."""

MINIMUM_VERSION = "3.5"
"""Of triton. Earlier ones do not have all of the language that the kernels are written in."""

MAXIMUM_ROWS = 64
"""Query heads of a group times query tokens that one program takes; more rows are divided among programs."""

_TENSOR_CORE_ROWS = 16
_MAXIMUM_SUMS = 8
_LARGEST_HEAD_DIM = 256
_SPLITS_MERGED_AT_ONCE = 16


_FLOAT16_BOOSTS = {2: 1.0, 4: 4.0, 8: 64.0}
"""Factors of scales of values in float16, for each width: weights times small scales would be subnormal.

A scale is at most the range of float16 over the largest code, and is to stay finite.
"""


@dataclass(frozen=True)
class Launch:
    """How the work is laid over a device. No number changes what is computed, but for the order of sums.

    Attributes:
        programs: programs that a multiprocessor is given; with fewer, memory waits for work.
        minimum_blocks: blocks of a split at least, so that its partial result is small beside what it reads.
        stages: blocks that are copied ahead, with the one that is worked on.
        warps: warps of a program; `None` for one to each 16 rows, and four at least where a head_dim is more than 128
            or states are float32.
        assembly: codes are unpacked two at a time by inline assembly.
    """

    programs: int = 8
    minimum_blocks: int = 4
    stages: int = 3
    warps: int | None = None
    assembly: bool = True


DEFAULT_LAUNCH = Launch()


def supports(
    key_format: CodeFormat,
    value_format: CodeFormat,
    *,
    key_head_dim: int,
    value_head_dim: int,
    block_tokens: int,
    dtype: torch.dtype,
    device: torch.device,
) -> bool:
    """Whether `attend_packed` takes packed states of such a kind; otherwise the caller has to unpack them.

    Args:
        key_format: what the codes of the keys mean.
        value_format: what those of the values mean.
        key_head_dim: channels of a key, and of a query.
        value_head_dim: channels of a value.
        block_tokens: tokens of a block.
        dtype: of queries and parameters.
        device: where the states are.
    """
    if not available(device) or dtype not in DTYPES:
        return False
    # Two tiles of scores are to have 16 columns.
    if block_tokens & (block_tokens - 1) or block_tokens * key_format.bits < 128:
        return False
    sides: tuple[tuple[CodeFormat, Side, int], ...] = (
        (key_format, "keys", key_head_dim),
        (value_format, "values", value_head_dim),
    )
    return all(_supports_side(code_format, side, head_dim, block_tokens) for code_format, side, head_dim in sides)


def _supports_side(code_format: CodeFormat, side: Side, head_dim: int, block_tokens: int) -> bool:
    if code_format.bits not in WIDTHS or (code_format.floating and code_format.bits != 8):
        return False
    if head_dim > _LARGEST_HEAD_DIM or block_tokens % code_format.group_tokens or head_dim % code_format.group_channels:
        return False
    # Rows are read by words of two bytes.
    return side == "keys" or code_format.bits != 8 or head_dim % 2 == 0


@functools.lru_cache(maxsize=32)
def available(device: torch.device) -> bool:
    """Whether there is a triton that compiles for the device, or interprets kernels for it."""
    if importlib.util.find_spec("triton") is None or _version() < Version(MINIMUM_VERSION):
        return False
    if _interpreted():
        return True
    # Products of bfloat16 came with compute capability 8.
    return device.type == "cuda" and torch.version.cuda is not None and torch.cuda.get_device_capability(device)[0] >= 8


def _version() -> Version:
    """Version of triton, without an import of it; that of nightly builds has another name."""
    for name in ("triton", "pytorch-triton"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return Version(importlib.metadata.version(name))
    return Version("0")


def _interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


@functools.cache
def _kernels() -> Any:
    """The module of the kernels: importing it imports triton."""
    return importlib.import_module(".kernels", __package__)


@functools.lru_cache(maxsize=32)
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def _launching_on(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Makes a device the current one, which triton launches on, wherever the pointers that it is given point."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def attend_packed(
    query: Tensor,
    keys: "PackedSide",
    values: "PackedSide",
    *,
    first: int = 0,
    ends: Tensor | None = None,
    starts: Tensor | None = None,
    mask: Tensor | None = None,
    scale: float | None = None,
    launch: Launch = DEFAULT_LAUNCH,
) -> tuple[Tensor, Tensor]:
    """Attention of queries to the packed tokens of a history, and its log-sum-exp for `merging.merge`.

    There is no causal mask among the queries: all see all packed tokens, but for those that `mask` hides. Rotated
    sides stay so: queries are to be rotated as the keys are, and what comes back is rotated as the values are.

    Args:
        query: `[batch, heads, q_tokens, head_dim]`, heads a multiple of the kv_heads, in the dtype of the parameters.
        keys: packed keys of `blocks` blocks.
        values: packed values of as many, of the same block_tokens.
        first: tokens at the front of the first block that are no longer part of the history.
        ends: int32 `[blocks]`, the tokens of each block that are filled, the first `first` of the first block
            included; `None` where all blocks are full.
        starts: int32 `[blocks]`, the tokens of the history in front of each block, by which `mask` is indexed; `None`
            to count them from `first` and `ends`.
        mask: bool (`True` is attended to) or float (added to the scores) of a shape that broadcasts to
            `[batch, heads, q_tokens, tokens]`; tokens counts those of the history alone. A float below -2.3e38 hides
            a token as `-inf` does.
        scale: factor of the scores, `None` for `head_dim ** -0.5`.
        launch: how the work is laid over the device.

    Returns:
        The attended values, float32 `[batch, heads, q_tokens, value_head_dim]`, zeros where a query sees no token; and
        the log-sum-exp of the scores, float32 `[batch, heads, q_tokens]`, `-inf` where a query sees no token.

    Raises:
        StateMismatchError: the shapes, dtypes or numbers of blocks do not belong together.
        OptionError: `supports` has these states as not supported, or `first` is not within the first block.
    """
    _check(query, keys, values, first, ends)
    batch, heads, q_tokens, key_dim = query.shape
    kv_heads, blocks = keys.codes.shape[1], keys.blocks
    block_tokens, value_dim = keys.block_tokens, values.head_dim
    if scale is None:
        scale = key_dim**-0.5
    options: dict[str, Any] = {"dtype": torch.float32, "device": query.device}
    if not blocks or not query.numel():
        outs = torch.zeros((batch, heads, q_tokens, value_dim), **options)
        return outs, torch.full((batch, heads, q_tokens), -torch.inf, **options)

    if scale <= 0:
        # The kernel takes the largest score before it scales.
        query, scale = query * (-1 if scale else 0), -scale or 1.0
    if query.stride(3) != 1:
        query = query.contiguous()
    groups = heads // kv_heads
    rows = min(MAXIMUM_ROWS, max(_TENSOR_CORE_ROWS, _power_of_two(groups * q_tokens)))
    row_tiles = -(-groups * q_tokens // rows)
    per_split = _blocks_per_split(blocks, batch * kv_heads * row_tiles, query.device, launch)
    splits = -(-blocks // per_split)
    mask_kind, mask_states = _mask_of(mask, (batch, heads, q_tokens), blocks * block_tokens, query)
    if ends is not None and starts is None:
        starts = torch.cumsum(ends, 0, dtype=torch.int32) - ends
        starts[1:] -= first
    key_codes, value_codes = _words(keys.codes), _words(values.codes)
    value_fold, chunks = _value_plan(values)
    words = values.row_bytes // 2 // chunks
    wide = max(key_dim, value_dim) > 128 or query.dtype == torch.float32
    warps = launch.warps or max(rows // _TENSOR_CORE_ROWS, 4 if wide else 1)
    nothing = query  # A pointer that is never read.

    partial_outs = torch.empty((batch, heads, q_tokens, splits, value_dim), **options)
    partial_lses = torch.empty((batch, heads, q_tokens, splits), **options)
    outs = torch.empty((batch, heads, q_tokens, value_dim), **options)
    lses = torch.empty((batch, heads, q_tokens), **options)
    kernels = _kernels()
    with _launching_on(query.device):
        kernels.attend_split[(splits, batch * kv_heads, row_tiles)](
            query,
            key_codes,
            keys.parameters,
            value_codes,
            values.parameters,
            nothing if ends is None else ends,
            nothing if starts is None else starts,
            nothing if mask_states is None else mask_states,
            partial_outs,
            partial_lses,
            *query.stride()[:3],
            *key_codes.stride()[:3],
            *keys.parameters.stride()[:3],
            *value_codes.stride()[:3],
            *values.parameters.stride()[:3],
            *((0, 0, 0, 0) if mask_states is None else mask_states.stride()),
            blocks,
            per_split,
            splits,
            first,
            _kernel_scale(scale, keys),
            KV_HEADS=kv_heads,
            GROUPS=groups,
            Q_TOKENS=q_tokens,
            BLOCK_TOKENS=block_tokens,
            KEY_DIM=key_dim,
            VALUE_DIM=value_dim,
            KEY_BITS=keys.format.bits,
            VALUE_BITS=values.format.bits,
            KEY_FLOATING=keys.format.floating,
            VALUE_FLOATING=values.format.floating,
            KEY_ROW_GROUP=keys.row_group,
            KEY_COLUMN_GROUP=keys.column_group,
            VALUE_ROW_GROUP=values.row_group,
            VALUE_COLUMN_GROUP=values.column_group,
            KEY_FOLD=keys.column_group == block_tokens,
            VALUE_FOLD=value_fold,
            VALUE_CHUNKS=chunks,
            VALUE_WORDS=words,
            CHANNELS=max(16, _power_of_two(key_dim)),
            ROWS=rows,
            COLUMNS=max(8, _power_of_two(words)),
            MASK=mask_kind,
            FIRST=first > 0,
            ENDS=ends is not None,
            DTYPE=kernels.DTYPES[query.dtype],
            BOOST=_FLOAT16_BOOSTS[values.format.bits] if query.dtype == torch.float16 else 1.0,
            KEY_ASSEMBLY=_assembly(keys, launch),
            VALUE_ASSEMBLY=_assembly(values, launch),
            EMULATED=_interpreted(),
            num_warps=warps,
            num_stages=launch.stages,
            # Not the default of every version of triton.
            enable_fp_fusion=True,
        )
        kernels.merge_splits[(batch * heads * q_tokens,)](
            partial_outs,
            partial_lses,
            outs,
            lses,
            splits,
            VALUE_DIM=value_dim,
            CHANNELS=_power_of_two(value_dim),
            ALL_SPLITS=_power_of_two(splits),
            SOME_SPLITS=min(_SPLITS_MERGED_AT_ONCE, _power_of_two(splits)),
            num_warps=4,
        )
    return outs, lses


def _check(query: Tensor, keys: "PackedSide", values: "PackedSide", first: int, ends: Tensor | None) -> None:
    if query.dim() != 4 or query.shape[3] != keys.head_dim or query.shape[0] != keys.codes.shape[0]:
        raise StateMismatchError(
            f"expected queries [{keys.codes.shape[0]}, heads, q_tokens, {keys.head_dim}], but saw "
            f"{tuple(query.shape)}: pass the queries of the sequences that are held."
        )
    if keys.codes.shape[:3] != values.codes.shape[:3] or keys.block_tokens != values.block_tokens:
        raise StateMismatchError(
            f"expected keys and values of the same blocks, but saw {tuple(keys.codes.shape[:3])} of "
            f"{keys.block_tokens} tokens and {tuple(values.codes.shape[:3])} of {values.block_tokens}."
        )
    if query.shape[1] % keys.codes.shape[1]:
        raise StateMismatchError(
            f"expected heads that are a multiple of the {keys.codes.shape[1]} kv_heads, but saw {query.shape[1]}."
        )
    if not query.dtype == keys.parameters.dtype == values.parameters.dtype:
        raise StateMismatchError(
            f"expected queries in the dtype of the parameters, {keys.parameters.dtype} and {values.parameters.dtype}, "
            f"but saw {query.dtype}: convert the queries."
        )
    if not supports(
        keys.format,
        values.format,
        key_head_dim=keys.head_dim,
        value_head_dim=values.head_dim,
        block_tokens=keys.block_tokens,
        dtype=query.dtype,
        device=query.device,
    ):
        raise OptionError("expected states that the kernel supports: ask `supports` first, and unpack the others.")
    if not 0 <= first < keys.block_tokens:
        raise OptionError(f"expected first to be within a block of {keys.block_tokens} tokens, but saw {first}.")
    if ends is not None and ends.shape != (keys.blocks,):
        raise StateMismatchError(f"expected ends of {keys.blocks} blocks, but saw {tuple(ends.shape)}.")


def _kernel_scale(scale: float, keys: "PackedSide") -> float:
    """Factor of what the kernel has as scores, which gives them in units of log2(e)."""
    # Codes of float8 are 256 times what the kernel unpacks, and it multiplies that where it applies scales to them.
    undone = 256 if keys.format.floating and keys.column_group == keys.block_tokens else 1
    return scale * undone * math.log2(math.e)


def _assembly(packed: "PackedSide", launch: Launch) -> tuple[str, ...]:
    if not launch.assembly or _interpreted():
        return ()
    return unpacking_instructions(packed.format.bits, packed.format.floating, packed.parameters.dtype)


def _power_of_two(number: int) -> int:
    """The smallest power of two that is no less."""
    return 1 << (number - 1).bit_length()


def _blocks_per_split(blocks: int, programs_of_a_split: int, device: torch.device, launch: Launch) -> int:
    wanted = -(-_multiprocessors(device) * launch.programs // programs_of_a_split)
    splits = min(wanted, -(-blocks // launch.minimum_blocks))
    return -(-blocks // max(1, splits))


def _value_plan(values: "PackedSide") -> tuple[bool, int]:
    """Whether scales of values can be multiplied into the weights, and the parts that a row is read in for that.

    They can where the channels of a tile of codes all share a scale: those of the same slot of a row, or of a part.
    In a row that is padded there are tiles which have no scale.
    """
    row_bytes, group = values.row_bytes, values.column_group
    if row_bytes * 8 != values.head_dim * values.format.bits:
        return False, 1
    if group % row_bytes == 0:
        return True, 1
    chunks = row_bytes // group
    if row_bytes % group == 0 and group % 2 == 0 and chunks * 16 // values.format.bits <= _MAXIMUM_SUMS:
        return True, chunks
    return False, 1


def _words(codes: Tensor) -> Tensor:
    """Codes as words of two bytes; a copy only where a view cannot be, as it starts within a word."""
    *strides, _ = codes.stride()
    if codes.storage_offset() % 2 or any(stride % 2 for stride in strides):
        codes = codes.contiguous()
    return codes.view(torch.int16)


def _mask_of(
    mask: Tensor | None, queries: tuple[int, int, int], tokens: int, query: Tensor
) -> tuple[int, Tensor | None]:
    """Kind of a mask, 0 for none, 1 for bool, 2 for one that is added; and the mask as a kernel reads it."""
    if mask is None:
        return 0, None
    if mask.dim() != 4 or mask.device != query.device or mask.shape[3] > tokens:
        raise StateMismatchError(
            f"expected a mask [batch, heads, q_tokens, tokens] of at most {tokens} tokens on {query.device}, but saw "
            f"{tuple(mask.shape)} on {mask.device}: leave out the columns of tokens that are not packed."
        )
    mask = mask.expand(*queries, mask.shape[3])
    if mask.dtype == torch.bool:
        return 1, mask.view(torch.uint8)
    return 2, mask
