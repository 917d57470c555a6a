"""Log-probabilities of continuations through any cache: each context is computed once, for all its continuations."""

import copy
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedTokenizerBase
from transformers.utils import logging

from kvlayers import PrefixStore, calls, models
from kvlayers.calls import MIN_TOKENS, StorePart, either, requested_cache
from kvlayers.errors import CapacityError, OptionError
from kvlayers_lab.evaluation.caches import (
    SharedCache,
    check_count,
    check_model,
    check_tokens,
    empty_cache,
    is_exact,
    layers_of,
    most_tokens,
    repeat,
    takes_rows,
)
from kvlayers_lab.evaluation.contexts import ContextCaches, ContextEntries, ScoredRow, SharedPrefix, plan_prefixes
from kvlayers_lab.evaluation.passes import (
    LOGITS_AT_ONCE,
    Division,
    ScoredToken,
    TokenScores,
    exact_division,
    lossy_division,
    scored_logits,
)
from kvlayers_lab.evaluation.requests import ContinuationScore, ScoringRequest, TokenIds, encoded


@torch.no_grad()
def score_tokens(
    model: Any,
    requests: Sequence[ScoringRequest],
    make_cache: Callable[[], Any],
    *,
    store: StorePart | None = None,
    batch_size: int = 16,
    chunk: int | None = None,
    on_scored: Callable[[int], None] = lambda count: None,
) -> list[ContinuationScore]:
    """Log-probabilities of continuations, through any cache.

    With an exact cache, no division into forward passes changes a score, so any prefix that contexts have in common is
    read once. With a lossy cache (one that rounds or evicts), a score never depends on the other requests: a context is
    read in one pass and the continuation token by token, as `generate()` does. With `chunk`, both are read in chunks,
    each from its own start, and contexts share prefixes of whole chunks.

    Args:
        model: a causal language model, in eval mode.
        requests: contexts and continuations of at least one token. Requests with equal contexts may stand anywhere.
        make_cache: makes an empty cache with room for the longest request, for one sequence or for several.
        store: contexts are looked up here before they are read, and inserted afterwards.
        batch_size: most continuations in one forward pass, at least 1.
        chunk: tokens in one forward pass, at least 1. An exact cache takes fewer tokens at once to save memory.
        on_scored: is called with the number of further requests that are scored.

    Returns:
        The scores, in the order of `requests`.

    Raises:
        CapacityError: a request has more tokens than the model has positions, or than a static cache reserves.
        ConfigError: as `check_model`.
        UnsupportedLayerError: it is not known whether a layer of the cache is exact.
    """
    check_model(model)
    if not requests:
        return []
    example = make_cache()
    _check_room(model, example, requests)
    exact = is_exact(example)
    division = (exact_division if exact else lossy_division)(model, chunk)
    entries = None if store is None else _entries(store, division, exact)
    contexts = ContextCaches(model, make_cache, division, entries)
    scoring = _Scoring(model, requests, contexts, division, batch_size, on_scored)
    scoring.score(plan_prefixes(requests, division, None if entries is None else MIN_TOKENS))
    return scoring.scores()


def _check_room(model: Any, cache: Any, requests: Sequence[ScoringRequest]) -> None:
    lengths = [len(context) + len(continuation) - 1 for context, continuation in requests]
    longest, positions = max(lengths), most_tokens(model, cache)
    if positions is not None and longest > positions:
        raise CapacityError(
            f"`requests[{lengths.index(longest)}]` must have {positions + 1} tokens at most, since the model has "
            f"{positions} positions and predicts one token more, got {longest + 1}: shorten its context."
        )
    try:
        # The cache is used for nothing else: a layer may take memory.
        for layer in layers_of(cache):
            if not layer.traits.is_upstream:
                layer.make_room(longest)
            elif isinstance(layer.original, models.STATIC_LAYER) and not layer.is_sliding:
                calls.check_reservation(layer.original, 0, longest)
    except CapacityError as error:
        raise CapacityError(
            f"`cache` must have room for {longest} tokens, the longest context with all but the last token of its "
            f"continuation: {error}"
        ) from error


def _entries(store: StorePart, division: Division, is_exact: bool) -> ContextEntries | None:
    if division.shared_every is None:
        lossy = "a cache that rounds or evicts reads each context in one pass, unless `chunk` is given"
        store.active.on_bypass("states of this model depend on the length of a pass" if is_exact else lossy)
        return None
    return ContextEntries(store, None if is_exact else division.shared_every)


class _Scoring:
    """One call: scores as far as they are known.

    Args:
        model: the model.
        requests: the requests.
        contexts: reads prefixes.
        division: how rows are divided into passes.
        batch_size: most rows of a batch.
        on_scored: is called with the number of further requests that are scored.
    """

    def __init__(
        self,
        model: Any,
        requests: Sequence[ScoringRequest],
        contexts: ContextCaches,
        division: Division,
        batch_size: int,
        on_scored: Callable[[int], None],
    ) -> None:
        self._model, self._requests, self._contexts, self._division = model, requests, contexts, division
        self._batch_size, self._on_scored = batch_size, on_scored
        self._logits_at_once = LOGITS_AT_ONCE // int(models.decoder_config(model.config).vocab_size)
        self._logprobs = [[0.0] * len(continuation) for _, continuation in requests]
        self._is_greedy = [[False] * len(continuation) for _, continuation in requests]

    def scores(self) -> list[ContinuationScore]:
        """The scores of all requests."""
        pairs = zip(self._logprobs, self._is_greedy, strict=True)
        return [ContinuationScore(tuple(logprobs), tuple(is_greedy)) for logprobs, is_greedy in pairs]

    def score(self, root: SharedPrefix) -> None:
        """Score everything behind the empty prefix, depth first, so that only caches of ancestors are held."""
        example = self._contexts.make_cache()
        for batch in self._batches(root, example):
            self._score_batch(batch, self._contexts.make_cache(), 0)
        pending: list[tuple[SharedPrefix, SharedCache | None, int]] = [(child, None, 0) for child in root.children]
        while pending:
            prefix, parent, seen = pending.pop()
            cache, logits = self._contexts.read(prefix, parent, seen)
            if logits is not None:
                self._score_ends(prefix, logits)
            batches = self._batches(prefix, cache)
            shared = SharedCache(cache, len(batches) + len(prefix.children))
            del cache, logits
            for batch in batches:
                self._score_batch(batch, shared.take(), prefix.length)
            pending += [(child, shared, prefix.length) for child in prefix.children]

    def _score_ends(self, prefix: SharedPrefix, logits: Tensor) -> None:
        """Score the tokens that are predicted from the last token of a prefix."""
        rows = [row for row in prefix.rows if len(row.context) == prefix.length]
        wanted = [token for row in rows for token in self._wanted(row, 0, prefix.length) if token.position < 0]
        scores = TokenScores([token._replace(position=0, row=0) for token in wanted])
        scores.take(0, logits)
        self._note(scores)
        if scored := sum(len(row.requests) for row in rows if row.tokens == prefix.length):
            self._on_scored(scored)

    def _score_batch(self, rows: Sequence[ScoredRow], cache: Any, seen: int) -> None:
        """Score rows behind a prefix of `seen` tokens, all in one batch."""
        wanted = [token for number, row in enumerate(rows) for token in self._wanted(row, number, seen)]
        scores = TokenScores(sorted(token for token in wanted if token.position >= 0))
        repeat(cache, len(rows))
        tokens = rows[0].tokens - seen
        behind = [row.ids(seen) for row in rows]
        # Rows are padded with a token of their own. Attention is causal, so nothing that is scored sees it.
        ids = [(*own, *own[-1:] * (tokens - len(own))) for own in behind]
        batch = torch.tensor(ids, device=self._model.device)
        scored = max(self._logits_at_once // len(rows), 1) if self._division.may_split else None
        scored_from = min(max(len(row.context) - 1 - seen, 0) for row in rows)
        for first, logits in scored_logits(
            self._model,
            batch,
            cache,
            seen,
            scored_from,
            step=self._division.continuation_step,
            behind=self._division.pass_limit,
            scored=scored,
        ):
            scores.take(first, logits)
        self._note(scores)
        self._on_scored(sum(len(row.requests) for row in rows))

    def _wanted(self, row: ScoredRow, number: int, seen: int) -> Iterator[ScoredToken]:
        """The tokens to score in a row of a batch behind `seen` tokens; the first may be predicted from position -1."""
        before = len(row.context) - 1 - seen
        for place, token in enumerate(row.read):
            # Requests that read the same tokens have the same scores up to here.
            for request in row.requests:
                yield ScoredToken(before + place, number, token, request, place)
        for request in row.requests:
            place = len(self._requests[request].continuation) - 1
            yield ScoredToken(before + place, number, self._requests[request].continuation[-1], request, place)

    def _batches(self, prefix: SharedPrefix, cache: Any) -> list[list[ScoredRow]]:
        """Rows that are read together behind a prefix, the longest first."""
        most = self._batch_size if takes_rows(cache, self._batch_size) else 1
        rows = sorted(
            (row for row in prefix.rows if row.tokens > prefix.length),
            key=lambda row: (-row.tokens, len(row.context)),
        )
        batches: list[list[ScoredRow]] = []
        for row in rows:
            batch = batches[-1] if batches else []
            if batch and len(batch) < most and self._may_join(row, batch, prefix.length):
                batch.append(row)
            else:
                batches.append([row])
        return batches

    def _may_join(self, row: ScoredRow, batch: Sequence[ScoredRow], seen: int) -> bool:
        tokens = batch[0].tokens
        if row.tokens != tokens and not self._division.may_pad:
            return False
        scored = tokens - max(min(len(each.context) for each in (row, *batch)) - 1, seen)
        at_once = min(scored, self._division.continuation_step or scored)
        return (len(batch) + 1) * at_once <= self._logits_at_once

    def _note(self, scores: TokenScores) -> None:
        for token, logprob, is_greedy in scores.results():
            self._logprobs[token.request][token.place] = logprob
            self._is_greedy[token.request][token.place] = is_greedy


BAR_DELAY = 3.0
"""Seconds after which a progress bar appears."""


def score(
    model: Any,
    contexts: Sequence[str | TokenIds],
    continuations: Sequence[Sequence[str | TokenIds]],
    cache: str | transformers.Cache | None = None,
    *,
    cache_config: Mapping[str, Any] | None = None,
    cache_implementation: str | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    prefix_store: PrefixStore | None = None,
    namespace: str = "",
    batch_size: int = 16,
    chunk: int | None = None,
    progress: bool = True,
) -> list[list[ContinuationScore]]:
    """Score continuations of contexts: how likely a model finds each of them.

    A context is computed once for all of its continuations, which follow it side by side. Contexts share what they have
    in common, and a prefix store also what earlier calls have computed.

    With a cache that is exact, a score is that of one forward pass over the context and the continuation. With any
    other cache, the context is read in one pass and the continuation token by token, as by `generate()`. Since the
    first pass of a cache attends to exact states, such a score shows only what the cache does to the continuation. With
    `chunk`, the context is read through the cache too. A score never depends on the other continuations of the call.

    Args:
        model: a causal language model of transformers, in evaluation mode.
        contexts: texts, or token ids (lists of int, or integer tensors `[tokens]`). In the place of an empty text
            stands the BOS token, or the EOS token if the tokenizer has no BOS.
        continuations: for each context a list of continuations, texts or token ids as the context is. Texts are encoded
            with the context, as lm-evaluation-harness does; docs/scoring.md has the rules.
        cache: name of a cache (`kvlayers.cache_names()`), or an empty cache of kvlayers or of transformers. The cache
            itself is never changed: copies of it are. Default: "dynamic".
        cache_config: options of the cache that `cache` names.
        cache_implementation: the same as `cache`, by the name that `generate()` has for it.
        tokenizer: the tokenizer of the model. Needed for texts.
        prefix_store: a store to find contexts in, and to insert them into. `cache` must be a name.
        namespace: the namespace of the store. Needs a `prefix_store`.
        batch_size: continuations that are computed side by side.
        chunk: tokens per forward pass: of the context from its beginning, and of the continuation from its own.
        progress: whether to show a progress bar if it takes longer than a few seconds.

    Returns:
        For each context, the scores of its continuations, in order.

    Raises:
        OptionError: an argument is of a wrong type; the lists differ in length; a continuation is empty, or the
            tokenizer leaves no token for it; an id is outside the vocabulary; a text has no tokenizer; the cache cannot
            be copied or records; an option of the cache does not exist; or the call cannot use a prefix store.
        RegistryError: no cache has this name.
        StateMismatchError: the cache holds states.
        CapacityError: a context and its continuation are longer than the model has positions, or than the cache has
            room.
        ConfigError: the model is in training mode, has an encoder, takes no cache, or has no logits of next tokens; or
            the cache was made for another model.

    Example:
        >>> import torch, transformers, kvlayers_lab
        >>> config = transformers.LlamaConfig(
        ...     num_hidden_layers=1, hidden_size=32, intermediate_size=32, num_attention_heads=2, vocab_size=99
        ... )
        >>> model = transformers.LlamaForCausalLM(config).eval()
        >>> scores = kvlayers_lab.score(model, [[5, 8, 13]], [[[21, 34], [55]]], cache="int8")
        >>> [len(score.token_logprobs) for score in scores[0]]
        [2, 1]
    """
    check_model(model)
    check_count("batch_size", batch_size)
    if chunk is not None:
        check_count("chunk", chunk)
    active = calls.required_store(prefix_store, namespace)
    cache = "dynamic" if (given := either(cache, cache_implementation)) is None else given
    if isinstance(cache, str):
        named = requested_cache(cache, cache_config)
        cache, cache_config = named.name, named.options
    if active is not None and not isinstance(cache, str):
        raise OptionError(
            f"`prefix_store` needs the name of a cache, by which its entries are found, got a {type(cache).__name__}: "
            "pass a name and cache_config, or leave prefix_store out."
        )
    groups = encoded(contexts, continuations, tokenizer)
    requests = list(itertools.chain.from_iterable(groups))
    longest = max((len(request.context) + len(request.continuation) for request in requests), default=1)
    template = empty_cache(model, cache, cache_config, longest)
    check_tokens(model, groups, template)
    # As `generate()` labels its entries.
    store = StorePart.if_usable(model, active, str(cache), cache_config or {})
    with logging.tqdm(
        total=len(requests), desc="Scoring", unit="continuation", delay=BAR_DELAY, disable=not progress
    ) as bar:
        scores = iter(
            score_tokens(
                model,
                requests,
                functools.partial(copy.deepcopy, template),
                store=store,
                batch_size=batch_size,
                chunk=chunk,
                on_scored=bar.update,
            )
        )
    return [list(itertools.islice(scores, len(group))) for group in groups]
