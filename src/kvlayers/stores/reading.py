"""What attention reads of a reservation: the tokens that are there, or the bucket that they are in."""

import torch

from .buckets import Place


class Reading:
    """Which of the two the masks of a forward pass were made for, so that updates return the same.

    Eager code reads the tokens that are there: no mask is needed for one query, and no slot is read over. Compiled code
    reads a bucket, whose size stays the same for many tokens. A mask may be made outside of the compiled code that
    uses it, and the other way round, so it is the mask that decides: `announce` is asked when sizes are told to it, and
    an update follows. The layers of a cache share one reading, since a mask is made for one of them and used by all.

    Args:
        compiled: whether eager code reads buckets too, for masks that compiled code is given.
    """

    def __init__(self, compiled: bool = False) -> None:
        self.compiled = compiled
        self._announced: Place | None = None

    @property
    def buckets_now(self) -> bool:
        """Whether a mask that is made now is one of a bucket."""
        # Where autograd follows the states they are concatenated, and there is no bucket.
        return torch.compiler.is_compiling() or (self.compiled and not torch.is_grad_enabled())

    def announce(self, place: Place | None) -> bool:
        """Settle what the update of a layer at `place` returns; whether it is the bucket. `None` is no such place."""
        bucket = place is not None and self.buckets_now
        self._announced = place if bucket else None
        return bucket

    def is_of_bucket(self, place: Place) -> bool:
        """Whether the update of a layer at `place` returns the bucket."""
        return self._announced is place or (self.compiled and not torch.is_grad_enabled())
