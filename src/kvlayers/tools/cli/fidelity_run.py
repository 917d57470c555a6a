"""What `kvlayers fidelity` does: it reads a text, or gives a model long-context tasks, through caches."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console

from kvlayers.errors import OptionError
from kvlayers.tools.cli.common import Dtype, one_line_errors
from kvlayers.tools.cli.console import bar_between_runs, plain, print_json, quiet_libraries, read_text, results_path
from kvlayers.tools.cli.fidelity_choice import (
    OPTIONS,
    ChosenCaches,
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
from kvlayers.tools.measuring.contenders import named_contender
from kvlayers.tools.measuring.fidelity import FULL, FidelityBudget, measure_fidelity
from kvlayers.tools.measuring.nbytes import held_nbytes
from kvlayers.tools.measuring.run_file import (
    PassageFile,
    ResultsFile,
    identity_of,
    run_identity,
)
from kvlayers.tools.measuring.scoring import NoRecord, PassageRecord
from kvlayers.tools.measuring.text import check_known
from kvlayers.tools.measuring.text import passages as passages_of
from kvlayers.tools.models import LoadedModel, RunFacts, find, find_device, load
from kvlayers.tools.names import FIDELITY_BITS, FIDELITY_CHUNK, TASK_BITS
from kvlayers.tools.reporting.page import command_line, publish, report_path
from kvlayers.tools.tasks.contract import samples_of
from kvlayers.tools.tasks.runner import run_tasks
from kvlayers.tools.tasks.summary import summarize
from kvlayers.upstream.model_types import tokens_at_once
from kvlayers.utils.units import bytes_or_share, tokens

EXACT = "dynamic"
"""The exact cache that every other cache is compared with in tasks."""


@dataclass(frozen=True)
class FidelityRequest:
    """What the user asked for, by the names of the options of `kvlayers fidelity`, which describes them."""

    model: str | None
    text: Path | None
    tasks: str | None
    bits: str | None
    names: Sequence[str]
    against: Sequence[str]
    calibration: Path | None
    context: str | None
    scored: str | None
    passages: int
    lengths: str | None
    depths: str
    samples: int
    seed: int
    chunk: int | None
    question_chunk: int | None
    max_kl: float | None
    max_perplexity_increase: float | None
    max_bytes: str | None
    budget: float | None
    dtype: Dtype
    device: str | None
    threads: int | None
    results: Path | None
    report: Path | None
    as_json: bool

    @property
    def text_name(self) -> str:
        """The file that is read, for readers."""
        return "Python's help" if self.text is None else str(self.text)


def measure(asked: FidelityRequest) -> bool:
    """Measure caches on a text, or on tasks, and show what they change. Returns whether the check passed."""
    # If stdout has the JSON, people read stderr.
    console = Console(stderr=asked.as_json)
    if asked.threads is not None:
        torch.set_num_threads(asked.threads)
    with one_line_errors("fidelity", OPTIONS), quiet_libraries():
        report = report_path(console, asked.report, None)
        file = results_path(asked.results, report)
        results = (_measure_text if asked.tasks is None else _measure_tasks)(console, asked, file)
        results.show(console)
        if report is not None:
            publish(console, results.report(command_line()), report)
    if asked.as_json:
        print_json(results.plain())
    return results.passed


def _measure_text(console: Console, asked: FidelityRequest, file: Path | None) -> FidelityResults:
    limit = None if asked.max_bytes is None else bytes_or_share(asked.max_bytes, "--max-bytes")
    budget = FidelityBudget(asked.max_kl, asked.max_perplexity_increase, limit)
    asked_context = None if asked.context is None else tokens(asked.context, "--context")
    asked_scored = None if asked.scored is None else tokens(asked.scored, "--scored")
    content = read_text(asked.text)
    target = find_device(asked.device)
    found = find(console, asked.model, "MODEL")
    at_once = FIDELITY_CHUNK if asked.chunk is None else asked.chunk
    chunk = min(at_once, tokens_at_once(found.config) or at_once)
    before, after = lengths(found.config, asked_context, asked_scored, chunk)
    chosen = choose_caches(
        asked.bits, asked.calibration, asked.names, asked.against, FIDELITY_BITS, found.config, before + after
    )
    texts = passages_of(found.tokenizer, content, asked.passages, before + after + 1)
    for ids in texts:
        check_known(found.config, ids)
    loaded = load(console, found, asked.dtype.on(target), target)
    facts = {"context": before, "scored": after, "passages": asked.passages, "chunk": chunk}
    with _record(console, file, chosen, loaded, content, facts) as record:
        chunks = asked.passages * (before + after) // chunk
        with bar_between_runs(console, chunks, "Every cache on every passage") as begin:
            measured = measure_fidelity(
                loaded.model, texts, chosen.makers, before, chunk, budget, record, lambda: begin("Reading")
            )
    return FidelityResults(
        run=RunFacts.of(loaded),
        text=asked.text_name,
        passages=asked.passages,
        context=before,
        scored=after,
        chunk=chunk,
        budget=budget,
        settings=measured,
        uses=chosen.uses,
        left_out=chosen.left_out,
    )


@contextmanager
def _record(
    console: Console,
    path: Path | None,
    chosen: ChosenCaches,
    loaded: LoadedModel,
    content: str,
    facts: Mapping[str, int],
) -> Iterator[PassageRecord]:
    """The record in the file of results; one that keeps nothing if the user named no file.

    Args:
        console: where to say how much is known.
        path: the file that the user named.
        chosen: the caches of this run.
        loaded: the model.
        content: the text.
        facts: what else decides the scores, the number of passages among it.
    """
    if path is None:
        yield NoRecord()
        return
    with PassageFile(path, identity_of(loaded.model, loaded.name, content, facts), chosen.uses) as record:
        names, passages = [FULL, *chosen.makers], facts["passages"]
        known = record.known(passages, names)
        if known:
            line = f"{known} of {passages * len(names)} readings of a passage through a cache were in {path}."
            console.print(line, markup=False, highlight=False, soft_wrap=True)
        yield record


def _measure_tasks(console: Console, asked: FidelityRequest, path: Path | None) -> TaskResults:
    target = find_device(asked.device)
    if asked.budget is not None and not 0 <= asked.budget <= 100:
        raise OptionError(f"`--budget` must be percentage points from 0 to 100, got {asked.budget:g}.")
    tasks, depths = chosen_tasks(asked.tasks or ""), chosen_depths(asked.depths)
    asked_lengths = chosen_lengths(asked.lengths)
    content = read_text(asked.text)
    found = find(console, asked.model, "MODEL")
    config, lengths = found.config, fitting_lengths(found.config, asked_lengths)
    samples = samples_of(tasks, lengths, depths, asked.samples, asked.seed, found.tokenizer, content)
    for sample in samples:
        check_known(config, torch.tensor(sample.context_ids + sample.question_ids + sample.answer_ids))
    most = needed_tokens(config, samples)
    exact = named_contender(EXACT, config, most)
    chosen = choose_caches(asked.bits, asked.calibration, asked.names, asked.against, TASK_BITS, config, most)
    contenders = [exact, *(each for each in chosen.contenders if each.key != exact.key)]
    # Weights are loaded when all that the user asked for is checked.
    loaded = load(console, found, asked.dtype.on(target), target)
    with ExitStack() as open_file:
        file, known = None, 0
        if path is not None:
            identity = run_identity(loaded.model, loaded.name, content, asked.seed, asked.chunk, asked.question_chunk)
            uses = {each.name: chosen.uses.get(each.short_name, {}) for each in contenders}
            # A calibration has options of its own each time, whatever its name.
            options = {name: plain(use) for name, use in uses.items() if "cache_config" in use}
            file = open_file.enter_context(ResultsFile(path, identity, options))
            known = sum(file.outcome(each.name, sample) is not None for sample in samples for each in contenders)
        runs = len(samples) * len(contenders)
        begin = open_file.enter_context(bar_between_runs(console, runs, "Every cache on every sample"))
        outcomes = run_tasks(
            loaded.model, loaded.tokenizer, samples, contenders, asked.chunk, file, begin, asked.question_chunk
        )
    at_once = asked.chunk or most
    return TaskResults(
        run=RunFacts.of(loaded),
        text=asked.text_name,
        tasks=tasks,
        lengths=lengths,
        depths=depths,
        samples=asked.samples,
        seed=asked.seed,
        chunk=asked.chunk,
        question_chunk=asked.question_chunk,
        budget=asked.budget,
        contenders=contenders,
        uses=chosen.uses,
        nbytes={each.name: held_nbytes(each.make, config, most, at_once) for each in contenders},
        nbytes_tokens=most,
        left_out=chosen.left_out,
        results_file=path,
        known=known,
        outcomes=outcomes,
        summary=summarize(outcomes, contenders[0].name),
    )
