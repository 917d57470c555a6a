"""What a model answers to a sample through a cache, and how likely it finds a right answer."""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from kvlayers.tools.tasks.contract import TaskSample
from kvlayers.tools.tasks.sample_reader import Decoding


@dataclass(frozen=True)
class TaskAnswer:
    """An answer, and how likely a right one was.

    Attributes:
        text: the first line that the model generated with greedy decoding.
        logprob: mean log-probability of the tokens of a right answer, in nats.
    """

    text: str
    logprob: float


def answer(tokenizer: Any, sample: TaskSample, read: Callable[[], Decoding]) -> TaskAnswer:
    """Answer a sample.

    What the model generates and a right answer are both decoded token by token, as `generate()` decodes. As long as
    they agree, they are decoded once. Where they part, the right answer goes on with a copy of the cache. If the cache
    cannot be copied, another one reads the sample again.

    Args:
        tokenizer: tokenizer of the model.
        sample: the sample.
        read: reads context and question into a new cache.
    """
    decoding = read()
    right = sample.answer_ids
    logprobs = _follow(decoding, right)
    agreed = right[: len(logprobs)]
    if len(agreed) < len(right):
        logprobs.append(decoding.logprob(right[len(agreed)]))
        if len(agreed) + 1 < len(right):
            logprobs += _forced(decoding.copied() or _read_again(read, agreed), right[len(agreed) :])
    text = _first_line(tokenizer, _generated(tokenizer, decoding, agreed, sample.max_answer_tokens))
    return TaskAnswer(text, math.fsum(logprob.item() for logprob in logprobs) / len(right))


def _follow(decoding: Decoding, right: Sequence[int]) -> list[Tensor]:
    """Append tokens as long as each is the likeliest one. Returns the log-probability of each token appended."""
    logprobs: list[Tensor] = []
    for token in right:
        if decoding.likeliest() != token:
            break
        logprobs.append(decoding.logprob(token))
        decoding.append([token])
    return logprobs


def _forced(decoding: Decoding, right: Sequence[int]) -> list[Tensor]:
    """Append all tokens but the last, whatever is likelier. Returns the log-probability of each token but the first."""
    logprobs = []
    for token, following in itertools.pairwise(right):
        decoding.append([token])
        logprobs.append(decoding.logprob(following))
    return logprobs


def _read_again(read: Callable[[], Decoding], agreed: Sequence[int]) -> Decoding:
    decoding = read()
    for token in agreed:
        decoding.append([token])
    return decoding


def _generated(tokenizer: Any, decoding: Decoding, begun: Sequence[int], most: int) -> list[int]:
    """Token ids of an answer, decoded to its end: the end of its first line, a token that ends texts, or `most` tokens.

    Args:
        tokenizer: tokenizer of the model.
        decoding: behind the first tokens of the answer.
        begun: these tokens.
        most: the most tokens of the answer.
    """
    ends = _end_tokens(tokenizer, decoding.model)
    tokens, appended = list(begun[:most]), len(begun)
    # Waiting for each token costs a device less than the passes behind the end of an answer would.
    while len(tokens) < most and "\n" not in tokenizer.decode(tokens).lstrip():
        if len(tokens) > appended:
            decoding.append(tokens[-1:])
        token = decoding.likeliest()
        if token in ends:
            break
        tokens.append(token)
    return tokens


def _first_line(tokenizer: Any, tokens: Sequence[int]) -> str:
    """The first line that is not empty."""
    text: str = tokenizer.decode(tokens, skip_special_tokens=True)
    return text.strip().partition("\n")[0].rstrip()


def _end_tokens(tokenizer: Any, model: Any) -> set[int | None]:
    ends = model.generation_config.eos_token_id
    return {tokenizer.eos_token_id, *(ends if isinstance(ends, list) else [ends])}
