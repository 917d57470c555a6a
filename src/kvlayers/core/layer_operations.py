"""The contract of a layer by the names that other rooms still import. `cache_layer.py` has it."""

from kvlayers.core.cache_layer import LAYER_CLASSES as LAYER_CLASSES
from kvlayers.core.cache_layer import CacheLayer as LayerOperations
from kvlayers.core.cache_layer import LayerState as LayerState
from kvlayers.core.cache_layer import check_kind_of_state as check_kind_of_state
from kvlayers.core.cache_layer import rows_of as rows_of

__all__ = ["LayerOperations"]
