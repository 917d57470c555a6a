"""The measurements of `kvlayers fidelity` on a text: whether they passed, and what people read of them."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from kvlayers.options import readable_bytes
from kvlayers_lab.cli.console import usage_line
from kvlayers_lab.cli.report import Report, ReportPlot, ReportTable, curves, labelled_points
from kvlayers_lab.measuring.fidelity import FULL, FidelityBudget, SettingFidelity
from kvlayers_lab.models import RunFacts

COLUMNS = (
    "Setting",
    "KL",
    "KL, 99th",
    "KL, first to last quarter",
    "Perplexity",
    "Increase",
    "Top-1",
    "A token",
    "Of full",
)
WITHIN = "Within"
PAGE_ONLY = ("KL, 99th", "KL, first to last quarter")
NOTES = (
    "KL: mean KL divergence of the next-token distribution from that of the same model over transformers' DynamicCache "
    "in full precision, in nats. 99th: the 99th percentile over the tokens.",
    "Top-1: the share of tokens whose likeliest next token is the same.",
    "A token: bytes per token of a cache of bfloat16 states that holds a whole passage, including scales and the "
    "newest tokens, which stay in full precision. The longer the context, the less those newest tokens count.",
    "First to last quarter: mean KL divergence of the first and of the last quarter of the scored tokens.",
    "By position: position 0 is the first token of a passage. Each point is the mean over a range of tokens.",
    "The passages are spread evenly over the text; nothing is chosen at random.",
    "k4v2: 4 bits for keys, 2 for values.",
)


@dataclass(frozen=True)
class FidelityResults:
    """All measurements.

    Attributes:
        run: the model and the machine.
        text: the file that was read, or "Python's help".
        passages: passages that were read.
        context: tokens of each passage before the scored ones.
        scored: scored tokens of each passage.
        chunk: tokens of a forward pass.
        budget: how much worse predictions may be.
        settings: the result of each setting, full precision first.
        uses: arguments of `generate()` that ask for such a cache, by the name of the setting.
        left_out: for each setting that the model does not support, why.
    """

    run: RunFacts
    text: str
    passages: int
    context: int
    scored: int
    chunk: int
    budget: FidelityBudget
    settings: Sequence[SettingFidelity]
    uses: Mapping[str, Mapping[str, Any]]
    left_out: Mapping[str, str]

    @property
    def recommended(self) -> SettingFidelity | None:
        """The best setting within the budget, `None` if no setting is within it, or without a budget."""
        return self.budget.best_of(self.settings)

    @property
    def passed(self) -> bool:
        """Whether every setting has figures, and if there is a budget, one setting is within it."""
        if not all(math.isfinite(each.kl) for each in self.settings):
            return False
        return self.recommended is not None or not self.budget.is_given

    def plain(self) -> dict[str, Any]:
        """All measurements as JSON types."""
        recommended = self.recommended
        return {
            **self.run.plain(),
            "text": self.text,
            "passages": self.passages,
            "context": self.context,
            "scored": self.scored,
            "chunk": self.chunk,
            "budget": {
                **vars(self.budget),
                "max_bytes": None if self.budget.max_bytes is None else limit_text(self.budget.max_bytes),
            },
            "left_out": self.left_out,
            "settings": [self._plain_setting(each) for each in self.settings],
            "recommended": None if recommended is None else recommended.name,
            "passed": self.passed,
        }

    def _plain_setting(self, measured: SettingFidelity) -> dict[str, Any]:
        """The figures that are finite, since JSON has no other numbers, and the failure if there is one."""
        finite = {
            name: value
            for name, value in vars(measured).items()
            if not (isinstance(value, float) and not math.isfinite(value)) and (name != "failure" or value)
        }
        return finite | ({"use": self.uses[measured.name]} if measured.name in self.uses else {})

    @property
    def findings(self) -> list[str]:
        """The findings beside the answer, one sentence each."""
        best = self.recommended
        found = [usage_line(self.uses[best.name])] if best is not None and best.name in self.uses else []
        found += [f"{each.name} failed: {each.failure}" for each in self.settings if each.failure is not None]
        if not any(each.kl for each in self.settings if each.name != FULL):
            found.append(
                "Nothing was rounded: the newest tokens, and windows, stay in full precision. A longer --context may "
                "change that."
            )
        heads = ((each.name, each.uneven_head) for each in self.settings)
        found += [f"Warning: {name}: {head.sentence}." for name, head in heads if head is not None]
        found += self._growth()
        return found + [f"Not for this model: {name} ({reason})" for name, reason in self.left_out.items()]

    def report(self) -> Report:
        """What people read."""
        within = [index for index, each in enumerate(self.settings) if each.within]
        rows = [self._cells(each) for each in self.settings]
        title = "KL divergence against bytes"
        points = {
            each.name: (each.bytes_per_token, each.kl) for each in self.settings if each.bytes_per_token is not None
        }
        return Report(
            title=f"Fidelity of caches for {self.run.model}",
            answer=self._verdict(),
            tables=[ReportTable(self._title, self._columns, rows, within, page_only=PAGE_ONLY)],
            findings=self.findings,
            plots=[
                ReportPlot(
                    title,
                    lambda: labelled_points("kl", title, "bytes a token", "mean KL divergence, nats", points),
                ),
                *self._curves(),
            ],
            notes=NOTES,
            facts={
                **self.run.settings,
                "Text": self.text,
                "Tokens at once": str(self.chunk),
                **self.run.machine,
            },
        )

    def _curves(self) -> list[ReportPlot]:
        """Curves of the KL divergence and of the agreement of each cache. No plot if no cache has any."""
        title = "Fidelity by position"
        found = [each for each in self.settings if each.name != FULL and each.by_position]

        def of(figure: str) -> dict[str, dict[float, float]]:
            # A point stands in the middle of its range.
            return {
                each.name: {(one.start + one.stop - 1) / 2: getattr(one, figure) for one in each.by_position}
                for each in found
            }

        panels = ("KL, nats", of("kl")), ("same top-1", of("agreement"))
        x_label = "position in the passage, tokens"
        return [ReportPlot(title, lambda: curves("position", title, x_label, *panels))] if found else []

    @property
    def _title(self) -> str:
        passages = "1 passage" if self.passages == 1 else f"{self.passages} passages"
        return f"{passages} of {self.context} tokens of context and {self.scored} scored tokens"

    @property
    def _columns(self) -> tuple[str, ...]:
        return (*COLUMNS, WITHIN) if self.budget.is_given else COLUMNS

    def _cells(self, measured: SettingFidelity) -> list[str]:
        verdict = (
            [] if not self.budget.is_given else ["" if measured.within is None else ("no", "yes")[measured.within]]
        )
        per_token, of_full = measured.bytes_per_token, measured.of_full
        held = ["" if per_token is None else readable_bytes(per_token), "" if of_full is None else f"{of_full:.3f}"]
        if measured.failure is not None:
            return [measured.name, "failed", "", "", "", "", "", *held, *verdict]
        if measured.name == FULL:
            return [measured.name, "0", "0", "", f"{measured.perplexity:#.5g}", "", "", *held, *verdict]
        quarters = "" if measured.drift is None else f"{measured.drift.first.kl:.2g} to {measured.drift.last.kl:.2g}"
        return [
            measured.name,
            f"{measured.kl:.2g}",
            f"{measured.kl_99:.2g}",
            quarters,
            f"{measured.perplexity:#.5g}",
            f"{measured.perplexity_increase:+.{2 if abs(measured.perplexity_increase) < 100 else 0}f} %",
            f"{measured.agreement:.1%}",
            *held,
            *verdict,
        ]

    def _verdict(self) -> str:
        """The answer in one sentence: the best cache within the budget; without one, the best within half the bytes."""
        budget, best = self.budget, self.recommended
        if not budget.is_given:
            small = (each for each in self.settings if each.of_full is not None and each.of_full <= 0.5)
            best = min((each for each in small if math.isfinite(each.kl)), key=lambda each: each.kl, default=None)
            if best is None:
                return "No measured setting takes half the memory of full precision or less."
            return f"In half the memory of full precision, least is lost with {_described(best)}."
        limits = [
            *([] if budget.max_bytes is None else [f"{limit_text(budget.max_bytes)} of memory"]),
            *([] if budget.max_kl is None else [f"a KL divergence of {budget.max_kl:g}"]),
            *(
                []
                if budget.max_perplexity_increase is None
                else [f"{budget.max_perplexity_increase:g} % more perplexity"]
            ),
        ]
        if best is None:
            return f"No setting is within {' and '.join(limits)}: keep full precision, or allow more."
        how = "The smallest is" if budget.max_bytes is None else "Least is lost with"
        within = ", ".join(each.name for each in self.settings if each.within)
        return f"Within {' and '.join(limits)}: {within}. {how} {_described(best)}."

    def _growth(self) -> list[str]:
        """A sentence about the caches whose KL divergence grows along the scored tokens, if there are any."""
        growing = [(each.name, each.drift) for each in self.settings if each.drift is not None and each.drift.grows]
        if not growing:
            return []
        first, last = growing[0][1].first, growing[0][1].last
        figures = ", ".join(
            f"{name} from {drift.first.kl:.2g} to {drift.last.kl:.2g} (in {drift.growing_passages} of {drift.passages} "
            "passages)"
            for name, drift in growing
        )
        return [
            f"KL grows between tokens {first.start:,} to {first.stop - 1:,} and tokens {last.start:,} to "
            f"{last.stop - 1:,}: {figures}."
        ]


def limit_text(max_bytes: int | Fraction) -> str:
    """A limit of bytes as people write it."""
    return f"{float(100 * max_bytes):g}%" if isinstance(max_bytes, Fraction) else readable_bytes(max_bytes)


def _described(best: SettingFidelity) -> str:
    size = (
        "whose bytes are not known"
        if best.bytes_per_token is None
        else f"with {readable_bytes(best.bytes_per_token)} a token, {best.of_full:.2f} of full precision"
    )
    return f"{best.name}, {size}; its KL is {best.kl:.2g}, and {best.agreement:.1%} of the top tokens are the same"
