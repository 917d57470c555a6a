"""What `kvlayers fidelity --documents` does: it concatenates documents, and reads on, or asks about them; and what
people read of the results of a text. Those of tasks are `TaskResults`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvlayers.documents import recompute_amount
from kvlayers.errors import OptionError
from kvlayers.models import most_positions, rotaries
from kvlayers.options import tokens
from kvlayers_lab.cli.console import bar_between_runs, measuring, read_text, results_path
from kvlayers_lab.cli.fidelity_run import EXACT, FidelityRun, check_points, chosen_tasks, needed_tokens
from kvlayers_lab.cli.report import Report, ReportPlot, ReportTable, conclude, curves, report_path
from kvlayers_lab.documents import DocumentFidelity, beginning_of, measure_documents, reading_of, recompute_contender
from kvlayers_lab.measuring.contenders import named_contender
from kvlayers_lab.models import RunFacts, find, load
from kvlayers_lab.names import DOCUMENT_SCORED
from kvlayers_lab.tasks.contract import samples_of

COLUMNS = ("Documents", "Recompute", "KL", "Top-1", "Perplexity", "Time")
NOTES = (
    "Each document is computed apart, after one common beginning, and kvlayers.concatenate(recompute=...) takes them.",
    "Recompute: a number means the first tokens of each document but the first one. A share is one of all tokens after "
    "the first document.",
    "KL: mean KL divergence of the next-token distribution from that after the whole text, in nats. The scored tokens "
    "go on with one of the documents.",
    "Top-1: the share of tokens whose likeliest next token is the same.",
    "Time: seconds to concatenate the documents, as a share of the seconds to compute all of them at once.",
)


@dataclass(frozen=True)
class DocumentsResults:
    """All measurements.

    Attributes:
        run: the model and the machine.
        text: the file that was read, or "Python's help".
        passages: sets of documents of each number.
        document_tokens: tokens of each document.
        scored: tokens that were read after the documents.
        max_kl: budget of the mean KL divergence, in nats a token; `None` for no budget.
        measured: the measurements.
    """

    run: RunFacts
    text: str
    passages: int
    document_tokens: int
    scored: int
    max_kl: float | None
    measured: Sequence[DocumentFidelity]

    def is_within(self, measured: DocumentFidelity) -> bool:
        """Whether concatenated documents are within the budget."""
        return measured.recompute is not None and self.max_kl is not None and measured.kl <= self.max_kl

    @property
    def passed(self) -> bool:
        """Whether for each number of documents, an amount is within the budget, if there is one."""
        counts = {each.documents for each in self.measured}
        return self.max_kl is None or counts == {each.documents for each in self.measured if self.is_within(each)}

    def plain(self) -> dict[str, Any]:
        """All measurements as JSON types."""
        return {
            **self.run.plain(),
            "text": self.text,
            "passages": self.passages,
            "document_tokens": self.document_tokens,
            "scored": self.scored,
            "max_kl": self.max_kl,
            "passed": self.passed,
            "documents": [vars(each) for each in self.measured],
        }

    @property
    def findings(self) -> list[str]:
        """The findings, one sentence each."""
        if self.max_kl is None:
            return ["KL alone does not show whether answers change: also run --tasks needle,keys,values."]
        found = []
        for count in dict.fromkeys(each.documents for each in self.measured):
            within = [each for each in self.measured if each.documents == count and self.is_within(each)]
            limit = f"a KL divergence of {self.max_kl:g} with {count} documents"
            if within:
                fastest = min(within, key=lambda each: each.seconds)
                found.append(f"Within {limit}, the fastest is recompute={fastest.recompute!r}.")
            else:
                found.append(f"Nothing is within {limit}: use recompute='100%', or raise --max-kl.")
        return found

    def report(self) -> Report:
        """What people read."""
        title = "What is lost, by what is recomputed"
        concatenated = [each for each in self.measured if each.recompute is not None]
        ordered = sorted(concatenated, key=lambda each: each.recomputed)

        def of(figure: str) -> dict[str, dict[float, float]]:
            lines: dict[str, dict[float, float]] = {}
            for each in ordered:
                lines.setdefault(f"{each.documents} documents", {})[100 * each.recomputed] = getattr(each, figure)
            return lines

        panels = ("KL, nats", of("kl")), ("same top-1", of("agreement"))
        rows = [self._cells(each) for each in self.measured]
        within = [index for index, each in enumerate(self.measured) if self.is_within(each)]
        return Report(
            title=f"Concatenated documents for {self.run.model}",
            tables=[ReportTable(self._title, COLUMNS, rows, within, texts=(1,))],
            findings=self.findings,
            plots=[ReportPlot(title, lambda: curves("documents", title, "recomputed tokens, percent", *panels))],
            notes=NOTES,
            facts={**self.run.settings, "Text": self.text, **self.run.machine},
        )

    @property
    def _title(self) -> str:
        sets = "1 set" if self.passages == 1 else f"{self.passages} sets"
        return f"{sets} of documents of {self.document_tokens} tokens, and {self.scored} tokens after them"

    def _cells(self, measured: DocumentFidelity) -> list[str]:
        is_full = measured.recompute is None
        return [
            str(measured.documents),
            "all at once" if is_full else str(measured.recompute),
            "0" if is_full else f"{measured.kl:.2g}",
            "" if is_full else f"{measured.agreement:.1%}",
            f"{measured.perplexity:#.4g}",
            f"{measured.of_full:.3f}",
        ]


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
            found = find(console, common.model, common.device, "MODEL")
            rotaries(found.config)
            needed = len(beginning_of(found.tokenizer)) + max(counts) * length + scored
            most = most_positions(found.config)
            if most is not None and needed > most:
                raise OptionError(
                    f"`--documents` and `--scored` tokens must be within the {most} positions of the model, got "
                    f"{needed} tokens: pass fewer documents, or a smaller `--document-tokens`."
                )
            loaded = load(console, found, common.dtype)
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
            return conclude(console, results, report, common.as_json)

    def over_tasks(self, asked_tasks: str, count: int, seed: int, budget: float | None) -> bool:
        """Ask about each of the documents, and show what is lost. Returns whether the check passed."""
        common = self.common
        with measuring("fidelity", OPTIONS, common.as_json, common.threads) as console:
            report = report_path(console, common.report, None)
            path = results_path(common.results, report)
            check_points(budget)
            counts, length, again = self._asked()
            tasks, content = chosen_tasks(asked_tasks), read_text(common.text)
            found = find(console, common.model, common.device, "MODEL")
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
            most = needed_tokens(found.config, samples)
            contenders = [named_contender(EXACT, found.config, most), *map(recompute_contender, again)]
            results = common.answered(
                console,
                found,
                samples,
                lambda model, sample: reading_of(model, found.tokenizer, again, sample, sample.length // length),
                content,
                {"seed": seed, "document_tokens": length},
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
            )
            return conclude(console, results, report, common.as_json)

    def _asked(self) -> tuple[list[int], int, list[int | str]]:
        """Numbers of documents, tokens of each, and amounts to recompute."""
        length = tokens(self.document_tokens, "--document-tokens")
        if length < 1:
            raise OptionError(f"`--document-tokens` must be at least 1, got {length}.")
        return document_counts(self.documents), length, recomputes(self.recompute)
