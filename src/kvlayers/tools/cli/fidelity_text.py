"""What `kvlayers fidelity` does with a running text: it compares the predictions of every cache."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console

from kvlayers.tools.cli.dtypes import Dtype
from kvlayers.tools.cli.exit_codes import one_line_errors
from kvlayers.tools.cli.fidelity_choice import OPTIONS, ChosenCaches, choose_caches, lengths
from kvlayers.tools.cli.fidelity_results import FidelityResults
from kvlayers.tools.cli.fidelity_view import fidelity_report, show
from kvlayers.tools.cli.files import read_text, results_path
from kvlayers.tools.cli.output import print_json, quiet_libraries
from kvlayers.tools.cli.progress import bar_between_runs
from kvlayers.tools.cli.reports import command_line, publish, report_path
from kvlayers.tools.cli.run_facts import RunFacts
from kvlayers.tools.demo.loading import find, load
from kvlayers.tools.demo.model import LoadedModel, find_device
from kvlayers.tools.measuring.fidelity import FULL, FidelityBudget, measure_fidelity
from kvlayers.tools.measuring.passage_file import RESULTS, PassageFile
from kvlayers.tools.measuring.run_file import RunFile, identity_of
from kvlayers.tools.measuring.scoring import NoRecord, PassageRecord
from kvlayers.tools.measuring.text import check_known
from kvlayers.tools.measuring.text import passages as passages_of
from kvlayers.tools.names import FIDELITY_BITS
from kvlayers.upstream.model_types import tokens_at_once
from kvlayers.utils.units import bytes_or_share, tokens

TEXT_OPTIONS = {
    **OPTIONS,
    "max_kl": "--max-kl",
    "max_perplexity_increase": "--max-perplexity-increase",
    "max_bytes": "--max-bytes",
}


@dataclass(frozen=True)
class TextFidelityRequest:
    """What the user asked for, by the names of the options of `kvlayers fidelity`, which describes them."""

    model: str | None
    text: Path | None
    bits: str | None
    calibration: Path | None
    context: str | None
    scored: str | None
    passages: int
    chunk: int
    max_kl: float | None
    max_perplexity_increase: float | None
    max_bytes: str | None
    dtype: Dtype
    device: str | None
    threads: int | None
    report: Path | None
    as_json: bool
    names: tuple[str, ...]
    against: tuple[str, ...]
    results: Path | None


def measure_text(asked: TextFidelityRequest) -> bool:
    """Read passages of a text through every cache, and show what changes. Returns whether the check passed."""
    # If stdout has the JSON, people read stderr.
    console = Console(stderr=asked.as_json)
    if asked.threads is not None:
        torch.set_num_threads(asked.threads)
    with one_line_errors("fidelity", TEXT_OPTIONS), quiet_libraries():
        limit = None if asked.max_bytes is None else bytes_or_share(asked.max_bytes, "--max-bytes")
        budget = FidelityBudget(asked.max_kl, asked.max_perplexity_increase, limit)
        asked_context = None if asked.context is None else tokens(asked.context, "--context")
        asked_scored = None if asked.scored is None else tokens(asked.scored, "--scored")
        path = report_path(console, asked.report, None)
        results_file = results_path(asked.results, path)
        content = read_text(asked.text)
        target = find_device(asked.device)
        found = find(console, asked.model, "MODEL")
        chunk = min(asked.chunk, tokens_at_once(found.config) or asked.chunk)
        before, after = lengths(found.config, asked_context, asked_scored, chunk)
        chosen = choose_caches(
            asked.bits, asked.calibration, asked.names, asked.against, FIDELITY_BITS, found.config, before + after
        )
        texts = passages_of(found.tokenizer, content, asked.passages, before + after + 1)
        for ids in texts:
            check_known(found.config, ids)
        loaded = load(console, found, asked.dtype.on(target), target)
        facts = {"context": before, "scored": after, "passages": asked.passages, "chunk": chunk}
        with _record(console, results_file, chosen, loaded, content, facts) as record:
            chunks = asked.passages * (before + after) // chunk
            with bar_between_runs(console, chunks, "Every cache on every passage") as begin:
                measured = measure_fidelity(
                    loaded.model, texts, chosen.makers, before, chunk, budget, record, lambda: begin("Reading")
                )
        results = FidelityResults(
            run=RunFacts.of(loaded),
            text="Python's help" if asked.text is None else str(asked.text),
            passages=asked.passages,
            context=before,
            scored=after,
            chunk=chunk,
            budget=budget,
            settings=measured,
            uses=chosen.uses,
            left_out=chosen.left_out,
        )
        show(console, results)
        if path is not None:
            publish(console, fidelity_report(results, command_line()), path)
    if asked.as_json:
        print_json(results.plain())
    return results.passed


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
    with RunFile(path, RESULTS, identity_of(loaded.model, loaded.name, content, facts)) as file:
        record = PassageFile(file, chosen.uses)
        names, passages = [FULL, *chosen.makers], facts["passages"]
        known = record.known(passages, names)
        if known:
            line = f"{known} of {passages * len(names)} readings of a passage through a cache were in {path}."
            console.print(line, markup=False, highlight=False, soft_wrap=True)
        yield record
