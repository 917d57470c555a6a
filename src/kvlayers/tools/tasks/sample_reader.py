"""Reads a sample into caches. The states of its context are computed once for all caches for which that is the same."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvlayers.attention.packed_ops import observed, observer_of
from kvlayers.caches.dynamic import DynamicCache
from kvlayers.caches.from_config import WINDOWED
from kvlayers.errors import ConfigError
from kvlayers.evaluation.caches import fork
from kvlayers.tools.measuring.predictions import newest_logits
from kvlayers.tools.tasks.contract import TaskSample
from kvlayers.upstream import model_layers
from kvlayers.upstream.model_types import config_of, kept_states, tokens_at_once

DECIDE_BY_STATES = ("kvlayers", "transformers")
"""Packages whose caches decide what to keep by the states that `update` gets, and by the queries that attend to the
states that it returns.

A cache of another package may decide by anything else, or may change the model.
"""


@dataclass(frozen=True)
class ContextStates:
    """What a model computes for a context in each of its layers.

    Attributes:
        states: keys and values, `[1, kv_heads, tokens, head_dim]`; `None` for a layer that the model left out.
        queries: the queries by the index of their layer, `[1, heads, tokens, head_dim]`, rotated and not scaled; `None`
            if they were not recorded. A layer is missing if its attention function does not show queries.
    """

    states: list[tuple[Tensor | None, Tensor | None]]
    queries: dict[int, Tensor] | None = None


class QueriesNeededError(Exception):
    """A layer waits for the queries that attend to its states, and there are none."""


class _QueryRecordingCache(DynamicCache):
    """A cache of every token that records the queries of each layer."""

    def __init__(self, length_hint: int) -> None:
        # Made without the config: each layer then holds every token.
        super().__init__(length_hint=length_hint)
        self.queries: dict[int, Tensor] = {}

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        """As the exact cache; attention to the states that it returns shows its queries."""
        keys, values = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        return observed(keys, values, lambda queries: self.queries.update({layer_idx: queries}))


class Decoding:
    """A model and its cache, between two tokens.

    Args:
        model: a causal language model in eval mode.
        cache: an empty cache, or one that holds a context.

    Attributes:
        logits: logits of the next token, float32 `[vocab]`, after the first `append`.
    """

    def __init__(self, model: Any, cache: Any) -> None:
        self.model, self.cache = model, cache
        self.logits: Tensor

    def append(self, token_ids: Sequence[int]) -> None:
        """Take in tokens in one forward pass."""
        ids = torch.tensor([token_ids], device=self.model.device)
        self.logits = newest_logits(self.model, ids, self.cache, 1)[0].float()

    def likeliest(self) -> int:
        """The likeliest next token."""
        return int(self.logits.argmax())

    def logprob(self, token: int) -> Tensor:
        """Log-probability of a token as the next one, in nats, float32 `[]`."""
        return self.logits.log_softmax(-1)[token]

    def copied(self) -> "Decoding | None":
        """An independent continuation, `None` if the cache cannot be copied."""
        try:
            cache = fork(self.cache)
        # What else an object of another package holds decides which error its copy raises.
        except Exception:
            return None
        twin = Decoding(self.model, cache)
        twin.logits = self.logits
        return twin


class SampleReader:
    """Reads the context and the question of a sample into one cache after another.

    The first pass of a cache attends to the states that the model computes, whatever the cache keeps of them. Without
    `chunk`, the states of the context are therefore the same for every cache, and so are its queries. They are computed
    once, when a cache first needs them, and given to each cache by `update`, as the model would do it, and its queries
    to each cache that waits for them. `replay` decides for which caches that holds. Other caches read the context
    themselves, and so does every cache of a model that has more states than keys and values.

    Args:
        model: a causal language model in eval mode.
        sample: the sample.
        chunk: tokens of a forward pass, for the context and for the question; `None` for one pass each.
        question_chunk: tokens of a forward pass for the question, if other than `chunk`.
    """

    def __init__(self, model: Any, sample: TaskSample, chunk: int | None, question_chunk: int | None = None) -> None:
        self.model, self.sample, self.chunk = model, sample, chunk
        self.question_chunk = chunk if question_chunk is None else question_chunk
        self._replays = chunk is None and has_only_keys_and_values(model)
        self._contexts: dict[Callable[[Any, Sequence[int]], ContextStates], ContextStates] = {}

    def read(self, make_cache: Callable[[], Any]) -> Decoding:
        """Read context and question.

        Args:
            make_cache: makes an empty cache.
        """
        decoding = Decoding(self.model, self._with_context(make_cache))
        behind = tokens_at_once(self.model.config)
        for piece in pieces(self.sample.question_ids, smallest(self.question_chunk, behind)):
            decoding.append(piece)
        return decoding

    def _with_context(self, make_cache: Callable[[], Any]) -> Any:
        if self._replays:
            cache = self._given_context(make_cache)
            if cache is not None:
                return cache
        cache = make_cache()
        decoding = Decoding(self.model, cache)
        at_once = None if self.chunk is None else smallest(self.chunk, tokens_at_once(self.model.config))
        for piece in pieces(self.sample.context_ids, at_once):
            decoding.append(piece)
        return cache

    def _given_context(self, make_cache: Callable[[], Any]) -> Any:
        """A cache with the states of the context, `None` if it must read the context itself."""
        for compute in (context_states, context_states_and_queries):
            cache = make_cache()
            try:
                return cache if replay(self._computed(compute), cache) else None
            except QueriesNeededError:
                continue
        return None

    def _computed(self, compute: Callable[[Any, Sequence[int]], ContextStates]) -> ContextStates:
        if compute not in self._contexts:
            self._contexts[compute] = compute(self.model, self.sample.context_ids)
        return self._contexts[compute]


def has_only_keys_and_values(model: Any) -> bool:
    """Whether a pass changes a cache by `update(keys, values, layer)` only, and nothing else that later passes read."""
    config = config_of(model)
    if config.is_encoder_decoder or kept_states(model) is not None:
        return False
    try:
        specs = model_layers.layer_specs(config)
    except ConfigError:
        return False
    return {spec.layer_type for spec in specs} <= {"full_attention", *WINDOWED}


def context_states(model: Any, token_ids: Sequence[int]) -> ContextStates:
    """Keys and values of all tokens in each layer, layers with windows included.

    Args:
        model: a model that `has_only_keys_and_values`.
        token_ids: the tokens.
    """
    # Made without the config: each layer then holds every token.
    return ContextStates(_held_after(model, DynamicCache(length_hint=len(token_ids)), token_ids))


def context_states_and_queries(model: Any, token_ids: Sequence[int]) -> ContextStates:
    """As `context_states`, with the queries of the layers whose attention function shows them.

    The states may differ from those of `context_states` in their last bits, as they do in a cache that looks at
    queries: attention to marked states may take another path.
    """
    cache = _QueryRecordingCache(len(token_ids))
    return ContextStates(_held_after(model, cache, token_ids), cache.queries)


def _held_after(model: Any, cache: DynamicCache, token_ids: Sequence[int]) -> list[tuple[Tensor | None, Tensor | None]]:
    Decoding(model, cache).append(token_ids)
    return [layer.peek() for layer in cache.adapted_layers()]


@torch.no_grad()
def replay(context: ContextStates, cache: Any) -> bool:
    """Give an empty cache the states of a context. Returns whether it is now as if the model had read the context.

    It is if every update returns the states that it was given: the model would then have attended to these very states,
    in each layer, and would have given the same states to the next layer. A static cache of transformers is an
    example of a cache that returns others: it adds empty slots. A layer that waits for the queries that attend to its
    states, to evict by them, is shown those of the context. After `False`, or an error, the cache cannot be used.

    Args:
        context: what `context_states` or `context_states_and_queries` returned.
        cache: an empty cache.

    Raises:
        QueriesNeededError: a layer waits for queries that were not recorded.
    """
    if not _decides_by_states(cache):
        return False
    for index, (keys, values) in enumerate(context.states):
        if keys is None or values is None:
            return False
        attended_keys, attended_values = cache.update(keys, values, index)
        if not torch.equal(attended_keys, keys) or not torch.equal(attended_values, values):
            return False
        _show_queries(context, index, attended_keys)
    # A cache may have made its layers only now. If it has more than the model has filled, they were not meant for it.
    return len(cache.layers) == len(context.states) and all(map(_decides_by_states, cache.layers))


def _decides_by_states(cache_or_layer: object) -> bool:
    return type(cache_or_layer).__module__.partition(".")[0] in DECIDE_BY_STATES


def _show_queries(context: ContextStates, layer_idx: int, attended_keys: Tensor) -> None:
    """Do what attention does to keys whose layer waits for queries."""
    observe = observer_of(attended_keys)
    if observe is None:
        return
    if context.queries is None or layer_idx not in context.queries:
        raise QueriesNeededError
    observe(context.queries[layer_idx])


def pieces(token_ids: Sequence[int], size: int | None) -> Iterator[Sequence[int]]:
    """The tokens in pieces of `size`; in one piece for `None`."""
    size = len(token_ids) if size is None else size
    return (token_ids[start : start + size] for start in range(0, len(token_ids), size))


def smallest(*sizes: int | None) -> int | None:
    """The smallest of the sizes that are not `None`."""
    return min((size for size in sizes if size is not None), default=None)
