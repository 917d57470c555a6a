"""Notices a forward pass that was interrupted: some layers of a cache have seen its tokens, and others have not."""

import itertools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from typing_extensions import Self

from kvlayers.errors import InterruptedPassError
from kvlayers.layers.operations import LayerOperations
from kvlayers.utils import module_calls
from kvlayers.utils.module_calls import in_module, outermost_module

NO_PASS = sys.maxsize
"""Stands for a layer's index when no forward pass is under way, so that the next update begins one."""


class Followed(Protocol):
    """What a follower needs to know of a cache."""

    layers: list[Any]
    layer_class_to_replicate: Callable[[], Any] | None

    def adapted_layer(self, layer_idx: int) -> LayerOperations:
        """The layer, with the operations of kvlayers' layers."""

    def adapted_layers(self) -> Sequence[LayerOperations]:
        """All layers, with the operations of kvlayers' layers."""


# Not frozen: it is made at every pass, and the initialiser of a frozen one takes three times as long.
@dataclass(slots=True)
class PassStart:
    """Where a forward pass began.

    Attributes:
        layer: index of the first layer that it has updated.
        length: tokens that this layer had seen before, `None` if it does not know.
        tokens: new tokens of the pass.
        in_module: whether a module updates the cache, rather than a loop over `update`, which may do as it likes.
        module: identity of the outermost module that was being called, `None` if it was not needed.
    """

    layer: int
    length: int | None
    tokens: int
    in_module: bool
    module: int | None


class ForwardPassFollower:
    """Follows the forward passes of one cache from layer to layer.

    A cache compares `at` and `in_step` with the index of a layer before each update, and calls `follow` only if a pass
    begins there or goes further than the pass before: usually once a pass.

    Attributes:
        at: index of the layer that the newest forward pass has updated last.
        in_step: index up to which layers have seen what the first layer has seen, apart from the pass under way.
        began: where the newest forward pass began.
    """

    __slots__ = ("at", "began", "in_step")

    def __init__(self, at: int = NO_PASS, in_step: int = -1, began: PassStart | None = None) -> None:
        self.at = at
        self.in_step = in_step
        self.began = began

    def copy(self) -> Self:
        """A follower of a cache that goes on from the same place."""
        return type(self)(self.at, self.in_step, self.began)

    def follow(self, cache: Followed, layer_idx: int, tokens: int) -> None:
        """Note that a layer is about to be updated, if a pass begins there or goes further than the pass before.

        Models may leave out their last layers (early exit). So an interrupted pass shows only when such a layer is
        updated: it would have seen fewer tokens than the layers before it.

        Raises:
            InterruptedPassError: the layer has seen fewer tokens than the first layer of this pass.
        """
        layers = cache.layers
        if layer_idx <= self.at:
            self.in_step = min(self.in_step, self.at)
            is_in_module = in_module()
            # This pass can go further than the one before only if more layers exist, or can be made.
            may_go_on = self.in_step < len(layers) - 1 or cache.layer_class_to_replicate is not None
            module = outermost_module() if is_in_module and may_go_on else None
            self.began = PassStart(layer_idx, _seen_by(cache, layer_idx), tokens, is_in_module, module)
            if is_in_module and layer_idx < len(layers):
                _check_parts(cache.adapted_layer(layer_idx), tokens)
        if layer_idx > self.in_step:
            began = self.began
            if began is not None and began.module is not None and tokens == began.tokens:
                seen = _seen_by(cache, layer_idx)
                uneven = None not in (seen, began.length) and seen != began.length
                if uneven and outermost_module() == began.module:
                    raise _interrupted_cache(cache, layer_idx)
            self.in_step = layer_idx

    def check_in_step(self, cache: Followed) -> None:
        """Check that the newest forward pass went as far as the earlier ones.

        Within a module nothing is checked, as the pass may still be under way.

        Raises:
            InterruptedPassError: it ended before them.
        """
        began = self.began
        if began is None or not began.in_module or in_module(module_calls.ALL):
            return
        behind = any(_seen_by(cache, index) == began.length for index in range(self.at + 1, self.in_step + 1))
        if began.length is not None and behind and _seen_by(cache, began.layer) != began.length:
            raise _interrupted_cache(cache, self.in_step)

    def forget(self) -> None:
        """Take the next update for the beginning of a forward pass, and look at each layer if one was interrupted."""
        if self.at < self.in_step:
            self.in_step = -1
        self.at = NO_PASS


def interruption(cache: Followed) -> InterruptedPassError | None:
    """The error for layers that have seen different numbers of tokens, `None` if all have seen as many."""
    count = len(cache.layers)
    seen = {_seen_by(cache, index) for index in range(count)} - {None}
    return _interrupted_cache(cache, count - 1) if len(seen) > 1 else None


def _seen_by(cache: Followed, layer_idx: int) -> int | None:
    """Tokens that a layer has seen, `None` if it does not know, or if an accelerator would have to be waited for."""
    return cache.adapted_layer(layer_idx).length_on_host if layer_idx < len(cache.layers) else 0


def _interrupted_cache(cache: Followed, last: int) -> InterruptedPassError:
    # A layer that is made when it is needed may not exist yet.
    seen = [_seen_by(cache, index) for index in range(max(len(cache.layers), last + 1))]
    return _interrupted(seen, any(layer.is_recurrent for layer in cache.adapted_layers()))


def _check_parts(layer: LayerOperations, tokens: int) -> None:
    """Raise if a pass was interrupted between the two parts of its first layer. Either part may come first."""
    if len(layer.parts) == 1:
        return
    attended, recurrent = (part.length for part in layer.parts)
    if recurrent and recurrent not in (attended, (attended or 0) + tokens):
        raise _interrupted([attended, recurrent], recurrent=True)


def _interrupted(lengths: Sequence[int | None], recurrent: bool) -> InterruptedPassError:
    """The error for layers that have seen these numbers of tokens, `None` for a layer that does not know."""
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
        "expected all layers to have seen the same tokens, but the last forward pass of this cache was interrupted "
        f"(tokens seen by {seen}): {repair}."
    )
