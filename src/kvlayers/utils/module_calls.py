"""Which modules are being called, by the frames of their calls.

Without `install()` nothing else tells an update by a model from one by a loop of a user's own.
"""

import sys
from collections.abc import Iterator
from types import FrameType

import torch

ALL = sys.maxsize

CALLERS = 12
"""The most frames between an update and the module that calls it: helpers of models, and wrappers of hooks."""


def _module_calls(most: int) -> Iterator[FrameType]:
    """Calls of modules that this code is within, the innermost first, among the nearest `most` frames."""
    code = torch.nn.Module._call_impl.__code__
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and most:
        if frame.f_code is code:
            yield frame
        frame, most = frame.f_back, most - 1


def in_module(most: int = CALLERS) -> bool:
    """Whether a module is being called, among the nearest `most` frames."""
    return next(_module_calls(most), None) is not None


def outermost_module() -> int | None:
    """Identity of the outermost module that is being called: the model, if it is a whole forward pass."""
    *_, outermost = (None, *_module_calls(ALL))
    return None if outermost is None else id(outermost.f_locals.get("self"))
