"""What `kvlayers fidelity` does: it reads a text, or gives a model long-context tasks, through caches."""

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from kvlayers.calls import NamedCache
from kvlayers.commands.common import Dtype
from kvlayers.commands.console import home_expanded, plain
from kvlayers.errors import KVLayersError, OptionError
from kvlayers.models import most_positions, tokens_at_once
from kvlayers.options import bytes_or_share, tokens
from kvlayers_lab.calibration import Calibration
from kvlayers_lab.cli.console import bar_between_runs, checked_lengths, measuring, read_text, results_path
from kvlayers_lab.cli.fidelity_tasks_view import TaskResults
from kvlayers_lab.cli.fidelity_view import FidelityResults
from kvlayers_lab.cli.report import conclude, report_path
from kvlayers_lab.measuring.contenders import (
    Contender,
    against_contenders,
    kvlayers_contender,
    named_contender,
    settings,
    uses_of,
)
from kvlayers_lab.measuring.fidelity import FULL, FidelityBudget, measure_fidelity
from kvlayers_lab.measuring.nbytes import bytes_of, held_nbytes
from kvlayers_lab.measuring.run_file import PassageFile, ResultsFile, identity_of
from kvlayers_lab.measuring.scoring import NoRecord
from kvlayers_lab.measuring.text import check_known
from kvlayers_lab.measuring.text import passages as passages_of
from kvlayers_lab.models import FoundModel, RunFacts, find, load
from kvlayers_lab.names import FIDELITY_BITS, FIDELITY_CHUNK, FIDELITY_CONTEXT, FIDELITY_SCORED, TASK_BITS, TASK_LENGTHS
from kvlayers_lab.tasks.contract import TaskSample, samples_of, task_names
from kvlayers_lab.tasks.runner import Read, SampleReader, run_tasks
from kvlayers_lab.tasks.summary import summarize

CALIBRATED = "calibrated"

OPTIONS = {
    "path": "--calibration",
    "name": "--cache",
    "against": "--against",
    "results": "--results",
    "backend": "--bits",
    "nbits": "--bits",
    "key_nbits": "--bits",
    "value_nbits": "--bits",
    "max_kl": "--max-kl",
    "max_perplexity_increase": "--max-perplexity-increase",
    "max_bytes": "--max-bytes",
    "text": "--text",
    "lengths": "--lengths",
    "length": "--lengths",
    "depths": "--depths",
}
"""For arguments that errors name, the options that they come from."""


def lengths(config: Any, context: int | None, scored: int | None, chunk: int) -> tuple[int, int]:
    """Tokens of context and scored tokens: as asked, or the defaults, or as many as the model has positions for.

    Raises:
        OptionError: they are not whole chunks, no token is scored, or the model has no positions for them.
    """
    most = most_positions(config)
    if context is None and scored is None and most is not None and most <= FIDELITY_CONTEXT + FIDELITY_SCORED:
        chunks = (most - 1) // chunk
        context, scored = (chunks - chunks // 3) * chunk, chunks // 3 * chunk
    # Defaults are cut to whole chunks.
    context = FIDELITY_CONTEXT // chunk * chunk if context is None else context
    scored = max(FIDELITY_SCORED // chunk, 1) * chunk if scored is None else scored
    if scored < 1 or context % chunk or scored % chunk:
        raise OptionError(
            f"`--context` and `--scored` must be multiples of `--chunk`, {chunk}, and at least one token must be "
            f"scored, got {context} and {scored}."
        )
    if most is not None and context + scored + 1 > most:
        raise OptionError(
            f"`--context` and `--scored` and the token after them must be within the {most} positions of the model, "
            f"got {context} + {scored} + 1: pass fewer tokens."
        )
    return context, scored


ALL = "all"


def chosen_tasks(text: str) -> list[str]:
    """Names of tasks, without duplicates. Raises `OptionError` if a name is unknown."""
    known = task_names()
    asked = [each.strip() for each in text.split(",")]
    if asked == [ALL]:
        return known
    for name in asked:
        if name not in known:
            raise OptionError(f"`--tasks` must be {', '.join(known)}, separated by commas, or {ALL}, got {name!r}.")
    return list(dict.fromkeys(asked))


def chosen_depths(text: str) -> list[float]:
    """Depths from 0 to 1, ascending. Raises `OptionError` if one is not a percentage."""
    found = set()
    for each in text.split(","):
        try:
            percentage = float(each)
        except ValueError:
            percentage = math.nan
        if not 0 <= percentage <= 100:
            raise OptionError(
                f"`--depths` must be percentages from 0 to 100, separated by commas, got {each.strip()!r}."
            )
        found.add(percentage / 100)
    return sorted(found)


def fitting_lengths(config: Any, asked: Sequence[int] | None) -> list[int]:
    """The lengths as asked, or the default lengths that the model has positions for.

    Raises:
        OptionError: the model has no positions for a length.
    """
    most = most_positions(config)
    if asked is None:
        default = checked_lengths(TASK_LENGTHS)
        # Some positions are left for the answer.
        return default if most is None else [each for each in default if each < most] or [most * 3 // 4]
    if most is not None and asked[-1] > most:
        raise OptionError(
            f"`--lengths` must be within the {most} positions of the model, got {asked[-1]}: pass shorter lengths."
        )
    return list(asked)


def needed_tokens(config: Any, samples: Sequence[TaskSample]) -> int:
    """The most tokens that a cache will hold: those of a sample and of its answer.

    Raises:
        OptionError: the model has no positions for an answer, or a token id is outside its vocabulary.
    """
    for sample in samples:
        check_known(config, torch.tensor(sample.context_ids + sample.question_ids + sample.answer_ids))
    longest = max(samples, key=_tokens_with_answer)
    needed, most = _tokens_with_answer(longest), most_positions(config)
    if most is not None and needed > most:
        raise OptionError(
            f"`lengths` must leave room for the answer within the {most} positions of the model, but {longest.task} "
            f"of {longest.length} tokens needs {needed}: pass shorter lengths."
        )
    return needed


def _tokens_with_answer(sample: TaskSample) -> int:
    asked = len(sample.context_ids) + len(sample.question_ids)
    return asked + max(sample.max_answer_tokens, len(sample.answer_ids))


def check_points(budget: float | None) -> None:
    """Raise `OptionError` unless a budget is in percentage points."""
    if budget is not None and not 0 <= budget <= 100:
        raise OptionError(f"`--budget` must be percentage points from 0 to 100, got {budget:g}.")


EXACT = "dynamic"
"""The exact cache that every other cache is compared with in tasks."""


@dataclass(frozen=True)
class FidelityRun:
    """A run of `kvlayers fidelity`: the options that runs over a text and over tasks have in common.

    `kvlayers fidelity` describes them, and the arguments of the methods.
    """

    model: str | None
    text: Path | None
    bits: str | None
    names: Sequence[str]
    against: Sequence[str]
    calibration: Path | None
    dtype: Dtype
    device: str | None
    threads: int | None
    results: Path | None
    report: Path | None
    as_json: bool

    def over_text(
        self,
        asked_context: str | None,
        asked_scored: str | None,
        passages: int,
        asked_chunk: int | None,
        max_kl: float | None,
        max_perplexity_increase: float | None,
        max_bytes: str | None,
    ) -> bool:
        """Measure caches on a text, and show what they change. Returns whether the check passed."""
        with measuring("fidelity", OPTIONS, self.as_json, self.threads) as console:
            report = report_path(console, self.report, None)
            file = results_path(self.results, report)
            limit = None if max_bytes is None else bytes_or_share(max_bytes, "--max-bytes")
            budget = FidelityBudget(max_kl, max_perplexity_increase, limit)
            context = None if asked_context is None else tokens(asked_context, "--context")
            scored = None if asked_scored is None else tokens(asked_scored, "--scored")
            content = read_text(self.text)
            found = find(console, self.model, self.device, "MODEL")
            config, at_once = found.config, asked_chunk or FIDELITY_CHUNK
            chunk = min(at_once, tokens_at_once(config) or at_once)
            before, after = lengths(config, context, scored, chunk)
            chosen, left_out = self._caches(FIDELITY_BITS, config, before + after)
            texts = passages_of(found.tokenizer, content, passages, before + after + 1)
            for ids in texts:
                check_known(config, ids)
            loaded = load(console, found, self.dtype)
            uses = uses_of(chosen)
            record = NoRecord()
            if file is not None:
                facts = {"context": before, "scored": after, "passages": passages, "chunk": chunk}
                record = PassageFile(file, identity_of(loaded.model, loaded.name, content, facts), uses)
                names = [FULL, *(each.short_name for each in chosen)]
                if known := record.known(passages, names):
                    line = f"{known} of {passages * len(names)} readings of a passage through a cache were in {file}."
                    console.print(line, markup=False, highlight=False, soft_wrap=True)
            makers = {each.short_name: each.make for each in chosen}
            chunks = passages * (before + after) // chunk
            with bar_between_runs(console, chunks, "Every cache on every passage") as begin:
                measured = measure_fidelity(
                    loaded.model, texts, makers, before, chunk, budget, record, lambda: begin("Reading")
                )
            results = FidelityResults(
                run=RunFacts.of(loaded),
                text=self.text_name,
                passages=passages,
                context=before,
                scored=after,
                chunk=chunk,
                budget=budget,
                settings=measured,
                uses=uses,
                left_out=left_out,
            )
            return conclude(console, results, report, self.as_json)

    def over_tasks(
        self,
        asked_tasks: str,
        asked_lengths: str | None,
        asked_depths: str,
        count: int,
        seed: int,
        chunk: int | None,
        question_chunk: int | None,
        budget: float | None,
    ) -> bool:
        """Give a model tasks through caches, and show what they change. Returns whether the check passed."""
        with measuring("fidelity", OPTIONS, self.as_json, self.threads) as console:
            report = report_path(console, self.report, None)
            path = results_path(self.results, report)
            check_points(budget)
            tasks, depths = chosen_tasks(asked_tasks), chosen_depths(asked_depths)
            wanted = None if asked_lengths is None else checked_lengths(asked_lengths)
            content = read_text(self.text)
            found = find(console, self.model, self.device, "MODEL")
            config, lengths = found.config, fitting_lengths(found.config, wanted)
            samples = samples_of(tasks, lengths, depths, count, seed, found.tokenizer, content)
            most = needed_tokens(config, samples)
            exact = named_contender(EXACT, config, most)
            chosen, left_out = self._caches(TASK_BITS, config, most)
            contenders = [exact, *(each for each in chosen if each.key != exact.key)]
            # Files of runs without a question in pieces of its own stay valid.
            of_question = {} if question_chunk is None else {"question_chunk": question_chunk}
            results = self.answered(
                console,
                found,
                samples,
                lambda model, sample: SampleReader(model, sample, chunk, question_chunk).read,
                content,
                {"seed": seed, "chunk": chunk, **of_question},
                tasks=tasks,
                lengths=lengths,
                depths=depths,
                samples=count,
                seed=seed,
                chunk=chunk,
                question_chunk=question_chunk,
                budget=budget,
                contenders=contenders,
                nbytes={each.name: held_nbytes(each.make, config, most, chunk or most) for each in contenders},
                nbytes_tokens=most,
                left_out=left_out,
                results_file=path,
            )
            return conclude(console, results, report, self.as_json)

    def answered(
        self,
        console: Console,
        found: FoundModel,
        asked: Sequence[TaskSample],
        read_of: Callable[[Any, TaskSample], Read],
        content: str,
        facts: Mapping[str, Any],
        *,
        contenders: Sequence[Contender],
        results_file: Path | None,
        **described: Any,
    ) -> TaskResults:
        """The answers of all contenders, those that the file of results had and new ones.

        Args:
            console: where the bar is drawn.
            found: the model, whose weights are loaded now, as all that the user asked for is checked.
            asked: the samples.
            read_of: how contenders read a sample with a model.
            content: the text that filler is taken from.
            facts: what decides the answers beside model and text.
            contenders: the caches, the exact one first.
            results_file: the file of results, `None` for no file.
            described: other attributes of the results.
        """
        loaded = load(console, found, self.dtype)
        file, known = None, 0
        if results_file is not None:
            uses = {each.name: plain(each.generate_options or {}) for each in contenders}
            # A calibration has options of its own each time, whatever its name.
            options = {name: use for name, use in uses.items() if "cache_config" in use}
            file = ResultsFile(results_file, identity_of(loaded.model, loaded.name, content, facts), options)
            pairs = itertools.product(contenders, asked)
            known = sum(file.outcome(each.name, sample) is not None for each, sample in pairs)
        with bar_between_runs(console, len(asked) * len(contenders), "Every cache on every sample") as begin:
            outcomes = run_tasks(
                loaded.tokenizer, asked, contenders, functools.partial(read_of, loaded.model), file, begin
            )
        return TaskResults(
            run=RunFacts.of(loaded),
            text=self.text_name,
            contenders=contenders,
            results_file=results_file,
            known=known,
            outcomes=outcomes,
            summary=summarize(outcomes, contenders[0].name),
            **described,
        )

    def _caches(self, default_bits: str, config: Any, tokens: int) -> tuple[list[Contender], dict[str, str]]:
        """The caches that the user named; the default settings if the user named neither settings nor caches.

        Args:
            default_bits: the default settings, as text.
            config: config of the model.
            tokens: the most tokens that a cache will hold.

        Returns:
            The caches; and for each default setting that the model does not support, why.

        Raises:
            KVLayersError: the model does not support a cache that the user named, or no cache at all.
        """
        asked = default_bits if self.bits is None and not self.names else self.bits
        rounded = {} if asked is None else settings(asked)
        optional = rounded.keys() if self.bits is None else ()
        if self.calibration is not None:
            found = Calibration.load(home_expanded(self.calibration))
            rounded = {**rounded, CALIBRATED: NamedCache("quantized", found.cache_config)}
        contenders, left_out = [], {}
        for name, named in rounded.items():
            contender = kvlayers_contender(name, named, config, tokens)
            try:
                bytes_of(contender.make, config, tokens)
                contenders.append(contender)
            except KVLayersError as error:
                if name not in optional:
                    raise
                left_out[name] = str(error)
        contenders += [named_contender(name, config, tokens) for name in self.names]
        contenders += against_contenders(self.against, config, tokens)
        for each in contenders:
            # So that a cache that the model does not support is refused before weights are loaded.
            each.make()
        if not contenders:
            raise OptionError(f"No setting of `--bits` suits the model: {next(iter(left_out.values()))}")
        return list({each.key: each for each in contenders}.values()), left_out

    @property
    def text_name(self) -> str:
        """Where the text is from, for readers."""
        return "Python's help" if self.text is None else str(self.text)
