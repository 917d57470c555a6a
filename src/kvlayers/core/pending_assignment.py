"""Keys and values that a caller assigns one after the other, while they do not match yet."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from kvlayers.core.buffer import StateForm
from kvlayers.core.token_store import BufferSwap, TokenStore
from kvlayers.errors import StateMismatchError


class PendingAssignment:
    """Stands in for a store after keys were assigned, until matching values are assigned; or the reverse.

    It can be moved and measured. Every other use is an error, because keys and values disagree on which tokens are
    held.

    Args:
        store: the store with the tokens that are held until then.
        keys: `[batch, kv_heads, tokens, key_head_dim]`, the assigned keys or the held ones.
        values: `[batch, kv_heads, tokens, value_head_dim]`, the assigned values or the held ones.
    """

    is_pending = True
    holds_tokens_apart = False
    holds_pages_apart = False

    def __init__(self, store: TokenStore, keys: Tensor, values: Tensor) -> None:
        self.store = store
        self.keys = keys
        self.values = values

    @property
    def complete(self) -> TokenStore:
        """The store with the tokens that are held until then."""
        return self.store

    def visible_states(self) -> tuple[Tensor, Tensor]:
        """The keys and values, which do not match."""
        return self.keys, self.values

    @property
    def key_form(self) -> StateForm | None:
        """Form of the held keys."""
        return self.store.key_form

    @property
    def value_form(self) -> StateForm | None:
        """Form of the held values."""
        return self.store.value_form

    def swap_buffers(self, swap: BufferSwap) -> None:
        """See `TokenStore.swap_buffers`."""
        self.store.swap_buffers(swap)

    def held_tensors(self) -> Iterator[Tensor]:
        """All tensors that keep memory alive."""
        yield from self.store.held_tensors()
        yield from (self.keys, self.values)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise StateMismatchError(
            "Keys and values must have the same batch size and number of tokens, got keys "
            f"{list(self.keys.shape)} and values {list(self.values.shape)}: assign the other half as well, or reset() "
            "the cache."
        )


def same_tokens(keys: Tensor, values: Tensor) -> bool:
    """Whether keys and values have the same number of sequences and tokens."""
    return (keys.shape[0], keys.shape[2]) == (values.shape[0], values.shape[2])
