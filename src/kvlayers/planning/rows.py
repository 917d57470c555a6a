"""How many rows of a batch fit into some memory."""

from collections.abc import Callable, Sequence

import torch

from kvlayers.core.named_caches import CacheRequest
from kvlayers.errors import CapacityError, KVLayersError, UnsupportedLayerError
from kvlayers.planning.auto import checked_memory, free_memory
from kvlayers.planning.planner import bytes_by_length
from kvlayers.rows.dense_rows import capacity_for
from kvlayers.utils.units import readable_bytes

ROUNDING = 256
"""Tokens to a multiple of which the length of a row is rounded up, to count its bytes."""


class RoomForRows:
    """Which rows fit side by side.

    Args:
        name: name of the rows' caches.
        request: what the cache of one row is for.
        memory: bytes of the device that all rows may take; `None` for half of what is free, but at least one row, and
            for no limit if it is not known what is free, or what such a cache takes.

    Raises:
        OptionError: `memory` is not a number of bytes.
        ConfigError, UnsupportedLayerError: `memory` is given, and the bytes of such a cache are not known.
    """

    def __init__(self, name: str, request: CacheRequest, memory: int | str | None) -> None:
        self._memory, self._is_given = 0, memory is not None
        self._bytes_of: Callable[[int], int] = lambda tokens: 0
        try:
            free = free_memory(request.device or torch.device("cpu")) if memory is None else 0
            self._memory = free // 2 if memory is None else checked_memory(memory)
            self._bytes_of = bytes_by_length(name, request)
        except KVLayersError:
            if memory is not None:
                raise

    def fits(self, tokens: int, others: Sequence[int]) -> bool:
        """Whether a row of up to `tokens` tokens fits beside others. All may take the room of the longest.

        Raises:
            CapacityError: it does not even fit alone.
        """
        if not self._is_given and not others:
            return True
        own, longest = self._bytes(tokens), self._bytes(max(tokens, *others, 0))
        if self._is_given and own > self._memory:
            raise CapacityError(
                f"`memory` must be at least {readable_bytes(own)} for a prompt and answer of {tokens} tokens, got "
                f"{readable_bytes(self._memory)}: give more, or name a smaller cache."
            )
        return longest * (len(others) + 1) <= self._memory

    def _bytes(self, tokens: int) -> int:
        try:
            # Rounded up, so that few lengths are tried.
            return self._bytes_of(-(-capacity_for(tokens) // ROUNDING) * ROUNDING)
        except CapacityError:
            # A reservation of its own may be no larger than the tokens.
            return self._bytes_of(tokens)
        except UnsupportedLayerError:
            if self._is_given:
                raise
            return 0
