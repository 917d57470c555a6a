"""Keeps kvlayers' own arithmetic in the dtype it is written in, even under autocast."""

import contextlib

import torch


def without_autocast(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """A context in which matrix products on a device have the dtype of their operands."""
    if not torch.is_autocast_enabled(device.type):
        return contextlib.nullcontext()
    return torch.autocast(device.type, enabled=False)
