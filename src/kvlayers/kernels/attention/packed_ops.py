"""Functions of torch that read packed states without bringing them to full precision.

They are attention, and the two products that eager attention is written as.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kvlayers.kernels.attention import dispatch
from kvlayers.kernels.attention.dispatch import PathCounter
from kvlayers.kernels.attention.gqa import attend_dense
from kvlayers.kernels.attention.packed_tensor import PackedStates, Snapshot, Version, attend_packed, packed_pair
from kvlayers.kernels.attention.segment_kinds import DenseSegment
from kvlayers.kernels.attention.segments import KVSegments
from kvlayers.kernels.attention.state_tensor import VIEWS, are_repeated, implements
from kvlayers.utils.transforms import autocast_converts, transforms_run


def packed_like(keys: Tensor, values: Tensor, snapshot: Snapshot) -> tuple[Tensor, Tensor]:
    """As `packed_pair`, in the form of keys and values but with the tokens of the snapshot."""
    batch, tokens = snapshot.segments.batch, snapshot.segments.tokens
    shapes = ((batch, states.shape[1], tokens, states.shape[3]) for states in (keys, values))
    return packed_pair(snapshot, *shapes)


def snapshot_of(
    keys: Tensor, values: Tensor, version: Version | None = None, paths: PathCounter | None = None
) -> Snapshot:
    """The tokens that keys and values of an update stand for.

    Args:
        keys: `[batch, kv_heads, tokens, key_head_dim]`, plain or packed.
        values: `[batch, kv_heads, tokens, value_head_dim]`, as the keys.
        version: version of plain states; one that nobody advances if it is not given. Packed ones have that of their
            store.
        paths: counts the paths of attention on plain states.
    """
    if isinstance(keys, PackedStates):
        return keys.snapshot
    segments = KVSegments((DenseSegment(keys.as_subclass(Tensor), values.as_subclass(Tensor)),))
    version, paths = version or Version(), paths or PathCounter()
    return Snapshot(segments, keys.dtype, keys.device, version, version.number, keys.shape[2], paths)


def observed(keys: Tensor, values: Tensor, observe: Callable[[Tensor], None]) -> tuple[Tensor, Tensor]:
    """Keys and values that an update returns, which show the queries that attend to them.

    Args:
        keys: `[batch, kv_heads, tokens, key_head_dim]`, plain or packed.
        values: `[batch, kv_heads, tokens, value_head_dim]`, as the keys.
        observe: called with the queries, `[batch, heads, queries, key_head_dim]`, before attention is computed. It is
            not called by an attention function that reads the states in another way.
    """
    snapshot = replace(snapshot_of(keys, values), observe=observe)
    return packed_like(keys, values, snapshot)


def observer_of(keys: Tensor) -> Callable[[Tensor], None] | None:
    """What is called with the queries that attend to keys that an update returned, `None` if nobody looks at them."""
    return keys.snapshot.observe if isinstance(keys, PackedStates) else None


def choosing(
    keys: Tensor,
    values: Tensor,
    choose: Callable[[Tensor, KVSegments, Tensor | None], KVSegments],
    version: Version,
    paths: PathCounter,
) -> tuple[Tensor, Tensor]:
    """Keys and values that an update returns, of which each query chooses what it attends to.

    Args:
        keys: `[batch, kv_heads, tokens, key_head_dim]`, plain or packed.
        values: `[batch, kv_heads, tokens, value_head_dim]`, as the keys.
        choose: see `Snapshot.choose`.
        version: as for `snapshot_of`, like `paths`.
        paths: counts the paths of attention on plain states.
    """
    snapshot = replace(snapshot_of(keys, values, version, paths), choose=choose)
    return packed_like(keys, values, snapshot)


_of_packed = implements(PackedStates.implementations)
PackedStates.implementations.update(VIEWS)

NEEDS_GRADIENTS = "autograd follows what is computed"


@_of_packed(scaled_dot_product_attention)
def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor | str:
    _show(query, key)
    if (obstacle := _obstacle(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa)) is not None:
        return obstacle
    snapshot: Snapshot = key.snapshot  # type: ignore[attr-defined]
    segments = snapshot.read(query, attn_mask)
    only = segments.only_dense
    if only is not None:
        return attend_dense(query, only.keys, only.values, attn_mask, is_causal, scale)
    if _needs_gradients(segments, query, attn_mask):
        return NEEDS_GRADIENTS
    return dispatch.attend(query, segments, attn_mask, scale, snapshot.paths, is_causal)


def _show(query: Tensor, key: Tensor) -> None:
    """Pass the queries that attend to the keys to the observer of the keys, if they have one."""
    if isinstance(key, PackedStates) and key.snapshot.observe is not None and not isinstance(query, PackedStates):
        key.snapshot.observe(query)


def _obstacle(
    query: Any, key: Any, value: Any, attn_mask: Tensor | None, dropout_p: float, is_causal: bool, enable_gqa: bool
) -> str | None:
    """Why attention cannot read the packed states as they are held, `None` if it can."""
    if not isinstance(key, PackedStates) or not isinstance(value, PackedStates) or isinstance(query, PackedStates):
        return "keys and values are not both of the cache"
    if key.snapshot is not value.snapshot or (key.side, value.side) != ("keys", "values"):
        return "keys and values are not those of one update"
    if dropout_p:
        return "there is dropout"
    if not are_repeated(key.view_taken, value.view_taken) or query.dim() != 4:
        return "keys and values do not have the shapes that attention takes"
    batch, heads, _, head_dim = query.shape
    key_batch, kv_heads, _, key_dim = key.known_shape
    whole_groups = heads == kv_heads or (enable_gqa and heads % kv_heads == 0)
    if not whole_groups or batch != key_batch or head_dim != key_dim:
        return "queries do not fit the keys"
    if (reason := _mismatch(query, key.snapshot)) is not None:
        return reason
    if attn_mask is not None and (attn_mask.dtype not in (torch.bool, torch.float32, query.dtype) or is_causal):
        return f"the mask is {attn_mask.dtype}, or comes beside is_causal"
    if attn_mask is not None and attn_mask.device != key.snapshot.device:
        return "the mask is on another device"
    return None


def _attention_in_graph(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor | None:
    if _obstacle(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa) is not None:
        return None
    snapshot: Snapshot = key.snapshot  # type: ignore[attr-defined]
    if _needs_gradients(snapshot.segments, query, attn_mask):
        return None
    number, version = snapshot.version.handle, snapshot.version_number
    attended: Tensor = attend_packed(number, version, query, key.shape[2], value.shape[3], attn_mask, is_causal, scale)
    return attended


PackedStates.in_graphs[scaled_dot_product_attention] = _attention_in_graph


@_of_packed(torch.matmul, Tensor.matmul, Tensor.__matmul__)
def _product(left: Tensor, right: Tensor) -> Tensor | str:
    """`queries @ keys.transpose(2, 3)`, or `weights @ values`."""
    if not isinstance(right, PackedStates) or isinstance(left, PackedStates):
        return "it is not a product of attention"
    if left.dim() != 4 or right.view_taken.grouped:
        return "keys and values do not have the shapes that attention takes"
    if (reason := _mismatch(left, right.snapshot)) is not None:
        return reason
    if left.shape[:2] != right.shape[:2] or left.shape[3] != right.shape[2]:
        return "queries do not fit the keys"
    is_of_queries = right.side == "keys" and right.view_taken.swapped
    if is_of_queries:
        _show(left, right)
    segments = right.snapshot.read(left if is_of_queries else None)
    if _needs_gradients(segments, left):
        return NEEDS_GRADIENTS
    if is_of_queries:
        return dispatch.scores(left, segments, right.snapshot.paths)
    if right.side == "values" and not right.view_taken.swapped:
        return dispatch.combine(left, segments, right.snapshot.paths)
    return "it is not a product of attention"


def _mismatch(states: Tensor, packed: Snapshot) -> str | None:
    """Why states cannot be multiplied with packed states as they are, `None` if they can."""
    # Attributes of the packed states themselves would take the detour by `__torch_function__`.
    if states.dtype != packed.dtype:
        return f"queries are {states.dtype}, and the cache is {packed.dtype}"
    if states.device != packed.device:
        return "queries are on another device"
    if autocast_converts(states):
        return "autocast computes in another dtype"
    if transforms_run():
        return "torch transforms the computation"
    return None


def _needs_gradients(segments: KVSegments, *tensors: Tensor | None) -> bool:
    """Whether autograd would follow what is computed from segments and tensors."""
    if not torch.is_grad_enabled():
        return False
    return segments.requires_grad or any(tensor is not None and tensor.requires_grad for tensor in tensors)
