"""Reads a sample into caches. The states of its context are computed once for all caches for which that is the same."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from kvlayers.attention.packed_tensor import PackedStates
from kvlayers.caches.dynamic import DynamicCache
from kvlayers.caches.from_config import WINDOWED
from kvlayers.errors import ConfigError
from kvlayers.evaluation.cache_copies import fork
from kvlayers.tools.measuring.predictions import newest_logits
from kvlayers.tools.tasks.contract import TaskSample
from kvlayers.upstream import model_layers
from kvlayers.upstream.model_types import KEEPS_STATES_IN_MODULES, config_of, decoder_config, tokens_at_once

DECIDE_BY_STATES = ("kvlayers", "transformers")
"""Packages whose caches keep what they keep because of the states that `update` gets, and of the queries that attend to
what it returns.

A cache of another package may have looked at anything else, or may have changed the model.
"""

ContextStates = list[tuple[Tensor | None, Tensor | None]]
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
    """

    def __init__(self, model: Any, sample: TaskSample, chunk: int | None) -> None:
        self.model, self.sample, self.chunk = model, sample, chunk
        self._replays = chunk is None and has_only_keys_and_values(model)
        self._states: ContextStates | None = None

    def read(self, make_cache: Callable[[], Any]) -> Decoding:
        """Read context and question.

        Args:
            make_cache: makes an empty cache.
        """
        decoding = Decoding(self.model, self._with_context(make_cache))
        behind = tokens_at_once(self.model.config)
        for piece in pieces(self.sample.question_ids, smallest(self.chunk, behind)):
            decoding.append(piece)
        return decoding

    def _with_context(self, make_cache: Callable[[], Any]) -> Any:
        cache = make_cache()
        if self._replays:
            if replay(self._context_states(), cache):
                return cache
            cache = make_cache()
        decoding = Decoding(self.model, cache)
        at_once = None if self.chunk is None else smallest(self.chunk, tokens_at_once(self.model.config))
        for piece in pieces(self.sample.context_ids, at_once):
            decoding.append(piece)
        return cache

    def _context_states(self) -> ContextStates:
        if self._states is None:
            self._states = context_states(self.model, self.sample.context_ids)
        return self._states


def has_only_keys_and_values(model_or_config: object) -> bool:
    """Whether a pass changes a cache by `update(keys, values, layer)` only, and nothing else that later passes read."""
    config = config_of(model_or_config)
    if config.is_encoder_decoder or decoder_config(config).model_type in KEEPS_STATES_IN_MODULES:
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
    cache = DynamicCache(length_hint=len(token_ids))
    Decoding(model, cache).append(token_ids)
    return [layer.peek() for layer in cache.adapted_layers()]


@torch.no_grad()
def replay(states: ContextStates, cache: Any) -> bool:
    """Give an empty cache the states of a context. Returns whether it is now as if the model had read the context.

    It is if every update returns the states that it was given, and no layer waits for the queries that attend to them:
    the model would then have attended to these very states, in each layer, and would have given the same states to the
    next layer. A static cache of transformers is an example of a cache that returns others: it adds empty slots. An
    evicting layer whose rule looks at queries waits for them. After `False` the cache cannot be used.

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
        if _waits_for_queries(attended_keys):
            return False
        if not torch.equal(attended_keys, keys) or not torch.equal(attended_values, values):
            return False
    # A cache may have made its layers only now. If it has more than the model has filled, they were not meant for it.
    return len(cache.layers) == len(states) and all(map(_decides_by_states, cache.layers))


def _decides_by_states(cache_or_layer: object) -> bool:
    return type(cache_or_layer).__module__.partition(".")[0] in DECIDE_BY_STATES


def _waits_for_queries(attended_keys: Tensor) -> bool:
    return isinstance(attended_keys, PackedStates) and attended_keys.snapshot.observe is not None


def pieces(token_ids: Sequence[int], size: int | None) -> Iterator[Sequence[int]]:
    """The tokens in pieces of `size`; in one piece for `None`."""
    size = len(token_ids) if size is None else size
    return (token_ids[start : start + size] for start in range(0, len(token_ids), size))


def smallest(*sizes: int | None) -> int | None:
    """The smallest of the sizes that are not `None`."""
    return min((size for size in sizes if size is not None), default=None)
