"""Which tokens a cache has seen: remembered where that is free, and compared with the prompts of `generate()`.

transformers goes on from a cache by counting its tokens, whatever they were. If a prompt begins with other tokens, as
another text does, or a chat that was tokenized again, the answer is to a text that nobody wrote.

A cache remembers a tensor of ids (`known_ids`), which follows its operations. It has the tokens of prompts and, once a
call of `generate()` ends, those of its sequences. Tokens that come one by one in other loops are not remembered, since
that would cost something at each. Tokens that are not known are not compared.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeGuard

import torch
from torch import Tensor
from transformers.utils import ModelOutput

from kvlayers.caches.base import Cache
from kvlayers.caches.encoder_decoder import EncoderDecoderCache
from kvlayers.errors import PromptMismatchError
from kvlayers.generation import install_options
from kvlayers.generation.calls import sequences_of_each_prompt
from kvlayers.upstream.deprecation import warn_the_caller


class PromptMismatchWarning(UserWarning):
    """A prompt begins with other tokens than those that the cache has seen, whose states answer for them."""


class KnownIds:
    """A call of `generate()`, and what it knows of the tokens that its cache sees.

    Args:
        given: the ids that it was given, `[prompts, tokens]`; `None` if they are not those that its cache sees.
        mask: the mask that it was given, `[prompts, tokens]`, if any.
    """

    def __init__(self, given: object, mask: object) -> None:
        is_ids = isinstance(given, Tensor) and given.dim() == 2 and not given.is_floating_point()
        self._ids: Tensor | None = given if is_ids else None  # type: ignore[assignment]
        self._is_whole = not isinstance(mask, Tensor) or self._ids is None or mask.shape[-1] == self._ids.shape[1]
        self._cache: Cache | None = None
        self._before: Tensor | None = None
        self._held = 0
        self._beams = False

    def begin(self, cache: object, generation_config: Any, mask: Tensor | None) -> None:
        """Compare the prompt with what a cache has seen that the call was given, if it was given one.

        Args:
            cache: the cache.
            generation_config: of the call.
            mask: `[sequences, tokens]`, 0 for padding, where there is any.

        Raises:
            PromptMismatchError: the prompt begins with other tokens, and that is to be an error.
        """
        self._beams = (generation_config.num_beams or 1) > 1
        if not _can_be_known(cache) or generation_config.is_assistant:
            return
        known, held, ids = cache.known_ids, _length(cache), self._ids
        if known is not None and held and ids is not None and self._is_whole:
            sequences = ids.cpu().repeat_interleave(sequences_of_each_prompt(generation_config), dim=0)
            _compare(cache, known[:, :held].cpu(), sequences, mask)
        self._cache, self._before, self._held = cache, known if held else None, held
        # Until the call ends, and for good where it fails.
        cache.known_ids = None

    def forget(self) -> None:
        """Let go of the cache, whose ids nobody knows any more."""
        self._cache = self._before = None

    def end(self, output: object, cache: object) -> None:
        """Remember what the cache that the call leaves has seen.

        Args:
            output: what `generate()` returns.
            cache: the cache that it was given, or that it returns.
        """
        sequences = output.get("sequences") if isinstance(output, ModelOutput) else output
        if not _can_be_known(cache) or self._ids is None or not isinstance(sequences, Tensor):
            return
        if self._cache is not cache and self._cache is not None:
            return
        rows, seen, ids = cache.batch_size, _length(cache), self._ids.cpu()
        # After beams a cache holds the last ones, of which the prompts are known.
        told = ids if self._beams else sequences.detach().cpu()
        if rows < 1 or rows % told.shape[0] or told.shape[0] % ids.shape[0]:
            return
        if not torch.equal(told[:, : ids.shape[1]], ids.repeat_interleave(told.shape[0] // ids.shape[0], dim=0)):
            return
        told = told.repeat_interleave(rows // told.shape[0], dim=0)
        before = _rows_of(self._before, rows)
        if self._held == 0:
            known = told
        elif before is None:
            return
        elif before.shape[1] < self._held:
            known = before
        else:
            new = told[:, self._held :] if self._is_whole else told
            known = torch.cat([before[:, : self._held].cpu(), new], dim=1)
        # More tokens than there are ids have none of their own, as those of an image.
        if self._beams or seen <= known.shape[1] or known is before:
            cache.known_ids = known[:, :seen].clone()


_call: ContextVar[KnownIds | None] = ContextVar("the call of generate() that is made", default=None)


@contextmanager
def calling(call: KnownIds) -> Iterator[None]:
    """Let `call` be the current one of this context, which is one thread's."""
    token = _call.set(call)
    try:
        yield
    except BaseException:
        # Whoever tries again with less memory must not find it held here.
        call.forget()
        raise
    finally:
        _call.reset(token)


def current() -> KnownIds | None:
    """The call of `generate()` that is made now in this context."""
    return _call.get()


def remember(cache: Cache, ids: Tensor, forward: Callable[[], Any]) -> Any:
    """What a forward pass over a prompt returns, whose ids the cache remembers if it has then seen them.

    Args:
        cache: of the forward pass.
        ids: `[batch, new]`.
        forward: the forward pass.
    """
    if _call.get() is not None or not _can_be_known(cache):
        return forward()
    held = _length(cache)
    output = forward()
    # A model that calls another one with the same ids says so twice.
    known = None if cache.known_ids is None else cache.known_ids[:, :held]
    if _length(cache) != held + ids.shape[1] or cache.batch_size != ids.shape[0]:
        return output
    if held == 0:
        cache.known_ids = ids.detach().clone()
    elif known is not None and known.shape == (ids.shape[0], held):
        cache.known_ids = torch.cat([known.to(ids.device), ids.detach()], dim=1)
    return output


def _length(cache: Cache) -> int:
    return max((layer.length or 0 for layer in cache.adapted_layers()), default=0)


def _can_be_known(cache: object) -> TypeGuard[Cache]:
    """Whether the ids of a call are those of the tokens that a cache sees: its decoder may have others."""
    return isinstance(cache, Cache) and not isinstance(cache, EncoderDecoderCache)


def _rows_of(known: Tensor | None, rows: int) -> Tensor | None:
    return known if known is not None and known.shape[0] == rows else None


def _compare(cache: Cache, known: Tensor, prompt: Tensor, mask: Tensor | None) -> None:
    """Warn, or raise, where a prompt differs from what is known of a cache.

    Args:
        cache: the cache.
        known: ids that it has seen, `[sequences, tokens]`.
        prompt: ids of the prompt, `[sequences, tokens]`.
        mask: `[sequences, tokens]`, 0 for padding, of which nobody knows what it once was.
    """
    tokens = min(known.shape[1], prompt.shape[1])
    if known.shape[0] != prompt.shape[0]:
        return
    differs = known[:, :tokens] != prompt[:, :tokens]
    if mask is not None and mask.shape == prompt.shape:
        differs &= mask[:, :tokens].cpu() != 0
    if not bool(differs.any()):
        return
    first = int(differs.any(dim=0).to(torch.int8).argmax())
    row = int(differs[:, first].to(torch.int8).argmax())
    message = (
        f"expected a prompt that begins with the tokens that the cache has seen, but token {first} of sequence {row} "
        f"is {int(prompt[row, first])}, and the cache has seen {int(known[row, first])}: "
        + (f"crop({first}) the cache to what both begin with, " if first else "")
        + "reset() it for another text, or use a PrefixStore, which finds what it holds of any prompt."
    )
    if install_options.current().strict_prompts:
        raise PromptMismatchError(message)
    if not cache.warned_of_prompt:
        cache.warned_of_prompt = True
        warn_the_caller(message, PromptMismatchWarning)
