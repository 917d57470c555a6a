"""A layer that keeps a window of the newest tokens in memory that is reserved once."""

from torch import Tensor
from typing_extensions import override

from ..errors import CapacityError
from ..options import checks_options
from ..stores import FixedStore
from ..stores.base import Fact
from .sliding import SlidingLayer, check_window, window_room
from .static import check_max_cache_len


class StaticSlidingLayer(SlidingLayer):
    """Sliding-window and chunked attention over memory that is reserved once.

    Args:
        max_cache_len: the most tokens that are expected. Where that is less than the window, no more is reserved, and
            one token more raises `CapacityError`.
        sliding_window: tokens that a query attends to, itself included; the chunk size for chunked attention.
        token_limit: tokens after which `CapacityError` is raised although the window could go on, `None` for no limit.
            Beside layers that hold every token, it makes all of them refuse the same one.
    """

    @checks_options
    def __init__(self, max_cache_len: int, sliding_window: int, token_limit: int | None = None) -> None:
        check_max_cache_len(max_cache_len)
        check_window(sliding_window)
        fits_window = max_cache_len >= sliding_window
        room = window_room(sliding_window) if fits_window else max_cache_len
        super().__init__(sliding_window, store=FixedStore(room))
        self.room = room
        self.max_cache_len = max_cache_len
        self.token_limit = token_limit if fits_window else max_cache_len

    @override
    def update(self, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        if self.token_limit is not None and key_states.dim() == 4:
            new = key_states.shape[2]
            if self._seen + new > self.token_limit:
                raise CapacityError(
                    f"expected at most {self.token_limit} tokens, the size of the reservation, but saw {self._seen} "
                    f"held and {new} new: reserve {self._seen + new} or more, or crop the cache first."
                )
        return super().update(key_states, value_states)

    @property
    @override
    def capacity(self) -> int | None:
        return min(self.max_cache_len, self.sliding_window)

    @override
    def settings(self) -> dict[str, Fact]:
        return {**super().settings(), "max_cache_len": self.max_cache_len, "token_limit": self.token_limit}

    @override
    def check_held(self, held: int, seen: int) -> None:
        super().check_held(held, seen)
        if self.token_limit is not None and seen > self.token_limit:
            raise CapacityError(f"expected a state of at most {self.token_limit} tokens, but saw {seen}.")
