"""Warnings that point at the line to change, such as that a name is old."""

import os
import sys
import warnings
from types import FrameType

import torch
import transformers

_PASSED_THROUGH = tuple(os.path.dirname(str(module)) + os.sep for module in (__file__, torch.__file__))
"""Folders of code that stands between a user's line and the old name that it uses."""


_GENERATE_TOO = (*_PASSED_THROUGH, os.path.dirname(str(transformers.__file__)) + os.sep)
"""The same, with the code of transformers that calls kvlayers."""

_IMPORTS = "<frozen importlib."
"""What `from module import name` asks for the name with, before it asks at the line itself."""


def warn_of_old_use(old: str, instead: str) -> None:
    """Say that `old` is old, at the line of the caller.

    Args:
        old: what the line does.
        instead: what it should do.
    """
    warn_at_caller(f"{old} is from transformers 4: {instead}.", DeprecationWarning)


def warn_at_caller(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the line of the caller outside of kvlayers and torch. Nothing while torch traces."""
    if torch.compiler.is_compiling():
        return
    frame, level = _first_outside(_PASSED_THROUGH)
    if not frame.f_code.co_filename.startswith(_IMPORTS):
        warnings.warn(message, category, stacklevel=level)


def warn_the_caller(message: str, category: type[Warning]) -> None:
    """Warn at the line of the caller outside of kvlayers, transformers and torch."""
    warnings.warn(message, category, stacklevel=_first_outside(_GENERATE_TOO)[1])


def _first_outside(folders: tuple[str, ...]) -> tuple[FrameType, int]:
    """The nearest frame of code outside of some folders, and its `stacklevel` for the function that called this one."""
    frame, level = sys._getframe(2), 2
    while frame.f_back is not None and frame.f_code.co_filename.startswith(folders):
        frame, level = frame.f_back, level + 1
    return frame, level
