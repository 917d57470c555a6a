"""Reads a sample into caches. The states of its context are computed once for all caches for which that is the same."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from kvlayers.attention.packed_ops import observer_of
from kvlayers.caches.dynamic import DynamicCache
from kvlayers.caches.from_config import WINDOWED
from kvlayers.errors import ConfigError
from kvlayers.evaluation.caches import fork
from kvlayers.tools.measuring.predictions import newest_logits
from kvlayers.tools.tasks.contract import TaskSample
from kvlayers.upstream import model_layers
from kvlayers.upstream.model_types import config_of, kept_states, tokens_at_once

DECIDE_BY_STATES = ("kvlayers", "transformers")
"""Packages whose caches decide what to keep by the states that `update` gets, and by queries only if they observe them.

A cache of another package may decide by anything else, or may change the model.
"""


States = list[tuple[Tensor | None, Tensor | None]]
"""Keys and values of each layer, `[1, kv_heads, tokens, head_dim]`; `None` for a layer that the model left out."""


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

    def read(self, token_ids: Sequence[int], size: int | None) -> None:
        """Take in tokens in passes of `size`; in one pass for `None`."""
        size = len(token_ids) if size is None else size
        for start in range(0, len(token_ids), size):
            self.append(token_ids[start : start + size])

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
    `chunk`, the states of the context are therefore the same for every cache. They are computed once, when a cache
    first needs them, and given to each cache by `update`, as the model would do it. `replay` decides for which caches
    that holds. Other caches read the context themselves, and so does every cache of a model that has more states than
    keys and values.

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
        self._states: States | None = None

    def read(self, make_cache: Callable[[], Any]) -> Decoding:
        """Read context and question.

        Args:
            make_cache: makes an empty cache.
        """
        decoding = Decoding(self.model, make_cache())
        at_once = tokens_at_once(self.model.config)
        if not self._replays or not replay(self._computed(), decoding.cache):
            if self._replays:
                # What was given to the other one cannot be taken back.
                decoding = Decoding(self.model, make_cache())
            decoding.read(self.sample.context_ids, None if self.chunk is None else smallest(self.chunk, at_once))
        decoding.read(self.sample.question_ids, smallest(self.question_chunk, at_once))
        return decoding

    def _computed(self) -> States:
        if self._states is None:
            self._states = context_states(self.model, self.sample.context_ids)
        return self._states


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


def context_states(model: Any, token_ids: Sequence[int]) -> States:
    """Keys and values of all tokens in each layer, layers with windows included.

    Args:
        model: a model that `has_only_keys_and_values`.
        token_ids: the tokens.
    """
    # Made without the config: each layer then holds every token.
    cache = DynamicCache(length_hint=len(token_ids))
    Decoding(model, cache).append(token_ids)
    return [layer.peek() for layer in cache.adapted_layers()]


@torch.no_grad()
def replay(states: States, cache: Any) -> bool:
    """Give an empty cache the states of a context. Returns whether it is now as if the model had read the context.

    It is if every update returns the states that it was given: the model would then have attended to these very states,
    in each layer, and would have given the same states to the next layer. A static cache of transformers is an
    example of a cache that returns others: it adds empty slots. A layer that waits for the queries that attend to its
    states, to evict by them, must see them. After `False`, or an error, the cache cannot be used.

    Args:
        states: what `context_states` returned.
        cache: an empty cache.
    """
    if not _decides_by_states(cache):
        return False
    for index, (keys, values) in enumerate(states):
        if keys is None or values is None:
            return False
        attended_keys, attended_values = cache.update(keys, values, index)
        if not torch.equal(attended_keys, keys) or not torch.equal(attended_values, values):
            return False
        if observer_of(attended_keys) is not None:
            return False
    # A cache may have made its layers only now. If it has more than the model has filled, they were not meant for it.
    return len(cache.layers) == len(states) and all(map(_decides_by_states, cache.layers))


def _decides_by_states(cache_or_layer: object) -> bool:
    return type(cache_or_layer).__module__.partition(".")[0] in DECIDE_BY_STATES


def smallest(*sizes: int | None) -> int | None:
    """The smallest of the sizes that are not `None`."""
    return min((size for size in sizes if size is not None), default=None)
