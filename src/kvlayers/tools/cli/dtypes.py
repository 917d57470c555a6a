"""Dtypes by their names on the command line."""

from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


class Dtype(str, Enum):
    """Dtype of the weights and the states."""

    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"

    @property
    def name_or_none(self) -> str | None:
        """The name, `None` for `auto`: the caller then takes the dtype of the config."""
        return None if self is Dtype.auto else self.value

    def on(self, device: "torch.device") -> "torch.dtype":
        """The dtype; `auto` is bfloat16, but float32 on a CPU without bfloat16 instructions."""
        # Imported late: torch takes seconds to import, and `--help` needs only the names.
        import torch

        from kvlayers.utils.options import checked_dtype

        if self is Dtype.auto:
            slow = device.type == "cpu" and not torch.cpu._is_avx512_bf16_supported()
            return torch.float32 if slow else torch.bfloat16
        return checked_dtype(self.value)
