"""Free memory of a device."""

import torch

from kvlayers.errors import OptionError


def free_memory(device: torch.device) -> int:
    """Bytes that tensors on a device can still take: free memory, and memory that torch has reserved and not used.

    Raises:
        OptionError: torch does not report the free memory of such a device.
    """
    if device.type == "cpu":
        # Late, as nothing else needs it.
        import psutil

        return int(psutil.virtual_memory().available)
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(free) + kept
    if device.type == "xpu":
        free, _ = torch.xpu.mem_get_info(device)
        kept = torch.xpu.memory_reserved(device) - torch.xpu.memory_allocated(device)
        return int(free) + kept
    if device.type == "mps":
        return int(torch.mps.recommended_max_memory() - torch.mps.current_allocated_memory())
    raise OptionError(
        f"torch reports the free memory of cpu, cuda, xpu and mps, but not of {device}: pass `memory`, in bytes, or "
        "name a cache."
    )
