"""Requests to be scored, encoded from texts or token ids, and their scores."""

import functools
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from kvlayers.errors import OptionError


class ScoringRequest(NamedTuple):
    """A context and one continuation of it.

    Attributes:
        context: token ids, at least one.
        continuation: token ids, at least one.
    """

    context: tuple[int, ...]
    continuation: tuple[int, ...]


@dataclass(frozen=True)
class ContinuationScore:
    """How likely a model finds a continuation of a context.

    Attributes:
        token_logprobs: log-probability of each token of the continuation, in nats, given the context and the tokens of
            the continuation before it. Computed in float32 at least.
        token_is_greedy: whether each of these tokens is the likeliest one at its place.
    """

    token_logprobs: tuple[float, ...]
    token_is_greedy: tuple[bool, ...]

    @property
    def logprob(self) -> float:
        """Log-probability of the whole continuation, in nats: the sum of `token_logprobs`."""
        return math.fsum(self.token_logprobs)

    @property
    def mean_logprob(self) -> float:
        """Log-probability per token, in nats."""
        return self.logprob / len(self.token_logprobs)

    @property
    def is_greedy(self) -> bool:
        """Whether greedy decoding of the context would give this continuation."""
        return all(self.token_is_greedy)


TokenIds = Sequence[int] | Tensor
"""Token ids: a list of int, or an integer tensor `[tokens]`."""


def encoded(
    contexts: Sequence[str | TokenIds],
    continuations: Sequence[Sequence[str | TokenIds]],
    tokenizer: PreTrainedTokenizerBase | None,
) -> list[list[ScoringRequest]]:
    """The requests of each context, in the order of its continuations.

    Raises:
        OptionError: an argument has a wrong type; the lists differ in length; a text has no tokenizer; a context of
            ids is empty; or a continuation is empty, or has no tokens of its own.
    """
    _check_lists(contexts, continuations)
    pairs = TextPairs(tokenizer) if any(isinstance(context, str) for context in contexts) else None
    found = []
    for index, (context, group) in enumerate(zip(contexts, continuations, strict=True)):
        names = [f"continuations[{index}][{place}]" for place in range(len(group))]
        for name, continuation in zip(names, group, strict=True):
            if isinstance(context, str) is not isinstance(continuation, str):
                raise OptionError(
                    f"`{name}` must be {'a text' if isinstance(context, str) else 'token ids'}, as `contexts[{index}]` "
                    f"is, got a {type(continuation).__name__}: pass texts or token ids for both."
                )
            if continuation == "":
                raise OptionError(f"`{name}` must have at least one token, got an empty text.")
        if isinstance(context, str) and pairs is not None:
            found.append([pairs.request(context, str(text), name) for name, text in zip(names, group, strict=True)])
        else:
            ids = _checked_ids(context, f"contexts[{index}]")
            found.append([ScoringRequest(ids, _checked_ids(*pair)) for pair in zip(group, names, strict=True)])
    return found


class TextPairs:
    """Encodes a context and a continuation together, and finds which tokens are those of the continuation.

    Args:
        tokenizer: the tokenizer of the model.

    Raises:
        OptionError: it is not a tokenizer of transformers.
    """

    def __init__(self, tokenizer: object) -> None:
        if not isinstance(tokenizer, PreTrainedTokenizerBase):
            raise OptionError(
                "`tokenizer` must be the tokenizer of the model, since contexts are texts, got "
                f"{'none' if tokenizer is None else f'a {type(tokenizer).__name__}'}: pass it, or pass token ids."
            )
        self._tokenizer: Any = tokenizer
        self._prefix_id = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
        self._prefix_text = None if self._prefix_id is None else self._tokenizer.decode(self._prefix_id)
        # The continuations of a context come one after another.
        self._context_ids = functools.lru_cache(maxsize=1)(self._ids)

    def request(self, context: str, continuation: str, name: str) -> ScoringRequest:
        """The ids of a context and of a continuation.

        Whitespace at the end of the context is encoded with the continuation. The ids of the continuation are those of
        both texts together that come behind as many tokens as the context has alone.

        Args:
            context: the context. If it is empty, the BOS token takes its place, or the EOS token if there is no BOS.
            continuation: the continuation.
            name: what a user calls the continuation.

        Raises:
            OptionError: no token is left for the continuation, or the context is empty and the tokenizer has neither a
                BOS nor an EOS token.
        """
        stripped = context.rstrip()
        moved = context[len(stripped) :]
        context_ids = self._context_ids(stripped) if stripped else ()
        if context_ids:
            ids = self._ids(stripped + moved + continuation)[len(context_ids) :]
        else:
            context_ids, ids = self._behind_prefix(moved + continuation, name)
        if not ids:
            raise OptionError(
                f"`{name}` must have a token of its own, but the tokenizer encodes the context and {continuation!r} "
                "together in no more tokens than the context alone: begin the continuation with a space, move the "
                "boundary to the end of a word, or pass token ids."
            )
        return ScoringRequest(context_ids, ids)

    def _behind_prefix(self, text: str, name: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
        if self._prefix_id is None:
            raise OptionError(
                f"the context of `{name}` must not be empty, as the tokenizer has neither a BOS nor an EOS token to "
                "take its place: pass a context."
            )
        ids = tuple(self._tokenizer.encode(text, add_special_tokens=False))
        return (ids[:1], ids[1:]) if ids[:1] == (self._prefix_id,) else ((self._prefix_id,), ids)

    def _ids(self, text: str) -> tuple[int, ...]:
        if self._prefix_text is not None and text.startswith(self._prefix_text):
            # A text that has a BOS token gets no second one.
            return tuple(self._tokenizer.encode(text, add_special_tokens=False))
        return tuple(self._tokenizer.encode(text))


def _check_lists(contexts: object, continuations: object) -> None:
    """Raise `OptionError` unless there is a list of contexts, and a list of continuations for each of them."""
    for name, given in (("contexts", contexts), ("continuations", continuations)):
        if not isinstance(given, list | tuple):
            raise OptionError(f"`{name}` must be a list with an entry for each context, got a {type(given).__name__}.")
        if name == "continuations":
            for index, group in enumerate(given):
                if not isinstance(group, list | tuple):
                    raise OptionError(
                        f"`continuations[{index}]` must be the list of the continuations of `contexts[{index}]`, got a "
                        f"{type(group).__name__}: put it into a list."
                    )
    if len(contexts) != len(continuations):  # type: ignore[arg-type]
        raise OptionError(
            f"`continuations` must have a list for each of the {len(contexts)} contexts, got {len(continuations)}."  # type: ignore[arg-type]
        )


def _checked_ids(given: object, name: str) -> tuple[int, ...]:
    """Token ids as a tuple.

    Raises:
        OptionError: they are not a list of whole numbers, or an integer tensor `[tokens]`; or there are no ids.
    """
    if isinstance(given, Tensor):
        if given.dim() != 1 or given.is_floating_point() or given.is_complex() or given.dtype == torch.bool:
            raise OptionError(
                f"`{name}` must be token ids of shape [tokens], got {given.dtype} of shape {list(given.shape)}."
            )
        given = given.tolist()
    if not isinstance(given, list | tuple):
        raise OptionError(f"`{name}` must be a text, a list of token ids or a tensor, got a {type(given).__name__}.")
    try:
        ids = tuple(map(operator.index, given))
    except TypeError as error:
        raise OptionError(f"`{name}` must be a list of token ids, got other values: {error}.") from error
    if not ids:
        raise OptionError(f"`{name}` must have at least one token, got none: pass the id of the BOS token, if any.")
    return ids
