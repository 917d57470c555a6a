"""The answers of `kvlayers fidelity --tasks`, and whether they passed."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from kvlayers.tools.cli.run_facts import RunFacts
from kvlayers.tools.measuring.contenders import Contender
from kvlayers.tools.tasks.contract import TaskSample
from kvlayers.tools.tasks.outcome import TaskOutcome
from kvlayers.tools.tasks.results_file import ResultsFile
from kvlayers.tools.tasks.summary import TaskFigures, TaskSummary


@dataclass(frozen=True)
class Resumption:
    """What an earlier run had written to the file of results.

    Attributes:
        path: the file.
        known: answers that were in the file.
        wanted: answers of the whole run.
    """

    path: Path
    known: int
    wanted: int

    @classmethod
    def of(cls, file: ResultsFile, samples: Sequence[TaskSample], contenders: Sequence[Contender]) -> "Resumption":
        """What a file has of the answers of these caches to these samples."""
        pairs = [(each.name, sample) for sample in samples for each in contenders]
        return cls(file.path, sum(file.outcome(*pair) is not None for pair in pairs), len(pairs))


@dataclass(frozen=True)
class TaskResults:
    """All answers, and their means.

    Attributes:
        run: the model and the machine.
        text: the file that filler was taken from, or "Python's help".
        tasks: names of the tasks.
        lengths: tokens of context and question together.
        depths: where the answers stand, from 0 to 1.
        samples: samples of each task for each length and depth.
        seed: seed of the samples.
        chunk: tokens of a forward pass, `None` if the context was read in one pass.
        question_chunk: tokens of a forward pass for the question, `None` if as many as `chunk`.
        budget: percentage points of the mean score that a cache may lose, `None` for no budget.
        contenders: the caches, the exact one first.
        uses: arguments of `generate()` that ask for such a cache, by its short name, if there are such arguments.
        nbytes: bytes of a cache of bfloat16 states that holds `nbytes_tokens` tokens, by the name of the cache; `None`
            if they are not known.
        nbytes_tokens: tokens of the longest sample and its answer.
        left_out: for each default setting that the model does not support, why.
        resumption: what was in the file of results, `None` without a file.
        outcomes: the answer to every sample through every cache.
        summary: means of the outcomes.
    """

    run: RunFacts
    text: str
    tasks: Sequence[str]
    lengths: Sequence[int]
    depths: Sequence[float]
    samples: int
    seed: int
    chunk: int | None
    question_chunk: int | None
    budget: float | None
    contenders: Sequence[Contender]
    uses: Mapping[str, Mapping[str, Any]]
    nbytes: Mapping[str, int | None]
    nbytes_tokens: int
    left_out: Mapping[str, str]
    resumption: Resumption | None
    outcomes: Sequence[TaskOutcome]
    summary: TaskSummary

    @property
    def exact(self) -> Contender:
        """The exact cache."""
        return self.contenders[0]

    @cached_property
    def comparable(self) -> Mapping[str, TaskFigures]:
        """Figures of each cache, by its name, over the tasks and lengths that the model is not too weak for."""
        return {each.cache: each for each in self.summary.comparable}

    @cached_property
    def failures(self) -> Mapping[str, str]:
        """The first error of each cache that failed, by the name of the cache."""
        failed = [each for each in self.outcomes if each.failure is not None]
        return {each.cache: each.failure or "" for each in reversed(failed)}

    @cached_property
    def within(self) -> Sequence[Contender]:
        """The caches within the budget, without the exact one. There are none without a budget."""
        return [each for each in self.contenders[1:] if self._is_within(each)]

    def _is_within(self, contender: Contender) -> bool:
        figures = self.comparable.get(contender.name)
        if self.budget is None or figures is None or figures.loss is None or contender.name in self.failures:
            return False
        # Means are not exact: 0.05 may be 0.050000000000000044.
        return round(100 * figures.loss, 9) <= self.budget

    @property
    def recommended(self) -> Contender | None:
        """The cache within the budget that takes the fewest bytes, `None` if no cache is within it."""
        return min(self.within, key=lambda each: self.nbytes[each.name] or math.inf, default=None)

    @property
    def passed(self) -> bool:
        """Whether no cache failed, and if there is a budget, one cache is within it."""
        return not self.failures and (self.budget is None or bool(self.within))

    def bytes_per_token(self, contender: Contender) -> float | None:
        """Bytes of a cache that holds the longest sample, divided by its tokens; `None` if they are not known."""
        nbytes = self.nbytes[contender.name]
        return None if nbytes is None else nbytes / self.nbytes_tokens

    def plain(self) -> dict[str, Any]:
        """All answers and figures as JSON types."""
        return {
            **self.run.plain(),
            "text": self.text,
            "tasks": self.tasks,
            "lengths": self.lengths,
            "depths": self.depths,
            "samples": self.samples,
            "seed": self.seed,
            "chunk": self.chunk,
            "question_chunk": self.question_chunk,
            "budget": self.budget,
            "left_out": self.left_out,
            "caches": [self._plain_cache(each) for each in self.contenders],
            "recommended": None if self.recommended is None else self.recommended.name,
            "passed": self.passed,
            "resumed": 0 if self.resumption is None else self.resumption.known,
            "summary": self.summary.plain(),
            "outcomes": self.outcomes,
        }

    def _plain_cache(self, contender: Contender) -> dict[str, Any]:
        use = self.uses.get(contender.short_name)
        return {
            "name": contender.name,
            "nbytes": self.nbytes[contender.name],
            "bytes_per_token": self.bytes_per_token(contender),
            **({} if use is None else {"use": use}),
            **({} if self.budget is None or contender is self.exact else {"within": contender in self.within}),
        }
