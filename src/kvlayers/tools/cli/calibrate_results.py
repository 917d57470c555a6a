"""The arguments of `kvlayers calibrate`, checked before anything is measured, and its result."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from typing_extensions import Self

from kvlayers.errors import OptionError
from kvlayers.stores.quantization import Quantization
from kvlayers.tools.calibration import Budget, BytesBudget, Calibration, DivergenceBudget
from kvlayers.tools.calibration.calibrator import file_of
from kvlayers.tools.calibration.checks import check_context, checked_count, checked_layers, checked_widths
from kvlayers.tools.cli.console import check_creatable, home_expanded, table, usage_line
from kvlayers.tools.measuring.uneven_heads import UnevenHead
from kvlayers.tools.models import RunFacts
from kvlayers.upstream.model_types import head_dims
from kvlayers.utils.units import amount_of_bytes, readable_bytes, tokens


@dataclass(frozen=True)
class CalibrationRequest:
    """The arguments of the command, checked as far as possible without a model.

    Attributes:
        budget: a budget of bytes, or of KL divergence.
        quantization: how states are quantized, apart from the bits.
        widths: bits to choose from, `None` for all of the backend.
        context: tokens of a passage before the scored ones.
        scored: scored tokens of a passage.
        file: where the result is written.
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
        """Check the arguments as they were typed.

        Raises:
            OptionError: an argument is invalid, or there is not exactly one budget.
            FileError: the output cannot be written.
        """
        quantization = Quantization(backend=backend)
        return cls(
            _budget(bytes_per_token, max_kl),
            quantization,
            None if bits is None else checked_widths(_numbers(bits), quantization),
            checked_count(tokens(context, "--context"), "context_length"),
            checked_count(tokens(scored, "--scored"), "scored_tokens"),
            _checked_file(output),
        )

    def check_layers(self, config: Any) -> None:
        """Check that a model has layers to quantize, and that the context is long enough to quantize any token.

        Raises:
            ConfigError: no layer is quantized.
            OptionError: the context is too short.
        """
        checked_layers(config, self.quantization)
        dims = head_dims(config)
        if dims is not None:
            check_context(self.context, self.quantization, *dims)


def _budget(bytes_per_token: str | None, max_kl: float | None) -> Budget:
    if (bytes_per_token is None) == (max_kl is None):
        raise OptionError(
            "Pass one budget, `--bytes-per-token` (such as 5KiB) or `--max-kl` (such as 0.001): got "
            f"{'neither' if max_kl is None else 'both'}."
        )
    if bytes_per_token is not None:
        return BytesBudget(amount_of_bytes(bytes_per_token, "--bytes-per-token"))
    return DivergenceBudget(max_kl or 0.0)


def _numbers(bits: str) -> tuple[int, ...]:
    try:
        return tuple(int(each) for each in bits.split(","))
    except ValueError:
        raise OptionError(f"`--bits` must be numbers separated by commas, such as 2,4,8, got {bits!r}.") from None


def _checked_file(output: Path) -> Path:
    file = file_of(home_expanded(output))
    if file.exists():
        # Only another calibration may be replaced.
        Calibration.load(file)
    check_creatable(file, "--output")
    return file


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

    def show(self, console: Console) -> None:
        """Print the calibrated bits beside the best uniform ones, and where the file is."""
        calibration = self.calibration
        named = {"calibrated": calibration.chosen, "uniform": calibration.uniform}
        rows = [
            (name, readable_bytes(setting.bytes_per_token), f"{setting.divergence:.3g} nats")
            for name, setting in named.items()
            if setting is not None
        ]
        console.print(table(("Bits", "A token", "KL"), rows, styles=("bold",)))
        for side, option in (("keys", "key_nbits"), ("values", "value_nbits")):
            # A dot for a layer that is not quantized.
            bits = ("." if nbits is None else str(nbits) for nbits in calibration.cache_config[option])
            console.print(f"{side}: {' '.join(bits)}", markup=False, highlight=False)
        warning = () if self.uneven_head is None else (f"Warning: {self.uneven_head.sentence}.",)
        options = f"kvlayers.Calibration.load({str(self.file)!r}).cache_config"
        usage = usage_line({"cache_implementation": "quantized"}).removesuffix(")") + f", cache_config={options})"
        for line in (*warning, f"Written to {self.file}", usage):
            # A line to paste must not be wrapped.
            console.print(line, markup=False, highlight=False, soft_wrap=True)
