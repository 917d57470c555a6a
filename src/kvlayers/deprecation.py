"""Warnings that point at the line to change, such as that a name is old."""

import os
import sys
import warnings

import torch

_PASSED_THROUGH = tuple(os.path.dirname(str(module)) + os.sep for module in (__file__, torch.__file__))
"""Folders of code that stands between a user's line and the old name that it uses."""


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
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PASSED_THROUGH):
        frame, level = frame.f_back, level + 1
    if not frame.f_code.co_filename.startswith(_IMPORTS):
        warnings.warn(message, category, stacklevel=level)
