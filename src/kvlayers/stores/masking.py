"""What attention reads of a reservation: the tokens that are there, or the bucket that they are in."""

from typing import Any

import torch

from kvlayers.stores.buckets import Slot


class MaskMode:
    """What the layers of a cache agree on, whatever their kinds: masks of all of them are made alike.

    Args:
        compiled: whether eager code reads buckets too, for masks that compiled code is given.
    """

    def __init__(self, compiled: bool = False) -> None:
        self.compiled = compiled
        self.recording = False
        self.mixed = False

    @property
    def compileable(self) -> bool:
        """Whether the forward pass around the cache may be compiled."""
        # What is recorded for a rollback is more than a window's bucket, and a layer that grows has none.
        if self.recording or self.mixed:
            return False
        return self.compiled or torch.compiler.is_compiling()

    @property
    def buckets_now(self) -> bool:
        """Whether a mask that is made now is one of a bucket."""
        # In eager code, states that autograd follows are concatenated.
        return self.compileable and (torch.compiler.is_compiling() or not torch.is_grad_enabled())


class MaskExtent:
    """Which of the two the mask of a forward pass was made for, so that updates return the same.

    Eager code reads the tokens that are there: no mask is needed for one query, and no slot is read over. Compiled code
    reads a bucket, whose size stays the same for many tokens. A mask may be made outside of the compiled code that
    uses it, and the other way round, so it is the mask that decides: `announce` is asked when sizes are told to it, and
    an update follows. Layers that share a mask share a reading.
    """

    def __init__(self, mode: MaskMode | None = None) -> None:
        self.mode = MaskMode() if mode is None else mode
        self._announced: Slot | None = None

    def announce(self, place: Slot | None) -> None:
        """Settle what the next update returns: the bucket, if it is that of a layer at `place`."""
        self._announced = place if place is not None and self.mode.buckets_now else None

    def is_of_bucket(self, place: Slot) -> bool:
        """Whether the update of a layer at `place` returns the bucket."""
        return self._announced is place

    def forget(self) -> None:
        """Take back what was announced, as the tokens that it was about have changed."""
        self._announced = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_announced": None}
