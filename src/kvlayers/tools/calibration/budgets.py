"""What a calibration must stay within."""

from dataclasses import dataclass

from kvlayers.errors import OptionError
from kvlayers.utils.units import amount_of_bytes


@dataclass(frozen=True)
class BytesBudget:
    """The most bytes that a packed token may take, over all layers that are quantized: least divergence within it.

    Attributes:
        bytes_per_token: keys and values, scales and zeros included: 4320, or a text such as "4.2KiB", of which the
            number is kept; `kvlayers.plan(...)["int4"].bytes_per_token` is
            that of 4 bits everywhere, in a model of full attention.

    Raises:
        OptionError: no number above 0.
    """

    bytes_per_token: float

    def __post_init__(self) -> None:
        if isinstance(self.bytes_per_token, str):
            object.__setattr__(self, "bytes_per_token", amount_of_bytes(self.bytes_per_token, "bytes_per_token"))
        _check_positive(self.bytes_per_token, "bytes_per_token")

    def rank(self, bytes_per_token: float, divergence: float) -> tuple[float, float]:
        """Less for what is better, of what is within the budget."""
        return divergence, bytes_per_token


@dataclass(frozen=True)
class DivergenceBudget:
    """The most divergence from full precision that there may be, on the texts: fewest bytes within it.

    Attributes:
        divergence: mean KL divergence of the next-token distributions, in nats.

    Raises:
        OptionError: no number above 0.
    """

    divergence: float

    def __post_init__(self) -> None:
        _check_positive(self.divergence, "divergence")

    def rank(self, bytes_per_token: float, divergence: float) -> tuple[float, float]:
        """Less for what is better; what is beyond the budget is worse than anything within it."""
        return (bytes_per_token if divergence <= self.divergence else float("inf")), divergence


Budget = BytesBudget | DivergenceBudget


def _check_positive(number: object, name: str) -> None:
    if isinstance(number, bool) or not isinstance(number, int | float) or not 0 < number < float("inf"):
        raise OptionError(f"expected {name} to be a number above 0, but saw {number!r}.")
