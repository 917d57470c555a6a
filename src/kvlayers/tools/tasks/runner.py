"""Gives samples of tasks to a model, through several caches."""

import itertools
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvlayers.errors import CapacityError, KVLayersError, OptionError
from kvlayers.tools.measuring.contenders import Contender
from kvlayers.tools.measuring.run_file import ResultsFile
from kvlayers.tools.tasks.contract import TaskSample, Tick
from kvlayers.tools.tasks.sample_reader import Decoding, SampleReader
from kvlayers.tools.tasks.summary import TaskOutcome

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


class TaskError(KVLayersError, RuntimeError):
    """The model cannot answer a sample even with the exact cache."""


def run_tasks(
    model: Any,
    tokenizer: Any,
    samples: Sequence[TaskSample],
    contenders: Sequence[Contender],
    chunk: int | None,
    done: ResultsFile | None,
    tick: Tick,
    question_chunk: int | None = None,
) -> list[TaskOutcome]:
    """Let a model answer samples through every cache.

    For each sample, a cache first takes in the context, then the question, then the tokens of the answer one by one. A
    cache that raises an error fails at this sample. If it lacks room, it also fails at every longer sample.

    Args:
        model: a causal language model in eval mode.
        tokenizer: its tokenizer.
        samples: the samples.
        contenders: the caches, the exact one first, each with a name of its own.
        chunk: tokens of a forward pass while context and question are read, so that the cache takes part in reading
            them; `None` to read each in one pass.
        done: file of results. Outcomes in it are not computed again, and new ones are added to it as they come.
            Failures in it are tried again.
        tick: called before each sample with each cache.
        question_chunk: tokens of a forward pass while the question is read, if other than `chunk`. With 1, the question
            is read as answers are, so that caches in which only single queries leave tokens out take part.

    Returns:
        One outcome for each sample and cache, in the order of the samples, and for each sample in the order of
        the caches.

    Raises:
        OptionError: `chunk` or `question_chunk` is not positive, or two caches have one name.
        TaskError: the first cache fails.
        ResultsFileError: the file cannot be written.
    """
    for name, size in (("chunk", chunk), ("question_chunk", question_chunk)):
        if size is not None and size < 1:
            raise OptionError(f"`{name}` must be at least 1 token, got {size}.")
    names = [contender.name for contender in contenders]
    if len(set(names)) != len(names):
        raise OptionError(f"`contenders` must have a name each, got {', '.join(names)}: leave out duplicates.")
    run = _Run(model, tokenizer, chunk, reference=names[0])
    outcomes = []
    for sample in samples:
        reader = SampleReader(model, sample, chunk, question_chunk)
        for contender in contenders:
            tick(f"{sample.task}, {sample.length} tokens: {contender.name}")
            outcome = None if done is None else done.outcome(contender.name, sample)
            if outcome is None:
                outcome = run.outcome(reader, contender)
                if done is not None:
                    done.add(outcome)
            outcomes.append(outcome)
    return outcomes


class _Run:
    """Computes outcomes, and remembers which caches lack room.

    Args:
        model: a causal language model in eval mode.
        tokenizer: its tokenizer.
        chunk: tokens of a forward pass.
        reference: name of the exact cache.
    """

    def __init__(self, model: Any, tokenizer: Any, chunk: int | None, reference: str) -> None:
        self.model, self.tokenizer, self.chunk, self.reference = model, tokenizer, chunk, reference
        self._full: dict[str, tuple[int, str]] = {}
        """For each cache that lacked room, the length of the sample, and the error."""

    def outcome(self, reader: SampleReader, contender: Contender) -> TaskOutcome:
        """The outcome of one sample with one cache."""
        sample = reader.sample
        if contender.name in self._full:
            length, failure = self._full[contender.name]
            if sample.length > length:
                return _outcome(contender, sample, failure=failure)
        try:
            answered = answer(self.tokenizer, sample, lambda: reader.read(contender.make))
            if not math.isfinite(answered.logprob):
                raise FloatingPointError(f"the mean log-probability of a right answer is {answered.logprob}")
        except Exception as error:
            failure = " ".join(f"{type(error).__name__}: {error}".split())
            if contender.name == self.reference:
                raise TaskError(
                    f"The model cannot answer the task {sample.task} of {sample.length} tokens with the exact cache "
                    f"({failure.rstrip('.')}): check the model, or ask for shorter lengths."
                ) from error
            if isinstance(error, CapacityError | torch.OutOfMemoryError):
                self._full[contender.name] = sample.length, failure
            return _outcome(contender, sample, failure=failure)
        score = answer_score(answered.text, sample.answers)
        return _outcome(contender, sample, score, answered.logprob, answered.text)


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
