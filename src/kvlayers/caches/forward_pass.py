"""What tells a forward pass that was interrupted: some layers of a cache have seen its tokens, and others have not."""

import itertools
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import FrameType

import torch

from kvlayers.errors import InterruptedPassError

NO_PASS = sys.maxsize
"""In the place of a layer's index: no forward pass is under way, so that the next update begins one."""

CALLERS = 12
"""Frames between an update and the module that calls it, at most: the helpers of models and the wrappers of hooks."""


@dataclass(frozen=True, slots=True)
class PassStart:
    """Where a forward pass began.

    Attributes:
        layer: index of the first layer that it has updated.
        length: tokens that this layer had seen before, `None` where it does not know.
        tokens: new tokens of the pass.
        in_module: whether a module updates the cache, rather than a loop over `update`, which may do as it likes.
        module: identity of the outermost module that was being called, `None` where that was not needed.
    """

    layer: int
    length: int | None
    tokens: int
    in_module: bool
    module: int | None


def _module_calls(most: int) -> Iterator[FrameType]:
    """Calls of modules that this code is within, the innermost first, of `most` frames."""
    code = torch.nn.Module._call_impl.__code__
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and most:
        if frame.f_code is code:
            yield frame
        frame, most = frame.f_back, most - 1


def in_module(most: int = CALLERS) -> bool:
    """Whether a module is being called, within so many frames."""
    return next(_module_calls(most), None) is not None


def outermost_module() -> int | None:
    """Identity of the outermost module that is being called: the model, where it is a whole forward pass."""
    *_, outermost = (None, *_module_calls(NO_PASS))
    return None if outermost is None else id(outermost.f_locals.get("self"))


def interrupted(lengths: Sequence[int | None], recurrent: bool) -> InterruptedPassError:
    """The error for layers that have seen so many tokens each, `None` where a layer does not know."""
    known = [(length, index) for index, length in enumerate(lengths) if length is not None]
    groups = [(length, [index for _, index in group]) for length, group in itertools.groupby(known, lambda one: one[0])]
    seen = ", ".join(
        f"{f'layers {indices[0]} to' if len(indices) > 1 else 'layer'} {indices[-1]}: {length}"
        for length, indices in groups
    )
    shortest = min(length for length, _ in known)
    repair = "reset() the cache, and pass all tokens again"
    if shortest:
        method = "truncate" if recurrent else "crop"
        repair = f"{method}({shortest}) the cache and pass the tokens from there on again, or reset() it"
    return InterruptedPassError(
        f"expected layers that have seen the same tokens, but saw a cache whose last forward pass was interrupted "
        f"(tokens seen by {seen}): {repair}."
    )
