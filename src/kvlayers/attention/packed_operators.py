"""Operators by which compiled code reads packed states that it is given as arguments.

A `PackedStates` has no memory, and is no input of a compiled graph. So the graph is given the number of the store, and
the operators read the newest states that the store has returned. They run the code of eager mode.

(A compiled model that updates its cache within the graph calls the operators of `layers/graph_operators.py`.)
"""

import itertools
import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from kvlayers.attention import dispatch
from kvlayers.attention.dense_reads import note_dense_read
from kvlayers.errors import StaleStatesError
from kvlayers.upstream import compat

_numbers = itertools.count()
_handles: "weakref.WeakValueDictionary[int, StoreHandle]" = weakref.WeakValueDictionary()


class StoreHandle:
    """The handle by which compiled code knows a store.

    Attributes:
        number: int64 scalar on the host. Since it is a tensor, it is an input of compiled code, and never a constant.
        newest: returns the newest `Snapshot` of the store, `None` if nobody holds its states any more.
    """

    __slots__ = ("__weakref__", "newest", "number")

    def __init__(self) -> None:
        number = next(_numbers)
        # A tensor born in inference mode could not be an argument of compiled code outside of it.
        with torch.inference_mode(False):
            self.number = torch.tensor(number, device="cpu")
        self.newest: Callable[[], Any] = _nothing
        _handles[number] = self

    def __reduce__(self) -> tuple[type["StoreHandle"], tuple[()]]:
        # A copy of the store has returned no states yet.
        return StoreHandle, ()


def _nothing() -> None:
    return None


def _newest(number: Tensor, version: int, tokens: int) -> Any:
    """The newest snapshot of a store, which must be of this version and have so many tokens."""
    handle = _handles.get(int(number))
    snapshot = None if handle is None else handle.newest()
    if snapshot is None or (snapshot.version_number, snapshot.segments.tokens) != (version, tokens):
        raise StaleStatesError(
            f"expected the states of {tokens} tokens, but the cache has returned other states since, or was deleted: "
            "call compiled code with the states of the newest update."
        )
    return snapshot


@torch.library.custom_op("kvlayers::attend_packed", mutates_args=(), **compat.OUTSIDE_CUDA_GRAPHS)
def attend_packed(
    number: Tensor,
    version: int,
    query: Tensor,
    tokens: int,
    value_head_dim: int,
    mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
) -> Tensor:
    """Attention of `query`, `[batch, heads, queries, head_dim]`, to the newest states of a store, read as codes."""
    with torch.no_grad():
        snapshot = _newest(number, version, tokens)
        if is_causal:
            mask = torch.ones(query.shape[2], tokens, dtype=torch.bool, device=query.device).tril()
        scale = 1 / math.sqrt(query.shape[3]) if scale is None else scale
        return dispatch.attend(query, snapshot.read_for(query, mask), mask, scale, snapshot.paths).contiguous()


@attend_packed.register_fake
def _(
    number: Tensor,
    version: int,
    query: Tensor,
    tokens: int,
    value_head_dim: int,
    mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
) -> Tensor:
    return query.new_empty((*query.shape[:3], value_head_dim))


GIVEN_TO_COMPILED_CODE = "compiled code in full precision, as it calls another function than attention"


@torch.library.custom_op("kvlayers::full_precision", mutates_args=(), **compat.OUTSIDE_CUDA_GRAPHS)
def full_precision(
    number: Tensor,
    version: int,
    is_values: bool,
    copies: int,
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """The newest keys, or values, of a store in full precision: `[batch, kv_heads * copies, tokens, head_dim]`."""
    with torch.no_grad():
        snapshot = _newest(number, version, shape[2])
        note_dense_read(snapshot.paths, GIVEN_TO_COMPILED_CODE)
        states: Tensor = snapshot.dense("values" if is_values else "keys")
        return states.repeat_interleave(copies, dim=1) if copies > 1 else states.clone()


@full_precision.register_fake
def _(
    number: Tensor,
    version: int,
    is_values: bool,
    copies: int,
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=device)
