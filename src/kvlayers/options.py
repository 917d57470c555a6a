"""Options as people write and read them: numbers of bytes and tokens, dtypes, and names that packages register."""

from kvlayers.core.arguments import whole_number
from kvlayers.utils.options import checked_dtype
from kvlayers.utils.registry import Registry
from kvlayers.utils.units import amount_of_bytes, bytes_or_share, exact_bytes, readable_bytes, tokens

__all__ = [
    "Registry",
    "amount_of_bytes",
    "bytes_or_share",
    "checked_dtype",
    "exact_bytes",
    "readable_bytes",
    "tokens",
    "whole_number",
]
