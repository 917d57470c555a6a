"""A layer that keeps every token."""

from torch import Tensor
from typing_extensions import override

from kvlayers.errors import RollbackError
from kvlayers.layers.arguments import whole_number
from kvlayers.layers.registry import register_layer
from kvlayers.layers.token_layer import TokenLayer
from kvlayers.stores import DenseStore, TokenStore
from kvlayers.utils.options import checks_options


@register_layer
class DynamicLayer(TokenLayer):
    """Full attention: keeps every token.

    Args:
        length_hint: the most tokens that are expected, if known; see `DenseStore`.
        store: how the tokens are held; a `DenseStore` if it is not given.
    """

    hints = ("length_hint",)
    keeps_every_token = True
    capacity: int | None = None

    @checks_options
    def __init__(self, length_hint: int | None = None, store: TokenStore | None = None) -> None:
        if length_hint is not None:
            length_hint = whole_number(length_hint, "length_hint")
        super().__init__(DenseStore(length_hint) if store is None else store)

    @override
    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        return self._store.take_in(key_states, value_states)

    @property
    @override
    def can_be_stacked(self) -> bool:  # type: ignore[override]
        return self._store.holds_tokens_apart

    @property
    @override
    def length(self) -> int:
        return self._store.length

    @override
    def count(self, tokens: int) -> None:
        self._store.count(tokens)

    @override
    def mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._store.length + query_length, 0

    @override
    def check_truncate(self, length: int) -> None:
        check_rollback(length, self.length)

    @override
    def truncate(self, length: int) -> None:
        length = whole_number(length, "a length")
        self.check_truncate(length)
        self._store.truncate(length)


def check_rollback(length: int, held: int) -> None:
    """Raise `RollbackError` if a layer of `held` tokens never had `length` tokens."""
    if not 0 <= length <= held:
        raise RollbackError(
            f"expected to roll back to between 0 and the {held} tokens that are held, but was asked for {length}."
        )
