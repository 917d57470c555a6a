"""A device that is not the CPU, in the memory of the host: for tests of what is on which device.

Its tensors say that they are on `DEVICE`, and no operation takes them together with tensors of the CPU, but copies
between the two. What is computed, the CPU computes at once. It has no backward pass, and no streams unless a
`RaceDetector` is installed.
"""

import functools
import itertools
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from recording_transfers import RecordingTransfers

DEVICE = torch.device("privateuseone:0")
CPU = torch.device("cpu")
IS_SUPPORTED = hasattr(torch._C, "_acc") and hasattr(torch._C._acc, "register_python_privateuseone_device_guard")
"""Whether this PyTorch lets a device be written in Python."""

COPIES = (torch.ops.aten.copy_, torch.ops.aten._to_copy, torch.ops.aten._copy_from)


class _Allocation:
    """Memory of the device, from when it is taken to when the last tensor in it goes."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        device.note_allocation(self)
        # Not where there was no memory for it.
        weakref.finalize(self, device.note_release, nbytes).atexit = False


@dataclass
class Crossings:
    """Bytes that went from one device to the other.

    Attributes:
        to_host: bytes that came to the CPU.
        to_device: bytes that came to the device.
        numbers: times that the host read a single number, which stalls a device.
    """

    to_host: int = 0
    to_device: int = 0
    numbers: int = 0


class FakeDevice:
    """What happens on the device.

    Attributes:
        crossings: what has been copied between it and the CPU.
        allocated_bytes: all memory that was ever taken.
        peak_bytes: the most that was taken at a time.
        most_bytes: memory that there is, `None` for any amount.
        watcher: called with each allocation.
        live_bytes: memory that is taken.
    """

    def __init__(self) -> None:
        self.live_bytes = 0
        self.crossings = Crossings()
        self.allocated_bytes = 0
        self.peak_bytes = 0
        self.most_bytes: int | None = None
        self.watcher: Callable[[_Allocation], None] | None = None

    def note_allocation(self, allocation: _Allocation) -> None:
        """Count memory that is taken.

        Raises:
            torch.OutOfMemoryError: there is not so much.
        """
        if self.most_bytes is not None and self.live_bytes + allocation.nbytes > self.most_bytes:
            raise torch.OutOfMemoryError(f"tried to allocate {allocation.nbytes} bytes on {DEVICE}")
        if self.watcher is not None:
            self.watcher(allocation)
        self.live_bytes += allocation.nbytes
        self.allocated_bytes += allocation.nbytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def note_release(self, nbytes: int) -> None:
        """Count memory that is free again."""
        self.live_bytes -= nbytes

    @contextmanager
    def watched(self) -> Iterator[Crossings]:
        """What crosses, and in `allocated_bytes` and `peak_bytes` what is taken, from now on."""
        self.crossings = Crossings()
        self.allocated_bytes, self.peak_bytes = 0, self.live_bytes
        yield self.crossings

    @contextmanager
    def short_of_memory(self, most_bytes: int | None) -> Iterator[None]:
        """No more than so many bytes can be taken at a time."""
        self.most_bytes = most_bytes
        try:
            yield
        finally:
            self.most_bytes = None


device = FakeDevice()


class DeviceTensor(Tensor):
    """A tensor of the device. It has the memory of a CPU tensor, which nobody else gets to see."""

    _inner: Tensor
    _allocation: _Allocation

    @staticmethod
    def __new__(cls: type["DeviceTensor"], inner: Tensor, allocation: _Allocation | None = None) -> "DeviceTensor":
        """A tensor over `inner`, which is a view of an allocation, or one by itself."""
        tensor: DeviceTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=DEVICE,
        )
        tensor._inner = inner
        tensor._allocation = _Allocation(inner.untyped_storage().nbytes()) if allocation is None else allocation
        return tensor

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        tensors = tensors_in(args) + tensors_in(kwargs.values())
        if func.overloadpacket in COPIES:
            _note_copy(func, args, kwargs)
        else:
            _check_one_device(func, tensors)
        if func is torch.ops.aten._local_scalar_dense.default:
            device.crossings.numbers += 1
        target = kwargs.get("device", DEVICE)
        if "device" in kwargs:
            kwargs["device"] = CPU
        result = func(*map(_inner, args), **{name: _inner(value) for name, value in kwargs.items()})
        if names_of(func)[1]:
            return _written(func, args, kwargs)
        if torch.device(target).type == "cpu":
            return result
        viewed = {_address(tensor): tensor for tensor in tensors if isinstance(tensor, DeviceTensor)}
        if isinstance(result, tuple | list):
            return type(result)(
                _wrapped(each, viewed.get(_address(each))) if isinstance(each, Tensor) else each for each in result
            )
        return _wrapped(result, viewed.get(_address(result))) if isinstance(result, Tensor) else result

    def untyped_storage(self) -> torch.UntypedStorage:
        """The memory, as if it was that of the device."""
        return self._inner.untyped_storage()

    def data_ptr(self) -> int:
        """Where the tensor begins."""
        return self._inner.data_ptr()

    def tolist(self) -> Any:
        """The elements, which come to the host for it."""
        return self.cpu().tolist()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"DeviceTensor({self._inner!r})"


# An operator's arguments are plain values and lists of them: torch's pytrees, which may be anything, take far longer.


def tensors_in(values: Iterable[Any]) -> list[Tensor]:
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, tuple | list):
            found += tensors_in(value)
    return found


def _inner(value: Any) -> Any:
    if isinstance(value, DeviceTensor):
        return value._inner
    return [_inner(each) for each in value] if isinstance(value, tuple | list) else value


def _wrapped(inner: Tensor, viewed: DeviceTensor | None) -> DeviceTensor:
    if viewed is None:
        return DeviceTensor(inner)
    # A view is of inference mode where what it is of is, whatever the mode is now.
    if viewed.is_inference() == torch.is_inference_mode_enabled():
        return DeviceTensor(inner, viewed._allocation)
    with torch.inference_mode(viewed.is_inference()):
        return DeviceTensor(inner, viewed._allocation)


def _address(tensor: Tensor) -> int:
    # Tensors without memory are all at 0, and none of them is a view of another.
    return tensor.untyped_storage().data_ptr() or id(tensor)


def _check_one_device(func: Any, tensors: list[Tensor]) -> None:
    """As CUDA does. A number on the CPU may take part in what is computed, and an index is brought by itself."""
    if func.overloadpacket in (torch.ops.aten.index, torch.ops.aten.index_put_):
        return
    strict = func.overloadpacket in (torch.ops.aten.index_select, torch.ops.aten.index_copy_, torch.ops.aten.cat)
    elsewhere = [t for t in tensors if not isinstance(t, DeviceTensor) and (t.dim() or strict)]
    if elsewhere:
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but found at least two devices, {DEVICE} and "
            f"{elsewhere[0].device}! (when checking arguments of {func})"
        )


def _note_copy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if func.overloadpacket is torch.ops.aten._to_copy:
        source, to_device = args[0], torch.device(kwargs.get("device") or args[0].device).type == DEVICE.type
        nbytes = source.numel() * (kwargs.get("dtype") or source.dtype).itemsize
    else:
        target, source = args[:2]
        to_device, nbytes = isinstance(target, DeviceTensor), target.numel() * target.element_size()
    if to_device and not isinstance(source, DeviceTensor):
        device.crossings.to_device += nbytes
    elif isinstance(source, DeviceTensor) and not to_device:
        device.crossings.to_host += nbytes


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What an operation that writes returns: the very tensors that it was given."""
    names, of_written, returns = names_of(func)
    given = dict(itertools.zip_longest(names, args)) | kwargs
    written = [given[name] for name in of_written]
    for tensor in written:
        if isinstance(tensor, DeviceTensor) and tensor.shape != tensor._inner.shape:
            raise NotImplementedError(f"{func} has resized a tensor, which the device of the tests cannot")
    return written[0] if returns == 1 else tuple(written) if returns else None


@functools.cache
def names_of(func: Any) -> tuple[list[str], list[str], int]:
    """The names of an operator's arguments, the names of those that it writes to, and how many values it returns."""
    arguments, returns = func._schema.arguments, func._schema.returns
    written = [each.name for each in arguments if each.alias_info is not None and each.alias_info.is_write]
    return [each.name for each in arguments], written, len(returns)


def _created(create: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def on_device(*args: Any, **kwargs: Any) -> Tensor:
        kwargs.pop("device", None)
        return DeviceTensor(create(*args, **kwargs))

    return on_device


def _copied_from(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    _note_copy(torch.ops.aten._copy_from.default, (target, source), {})
    inner_source, inner_target = (getattr(tensor, "_inner", tensor) for tensor in (source, target))
    inner_target.copy_(inner_source)
    return target


def _register() -> torch.library.Library:
    # Not under a name of its own, which would make it the accelerator of this process, for other tests too.
    module = types.ModuleType("torch.privateuseone")
    module._lazy_init = lambda: None  # type: ignore[attr-defined]
    module._is_in_bad_fork = lambda: False  # type: ignore[attr-defined]
    module.manual_seed_all = lambda seed: None  # type: ignore[attr-defined]
    module.is_initialized = lambda: True  # type: ignore[attr-defined]
    torch._register_device_module("privateuseone", module)

    class Guard(torch._C._acc.DeviceGuard):  # type: ignore[misc, name-defined]
        def type_(self) -> Any:
            return torch._C._autograd.DeviceType.PrivateUse1  # type: ignore[attr-defined]

    torch._C._acc.register_python_privateuseone_device_guard(Guard())
    library = torch.library.Library("aten", "IMPL")
    for name in ("empty.memory_format", "empty_strided", "arange", "arange.start", "arange.start_step"):
        packet, _, overload = name.partition(".")
        library.impl(name, _created(getattr(getattr(torch.ops.aten, packet), overload or "default")), "PrivateUse1")
    # Where PyTorch makes a tensor of numbers, it copies them past `__torch_dispatch__`.
    library.impl("_copy_from", _copied_from, "PrivateUse1")
    return library


class DeviceTransfers(RecordingTransfers):
    """Copies to the device and back, done no sooner than allowed and some time later."""

    def _block(self, nbytes: int) -> Tensor:
        with DEVICE:
            return super()._block(nbytes)


_library = _register() if IS_SUPPORTED else None
