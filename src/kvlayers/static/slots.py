"""How a static reservation is counted and read: sizes of buckets, linked slots, and what a mask covers."""

import functools
import gc
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvlayers.core.description import OptionFacts
from kvlayers.errors import OptionError
from kvlayers.utils.options import check_whole_number, checks_options

ALIGNMENT = 8
"""Bucket sizes are multiples of this many tokens, as attention kernels require of a mask's rows."""


MOST_TOKENS = 2**24
"""Tokens of the largest reservation, above the contexts of all models. There is a `Slot` for each of them."""

LARGEST_FACTOR = 2**20
"""The largest factor: above it there is only one bucket in any case."""


@dataclass(frozen=True, slots=True)
class Buckets(OptionFacts):
    """Bucket sizes that grow geometrically, up to the size of the reservation.

    A larger factor means fewer sizes, each of which is compiled once, and more empty slots that attention reads.

    Args:
        minimum: tokens in the smallest bucket.
        factor: size of each bucket, divided by the size of the one before.

    Raises:
        OptionError: `minimum` is below one token, or `factor` does not grow.

    Example:
        >>> import kvlayers
        >>> kvlayers.stores.Buckets().sizes(4096)
        (256, 512, 1024, 2048, 4096)
    """

    fact_names: ClassVar[Mapping[str, str]] = {"minimum": "smallest_bucket", "factor": "bucket_factor"}

    minimum: int = 256
    factor: float = 2.0

    def __post_init__(self) -> None:
        check_whole_number(self.minimum, "`minimum` of Buckets", 1, of="tokens")
        if not isinstance(self.factor, int | float) or not 1 < self.factor <= LARGEST_FACTOR:
            raise OptionError(
                f"`factor` of Buckets must be above 1 and at most {LARGEST_FACTOR:,}, got {self.factor!r}: pass, for "
                "example, 2."
            )

    def sizes(self, capacity: int, whole_from: int | None = None) -> tuple[int, ...]:
        """Sizes of the buckets of a reservation of `capacity` tokens, smallest first.

        Args:
            capacity: tokens reserved, the last size.
            whole_from: a bucket of this many tokens or more is of no use, except the last; `None` for `capacity`.

        Raises:
            OptionError: `capacity` is not a number of tokens from 1 to `MOST_TOKENS`.
        """
        check_whole_number(capacity, "`capacity`", 1, MOST_TOKENS, of="tokens")
        sizes, size = [], self.minimum
        while size < (capacity if whole_from is None else min(whole_from, capacity)):
            sizes.append(size)
            size = self.after(size)
        return (*sizes, capacity)

    def after(self, size: int) -> int:
        """The size that follows `size`."""
        return max(math.ceil(size * self.factor / ALIGNMENT), size // ALIGNMENT + 1) * ALIGNMENT


Buckets.__init__ = checks_options(Buckets.__init__)  # type: ignore[method-assign]

SPECIALIZED_SIZES = 2
"""TorchDynamo always treats sizes below this one as constants."""


@dataclass(slots=True, eq=False, repr=False)
class Slot:
    """A count of tokens in a reservation, which compiled code advances by one token without reading a number.

    An `int` that a compiled function reads becomes a constant of the compiled code: the function is compiled again when
    the number differs, which for a count is at every token. Slots are linked instead. Code that adds one token goes
    from a slot to the `next` one, and all that it reads is the bucket.

    Attributes:
        length: tokens held.
        bucket: the smallest bucket that holds one token more, `None` at the end of the reservation.
        next: the slot after one token more, `None` at the end of the reservation.
    """

    length: int
    bucket: int | None
    next: "Slot | None"


class Slots:
    """All slots of a reservation. They are attributes, so that compiled code reaches one without seeing the others.

    Args:
        sizes: sizes of the buckets, the last one that of the reservation.
    """

    def __init__(self, sizes: tuple[int, ...]) -> None:
        slot = Slot(sizes[-1], None, None)
        slots = {str(slot.length): slot}
        for lower, size in reversed(list(zip((0, *sizes[:-1]), sizes, strict=True))):
            for length in range(size - 1, lower - 1, -1):
                slot = Slot(length, size, slot)
                slots[str(length)] = slot
        self.__dict__.update(slots)
        self.first, self.sizes = slot, sizes

    def __reduce__(self) -> tuple[Any, ...]:
        return slots_of, (self.sizes,)

    def at(self, length: int) -> Slot:
        """The slot of `length` tokens."""
        # Not `str`, which TorchDynamo does not know for a number that it has found out to be constant.
        slot: Slot = getattr(self, f"{length}")
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


class MaskMode:
    """Facts on which all layers of a cache agree, because the masks of all layers are made alike.

    Args:
        compiled: whether eager code reads buckets too, for masks that are passed to compiled code. `None` if it does
            unless the states are on a CPU.

    Attributes:
        device: device of the states, `None` before the first ones.
        recording: whether the cache records tokens for a rollback.
        mixed: whether the layers cannot share masks of a bucket, because some are offloaded, not static, or of other
            sizes.
    """

    def __init__(self, compiled: bool | None = False) -> None:
        self.compiled = compiled
        self.device: torch.device | None = None
        self.recording = False
        self.mixed = False

    @property
    def is_compiled(self) -> bool:
        """Whether eager code reads buckets too."""
        if self.compiled is None:
            return self.device is None or self.device.type != "cpu"
        return self.compiled

    @property
    def compileable(self) -> bool:
        """Whether the forward pass around the cache may be compiled."""
        # What is recorded for a rollback does not fit a window's bucket, and a layer that grows has no buckets.
        if self.recording or self.mixed:
            return False
        # Read at every step of a layer: without a further call if there is no accelerator.
        compiled = self.is_compiled if self.compiled is None else self.compiled
        return compiled or torch.compiler.is_compiling()

    @property
    def uses_buckets(self) -> bool:
        """Whether a mask that is made now has the size of a bucket."""
        # Eager code concatenates states that autograd follows, so they are in no bucket.
        return self.compileable and (torch.compiler.is_compiling() or not torch.is_grad_enabled())


class MaskExtent:
    """Remembers whether the mask of a forward pass covers the held tokens or a bucket, so that updates return the same.

    Eager code reads the held tokens: one query then needs no mask, and no empty slot is read. Compiled code reads a
    bucket, whose size stays the same for many tokens. A mask may be made outside of the compiled code that uses it, or
    the reverse, so the mask decides: its size is chosen first, and the update follows. Layers that share a mask share
    a `MaskExtent`.

    Attributes:
        mode: what all layers of the cache agree on.
        asked_at: the slot of the first token that the last mask was asked for.
        bucket_of: the same slot if its bucket was chosen, `None` if the held tokens were.
    """

    def __init__(self, mode: MaskMode | None = None) -> None:
        self.mode = MaskMode() if mode is None else mode
        self.asked_at: Slot | None = None
        self.bucket_of: Slot | None = None

    def choose(self, slot: Slot, is_step: bool) -> None:
        """Choose the bucket of a slot if the mode uses buckets and a single token goes there, else the held tokens."""
        self.asked_at = slot
        self.bucket_of = slot if is_step and self.mode.uses_buckets else None

    def forget(self) -> None:
        """Forget the choice, because the tokens that it was made for have changed."""
        self.asked_at = self.bucket_of = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "asked_at": None, "bucket_of": None}
