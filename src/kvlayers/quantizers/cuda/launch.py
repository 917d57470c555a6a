"""Launches of the kernels that pack blocks and read them."""

import torch
from torch import Tensor

from kvlayers.quantizers.block_layout import BlockLayout
from kvlayers.quantizers.contract import KernelSearch
from kvlayers.quantizers.cuda.support import PACK, READ, pack_constants, read_constants
from kvlayers.quantizers.smoothing import KeySmoothing


def pack_blocks(
    states: Tensor,
    partner: Tensor,
    codes: Tensor,
    parameters: Tensor,
    layout: BlockLayout,
    search: KernelSearch,
    smoothing: KeySmoothing | None = None,
) -> None:
    """Quantize one side of whole blocks, and write it in their packed layout. Call only without a `pack_obstacle`.

    Tokens that are not finite in one of the sides are quantized as zeros, and the parameters of their values are NaN.

    Args:
        states: `[batch, kv_heads, tokens, head_dim]`, the tokens of whole blocks.
        partner: states of the other side of the same tokens.
        codes: uint8 `[batch, kv_heads, blocks, layout.code_bytes]`, whose last dimension is contiguous.
        parameters: `[batch, kv_heads, blocks, layout.parameters]` in the dtype of the states, likewise.
        layout: layout of the blocks.
        search: how codes are searched for.
        smoothing: how states are smoothed first.
    """
    batch, kv_heads, blocks, _ = codes.shape
    if not codes.numel():
        return
    factor, mean = (None, None) if smoothing is None else (smoothing.factor, smoothing.mean)
    constants = pack_constants(layout, partner.shape[3], states.dtype, search, factor is not None, mean is not None)
    arguments = (
        states,
        partner,
        codes,
        parameters,
        # Any pointer stands for what is never read.
        *(parameters if vectors is None else vectors for vectors in (factor, mean)),
        *states.stride(),
        *partner.stride(),
        *codes.stride()[:3],
        *parameters.stride()[:3],
    )
    PACK.launch(states.device, (blocks * constants["C"].PIECES, kv_heads, batch), arguments, constants)


def read_blocks(codes: Tensor, parameters: Tensor, layout: BlockLayout, dtype: torch.dtype) -> Tensor:
    """States of packed blocks, rotated back. Call only without a `read_obstacle`.

    Args:
        codes: uint8 `[batch, kv_heads, blocks, layout.code_bytes]`, whose last dimension is contiguous.
        parameters: `[batch, kv_heads, blocks, layout.parameters]`, likewise.
        layout: layout of the blocks.
        dtype: dtype of the states.

    Returns:
        `[batch, kv_heads, blocks * block_tokens, head_dim]` of `dtype`.
    """
    batch, kv_heads, blocks, _ = codes.shape
    tokens = blocks * layout.block_tokens
    states = torch.empty((batch, kv_heads, tokens, layout.head_dim), dtype=dtype, device=codes.device)
    if states.numel():
        constants = read_constants(layout)
        arguments = (codes, parameters, states, *codes.stride()[:3], *parameters.stride()[:3], tokens)
        READ.launch(codes.device, (blocks * constants["C"].PIECES, kv_heads, batch), arguments, constants)
    return states
