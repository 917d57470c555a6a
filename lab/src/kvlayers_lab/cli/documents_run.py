"""What `kvlayers fidelity --documents` does: it concatenates documents, and reads on, or asks about them."""

from dataclasses import dataclass

import torch

from kvlayers.documents import recompute_amount
from kvlayers.errors import OptionError
from kvlayers.models import most_positions, rotaries
from kvlayers.options import tokens
from kvlayers_lab.cli.console import bar_between_runs, measuring, read_text, results_path
from kvlayers_lab.cli.documents_view import DocumentsResults
from kvlayers_lab.cli.fidelity_run import EXACT, FidelityRun, answered, check_points, chosen_tasks, needed_tokens
from kvlayers_lab.cli.fidelity_tasks_view import TaskResults
from kvlayers_lab.cli.report import conclude, report_path
from kvlayers_lab.documents import beginning_of, measure_documents, reading_of, recompute_contender
from kvlayers_lab.measuring.contenders import named_contender
from kvlayers_lab.measuring.run_file import identity_of
from kvlayers_lab.measuring.text import check_known
from kvlayers_lab.models import RunFacts, find, find_device, load
from kvlayers_lab.names import DOCUMENT_SCORED
from kvlayers_lab.tasks.contract import samples_of
from kvlayers_lab.tasks.summary import summarize

OPTIONS = {
    "recompute": "--recompute",
    "lengths": "--document-tokens",
    "text": "--text",
    "max_kl": "--max-kl",
    "results": "--results",
}
"""For arguments that errors name, the options that they come from."""


def document_counts(text: str) -> list[int]:
    """Numbers of documents, ascending. Raises `OptionError` if one is not at least 2."""
    found = sorted({int(each) if each.strip().isdecimal() else 0 for each in text.split(",")})
    if found[0] < 2:
        raise OptionError(f"`--documents` must be whole numbers, at least 2, separated by commas, got {text!r}.")
    return found


def recomputes(text: str) -> list[int | str]:
    """What is recomputed, as asked and in that order. Raises `OptionError` for anything but numbers and shares."""
    found: list[int | str] = []
    for each in text.split(","):
        written = each.strip()
        recompute = int(written) if written.isdecimal() else written
        recompute_amount(recompute)
        found.append(recompute)
    return list(dict.fromkeys(found))


@dataclass(frozen=True)
class DocumentsRun:
    """A run of `kvlayers fidelity --documents`.

    Attributes:
        common: the options that all runs of the command have.
        documents: numbers of documents, as text.
        document_tokens: tokens of each document, as text.
        recompute: amounts to recompute, as text.
    """

    common: FidelityRun
    documents: str
    document_tokens: str
    recompute: str

    def over_text(self, asked_scored: str | None, passages: int, max_kl: float | None) -> bool:
        """Score text after documents, and show what is lost. Returns whether the check passed."""
        common = self.common
        with measuring("fidelity", OPTIONS, common.as_json, common.threads) as console:
            report = report_path(console, common.report, None)
            counts, length, again = self._asked()
            scored = DOCUMENT_SCORED if asked_scored is None else tokens(asked_scored, "--scored")
            if scored < 2:
                raise OptionError(f"`--scored` must be at least 2 tokens, got {scored}.")
            content = read_text(common.text)
            target = find_device(common.device)
            found = find(console, common.model, "MODEL")
            rotaries(found.config)
            needed = len(beginning_of(found.tokenizer)) + max(counts) * length + scored
            most = most_positions(found.config)
            if most is not None and needed > most:
                raise OptionError(
                    f"`--documents` and `--scored` tokens must be within the {most} positions of the model, got "
                    f"{needed} tokens: pass fewer documents, or a smaller `--document-tokens`."
                )
            loaded = load(console, found, common.dtype.on(target), target)
            pieces = len(counts) * passages * (1 + len(again))
            with bar_between_runs(console, pieces, "Every amount for every set of documents") as begin:
                measured = measure_documents(
                    loaded.model, loaded.tokenizer, content, counts, length, scored, passages, again, begin
                )
            results = DocumentsResults(
                run=RunFacts.of(loaded),
                text=common.text_name,
                passages=passages,
                document_tokens=length,
                scored=scored,
                max_kl=max_kl,
                measured=measured,
            )
            conclude(console, results, report, common.as_json)
        return results.passed

    def over_tasks(self, asked_tasks: str, count: int, seed: int, budget: float | None) -> bool:
        """Ask about each of the documents, and show what is lost. Returns whether the check passed."""
        common = self.common
        with measuring("fidelity", OPTIONS, common.as_json, common.threads) as console:
            report = report_path(console, common.report, None)
            path = results_path(common.results, report)
            check_points(budget)
            counts, length, again = self._asked()
            tasks, content = chosen_tasks(asked_tasks), read_text(common.text)
            target = find_device(common.device)
            found = find(console, common.model, "MODEL")
            rotaries(found.config)
            # The answer stands in the middle of each document in turn.
            depths = {number: [(place + 0.5) / number for place in range(number)] for number in counts}
            samples = [
                sample
                for number in counts
                for sample in samples_of(
                    tasks, [number * length], depths[number], count, seed, found.tokenizer, content
                )
            ]
            for sample in samples:
                check_known(found.config, torch.tensor(sample.context_ids + sample.question_ids + sample.answer_ids))
            most = needed_tokens(found.config, samples)
            contenders = [named_contender(EXACT, found.config, most), *map(recompute_contender, again)]
            loaded = load(console, found, self.common.dtype.on(target), target)
            known, outcomes = answered(
                console,
                loaded.tokenizer,
                samples,
                contenders,
                lambda sample: reading_of(loaded.model, loaded.tokenizer, again, sample, sample.length // length),
                path,
                lambda: identity_of(loaded.model, loaded.name, content, {"seed": seed, "document_tokens": length}),
            )
            results = TaskResults(
                run=RunFacts.of(loaded),
                text=common.text_name,
                tasks=tasks,
                lengths=[number * length for number in counts],
                depths=sorted({depth for each in depths.values() for depth in each}),
                samples=count,
                seed=seed,
                chunk=None,
                question_chunk=None,
                budget=budget,
                contenders=contenders,
                nbytes={each.name: None for each in contenders},
                nbytes_tokens=most,
                left_out={},
                results_file=path,
                known=known,
                outcomes=outcomes,
                summary=summarize(outcomes, contenders[0].name),
            )
            conclude(console, results, report, common.as_json)
        return results.passed

    def _asked(self) -> tuple[list[int], int, list[int | str]]:
        """Numbers of documents, tokens of each, and amounts to recompute."""
        length = tokens(self.document_tokens, "--document-tokens")
        if length < 1:
            raise OptionError(f"`--document-tokens` must be at least 1, got {length}.")
        return document_counts(self.documents), length, recomputes(self.recompute)
