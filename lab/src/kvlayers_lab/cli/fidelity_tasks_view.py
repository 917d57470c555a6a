"""The answers of `kvlayers fidelity --tasks`: whether they passed, and what people read of them."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from kvlayers.options import readable_bytes
from kvlayers_lab.cli.console import usage_line
from kvlayers_lab.cli.report import Cells, Report, ReportPlot, ReportTable, heat_maps
from kvlayers_lab.measuring.contenders import Contender
from kvlayers_lab.models import RunFacts
from kvlayers_lab.tasks.summary import TaskFigures, TaskOutcome, TaskSummary

PAGE_ONLY = ("±", "Log-prob.", "Same", "A token")
NOTES = (
    "Score: the share of the expected strings that an answer contains, in percent. Each sample counts the same.",
    "Mean and loss leave out the tasks and lengths that the model is too weak for. Loss: the mean score of the exact "
    "cache less that of this cache, in percentage points; ±: its standard error over the samples.",
    "Log-prob.: the mean log-probability of a token of a right answer, in nats, over all samples. It falls before an "
    "answer turns wrong, while scores are all or nothing.",
    "Same: the share of the answers that are word for word those of the exact cache, in percent.",
    "A token: bytes per token of a cache of bfloat16 states that holds the longest sample and its answer, including "
    "scales and the tokens that stay in full precision.",
    "In a table of one length, the loss beside the exact cache stands in parentheses.",
)


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
        nbytes: bytes of a cache of bfloat16 states that holds `nbytes_tokens` tokens, by the name of the cache; `None`
            if they are not known.
        nbytes_tokens: tokens of the longest sample and its answer.
        left_out: for each default setting that the model does not support, why.
        results_file: the file that a run goes on from, `None` for no file.
        known: answers that were in the file.
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
    nbytes: Mapping[str, int | None]
    nbytes_tokens: int
    left_out: Mapping[str, str]
    results_file: Path | None
    known: int
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
            "resumed": self.known,
            "summary": self.summary.plain(),
            "outcomes": self.outcomes,
        }

    def _plain_cache(self, contender: Contender) -> dict[str, Any]:
        use = contender.generate_options
        return {
            "name": contender.name,
            "nbytes": self.nbytes[contender.name],
            "bytes_per_token": self.bytes_per_token(contender),
            **({} if use is None else {"use": use}),
            **({} if self.budget is None or contender is self.exact else {"within": contender in self.within}),
        }

    @property
    def findings(self) -> list[str]:
        """The findings, one sentence each."""
        found = [] if self.budget is None else self._verdict(self.budget)
        for task in self.tasks:
            lengths = [length for weak, length in self.summary.too_weak if weak == task]
            if lengths:
                found.append(
                    f"The model is too weak for {task} at {listed(lengths)} tokens: even with the exact cache, it "
                    f"scores less than {self.summary.too_weak_below:.0%}. Mean and loss leave these samples out."
                )
        for each in self.contenders:
            if each.name in self.failures:
                failed = sum(one.cache == each.name and one.failure is not None for one in self.outcomes)
                found.append(f"{each.short_name} failed at {counted(failed, 'sample')}: {self.failures[each.name]}")
        if self.known:
            found.append(f"{self.known} of {counted(len(self.outcomes), 'answer')} were in {self.results_file} before.")
        return found + [f"Not for this model: {name} ({reason})" for name, reason in self.left_out.items()]

    def _verdict(self, budget: float) -> list[str]:
        if not self.comparable:
            return [
                "The model is too weak for all of these tasks, so the budget cannot be judged: choose easier tasks, "
                "shorter lengths or a larger model."
            ]
        limit, best = f"a loss of {budget:g} percentage point{'' if budget == 1 else 's'}", self.recommended
        if best is None:
            return [f"No cache is within {limit}: keep the exact cache, or allow more."]
        within = f"Within {limit}: {', '.join(each.short_name for each in self.within)}."
        taken, exact = self.bytes_per_token(best), self.bytes_per_token(self.exact)
        if taken is not None and exact is not None:
            within += (
                f" The smallest is {best.short_name}, with {readable_bytes(taken)} a token, {taken / exact:.2f} of the "
                "exact cache."
            )
        use = best.generate_options
        return [within, *([] if use is None else [usage_line(use)])]

    @property
    def _title(self) -> str:
        return f"Scores in percent at {listed(self.lengths)} tokens"

    def _label(self, contender: Contender) -> str:
        """The name of a cache in tables and plots."""
        return f"{contender.short_name} (exact)" if contender is self.exact else contender.short_name

    def _mean_and_loss(self, contender: Contender) -> tuple[str, str]:
        """The mean score of a cache, and what it lost; empty if the model is too weak for all tasks."""
        figures = self.comparable.get(contender.name)
        if figures is None:
            return "", ""
        return _percent(figures.score), "" if contender is self.exact else _percent(figures.loss)

    def report(self) -> Report:
        """What people read."""
        read = "the context in one pass, with exact attention"
        if self.chunk is not None:
            read = f"{self.chunk} tokens at once, through every cache"
        if self.question_chunk is not None:
            read += f"; the question {self.question_chunk} at once"
        return Report(
            title=f"Long-context tasks for {self.run.model}",
            tables=[self._overall_table(), *map(self._length_table, self.lengths)],
            findings=self.findings,
            plots=self._plots(),
            notes=NOTES,
            facts={
                **self.run.settings,
                "Tasks": ", ".join(self.tasks),
                "Lengths": f"{listed(self.lengths)} tokens of context and question",
                "Depths": ", ".join(f"{100 * depth:.3g} %" for depth in self.depths),
                "Samples": f"{self.samples} per length and depth, seed {self.seed}",
                "Filler": self.text,
                "Read": read,
                **self.run.machine,
            },
        )

    def _overall_table(self) -> ReportTable:
        overall = {each.cache: each for each in self.summary.overall}
        by_task = {(each.cache, each.task): each for each in self.summary.by_task}
        within = [index for index, each in enumerate(self.contenders) if each in self.within]

        def row(contender: Contender) -> list[str]:
            figures, comparable = overall[contender.name], self.comparable.get(contender.name)
            taken = self.bytes_per_token(contender)
            return [
                self._label(contender),
                *(_percent(by_task[contender.name, task].score) for task in self.tasks),
                *self._mean_and_loss(contender),
                "" if comparable is None or contender is self.exact else _percent(comparable.loss_error),
                _nats(figures.logprob),
                _percent(figures.same_answers),
                "" if taken is None else readable_bytes(taken),
            ]

        columns = ("Cache", *self.tasks, "Mean", "Loss", *PAGE_ONLY)
        rows = [row(each) for each in self.contenders]
        return ReportTable(self._title, columns, rows, within, page_only=PAGE_ONLY)

    def _length_table(self, length: int) -> ReportTable:
        found = {(each.cache, each.task): each for each in self.summary.by_length if each.length == length}

        def row(contender: Contender) -> list[str]:
            every = [found[contender.name, task] for task in self.tasks]
            losses = ["" if each.loss is None else f" ({_percent(each.loss)})" for each in every]
            scores = [
                _percent(each.score) + ("" if contender is self.exact else loss)
                for each, loss in zip(every, losses, strict=True)
            ]
            return [self._label(contender), *scores, *(_nats(each.logprob) for each in every)]

        columns = ("Cache", *self.tasks, *(f"{task}, log-prob." for task in self.tasks))
        return ReportTable(f"{length:,} tokens", columns, [row(each) for each in self.contenders], on_console=False)

    def _plots(self) -> list[ReportPlot]:
        """Heat maps for each task with depths: of the scores, and of the log-probabilities."""
        found = []
        for task in dict.fromkeys(each.task for each in self.summary.by_depth if each.depth is not None):
            scores, logprobs = self._maps(task, "score"), self._maps(task, "logprob")
            every = [logprob for cells in logprobs.values() for logprob in cells.values()]
            title = f"{task}: score by length and depth"
            found.append(ReportPlot(title, partial(heat_maps, f"{task}-score", title, scores, (0, 1))))
            title = f"{task}: mean log-probability of a right answer, in nats a token, by length and depth"
            scale = min(every), max(every)
            found.append(ReportPlot(title, partial(heat_maps, f"{task}-logprob", title, logprobs, scale)))
        return found

    def _maps(self, task: str | None, figure: str) -> Mapping[str, Cells]:
        """For each cache, a figure of a task by length and depth."""
        labels = {each.name: self._label(each) for each in self.contenders}
        maps: dict[str, dict[tuple[int, float], float]] = {label: {} for label in labels.values()}
        for each in self.summary.by_depth:
            value = getattr(each, figure)
            if each.task == task and each.length is not None and each.depth is not None and value is not None:
                maps[labels[each.cache]][each.length, each.depth] = value
        return maps


def _percent(share: float | None) -> str:
    """A share, or a loss in percentage points; empty for `None`."""
    return "" if share is None else f"{100 * share:.1f}"


def counted(count: int, noun: str) -> str:
    """A number of things.

    Example:
        >>> counted(1, "sample"), counted(2048, "answer")
        ('1 sample', '2,048 answers')
    """
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def listed(numbers: Sequence[int]) -> str:
    """Numbers in a sentence.

    Example:
        >>> listed([512]), listed([512, 1024, 2048])
        ('512', '512, 1,024 and 2,048')
    """
    *others, last = (f"{number:,}" for number in numbers)
    return f"{', '.join(others)} and {last}" if others else last


def _nats(logprob: float | None) -> str:
    return "" if logprob is None else f"{logprob:.2f}"
