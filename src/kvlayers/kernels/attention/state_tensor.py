"""Tensors that stand for keys or values, and are brought to full precision only if a function needs it.

A model gets them from a cache and passes them to its attention. Classes of them implement attention, and the products
that eager attention is written as. Every other function is given the states in full precision, which is always right,
and as slow as a packed cache would be without this module.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only
from typing_extensions import override

from kvlayers.errors import ReadOnlyStatesError, UnsupportedLayerError
from kvlayers.kernels.attention.dispatch import PathCounter
from kvlayers.kernels.attention.gqa import kv_head_copies

METADATA_FUNCTIONS = frozenset(
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
"""Functions that read no state: their result is known from shape, dtype and device."""


Implementations = dict[Any, Callable[..., Any]]

Implementation = TypeVar("Implementation", bound=Callable[..., Any])

NOT_IMPLEMENTED = "it has no implementation on packed states"


class StateTensor(Tensor):
    """A tensor without memory of its own, which is brought to full precision only if a function needs that.

    Attributes:
        implementations: by function of torch, what is called in its place, with the same arguments. If it needs the
            states in full precision after all, it returns the reason as a text.
        is_read_only: whether nothing may be written to it.
        in_graphs: the same for code that TorchDynamo traces. It returns `None` if it needs full precision.
        paths: counts how the states are read; `None` if nobody does.
    """

    implementations: ClassVar[Implementations]
    is_read_only: ClassVar[bool] = False
    in_graphs: ClassVar[dict[Any, Callable[..., Tensor | None]]] = {}
    paths: PathCounter | None = None

    def dense(self) -> Tensor:
        """The states in full precision, of the same shape and dtype."""
        raise NotImplementedError

    def traced(self) -> Tensor:
        """What takes the place of the states in code that TorchDynamo traces."""
        return self

    @override
    def data_ptr(self) -> int:
        return self.dense().data_ptr()

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
            if func in METADATA_FUNCTIONS:
                return func(*args, **kwargs)
            if torch.compiler.is_dynamo_compiling():
                traced = cls.in_graphs[func](*args, **kwargs) if func in cls.in_graphs else None
                if traced is not None:
                    return traced
                return func(*map(_in_graph, args), **{name: _in_graph(argument) for name, argument in kwargs.items()})
            implementation = cls.implementations.get(func)
            computed = NOT_IMPLEMENTED if implementation is None else implementation(*args, **kwargs)
        return _call_on_dense(func, args, kwargs, computed) if isinstance(computed, str) else computed

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        return _call_on_dense(func, args, kwargs or {}, NOT_IMPLEMENTED)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"{type(self).__name__}(shape={tuple(self.shape)}, dtype={self.dtype})"


def implements(table: Implementations) -> Callable[..., Callable[[Implementation], Implementation]]:
    """A decorator of functions of torch, which enters what it decorates in a table."""

    def of_functions(*functions: Any) -> Callable[[Implementation], Implementation]:
        def register(implementation: Implementation) -> Implementation:
            table.update(dict.fromkeys(functions, implementation))
            return implementation

        return register

    return of_functions


def writes_in_place(name: str) -> bool:
    """Whether a function of torch writes to its first argument, by its name."""
    return name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))


def _call_on_dense(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], reason: str) -> Any:
    name = getattr(func, "__name__", "").removesuffix(".default")
    written = args[:1] if writes_in_place(name) or kwargs.get("inplace") else (), kwargs.get("out")
    if any(isinstance(leaf, StateTensor) and leaf.is_read_only for leaf in tree_leaves(written)):
        raise ReadOnlyStatesError(
            f"The states that this cache returns are read-only, and what {name} writes would be lost: clone() the "
            "states first."
        )
    given = (states.paths for states in tree_leaves((args, kwargs)) if isinstance(states, StateTensor))
    if (paths := next(filter(None, given), None)) is not None:
        paths.note_dense_read(f"{name} in full precision, as {reason}")
    args, kwargs = tree_map_only(StateTensor, lambda states: states.dense(), (args, kwargs))
    return func(*args, **kwargs)


@dataclass(frozen=True)
class StateView:
    """The view of states that modelling code has taken so far.

    Attributes:
        copies: copies of each kv head, side by side.
        grouped: whether the copies have an axis of their own, after that of the kv heads.
        swapped: whether the axes of tokens and head_dim are swapped.
    """

    copies: int = 1
    grouped: bool = False
    swapped: bool = False

    def of(self, states: Tensor) -> Tensor:
        """The view of states in memory, `[batch, kv_heads, tokens, head_dim]`."""
        if self.grouped:
            return states[:, :, None].expand(-1, -1, self.copies, -1, -1)
        if self.copies > 1:
            states = states.repeat_interleave(self.copies, dim=1)
        return states.transpose(2, 3) if self.swapped else states


UNCHANGED = StateView()


def are_repeated(keys: StateView, values: StateView) -> bool:
    """Whether views are those that attention takes: states as they are, or with the same copies of each kv head."""
    return (keys is values or keys == values) and not keys.swapped and not keys.grouped


NO_ADDRESS = (
    "The states of a quantized cache, of rows, or of a prefix that sequences share, have no address: pass a clone() of "
    "them to a kernel that reads memory."
)


class HeldStates(StateTensor):
    """Keys or values `[batch, kv_heads, tokens, head_dim]` as a cache holds them, or a view. They are read-only.

    Attributes:
        known_shape: the shape.
        view_taken: which view it is.
    """

    is_read_only = True

    known_shape: torch.Size
    view_taken: StateView

    @classmethod
    def without_memory(cls, shape: Sequence[int], dtype: torch.dtype, device: torch.device, view: StateView) -> Any:
        """A tensor of this class, for the caller to say what it stands for."""
        states = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
        states.known_shape, states.view_taken = torch.Size(shape), view
        return states

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        """The shape, without the detour by `__torch_function__`: models read it several times in each layer."""
        return self.known_shape

    def viewed(self, shape: Sequence[int], view: StateView) -> "HeldStates":
        """The same states in another view, of this shape."""
        states: HeldStates = self.without_memory(shape, self.dtype, self.device, view)
        states.__dict__ = {**self.__dict__, **states.__dict__}
        return states

    def whole(self) -> Tensor:
        """A copy of the states in full precision, `[batch, kv_heads, tokens, head_dim]` whatever the view.

        Raises:
            StaleStatesError: the cache has changed since it returned the states.
        """
        raise NotImplementedError

    @override
    def dense(self) -> Tensor:
        return self.view_taken.of(self.whole())

    # The address of a copy would be that of freed memory by the time that a kernel reads it.

    @override
    def data_ptr(self) -> int:
        raise UnsupportedLayerError(NO_ADDRESS)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        # As tensors of a CPU do, so that `hasattr` can ask for it.
        raise AttributeError(NO_ADDRESS)

    @override
    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return copy.deepcopy(self.dense(), memo)

    @override
    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.dense().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


# The views that modelling code takes of keys and values before it attends to them. Most are the three steps in which it
# repeats KV heads for the query heads that share them.

UNKNOWN_VIEW = "attention takes no such view of keys or values"

_WHOLE = slice(None)
_WITH_AN_AXIS_FOR_COPIES = ((_WHOLE, _WHOLE, None, _WHOLE, _WHOLE), (_WHOLE, _WHOLE, None))

VIEWS: Implementations = {}
"""By function of torch: the view of `HeldStates`, or why it is not one that attention takes."""


_of = implements(VIEWS)


@_of(Tensor.transpose, torch.transpose, Tensor.swapaxes)
def _transposed(states: Any, dim0: int, dim1: int) -> Tensor | str:
    if not isinstance(states, HeldStates) or states.dim() != 4 or {dim0 % 4, dim1 % 4} != {2, 3}:
        return UNKNOWN_VIEW
    batch, heads, rows, columns = states.shape
    return states.viewed(
        (batch, heads, columns, rows), replace(states.view_taken, swapped=not states.view_taken.swapped)
    )


VIEWS[Tensor.mT.__get__] = lambda states: _transposed(states, 2, 3)  # type: ignore[attr-defined]


@_of(Tensor.__getitem__)
def _item(states: Any, index: Any) -> Tensor | str:
    # Anything else, such as a tensor, could not be compared.
    are_slices = isinstance(index, tuple) and {type(None), slice}.issuperset(map(type, index))
    adds_an_axis = are_slices and index in _WITH_AN_AXIS_FOR_COPIES
    if not adds_an_axis or not isinstance(states, HeldStates) or states.view_taken != UNCHANGED:
        return UNKNOWN_VIEW
    batch, kv_heads, *rest = states.shape
    return states.viewed((batch, kv_heads, 1, *rest), StateView(grouped=True))


@_of(Tensor.expand, Tensor.reshape, Tensor.view)
def _resized(states: Any, *sizes: Any, **named: Any) -> Tensor | str:
    if named or not isinstance(states, HeldStates):
        return UNKNOWN_VIEW
    shape, own, view = sizes_of(sizes), states.shape, states.view_taken
    if shape == tuple(own):
        return states
    if view == UNCHANGED and len(shape) == 4 and own[1] == 1 and shape[1] > 0:
        # As for the rotated key of multi-head latent attention, which all heads share.
        whole = (own[0], shape[1], *own[2:])
        fits = all(size in (-1, known) for size, known in zip(shape, whole, strict=True))
        return states.viewed(whole, StateView(shape[1])) if fits else UNKNOWN_VIEW
    copies = kv_head_copies(own, shape)
    return states.viewed(shape, StateView(copies, grouped=len(shape) == 5)) if view.grouped and copies else UNKNOWN_VIEW


@_of(Tensor.repeat_interleave, torch.repeat_interleave)
def _repeated(states: Any, repeats: Any, dim: int | None = None, **options: Any) -> Tensor | str:
    repeats_heads = dim == 1 and isinstance(repeats, int) and repeats >= 1
    if not repeats_heads or not isinstance(states, HeldStates) or states.view_taken != UNCHANGED:
        return UNKNOWN_VIEW
    batch, kv_heads, tokens, head_dim = states.shape
    return states.viewed((batch, kv_heads * repeats, tokens, head_dim), StateView(repeats))


@_of(Tensor.contiguous, Tensor.detach, Tensor.to)
def unchanged(states: Any, *args: Any, **kwargs: Any) -> Tensor | str:
    """The states, if they are asked for in the dtype and on the device that they have."""
    is_same = isinstance(states, StateTensor) and {*args, *kwargs.values()} <= {states.dtype, states.device}
    return states if is_same else "they are converted"


def sizes_of(sizes: tuple[Any, ...]) -> tuple[int, ...]:
    """The sizes of a view, which were passed one by one or together."""
    return tuple(sizes[0]) if len(sizes) == 1 and isinstance(sizes[0], tuple | list) else sizes


def _in_graph(argument: Any) -> Any:
    """An argument in which states are what TorchDynamo traces."""
    if isinstance(argument, StateTensor):
        return argument.traced()
    return type(argument)([_in_graph(part) for part in argument]) if isinstance(argument, list | tuple) else argument
