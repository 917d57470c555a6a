"""What `kvlayers calibrate` was asked for, and how it shows what it has found."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from typing_extensions import Self

from kvlayers.errors import OptionError
from kvlayers.stores.quantization import Quantization
from kvlayers.tools.calibration import Budget, BytesBudget, Calibration, DivergenceBudget, MeasuredSetting
from kvlayers.tools.calibration.checks import check_context, checked_count, checked_layers, checked_widths
from kvlayers.tools.calibration.result import file_of
from kvlayers.tools.cli.files import FileError, check_writable, home_expanded
from kvlayers.tools.cli.output import pasted
from kvlayers.upstream.model_types import head_dims
from kvlayers.utils.units import amount_of_bytes, readable_bytes, tokens


@dataclass(frozen=True)
class CalibrationAsked:
    """The arguments of the command, checked as far as they can be without a model.

    Attributes:
        budget: of bytes, or of divergence.
        quantization: how is quantized, but for the bits.
        widths: bits to choose from, `None` for all of the backend.
        context: tokens of a passage before those that are scored.
        scored: tokens that are scored.
        file: where the result goes.
    """

    budget: Budget
    quantization: Quantization
    widths: tuple[int, ...] | None
    context: int
    scored: int
    file: Path

    @classmethod
    def of(
        cls,
        bytes_per_token: str | None,
        max_kl: float | None,
        bits: str | None,
        backend: str,
        context: str,
        scored: str,
        output: Path,
    ) -> Self:
        """The arguments as they were typed.

        Raises:
            OptionError: one that is none, no budget, or two.
            FileError: the file cannot be written.
        """
        quantization = Quantization(backend=backend)
        return cls(
            _budget(bytes_per_token, max_kl),
            quantization,
            None if bits is None else checked_widths(_numbers(bits), quantization),
            checked_count(tokens(context, "--context"), "--context"),
            checked_count(tokens(scored, "--scored"), "--scored"),
            _checked_file(output),
        )

    def check_layers(self, config: Any) -> None:
        """Raise where a model has nothing to quantize, or the context is too short for any of it.

        Raises:
            OptionError, ConfigError: as said.
        """
        checked_layers(config, self.quantization)
        dims = head_dims(config)
        if dims is not None:
            check_context(self.context, self.quantization, *dims)


@dataclass(frozen=True)
class CalibrationResults:
    """All that was found.

    Attributes:
        model: its name.
        text: the file that was read, or what it was.
        dtype: what the model computed in.
        device: where.
        passages: how many were read.
        asked: the arguments.
        calibration: what was found.
        file: where it was written.
        environment: hardware, versions and date.
    """

    model: str
    text: str
    dtype: torch.dtype
    device: torch.device
    passages: int
    asked: CalibrationAsked
    calibration: Calibration
    file: Path
    environment: Mapping[str, Any]

    @property
    def use(self) -> dict[str, Any]:
        """Arguments of `generate()` that ask for such a cache."""
        return {"cache_implementation": "quantized", "cache_config": self.calibration.cache_config}

    def plain(self) -> dict[str, Any]:
        """All of it in words of JSON."""
        return {
            "model": self.model,
            "text": self.text,
            "dtype": self.dtype,
            "device": str(self.device),
            "passages": self.passages,
            "context": self.asked.context,
            "scored": self.asked.scored,
            **self.environment,
            "budget": self.asked.budget,
            "chosen": self.calibration.chosen,
            "uniform": self.calibration.uniform,
            "file": str(self.file),
            "use": self.use,
        }


def show(console: Console, results: CalibrationResults) -> None:
    """Print what was chosen, beside the same bits everywhere, and where it is."""
    calibration = results.calibration
    console.print(_figures(calibration))
    for side in ("keys", "values"):
        console.print(f"{side}: {_bits(calibration, side)}", markup=False, highlight=False)
    for line in (f"Written to {results.file}", _usage(results)):
        # What is to be pasted stays in one piece.
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _figures(calibration: Calibration) -> Table:
    drawn = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for column in ("Bits", "A token", "Divergence"):
        drawn.add_column(column, justify="left" if column == "Bits" else "right")
    rows = {"calibrated": calibration.chosen, "the same everywhere": calibration.uniform}
    for name, setting in rows.items():
        if setting is not None:
            drawn.add_row(name, *_cells(setting), style="bold" if name == "calibrated" else None)
    return drawn


def _cells(setting: MeasuredSetting) -> tuple[str, str]:
    return readable_bytes(setting.bytes_per_token), f"{setting.divergence:.3g} nats"


def _bits(calibration: Calibration, side: str) -> str:
    """Bits of each layer, in the order of the layers; a dot for one that is not quantized."""
    numbers = calibration.cache_config["key_nbits" if side == "keys" else "value_nbits"]
    return " ".join("." if nbits is None else str(nbits) for nbits in numbers)


def _usage(results: CalibrationResults) -> str:
    options = f"kvlayers.Calibration.load({str(results.file)!r}).cache_config"
    return pasted({"cache_implementation": "quantized"}).removesuffix(")") + f", cache_config={options})"


def _budget(bytes_per_token: str | None, max_kl: float | None) -> Budget:
    if (bytes_per_token is None) == (max_kl is None):
        raise OptionError(
            "expected one budget, --bytes-per-token (such as 5KiB) or --max-kl (such as 0.001), but saw "
            f"{'neither' if max_kl is None else 'both'}."
        )
    if bytes_per_token is not None:
        return BytesBudget(amount_of_bytes(bytes_per_token, "--bytes-per-token"))
    return DivergenceBudget(max_kl or 0.0)


def _numbers(bits: str) -> tuple[int, ...]:
    try:
        return tuple(int(each) for each in bits.split(","))
    except ValueError:
        raise OptionError(
            f"expected --bits to be numbers separated by commas, such as 2,4,8, but saw {bits!r}."
        ) from None


def _checked_file(output: Path) -> Path:
    """Where the result goes, seen before minutes are spent on it."""
    file = file_of(home_expanded(output))
    if file.exists():
        # Nothing but another calibration is replaced.
        Calibration.load(file)
    there = next(parent for parent in file.resolve().parents if parent.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise FileError(f"expected a directory that can be written to, but {there} cannot: name another with --output.")
    if file.parent.is_dir():
        check_writable(file, "--output")
    return file
