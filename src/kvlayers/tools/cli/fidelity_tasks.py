"""What `kvlayers fidelity --tasks` does: it gives a model long-context tasks, and scores its answers through caches."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console

from kvlayers.errors import OptionError
from kvlayers.tools.cli.dtypes import Dtype
from kvlayers.tools.cli.exit_codes import one_line_errors
from kvlayers.tools.cli.fidelity_choice import OPTIONS, ChosenCaches, choose_caches
from kvlayers.tools.cli.fidelity_tasks_choice import (
    chosen_depths,
    chosen_lengths,
    chosen_tasks,
    fitting_lengths,
    needed_tokens,
)
from kvlayers.tools.cli.fidelity_tasks_results import Resumption, TaskResults
from kvlayers.tools.cli.fidelity_tasks_view import show
from kvlayers.tools.cli.files import read_text, results_path
from kvlayers.tools.cli.output import plain, print_json, quiet_libraries
from kvlayers.tools.cli.progress import bar_between_runs
from kvlayers.tools.cli.reports import command_line, publish, report_path
from kvlayers.tools.cli.run_facts import RunFacts
from kvlayers.tools.demo.loading import find, load
from kvlayers.tools.demo.model import FoundModel, LoadedModel, find_device
from kvlayers.tools.measuring.contenders import Contender, named_contender
from kvlayers.tools.measuring.held_bytes import held_nbytes
from kvlayers.tools.measuring.text import check_known
from kvlayers.tools.names import TASK_BITS
from kvlayers.tools.tasks.contract import TaskSample
from kvlayers.tools.tasks.results_file import ResultsFile, run_identity
from kvlayers.tools.tasks.runner import run_tasks
from kvlayers.tools.tasks.samples import samples_of
from kvlayers.tools.tasks.summary import summarize

TASK_OPTIONS = {**OPTIONS, "text": "--text", "lengths": "--lengths", "length": "--lengths", "depths": "--depths"}

EXACT = "dynamic"
"""The exact cache that every other cache is compared with."""


@dataclass(frozen=True)
class TaskFidelityRequest:
    """What the user asked for, by the names of the options of `kvlayers fidelity`, which describes them."""

    model: str | None
    text: Path | None
    tasks: str
    lengths: str | None
    depths: str
    samples: int
    seed: int
    budget: float | None
    bits: str | None
    calibration: Path | None
    names: tuple[str, ...]
    against: tuple[str, ...]
    chunk: int | None
    question_chunk: int | None
    dtype: Dtype
    device: str | None
    threads: int | None
    results: Path | None
    report: Path | None
    as_json: bool


@dataclass(frozen=True)
class _Plan:
    """What is measured, all of it checked.

    Attributes:
        found: the model, without its weights.
        content: text that filler is taken from.
        tasks: names of the tasks.
        lengths: tokens of context and question together.
        depths: where the answers stand, from 0 to 1.
        samples: the samples.
        tokens: the most tokens that a cache will hold.
        contenders: the caches, the exact one first.
        chosen: the caches that the user asked for.
    """

    found: FoundModel
    content: str
    tasks: Sequence[str]
    lengths: Sequence[int]
    depths: Sequence[float]
    samples: Sequence[TaskSample]
    tokens: int
    contenders: Sequence[Contender]
    chosen: ChosenCaches


def measure_tasks(asked: TaskFidelityRequest) -> bool:
    """Let a model answer the samples of tasks through every cache, and show the scores. Returns whether they passed."""
    # If stdout has the JSON, people read stderr.
    console = Console(stderr=asked.as_json)
    if asked.threads is not None:
        torch.set_num_threads(asked.threads)
    with one_line_errors("fidelity", TASK_OPTIONS), quiet_libraries():
        report = report_path(console, asked.report, None)
        file = results_path(asked.results, report)
        target = find_device(asked.device)
        plan = _checked(console, asked)
        loaded = load(console, plan.found, asked.dtype.on(target), target)
        results = _measure(console, asked, plan, loaded, file)
        show(console, results)
        if report is not None:
            # Imported late: it needs matplotlib.
            from kvlayers.tools.cli.fidelity_tasks_report import tasks_report

            publish(console, tasks_report(results, command_line()), report)
    if asked.as_json:
        print_json(results.plain())
    return results.passed


def _checked(console: Console, asked: TaskFidelityRequest) -> _Plan:
    """Check what the user asked for, before weights are loaded."""
    if asked.budget is not None and not 0 <= asked.budget <= 100:
        raise OptionError(f"`--budget` must be percentage points from 0 to 100, got {asked.budget:g}.")
    tasks, depths = chosen_tasks(asked.tasks), chosen_depths(asked.depths)
    asked_lengths = chosen_lengths(asked.lengths)
    content = read_text(asked.text)
    found = find(console, asked.model, "MODEL")
    lengths = fitting_lengths(found.config, asked_lengths)
    samples = samples_of(tasks, lengths, depths, asked.samples, asked.seed, found.tokenizer, content)
    for sample in samples:
        check_known(found.config, torch.tensor(sample.context_ids + sample.question_ids + sample.answer_ids))
    tokens = needed_tokens(found.config, samples)
    exact = named_contender(EXACT, found.config, tokens)
    chosen = choose_caches(asked.bits, asked.calibration, asked.names, asked.against, TASK_BITS, found.config, tokens)
    contenders = [exact, *(each for each in chosen.contenders if each.key != exact.key)]
    return _Plan(found, content, tasks, lengths, depths, samples, tokens, contenders, chosen)


def _measure(
    console: Console, asked: TaskFidelityRequest, plan: _Plan, loaded: LoadedModel, path: Path | None
) -> TaskResults:
    contenders, config = plan.contenders, plan.found.config
    at_once = asked.chunk or plan.tokens
    with ExitStack() as open_file:
        file, resumption = None, None
        if path is not None:
            identity = run_identity(
                loaded.model, loaded.name, plan.content, asked.seed, asked.chunk, asked.question_chunk
            )
            uses = {each.name: plan.chosen.uses.get(each.short_name, {}) for each in contenders}
            # A calibration has options of its own each time, whatever its name.
            options = {name: plain(use) for name, use in uses.items() if "cache_config" in use}
            file = open_file.enter_context(ResultsFile(path, identity, options))
            resumption = Resumption.of(file, plan.samples, contenders)
        runs = len(plan.samples) * len(contenders)
        begin = open_file.enter_context(bar_between_runs(console, runs, "Every cache on every sample"))
        outcomes = run_tasks(
            loaded.model, loaded.tokenizer, plan.samples, contenders, asked.chunk, file, begin, asked.question_chunk
        )
    return TaskResults(
        run=RunFacts.of(loaded),
        text="Python's help" if asked.text is None else str(asked.text),
        tasks=plan.tasks,
        lengths=plan.lengths,
        depths=plan.depths,
        samples=asked.samples,
        seed=asked.seed,
        chunk=asked.chunk,
        question_chunk=asked.question_chunk,
        budget=asked.budget,
        contenders=contenders,
        uses=plan.chosen.uses,
        nbytes={each.name: held_nbytes(each.make, config, plan.tokens, at_once) for each in contenders},
        nbytes_tokens=plan.tokens,
        left_out=plan.chosen.left_out,
        resumption=resumption,
        outcomes=outcomes,
        summary=summarize(outcomes, contenders[0].name),
    )
