"""What fits into memory: the cache that a plan recommends (`cache_implementation="auto"`), and rows side by side."""

import dataclasses
import logging
import sys
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import torch
import transformers

from kvlayers.core.named_caches import CacheRequest, register
from kvlayers.errors import CapacityError, ConfigError, KVLayersError, OptionError, UnsupportedLayerError
from kvlayers.generation.cache_by_name import AUTO, cache_for
from kvlayers.memory.budget import Budget, free_memory
from kvlayers.planning.planner import BudgetsByDevice, bytes_by_length, checked_count, plan_for
from kvlayers.rows.dense_rows import capacity_for
from kvlayers.utils.units import amount_of_bytes, readable_bytes

logger = logging.getLogger(__name__)

KINDS = ("dynamic", "int8", "int4", "offloaded")
"""The caches to choose from: exact and on the device, then in fewer bits, then on the host."""

SHARE_FOR_CACHE = 0.9
"""The share of the free memory that the cache may take. The forward pass needs the rest."""

WITHOUT_PLAN = "dynamic"
"""The cache of a model that cannot be planned."""


@register(AUTO)
def chosen_cache(request: CacheRequest) -> transformers.Cache:
    """The cache that a plan recommends. The log says which: as a warning unless it is exact and on the device.

    Args:
        request: must have a `length_hint`. Its only option is `memory`: bytes, or a text such as "1GiB". With
            `max_bytes` there is nothing to choose: a cache that grows stays within them.

    Raises:
        OptionError: another option, or no length hint.
        CapacityError: no cache is within the memory.
    """
    if "max_bytes" in request.options:
        return cache_for(WITHOUT_PLAN, request)
    budgets = _budgets(request)
    devices = _devices(request)
    # The host is no other place for a model on the CPU.
    names = KINDS if any(device.type != "cpu" for device in devices) else KINDS[:-1]
    plain = dataclasses.replace(request, options={})
    try:
        plan = plan_for(plain, budgets, names)
    except ConfigError as error:
        logger.warning("'%s' takes '%s', since the model cannot be planned: %s", AUTO, WITHOUT_PLAN, error)
        return cache_for(WITHOUT_PLAN, plain)
    best = plan.recommended
    logger.log(
        logging.INFO if best.is_exact and not best.host_bytes else logging.WARNING,
        "'%s' takes '%s' for %d tokens, batch %d, of %s for caches on %s: %s",
        AUTO,
        best.name,
        plan.context_length,
        plan.batch_size,
        readable_bytes(plan.memory or 0),
        ", ".join(map(str, devices)),
        best.reason,
    )
    return cache_for(best.name, plain)


def _devices(request: CacheRequest) -> list[torch.device]:
    """The devices that compute the layers, each once."""
    return list(dict.fromkeys(request.layer_devices)) or [request.device or torch.device("cpu")]


def _budgets(request: CacheRequest) -> BudgetsByDevice:
    """Bytes that the cache may take: `memory`, or most of what is free, of each device if the layers are on several."""
    others = sorted(request.options.keys() - {"memory"})
    if others:
        raise OptionError(
            f"`cache_config` of '{AUTO}' must have the option `memory` alone, got {others}: name one that has them."
        )
    if (memory := request.options.get("memory")) is not None:
        return {None: _bytes_of(memory)}
    free = {device: int(SHARE_FOR_CACHE * free_memory(device)) for device in _devices(request)}
    return dict(free.items()) if request.layer_devices else {None: sum(free.values())}


def _bytes_of(memory: Any) -> int:
    """The bytes of `memory`, a number or a text such as "1GiB"."""
    return checked_count(amount_of_bytes(memory, "memory"), "memory", "bytes")


# Rows side by side

ROUNDING = 256
"""Tokens to a multiple of which the length of a row is rounded up, to count its bytes."""


class RoomForRows:
    """Which rows fit side by side.

    Args:
        name: name of the rows' caches.
        request: what the cache of one row is for.
            With the option `max_bytes`, rows join while all of them stay exact within these bytes: a row that is
            alone gives way.
        memory: bytes of the device that all rows may take, or a share of what is free; `None` for half of it, but at
            least one row, and for no limit if it is not known what is free, or what such a cache takes.

    Raises:
        OptionError: `memory` is not a number of bytes.
        ConfigError, UnsupportedLayerError: `memory` is given, and the bytes of such a cache are not known.
    """

    def __init__(self, name: str, request: CacheRequest, memory: int | str | Fraction | None) -> None:
        self._memory, self._is_given = 0, memory is not None
        most = Budget.of(request.options.get("max_bytes", sys.maxsize), None, length_hint=1).max_bytes
        # A share is one of each row's own length.
        self._max_bytes = most if isinstance(most, int) else sys.maxsize
        self._bytes_of: Callable[[int], int] = lambda tokens: 0
        try:
            given = Fraction(1, 2) if memory is None else memory
            self._memory = (
                int(given * free_memory(request.device or torch.device("cpu")))
                if isinstance(given, Fraction)
                else _bytes_of(given)
            )
            exact = {
                option: value for option, value in request.options.items() if option not in ("max_bytes", "ladder")
            }
            self._bytes_of = bytes_by_length(name, dataclasses.replace(request, options=exact))
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
        own, longest = min(self._bytes(tokens), self._max_bytes), self._bytes(max(tokens, *others, 0))
        if self._is_given and own > self._memory:
            raise CapacityError(
                f"`memory` must be at least {readable_bytes(own)} for a prompt and answer of {tokens} tokens, got "
                f"{readable_bytes(self._memory)}: give more, or name a smaller cache."
            )
        return not others or longest * (len(others) + 1) <= min(self._memory, self._max_bytes)

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
