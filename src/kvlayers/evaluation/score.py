"""Log-probabilities of continuations, with each context computed once, through any cache."""

import copy
import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import transformers
from transformers import PreTrainedTokenizerBase
from transformers.utils import logging

from kvlayers.errors import OptionError
from kvlayers.evaluation.caches import check_count, check_model, check_tokens, empty_cache
from kvlayers.evaluation.contexts import stored_contexts
from kvlayers.evaluation.engine import score_tokens
from kvlayers.evaluation.requests import ContinuationScore, TokenIds, encoded
from kvlayers.generation.prefixes import active_store
from kvlayers.prefix import PrefixStore

BAR_DELAY = 3.0
"""Seconds after which a progress bar appears."""


def score(
    model: Any,
    contexts: Sequence[str | TokenIds],
    continuations: Sequence[Sequence[str | TokenIds]],
    cache: str | transformers.Cache = "dynamic",
    *,
    cache_config: Mapping[str, Any] | None = None,
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
            itself is never changed: copies of it are.
        cache_config: options of the cache that `cache` names.
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
        >>> import torch, transformers, kvlayers
        >>> config = transformers.LlamaConfig(
        ...     num_hidden_layers=1, hidden_size=32, intermediate_size=32, num_attention_heads=2, vocab_size=99
        ... )
        >>> model = transformers.LlamaForCausalLM(config).eval()
        >>> scores = kvlayers.score(model, [[5, 8, 13]], [[[21, 34], [55]]], cache="int8")
        >>> [len(score.token_logprobs) for score in scores[0]]
        [2, 1]
    """
    check_model(model)
    check_count("batch_size", batch_size)
    if chunk is not None:
        check_count("chunk", chunk)
    active = active_store.required_store(prefix_store, namespace)
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
    store = stored_contexts(model, active, str(cache), cache_config or {})
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
