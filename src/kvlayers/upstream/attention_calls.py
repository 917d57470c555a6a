"""Which attention implementation of transformers is running."""

import sys
from types import FrameType

from torch import nn

# Transformers 5 spells it PreTrainedConfig, and keeps this name as well.
from transformers import PretrainedConfig


def running_attention_implementation() -> str | None:
    """The `attn_implementation` of the model's layer that is being called, `None` outside of a model's layers.

    It reads the frames of the calls that are running, so it is for rare events.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module):
            config = getattr(owner, "config", None)
            if isinstance(config, PretrainedConfig):
                name: str | None = config._attn_implementation
                return name
        frame = frame.f_back
    return None
