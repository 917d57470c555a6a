"""Which tokens a cache has seen: recorded where that is free, and compared with the prompts of `generate()`.

transformers continues from a cache by counting its tokens, whatever they were. If a prompt starts with other tokens
(another text, or a chat that was tokenized again), the model answers a text that nobody wrote.

A cache keeps a tensor of ids (`known_ids`) that follows its operations. It holds the tokens of prompts and, once a call
of `generate()` has ended, those of the returned sequences; after a beam search, those of the beams that the cache has
states of, which may be other ones. Tokens that other loops decode one by one are not recorded, since that would cost
something at each token. Unknown tokens are not compared, and are an error if prompts must be (`strict_prompts`).
"""

import contextlib
import weakref
from collections.abc import Callable
from typing import Any, TypeGuard

import torch
from torch import Tensor
from transformers.utils import ModelOutput

from kvlayers.core.cache import Cache
from kvlayers.errors import KVLayersError, PromptMismatchError
from kvlayers.generation.patching import ScopedValue
from kvlayers.persistence.fingerprint import weights_id
from kvlayers.upstream.callers import warn_the_caller
from kvlayers.upstream.generate_calls import sequences_per_prompt, static_shape

STRICT_PROMPTS = ScopedValue("strict_prompts", False)
"""The option `strict_prompts` of `install()`."""

_WARNED: "weakref.WeakSet[Cache]" = weakref.WeakSet()
"""Caches of which a `PromptMismatchWarning` was given, which comes only once."""

_MODELS: "weakref.WeakKeyDictionary[Cache, weakref.ref[Any]]" = weakref.WeakKeyDictionary()
"""The model that each cache was last given to."""


class PromptMismatchWarning(UserWarning):
    """A prompt starts with other tokens than the cache has seen, or the cache has states of another model."""


class TokenRecord:
    """What one call of `generate()` knows of the tokens that its cache sees.

    Attributes:
        has_beams: whether the call searches with beams, known when its cache is prepared.
        is_whole: whether the ids are the whole sequence, rather than the tokens alone that the cache has not seen.

    Args:
        input_ids: the ids that the call was given, `[prompts, tokens]`; `None` if the cache sees other ones.
        mask: the attention mask that it was given, `[prompts, tokens]`, if any.
    """

    def __init__(self, input_ids: object, mask: object) -> None:
        is_ids = isinstance(input_ids, Tensor) and input_ids.dim() == 2 and not input_ids.is_floating_point()
        self._ids: Tensor | None = input_ids if is_ids else None  # type: ignore[assignment]
        self.is_whole = not isinstance(mask, Tensor) or self._ids is None or mask.shape[-1] == self._ids.shape[1]
        self._mask = mask if isinstance(mask, Tensor) and mask.dim() == 2 else None
        self._length_before = 0
        self.has_beams = False

    def begin(self, model: Any, cache: Any, generation_config: Any, mask: Tensor | None) -> None:
        """Compare the prompt and the model with what the passed cache has seen.

        Args:
            model: the model that generates.
            cache: the cache that the call was given.
            generation_config: config of the call.
            mask: `[sequences, tokens]`, 0 for padding, if there is any.

        Raises:
            PromptMismatchError: the cache has states of a model with other layers; or the prompt starts with other
                tokens or with unknown ones, or the cache has states of other weights, under
                `install(strict_prompts=True)`.
        """
        if isinstance(cache, Cache):
            _compare_models(cache, model)
        if generation_config.is_assistant or not _records_ids(cache):
            return
        ids, known, length = self._ids, cache.known_ids, cache.most_seen()
        # What is known of tokens that stay is known during the call as well, and if it fails.
        cache.known_ids = None if known is None or not length else known[:, :length]
        if ids is not None and length and self.is_whole:
            sequences = ids.cpu().repeat_interleave(sequences_per_prompt(generation_config), dim=0)
            held = ids[:, :0].cpu() if cache.known_ids is None else cache.known_ids.cpu()
            _compare(cache, held, length, sequences, mask)
            # The beams of a prompt have all of them, in whatever order.
            length = 0 if self.has_beams and torch.equal(held, sequences[:, :length]) else length
        self._length_before = length

    def note_beams(self, cache: object, sequences: Tensor) -> None:
        """Let a cache know the tokens of its beams, which it then selects as it selects their states.

        Args:
            cache: the cache of the call.
            sequences: ids of which the next pass is prepared, `[prompts * beams, tokens]`.
        """
        # A prompt may be read once, before it is repeated.
        if (
            self.has_beams
            and self._ids is not None
            and sequences.shape[1] > self._ids.shape[1]
            and self.is_whole
            and not self._length_before
            and _records_ids(cache)
        ):
            cache.known_ids = sequences

    def end(self, output: object, cache: object) -> None:
        """Record in the cache of the finished call which tokens it has seen.

        Args:
            output: what `generate()` returns.
            cache: the cache that it was given, or that it returns.
        """
        sequences = output.get("sequences") if isinstance(output, ModelOutput) else output
        if self._ids is None or not isinstance(sequences, Tensor) or not _records_ids(cache):
            return
        ids, known, before = self._ids.cpu(), cache.known_ids, self._length_before
        rows, seen = cache.batch_size, cache.most_seen()
        if self.has_beams:
            # They may be others than what is returned. Before the second pass, only their prompts are known.
            sequences = ids if known is None or known.shape[1] <= ids.shape[1] else known
        fed = sequences.detach().cpu()
        # Sequences that go on from beams may have been selected since.
        if (
            not torch.equal(fed[:, : ids.shape[1]], ids.repeat_interleave(len(fed) // len(ids), dim=0))
            or rows < 1
            or rows % len(fed)
            or (self.has_beams and before)
        ):
            return
        fed = fed.repeat_interleave(rows // len(fed), dim=0)
        known = fed if before == 0 else known
        # Without all ids of the tokens before, those of new tokens have no place.
        if known is None or known.shape[0] != rows or known.shape[1] < before:
            return
        known = torch.cat([known[:, :before].cpu(), fed[:, before:] if self.is_whole else fed], dim=1)
        if any(layer.traits.counts_rows for layer in cache.adapted_layers()):
            # They are aligned on the right, whatever padding there was, and wherever each has ended.
            is_token = torch.ones_like(ids) if self._mask is None else self._mask.ne(0).int()
            known = torch.nn.utils.rnn.pad_sequence(
                [
                    own[first:][:length]
                    for own, first, length in zip(
                        known,
                        is_token.argmax(1).repeat_interleave(rows // len(is_token)).tolist(),
                        cache.row_lengths,
                        strict=True,
                    )
                ],
                batch_first=True,
                padding_side="left",
            )
        # If the cache has seen more tokens than there are ids, some have no id, such as those of an image.
        if seen <= known.shape[1]:
            cache.known_ids = known[:, :seen].clone()


def record_forward(cache: Cache, ids: Tensor, forward: Callable[[], Any]) -> Any:
    """Run a forward pass over a prompt, and record its ids if the cache has then seen them.

    Args:
        cache: the cache of the forward pass.
        ids: `[batch, new]`.
        forward: runs the pass.

    Returns:
        What the forward pass returns.
    """
    if not _records_ids(cache):
        return forward()
    length = cache.most_seen()
    output = forward()
    # If a model calls another one with the same ids, both passes come here.
    known = ids[:, :0] if length == 0 or cache.known_ids is None else cache.known_ids[:, :length]
    if known.shape == (cache.batch_size, length) == (len(ids), cache.most_seen() - ids.shape[1]):
        cache.known_ids = torch.cat([known.to(ids.device), ids.detach()], dim=1)
    return output


def _records_ids(cache: object) -> TypeGuard[Cache]:
    """Whether the ids of a call are those of the tokens that a cache sees. The decoder of a pair sees other ones.

    Recurrent states alone do not say how many tokens they have seen.
    """
    return isinstance(cache, Cache) and not cache.is_pair and not cache.is_recurrent


def _compare_models(cache: Cache, model: Any) -> None:
    """Warn or raise if a cache has states of another model. Models that cannot be compared are taken for equal."""
    before = _MODELS[cache]() if cache in _MODELS else None
    if before is not None and before is not model and cache.most_seen():
        has_equal_layers = equal = True
        with contextlib.suppress(KVLayersError):
            has_equal_layers = static_shape(before) == static_shape(model)
            equal = has_equal_layers and weights_id(before) == weights_id(model)
        if not equal:
            _complain(
                cache,
                f"the cache holds states of another model, a {type(before).__name__} with other "
                f"{'weights' if has_equal_layers else 'layers'}: reset() it, or give each model a cache of its own.",
                may_go_on=has_equal_layers,
            )
    _MODELS[cache] = weakref.ref(model)


def _compare(cache: Cache, known: Tensor, length: int, prompt: Tensor, mask: Tensor | None) -> None:
    """Warn or raise if a prompt differs from the known ids of a cache.

    Args:
        cache: the cache.
        known: ids that it has seen, `[sequences, tokens]`.
        length: how many tokens it has seen.
        prompt: ids of the prompt, `[sequences, tokens]`.
        mask: `[sequences, tokens]`, 0 for padding, which may have had other ids before.
    """
    tokens = min(known.shape[1], prompt.shape[1])
    if tokens and known.shape[0] != prompt.shape[0]:
        return
    differs = known[:, :tokens] != prompt[:, :tokens]
    if mask is not None and mask.shape == prompt.shape:
        differs &= mask[:, :tokens].cpu() != 0
    for first, row in differs.T.nonzero()[:1].tolist():
        _complain(
            cache,
            f"the prompt must start with the tokens that the cache has seen, but token {first} of sequence {row} is "
            f"{int(prompt[row, first])} in the prompt, and {int(known[row, first])} in the cache: "
            + (f"crop({first}) the cache to the common prefix, " if first else "")
            + "reset() it for another text, or use a PrefixStore, which finds the longest stored prefix of any prompt.",
        )
    if tokens < length and STRICT_PROMPTS.get():
        raise PromptMismatchError(
            f"the prompt cannot be compared with {length - tokens} of the {length} tokens that the cache has seen, as "
            "their ids are unknown: set its `known_ids` to them, [sequences, tokens], or reset() it and pass the whole "
            "text."
        )


def _complain(cache: Cache, message: str, may_go_on: bool = True) -> None:
    """Raise under `install(strict_prompts=True)` or if the pass would fail, else warn once for each cache."""
    if STRICT_PROMPTS.get() or not may_go_on:
        raise PromptMismatchError(message)
    if cache not in _WARNED:
        _WARNED.add(cache)
        warn_the_caller(message, PromptMismatchWarning)
