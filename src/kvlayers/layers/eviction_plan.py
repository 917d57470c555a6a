"""How many bytes an evicting layer takes for a number of tokens."""

from kvlayers.eviction.settings import EvictionSettings
from kvlayers.layers.shape import LayerShape, PlannedBytes
from kvlayers.stores import TokenStore
from kvlayers.stores.buffer import nbytes_of
from kvlayers.stores.ragged import RaggedStore


def planned_nbytes(
    settings: EvictionSettings, empty: TokenStore, shape: LayerShape, tokens: int, sized_for: int | None
) -> PlannedBytes:
    """The bytes of a layer after it took in `tokens` tokens at once: kept tokens and retained queries.

    Args:
        settings: how the layer evicts.
        empty: an empty store of the kind that the layer has before it evicts.
        shape: what the model's layer holds.
        tokens: tokens of the text.
        sized_for: as for `LayerOperations.planned_nbytes`.
    """
    forms, held = shape.forms(), min(tokens, settings.allowed(tokens))
    are_uneven = held < tokens and settings.heads_differ and forms[0].kv_heads > 1
    store = RaggedStore(empty) if are_uneven else empty
    queries = nbytes_of(shape.query_form(), settings.retained_queries(tokens))
    return PlannedBytes(store.planned_nbytes(*forms, held, sized_for), resident=queries)
