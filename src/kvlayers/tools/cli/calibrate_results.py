"""The result of `kvlayers calibrate`, and how it is shown."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from kvlayers.tools.calibration import Calibration, MeasuredSetting
from kvlayers.tools.cli.calibrate_request import CalibrationRequest
from kvlayers.tools.cli.output import usage_line
from kvlayers.tools.cli.run_facts import RunFacts
from kvlayers.tools.measuring.uneven_heads import UnevenHead
from kvlayers.utils.units import readable_bytes


@dataclass(frozen=True)
class CalibrationResults:
    """A calibration, and how it was made.

    Attributes:
        run: the model and the machine.
        text: the file that was read, or "Python's help".
        passages: passages that were read.
        request: the arguments.
        calibration: the result.
        file: where the result was written.
        uneven_head: the head whose keys lose far more than those of the others, `None` if no head does.
    """

    run: RunFacts
    text: str
    passages: int
    request: CalibrationRequest
    calibration: Calibration
    file: Path
    uneven_head: UnevenHead | None

    @property
    def use(self) -> dict[str, Any]:
        """Arguments of `generate()` that ask for such a cache."""
        return {"cache_implementation": "quantized", "cache_config": self.calibration.cache_config}

    def plain(self) -> dict[str, Any]:
        """The results as JSON types."""
        return {
            **self.run.plain(),
            "text": self.text,
            "passages": self.passages,
            "context": self.request.context,
            "scored": self.request.scored,
            "budget": self.request.budget,
            "chosen": self.calibration.chosen,
            "uniform": self.calibration.uniform,
            "file": str(self.file),
            "uneven_head": self.uneven_head,
            "use": self.use,
        }


def show(console: Console, results: CalibrationResults) -> None:
    """Print the calibrated bits beside the best uniform ones, and where the file is."""
    calibration = results.calibration
    console.print(_table(calibration))
    for side in ("keys", "values"):
        console.print(f"{side}: {_bits(calibration, side)}", markup=False, highlight=False)
    uneven = results.uneven_head
    warning = () if uneven is None else (f"Warning: {uneven.sentence}.",)
    for line in (*warning, f"Written to {results.file}", _usage(results)):
        # A line to paste must not be wrapped.
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _table(calibration: Calibration) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for column in ("Bits", "A token", "KL"):
        table.add_column(column, justify="left" if column == "Bits" else "right")
    rows = {"calibrated": calibration.chosen, "uniform": calibration.uniform}
    for name, setting in rows.items():
        if setting is not None:
            table.add_row(name, *_cells(setting), style="bold" if name == "calibrated" else None)
    return table


def _cells(setting: MeasuredSetting) -> tuple[str, str]:
    return readable_bytes(setting.bytes_per_token), f"{setting.divergence:.3g} nats"


def _bits(calibration: Calibration, side: str) -> str:
    """Bits of each layer, in the order of the layers; a dot for a layer that is not quantized."""
    numbers = calibration.cache_config["key_nbits" if side == "keys" else "value_nbits"]
    return " ".join("." if nbits is None else str(nbits) for nbits in numbers)


def _usage(results: CalibrationResults) -> str:
    options = f"kvlayers.Calibration.load({str(results.file)!r}).cache_config"
    return usage_line({"cache_implementation": "quantized"}).removesuffix(")") + f", cache_config={options})"
