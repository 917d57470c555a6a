"""Who calls kvlayers, by the frames of running calls: the line that a user should change, and the layer of a model."""

import os
import sys
import warnings
from types import FrameType

import torch
import transformers
from torch import nn

# Transformers 5 spells it PreTrainedConfig, and keeps this name as well.
from transformers import PretrainedConfig

from kvlayers.upstream.model_types import attention_implementation

_KVLAYERS = os.path.dirname(os.path.dirname(__file__)) + os.sep

_LIBRARIES = (_KVLAYERS, os.path.dirname(str(torch.__file__)) + os.sep)
"""Folders of code that stands between a line that uses an old name, of a user or of transformers, and the name."""

_CALLERS_TOO = (*_LIBRARIES, os.path.dirname(str(transformers.__file__)) + os.sep)
"""The same, with transformers, which calls kvlayers for a user's line."""

_IMPORTS = "<frozen importlib."
"""File name of the code behind `from module import name`. It looks up the name once before the line itself does."""


def warn_of_old_use(old: str, instead: str) -> None:
    """Warn that `old` is deprecated, at the line that uses it, which may be one of transformers. Silent under tracing.

    Args:
        old: the name or usage of transformers 4.
        instead: what to write instead.
    """
    _warn(f"{old} is from transformers 4: {instead}.", DeprecationWarning, _LIBRARIES)


def warn_the_caller(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the calling line outside kvlayers, transformers and torch. Silent while torch traces."""
    _warn(message, category, _CALLERS_TOO)


def _warn(message: str, category: type[Warning], folders: tuple[str, ...]) -> None:
    """Warn at the nearest calling line that is not in one of `folders`."""
    if torch.compiler.is_compiling():
        return
    frame, level = sys._getframe(2), 3
    while frame.f_back is not None and frame.f_code.co_filename.startswith(folders):
        frame, level = frame.f_back, level + 1
    if not frame.f_code.co_filename.startswith(_IMPORTS):
        warnings.warn(message, category, stacklevel=level)


def running_attention_implementation() -> str | None:
    """The `attn_implementation` of the model's layer that is being called, `None` outside of a model's layers.

    It reads the frames of the calls that are running, so it is for rare events.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        config = getattr(owner, "config", None) if isinstance(owner, nn.Module) else None
        if isinstance(config, PretrainedConfig):
            return attention_implementation(config)
        frame = frame.f_back
    return None
