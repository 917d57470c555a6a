"""How much of a reservation attention sees: the smallest of a few sizes that holds the tokens."""

import functools
import gc
import math
import threading
from dataclasses import dataclass
from typing import Any

from typing_extensions import Self

from kvlayers.errors import OptionError
from kvlayers.stores.description import Fact, Facts

ALIGNMENT = 8
"""Sizes are multiples of so many tokens, which attention kernels want of a mask's rows."""


LARGEST_FACTOR = 2**20
"""Above this one there is a single bucket anyway."""


@dataclass(frozen=True, slots=True)
class Buckets:
    """Sizes that grow geometrically, up to the reservation itself.

    A larger factor means fewer sizes, each compiled once, and more slots without a token that attention reads over.

    Args:
        minimum: tokens in the smallest bucket.
        factor: how many times as large as a bucket the next one is.

    Raises:
        OptionError: a minimum below one token, or a factor that does not grow.

    Example:
        >>> import kvlayers
        >>> kvlayers.Buckets().sizes(4096)
        (256, 512, 1024, 2048, 4096)
    """

    minimum: int = 256
    factor: float = 2.0

    def __post_init__(self) -> None:
        if not isinstance(self.minimum, int) or isinstance(self.minimum, bool) or self.minimum < 1:
            raise OptionError(f"expected a smallest bucket of at least one token, but saw minimum={self.minimum!r}.")
        if not isinstance(self.factor, int | float) or not 1 < self.factor <= LARGEST_FACTOR:
            raise OptionError(
                f"expected buckets that grow, by a factor above 1 and at most {LARGEST_FACTOR:,}, but saw "
                f"factor={self.factor!r}."
            )

    def facts(self) -> dict[str, Fact]:
        """The sizes by plain facts."""
        return {"smallest_bucket": self.minimum, "bucket_factor": self.factor}

    @classmethod
    def from_facts(cls, facts: Facts) -> Self:
        """The sizes that have said `facts` of themselves; there may be other facts among them."""
        given: Any = facts
        return cls(given["smallest_bucket"], given["bucket_factor"])

    def sizes(self, capacity: int, whole_from: int | None = None) -> tuple[int, ...]:
        """Sizes of the buckets of a reservation of `capacity` tokens, the smallest first.

        Args:
            capacity: tokens reserved, the last size.
            whole_from: tokens from which on no smaller size is of use, `None` for `capacity`.

        Raises:
            OptionError: a capacity that is no number of tokens.
        """
        if not isinstance(capacity, int) or capacity < 1:
            raise OptionError(f"expected a capacity of at least one token, but saw {capacity!r}.")
        sizes, size = [], self.minimum
        while size < (capacity if whole_from is None else min(whole_from, capacity)):
            sizes.append(size)
            size = self.after(size)
        return (*sizes, capacity)

    def after(self, size: int) -> int:
        """The size that follows `size`."""
        return max(math.ceil(size * self.factor / ALIGNMENT), size // ALIGNMENT + 1) * ALIGNMENT


class Slot:
    """A count of tokens in a reservation, in a form that compiled code takes a step from without reading a number.

    Where a compiled function reads an `int`, that number becomes part of what is compiled, and the function is compiled
    again when it differs: for a count, at every token. Slots are linked instead: code that adds one token goes from a
    place to the `next`, and all that it reads is the bucket.

    Attributes:
        length: tokens held.
        bucket: the smallest bucket that holds one token more, 0 at the end.
        next: the place after one token more, `None` at the end of the reservation.
    """

    __slots__ = ("bucket", "length", "next", "sizes")

    def __init__(self, length: int, bucket: int, following: "Slot | None", sizes: tuple[int, ...]) -> None:
        self.length = length
        self.bucket = bucket
        self.next = following
        self.sizes = sizes

    def __reduce__(self) -> tuple[Any, ...]:
        return place_of, (self.sizes, self.length)

    def __deepcopy__(self, memo: dict[int, object]) -> "Slot":
        return self


class Slots:
    """Every place in a reservation. They are attributes, so that compiled code reaches one without seeing the others.

    Args:
        sizes: sizes of the buckets, the last one that of the reservation.
    """

    def __init__(self, sizes: tuple[int, ...]) -> None:
        place = Slot(sizes[-1], 0, None, sizes)
        places = {str(place.length): place}
        bounds = (0, *sizes)
        for lower, size in reversed(list(zip(bounds[:-1], sizes, strict=True))):
            for length in range(size - 1, lower - 1, -1):
                place = Slot(length, size, place, sizes)
                places[str(length)] = place
        self.__dict__.update(places)
        self.first = place

    def __reduce__(self) -> tuple[Any, ...]:
        return places, (self.first.sizes,)

    def __deepcopy__(self, memo: dict[int, object]) -> "Slots":
        return self

    def at(self, length: int) -> Slot:
        """The place of so many tokens."""
        place: Slot = getattr(self, str(length))
        return place


_building = threading.Lock()


def places(sizes: tuple[int, ...]) -> Slots:
    """The places of a reservation with buckets of these sizes, shared by all layers that have the same."""
    # Slots are told apart by identity, so two threads must not both make them.
    with _building:
        return _places(sizes)


@functools.lru_cache(maxsize=8)
def _places(sizes: tuple[int, ...]) -> Slots:
    # So many small objects at once set off collections of everything that the process holds: ten times the work itself.
    collecting = gc.isenabled()
    gc.disable()
    try:
        return Slots(sizes)
    finally:
        if collecting:
            gc.enable()


def place_of(sizes: tuple[int, ...], length: int) -> Slot:
    """One place of a reservation."""
    return places(sizes).at(length)
