"""Linked slots: how compiled code counts the tokens of a reservation without reading a number."""

import functools
import gc
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from kvlayers.stores.buffer import COUNT_DTYPE

SPECIALIZED_SIZES = 2
"""TorchDynamo always treats sizes below this one as constants."""


class Slot:
    """A count of tokens in a reservation, which compiled code advances by one token without reading a number.

    An `int` that a compiled function reads becomes a constant of the compiled code: the function is compiled again when
    the number differs, which for a count is at every token. Slots are linked instead. Code that adds one token goes
    from a slot to the `next` one, and all that it reads is the bucket.

    Attributes:
        length: tokens held.
        bucket: the smallest bucket that holds one token more, 0 at the end of the reservation.
        next: the slot after one token more, `None` at the end of the reservation.
    """

    __slots__ = ("bucket", "length", "next", "sizes")

    def __init__(self, length: int, bucket: int, following: "Slot | None", sizes: tuple[int, ...]) -> None:
        self.length = length
        self.bucket = bucket
        self.next = following
        self.sizes = sizes

    def __reduce__(self) -> tuple[Any, ...]:
        return slot_of, (self.sizes, self.length)

    def __deepcopy__(self, memo: dict[int, object]) -> "Slot":
        return self


class Slots:
    """All slots of a reservation. They are attributes, so that compiled code reaches one without seeing the others.

    Args:
        sizes: sizes of the buckets, the last one that of the reservation.
    """

    def __init__(self, sizes: tuple[int, ...]) -> None:
        slot = Slot(sizes[-1], 0, None, sizes)
        slots = {str(slot.length): slot}
        bounds = (0, *sizes)
        for lower, size in reversed(list(zip(bounds[:-1], sizes, strict=True))):
            for length in range(size - 1, lower - 1, -1):
                slot = Slot(length, size, slot, sizes)
                slots[str(length)] = slot
        self.__dict__.update(slots)
        self.first = slot

    def __reduce__(self) -> tuple[Any, ...]:
        return slots_of, (self.first.sizes,)

    def __deepcopy__(self, memo: dict[int, object]) -> "Slots":
        return self

    def at(self, length: int) -> Slot:
        """The slot of `length` tokens."""
        slot: Slot = getattr(self, str(length))
        return slot


_building = threading.Lock()


def slots_of(sizes: tuple[int, ...]) -> Slots:
    """The slots of a reservation with buckets of these sizes, shared by all layers with the same sizes."""
    # Slots are compared by identity, so two threads must not both build them.
    with _building:
        return _built_slots(sizes)


@functools.lru_cache(maxsize=8)
def _built_slots(sizes: tuple[int, ...]) -> Slots:
    # So many small objects would trigger collections of all objects in the process: ten times the work itself.
    collecting = gc.isenabled()
    gc.disable()
    try:
        return Slots(sizes)
    finally:
        if collecting:
            gc.enable()


def slot_of(sizes: tuple[int, ...], length: int) -> Slot:
    """One slot of a reservation with buckets of these sizes."""
    return slots_of(sizes).at(length)


def symbolic_number(number: int) -> Tensor:
    """An empty tensor whose size encodes `number`. Compiled code sets no guard on a size.

    If compiled code read the number from an attribute, it would be compiled once for that number alone, and a second
    time for all others.
    """
    tensor = torch.empty((number + SPECIALIZED_SIZES, 0))
    if not torch.compiler.is_compiling():
        torch._dynamo.maybe_mark_dynamic(tensor, 0)
    return tensor


class TracedCount:
    """A count that compiled code adds: to tensors as a tensor, and to numbers as a number.

    A number that reaches a tensor would be an input of the compiled code, and a CUDA graph would be recorded for each
    number. Code that only compares it (a mask of padding is long enough, or it is not) needs the number.

    Args:
        number: the count.
        on_device: the same count as a tensor without a dimension.
    """

    __slots__ = ("number", "on_device")

    def __init__(self, number: int, on_device: Tensor) -> None:
        self.number = number
        self.on_device = on_device

    def __add__(self, other: int) -> int:
        return self.number + other

    __radd__ = __add__

    # As the number too, since an object of no type that Python knows is true, and equal to nothing.

    def __bool__(self) -> bool:
        return self.number != 0

    def __eq__(self, other: object) -> bool:
        return self.number == other

    __hash__ = None  # type: ignore[assignment]

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        arguments = [argument._beside(args) if isinstance(argument, TracedCount) else argument for argument in args]
        return func(*arguments, **({} if kwargs is None else kwargs))

    def _beside(self, arguments: tuple[Any, ...]) -> Tensor | int:
        """The count as it is among the arguments of a function: a tensor if one of them is a tensor."""
        for argument in arguments:
            if isinstance(argument, Tensor):
                return self.on_device.to(argument.device)
        return self.number


def is_static_int(number: int) -> bool:
    """Whether a number is the same in every run of the code that is being compiled, without a guard."""
    if not torch.compiler.is_compiling():
        return True
    # Imported here, because sympy takes long to import.
    from torch.fx.experimental.symbolic_shapes import has_static_value

    return has_static_value(number)


def device_count(number: int, device: torch.device) -> Tensor:
    """A count on a device: int64, without a dimension."""
    with torch.inference_mode(False):
        return torch.full((), number, dtype=COUNT_DTYPE, device=device)
