"""Counts what a computation asks of a GPU, on any machine: meta tensors stand for tensors of the device.

A meta tensor has a shape and no memory, so an operation takes no time, whatever its size. If the host reads a number of
the device, that is counted, and it reads a zero.
"""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from kvlayers.offload.transfers import BlockingTransfers
from kvlayers.utils.triton_support import TritonKernel
from offline_gpu import META as DEVICE
from offline_gpu import as_gpu

WITHOUT_KERNEL = {"empty", "empty_strided", "new_empty", "new_empty_strided", "empty_like", "set_", "_unsafe_view"}
"""Operators that launch nothing, beside views."""

SEVERAL_KERNELS = {"masked_fill": 2, "constant_pad_nd": 2, "logsumexp": 6, "sort": 2}
"""Operators for which PyTorch launches several kernels on a CUDA device, and how many at least."""

COPIES = {"_to_copy", "copy_"}
INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_"}
"""Operators that take an index on the CPU. PyTorch copies it to the device."""

SHAPED_BY_NUMBERS = {"nonzero", "masked_select", "_unique2", "unique_consecutive", "unique_dim"}
"""Operators whose result has a shape for which the host has to wait."""


@dataclass
class Counts:
    """What a computation asked of the device, by the name of the operator or kernel.

    Attributes:
        kernels: kernels that were launched.
        stalls: times that the host waited for the device, and copies between the memory of both, other than those of
            offloaded states, which run beside the computation.
    """

    kernels: Counter[str] = field(default_factory=Counter)
    stalls: Counter[str] = field(default_factory=Counter)

    @property
    def launches(self) -> int:
        return sum(self.kernels.values())


_counting: list[Counts] = []
"""The counts in progress: at most one."""


@contextlib.contextmanager
def gpu() -> Iterator[None]:
    """Let kvlayers take the meta device for a GPU on which Triton's kernels run. Their launches do nothing."""
    with (
        as_gpu(),
        mock.patch.object(TritonKernel, "launch", _count_launch),
        mock.patch.object(TritonKernel, "shared_memory", return_value=0),
    ):
        yield


def _count_launch(kernel: TritonKernel, *arguments: Any) -> None:
    for counts in _counting:
        counts.kernels[kernel.name] += 1


@contextlib.contextmanager
def counted() -> Iterator[Counts]:
    """Count what is asked of the device within this context, which must be within `gpu()`."""
    counts = Counts()
    _counting.append(counts)
    try:
        with (
            mock.patch.object(torch, "tensor", _from_numbers(torch.tensor)),
            mock.patch.object(torch, "as_tensor", _from_numbers(torch.as_tensor)),
            _Operators(counts),
            _Attention(counts),
        ):
            yield counts
    finally:
        _counting.remove(counts)


def _from_numbers(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    # PyTorch fills such a tensor on the CPU and copies it, past all modes.
    def counting(data: Any, *args: Any, **kwargs: Any) -> Tensor:
        made = make(data, *args, **kwargs)
        if made.is_meta and not isinstance(data, Tensor):
            for counts in _counting:
                counts.stalls[make.__name__] += 1
        return made

    return counting


class _Attention(TorchFunctionMode):
    """Counts PyTorch's attention as one kernel, as its fused kernels are. Meta tensors have no fused kernel."""

    def __init__(self, counts: Counts) -> None:
        super().__init__()
        self._counts = counts
        self._is_inside = False

    @override
    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is not scaled_dot_product_attention:
            return func(*args, **kwargs)
        packed: Any = next((kind for kind in types if kind is not Tensor), None)
        if packed is None or self._is_inside:
            return self._fused(*args, **kwargs)
        # A mode does not see what is called within it, unless it is entered again.
        self._is_inside = True
        try:
            with self:
                return packed.__torch_function__(func, types, args, kwargs)
        finally:
            self._is_inside = False

    def _fused(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        _check_one_device("scaled_dot_product_attention", [query, key, value])
        self._counts.kernels["scaled_dot_product_attention"] += 1
        return query.new_empty((*query.shape[:-1], value.shape[-1]))


class _Operators(TorchDispatchMode):
    """Counts PyTorch's operators."""

    def __init__(self, counts: Counts) -> None:
        super().__init__()
        self._counts = counts

    @override
    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if func.namespace == "kvlayers":
            raise NotImplementedError(f"the operator {func} hides its launches: count what it calls")
        # In inference mode, PyTorch hands over operators that consist of others.
        with self:
            found = func.decompose(*args, **kwargs)
        if found is not NotImplemented:
            return found
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        on_device = any(tensor.is_meta for tensor in given)
        if on_device and (standing_in := self._read_by_host(name, given, kwargs)) is not None:
            return standing_in[0]
        if on_device and name in INDEXING:
            self._counts.stalls.update(name for tensor in given if tensor.is_cpu)
        elif on_device and name not in COPIES:
            _check_one_device(name, given)
        found = func(*args, **kwargs)
        made = [leaf for leaf in tree_leaves(found) if isinstance(leaf, Tensor) and leaf.is_meta]
        if name in COPIES and made and any(tensor.is_cpu for tensor in given):
            self._counts.stalls[name] += 1
        elif any(tensor.numel() for tensor in made) and not func.is_view and name not in WITHOUT_KERNEL:
            self._counts.kernels[name] += SEVERAL_KERNELS.get(name, 1)
        return found

    def _read_by_host(self, name: str, given: list[Tensor], kwargs: dict[str, Any]) -> tuple[Any] | None:
        """What stands in for a result that the host reads, within a tuple. `None` if it reads nothing."""
        first, counts = given[0], self._counts
        if name == "_local_scalar_dense":
            counts.stalls[name] += 1
            return (torch.zeros((), dtype=first.dtype).item(),)
        if name == "equal":
            counts.stalls[name] += 1
            return (False,)
        by_mask = name in INDEXING and any(index.dtype == torch.bool for index in given[1:])
        without_size = name == "repeat_interleave" and kwargs.get("output_size") is None
        if name in SHAPED_BY_NUMBERS or by_mask or without_size:
            counts.stalls[name] += 1
            raise NotImplementedError(f"the shape of what {name} returns depends on numbers of the device")
        if name == "_to_copy" and str(kwargs.get("device")) == "cpu" and first.is_meta:
            counts.stalls["to the host"] += 1
            return (torch.zeros(first.shape, dtype=kwargs.get("dtype") or first.dtype),)
        if name == "copy_" and first.is_cpu:
            counts.stalls["to the host"] += 1
            return (first,)
        return None


def _check_one_device(name: str, tensors: Sequence[Tensor]) -> None:
    """As CUDA does: a number on the CPU may take part, a tensor may not."""
    if any(tensor.is_cpu and tensor.dim() for tensor in tensors):
        raise RuntimeError(f"{name} takes tensors of the device and of the CPU")


class Transfers(BlockingTransfers):
    """Copies of offloaded states, which a GPU does beside the computation: they are no stalls."""

    def __init__(self, device: torch.device = DEVICE) -> None:
        super().__init__(device)

    @override
    def copy_to_device(self, *arguments: Any) -> Any:
        with _as_transfers():
            return super().copy_to_device(*arguments)

    @override
    def copy_to_host(self, *arguments: Any) -> Any:
        with _as_transfers():
            return super().copy_to_host(*arguments)

    @override
    def wait(self, event: Any) -> None:
        for counts in _counting:
            counts.stalls["wait"] += 1


@contextlib.contextmanager
def _as_transfers() -> Iterator[None]:
    # Only while operators are counted does a copy out of a meta tensor do nothing.
    with contextlib.nullcontext() if _counting else counted():
        counts = _counting[-1]
        before = counts.stalls.copy()
        yield
        counts.stalls = before
