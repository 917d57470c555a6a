"""Packed states: the tokens that the keys and values of one update stand for, and how compiled code reads them.

A `PackedStates` has no memory, and is no input of a compiled graph. So the graph is given the number of the store, and
the operators read the newest states that the store has returned. They run the code of eager mode.

(A compiled model that updates its cache within the graph calls the operators of `core/graph_operators.py`.)
"""

import itertools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from kvlayers.errors import StaleStatesError
from kvlayers.kernels.attention import dispatch
from kvlayers.kernels.attention.dispatch import PathCounter
from kvlayers.kernels.attention.segments import KVSegments
from kvlayers.kernels.attention.state_tensor import UNCHANGED, HeldStates, Implementations, StateView
from kvlayers.kernels.codes.quantizer_contract import Side
from kvlayers.upstream import compat
from kvlayers.utils.sending import sent_by_value
from kvlayers.utils.transforms import without_autocast

_numbers = itertools.count()
_versions: "weakref.WeakValueDictionary[int, Version]" = weakref.WeakValueDictionary()


class Version:
    """Counts the changes of a store that make the states it has returned stale. A copy has returned no states yet.

    Attributes:
        number: the count.
        handle: int64 scalar on the host, by which compiled code knows the store. Since it is a tensor, it is an input
            of compiled code, and never a constant.
        newest: returns the newest `Snapshot` of the store, `None` if nobody holds its states any more.
    """

    __slots__ = ("__weakref__", "handle", "newest", "number")

    def __init__(self) -> None:
        self.number, known_by = 0, next(_numbers)
        # A tensor born in inference mode could not be an argument of compiled code outside of it.
        with torch.inference_mode(False):
            self.handle = torch.tensor(known_by, device="cpu")
        self.newest: Callable[[], Any] = lambda: None
        _versions[known_by] = self

    def __reduce__(self) -> tuple[type["Version"], tuple[()]]:
        return Version, ()

    def advance(self) -> None:
        """Make all states that were returned so far stale."""
        self.number += 1


# Not frozen: each layer makes one at each step, and the initialiser of a frozen one takes five times as long.
@dataclass(eq=False)
class Snapshot:
    """The tokens that the packed keys and values of one update stand for.

    Attributes:
        segments: the tokens.
        dtype: dtype of the states.
        device: device of the states.
        version: version of the store.
        version_number: number of that version when the segments were returned.
        length: tokens that the store held at that time.
        paths: counts the paths that attention on the segments takes.
        store: the store. It lives as long as the states, so that no other store writes to the memory that they read.
        observe: called with the queries that attend, `[batch, heads, queries, head_dim]`, before attention is computed.
        choose: given queries, the segments and the mask, the segments that these queries attend to.
        bring: given segments whose states are in other memory, the same segments on the device.
    """

    segments: KVSegments
    dtype: torch.dtype
    device: torch.device
    version: Version
    version_number: int
    length: int
    paths: PathCounter
    store: object = None
    observe: Callable[[Tensor], None] | None = None
    choose: Callable[[Tensor, KVSegments, Tensor | None], KVSegments] | None = None
    bring: Callable[[KVSegments], KVSegments] | None = None

    def __post_init__(self) -> None:
        self.version.newest = weakref.ref(self)

    def read(self, query: Tensor | None = None, mask: Tensor | None = None) -> KVSegments:
        """The segments, or those that queries attend to.

        Args:
            query: `[batch, heads, queries, head_dim]`; `None` for all segments.
            mask: mask of all tokens, broadcast to `[batch, heads, queries, tokens]`; `None` if it is not known yet.

        Raises:
            StaleStatesError: the cache has changed since.
        """
        if self.version.number != self.version_number:
            raise StaleStatesError(
                "These states are stale: the cache has been updated, cropped or reordered since it returned them. Read "
                "states before the cache changes, clone() what is needed longer, or fork() the cache."
            )
        chosen = self.segments if query is None or self.choose is None else self.choose(query, self.segments, mask)
        return chosen if self.bring is None else self.bring(chosen)

    def dense(self, side: Side) -> Tensor:
        """All keys, or values, in full precision, `[batch, kv_heads, tokens, head_dim]`; raises as `read`."""
        with without_autocast(self.device):
            segments = self.read()
            states = segments.dense(side, self.dtype)
            # The states of one dense segment are a view, to which a caller could write.
            return states.clone() if len(segments.in_order) == 1 and segments.are_dense else states

    @property
    def follows_gradients(self) -> bool:
        """Whether autograd follows what is computed from the states."""
        return torch.is_grad_enabled() and self.segments.requires_grad


def _newest(number: Tensor, version: int, tokens: int) -> Any:
    """The newest snapshot of a store, which must be of this version and have so many tokens."""
    known = _versions.get(int(number))
    snapshot = None if known is None else known.newest()
    if snapshot is None or (snapshot.version_number, snapshot.segments.tokens) != (version, tokens):
        raise StaleStatesError(
            f"Compiled code must read the newest states of a cache, got those of {tokens} tokens, after which the "
            "cache returned others or was deleted: call it with the states of the newest update."
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
        segments = snapshot.read(query, mask)
        return dispatch.attend(query, segments, mask, scale, snapshot.paths, is_causal).contiguous()


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
        snapshot.paths.note_dense_read(GIVEN_TO_COMPILED_CODE)
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


@sent_by_value
class PackedStates(HeldStates):
    """The states of a snapshot: packed, in several segments, or such as look at the queries that attend to them."""

    implementations: ClassVar[Implementations] = {}

    in_graphs: ClassVar[dict[Any, Callable[..., Tensor | None]]] = {}

    snapshot: Snapshot
    side: Side

    @staticmethod
    def __new__(
        cls: type["PackedStates"], snapshot: Snapshot, side: Side, shape: Sequence[int], view: StateView = UNCHANGED
    ) -> "PackedStates":
        """Packed states of `shape`, without memory of their own."""
        # Not by `without_memory`: an update makes two, and each view another one.
        states: PackedStates = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=snapshot.dtype, device=snapshot.device
        )
        states.known_shape, states.view_taken = torch.Size(shape), view
        states.snapshot = snapshot
        states.side = side
        return states

    @property
    def paths(self) -> PathCounter:  # type: ignore[override]
        """Counts how the states are read."""
        return self.snapshot.paths

    @override
    def whole(self) -> Tensor:
        return self.snapshot.dense(self.side)

    @override
    def traced(self) -> Tensor:
        snapshot, view = self.snapshot, self.view_taken
        if view.grouped or view.swapped or snapshot.follows_gradients:
            return self.dense()
        number, version, is_values = snapshot.version.handle, snapshot.version_number, self.side == "values"
        states: Tensor = full_precision(
            number, version, is_values, view.copies, tuple(self.shape), snapshot.dtype, snapshot.device
        )
        return states


def packed_pair(snapshot: Snapshot, key_shape: Sequence[int], value_shape: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Keys and values that an update returns, of shapes `[batch, kv_heads, tokens, head_dim]`."""
    return PackedStates(snapshot, "keys", key_shape), PackedStates(snapshot, "values", value_shape)


def as_dense(states: Tensor) -> Tensor:
    """A tensor in full precision: a copy of packed states, or the tensor itself. States of rows stay as they are."""
    return states.dense() if isinstance(states, PackedStates) else states
