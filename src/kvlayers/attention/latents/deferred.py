"""Tensors that are computed when something reads them, and not before."""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only
from typing_extensions import override

from kvlayers.attention.packed_tensor import METADATA_FUNCTIONS

Method = TypeVar("Method", bound=Callable[..., Any])


class DeferredTensor(Tensor):
    """A tensor without memory of its own.

    A function that a subclass has an implementation for may take it as it is. Every other function is given the
    computed tensor, and so is every later one: what is written to it is not lost.
    """

    implementations: ClassVar[dict[Any, Callable[..., Any]]]
    """By function of torch, what is called instead. It returns `NotImplemented` if the tensor must be computed."""

    @classmethod
    def of(cls, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Any:
        """A tensor of the class, with this shape, dtype and device."""
        return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)

    def computed(self) -> Tensor:
        """The tensor itself: a view of the same memory at every call."""
        raise NotImplementedError

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
        if func in METADATA_FUNCTIONS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        implementation = cls.implementations.get(func)
        result = NotImplemented if implementation is None else implementation(*args, **kwargs)
        return _call_on_computed(func, args, kwargs) if result is NotImplemented else result

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        return _call_on_computed(func, args, kwargs or {})

    @override
    def data_ptr(self) -> int:
        return self.computed().data_ptr()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"{type(self).__name__}(shape={tuple(self.shape)}, dtype={self.dtype})"


def implemented_in(*tables: dict[Any, Callable[..., Any]]) -> Callable[..., Callable[[Method], Method]]:
    """A decorator of functions of torch, which enters what it decorates in the tables."""

    def of_functions(*functions: Any) -> Callable[[Method], Method]:
        def register(implementation: Method) -> Method:
            for table in tables:
                table.update(dict.fromkeys(functions, implementation))
            return implementation

        return register

    return of_functions


def _call_on_computed(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    args, kwargs = tree_map_only(DeferredTensor, lambda tensor: tensor.computed(), (args, kwargs))
    return func(*args, **kwargs)
