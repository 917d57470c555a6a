"""What holds for the call of `generate()` that runs in a context, which belongs to one thread."""

from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from kvlayers.core.cache import Cache
from kvlayers.core.named_caches import CacheRequest
from kvlayers.generation.known_ids import TokenRecord

Acquired = tuple[Cache, CacheRequest]

Inputs = tuple[Tensor, dict[str, Any]]
"""Ids `[batch, tokens]`, and arguments of a model for them, of which it prepares a pass in a loop of `generate()`."""


@dataclass(eq=False)
class CurrentCall:
    """A call of `generate()`.

    Attributes:
        requested_name: the name of a cache that the call asks for itself.
        record: what is known of the tokens that its cache sees; `None` outside of a call.
        may_be_stopped: whether the caller's code may stop it at any token.
        acquired: static caches that were acquired for compiled code, which the next call may reuse; `None` outside of
            a call.
        inputs: of the newest pass, if its cache cannot go back by one pass: earlier tokens are then read again.
        prompt: the same of a prompt that is read in chunks.
        pair: the cache of the call, if its model would make the part for cross-attention anew.
    """

    requested_name: str | None = None
    record: TokenRecord | None = None
    may_be_stopped: bool = True
    acquired: list[Acquired] | None = None
    inputs: Inputs | None = None
    prompt: Inputs | None = None
    pair: Cache | None = None


_OUTSIDE = CurrentCall()
"""Code outside of a call."""

CURRENT: ContextVar[CurrentCall] = ContextVar("current call of generate()", default=_OUTSIDE)

USES_KVLAYERS: ContextVar[bool | None] = ContextVar(
    "whether the current call of generate() uses kvlayers", default=None
)
"""`None` outside of a call."""
