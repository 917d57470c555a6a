"""Follows the forward passes of a cache, and notices what goes wrong with them.

A pass may be interrupted, so that some layers have seen its tokens, and others have not. A prompt of `generate()` may
have no new tokens. A model that was written for an older version of transformers takes its cache by another name than
`generate()` passes it by: if it ignores arguments that it does not know, it decodes each token without those before it.
"""

import itertools
import sys
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from typing_extensions import Self

from kvlayers.core.arguments import check_can_follow
from kvlayers.core.buffer import form_of
from kvlayers.core.cache_layer import CacheLayer
from kvlayers.errors import InterruptedPassError, StateMismatchError, UnsupportedLayerError, UnusedCacheError
from kvlayers.upstream import cache_argument
from kvlayers.upstream.model_types import knows_pairs

ALL = sys.maxsize

CALLERS = 12
"""The most frames between an update and the module that calls it: helpers of models, and wrappers of hooks."""


CALLING = nn.Module._call_impl.__code__
"""The code that calls a module."""


def in_module(most: int = CALLERS) -> bool:
    """Whether a module is being called, among the nearest `most` frames."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and most:
        if frame.f_code is CALLING:
            return True
        frame, most = frame.f_back, most - 1
    return False


def outermost_module() -> int | None:
    """Identity of the outermost module that is being called: the model, if it is a whole forward pass."""
    module, frame = None, sys._getframe().f_back
    while frame is not None:
        if frame.f_code is CALLING:
            module = id(frame.f_locals.get("self"))
        frame = frame.f_back
    return module


NO_PASS = sys.maxsize
"""Stands for a layer's index when no forward pass is under way, so that the next update begins one."""


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


@dataclass(slots=True)
class ForwardPassFollower:
    """Follows the forward passes of one cache from layer to layer.

    A cache compares `at` and `in_step` with the index of a layer before each update, and calls `follow` only if a pass
    begins there or goes further than the pass before: usually once a pass.

    Attributes:
        at: index of the layer that the newest forward pass has updated last.
        in_step: index up to which layers have seen what the first layer has seen, apart from the pass under way.
        began: where the newest forward pass began.
        goes_on_with: dtype and device of states that can follow what layers hold, `None` if that is not known.
    """

    at: int = NO_PASS
    in_step: int = -1
    began: PassStart | None = None
    goes_on_with: tuple[torch.dtype, torch.device] | None = None

    def check_states(self, layer: CacheLayer, keys: Tensor, values: Tensor) -> None:
        """Check the dtype and the device of a pass where it begins, before any layer or budget changes.

        A store holds all tokens in the dtype that can represent both, and attention takes queries of no other dtype.

        Raises:
            StateMismatchError: attention could not read the held states beside the new ones.
        """
        # A layer names what are no keys and values, and a count on a device is not waited for.
        if layer.counts_on_device or not isinstance(values, Tensor) or not keys.dim() == values.dim() == 4:
            return
        is_known = True
        if length := layer.held_tokens:
            # Layers of transformers that have just packed all their tokens show tensors of one dimension.
            held = layer.forms or tuple(form_of(side) for side in layer.peek() if side is not None and side.dim() == 4)
            is_known = check_can_follow(form_of(keys), form_of(values), held, length)
        self.goes_on_with = (keys.dtype, keys.device) if is_known else None

    def follow(self, cache: Any, layer_idx: int, layer: CacheLayer | None, tokens: int) -> None:
        """Note that a layer is about to be updated, if a pass begins there or goes further than the pass before.

        Models may leave out their last layers (early exit). So an interrupted pass shows only when such a layer is
        updated: it would have seen fewer tokens than the layers before it.

        Args:
            cache: the cache.
            layer_idx: index of the layer.
            layer: the layer, `None` if it has not been made yet.
            tokens: new tokens of the pass.

        Raises:
            InterruptedPassError: the layer has seen fewer tokens than the first layer of this pass.
        """
        if layer_idx <= self.at:
            self.in_step = min(self.in_step, self.at)
            is_in_module = in_module()
            # This pass can go further than the one before only if more layers exist, or can be made.
            may_go_on = self.in_step < len(cache.layers) - 1 or cache.layer_class_to_replicate is not None
            module = outermost_module() if is_in_module and may_go_on else None
            length = 0 if layer is None else None if layer.counts_on_device else layer.length
            self.began = PassStart(layer_idx, length, tokens, is_in_module, module)
            if is_in_module and layer is not None:
                _check_parts(layer, tokens)
            # Now, as an interrupt may come as soon as the layer has changed.
            self.at = layer_idx
        if layer_idx > self.in_step:
            began = self.began
            if began is not None and began.module is not None and tokens == began.tokens:
                seen = _seen_by(cache, layer_idx)
                uneven = None not in (seen, began.length) and seen != began.length
                if uneven and outermost_module() == began.module:
                    raise _interrupted_cache(cache, layer_idx)
            self.in_step = layer_idx

    def check_in_step(self, cache: Any) -> None:
        """Check that the newest forward pass went as far as the earlier ones.

        Within a module nothing is checked, as the pass may still be under way.

        Raises:
            InterruptedPassError: it ended before them.
        """
        began = self.began
        if began is None or not began.in_module or in_module(ALL):
            return
        behind = any(_seen_by(cache, index) == began.length for index in range(self.at + 1, self.in_step + 1))
        if began.length is not None and behind and _seen_by(cache, began.layer) != began.length:
            raise _interrupted_cache(cache, self.in_step)

    def forget(self) -> None:
        """Take the next update for the beginning of a forward pass, and look at each layer if one was interrupted."""
        if self.at < self.in_step:
            self.in_step = -1
        self.at = NO_PASS


def interruption(cache: Any) -> InterruptedPassError | None:
    """The error for layers that have seen different numbers of tokens, `None` if all have seen as many."""
    count = len(cache.layers)
    seen = {_seen_by(cache, index) for index in range(count)} - {None}
    is_within = any(part.is_interrupted for part in cache.recurrent_parts())
    return _interrupted_cache(cache, count - 1) if len(seen) > 1 or is_within else None


def _seen_by(cache: Any, layer_idx: int) -> int | None:
    """Tokens that a layer has seen, `None` if it does not know, or if an accelerator would have to be waited for."""
    layer = cache._layer_at(layer_idx)
    return 0 if layer is None else None if layer.counts_on_device else layer.length


def _interrupted_cache(cache: Any, last: int) -> InterruptedPassError:
    # A layer that is made when it is needed may not exist yet.
    seen = [_seen_by(cache, index) for index in range(max(len(cache.layers), last + 1))]
    return _interrupted(seen, any(layer.traits.is_recurrent for layer in cache.adapted_layers()))


def _check_parts(layer: CacheLayer, tokens: int) -> None:
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
        "All layers must have seen the same tokens, got layers that an earlier forward pass has not reached (tokens "
        f"seen by {seen}), because an error or Ctrl-C interrupted it, or another thread uses the cache too: {repair}."
    )


class GivenToGenerate:
    """A call of `generate()` that was given a cache.

    Args:
        cache: the cache.

    Attributes:
        is_measured: whether the call has asked for the length of the cache, which it does to find the new tokens.
    """

    def __init__(self, cache: Any) -> None:
        self.is_measured = False
        self._cache = weakref.ref(cache)
        self._hooks: list[Any] = []
        self._thread = 0
        self._began: PassStart | None = cache.self_attention._pass.began
        self._seen: int | None = None
        self._model: nn.Module | None = None

    def measure(self) -> None:
        """Note that the call has asked for the length: the next model to be called takes in the prompt.

        That one pass is looked at by hooks on torch's modules. Compiled code would see them, so such passes are not.
        """
        self.is_measured = True
        cache = self._cache()
        if cache is None or cache.is_compileable:
            return
        # A model that asks within its pass (assisted decoding), or somebody who asks after a pass, finds the cache
        # taken, and hooks would see a later call.
        if in_module(ALL) or cache.self_attention._pass.began is not self._began:
            return
        self._thread = threading.get_ident()
        self._hooks = [
            register_module_forward_pre_hook(self._before_module),
            register_module_forward_hook(self._after_module, always_call=True),
        ]

    def end(self) -> None:
        """Look at no further pass."""
        while self._hooks:
            self._hooks.pop().remove()

    def _before_module(self, module: nn.Module, args: object) -> None:
        if self._model is None and threading.get_ident() == self._thread and cache_argument.is_generator(module):
            self._model, cache = module, self._cache()
            self._seen = None if cache is None else _seen_by(cache, 0)

    def _after_module(self, module: nn.Module, args: object, output: object) -> None:
        if module is not self._model or threading.get_ident() != self._thread:
            return
        self.end()
        cache, self._model = self._cache(), None
        # A pass that failed has no output.
        if output is None or cache is None:
            return
        newest = cache.newest_pass()
        if newest is self._began:
            raise UnusedCacheError(
                "`generate()` must be given a cache that the model updates, got one that "
                f"{type(module).__name__} ignores, so that no token would see those before it: call "
                "kvlayers.install(), by which models get their cache that were written for another version of "
                "transformers, or that read a prompt again as their RoPE changes with its length (Phi-3)."
            )
        # Self-attention and cross-attention of a layer have updated the same layer of the cache, one after the other.
        lengths = None if newest is None else newest.length, self._seen
        if None not in lengths and lengths[0] != lengths[1] and knows_pairs(module):
            raise UnsupportedLayerError(
                f"`generate()` of a {type(module).__name__} that attends to an encoder must be given a pair of caches, "
                f"got a {type(cache).__name__}, which has mixed the states of both: pass "
                "kvlayers.EncoderDecoderCache(cache, cross_attention_cache), or call kvlayers.install()."
            )


def check_is_new(cache: Any, held: int, given: int) -> None:
    """Check that a sequence is longer than what a cache has seen.

    transformers finds the new tokens by counting from the end of the sequence. Without new tokens it would take others.

    Args:
        cache: the cache.
        held: tokens that the cache has seen.
        given: tokens of the sequence.

    Raises:
        InterruptedPassError: no token is new, and an earlier forward pass was interrupted.
        StateMismatchError: no token is new.
    """
    if given <= held and held:
        interrupted = interruption(cache)
        if interrupted is not None:
            raise interrupted
        raise StateMismatchError(
            f"The cache has seen {held} tokens, and a prompt of {given} has no new ones. Pass the whole text with the "
            "new tokens at its end (or these alone, with an attention_mask for all), or crop() or reset() the cache "
            "first."
        )


class SeenTokens(int):
    """Tokens that a cache has seen: an `int` that can tell what is left of a sequence from a number of new tokens.

    `generate()` subtracts it from the length of a sequence, and slices the new tokens from the end of the sequence by
    the negative of the difference. If no token is new, such a slice has all tokens, or tokens that the cache has seen.
    """

    cache: "weakref.ref[Any]"

    @classmethod
    def of(cls, cache: Any, seen: int) -> Self:
        """The length `seen` of a cache, to which it refers weakly."""
        tokens = cls(seen)
        tokens.cache = weakref.ref(cache)
        return tokens

    def __rsub__(self, given: int) -> int:
        new = given - int(self)
        return new if new > 0 else NoNewTokens.of(self, given)

    def __reduce__(self) -> tuple[type[int], tuple[int]]:
        return int, (int(self),)


class NoNewTokens(int):
    """What is left of a sequence of which a cache has seen every token: not positive, and no end of a slice."""

    seen: SeenTokens
    given: int

    @classmethod
    def of(cls, seen: SeenTokens, given: int) -> Self:
        """The difference of the length of a sequence, `given`, and of the tokens that a cache has seen."""
        none = cls(given - int(seen))
        none.seen, none.given = seen, given
        return none

    def __neg__(self) -> int:
        cache = self.seen.cache()
        if cache is not None:
            cache.forget_call()
            check_is_new(cache, int(self.seen), self.given)
        return -int(self)

    __reduce__ = SeenTokens.__reduce__
