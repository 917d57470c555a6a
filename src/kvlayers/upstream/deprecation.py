"""Warnings that point at the line to change, such as that a name is old."""

import os
import sys
import warnings

import torch
import transformers

_KVLAYERS = os.path.dirname(os.path.dirname(__file__)) + os.sep

_LIBRARIES = (_KVLAYERS, os.path.dirname(str(torch.__file__)) + os.sep)
"""Folders of code that stands between a line that uses an old name, of a user or of transformers, and the name."""

_CALLERS_TOO = (*_LIBRARIES, os.path.dirname(str(transformers.__file__)) + os.sep)
"""The same, with transformers, which calls kvlayers for a user's line."""

_IMPORTS = "<frozen importlib."
"""What `from module import name` asks for the name with, before it asks at the line itself."""


def warn_of_old_use(old: str, instead: str) -> None:
    """Say that `old` is old, at the line that uses it, of transformers as well. Nothing while torch traces.

    Args:
        old: what the line does.
        instead: what it should do.
    """
    _warn(f"{old} is from transformers 4: {instead}.", DeprecationWarning, _LIBRARIES)


def warn_the_caller(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the line of the caller outside of kvlayers, transformers and torch. Nothing while torch traces."""
    _warn(message, category, _CALLERS_TOO)


def _warn(message: str, category: type[Warning], folders: tuple[str, ...]) -> None:
    """Warn at the nearest line of code that is not in one of `folders`."""
    if torch.compiler.is_compiling():
        return
    frame, level = sys._getframe(2), 3
    while frame.f_back is not None and frame.f_code.co_filename.startswith(folders):
        frame, level = frame.f_back, level + 1
    if not frame.f_code.co_filename.startswith(_IMPORTS):
        warnings.warn(message, category, stacklevel=level)
