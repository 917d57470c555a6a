"""Keys, or values, that attention reads as they are held, and that are brought to full precision only where they must.

A model gets them from a cache and hands them to its attention. `scaled_dot_product_attention`, and the products that
eager attention is written in, are computed on what is held. Every other function is given the states in full
precision, which is always right, and as slow as a cache that holds them packed would be without this module.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._pytree import tree_leaves, tree_map_only
from typing_extensions import override

from ..autocast import without_autocast
from ..errors import ReadOnlyStatesError, StaleStatesError
from ..quantizers.base import Side
from . import fused
from .history import History


class Edition:
    """Counts the times that what a store has returned stops to be true."""

    __slots__ = ("number",)

    def __init__(self) -> None:
        self.number = 0

    def advance(self) -> None:
        """What was returned so far must not be read any more."""
        self.number += 1


@dataclass(frozen=True, eq=False)
class Attended:
    """What both handles of an update stand for.

    Attributes:
        history: the tokens.
        dtype: dtype of the states.
        device: device of the states.
        edition: of the store.
        number: of the edition when the history was true.
        length: tokens that the store held when it returned the history.
    """

    history: History
    dtype: torch.dtype
    device: torch.device
    edition: Edition
    number: int
    length: int

    def read(self) -> History:
        """The history.

        Raises:
            StaleStatesError: the cache has changed since.
        """
        if self.edition.number != self.number:
            raise StaleStatesError(
                "expected states of a cache to be read before it changes again, but it has been updated, cropped or "
                "reordered since it returned these: read them at once, clone() what is needed longer, or fork() the "
                "cache."
            )
        return self.history


@dataclass(frozen=True)
class _View:
    """What has been asked of the states so far.

    Attributes:
        copies: times that each kv head comes, one copy beside the other.
        grouped: whether copies have an axis of their own, behind that of the kv heads.
        swapped: whether tokens and head_dim have changed places.
    """

    copies: int = 1
    grouped: bool = False
    swapped: bool = False


_AS_HELD = _View()


class PackedStates(Tensor):
    """Keys or values `[batch, kv_heads, tokens, head_dim]` of a cache that holds them packed."""

    attended: Attended
    side: Side
    view_of: _View

    @staticmethod
    def __new__(
        cls: type["PackedStates"], attended: Attended, side: Side, shape: Sequence[int], view: _View = _AS_HELD
    ) -> "PackedStates":
        """A handle of `shape`, which nothing has been asked of yet."""
        states: PackedStates = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=attended.dtype, device=attended.device
        )
        states.attended = attended
        states.side = side
        states.view_of = view
        return states

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def dense(self) -> Tensor:
        """The states in full precision: a copy, of the handle's shape and dtype.

        Raises:
            StaleStatesError: the cache has changed since it returned the handle.
        """
        with without_autocast(self.attended.device):
            states = self.attended.read().dense(self.side, self.attended.dtype)
        view = self.view_of
        if view.grouped:
            return states[:, :, None].expand(-1, -1, view.copies, -1, -1)
        if view.copies > 1:
            states = states.repeat_interleave(view.copies, dim=1)
        return states.transpose(2, 3) if view.swapped else states

    @classmethod
    @override
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if func in _OF_THE_HANDLE:
                return func(*args, **kwargs)
            computed = _ON_WHAT_IS_HELD[func](*args, **kwargs) if func in _ON_WHAT_IS_HELD else None
            return _on_dense_states(func, args, kwargs) if computed is None else computed

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        return _on_dense_states(func, args, kwargs or {})

    @override
    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return copy.deepcopy(self.dense(), memo)

    @override
    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.dense().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"PackedStates({self.side}, shape={tuple(self.shape)}, dtype={self.dtype})"


def as_dense(states: Tensor) -> Tensor:
    """States in full precision: a handle's, or the tensor itself."""
    return states.dense() if isinstance(states, PackedStates) else states


def _on_dense_states(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    name = getattr(func, "__name__", "").removesuffix(".default")
    in_place = name == "__setitem__" or (name.endswith("_") and not name.endswith("__")) or kwargs.get("inplace")
    written = (args[:1] if in_place else (), kwargs.get("out"))
    if any(isinstance(thing, PackedStates) for thing in tree_leaves(written)):
        raise ReadOnlyStatesError(
            f"expected the states of a quantized cache to be read, but {name} would write to them, and be lost: "
            "clone() them first."
        )
    args, kwargs = tree_map_only(PackedStates, PackedStates.dense, (args, kwargs))
    return func(*args, **kwargs)


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor | None:
    if not isinstance(key, PackedStates) or not isinstance(value, PackedStates) or isinstance(query, PackedStates):
        return None
    if key.attended is not value.attended or (key.side, value.side) != ("keys", "values") or dropout_p:
        return None
    view = key.view_of
    if view != value.view_of or view.swapped or view.grouped or query.dim() != 4 or query.dtype != key.dtype:
        return None
    heads, kv_heads = query.shape[1], key.shape[1]
    whole_groups = heads == kv_heads or (enable_gqa and heads % kv_heads == 0)
    if not whole_groups or query.shape[0] != key.shape[0] or query.shape[3] != key.shape[3]:
        return None
    if attn_mask is not None and attn_mask.dtype not in (torch.bool, torch.float32, query.dtype):
        return None
    if _converts(query) or any(given.device != key.device for given in (query, attn_mask) if given is not None):
        return None
    history = key.attended.read()
    if fused.wants_gradients(query, *history.dense_states(), *(() if attn_mask is None else (attn_mask,))):
        return None
    if is_causal:
        if attn_mask is not None:
            return None
        attn_mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).tril()
    return fused.attend(query, history, attn_mask, scale)


def _product(left: Tensor, right: Tensor) -> Tensor | None:
    """`queries @ keys.transpose(2, 3)`, or `weights @ values`."""
    if not isinstance(right, PackedStates) or isinstance(left, PackedStates):
        return None
    if left.dim() != 4 or right.view_of.grouped or left.dtype != right.dtype or left.device != right.device:
        return None
    if _converts(left):
        return None
    if left.shape[:2] != right.shape[:2] or left.shape[3] != right.shape[2]:
        return None
    history = right.attended.read()
    if fused.wants_gradients(left, *history.dense_states()):
        return None
    if right.side == "keys" and right.view_of.swapped:
        return fused.scores(left, history)
    if right.side == "values" and not right.view_of.swapped:
        return fused.combine(left, history)
    return None


def _converts(states: Tensor) -> bool:
    """Whether autocast would have the computation in another dtype."""
    kind = states.device.type
    return torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) != states.dtype


def _transposed(states: Tensor, dim0: int, dim1: int) -> Tensor | None:
    if not isinstance(states, PackedStates) or states.dim() != 4 or {dim0 % 4, dim1 % 4} != {2, 3}:
        return None
    batch, heads, rows, columns = states.shape
    view = replace(states.view_of, swapped=not states.view_of.swapped)
    return PackedStates(states.attended, states.side, (batch, heads, columns, rows), view)


# The three steps in which modelling code repeats kv heads for the query heads that share them.

_WITH_AN_AXIS_FOR_COPIES = (slice(None), slice(None), None, slice(None), slice(None))


def _item(states: Tensor, index: Any) -> Tensor | None:
    if not isinstance(states, PackedStates) or states.view_of != _AS_HELD or not isinstance(index, tuple):
        return None
    if not all(part is None or isinstance(part, slice) for part in index):
        return None
    if index not in (_WITH_AN_AXIS_FOR_COPIES, _WITH_AN_AXIS_FOR_COPIES[:3]):
        return None
    batch, kv_heads, *rest = states.shape
    return PackedStates(states.attended, states.side, (batch, kv_heads, 1, *rest), _View(grouped=True))


def _expanded(states: Tensor, *sizes: Any, **named: Any) -> Tensor | None:
    shape = _numbers(sizes)
    if named or not isinstance(states, PackedStates) or states.view_of != _View(grouped=True) or len(shape) != 5:
        return None
    batch, kv_heads, _, tokens, head_dim = states.shape
    copies = shape[2]
    if shape != (batch, kv_heads, copies, tokens, head_dim) or copies < 1:
        return None
    return PackedStates(states.attended, states.side, shape, _View(copies, grouped=True))


def _reshaped(states: Tensor, *sizes: Any, **named: Any) -> Tensor | None:
    shape = _numbers(sizes)
    if named or not isinstance(states, PackedStates):
        return None
    if shape == tuple(states.shape):
        return states
    if not states.view_of.grouped:
        return None
    batch, kv_heads, copies, tokens, head_dim = states.shape
    if shape != (batch, kv_heads * copies, tokens, head_dim):
        return None
    return PackedStates(states.attended, states.side, shape, _View(copies))


def _repeated(states: Tensor, repeats: Any, dim: int | None = None, **options: Any) -> Tensor | None:
    if not isinstance(states, PackedStates) or states.view_of != _AS_HELD or dim != 1:
        return None
    if not isinstance(repeats, int) or repeats < 1:
        return None
    batch, kv_heads, tokens, head_dim = states.shape
    return PackedStates(states.attended, states.side, (batch, kv_heads * repeats, tokens, head_dim), _View(repeats))


def _numbers(sizes: tuple[Any, ...]) -> tuple[int, ...]:
    return tuple(sizes[0]) if len(sizes) == 1 and isinstance(sizes[0], tuple | list) else sizes


def _unchanged(states: Tensor, *args: Any, **kwargs: Any) -> Tensor | None:
    asked = {*args, *kwargs.values()}
    return states if isinstance(states, PackedStates) and asked <= {states.dtype, states.device} else None


_ON_WHAT_IS_HELD: dict[Any, Callable[..., Tensor | None]] = {
    scaled_dot_product_attention: _attention,
    torch.matmul: _product,
    Tensor.matmul: _product,
    Tensor.__matmul__: _product,
    Tensor.transpose: _transposed,
    torch.transpose: _transposed,
    Tensor.swapaxes: _transposed,
    Tensor.mT.__get__: lambda states: _transposed(states, 2, 3),  # type: ignore[attr-defined]
    Tensor.__getitem__: _item,
    Tensor.expand: _expanded,
    Tensor.reshape: _reshaped,
    Tensor.view: _reshaped,
    Tensor.repeat_interleave: _repeated,
    torch.repeat_interleave: _repeated,
    Tensor.contiguous: _unchanged,
    Tensor.detach: _unchanged,
    Tensor.to: _unchanged,
}
"""What is computed without states in full precision; `None` where it is not, after all, what these are for."""

_OF_THE_HANDLE = {
    *(
        getattr(Tensor, name).__get__
        for name in (
            "shape",
            "dtype",
            "device",
            "ndim",
            "layout",
            "requires_grad",
            "grad_fn",
            "grad",
            "is_leaf",
            "is_cpu",
            "is_cuda",
            "is_meta",
            "is_sparse",
            "is_quantized",
            "is_nested",
            "itemsize",
        )
    ),
    Tensor.size,
    Tensor.dim,
    Tensor.ndimension,
    Tensor.numel,
    Tensor.nelement,
    Tensor.element_size,
    Tensor.is_floating_point,
    Tensor.is_complex,
    Tensor.get_device,
    Tensor.__len__,
    torch.numel,
    torch.is_floating_point,
}
"""What is known without reading any state."""


def handles(attended: Attended, kv_heads: int, head_dims: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """The two handles of what an update returns: keys and values, each `[batch, kv_heads, tokens, head_dim]`."""
    batch, tokens = attended.history.batch, attended.history.tokens
    keys = PackedStates(attended, "keys", (batch, kv_heads, tokens, head_dims[0]))
    values = PackedStates(attended, "values", (batch, kv_heads, tokens, head_dims[1]))
    return keys, values
