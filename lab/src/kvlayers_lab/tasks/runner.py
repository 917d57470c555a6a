"""Gives samples of tasks to a model, through several caches."""

import contextlib
import functools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvlayers import DynamicCache, models
from kvlayers.errors import CapacityError, ConfigError, KVLayersError
from kvlayers.layers import observed, observer_of
from kvlayers.models import WINDOWED, config_of, kept_states, tokens_at_once
from kvlayers_lab.evaluation.caches import fork
from kvlayers_lab.measuring.contenders import Contender
from kvlayers_lab.measuring.run_file import ResultsFile
from kvlayers_lab.measuring.scoring import newest_logits
from kvlayers_lab.tasks.contract import TaskSample, Tick
from kvlayers_lab.tasks.summary import TaskOutcome

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
        queries: the queries by the index of their layer, `[1, heads, tokens, head_dim]`, rotated and not scaled; empty
            if they were not recorded. A layer is missing if its attention function does not show queries.
    """

    states: list[tuple[Tensor | None, Tensor | None]]
    queries: Mapping[int, Tensor]


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


Read = Callable[[Contender], Decoding]
"""Reads context and question of a sample for a contender, into a new cache."""


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
        question_chunk: tokens of a forward pass for the question, if other than `chunk`. With 1, the question is read
            as answers are, so that caches in which only single queries leave tokens out take part.

    Raises:
        ConfigError: the model keeps states outside its cache, which go on from one part of the sample to the next only
            if they come token by token.
    """

    def __init__(self, model: Any, sample: TaskSample, chunk: int | None, question_chunk: int | None = None) -> None:
        if (kept := kept_states(model)) is not None:
            raise ConfigError(f"`model` must keep all of its states in its cache, got one that keeps some in {kept}.")
        self.model, self.sample, self.chunk = model, sample, chunk
        self.question_chunk = chunk if question_chunk is None else question_chunk
        self._replays = chunk is None and has_only_keys_and_values(model)
        # Whether queries are recorded decides how attention computes, and thereby the last bits of states.
        self._with_queries = functools.cache(lambda recorded: context_states(model, sample.context_ids, recorded))

    def read(self, contender: Contender) -> Decoding:
        """Read context and question."""
        make_cache = contender.make
        at_once = tokens_at_once(self.model.config)
        cache = self._given_context(make_cache) if self._replays else None
        decoding = Decoding(self.model, make_cache() if cache is None else cache)
        if cache is None:
            decoding.read(self.sample.context_ids, None if self.chunk is None else smallest(self.chunk, at_once))
        decoding.read(self.sample.question_ids, smallest(self.question_chunk, at_once))
        return decoding

    def _given_context(self, make_cache: Callable[[], Any]) -> Any:
        """A cache with the states of the context, `None` if it must read the context itself."""
        for recorded in (False, True):
            cache = make_cache()
            with contextlib.suppress(QueriesNeededError):
                return cache if replay(self._with_queries(recorded), cache) else None
        return None


def has_only_keys_and_values(model: Any) -> bool:
    """Whether a pass changes a cache by `update(keys, values, layer)` only, and nothing else that later passes read."""
    config = config_of(model)
    if config.is_encoder_decoder:
        return False
    try:
        specs = models.layer_specs(config)
    except ConfigError:
        return False
    return {spec.layer_type for spec in specs} <= {"full_attention", *WINDOWED}


def context_states(model: Any, token_ids: Sequence[int], recorded: bool = False) -> ContextStates:
    """Keys and values of all tokens in each layer, layers with windows included.

    Args:
        model: a model that `has_only_keys_and_values`.
        token_ids: the tokens.
        recorded: whether the queries are recorded, in layers whose attention function shows them. The states may then
            differ in their last bits, as they do in a cache that looks at queries.
    """
    cache = (_QueryRecordingCache if recorded else DynamicCache)(length_hint=len(token_ids))
    Decoding(model, cache).append(token_ids)
    queries = cache.queries if isinstance(cache, _QueryRecordingCache) else {}
    return ContextStates([layer.peek() for layer in cache.adapted_layers()], queries)


@torch.no_grad()
def replay(context: ContextStates, cache: Any) -> bool:
    """Give an empty cache the states of a context. Returns whether it is now as if the model had read the context.

    It is if every update returns the states that it was given: the model would then have attended to these very states,
    in each layer, and would have given the same states to the next layer. A static cache of transformers is an
    example of a cache that returns others: it adds empty slots. A layer that waits for the queries that attend to its
    states, to evict by them, is shown those of the context. After `False`, or an error, the cache cannot be used.

    Args:
        context: what `context_states` returned.
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
        # As attention does to keys whose layer waits for queries.
        observe = observer_of(attended_keys)
        if observe is not None and index not in context.queries:
            raise QueriesNeededError
        if observe is not None:
            observe(context.queries[index])
    # A cache may have made its layers only now. If it has more than the model has filled, they were not meant for it.
    return len(cache.layers) == len(context.states) and all(map(_decides_by_states, cache.layers))


def _decides_by_states(cache_or_layer: object) -> bool:
    return type(cache_or_layer).__module__.partition(".")[0] in DECIDE_BY_STATES


def smallest(*sizes: int | None) -> int | None:
    """The smallest of the sizes that are not `None`."""
    return min((size for size in sizes if size is not None), default=None)


_WORD = "[0-9A-Za-z_]"
"""What a word or number goes on with. Letters of other scripts may stand beside a number without a space."""


def answer_score(answer: str, expected: Sequence[str]) -> float:
    """Share of the expected strings that an answer contains, from 0 to 1, as RULER scores answers.

    Upper and lower case are the same. An expected string counts only as whole words and whole numbers: 1234 is not
    in 12345.

    Reference: Hsieh et al., "RULER: What's the Real Context Size of Your Long-Context Language Models?" (2024),
    https://arxiv.org/abs/2404.06654.

    Args:
        answer: the text that a model generated.
        expected: the strings that a right answer contains, at least one.

    Examples:
        >>> answer_score("It is 1234.", ["1234"]), answer_score("12345", ["1234"])
        (1.0, 0.0)
        >>> answer_score("An owl and a Fox", ["fox", "bee"])
        0.5
    """
    found = [re.search(rf"(?<!{_WORD}){re.escape(each)}(?!{_WORD})", answer, re.IGNORECASE) for each in expected]
    return sum(match is not None for match in found) / len(expected)


def answer(tokenizer: Any, sample: TaskSample, read: Callable[[], Decoding]) -> tuple[str, float]:
    """Answer a sample. What the model generates and a right answer are both decoded token by token, as by `generate()`.

    The right answer is decoded with a copy of the cache. If the cache cannot be copied, another one reads the sample.

    Args:
        tokenizer: tokenizer of the model.
        sample: the sample.
        read: reads context and question into a new cache.

    Returns:
        The first line that the model generates with greedy decoding, and the mean log-probability of the tokens of a
        right answer, in nats.
    """
    decoding = read()
    forced, (first, *others) = decoding.copied() or read(), sample.answer_ids
    logprobs = [forced.logprob(first)]
    for token, following in zip(sample.answer_ids, others, strict=False):
        forced.append([token])
        logprobs.append(forced.logprob(following))
    text: str = tokenizer.decode(_generated(tokenizer, decoding, sample.max_answer_tokens), skip_special_tokens=True)
    mean = math.fsum(logprob.item() for logprob in logprobs) / len(logprobs)
    return text.strip().partition("\n")[0].rstrip(), mean


def _generated(tokenizer: Any, decoding: Decoding, most: int) -> list[int]:
    """Token ids of an answer, decoded to its end: the end of its first line, a token that ends texts, or `most` tokens.

    Args:
        tokenizer: tokenizer of the model.
        decoding: behind the question.
        most: the most tokens of the answer.
    """
    ends = decoding.model.generation_config.eos_token_id
    ends = {tokenizer.eos_token_id, *(ends if isinstance(ends, list) else [ends])}
    tokens: list[int] = []
    # Waiting for each token costs a device less than the passes behind the end of an answer would.
    while len(tokens) < most and "\n" not in tokenizer.decode(tokens).lstrip():
        if tokens:
            decoding.append(tokens[-1:])
        token = decoding.likeliest()
        if token in ends:
            break
        tokens.append(token)
    return tokens


class TaskError(KVLayersError, RuntimeError):
    """The model cannot answer a sample even with the exact cache."""


def run_tasks(
    tokenizer: Any,
    samples: Sequence[TaskSample],
    contenders: Sequence[Contender],
    read_of: Callable[[TaskSample], Read],
    done: ResultsFile | None,
    tick: Tick,
) -> list[TaskOutcome]:
    """Let a model answer samples through every cache.

    For each sample, a cache first takes in the context, then the question, then the tokens of the answer one by one. A
    cache that raises an error fails at this sample. If it lacks room, it also fails at every longer sample.

    Args:
        tokenizer: tokenizer of the model.
        samples: the samples.
        contenders: the caches, the exact one first, each with a name of its own.
        read_of: how each contender reads a sample, such as `SampleReader(...).read`.
        done: file of results. Outcomes in it are not computed again, and new ones are added to it as they come.
            Failures in it are tried again.
        tick: called before each sample with each cache.

    Returns:
        One outcome for each sample and cache, in the order of the samples, and for each sample in the order of
        the caches.

    Raises:
        TaskError: the first cache fails.
        ResultsFileError: the file cannot be written.
    """
    outcomes: list[TaskOutcome] = []
    lacked_room: dict[str, TaskOutcome] = {}
    for sample in samples:
        read = read_of(sample)
        for contender in contenders:
            tick(f"{sample.task}, {sample.length} tokens: {contender.name}")
            outcome = None if done is None else done.outcome(contender.name, sample)
            if outcome is None:
                full = lacked_room.get(contender.name)
                if full is not None and sample.length > full.length:
                    outcome = _outcome(contender, sample, failure=full.failure)
                else:
                    outcome = _answered(tokenizer, sample, read, contender, contender is contenders[0], lacked_room)
                if done is not None:
                    done.add(outcome)
            outcomes.append(outcome)
    return outcomes


def _answered(
    tokenizer: Any,
    sample: TaskSample,
    read: Read,
    contender: Contender,
    is_reference: bool,
    lacked_room: dict[str, TaskOutcome],
) -> TaskOutcome:
    """The outcome of one sample with one cache, which is noted in `lacked_room` if the cache lacks room for it."""
    try:
        text, logprob = answer(tokenizer, sample, lambda: read(contender))
        if not math.isfinite(logprob):
            raise FloatingPointError(f"the mean log-probability of a right answer is {logprob}")
    except Exception as error:
        failure = " ".join(f"{type(error).__name__}: {error}".split())
        if is_reference:
            raise TaskError(
                f"The model cannot answer the task {sample.task} of {sample.length} tokens with the exact cache "
                f"({failure.rstrip('.')}): check the model, or ask for shorter lengths."
            ) from error
        outcome = _outcome(contender, sample, failure=failure)
        if isinstance(error, CapacityError | torch.OutOfMemoryError):
            lacked_room[contender.name] = outcome
        return outcome
    return _outcome(contender, sample, answer_score(text, sample.answers), logprob, text)


def _outcome(
    contender: Contender,
    sample: TaskSample,
    score: float | None = None,
    logprob: float | None = None,
    answer: str = "",
    failure: str | None = None,
) -> TaskOutcome:
    return TaskOutcome(
        cache=contender.name,
        task=sample.task,
        length=sample.length,
        depth=sample.depth,
        index=sample.index,
        score=score,
        logprob=logprob,
        answer=answer,
        failure=failure,
    )
