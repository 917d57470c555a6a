"""Whether attention reads the held tokens of a static reservation, or the whole bucket that they are in."""

from typing import Any

import torch

from kvlayers.stores.slots import Slot


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
    """

    def __init__(self, mode: MaskMode | None = None) -> None:
        self.mode = MaskMode() if mode is None else mode
        self._slot: Slot | None = None
        self._asked_at: Slot | None = None

    def choose(self, slot: Slot, is_step: bool) -> None:
        """Choose the bucket of a slot if the mode uses buckets and a single token goes there, else the held tokens."""
        self._asked_at = slot
        self._slot = slot if is_step and self.mode.uses_buckets else None

    def was_asked_at(self, slot: Slot) -> bool:
        """Whether a mask was asked for, of tokens from this slot on."""
        return self._asked_at is slot

    def is_bucket_of(self, slot: Slot) -> bool:
        """Whether the bucket of `slot` was chosen."""
        return self._slot is slot

    def forget(self) -> None:
        """Forget the choice, because the tokens that it was made for have changed."""
        self._slot = self._asked_at = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_slot": None, "_asked_at": None}
