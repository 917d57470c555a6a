"""Attention on a CUDA device to packed and gathered segments, and to dense ones around them: a launch each, a merge."""

import logging
import math

import torch
from torch import Tensor

from kvlayers.errors import StateMismatchError
from kvlayers.kernels.attention.cuda.launch import Read, SplitCall, kind_of, reads_of, variant_of
from kvlayers.kernels.attention.cuda.plan import Variant
from kvlayers.kernels.attention.segments import KVSegments

logger = logging.getLogger(__name__)

MAXIMUM_ROWS = 256
"""Queries of one kv head, over all heads that share it, up to which reading packed codes pays."""

LARGEST_ERROR = 0.1
"""Norm of the difference from torch's result, relative to that, from which on a result is wrong.

Both round to the dtype of the states, which makes a difference below 0.01; code that multiplies wrong numbers makes one
of about 1.
"""

MAXIMUM_HEADS = 65535
"""Kv heads of all sequences up to which CUDA can launch the kernel, in the second dimension of a grid."""


def obstacle(query: Tensor, segments: KVSegments, mask: Tensor | None) -> str | None:
    """Why the kernel cannot take queries `[batch, heads, queries, key_head_dim]`; `None` if it can.

    The first answer for a kind of states compiles the kernel, to see how much shared memory it needs.
    """
    reads = reads_of(segments)
    if isinstance(reads, str):
        return reads
    kind, mask_kind = reads[0].plan.kind, kind_of(mask)
    batch, heads, queries, _ = query.shape
    if heads // kind.kv_heads * queries * max(read.readers for read in reads) > MAXIMUM_ROWS:
        return f"there are more than {MAXIMUM_ROWS} queries for a kv head, as in a prompt"
    if batch * kind.kv_heads > MAXIMUM_HEADS:
        return f"there are more than {MAXIMUM_HEADS} kv heads in all sequences"
    if query.dtype != kind.dtype:
        return f"queries are {query.dtype}, and scales {kind.dtype}"
    for read in reads:
        variant = variant_of(read, heads, queries, mask_kind)
        if variant.constants is None:
            SplitCall(query, reads, mask, 1.0)
        if variant.obstacle is not None:
            return variant.obstacle
    return None


def variants_to_compare(query: Tensor, segments: KVSegments, mask: Tensor | None) -> list[Variant]:
    """The compiled variants that take these queries, of which no result has been compared with that of torch.

    Comparing waits for the device, so there are none while a CUDA graph is recorded.
    """
    kind, (_, heads, queries, _) = kind_of(mask), query.shape
    variants = [variant_of(read, heads, queries, kind) for read in _reads(segments)]
    if all(variant.compared for variant in variants) or not query.numel() or query.is_meta:
        return []
    if query.is_cuda and torch.cuda.is_current_stream_capturing():
        return []
    return [variant for variant in variants if not variant.compared]


def compare(variants: list[Variant], seen: Tensor, expected: Tensor) -> str | None:
    """Why the variants that gave a result are never launched again, `None` if it is the expected one.

    Nothing is decided if the expected result is not finite.
    """
    error, size = torch.stack([(seen.float() - expected.float()).norm(), expected.float().norm()]).tolist()
    if not math.isfinite(size):
        return None
    found: str | None = None
    if not error <= LARGEST_ERROR * size:
        found = f"the first result of the kernel was {error:.2g} from that of torch, whose norm is {size:.2g}"
        logger.warning("triton's code is wrong on %s, so another path is taken: %s", seen.device, found)
    for variant in variants:
        variant.compared, variant.obstacle = True, found
    return found


def attend(query: Tensor, segments: KVSegments, mask: Tensor | None, scale: float) -> Tensor:
    """Softmax attention; arguments and result are those of `reference.attend`. `obstacle` must have said `None`.

    The result has the memory layout of torch's own attention, `[batch, queries, heads, value_head_dim]`.
    """
    return SplitCall(query, _reads(segments), mask, scale).run(query.dtype, logsumexp=False)[0]


def attend_partly(query: Tensor, segments: KVSegments, mask: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """As `attend`, for segments that are only a part of the tokens that the queries attend to.

    Returns:
        Attended values float32 `[batch, heads, queries, value_head_dim]`, and the log-sum-exp of the scores, float32
        `[batch, heads, queries]`, as `reference.merge` takes them.
    """
    return SplitCall(query, _reads(segments), mask, scale).run(torch.float32, logsumexp=True)


def _reads(segments: KVSegments) -> list[Read]:
    reads = reads_of(segments)
    if isinstance(reads, str):
        raise StateMismatchError(f"The kernel cannot take the segments ({reads}): call obstacle() first.")
    return reads
