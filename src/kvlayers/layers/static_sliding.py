"""A layer that keeps a window of the newest tokens in memory that is reserved once."""

from torch import Tensor
from typing_extensions import override

from ..errors import CapacityError
from ..options import checks_options
from ..stores import FixedStore
from .base import Fact
from .sliding import SlidingLayer, check_window, window_room
from .static import check_max_cache_len


class StaticSlidingLayer(SlidingLayer):
    """Sliding-window and chunked attention over memory that is reserved once.

    Args:
        max_cache_len: the most tokens that are expected. Where that is less than the window, no more is reserved, and
            one token more raises `CapacityError`; else the layer takes any number of tokens.
        sliding_window: tokens that a query attends to, itself included; the chunk size for chunked attention.
    """

    @checks_options
    def __init__(self, max_cache_len: int, sliding_window: int) -> None:
        check_max_cache_len(max_cache_len)
        check_window(sliding_window)
        room = max_cache_len if max_cache_len < sliding_window else window_room(sliding_window)
        super().__init__(sliding_window, store=FixedStore(room))
        self.room = room
        self.max_cache_len = max_cache_len

    @override
    def update(self, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        tokens = self._seen + key_states.shape[-2]
        if self.max_cache_len < self.sliding_window and tokens > self.max_cache_len:
            raise CapacityError(
                f"expected at most {self.max_cache_len} tokens, as reserved, but saw {self._seen} held and "
                f"{key_states.shape[-2]} new: make the cache with max_cache_len={tokens} or more."
            )
        return super().update(key_states, value_states)

    @property
    @override
    def capacity(self) -> int | None:
        return min(self.max_cache_len, self.sliding_window)

    @override
    def settings(self) -> dict[str, Fact]:
        return {**super().settings(), "max_cache_len": self.max_cache_len}
