"""The budget of a calibration: bytes, or KL divergence."""

from dataclasses import dataclass

from kvlayers.errors import OptionError
from kvlayers.utils.units import amount_of_bytes


@dataclass(frozen=True)
class BytesBudget:
    """Ask for the least KL divergence within a number of bytes.

    Attributes:
        bytes_per_token: bytes that a packed token may take over all quantized layers, including keys, values, scales
            and zeros: 4320, or a text such as "4.2KiB", which becomes a number. In a model of full attention,
            `kvlayers.plan(...)["int4"].bytes_per_token` is the number for 4 bits everywhere.

    Raises:
        OptionError: `bytes_per_token` is not a number above 0.
    """

    bytes_per_token: float

    def __post_init__(self) -> None:
        if isinstance(self.bytes_per_token, str):
            object.__setattr__(self, "bytes_per_token", amount_of_bytes(self.bytes_per_token, "bytes_per_token"))
        _check_positive(self.bytes_per_token, "bytes_per_token")

    def rank(self, bytes_per_token: float, divergence: float) -> tuple[float, float]:
        """Sort key of a setting within the budget, less if it is better."""
        return divergence, bytes_per_token


@dataclass(frozen=True)
class DivergenceBudget:
    """Ask for the fewest bytes within a KL divergence.

    Attributes:
        divergence: the greatest mean KL divergence of the next-token distributions from full precision, on the texts
            of the calibration, in nats.

    Raises:
        OptionError: `divergence` is not a number above 0.
    """

    divergence: float

    def __post_init__(self) -> None:
        _check_positive(self.divergence, "divergence")

    def rank(self, bytes_per_token: float, divergence: float) -> tuple[float, float]:
        """Sort key of a setting, less if it is better. A setting beyond the budget is worse than any within it."""
        return (bytes_per_token if divergence <= self.divergence else float("inf")), divergence


Budget = BytesBudget | DivergenceBudget


def _check_positive(number: object, name: str) -> None:
    if isinstance(number, bool) or not isinstance(number, int | float) or not 0 < number < float("inf"):
        raise OptionError(f"`{name}` must be a number above 0, got {number!r}.")
