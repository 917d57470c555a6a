"""What a cache is told about offloading."""

import os
from dataclasses import dataclass
from typing import Any

from typing_extensions import Self

from kvlayers.errors import OptionError
from kvlayers.offload.storage import DiskMemory, HomeMemory, HostMemory

TIERS = ("cpu", "disk")


@dataclass(frozen=True, slots=True)
class Offloading:
    """Where states are held between updates.

    Args:
        only_non_sliding: leave layers that attend within a window on the device: they are small.
        offload_device: "cpu" for the host's memory, "disk" for files.
        offload_directory: where the files are made, for "disk".

    Raises:
        OptionError: no such device, or a directory without "disk", or none with it, or one that cannot be written to.
    """

    only_non_sliding: bool = False
    offload_device: str = "cpu"
    offload_directory: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        # A torch.device, as transformers 4 took one, has its name.
        object.__setattr__(self, "offload_device", str(self.offload_device))
        if self.offload_device not in TIERS:
            raise OptionError(
                f"expected offload_device to be one of {', '.join(map(repr, TIERS))}, but saw {self.offload_device!r}."
            )
        if (self.offload_device == "disk") != (self.offload_directory is not None):
            raise OptionError(
                "expected offload_directory together with offload_device='disk', but saw "
                f"offload_device={self.offload_device!r} and offload_directory={self.offload_directory!r}: pass both, "
                "or neither."
            )

    @classmethod
    def from_options(
        cls,
        offloading: bool,
        offload_only_non_sliding: bool,
        offload_device: str,
        offload_directory: str | os.PathLike[str] | None,
    ) -> Self | None:
        """The options of a cache as one value, `None` if nothing is offloaded.

        Raises:
            OptionError: as `Offloading`, or a directory without offloading.
        """
        placement = cls(offload_only_non_sliding, offload_device, offload_directory)
        if placement.offload_directory is not None and not offloading:
            raise OptionError("expected offloading=True with offload_device='disk', but saw False.")
        return placement if offloading else None

    def options(self) -> dict[str, Any]:
        """The options of a cache that this value was made of."""
        return {
            "offloading": True,
            "offload_only_non_sliding": self.only_non_sliding,
            "offload_device": self.offload_device,
            "offload_directory": self.offload_directory,
        }

    def memory(self) -> HomeMemory:
        """The memory that this is."""
        return HostMemory() if self.offload_directory is None else DiskMemory(self.offload_directory)
