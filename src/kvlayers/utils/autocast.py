"""Arithmetic of our own keeps the dtype that it is written in, whatever autocast is on around it."""

import contextlib

import torch


def without_autocast(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Context in which matrix products on a device give what their operands say."""
    if not torch.is_autocast_enabled(device.type):
        return contextlib.nullcontext()
    return torch.autocast(device.type, enabled=False)
