"""A layer that keeps every token."""

from collections.abc import Sequence

from torch import Tensor
from typing_extensions import override

from kvlayers.core.arguments import check_rollback
from kvlayers.core.cache_layer import CacheLayer, LayerTraits, forwarded, register_layer
from kvlayers.core.dense_store import DenseStore
from kvlayers.core.token_layer import TokenLayer
from kvlayers.core.token_store import TokenStore
from kvlayers.utils import late
from kvlayers.utils.options import checks_options


@register_layer
class DynamicLayer(TokenLayer):
    """Full attention: keeps every token.

    Args:
        length_hint: the most tokens that are expected, if known; see `DenseStore`.
        store: how the tokens are held; a `DenseStore` if it is not given.
    """

    hints = ("length_hint",)
    traits = LayerTraits(keeps_every_token=True, can_be_stacked=True)
    capacity: int | None = None

    @checks_options
    def __init__(self, length_hint: int | None = None, store: TokenStore | None = None) -> None:
        super().__init__(DenseStore(length_hint) if store is None else store)

    @override
    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        return self.store.take_in(key_states, value_states)

    @override
    def side_by_side(self, layers: Sequence[CacheLayer]) -> CacheLayer:
        # Rows in one tensor are saved and compared as a plain layer, so they stand for nothing else.
        plain = DynamicLayer()
        if (self.kind, self.describe()) != (plain.kind, plain.describe()):
            return super().side_by_side(layers)
        joined: CacheLayer = late.function("dense rows")(layers)
        return joined

    @property
    @override
    def length(self) -> int:
        return self.store.length

    count = forwarded("store")

    @override
    def mask_sizes(self, query_length: int) -> tuple[int, int]:
        # Asked in each step: without the calls of layers that hold less than they saw.
        return self.store.length + query_length, 0

    @override
    def check_truncate(self, length: int) -> None:
        check_rollback(length, self.store.length)

    @override
    def truncate(self, length: int) -> None:
        self.check_truncate(length)
        self.store.truncate(int(length))
