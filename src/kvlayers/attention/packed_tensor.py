"""Keys, or values, that attention reads as they are held, and that are brought to full precision only where they must.

A model gets them from a cache and hands them to its attention. `scaled_dot_product_attention`, and the products that
eager attention is written in, are computed on what is held. Every other function is given the states in full
precision, which is always right, and as slow as a cache that holds them packed would be without this module.
What is computed on what is held, `on_handles.py` says.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only
from typing_extensions import override

from kvlayers.attention.path_counter import PathCounter
from kvlayers.attention.segments import KVSegments
from kvlayers.attention.shared_prefix import SharedPrefixSegments
from kvlayers.errors import ReadOnlyStatesError, StaleStatesError
from kvlayers.quantizers.contract import Side
from kvlayers.utils.autocast import without_autocast


class Version:
    """Counts the times that what a store has returned stops to be true."""

    __slots__ = ("number",)

    def __init__(self) -> None:
        self.number = 0

    def advance(self) -> None:
        """What was returned so far must not be read any more."""
        self.number += 1


@dataclass(frozen=True, eq=False)
class Snapshot:
    """What both handles of an update stand for.

    Attributes:
        history: the tokens.
        dtype: dtype of the states.
        device: device of the states.
        edition: of the store.
        number: of the edition when the history was true.
        length: tokens that the store held when it returned the history.
        ways: counts which way attention on it goes.
    """

    history: KVSegments | SharedPrefixSegments
    dtype: torch.dtype
    device: torch.device
    edition: Version
    number: int
    length: int
    ways: PathCounter

    def read(self) -> KVSegments | SharedPrefixSegments:
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
class View:
    """What has been asked of the states so far.

    Attributes:
        copies: times that each kv head comes, one copy beside the other.
        grouped: whether copies have an axis of their own, behind that of the kv heads.
        swapped: whether tokens and head_dim have changed places.
    """

    copies: int = 1
    grouped: bool = False
    swapped: bool = False


AS_HELD = View()


Computation = TypeVar("Computation", bound=Callable[..., Tensor | str])

_on_what_is_held: dict[Any, Callable[..., Tensor | str]] = {}


def computes(*functions: Any) -> Callable[[Computation], Computation]:
    """Decorator for what stands in for functions of torch where one of their arguments is a handle.

    It is called as they are. Where states in full precision are needed after all, it returns why.
    """

    def keep(computation: Computation) -> Computation:
        _on_what_is_held.update(dict.fromkeys(functions, computation))
        return computation

    return keep


class PackedStates(Tensor):
    """Keys or values `[batch, kv_heads, tokens, head_dim]` of a cache that holds them packed."""

    attended: Snapshot
    side: Side
    view_of: View

    @staticmethod
    def __new__(
        cls: type["PackedStates"], attended: Snapshot, side: Side, shape: Sequence[int], view: View = AS_HELD
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
            if func in ASKS_NO_STATE:
                return func(*args, **kwargs)
            computed = _on_what_is_held[func](*args, **kwargs) if func in _on_what_is_held else NOT_READ_AS_HELD
            return _on_dense_states(func, args, kwargs, computed) if isinstance(computed, str) else computed

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        return _on_dense_states(func, args, kwargs or {}, NOT_READ_AS_HELD)

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


NOT_READ_AS_HELD = "it is none of the functions that read states as they are held"


def _on_dense_states(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], reason: str) -> Any:
    name = getattr(func, "__name__", "").removesuffix(".default")
    in_place = name == "__setitem__" or (name.endswith("_") and not name.endswith("__")) or kwargs.get("inplace")
    written = (args[:1] if in_place else (), kwargs.get("out"))
    if any(isinstance(thing, PackedStates) for thing in tree_leaves(written)):
        raise ReadOnlyStatesError(
            f"expected the states of a quantized cache to be read, but {name} would write to them, and be lost: "
            "clone() them first."
        )
    for handle in tree_leaves((args, kwargs)):
        if isinstance(handle, PackedStates):
            handle.attended.ways.note(f"{name} in full precision, as {reason}")
            break
    args, kwargs = tree_map_only(PackedStates, PackedStates.dense, (args, kwargs))
    return func(*args, **kwargs)


ASKS_NO_STATE = frozenset(
    {
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
)
"""What is known without reading any state."""
