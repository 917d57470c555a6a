"""Attention on a CUDA device to packed tokens, and to the tokens in full precision around them, in two launches."""

import torch
from torch import Tensor

from kvlayers.attention.cuda.launch import SplitCall, kind_of
from kvlayers.attention.cuda.plan import DEFAULT_LAUNCH, Launch, SegmentPlan, plan_of
from kvlayers.attention.cuda.specs import MAXIMUM_ROWS as ROWS_OF_A_PROGRAM
from kvlayers.attention.cuda.specs import rows_of_program
from kvlayers.attention.segments import KVSegments
from kvlayers.errors import StateMismatchError

MAXIMUM_ROWS = 4 * ROWS_OF_A_PROGRAM
"""Queries of one kv head, over all heads that share it, up to which reading packed codes pays."""

MAXIMUM_HEADS = 65535
"""Kv heads of all sequences up to which CUDA can launch the kernel, in the second dimension of a grid."""


def obstacle(query: Tensor, segments: KVSegments, mask: Tensor | None, launch: Launch = DEFAULT_LAUNCH) -> str | None:
    """Why the kernel cannot take queries `[batch, heads, queries, key_head_dim]`; `None` if it can.

    The first answer for a kind of states compiles the kernel, to see how much shared memory it needs.
    """
    packed = segments.packed
    if packed is None:
        return "no token is packed yet"
    if not segments.has_one_packed_run:
        return "packed tokens are in several segments"
    plan = plan_of(packed, launch)
    if plan.obstacle is not None:
        return plan.obstacle
    if query.shape[1] // plan.kv_heads * query.shape[2] > MAXIMUM_ROWS:
        return f"there are more than {MAXIMUM_ROWS} queries for a kv head, as in a prompt"
    if query.shape[0] * plan.kv_heads > MAXIMUM_HEADS:
        return f"there are more than {MAXIMUM_HEADS} kv heads in all sequences"
    if query.dtype != plan.dtype:
        return f"queries are {query.dtype}, and scales {plan.dtype}"
    for states in segments.dense_states():
        if states.dtype != query.dtype:
            return f"queries are {query.dtype}, and states in full precision {states.dtype}"
    rows = rows_of_program(query.shape[1] // plan.kv_heads * query.shape[2])
    variant = plan.variant(query.shape[1], rows, kind_of(mask))
    if variant.constants is None:
        SplitCall(query, segments, plan, mask, 1.0)
    return variant.obstacle


def attend(
    query: Tensor, segments: KVSegments, mask: Tensor | None, scale: float, launch: Launch = DEFAULT_LAUNCH
) -> Tensor:
    """Softmax attention; arguments and result are those of `reference.attend`. `obstacle` must have said `None`.

    The result has the memory layout of torch's own attention, `[batch, queries, heads, value_head_dim]`.
    """
    return SplitCall(query, segments, _plan(segments, launch), mask, scale).run(query.dtype, logsumexp=False)[0]


def attend_partly(
    query: Tensor, segments: KVSegments, mask: Tensor | None, scale: float, launch: Launch = DEFAULT_LAUNCH
) -> tuple[Tensor, Tensor]:
    """As `attend`, for segments that are only a part of the tokens that the queries attend to.

    Returns:
        Attended values float32 `[batch, heads, queries, value_head_dim]`, and the log-sum-exp of the scores, float32
        `[batch, heads, queries]`, as `reference.merge` takes them.
    """
    return SplitCall(query, segments, _plan(segments, launch), mask, scale).run(torch.float32, logsumexp=True)


def _plan(segments: KVSegments, launch: Launch) -> SegmentPlan:
    if segments.packed is None:
        raise StateMismatchError("No token is packed: call obstacle() first.")
    return plan_of(segments.packed, launch)
