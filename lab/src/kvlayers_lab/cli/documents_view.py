"""The measurements of `kvlayers fidelity --documents` on a text: whether they passed, and how they are shown."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from kvlayers.commands.console import table
from kvlayers_lab.cli.console import print_sentences
from kvlayers_lab.cli.report import Report, ReportPlot, ReportTable, curves
from kvlayers_lab.documents import DocumentFidelity
from kvlayers_lab.models import RunFacts

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

    def show(self, console: Console) -> None:
        """Print the table, and the findings."""
        styles = ["bold" if self.is_within(each) else None for each in self.measured]
        console.print(table(COLUMNS, map(self._cells, self.measured), self._title, styles, texts=(1,)))
        print_sentences(console, self.findings)

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

    def report(self, command: str) -> Report:
        """The report as a page. It needs matplotlib."""
        lines: dict[str, list[DocumentFidelity]] = {}
        for each in self.measured:
            if each.recompute is not None:
                lines.setdefault(f"{each.documents} documents", []).append(each)
        title = "What is lost, by what is recomputed"

        def of(name: str) -> Mapping[str, Mapping[float, float]]:
            return {
                line: {100 * each.recomputed: getattr(each, name) for each in sorted(found, key=_recomputed)}
                for line, found in lines.items()
            }

        panels = ("KL, nats", of("kl")), ("same top-1", of("agreement"))
        return Report(
            title=f"Concatenated documents for {self.run.model}",
            command=command,
            findings=self.findings,
            tables=[ReportTable(self._title, COLUMNS, [self._cells(each) for each in self.measured])],
            plots=[ReportPlot(title, curves("documents", title, "recomputed tokens, percent", *panels))],
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


def _recomputed(measured: DocumentFidelity) -> float:
    return measured.recomputed
