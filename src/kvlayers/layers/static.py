"""A layer that keeps every token, up to a fixed number."""

from typing_extensions import override

from ..errors import CapacityError, OptionError
from ..options import checks_options
from ..stores import FixedStore
from ..stores.base import Fact
from .dynamic import DynamicLayer


def check_max_cache_len(max_cache_len: object) -> None:
    """Raise `OptionError` where `max_cache_len` is no number of tokens."""
    if not isinstance(max_cache_len, int) or isinstance(max_cache_len, bool) or max_cache_len < 1:
        raise OptionError(
            f"expected max_cache_len to be a whole number of tokens, at least 1, but saw {max_cache_len!r}: pass the "
            "longest prompt and continuation together."
        )


class StaticLayer(DynamicLayer):
    """Full attention over memory that is reserved once, at an address that does not change.

    Attention reads the tokens that are there, not the reservation.

    Args:
        max_cache_len: tokens to reserve. One more raises `CapacityError`.
    """

    @checks_options
    def __init__(self, max_cache_len: int) -> None:
        check_max_cache_len(max_cache_len)
        super().__init__(store=FixedStore(max_cache_len))
        self.max_cache_len = max_cache_len

    @property
    @override
    def capacity(self) -> int | None:
        return self.max_cache_len

    @override
    def settings(self) -> dict[str, Fact]:
        return {**super().settings(), "max_cache_len": self.max_cache_len}

    @override
    def check_held(self, held: int, seen: int) -> None:
        super().check_held(held, seen)
        if held > self.max_cache_len:
            raise CapacityError(f"expected a state of at most {self.max_cache_len} tokens, but saw {held}.")
