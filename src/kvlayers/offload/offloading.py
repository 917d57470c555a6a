"""The options of a cache that say where its states are between updates."""

import os
from dataclasses import dataclass
from typing import Any

from typing_extensions import Self

from kvlayers.errors import OptionError
from kvlayers.offload.prefetcher import Prefetcher
from kvlayers.offload.storage import TIERS, DiskMemory, HostMemory


@dataclass(frozen=True, slots=True)
class Offloading:
    """Where a cache holds its states between updates.

    Args:
        only_non_sliding: leave layers with a sliding window on the device, because they are small.
        offload_device: "cpu" for the host's memory, "disk" for files.
        offload_directory: directory for the files, for "disk".

    Raises:
        OptionError: `offload_device` is unknown; `offload_directory` is given without "disk", or "disk" without it; or
            the directory cannot be written to.
    """

    only_non_sliding: bool = False
    offload_device: str = "cpu"
    offload_directory: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        # transformers 4 took a torch.device, whose text is its name.
        object.__setattr__(self, "offload_device", str(self.offload_device))
        if self.offload_device not in TIERS:
            raise OptionError(
                f"`offload_device` must be one of {', '.join(map(repr, TIERS))}, got {self.offload_device!r}: pass one "
                "of them (to `offload`, as its `device`)."
            )
        if (self.offload_device == "disk") != (self.offload_directory is not None):
            raise OptionError(
                f"`offload_directory` belongs to the device 'disk', got the device {self.offload_device!r} and the "
                f"directory {self.offload_directory!r}: pass both, or neither (to `offload`, as `device` and "
                "`directory`)."
            )

    @classmethod
    def from_options(
        cls,
        offloading: bool,
        offload_only_non_sliding: bool,
        offload_device: str,
        offload_directory: str | os.PathLike[str] | None,
    ) -> Self | None:
        """The offloading options of a cache as one value, `None` if nothing is offloaded.

        Raises:
            OptionError: as for `Offloading`, or a directory is given without offloading, or a flag is not a bool.
        """
        for name, given in (("offloading", offloading), ("offload_only_non_sliding", offload_only_non_sliding)):
            if not isinstance(given, bool):
                raise OptionError(f"`{name}` must be True or False, got {given!r}: pass one of them.")
        placement = cls(offload_only_non_sliding, offload_device, offload_directory)
        if placement.offload_directory is not None and not offloading:
            raise OptionError("`offloading` must be True with offload_device='disk', got False: pass offloading=True.")
        return placement if offloading else None

    def options(self) -> dict[str, Any]:
        """The options of a cache from which this value is made."""
        return {
            "offloading": True,
            "offload_only_non_sliding": self.only_non_sliding,
            "offload_device": self.offload_device,
            "offload_directory": self.offload_directory,
        }

    def prefetcher(self) -> Prefetcher:
        """A prefetcher that holds states in the memory that these options choose."""
        return Prefetcher(HostMemory() if self.offload_directory is None else DiskMemory(self.offload_directory))
