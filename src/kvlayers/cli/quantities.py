"""Tokens and bytes as people write them."""

import re
from fractions import Fraction

from ..errors import OptionError

MOST = 2**62
"""Far more tokens or bytes than there are anywhere; more are no number of torch's."""

_TOKENS = {"": 1, "k": 2**10, "m": 2**20}
_BYTES = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", start=1):
    _BYTES |= {_letter: 1024**_power, f"{_letter}ib": 1024**_power, f"{_letter}b": 1000**_power}


def tokens(text: str) -> int:
    """A number of tokens: 32768, 32k or 1M, by powers of 1024.

    Raises:
        OptionError: it is none.

    Example:
        >>> tokens("32k")
        32768
    """
    return _quantity(text, _TOKENS, "a number of tokens, such as 4096, 32k or 1M")


def amount_of_bytes(text: str) -> int:
    """A number of bytes: 24GiB, 24G (the same), or 24GB by powers of 1000.

    Raises:
        OptionError: it is none.

    Example:
        >>> amount_of_bytes("1.5 GiB"), amount_of_bytes("2kB")
        (1610612736, 2000)
    """
    return _quantity(text, _BYTES, "a number of bytes, such as 24GiB, 512MiB or 80GB")


def _quantity(text: str, units: dict[str, int], expected: str) -> int:
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if found is None or found[2].lower() not in units:
        raise OptionError(f"expected {expected}, but saw {text!r}.")
    amount = int(Fraction(found[1]) * units[found[2].lower()])
    if amount > MOST:
        raise OptionError(f"expected {expected}, but saw more than any machine has: {text[:20]}.")
    return amount
