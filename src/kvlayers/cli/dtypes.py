"""Dtypes as they are named on the command line."""

from enum import Enum

import torch


class Dtype(str, Enum):
    """What the weights and the states are kept in."""

    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"

    @property
    def of_torch(self) -> torch.dtype:
        """The dtype of that name, which `auto` is not."""
        dtype: torch.dtype = getattr(torch, self.value)
        return dtype

    def on(self, device: torch.device) -> torch.dtype:
        """The dtype; `auto` is bfloat16, but float32 on a CPU that has no instructions for less."""
        if self is Dtype.auto:
            slow = device.type == "cpu" and not torch.cpu._is_avx512_bf16_supported()
            return torch.float32 if slow else torch.bfloat16
        return self.of_torch
