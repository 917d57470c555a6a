"""Bucket sizes: how much of a static reservation compiled attention reads."""

import math
from dataclasses import dataclass
from typing import Any

from typing_extensions import Self

from kvlayers.errors import OptionError
from kvlayers.stores.description import Fact, Facts

ALIGNMENT = 8
"""Bucket sizes are multiples of this many tokens, as attention kernels require of a mask's rows."""


LARGEST_FACTOR = 2**20
"""The largest factor: above it there is only one bucket in any case."""


@dataclass(frozen=True, slots=True)
class Buckets:
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

    minimum: int = 256
    factor: float = 2.0

    def __post_init__(self) -> None:
        if not isinstance(self.minimum, int) or isinstance(self.minimum, bool) or self.minimum < 1:
            raise OptionError(f"`minimum` of Buckets must be at least 1 token, got {self.minimum!r}.")
        if not isinstance(self.factor, int | float) or not 1 < self.factor <= LARGEST_FACTOR:
            raise OptionError(
                f"`factor` of Buckets must be above 1 and at most {LARGEST_FACTOR:,}, got {self.factor!r}."
            )

    def facts(self) -> dict[str, Fact]:
        """The arguments as plain facts."""
        return {"smallest_bucket": self.minimum, "bucket_factor": self.factor}

    @classmethod
    def from_facts(cls, facts: Facts) -> Self:
        """The buckets with these `facts`, which may contain other facts too."""
        given: Any = facts
        return cls(given["smallest_bucket"], given["bucket_factor"])

    def sizes(self, capacity: int, whole_from: int | None = None) -> tuple[int, ...]:
        """Sizes of the buckets of a reservation of `capacity` tokens, smallest first.

        Args:
            capacity: tokens reserved, the last size.
            whole_from: a bucket of this many tokens or more is of no use, except the last; `None` for `capacity`.

        Raises:
            OptionError: `capacity` is not a positive number of tokens.
        """
        if not isinstance(capacity, int) or capacity < 1:
            raise OptionError(f"`capacity` must be at least 1 token, got {capacity!r}.")
        sizes, size = [], self.minimum
        while size < (capacity if whole_from is None else min(whole_from, capacity)):
            sizes.append(size)
            size = self.after(size)
        return (*sizes, capacity)

    def after(self, size: int) -> int:
        """The size that follows `size`."""
        return max(math.ceil(size * self.factor / ALIGNMENT), size // ALIGNMENT + 1) * ALIGNMENT
