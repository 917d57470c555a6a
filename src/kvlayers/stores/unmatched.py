"""Keys and values that were assigned one after the other, while they do not match."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from kvlayers.errors import StateMismatchError
from kvlayers.stores.buffer import StateForm
from kvlayers.stores.contract import Mover, TokenStore


class UnmatchedHalves:
    """Stands in for a store after keys were assigned, and until values of as many tokens are; or the other way round.

    It can be moved and measured. Every other use is an error: neither half alone says which tokens are held.

    Args:
        store: what is held until the other half comes.
        keys: `[batch, kv_heads, tokens, key_head_dim]`, those assigned or those that are held.
        values: `[batch, kv_heads, tokens, value_head_dim]`, as the keys.
    """

    is_complete = False
    holds_tokens_apart = False

    def __init__(self, store: TokenStore, keys: Tensor, values: Tensor) -> None:
        self.store = store
        self.keys = keys
        self.values = values

    @property
    def complete(self) -> TokenStore:
        """The store that held tokens before."""
        return self.store

    def visible_states(self) -> tuple[Tensor, Tensor]:
        """The keys and values, which do not match."""
        return self.keys, self.values

    @property
    def key_form(self) -> StateForm | None:
        """That of the store."""
        return self.store.key_form

    @property
    def value_form(self) -> StateForm | None:
        """That of the store."""
        return self.store.value_form

    def swap_buffers(self, move: Mover) -> None:
        """See `TokenStore.swap_buffers`."""
        self.store.swap_buffers(move)

    def held_tensors(self) -> Iterator[Tensor]:
        """Every tensor that keeps memory alive."""
        yield from self.store.held_tensors()
        yield from (self.keys, self.values)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise StateMismatchError(
            "expected keys and values of one batch size with as many tokens, but saw keys "
            f"{list(self.keys.shape)} beside values {list(self.values.shape)}: assign the other half as well, or "
            "reset() the cache."
        )


def match(keys: Tensor, values: Tensor) -> bool:
    """Whether keys and values are of as many sequences and tokens."""
    return (keys.shape[0], keys.shape[2]) == (values.shape[0], values.shape[2])
