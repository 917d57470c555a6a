"""Launches the Triton kernels: attention of few queries to packed keys and values, never unpacked to memory.

The blocks are divided among enough programs to keep all multiprocessors busy (flash-decoding): each program attends to
a split of the blocks, and a second kernel merges the results of the splits. All query heads and query tokens that share
a kv head are rows of one product, so its codes are read once. A scale that a whole row of keys shares is multiplied
into the queries, and one that a whole row of values shares into the weights: each single code is only unpacked.

The first call imports triton; `import kvlayers` never does.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvlayers.attention.cuda.support import supports
from kvlayers.attention.cuda.unpacking import unpacking_instructions
from kvlayers.errors import OptionError, StateMismatchError
from kvlayers.quantizers.packed_side import PackedSide
from kvlayers.utils.triton_support import TritonKernel, is_interpreted, multiprocessors

MAXIMUM_ROWS = 64
"""Query heads of a group times query tokens that one program takes; more rows are divided among programs."""

_TENSOR_CORE_ROWS = 16
_MAXIMUM_SUMS = 8
_SPLITS_MERGED_AT_ONCE = 16


_FLOAT16_BOOSTS = {2: 1.0, 4: 4.0, 8: 64.0}
"""Factor of the value scales in float16, for each width of a code: weights times small scales would be subnormal.

A scale is at most the range of float16 divided by the largest code, so it stays finite.
"""


@dataclass(frozen=True)
class Launch:
    """How the work is divided on a device. No number changes the result, apart from the order of sums.

    Attributes:
        programs: programs for each multiprocessor; with fewer, memory bandwidth stays unused.
        minimum_blocks: fewest blocks of a split, so that its partial result is small beside the codes it reads.
        stages: blocks in the copy pipeline, including the current one.
        warps: warps of a program; `None` for one per 16 rows, and at least four if a head_dim is above 128 or states
            are float32.
        assembly: whether inline assembly unpacks two codes at a time.
    """

    programs: int = 8
    minimum_blocks: int = 4
    stages: int = 3
    warps: int | None = None
    assembly: bool = True


DEFAULT_LAUNCH = Launch()


ATTEND_SPLIT = TritonKernel("kvlayers.attention.cuda.triton_kernels", "attend_split")
MERGE_SPLITS = TritonKernel("kvlayers.attention.cuda.triton_kernels", "merge_splits")


def attend_packed(
    query: Tensor,
    keys: PackedSide,
    values: PackedSide,
    *,
    first: int = 0,
    ends: Tensor | None = None,
    starts: Tensor | None = None,
    mask: Tensor | None = None,
    scale: float | None = None,
    launch: Launch = DEFAULT_LAUNCH,
) -> tuple[Tensor, Tensor]:
    """Attention of queries to packed tokens, and its log-sum-exp for `reference.merge`.

    There is no causal mask among the queries: all see every packed token that `mask` does not hide. The kernel rotates
    nothing: pass queries rotated as the keys are; the result is rotated as the values are.

    Args:
        query: `[batch, heads, q_tokens, head_dim]`, heads a multiple of the kv_heads, in the dtype of the parameters.
        keys: packed keys of `blocks` blocks.
        values: packed values of as many, of the same block_tokens.
        first: tokens at the front of the first block that have been evicted.
        ends: int32 `[blocks]`, the filled tokens of each block, counting the first `first` of the first block; `None`
            if all blocks are full.
        starts: int32 `[blocks]`, the tokens that are held in front of each block, by which `mask` is indexed; `None`
            to compute them from `first` and `ends`.
        mask: bool (`True` is attended to) or float (added to the scores) of a shape that broadcasts to
            `[batch, heads, q_tokens, tokens]`; evicted and unfilled tokens do not count. A float below -2.3e38 hides a
            token as `-inf` does.
        scale: factor of the scores, `None` for `head_dim ** -0.5`.
        launch: how the work is divided on the device.

    Returns:
        The attended values, float32 `[batch, heads, q_tokens, value_head_dim]`, zeros if a query sees no token; and
        the log-sum-exp of the scores, float32 `[batch, heads, q_tokens]`, `-inf` if a query sees no token.

    Raises:
        StateMismatchError: the shapes, dtypes or numbers of blocks do not match.
        OptionError: `supports` is false for these states, or `first` is not within the first block.
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
    unused = query  # A pointer that is never read.

    partial_outs = torch.empty((batch, heads, q_tokens, splits, value_dim), **options)
    partial_lses = torch.empty((batch, heads, q_tokens, splits), **options)
    outs = torch.empty((batch, heads, q_tokens, value_dim), **options)
    lses = torch.empty((batch, heads, q_tokens), **options)
    ATTEND_SPLIT.launch(
        query.device,
        (splits, batch * kv_heads, row_tiles),
        (
            query,
            key_codes,
            keys.parameters,
            value_codes,
            values.parameters,
            unused if ends is None else ends,
            unused if starts is None else starts,
            unused if mask_states is None else mask_states,
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
        ),
        {
            "KV_HEADS": kv_heads,
            "GROUPS": groups,
            "Q_TOKENS": q_tokens,
            "BLOCK_TOKENS": block_tokens,
            "KEY_DIM": key_dim,
            "VALUE_DIM": value_dim,
            "KEY_BITS": keys.format.bits,
            "VALUE_BITS": values.format.bits,
            "KEY_FLOATING": keys.format.floating,
            "VALUE_FLOATING": values.format.floating,
            "KEY_ROW_GROUP": keys.row_group,
            "KEY_COLUMN_GROUP": keys.column_group,
            "VALUE_ROW_GROUP": values.row_group,
            "VALUE_COLUMN_GROUP": values.column_group,
            "KEY_FOLD": keys.column_group == block_tokens,
            "VALUE_FOLD": value_fold,
            "VALUE_CHUNKS": chunks,
            "VALUE_WORDS": words,
            "CHANNELS": max(16, _power_of_two(key_dim)),
            "ROWS": rows,
            "COLUMNS": max(8, _power_of_two(words)),
            "MASK": mask_kind,
            "FIRST": first > 0,
            "ENDS": ends is not None,
            "BOOST": _FLOAT16_BOOSTS[values.format.bits] if query.dtype == torch.float16 else 1.0,
            "KEY_ASSEMBLY": _assembly(keys, launch),
            "VALUE_ASSEMBLY": _assembly(values, launch),
            "EMULATED": is_interpreted(),
            "num_warps": warps,
            "num_stages": launch.stages,
            # Not the default of every version of triton.
            "enable_fp_fusion": True,
        },
    )
    MERGE_SPLITS.launch(
        query.device,
        (batch * heads * q_tokens,),
        (partial_outs, partial_lses, outs, lses, splits),
        {
            "VALUE_DIM": value_dim,
            "CHANNELS": _power_of_two(value_dim),
            "ALL_SPLITS": _power_of_two(splits),
            "SOME_SPLITS": min(_SPLITS_MERGED_AT_ONCE, _power_of_two(splits)),
            "num_warps": 4,
        },
    )
    return outs, lses


def _check(query: Tensor, keys: PackedSide, values: PackedSide, first: int, ends: Tensor | None) -> None:
    if query.dim() != 4 or query.shape[3] != keys.head_dim or query.shape[0] != keys.codes.shape[0]:
        raise StateMismatchError(
            f"`query` must be [{keys.codes.shape[0]}, heads, q_tokens, {keys.head_dim}], got {tuple(query.shape)}: "
            "pass the queries of the sequences that are held."
        )
    if keys.codes.shape[:3] != values.codes.shape[:3] or keys.block_tokens != values.block_tokens:
        raise StateMismatchError(
            f"`keys` and `values` must have the same blocks, got {tuple(keys.codes.shape[:3])} of {keys.block_tokens} "
            f"tokens and {tuple(values.codes.shape[:3])} of {values.block_tokens}."
        )
    if query.shape[1] % keys.codes.shape[1]:
        raise StateMismatchError(
            f"`query` must have a multiple of the {keys.codes.shape[1]} kv_heads, got {query.shape[1]} heads."
        )
    if not query.dtype == keys.parameters.dtype == values.parameters.dtype:
        raise StateMismatchError(
            f"`query` must have the dtype of the parameters, {keys.parameters.dtype} and {values.parameters.dtype}, "
            f"got {query.dtype}: convert the queries."
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
        raise OptionError(
            "The kernel does not support these states: call supports() first, and unpack the states if it is false."
        )
    if not 0 <= first < keys.block_tokens:
        raise OptionError(f"`first` must be within a block of {keys.block_tokens} tokens, got {first}.")
    if ends is not None and ends.shape != (keys.blocks,):
        raise StateMismatchError(f"`ends` must have shape ({keys.blocks},), got {tuple(ends.shape)}.")


def _kernel_scale(scale: float, keys: PackedSide) -> float:
    """Factor that turns the kernel's products into scores in units of log2(e)."""
    # Codes of float8 are 256 times the numbers that the kernel unpacks. It makes up for that when it applies scales.
    undone = 256 if keys.format.floating and keys.column_group == keys.block_tokens else 1
    return scale * undone * math.log2(math.e)


def _assembly(packed: PackedSide, launch: Launch) -> tuple[str, ...]:
    if not launch.assembly or is_interpreted():
        return ()
    return unpacking_instructions(packed.format.bits, packed.format.floating, packed.parameters.dtype)


def _power_of_two(number: int) -> int:
    """The smallest power of two that is at least `number`."""
    return 1 << (number - 1).bit_length()


def _blocks_per_split(blocks: int, programs_of_a_split: int, device: torch.device, launch: Launch) -> int:
    wanted = -(-multiprocessors(device) * launch.programs // programs_of_a_split)
    splits = min(wanted, -(-blocks // launch.minimum_blocks))
    return -(-blocks // max(1, splits))


def _value_plan(values: PackedSide) -> tuple[bool, int]:
    """Whether value scales can be multiplied into the weights, and the number of parts that rows are read in for that.

    They can if all channels of a tile of codes share a scale: the channels of one slot of a row, or of a part of it.
    A padded row has tiles without a scale.
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
    """Codes as words of two bytes: a view, or a copy if the codes start within a word."""
    *strides, _ = codes.stride()
    if codes.storage_offset() % 2 or any(stride % 2 for stride in strides):
        codes = codes.contiguous()
    return codes.view(torch.int16)


def _mask_of(
    mask: Tensor | None, queries: tuple[int, int, int], tokens: int, query: Tensor
) -> tuple[int, Tensor | None]:
    """The kind of a mask (0: no mask, 1: bool, 2: additive), and the mask as the kernel reads it."""
    if mask is None:
        return 0, None
    if mask.dim() != 4 or mask.device != query.device or mask.shape[3] > tokens:
        raise StateMismatchError(
            f"`mask` must be [batch, heads, q_tokens, tokens] with at most {tokens} tokens on {query.device}, got "
            f"{tuple(mask.shape)} on {mask.device}: leave out the columns of tokens that are not packed."
        )
    mask = mask.expand(*queries, mask.shape[3])
    if mask.dtype == torch.bool:
        return 1, mask.view(torch.uint8)
    return 2, mask
