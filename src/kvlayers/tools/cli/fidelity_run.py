"""What `kvlayers fidelity` does: it reads a text, or gives a model long-context tasks, through caches."""

import itertools
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from kvlayers.errors import OptionError
from kvlayers.tools.cli.common import Dtype
from kvlayers.tools.cli.console import bar_between_runs, measuring, plain, read_text, results_path
from kvlayers.tools.cli.fidelity_choice import (
    OPTIONS,
    choose_caches,
    chosen_depths,
    chosen_lengths,
    chosen_tasks,
    fitting_lengths,
    lengths,
    needed_tokens,
)
from kvlayers.tools.cli.fidelity_tasks_view import TaskResults
from kvlayers.tools.cli.fidelity_view import FidelityResults
from kvlayers.tools.measuring.contenders import Contender, named_contender, uses_of
from kvlayers.tools.measuring.fidelity import FULL, FidelityBudget, measure_fidelity
from kvlayers.tools.measuring.nbytes import held_nbytes
from kvlayers.tools.measuring.run_file import PassageFile, ResultsFile, identity_of, run_identity
from kvlayers.tools.measuring.scoring import NoRecord, PassageRecord
from kvlayers.tools.measuring.text import check_known
from kvlayers.tools.measuring.text import passages as passages_of
from kvlayers.tools.models import RunFacts, find, find_device, load
from kvlayers.tools.names import FIDELITY_BITS, FIDELITY_CHUNK, TASK_BITS
from kvlayers.tools.reporting.page import conclude, report_path
from kvlayers.tools.tasks.contract import samples_of
from kvlayers.tools.tasks.runner import run_tasks
from kvlayers.tools.tasks.summary import summarize
from kvlayers.upstream.model_types import tokens_at_once
from kvlayers.utils.units import bytes_or_share, tokens

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
            target = find_device(self.device)
            found = find(console, self.model, "MODEL")
            config, at_once = found.config, asked_chunk or FIDELITY_CHUNK
            chunk = min(at_once, tokens_at_once(config) or at_once)
            before, after = lengths(config, context, scored, chunk)
            chosen, left_out = self._caches(FIDELITY_BITS, config, before + after)
            texts = passages_of(found.tokenizer, content, passages, before + after + 1)
            for ids in texts:
                check_known(config, ids)
            loaded = load(console, found, self.dtype.on(target), target)
            uses = uses_of(chosen)
            with ExitStack() as open_file:
                record: PassageRecord = NoRecord()
                if file is not None:
                    facts = {"context": before, "scored": after, "passages": passages, "chunk": chunk}
                    identity = identity_of(loaded.model, loaded.name, content, facts)
                    record = open_file.enter_context(PassageFile(file, identity, uses))
                    _say_known(console, record, passages, [FULL, *(each.short_name for each in chosen)])
                chunks = passages * (before + after) // chunk
                begin = open_file.enter_context(bar_between_runs(console, chunks, "Every cache on every passage"))
                makers = {each.short_name: each.make for each in chosen}
                measured = measure_fidelity(
                    loaded.model, texts, makers, before, chunk, budget, record, lambda: begin("Reading")
                )
            results = FidelityResults(
                run=RunFacts.of(loaded),
                text=self._text_name,
                passages=passages,
                context=before,
                scored=after,
                chunk=chunk,
                budget=budget,
                settings=measured,
                uses=uses,
                left_out=left_out,
            )
            conclude(console, results, report, self.as_json)
        return results.passed

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
            target = find_device(self.device)
            if budget is not None and not 0 <= budget <= 100:
                raise OptionError(f"`--budget` must be percentage points from 0 to 100, got {budget:g}.")
            tasks, depths = chosen_tasks(asked_tasks), chosen_depths(asked_depths)
            wanted = chosen_lengths(asked_lengths)
            content = read_text(self.text)
            found = find(console, self.model, "MODEL")
            config, lengths = found.config, fitting_lengths(found.config, wanted)
            samples = samples_of(tasks, lengths, depths, count, seed, found.tokenizer, content)
            for sample in samples:
                check_known(config, torch.tensor(sample.context_ids + sample.question_ids + sample.answer_ids))
            most = needed_tokens(config, samples)
            exact = named_contender(EXACT, config, most)
            chosen, left_out = self._caches(TASK_BITS, config, most)
            contenders = [exact, *(each for each in chosen if each.key != exact.key)]
            # Weights are loaded when all that the user asked for is checked.
            loaded = load(console, found, self.dtype.on(target), target)
            with ExitStack() as open_file:
                file, known = None, 0
                if path is not None:
                    identity = run_identity(loaded.model, loaded.name, content, seed, chunk, question_chunk)
                    uses = {each.name: plain(each.generate_options or {}) for each in contenders}
                    # A calibration has options of its own each time, whatever its name.
                    options = {name: use for name, use in uses.items() if "cache_config" in use}
                    file = open_file.enter_context(ResultsFile(path, identity, options))
                    asked = itertools.product(contenders, samples)
                    known = sum(file.outcome(each.name, sample) is not None for each, sample in asked)
                runs = len(samples) * len(contenders)
                begin = open_file.enter_context(bar_between_runs(console, runs, "Every cache on every sample"))
                outcomes = run_tasks(
                    loaded.model, loaded.tokenizer, samples, contenders, chunk, file, begin, question_chunk
                )
            results = TaskResults(
                run=RunFacts.of(loaded),
                text=self._text_name,
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
                known=known,
                outcomes=outcomes,
                summary=summarize(outcomes, exact.name),
            )
            conclude(console, results, report, self.as_json)
        return results.passed

    def _caches(self, default_bits: str, config: Any, most: int) -> tuple[list[Contender], dict[str, str]]:
        return choose_caches(self.bits, self.calibration, self.names, self.against, default_bits, config, most)

    @property
    def _text_name(self) -> str:
        return "Python's help" if self.text is None else str(self.text)


def _say_known(console: Console, record: PassageFile, passages: int, names: Sequence[str]) -> None:
    known = record.known(passages, names)
    if known:
        line = f"{known} of {passages * len(names)} readings of a passage through a cache were in {record.path}."
        console.print(line, markup=False, highlight=False, soft_wrap=True)
